"""Some of the files of tests.trials.hostile_gguf, loaded in this process: none crashes, and none is
read otherwise than `gguf` reads it.
"""

from pathlib import Path

from tests.trials.hostile_gguf import LONGEST_LINE, bases, load, mutant

COUNT = 150


def test_changed_files_are_refused_in_a_line_or_read_as_they_are(tmp_path: Path) -> None:
    found, path = bases(tmp_path), tmp_path / "model" / "m.gguf"
    path.parent.mkdir()
    lines = []
    for seed in range(COUNT):
        path.write_bytes(mutant(found, seed)[1])
        lines.append(load(path))
    refusals = [line for line in lines if line]
    assert COUNT / 2 < len(refusals) < COUNT  # Some are changed where it does not matter.
    assert all(
        str(path.parent) in line and "\n" not in line and len(line) <= LONGEST_LINE
        for line in refusals
    )
    assert len({line.split(": ", 1)[1][:12] for line in refusals}) > 20
