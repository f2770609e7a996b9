// What a step does, counted while a trace is read (for charts and jumps) and explained when it is shown.

export const JUMPS = ["preemptions", "copies", "hits", "evictions"];

// Blocks of a table that it did not hold before: {block, logical, hit}. A hit is a block of the prefix cache
// (or of another sequence) that has its tokens already; a commit fills others, so only the plan tells them apart.
export function newBlocks(table, before, size) {
  const held = before && before.on_host === table.on_host ? before.blocks : [];
  const added = [];
  for (let logical = 0; logical < table.blocks.length; logical++) {
    if (table.blocks[logical] === held[logical]) continue;
    added.push({ block: table.blocks[logical], logical, hit: !before && (logical + 1) * size <= table.num_computed });
  }
  return added;
}

// Blocks of a group that is admitted in this plan, which its first sequences compute for the others too: they look
// like hits, but the cache does not have them.
export function sharedAnew(tables, request, size) {
  const added = [...tables.values()].filter((table) => table.request === request).flatMap((table) => newBlocks(table, undefined, size));
  const computed = new Set(added.filter(({ hit }) => !hit).map(({ block }) => block));
  return added.filter(({ block, hit }) => hit && computed.has(block)).map(({ block }) => block);
}

// Requests that this plan admits. Their tables are new, also if they had some before: then a step failed.
export function admitted({ events = [] }) {
  return new Set(events.filter(({ kind, mode }) => kind === "admitted" || (kind === "resumed" && mode !== "swap")).map(({ request }) => request));
}

// Whether the token that is scheduled was chosen in the last step of its sequence. The last one of a prompt or of a
// recomputation has had its slot since the admission; `old` is the table before the step.
export function isDecode(old, [, , start, count, candidates]) {
  return count === 1 && candidates > 0 && old !== undefined && old.num_computed === old.num_tokens && start >= old.num_prompt;
}

// Whether a commit gives blocks to a table or takes them, by a fork or an end.
function changesBlocks({ tables = {}, evictable, not_evictable } = {}) {
  const moved = Object.values(tables ?? {}).some((table) => !table || table.blocks !== undefined || table.on_host !== undefined);
  return moved || Boolean(evictable?.length || not_evictable?.length);
}

// Applies the plan of an entry to the memory before it and counts what it does.
export function happenings(memory, entry, last) {
  const stats = { step: entry.step, preemptions: 0, copies: entry.copies?.length ?? 0, hits: 0, evictions: entry.evicted?.length ?? 0 };
  stats.cached = 0;
  for (const event of entry.events ?? []) {
    if (event.kind === "preempted") stats.preemptions += 1;
  }
  const anew = admitted(entry);
  stats.decode = stats.prefill = 0;
  for (const scheduled of entry.scheduled ?? [])
    if (!anew.has(scheduled[0]) && isDecode(memory.tables.get(`${scheduled[0]}/${scheduled[1]}`), scheduled)) stats.decode += 1;
    else stats.prefill += scheduled[3];
  memory.plan(entry);
  for (const event of entry.events ?? []) {
    if (!(event.cached_tokens > 0)) continue;
    const cached = event.cached_tokens - memory.header.block_size * sharedAnew(memory.tables, event.request, memory.header.block_size).length;
    if (cached > 0) {
      stats.hits += 1;
      stats.cached += cached;
    }
  }
  stats.commits = changesBlocks(entry.committed);
  stats.used = memory.used[0];
  stats.host = memory.used[1];
  stats.evictable = memory.evictable.size;
  stats.waste = memory.waste();
  stats.waiting = (entry.waiting ?? last?.waiting ?? []).slice(0, entry.num_waiting); // the first ids of the queue
  stats.highest = Math.max(memory.highest, last?.highest ?? -1);
  return stats;
}
