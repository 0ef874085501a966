/* What every mode has: the buttons, the settings, the outputs side by side, the request as code, and the errors in words.

   A mode gives its editor and turns its form into a body; the bench does the rest. */

import { SettingsError, Settings } from "./settings.js";
import { button, copyButton, el, newId } from "./dom.js";
import { Pane } from "./pane.js";
import { SNIPPETS } from "./snippets.js";
import { legend } from "./tokens.js";

const MAX_SIDE_BY_SIDE = 4;
const SEEDS = 2 ** 31;

export class Work {
  #panes = [];
  #lastSeed = null;
  #alert = el("div", { class: "alert", role: "alert", hidden: true });

  /** `mode`: {name, path, schema, editor, body(), continued(body, text), place(panes), form(), setForm(form), title(), done(panes),
      advice(error)}; the last two are optional, and `continued` is null where an output cannot be continued. */
  constructor(panel, api, history, mode) {
    Object.assign(this, { api, history, mode });
    this.settings = new Settings(mode.name, mode.initial);
    this.runButton = button(mode.verb ?? "Run", () => this.run(), { class: "primary", title: "Ctrl+Enter" });
    this.stopButton = button("Stop", () => this.stop(), { title: "Esc", disabled: true });
    this.continueButton = button("Continue", () => this.continue(), { title: "Alt+C", disabled: true });
    this.againButton = button("Regenerate", () => this.again(), { title: "Again with the same seed (Alt+R)", disabled: true });
    const actions = el("div", { class: "actions" }, this.runButton, this.stopButton, mode.continued === null ? null : this.continueButton,
      this.againButton, this.#sideBySide(), button("Code", () => this.#showCode(), { class: "spread", "aria-haspopup": "dialog" }));
    this.code = el("dialog", { class: "code", "aria-label": "The request as code" });
    panel.replaceChildren(el("div", { class: "work" },
      el("div", { class: "stage" }, ...mode.stage(actions, this.#alert), legend()), this.settings.element), this.code);
    this.ready = this.settings.show(api, mode.schema).catch((error) => this.#fail(error));
  }

  get isRunning() {
    return this.#panes.some((pane) => pane.isRunning);
  }

  /** Runs the form as it stands, with new seeds unless one is set. */
  async run() {
    await this.ready; // A request has the parameters that are shown.
    this.#runWith(null);
  }

  /** The same request with the same seeds: the same outputs, where the server is deterministic. */
  again() {
    if (this.#lastSeed !== null) this.#runWith(this.#lastSeed);
  }

  #runWith(seed) {
    const again = seed !== null;
    const body = this.isRunning ? null : this.#body(again);
    if (body === null) return;
    this.#lastSeed = body.seed ?? seed ?? Math.floor(Math.random() * SEEDS);
    this.#place(this.count, again);
    this.#start(this.#panes.map((pane, index) => [pane, { ...body, seed: this.#lastSeed + index }, false]));
  }

  /** Goes on where the outputs ended. */
  continue() {
    const body = this.isRunning || this.continueButton.disabled ? null : this.#body();
    if (body === null || this.mode.continued === null) return;
    this.#start(this.#panes.filter(canContinue).map((pane) => [pane, this.mode.continued(body, pane.text), true]));
  }

  stop() {
    for (const pane of this.#panes) pane.stop();
  }

  /** Shows an entry of the history as it was. */
  restore(entry) {
    this.reset();
    this.mode.setForm(entry.form);
    this.settings.restore(entry.settings ?? {});
    this.#place(entry.outputs.length, true);
    this.#panes.forEach((pane, index) => pane.restore(entry.outputs[index]));
    this.#lastSeed = entry.seed;
    this.#update();
  }

  /** Forgets the last run. */
  reset() {
    this.stop();
    this.#panes = [];
    this.#lastSeed = null;
    this.#alert.hidden = true;
    this.#update();
  }

  #place(count, again) {
    this.#panes = Array.from({ length: count }, (_, index) => new Pane(this.api, count > 1 ? `Output ${index + 1}` : "Output"));
    this.mode.place(this.#panes, again);
  }

  async #start(runs) {
    this.#alert.hidden = true;
    const all = Promise.all(runs.map(([pane, body, keeps]) => {
      pane.showSeed(body.seed);
      return pane.run(this.mode.path, body, keeps);
    }));
    this.#update();
    await all;
    this.#update();
    const failed = runs.map(([pane]) => pane).filter((pane) => pane.error);
    if (failed.length > 0) this.#fail(failed[0].error);
    const outputs = this.#panes.map((pane) => pane.text);
    this.history.add({ mode: this.mode.name, title: this.mode.title(), form: this.mode.form(), settings: this.settings.kept,
      seed: this.#lastSeed, outputs });
    this.mode.done?.(this.#panes);
  }

  /** The request as the form and the settings say; null if they cannot be sent, which is said. */
  #body(again = false) {
    this.#alert.hidden = true;
    try {
      return { ...this.mode.body(again), ...this.settings.values };
    } catch (error) {
      this.#fail(error);
      return null;
    }
  }

  #fail(error) {
    if (error.status === 401) return; // The header says that a key is needed.
    const advice = error instanceof SettingsError ? "" : (this.mode.advice?.(error) ?? "");
    this.#alert.replaceChildren(el("p", { text: error.message }), ...(advice === "" ? [] : [el("p", { text: advice })]));
    this.#alert.hidden = false;
  }

  #update() {
    const running = this.isRunning;
    this.runButton.disabled = running;
    this.stopButton.disabled = !running;
    this.againButton.disabled = running || this.#lastSeed === null;
    this.continueButton.disabled = running || !this.#panes.some(canContinue);
  }

  #sideBySide() {
    const name = newId("count");
    this.count = 1;
    const choices = Array.from({ length: MAX_SIDE_BY_SIDE }, (_, index) => {
      const input = el("input", { type: "radio", name, checked: index === 0, on: { change: () => (this.count = index + 1) } });
      return el("label", {}, input, String(index + 1));
    });
    return el("div", { class: "choice", role: "radiogroup", "aria-label": "Outputs side by side", title: "Outputs side by side" }, ...choices);
  }

  /** Shows the present request in each language. */
  #showCode() {
    const body = this.#body();
    if (body === null) return;
    const { logprobs, top_logprobs: _, ...plain } = body;
    const request = { model: this.api.model, ...plain, stream: true };
    const pre = el("pre", { tabIndex: 0, "aria-label": "Code" });
    const write = (language) => (pre.textContent = SNIPPETS[language](this.api.base.href, this.mode.path, request, this.api.hasKey));
    const name = newId("language");
    const languages = Object.keys(SNIPPETS).map((language, index) =>
      el("label", {}, el("input", { type: "radio", name, checked: index === 0, on: { change: () => write(language) } }), language));
    this.code.replaceChildren(el("h2", { text: "This request as code" }),
      el("div", { class: "row" }, el("div", { class: "choice", role: "radiogroup", "aria-label": "Language" }, ...languages)), pre,
      el("div", { class: "row end" }, copyButton("Copy", () => pre.textContent), button("Close", () => this.code.close())));
    write("curl");
    this.code.showModal();
  }
}

function canContinue(pane) {
  return pane.text !== "" && ["length", "stopped", "stop", "timeout", null].includes(pane.finish);
}
