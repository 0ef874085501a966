/* The colours of what is drawn on a canvas, from the variables of monitor.css, and word of their changes (light, dark). */

import { colour } from "./dom.js";

const NUM_HUES = 8;

/** The colours in force. `of(id)`: the stable colour of a sequence. */
export function colours() {
  const names = ["surface", "line", "ink", "muted", "bad", "series-1", "series-2", "map-free", "map-cached"];
  const read = Object.fromEntries(names.map((name) => [name.replace("map-", ""), colour(`--${name}`)]));
  const hues = Array.from({ length: NUM_HUES }, (_, i) => colour(`--map-hue-${i}`));
  return { ...read, hues, of: (id) => hues[id % NUM_HUES] };
}

/** Calls `changed` when the colours have changed, until the signal aborts. */
export function watchTheme(changed, signal) {
  document.addEventListener("themechange", changed, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed, { signal });
}
