// The pool as a grid on a canvas, a cell per block. Colour is never the only sign: owners have names or are named
// when a block is chosen, a bar says how full a block is, cached blocks are hatched.

import { filledSlots } from "./memory.js";

const FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif";
const GAP_BETWEEN_POOLS = 30;
const TALLEST = 460;
export const HUES = 6;

// The colours of an element's theme, resolved by a property that uses them.
export function palette(element) {
  const probe = element.appendChild(document.createElement("i"));
  const value = (name) => {
    probe.style.color = `var(--mpv-${name})`;
    return getComputedStyle(probe).color;
  };
  const several = (name) => Array.from({ length: HUES }, (_, i) => value(`${name}${i}`));
  const colours = {
    paper: value("paper"), ink: value("ink"), soft: value("soft"), line: value("line"), shade: value("shade"),
    tints: several("tint"), hues: several("hue"),
  };
  probe.remove();
  return colours;
}

function cellSize(width, height, count) {
  const largest = width < 500 ? 58 : 74;
  let size = Math.min(largest, Math.floor(Math.sqrt((width * height) / Math.max(1, count))));
  while (size > 2 && Math.ceil(count / Math.floor(width / size)) * size > height) size -= 1;
  return Math.max(2, size);
}

export class Pool {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = 0;
  }

  // Fits the cells of the first `counts[0]` device blocks and `counts[1]` host blocks into a width of pixels.
  layout(width, counts, dense) {
    const [device, host] = counts;
    const height = dense ? 320 : TALLEST;
    const size = cellSize(width, host ? height * (device / (device + host)) : height, device);
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(device / columns);
    const hostTop = host ? rows * size + GAP_BETWEEN_POOLS : 0;
    const total = host ? hostTop + Math.ceil(host / columns) * size : rows * size;
    Object.assign(this, { size, columns, counts, hostTop, width, height: Math.max(size, total) + 2 });
    const scale = globalThis.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
  }

  rect(block, onHost = false) {
    const { size, columns } = this;
    return { x: (block % columns) * size, y: Math.floor(block / columns) * size + (onHost ? this.hostTop : 0), size };
  }

  // The block at a place of the canvas: {block, onHost}, or null.
  blockAt(x, y) {
    const onHost = Boolean(this.counts[1]) && y >= this.hostTop;
    const column = Math.floor(x / this.size);
    const row = Math.floor((y - (onHost ? this.hostTop : 0)) / this.size);
    const block = row * this.columns + column;
    const there = column >= 0 && column < this.columns && row >= 0 && block < this.counts[onHost ? 1 : 0];
    return there ? { block, onHost } : null;
  }

  // scene: {memory, chosen, colours, hueOf, nameOf, selected, marks, progress}
  draw(scene) {
    const { context, width, height } = this;
    const { colours } = scene;
    context.clearRect(0, 0, width, height);
    for (const onHost of [false, true]) this.drawBlocks(scene, onHost);
    if (this.counts[1]) {
      context.fillStyle = colours.soft;
      context.font = `13px ${FONT}`;
      context.textAlign = "left";
      context.textBaseline = "alphabetic";
      context.fillText("Host memory (swapped out)", 0, this.hostTop - 9);
    }
    if (scene.selected) this.outline(this.rect(scene.selected.block, scene.selected.onHost), colours.ink, 3);
  }

  drawBlocks({ memory, chosen, colours, hueOf, nameOf, marks, progress }, onHost) {
    const { context, size } = this;
    const place = onHost ? 1 : 0;
    const count = this.counts[place];
    const slots = memory.header.block_size;
    const owner = new Int32Array(count).fill(-1); // place of the first table that holds it
    const mixed = new Uint8Array(count); // 1: tables of several colours, 2: of several requests
    const filled = new Int32Array(count);
    const tables = [...memory.tables.values()].filter((table) => table.on_host === onHost);
    tables.forEach((table, number) => {
      table.blocks.forEach((block, logical) => {
        if (block >= count) return;
        if (owner[block] < 0) owner[block] = number;
        else {
          const first = tables[owner[block]];
          if (hueOf(first) !== hueOf(table)) mixed[block] = Math.max(mixed[block], 1);
          if (first.request !== table.request) mixed[block] = 2;
        }
        filled[block] = Math.max(filled[block], filledSlots(table, logical, slots));
      });
    });
    const gap = size >= 30 ? 4 : size >= 8 ? 1 : size >= 4 ? 0.5 : 0;
    const inner = size - gap;
    const large = size >= 34;
    const hatched = hatching(context, colours);
    const theirs = chosen === null ? null : new Set(memory.tables.get(chosen)?.on_host === onHost ? memory.tables.get(chosen).blocks : []);
    context.lineWidth = 1;
    for (let block = 0; block < count; block++) {
      const { x, y } = this.rect(block, onHost);
      const refs = memory.refs[place][block];
      const strength = theirs === null || theirs.has(block) ? 1 : 0.3; // the chosen sequence stands out
      context.globalAlpha = strength;
      const grown = marks.fresh.has(block) && !onHost && progress < 1 ? 0.4 + 0.6 * progress : 1;
      const inset = ((1 - grown) * inner) / 2;
      const left = x + gap / 2 + inset;
      const top = y + gap / 2 + inset;
      const side = inner * grown;
      if (!refs) {
        const cached = !onHost && memory.evictable.has(block);
        if (size >= 5) {
          context.globalAlpha = strength < 1 && !cached ? 0.4 : strength;
          context.fillStyle = colours.line;
          context.fillRect(left, top, side, side);
          context.globalAlpha = 1;
          context.fillStyle = cached ? hatched : colours.paper;
          context.fillRect(left + 1, top + 1, side - 2, side - 2);
        } else {
          context.fillStyle = cached ? colours.line : colours.shade;
          context.fillRect(left, top, Math.max(1, side - 0.5), Math.max(1, side - 0.5));
        }
      } else {
        const hue = mixed[block] ? -1 : hueOf(tables[owner[block]]);
        const share = filled[block] / slots;
        context.fillStyle = hue < 0 ? colours.shade : colours.tints[hue];
        context.fillRect(left, top, side, side);
        context.fillStyle = colours.paper; // a bar stands out from paper, not from every tint
        if (large) context.fillRect(left, top + side - 7, side, 7);
        else if (size >= 8 && share < 1) context.fillRect(left, top + side * (1 - share) - 1, side, 1);
        context.fillStyle = hue < 0 ? colours.ink : colours.hues[hue];
        if (large) {
          context.fillRect(left, top + side - 6, side * share, 6);
          context.strokeStyle = context.fillStyle;
          context.lineWidth = 1;
          context.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
        } else context.fillRect(left, top + side * (1 - share), side, side * share);
        if (refs > 1 && !large && size >= 6) {
          context.fillStyle = colours.paper;
          context.beginPath();
          context.arc(left + side / 2, top + side / 2, side / 5, 0, 7);
          context.fill();
        }
      }
      context.globalAlpha = 1; // words are read in pale cells, too
      if (large) this.words(block, refs, { x: left, y: top, side, paler: strength < 1 }, colours, () => {
        if (!refs) return !onHost && memory.evictable.has(block) ? "cached" : "";
        const table = tables[owner[block]];
        return mixed[block] === 2 ? "shared" : refs === 1 ? nameOf(table) : table.request;
      });
      context.globalAlpha = strength < 1 ? 0.55 : 1;
      if (!onHost && marks.fresh.has(block) && size >= 5) this.outline({ x, y, size }, colours.ink, size >= 30 ? 2 : 1.2);
      if (!onHost && marks.hit.has(block) && size >= 5) this.outline({ x, y, size }, colours.ink, 2, [4, 3]);
      if (!onHost && marks.evicted.has(block) && size >= 8) this.cross({ x: left, y: top, size: side }, colours.ink);
    }
    context.globalAlpha = 1;
  }

  // In a small cell, the reference count stands beside the name if it has no room beside the number.
  words(block, refs, { x, y, side, paler }, colours, name) {
    const { context } = this;
    const small = side < 44;
    context.textBaseline = "top";
    context.textAlign = "left";
    context.font = `${small ? 10 : 11}px ${FONT}`;
    context.fillStyle = refs && !paler ? colours.ink : colours.soft;
    const [left, top] = small ? [x + 3, y + 3] : [x + 5, y + 4];
    const write = (text, ...at) => {
      if (!refs) {
        Object.assign(context, { strokeStyle: colours.paper, lineWidth: 4, lineJoin: "round" }); // over the hatching
        context.strokeText(text, ...at);
      }
      context.fillText(text, ...at);
    };
    write(String(block), left, top);
    const count = refs > 1 ? `×${refs}` : "";
    const end = left + context.measureText(String(block)).width;
    context.font = `bold ${small ? 10 : 11}px ${FONT}`;
    const above = end + context.measureText(count).width + 6 <= x + side;
    if (above) {
      context.textAlign = "right";
      context.fillText(count, x + side - (small ? 3 : 4), top);
    }
    const text = name();
    if (!text && (above || !count)) return;
    context.textAlign = "center";
    context.font = refs ? `bold ${small ? 12 : 13}px ${FONT}` : `11px ${FONT}`;
    const most = Math.max(2, Math.floor(side / 8.5));
    let cut = refs && text.length > most ? `${text.slice(0, most - 1)}…` : text;
    if (!above) cut = context.measureText(cut + count).width < side - 2 ? cut + count : count;
    if (refs || context.measureText(cut).width < side - 4) write(cut, x + side / 2, y + Math.max(side / 2 - 4, 14));
  }

  outline({ x, y, size }, colour, width, dash = []) {
    const { context } = this;
    context.setLineDash(dash);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, size - width, size - width);
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  cross({ x, y, size }, colour) {
    const { context } = this;
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.beginPath();
    const inset = size * 0.72;
    context.moveTo(x + inset, y + 4);
    context.lineTo(x + size - 4, y + size - inset);
    context.moveTo(x + size - 4, y + 4);
    context.lineTo(x + inset, y + size - inset);
    context.stroke();
    context.lineWidth = 1;
  }
}

// The pattern of what is cached.
export function hatching(canvas, { shade, line }) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const context = tile.getContext("2d");
  context.fillStyle = shade;
  context.fillRect(0, 0, 8, 8);
  context.strokeStyle = line;
  context.lineWidth = 1.4;
  context.beginPath();
  for (const shift of [-8, 0, 8]) {
    context.moveTo(shift - 1, 9);
    context.lineTo(shift + 9, -1);
  }
  context.stroke();
  return canvas.createPattern(tile, "repeat");
}

// An arrow along a curve, as far as `progress` (0 to 1); `margin`: how far from both places it stays.
export function arrow(context, start, end, colour, progress, bend, width, margin = 0) {
  const middle = { x: (start.x + end.x) / 2 - (end.y - start.y) * bend, y: (start.y + end.y) / 2 + (end.x - start.x) * bend };
  const beside = (place) => {
    const [x, y] = [middle.x - place.x, middle.y - place.y];
    const share = Math.min(0.5, margin / (Math.hypot(x, y) || 1));
    return { x: place.x + x * share, y: place.y + y * share };
  };
  const [from, to] = [beside(start), beside(end)];
  const at = (t) => ({
    x: (1 - t) ** 2 * from.x + 2 * t * (1 - t) * middle.x + t * t * to.x,
    y: (1 - t) ** 2 * from.y + 2 * t * (1 - t) * middle.y + t * t * to.y,
  });
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  context.moveTo(from.x, from.y);
  for (let i = 1; i <= 16; i++) {
    const point = at((i / 16) * progress);
    context.lineTo(point.x, point.y);
  }
  context.stroke();
  const tip = at(progress);
  const back = at(Math.max(0, progress - 0.06));
  const angle = Math.atan2(tip.y - back.y, tip.x - back.x);
  context.beginPath();
  context.moveTo(tip.x, tip.y);
  for (const side of [-0.45, 0.45]) context.lineTo(tip.x - 9 * Math.cos(angle + side), tip.y - 9 * Math.sin(angle + side));
  context.fill();
}
