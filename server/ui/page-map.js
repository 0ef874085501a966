/* The page map: pages of the KV cache as cells of a canvas, as far as they are in use. Once a frame, the cells that have changed are drawn.

   Invariant: what is drawn follows from the CacheState, the followed sequence and what was just written. It knows no network. */

import { CACHED, FREE, OWNED, SHARED, phaseOf } from "./cache-state.js";
import { counted, el, setText, sized } from "./dom.js";
import { colours } from "./theme.js";

const [LARGEST_CELL, SMALLEST_CELL, TALLEST] = [26, 2, 340]; // CSS pixels; the last is the map's height.
const MARKED_CELL = 5; // Device pixels: smaller cells have no gaps and marks.
const LEAST_SHOWN = 256; // Pages: so many cells have their largest size.
const HIGHLIGHT_MS = 350;
const DIMMED = 0.25;
const LABEL = "Page map. Arrow keys move over the pages, Enter follows the sequence that owns one.";
const HINT = "Point at a page, or move over the map with the arrow keys; click or Enter follows its sequence.";

/** The grid that shows `numPages` cells in `width` CSS pixels: columns, rows, and the sizes of a cell and of its gap in device pixels. */
function gridOf(numPages, width, ratio) {
  let cell = Math.round(LARGEST_CELL * ratio);
  const columnsOf = () => Math.max(1, Math.floor((width * ratio) / cell));
  while (cell > SMALLEST_CELL * ratio && Math.ceil(numPages / columnsOf()) * cell > TALLEST * ratio) cell -= 1;
  const columns = columnsOf();
  return { columns, rows: Math.ceil(numPages / columns), cell, gap: cell < MARKED_CELL ? 0 : Math.max(1, Math.round(cell / 12)), ratio };
}

/** How many pages to show where `needed` are to be seen: a power of two, which is kept until a quarter of it is enough. */
function regionOf(needed, before, numPages) {
  const least = Math.max(LEAST_SHOWN, 2 ** Math.ceil(Math.log2(needed || 1)));
  return Math.min(numPages, least < before && 4 * needed > before ? before : least);
}

/** The left and upper edge of a cell in device pixels. */
const placeOf = (page, { columns, cell }) => [(page % columns) * cell, Math.floor(page / columns) * cell];

/** Gives a canvas room for so many rows, which empties it, and returns its drawing context. */
export function sizeCanvas(canvas, { columns, cell, ratio }, rows) {
  const [width, height] = [columns * cell, rows * cell];
  Object.assign(canvas, { width, height });
  Object.assign(canvas.style, { width: `${width / ratio}px`, height: `${height / ratio}px` });
  return canvas.getContext("2d");
}

/** What a page holds, in words. */
function describe(state, page) {
  const kind = state.kinds[page];
  if (kind === FREE) return `Page ${page}: free.`;
  if (kind === CACHED) return `Page ${page}: kept as a prefix; no open request holds it.`;
  const [id, first] = [state.owners[page], state.positions[page]];
  const sequence = state.sequences.get(id);
  const stored = Math.min(first + state.pageSize, sequence?.numComputed ?? 0);
  const tokens = stored > first ? `tokens ${first} to ${stored - 1}` : `reserved for tokens from ${first} on`;
  const request = sequence?.request ? ` of request ${sequence.request}` : "";
  const others = kind === SHARED ? "shared by several, first " : "";
  return `Page ${page}: ${others}sequence ${id}${request}, ${tokens}, ${sequence ? phaseOf(sequence) : "ended"}.`;
}

export class PageMap {
  /** `follow` is told the id of a sequence that is chosen, or null; `laidOut` is called when the grid has changed; `signal` ends it. */
  constructor({ follow, laidOut, signal }) {
    Object.assign(this, { follow, laidOut, state: null, grid: null, followed: null, dirty: new Set(), written: new Set() });
    this.at = null; // The page under the cursor.
    Object.assign(this, { shown: 0, factor: 1, pageBytes: 0, scale: el("p", { class: "quiet" }) });
    this.isStill = matchMedia("(prefers-reduced-motion: reduce)");
    this.readout = el("p", { class: "quiet readout", text: HINT });
    this.spoken = el("p", { class: "offscreen", "aria-live": "polite" }); // Unlike the readout it changes only when the cursor moves.
    this.canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": LABEL, on: {
      pointermove: (event) => this.#place(this.#pageAt(event)),
      pointerdown: (event) => this.#place(this.#pageAt(event)),
      pointerleave: () => document.activeElement === this.canvas || this.#place(null),
      focus: () => this.#place(this.at ?? 0),
      blur: () => this.#place(null),
      keydown: (event) => this.#onKey(event),
      click: () => this.#choose(),
    } });
    this.cursor = el("div", { class: "cursor", hidden: true });
    this.frame = el("div", { class: "frame" }, this.canvas, this.cursor, this.spoken);
    new ResizeObserver(() => this.layOut()).observe(this.frame);
    document.addEventListener("themechange", () => this.layOut(), { signal });
  }

  /** Shows a state to which an event was applied; `change` is what `apply` returned. */
  show(state, change) {
    this.state = state;
    if (this.numPages !== state.numPages || this.#wanted() !== this.shown) this.layOut();
    this.#highlight(this.isStill.matches ? [] : change.written);
    this.#draw(change.whole ? Array(state.numPages).keys() : change.pages);
    clearTimeout(this.fading);
    this.fading = setTimeout(() => this.#highlight([]), HIGHLIGHT_MS);
    this.#tell();
  }

  /** Computes grid and colours, and draws every cell; those of the sequence `followed` stand out, if it is not null. */
  layOut(followed = this.followed) {
    this.followed = followed;
    if (!this.state?.numPages || !this.frame.clientWidth) return;
    this.numPages = this.state.numPages;
    this.colours = colours();
    this.shown = this.#wanted();
    this.grid = gridOf(this.shown, this.frame.clientWidth, devicePixelRatio || 1);
    this.context = sizeCanvas(this.canvas, this.grid, this.grid.rows);
    this.#draw(Array(this.shown).keys());
    this.#place(this.at);
    this.setScale(this.factor, this.pageBytes);
    this.laidOut();
  }

  /** The number of pages to show. */
  #wanted() {
    const { numPages, extent } = this.state;
    const owned = this.state.counts().slice(OWNED).reduce((sum, count) => sum + count);
    return regionOf(Math.max(extent, owned * this.factor), this.shown, numPages);
  }

  /** Says what a cell is. `factor`: how many times the owned pages are to have room; `pageBytes`: 0 while it is not known. */
  setScale(factor, pageBytes) {
    Object.assign(this, { factor, pageBytes });
    if (!this.grid) return;
    const { numPages, shown, state } = this;
    const part = shown < numPages ? `Pages 0 to ${shown - 1} of ${counted(numPages, "page")}, the rest is free` : `All ${counted(numPages, "page")}`;
    setText(this.scale, `${part}. A cell is a page: ${counted(state.pageSize, "token")}${pageBytes ? `, ${sized(pageBytes)}` : ""}.`);
  }

  #highlight(written) {
    this.#draw(this.written);
    this.written = new Set(written);
    this.#draw(this.written);
  }

  /** Draws pages in the next frame. */
  #draw(pages) {
    for (const page of pages) if (page < this.shown) this.dirty.add(page);
    if (!this.dirty.size || !this.grid) return;
    this.frameRequest ??= requestAnimationFrame(() => {
      this.frameRequest = undefined;
      for (const page of this.dirty) this.#drawCell(page);
      this.dirty.clear();
    });
  }

  /** Kinds are told apart not by colour alone: a prefix is a hollow square, a shared page has a hole, what was just written a border. */
  #drawCell(page) {
    const { context, grid, state } = this;
    const { surface, ink, free, cached, [`hue-${state.hueOf(page)}`]: hue } = this.colours;
    const [kind, size] = [state.kinds[page], grid.cell - grid.gap];
    const [x, y] = placeOf(page, grid);
    const square = (colour, inset) => {
      context.fillStyle = colour;
      context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
    };
    const isDimmed = this.followed !== null && kind === OWNED && state.owners[page] !== this.followed;
    square(surface, 0);
    context.globalAlpha = isDimmed ? DIMMED : 1;
    square(kind >= OWNED ? hue : kind === CACHED ? cached : free, 0);
    context.globalAlpha = 1;
    const border = grid.gap ? [ink, surface, hue] : [ink];
    if (this.written.has(page) && !isDimmed) border.forEach((colour, i) => square(colour, i * Math.max(1, Math.round(size / 9))));
    if (grid.gap && kind === CACHED) square(surface, Math.max(1, Math.round(size / 10)));
    if (grid.gap && kind === SHARED) square(surface, Math.ceil(size / 3));
  }

  #onKey(event) {
    if (!this.grid || event.ctrlKey || event.altKey || event.metaKey) return;
    const { columns } = this.grid;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -this.shown, End: this.shown };
    if (event.key in steps) this.#place(Math.min(this.shown - 1, Math.max(0, (this.at ?? 0) + steps[event.key])));
    else if (event.key === "Enter" || event.key === " ") this.#choose();
    else if (event.key === "Escape") this.follow(null);
    else return;
    event.preventDefault();
  }

  #choose() {
    const owner = this.state?.kinds[this.at] >= OWNED ? this.state.owners[this.at] : null;
    this.follow(owner === this.followed ? null : owner);
  }

  #pageAt({ offsetX, offsetY }) {
    if (!this.grid) return null;
    const { columns, cell, ratio } = this.grid;
    const [column, row] = [offsetX, offsetY].map((offset) => Math.max(0, Math.floor((offset * ratio) / cell)));
    const page = row * columns + Math.min(columns - 1, column);
    return page < this.shown ? page : null;
  }

  /** Moves the cursor to a page; null: nowhere. */
  #place(page) {
    this.at = page === null || !this.grid ? null : Math.min(page, this.shown - 1);
    this.cursor.hidden = this.at === null;
    if (this.at !== null) {
      const { cell, gap, ratio } = this.grid;
      const [left, top, size] = [...placeOf(this.at, this.grid), cell - gap].map((pixels) => `${pixels / ratio}px`);
      Object.assign(this.cursor.style, { width: size, height: size, left, top });
    }
    this.#tell();
    this.spoken.textContent = this.at === null ? "" : this.readout.textContent;
  }

  #tell() {
    this.readout.textContent = this.at === null ? HINT : describe(this.state, this.at);
  }
}
