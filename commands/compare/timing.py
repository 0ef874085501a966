"""Seconds, by measuring: cache against none, multi-head against multi-query decode, one class against a list of heads.

Two sides of a comparison are timed in turn within one run, several times, and reported as medians with their range: machines are noisy,
ratios less so. It knows nothing of files or pages.

Shape letters: b batch, m keys, d model size, h heads, k head size.
"""

import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from cache.layout import pages_for
from commands.reference.fused import FusedAttention
from commands.reference.heads import HeadListAttention
from commands.train.train import initialise
from model.decoder import Decoder
from model.devices import find_device
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import ModelSpec
from model.step import Row, Sample, SampledToken, Sampling, StepPlan

GREEDY = Sampling(temperature=0.0)
GPT2 = ModelSpec(
    model_type="gpt_bigcode",
    vocab_size=50257,
    hidden_size=768,
    num_layers=12,
    num_query_heads=12,
    head_dim=64,
    intermediate_size=3072,
    max_positions=1024,
    norm_epsilon=1e-5,
    activation="gelu_tanh",
    attention_scale=64**-0.5,
    tied_embeddings=True,
    end_token_ids=(),
)
PROMPT = tuple(range(1, 9))
PAPER = {"d": 1024, "h": 8, "k": 128, "mha_ff": 4096, "mqa_ff": 5440}
"""The paper's decoder layer; the multi-query one's MLP is widened so that both have equally many parameters."""


Say = Callable[[str], None]
"""Reports the progress of a long measurement."""


def silent(text: str) -> None:
    """A Say that prints nothing."""


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turn(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Each side `repeats` times, alternating, after one unmeasured run: median, least and most seconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        sides[name]()
    for _ in range(repeats):
        for name, work in sides.items():
            times[name].append(seconds(work))
    return {name: {"median_s": statistics.median(t), "min_s": min(t), "max_s": max(t)} for name, t in times.items()}


class Generator:
    """Our decoder writing greedy tokens, with its cache or computing everything anew for each token."""

    def __init__(self, spec: ModelSpec, num_tokens: int) -> None:
        decoder = Decoder(spec)
        initialise(decoder, seed=0)
        pages = pages_for(len(PROMPT) + num_tokens, 64)
        options = EngineOptions("cpu", "float32", 0, 64, pages, None, spec.max_positions, 1, spec.max_positions)
        self.runner = ModelRunner.over(decoder.requires_grad_(False).eval(), find_device("cpu"), options)
        self.pages = [array("q", range(pages))]

    def generate(self, num_tokens: int, cached: bool, say: Say = silent) -> list[int]:
        """`num_tokens` greedy tokens after PROMPT."""
        output: list[int] = []
        while len(output) < num_tokens:
            say(f"{len(output)}/{num_tokens} tokens")
            tokens = [*PROMPT, *output]
            start = len(tokens) - 1 if cached and output else 0
            (drawn,) = self.runner.run(StepPlan((Row(0, tokens[start:], start, self.pages, Sample(GREEDY, PROMPT, output)),))).drawn
            assert isinstance(drawn, SampledToken)
            output.append(drawn.token)
        return output


def cache_or_none(num_tokens: int, say: Say = silent) -> dict[str, Any]:
    """Seconds for `num_tokens` from a GPT-2-sized random model with and without a cache: ours, and transformers' of the same shape."""
    ours = Generator(GPT2, num_tokens)
    ours.generate(4, cached=True)
    sides: dict[str, Any] = {"ours": lambda cached: ours.generate(num_tokens, cached, say)}
    theirs = _transformers_generate(num_tokens)
    if theirs is not None:
        sides["transformers"] = theirs
    results: dict[str, Any] = {"num_tokens": num_tokens, "prompt_tokens": len(PROMPT)}
    for name, generate in sides.items():
        say(f"{name}, {num_tokens} tokens")
        cached, uncached = seconds(partial(generate, True)), seconds(partial(generate, False))
        results[name] = {"cached_s": cached, "uncached_s": uncached, "ratio": uncached / cached}
    return results


def _transformers_generate(num_tokens: int) -> Callable[[bool], Any] | None:
    """generate() of a random gpt_bigcode of GPT2's dimensions; None where transformers is not installed."""
    try:
        from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM
    except ImportError:
        return None
    from model.checkpoint.families.gpt_bigcode import config_from_spec

    model: Any = GPTBigCodeForCausalLM(GPTBigCodeConfig(**config_from_spec(GPT2)))
    model.eval()
    ids = torch.tensor([PROMPT])

    def generate(cached: bool) -> Any:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            use_cache=cached,
            pad_token_id=0,
        )

    return generate


@torch.inference_mode()
def decode_step(batch: int, context: int, repeats: int) -> dict[str, Any]:
    """Seconds of one decode step of the paper's layer at this batch and context, MHA and MQA: attention alone, and the whole layer."""
    d, h, k = PAPER["d"], PAPER["h"], PAPER["k"]
    x_bd = torch.randn(batch, d)
    q_bhk = torch.randn(batch, h, k)
    kv = {name: torch.randn(2, batch, heads, context, k) for name, heads in (("mha", h), ("mqa", 1))}
    weights = {name: _layer_weights((h + 2 * heads) * k, PAPER[f"{name}_ff"]) for name, heads in (("mha", h), ("mqa", 1))}

    def attention(name: str) -> torch.Tensor:
        # With one head the queries are rows over the same keys; with h, each has keys of its own.
        q = q_bhk[:, None] if name == "mqa" else q_bhk[:, :, None]
        return F.scaled_dot_product_attention(q, kv[name][0], kv[name][1])

    def layer(name: str) -> torch.Tensor:
        qkv, out, up, down = weights[name]
        F.linear(x_bd, qkv)
        y_bd = x_bd + F.linear(attention(name).reshape(batch, h * k), out)
        return y_bd + F.linear(F.relu(F.linear(y_bd, up)), down)

    result: dict[str, Any] = {"batch": batch, "context": context}
    for part, work in (("attention", attention), ("layer", layer)):
        times = in_turn({name: partial(work, name) for name in ("mha", "mqa")}, repeats)
        result[part] = times | {"ratio": times["mha"]["median_s"] / times["mqa"]["median_s"]}
    for name in ("mha", "mqa"):
        kv_bytes, flops = kv[name].nbytes, 4 * batch * h * context * k
        result[f"{name}_arithmetic"] = {
            "kv_bytes": kv_bytes,
            "weight_bytes": sum(weight.nbytes for weight in weights[name]),
            "attention_flops": flops,
            "attention_flops_per_byte": flops / kv_bytes,
        }
    return result


def _layer_weights(qkv_rows: int, ff: int) -> tuple[torch.Tensor, ...]:
    """(qkv, out, up, down) of one layer of the paper's, random."""
    d, width = PAPER["d"], PAPER["h"] * PAPER["k"]
    return torch.randn(qkv_rows, d), torch.randn(d, width), torch.randn(ff, d), torch.randn(d, ff)


def classes(num_heads: int, repeats: int, model_size: int = 1024, batch: int = 4, length: int = 128) -> dict[str, Any]:
    """Seconds of a list of query projections against one fused class, forward, and forward with backward."""
    x_bnd = torch.randn(batch, length, model_size)
    modules = {"list": HeadListAttention(model_size, num_heads), "fused": FusedAttention(model_size, num_heads)}
    result: dict[str, Any] = {"heads": num_heads, "model_size": model_size, "batch": batch, "length": length}

    def forward(name: str) -> None:
        with torch.inference_mode():
            modules[name](x_bnd)

    def both(name: str) -> None:
        modules[name](x_bnd).sum().backward()

    for part, work in (("forward", forward), ("forward_backward", both)):
        times = in_turn({name: partial(work, name) for name in modules}, repeats)
        result[part] = times | {"ratio": times["list"]["median_s"] / times["fused"]["median_s"]}
    return result
