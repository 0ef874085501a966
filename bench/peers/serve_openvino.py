"""OpenVINO GenAI's ContinuousBatchingPipeline behind the thinnest HTTP server that streams OpenAI
completions of token ids.

    PYTHON bench/peers/serve_openvino.py --model FOLDER --port PORT [--threads 2]

PYTHON is that of an environment with openvino-genai, fastapi and uvicorn; FOLDER holds an OpenVINO
export. One thread steps the pipeline and hands each request's new ids to its asyncio queue; texts
are a constant, so no time is spent on them. Ids are counted in `usage`.
"""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


class Pipeline:
    """The engine and the requests that are handed to its thread."""

    def __init__(self, folder: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.cache_size = 32, 2048, 2
        scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._new: list[tuple[list[int], int, asyncio.Queue[tuple[int, bool]]]] = []
        self._lock, self._wake = threading.Lock(), threading.Event()

    def submit(self, prompt: list[int], count: int) -> "asyncio.Queue[tuple[int, bool]]":
        """The queue gets (number of new ids, whether these are the last)."""
        queue: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        with self._lock:
            self._new.append((prompt, count, queue))
        self._wake.set()
        return queue

    def work(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread's loop."""
        running: dict[int, list[Any]] = {}
        number = 0
        while True:
            with self._lock:
                new, self._new = self._new, []
            for prompt, count, queue in new:
                config = genai.GenerationConfig()
                config.max_new_tokens = config.min_new_tokens = count
                config.ignore_eos, config.do_sample = True, False
                running[number] = [
                    self._pipeline.add_request(
                        number, ov.Tensor(np.array([prompt], dtype=np.int64)), config
                    ),
                    queue,
                    count,
                ]
                number += 1
            if not running:
                self._wake.wait()
                self._wake.clear()
                continue
            self._pipeline.step()
            told = []
            for key, state in list(running.items()):
                while state[0].can_read():
                    count = sum(len(output.generated_ids) for output in state[0].read().values())
                    state[2] -= count
                    told.append((state[1], (count, state[2] <= 0)))
                if state[2] <= 0:
                    del running[key]
            loop.call_soon_threadsafe(_tell, told)


def _tell(told: list[tuple[Any, Any]]) -> None:
    for queue, item in told:
        queue.put_nowait(item)


def make_app(pipeline: Pipeline) -> FastAPI:
    """The application; its routes are /health and /v1/completions."""

    @asynccontextmanager
    async def started(app: FastAPI) -> AsyncIterator[None]:
        threading.Thread(
            target=pipeline.work, args=(asyncio.get_running_loop(),), daemon=True
        ).start()
        yield

    app = FastAPI(lifespan=started)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        queue = pipeline.submit(body["prompt"], body["max_tokens"])

        async def events() -> AsyncIterator[str]:
            done, is_last = 0, False
            while not is_last:
                count, is_last = await queue.get()
                done += count
                choice = {
                    "index": 0,
                    "text": "x",
                    "logprobs": None,
                    "finish_reason": "length" if is_last else None,
                }
                chunk = {
                    "id": "cmpl-1",
                    "object": "text_completion",
                    "created": int(time.time()),
                    "model": "model",
                    "choices": [choice],
                }
                yield f"data: {json.dumps(chunk | {'usage': {'completion_tokens': done}})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    app = make_app(Pipeline(options.model, options.threads))
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
