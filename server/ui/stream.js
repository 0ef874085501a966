/* One streamed answer that goes on when its connection is lost, or when the engine behind it dies.

   The request is resumable: the server keeps its events, so the stream is read again from the last event that came. Invariant: each event
   is given to `onChunk` once, in order. It knows no elements of the page. */

import { ApiError, errorOf, events } from "./api.js";

const RETRY_MS = [200, 400, 800, 1500, 3000];
const GIVE_UP_MS = 60_000;

export class Stream {
  #abort = new AbortController();
  #id = null;
  #lastEvent = null;
  #isLost = false;
  /** Whether `stop` was called. */
  stopped = false;

  /** `onChunk(object)`: each event's JSON. `onState(kind, words)`: `lost`, `resumed`. */
  constructor(api, onChunk, onState) {
    Object.assign(this, { api, onChunk, onState });
    this.stopping = new Promise((resolve) => (this.giveUp = resolve));
  }

  /** Sends the request and reads its answer to the end, or until `stop`. Throws ApiError if the server refuses or fails it. */
  async run(path, body) {
    try {
      let response = await Promise.race([this.#open(path, body), this.stopping]);
      while (response !== null && !(await this.#read(response))) response = await this.#again();
    } catch (error) {
      if (!this.stopped) throw error instanceof ApiError ? error : new ApiError("The server cannot be reached.", 0);
    }
  }

  /** Ends the stream, and its generation on the server. */
  stop() {
    this.stopped = true;
    this.giveUp(null);
    if (this.#id !== null) this.#end();
  }

  /** Sends the request. The head of its response says by which id the server can end it: it is waited for even after `stop`. */
  async #open(path, body) {
    const response = await this.api.post(path, { ...body, stream: true, resumable: true }, this.#abort.signal);
    this.#id = response.headers.get("x-stream-id");
    if (this.stopped) this.#end();
    return response;
  }

  #end() {
    this.#abort.abort();
    this.api.fetch(`v1/streams/${this.#id}`, { method: "DELETE" }).catch(() => {});
  }

  /** Reads events. Returns whether the last one came; false where the connection ended before. */
  async #read(response) {
    try {
      for await (const event of events(response)) {
        if (event.id !== "") this.#lastEvent = event.id;
        this.#wentOn();
        if (event.data === "[DONE]") return true;
        if (event.event === "superseded") throw new ApiError("This stream is being read elsewhere.", 409);
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new ApiError(chunk.error.message ?? chunk.error, 0);
        this.onChunk(chunk);
      }
    } catch (error) {
      if (error instanceof ApiError || this.stopped) throw error;
    }
    return false;
  }

  /** A response with the events after the last one; null if there are none. Tries until the server can be reached again. */
  async #again() {
    const lostAt = performance.now();
    this.#isLost = true;
    this.onState("lost", "Connection lost. Resuming…");
    for (let attempt = 0; performance.now() - lostAt < GIVE_UP_MS; attempt += 1) {
      const headers = this.#lastEvent === null ? {} : { "last-event-id": this.#lastEvent };
      try {
        const response = await this.api.fetch(`v1/streams/${this.#id}`, { headers, signal: this.#abort.signal });
        if (response.status === 204) return this.#wentOn();
        if (response.ok) return response;
        if (response.status < 500) throw await errorOf(response);
      } catch (error) {
        if (error instanceof ApiError || this.stopped) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]));
      if (this.stopped) return null;
    }
    throw new ApiError("The connection was lost, and the server cannot be reached.", 0);
  }

  /** Says that the stream went on, if its connection was lost. Returns null: there is no response to read. */
  #wentOn() {
    if (this.#isLost) this.onState("resumed", "The stream went on; nothing was lost.");
    this.#isLost = false;
    return null;
  }
}
