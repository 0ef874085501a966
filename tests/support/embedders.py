"""Tiny random models that make vectors of texts, with `transformers` and the equations of
sentence-transformers' modules as the oracle.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing

from tests.support.checkpoints import make_tokenizer

GLOBAL, LOCAL = "full_attention", "sliding_attention"
BOS, EOS = "<bos>", "<eos>"
VOCABULARY, WIDTH, INNER, CONTEXT = 300, 48, 64, 128
PROMPTS = {"query": "query: ", "document": "text: "}


@dataclass(frozen=True)
class Embedder:
    """A folder as sentence-transformers writes it, and what it should compute."""

    folder: Path
    model: Any
    dense: tuple[torch.Tensor, ...]

    def vector(self, ids: list[int]) -> torch.Tensor:
        """The mean of the states, and then the linear layers, in float64 from the states on."""
        with torch.inference_mode():
            states_TD = self.model(torch.tensor([ids])).last_hidden_state[0].double()
        vector = states_TD.mean(0)
        for weight in self.dense:
            vector = weight.double() @ vector
        return vector


def tokenizer_of(folder: Path) -> None:
    """Writes a tokenizer that puts a text between two tokens."""
    tokenizer = make_tokenizer((BOS, EOS), VOCABULARY - 1)
    ends = [(name, tokenizer.token_to_id(name)) for name in (BOS, EOS)]
    single, pair = f"{BOS} $A {EOS}", f"{BOS} $A {BOS} $B {EOS}"
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))


def make_embedder(folder: Path, window: int = 10, seed: int = 0) -> Embedder:
    """Four layers, three with a window that counts both ways, and two linear layers after them."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        sliding_window=window,
        layer_types=[LOCAL, GLOBAL, LOCAL, LOCAL],
        query_pre_attn_scalar=16,
        initializer_range=0.4,
        use_bidirectional_attention=True,
        eos_token_id=0,
    )
    model = Gemma3TextModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    # As published: `transformers` halves the window of a config that it has read.
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"sliding_window": window}))
    dense = torch.randn(INNER, WIDTH) * 0.2, torch.randn(WIDTH, INNER) * 0.2
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate((kinds | {"4_Normalize": "Normalize"}).items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    write(folder / "1_Pooling", pooling | {"include_prompt": True})
    for number, weight in enumerate(dense, start=2):
        facts = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
        identity = {"activation_function": "torch.nn.modules.linear.Identity"}
        write(folder / f"{number}_Dense", facts | identity)
        save_file(
            {"linear.weight": weight.contiguous()}, folder / f"{number}_Dense/model.safetensors"
        )
    prompts = {"prompts": PROMPTS, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    tokenizer_of(folder)
    return Embedder(folder, model, dense)


def write(folder: Path, config: dict[str, Any]) -> None:
    """Writes a module's config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
ONE_HEAD = SIZES | {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 80}
BIGCODE = {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": CONTEXT}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_bigcode": ("GPTBigCode", BIGCODE),
    "falcon": ("Falcon", SIZES | {"alibi": False}),
    "llama": ("Llama", ONE_HEAD | {"tie_word_embeddings": False}),
    "gemma": ("Gemma", ONE_HEAD),
}
"""Family -> the beginning of its classes' names in `transformers`, and sizes."""


def make_classifier(family: str, folder: Path, labels: tuple[str, ...]) -> Any:
    """Writes one of `transformers`' models for classification and its tokenizer. -> the model"""
    import transformers

    torch.manual_seed(len(labels))
    name, sizes = CLASSIFIERS[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        initializer_range=0.3,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    model.save_pretrained(folder)
    tokenizer_of(folder)
    return model


if __name__ == "__main__":  # Of scripts/clients: makes an embedder in a new folder, and names it.
    folder = Path(sys.argv[1])
    folder.mkdir()
    make_embedder(folder)
    print(folder)
