"""Python source of permissively licensed packages, for training the embedded model:
FOLDER/NAME/*.py and FOLDER/packages.csv.

    python scripts/embedded_corpus.py FOLDER [--packages FILE] [--most-bytes 4600000]

Downloads the packages that FILE names, one a line (bench/gpu/corpus_packages.txt), from the package
index with pip, and keeps those whose metadata names a permissive licence. Of each at most
--most-bytes are kept, counted in characters (nearly all are ASCII); the files are chosen by a hash
of their names, so that the choice does not depend on the machine. Files that occur twice, that hold
data rather than code, or that are mostly not ASCII are left out.
"""

import argparse
import csv
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

PACKAGES = Path(__file__).resolve().parents[1] / "bench" / "gpu" / "corpus_packages.txt"
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|Unlicense|HPND|ZPL)\b",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"GPL|GNU|MPL|Mozilla|EPL|CC-BY|Proprietary", re.IGNORECASE)
DATA_FOLDERS = {
    "locale",
    "locales",
    "data",
    "fixtures",
    "vendor",
    "vendored",
    "_vendor",
    "migrations",
    "node_modules",
}
LEAST_BYTES, LARGEST_FILE = 200, 150_000
LONGEST_LINE, MEAN_LINE, MOST_NON_ASCII, MOST_DIGITS = 1000, 80, 0.02, 0.2


@dataclass(frozen=True)
class Package:
    """What an archive holds: its metadata's name, version and licence, and its Python files by
    their names.
    """

    name: str
    version: str
    licence: str
    files: dict[str, bytes]


def download(name: str, folder: Path) -> Path | None:
    """The archive of a package's newest release, preferably a wheel; None where there is none."""
    target = folder / name
    for more in (["--only-binary=:all:"], ["--no-build-isolation"]):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            *more,
            "--dest",
            str(target),
            name,
        ]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return next(target.iterdir())
    return None


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a wheel or a source distribution."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                if not entry.is_dir():
                    yield entry.filename, zipped.read(entry)
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield member.name, file.read()


def read_package(archive: Path) -> Package:
    """Raises ValueError where there is no metadata."""
    files, described = {}, ""
    for name, data in members(archive):
        if PurePosixPath(name).name in ("METADATA", "PKG-INFO") and not described:
            described = data.decode("utf-8", "replace")
        elif name.endswith(".py"):
            files[name] = data
    if not described:
        raise ValueError(f"{archive.name}: no metadata")
    fields = HeaderParser().parsestr(described)
    classifiers = [
        line.split("::")[-1].strip()
        for line in fields.get_all("Classifier", [])
        if line.startswith("License")
    ]
    licence = " | ".join(
        [*fields.get_all("License-Expression", []), *fields.get_all("License", []), *classifiers]
    )
    return Package(fields["Name"], fields["Version"], " ".join(licence.split())[:160], files)


def is_permissive(licence: str) -> bool:
    return PERMISSIVE.search(licence) is not None and COPYLEFT.search(licence) is None


def text_of(name: str, data: bytes) -> str | None:
    """The text of a file that is worth learning from; None of any other."""
    if (
        DATA_FOLDERS & set(PurePosixPath(name).parts)
        or not LEAST_BYTES <= len(data) <= LARGEST_FILE
    ):
        return None
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    good = max(map(len, lines)) <= LONGEST_LINE and len(text) <= MEAN_LINE * len(lines)
    good = good and sum(not letter.isascii() for letter in text) <= MOST_NON_ASCII * len(text)
    return (
        text
        if good and sum(letter.isdigit() for letter in text) <= MOST_DIGITS * len(text)
        else None
    )


def chosen(package: Package, most_bytes: int, seen: set[bytes]) -> Iterator[tuple[str, str]]:
    """Names and texts of the files to keep. `seen` holds digests of all texts so far, without white
    space.
    """
    size = 0
    for name in sorted(package.files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = text_of(name, package.files[name])
        if text is None or size + len(text) > most_bytes:
            continue
        digest = hashlib.sha256("".join(text.split()).encode()).digest()
        if digest not in seen:
            seen.add(digest)
            size += len(text)
            yield name, text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", type=Path, default=PACKAGES)
    parser.add_argument("--most-bytes", type=int, default=4_600_000)
    options = parser.parse_args(argv)
    rows, seen = [], set[bytes]()
    with tempfile.TemporaryDirectory() as scratch:
        for name in sorted(options.packages.read_text().split()):
            archive = download(name, Path(scratch))
            package = read_package(archive) if archive is not None else None
            if package is None or not is_permissive(package.licence):
                print(
                    f"{name}: left out, "
                    f"{'cannot be downloaded' if package is None else f'licence {package.licence!r}'}",  # noqa: E501
                    file=sys.stderr,
                )
                continue
            kept = dict(chosen(package, options.most_bytes, seen))
            for file, text in kept.items():
                path = options.folder / package.name.lower() / file.lstrip("/").replace("..", "_")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            rows.append(
                (
                    package.name,
                    package.version,
                    package.licence,
                    len(kept),
                    sum(map(len, kept.values())),
                )
            )
    with (options.folder / "packages.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("name", "version", "licence", "files", "letters"), *rows])
    print(
        f"{len(rows)} packages, {sum(row[3] for row in rows)} files, "
        f"{sum(row[4] for row in rows) / 1e6:.0f} MB in {options.folder}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
