/* Modes "Complete", a prompt in and its continuation out, and "Fill in the middle": what belongs between two texts, in its place. */

import { el, textArea } from "./dom.js";
import { NUM_TOP } from "./tokens.js";
import { Work } from "./work.js";

/** Mounts a mode into its panel. Returns its view. */
export function complete(panel, api, history) {
  const prompt = textArea("Prompt", { value: 'def count_vowels(text):\n    """Return the number of vowels in text."""', rows: 3 });
  const panes = panesWith("Press Run, or Ctrl+Enter: the text goes on from here.");
  return mount(panel, api, history, { prompt }, panes, {
    name: "complete",
    initial: { max_tokens: "128" },
    stage: (actions, alert) => [el("div", { class: "card" }, editor(prompt), actions), alert, panes],
    title: () => prompt.area.value.slice(0, 200),
  });
}

export function fill(panel, api, history) {
  const prompt = textArea("Before the gap", { value: 'def is_even(n):\n    """Return whether n is even."""\n    return ', rows: 3 });
  const suffix = textArea("After the gap", { value: " == 0\n", rows: 2 });
  const panes = panesWith("Press Run, or Ctrl+Enter: what belongs here is written here.");
  const hole = el("div", { class: "hole" }, el("p", { class: "label", text: "The gap" }), panes);
  return mount(panel, api, history, { prompt, suffix }, panes, {
    name: "fill",
    initial: { max_tokens: "48" },
    needs: "completion_fim",
    lacking: "This checkpoint's tokenizer has no fill-in-the-middle tokens, so it cannot fill a gap. Complete continues any text.",
    stage: (actions, alert) => [el("div", { class: "card" }, editor(prompt), hole, editor(suffix), actions), alert],
    title: () => prompt.area.value.slice(-200),
  });
}

const panesWith = (text) => el("div", { class: "panes" }, el("p", { class: "blank", text }));
const editor = ({ label, area }) => el("div", { class: "editor" }, label, area);

/** A mode whose form is these texts, by the names that they have in a request. */
function mount(panel, api, history, texts, panes, mode) {
  const form = () => Object.fromEntries(Object.entries(texts).map(([name, { area }]) => [name, area.value]));
  return new Work(panel, api, history, {
    path: "v1/completions",
    schema: "CompletionBody",
    body: () => ({ ...form(), logprobs: NUM_TOP }),
    continued: (body, text) => ({ ...body, prompt: body.prompt + text }),
    place: (made) => panes.replaceChildren(...made.map((pane) => pane.element)),
    form,
    setForm: (kept) => Object.entries(texts).forEach(([name, { area }]) => (area.value = kept[name])),
    ...mode,
  });
}
