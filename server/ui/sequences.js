/* The open sequences as a table, which says in words what the page map shows, and a panel with the times and numbers of one of them. */

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
    Object.assign(this, { follow, rows: new Map() });
    const headers = COLUMNS.map(([text]) => el("th", { scope: "col", text }));
    this.caption = el("caption");
    this.body = el("tbody");
    const table = el("table", {}, this.caption, el("thead", {}, el("tr", {}, ...headers)), this.body);
    this.element = el("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Open sequences" }, table);
  }

  /** Shows the sequences of a state; `followed` is the id of one. */
  show(state, followed) {
    this.followed = followed;
    const shown = [...state.sequences.values()].sort((a, b) => a.id - b.id).slice(0, MOST_ROWS);
    const rest = state.sequences.size - shown.length;
    setText(this.caption, `${counted(state.sequences.size, "open sequence")}${rest ? `, of which ${rest} are not listed` : ""}`);
    const rows = new Map(shown.map(({ id, hue }) => [id, this.rows.get(id) ?? this.#row(id, hue)]));
    for (const [id, row] of this.rows) if (!rows.has(id)) row.remove();
    this.rows = rows;
    shown.forEach((sequence, i) => {
      const row = rows.get(sequence.id);
      if (this.body.children[i] !== row) this.body.insertBefore(row, this.body.children[i] ?? null);
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
    this.words = el("p", { class: "quiet" });
    this.close = button("Stop following", close);
    this.element = el("section", { class: "card", "aria-label": "Followed sequence" }, this.title, this.words, this.close);
    this.show(undefined);
  }

  /** Shows a sequence at a time in seconds; undefined: says how to choose one. */
  show(sequence, now) {
    this.close.hidden = !sequence;
    const { id, request } = sequence ?? {};
    setText(this.title, sequence ? `Sequence ${id}${request ? ` of request ${request}` : ""}` : "Follow a sequence");
    setText(this.words, sequence ? inWords(sequence, now) : HINT);
  }
}

function inWords({ numPrompt, numCached, numComputed, numOutput, numPages, numPreemptions, phases: all }, now) {
  const lasted = (index) => ((all[index + 1]?.since ?? now) - all[index].since).toFixed(1);
  const phases = all.map(({ phase }, index) => (phase.startsWith("ended") ? phase : `${phase} ${lasted(index)} s`)).join(", then ");
  const prompt = `Prompt of ${counted(numPrompt, "token")}, ${numCached} of them found in the prefix cache.`;
  const stored = `${counted(numOutput, "token")} generated, ${numComputed} stored in ${counted(numPages, "page")}`;
  return `${phases}. ${prompt} ${stored}, ${counted(numPreemptions, "preemption")}.`;
}

