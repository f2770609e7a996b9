// The memory of a run, and how a line of a trace changes it. The same rules as viewer/delta.py and replay.py:
// what is not in the pool, not an integer or does not continue the trace is refused with one clear line.

export class TraceError extends Error {}

const VERSION = 2;
const MOST_BLOCKS = 1 << 24;
const SIZES = { block_size: 1, num_blocks: 1, num_host_blocks: 0 };

export function shown(value) {
  const text = JSON.stringify(value) ?? String(value);
  return text.length > 60 ? `${text.slice(0, 57)}…` : text;
}

const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

export function checkHeader(header) {
  if (!isObject(header) || header.format !== "minipaged-trace")
    throw new TraceError("This is not a trace of minipaged: its first line is not a trace header. Make one with --trace FILE.");
  if (header.version !== VERSION) {
    const fix = header.version > VERSION ? "open it with a newer minipaged" : "record the run again with --trace FILE";
    throw new TraceError(`This trace is of version ${shown(header.version)}, this viewer reads version ${VERSION}: ${fix}.`);
  }
  for (const [name, least] of Object.entries(SIZES)) {
    const value = header[name];
    if (!Number.isSafeInteger(value) || value < least || value > MOST_BLOCKS)
      throw new TraceError(`Line 1: ${name} is ${shown(value)}; it must be an integer from ${least} to ${MOST_BLOCKS}.`);
  }
  return header;
}

function refuse(message) {
  throw new TraceError(message);
}

function checkCounts(values, what, name = "") {
  if (!Array.isArray(values)) refuse(`${what}${name && shown(name)} is ${shown(values)}, not a list`);
  for (let i = 0; i < values.length; i++)
    if (!isCount(values[i])) refuse(`${what}${name && shown(name)} has ${shown(values[i])}, not an integer of at least 0`);
}

// A list that shares its beginning with its past: states of many moments keep (items, length) of one array.
class Shared {
  constructor(items, length) {
    this.items = items;
    this.length = length;
  }

  changed(keep, added, name) {
    if (keep > this.length) refuse(`token_ids of ${shown(name)}: ${keep} of ${this.length} are kept`);
    let items = this.items;
    for (let i = 0; i < added.length && keep + i < items.length; i++)
      if (items[keep + i] !== added[i]) {
        items = items.slice(0, keep);
        break;
      }
    for (let i = items.length - keep; i < added.length; i++) items.push(added[i]);
    return new Shared(items, keep + added.length);
  }

  slice(start, stop) {
    return this.items.slice(start, Math.min(stop ?? this.length, this.length));
  }
}

const EMPTY = new Shared([], 0);
const COUNTS = ["num_tokens", "num_computed", "num_prompt"];

function emptyTable(name) {
  const cut = name.lastIndexOf("/");
  const position = Number(name.slice(cut + 1));
  if (!(cut >= 0 && isCount(position))) refuse(`${shown(name)} is not the name of a sequence`);
  return {
    name, request: name.slice(0, cut), position, on_host: false, blocks: [],
    num_tokens: 0, num_computed: 0, num_prompt: 0, tokens: EMPTY,
  };
}

// Slots of a logical block that have a token.
export const filledSlots = (table, logical, size) => Math.max(0, Math.min(size, table.num_tokens - logical * size));

export class Memory {
  constructor(header, tables = new Map(), evictable = new Set()) {
    this.header = header;
    this.tables = tables; // name -> table, device and host
    this.evictable = evictable; // device blocks that only the prefix cache remembers
    this.refs = [new Int32Array(header.num_blocks), new Int32Array(header.num_host_blocks)];
    this.used = [0, 0]; // blocks with an owner: device, host
    this.highest = -1; // last device block that was ever not free
    for (const table of tables.values()) this.count(table, 1);
    for (const block of evictable) this.highest = Math.max(this.highest, block);
  }

  // A state to come back to: later changes do not touch it.
  kept() {
    return { tables: [...this.tables.values()].map((table) => ({ ...table })), evictable: [...this.evictable] };
  }

  static from(header, kept) {
    return new Memory(header, new Map(kept.tables.map((table) => [table.name, { ...table }])), new Set(kept.evictable));
  }

  count(table, by) {
    const place = table.on_host ? 1 : 0;
    const refs = this.refs[place];
    for (const block of table.blocks) {
      const before = refs[block];
      refs[block] = before + by;
      if (before + by === 0) this.used[place] -= 1;
      else if (before === 0) this.used[place] += 1;
      if (!place && block > this.highest) this.highest = block;
    }
  }

  reach(scheduled, field) {
    for (const [request, position, start, count] of scheduled) {
      const table = this.tables.get(`${request}/${position}`);
      if (table && table[field] < start + count) table[field] = start + count;
    }
  }

  apply(change) {
    if (!isObject(change)) refuse(`a change is ${shown(change)}`);
    for (const [name, entry] of Object.entries(change.tables ?? {})) {
      const before = this.tables.get(name);
      if (entry === null) {
        if (before === undefined) refuse(`${shown(name)} ends, but was not there`);
        this.count(before, -1);
        this.tables.delete(name);
        continue;
      }
      if (!isObject(entry)) refuse(`table ${shown(name)} is ${shown(entry)}`);
      this.changeTable(before ?? emptyTable(name), entry, before !== undefined);
    }
    for (const key of ["evictable", "not_evictable"]) {
      const blocks = change[key] ?? [];
      checkCounts(blocks, key);
      for (const block of blocks) {
        if (block >= this.header.num_blocks) refuse(`evictable block ${block} is not in the pool`);
        if (key === "evictable") this.evictable.add(block);
        else this.evictable.delete(block);
        if (block > this.highest) this.highest = block;
      }
    }
  }

  changeTable(table, entry, known) {
    const moved = entry.blocks !== undefined || entry.on_host !== undefined;
    if (moved && known) this.count(table, -1);
    for (const field of COUNTS)
      if (entry[field] !== undefined) {
        if (!isCount(entry[field])) refuse(`${shown(table.name)} has ${field} ${shown(entry[field])}`);
        table[field] = entry[field];
      }
    if (entry.on_host !== undefined) table.on_host = Boolean(entry.on_host);
    for (const field of ["blocks", "token_ids"]) {
      if (entry[field] === undefined) continue;
      const what = `${field} of `;
      if (!(Array.isArray(entry[field]) && isCount(entry[field][0]))) refuse(`${what}${shown(table.name)} are ${shown(entry[field])}`);
      const [keep, added] = entry[field];
      checkCounts(added, what, table.name);
      if (field === "token_ids") table.tokens = table.tokens.changed(keep, added, table.name);
      else {
        if (keep > table.blocks.length) refuse(`${what}${shown(table.name)}: ${keep} of ${table.blocks.length} are kept`);
        table.blocks = table.blocks.slice(0, keep).concat(added);
      }
    }
    if (moved) {
      const size = this.refs[table.on_host ? 1 : 0].length;
      for (const block of table.blocks)
        if (block >= size) refuse(`${shown(table.name)} has block ${block}, which is not in the pool`);
      this.count(table, 1);
    }
    if (!known) this.tables.set(table.name, table);
  }

  plan(entry) {
    this.reach(entry.scheduled ?? [], "num_tokens");
    this.apply(entry.planned ?? {});
  }

  commit(entry) {
    this.reach(entry.scheduled ?? [], "num_computed");
    this.apply(entry.committed ?? {});
  }

  // The share of the slots of held device blocks that has no token; a shared block counts once.
  waste() {
    const size = this.header.block_size;
    const shared = new Map(); // block -> most slots that a holder has filled
    let filled = 0;
    for (const table of this.tables.values()) {
      if (table.on_host) continue;
      const blocks = table.blocks;
      for (let i = blocks.length - 1; i >= 0; i--) {
        const here = filledSlots(table, i, size);
        if (this.refs[0][blocks[i]] === 1) filled += here;
        else if ((shared.get(blocks[i]) ?? -1) < here) shared.set(blocks[i], here);
      }
    }
    for (const here of shared.values()) filled += here;
    const held = this.used[0] * size;
    return held && 1 - filled / held;
  }

  // Every block of the device pool or of the host pool.
  blocks(onHost = false) {
    const size = this.header.block_size;
    const views = Array.from(this.refs[onHost ? 1 : 0], (refs, id) => ({
      id, refs, owners: [], filled: refs ? 0 : null, cached: !onHost && this.evictable.has(id),
    }));
    for (const table of this.tables.values()) {
      if (table.on_host !== onHost) continue;
      table.blocks.forEach((block, logical) => {
        const view = views[block];
        view.owners.push(table.name);
        view.filled = Math.max(view.filled, filledSlots(table, logical, size));
      });
    }
    return views;
  }
}

const isScheduled = (item) =>
  Array.isArray(item) && item.length === 5 && typeof item[0] === "string" &&
  isCount(item[1]) && isCount(item[2]) && isCount(item[3]) && isCount(item[4]);
const isMove = (pair) => Array.isArray(pair) && pair.length === 2 && isCount(pair[0]) && isCount(pair[1]);
const isEvent = (event) => isObject(event) && typeof event.kind === "string";
const LISTS = { scheduled: isScheduled, swap_out: isMove, swap_in: isMove, copies: isMove, evicted: isCount, events: isEvent, finished: () => true, waiting: (id) => typeof id === "string" };

export function checkEntry(entry) {
  if (!isObject(entry)) refuse("it is not a JSON object");
  for (const name of ["step", "num_waiting"]) if (!isCount(entry[name])) refuse(`${name} is ${shown(entry[name])}`);
  for (const name in LISTS) {
    const items = entry[name];
    if (items === undefined) continue;
    if (!Array.isArray(items)) refuse(`${name} is ${shown(items)}`);
    for (const item of items) if (!LISTS[name](item)) refuse(`${name} has ${shown(item)}`);
  }
  return entry;
}
