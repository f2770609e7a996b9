// The viewer: a run of the engine, step by step, from its trace and nothing else.
//
//   const viewer = mountViewer(element, {baseUrl, label});  baseUrl: where the documentation is; without it, the
//   viewer.load(text)                                  concepts are explained in the page itself
//   viewer.start(header, phase); viewer.append(entry)  live; follows the end as long as the user is there
//   viewer.seek(step, "planned" or "committed"); viewer.play(); viewer.pause()
//   viewer.state()                                     what is shown, as plain data
//
// Text from a trace only becomes text nodes and canvas text: none of it is parsed as HTML or run.

import { TraceError } from "./memory.js";
import { Reader, Timeline } from "./timeline.js";
import { JUMPS } from "./happenings.js";
import { CONCEPTS, explain, labels, list, named, plural } from "./explain.js";
import { HUES, Pool, arrow, palette } from "./pool.js";
import { drawChart } from "./chart.js";

const ANIMATION = 420; // milliseconds
const FIRST_LOOK = 250; // milliseconds until a long trace is first shown
const SLICE = 40; // milliseconds of reading between frames
const QUIET = 700; // milliseconds without another step until one is read out
const MOST_TABLES = 6;
const MOST_ROWS = 10;
const MOST_CHIPS = 24;
const SPEEDS = { "½ step/s": 0.5, "1 step/s": 1, "2 steps/s": 2, "5 steps/s": 5, "20 steps/s": 20, "60 steps/s": 60 };
const JUMP_NAMES = { preemptions: ["Preemption", "p"], copies: ["Copy", "c"], hits: ["Prefix hit", "h"], evictions: ["Eviction", "e"] };
const PHASES = { planned: "while it is computed", committed: "after its commit" };

function h(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const number = (value) => value.toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)} %`;

const hidesTokens = (table) => table.num_tokens > 0 && !table.tokens.length;

class Viewer {
  constructor(element, { baseUrl, label = "Viewer of a run" } = {}) {
    this.label = label;
    this.baseUrl = baseUrl?.replace(/\/*$/, "/");
    this.timeline = null;
    this.index = -1;
    this.phase = "planned";
    this.error = "";
    this.chosenTable = null;
    this.selected = null;
    this.playing = 0;
    this.progress = 1;
    this.chartCache = document.createElement("canvas");
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.build(element);
    this.pool = new Pool(this.parts.pool);
    const redraw = () => this.restyle();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    const watcher = new MutationObserver(redraw);
    for (const node of [document.documentElement, document.body])
      watcher.observe(node, { attributes: true, attributeFilter: ["data-mpv-theme", "data-md-color-scheme"] });
    new ResizeObserver(() => {
      if (this.root.clientWidth !== this.lastWidth) this.render();
    }).observe(this.root);
    this.restyle();
  }

  // -- what other code calls ----------------------------------------------------------------------------

  load(text) {
    this.reset();
    try {
      this.reader = new Reader(text);
    } catch (error) {
      this.fail(error);
      return;
    }
    this.timeline = this.reader.timeline;
    this.readOn(FIRST_LOOK);
    this.index = this.timeline.length ? 0 : -1;
    this.setSpeed(this.reader || this.timeline.length > 300 ? 20 : this.timeline.length > 60 ? 5 : 1);
    this.render();
  }

  // A long trace is shown at once; the rest of it is read between frames.
  readOn(milliseconds) {
    if (this.reader.read(milliseconds)) {
      this.error = this.timeline.problem;
      this.reader = null;
    } else this.reading = setTimeout(() => this.readOn(SLICE), 0);
    this.later();
  }

  start(header, phase = "planned") {
    this.reset();
    this.phase = phase;
    try {
      this.timeline = new Timeline(header);
    } catch (error) {
      this.fail(error);
      return;
    }
    this.render();
  }

  append(entry) {
    const { timeline } = this;
    if (!timeline) throw new Error("start(header) comes before append(entry)");
    const follows = this.index === timeline.length - 1;
    const dropped = timeline.dropped;
    try {
      timeline.add(entry);
    } catch (error) {
      if (!(error instanceof TraceError)) throw error;
      this.error = `The live trace cannot continue: ${error.message}.`;
      this.later();
      return;
    }
    if (follows) this.index = timeline.length - 1;
    else this.index = Math.max(0, this.index - (timeline.dropped - dropped));
    this.changed();
    this.later();
  }

  seek(step, phase = "planned") {
    if (!this.timeline?.length) return;
    this.pause();
    this.phase = phase in PHASES ? phase : "planned";
    this.goTo(this.timeline.indexOf(step));
  }

  play() {
    if (this.playing || !this.timeline?.length) return;
    if (this.index >= this.timeline.length - 1 && this.phase === "committed") this.showPlan(0);
    this.playing = setInterval(() => this.advance(), 1000 / this.speed);
    this.drawControls();
  }

  pause() {
    clearInterval(this.playing);
    this.playing = 0;
    this.drawControls();
  }

  state() {
    const { timeline } = this;
    const empty = { step: null, index: -1, steps: timeline?.length ?? 0, error: this.error, blocks: [], tables: {} };
    if (!timeline?.length) return empty;
    const { memory, entry, stats } = this.moment();
    const block = ({ id, owners, refs, cached, filled }) => ({ id, owners, refs, cached, filled });
    const tables = [...memory.tables.values()].map(({ name, tokens, ...table }) => [name, { ...table, token_ids: tokens.slice(0) }]);
    return {
      step: entry.step,
      index: this.index,
      steps: timeline.length,
      phase: this.phase,
      playing: Boolean(this.playing),
      loading: Boolean(this.reader),
      error: this.error,
      blocks: memory.blocks().map(block),
      host: memory.blocks(true).map(block),
      tables: Object.fromEntries(tables),
      queues: this.queues(),
      budget: { limit: timeline.header.max_num_batched_tokens ?? null, decode: stats.decode, prefill: stats.prefill, cached: stats.cached },
      used: memory.used[0],
      evictable: memory.evictable.size,
      free: timeline.header.num_blocks - memory.used[0] - memory.evictable.size,
      waste: memory.waste(),
      events: this.told().map(({ kind, text, blocks, concept }) => ({ kind, text, blocks, concept })),
      counts: { ...timeline.totals },
      selected: this.selected,
      table: this.chosenTable,
    };
  }

  // -- the moment that is shown -------------------------------------------------------------------------

  reset() {
    this.pause();
    clearTimeout(this.reading);
    clearTimeout(this.saying);
    Object.assign(this, { timeline: null, reader: null, index: -1, phase: "planned", error: "", chosenTable: null, selected: null });
    this.changed();
  }

  changed() {
    this.cachedMoment = this.cachedTold = null;
    this.parts.chosen.textContent = "";
  }

  moment() {
    this.cachedMoment ??= this.timeline.at(this.index, this.phase === "committed");
    return this.cachedMoment;
  }

  get memory() {
    return this.timeline.length ? this.moment().memory : this.timeline.memory;
  }

  told() {
    this.cachedTold ??= explain(this.moment(), labels(this.timeline.several), (tokens) => this.textOf(tokens));
    return this.cachedTold;
  }

  queues() {
    const { memory, entry, stats } = this.moment();
    const running = new Set();
    const swapped = new Set();
    for (const table of memory.tables.values()) (table.on_host ? swapped : running).add(table.request);
    return { running: [...running], swapped: [...swapped], waiting: stats.waiting, num_waiting: entry.num_waiting };
  }

  goTo(index, animated = false) {
    const last = this.timeline.length - 1;
    this.index = Math.max(0, Math.min(last, index));
    this.changed();
    if (animated && !this.still.matches && this.speed <= 5) this.animate();
    else this.progress = 1;
    this.later();
  }

  advance() {
    this.step(1);
    if (this.index === this.timeline.length - 1 && this.phase === "committed") this.pause();
  }

  // A step forth or back, with a stop after a commit that moves blocks (not when it goes fast), and at the end.
  step(by) {
    const { timeline } = this;
    const last = timeline.length - 1;
    const stops = (index) => index === last || (timeline.stats[index].commits && !(this.playing && this.speed > 5));
    let index = this.index;
    if (by > 0 && this.phase === "planned" && stops(index)) this.phase = "committed";
    else if (by < 0 && this.phase === "committed") this.phase = "planned";
    else if (by > 0 ? index < last : index > 0) {
      index += by;
      this.phase = by < 0 && stops(index) ? "committed" : "planned";
    }
    this.goTo(index, by > 0);
  }

  showPlan(index, animated = false) {
    this.phase = "planned";
    this.goTo(index, animated);
  }

  jump(kind, by) {
    const found = this.timeline?.find(kind, this.index, by) ?? -1;
    if (found < 0) return;
    this.pause();
    this.showPlan(found, true);
  }

  animate() {
    const start = performance.now();
    this.progress = 0;
    cancelAnimationFrame(this.animation);
    const frame = (now) => {
      this.progress = Math.min(1, Math.max(0, (now - start) / ANIMATION));
      this.drawPool();
      if (this.progress < 1) this.animation = requestAnimationFrame(frame);
    };
    this.animation = requestAnimationFrame(frame);
  }

  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = undefined;
      this.render();
    });
  }

  fail(error) {
    this.error = error instanceof TraceError ? error.message : `This trace cannot be read: ${error.message}`;
    this.render();
  }

  // -- the page -----------------------------------------------------------------------------------------

  build(element) {
    const parts = (this.parts = {});
    const button = (name, text, title, action, extra = {}) =>
      (parts[name] = h("button", { type: "button", className: "mpv-button", title, ...extra }, text)).addEventListener("click", action);
    parts.error = h("p", { className: "mpv-error", role: "alert", hidden: true });
    parts.title = h("p", { className: "mpv-title" });
    button("first", "|◀", "To the first step (Home)", () => this.move(() => this.showPlan(0)), { ariaLabel: "First step" });
    button("back", "◀", "A step back (left arrow)", () => this.move(() => this.step(-1)), { ariaLabel: "Step back" });
    button("play", "Play", "Play or pause (space)", () => (this.playing ? this.pause() : this.play()));
    button("next", "▶", "A step forward (right arrow)", () => this.move(() => this.step(1)), { ariaLabel: "Step on" });
    button("last", "▶|", "To the last step (End)", () => this.move(() => this.showPlan(Infinity)), { ariaLabel: "Last step" });
    parts.speed = h("select", { className: "mpv-select", ariaLabel: "Speed" });
    for (const [name, speed] of Object.entries(SPEEDS)) parts.speed.append(h("option", { value: speed }, name));
    parts.speed.addEventListener("change", () => this.setSpeed(Number(parts.speed.value)));
    parts.phase = h("select", { className: "mpv-select", ariaLabel: "Moment of the step" });
    for (const [value, name] of Object.entries(PHASES)) parts.phase.append(h("option", { value }, name));
    parts.phase.addEventListener("change", () => {
      this.phase = parts.phase.value;
      this.changed();
      this.render();
    });
    const jumps = h("div", { className: "mpv-jumps", role: "group", ariaLabel: "Jump to the next" });
    for (const kind of JUMPS) {
      const [name, key] = JUMP_NAMES[kind];
      button(kind, name, `To the next step with one (${key}; before: shift ${key})`, (event) => this.jump(kind, event.shiftKey ? -1 : 1));
      parts[kind].classList.add(`mpv-jump-${kind}`);
      jumps.append(parts[kind]);
    }
    parts.chart = h("canvas", { className: "mpv-chart", role: "img" });
    parts.scrub = h("input", { type: "range", className: "mpv-scrub", min: 0, max: 0, value: 0, ariaLabel: "Step" });
    parts.scrub.addEventListener("input", () => {
      const index = Number(parts.scrub.value);  // now: `move` redraws the controls, this one too
      this.move(() => this.goTo(index));
    });
    parts.chart.addEventListener("pointerdown", (event) => this.scrubTo(event));
    parts.chart.addEventListener("pointermove", (event) => event.buttons && this.scrubTo(event));
    parts.chartKey = h("p", { className: "mpv-key" });

    parts.pool = h("canvas", { className: "mpv-pool", tabIndex: 0, role: "application", ariaRoleDescription: "grid of blocks" }); // the arrow keys are its own
    parts.pool.addEventListener("click", (event) => this.select(this.pool.blockAt(event.offsetX, event.offsetY)));
    parts.pool.addEventListener("keydown", (event) => this.moveSelection(event));
    parts.overlay = h("canvas", { className: "mpv-overlay", ariaHidden: "true" });
    parts.usage = h("p", { className: "mpv-usage" });
    parts.detail = h("p", { className: "mpv-detail" });
    parts.chosen = h("p", { className: "mpv-hidden", ariaLive: "polite" });
    parts.legend = h("p", { className: "mpv-legend" });
    for (const [kind, name] of [["used", "in use, the bar shows how full"], ["shared", "dot or ×2: several tables hold it"], ["cached", "cached, evictable"], ["free", "free"], ["fresh", "new in this step"], ["hit", "prefix hit"], ["evicted", "evicted"]])
      parts.legend.append(h("span", {}, h("i", { className: `mpv-swatch mpv-${kind}` }), name));
    parts.tables = h("div", { className: "mpv-tables" });
    parts.stage = h(
      "div",
      { className: "mpv-stage" },
      h("section", { className: "mpv-tables-part" }, h("h3", {}, "Block tables"), parts.tables),
      h("section", {}, h("h3", {}, "Pool"), parts.usage, parts.pool, parts.legend, parts.detail, parts.chosen),
      parts.overlay,
    );
    parts.events = h("ol", { className: "mpv-events" });
    parts.queues = h("dl", { className: "mpv-queues" });
    parts.budget = h("div", { className: "mpv-budget" });
    parts.live = h("p", { className: "mpv-hidden", ariaLive: "polite" });
    parts.concepts = h("div", { className: "mpv-concepts", hidden: true }, h("h3", {}, "Concepts"), h("dl"));
    const keys = "Keys: space plays and pauses, ← and → go a step, Home and End to the first and last, p c h e to the next preemption, copy, prefix hit, eviction (with shift: the one before). In the pool, arrow keys choose a block, and Escape none.";
    this.root = h(
      "div",
      { className: "mpv", role: "region", ariaLabel: this.label, tabIndex: -1 },
      parts.error,
      h("div", { className: "mpv-controls" },
        h("div", { className: "mpv-buttons" }, parts.first, parts.back, parts.play, parts.next, parts.last),
        parts.speed, parts.title, parts.phase, jumps),
      h("div", { className: "mpv-strip" }, parts.chart, parts.scrub, parts.chartKey),
      h("div", { className: "mpv-main" },
        parts.stage,
        h("div", { className: "mpv-side" },
          h("section", {}, h("h3", {}, "What happens, and why"), parts.events),
          h("section", {}, h("h3", {}, "Tokens of this step"), parts.budget),
          h("section", {}, h("h3", {}, "Queues"), parts.queues))),
      parts.concepts,
      h("p", { className: "mpv-help" }, keys),
      parts.live,
    );
    this.root.addEventListener("keydown", (event) => this.key(event));
    element.replaceChildren(this.root);
    this.setSpeed(1);
  }

  move(action) {
    if (!this.timeline?.length) return;
    this.pause();
    action();
  }

  setSpeed(speed) {
    this.speed = speed;
    this.parts.speed.value = speed;
    if (this.playing) {
      clearInterval(this.playing);
      this.playing = setInterval(() => this.advance(), 1000 / speed);
    }
  }

  scrubTo(event) {
    const count = this.timeline?.length;
    if (count) this.move(() => this.goTo(Math.floor((event.offsetX / this.parts.chart.clientWidth) * count)));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.length === 1) event.stopPropagation(); // the page around it may have keys of its own
    if (/^(SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const typing = event.target.tagName === "INPUT";
    const actions = {
      ArrowRight: () => this.move(() => this.step(1)),
      ArrowLeft: () => this.move(() => this.step(-1)),
      Home: () => this.move(() => this.showPlan(0)),
      End: () => this.move(() => this.showPlan(Infinity)),
    };
    if (event.target.tagName !== "BUTTON" && event.target.tagName !== "A")
      actions[" "] = () => (this.playing ? this.pause() : this.play());
    for (const kind of JUMPS) {
      const key = JUMP_NAMES[kind][1];
      actions[key] = () => this.jump(kind, 1);
      actions[key.toUpperCase()] = () => this.jump(kind, -1);
    }
    if (typing && (event.key.length === 1) && event.key !== " " && event.target.type !== "range") return;
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  }

  select(block) {
    this.selected = block;
    const owner = block && this.memory.blocks(block.onHost)[block.block].owners[0];
    if (owner) this.chosenTable = owner;
    this.render();
    this.parts.chosen.textContent = block ? this.parts.detail.textContent : "No block is chosen.";
  }

  moveSelection(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.pool.columns, ArrowDown: this.pool.columns }[event.key];
    const leaves = event.key === "Escape" && this.selected;
    if (!(by || leaves) || !this.timeline?.length) return;
    event.preventDefault();
    event.stopPropagation();
    if (leaves) {
      this.chosenTable = null;
      this.select(null);
      return;
    }
    const { block, onHost } = this.selected ?? { block: -by, onHost: false };
    const [device, host] = this.pool.counts;
    const next = block + by;
    if (next >= 0 && next < (onHost ? host : device)) this.select({ block: next, onHost });
    else if (onHost ? next < 0 : next >= device && host) this.select({ block: onHost ? device - 1 : 0, onHost: !onHost });
  }

  restyle() {
    this.colours = palette(this.root);
    this.render();
  }

  hueOf(table) {
    const { requests } = this.timeline;
    if (requests.size === 1) return table.position % HUES;
    const { request } = table;
    if (/^\d+$/.test(request)) return Number(request.slice(-6)) % HUES;
    if (/^[A-Z]$/.test(request)) return (request.charCodeAt(0) - 65) % HUES;
    return (requests.get(request) ?? 0) % HUES;
  }

  // -- drawing ------------------------------------------------------------------------------------------

  render() {
    const { parts, timeline } = this;
    const focused = this.root.contains(document.activeElement) ? document.activeElement : null;
    parts.error.hidden = !this.error;
    parts.error.textContent = this.error;
    const ready = Boolean(timeline?.length);
    this.root.classList.toggle("mpv-empty", !timeline);
    this.lastWidth = this.root.clientWidth;
    this.drawControls();
    if (!timeline) return;
    drawChart(parts.chart, timeline, this.index, this.colours, this.chartCache);
    this.drawChartKey();
    if (ready) {
      this.drawTables();
      this.drawSide();
    } else {
      parts.tables.textContent = "No sequence holds a block yet.";
      parts.events.replaceChildren();
      parts.queues.replaceChildren();
      parts.budget.replaceChildren();
    }
    this.layoutPool();
    this.drawPool();
    // What had the focus may be drawn anew, gone or disabled; keys remain the viewer's.
    if (!focused || focused.isConnected && !focused.disabled) return;
    const again = [...this.root.querySelectorAll("[data-place]")].find(({ dataset }) => dataset.place === focused.dataset.place);
    (again ?? this.root).focus({ preventScroll: true });
  }

  drawControls() {
    const { parts, timeline } = this;
    const count = timeline?.length ?? 0;
    const last = count - 1;
    const end = this.index === last && this.phase === "committed";
    parts.play.textContent = this.playing ? "Pause" : "Play";
    for (const name of ["first", "back"]) parts[name].disabled = this.index <= 0 && this.phase === "planned";
    parts.next.disabled = !count || end;
    parts.last.disabled = !count || this.index === last;
    for (const name of ["play", "speed", "phase", "scrub"]) parts[name].disabled = !count;
    for (const kind of JUMPS) {
      const total = timeline?.totals[kind] ?? 0;
      parts[kind].textContent = `${JUMP_NAMES[kind][0]} ${number(total)}`;
      parts[kind].disabled = !total || timeline.find(kind, this.index, 1) < 0 && timeline.find(kind, this.index, -1) < 0;
    }
    parts.scrub.max = Math.max(0, last);
    parts.scrub.value = Math.max(0, this.index);
    parts.phase.value = this.phase;
    const step = count ? timeline.stats[this.index].step : null;
    const position = count ? `Step ${number(step)} of ${number(timeline.stats[last].step)}` : timeline ? "Nothing has run yet" : "No trace";
    parts.scrub.setAttribute("aria-valuetext", position);
    parts.title.textContent = this.reader ? `${position} (${percent(this.reader.share)} read)` : position;
  }

  drawChartKey() {
    const { parts, memory } = this;
    const waste = percent(memory.waste());
    parts.chart.setAttribute("aria-label", `Over all steps: ${plural(memory.used[0], "block")} in use, ${waste} of their slots empty (waste) now.`);
    parts.chartKey.replaceChildren(
      h("span", {}, h("i", { className: "mpv-swatch mpv-bar0" }), "blocks in use"),
      h("span", {}, h("i", { className: "mpv-swatch mpv-cached" }), "cached"),
      h("span", {}, h("i", { className: "mpv-swatch mpv-line5" }), `waste, now ${waste}`),
      h("span", {}, "■ preemption ● copy ▲ prefix hit ▼ eviction"),
    );
  }

  layoutPool() {
    const { timeline, parts } = this;
    const { header } = timeline;
    const all = header.num_blocks;
    const shown = all <= 256 ? all : Math.min(all, Math.max(64, 2 ** Math.ceil(Math.log2(timeline.highest + 1))));
    const host = timeline.hostEver ? Math.min(header.num_host_blocks, Math.max(8, timeline.hostHighest + 1)) : 0;
    this.pool.layout(parts.pool.clientWidth, [shown, host], timeline.length === 0);
    this.hiddenBlocks = all - shown;
  }

  marks() {
    const fresh = new Set();
    const hit = new Set();
    const evicted = new Set();
    for (const { kind, blocks } of this.told()) {
      const into = { allocation: fresh, hit, eviction: evicted }[kind];
      if (into) for (const block of blocks) into.add(block);
    }
    for (const [, to] of this.moment().entry.copies ?? []) fresh.add(to);
    return { fresh, hit, evicted };
  }

  drawPool() {
    const { timeline, parts, colours, pool, memory } = this;
    const label = labels(timeline.several);
    const marks = timeline.length ? this.marks() : { fresh: new Set(), hit: new Set(), evicted: new Set() };
    const scene = { memory, chosen: this.chosenTable, colours, hueOf: (table) => this.hueOf(table), nameOf: label, selected: this.selected, marks, progress: this.progress };
    pool.draw(scene);
    const cached = memory.evictable.size;
    const free = timeline.header.num_blocks - memory.used[0] - cached;
    const usage = `${number(memory.used[0])} of ${plural(timeline.header.num_blocks, "block")} of ${plural(timeline.header.block_size, "token")} in use, ${cached ? `${number(cached)} cached and evictable, ` : ""}${number(free)} free`;
    const hidden = this.hiddenBlocks ? ` (the last ${number(this.hiddenBlocks)}, never used, ${this.hiddenBlocks === 1 ? "is" : "are"} not drawn)` : "";
    parts.usage.textContent = usage + hidden;
    parts.pool.setAttribute("aria-label", `Pool: ${usage}. Arrow keys choose a block.`);
    this.drawOverlay(memory);
    this.drawDetail(memory, label);
  }

  drawDetail(memory, label) {
    const { parts, selected } = this;
    if (!selected) {
      parts.detail.textContent = "Choose a block to see who holds it.";
      return;
    }
    const view = memory.blocks(selected.onHost)[selected.block];
    const name = `${selected.onHost ? "Host block" : "Block"} ${selected.block}`;
    const size = this.timeline.header.block_size;
    if (!view.refs) parts.detail.textContent = `${name}: ${view.cached ? "nobody holds it; the prefix cache remembers its tokens" : "free"}.`;
    else {
      const owners = view.owners.map((owner) => named(label(memory.tables.get(owner))));
      const table = memory.tables.get(view.owners[0]);
      const logical = table.blocks.indexOf(selected.block);
      const words = this.textOf(table.tokens.slice(logical * size, logical * size + view.filled));
      parts.detail.textContent = `${name}: held by ${list(owners, 6)} (reference count ${view.refs}), ${view.filled} of ${plural(size, "slot")} filled${hidesTokens(table) ? "." : `: ${words}`}`;
    }
  }

  textOf(tokens) {
    const { texts } = this.timeline;
    return tokens.map((token) => (texts.has(token) ? texts.get(token).replaceAll("\n", "⏎") : `${token} `)).join("");
  }

  drawOverlay(memory) {
    const { parts, colours, pool } = this;
    const { overlay, stage } = parts;
    const box = stage.getBoundingClientRect();
    const scale = globalThis.devicePixelRatio || 1;
    const [width, height] = [Math.round(box.width * scale), Math.round(box.height * scale)];
    if (overlay.width !== width || overlay.height !== height) Object.assign(overlay, { width, height });
    const context = overlay.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, box.width, box.height);
    if (!this.timeline.length) return;
    const canvas = parts.pool.getBoundingClientRect();
    const centre = (block, onHost = false) => {
      const { x, y, size } = pool.rect(block, onHost);
      return { x: canvas.left - box.left + x + size / 2, y: canvas.top - box.top + y + size / 2 };
    };
    const drawn = (block, onHost = false) => block < pool.counts[onHost ? 1 : 0];
    const beside = canvas.left - box.left > 120;
    const rows = [...stage.querySelectorAll("[data-block]")];
    if (beside)
      for (const row of rows.length <= 16 && pool.size >= 34 ? rows : rows.filter((row) => row.dataset.chosen === "true")) {
        const block = Number(row.dataset.block);
        const onHost = row.dataset.host === "true";
        if (!drawn(block, onHost)) continue;
        const place = row.getBoundingClientRect();
        const from = { x: place.right - box.left + 2, y: (place.top + place.bottom) / 2 - box.top };
        const { x, y, size } = pool.rect(block, onHost);
        const to = { x: canvas.left - box.left + x + 1, y: canvas.top - box.top + y + size / 2 };
        context.globalAlpha = this.chosenTable && row.dataset.chosen !== "true" ? 0.2 : 0.8;
        arrow(context, from, to, colours.hues[Number(row.dataset.hue)], 1, 0.04, 1.5);
      }
    context.globalAlpha = 1;
    const { entry } = this.moment();
    const moves = [
      ...(entry.copies ?? []).map(([from, to]) => [centre(from), centre(to), drawn(from) && drawn(to)]),
      ...(entry.swap_out ?? []).map(([from, to]) => [centre(from), centre(to, true), drawn(from) && drawn(to, true)]),
      ...(entry.swap_in ?? []).map(([from, to]) => [centre(from, true), centre(to), drawn(from, true) && drawn(to)]),
    ];
    // What is in the cells can be read: arrows end at their edges, and many are thin.
    const many = moves.length > 8;
    context.globalAlpha = many ? 0.55 : 1;
    for (const [from, to, there] of moves.slice(0, 64))
      if (there) arrow(context, from, to, colours.ink, this.progress, 0.3, many ? 1.2 : 2.5, pool.size * 0.45);
    context.globalAlpha = 1;
  }

  drawTables() {
    const { parts, timeline, memory } = this;
    const size = timeline.header.block_size;
    const label = labels(timeline.several);
    const all = [...memory.tables.values()];
    if (this.chosenTable && !memory.tables.has(this.chosenTable)) this.chosenTable = null;
    let shown = all.slice(0, MOST_TABLES);
    const chosen = memory.tables.get(this.chosenTable);
    if (chosen && !shown.includes(chosen)) shown = [chosen, ...shown.slice(0, MOST_TABLES - 1)];
    const made = shown.map((table) => this.tableElement(table, label, size, shown.length));
    if (all.length > shown.length) made.push(h("p", { className: "mpv-more" }, `and ${plural(all.length - shown.length, "more sequence")}; choose a block in the pool to see its own`));
    if (shown.some((table) => hidesTokens(table))) made.push(h("p", { className: "mpv-more" }, "The trace does not say which tokens these are (a server with several API keys hides them)."));
    if (!all.length) made.push(h("p", { className: "mpv-more" }, "No sequence holds a block."));
    parts.tables.replaceChildren(...made);
  }

  tableElement(table, label, size, together) {
    const hue = this.hueOf(table);
    const chosen = this.chosenTable === table.name;
    const slots = table.blocks.length * size;
    const empty = slots - table.num_tokens;
    const title = h("button", { type: "button", className: "mpv-name", ariaPressed: String(chosen) }, h("b", {}, label(table)));
    title.append(` ${plural(table.num_tokens, "token")} in ${plural(table.blocks.length, "block")}${table.on_host ? " on the host" : ""}, ${number(Math.max(0, empty))} of ${plural(slots, "slot")} empty`);
    title.dataset.place = table.name;
    title.addEventListener("click", () => {
      this.chosenTable = chosen ? null : table.name;
      this.render();
    });
    const most = chosen ? 40 : together > 4 ? 3 : MOST_ROWS;
    const first = Math.max(0, table.blocks.length - most);
    const rows = [];
    if (first) rows.push(h("li", { className: "mpv-more" }, `${plural(first, "block")} before`));
    for (let logical = first; logical < table.blocks.length; logical++) {
      const block = table.blocks[logical];
      const start = logical * size;
      const end = start + size;
      const computed = Math.max(start, Math.min(end, table.num_computed));
      const done = this.textOf(table.tokens.slice(start, computed));
      const now = this.textOf(table.tokens.slice(computed, Math.min(end, table.num_tokens)));
      const refs = this.memory.refs[table.on_host ? 1 : 0][block];
      const row = h("li", {}, h("span", { className: "mpv-map" }, `${logical} → ${block}`), h("span", { className: "mpv-words" }, h("span", {}, done), h("u", {}, now)));
      row.append(h("span", { className: "mpv-refs", title: "reference count" }, refs > 1 ? `×${refs}` : ""));
      Object.assign(row.dataset, { block, host: table.on_host, hue, chosen });
      rows.push(row);
    }
    return h("div", { className: `mpv-table mpv-hue${hue}${chosen ? " mpv-chosen" : ""}` }, title, h("ul", {}, ...rows));
  }

  drawSide() {
    const { parts, timeline } = this;
    const told = this.told();
    const shown = told.slice(0, 14);
    parts.events.replaceChildren(
      ...shown.map(({ kind, text, concept }, place) => h("li", { className: `mpv-event mpv-event-${kind}` }, `${text} `, this.conceptLink(concept, place))),
      ...(told.length > shown.length ? [h("li", { className: "mpv-more" }, `and ${told.length - shown.length} more`)] : []),
    );
    clearTimeout(this.saying);
    const said = `${parts.title.textContent}. ${told.slice(0, 3).map(({ text }) => text).join(" ")}`;
    if (!this.playing && said !== parts.live.textContent) this.saying = setTimeout(() => (parts.live.textContent = said), QUIET);

    const { decode, prefill, cached } = timeline.stats[this.index];
    const limit = timeline.header.max_num_batched_tokens;
    const scale = Math.max(1, Number(limit) || 0, decode + prefill + cached);
    const piece = (name, value) => {
      const made = h("i", { className: `mpv-${name}` });
      made.style.width = value ? `max(3px, ${(100 * value) / scale}%)` : "0";
      return made;
    };
    const key = (name, text) => h("span", {}, h("i", { className: `mpv-swatch mpv-${name}` }), text);
    parts.budget.replaceChildren(
      h("div", { className: "mpv-budget-bar", ariaHidden: "true" }, piece("decode", decode), piece("prefill", prefill), piece("saved", cached)),
      h("p", { className: "mpv-key" }, key("decode", `${number(decode)} decode`), key("prefill", `${number(prefill)} prefill`), key("saved", `${number(cached)} cached, not computed`), h("span", {}, limit ? `budget ${number(Number(limit) || 0)}` : "")),
    );
    const queues = this.queues();
    const chips = (names, total = names.length) => {
      const made = names.slice(0, MOST_CHIPS).map((name) => h("span", { className: "mpv-chip" }, name));
      const more = total - made.length;
      if (more) made.push(made.length ? `and ${number(more)} more` : plural(more, "request"));
      return made.length ? made : ["none"];
    };
    parts.queues.replaceChildren(
      h("dt", {}, "Running"), h("dd", {}, ...chips(queues.running)),
      h("dt", {}, "Waiting"), h("dd", {}, ...chips(queues.waiting, queues.num_waiting)),
      h("dt", {}, "Swapped out"), h("dd", {}, ...chips(queues.swapped)),
    );
  }

  conceptLink(concept, place) {
    const [title, idea] = CONCEPTS[concept];
    const inPage = this.baseUrl === undefined;
    const link = h("a", { href: inPage ? `#mpv-concept-${concept}` : `${this.baseUrl}concepts/${concept}/`, title: idea }, title);
    link.dataset.place = place;
    if (!inPage) return link;
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const { concepts } = this.parts;
      if (concepts.hidden)
        concepts.lastChild.replaceChildren(
          ...Object.entries(CONCEPTS).flatMap(([name, [term, text]]) => [h("dt", { id: `mpv-concept-${name}`, tabIndex: -1 }, term), h("dd", {}, text)]),
        );
      concepts.hidden = false;
      const target = concepts.querySelector(`#mpv-concept-${concept}`);
      target.scrollIntoView({ block: "nearest" });
      target.focus();
    });
    return link;
  }
}

export function mountViewer(element, options) {
  const viewer = new Viewer(element, options);
  const api = {};
  for (const name of ["load", "start", "append", "seek", "play", "pause", "state"]) api[name] = viewer[name].bind(viewer);
  return api;
}
