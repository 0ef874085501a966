/* What the page keeps in this browser (localStorage): theme, settings, history. It goes on without, where a browser keeps nothing. */

const PREFIX = "onehead.";

/** The value that was saved under a name, or `fallback`. */
export function load(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Saves a value; null removes it. Returns whether there was room for it. */
export function save(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
