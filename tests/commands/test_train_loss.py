"""The compiled loss is the other one, compiled once for each length; what cannot be compiled is
computed all the same.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from commands.train.loss import Loss
from commands.train.train import initialise
from model.checkpoint.families import read_spec
from model.decoder import Decoder
from server.config import EMBEDDED_MODEL

NUM_TOKENS, VOCABULARY = 32, 50

# The compiler's own: it makes an instance of each autograd function that it meets.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def decoder() -> Decoder:
    small = replace(
        read_spec(EMBEDDED_MODEL), hidden_size=16, head_dim=4, intermediate_size=16, num_layers=1
    )
    decoder = Decoder(replace(small, vocab_size=VOCABULARY, max_positions=NUM_TOKENS))
    initialise(decoder, 0)
    return decoder


def loss_and_gradient(decoder: Decoder, loss: Loss, length: int) -> tuple[Tensor, Tensor]:
    ids_N = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    nats = loss(ids_N, ids_N.roll(-1), torch.arange(NUM_TOKENS) % length, length)
    (gradient,) = torch.autograd.grad(nats, [decoder.token_embedding.weight])
    return nats, gradient


def test_it_is_compiled_once_for_each_length(
    decoder: Decoder, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    plain, compiled = Loss(decoder, "cpu"), Loss(decoder, "cpu", backend)
    for length in (16, 16, 8, 16):
        for one, other in zip(
            loss_and_gradient(decoder, plain, length),
            loss_and_gradient(decoder, compiled, length),
            strict=True,
        ):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert len(graphs) == 2 and capsys.readouterr().err == ""


def test_what_cannot_be_compiled_is_computed_after_one_line(
    decoder: Decoder, capsys: pytest.CaptureFixture[str]
) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        raise RuntimeError("no compiler here")

    plain, compiled = Loss(decoder, "cpu"), Loss(decoder, "cpu", backend)
    for length in (16, 8):
        assert torch.equal(
            loss_and_gradient(decoder, plain, length)[0],
            loss_and_gradient(decoder, compiled, length)[0],
        )
    text = capsys.readouterr().err
    assert (
        text.startswith("onehead train: the loss cannot be compiled, so that steps take longer: ")
        and "no compiler here" in text
    )
    assert text.count("\n") == 1
