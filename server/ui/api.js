/* The server's API as the page sees it: requests with the API key, errors in words, server-sent events, the schemas of request bodies.

   URLs are relative to the page, so that it works under any prefix. The key is asked for when a request is refused without it, and is
   kept in this module's memory only; where none was given, what runs by itself does not ask again, but waits for the event "key". It knows
   no elements of the page: `askForKey` is given by app.js. */

const JSON_TYPE = { "content-type": "application/json" };
const LOOK_TIMEOUT_MS = 5000;

/** An answer that refuses a request: the server's own words and its status. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** One server. `askForKey(refused)` resolves to a key, or null if the user gives none; `refused`: whether the last key was wrong. */
export class Api extends EventTarget {
  #key = null;
  #asking = null;
  declined = false; // Whether the user was asked and gave no key.
  #document = null;
  #served = null;
  model = null; // As GET /v1/models lists it, once it is known.
  /** How the server was last seen: connecting, ready, recovering, draining, waiting or unreachable; its own words. */
  health = { state: "connecting", status: "" };

  constructor(askForKey) {
    super();
    this.askForKey = askForKey;
    this.base = new URL(".", document.baseURI);
  }

  get hasKey() {
    return this.#key !== null;
  }

  /** fetch() with the key. Asks for the key, and repeats the request with it, as long as the answer is 401. */
  async fetch(path, init = {}) {
    for (;;) {
      const used = this.#key;
      const headers = used === null ? init.headers : { ...init.headers, authorization: `Bearer ${used}` };
      const response = await fetch(new URL(path, this.base), { ...init, headers, cache: "no-store" });
      if (response.status !== 401) return response;
      if (used === this.#key && (this.declined || !(await this.renewKey()))) return response;
    }
  }

  /** The served model, asked for once. Throws ApiError. */
  served() {
    this.#served ??= this.json("v1/models").then(({ data: [first] }) => (this.model = first));
    this.#served.catch(() => (this.#served = null));
    return this.#served;
  }

  /** Looks how the server is, for which no key is needed. A change is the event "health". */
  async look() {
    let seen = { state: "unreachable", status: "" };
    try {
      const signal = AbortSignal.timeout(LOOK_TIMEOUT_MS);
      const response = await fetch(new URL("health", this.base), { cache: "no-store", signal });
      const { status } = await response.json();
      seen = { state: stateOf(response.ok, status), status };
    } catch {
      this.#served = null; // It may come back with another model.
    }
    const isNew = seen.state !== this.health.state || seen.status !== this.health.status;
    this.health = seen;
    if (isNew) this.dispatchEvent(new Event("health"));
    return seen;
  }

  /** Asks for a key, once for all requests that are refused at the same time. Returns whether one was given, which is the event "key". */
  renewKey() {
    this.#asking ??= this.askForKey(this.hasKey).then((key) => {
      this.#asking = null;
      this.declined = key === null;
      this.#key = key ?? this.#key;
      if (key !== null) this.dispatchEvent(new Event("key"));
      return key !== null;
    });
    return this.#asking;
  }

  /** The answer to a GET as JSON. Throws ApiError. */
  async json(path, init) {
    const response = await this.fetch(path, init);
    if (!response.ok) throw await errorOf(response);
    return response.json();
  }

  /** The answer to a POST of JSON, for its events to be read. Throws ApiError. */
  async post(path, body, signal) {
    this.declined = false;
    const response = await this.fetch(path, { method: "POST", headers: JSON_TYPE, body: JSON.stringify(body), signal });
    if (!response.ok) throw await errorOf(response);
    return response;
  }

  /** The schema of a request body in the server's OpenAPI document, which is kept: name of each field -> its Field. */
  async fields(body) {
    this.#document ??= await this.json("openapi.json");
    const { properties } = this.#document.components.schemas[body];
    // Every optional field takes null. Of several kinds the first is offered.
    const kindOf = (schema) => (schema.anyOf ?? schema.oneOf)?.map(kindOf).find((kind) => kind.type !== "null") ?? schema;
    return new Map(Object.entries(properties).map(([name, schema]) => [name, { ...kindOf(schema), description: schema.description ?? "" }]));
  }
}

/** The state of a server that says this of itself: not a proxy's words, which are an Error. */
function stateOf(isHealthy, status) {
  if (status === "ok") return "ready";
  if (status === "draining") return status;
  return isHealthy || status.startsWith("restarting") ? "recovering" : "waiting";
}

/** The ApiError of a refused request, in either of the server's dialects. */
export async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error.message ?? error, response.status);
  } catch {
    return new ApiError(text.slice(0, 500) || response.statusText, response.status);
  }
}

/** The server-sent events of a response, as {id, event, data}. Comments give nothing; an event that is cut off is not given. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      yield* parts.map(parseEvent).filter(({ data }) => data !== null);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(text) {
  const event = { id: "", event: "message", data: null };
  for (const line of text.split("\n")) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    if (!Object.hasOwn(event, name)) continue;
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    event[name] = name === "data" && event.data !== null ? `${event.data}\n${value}` : value;
  }
  return event;
}
