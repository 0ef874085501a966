/* The tab "Cache": reads GET /monitor, keeps the state and shows it: page map, multi-head comparison, sequences, plots and a line of status.

   A stream that breaks, or brings an event that does not continue the state, is opened again after a growing delay, and begins with a whole
   state. After each cache event the tab's element gets the event "cachechange" with the CacheState as its detail. */

import { errorOf, events } from "./api.js";
import { CacheState } from "./cache-state.js";
import { el } from "./dom.js";
import { drawMultiHead } from "./multi-head.js";
import { PageMap } from "./page-map.js";
import { Plots } from "./plots.js";
import { FollowPanel, SequenceTable } from "./sequences.js";

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 8000;
const SILENCE_MS = 10_000; // Stats come each second: after this long without an event the connection is dead.
const CLOCK_MS = 250;
const MAP_LABEL = "Page map. Arrow keys move over the pages, Enter follows the sequence that owns one.";
const MAP_HINT = "Point at a page, or move over the map with the arrow keys; click or Enter follows its sequence.";
/** Kinds of pages in the order of CacheState.counts, and their names. */
const LEGEND = [["free", "free"], ["cached", "kept as a prefix"], ["owned", "owned by a sequence"], ["shared", "shared by several"], ["written", "just written"]];

let view = null;

/** Shows the tab in an element; `api` is the page's Api. */
export async function mount(parent, api) {
  unmount();
  const mine = (view = new MonitorView(parent, api));
  await Promise.all([loadStyle("monitor.css"), loadStyle("vendor/uPlot.min.css")]);
  if (view === mine) mine.start();
}

/** Ends the stream and removes everything. */
export function unmount() {
  view?.destroy();
  view = null;
}

class MonitorView {
  constructor(parent, api) {
    Object.assign(this, { parent, api, state: new CacheState(), stats: null, followed: null, stopping: new AbortController() });
  }

  start() {
    const follow = (id) => this.#follow(id);
    this.status = el("p", { class: "status", role: "status", text: "Connecting" });
    this.facts = el("p", { class: "quiet" });
    const maps = el("div", { class: "columns" }, this.#buildMap(follow), this.#buildMultiHead());
    const sequences = el("div", { class: "columns" });
    const plots = el("div", { class: "columns plots" });
    const head = el("div", { class: "row" }, this.status, this.facts);
    this.root = el("div", { class: "monitor" }, head, maps, sequences, plots);
    this.table = new SequenceTable(sequences.appendChild(el("div", { class: "card" })), follow);
    this.panel = new FollowPanel(sequences, () => follow(null));
    this.parent.append(this.root);
    this.plots = new Plots(plots);
    this.clock = setInterval(() => this.#showFollowed(), CLOCK_MS);
    this.#run();
  }

  destroy() {
    this.stopping.abort();
    clearInterval(this.clock);
    cancelAnimationFrame(this.frame);
    this.map?.destroy();
    this.plots?.destroy();
    this.root?.remove();
  }

  #buildMap(follow) {
    const words = el("p", { class: "quiet readout", id: "page-map-readout", "aria-live": "polite" });
    const canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": MAP_LABEL, "aria-describedby": words.id });
    const cursor = el("div", { class: "cursor", hidden: true });
    const frame = el("div", { class: "frame" }, canvas, cursor);
    const readout = (text) => (words.textContent = text || MAP_HINT);
    this.map = new PageMap({ frame, canvas, cursor, readout, follow, laidOut: () => this.#drawMultiHead() });
    readout("");
    this.mapTitle = el("h2", { text: "One key/value head" });
    this.legend = LEGEND.map(([kind, text]) => el("li", { data: { kind }, text }));
    return el("figure", { class: "card" }, el("figcaption", {}, this.mapTitle), frame, el("ul", { class: "keys-of-map quiet" }, ...this.legend), words);
  }

  #buildMultiHead() {
    this.multiHeadTitle = el("h2", { text: "Multi-head attention" });
    this.multiHeadCanvas = el("canvas", { "aria-hidden": "true" });
    this.multiHeadRatio = el("span", { class: "ratio" });
    this.multiHeadWords = el("p", { class: "quiet" });
    const frame = el("div", { class: "frame" }, this.multiHeadCanvas, this.multiHeadRatio);
    return el("figure", { class: "card" }, el("figcaption", {}, this.multiHeadTitle), frame, this.multiHeadWords);
  }

  /** Reads the stream, again and again. */
  async #run() {
    let delay = FIRST_DELAY_MS;
    while (!this.stopping.signal.aborted) {
      const received = () => (delay = FIRST_DELAY_MS);
      const reason = await this.#read(received).catch((error) => error.message);
      if (this.stopping.signal.aborted) return;
      this.#setStatus(`Reconnecting: ${reason ?? "the connection was closed"}`, true);
      await new Promise((resolve) => setTimeout(resolve, delay));
      delay = Math.min(2 * delay, LONGEST_DELAY_MS);
    }
  }

  async #read(received) {
    const silence = new AbortController();
    let timer;
    const wait = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(new Error(`nothing has come for ${SILENCE_MS / 1000} s`)), SILENCE_MS);
    };
    try {
      const response = await this.api.fetch("monitor", { signal: AbortSignal.any([silence.signal, this.stopping.signal]) });
      if (!response.ok) throw await errorOf(response);
      wait();
      for await (const { event, data } of events(response)) {
        wait();
        if (event === "cache") this.#onCache(JSON.parse(data));
        if (event === "stats") this.#onStats(JSON.parse(data));
        received();
      }
    } finally {
      clearTimeout(timer);
    }
  }

  #onCache(event) {
    this.map.show(this.state, this.state.apply(event, Date.now() / 1000));
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.#showState();
    });
    this.parent.dispatchEvent(new CustomEvent("cachechange", { detail: this.state }));
  }

  #onStats(stats) {
    this.stats = stats;
    this.plots.add(stats);
    const isReady = stats.status === "ready";
    this.#setStatus(`${isReady ? "Live" : `Engine: ${stats.status}`}, ${stats.restarts || "no"} engine restarts`, !isReady);
    this.facts.textContent = !stats.num_pages ? stats.model : `${stats.model} on ${stats.device}, ${stats.num_pages} pages of ${stats.page_size} tokens`;
  }

  #setStatus(text, isTroubled) {
    if (this.status.textContent !== text) this.status.textContent = text;
    this.status.classList.toggle("troubled", isTroubled);
  }

  #showState() {
    const counts = this.state.counts();
    this.mapTitle.textContent = `One key/value head: ${counts[2] + counts[3]} pages owned`;
    counts.forEach((count, kind) => (this.legend[kind].textContent = `${count} ${LEGEND[kind][1]}`));
    const followed = this.state.sequences.has(this.followed) ? this.followed : null;
    if (this.map.followed !== followed) this.map.emphasise(followed);
    this.table.show(this.state, this.followed);
    this.#showFollowed();
    this.#drawMultiHead();
  }

  #drawMultiHead() {
    if (!this.stats?.multi_head_ratio || !this.map.grid) return;
    const ratio = this.stats.multi_head_ratio;
    drawMultiHead(this.multiHeadCanvas, this.state, this.map, ratio);
    const [, , owned, shared] = this.state.counts();
    const needed = Math.ceil((owned + shared) * ratio);
    const times = `× ${Number(ratio.toPrecision(3))}`;
    const fit = needed > this.state.numPages ? `${needed - this.state.numPages} pages would not fit.` : "This load would still fit.";
    this.multiHeadTitle.textContent = `Multi-head attention, same load: ${needed} pages`;
    this.multiHeadRatio.textContent = times;
    this.multiHeadWords.textContent = `With a key and a value for every query head, the same tokens take ${times} the pages. The line is the end of this memory: ${fit}`;
  }

  #follow(id) {
    this.followed = id;
    this.#showState();
  }

  #showFollowed() {
    this.panel.show(this.followed === null ? undefined : this.state.find(this.followed), Date.now() / 1000);
  }
}

const styles = new Map();

/** Adds a style sheet beside this module to the document, once. */
function loadStyle(path) {
  const load = new Promise((resolve, reject) => {
    const fail = () => reject(new Error(`${path} could not be loaded`));
    if (!styles.has(path)) document.head.append(el("link", { rel: "stylesheet", href: new URL(path, import.meta.url).href, onload: resolve, onerror: fail }));
  });
  return styles.get(path) ?? styles.set(path, load).get(path);
}
