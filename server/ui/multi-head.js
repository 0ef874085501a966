/* What the same load would take with multi-head attention: each owned page several times, at the scale of the page map. What does not fit
   into the memory is drawn pale, after its end, and is cut where it is too much. */

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
    const fit = beyond > 0 ? `${counted(beyond, "page")} too many, drawn pale as far as there is room`
      : `${needed.toLocaleString("en")} of ${counted(state.numPages, "page")}`;
    this.words.textContent = `With a key and a value for every query head, the same tokens take ${times} times the memory: ${fit}.`;
  }
}

/** Draws the load of a state. Returns the number of pages that it would take. */
function draw(canvas, state, { columns, cell, gap, ratio, rows: least }, colours, shown, factor) {
  const rows = least + (shown < state.numPages ? 0 : Math.max(2, Math.ceil(least * ROWS_BEYOND)));
  const context = sizeCanvas(canvas, { columns, cell, ratio }, rows);
  const owned = Array.from(state.kinds.keys()).filter((page) => state.kinds[page] >= OWNED);
  const needed = Math.ceil(owned.length * factor);
  const end = shown < state.numPages ? shown : Math.max(shown, Math.min(needed, rows * columns));
  for (let at = 0; at < end; at++) {
    context.globalAlpha = at < shown ? 1 : 0.4;
    context.fillStyle = at < needed ? colours[`hue-${state.hueOf(owned[Math.floor(at / factor)])}`] : colours.free;
    context.fillRect((at % columns) * cell, Math.floor(at / columns) * cell, cell - gap, cell - gap);
  }
  return needed;
}
