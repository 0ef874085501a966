/* The colours of what is drawn on a canvas. When they change, light to dark or back, the document gets the event "themechange". */

import { NUM_HUES } from "./cache-state.js";
import { el } from "./dom.js";

const HUES = Array.from({ length: NUM_HUES }, (_, i) => `hue-${i}`);
const NAMES = ["surface", "line", "ink", "muted", "free", "cached", "series-1", "series-2", ...HUES];

/** The present values of NAMES, which are variables of the style sheets. */
export function colours() {
  const probe = document.body.appendChild(el("span", { hidden: true }));
  const valueOf = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = Object.fromEntries(NAMES.map((name) => [name, valueOf(name)]));
  probe.remove();
  return found;
}
