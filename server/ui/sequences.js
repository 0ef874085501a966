/* The open sequences as a sortable table, which says in words what the page map shows, and a panel about the sequence that is followed:
   its phases in time and its numbers. */

import { phaseOf } from "./cache-state.js";
import { button, counted, el, setText } from "./dom.js";

const MOST_ROWS = 200;
const HINT = "Choose a sequence in the table or on the map to follow it: waiting, prefill (if longer than a step), generation, preemption.";
const COLUMNS = [
  ["Id", ({ id }) => id],
  ["Request", ({ request }) => request],
  ["State", phaseOf],
  ["Prompt", ({ numPrompt }) => numPrompt],
  ["Stored", ({ numComputed }) => numComputed],
  ["Output", ({ numOutput }) => numOutput],
  ["Pages", ({ numPages }) => numPages],
];

export class SequenceTable {
  /** `follow` is told the id of a sequence that is chosen, or null. */
  constructor(follow) {
    Object.assign(this, { follow, rows: new Map(), column: 0, sign: 1 });
    this.headers = COLUMNS.map(([name], column) => el("th", { scope: "col" }, button(name, () => this.sortBy(column), { class: "plain" })));
    this.caption = el("caption");
    this.body = el("tbody");
    const table = el("table", {}, this.caption, el("thead", {}, el("tr", {}, ...this.headers)), this.body);
    this.element = el("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Open sequences" }, table);
  }

  sortBy(column) {
    this.sign = this.column === column ? -this.sign : 1;
    this.column = column;
    this.show(this.state, this.followed);
  }

  /** Shows the sequences of a state; `followed` is the id of one. */
  show(state, followed) {
    Object.assign(this, { state, followed });
    const { column, sign, body } = this;
    this.headers.forEach((header, i) => (header.ariaSort = i !== column ? "none" : sign > 0 ? "ascending" : "descending"));
    const value = COLUMNS[column][1];
    const compare = (a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.id - b.id);
    const shown = [...state.sequences.values()].sort(compare).slice(0, MOST_ROWS);
    const rest = state.sequences.size - shown.length;
    setText(this.caption, `${counted(state.sequences.size, "open sequence")}${rest ? `, of which ${rest} are not listed` : ""}`);
    const rows = new Map(shown.map(({ id, hue }) => [id, this.rows.get(id) ?? this.#row(id, hue)]));
    for (const [id, row] of this.rows) if (!rows.has(id)) row.remove();
    this.rows = rows;
    shown.forEach((sequence, i) => {
      const row = rows.get(sequence.id);
      if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
      row.querySelector("button").ariaPressed = String(sequence.id === followed);
      COLUMNS.slice(1).forEach(([, value], at) => setText(row.children[at + 1], String(value(sequence))));
    });
  }

  #row(id, hue) {
    const choose = () => this.follow(id === this.followed ? null : id);
    const name = el("th", { scope: "row" }, button(id, null, { class: "plain" })); // Its click is the row's.
    name.style.borderLeftColor = `var(--hue-${hue})`;
    return el("tr", { on: { click: choose } }, name, ...COLUMNS.slice(1).map(() => el("td")));
  }
}

export class FollowPanel {
  /** `close` is called when the sequence is not to be followed any more. */
  constructor(close) {
    this.title = el("h2");
    this.bar = el("div", { class: "phases", "aria-hidden": "true" });
    this.words = el("p", { class: "quiet" });
    this.close = button("Stop following", close);
    this.element = el("section", { class: "card", "aria-label": "Followed sequence" }, this.title, this.bar, this.words, this.close);
    this.show(undefined);
  }

  /** Shows a sequence at a time in seconds; undefined: says how to choose one. */
  show(sequence, now) {
    this.close.hidden = !sequence;
    const { id, request, phases } = sequence ?? { phases: [] };
    setText(this.title, sequence ? `Sequence ${id}${request ? ` of request ${request}` : ""}` : "Follow a sequence");
    const spans = phases.map(({ phase, since }, i) => ({ phase, seconds: (phases[i + 1]?.since ?? now) - since }));
    this.bar.replaceChildren(...spans.map(({ phase }) => el("span", { data: { phase }, text: phase })));
    spans.forEach(({ phase, seconds }, i) => (this.bar.children[i].style.flexGrow = isEnd(phase) ? 0 : Math.max(seconds, 0.01)));
    setText(this.words, sequence ? inWords(sequence, spans) : HINT);
  }
}

const isEnd = (phase) => phase.startsWith("ended");

function inWords({ numPrompt, numCached, numComputed, numOutput, numPages, numPreemptions }, spans) {
  const phases = spans.map(({ phase, seconds }) => (isEnd(phase) ? phase : `${phase} ${seconds.toFixed(1)} s`)).join(", then ");
  const prompt = `Prompt of ${counted(numPrompt, "token")}, ${numCached} of them found in the prefix cache.`;
  const stored = `${counted(numOutput, "token")} generated, ${numComputed} stored in ${counted(numPages, "page")}`;
  return `${phases}. ${prompt} ${stored}, ${counted(numPreemptions, "preemption")}.`;
}

