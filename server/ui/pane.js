/* One output: a stream, its text, its seed, its speed and how it ended. Knows no inputs. */

import { button, copyButton, el, textArea } from "./dom.js";
import { Stream } from "./stream.js";
import { Aligner, Output, tokensOf } from "./tokens.js";

const ENDINGS = { stop: "ended by itself", length: "reached max_tokens", timeout: "reached its time limit", tool_calls: "calls a tool" };
const STATS_MS = 100;

export class Pane {
  #api;
  #stream = null;
  #aligner = new Aligner();
  #calls = new Map();
  #times = { begun: 0, first: 0, last: 0, shown: 0 };
  #tokens = 0;
  #title = el("h2");
  #stats = el("span", { class: "quiet stats" });
  #thinking = el("p", { class: "note thinking" });
  #tools = el("div");
  #note = el("p", { class: "note", role: "status" });
  /** Why the output ended: one of the server's reasons, `stopped`, `failed`, or null while it has not. */
  finish = null;
  /** What went wrong. */
  error = null;

  constructor(api, name) {
    this.#api = api;
    this.output = new Output(name);
    this.#title.textContent = name;
    this.actions = el("span", { class: "row spread" }, copyButton("Copy", () => this.text, { class: "plain" }));
    this.element = el("article", { class: "pane", "aria-label": name },
      el("header", {}, this.#title, this.#stats, this.actions), this.#thinking, this.output.element, this.#tools, this.#note);
  }

  get text() {
    return this.output.text;
  }

  get isRunning() {
    return this.#stream !== null;
  }

  /** The tool calls of the answer, as a message of the conversation has them. */
  get toolCalls() {
    return [...this.#calls.values()].map(({ call }) => call);
  }

  /** Streams the answer to a request. `keeps`: it goes on after the text that is there. What goes wrong is shown, and kept in `error`. */
  async run(path, body, keeps) {
    if (!keeps) this.output.clear();
    this.finish = this.error = null;
    this.#tokens = 0;
    this.#times = { begun: performance.now(), first: 0, last: 0, shown: 0 };
    this.#title.textContent = `Seed ${body.seed}`;
    this.#say("", "");
    this.#stream = new Stream(this.#api, (chunk) => this.#onChunk(chunk), (kind, words) => this.#say(kind, words));
    this.element.dataset.state = "running";
    try {
      await this.#stream.run(path, body);
      if (this.#stream.stopped) this.finish = "stopped";
    } catch (error) {
      this.finish = "failed";
      this.error = error;
      this.#say("bad", error.message);
    }
    this.output.append(this.#aligner.flush());
    this.#stream = null;
    this.element.dataset.state = "ended";
    this.output.element.dataset.empty = "Ended without text";
    this.#showStats();
  }

  stop() {
    this.#stream?.stop();
  }

  /** Shows a text of an earlier run. */
  restore(text) {
    this.output.append([{ text, tokens: [] }]);
  }

  /** Shows whether the conversation goes on with this answer, with a button that chooses it; null takes that away. */
  setChoice(chosen, choose) {
    this.choice?.remove();
    this.choice = chosen === null ? null : button(chosen ? "Chosen" : "Choose", choose, { class: "plain", "aria-pressed": String(chosen) });
    if (this.choice !== null) this.actions.prepend(this.choice);
  }

  /** Asks for the results of the tool calls; `send` gets them as messages. */
  offerResults(send) {
    const results = [...this.#calls.values()].map(({ call, text }) => {
      const { area, label } = textArea(`Result of ${call.function.name}`, { rows: 1 });
      text.after(label, area);
      return () => ({ role: "tool", tool_call_id: call.id, content: area.value });
    });
    const sender = button("Send results", () => {
      sender.remove();
      send(results.map((result) => result()));
    }, { class: "primary" });
    this.#tools.append(el("div", { class: "row end tool-send" }, sender));
  }

  #onChunk(chunk) {
    const [choice] = chunk.choices ?? [];
    if (choice === undefined) return;
    const delta = choice.delta ?? { content: choice.text };
    const tokens = tokensOf(choice);
    if (delta.content || tokens.length > 0) this.#count(tokens.length || 1);
    if (delta.reasoning_content) this.#thinking.append(delta.reasoning_content);
    for (const call of delta.tool_calls ?? []) this.#onCall(call);
    this.output.append(this.#aligner.push(delta.content ?? "", tokens));
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  #count(number) {
    const now = performance.now();
    this.#times.last = now;
    this.#times.first ||= now;
    this.#tokens += number;
    if (now - this.#times.shown > STATS_MS) this.#showStats();
  }

  #showStats() {
    const { begun, first, last } = this.#times;
    this.#times.shown = performance.now();
    if (first === 0) return;
    const parts = [`${this.#tokens.toLocaleString("en")} token${this.#tokens === 1 ? "" : "s"}`];
    if (last > begun) parts.push(`${(this.#tokens / (last - begun) * 1000).toFixed(0)} tokens/s`);
    parts.push(`first after ${(first - begun).toFixed(0)} ms`);
    if (this.finish !== null) parts.push(ENDINGS[this.finish] ?? this.finish);
    this.#stats.textContent = parts.join(" · ");
  }

  #say(kind, words) {
    this.#note.dataset.kind = kind;
    this.#note.textContent = words;
  }

  /** Takes a part of a tool call: its name comes first, its arguments grow. */
  #onCall({ index = 0, id, function: part = {} }) {
    if (!this.#calls.has(index)) {
      const [name, text] = [el("strong"), el("pre")];
      this.#tools.append(el("div", { class: "tool" }, el("span", { class: "quiet", text: "Tool call " }), name, text));
      this.#calls.set(index, { call: { id: "", type: "function", function: { name: "", arguments: "" } }, name, text });
    }
    const { call, name, text } = this.#calls.get(index);
    call.id ||= id ?? "";
    call.function.name += part.name ?? "";
    call.function.arguments += part.arguments ?? "";
    name.textContent = call.function.name;
    text.textContent = call.function.arguments;
  }
}
