"""transformers on the same workload and the same weights: generate with a static cache, compiled; and its continuous batching.

Generate takes all requests as one left-padded batch and runs to the longest output, of which only tokens that were asked for count.
Continuous batching that is not done in its time is cut, and told as what was finished by then.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteriaList

from bench.gpu.common import Part

WARMUP_TOKENS = 8


def drawing(part: Part) -> dict[str, Any]:
    """As the workload's tokens are drawn, with no filter that it does not ask for."""
    return {"do_sample": True, "temperature": part.workload.temperature, "top_k": 0, "top_p": 1.0}


def load(part: Part) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(part.checkpoint, dtype=part.dtype, attn_implementation="sdpa")
    model = model.to(part.device).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, **drawing(part))  # type: ignore[no-untyped-call]
    return model


@torch.inference_mode()
def static(part: Part, model: Any) -> None:
    """The whole workload as one batch, behind a warm-up of a few tokens over a cache of the same size."""
    workload, device = part.workload, part.device
    longest, count = max(map(len, workload.prompts)), max(workload.outputs)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in workload.prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts], device=device)
    times = []
    for most in (WARMUP_TOKENS, count):

        def enough(so_far: Any, _: Any, most: int = most, **__: Any) -> Any:
            return torch.full((len(so_far),), so_far.shape[1] >= longest + most, dtype=torch.bool, device=device)

        began = time.perf_counter()
        rows = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            cache_implementation="static",
            stopping_criteria=StoppingCriteriaList([enough]),
        )
        tokens = rows[:, longest:].tolist()
        times.append(time.perf_counter() - began)
    if len(tokens[0]) != count:
        raise RuntimeError(f"{len(tokens[0])} tokens came, {count} were asked for")
    found = {"seconds": times[1], "warmup_seconds": times[0], "computed_tokens": count * len(tokens)}
    part.note("static", found | {"output_tokens_per_second": workload.num_tokens / times[1]})


def continuous(part: Part, model: Any) -> None:
    """Every request with its own length; SDPA over gathered pages where flash-attention is missing, which is a handicap."""
    from transformers import ContinuousBatchingConfig

    workload = part.workload
    sizes: dict[str, Any] = {"max_requests_per_batch": len(workload.prompts), "allow_block_sharing": False}
    if part.device == "cpu":
        sizes |= {"page_size": 32, "num_blocks": 64, "max_batch_tokens": 256, "use_cuda_graph": False, "use_async_batching": False}
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        **drawing(part), eos_token_id=-1, pad_token_id=0, max_new_tokens=max(workload.outputs)
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**sizes), timeout=5
    ) as manager:
        began, num_tokens, finished = time.perf_counter(), 0, 0
        for prompt, count in zip(workload.prompts, workload.outputs, strict=True):
            manager.add_request(prompt, max_new_tokens=count)
        while finished < len(workload.prompts) and part.left > 10.0:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its thread has ended")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            finished, num_tokens = finished + 1, num_tokens + len(result.generated_tokens)
        seconds = time.perf_counter() - began
    found = {"output_tokens_per_second": num_tokens / seconds, "seconds": seconds, "output_tokens": num_tokens}
    part.note("continuous", found | {"finished": finished, "requests": len(workload.prompts)})


def measure(part: Part) -> None:
    model = load(part)
    with part.guarded("static"):
        static(part, model)
    with part.guarded("continuous"):
        continuous(part, model)
