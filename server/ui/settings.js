/* The controls of a request's parameters, made from the schema in the server's own OpenAPI document: which fields there are, their bounds,
   descriptions and defaults. A field that is not set is not sent. It knows no requests. */

import { button, el, newId, withCode } from "./dom.js";
import { load, save } from "./store.js";

const FIRST = ["max_tokens", "temperature", "top_p", "seed", "stop", "tools", "tool_choice"];
const FORMAT = "structured_outputs"; // Has fields of its own, one for each kind of constraint.
/** Fields that the page itself fills in, or that change what an answer looks like to a program. */
const OWN = new Set([
  "prompt", "suffix", "messages", "model", "stream", "stream_options", "resumable", "n", "best_of", "echo", "request_id", "logprobs",
  "top_logprobs", "logprob_token_ids", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "response_format", FORMAT,
  "max_completion_tokens", "truncate_prompt_tokens", "token_healing", "continue_final_message",
]);
const WITHOUT_EFFECT = /chang\w+ nothing|not supported|not stored|only text is supported/i;
const CALM = "0.4"; // Temperature where the checkpoint names no sampling parameters: 1 would make noise of a small model.
const MAX_RANGE = 100; // A field with a wider range gets no slider.

export class Settings {
  #controls = [];
  /** What the controls hold, to be restored: name -> text. */
  kept = null;

  /** `name` of the mode whose settings these are; `initial` values are those that "Reset all" gives back. */
  constructor(name, initial) {
    Object.assign(this, { name: `settings.${name}`, initial });
    this.fields = el("div", { class: "fields" }, el("p", { class: "quiet", text: "The server has not told them yet." }));
    this.element = el("details", { class: "card settings", open: matchMedia("(min-width: 1021px)").matches },
      el("summary", { text: "Parameters" }), this.fields);
  }

  /** Makes the controls of a request body. Throws ApiError if the server does not give its schema. */
  async show(api, body) {
    const [{ default_sampling_params: sampling = {} }, fields] = await Promise.all([api.served(), api.fields(body)]);
    const isUnnamed = Object.keys(sampling).length === 0;
    if (isUnnamed) this.initial.temperature = CALM;
    for (const [name, value] of Object.entries(sampling)) Object.assign(fields.get(name) ?? {}, { usual: String(value) });
    this.kept ??= { ...this.initial, ...load(this.name, {}) };
    const rest = [...fields.keys()].filter((name) => !OWN.has(name) && !FIRST.includes(name));
    const controls = (chosen, from = fields, group = "") =>
      chosen.filter((name) => isChoosable(from.get(name))).map((name) => this.#control(name, from.get(name), group));
    const more = (title, ...inner) => el("details", { class: "more" }, el("summary", { text: title }), el("div", { class: "fields" }, ...inner));
    const formats = fields.has(FORMAT) ? await api.fields("StructuredOutputs") : new Map();
    const text = isUnnamed ? `The checkpoint names no sampling parameters: temperature ${CALM} is this page's.` : "Defaults are the checkpoint's.";
    this.fields.replaceChildren(el("p", { class: "quiet", text }), ...controls(FIRST),
      more("Output format", ...controls([...formats.keys()], formats, FORMAT)), more("More parameters", ...controls(rest)),
      button("Reset all", () => this.restore({})));
  }

  /** The fields that are set, with their values. Throws an Error that names a field whose text is no value of it. */
  get values() {
    const values = {};
    for (const { name, group, read } of this.#controls) {
      const value = read();
      if (value !== undefined) (group === "" ? values : (values[group] ??= {}))[name] = value;
    }
    return values;
  }

  restore(kept) {
    this.kept = { ...this.initial, ...kept };
    for (const control of this.#controls) control.show();
    this.#save();
  }

  /** Keeps what differs from the initial values, which may be another model's the next time. */
  #save() {
    save(this.name, Object.fromEntries(Object.entries(this.kept).filter(([name, text]) => text !== (this.initial[name] ?? ""))));
  }

  /** A field's name, description and input, and a slider where its range is small. */
  #control(name, field, group) {
    const kind = kindOf(field);
    const input = Object.assign(kind.input(field), { id: newId("field"), name });
    const about = el("p", { class: "quiet", id: newId("about"), hidden: true }, ...withCode(field.description));
    const usual = this.initial[group + name] ?? "";
    const reset = button("×", () => set(usual), { class: "info spread", title: `Reset ${name}`, "aria-label": `Reset ${name}` });
    const slider = sliderOf(field, name);
    const show = (text = this.kept[group + name] ?? "") => {
      if (input.value !== text) input.value = text;
      if (slider !== null) slider.value = text || defaultOf(field) || slider.min;
      reset.hidden = text === usual;
      input.classList.remove("invalid");
    };
    const set = (text) => {
      this.kept[group + name] = text;
      this.#save();
      show();
    };
    input.addEventListener("input", () => set(input.value));
    slider?.addEventListener("input", () => set(slider.value));
    this.#controls.push({ name, group, show, read: () => readField(name, input, kind, field) });
    show();
    return el("div", { class: "field" },
      el("div", { class: "head" }, el("label", { htmlFor: input.id, text: name }), aboutButton(name, about), reset),
      about, slider === null ? input : el("div", { class: "pair" }, slider, input));
  }
}

function isChoosable(field) {
  const isFixed = field === undefined || "const" in field || field.maxItems === 0 || field.maxProperties === 0;
  return !isFixed && !WITHOUT_EFFECT.test(field.description);
}

/** The checkpoint's default, or that of a description's words, such as 16 of "Default: 16."; empty if there is none. */
function defaultOf(field) {
  return field.usual ?? /Default: (?:the checkpoint's [^;]*, else\s)?(-?\d+(?:\.\d+)?|true|false)/.exec(field.description)?.[1] ?? "";
}

function aboutButton(name, about) {
  const self = button("i", () => {
    about.hidden = !about.hidden;
    self.setAttribute("aria-expanded", String(!about.hidden));
  }, { class: "info", title: about.textContent, "aria-label": `About ${name}`, "aria-expanded": "false", "aria-controls": about.id });
  return self;
}

const least = (field) => field.minimum ?? field.exclusiveMinimum;
const most = (field) => field.maximum ?? field.exclusiveMaximum;
const parseNumbers = (text) => text.split(/[\s,]+/).filter((word) => word !== "").map((word) => parseNumber(word, { type: "integer" }));

function sliderOf(field, name) {
  if (!["number", "integer"].includes(field.type) || !(most(field) - least(field) <= MAX_RANGE)) return null;
  const step = field.type === "integer" ? 1 : 0.01;
  return el("input", { type: "range", min: least(field), max: most(field), step, "aria-label": `${name}, slider` });
}

/** How a field is typed in and read, by its type. */
function kindOf(field) {
  const choices = field.enum ?? (field.type === "boolean" ? ["true", "false"] : null);
  if (choices !== null) return { input: () => choiceInput(choices, field), parse: (text) => (field.type === "boolean" ? text === "true" : text) };
  if (field.type === "number" || field.type === "integer") return { input: numberInput, parse: parseNumber };
  const lines = (placeholder) => () => el("textarea", { spellcheck: false, placeholder });
  if (field.items?.type === "string") return { input: lines("one a line; \\n is a line end"), parse: parseTexts };
  if (field.items?.type === "integer") return { input: lines("numbers, such as 5, 17"), parse: parseNumbers };
  if (field.type === "string") return { input: lines(""), parse: (text) => text };
  return { input: lines(field.type === "array" ? "[…] as JSON" : "{…} as JSON"), parse: parseJson };
}

function choiceInput(choices, field) {
  const unset = el("option", { value: "", text: `default${defaultOf(field) && ": "}${defaultOf(field)}` });
  return el("select", {}, unset, ...choices.map((text) => el("option", { value: text, text })));
}

function numberInput(field) {
  return el("input", { type: "number", min: least(field) ?? "", max: most(field) ?? "", step: field.type === "integer" ? 1 : "any",
    placeholder: defaultOf(field) || "default" });
}

/** The value of what was typed, undefined for nothing. Throws an Error that names the field. */
function readField(name, input, kind, field) {
  try {
    if (!input.checkValidity()) throw new Error(input.validationMessage);
    return input.value === "" ? undefined : kind.parse(input.value, field);
  } catch (error) {
    input.classList.add("invalid");
    throw new Error(`${name}: ${error.message}`, { cause: error });
  }
}

function parseNumber(text, { type }) {
  const value = Number(text);
  if (type === "integer" && !Number.isSafeInteger(value)) throw new Error("must be a whole number that a browser can hold exactly");
  return value;
}

/** One text a line, with \n, \t, \r and \\ for what a line cannot hold. */
function parseTexts(text) {
  const escapes = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  return text.split("\n").filter((line) => line !== "").map((line) => line.replace(/\\([ntr\\])/g, (_, letter) => escapes[letter]));
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`is not JSON: ${error.message}`, { cause: error });
  }
}
