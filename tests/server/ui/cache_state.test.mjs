/* CacheState against a model that keeps what each page holds in the plainest way, over random events: `node --test` runs it. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

const source = readFileSync(new URL("../../../server/ui/cache-state.js", import.meta.url), "utf8");
const { CacheState, phaseOf } = await import(`data:text/javascript,${encodeURIComponent(source)}`);

const [NUM_PAGES, PAGE_SIZE, STATES] = [40, 4, ["waiting", "running", "preempted"]];

/** Random integers below a bound, the same for a seed. */
function generator(seed) {
  let state = seed;
  return (bound) => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return Math.floor((state / 2 ** 32) * bound);
  };
}

const FREE_CELL = [0, -1, 0];
const row = (id, state, computed, output) => [id, `request-${id}`, state, 10, 2, computed, output, 1, 0];

/** Changes a model, an object of cells and rows, at random; returns the ids of rows that it removed. */
function change(model, random) {
  for (let i = random(8); i > 0; i--) {
    const cell = [[...FREE_CELL], [1, -1, 0], [2, random(9), PAGE_SIZE * random(9)], [3, random(9), PAGE_SIZE * random(9)]][random(4)];
    model.cells[random(NUM_PAGES)] = cell;
  }
  const ended = [...model.rows.keys()].filter(() => random(5) === 0);
  for (const id of ended) model.rows.delete(id);
  const old = [...model.rows.keys()].filter(() => random(3) === 0);
  for (const id of [...old, (model.next += 1)]) model.rows.set(id, row(id, STATES[random(3)], random(40), random(20)));
  return ended;
}

/** The event of a model. */
function eventOf(model, view) {
  const pages = [...model.cells.keys()].filter((page) => String(model.cells[page]) !== String(FREE_CELL));
  const cells = pages.flatMap((page) => [page, 1, ...model.cells[page]]);
  return { engine: 0, view, num_pages: NUM_PAGES, page_size: PAGE_SIZE, cells, sequences: [...model.rows.values()] };
}

test("the state is the model's after every event", () => {
  for (let seed = 1; seed <= 200; seed++) {
    const [random, state] = [generator(seed), new CacheState()];
    let model = { cells: Array(NUM_PAGES).fill(FREE_CELL), rows: new Map(), next: 0 };
    for (let view = 0; view < 30; view++) {
      const before = [...model.cells];
      const ended = change(model, random);
      const { whole, pages } = state.apply(eventOf(model, view), view);
      assert.equal(whole, view === 0);
      const changed = [...before.keys()].filter((page) => String(before[page]) !== String(model.cells[page]));
      assert.deepEqual(pages, view === 0 ? [] : changed);
      const held = Array.from(state.kinds, (kind, page) => [kind, state.owners[page], state.positions[page]]);
      assert.deepEqual(held, model.cells);
      assert.deepEqual([...state.sequences.keys()].sort(), [...model.rows.keys()].sort());
      for (const [id, , name, , , computed] of model.rows.values()) {
        assert.equal(state.sequences.get(id).state, name);
        assert.equal(state.sequences.get(id).numComputed, computed);
      }
      for (const id of ended) assert.ok(state.ended.has(id));
      assert.equal(state.counts().reduce((sum, count) => sum + count), NUM_PAGES);
      assert.equal(state.view, view);
    }
  }
});

const whole = (cells, sequences, view = 0, engine = 0) => ({
  engine, view, num_pages: NUM_PAGES, page_size: PAGE_SIZE, cells, sequences,
});

test("a run sets all of its pages, and written are those of the tokens that a sequence has got", () => {
  const state = new CacheState();
  const cells = [0, 1, 2, 7, 0, 1, 1, 2, 7, 4, 2, 1, 2, 7, 8, 3, 5, 1, -1, 0];
  state.apply(whole(cells, [row(7, "running", 3, 0)]), 0);
  assert.deepEqual(state.counts(), [NUM_PAGES - 8, 5, 3, 0]);
  const change = state.apply(whole(cells, [row(7, "running", 6, 0)], 1), 1);
  assert.deepEqual(change.written, [0, 1]); // Tokens 3, 4 and 5.
  const preempted = state.apply(whole(cells, [row(7, "preempted", 0, 0)], 2), 2);
  assert.deepEqual(preempted.written, []);
});

test("phases follow each other, and end", () => {
  const state = new CacheState();
  const rows = [row(1, "waiting", 0, 0), row(1, "running", 4, 0), row(1, "running", 8, 0), row(1, "running", 10, 1), row(1, "preempted", 0, 5)];
  rows.forEach((values, now) => state.apply(whole([], [values], now), now));
  state.apply(whole([], [], rows.length), 9);
  const phases = [["waiting", 0], ["prefill", 1], ["generation", 3], ["preempted", 4], ["ended or not listed", 9]];
  assert.deepEqual(state.ended.get(1).phases, phases.map(([phase, since]) => ({ phase, since })));
  assert.equal(state.sequences.size, 0);
  assert.equal(phaseOf({ state: "running", numPrompt: 10, numComputed: 12, numOutput: 5 }), "prefill");
});

test("the state of another engine replaces everything", () => {
  const state = new CacheState();
  state.apply(whole([0, 1, 1, -1, 0], [row(1, "running", 3, 0)]), 0);
  assert.equal(state.apply(whole([], [], 0, 1), 3).whole, true);
  assert.equal(state.engine, 1);
  assert.equal(state.counts()[1], 0);
  assert.equal(state.ended.get(1).phases.at(-1).since, 3);
});
