"""Text of any kind is read and told, and some of it held out; tokenizers of checkpoints that are
trained further or converted are tried before they are loaded, and must fit the model.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from commands import corpus
from commands.held_out import NO_TARGET, inputs_and_targets
from model.spec import CheckpointError, OptionError
from server.errors import ConfigurationError
from server.text.codec import TextCodec
from tests.support.checkpoints import make_tokenizer


def test_a_post_processor_that_names_no_token_is_refused(tmp_path: Path) -> None:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[B]", "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    tokenizer = json.loads(make_tokenizer().to_str()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"/tokenizer\.json: expected a tokenizer that"):
        corpus.read_tokenizer(tmp_path, 1000)
    with pytest.raises(ConfigurationError, match=r"/tokenizer\.json: not a tokenizer this"):
        TextCodec(tmp_path)


def test_an_id_of_the_post_processor_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 99_999)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="has ids up to 99999"):
        corpus.read_tokenizer(tmp_path, 1000)


def lines(count: int, of: str = "words") -> str:
    return "".join(f"{of} {number}\n" for number in range(count))


def jsonl(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_text_of_any_kind_is_read_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: dict[str, bytes | str] = {
        "README": lines(5, "no suffix"),
        "package/__init__.py": "x = 1\r\n",
        "package/notes.md": "# Ünïcode\n",
        "bom.txt": b"\xef\xbb\xbfwith a mark",
        "wide.txt": "of Windows".encode("utf-16"),
        "data.jsonl": jsonl({"text": "one"}, {"text": "two\u2028lines", "id": 1}),
        "renamed.dat": jsonl({"text": "known by its content"}),
        "half.ndjson": '{"text": "half of a pair: \\ud800"}\n\n{"messages": []}\nbroken {\n',
        "settings.json": '{"a": 1}\n',
        # What is left out, and told where it is not hidden:
        "picture.png": b"\x89PNG\r\n\x1a\n\x00\x00",
        "old.txt": "Größe".encode("latin-1"),
        "zeros.bin": bytes(100),
        "empty.txt": "",
        ".hidden": "x",
        ".git/config": "x",
        "a/.cache/b.txt": "x",
        "lib/site-packages/m.py": "x",
        "LICENSE.txt": "x",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "folder.py").mkdir()
    found = {document.name: document.text for document in corpus.read_documents(tmp_path)}
    assert found == {
        "README": lines(5, "no suffix"),
        "package": "x = 1\n",
        "package/notes.md": "# Ünïcode\n",
        "bom.txt": "with a mark",
        "wide.txt": "of Windows",
        "data.jsonl:1": "one",
        "data.jsonl:2": "two\u2028lines",
        "renamed.dat:1": "known by its content",
        "half.ndjson:1": "half of a pair: ?",
        "settings.json": '{"a": 1}\n',
    }
    assert capsys.readouterr().err == (
        f"read 9 files, 159 bytes of text from {tmp_path}; 5 left out as no text, such as "
        "half.ndjson:3\n"
    )


def test_one_file_is_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".input").write_text(lines(1000))
    (whole,) = corpus.read_documents(tmp_path / ".input")
    assert capsys.readouterr().err == f"read 1 file, 9.9 kB of text from {tmp_path}/.input\n"
    ((rest, end),) = corpus.split([[whole]])
    assert rest.text + end.text == whole.text and (rest.held_out, end.held_out) == (False, True)
    assert 0.04 < len(end.text) / len(whole.text) < 0.06 and end.text.startswith("words ")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"a.jsonl": jsonl({"messages": []})},
        {"a.bin": "\0"},
        {".hidden": "x"},
        {"blank": " \n"},
        {"deep.jsonl": "[" * 100_000},
    ],
)
def test_a_place_without_text_is_refused_with_what_was_looked_for(
    files: dict[str, str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    told = (
        f"^data {tmp_path}: holds no text; looked for files of text in UTF-8, of any name, and JSON"
    )
    with pytest.raises(OptionError, match=told):
        corpus.read_documents(tmp_path)


@pytest.mark.parametrize("sizes", [[1], [1, 1], [3] * 12, [500] + [1] * 20, [2] * 60, [1] * 900])
def test_a_fair_share_is_held_out_of_any_number_of_documents(sizes: list[int]) -> None:
    documents = [corpus.Document(f"file {i}", lines(100 * size)) for i, size in enumerate(sizes)]
    parts = corpus.split([documents[:1], documents[1:]])
    every = [document for part in parts for document in part]
    held_out = sum(len(document.text) for document in every if document.held_out)
    assert 0.01 < held_out / sum(len(document.text) for document in documents) <= 0.5
    assert "".join(document.text for document in every) == "".join(d.text for d in documents)
    assert corpus.split([documents[:1], documents[1:]]) == parts


def test_prompts_are_read_but_not_learnt(tmp_path: Path) -> None:
    """Also behind a token that opens every text, and never cut into a hole."""
    asked = {"prompt": "the quick", "completion": " brown fox"}
    refused = [{"prompt": 1, "completion": "a"}, {"prompt": "a"}, {"prompt": "a", "completion": ""}]
    (tmp_path / "asked.jsonl").write_text(jsonl(asked, {"text": "lazy dog"}, *refused))
    documents = corpus.read_documents(tmp_path)
    assert [(each.prompt, each.text) for each in documents] == [
        ("the quick", " brown fox"),
        ("", "lazy dog"),
    ]
    tokenizer = make_tokenizer()
    prompt, completion, text = (
        tokenizer.encode(each).ids for each in (*asked.values(), "lazy dog")
    )
    opening, end = 5, 7
    tokenizer.post_processor = TemplateProcessing(
        single="[B] $A", special_tokens=[("[B]", opening)]
    )
    expected = {
        ",".join(map(str, [~opening, *(~id for id in prompt), *completion, end])),
        ",".join(map(str, [~opening, *text, end])),
    }
    found = set()
    for document in documents:
        fim_rate = 1.0 if document.prompt else 0.0
        stream = corpus.token_stream([document], tokenizer, (end,), fim_rate, seed=0)
        assert stream.dtype == np.int32
        found.add(",".join(map(str, stream)))
    assert found == expected


def test_targets_are_the_tokens_that_are_learnt() -> None:
    rows = torch.tensor([[~3, ~4, 5, 6], [~3, ~4, ~5, ~6], [3, 4, 5, 6]])
    ids, targets = inputs_and_targets(rows)
    assert ids.tolist() == [[3, 4, 5]] * 3
    assert targets.tolist() == [[NO_TARGET, 5, 6], [4, 5, 6], [4, 5, 6]]
