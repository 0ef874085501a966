"""OverlappedRunner: a ModelRunner whose steps are launched, so that the next one is planned while the device computes.

A token that was drawn in the step before and that nobody has seen yet is taken on the device, from where every step leaves what it drew.
Invariant: between two calls it holds, of any sequence, that token and nothing else. What it tells the device goes through its stream.
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch

from cache.pool import KVPool
from model.batch import Batch, build_batch
from model.decoder import Decoder
from model.devices.backend import Backend
from model.runner.cuda_graphs import CudaGraphs, ListedBackend
from model.runner.device_memory import lack_of_memory, memory_error
from model.runner.device_stream import CudaStream, Stream
from model.runner.pending_step import PendingStep
from model.runner.runner import GREEDY, ModelRunner, RunnerOptions, all_in_page_0
from model.step import PENDING, Row, Sample, StepPlan, StepResult
from model.transfer import download, upload


class OverlappedRunner(ModelRunner):
    """Steps of one model on a device that computes beside us: of `most_tokens` tokens at most, and captured ones of up to `most_rows`."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, backend: Backend, device: torch.device, stream: Stream, most_rows: int, most_tokens: int
    ) -> None:
        super().__init__(decoder, pool, backend, device)
        assert decoder.spec.experts is None, "the host chooses experts, and what it chose would be captured"
        self._stream = stream
        self._drawn_S = torch.zeros(most_tokens, dtype=torch.long, device=device)
        self._place_of: dict[int, int] = {}
        """Sequence -> where its token is on drawn_S, when the step launched last is done."""
        self._graphs: CudaGraphs | None = None
        if isinstance(backend, ListedBackend):
            self._graphs = CudaGraphs(decoder, backend, stream, self._drawn_S, most_rows)

    @classmethod
    def on_gpu(cls, runner: ModelRunner, options: RunnerOptions, longest: int) -> "OverlappedRunner":
        """The same runner over CUDA's stream, with everything captured that it will be asked for: contexts up to the longest."""
        parts = runner.decoder, runner.pool, runner.backend, runner.device
        found = cls(*parts, CudaStream(), options.max_running, options.step_tokens)
        found.capture(longest)
        return found

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step behind all that were begun before. A row whose last token is PENDING goes on with what its sequence draws in the
        step that was launched last. What the plan refers to may change when this has returned. Raises MemoryError.
        """
        try:
            return self._launch(plan)
        except RuntimeError as error:
            reason = lack_of_memory(error)
        raise memory_error(reason, self.device)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep:
        rows = plan.rows
        sources = [self._place_of[row.sequence] if row.tokens[-1] == PENDING else -1 for row in rows]
        replay = None if self._graphs is None else self._graphs.find(rows, sources)
        if replay is not None:
            flight = PendingStep(rows, range(len(rows)))
            self._stream.enqueue(partial(self._compute_captured, plan, flight, replay))
        else:
            batch = build_batch(plan, self.pool.layout, self.device)
            flight = PendingStep(rows, batch.firsts)
            unseen = [index for index, source in enumerate(sources) if source >= 0]
            places = upload([batch.firsts[i] + len(rows[i].tokens) - 1 for i in unseen], self.device, torch.long)
            from_S = upload([sources[i] for i in unseen], self.device, torch.long)
            self._stream.enqueue(partial(self._compute_seen, plan, flight, batch, self.backend.plan(batch), places, from_S))
        places_of_rows = accumulate(map(len, flight.samples), initial=0)
        self._place_of = {row.sequence: place for row, place in zip(rows, places_of_rows, strict=False) if row.sample is not None}
        flight.event = self._stream.mark()
        return flight

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def _compute_seen(
        self, plan: StepPlan, flight: PendingStep, batch: Batch, attended: Any, places: torch.Tensor, from_S: torch.Tensor
    ) -> None:
        """A step that is launched piece by piece."""
        batch.token_ids_T[places] = self._drawn_S[from_S]
        self._compute(plan, flight, batch, attended)

    @torch.inference_mode()
    def _compute_captured(self, plan: StepPlan, flight: PendingStep, replay: Any) -> None:
        if plan.clear:
            self.pool.clear(upload(plan.clear, self.device, torch.long))
        logits_SV, finite_S = replay()
        self._draw(flight, logits_SV)
        flight.finite_T = download(finite_S)
        self.decoder.num_parts_run += 1

    def _draw(self, flight: PendingStep, logits_SV: torch.Tensor) -> None:
        super()._draw(flight, logits_SV)
        assert flight.draws is not None
        self._drawn_S[: len(logits_SV)].copy_(flight.draws.tokens_S())

    def capture(self, longest: int) -> int:
        """Captures steps of every size, for contexts up to the longest; how many. Before anybody is served: it takes seconds."""
        if not isinstance(self.backend, ListedBackend) or self._graphs is None:
            return 0
        # At the end of a context of each length. All their pages are page 0, as nothing there is anybody's yet.
        draw, layout = Sample(GREEDY, (), ()), self.pool.layout
        examples = [[Row(0, [0], keys - 1, all_in_page_0(layout, keys), draw)] for keys in self.backend.contexts(longest)]
        with torch.inference_mode():
            self._graphs.capture(examples)
        return self._graphs.num_captured
