// Why: a sentence for everything that a step does, with the concept it belongs to.

import { evicted, isDecode, newBlocks } from "./happenings.js";

export const CONCEPTS = {
  "block-table": ["Block table", "A table says which physical block holds each logical block of a sequence; the last one may be partly empty."],
  allocator: ["Allocator", "Free blocks are handed out in any order; a block is free again when no table holds it."],
  scheduler: ["Scheduler", "First come, first served: each step serves running requests, then admits those that wait, while blocks and budget last."],
  "page-growth": ["Page growth", "A policy says how many blocks a sequence gets at a time: one when it is needed, several, or all it could ever use."],
  preemption: ["Preemption", "When blocks run out, the request that arrived last gives up all of its own and comes back later."],
  swapping: ["Swapping", "Blocks of a preempted request move to host memory and back, so that nothing is computed again."],
  "batch-policies": ["Chunked prefill", "A long prompt is computed in pieces that fill what the decodes of a step leave of its token budget."],
  "prefix-cache": ["Prefix cache", "Full blocks stay findable by their content, so an equal prefix is not computed again; the longest unused is evicted."],
  "parallel-sampling": ["Parallel sampling", "Completions of one prompt share its blocks and copy one only when they write to it."],
  "beam-search": ["Beam search", "Beams share the blocks of their common beginning; a beam that dies gives back what only it held."],
};

const MOST = 60; // letters of a name or a reason from outside
const short = (text, most = MOST) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const list = (items, most = 8) =>
  items.length > most ? `${items.slice(0, most).join(", ")} and ${items.length - most} more` : items.join(", ");
const blocksText = (blocks) => `${blocks.length === 1 ? "block" : "blocks"} ${list(blocks)}`;

// What a sequence is called: its request, and its number if the request has several.
export function labels(memory) {
  const several = new Map();
  for (const table of memory.tables.values()) several.set(table.request, (several.get(table.request) ?? 0) + 1);
  return (table) => (several.get(table.request) > 1 ? `${short(table.request)}.${table.position + 1}` : short(table.request));
}

// All that a step does, in the order in which it is decided: [{kind, text, concept, blocks}].
export function explain({ entry, before, memory }, committed) {
  const told = [];
  const tell = (kind, concept, text, blocks = []) => told.push({ kind, concept, text, blocks });
  const size = memory.header.block_size;
  const label = labels(memory);
  const nameOf = (table) => label(table);
  const events = entry.events ?? [];

  for (const event of events) {
    const who = short(String(event.request ?? ""));
    const request = String(event.request ?? "");
    if (event.kind === "preempted") {
      const how =
        event.mode === "swap"
          ? "its blocks move to host memory until there is room again"
          : "its blocks are freed, and its tokens are computed again later";
      const reason = event.reason ? ` (${short(String(event.reason), 200)})` : "";
      tell("preemption", "preemption", `${who} is preempted because blocks ran out (by default the latest arrival gives way): ${how}${reason}.`);
    } else if (event.kind === "admitted" || (event.kind === "resumed" && event.mode !== "swap")) {
      const again = event.kind === "resumed" ? "is back and computes its tokens again" : "is admitted";
      const need = Number(event.prompt_tokens) || 0;
      const blocks = Number(event.blocks) || 0;
      tell("admission", "scheduler", `${who} ${again}: its ${count(need, "prompt token")} ${need === 1 ? "needs" : "need"} ${count(blocks, "new block")}, and the pool has them.`);
      if (event.cached_tokens > 0) {
        const hits = hitBlocks(before, memory, request, size);
        const where = hits.length ? ` in ${blocksText(hits)}` : "";
        tell("hit", "prefix-cache", `Prefix hit: ${count(event.cached_tokens, "token")} of ${who} ${event.cached_tokens === 1 ? "is" : "are"} there already${where}, so nothing of that is computed.`, hits);
      }
    } else if (event.kind === "resumed") {
      tell("admission", "swapping", `${who} is back from host memory: its blocks fit again, and it goes on where it was.`);
    } else if (event.kind === "outgrown") {
      tell("end", "preemption", `${who} ends here: it is alone and needs more blocks than the whole pool has.`);
    } else if (event.kind === "snapshot") {
      tell("other", "block-table", "This is the memory as it was when this page came.");
    } else if (event.kind === "idle") {
      tell("end", "allocator", "No step: a request was aborted.");
    } else if (event.kind !== "closed") {
      tell("other", "scheduler", `${who}: ${short(event.kind)}.`);
    }
  }
  if (entry.swap_out?.length)
    tell("swap", "swapping", `${count(entry.swap_out.length, "block")} ${entry.swap_out.length === 1 ? "moves" : "move"} to host memory before their device blocks are given away.`, entry.swap_out.map(([block]) => block));
  if (entry.swap_in?.length)
    tell("swap", "swapping", `${count(entry.swap_in.length, "block")} ${entry.swap_in.length === 1 ? "comes" : "come"} back from host memory.`, entry.swap_in.map(([, block]) => block));

  const gone = evicted(memory, entry, before.tables);
  if (gone.length)
    tell("eviction", "prefix-cache", `The prefix cache gives up ${blocksText(gone)}: nothing else is free, and by default the least recently used goes first.`, gone);

  const copied = new Set();
  for (const [from, to] of entry.copies ?? []) {
    copied.add(to);
    const writer = [...memory.tables.values()].find((table) => !table.on_host && table.blocks.includes(to));
    const who = writer ? nameOf(writer) : "A sequence";
    const others = memory.refs[0][from] ?? 0;
    const why = others ? `${who} writes where ${others === 1 ? "another sequence reads" : `${others} others read`}` : `${who} writes to a block that the prefix cache keeps`;
    tell("copy", "block-table", `Copy-on-write: block ${from} is copied to block ${to}, because ${why}.`, [from, to]);
  }

  for (const table of memory.tables.values()) {
    if (table.on_host) continue;
    const old = before.tables.get(table.name);
    if (!old || old.on_host) {
      if (!old && !committed) {
        const fresh = newBlocks(table, undefined, size).filter(({ hit, block }) => !hit && !copied.has(block));
        const blocks = fresh.map(({ block }) => block);
        const needed = Math.ceil(table.num_tokens / size);
        const ahead = table.blocks.length - needed;
        if (fresh.length && ahead > 0)
          tell("allocation", "page-growth", `${nameOf(table)} gets ${blocksText(blocks)}, ${count(ahead, "block")} more than its ${count(table.num_tokens, "token")} ${table.num_tokens === 1 ? "needs" : "need"}: kept for tokens that may never come.`, blocks);
        else if (fresh.length)
          tell("allocation", "allocator", `${nameOf(table)} gets ${blocksText(blocks)} for ${count(table.num_tokens, "token")}${fresh.length > 1 ? "; they need not lie side by side" : ""}.`, blocks);
      }
      continue;
    }
    const fresh = newBlocks(table, old, size).filter(({ block, logical }) => !copied.has(block) && logical >= old.blocks.length);
    if (fresh.length) {
      const blocks = fresh.map(({ block }) => block);
      const ahead = table.blocks.length - Math.ceil(table.num_tokens / size);
      const full = old.blocks.length ? `block ${old.blocks[old.blocks.length - 1]} is full` : "it has no block";
      if (ahead > 0) tell("allocation", "page-growth", `${nameOf(table)} takes ${blocksText(blocks)}, more than it fills now: its growth policy asks ahead.`, blocks);
      else tell("allocation", "block-table", `${nameOf(table)} takes ${blocksText(blocks)}: ${full}, and one more token has to be written.`, blocks);
    }
  }

  if (committed) {
    for (const table of memory.tables.values()) {
      if (before.tables.has(table.name) || !table.position) continue;
      const sibling = [...memory.tables.values()].find((other) => other !== table && other.request === table.request);
      if (sibling && sibling.blocks[0] === table.blocks[0])
        tell("fork", "parallel-sampling", `${nameOf(table)} is forked: it holds the same ${count(table.blocks.length, "block")}, and nothing is copied until one of them writes.`, table.blocks);
    }
    for (const table of memory.tables.values()) {
      const old = before.tables.get(table.name);
      if (!old || old.on_host || table.on_host || old.blocks.every((block, i) => block === table.blocks[i])) continue;
      if (!(entry.copies ?? []).some(([, to]) => table.blocks.includes(to)))
        tell("fork", "beam-search", `${nameOf(table)} now continues another beam, whose ${blocksText(table.blocks)} it shares; what it held before is dropped.`, table.blocks);
    }
    const back = [];
    before.refs[0].forEach((refs, block) => refs && !memory.refs[0][block] && back.push(block));
    if (back.length) {
      const kept = back.filter((block) => memory.evictable.has(block));
      const note = kept.length ? ` (${kept.length === back.length ? "all" : kept.length} stay cached until the room is needed)` : "";
      tell("free", "allocator", `${blocksText(back)} ${back.length === 1 ? "comes" : "come"} back: no sequence holds ${back.length === 1 ? "it" : "them"} any more${note}.`.replace(/^b/, "B"), back);
    }
  }
  if (entry.finished?.length)
    tell("end", "allocator", `${list(entry.finished.map((request) => short(String(request))))} ${entry.finished.length === 1 ? "has" : "have"} ended: every block that nobody else holds comes back ${committed ? "now" : "with this step's commit"}.`);
  if (events.some((event) => event.kind === "closed"))
    tell("end", "scheduler", "The trace ends here: what changed after its last step was a request that was aborted.");

  const decodes = [];
  for (const scheduled of entry.scheduled ?? []) {
    const table = memory.tables.get(`${scheduled[0]}/${scheduled[1]}`) ?? before.tables.get(`${scheduled[0]}/${scheduled[1]}`);
    if (isDecode(table, scheduled)) decodes.push(table ? nameOf(table) : short(scheduled[0]));
    else {
      const [, , start, number] = scheduled;
      const request = table ? nameOf(table) : short(scheduled[0]);
      const total = table?.tokens.length ?? 0;
      const part = start > 0 || start + number < total;
      if (part) tell("prefill", "batch-policies", `${request} computes tokens ${start} to ${start + number - 1}${total ? ` of ${total}` : ""}: what is cached or done is left out, and the step's budget limits the rest.`);
      else tell("prefill", "scheduler", `${request} computes its prompt: ${count(number, "token")} in one forward pass.`);
    }
  }
  if (decodes.length) tell("decode", "scheduler", `${list(decodes, 6)} ${decodes.length === 1 ? "decodes: one new token" : "decode: one new token each"}.`);
  if (!told.length) tell("other", "scheduler", "Nothing is computed in this step.");
  return told;
}

function hitBlocks(before, memory, request, size) {
  const blocks = new Set();
  for (const table of memory.tables.values())
    if (table.request === request && !before.tables.has(table.name))
      for (const { block, hit } of newBlocks(table, undefined, size)) if (hit) blocks.add(block);
  return [...blocks];
}
