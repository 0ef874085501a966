"""Routes that answer with vectors of texts: by openai's and Ollama's clients and by hand, against a
served embedder and a served classifier, and what other models answer.
"""

import base64
import hashlib
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from tokenizers import Tokenizer

from tests.support.embedders import (
    CONTEXT,
    PROMPTS,
    WIDTH,
    Embedder,
    make_classifier,
    make_embedder,
)
from tests.support.processes import ServerProcess, kill

ARGUMENTS = ("--cache.memory", "0.05", "--engine.max_running", "4")


class Served:
    """An embedder, its server and clients of it."""

    def __init__(self, made: Embedder, server: ServerProcess) -> None:
        self.made, self.server = made, server
        self.url = f"http://127.0.0.1:{server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(made.folder / "tokenizer.json"))

    def post(self, path: str, **body: Any) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, **body: Any) -> str:
        response = self.http.post(path, json=body)
        assert 400 <= response.status_code < 500, response.text
        error = response.json()["error"]
        return str(error if isinstance(error, str) else error["message"])

    def expected(self, text: str, dimensions: int = WIDTH) -> list[float]:
        vector = self.made.vector(self.tokenizer.encode(text).ids)[:dimensions]
        found: list[float] = (vector / vector.norm()).tolist()
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = make_embedder(tmp_path_factory.mktemp("embedder"))
    server = ServerProcess(made.folder, *ARGUMENTS, "--server.model_name", "embedder")
    served = Served(made, server)
    with served.http:
        yield served
    assert server.stop() == 0


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("classifier")
    model = make_classifier("gpt_bigcode", folder, ("bad", "good"))
    server = ServerProcess(folder, *ARGUMENTS)
    served = Served(Embedder(folder, model, ()), server)
    with served.http:
        yield served
    assert server.stop() == 0


def near(found: Any, expected: list[float]) -> bool:
    return list(found) == pytest.approx(expected, abs=2e-4)


# --- clients


def test_openais_client(served: Served) -> None:
    texts = ["one text", "", "another text, a longer one"]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-") as client:
        check_openai(served, client, texts)


def check_openai(served: Served, client: openai.OpenAI, texts: list[str]) -> None:
    # It asks for base64 and decodes that.
    given = client.embeddings.create(model="embedder", input=texts)
    assert [each.index for each in given.data] == [0, 1, 2] and given.model == "embedder"
    for text, each in zip(texts, given.data, strict=True):
        assert near(each.embedding, served.expected(text))
    count = sum(len(served.tokenizer.encode(text).ids) for text in texts)
    assert given.usage.prompt_tokens == given.usage.total_tokens == count
    cut = client.embeddings.create(
        model="embedder", input=texts[0], dimensions=8, encoding_format="float"
    )
    assert near(cut.data[0].embedding, served.expected(texts[0], 8))
    ids = served.tokenizer.encode(texts[0]).ids
    by_ids = client.embeddings.create(model="embedder", input=[ids])
    assert by_ids.data[0].embedding == given.data[0].embedding


def test_ollamas_client(served: Served) -> None:
    with ollama.Client(served.url) as client:
        check_ollama(served, client)


def check_ollama(served: Served, client: ollama.Client) -> None:
    given = client.embed("embedder", ["one", "two"], dimensions=8)
    assert near(given.embeddings[1], served.expected("two", 8)) and len(given.embeddings) == 2
    assert given.prompt_eval_count and given.total_duration and given.model == "embedder"
    assert near(client.embeddings("embedder", "one").embedding, served.expected("one"))
    assert client.show("embedder").capabilities == ["embedding"]
    long = "x" * 3 * CONTEXT
    ids = served.tokenizer.encode(long).ids
    vector = served.made.vector([*ids[: CONTEXT - 1], ids[-1]])
    cut = client.embed("embedder", long)
    assert near(cut.embeddings[0], (vector / vector.norm()).tolist())
    with pytest.raises(ollama.ResponseError, match=f"at most {CONTEXT}"):
        client.embed("embedder", long, truncate=False)


# --- forms


def test_base64_is_of_little_endian_floats(served: Served) -> None:
    floats = served.post("/v1/embeddings", input="a")["data"][0]["embedding"]
    text = served.post("/v1/embeddings", input="a", encoding_format="base64")["data"][0]
    assert list(struct.unpack(f"<{WIDTH}f", base64.b64decode(text["embedding"]))) == floats


def test_prompts_are_put_before_texts(served: Served) -> None:
    given = served.post("/v1/embeddings", input=["a"], prompt_name="query")
    assert near(given["data"][0]["embedding"], served.expected(PROMPTS["query"] + "a"))
    given = served.post("/embed", inputs=["a"], prompt_name="document")
    assert near(given[0], served.expected(PROMPTS["document"] + "a"))


def test_forms_of_tei_and_llama_cpp(served: Served) -> None:
    assert near(served.post("/embed", inputs="a", dimensions=4)[0], served.expected("a", 4))
    raw = served.post("/embed", inputs="a", normalize=False)[0]
    assert near(raw, served.made.vector(served.tokenizer.encode("a").ids).tolist())
    for path in ("/embedding", "/embeddings"):
        (given,) = served.post(path, content="a")
        assert given["index"] == 0 and near(given["embedding"][0], served.expected("a"))
    assert served.post("/embedding", content="a", embd_normalize=-1)[0]["embedding"] == [raw]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_are_sorted_by_cosine(served: Served, path: str) -> None:
    documents: list[Any] = ["one", {"text": "two"}, "three"]
    given = served.post(path, query="q", documents=documents, return_documents=True)
    query = served.expected(PROMPTS["query"] + "q")
    scores = {}
    for index, text in enumerate(("one", "two", "three")):
        other = served.expected(PROMPTS["document"] + text)
        scores[index] = sum(x * y for x, y in zip(query, other, strict=True))
    results = given["results"]
    assert [each["index"] for each in results] == sorted(scores, key=lambda i: -scores[i])
    assert all(
        each["relevance_score"] == pytest.approx(scores[each["index"]], abs=2e-4)
        for each in results
    )
    assert {each["index"]: each["document"]["text"] for each in results}[1] == "two"
    assert served.post(path, query="q", documents=documents, top_n=1)["results"] == [
        {key: results[0][key] for key in ("index", "relevance_score")}
    ]


# --- guarantees


def test_a_vector_is_the_same_in_any_company(served: Served) -> None:
    texts = ["word " * count for count in (1, 20, 7, 13, 2, 24, 12)] * 8
    alone = [
        served.post("/v1/embeddings", input=text)["data"][0]["embedding"] for text in texts[:7]
    ]
    found: list[Any] = [None] * 4

    def ask(number: int) -> None:
        order = texts[number:] + texts[:number]
        data = served.post("/v1/embeddings", input=order)["data"]
        found[number] = [each["embedding"] for each in data[len(texts) - number :]] + [
            each["embedding"] for each in data[: len(texts) - number]
        ]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(vectors == alone * 8 for vectors in found)


def test_a_killed_engine_loses_no_text(served: Served) -> None:
    texts = ["word " * 24] * 1000
    expected = served.post("/v1/embeddings", input=texts[0])["data"][0]["embedding"]
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(served.post("/v1/embeddings", input=texts))
    )
    asking.start()
    time.sleep(0.2)
    kill(served.server.engine_pid)
    asking.join()
    assert [each["embedding"] for each in answers[0]["data"]] == [expected] * 1000


# --- refusals


def test_what_cannot_be_embedded_is_refused(served: Served) -> None:
    long = "x" * 3 * CONTEXT
    for body, words in (
        ({"input": []}, "`input` cannot be empty"),
        ({"input": ["a"] * 2049}, "`input` supports up to 2048"),
        ({"input": ["a", [1]]}, "differs in kind"),
        ({"input": [[1, -1]]}, "must be a token id"),
        ({"input": [10**6]}, "is not below the vocabulary"),
        ({"input": {"text": "a"}}, "must be a text"),
        ({"input": long}, f"at most {CONTEXT}"),
        ({"input": "a", "dimensions": WIDTH + 1}, f"at most the {WIDTH} of this model"),
        ({"input": "a", "dimensions": 0}, "`dimensions` must be >= 1"),
        ({"input": "a", "prompt_name": "poem"}, "which has: document, query"),
        ({"input": [[1]], "prompt_name": "query"}, "goes with texts"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "model": "other"}, "no such model"),
        ({}, "input"),
    ):
        assert words in served.refusal("/v1/embeddings", **body), body
    assert (
        served.post("/v1/embeddings", input=long, truncate=True)["usage"]["total_tokens"] == CONTEXT
    )
    assert "does not support classification: it embeds" in served.refusal("/classify", input="a")
    for path, body in (
        ("/generate", {"inputs": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/api/generate", {"model": "embedder", "prompt": "a", "raw": True}),
    ):
        assert "does not support generation: it embeds texts" in served.refusal(path, **body)


@pytest.mark.parametrize("terms", ["max_running = 1\nmax_waiting = 0", "tokens_per_minute = 900"])
def test_a_request_is_admitted_once(terms: str, served: Served, tmp_path: Path) -> None:
    keys, digest = tmp_path / "keys.toml", hashlib.sha256(b"secret-of-a-key").hexdigest()
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{digest}"\n{terms}\n')
    server = ServerProcess(served.made.folder, *ARGUMENTS, "--server.api_keys_file", str(keys))
    try:
        url = f"http://127.0.0.1:{server.port}/v1/embeddings"
        given = httpx.post(
            url,
            json={"input": ["some words"] * 150},
            headers={"authorization": "Bearer secret-of-a-key"},
            timeout=60,
        )
        assert given.status_code == 200, given.text
        assert len(given.json()["data"]) == 150
    finally:
        assert server.stop() == 0


def test_a_drain_waits_for_texts_that_are_not_submitted_yet(served: Served) -> None:
    server = ServerProcess(served.made.folder, *ARGUMENTS)
    answers: list[httpx.Response] = []
    url = f"http://127.0.0.1:{server.port}/v1/embeddings"
    body = {"input": ["word " * 24] * 1500}
    asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60)))
    asking.start()
    time.sleep(0.3)
    assert server.stop() == 0
    asking.join()
    assert answers[0].status_code == 200 and len(answers[0].json()["data"]) == 1500


def test_a_model_that_generates_embeds_nothing(pretrained_server: ServerProcess) -> None:
    url = f"http://127.0.0.1:{pretrained_server.port}"
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/embed", {"inputs": "a"}),
        ("/embedding", {"content": "a"}),
        ("/api/embed", {"model": "embedded", "input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        response = httpx.post(url + path, json=body)
        assert response.status_code in (400, 422), path
        assert "does not support embeddings: it generates text" in response.text


# --- classifiers


def test_texts_are_classified(classifier: Served) -> None:
    import torch

    given = classifier.post("/classify", input=["one", "two"])
    for text, each in zip(("one", "two"), given["data"], strict=True):
        ids = classifier.tokenizer.encode(text).ids
        with torch.inference_mode():
            logits = classifier.made.model(torch.tensor([ids])).logits[0]
        assert each["probs"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-4)
        assert each["label"] == ("bad", "good")[int(logits.argmax())] and each["num_classes"] == 2
    assert "into 2 labels" in classifier.refusal("/rerank", query="a", documents=["b"])
    assert "it classifies texts" in classifier.refusal("/v1/completions", prompt="a")
    assert "does not support embeddings: it classifies" in classifier.refusal(
        "/v1/embeddings", input="a"
    )


def test_pairs_are_scored_by_a_model_with_one_label(tmp_path: Path) -> None:
    import torch

    model = make_classifier("falcon", tmp_path, ("relevant",))
    server = ServerProcess(tmp_path, *ARGUMENTS)
    try:
        scorer = Served(Embedder(tmp_path, model, ()), server)
        with scorer.http:
            given = scorer.post("/v1/rerank", query="q", documents=["one", "two"])
        for each in given["results"]:
            ids = scorer.tokenizer.encode("q", ("one", "two")[each["index"]]).ids
            with torch.inference_mode():
                score = float(model(torch.tensor([ids])).logits[0, 0].sigmoid())
            assert each["relevance_score"] == pytest.approx(score, abs=1e-4)
    finally:
        assert server.stop() == 0
