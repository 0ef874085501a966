/* One output: a stream, its text, its seed, its speed and how it ended. Knows no inputs. */

import { button, copyButton, el, textArea } from "./dom.js";
import { Stream } from "./stream.js";
import { Aligner, Output, tokensOf } from "./tokens.js";

const ENDINGS = {
  stop: "ended by itself",
  length: "reached max_tokens",
  timeout: "reached its time limit",
  tool_calls: "calls a tool",
  abort: "stopped",
};

export class Pane {
  #stream = null;
  #stats = el("span", { class: "quiet stats" });
  #note = el("p", { class: "note", role: "status" });
  #aligner = new Aligner();
  #calls = new Map();
  #begunAt = 0;
  #firstAt = 0;
  #lastAt = 0;
  #tokens = 0;
  /** Why the output ended: one of the server's reasons, `stopped`, `failed`, or null while it has not. */
  finish = null;

  constructor(api, name) {
    this.api = api;
    this.output = new Output(name);
    this.thinking = el("p", { class: "note thinking" });
    this.title = el("h3", { text: name });
    this.tools = el("div");
    this.actions = el("span", { class: "row spread" }, copyButton("Copy", () => this.text, { class: "plain" }));
    this.element = el("article", { class: "pane", "aria-label": name },
      el("header", {}, this.title, this.#stats, this.actions), this.thinking, this.output.element, this.tools, this.#note);
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
  async run(path, body, keeps = false) {
    this.#reset(keeps);
    this.#stream = new Stream(this.api, (chunk) => this.#onChunk(chunk), (kind, words) => this.#say(kind, words));
    this.element.dataset.state = "running";
    try {
      await this.#stream.run(path, body);
      if (this.#stream.stopped) this.finish = "stopped";
    } catch (error) {
      this.finish = "failed";
      this.#say("bad", error.message);
      this.error = error;
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

  showSeed(seed) {
    this.title.textContent = `Seed ${seed}`;
  }

  /** Shows whether the conversation goes on with this answer, with a button that chooses it; null takes that away. */
  setChoice(chosen, choose) {
    this.choice?.remove();
    this.choice = null;
    if (chosen === null) return;
    this.choice = button(chosen ? "Chosen" : "Choose", choose, { class: "plain", "aria-pressed": String(chosen) });
    this.actions.prepend(this.choice);
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
    this.tools.append(el("div", { class: "row end tool-send" }, sender));
  }

  /** Shows a text of an earlier run. */
  restore(text) {
    this.output.clear();
    this.output.append([{ text, tokens: [] }]);
  }

  #reset(keeps) {
    if (!keeps) {
      this.output.clear();
      this.thinking.textContent = "";
      this.tools.replaceChildren();
      this.#calls.clear();
    }
    this.finish = this.error = null;
    this.#begunAt = performance.now();
    this.#firstAt = this.#lastAt = this.#tokens = 0;
    this.#say("", "");
    this.#stats.textContent = "";
  }

  #onChunk(chunk) {
    const [choice] = chunk.choices ?? [];
    if (choice === undefined) return;
    const delta = choice.delta ?? { content: choice.text };
    const tokens = tokensOf(choice);
    if (delta.content || tokens.length > 0) this.#count(tokens.length || 1);
    if (delta.reasoning_content) this.thinking.append(delta.reasoning_content);
    for (const call of delta.tool_calls ?? []) this.#onCall(call);
    this.output.append(this.#aligner.push(delta.content ?? "", tokens));
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  #count(number) {
    this.#lastAt = performance.now();
    this.#firstAt ||= this.#lastAt;
    this.#tokens += number;
    if (this.#lastAt - (this.shownAt ?? 0) > 100) this.#showStats();
  }

  #showStats() {
    this.shownAt = performance.now();
    if (this.#tokens === 0) return;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    const parts = [`${this.#tokens.toLocaleString("en")} token${this.#tokens === 1 ? "" : "s"}`];
    if (seconds > 0) parts.push(`${((this.#tokens - 1) / seconds).toFixed(0)} tokens/s`);
    if (this.#firstAt > 0) parts.push(`first after ${(this.#firstAt - this.#begunAt).toFixed(0)} ms`);
    if (this.finish !== null) parts.push(ENDINGS[this.finish] ?? this.finish);
    this.#stats.textContent = parts.join(" · ");
  }

  #say(kind, words) {
    this.#note.dataset.kind = { lost: "wait", waiting: "wait", bad: "bad" }[kind] ?? "";
    this.#note.textContent = words;
  }

  /** Takes a part of a tool call: its name comes first, its arguments grow. */
  #onCall({ index = 0, id, function: part = {} }) {
    if (!this.#calls.has(index)) {
      const name = el("strong");
      const text = el("pre");
      this.tools.append(el("div", { class: "tool" }, el("span", { class: "quiet", text: "Tool call " }), name, text));
      this.#calls.set(index, { call: { id: "", type: "function", function: { name: "", arguments: "" } }, name, text });
    }
    const shown = this.#calls.get(index);
    shown.call.id ||= id ?? "";
    shown.call.function.name += part.name ?? "";
    shown.call.function.arguments += part.arguments ?? "";
    shown.name.textContent = shown.call.function.name;
    shown.text.textContent = shown.call.function.arguments;
  }
}
