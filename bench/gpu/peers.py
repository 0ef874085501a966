"""transformers on the same workload and the same weights: generate with a static cache, compiled;
and its continuous batching.

Generate takes all requests as one left-padded batch and runs to the longest output, of which only
tokens that were asked for count. A run that exceeds its time is stopped; the tokens generated until
then are reported, with the step that was reached.
"""

import gc
import time
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteriaList

from bench.gpu.common import Part
from tests.support.checks import Found

WARMUP_TOKENS = 8
RESERVE = 0.4
"""Of the part's time, kept for continuous batching."""
PAGE_SIZE, NUM_PAGES, STEP_TOKENS = 256, 2304, 4096
"""Of continuous batching: about the memory that our engine has, and its tokens of a step."""


def drawing(part: Part) -> dict[str, Any]:
    """As the workload's tokens are drawn, with no filter that it does not ask for."""
    return {"do_sample": True, "temperature": part.workload.temperature, "top_k": 0, "top_p": 1.0}


def load(part: Part) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        part.checkpoint, dtype=part.dtype, attn_implementation="sdpa"
    )
    model = model.to(part.device).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, **drawing(part))  # type: ignore[no-untyped-call]
    return model


@torch.inference_mode()
def static(part: Part, model: Any) -> None:
    """The whole workload as one batch, after a warm-up of a few tokens over a cache of the same
    size.
    """
    workload, device = part.workload, part.device
    longest, count = max(map(len, workload.prompts)), max(workload.outputs)
    ids = torch.tensor(
        [[0] * (longest - len(prompt)) + prompt for prompt in workload.prompts], device=device
    )
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts],
        device=device,
    )
    times = []
    for most in (WARMUP_TOKENS, count):

        def enough(so_far: Any, _: Any, most: int = most, **__: Any) -> Any:
            over = so_far.shape[1] >= longest + most or part.left < RESERVE * part.seconds
            return torch.full((len(so_far),), over, dtype=torch.bool, device=device)

        began = time.perf_counter()
        rows = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            cache_implementation="static",
            stopping_criteria=StoppingCriteriaList([enough]),
        )
        steps = len(rows[:, longest:].tolist()[0])
        times.append(time.perf_counter() - began)
    num_tokens = sum(min(output, steps) for output in workload.outputs)
    found = {
        "seconds": times[1],
        "warmup_seconds": times[0],
        "steps": steps,
        "asked_steps": count,
        "output_tokens": num_tokens,
    }
    part.note("static", found | {"output_tokens_per_second": num_tokens / times[1]})


def sizes(part: Part, config: type) -> dict[str, Any]:
    """Options of continuous batching, by the names that this version of transformers has for
    them.
    """
    wanted: dict[str, Any] = {
        "max_requests_per_batch": len(part.workload.prompts),
        "allow_block_sharing": False,
    }
    if part.device == "cpu":
        wanted |= {
            "num_blocks": 64,
            "max_batch_tokens": 256,
            "use_cuda_graph": False,
            "use_async_batching": False,
        }
    else:
        wanted |= {"num_blocks": NUM_PAGES, "max_batch_tokens": STEP_TOKENS}
    there = {field.name for field in fields(config)}
    # Where both are there, block_size is the deprecated one.
    wanted["page_size" if "page_size" in there else "block_size"] = (
        32 if part.device == "cpu" else PAGE_SIZE
    )
    return {name: value for name, value in wanted.items() if name in there}


def unfinished_tokens(manager: Any) -> int | None:
    """Of requests that are being computed; None where this version of transformers does not
    tell.
    """
    try:
        return sum(
            int(state.generated_len())
            for state in list(manager.batch_processor.scheduler.active_requests.values())
        )
    except (AttributeError, TypeError, RuntimeError):
        return None


def continuous(part: Part, model: Any) -> None:
    """Every request with its own length; SDPA over gathered pages where flash-attention is missing,
    which is a handicap.
    """
    from transformers import ContinuousBatchingConfig

    workload = part.workload
    config = ContinuousBatchingConfig(**sizes(part, ContinuousBatchingConfig))
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        **drawing(part), eos_token_id=-1, pad_token_id=0, max_new_tokens=max(workload.outputs)
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, timeout=5
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
        found: Found = {"finished": finished, "requests": len(workload.prompts)}
        if finished < len(workload.prompts):
            unfinished = unfinished_tokens(manager)
            found["unfinished_tokens"] = (
                "could not be counted" if unfinished is None else unfinished
            )
            num_tokens += unfinished or 0
        # Before the end of the context, which may wait for its thread until we are killed.
        part.note(
            "continuous",
            found
            | {
                "seconds": seconds,
                "output_tokens": num_tokens,
                "output_tokens_per_second": num_tokens / seconds,
            },
        )


def measure(part: Part) -> None:
    model = load(part)
    with part.guarded("static"):
        static(part, model)
    torch.compiler.reset()
    gc.collect()
    if part.device == "cuda":
        torch.cuda.empty_cache()
    with part.guarded("continuous"):
        continuous(part, model)
