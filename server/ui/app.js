/* The page's frame: tabs, theme, dialogs, shortcuts and the served model. Each mode is a module of its own that is mounted when its tab is
   shown first; the cache's is mounted while its tab is shown, because it reads a live stream. */

import { Api } from "./api.js";
import { button, el } from "./dom.js";
import { History } from "./history.js";
import { load, save } from "./store.js";

const MODES = ["complete", "fill", "chat", "cache"];
/** Theme -> its sign, its name, the next theme. */
const THEMES = { auto: ["◐", "as the system", "light"], light: ["☀", "light", "dark"], dark: ["☾", "dark", "auto"] };
const ALT = { c: "continue", r: "again", ...Object.fromEntries(MODES.map((mode, index) => [index + 1, `#${mode}`])) };
const MODEL_RETRY = 2000;
const byId = (id) => document.getElementById(id);

const api = new Api(askForKey);
const history = new History(openEntry);
/** Mode -> its view: run(), stop(), continue(), again(), restore(entry); null for a mode that has none of these. */
const views = new Map();
let [shown, monitor] = [null, null];

/** Shows the tab that the URL names. */
async function showTab() {
  const named = location.hash.slice(1);
  const mode = MODES.includes(named) ? named : MODES[0];
  if (mode === shown) return;
  shown = mode;
  for (const other of MODES) {
    byId(`tab-${other}`).ariaCurrent = other === mode ? "page" : null;
    byId(`panel-${other}`).hidden = other !== mode;
  }
  monitor?.destroy();
  monitor = null;
  if (mode !== "cache") return view(mode);
  const { Monitor } = await import("./monitor.js");
  if (shown === mode) monitor ??= new Monitor(byId("panel-cache"), api);
}

/** The view of a mode, mounted on first use. */
function view(mode) {
  const module = mode === "chat" ? "./chat.js" : "./completions.js";
  if (!views.has(mode)) views.set(mode, import(module).then(({ [mode]: mount }) => mount(byId(`panel-${mode}`), api, history)));
  return views.get(mode);
}

function setTheme(theme) {
  const [sign, name] = THEMES[theme];
  document.documentElement.dataset.theme = theme;
  Object.assign(byId("theme"), { textContent: sign, title: `Theme: ${name}`, ariaLabel: `Theme: ${name}. Change` });
  save("theme", theme);
  document.dispatchEvent(new Event("themechange"));
}

/** Asks for an API key in a dialog. Resolves to the key, or to null if none is given. */
function askForKey(refused) {
  const dialog = byId("key");
  const input = byId("key-value");
  byId("key-title").textContent = refused ? "The server refused that API key" : "This server asks for an API key";
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const answer = () => {
      resolve(dialog.returnValue === "use" && input.value !== "" ? input.value : null);
      input.value = "";
    };
    dialog.addEventListener("close", answer, { once: true });
  });
}

/** Shows the served model. Tries again while the server is loading it or away, and once there is a key. */
async function showModel() {
  const model = byId("model");
  try {
    const [first] = (await api.json("v1/models")).data;
    api.model = first.id;
    for (const mounted of views.values()) mounted.then((mode) => mode.prepare());
    model.dataset.state = "ready";
    const context = `${first.max_model_len.toLocaleString("en")} tokens of context`;
    model.replaceChildren(el("span", { class: "name", text: first.id, title: first.id }), el("span", { class: "quiet", text: context }));
  } catch (error) {
    model.dataset.state = "waiting";
    const text = error.status === 401 ? "an API key is needed" : "waiting for the server";
    model.replaceChildren(el("span", { class: "name", text }));
    if (error.status !== 401) return setTimeout(showModel, MODEL_RETRY);
    model.append(button("Enter key", () => api.renewKey()));
    api.addEventListener("key", showModel, { once: true });
  }
}

/** Shortcuts of the page; a dialog closes itself on Escape. */
async function onKey(event) {
  if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
  const action = actionOf(event);
  if (action === null) return;
  event.preventDefault();
  if (action === "shortcuts") byId("shortcuts").showModal();
  else if (action.startsWith("#")) location.hash = action;
  else if (shown !== "cache") (await view(shown))[action]?.();
}

/** What a key does; null for nothing. It goes by what is typed: with Alt some keyboards type characters, such as # by Alt+3. */
function actionOf({ key, ctrlKey, metaKey, altKey, target }) {
  if (key === "Enter" && (ctrlKey || metaKey)) return "run";
  if (key === "Escape") return "stop";
  if (altKey && !ctrlKey && !metaKey) return ALT[key.toLowerCase()] ?? null;
  const writes = target.closest("input, textarea, select, [contenteditable]") !== null;
  return key === "?" && !writes ? "shortcuts" : null;
}

/** Restores an entry of the history in its own tab. */
async function openEntry(entry) {
  location.hash = entry.mode;
  (await view(entry.mode)).restore(entry);
}

setTheme(load("theme", "auto"));
byId("theme").addEventListener("click", () => setTheme(THEMES[load("theme", "auto")][2]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(load("theme", "auto")));
byId("show-shortcuts").addEventListener("click", () => byId("shortcuts").showModal());
byId("show-history").addEventListener("click", () => history.show());
document.addEventListener("click", ({ target }) => target.closest("[data-close]")?.closest("dialog").close());
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", showTab);
showTab();
showModel();
