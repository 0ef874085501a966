/* Mode "Complete": a prompt in, its continuation out. */

import { blank, el, textArea } from "./dom.js";
import { NUM_TOP } from "./tokens.js";
import { Work } from "./work.js";

const EXAMPLE = "def fibonacci(n):\n    ";

/** Mounts the mode into its panel. Returns its view. */
export function mount(panel, api, history) {
  const { area, label } = textArea("Prompt", { value: EXAMPLE, rows: 3 });
  const panes = el("div", { class: "panes" }, blank("Press Run, or Ctrl+Enter: the text goes on from here."));
  return new Work(panel, api, history, {
    name: "complete",
    path: "v1/completions",
    schema: "CompletionBody",
    initial: { max_tokens: "128" },
    stage: (actions, alert) => [el("div", { class: "card" }, el("div", { class: "editor" }, label, area), actions), alert, panes],
    body: () => ({ prompt: area.value, logprobs: NUM_TOP }),
    continued: (body, text) => ({ ...body, prompt: body.prompt + text }),
    place: (made) => panes.replaceChildren(...made.map((pane) => pane.element)),
    form: () => ({ prompt: area.value }),
    setForm: ({ prompt }) => (area.value = prompt),
    title: () => area.value.slice(0, 200),
  });
}
