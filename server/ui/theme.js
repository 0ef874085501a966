/* The colours of what is drawn on a canvas, and word of their changes (light, dark).

   The hues of sequences have a contrast of 3 to the surface in both themes; their least distance in OKLab, seen normally or without one of
   the three kinds of cones, is the largest that a search found. */

import { colour } from "./dom.js";

const LIGHT = ["#1f9ae9", "#895f0d", "#195863", "#6e50ba", "#7e9e09", "#361e84", "#af7692", "#5f2501"];
const DARK = ["#3f9196", "#ee9d01", "#34d1a9", "#725ac7", "#ffea55", "#a79bff", "#b7f5fb", "#aa4f01"];
const NAMES = ["surface", "line", "ink", "muted", "free", "cached", "series-1", "series-2"];

/** The stable hue of a sequence, in CSS. */
export const hueOf = (id) => `light-dark(${LIGHT[id % LIGHT.length]}, ${DARK[id % DARK.length]})`;

/** The present values of NAMES, which are variables of the style sheets, and `of(id)`, that of a sequence's hue. */
export function colours() {
  const hues = LIGHT.map((_, id) => colour(hueOf(id)));
  return { ...Object.fromEntries(NAMES.map((name) => [name, colour(`var(--${name})`)])), of: (id) => hues[id % hues.length] };
}

/** Calls `changed` when the colours have changed, until the signal aborts. */
export function watchTheme(changed, signal) {
  document.addEventListener("themechange", changed, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed, { signal });
}
