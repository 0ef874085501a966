"""lm-evaluation-harness: local-completions against its own `hf` backend on the same checkpoint,
log-likelihoods within 1e-3.
"""

from importlib.metadata import version
from pathlib import Path

from check import run
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

FOLDER = str(Path(__file__).resolve().parents[2] / "model" / "pretrained")
ITEMS = [
    ("import os\nimport ", "sys"),
    ("def add(a, b):\n    return a ", "+ b"),
    ("def add(a, b):\n    return a ", "- c"),
    ("class A:\n    def __init__(self", "):\n        pass\n"),
    ("for i in range(10):\n    print(", "i)"),
    ("", "import os"),
]


def server(url: str) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="embedded",
        tokenizer=FOLDER,
        tokenizer_backend="huggingface",
        max_length=4096,
        batch_size=2,
    )


def loglikelihood(url: str) -> None:
    requests = [Instance("loglikelihood", {}, item, 0) for item in ITEMS]
    ours = server(url).loglikelihood(requests)
    theirs = HFLM(pretrained=FOLDER, device="cpu", dtype="float32", batch_size=1).loglikelihood(
        requests
    )
    for item, (our, our_greedy), (their, their_greedy) in zip(ITEMS, ours, theirs, strict=True):
        assert abs(our - their) < 1e-3 and our_greedy == their_greedy, (item, our, their)
    print(
        "largest difference",
        max(abs(our - their) for (our, _), (their, _) in zip(ours, theirs, strict=True)),
    )


def generate_until(url: str) -> None:
    requests = [
        Instance("generate_until", {}, ("def add(", {"until": ["\n"], "max_gen_toks": 16}), 0)
    ]
    (text,) = server(url).generate_until(requests)
    assert text and "\n" not in text


run("lm_eval", version("lm_eval"), [loglikelihood, generate_until])
