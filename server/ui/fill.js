/* Mode "Fill in the middle": code before, code after, and what the model writes between them, in its place. */

import { blank, el, textArea } from "./dom.js";
import { NUM_TOP } from "./tokens.js";
import { Work } from "./work.js";

const EXAMPLE = { before: "def add(a, b):\n    ", after: "\n\nprint(add(1, 2))\n" };

/** Mounts the mode into its panel. Returns its view. */
export function mount(panel, api, history) {
  const before = textArea("Before the gap", { value: EXAMPLE.before, rows: 3 });
  const after = textArea("After the gap", { value: EXAMPLE.after, rows: 3 });
  const panes = el("div", { class: "panes" }, blank("Press Run, or Ctrl+Enter: what belongs here is written here."));
  const hole = el("div", { class: "hole" }, el("p", { class: "label", text: "The gap" }), panes);
  return new Work(panel, api, history, {
    name: "fill",
    path: "v1/completions",
    schema: "CompletionBody",
    initial: { max_tokens: "48" },
    stage: (actions, alert) => [
      el("div", { class: "card filling" }, el("div", { class: "editor" }, before.label, before.area), hole,
        el("div", { class: "editor" }, after.label, after.area), actions),
      alert,
    ],
    body: () => ({ prompt: before.area.value, suffix: after.area.value, logprobs: NUM_TOP }),
    continued: (body, text) => ({ ...body, prompt: body.prompt + text }),
    place: (made) => panes.replaceChildren(...made.map((pane) => pane.element)),
    form: () => ({ before: before.area.value, after: after.area.value }),
    setForm: (form) => {
      before.area.value = form.before;
      after.area.value = form.after;
    },
    title: () => before.area.value.slice(-200),
    advice: (error) => (error.param === "suffix" ? "Serve a code model whose tokenizer has fill-in-the-middle tokens." : ""),
  });
}
