/* What every mode has: the buttons, the settings, the outputs side by side, the request as code, and the errors in words.

   A mode gives its editor and turns its form into a body; this does the rest. */

import { button, copyButton, el, followEnd, radios } from "./dom.js";
import { Pane } from "./pane.js";
import { Settings } from "./settings.js";
import { snippetsOf } from "./snippets.js";
import { legend } from "./tokens.js";

const SEEDS = 1_000_000;
const CONTINUABLE = ["length", "stopped", "stop", "timeout", null];
const canContinue = (pane) => pane.text !== "" && CONTINUABLE.includes(pane.finish);

export class Work {
  #panes = [];
  #lastSeed = null;
  #count = 1;
  #alert = el("div", { class: "alert", role: "alert", hidden: true });

  /** `mode`: {name, path, schema, initial settings, stage(actions, alert), body(again), continued(body, text), place(panes, again),
      form(), setForm(form), title()}, and if it likes {verb, isSingle: has one output, done(), needs: a capability, lacking: words without}. */
  constructor(panel, api, history, mode) {
    Object.assign(this, { api, history, mode });
    this.settings = new Settings(mode.name, mode.initial);
    this.runButton = button(mode.verb ?? "Run", () => this.run(), { class: "primary", title: "Ctrl+Enter" });
    this.stopButton = button("Stop", () => this.stop(), { title: "Esc", disabled: true });
    this.continueButton = button("Continue", () => this.continue(), { title: "Alt+C", disabled: true });
    this.againButton = button("Regenerate", () => this.again(), { title: "Again with the same seed (Alt+R)", disabled: true });
    const counts = radios("Outputs side by side", ["1", "2", "3", "4"], (count) => (this.#count = Number(count)));
    const actions = el("div", { class: "actions" }, this.runButton, this.stopButton, this.continueButton, this.againButton,
      mode.isSingle ? null : el("span", { class: "row quiet" }, "Outputs", counts),
      button("Code", () => this.#showCode(), { class: "spread", "aria-haspopup": "dialog" }));
    this.code = el("dialog", { class: "code", "aria-label": "The request as code" });
    this.notice = el("p", { class: "blank", role: "status", text: mode.lacking ?? "", hidden: true });
    const stage = el("div", { class: "stage" }, this.notice, ...mode.stage(actions, this.#alert), legend());
    this.toEnd = followEnd(stage, () => this.isRunning);
    panel.replaceChildren(el("div", { class: "work" }, stage, this.settings.element), this.code);
    this.prepare();
  }

  /** Shows the settings, once; again after the server has refused its schema. Returns whether the mode can run. */
  async prepare() {
    this.ready ??= this.settings.show(this.api, this.mode.schema);
    try {
      await this.ready;
    } catch (error) {
      this.ready = null;
      const textContent = error.status === 401 ? "An API key is needed: Enter key, above." : error.message;
      Object.assign(this.#alert, { textContent, hidden: false });
      return false;
    }
    this.#alert.hidden = true;
    this.notice.hidden = this.api.model.capabilities?.[this.mode.needs] !== false;
    this.#update();
    return this.notice.hidden;
  }

  get isRunning() {
    return this.#panes.some((pane) => pane.isRunning);
  }

  /** Runs the form as it stands, with new seeds unless one is set. A request has the parameters that are shown: there is none without. */
  async run() {
    this.api.declined = false; // The user may have a key now.
    if (await this.prepare()) this.#runWith(null);
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
    this.#place(this.#count, again);
    this.#start(this.#panes.map((pane, index) => [pane, { ...body, seed: this.#lastSeed + index }, false]));
    this.toEnd();
  }

  /** Goes on where the outputs ended. */
  continue() {
    const body = this.continueButton.disabled ? null : this.#body(true);
    if (body === null) return;
    const next = (pane, index) => [pane, { ...this.mode.continued(body, pane.text), seed: body.seed ?? this.#lastSeed + index }, true];
    this.#start(this.#panes.map(next).filter(([pane]) => canContinue(pane)));
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

  /** Runs requests, and keeps them in the history as they were sent, unless nothing came of them. */
  async #start(runs) {
    const { mode } = this;
    const panes = this.#panes;
    const sent = { mode: mode.name, title: mode.title(), form: mode.form(), settings: { ...this.settings.kept }, seed: this.#lastSeed };
    const all = Promise.all(runs.map(([pane, body, keeps]) => pane.run(mode.path, body, keeps)));
    this.#update();
    await all;
    if (panes.some((pane) => pane.hasOutput)) this.history.add({ ...sent, outputs: panes.map((pane) => pane.text) });
    if (panes !== this.#panes) return; // Something else is shown meanwhile.
    this.#update();
    mode.done?.();
  }

  /** The request as the form and the settings say; null if they cannot be sent, which is said. */
  #body(again = false) {
    this.#alert.hidden = true;
    try {
      return { ...this.mode.body(again), ...this.settings.values };
    } catch (error) {
      Object.assign(this.#alert, { textContent: error.message, hidden: false });
      return null;
    }
  }

  #update() {
    const isBlocked = this.isRunning || !this.notice.hidden;
    this.runButton.disabled = isBlocked;
    this.stopButton.disabled = !this.isRunning;
    this.againButton.disabled = isBlocked || this.#lastSeed === null;
    this.continueButton.disabled = isBlocked || !this.#panes.some(canContinue);
  }

  /** Shows the present request in each language, with the seed of the output that is shown. */
  #showCode() {
    const body = this.#body();
    if (body === null) return;
    const { logprobs, top_logprobs: _, ...plain } = body;
    const seed = this.#lastSeed === null ? {} : { seed: this.#lastSeed };
    const request = { model: this.api.model.id, ...seed, ...plain, stream: true };
    const pre = el("pre", { tabIndex: 0, "aria-label": "Code" });
    const snippets = snippetsOf(request);
    const write = (language) => (pre.textContent = snippets[language](this.api.base.href, this.mode.path, request, this.api.hasKey));
    this.code.replaceChildren(el("h2", { text: "This request as code" }), radios("Language or API", Object.keys(snippets), write), pre,
      el("div", { class: "row end" }, copyButton("Copy", () => pre.textContent), button("Close", () => this.code.close())));
    write("curl");
    this.code.showModal();
  }
}
