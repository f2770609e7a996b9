// Why: a sentence for everything that a step does, with the concept it belongs to.

import { admitted, isDecode, newBlocks, sharedAnew } from "./happenings.js";

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
  speculation: ["Speculative decoding", "A step also verifies draft tokens, and keeps those that the model would have chosen."],
  "beam-search": ["Beam search", "Beams share the blocks of their common beginning; a beam that dies gives back what only it held."],
};

const MOST = 60; // letters of a name or a reason from outside
const short = (text, most = MOST) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
export const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
export const list = (items, most = 8) =>
  items.length > most ? `${items.slice(0, most).join(", ")} and ${items.length - most} more` : items.join(", ");
const blocksText = (blocks) => `${blocks.length === 1 ? "block" : "blocks"} ${list(blocks)}`;
const freeAgain = (blocks) => `${blocksText(blocks)} ${blocks.length === 1 ? "is" : "are"} free again`;

// In a sentence, a number alone could be a block's: "request 5", "sequence 5.2". Other names are shown as they are.
const kindOf = (name) => (/^\d+$/.test(name) ? "request" : /^\d+\.\d+$/.test(name) ? "sequence" : "");
export const named = (name) => (kindOf(name) ? `${kindOf(name)} ${name}` : name);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const begin = (name) => (kindOf(name) ? capital(named(name)) : name);
function listNamed(names, most) {
  const kind = kindOf(names[0]);
  const alike = kind && names.length > 1 && names.every((name) => kindOf(name) === kind);
  return alike ? `${kind}s ${list(names, most)}` : list(names.map(named), most);
}
const beginList = (names, most) => (kindOf(names[0]) ? capital(listNamed(names, most)) : listNamed(names, most));

// What a sequence is called: its request, and its number if the request is one of the `several` that have more.
export const labels = (several) => (table) => `${short(table.request)}${several.has(table.request) ? `.${table.position + 1}` : ""}`;

// All that a step does, in the order in which it is decided: [{kind, text, concept, blocks}]. What the plan does is
// read from the memory that it made: the commit has moved tables and filled blocks since.
export function explain({ entry, before, planned, memory }, nameOf, textOf) {
  const told = [];
  const tell = (kind, concept, text, blocks = []) => told.push({ kind, concept, text, blocks });
  const size = planned.header.block_size;
  const committed = memory !== planned;
  const events = entry.events ?? [];
  const ownEnd = new Map(); // name -> end of what a sequence computes of its own: its first entry; a draft follows
  for (const [request, position, start, number] of entry.scheduled ?? [])
    if (!ownEnd.has(`${request}/${position}`)) ownEnd.set(`${request}/${position}`, start + number);

  const anew = admitted(entry);
  const earlier = new Map([...before.tables].filter(([, table]) => !anew.has(table.request))); // and still theirs
  const tellLeft = (requests, why) => {
    if (requests.length)
      tell("end", "scheduler", `${beginList(requests.map((request) => short(request)), 6)} gave ${requests.length === 1 ? "its" : "their"} blocks back before this step: ${why(requests.length === 1)}.`);
  };
  const left = leftBefore(before, planned, events);
  tellLeft(left, (one) => (one ? "it was aborted, or a step failed and it waits again" : "they were aborted, or a step failed and they wait again"));
  tellLeft(requestsOf(before).filter((request) => anew.has(request) && !left.includes(request)), () => "a step failed");
  const shared = new Set(); // blocks that a sequence computes for others of its group
  const written = new Set(); // blocks that get tokens in this step
  for (const [request, position, start, number] of entry.scheduled ?? []) {
    const { blocks = [] } = planned.tables.get(`${request}/${position}`) ?? {};
    blocks.slice(Math.floor(start / size), Math.ceil((start + number) / size)).forEach((block) => written.add(block));
  }
  for (const event of events) {
    const request = String(event.request ?? "");
    const who = begin(short(request));
    if (event.kind === "preempted") {
      const how =
        event.mode === "swap"
          ? "its blocks move to host memory until there is room again"
          : "its blocks are freed, and its tokens are computed again later";
      const reason = event.reason ? ` (${short(String(event.reason), 200)})` : "";
      tell("preemption", "preemption", `${who} is preempted because blocks ran out (by default the latest arrival gives way): ${how}${reason}.`);
    } else if (event.kind === "admitted" || (event.kind === "resumed" && event.mode !== "swap")) {
      const number = Number(event.blocks) || 0; // more than the tokens need, if growth is ahead of them
      const what = event.kind === "resumed"
        ? "is back and computes its tokens again"
        : `is admitted with ${plural(Number(event.prompt_tokens) || 0, "prompt token")}`;
      tell("admission", "scheduler", `${who} ${what}: ${number ? `it asks for ${plural(number, "new block")}, and the pool has ${number === 1 ? "it" : "them"}` : "it needs no new block"}.`);
      const again = event.cached_tokens > 0 ? sharedAnew(planned.tables, request, size) : [];
      const cached = event.cached_tokens - again.length * size;
      if (cached > 0) {
        const hits = hitBlocks(earlier, planned, request, size, entry.copies ?? []).filter((block) => !again.includes(block));
        const where = hits.length ? ` in ${blocksText(hits)}` : "";
        const now = hits.filter((block) => written.has(block));
        const which = now.length < hits.length ? blocksText(now) : now.length === 1 ? "it" : "them";
        const how = now.length
          ? `found${where} and not computed again: another request computes ${which} in this step`
          : `already cached${where} and not computed again`;
        tell("hit", "prefix-cache", `Prefix hit: ${plural(cached, "token")} of ${named(short(request))} ${cached === 1 ? "is" : "are"} ${how}.`, hits);
      }
      if (again.length) {
        const blocks = [...new Set(again)];
        again.forEach((block) => shared.add(block));
        tell("fork", "parallel-sampling", `Sequences of ${named(short(request))} share ${blocksText(blocks)} again: what they have in common is computed once.`, blocks);
      }
    } else if (event.kind === "resumed") {
      tell("admission", "swapping", `${who} is back from host memory: its blocks fit again, and it continues where it left off.`);
    } else if (event.kind === "outgrown") {
      tell("end", "preemption", `${who} ends here: it is alone and needs more blocks than the whole pool has.`);
    } else if (event.kind === "snapshot") {
      tell("other", "block-table", "This is the memory as it was when this page connected to the server.");
    } else if (event.kind === "idle") {
      tellBetween(before, entry, "No step:", tell);
    } else if (event.kind === "cleared") { // (after another event, it is part of what changed without a step)
      const blocks = [...before.evictable].sort((a, b) => a - b);
      if (event === events[0]) tell("free", "prefix-cache", `The prefix cache was cleared before this step: ${freeAgain(blocks)}.`, blocks);
    } else if (event.kind !== "closed" && event.kind !== "drafted") {
      tell("other", "scheduler", `${who}: ${short(event.kind)}.`);
    }
  }
  if (entry.swap_out?.length)
    tell("swap", "swapping", `${plural(entry.swap_out.length, "block")} ${entry.swap_out.length === 1 ? "moves to host memory before its device block is" : "move to host memory before their device blocks are"} given away.`, entry.swap_out.map(([block]) => block));
  if (entry.swap_in?.length)
    tell("swap", "swapping", `${plural(entry.swap_in.length, "block")} ${entry.swap_in.length === 1 ? "comes" : "come"} back from host memory.`, entry.swap_in.map(([, block]) => block));

  const gone = entry.evicted ?? [];
  if (gone.length)
    tell("eviction", "prefix-cache", `The prefix cache gives up ${blocksText(gone)}: nothing else is free, and by default the least recently used goes first.`, gone);

  const copied = new Set();
  const copies = entry.copies ?? [];
  const writers = new Map(copies.map(([, to]) => [to, [...planned.tables.values()].find((table) => !table.on_host && table.blocks.includes(to))]));
  const held = (from, to) => earlier.get(writers.get(to)?.name)?.blocks.includes(from);
  copies.forEach(([from, to], i) => {
    copied.add(to);
    const writer = writers.get(to);
    const who = writer ? named(nameOf(writer)) : "a sequence";
    const later = copies.slice(i + 1).filter(([other, own]) => other === from && held(from, own)).length; // they still read it
    const others = (planned.refs[0][from] ?? 0) + later;
    const why = others ? `${who} writes where ${others === 1 ? "another sequence reads" : `${others} others read`}` : `${who} writes to a block that the prefix cache keeps`;
    tell("copy", "block-table", `Copy-on-write: block ${from} is copied to block ${to}, because ${why}.`, [from, to]);
  });

  for (const table of planned.tables.values()) {
    const old = earlier.get(table.name);
    if (table.on_host) continue;
    const blocks = newBlocks(table, old, size)
      .filter(({ block, logical, hit }) => !hit && !copied.has(block) && logical >= (old?.blocks.length ?? 0))
      .map(({ block }) => block);
    if (!blocks.length) continue;
    const who = begin(nameOf(table));
    const ahead = table.blocks.length - Math.ceil(table.num_tokens / size);
    const tokens = plural(table.num_tokens, "token");
    if (!old && ahead > 0)
      tell("allocation", "page-growth", `${who} gets ${blocksText(blocks)}, ${plural(ahead, "block")} more than its ${tokens} ${table.num_tokens === 1 ? "needs" : "need"}: kept for tokens that may never come.`, blocks);
    else if (!old)
      tell("allocation", "allocator", `${who} gets ${blocksText(blocks)} for ${tokens}${blocks.length > 1 ? "; they need not be contiguous" : ""}.`, blocks);
    else if (ahead > 0)
      tell("allocation", "page-growth", `${who} takes ${blocksText(blocks)}, more than it fills now: its growth policy allocates ahead.`, blocks);
    else if (old.on_host)
      tell("allocation", "swapping", `${who} takes ${blocksText(blocks)}, because ${plural(table.num_tokens - old.num_tokens, "token")} of it ${table.num_tokens - old.num_tokens === 1 ? "has" : "have"} no slot yet.`, blocks);
    else if (ownEnd.get(table.name) <= old.blocks.length * size)
      tell("allocation", "speculation", `${who} takes ${blocksText(blocks)} for draft tokens.`, blocks);
    else {
      const full = old.blocks.length ? `block ${old.blocks[old.blocks.length - 1]} is full` : "it has no block";
      tell("allocation", "block-table", `${who} takes ${blocksText(blocks)}: ${full}, and one more token has to be written.`, blocks);
    }
  }

  const decodes = [];
  const numDrafted = new Map(); // by request
  for (const scheduled of entry.scheduled ?? []) {
    const [request, position, start, number, candidates] = scheduled;
    const name = `${request}/${position}`;
    const table = planned.tables.get(name);
    const who = table ? nameOf(table) : short(request);
    const rest = !candidates; // only what reaches the end of a sequence has some
    const total = table?.tokens.length || (rest ? 0 : start + number); // 0: unknown, where tokens are hidden
    const cached = start > 0 && !earlier.has(name);
    const isShared = cached && newBlocks(table, undefined, size).some(({ block, hit }) => hit && shared.has(block));
    const why = [start > 0 && `what ${isShared ? "another sequence computes" : cached ? "is cached" : "is done"} is left out`, rest && "the step's budget limits the rest"].filter(Boolean);
    const which = `${number === 1 ? `token ${start}` : `tokens ${start} to ${start + number - 1}`}${total ? ` of ${total}` : ""}`;
    if (start >= ownEnd.get(name)) numDrafted.set(request, (numDrafted.get(request) ?? 0) + 1);
    else if (isDecode(earlier.get(name), scheduled)) decodes.push(who);
    else if (why.length) tell("prefill", isShared && !rest ? "parallel-sampling" : cached && !rest ? "prefix-cache" : "batch-policies", `${begin(who)} computes ${which}: ${why.join(", and ")}.`);
    else if (total > (table?.num_prompt ?? 0)) tell("prefill", "scheduler", `${begin(who)} computes its ${plural(number, "token")} again, in one forward pass.`);
    else tell("prefill", "scheduler", `${begin(who)} computes its prompt: ${plural(number, "token")} in one forward pass.`);
  }
  if (decodes.length) tell("decode", "scheduler", `${beginList(decodes, 6)} ${decodes.length === 1 ? "decodes: one new token" : "decode: one new token each"}.`);
  const drafts = events.filter((event) => event.kind === "drafted");
  for (const [request, number] of numDrafted) {
    const draft = drafts.find((event) => event.request === request)?.draft;
    const which = areTokens(draft) ? ` (${quoted(draft, textOf)})` : "";
    tell("decode", "speculation", `${begin(short(request))} also computes ${plural(number, "draft token")}${which}: ${number === 1 ? "it is kept if the model would have chosen it" : "those that the model would have chosen are kept"}.`);
  }
  for (const event of committed ? drafts : []) {
    const who = named(short(String(event.request)));
    const accepted = event.tokens === 1
      ? `The draft token for ${who} was ${event.accepted === 1 ? "accepted" : "rejected"}`
      : `${Number(event.accepted)} of ${Number(event.tokens)} draft tokens for ${who} ${event.accepted === 1 ? "was" : "were"} accepted`;
    tell("decode", "speculation", `${accepted}${outcome(event, textOf)}.`);
  }

  if (committed) tellForks(planned, memory, nameOf, tell);
  if (entry.finished?.length)
    tell("end", "allocator", `${beginList(entry.finished.map((request) => short(String(request))))} ${entry.finished.length === 1 ? "has" : "have"} ended: every block that nobody else holds comes back ${committed ? "now" : "with this step's commit"}.`);
  if (events.some((event) => event.kind === "closed")) tellBetween(before, entry, "The trace ends here: after its last step", tell);
  if (committed) tellFreed(before, planned, memory, tell);
  if (!told.length) tell("other", "scheduler", "Nothing is computed in this step.");
  return told;
}

const areTokens = (value) => Array.isArray(value) && value.length > 0 && value.every(Number.isInteger);
const quoted = (tokens, textOf) => `“${short(textOf(tokens))}”`;

// What became of a draft: what is kept of it, and what the model chose after that. (A trace may hide tokens.)
function outcome({ accepted, draft, output }, textOf) {
  if (!areTokens(draft) || !areTokens(output)) return "";
  const kept = accepted > 0 ? `${quoted(output.slice(0, accepted), textOf)} is kept, then ` : "";
  const isRejected = accepted < draft.length && draft[accepted] !== output[accepted];
  const instead = isRejected ? ` instead of ${quoted([draft[accepted]], textOf)}` : "";
  return `: ${kept}the model chose ${quoted(output.slice(accepted), textOf)}${instead}`;
}

const requestsOf = (memory) => [...new Set([...memory.tables.values()].map((table) => table.request))];

// Requests that had tables and have none, though no decision of this step says why.
function leftBefore(before, planned, events) {
  const there = new Set(requestsOf(planned));
  for (const { kind, request } of events)
    if (kind === "preempted" || kind === "outgrown") there.add(request);
    else if (kind === "admitted") there.delete(request); // another of the same name
  return requestsOf(before).filter((request) => !there.has(request));
}

// What changed without a step.
function tellBetween(before, { events, waiting = [], committed }, begin, tell) {
  const tables = committed?.tables ?? {};
  const blocks = committed?.not_evictable ?? [];
  const gone = requestsOf(before).filter((request) => [...before.tables.values()].every((table) => table.request !== request || tables[table.name] === null));
  const back = gone.filter((request) => waiting.includes(request)).map((request) => short(request));
  const aborted = gone.filter((request) => !waiting.includes(request)).map((request) => short(request));
  const cleared = events.some(({ kind }) => kind === "cleared");
  if (back.length) tell("end", "scheduler", `${begin} a step failed, and ${listNamed(back, 6)} ${back.length === 1 ? "waits" : "wait"} again.`);
  if (aborted.length) tell("end", "scheduler", `${begin} ${listNamed(aborted, 6)} ${aborted.length === 1 ? "was" : "were"} aborted.`);
  if (cleared) tell("free", "prefix-cache", `${begin} the prefix cache was cleared, and ${freeAgain(blocks)}.`, blocks);
  if (!gone.length && !cleared) tell("end", "scheduler", `${begin} a request was aborted.`);
}

const contents = ({ request, blocks }) => [request, ...blocks].join();

// The tables of each content, by it.
function byContents(memory) {
  const found = new Map();
  for (const table of memory.tables.values()) found.set(contents(table), [...(found.get(contents(table)) ?? []), table]);
  return found;
}

// Who is forked, and who continues another.
function tellForks(planned, memory, nameOf, tell) {
  for (const table of memory.tables.values()) {
    if (planned.tables.has(table.name)) continue;
    const sibling = [...planned.tables.values()].find((other) => other.request === table.request);
    if (sibling && sibling.blocks[0] === table.blocks[0])
      tell("fork", "parallel-sampling", `${begin(nameOf(table))} is forked: it holds the same ${plural(table.blocks.length, "block")}, and nothing is copied until one of them writes.`, table.blocks);
  }
  const after = byContents(memory);
  const beams = byContents(planned);
  for (const table of memory.tables.values()) {
    const old = planned.tables.get(table.name);
    if (!old || table.blocks.every((block, i) => block === old.blocks[i])) continue;
    const [source] = beams.get(contents(table)) ?? [];
    const others = after.get(contents(table)).filter((other) => other !== table).map((other) => named(nameOf(other)));
    const which = source ? `the beam that was ${named(nameOf(source))}` : "another beam";
    const shares = others.length ? `, and shares its ${blocksText(table.blocks)} with ${list(others)}` : "";
    const dropped = after.has(contents(old)) ? "" : "; no beam continues what it held before";
    tell("fork", "beam-search", `${begin(nameOf(table))} now continues ${which}${shares}${dropped}.`, table.blocks);
  }
}

// What comes back.
function tellFreed(before, planned, memory, tell) {
  const back = [];
  memory.refs[0].forEach((refs, block) => !refs && (before.refs[0][block] || planned.refs[0][block]) && back.push(block));
  if (!back.length) return;
  const kept = back.filter((block) => memory.evictable.has(block));
  const who = kept.length < back.length ? kept.length : kept.length === 1 ? "it" : "all";
  const note = kept.length ? ` (${who} ${kept.length === 1 ? "stays" : "stay"} cached until the room is needed)` : "";
  tell("free", "allocator", `${capital(blocksText(back))} ${back.length === 1 ? "comes" : "come"} back: no sequence holds ${back.length === 1 ? "it" : "them"} any more${note}.`, back);
}

function hitBlocks(earlier, planned, request, size, copies) {
  const sources = new Map(copies.map(([from, to]) => [to, from])); // of the last hit, if its last token is computed again
  const blocks = new Set();
  for (const table of planned.tables.values())
    if (table.request === request && !earlier.has(table.name))
      for (const { block, logical, hit } of newBlocks(table, undefined, size))
        if (hit) blocks.add(block);
        else if (sources.has(block) && logical * size < table.num_computed) blocks.add(sources.get(block));
  return [...blocks];
}
