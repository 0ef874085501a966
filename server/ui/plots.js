/* Live plots of the last five minutes, from the stats events of GET /monitor; uPlot draws. Rates and quantiles are differences between two
   events. The numbers at the cursor, or else the latest, are there as text. It knows nothing of the network. */

import { el } from "./dom.js";
import { colours } from "./theme.js";
import UPlot from "./vendor/uPlot.js";

const SECONDS = 300;
const HEIGHT = 132;
const QUANTILE_SECONDS = 10; // Histograms are compared over so many, so that there are some values to count.
const AGO = ["", "−4 min", "", "−2 min", "", "now"]; // Ticks of the time axis, a minute from one to the next.

/** The value below which a share of what a histogram has counted between two events lies; null where nothing was counted. */
export function quantile(before, { counts: after, bounds }, share) {
  const counts = after.map((count, i) => count - before.counts[i]);
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total <= 0) return null;
  let rest = share * total;
  const index = counts.findIndex((count) => (rest -= count) <= 0);
  if (index >= bounds.length) return bounds.at(-1);
  const low = index ? bounds[index - 1] : 0;
  return low + (bounds[index] - low) * (1 + rest / counts[index]);
}

/** Each value is computed from {latest, earlier}: this stats event, and the one QUANTILE_SECONDS ago. */
const now = (name) => ({ latest }) => latest[name];
const rate = (name) => ({ latest, earlier }) => {
  const seconds = latest.time - earlier.time;
  return seconds > 0 ? (latest.totals[name] - earlier.totals[name]) / seconds : null;
};
const share = (name, part) => ({ latest, earlier }) => quantile(earlier[name], latest[name], part);
const quantiles = (name) => [["p50", share(name, 0.5)], ["p95", share(name, 0.95)]];

const LARGE = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (value) => (value < 100_000 ? Number(value.toFixed(value < 100 ? 1 : 0)).toLocaleString("en") : LARGE.format(value));
const duration = (value) => (!value ? "0" : value < 1 ? `${Number((value * 1000).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`);

/** Title, format of values, upper end of the axis where all values are small, and for each series its name and values. */
const PLOTS = [
  ["Requests", count, 4, [["running", now("running")], ["waiting", now("waiting")]]],
  ["Tokens a second", count, 10, [["generated", rate("generation_tokens")], ["prompt", rate("prompt_tokens")]]],
  ["Pages", count, 10, [["owned", now("pages_used")], ["prefixes", now("pages_cached")]]],
  ["Time to first token", duration, 0.01, quantiles("time_to_first_token")],
  ["Time between tokens", duration, 0.01, quantiles("inter_token_latency")],
  ["Time of a step", duration, 0.01, quantiles("step_time")],
];

export class Plots {
  /** `signal` ends it. */
  constructor(signal) {
    this.events = [];
    this.plots = PLOTS.map((plot) => new Plot(...plot));
    const columns = el("div", { class: "columns" }, ...this.plots.map(({ element }) => element));
    this.element = el("details", { class: "plots", open: matchMedia("(min-width: 721px)").matches },
      el("summary", { text: "Plots of the last five minutes" }), columns);
    document.addEventListener("themechange", () => this.plots.forEach((plot) => plot.build()), { signal });
    const resize = ({ plot, area }) => plot.setSize({ width: Math.max(1, area.clientWidth), height: HEIGHT });
    const observer = new ResizeObserver(() => this.plots.forEach(resize));
    observer.observe(this.element);
    signal.addEventListener("abort", () => {
      observer.disconnect();
      for (const { plot } of this.plots) plot.destroy();
    });
  }

  /** Adds the values of a stats event. Counts that have become less are another server's, of which there is no event before. */
  add(stats) {
    if (stats.totals.generation_tokens < this.events.at(-1)?.totals.generation_tokens) this.events = [];
    this.events = [...this.events.filter(({ time }) => time >= stats.time - QUANTILE_SECONDS), stats];
    const moment = { latest: stats, earlier: this.events[0] };
    for (const plot of this.plots) plot.add(stats.time, moment);
  }

  /** Makes the latest numbers of pages those of the map, which changes more often. */
  setPages(...values) {
    this.plots.find(({ title }) => title === "Pages").setLatest(values);
  }
}

class Plot {
  constructor(title, format, least, series) {
    Object.assign(this, { title, format, least, series, data: [[], [], []] });
    this.values = series.map((_, i) => el("span", { class: `series-${i + 1}` }));
    this.empty = el("p", { class: "empty quiet", text: "Nothing in the last five minutes" });
    this.area = el("div", { class: "plot", "aria-hidden": "true" });
    const values = el("p", { class: "quiet" }, ...this.values);
    this.element = el("section", { class: "card" }, el("h2", { text: title }), values, this.area, this.empty);
    this.build();
  }

  add(time, moment) {
    this.data.forEach((values) => values.push(null));
    this.data[0][this.data[0].length - 1] = time;
    while (this.data[0][0] < time - SECONDS) this.data.forEach((values) => values.shift());
    this.setLatest(this.series.map(([, value]) => value(moment)));
  }

  setLatest(values) {
    const last = this.data[0].length - 1;
    if (last < 0) return;
    values.forEach((value, i) => (this.data[i + 1][last] = value));
    this.empty.hidden = this.data.slice(1).some((values) => values.some((value) => value !== null));
    this.plot.setData(this.data);
    this.say(this.plot);
  }

  say({ cursor }) {
    this.series.forEach(([name], i) => {
      const value = this.data[i + 1][cursor.idx ?? this.data[0].length - 1] ?? null;
      this.values[i].textContent = `${name} ${value === null ? "–" : this.format(value)}`;
    });
  }

  /** Makes the plot, anew if there is one, in the colours in force. */
  build() {
    this.plot?.destroy();
    const { muted, line, ...colour } = colours();
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: this.area.clientWidth || 300,
      height: HEIGHT,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      hooks: { setCursor: [(plot) => this.say(plot)] },
      scales: {
        x: { time: false, range: (_, low, high) => [(high ?? SECONDS) - SECONDS, high ?? SECONDS] },
        y: { range: (_, low, high) => [0, Math.max(1.1 * (high ?? 0), this.least)] },
      },
      axes: [
        { ...axis, size: 24, splits: ({ scales: { x } }) => AGO.map((_, i) => x.max - 60 * (5 - i)), values: () => AGO },
        { ...axis, size: 56, space: 30, values: (_, splits) => splits.map(this.format) },
      ],
      series: [{}, ...[[], [5, 4]].map((dash, i) => ({ stroke: colour[`series-${i + 1}`], width: 2, dash, points: { show: false } }))],
    };
    this.plot = new UPlot(options, this.data, this.area);
  }
}
