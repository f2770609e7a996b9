// All steps of a run: read once, kept as text; any step is rebuilt from the kept state before it.

import { Memory, TraceError, checkEntry, checkHeader, shown } from "./memory.js";
import { happenings, JUMPS } from "./happenings.js";

const SEGMENT = 64; // steps between two kept states
const MOST_LIVE = 20_000; // steps that a live view keeps

export class Timeline {
  constructor(header) {
    this.header = checkHeader(header);
    this.memory = new Memory(this.header); // after the last step
    this.texts = new Map(); // token id -> its text
    this.lines = []; // of each step: its text, or the object of a live one
    this.kept = []; // the state before every SEGMENT-th of them
    this.stats = []; // numbers of each step, for charts and jumps
    this.dropped = 0; // steps of a live view that are no longer kept
    this.problem = ""; // why it ends early
    this.current = null;
    this.totals = Object.fromEntries(JUMPS.map((kind) => [kind, 0])); // of all steps
    this.requests = new Map(); // id -> its number, in the order in which they appear
    this.several = new Set(); // those that ever had more than one sequence
    this.hostEver = false;
    this.hostHighest = -1; // last block of either pool that was ever held
    this.highest = -1;
  }

  get length() {
    return this.lines.length;
  }

  add(entry, line = entry) {
    checkEntry(entry);
    // A line that cannot be applied leaves the memory between two states; so nothing is read after it.
    if (this.broken) throw new TraceError("a line before it was broken");
    if (this.length % SEGMENT === 0) this.kept.push(this.memory.kept());
    this.broken = true;
    const stats = happenings(this.memory, entry, this.stats[this.stats.length - 1]);
    this.memory.commit(entry);
    this.broken = false;
    for (const [token, text] of Object.entries(entry.texts ?? {})) this.texts.set(Number(token), String(text));
    this.remember(entry, stats);
    this.lines.push(line);
    this.stats.push(stats);
    if (typeof line !== "string" && this.length > MOST_LIVE) this.forget();
  }

  remember(entry, stats) {
    for (const kind of JUMPS) this.totals[kind] += stats[kind];
    for (const [request] of entry.scheduled ?? [])
      if (!this.requests.has(request)) this.requests.set(request, this.requests.size);
    for (const { tables } of [entry.planned ?? {}, entry.committed ?? {}])
      for (const name of Object.keys(tables ?? {}))
        if (!name.endsWith("/0")) this.several.add(name.slice(0, name.lastIndexOf("/")));
    this.hostEver ||= stats.host > 0;
    for (const [, block] of entry.swap_out ?? []) this.hostHighest = Math.max(this.hostHighest, block);
    this.highest = stats.highest;
  }

  forget() {
    this.lines.splice(0, SEGMENT);
    this.stats.splice(0, SEGMENT);
    this.kept.shift();
    this.dropped += SEGMENT;
    if (this.current) this.current.index -= SEGMENT;
    if (this.current?.index < 0) this.current = null;
  }

  entry(index) {
    const line = this.lines[index];
    return typeof line === "string" ? JSON.parse(line) : line;
  }

  // The index of a step, or of the last one before it; 0 if there is none.
  indexOf(step) {
    let low = 0;
    let high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.stats[middle].step <= step) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // A step: {entry, before, planned, memory, stats}; `before` is the memory when it began, `planned` while it is
  // computed, `memory` the same or that after its commit. All are valid until the next call.
  at(index, committed = false) {
    const current = this.current;
    const near = current && current.index <= index && index - current.index < SEGMENT;
    let next = near ? current.index : index - (index % SEGMENT);
    const before = near ? current.memory : Memory.from(this.header, this.kept[next / SEGMENT]);
    for (; next < index; next++) {
      const entry = this.entry(next);
      before.plan(entry);
      before.commit(entry);
    }
    this.current = { index, memory: before };
    const entry = this.entry(index);
    const planned = Memory.from(this.header, before.kept());
    planned.plan(entry);
    const memory = committed ? Memory.from(this.header, planned.kept()) : planned;
    if (committed) memory.commit(entry);
    return { entry, before, planned, memory, stats: this.stats[index] };
  }

  // The next index after `from` (by 1 or -1) where something of this kind happens, or -1.
  find(kind, from, by = 1) {
    for (let i = from + by; i >= 0 && i < this.length; i += by) if (this.stats[i][kind]) return i;
    return -1;
  }
}

// Reads a whole trace, a while at a time; of a cut or broken one, what is readable, with the reason.
export class Reader {
  constructor(text) {
    this.text = text;
    this.start = lineEnd(text, 0) + 1;
    this.number = 1; // of the line read last
    this.timeline = new Timeline(parsed(text.slice(0, this.start), 1));
  }

  get share() {
    return Math.min(1, this.start / this.text.length);
  }

  // Reads for this many milliseconds, at least one line; true once all is read.
  read(milliseconds = Infinity) {
    const { text, timeline } = this;
    const until = performance.now() + milliseconds;
    while (this.start < text.length) {
      const stop = lineEnd(text, this.start);
      const line = text.slice(this.start, stop);
      this.start = stop + 1;
      this.number += 1;
      if (!line.trim()) continue;
      try {
        timeline.add(parsed(line, this.number), line);
      } catch (error) {
        if (!(error instanceof TraceError)) throw error;
        timeline.problem = this.told(error.message);
        this.start = text.length;
      }
      if (performance.now() > until) break;
    }
    return this.start >= text.length;
  }

  told(message) {
    const reason = message.startsWith("Line ") ? message : `Line ${this.number} does not continue the trace: ${message}.`;
    const { length } = this.timeline;
    return `${reason} ${length ? `Shown: ${length} step${length === 1 ? "" : "s"} before it.` : "No step is left to show."}`;
  }
}

function lineEnd(text, start) {
  const end = text.indexOf("\n", start);
  return end < 0 ? text.length : end;
}

function parsed(line, number) {
  try {
    return JSON.parse(line);
  } catch {
    const what = number === 1 ? "This is not a trace of minipaged: line 1 is not JSON" : `Line ${number} is not JSON (was it truncated?)`;
    throw new TraceError(`${what}: ${shown(line.slice(0, 40))}.`);
  }
}
