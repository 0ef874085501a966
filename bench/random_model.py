"""A gpt_bigcode checkpoint of random float32 weights, to measure on without a published one.

    python -m bench.random_model 164m|1b FOLDER

It has the shape of tiny_starcoder_py or StarCoderBase-1B, and a tokenizer trained on the standard
library. Weights are the same each time.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from commands import corpus
from commands.train.train import initialise
from model.checkpoint.families import gpt_bigcode, read_spec
from model.checkpoint.saving import save_decoder
from model.decoder import Decoder
from tests.support.paths import MODELS

SHAPES = {"164m": "tiny_starcoder_py", "1b": "starcoderbase-1b"}
"""Name of a shape -> the published checkpoint whose config.json has it."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.random_model")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    published = read_spec(MODELS / SHAPES[options.shape])
    texts = (document.text for document in corpus.read_documents(None))
    tokenizer = corpus.train_tokenizer(texts, published.vocab_size)
    spec = replace(published, end_token_ids=(corpus.token_id(tokenizer, corpus.END),))
    decoder = Decoder(spec)
    initialise(decoder, seed=0)
    save_decoder(options.folder, decoder, torch.float32, gpt_bigcode.config_from_spec(spec))
    tokenizer.save(str(options.folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
