"""llama.cpp in its own process and environment, where there is no onehead: perplexity, speed and
requantisation of a GGUF file.

    python bench/real/peer.py FILE.gguf REQUEST.json

REQUEST is one JSON object, `do` and its arguments; the answer is printed as one JSON object.
`quantize`: writes the weights in `type` into `output`. `perplexity`: of `windows` of token ids,
with a float32 KV cache. `speed`: output tokens per second of as many requests as there are
`prompts`, `clients` of them at a time, each continued by `tokens` greedy tokens; continuous batches
through the low-level interface, where a prompt is computed with the tokens of the running requests.
"""

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np

MOST_TOKENS = 512
"""Of a batch. A batch of scored tokens has logits of the whole vocabulary for each."""
SCORED_AT_ONCE = 256


class Batches:
    """One context of llama.cpp's, and the sequences in it."""

    def __init__(
        self, path: str, threads: int, context: int, sequences: int, float32_cache: bool = False
    ) -> None:
        self.model = _model(path)
        options = llama.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = MOST_TOKENS
        options.n_ubatch = MOST_TOKENS
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True
        if float32_cache:
            options.type_k = options.type_v = llama.GGML_TYPE_F32
            options.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {context} tokens for {path}")
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(MOST_TOKENS, 0, 1)

    def step(self, rows: list[tuple[int, int, list[int]]], all_logits: bool = False) -> list[int]:
        """Computes (place, position, tokens) rows in one batch; the indices in the batch of each
        row's last token.
        """
        count, lasts = 0, []
        for place, position, tokens in rows:
            for offset, token in enumerate(tokens):
                self.batch.token[count], self.batch.pos[count] = token, position + offset
                self.batch.n_seq_id[count], self.batch.seq_id[count][0] = 1, place
                self.batch.logits[count] = all_logits or offset == len(tokens) - 1
                count += 1
            lasts.append(count - 1)
        self.batch.n_tokens = count
        if llama.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        return lasts

    def logits(self, index: int) -> Any:
        """Logits of a token of the last batch, as a view."""
        found = llama.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(
            ctypes.cast(found, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)
        )

    def forget(self, place: int) -> None:
        """Drops a sequence."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), place, -1, -1)


def _model(path: str) -> Any:
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {path}")
    return model


def perplexity(path: str, windows: list[list[int]], threads: int) -> dict[str, Any]:
    """exp of the mean -log p of every token that has one before it in its window."""
    batches = Batches(path, threads, max(map(len, windows)) + SCORED_AT_ONCE, 1, float32_cache=True)
    nats = 0.0
    count = 0
    for window in windows:
        batches.forget(0)
        for start in range(0, len(window), SCORED_AT_ONCE):
            batches.step([(0, start, window[start : start + SCORED_AT_ONCE])], all_logits=True)
            for index, target in enumerate(window[start + 1 : start + 1 + SCORED_AT_ONCE]):
                logits = batches.logits(index)
                largest = logits.max()
                nats += (
                    float(largest)
                    + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
                    - float(logits[target])
                )
                count += 1
    return {"perplexity": float(np.exp(nats / count)), "tokens": count}


def speed(
    path: str, prompts: list[list[int]], clients: int, tokens: int, threads: int
) -> dict[str, Any]:
    """Output tokens per second. A request starts as soon as there is a place for it."""
    longest = max(map(len, prompts)) + tokens
    batches = Batches(path, threads, clients * longest + MOST_TOKENS, clients)
    _run(batches, prompts[:1], 1, 4)
    began = time.perf_counter()
    made = _run(batches, prompts, clients, tokens)
    seconds = time.perf_counter() - began
    return {"tokens_per_second": made / seconds, "seconds": seconds, "tokens": made}


def _run(batches: Batches, prompts: list[list[int]], clients: int, tokens: int) -> int:
    waiting, places, made = list(range(len(prompts))), list(range(clients)), [0] * len(prompts)
    running: dict[int, tuple[int, int, list[int]]] = {}
    while waiting or running:
        room = MOST_TOKENS - len(running)
        while waiting and places and len(prompts[waiting[0]]) <= room:
            request = waiting.pop(0)
            running[request] = places.pop(), 0, prompts[request]
            room -= len(prompts[request])
        requests = list(running)
        for request, index in zip(
            requests, batches.step([running[request] for request in requests]), strict=True
        ):
            place, position, computed = running.pop(request)
            token = int(np.argmax(batches.logits(index)))
            made[request] += 1
            if made[request] < tokens:
                running[request] = place, position + len(computed), [token]
            else:
                batches.forget(place)
                places.append(place)
    return sum(made)


def quantize(path: str, output: str, type: str, threads: int) -> dict[str, Any]:
    """Writes a file with the weights in another type, by llama.cpp's own choice of tensors: F32 is
    exact.
    """
    options = llama.llama_model_quantize_default_params()
    options.ftype = {
        "F32": llama.LLAMA_FTYPE_ALL_F32,
        "Q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
        "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    }[type]
    options.allow_requantize, options.nthread = True, threads
    if llama.llama_model_quantize(path.encode(), output.encode(), options):
        raise RuntimeError(f"llama.cpp cannot write {path} in {type}")
    return {"output": output}


def embed(path: str, texts: list[list[int]], threads: int) -> dict[str, Any]:
    """Vectors of texts, as many in a batch as have 2,048 tokens, and texts a second."""
    model, options = _model(path), llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = most = 2048
    options.n_seq_max, options.kv_unified, options.embeddings = 64, True, True
    options.n_threads = options.n_threads_batch = threads
    context = llama.llama_init_from_model(model, options)
    batch, size = llama.llama_batch_init(most, 0, 1), llama.llama_model_n_embd_out(model)
    vectors, waiting = list[list[float]](), [*texts]

    def compute(group: list[list[int]]) -> None:
        count = 0
        for place, ids in enumerate(group):
            for position, id in enumerate(ids):
                batch.token[count], batch.pos[count] = id, position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, place
                batch.logits[count] = True
                count += 1
        batch.n_tokens = count
        if llama.llama_encode(context, batch):
            raise RuntimeError("llama_encode failed")
        for place in range(len(group)):
            found = llama.llama_get_embeddings_seq(context, place)
            vectors.append([found[i] for i in range(size)])

    compute(texts[:1])
    vectors.clear()
    began = time.perf_counter()
    while waiting:
        group = [waiting.pop(0)]
        while waiting and len(group) < 64 and sum(map(len, [*group, waiting[0]])) <= most:
            group.append(waiting.pop(0))
        compute(group)
    return {"speed": len(texts) / (time.perf_counter() - began), "vectors": vectors}


WORK: dict[str, Any] = {
    "perplexity": perplexity,
    "speed": speed,
    "quantize": quantize,
    "embed": embed,
}


def main() -> None:
    path = sys.argv[1]
    with open(sys.argv[2], encoding="utf-8") as file:
        request = json.load(file)
    llama.llama_backend_init()
    print(
        json.dumps(
            WORK[request.pop("do")](path, **request) | {"llama_cpp_python": llama.__version__}
        )
    )


if __name__ == "__main__":
    main()
