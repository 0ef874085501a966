/* Answers requests to PATH within the page with EVENTS, PER_READ at a time and PAUSE milliseconds between; the last body is window.sent.
   It waits before event number window.limit, and counts those that it has given in window.given. The constants stand before this text. */

const real = window.fetch;

function stream() {
  const encoder = new TextEncoder();
  let next = 0;
  return new ReadableStream({
    async pull(controller) {
      if (PAUSE > 0) await new Promise((resolve) => setTimeout(resolve, PAUSE));
      while (next >= window.limit) await new Promise((resolve) => setTimeout(resolve, 20));
      const end = Math.min(EVENTS.length, next + PER_READ);
      for (; next < end; next += 1) controller.enqueue(encoder.encode(`id: s.${next + 1}\ndata: ${JSON.stringify(EVENTS[next])}\n\n`));
      window.given = next;
      if (next < EVENTS.length) return;
      controller.enqueue(encoder.encode("data: [DONE]\n\n"));
      controller.close();
    },
  });
}

window.fetch = async (url, init) => {
  if (!String(url).endsWith(PATH)) return real(url, init);
  window.sent = JSON.parse(init.body);
  return new Response(stream(), { status: 200, headers: { "x-stream-id": "s", "content-type": "text/event-stream" } });
};
