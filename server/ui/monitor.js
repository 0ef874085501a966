/* The tab "Cache": reads GET /monitor, keeps the state and shows it: page map, multi-head comparison, sequences, plots, a line of status.

   A stream that breaks, or brings an event that does not continue the state, is opened again after a growing delay, and begins with a whole
   state. After each cache event the tab's element gets the event "cachechange" with the CacheState as its detail. */

import { errorOf, events } from "./api.js";
import { CacheState } from "./cache-state.js";
import { el } from "./dom.js";
import { drawMultiHead } from "./multi-head.js";
import { PageMap } from "./page-map.js";
import { Plots } from "./plots.js";
import { FollowPanel, SequenceTable } from "./sequences.js";

const [FIRST_DELAY_MS, LONGEST_DELAY_MS] = [500, 8000]; // Before the stream is opened again.
const SILENCE_MS = 10_000; // Stats come each second: after this long without an event the connection is dead.
const CLOCK_MS = 250;
const LEGEND = ["free", "kept as a prefix", "owned by a sequence", "shared by several", "just written"]; // By kind, as in counts().

let [view, style, mounts] = [null, null, 0];

/** Shows the tab in an element; `api` is the page's Api. */
export async function mount(parent, api) {
  unmount();
  const mine = mounts;
  const href = new URL("monitor.css", import.meta.url).href;
  style ??= new Promise((done) => document.head.append(el("link", { rel: "stylesheet", href, onload: done, onerror: done })));
  await style;
  if (mine === mounts) view = new MonitorView(parent, api);
}

/** Ends the stream and removes everything. */
export function unmount() {
  mounts += 1;
  view?.destroy();
  view = null;
}

const card = (title, ...children) => el("section", { class: "card" }, title, ...children);

class MonitorView {
  constructor(parent, api) {
    Object.assign(this, { parent, api, state: new CacheState(), stats: null, followed: null, stopping: new AbortController() });
    const follow = (id) => {
      this.followed = id;
      this.#showState();
    };
    this.status = el("p", { class: "status", role: "status", text: "Connecting" });
    this.facts = el("p", { class: "quiet" });
    this.mapTitle = el("h2");
    this.map = new PageMap({ follow, laidOut: () => this.#drawMultiHead() });
    this.legend = LEGEND.map((text, kind) => el("li", { data: { kind }, text }));
    const map = card(this.mapTitle, this.map.frame, el("ul", { class: "keys-of-map quiet" }, ...this.legend), this.map.readout);
    this.table = new SequenceTable(follow);
    this.panel = new FollowPanel(() => follow(null));
    this.plots = new Plots();
    const sequences = el("div", { class: "columns" }, card(this.table.element), this.panel.element);
    const maps = el("div", { class: "columns" }, map, this.#buildMultiHead());
    this.root = el("div", { class: "monitor" }, el("div", { class: "row" }, this.status, this.facts), maps, sequences, this.plots.element);
    parent.append(this.root);
    this.clock = setInterval(() => this.#showFollowed(), CLOCK_MS);
    this.#run();
  }

  destroy() {
    this.stopping.abort();
    clearInterval(this.clock);
    this.map.destroy();
    this.plots.destroy();
    this.root.remove();
  }

  #buildMultiHead() {
    const [title, canvas, ratio] = [el("h2"), el("canvas", { "aria-hidden": "true" }), el("span")];
    const words = el("p", { class: "quiet" });
    this.multiHead = { title, canvas, ratio, words };
    return card(title, el("div", { class: "frame" }, canvas, ratio), words);
  }

  /** Reads the stream, again and again. */
  async #run() {
    for (this.delay = FIRST_DELAY_MS; ; this.delay = Math.min(2 * this.delay, LONGEST_DELAY_MS)) {
      const error = await this.#read().catch((error) => error);
      if (this.stopping.signal.aborted) return;
      if (error?.status === 401) return this.#setStatus("An API key is needed: open this tab again to enter one", true);
      this.#setStatus(`Reconnecting: ${error?.message ?? "the connection was closed"}`, true);
      await new Promise((resolve) => setTimeout(resolve, this.delay));
    }
  }

  async #read() {
    const silence = new AbortController();
    const fail = () => silence.abort(new Error(`nothing has come for ${SILENCE_MS / 1000} s`));
    let timer = null;
    try {
      const response = await this.api.fetch("monitor", { signal: AbortSignal.any([silence.signal, this.stopping.signal]) });
      if (!response.ok) throw await errorOf(response);
      timer = setTimeout(fail, SILENCE_MS);
      for await (const { event, data } of events(response)) {
        clearTimeout(timer);
        timer = setTimeout(fail, SILENCE_MS);
        if (event === "cache") this.#onCache(JSON.parse(data));
        if (event === "stats") this.#onStats(JSON.parse(data));
        this.delay = FIRST_DELAY_MS;
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
    this.#setStatus(`${isReady ? "Live" : `Engine: ${stats.status}`}, engine restarts: ${stats.restarts}`, !isReady);
    const pages = stats.num_pages ? ` on ${stats.device}, ${stats.num_pages} pages of ${stats.page_size} tokens` : "";
    this.facts.textContent = `${stats.model}${pages}`;
  }

  #setStatus(text, isTroubled) {
    if (this.status.textContent !== text) this.status.textContent = text;
    this.status.classList.toggle("troubled", isTroubled);
  }

  #showState() {
    const counts = this.state.counts();
    this.mapTitle.textContent = `One key/value head: ${counts[2] + counts[3]} pages owned`;
    counts.forEach((count, kind) => (this.legend[kind].textContent = `${count} ${LEGEND[kind]}`));
    const followed = this.state.sequences.has(this.followed) ? this.followed : null;
    if (this.map.followed !== followed) this.map.layOut(followed);
    this.table.show(this.state, this.followed);
    this.#showFollowed();
    this.#drawMultiHead();
  }

  #drawMultiHead() {
    const factor = this.stats?.multi_head_ratio;
    if (!factor || !this.map.grid) return;
    const { title, canvas, ratio, words } = this.multiHead;
    const needed = drawMultiHead(canvas, this.state, this.map, factor);
    const beyond = needed - this.state.numPages;
    ratio.textContent = `× ${Number(factor.toPrecision(3))}`;
    title.textContent = `Multi-head attention, same load: ${needed} pages`;
    const fit = beyond > 0 ? `${beyond} more than there are, the first of them pale` : `${needed} of the ${this.state.numPages} there are`;
    words.textContent = `With a key and a value for every query head, the same tokens take ${ratio.textContent} the pages: ${fit}.`;
  }

  #showFollowed() {
    const { sequences, ended } = this.state;
    this.panel.show(sequences.get(this.followed) ?? ended.get(this.followed), Date.now() / 1000);
  }
}
