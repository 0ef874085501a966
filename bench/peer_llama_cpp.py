"""llama.cpp (llama-cpp-python) on a given workload, in its own process: continuous batches through its low-level interface, greedy.

Run in an environment with llama-cpp-python, numpy and a module `workload`, which is not part of this repository: it has THREADS,
arguments(gguf, name), Trace(case) and measure(name, run, options, info, vocab), which were the same for all servers compared.
    PYTHONPATH=FOLDER python bench/peer_llama_cpp.py --gguf model-q8_0.gguf --cases c1,c8,c32
"""

import ctypes
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np
import workload as peers  # type: ignore[import-not-found]

MOST_TOKENS = 2048
"""Of a batch."""
CONTEXT = 32 * 1024


class Batches:
    """One context of llama.cpp's, and the sequences in it."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = CONTEXT, MOST_TOKENS, 512, 32
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True
        self.context = llama.llama_init_from_model(self.model, options)
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(MOST_TOKENS, 0, 1)

    def step(self, rows: list[tuple[int, int, list[int]]]) -> list[int]:
        """The next token of each (place, position, tokens)."""
        count, lasts = 0, []
        for place, position, tokens in rows:
            for offset, token in enumerate(tokens):
                self.batch.token[count], self.batch.pos[count] = token, position + offset
                self.batch.n_seq_id[count], self.batch.seq_id[count][0] = 1, place
                self.batch.logits[count] = offset == len(tokens) - 1
                count += 1
            lasts.append(count - 1)
        self.batch.n_tokens = count
        if llama.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        return [int(np.argmax(self._logits(last))) for last in lasts]

    def _logits(self, index: int) -> Any:
        found = llama.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(ctypes.cast(found, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))

    def forget(self, place: int) -> None:
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), place, -1, -1)


def run(batches: Batches, case: Any) -> Any:
    """Runs every request as soon as there is a place for it; its prompt is computed with the tokens of the running ones."""
    trace = peers.Trace(case)
    waiting, places = list(range(len(case.prompts))), list(range(case.limit))
    running: dict[int, tuple[int, int, list[int]]] = {}
    trace.start()
    while waiting or running:
        room = MOST_TOKENS - len(running)
        while waiting and places and len(case.prompts[waiting[0]]) <= room:
            request = waiting.pop(0)
            running[request] = places.pop(), 0, case.prompts[request]
            room -= len(case.prompts[request])
        requests = list(running)
        for request, token in zip(requests, batches.step([running[request] for request in requests]), strict=True):
            trace.token(request)
            place, position, tokens = running.pop(request)
            if len(trace.stamps[request]) < case.outputs[request]:
                running[request] = place, position + len(tokens), [token]
            else:
                batches.forget(place)
                places.append(place)
    trace.stop()
    return trace


def main() -> None:
    options = peers.arguments(gguf="", name="llama-cpp")
    batches = Batches(options.gguf, peers.THREADS)
    info = {"llama_cpp_python": llama.__version__, "gguf": options.gguf.rsplit("/", 1)[-1]}
    peers.measure(options.name, lambda case: run(batches, case), options, info, vocab=batches.vocab_size)


if __name__ == "__main__":
    main()
