/* The KV cache of a running engine, as the events of GET /monitor describe it: every page's kind, owner and position, and the sequences.

   Invariant: after `apply` the state is the engine's own at the event's view. It knows nothing of the network, the document and the clock: times are arguments. */

export const [FREE, CACHED, OWNED, SHARED] = [0, 1, 2, 3]; // Kinds of pages.
export const NUM_HUES = 8; // Sequences are told apart by so many.
const FIELDS = ["id", "request", "state", "numPrompt", "numCached", "numComputed", "numOutput", "numPages", "numPreemptions"];
const RUN_INTEGERS = 5;
const MOST_ENDED = 100; // Ended sequences that can still be looked at.

/** What a sequence is doing: "waiting", "prefill", "generation", "preempted" or "ended". Of those that wait, only the first are listed. */
export function phaseOf(sequence) {
  if (sequence.state !== "running") return sequence.state;
  // The K/V of the last output token are stored by the step after the one that drew it.
  const known = sequence.numPrompt + Math.max(0, sequence.numOutput - 1);
  return sequence.numComputed < known ? "prefill" : "generation";
}

export class CacheState {
  engine = null;
  view = 0; // Number of the engine's view.
  sequences = new Map(); // Open sequences by id.
  ended = new Map(); // The latest ended ones by id, oldest first.

  constructor() {
    this.#allocate(0, 1);
  }

  /** Takes the state of a cache event. Returns {whole, pages, written}: whether every page may have changed, else those that have, and
      those written to. */
  apply(event, now) {
    const whole = event.engine !== this.engine || event.num_pages !== this.numPages;
    const before = [this.kinds, this.owners, this.positions];
    this.#allocate(event.num_pages, event.page_size);
    [this.engine, this.view] = [event.engine, event.view];
    this.#setCells(event.cells);
    const advanced = this.#setSequences(event, now);
    const isChanged = (page) => [this.kinds, this.owners, this.positions].some((values, i) => values[page] !== before[i][page]);
    const pages = whole ? [] : [...this.kinds.keys()].filter(isChanged);
    return { whole, pages, written: whole ? [] : this.#pagesOf(advanced) };
  }

  /** Number of pages of each kind. */
  counts() {
    const counts = [0, 0, 0, 0];
    for (const kind of this.kinds) counts[kind] += 1;
    return counts;
  }

  /** Number of pages up to the last one that is not free. */
  get extent() {
    return this.kinds.findLastIndex((kind) => kind !== FREE) + 1;
  }

  /** The hue of the sequence that owns a page. */
  hueOf(page) {
    return this.sequences.get(this.owners[page])?.hue ?? 0;
  }

  #allocate(numPages, pageSize) {
    [this.numPages, this.pageSize] = [numPages, pageSize];
    this.kinds = new Uint8Array(numPages);
    this.owners = new Float64Array(numPages).fill(-1); // Ids may exceed 32 bits.
    this.positions = new Float64Array(numPages);
  }

  #setCells(cells) {
    for (let i = 0; i < cells.length; i += RUN_INTEGERS) {
      const [first, count, kind, owner, position] = cells.slice(i, i + RUN_INTEGERS);
      this.kinds.fill(kind, first, first + count);
      this.owners.fill(owner, first, first + count);
      this.positions.fill(position, first, first + count);
    }
  }

  /** Returns the tokens whose K/V were stored since the last event: id of their sequence -> [first, end]. */
  #setSequences(event, now) {
    const advanced = new Map();
    const listed = new Set(event.sequences.map(([id]) => id));
    const gone = [...this.sequences.values()].filter(({ id }) => !listed.has(id));
    for (const sequence of gone) this.#end(sequence, now);
    for (const values of event.sequences) {
      const sequence = Object.fromEntries(FIELDS.map((field, i) => [field, values[i]]));
      const old = this.sequences.get(sequence.id) ?? this.ended.get(sequence.id); // It may have been beyond those that are listed.
      const stored = old?.numComputed ?? sequence.numCached;
      if (sequence.state === "running" && sequence.numComputed > stored) advanced.set(sequence.id, [stored, sequence.numComputed]);
      sequence.hue = old?.hue ?? this.#rarestHue();
      this.sequences.set(sequence.id, withPhase(sequence, old, now));
      this.ended.delete(sequence.id);
    }
    return advanced;
  }

  /** The hue that the fewest open sequences have. */
  #rarestHue() {
    const uses = Array(NUM_HUES).fill(0);
    for (const { hue } of this.sequences.values()) uses[hue] += 1;
    return uses.indexOf(Math.min(...uses));
  }

  #end(sequence, now) {
    this.sequences.delete(sequence.id);
    const state = sequence.state === "running" ? "ended" : "ended or not listed";
    this.ended.set(sequence.id, withPhase({ ...sequence, state }, sequence, now));
    if (this.ended.size > MOST_ENDED) this.ended.delete(this.ended.keys().next().value);
  }

  #pagesOf(tokens) {
    const pages = [];
    for (let page = 0; tokens.size && page < this.numPages; page++) {
      const [first, end] = (this.kinds[page] >= OWNED && tokens.get(this.owners[page])) || [0, 0];
      if (this.positions[page] < end && this.positions[page] + this.pageSize > first) pages.push(page);
    }
    return pages;
  }
}

/** The sequence with the list of its phases, each {phase, since}, continued from what it was before. */
function withPhase(sequence, before, now) {
  const phase = phaseOf(sequence);
  const phases = before?.phases ?? [];
  return { ...sequence, phases: phases.at(-1)?.phase === phase ? phases : [...phases, { phase, since: now }] };
}
