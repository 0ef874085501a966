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
const LOOK_MS = 3000;
/** What the header says in each state of the server. */
const STATES = { connecting: "connecting", ready: "ready", recovering: "recovering: a new engine starts",
  draining: "draining: it is shutting down", waiting: "not ready", unreachable: "cannot be reached" };
const byId = (id) => document.getElementById(id);

const api = new Api(askForKey);
const history = new History(openEntry);
/** Mode -> its view: run(), stop(), continue(), again(), restore(entry); null for a mode that has none of these. */
const views = new Map();
let [shown, monitor, needsKey] = [null, null, false];

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
  input.value = dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    resolve(dialog.returnValue === "use" && input.value !== "" ? input.value : null);
    input.value = "";
  }, { once: true }));
}

/** Looks how the server is, and which model it serves until that is known or a key is needed for it. */
async function watch() {
  if (document.hidden) return;
  const { state } = await api.look();
  if (needsKey || state === "unreachable") return;
  const before = api.model;
  const served = await api.served().catch((error) => ((needsKey = error.status === 401), before));
  if (served !== before) for (const mounted of views.values()) mounted.then((mode) => mode.prepare());
  if (served !== before || needsKey) showServer();
}

/** Shows the served model and how the server is. */
function showServer() {
  const { state, status } = api.health;
  const { id = "", max_model_len: context = 0 } = api.model ?? {};
  const asks = needsKey && state === "ready";
  let words = asks ? "an API key is needed" : STATES[state];
  if (state === "ready" && context) words += `, context of ${context.toLocaleString("en")} tokens`;
  const spans = [el("span", { class: "name", text: id, title: id }), el("span", { class: "quiet", text: words, title: status })];
  byId("model").replaceChildren(...spans, ...(asks ? [button("Enter key", () => api.renewKey())] : []));
  byId("model").dataset.state = asks ? "waiting" : state;
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
api.addEventListener("health", showServer);
api.addEventListener("key", () => watch((needsKey = false)));
document.addEventListener("visibilitychange", watch);
setInterval(watch, LOOK_MS);
showTab();
watch();
