/* One output: a stream, its text, its seed, its speed and how it ended. Knows no inputs. */

import { button, copyButton, counted, el, textArea, withCode } from "./dom.js";
import { Stream } from "./stream.js";
import { Aligner, Output, tokensOf } from "./tokens.js";

const ENDINGS = { stop: "ended by itself", length: "reached max_tokens", timeout: "reached its time limit", tool_calls: "calls a tool" };
const EMPTY = { failed: "Failed", tool_calls: "" };
const STATS_MS = 100;

export class Pane {
  #api; #times; #tokens; #sender = null; #stream = null;
  #aligner = new Aligner();
  #calls = new Map();
  #title = el("h2");
  #stats = el("span", { class: "quiet stats" });
  #thinking = el("p", { class: "note" });
  #tools = el("div");
  #note = el("p", { class: "note", role: "status" });
  /** Why the output ended: one of the server's reasons, `stopped`, `failed`, or null while it has not. */
  finish = null;

  constructor(api, name) {
    this.#api = api;
    this.output = new Output(name);
    this.#title.textContent = name;
    const copy = copyButton("Copy", () => this.text, { class: "plain spread" });
    this.element = el("article", { class: "pane", "aria-label": name },
      el("header", {}, this.#title, this.#stats, copy), this.#thinking, this.output.element, this.#tools, this.#note);
  }

  get text() {
    return this.output.text;
  }

  /** Whether the output is worth keeping: it neither failed nor was stopped before its first word. */
  get hasOutput() {
    return this.finish !== "failed" && (this.finish !== "stopped" || this.text !== "");
  }

  get isRunning() {
    return this.#stream !== null;
  }

  /** The tool calls of the answer, as a message of the conversation has them. */
  get toolCalls() {
    return [...this.#calls.values()].map(({ call }) => call);
  }

  /** Streams the answer to a request. `keeps`: it goes on after the text that is there. What goes wrong is shown. */
  async run(path, body, keeps) {
    if (!keeps) this.output.clear();
    this.finish = null;
    this.#tokens = { all: 0, first: 0 };
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
      this.#say("bad", error.message);
    }
    this.output.append(this.#aligner.flush());
    this.#stream = null;
    this.element.dataset.state = "ended";
    this.output.element.dataset.empty = EMPTY[this.finish] ?? "Ended without text";
    this.#showStats();
  }

  stop() {
    this.#stream?.stop();
  }

  /** Shows a text of an earlier run. */
  restore(text) {
    this.output.append([{ text, tokens: [] }]);
  }

  /** Asks for the results of the tool calls that end the answer; `send` gets them as messages. */
  offerResults(send) {
    if (this.finish !== "tool_calls" || this.#sender !== null) return;
    const results = [...this.#calls.values()].map(({ call, text }) => {
      const { area, label } = textArea(`Result of ${call.function.name}`, { rows: 1 });
      text.after(label, area);
      return () => ({ role: "tool", tool_call_id: call.id, content: area.value });
    });
    const sender = button("Send results", () => send(results.map((result) => result())), { class: "primary" });
    this.#tools.append((this.#sender = el("div", { class: "row end tool-send" }, sender)));
  }

  /** Takes away what the answer offers to do: it is a part of the conversation now. */
  settle() {
    this.#sender?.remove();
    for (const area of this.#tools.querySelectorAll("textarea")) area.disabled = true;
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
    this.#tokens.all += number;
    this.#tokens.first ||= number;
    if (now - this.#times.shown > STATS_MS) this.#showStats();
  }

  /** Shows the number of tokens and their times. The speed is that of the tokens after the first chunk, which waits for its prompt. */
  #showStats() {
    const { begun, first, last } = this.#times;
    this.#times.shown = performance.now();
    if (first === 0) return;
    const parts = [counted(this.#tokens.all, "token")];
    if (last > first) parts.push(`${((this.#tokens.all - this.#tokens.first) / (last - first) * 1000).toFixed(0)} tokens/s`);
    parts.push(`first after ${(first - begun).toFixed(0)} ms`);
    if (this.finish !== null) parts.push(ENDINGS[this.finish] ?? this.finish);
    this.#stats.textContent = parts.join(" · ");
  }

  #say(kind, words) {
    this.#note.dataset.kind = kind;
    this.#note.replaceChildren(...withCode(words));
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
