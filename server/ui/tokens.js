/* Generated text as tokens, each tinted by how likely it was, with its alternatives in a card on hover, focus or touch. It knows no requests.

   Text is only ever appended, once a frame. Lines are in blocks that are laid out by themselves: a frame costs the same below any text. */

import { el } from "./dom.js";

const LIMITS = [0.9, 0.6, 0.3, 0.1, 0.02]; // A token less likely than the n-th of these has the tint n.
const MAX_PIECES_PER_FRAME = 400;
const MAX_PIECES = 400; // Of a block before its last line, and of a line: a longer one goes on in a block of its own.
const FOLLOW_PIXELS = 40;
const [SHOW_MS, HIDE_MS] = [120, 250];
/** How many alternatives a request asks for. */
export const NUM_TOP = 5;
const SIGNS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

/** The tokens of a choice in a chunk, in both forms of log-probabilities: [{text, logprob, top: [[text, logprob], ...]}]. */
export function tokensOf({ logprobs }) {
  const entry = ({ token, logprob }) => [token, logprob];
  if (logprobs?.content) return logprobs.content.map((one) => ({ text: one.token, logprob: one.logprob, top: one.top_logprobs.map(entry) }));
  const { tokens = [], token_logprobs: scores, top_logprobs: tops } = logprobs ?? {};
  return tokens.map((text, index) => ({ text, logprob: scores[index], top: Object.entries(tops?.[index] ?? {}) }));
}

/** Finds which part of the text each token stands for: chunks may hold back text that a stop string could begin with, and a character may
    take several tokens. */
export class Aligner {
  #text = "";
  #tokens = [];

  /** Takes a chunk. Returns the pieces [{text, tokens}] that are settled. */
  push(text, tokens) {
    this.#text += text;
    this.#tokens.push(...tokens);
    const pieces = [];
    while (this.#text !== "" && this.#tokens.length > 0) {
      const [first] = this.#tokens;
      if (first.text !== "" && this.#text.startsWith(first.text)) {
        pieces.push({ text: first.text, tokens: [this.#tokens.shift()] });
        this.#text = this.#text.slice(first.text.length);
      } else if (first.text.startsWith(this.#text)) {
        return pieces;
      } else {
        pieces.push(...this.flush());
      }
    }
    return this.#tokens.length > 0 ? pieces : pieces.concat(this.flush());
  }

  /** The piece of what is left. */
  flush() {
    const piece = { text: this.#text, tokens: this.#tokens };
    [this.#text, this.#tokens] = ["", []];
    return piece.text === "" ? [] : [piece];
  }
}

/** The element in which a text grows. */
export class Output {
  #queue; #block; #blockEnd; #line; #spans; #current; #frame = 0;
  /** The text so far. */
  text;

  constructor(name) {
    this.element = el("div", {
      class: "output", tabIndex: 0, role: "group", "aria-label": `${name}. Left and right arrow keys step through its tokens.`,
      data: { empty: "Nothing yet" },
      on: {
        keydown: (event) => this.#onKey(event),
        pointermove: (event) => this.#onMove(event),
        pointerleave: () => card.soon(null),
        click: (event) => event.target.tokens && this.#select(this.#spans.indexOf(event.target)),
        blur: () => this.#select(-1),
      },
    });
    this.clear();
  }

  clear() {
    cancelAnimationFrame(this.#frame);
    [this.#queue, this.#spans, this.#block, this.#line, this.#current, this.#frame, this.text] = [[], [], null, null, -1, 0, ""];
    this.element.replaceChildren();
  }

  /** Appends pieces [{text, tokens}], at the next animation frame. */
  append(pieces) {
    if (pieces.length === 0) return;
    this.text += pieces.map((piece) => piece.text).join("");
    this.#queue.push(...pieces);
    if (this.#frame === 0) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    const box = this.element;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < FOLLOW_PIXELS;
    const blocks = document.createDocumentFragment();
    for (const piece of this.#queue.splice(0, MAX_PIECES_PER_FRAME)) this.#add(piece, blocks);
    box.append(blocks);
    if (follows) box.scrollTop = box.scrollHeight;
    this.#frame = this.#queue.length > 0 ? requestAnimationFrame(() => this.#draw()) : 0;
  }

  #add({ text, tokens }, blocks) {
    text.split("\n").forEach((part, index) => {
      const isFull = this.#line === null || this.#line.childElementCount >= MAX_PIECES;
      if (index > 0 || isFull) {
        if (this.#line === null || this.#spans.length >= this.#blockEnd) {
          blocks.append((this.#block = el("div")));
          this.#blockEnd = this.#spans.length + MAX_PIECES;
        }
        this.#block.append((this.#line = el("div")));
      }
      if (part !== "" || index === 0) this.#line.append(this.#span(part, tokens));
    });
  }

  #span(text, tokens) {
    const span = el("span", { class: `t t${tintOf(tokens)}${text === "" ? " nl" : ""}`, text, tokens });
    this.#spans.push(span);
    return span;
  }

  /** Shows the card where the pointer comes to rest, not where text moves below it. */
  #onMove({ pointerType, movementX, movementY, target }) {
    if (pointerType !== "touch" && (movementX !== 0 || movementY !== 0) && target.tokens) card.soon(target);
  }

  #onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || event.ctrlKey || event.altKey || event.metaKey || this.#spans.length === 0) return;
    event.preventDefault();
    this.#select(Math.max(0, Math.min(this.#spans.length - 1, this.#current + step)));
  }

  #select(index) {
    this.#spans[this.#current]?.classList.remove("current");
    this.#current = index;
    const span = this.#spans[index];
    if (span === undefined) return card.hide();
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    card.show(span);
  }
}

function tintOf(tokens) {
  const logprob = Math.min(...tokens.map((token) => token.logprob ?? 0));
  return LIMITS.filter((limit) => logprob < Math.log(limit)).length;
}

/** The strip that explains the tints. */
export function legend() {
  const steps = [...LIMITS.keys()].map((index) => el("i", { class: `t${index + 1}` }));
  const strip = el("span", {}, "likely", el("span", {}, el("i"), ...steps), "unlikely");
  return el("p", { class: "legend" }, "Tokens, before temperature:", strip);
}

/** The card beside a token. Escape hides it; it stays while the pointer is on it. */
class Card {
  #timer = 0; #span = null;
  #element = this.#make();

  show(span) {
    clearTimeout(this.#timer);
    this.#element.replaceChildren(...(span.tokens.length === 0 ? ["No probability came with it."] : span.tokens.flatMap(describe)));
    this.#element.hidden = false;
    this.#span = span;
    this.#place();
  }

  hide() {
    clearTimeout(this.#timer);
    this.#element.hidden = true;
  }

  /** Shows the card of a token, or hides it for null, unless something else happens before. */
  soon(span) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => (span?.isConnected ? this.show(span) : this.hide()), span === null ? HIDE_MS : SHOW_MS);
  }

  #make() {
    const keep = { pointerenter: () => clearTimeout(this.#timer), pointerleave: () => this.soon(null) };
    const made = el("div", { class: "token-card", role: "status", hidden: true, on: keep });
    document.addEventListener("scroll", () => made.hidden || (this.#span.isConnected ? this.#place() : this.hide()), { passive: true });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || made.hidden || document.querySelector("dialog[open]")) return;
      this.hide();
      event.preventDefault();
    }, { capture: true });
    document.body.append(made);
    return made;
  }

  /** Below the token, or above it where there is no room. */
  #place() {
    const token = this.#span.getClientRects()[0] ?? this.#span.getBoundingClientRect();
    const { width, height } = this.#element.getBoundingClientRect();
    const below = token.bottom + 6;
    this.#element.style.left = `${Math.max(8, Math.min(token.left, innerWidth - width - 8))}px`;
    this.#element.style.top = `${below + height < innerHeight ? below : Math.max(8, token.top - height - 6)}px`;
  }
}

const card = new Card();

/** A token's probability, and those of the most likely ones. */
function describe(token) {
  const shares = [...new Map([...token.top, [token.text, token.logprob]])].sort((one, other) => other[1] - one[1]).slice(0, NUM_TOP + 1);
  const rows = shares.map(([text, logprob]) => el("tr", { class: text === token.text ? "chosen" : null }, el("td", { text: visible(text) }),
    el("td", { text: percent(logprob) }), el("td", {}, el("meter", { value: Math.exp(logprob), "aria-hidden": "true" }))));
  const said = `${visible(token.text)}: ${percent(token.logprob)}, log-probability ${token.logprob.toFixed(3)}`;
  return [el("div", { text: said }), el("table", {}, el("tbody", {}, ...rows))];
}

const percent = (logprob) => (Math.exp(logprob) >= 1e-4 ? `${Number((Math.exp(logprob) * 100).toPrecision(3))} %` : "< 0.01 %");

/** A token's text with its spaces and line ends made visible. */
const visible = (text) => text.replace(/[ \n\t\r]/g, (sign) => SIGNS[sign]) || "(no text)";
