// The playground: a form of settings, a run of the real engine in a worker, its trace in the viewer. The settings
// that are not the defaults are in the address, after #.

import { EngineWorker, at, counted, element, tell } from "./engine.js";
import { mountViewer } from "../javascripts/viewer/viewer.js";

const FIELDS = [
  ["block_size", "Block size (tokens)", 16, { min: 1, max: 256 }],
  ["num_blocks", "Blocks in the pool", 32, { min: 1, max: 4096 }],
  ["max_num_batched_tokens", "Token budget of a step", 256, { min: 1, max: 8192 }],
  ["max_num_seqs", "Sequences at once", 16, { min: 1, max: 256 }],
  ["enable_chunked_prefill", "Prompts", "true", { true: "in chunks, beside decodes", false: "first, alone" }],
  ["page_growth", "Blocks are taken", "on_demand", { on_demand: "one at a time", chunked: "16 at a time", reserve: "all at once" }],
  ["preemption_mode", "Preemption by", "recompute", { recompute: "recomputing", swap: "swapping", auto: "the cheaper" }],
  ["enable_prefix_caching", "Prefix caching", "true", { true: "on", false: "off" }],
  ["requests", "Requests", 8, { min: 1, max: 200 }],
  ["rate", "Arrivals per second", 2, { min: 0.01, max: 1000, step: "any" }],
  ["prompt", "Prompt tokens (mean)", 40, { min: 1, max: 255, step: "any" }],
  ["output", "Output tokens (mean)", 60, { min: 1, max: 255, step: "any" }],
  ["prefix", "Tokens that all prompts begin with", 0, { min: 0, max: 256 }],
  ["samples", "Outputs per request", 1, { min: 1, max: 8 }],
  ["seed", "Seed", 0, { min: 0, max: 999999 }],
];

const FIRST = ["num_blocks", "requests", "output", "preemption_mode"]; // always in sight

const COUNTS = [
  ["finished", "Requests finished", String],
  ["cut_short", "Of these, cut short by a full pool", String],
  ["refused", "Requests refused", String],
  ["steps", "Steps", String],
  ["seconds", "Simulated seconds", (value) => value.toFixed(2)],
  ["ttft", "To the first token, mean [s]", (value) => value.toFixed(3)],
  ["preemptions", "Preemptions", String],
  ["cached_tokens", "Prompt tokens from the cache, when first admitted", String],
  ["peak_blocks", "Blocks in use, at most", String],
  ["waste", "Of the memory handed out, empty", (value) => `${(100 * value).toFixed(1)} %`],
  ["shared", "Of the table entries, shared", (value) => `${(100 * value).toFixed(1)} %`],
];

const QUESTIONS = [
  {
    text: "The pool shrinks from 32 blocks to 20. Eight requests want about 40 + 60 tokens each. Is anyone preempted?",
    settings: { num_blocks: 20 },
    options: ["nobody", "1 to 5 times", "more often"],
    answer: ({ preemptions }) => (preemptions === 0 ? 0 : preemptions <= 5 ? 1 : 2),
    told: ({ preemptions }) => `${counted(preemptions, "preemption")}.`,
  },
  {
    text: "All blocks that a request might ever need (256 tokens of output) are reserved when it is admitted. How much of the memory handed out is empty?",
    settings: { page_growth: "reserve", num_blocks: 64 },
    options: ["below 10 %", "10 to 50 %", "more"],
    answer: ({ waste }) => (waste < 0.1 ? 0 : waste <= 0.5 ? 1 : 2),
    told: ({ waste }) => `${(100 * waste).toFixed(1)} %; with blocks on demand it is about a tenth.`,
  },
  {
    text: "All eight prompts begin with the same 64 tokens, four blocks. How many prompt tokens need not be computed?",
    settings: { prefix: 64 },
    options: ["64", "448", "512"],
    answer: ({ cached_tokens: cached }) => (cached <= 64 ? 0 : cached <= 448 ? 1 : 2),
    told: ({ cached_tokens: cached }) => `${cached}: the first request computes the prefix, the seven others find it.`,
  },
  {
    text: "Four outputs of each prompt. Sequences of a request share the blocks of its prompt: what share of the block-table entries needs no block of its own?",
    settings: { samples: 4, num_blocks: 64 },
    options: ["below 10 %", "10 to 40 %", "more"],
    answer: ({ shared }) => (shared < 0.1 ? 0 : shared <= 0.4 ? 1 : 2),
    told: ({ shared }) => `${(100 * shared).toFixed(1)} %.`,
  },
];

// ---- settings, and the address -----------------------------------------------------------------------------

const form = at("settings");
const more = element("details", { className: "more" }, element("summary", { textContent: "More settings" }));
const rest = element("div", { className: "fields" });
more.append(rest);
for (const [name, label, value, kind] of FIELDS) {
  const input = typeof value === "number"
    ? element("input", { type: "number", name, value, required: true, ...kind })
    : element("select", { name, value }, ...Object.entries(kind).map(([key, text]) => element("option", { value: key, textContent: text })));
  (FIRST.includes(name) ? form : rest).append(element("label", {}, label, input));
}
form.addEventListener("invalid", () => (more.open = true), true); // a field out of sight says nothing
form.append(
  more,
  element("div", { className: "buttons" },
    element("button", { className: "small", id: "run", textContent: "Run" }),
    element("button", { className: "small", type: "button", id: "stop", textContent: "Stop", disabled: true }),
    element("button", { className: "small", type: "button", id: "defaults", textContent: "Back to the defaults" })),
);

// What a field cannot be stays its default, and comes back: [[name, text], ...].
function fill(settings) {
  const refused = Object.entries(settings).filter(([name]) => !FIELDS.some(([known]) => known === name));
  for (const [name, , value] of FIELDS) {
    const field = form.elements[name];
    field.value = settings[name] ?? value;
    if (field.value !== "" && field.checkValidity()) continue;
    refused.push([name, settings[name]]);
    field.value = value;
  }
  const isChanged = ([name, , value]) => !FIRST.includes(name) && form.elements[name].value !== String(value);
  more.open ||= FIELDS.some(isChanged);
  return refused;
}

function chosen() {
  const entries = FIELDS.map(([name, , value]) => {
    const text = form.elements[name].value;
    return [name, typeof value === "number" ? Number(text) : text === "true" || text === "false" ? text === "true" : text];
  });
  return Object.fromEntries(entries);
}

function remember() {
  const changed = FIELDS.filter(([name, , value]) => form.elements[name].value !== String(value));
  const link = new URLSearchParams(changed.map(([name]) => [name, form.elements[name].value]));
  history.replaceState(null, "", changed.length ? `#${link}` : location.pathname + location.search);
}

function fromAddress() {
  const link = location.hash.slice(1);
  if (link && !link.includes("=")) return; // a heading, the skip link
  const refused = fill(Object.fromEntries(new URLSearchParams(link)));
  const told = refused.map((pair) => pair.join("=").slice(0, 60)).join(", ");
  if (told) tell(`The link has settings that cannot be taken: ${told}. The others are set.`, true);
  else if (at("status").dataset.state) tell("");
}
addEventListener("hashchange", fromAddress);
fromAddress();

// ---- a run -------------------------------------------------------------------------------------------------

const viewer = mountViewer(at("viewer"), { baseUrl: "../" });
const runs = new Map(); // id -> { lines, done, failed }

// Until the reader has a run: one that was recorded when the site was built.
fetch(new URL("../scenes/playground.jsonl", import.meta.url)).then(async (answer) => {
  const trace = await answer.text();
  if (!answer.ok || before) return;
  viewer.load(trace);
  viewer.seek(Number(at("recorded").dataset.step));
  at("recorded").hidden = false;
});

let number = 0;

const engine = new EngineWorker(({ id, error, lines, ...result }) => {
  const run = runs.get(id);
  if (!run) return;
  if (lines) {
    run.lines.push(...lines);
    tell(`${counted(run.lines.length - 1, "step")} ...`);
    return;
  }
  runs.delete(id);
  at("stop").disabled = true;
  if (error) run.failed(new Error(error));
  else run.done({ ...result, trace: run.lines.join("\n") });
});

// The last run's counts beside those of the run before.
let before;
function show(counts) {
  const table = element("table", {}, element("caption", { textContent: "What came out" }));
  table.append(element("tr", {}, element("td"), element("th", { scope: "col", textContent: "this run" }), ...(before ? [element("th", { scope: "col", textContent: "the run before" })] : [])));
  for (const [name, label, text] of COUNTS)
    table.append(element("tr", {}, element("th", { scope: "row", textContent: label }), ...[counts, before].filter(Boolean).map((column) => element("td", { textContent: text(column[name]) }))));
  at("counts").replaceChildren(table);
  at("counts").tabIndex = 0;
  before = counts;
}

// The counts of a run; null if another has begun before it ended.
async function simulate(settings) {
  await engine.load();
  const id = ++number;
  for (const run of runs.values()) run.done(null); // the worker drops a run when another begins
  runs.clear();
  const result = new Promise((done, failed) => runs.set(id, { lines: [], done, failed }));
  at("stop").disabled = false;
  await engine.send({ call: "simulate", id, settings });
  const ended = await result;
  if (ended === null) return null;
  const { counts, trace, refusal, stopped } = ended;
  show(counts);
  at("recorded").hidden = true;
  viewer.load(trace);
  const numbers = counts.steps > 1 ? ` (0 to ${counts.steps - 1})` : "";
  const steps = `${stopped ? "Stopped after " : ""}${counted(counts.steps, "step")}${numbers}. Play the run below, or change a setting and run again.`;
  const refused = counts.refused ? `${counts.refused} of ${counted(settings.requests ?? counts.refused + counts.finished, "request")} can never run: ${refusal}.` : "";
  tell([counts.steps ? steps : "", refused].filter(Boolean).join(" "));
  globalThis.playground.counts = counts;
  return counts;
}

const attempt = async (settings) => {
  try {
    return await simulate(settings);
  } catch (error) {
    tell(error.message, true);
    return null;
  }
};

form.addEventListener("input", remember);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(chosen());
});
at("stop").addEventListener("click", () => engine.send({ call: "stop" }));
at("defaults").addEventListener("click", () => {
  fill({});
  remember();
});

// ---- what if -----------------------------------------------------------------------------------------------

at("questions").append(element("h2", { textContent: "What if ..." }), element("p", { textContent: "Guess first; then the engine answers." }));
QUESTIONS.forEach(({ text, settings, options, answer, told }) => {
  const verdict = element("p", { role: "status" });
  const buttons = options.map((option, guess) => {
    const button = element("button", { className: "small", type: "button", textContent: option });
    button.addEventListener("click", async () => {
      fill(settings);
      remember();
      verdict.textContent = "The engine runs ...";
      const counts = await attempt(chosen());
      if (!counts) verdict.textContent = "";
      else verdict.textContent = `${answer(counts) === guess ? "Right" : "Not so"}: ${told(counts)}`;
    });
    return button;
  });
  at("questions").append(element("div", { className: "question" }, element("p", { textContent: text }), element("div", { className: "buttons" }, ...buttons), verdict));
});

globalThis.playground = { viewer, run: attempt, chosen, load: () => engine.load() };
