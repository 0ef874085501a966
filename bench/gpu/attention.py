"""The decode kernel: seconds and bytes of a call that reads one K and V for all heads, beside SDPA,
FlashInfer and FlexAttention.

A call is timed over several layers, as a model's step has them, each with keys of its own that
nothing has read since the flush. Ours reads pages in a random order; SDPA and FlexAttention get the
same memory as if it were contiguous. None writes K and V; what ours takes with its writing is told
beside. It knows no ceilings: shares are the report's.

Shape letters: B sequences, L keys of a sequence, P pages, S slots of a page, H query heads, d
columns.
"""

import random
from array import array
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.common import CASES, HEADS, Part, captured, timed
from cache.layout import CacheLayout, Columns, pages_for
from cache.pool import KVPool
from model.batch import build_batch
from model.devices import create_backend, find_device
from model.step import Row, StepPlan
from tests.support.checks import Found

PAGE_SIZE = 64
PEER_CASES = ((1, 1024), (32, 8192), (256, 2048))
SMALL_HEADS, SMALL_CASES, SMALL_PEER_CASES = ((4, 32), (3, 16)), ((1, 64), (3, 128)), ((3, 128),)
NEAR = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}
"""Largest distance from the reference, relative to 1 + the value."""
LEAST_SECONDS = 60.0
"""Of a peer that may have to be compiled: FlashInfer's compiler takes as long for one kernel."""
COLD_BYTES, MOST_LAYERS = 2 * 10**9, 24
"""Each call is timed over enough layers to read about COLD_BYTES, at most MOST_LAYERS."""


def backend_name(pool: KVPool, heads: int) -> str:
    """Ours on a GPU is what serves there; on a CPU Triton's interpreter where it is installed."""
    if pool.numbers_PN.device.type != "cpu":
        return find_device("cuda").backend_for(pool, heads)
    return "triton" if find_spec("triton") is not None else "reference"


def layers_of(num_bytes: int) -> int:
    """Over how many layers a call that reads so much is timed."""
    return max(1, min(MOST_LAYERS, COLD_BYTES // num_bytes))


class Problem:
    """The decode step of sequences with so many keys, the token's own included."""

    def __init__(
        self, heads: int, head_dim: int, contexts: list[int], dtype: torch.dtype, device: str
    ) -> None:
        self.heads, self.head_dim, self.contexts = heads, head_dim, contexts
        self.num_bytes = 2 * sum(contexts) * head_dim * dtype.itemsize
        self.layers = layers_of(self.num_bytes) if device == "cuda" else 1
        self.upload = find_device(device).upload
        columns = [Columns(head_dim, head_dim)] * self.layers
        self.layout = CacheLayout.of(self.layers, (), PAGE_SIZE, columns)
        counts = [pages_for(context, PAGE_SIZE) for context in contexts]
        self.pool = KVPool.allocate(self.layout, sum(counts), dtype, torch.device(device))
        torch.manual_seed(0)
        self.pool.numbers_PN.normal_()
        self.pages = random.Random(0).sample(range(sum(counts)), sum(counts))
        pages = iter(self.pages)
        self.rows = [
            Row(id, [0], context - 1, [array("q", (next(pages) for _ in range(count)))], None)
            for id, (context, count) in enumerate(zip(contexts, counts, strict=True))
        ]
        self.q_BHd = torch.randn(len(contexts), heads, head_dim, dtype=dtype, device=device)
        self.k_Bd, self.v_Bd = torch.randn(2, len(contexts), head_dim, dtype=dtype, device=device)
        self.scale = head_dim**-0.5

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [B, 1, L, d], as if pages lay in their order."""
        k_B1Ld, v_B1Ld = (
            x.reshape(len(self.rows), 1, -1, self.head_dim) for x in self.pool.layer(layer)
        )
        return k_B1Ld, v_B1Ld

    def ours(self) -> Callable[[int], Tensor]:
        """A layer's call. Writing the tokens' K and V is part of it."""
        backend, plan = self._planned()
        return lambda layer: backend.run(plan, layer, self.q_BHd, self.k_Bd, self.v_Bd)

    def attending(self) -> Callable[[int], Tensor]:
        """A layer's call, without the writing where the backend offers that."""
        backend, plan = self._planned()
        if not hasattr(backend, "attend"):
            return self.ours()
        return lambda layer: backend.attend(plan, layer, self.q_BHd)

    def check(self, o_BHd: Tensor, layer: int = 0) -> None:
        """Raises AssertionError where the output of the first, a middle or the last row is not
        attention over the keys that the pool holds now, in float64.
        """
        o_BHd = o_BHd.view(len(self.rows), self.heads, self.head_dim)
        for i in {0, len(self.rows) // 2, len(self.rows) - 1}:
            pages = list(self.rows[i].pages[0])
            k_Ld, v_Ld = (
                x[pages].flatten(0, 1)[: self.contexts[i]].double() for x in self.pool.layer(layer)
            )
            expected_Hd = (self.q_BHd[i].double() @ k_Ld.T * self.scale).softmax(-1) @ v_Ld
            distance = float(
                ((o_BHd[i].double() - expected_Hd).abs() / (1 + expected_Hd.abs())).max()
            )
            assert distance <= NEAR[self.q_BHd.dtype], (
                f"sequence {i} of {len(self.rows)} is off by {distance:.2g}"
            )

    def _planned(self) -> tuple[Any, Any]:
        """A backend, and its plan of all rows."""
        backend = create_backend(
            backend_name(self.pool, self.heads), self.pool, self.scale, self.heads
        )
        return backend, backend.plan(
            build_batch(StepPlan(tuple(self.rows)), self.layout, self.upload)
        )


def sdpa(problem: Problem) -> Callable[[int], Tensor]:
    """Heads stacked as the rows of one query matrix, so that K and V are read once."""
    q_B1Hd = problem.q_BHd.unsqueeze(1)
    return lambda layer: F.scaled_dot_product_attention(
        q_B1Hd, *problem.whole(layer), scale=problem.scale
    )


def flex(problem: Problem) -> Callable[[int], Tensor]:
    """Compiled where that makes a kernel of it. Of head counts that are no power of two it has no
    kernel that reads K and V once: there heads are rows of one query matrix.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # Of so many shapes of one function it would compile no more than eight.
    attend = (
        torch.compile(flex_attention, dynamic=False) if problem.q_BHd.is_cuda else flex_attention
    )
    grouped = problem.heads & (problem.heads - 1) == 0
    q = problem.q_BHd.unsqueeze(2 if grouped else 1)
    return lambda layer: attend(q, *problem.whole(layer), scale=problem.scale, enable_gqa=grouped)


def flashinfer(problem: Problem) -> Callable[[int], Tensor]:
    """Over the same pages in the same order as ours. Its first call compiles."""
    peer = import_module("flashinfer")
    device, dtype = problem.q_BHd.device, problem.q_BHd.dtype
    workspace = torch.empty(2**27, dtype=torch.uint8, device=device)
    wrapper = peer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    ends = torch.tensor(
        [0, *(len(row.pages[0]) for row in problem.rows)], dtype=torch.int32, device=device
    ).cumsum(0, dtype=torch.int32)
    order = torch.tensor(problem.pages, dtype=torch.int32, device=device)
    last = torch.tensor(
        [(context - 1) % PAGE_SIZE + 1 for context in problem.contexts],
        dtype=torch.int32,
        device=device,
    )
    sizes = problem.heads, 1, problem.head_dim, PAGE_SIZE
    wrapper.plan(
        ends, order, last, *sizes, q_data_type=dtype, kv_data_type=dtype, sm_scale=problem.scale
    )
    return lambda layer: wrapper.run(
        problem.q_BHd, tuple(x.unsqueeze(2) for x in problem.pool.layer(layer))
    )


KERNELS: dict[str, Callable[[Problem], Callable[[int], Tensor]]] = {
    "onehead": Problem.attending,
    "sdpa": sdpa,
    "flex": flex,
    "flashinfer": flashinfer,
}
"""The slowest to compile at the end: where time is up, that is what is missing."""


def figures(part: Part, call: Callable[[int], Tensor], num_layers: int) -> Found:
    """Seconds of a call, and whether from a CUDA graph, which it is where the kernel can be
    captured.
    """
    graph = False

    def layers() -> None:
        for layer in range(num_layers):
            call(layer)

    work: Callable[[], object] = layers
    if part.device == "cuda":
        try:
            work, graph = captured(layers), True
        except RuntimeError:
            torch.cuda.synchronize()
    return timed(work, part, layers=num_layers) | {"graph": graph}


def time_one(part: Part, kernel: str, problem: Problem) -> Found:
    """The figures of one kernel; of ours with its writing, too, which others do not do. Ours is
    compared with the reference first.
    """
    call = KERNELS[kernel](problem)
    sizes = {"bytes": problem.num_bytes, "layers": problem.layers}
    if kernel != "onehead":
        return figures(part, call, problem.layers) | sizes
    with_write = problem.ours()
    for each in (call, with_write):
        problem.check(each(0))
    return (
        figures(part, call, problem.layers)
        | sizes
        | {"seconds_with_write": figures(part, with_write, problem.layers)["seconds"]}
    )


@torch.inference_mode()
def measure(part: Part) -> None:
    heads, cases, peer_cases = (
        (SMALL_HEADS, SMALL_CASES, SMALL_PEER_CASES) if part.small else (HEADS, CASES, PEER_CASES)
    )
    for kernel in KERNELS:
        for num_heads, head_dim in heads:
            for batch, context in cases if kernel == "onehead" else peer_cases:
                name = f"{kernel}/{num_heads}x{head_dim}/{batch}x{context}"
                if kernel != "onehead" and part.left < LEAST_SECONDS:
                    part.note(name, {"missing": "no time is left"})
                    continue
                with part.guarded(name):
                    problem = Problem(
                        num_heads, head_dim, [context] * batch, part.dtype, part.device
                    )
                    part.note(name, time_one(part, kernel, problem))
