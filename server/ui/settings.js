/* The controls of a request's parameters, made from the schema in the server's own OpenAPI document: which fields there are, their bounds,
   descriptions and defaults. A field that is not set is not sent. It knows no requests. */

import { button, el, newId } from "./dom.js";
import { load, save } from "./store.js";

const FIRST = ["max_tokens", "temperature", "top_p", "seed", "stop", "tools", "tool_choice"];
/** Fields that the page itself fills in, or that change what an answer looks like to a program. */
const OWN = new Set([
  "prompt", "suffix", "messages", "model", "stream", "stream_options", "resumable", "n", "best_of", "echo", "request_id", "logprobs",
  "top_logprobs", "logprob_token_ids", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "response_format",
  "structured_outputs", "max_completion_tokens", "truncate_prompt_tokens", "token_healing", "continue_final_message",
]);
const WITHOUT_EFFECT = /chang\w+ nothing|not supported|not stored|only text is supported/i;
const FORMATS = { "": "Any text", json: "JSON schema", regex: "Regular expression" };
const EXAMPLES = { json: '{"type": "object", "properties": {"name": {"type": "string"}}}', regex: "[a-z]+@[a-z]+\\.com" };
const MAX_RANGE = 100; // A field with a wider range gets no slider.

/** What a user typed is no value of its field. */
export class SettingsError extends Error {}

export class Settings {
  #controls = [];
  #values;

  /** `name` of the mode whose settings these are; `initial` values are those of its first time. */
  constructor(name, initial) {
    this.name = `settings.${name}`;
    this.#values = load(this.name, initial);
    this.fields = el("div", { class: "fields" }, el("p", { class: "quiet", text: "Reading the server's schema…" }));
    this.element = el("details", { class: "card settings", open: matchMedia("(min-width: 1021px)").matches },
      el("summary", { text: "Parameters" }), this.fields);
  }

  /** Makes the controls of a request body. Throws ApiError if the server does not give its schema. */
  async show(api, body) {
    const fields = await api.fields(body);
    const shown = [...fields].filter(([name, field]) => !OWN.has(name) && isChoosable(field));
    const controls = new Map(shown.map(([name, field]) => [name, this.#control(name, field)]));
    const first = FIRST.filter((name) => controls.has(name));
    const rest = [...controls.keys()].filter((name) => !first.includes(name));
    const elements = (names) => names.map((name) => controls.get(name));
    const format = fields.has("structured_outputs") ? [this.#format()] : [];
    this.fields.replaceChildren(...elements(first), ...format,
      el("details", { class: "more" }, el("summary", { text: "More parameters" }), el("div", { class: "fields" }, ...elements(rest))),
      button("Reset all", () => this.restore({})));
  }

  /** The fields that are set, with their values. Throws SettingsError. */
  get values() {
    return Object.assign({}, ...this.#controls.map((control) => control.read()));
  }

  /** What the controls hold, to be restored. */
  get kept() {
    return { ...this.#values };
  }

  restore(kept) {
    this.#values = { ...kept };
    for (const control of this.#controls) control.show();
    save(this.name, this.#values);
  }

  #keep(name, text) {
    if (text === "") delete this.#values[name];
    else this.#values[name] = text;
    save(this.name, this.#values);
  }

  /** A labelled control. `parse(text)` gives the value of what was typed, and throws an Error with words if it is none. */
  #control(name, field) {
    const kind = kindOf(field);
    const input = kind.input(field);
    const description = el("p", { class: "about", id: newId("about"), hidden: true, text: field.description });
    input.id = newId("field");
    input.name = name;
    const reset = button("×", () => set(""), { class: "info reset", title: `Reset ${name}`, "aria-label": `Reset ${name}` });
    const slider = sliderOf(field, name);
    const show = () => {
      input.value = this.#values[name] ?? "";
      reset.hidden = input.value === "";
      input.classList.remove("invalid");
      if (slider !== null) slider.value = input.value || defaultOf(field) || slider.min;
    };
    const set = (text) => {
      this.#keep(name, text);
      show();
    };
    input.addEventListener("input", () => {
      this.#keep(name, input.value);
      reset.hidden = input.value === "";
      if (slider !== null && input.value !== "") slider.value = input.value;
    });
    slider?.addEventListener("input", () => set(slider.value));
    this.#controls.push({ show, read: () => readField(name, input, kind, field) });
    show();
    return el("div", { class: "field" },
      el("div", { class: "head" }, el("label", { htmlFor: input.id, text: name }), aboutButton(name, description), reset),
      description, slider === null ? input : el("div", { class: "pair" }, slider, input));
  }

  /** The constraint on the output: a kind, and its schema or expression. */
  #format() {
    const kind = el("select", { id: newId("format") }, ...Object.entries(FORMATS).map(([value, text]) => el("option", { value, text })));
    const text = el("textarea", { spellcheck: false, "aria-label": "Schema or expression of the output" });
    const show = () => {
      kind.value = this.#values["format.kind"] ?? "";
      text.value = this.#values["format.text"] ?? "";
      text.hidden = kind.value === "";
      text.placeholder = EXAMPLES[kind.value] ?? "";
      text.classList.remove("invalid");
    };
    kind.addEventListener("input", () => {
      this.#keep("format.kind", kind.value);
      show();
    });
    text.addEventListener("input", () => this.#keep("format.text", text.value));
    this.#controls.push({ show, read: () => readFormat(kind.value, text) });
    show();
    return el("div", { class: "field" }, el("div", { class: "head" }, el("label", { htmlFor: kind.id, text: "Output format" })), kind, text);
  }
}

function isChoosable(field) {
  return field.const === undefined && field.maxItems !== 0 && field.maxProperties !== 0 && !WITHOUT_EFFECT.test(field.description);
}

/** The default in a description's words, such as 16 of "Default: 16."; empty if it names none. */
function defaultOf(field) {
  return /Default: (?:the checkpoint's [^;]*, else\s)?(-?\d+(?:\.\d+)?|true|false)/.exec(field.description)?.[1] ?? "";
}

function aboutButton(name, description) {
  const self = button("i", () => {
    description.hidden = !description.hidden;
    self.setAttribute("aria-expanded", String(!description.hidden));
  }, { class: "info", title: description.textContent, "aria-label": `About ${name}`, "aria-expanded": "false", "aria-controls": description.id });
  return self;
}

const least = (field) => field.minimum ?? field.exclusiveMinimum;
const most = (field) => field.maximum ?? field.exclusiveMaximum;

function sliderOf(field, name) {
  if (!["number", "integer"].includes(field.type) || !(most(field) - least(field) <= MAX_RANGE)) return null;
  const step = field.type === "integer" ? 1 : 0.01;
  return el("input", { type: "range", min: least(field), max: most(field), step, "aria-label": `${name}, slider` });
}

/** How a field is typed in and read, by its type. */
function kindOf(field) {
  const choices = field.enum ?? (field.type === "boolean" ? ["true", "false"] : null);
  if (choices !== null) return { input: () => choiceInput(choices, field), parse: (text) => (field.type === "boolean" ? text === "true" : text) };
  if (field.type === "number" || field.type === "integer") return { input: () => numberInput(field), parse: parseNumber };
  const lines = (placeholder) => () => el("textarea", { spellcheck: false, placeholder });
  if (field.type === "array" && field.items?.type === "string") return { input: lines("one a line; \\n is a line end"), parse: parseTexts };
  if (field.type === "array" && field.items?.type === "integer") return { input: lines("numbers, such as 5, 17"), parse: parseNumbers };
  if (field.type === "string") return { input: () => el("input", { type: "text", spellcheck: false }), parse: (text) => text };
  return { input: lines(field.type === "array" ? "[…] as JSON" : "{…} as JSON"), parse: parseJson };
}

function choiceInput(choices, field) {
  const unset = el("option", { value: "", text: defaultOf(field) === "" ? "default" : `default: ${defaultOf(field)}` });
  return el("select", {}, unset, ...choices.map((text) => el("option", { value: text, text })));
}

function numberInput(field) {
  return el("input", { type: "number", min: least(field) ?? "", max: most(field) ?? "", step: field.type === "integer" ? 1 : "any",
    placeholder: defaultOf(field) || "default" });
}

function readField(name, input, kind, field) {
  input.classList.remove("invalid");
  if (input.value === "" && !input.validity?.badInput) return {};
  try {
    return { [name]: kind.parse(input.value, field) };
  } catch (error) {
    input.classList.add("invalid");
    throw new SettingsError(`${name}: ${error.message}`);
  }
}

function parseNumber(text, field) {
  const value = Number(text);
  if (text === "" || !Number.isFinite(value)) throw new Error("must be a number");
  if (field.type === "integer" && !Number.isSafeInteger(value)) throw new Error("must be a whole number that a browser can hold exactly");
  if (value < field.minimum || value > field.maximum) throw new Error(`must be from ${least(field)} to ${most(field)}`);
  if (value <= field.exclusiveMinimum) throw new Error(`must be above ${field.exclusiveMinimum}`);
  if (value >= field.exclusiveMaximum) throw new Error(`must be below ${field.exclusiveMaximum}`);
  return value;
}

/** One text a line, with \n, \t and \\ for what a line cannot hold. */
function parseTexts(text) {
  const escapes = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  return text.split("\n").filter((line) => line !== "").map((line) => line.replace(/\\([ntr\\])/g, (_, letter) => escapes[letter]));
}

function parseNumbers(text) {
  return text.split(/[\s,]+/).filter((word) => word !== "").map((word) => {
    if (!/^\d+$/.test(word)) throw new Error(`${word} is not a whole number`);
    return Number(word);
  });
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`is not JSON: ${error.message}`, { cause: error });
  }
}

function readFormat(kind, text) {
  text.classList.remove("invalid");
  if (kind === "") return {};
  try {
    if (text.value.trim() === "") throw new Error("is empty");
    return { structured_outputs: kind === "json" ? { json: parseJson(text.value) } : { regex: text.value } };
  } catch (error) {
    text.classList.add("invalid");
    throw new SettingsError(`Output format: ${error.message}`);
  }
}
