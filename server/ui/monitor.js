/* The tab "Cache": reads GET /monitor, keeps the state and shows it: page map, multi-head comparison, sequences, plots, a line of status.

   A stream that breaks is opened again after a growing delay. After each cache event the tab's element gets the event "cachechange" with the CacheState as its detail. */

import { errorOf, events } from "./api.js";
import { CacheState } from "./cache-state.js";
import { counted, el, setText, sized } from "./dom.js";
import { MultiHead } from "./multi-head.js";
import { PageMap } from "./page-map.js";
import { Plots } from "./plots.js";
import { FollowPanel, SequenceTable } from "./sequences.js";

const [FIRST_DELAY_MS, LONGEST_DELAY_MS] = [500, 8000]; // Before the stream is opened again.
const SILENCE_MS = 10_000; // Stats come each second: after this long without an event the connection is dead.
const UNMARKED = "Too small for marks: a shared page has the colour of one of its sequences, a prefix is grey";
const MOST_TIMES = 8; // The map has room for so many times the owned pages, for multi-head attention beside it.
const TITLE = "One key/value head";
/** By kind, as in counts(). */
const LEGEND = ["free", "kept as a prefix", "owned by a sequence, in one of 8 colours", "shared by several", "just written"];

export class Monitor {
  /** Shows the tab in an element; `api` is the page's Api. */
  constructor(parent, api) {
    Object.assign(this, { parent, api, state: new CacheState(), stats: null, followed: null, stopping: new AbortController() });
    const { signal } = this.stopping;
    const follow = (id) => this.#showState((this.followed = id));
    this.status = el("p", { class: "status", role: "status", text: "Connecting" });
    this.facts = el("p", { class: "quiet" });
    this.mapTitle = el("h2", { text: TITLE });
    this.map = new PageMap({ follow, signal, laidOut: () => this.#showMultiHead() });
    this.legend = LEGEND.map((text, kind) => el("li", { data: { kind }, text }));
    this.keys = el("ul", { class: "keys-of-map quiet" }, ...this.legend, el("li", { class: "unmarked", text: UNMARKED }));
    const map = el("section", { class: "card" }, this.mapTitle, this.map.frame, this.map.scale, this.keys, this.map.readout);
    this.multiHead = new MultiHead();
    this.table = new SequenceTable(follow);
    this.panel = new FollowPanel(() => follow(null));
    this.plots = new Plots(signal);
    const sequences = el("div", { class: "columns" }, el("section", { class: "card" }, this.table.element), this.panel.element);
    const maps = el("div", { class: "columns" }, map, this.multiHead.element);
    this.root = el("div", { class: "monitor" }, el("div", { class: "row" }, this.status, this.facts), maps, sequences, this.plots.element);
    parent.append(this.root);
    this.#run();
  }

  /** Ends the stream and removes everything. */
  destroy() {
    this.stopping.abort();
    this.root.remove();
  }

  /** Reads the stream, again and again: after a delay, or once there is a key. */
  async #run() {
    for (this.delay = FIRST_DELAY_MS; ; this.delay = Math.min(2 * this.delay, LONGEST_DELAY_MS)) {
      const error = await this.#read().catch((error) => error);
      if (this.stopping.signal.aborted) return;
      const needsKey = error?.status === 401;
      const trouble = `Reconnecting: ${error?.message ?? "the connection was closed"}`;
      this.#setStatus(needsKey ? "An API key is needed: Enter key, above" : trouble, true);
      const wait = (resolve) => (needsKey ? this.api.addEventListener("key", resolve, { once: true }) : setTimeout(resolve, this.delay));
      await new Promise(wait);
    }
  }

  async #read() {
    const silence = new AbortController();
    const fail = () => silence.abort(new Error(`nothing has come for ${SILENCE_MS / 1000} s`));
    let timer;
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
    this.map.setScale(Math.min(stats.multi_head_ratio ?? 1, MOST_TIMES), stats.page_bytes ?? 0);
    this.plots.add(stats);
    this.#showPages();
    this.#showFollowed();
    const isReady = stats.status === "ready";
    this.#setStatus(`${isReady ? "Live" : `Engine: ${stats.status}`}, engine restarts: ${stats.restarts}`, !isReady);
    const pages = stats.num_pages ? ` on ${stats.device}, ${stats.num_pages} pages of ${stats.page_size} tokens` : "";
    this.facts.textContent = `${stats.model}${pages}`;
  }

  #setStatus(text, isTroubled) {
    setText(this.status, text);
    this.status.classList.toggle("troubled", isTroubled);
  }

  /** Shows the numbers of pages, the same ones everywhere. */
  #showPages() {
    if (!this.state.numPages) return;
    const counts = this.state.counts();
    const owned = counts[2] + counts[3];
    const memory = this.map.pageBytes ? `, ${sized(owned * this.map.pageBytes)}` : "";
    setText(this.mapTitle, `${TITLE}: ${counted(owned, "page")} owned${memory}`);
    counts.forEach((count, kind) => setText(this.legend[kind], `${count.toLocaleString("en")} ${LEGEND[kind]}`));
    this.plots.setPages(owned, counts[1]);
  }

  #showState() {
    this.#showPages();
    const followed = this.state.sequences.has(this.followed) ? this.followed : null;
    if (this.map.followed !== followed) this.map.layOut(followed);
    this.table.show(this.state, this.followed);
    this.#showFollowed();
    this.#showMultiHead();
  }

  #showMultiHead() {
    if (!this.stats?.multi_head_ratio || !this.map.grid) return;
    this.keys.classList.toggle("small", this.map.grid.gap === 0);
    this.multiHead.show(this.state, this.map, this.stats.multi_head_ratio);
  }

  #showFollowed() {
    const { sequences, ended } = this.state;
    this.panel.show(sequences.get(this.followed) ?? ended.get(this.followed), Date.now() / 1000);
  }
}
