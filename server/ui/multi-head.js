/* What the same load would take with multi-head attention: each owned page `ratio` times, drawn at the scale of the page map into a memory
   of the same size. What does not fit is drawn pale, below the memory's edge, and is cut where it is too much. */

import { OWNED } from "./cache-state.js";
import { sizeCanvas } from "./page-map.js";

const ROWS_BEYOND = 0.2; // As many rows below the edge, as a share of the memory's.

/** Draws the load of a state in the page map's grid and colours. */
export function drawMultiHead(canvas, state, { grid, colours }, ratio) {
  const rows = grid.rows + Math.max(2, Math.ceil(grid.rows * ROWS_BEYOND));
  const context = sizeCanvas(canvas, grid, rows);
  const end = rows * grid.columns;
  const paint = (first, last, colour) => {
    context.fillStyle = colour;
    paintRun(context, grid, Math.floor(first), Math.min(Math.ceil(last), end));
  };
  paint(0, state.numPages, colours.free);
  for (let page = 0, at = 0; page < state.numPages && at < end; page++) {
    if (state.kinds[page] < OWNED) continue;
    paint(at, at + ratio, colours.of(state.owners[page]));
    at += ratio;
  }
  context.fillStyle = colours.surface;
  for (let x = grid.cell - grid.gap; grid.gap && x < canvas.width; x += grid.cell) context.fillRect(x, 0, grid.gap, canvas.height);
  for (let y = grid.cell - grid.gap; grid.gap && y < canvas.height; y += grid.cell) context.fillRect(0, y, canvas.width, grid.gap);
  context.globalAlpha = 0.6;
  paint(state.numPages, end, colours.surface);
  context.globalAlpha = 1;
  drawEdge(context, canvas.width, state.numPages, grid, colours.bad);
}

/** Fills the cells first to end: a rectangle for each row. */
function paintRun(context, { columns, cell }, first, end) {
  for (let at = first; at < end; ) {
    const length = Math.min(columns - (at % columns), end - at);
    context.fillRect((at % columns) * cell, Math.floor(at / columns) * cell, length * cell, cell);
    at += length;
  }
}

/** The memory's edge: below its last row, with a step where that row is not full. */
function drawEdge(context, width, numPages, { columns, cell, gap, ratio }, colour) {
  const thick = Math.max(2 * Math.round(ratio), gap);
  const [full, x] = [Math.floor(numPages / columns) * cell, (numPages % columns) * cell];
  context.fillStyle = colour;
  context.fillRect(x, full - thick / 2, width - x, thick);
  if (x) context.fillRect(0, full + cell - thick / 2, x + thick / 2, thick);
  if (x) context.fillRect(x - thick / 2, full - thick / 2, thick, cell + thick);
}
