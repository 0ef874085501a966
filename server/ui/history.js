/* The history of runs, in this browser only: a list in a drawer, newest first, with a button that clears it.

   An entry is {mode, at, title, form, settings, seed, outputs}: what the mode needs to restore itself. Long texts and old entries are left
   out, so that it stays small. */

import { el } from "./dom.js";
import { load, save } from "./store.js";

const MAX_ENTRIES = 50;
const MAX_CHARS = 20_000;
const NAMES = { complete: "Complete", fill: "Fill", chat: "Chat" };

export class History {
  /** `onOpen` is called with the entry that the user opens. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.dialog = document.getElementById("history");
    document.getElementById("history-clear").addEventListener("click", () => save("history", null) && this.#render());
  }

  /** Adds an entry; the oldest ones give way where the browser has no room. */
  add(entry) {
    const kept = { ...entry, at: Date.now(), outputs: entry.outputs.map((text) => text.slice(0, MAX_CHARS)) };
    if (JSON.stringify(kept.form).length > 2 * MAX_CHARS) return;
    const entries = [kept, ...load("history", [])].slice(0, MAX_ENTRIES);
    while (!save("history", entries) && entries.length > 1) entries.pop();
  }

  show() {
    this.#render();
    this.dialog.showModal();
  }

  #render() {
    const entries = load("history", []);
    document.getElementById("history-empty").hidden = entries.length > 0;
    document.getElementById("history-clear").disabled = entries.length === 0;
    document.getElementById("history-list").replaceChildren(...entries.map((entry) => this.#item(entry)));
  }

  #item(entry) {
    const time = new Date(entry.at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const texts = [`${NAMES[entry.mode]} · ${time}`, entry.title, entry.outputs[0] ?? ""];
    const spans = texts.map((text, index) => el("span", { class: ["quiet", "what", "what quiet"][index], text }));
    return el("li", {}, el("button", { type: "button", data: { close: "" }, on: { click: () => this.onOpen(entry) } }, ...spans));
  }
}
