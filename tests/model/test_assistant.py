"""The drafter of Gemma 4, against transformers: what it draws from a model's states and pages."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.pages import PageAllocator
from cache.table import PageTable
from model.checkpoint.families import read_spec, spec_of
from model.checkpoint.weights import load_decoder
from model.options import EngineOptions
from model.runner.assistant import Assistant, check
from model.runner.runner import ModelRunner
from model.spec import CheckpointError, OptionError
from model.step import Row, Sample, SampledToken, Sampling, StepPlan
from server.engine.draft_model import AssistantModel
from tests.server.engine.test_draft_model import always, requests_of
from tests.server.engine.test_drafts import outcomes
from tests.support.families import make_family_checkpoint
from tests.support.processes import ServerProcess

NUM_DRAFTS = 4
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "num_kv_shared_layers": 3,
    "intermediate_size": 90,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
}
GREEDY = Sampling(temperature=0.0)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions("cpu", "float32", 1, 16, 200, None, 400, 8, 64, **changes)


def make_drafter(folder: Path, vocab_size: int, backbone: int, **changes: Any) -> Any:
    """Writes a random one, with tables of clusters -> the model of transformers that it is."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    torch.manual_seed(5)
    text = Gemma4TextConfig(**TEXT | {"vocab_size": vocab_size} | changes)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=backbone)
    # transformers 5.23 refuses a model all of whose layers read another one's keys.
    modes = ["reuse"] * text.num_hidden_layers
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", modes):
        oracle = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    oracle.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["masked_embedding.centroids.weight"] = torch.zeros(8, 48)
    weights["masked_embedding.token_ordering"] = torch.arange(vocab_size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return oracle


class Pair:
    """A model and its drafter, with oracles of both."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.target = make_family_checkpoint("gemma4_text", 0, folder / "model")
        self.folder = folder / "drafter"
        spec = read_spec(self.target.folder)
        self.window = max(window or 0 for window in spec.windows)
        heads = {"head_dim": spec.head_dim, "global_head_dim": spec.wide_head_dim}
        sizes = self.target.vocab_size, spec.hidden_size
        heads |= {"sliding_window": self.window}
        self.oracle = make_drafter(self.folder, *sizes, **heads | changes)

    def runner(self, **changes: Any) -> ModelRunner:
        folder = self.target.folder
        return ModelRunner.load(folder, read_spec(folder), options(**changes))

    def assistant(self, runner: ModelRunner) -> Assistant:
        spec = read_spec(self.folder, drafts=True)
        decoder = load_decoder(self.folder, spec, torch.float32, torch.device("cpu"))
        return Assistant(decoder, runner)

    @torch.inference_mode()
    def expected(self, prompt: list[int]) -> list[tuple[int, torch.Tensor]]:
        """By transformers: for the token drawn after a prompt and each draft token the
        log-probabilities that it was drawn by, greedily.
        """
        target = self.target.oracle
        found = target(
            torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True
        )
        state, keys = found.hidden_states[-1][:, -1:], found.shared_kv_states
        token = found.logits[:, -1:].argmax(-1)
        drawn = [(int(token), found.logits[0, -1].log_softmax(-1))]
        for _ in range(NUM_DRAFTS):
            embedding = target.get_input_embeddings()(token)
            out = self.oracle(
                inputs_embeds=torch.cat([embedding, state], -1),
                position_ids=torch.tensor([[len(prompt)]]),
                shared_kv_states=keys,
            )
            state, token = out.last_hidden_state, out.logits.argmax(-1)
            drawn.append((int(token), out.logits[0, -1].log_softmax(-1)))
        return drawn


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 19])
def test_the_same_logits_as_transformers(pair: Pair, length: int) -> None:
    """Whatever place in a page the last token has; prompts are shorter than the window."""
    assert length < pair.window
    check_logits(pair, length)


def test_windows_are_a_key_shorter_than_the_models(tmp_path: Path) -> None:
    """As the page of the oldest key may have been given back. transformers does not count the
    newest key.
    """
    check_logits(Pair(tmp_path, sliding_window=31), 60)


def check_logits(pair: Pair, length: int) -> None:
    prompt = [(7 * place + 3) % pair.target.vocab_size for place in range(length)]
    runner = pair.runner()
    assistant = pair.assistant(runner)
    table = PageTable(PageAllocator(200), runner.pool.layout)
    table.grow(length + 1, length + 1)
    first = Row(9, prompt, 0, table.pages, Sample(GREEDY, prompt, (), num_top=5))
    (drawn,) = runner.run(StepPlan((first,))).drawn
    found = []
    for number in range(NUM_DRAFTS + 1):
        assert isinstance(drawn, SampledToken)
        found.append(drawn)
        sample = Sample(GREEDY, prompt, [d.token for d in found], num_top=5)
        row = Row(9, [drawn.token], length, table.pages, sample)
        if number < NUM_DRAFTS:
            (drawn,) = assistant.run(StepPlan((row,))).drawn
    for got, (token, logprobs_V) in zip(found, pair.expected(prompt), strict=True):
        assert got.token == token
        for other, logprob in got.top:
            assert logprob == pytest.approx(float(logprobs_V[other]), abs=1e-4)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_same_bits_as_without(pair: Pair, quantization: str) -> None:
    """Windows are passed, so that pages are given back; some drafts come true."""
    runner = pair.runner(quantization=quantization)
    layout, requests = runner.pool.layout, requests_of(pair.target.vocab_size, 8)
    without, _ = outcomes(runner, layout, requests, None)
    assistant = pair.assistant(runner)
    drafts = AssistantModel(assistant, assistant.states, 400)
    drafted, scheduler = outcomes(runner, layout, requests, always(drafts))
    assert drafted == without and scheduler.num_drafted_tokens > 30
    assert not assistant.states


def test_memory_is_short_while_tokens_are_drafted(pair: Pair) -> None:
    """It costs speed alone; states of what has no drafts, as of constrained sequences, go too."""
    runner = pair.runner()
    layout, requests = runner.pool.layout, requests_of(pair.target.vocab_size, 4)
    without, _ = outcomes(runner, layout, requests, None)
    assistant = pair.assistant(runner)
    drafts = always(AssistantModel(assistant, assistant.states, 400))
    with patch.object(assistant, "_compute", side_effect=RuntimeError("can't allocate memory")):
        drafted, scheduler = outcomes(runner, layout, requests, drafts)
    assert drafted == without and scheduler.num_drafted_tokens == 0
    assert not assistant.states


def test_a_server_with_an_assistant_answers_as_one_without(pair: Pair) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    found = []
    for more in ((), ("--engine.speculation", "draft", "--engine.draft", str(pair.folder))):
        with ServerProcess(pair.target.folder, *more) as server:
            found.append(server.post("/v1/completions", body)[1]["choices"][0]["text"])
            drafted = server.metric("onehead_spec_decode_num_draft_tokens_total")
            assert (drafted > 0) is bool(more)
    assert found[0] == found[1]


def test_the_published_configuration() -> None:
    text = TEXT | {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_kv_shared_layers": 4,
        "intermediate_size": 2048,
        "vocab_size": 262_144,
    }
    clusters = {"use_ordered_embeddings": True, "num_centroids": 2048}
    whole = {"model_type": "gemma4_assistant", "text_config": text, "backbone_hidden_size": 2048}
    spec = spec_of(Path("m"), whole | clusters)
    assert (spec.num_storing_layers, spec.backbone_size, spec.logit_cap) == (0, 2048, None)
    for changes in (
        {"num_kv_shared_layers": 2},
        {"hidden_size_per_layer_input": 256},
        {"use_double_wide_mlp": True},
    ):
        with pytest.raises(CheckpointError, match=next(iter(changes))):
            spec_of(Path("m"), whole | {"text_config": text | changes})


def test_what_does_not_belong_together_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"name it with --engine\.draft"):
        read_spec(pair.folder)
    runner = pair.runner()
    make_drafter(tmp_path / "wide", pair.target.vocab_size, 40)
    make_drafter(tmp_path / "heads", pair.target.vocab_size, runner.decoder.spec.hidden_size)
    for name, message in (("wide", "states of 40 columns"), ("heads", "with other layers")):
        folder = tmp_path / name
        with pytest.raises(OptionError, match=message):
            check(read_spec(folder, drafts=True), runner.decoder.spec)
