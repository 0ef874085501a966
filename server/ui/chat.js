/* Mode "Chat": a conversation by the checkpoint's chat template. */

import { button, el, textArea } from "./dom.js";
import { NUM_TOP } from "./tokens.js";
import { Work } from "./work.js";

const blank = () => el("p", { class: "blank", text: "A conversation begins with your message." });
const LACKING = "This checkpoint has no chat template, so it cannot chat; Complete continues any text. To chat, serve a checkpoint that "
  + "was tuned for it, or give the server a template: --server.chat_template FILE.";
const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

/** Mounts the mode into its panel. Returns its view. */
export const chat = (panel, api, history) => new Chat(panel, api, history).work;

class Chat {
  /** The messages before the last answer, as the server takes them. */
  #messages = [];
  /** The pane of the last answer; null before the first. */
  #answer = null;
  #system = textArea("System message", { rows: 2, placeholder: "Says how the assistant is to behave", "aria-label": "System message" }).area;
  #draft = textArea("Message", { rows: 1, enterKeyHint: "send",
    placeholder: "Enter sends, Shift+Enter breaks the line", on: { keydown: (event) => this.#onKey(event) } });
  #turns = el("div", { class: "turns" }, blank());

  constructor(panel, api, history) {
    const clear = button("New conversation", () => this.#setForm({ system: this.#system.value, messages: [] }), { class: "plain spread" });
    const system = el("details", { class: "system" }, el("summary", { text: "System message" }), this.#system);
    this.work = new Work(panel, api, history, {
      name: "chat",
      path: "v1/chat/completions",
      schema: "ChatBody",
      needs: "completion_chat",
      lacking: LACKING,
      initial: { max_tokens: "256" },
      verb: "Send",
      isSingle: true,
      continued: (body, content) => ({ ...body, messages: [...body.messages, { role: "assistant", content }], continue_final_message: true }),
      stage: (actions, alert) => [el("div", { class: "row" }, system, clear), this.#turns, alert,
        el("div", { class: "card composer" }, el("div", { class: "editor" }, this.#draft.label, this.#draft.area), actions)],
      body: (again) => this.#body(again),
      place: ([pane], again) => this.#place(pane, again),
      form: () => ({ system: this.#system.value, messages: this.#messages }),
      setForm: (form) => this.#setForm(form),
      title: () => this.#messages.findLast((message) => message.role === "user")?.content ?? "",
      done: () => this.#offer(),
    });
  }

  /** Enter sends a message, but not while an input method composes a character with it. */
  #onKey(event) {
    const { key, shiftKey, ctrlKey, altKey, metaKey, isComposing, keyCode } = event;
    if (key !== "Enter" || shiftKey || ctrlKey || altKey || metaKey || isComposing || keyCode === 229) return; // 229: Safari's.
    event.preventDefault();
    if (this.#draft.area.value.trim() !== "") this.work.run();
  }

  /** The request: `again` asks for another answer to the same messages, as an empty draft does. */
  #body(again) {
    const drafted = this.#drafted(again);
    const messages = drafted.length > 0 ? [...this.#settled(), ...drafted] : this.#messages;
    if (messages.length === 0) throw new Error("Write a message first.");
    const system = this.#system.value;
    const first = system === "" ? [] : [{ role: "system", content: system }];
    return { messages: [...first, ...messages], logprobs: true, top_logprobs: NUM_TOP };
  }

  /** The message that is sent now, if there is one. */
  #drafted(again) {
    const content = this.#draft.area.value;
    return again || content === "" ? [] : [{ role: "user", content }];
  }

  /** The messages with the last answer, unless it failed before its first word. */
  #settled() {
    const { text = "", toolCalls: calls = [] } = this.#answer ?? {};
    if (text === "" && calls.length === 0) return this.#messages;
    return [...this.#messages, { role: "assistant", content: text, ...(calls.length > 0 ? { tool_calls: calls } : {}) }];
  }

  /** Puts the pane of a new answer below the conversation, after the draft if it is sent now. */
  #place(pane, again) {
    const drafted = this.#drafted(again);
    if (drafted.length > 0) {
      this.#settle(drafted);
      this.#draft.area.value = "";
    }
    this.#turns.querySelector(".blank")?.remove();
    if (this.#answer === null) this.#turns.append(el("div", { class: "turn" }, pane.element));
    else this.#answer.element.replaceWith(pane.element);
    this.#answer = pane;
  }

  /** Makes the last answer a part of the conversation, and adds messages. */
  #settle(added) {
    this.#messages = [...this.#settled(), ...added];
    this.#answer?.settle();
    this.#answer = null;
    this.#turns.append(...added.map(turnOf));
  }

  /** Offers to give the results of an ended answer's tool calls. */
  #offer() {
    this.#answer.offerResults((results) => {
      this.#settle(results);
      this.work.again();
    });
  }

  #setForm({ system, messages }) {
    this.work.reset();
    this.#system.value = system;
    [this.#messages, this.#answer] = [messages, null];
    this.#turns.replaceChildren(...(messages.length > 0 ? messages.map(turnOf) : [blank()]));
  }
}

/** A message that is no longer running. */
function turnOf({ role, content, tool_calls: calls = [] }) {
  const text = [content, ...calls.map((call) => `${call.function.name}(${call.function.arguments})`)].filter((part) => part).join("\n");
  return el("div", { class: `turn ${role}` }, el("span", { class: "quiet", text: NAMES[role] ?? role }), el("div", { class: "said", text }));
}
