"""Tokenizers of checkpoints that are trained further or converted are tried before they are loaded, and must fit the model."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from commands import corpus
from model.spec import CheckpointError
from server.errors import ConfigurationError
from tests.support.checkpoints import make_tokenizer


def test_a_tokenizer_that_takes_too_much_is_not_loaded(tmp_path: Path) -> None:
    tokenizer = json.loads(make_tokenizer().to_str()) | {"normalizer": {"type": "Prepend", "prepend": "xy z" * 2**23}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigurationError, match=r"/tokenizer\.json: cannot be loaded within"):
        corpus.read_tokenizer(tmp_path, 1000)


def test_an_id_of_the_post_processor_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 99_999)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="has ids up to 99999"):
        corpus.read_tokenizer(tmp_path, 1000)
