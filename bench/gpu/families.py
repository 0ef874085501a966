"""Whether decoders of every family are right on this device, beside the reference on the CPU: tiny
checkpoints of random weights, made by transformers.

In float32 the logits of a prompt computed in chunks and token by token, and greedy tokens, which
CUDA graphs compute; in the device's own dtype replayed steps beside launched ones. What differs
between families is what is checked here: norms of branches and heads, gates, rotations, windows,
parallel blocks, latents. Experts are chosen on the host and have no graphs.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.check import replays
from bench.gpu.common import Part, at_once, engine, pages_of
from bench.gpu.numerics import Model
from commands.bench.closed_loop import ClosedLoop
from model.batch import build_batch
from model.step import Row, StepPlan
from tests.support.families import make_family_checkpoint

FAMILIES = (
    ("falcon", 1),
    ("gemma", 2),
    ("gemma3_text", 1),
    ("gemma4_text", 0),
    ("gemma4_text", 3),
    ("llama", 2),
    ("mistral", 1),
    ("deepseek_v2", 1),
    ("minicpm3", 3),
)
SMALL_FAMILIES = (("gemma3_text", 1),)
CHUNKS = (40, 1, 1, 5, 23)
NEAR = 1e-3
"""Of a logit in float32."""
NUM_GREEDY = 40
OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "deterministic": {"deterministic": True}}


@torch.inference_mode()
def in_chunks(model: Model, ids: list[int]) -> Tensor:
    """Logits of every token, on the CPU."""
    layout, logits, first = model.pool.layout, list[Tensor](), 0
    pages = pages_of(layout, len(ids))
    for count in CHUNKS:
        row = Row(0, ids[first : first + count], first, pages, None)
        batch = build_batch(StepPlan((row,)), layout, model.upload)
        run = partial(model.backend.run, model.backend.plan(batch))
        x_TD = model.decoder(batch.token_ids_T, batch.position_ids_T, run)
        logits.append(model.decoder.logits(x_TD).float().cpu())
        first += count
    return torch.cat(logits)


def check(part: Part, family: str, number: int) -> dict[str, Any]:
    """How far logits are from the reference's. Raises AssertionError where one is too far, or a
    greedy token is another although the reference is sure of its own.
    """
    folder = part.scratch / f"{family}-{number}"
    make_family_checkpoint(family, number, folder)
    reference = Model(torch.float32, "cpu", "reference", folder)
    generator = torch.Generator().manual_seed(number)
    vocab_size = reference.decoder.spec.vocab_size
    ids = torch.randint(3, vocab_size, (sum(CHUNKS),), generator=generator).tolist()
    expected_TV = reference.logits(ids)
    found: dict[str, Any] = {}
    for kernels in ("triton", "triton-fast"):
        model = Model(torch.float32, part.device, kernels, folder)
        found[kernels] = float((in_chunks(model, ids) - expected_TV).abs().max())
        assert found[kernels] < NEAR, f"{kernels}: a logit is off by {found[kernels]:.2g}"
    core, ready = engine(part, folder, dtype="float32", pages=64)
    outcomes, _ = ClosedLoop(core, NUM_GREEDY, lambda: None).run(1, [ids[:21]])
    tokens = outcomes[0].token_ids
    for place, token in enumerate(tokens):
        logits_V = reference.logits(ids[:21] + tokens[:place], last=1)[0]
        gap = float(logits_V.max() - logits_V[token])
        assert gap < NEAR, f"greedy token {place} is {token}, short of the largest by {gap:.2g}"
    return found | {"tokens": len(tokens), "kernels": ready.kernels}


def check_family(part: Part, family: str, number: int) -> None:
    with part.guarded(f"{family}/float32"):
        part.note(f"{family}/float32", check(part, family, number))
    for name, options in OPTIONS.items():
        with part.guarded(f"{family}/{name}"):
            folder = part.scratch / f"{family}-{number}"
            part.note(f"{family}/{name}", replays(part, options, folder))


def measure(part: Part) -> None:
    families = SMALL_FAMILIES if part.small else FAMILIES
    at_once(part, [partial(check_family, family=name, number=number) for name, number in families])
