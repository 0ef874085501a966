/* The page map: every page of the KV cache as a cell of a canvas. Once a frame, the cells that have changed are drawn again.

   Invariant: what is drawn follows from the CacheState, the followed sequence and the pages just written. It knows nothing of the network. */

import { CACHED, FREE, OWNED, SHARED, phaseOf } from "./cache-state.js";
import { colours, watchTheme } from "./theme.js";

const LARGEST_CELL = 26; // CSS pixels.
const SMALLEST_CELL = 2;
const TALLEST = 340;
const MARKED_CELL = 5; // Device pixels: smaller cells have no gaps and marks.
const HIGHLIGHT_MS = 350;
const DIMMED = 0.25;

/** The grid that shows `numPages` cells in `width` CSS pixels: columns, rows, and the sizes of a cell and of its gap in device pixels. */
function gridOf(numPages, width, ratio) {
  let cell = Math.round(LARGEST_CELL * ratio);
  const columnsOf = () => Math.max(1, Math.floor((width * ratio) / cell));
  while (cell > SMALLEST_CELL * ratio && Math.ceil(numPages / columnsOf()) * cell > TALLEST * ratio) cell -= 1;
  const columns = columnsOf();
  return { columns, rows: Math.ceil(numPages / columns), cell, gap: cell < MARKED_CELL ? 0 : Math.max(1, Math.round(cell / 12)), ratio };
}

/** Gives a canvas room for so many rows, which empties it, and returns its drawing context. */
export function sizeCanvas(canvas, grid, rows) {
  canvas.width = grid.columns * grid.cell;
  canvas.height = rows * grid.cell;
  canvas.style.width = `${canvas.width / grid.ratio}px`;
  canvas.style.height = `${canvas.height / grid.ratio}px`;
  return canvas.getContext("2d");
}

/** What a page holds, in words. */
function describe(state, page) {
  const kind = state.kinds[page];
  if (kind === FREE) return `Page ${page}: free.`;
  if (kind === CACHED) return `Page ${page}: kept as a prefix; no open request holds it.`;
  const id = state.owners[page];
  const sequence = state.sequences.get(id);
  const first = state.positions[page];
  const stored = Math.min(first + state.pageSize, sequence?.numComputed ?? 0);
  const tokens = stored > first ? `tokens ${first} to ${stored - 1}` : `reserved for tokens from ${first} on`;
  const request = sequence?.request ? ` of request ${sequence.request}` : "";
  const phase = sequence ? `, ${phaseOf(sequence)}` : "";
  return `Page ${page}: ${kind === SHARED ? "shared by several, first " : ""}sequence ${id}${request}, ${tokens}${phase}.`;
}

export class PageMap {
  /** `frame` holds the canvas and the cursor's mark. `readout` is told what is under the cursor, in words, and `follow` the id of a
      sequence that is chosen, or null. `laidOut` is called when the grid has changed. */
  constructor({ frame, canvas, cursor, readout, follow, laidOut }) {
    Object.assign(this, { frame, canvas, cursor, readout, follow, laidOut });
    this.state = this.grid = this.at = this.followed = null; // `at`: the page under the cursor.
    this.dirty = new Set();
    this.written = new Set();
    this.stopping = new AbortController();
    this.isStill = matchMedia("(prefers-reduced-motion: reduce)");
    this.observer = new ResizeObserver(() => this.layOut());
    this.observer.observe(frame);
    watchTheme(() => this.layOut(), this.stopping.signal);
    this.#listen();
  }

  destroy() {
    this.stopping.abort();
    this.observer.disconnect();
    cancelAnimationFrame(this.frameRequest);
    clearTimeout(this.fading);
  }

  /** Shows a state to which an event was applied; `change` is what `apply` returned. */
  show(state, change) {
    const isSame = this.state === state && this.numPages === state.numPages;
    this.state = state;
    if (!isSame) this.layOut();
    this.#highlight(this.isStill.matches ? [] : change.written);
    this.#draw(change.whole ? Array(state.numPages).keys() : change.pages);
    clearTimeout(this.fading);
    this.fading = setTimeout(() => this.#highlight([]), HIGHLIGHT_MS);
    this.#tell();
  }

  /** Makes the pages of a sequence stand out; null: of none. */
  emphasise(id) {
    this.followed = id;
    this.layOut();
  }

  /** Computes grid and colours, and draws every cell. */
  layOut() {
    if (!this.state?.numPages || !this.frame.clientWidth) return;
    this.numPages = this.state.numPages;
    this.colours = colours();
    this.grid = gridOf(this.numPages, this.frame.clientWidth, devicePixelRatio || 1);
    this.context = sizeCanvas(this.canvas, this.grid, this.grid.rows);
    this.#draw(Array(this.numPages).keys());
    this.#place(this.at);
    this.laidOut();
  }

  #highlight(written) {
    this.#draw(this.written);
    this.written = new Set(written);
    this.#draw(this.written);
  }

  /** Draws pages in the next frame. */
  #draw(pages) {
    for (const page of pages) this.dirty.add(page);
    if (!this.dirty.size || !this.grid) return;
    this.frameRequest ??= requestAnimationFrame(() => {
      this.frameRequest = undefined;
      for (const page of this.dirty) this.#drawCell(page);
      this.dirty.clear();
    });
  }

  #drawCell(page) {
    const { context, grid, state } = this;
    const kind = state.kinds[page];
    const size = grid.cell - grid.gap;
    const [x, y] = [(page % grid.columns) * grid.cell, Math.floor(page / grid.columns) * grid.cell];
    const square = (colour, inset) => {
      context.fillStyle = colour;
      context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
    };
    const { free, cached, surface, ink, of } = this.colours;
    square(surface, 0);
    if (this.followed !== null && kind !== FREE && state.owners[page] !== this.followed) context.globalAlpha = DIMMED;
    square(kind >= OWNED ? of(state.owners[page]) : kind === CACHED ? cached : free, 0);
    context.globalAlpha = 1;
    const isMarked = grid.gap > 0;
    // Not by colour alone: a prefix is a hollow square, a shared page has a hole, what was just written has a border.
    if (isMarked && kind === CACHED) square(surface, Math.max(1, Math.round(size / 10)));
    if (isMarked && kind === SHARED) square(surface, Math.ceil(size / 3));
    if (this.written.has(page)) outline(context, ink, x, y, size, 0);
    if (this.written.has(page) && isMarked) outline(context, surface, x, y, size, 1);
  }

  #listen() {
    const on = (name, listener) => this.canvas.addEventListener(name, listener);
    on("pointermove", (event) => this.#place(this.#pageAt(event)));
    on("pointerleave", () => document.activeElement === this.canvas || this.#place(null));
    on("focus", () => this.#place(this.at ?? 0));
    on("blur", () => this.#place(null));
    on("keydown", (event) => this.#onKey(event));
    on("click", (event) => {
      this.#place(this.#pageAt(event));
      this.#choose();
    });
  }

  #onKey(event) {
    if (!this.grid || event.ctrlKey || event.altKey || event.metaKey) return;
    const { columns } = this.grid;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -this.numPages, End: this.numPages };
    if (event.key in steps) this.#place(Math.min(this.numPages - 1, Math.max(0, (this.at ?? 0) + steps[event.key])));
    else if (event.key === "Enter" || event.key === " ") this.#choose();
    else if (event.key === "Escape") this.follow(null);
    else return;
    event.preventDefault();
  }

  #choose() {
    if (this.at === null) return;
    const owner = this.state.kinds[this.at] >= OWNED ? this.state.owners[this.at] : null;
    this.follow(owner === this.followed ? null : owner);
  }

  #pageAt({ offsetX, offsetY }) {
    if (!this.grid) return null;
    const { columns, cell, ratio } = this.grid;
    const column = Math.min(columns - 1, Math.max(0, Math.floor((offsetX * ratio) / cell)));
    const page = Math.max(0, Math.floor((offsetY * ratio) / cell)) * columns + column;
    return page < this.numPages ? page : null;
  }

  /** Moves the cursor to a page; null: nowhere. */
  #place(page) {
    this.at = page === null || !this.grid ? null : Math.min(page, this.numPages - 1);
    this.cursor.hidden = this.at === null;
    if (this.at !== null) {
      const { columns, cell, gap, ratio } = this.grid;
      this.cursor.style.width = this.cursor.style.height = `${(cell - gap) / ratio}px`;
      this.cursor.style.left = `${((this.at % columns) * cell) / ratio}px`;
      this.cursor.style.top = `${(Math.floor(this.at / columns) * cell) / ratio}px`;
    }
    this.#tell();
  }

  #tell() {
    this.readout(this.at === null ? "" : describe(this.state, this.at));
  }
}

/** The border of a cell; `nth`: of several inside each other. */
function outline(context, colour, x, y, size, nth) {
  const width = Math.max(1, Math.round(size / 9));
  const inset = (nth + 0.5) * width;
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
}
