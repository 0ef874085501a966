"""GGUF headers: what the `gguf` package writes is read as it was written; every other file is
refused by a line that names the fault.
"""

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from model.checkpoint.gguf import header
from model.checkpoint.gguf.header import GGUFFile, check_whole, gguf_in
from model.spec import CheckpointError
from tests.support.gguf_files import pair, raw_file, tensor, text, write_file

METADATA: dict[str, Any] = {
    "llama.block_count": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "", "語", "<0x0A>"],
    "tokenizer.ggml.scores": [0.5, -1.0],
    "tokenizer.ggml.flags": [True, False],
}


def opened(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return GGUFFile.open(path)


def test_what_gguf_writes_is_read_as_gguf_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    ones: Any = np.ones
    tensors = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": ones(5, np.float16),
        "c": ones((2, 3, 4), np.float32),
    }
    write_file(path, "llama", METADATA, tensors)
    file, oracle = GGUFFile.open(path), GGUFReader(path)
    for item in oracle.tensors:
        entry = file.entries[item.name]
        assert (entry.dtype, entry.shape) == (
            item.tensor_type.name,
            tuple(item.shape.tolist()[::-1]),
        )
        assert (entry.begin, entry.num_bytes) == (item.data_offset, item.n_bytes)
    found = {
        key: item if isinstance(item, str | int | float) else list(item)
        for key, item in file.metadata.items()
    }
    assert found == {"general.architecture": "llama"} | METADATA


F32 = [tensor("a", [4, 2], 0, 0), tensor("b", [3], 0, 32)]
DATA = bytes(32 + 12)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with b'', expected b'GGUF': not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1; read are 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3), "GGUF version 50331648; read are 2 and 3, little-endian"),
        (b"GGUF\x03", "version: 4 bytes from byte 4 on, the file has 5: truncated"),
        (
            raw_file([], [], says_tensors=2**63),
            "says it has 9223372036854775808 tensors and 0 metadata keys; read are 131072 of each",
        ),
        (
            raw_file([], [], says_keys=2**63),
            "says it has 0 tensors and 9223372036854775808 metadata keys",
        ),
        (raw_file([pair("a", 1), pair("a", 2)], []), "metadata key a occurs twice"),
        (raw_file([pair("", 1)], []), "metadata key 0: '' is not a name of 1 to 255"),
        (raw_file([pair("a\nb", 1)], []), r"'a\\nb' is not a name"),
        (raw_file([pair(b"\xff", 1)], []), "metadata key 0: a string that is not UTF-8"),
        (
            raw_file([text("a") + struct.pack("<IQ", 8, 2**63)], []),
            "a: 9223372036854775816 bytes from byte",
        ),
        (raw_file([text("a") + struct.pack("<I", 13)], []), "a: value type 13 is not known"),
        (raw_file([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), "a: an array of value type 9"),
        (
            raw_file([text("a") + struct.pack("<IIQ", 9, 8, 2**61)], []),
            "a: with the arrays before it, it has more than the 1048576",
        ),
        (
            raw_file([text("a") + struct.pack("<IIQ", 9, 12, 2**62)], []),
            "a, an array of 4611686018427387904 numbers",
        ),
        (
            raw_file([text("a") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text(b"\xff")], []),
            "a: a string that is not UTF-8",
        ),
        (
            raw_file([text("a") + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2**63)], []),
            "a: 92233720",
        ),
        (
            raw_file([pair("general.alignment", 24)], []),
            "general.alignment is 24, expected a power of two",
        ),
        (raw_file([pair("general.alignment", "32")], []), "general.alignment is '32'"),
        (raw_file([], [tensor("a", [], 0, 0)]), "a: 0 dimensions, expected 1 to 4"),
        (raw_file([], [tensor("a", [1] * 5, 0, 0)]), "a: 5 dimensions"),
        (
            raw_file([], [tensor("a", [0], 0, 0)]),
            "a: shape .0., expected rows of one or more blocks of 1",
        ),
        (
            raw_file([], [tensor("a", [33], 2, 0)]),
            "a: shape .33., expected rows of one or more blocks of 32",
        ),
        (raw_file([], [tensor("a", [256], 10, 0)]), "a has type Q2_K; read are F32, F16, .*BF16"),
        (raw_file([], [tensor("a", [256], 99, 0)]), "a has type number 99"),
        (raw_file([], [tensor("x" * 256, [4], 0, 0)]), "is not a name of 1 to 255"),
        (raw_file([], [*F32, tensor("a", [1], 0, 64)], DATA), "tensor a occurs twice"),
        (raw_file([], F32, DATA[:-1]), "ends at byte .*, its tensors at .*: truncated"),
        (
            raw_file([], F32, DATA + bytes(21)),
            "ends at byte 193, its tensors at 172: truncated or damaged",
        ),
        (
            raw_file([], [F32[0], tensor("b", [3], 0, 0)], DATA),
            "tensor b: offset 0, expected 32, after the tensor before it",
        ),
        (raw_file([], [F32[0], tensor("b", [3], 0, 36)], DATA), "tensor b: offset 36, expected 32"),
        (
            raw_file([], [F32[0], tensor("b", [3], 0, 64)], DATA + DATA),
            "tensor b: offset 64, expected 32",
        ),
        (
            raw_file([], [tensor("a", [2**62, 2**62], 0, 0)]),
            "ends at byte .*, its tensors at .*: truncated",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        opened(tmp_path, data)
    assert str(error.value).startswith(str(tmp_path / "m.gguf: ")) and "\n" not in str(error.value)


def test_padding_after_the_last_tensor_may_be_missing_or_whole(tmp_path: Path) -> None:
    for data, version in ((DATA, 3), (DATA + bytes(20), 2)):
        assert [*opened(tmp_path, raw_file([], F32, data, version)).entries] == ["a", "b"]


def test_a_header_beyond_what_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 64)
    with pytest.raises(CheckpointError, match="its header goes on after 64 bytes"):
        opened(tmp_path, raw_file([pair("a", "x" * 100)], F32, DATA))


def test_no_file_that_would_block_is_opened(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        GGUFFile.open(tmp_path / "m.gguf")


@pytest.mark.parametrize(("count", "kind"), [(3, 2), (2**16 - 1, 2), ("3", None), ([3], None)])
def test_one_part_of_several_is_refused(tmp_path: Path, count: Any, kind: int | None) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf: is one of .* parts; `llama-gguf-split"):
        opened(tmp_path, raw_file([pair("split.count", count, kind)], F32, DATA))


@pytest.mark.parametrize("count", [0, 1])
def test_what_was_merged_and_one_part_of_one_are_read(tmp_path: Path, count: int) -> None:
    assert opened(tmp_path, raw_file([pair("split.count", count, 2)], F32, DATA)).entries


def test_parts_are_told_by_their_names(tmp_path: Path) -> None:
    for name in ("m.gguf", "m-00001-of-00001.gguf", "best-of-3.gguf"):
        check_whole(tmp_path / name)
    for number in (1, 10):
        path = tmp_path / f"m-{number:05}-of-00010.gguf"
        path.write_bytes(raw_file([], F32, DATA))
        with pytest.raises(CheckpointError, match=f"{path.name}: is one of 10 parts; .* --merge"):
            check_whole(path)
        with pytest.raises(CheckpointError, match=f"{path.name}: is one of 10 parts"):
            GGUFFile.open(path)
    with pytest.raises(CheckpointError, match=r"m-00001-of-00010\.gguf: is one of 10 parts"):
        gguf_in(tmp_path)


def test_reading_a_header_imports_no_torch() -> None:
    code = (
        "import sys, model.checkpoint.gguf.header; sys.exit(any(name in sys.modules for name in "
        "('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
