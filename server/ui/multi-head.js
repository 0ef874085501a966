/* What the same load would take with multi-head attention: each owned page `factor` times, drawn at the scale of the page map into a memory
   of the same size. What does not fit is drawn pale, after the memory's end, and is cut where it is too much. */

import { OWNED } from "./cache-state.js";
import { sizeCanvas } from "./page-map.js";

const ROWS_BEYOND = 0.2; // Rows that are drawn after the memory's end, as a share of its own.

/** Draws the load of a state in the page map's grid and colours. Returns the number of pages that it would take. */
export function drawMultiHead(canvas, state, { grid, colours }, factor) {
  const rows = grid.rows + Math.max(2, Math.ceil(grid.rows * ROWS_BEYOND));
  const context = sizeCanvas(canvas, grid, rows);
  const end = rows * grid.columns;
  const paint = (first, last, colour) => {
    context.fillStyle = colour;
    paintRun(context, grid, Math.floor(first), Math.min(Math.ceil(last), end));
  };
  let needed = 0;
  paint(0, state.numPages, colours.free);
  for (let page = 0; page < state.numPages; page++) {
    if (state.kinds[page] < OWNED) continue;
    if (needed < end) paint(needed, needed + factor, colours.of(state.owners[page]));
    needed += factor;
  }
  context.fillStyle = colours.surface;
  for (let x = grid.cell - grid.gap; grid.gap && x < canvas.width; x += grid.cell) context.fillRect(x, 0, grid.gap, canvas.height);
  for (let y = grid.cell - grid.gap; grid.gap && y < canvas.height; y += grid.cell) context.fillRect(0, y, canvas.width, grid.gap);
  context.globalAlpha = 0.6;
  paint(state.numPages, end, colours.surface);
  return Math.ceil(needed);
}

/** Fills the cells first to end: a rectangle for each row. */
function paintRun(context, { columns, cell }, first, end) {
  for (let at = first; at < end; ) {
    const length = Math.min(columns - (at % columns), end - at);
    context.fillRect((at % columns) * cell, Math.floor(at / columns) * cell, length * cell, cell);
    at += length;
  }
}
