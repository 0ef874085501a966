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

/** Saves a value. Returns whether there was room for it. */
export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Removes what was saved under a name. */
export function forget(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // Nothing was kept.
  }
}
