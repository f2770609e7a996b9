// The whole run in one strip: blocks in use and cached (hatched), waste as a line, and a mark wherever something happens.

import { JUMPS } from "./happenings.js";
import { hatching } from "./pool.js";

const LANE = 7;

// `kept`: a canvas for all but the mark of the step that is shown, redrawn only if something has changed.
export function drawChart(canvas, timeline, at, colours, kept) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  const scale = globalThis.devicePixelRatio || 1;
  const key = [width, height, scale, timeline.dropped + timeline.length, timeline.highest, colours.paper, timeline.requests.size].join();
  if (kept.key !== key || kept.timeline !== timeline) {
    kept.width = Math.round(width * scale);
    kept.height = Math.round(height * scale);
    const context = kept.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    drawRun(context, width, height, timeline, colours);
    Object.assign(kept, { key, timeline });
  }
  if (canvas.width !== kept.width) canvas.width = kept.width;
  if (canvas.height !== kept.height) canvas.height = kept.height;
  const context = canvas.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.drawImage(kept, 0, 0);
  context.setTransform(scale, 0, 0, scale, 0, 0);
  if (at >= 0) {
    context.fillStyle = colours.ink;
    context.fillRect(Math.min(width - 1, ((at + 0.5) / timeline.length) * width) - 1, 0, 2, height);
  }
}

function drawRun(context, width, height, timeline, colours) {
  const top = JUMPS.length * LANE + 4;
  const room = height - top - 1;
  const { stats, header } = timeline;
  const count = stats.length;
  const most = Math.min(header.num_blocks, Math.max(8, timeline.highest + 1));
  context.fillStyle = colours.shade;
  context.fillRect(0, top, width, room);
  if (!count) return;
  const columns = Math.min(count, Math.floor(width));
  const wide = width / columns;
  const hatched = hatching(context, colours);
  for (let column = 0; column < columns; column++) {
    const first = Math.floor((column * count) / columns);
    const last = Math.max(first + 1, Math.floor(((column + 1) * count) / columns));
    let used = 0;
    let cached = 0;
    const happened = JUMPS.map(() => false);
    for (let i = first; i < last; i++) {
      used = Math.max(used, stats[i].used);
      cached = Math.max(cached, stats[i].used + stats[i].evictable);
      JUMPS.forEach((kind, lane) => (happened[lane] ||= stats[i][kind] > 0));
    }
    const x = column * wide;
    context.fillStyle = hatched;
    context.fillRect(x, top + room * (1 - cached / most), wide + 0.5, (room * (cached - used)) / most);
    context.fillStyle = colours.soft;
    if (cached > used) context.fillRect(x, top + room * (1 - cached / most), wide + 0.5, 1);
    context.fillStyle = colours.hues[0];
    context.fillRect(x, top + room * (1 - used / most), wide + 0.5, (room * used) / most);
    context.fillStyle = colours.ink;
    happened.forEach((there, lane) => there && mark(context, JUMPS[lane], x + wide / 2, lane * LANE + LANE / 2 + 1));
  }
  context.beginPath();
  for (let column = 0; column < columns; column++) {
    const { waste } = stats[Math.floor((column * count) / columns)];
    const [x, y] = [column * wide + wide / 2, top + room * (1 - waste)];
    if (column) context.lineTo(x, y);
    else context.moveTo(x, y);
  }
  context.lineJoin = "round"; // in paper first: the line is seen over every colour
  for (const [colour, thick] of [[colours.paper, 5], [colours.hues[5], 2]]) {
    Object.assign(context, { strokeStyle: colour, lineWidth: thick });
    context.stroke();
  }
}

// Each kind has a shape of its own.
function mark(context, kind, x, y) {
  context.beginPath();
  if (kind === "preemptions") context.rect(x - 2.5, y - 2.5, 5, 5);
  else if (kind === "copies") context.arc(x, y, 2.6, 0, 7);
  else if (kind === "hits") context.moveTo(x, y - 3.4), context.lineTo(x + 3.4, y + 2.8), context.lineTo(x - 3.4, y + 2.8);
  else context.moveTo(x - 3.4, y - 2.8), context.lineTo(x + 3.4, y - 2.8), context.lineTo(x, y + 3.4);
  context.fill();
}
