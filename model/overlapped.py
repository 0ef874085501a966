"""OverlappedRunner: a ModelRunner whose steps are launched, so that the next one is planned while the device computes.

A token that was drawn in the step before and that nobody has seen yet is taken on the device, from where every step leaves what it drew.
Invariant: between two calls it holds, of any sequence, that token and nothing else. What it tells the device goes through its stream.
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from cache.pool import KVPool
from model.backends import Backend
from model.batch import Batch, build_batch
from model.decoder import Decoder
from model.flight import StepFlight
from model.graphs import ListedBackend, StepGraphs
from model.runner import GREEDY, SORTING, ModelRunner, RunnerOptions, all_in_page_0, lack_of_memory, memory_error
from model.step import UNSEEN, Row, Sample, Sampling, StepPlan, StepResult
from model.streams import CudaStream, Stream
from model.transfer import download, upload

CONTEXT_STEP = 4
"""Captured steps are for contexts of a page, and of this many times as many keys each, up to the longest."""


class OverlappedRunner(ModelRunner):
    """Steps of one model on a device that computes beside us: of `most_tokens` tokens at most, and captured ones of up to `most_rows`."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, backend: Backend, device: torch.device, stream: Stream, most_rows: int, most_tokens: int
    ) -> None:
        super().__init__(decoder, pool, backend, device)
        self._stream = stream
        self._drawn_S = torch.zeros(most_tokens, dtype=torch.long, device=device)
        self._place_of: dict[int, int] = {}
        """Sequence -> where its token is on drawn_S, when the step launched last is done."""
        # Experts are chosen by the host.
        self._graphs: StepGraphs | None = None
        if isinstance(backend, ListedBackend) and decoder.spec.experts is None:
            self._graphs = StepGraphs(decoder, backend, stream, self._drawn_S, most_rows)

    @classmethod
    def on_gpu(cls, runner: ModelRunner, options: RunnerOptions) -> "OverlappedRunner":
        """The same runner over CUDA's stream, with everything captured that it will be asked for."""
        parts = runner.decoder, runner.pool, runner.backend, runner.device
        found = cls(*parts, CudaStream(), options.max_running, options.step_tokens)
        found.capture(options.max_context)
        found.warm_up()
        return found

    def launch(self, plan: StepPlan) -> StepFlight:
        """Begins a step behind all that were begun before. A row whose last token is UNSEEN goes on with what its sequence draws in the
        step that was launched last. What the plan refers to may change when this has returned. Raises MemoryError.
        """
        try:
            return self._launch(plan)
        except RuntimeError as error:
            reason = lack_of_memory(error)
        raise memory_error(reason, self.device)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> StepFlight:
        rows = plan.rows
        sources = [self._place_of[row.sequence] if row.tokens[-1] == UNSEEN else -1 for row in rows]
        replay = None if self._graphs is None else self._graphs.find(rows, sources)
        if replay is not None:
            flight = StepFlight(rows, range(len(rows)))
            self._stream.enqueue(partial(self._compute_captured, plan, flight, replay))
        else:
            batch = build_batch(plan, self.pool.layout, self.device)
            flight = StepFlight(rows, batch.firsts)
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
        self, plan: StepPlan, flight: StepFlight, batch: Batch, attended: Any, places: torch.Tensor, from_S: torch.Tensor
    ) -> None:
        """A step that is launched piece by piece."""
        batch.token_ids_T[places] = self._drawn_S[from_S]
        self._compute(plan, flight, batch, attended)

    @torch.inference_mode()
    def _compute_captured(self, plan: StepPlan, flight: StepFlight, replay: Any) -> None:
        if plan.clear:
            self.pool.clear(list(plan.clear))
        logits_SV, finite_S = replay()
        self._draw(flight, logits_SV)
        flight.finite_T = download(finite_S)
        self.decoder.num_parts_run += 1

    def _draw(self, flight: StepFlight, logits_SV: torch.Tensor) -> None:
        super()._draw(flight, logits_SV)
        assert flight.draws is not None
        self._drawn_S[: len(logits_SV)].copy_(flight.draws.tokens_S())

    def capture(self, max_context: int) -> int:
        """Captures steps of every size, for contexts up to the longest; how many. Before anybody is served: it takes seconds."""
        if self._graphs is None:
            return 0
        with torch.inference_mode():
            self._graphs.capture(self._examples(max_context))
        return self._graphs.num_captured

    def warm_up(self) -> None:
        """Computes a step that draws in every way there are kernels for, so that they are compiled before anybody waits for them."""
        pages = all_in_page_0(self.pool.layout, 2)
        rows = (Row(number, [0, 0], 0, pages, Sample(sampling, (), ())) for number, sampling in enumerate((GREEDY, Sampling(), SORTING)))
        self.run(StepPlan(tuple(rows)))

    def _examples(self, max_context: int) -> Iterator[list[Row]]:
        """Steps of one row at the end of a context of each length, all of whose keys are page 0's."""
        layout = self.pool.layout
        num_keys = layout.page_size
        while True:
            num_keys = min(num_keys, max_context)
            # Read from where a table of a context's length has them: all are one page, as nothing here is anybody's.
            yield [Row(0, [0], num_keys - 1, all_in_page_0(layout, num_keys), Sample(GREEDY, (), ()))]
            if num_keys == max_context:
                return
            num_keys *= CONTEXT_STEP
