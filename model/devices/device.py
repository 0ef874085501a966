"""Device: the hardware that a model runs on, as the rest of the model sees it. devices/cpu and
devices/gpu implement it.

Everything that differs between devices is asked of this one object, which
`model.devices.find_device` chooses by name. Invariant: copies and steps take effect on a device in
the order in which they are issued. It knows nothing of requests and schedules.

Shape letters: S rows of logits, V vocabulary, F rows whose largest logits are wanted, K how many of
them, D hidden size, N settings of a row, R results of a row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Batch, Numbers
from model.decoder import Decoder, Tail
from model.devices.backend import Backend, Plans
from model.devices.products import Products
from model.step import Sample, StepPlan

MEMORY_ERRORS = "out of memory", "ALLOC_FAILED", "can't allocate memory"

Forward = Callable[[Batch, Plans], Tensor]
"""(the rows of a step, the backend's plans for it) -> the last hidden states x_TD, valid until the
next call. Of tokens that are not in the batch's tail, if it has one, they are those that layers
before it leave."""


class Event(Protocol):
    """A point in a device's stream of work."""

    def synchronize(self) -> None:
        """Returns when the device has reached it."""


class Stream(Protocol):
    """A device's queue of work. What is enqueued runs after everything enqueued before it, possibly
    after `enqueue` has returned.
    """

    def enqueue(self, work: Callable[[], None]) -> None:
        """Runs `work`, which touches the device and nothing else. Raises the errors of launching
        it; lack of memory is one of torch's RuntimeErrors (see `lack_of_memory`).
        """

    def mark(self) -> Event:
        """The point after everything enqueued so far."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records `work` and returns a function that repeats it on the same tensors. Numbers that
        `work` takes from the host keep their values of now; it must not wait for the device.
        """


class RowDraws(Protocol):
    """Kernels that draw for all rows of a step at once, and their buffers, which the next draw
    overwrites.
    """

    results_SR: Tensor
    """Of each row, 32 bits each: its token; log-probability and normaliser under the model's own
    distribution, and the largest logit that it draws from, as float32; 1 if its states are finite,
    plus 2 if normaliser and the model's largest logit are.
    """

    def draw(
        self,
        logits_SV: Tensor,
        settings_SN: Tensor,
        drawn_S: Tensor | None,
        states_SD: Tensor | None = None,
    ) -> None:
        """Draws for all rows, by temperature and min-p (see model.draw_words.settings_SN), into
        results_SR and drawn_S; can be captured. `states_SD`: hidden states that have to be finite.
        """

    def redraw(
        self,
        logits_SV: Tensor,
        settings_SN: Tensor,
        drawn_S: Tensor | None,
        rows: Sequence[int],
        samples: Sequence[Sample],
        adjusted_FV: Tensor | None,
    ) -> None:
        """Draws again for these rows, whose samples are given, within top-k and top-p.
        `adjusted_FV`: the logits that they draw from, filtered for rows with typical-p; None: the
        model's.
        """


class Dtypes(NamedTuple):
    """What a value of engine.dtype stands for on a device."""

    compute: torch.dtype
    """Of activations, and of weights that are no matrices: norms and biases."""
    matrices: torch.dtype | None
    """Of linear layers and embedding tables; None leaves each as the checkpoint stores it, where
    kernels take that."""
    cache: torch.dtype


class Device:
    """One kind of hardware. What a subclass does not override is done by torch, and done when the
    call returns.
    """

    name: str
    """The value of engine.device that selects it."""
    torch_device: torch.device
    """Where tensors lie."""
    default_dtype: torch.dtype
    default_cache_share: float
    """The share of free memory that the KV cache takes by default."""
    overcommits = False
    """Whether an allocation succeeds without the memory being there, because it is taken only when
    it is first written to."""
    warms_up = False
    """Whether kernels are compiled or captured when they first run, which should happen before
    requests are served."""
    invariant_backend: str
    """Name of the attention backend that is batch-invariant."""
    invariant_backend_needs: str
    """What has to hold for that backend to be chosen, for error messages."""

    def dtypes(self, option: str) -> Dtypes:
        """What engine.dtype means here: one dtype for everything. Raises OptionError for one that
        cannot be had.
        """
        dtype = self.default_dtype if option == "auto" else getattr(torch, option)
        return Dtypes(dtype, dtype, dtype)

    def backend_for(self, pool: KVPool, num_heads: int, deterministic: bool = False) -> str:
        """Name of the fastest attention backend for a pool of this dtype and these sizes, or with
        `deterministic` of the fastest that is batch-invariant, if there is one. The pool may be on
        torch's meta device.
        """
        raise NotImplementedError

    def products(self, dtypes: Dtypes, quantization: str, deterministic: bool) -> Products:
        """What computes a decoder's matrix products."""
        raise NotImplementedError

    def forward(self, decoder: Decoder, backend: Backend) -> Forward:
        """What computes a step's hidden states, over the backend's pages."""

        def run(batch: Batch, plans: Plans) -> Tensor:
            tail = batch.tail and Tail(batch.tail.rows_K, partial(backend.run, plans.tail))
            attend = partial(backend.run, plans.all_tokens)
            x_TD: Tensor = decoder(batch.token_ids_T, batch.position_ids_T, attend, tail)
            return x_TD

        return run

    def num_parts_run(self) -> int:
        """A number that grows while a step is computed, where the decoder does not count its
        own.
        """
        return 0

    def memory(self) -> tuple[int, int]:
        """Bytes that can be taken now, and all there are."""
        raise NotImplementedError

    def description(self) -> str:
        """The hardware by name, for people; empty where the device's name says enough."""
        return ""

    def own_memory(self) -> tuple[int, int]:
        """Bytes of memory of the device's own that are free now, and all there are; 0 where it
        computes in the machine's.
        """
        return 0, 0

    def memory_in_words(self) -> str:
        """Who has the device's memory, for a message that some is lacking."""
        free, total = self.memory()
        return f"{free} of {total} bytes are free"

    def failure(self, error: Exception) -> str:
        """What is known of the hardware when a step has ended with this error; empty where it can
        still compute.
        """
        return ""

    def use_threads(self, count: int) -> None:
        """Sets the number of threads where torch's own threads compute; 0 leaves it as it is."""

    def refusal(self) -> str:
        """Why a model cannot be served on it; empty where one can."""
        return ""

    def check_float8(self) -> None:
        """Raises OptionError where the hardware cannot compute over a cache in float8."""

    def step_bytes(
        self, prepare: Callable[[], Callable[[StepPlan], object]], plans: Sequence[StepPlan]
    ) -> int:
        """Memory that steps take besides weights and cache. `prepare` allocates what stays between
        steps and returns what runs a plan. 0 where nothing needs to be reserved for steps; then
        nothing is run.
        """
        return 0

    def release_cached_memory(self) -> None:
        """Returns memory that torch's allocator keeps for reuse."""

    def synchronize(self) -> None:
        """Returns when everything launched so far is done."""

    def stream(self) -> Stream | None:
        """What runs steps asynchronously; None where a step is done when it has been launched."""
        return None

    def upload(self, values: Numbers, dtype: torch.dtype | None = None) -> Tensor:
        """A non-blocking copy on the device. The host's values may change as soon as this has
        returned.
        """
        return values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)

    def for_upload(self, values: Tensor) -> Tensor:
        """The same values, where a non-blocking copy to the device can read them; they are kept
        until it has.
        """
        return values

    def download(self, x: Tensor) -> Tensor:
        """A non-blocking copy on the host. It may be read when an event after it has been
        reached.
        """
        return x.clone()

    def summary(self, logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(normaliser_S, largest_S, tokens_S) of float32 logits: the logarithm of the sum of each
        row's exponentials, its largest logit and the index of that. torch's normaliser is not
        batch-invariant.
        """
        return logits_SV.logsumexp(dim=-1), *logits_SV.max(dim=-1)

    def row_draws(self, num_rows: int, num_tokens: int) -> RowDraws | None:
        """Draws of up to so many rows of logits of so many tokens; None where no kernels draw."""
        return None

    def largest(self, logits_FV: Tensor, count: int) -> Tensor:
        """Indices of each row's largest logits, in an order that does not depend on other rows. ->
        ids_FK
        """
        return logits_FV.topk(count, dim=-1).indices

    def raise_if_broken(self) -> None:
        """Raises the device's own error where it can no longer compute: kernel launchers may report
        that as any error.
        """


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an error says that the device is out of memory."""
    # torch's allocator has an exception of its own; CUDA graphs, libraries, Triton and the CPU's
    # allocator have texts.
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in MEMORY_ERRORS
    )


def lack_of_memory(error: RuntimeError) -> str:
    """The message of an error that says the device is out of memory. Raises every other error."""
    if not is_lack_of_memory(error):
        raise error
    return str(error).splitlines()[0]
