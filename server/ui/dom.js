/* Small helpers around elements. Everything that comes from the server or the user becomes text, never markup. */

/** A new element. `properties`: `text`, `class`, `data` (data-*), `on` (event listeners), attributes with a hyphen or `role`, and
    properties of the element. Children are elements, texts, or null for none. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "on") Object.entries(value).forEach(([event, listener]) => element.addEventListener(event, listener));
    else if (name === "role" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Makes a text an element's only content, which costs nothing where it is that already. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A button with a visible name; `properties` as in `el`. */
export function button(text, onclick, properties = {}) {
  return el("button", { type: "button", text, on: { click: onclick }, ...properties });
}

/** A number of bytes in words, such as "1.25 MiB". */
export function sized(bytes) {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log2(bytes || 1) / 10)));
  return `${Number((bytes / 1024 ** power).toPrecision(3)).toLocaleString("en")}\u00a0${["B", "KiB", "MiB", "GiB"][power]}`;
}

/** A number of things in words, such as "1 token" and "2,000 tokens". */
export const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** The texts and elements of a text whose code stands between backticks; one backtick is a character as every other. */
export function withCode(text) {
  const parts = text.split("`");
  return parts.length % 2 ? parts.map((part, index) => (index % 2 ? el("code", { text: part }) : part)) : [text];
}

const END_PIXELS = 4;
let lastId = 0;

/** An id that no other element of the page has. */
export const newId = (prefix) => `${prefix}-${(lastId += 1)}`;

/** A textarea with a visible label, that grows with its text. */
export function textArea(label, properties = {}) {
  const area = el("textarea", { id: newId("text"), spellcheck: false, ...properties });
  return { area, label: el("label", { htmlFor: area.id, text: label }) };
}

/** Keeps the window at the end of an element that grows while `grows()`, unless its reader scrolls up. Returns a function that goes there. */
export function followEnd(element, grows) {
  let [follows, last] = [true, 0];
  const beyond = () => element.getBoundingClientRect().bottom - innerHeight;
  const toEnd = () => {
    follows = true;
    if (beyond() > 0) scrollBy(0, beyond());
  };
  new ResizeObserver(() => follows && grows() && toEnd()).observe(element);
  document.addEventListener("scroll", () => {
    follows = beyond() < END_PIXELS || (follows && scrollY >= last);
    last = scrollY;
  }, { passive: true });
  return toEnd;
}

/** A row of choices, of which the first is chosen; `choose` is called with the text of another one. */
export function radios(label, texts, choose) {
  const name = newId("radios");
  const choices = texts.map((text, index) => {
    const input = el("input", { type: "radio", name, checked: index === 0, on: { change: () => choose(text) } });
    return el("label", {}, input, text);
  });
  return el("div", { class: "choice", role: "radiogroup", "aria-label": label, title: label }, ...choices);
}

/** Copies a text to the clipboard, also where the page came over plain HTTP from another machine. Returns whether it could. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { value: text, class: "offscreen" });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** A button that copies what `text()` returns, and says so for a moment. */
export function copyButton(name, text, properties = {}) {
  return button(name, async ({ currentTarget: self }) => {
    self.textContent = (await copy(text())) ? "Copied" : "Select and copy by hand";
    setTimeout(() => (self.textContent = name), 1500);
  }, properties);
}
