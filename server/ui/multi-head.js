/* What the same load would take with multi-head attention: each owned page several times, drawn at the scale of the page map into a memory
   of the same size. What does not fit is drawn pale, after the memory's end, and is cut where it is too much. */

import { OWNED } from "./cache-state.js";
import { counted, el, sized } from "./dom.js";
import { sizeCanvas } from "./page-map.js";

const ROWS_BEYOND = 0.2; // Rows that are drawn after the memory's end, as a share of its own.

export class MultiHead {
  constructor() {
    this.title = el("h2", { text: "Multi-head attention, same load" });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.badge = el("span", { hidden: true });
    this.words = el("p", { class: "quiet" });
    this.element = el("section", { class: "card" }, this.title, el("div", { class: "frame" }, this.canvas, this.badge), this.words);
  }

  /** Shows the load of a state in the page map's grid and colours, each page `factor` times. */
  show(state, { grid, colours, shown, pageBytes }, factor) {
    const needed = draw(this.canvas, state, grid, colours, shown, factor);
    const [times, beyond] = [Number(factor.toPrecision(3)), needed - state.numPages];
    Object.assign(this.badge, { textContent: `× ${times}`, hidden: false });
    const memory = pageBytes ? `, ${sized(needed * pageBytes)}` : "";
    this.title.textContent = `Multi-head attention, same load: ${counted(needed, "page")}${memory}`;
    const fit = beyond > 0 ? `${beyond} do not fit; as many as there is room for are drawn pale` : `${needed} of ${state.numPages}`;
    this.words.textContent = `With a key and a value for every query head, the same tokens take ${times} times as many pages: ${fit}.`;
  }
}

/** Draws the load of a state. Returns the number of pages that it would take. */
function draw(canvas, state, grid, colours, shown, factor) {
  const { columns, cell, gap } = grid;
  const rows = grid.rows + (shown < state.numPages ? 0 : Math.max(2, Math.ceil(grid.rows * ROWS_BEYOND)));
  const context = sizeCanvas(canvas, grid, rows);
  const end = rows * columns;
  const paint = (first, last, colour) => {
    context.fillStyle = colour;
    const stop = Math.min(Math.ceil(last), end);
    for (let at = Math.floor(first); at < stop; at += columns - (at % columns)) { // A rectangle for each row.
      const length = Math.min(columns - (at % columns), stop - at);
      context.fillRect((at % columns) * cell, Math.floor(at / columns) * cell, length * cell, cell);
    }
  };
  let needed = 0;
  paint(0, shown, colours.free);
  for (let page = 0; page < state.numPages; page++) {
    if (state.kinds[page] < OWNED) continue;
    if (needed < end) paint(needed, needed + factor, colours[`hue-${state.hueOf(page)}`]);
    needed += factor;
  }
  context.fillStyle = colours.surface;
  for (let x = cell - gap; gap && x < canvas.width; x += cell) context.fillRect(x, 0, gap, canvas.height);
  for (let y = cell - gap; gap && y < canvas.height; y += cell) context.fillRect(0, y, canvas.width, gap);
  context.globalAlpha = 0.6;
  paint(shown, end, colours.surface);
  return Math.ceil(needed);
}
