"""Checks on the embedded model: logits against the CPU's reference, and each request alone against
the same request in a batch.

The reference is the decoder over the backend `reference` in float32 on the CPU, the whole text at
once: nothing is kept between tokens.

Shape letters: T tokens, V vocabulary.
"""

import random
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.attention import backend_name
from bench.gpu.common import Part, engine, pages_of
from cache.pool import KVPool
from model.batch import build_batch
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.devices import create_backend, find_device
from model.devices.products import Products
from model.kv_layout import layout_of
from model.spec import OptionError
from model.step import Row, StepPlan
from tests.support.conditions import Engine, alone, batches, compare, make_cases
from tests.support.paths import EMBEDDED

PAGE_SIZE, POSITIONS = 64, 512
COMPANY = 16
"""Requests at once."""


class Model:
    """A model over one backend."""

    def __init__(
        self, dtype: torch.dtype, device: str, backend: str | None, folder: Path = EMBEDDED
    ) -> None:
        spec, place = read_spec(folder), find_device(device)
        self.upload, heads = place.upload, spec.num_query_heads
        # On a GPU with the products and norms that it serves by, but for the reference.
        products = (
            place.products(place.dtypes("auto"), "none", False)
            if device == "cuda" and backend != "reference"
            else Products()
        )
        self.decoder = load_decoder(folder, spec, dtype, torch.device(device), products)
        layout = layout_of(spec, PAGE_SIZE)
        num_pages = POSITIONS // PAGE_SIZE * layout.pages_per_block
        self.pool = KVPool.allocate(layout, num_pages, dtype, torch.device(device))
        self.backend = create_backend(
            backend or backend_name(self.pool, heads), self.pool, spec.attention_scale, heads
        )

    @torch.inference_mode()
    def logits(self, ids: list[int], last: int | None = None) -> Tensor:
        """Of every token, or of the last so many."""
        row = Row(0, ids, 0, pages_of(self.pool.layout, len(ids)), None)
        batch = build_batch(StepPlan((row,)), self.pool.layout, self.upload)
        x_TD = self.decoder(
            batch.token_ids_T,
            batch.position_ids_T,
            partial(self.backend.run, self.backend.plan(batch)),
        )
        logits_TV: Tensor = (
            self.decoder.logits(x_TD if last is None else x_TD[-last:]).float().cpu()
        )
        return logits_TV


def prompt(length: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(read_spec(EMBEDDED).vocab_size) for _ in range(length)]


def logits(part: Part, reference: Model) -> None:
    """Largest distance of a logit from the reference's: in float32, in bfloat16, and of the
    reference itself in bfloat16.
    """
    ids = prompt(24 if part.small else 256)
    expected_TV = reference.logits(ids)
    distances = {}
    for name, dtype, device, backend in (
        ("float32", torch.float32, part.device, None),
        ("bfloat16", torch.bfloat16, part.device, None),
        ("reference_bfloat16", torch.bfloat16, "cpu", "reference"),
    ):
        distances[name] = float(
            (Model(dtype, device, backend).logits(ids) - expected_TV).abs().max()
        )
    part.note("logits", distances | {"tokens": len(ids), "largest": float(expected_TV.abs().max())})


def engine_alone(part: Part) -> None:
    """Requests whose tokens or log-probabilities differ in a bit between a batch of one and a
    larger one.
    """
    try:
        core, ready = engine(part, EMBEDDED, pages=512, deterministic=True)
    except OptionError as error:
        if part.device == "cuda":
            raise
        # A tree that is only unpacked has no kernels for a CPU.
        return part.note("engine", {"refused": str(error)})
    passes = Engine(core.runner, ready.max_context)  # type: ignore[arg-type]
    cases = make_cases(
        4 if part.small else 32, ready.vocab_size, 100 if part.small else ready.capacity, 0
    )
    (expected,) = alone(passes, cases, lambda _: None)
    (company,) = batches(passes, cases, lambda _: None, COMPANY)
    part.note("engine", compare(expected.traces, company, cases) | {"kernels": ready.kernels})


def measure(part: Part) -> None:
    reference = Model(torch.float32, "cpu", "reference")
    with part.guarded("logits"):
        logits(part, reference)
    with part.guarded("engine"):
        engine_alone(part)
