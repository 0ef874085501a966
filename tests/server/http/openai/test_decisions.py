"""Decisions against transformers, alone and in company, over HTTP with a real engine; how questions
are asked, and what is refused.
"""

import math
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from server.errors import InvalidRequest
from server.generation.stream import Piece
from server.http.body import check
from server.http.decisions.fields import DecisionBody, SystemBody
from server.http.decisions.replies import Labels
from server.http.openai.chat_fields import plain_messages
from tests.support.checkpoints import SHAPES, TinyCheckpoint, make_checkpoint
from tests.support.processes import ServerProcess, metric_sums, wait_until

STATE = "The parcel arrived on Monday; the box was torn."
YES_NO = {"type": "predicate", "name": "torn", "instructions": "The box was damaged."}
COLOURS = {
    "type": "choice",
    "name": "tone",
    "instructions": "Which tone?",
    "choices": [{"value": "calm"}, {"value": True, "description": "?"}],
}
STARS = {
    "type": "score",
    "instructions": "How urgent?",
    "levels": [{"label": "low", "description": "days"}, {"label": "mid"}, {"label": "high"}],
}
MANY = {
    "type": "choice",
    "instructions": "Which number?",
    "choices": [{"value": f"number {i}"} for i in range(30)],
}
QUESTIONS: list[dict[str, Any]] = [YES_NO, COLOURS, STARS, MANY]
TEXTS = [
    (
        "Question: The box was damaged.\nAnswer with yes or no, and nothing else.",
        [["yes", "Yes"], ["no", "No"]],
    ),
    (
        "Question: Which tone?\nA: calm\nB: true - ?\nAnswer with the letter of one of these, and "
        "nothing else.",
        [["A"], ["B"]],
    ),
    (
        "Question: How urgent?\n0: low - days\n1: mid\n2: high\nAnswer with the number of one of "
        "these, and nothing else.",
        [["0"], ["1"], ["2"]],
    ),
    (
        "Question: Which number?\n"
        + "".join(f"{i:02}: number {i}\n" for i in range(30))
        + "Answer with the number of one of these, and nothing else.",
        [[f"{i:02}"] for i in range(30)],
    ),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A random checkpoint whose context holds a question with many answers, byte by byte."""
    return make_checkpoint(SHAPES[0], tmp_path_factory.mktemp("decisions"), 4096)


@pytest.fixture(scope="module")
def server(checkpoint: TinyCheckpoint) -> Iterator[ServerProcess]:
    server = ServerProcess(checkpoint.folder, "--cache.pages", "1024")
    yield server
    assert server.stop() == 0


def expected(
    oracle: Any, encode: Any, before: str, space: str, answers: list[list[str]]
) -> tuple[list[float], float]:
    """The probability of each answer among all, and of all labels among all texts, by a float64
    softmax of transformers' logits.
    """
    ids, found = encode(before), {}
    labels = {
        text: encode(before + space + text)[len(ids) :] for texts in answers for text in texts
    }

    def logprobs(tail: list[int]) -> torch.Tensor:
        if tuple(tail) not in found:
            with torch.inference_mode():
                found[tuple(tail)] = (
                    oracle(torch.tensor([ids + tail])).logits[0, -1].double().log_softmax(dim=-1)
                )
        return found[tuple(tail)]

    def of(texts: list[str]) -> float:
        others = [label for text, label in labels.items() if text not in texts]
        told = set()
        for text in texts:  # Up to the token that no other answer's label has.
            told.add(
                next(
                    tuple(labels[text][:n])
                    for n in range(1, 9)
                    if not any(o[:n] == labels[text][:n] for o in others)
                )
            )
        return sum(
            math.exp(sum(logprobs(list(label[:i]))[label[i]].item() for i in range(len(label))))
            for label in told
        )

    shares = [of(texts) for texts in answers]
    return [share / sum(shares) for share in shares], sum(shares)


def metric(server: ServerProcess, name: str) -> float:
    return metric_sums(server.get("/metrics")[1])[name]


def probabilities(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"], 1 - answer["probability"]]
    return [entry["probability"] for entry in answer["probabilities"]]


def encode_bytes(server: ServerProcess) -> Any:
    return lambda text: server.post("/tokenize", {"prompt": text})[1]["tokens"]


def test_the_probabilities_are_those_of_transformers(
    server: ServerProcess, checkpoint: TinyCheckpoint
) -> None:
    status, answer = server.post("/v1/decisions", {"input": STATE, "questions": QUESTIONS})
    assert status == 200 and [found["type"] for found in answer["answers"]] == [
        "predicate",
        "choice",
        "score",
        "choice",
    ]
    for found, (text, labels) in zip(answer["answers"], TEXTS, strict=True):
        wanted, mass = expected(
            checkpoint.oracle, encode_bytes(server), f"{STATE}\n\n{text}\nAnswer:", " ", labels
        )
        assert probabilities(found) == pytest.approx(wanted, abs=1e-5) and found[
            "label_mass"
        ] == pytest.approx(mass, abs=1e-5)
        if "confidence" in found:
            assert found["confidence"] == pytest.approx(max(wanted) * mass, abs=1e-5)
    assert [answer["answers"][0]["name"], answer["answers"][2]["name"]] == ["torn", None]
    tone, stars, many = answer["answers"][1:]
    assert [entry["value"] for entry in tone["probabilities"]] == ["calm", True]
    assert (
        tone["choice"]
        == max(tone["probabilities"], key=lambda entry: entry["probability"])["value"]
    )
    assert stars["score"] == pytest.approx(
        sum(entry["value"] * entry["probability"] for entry in stars["probabilities"])
    )
    assert [(entry["label"], entry["value"]) for entry in stars["probabilities"]] == [
        ("low", 0),
        ("mid", 1),
        ("high", 2),
    ]
    assert len(many["probabilities"]) == 30 and sum(probabilities(many)) == pytest.approx(1)


def test_it_is_the_same_alone_and_among_64_others(server: ServerProcess) -> None:
    body = {"input": STATE, "questions": QUESTIONS}
    alone = server.post("/v1/decisions", body | {"cache_salt": "alone"})[1]["answers"]

    def other(number: int) -> int:
        prompt = [1 + number * i % 256 for i in range(1 + 7 * number)]
        return server.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 20 + number % 9, "seed": number}
        )[0]

    with ThreadPoolExecutor(72) as pool:
        others = [pool.submit(other, number) for number in range(64)]
        again = [
            pool.submit(server.post, "/v1/decisions", body | {"cache_salt": f"salt {i}"})
            for i in range(8)
        ]
        assert all(future.result()[1]["answers"] == alone for future in again)
        assert all(future.result() == 200 for future in others)
    # From the prefix cache.
    assert server.post("/v1/decisions", body | {"cache_salt": "alone"})[1]["answers"] == alone
    for question, answer in zip(QUESTIONS, alone, strict=True):
        assert server.post("/v1/decisions", {"input": STATE, "questions": [question]})[1][
            "answers"
        ] == [answer]


def test_400_questions_read_their_state_once_and_outlive_an_engine(server: ServerProcess) -> None:
    state, page = "One line of many. " * 60, 64
    questions = [{"type": "predicate", "instructions": f"It is {i:03}."} for i in range(400)]
    status, first = server.post(
        "/v1/decisions", {"input": state, "questions": questions, "cache_salt": "400"}
    )
    usage = first["usage"]
    prompt = (
        len(f"{state}\n\n{TEXTS[0][0]}\nAnswer:") + len("It is 000.") - len(YES_NO["instructions"])
    )
    shared = (len(state) + len("\n\nQuestion: It is ")) // page * page
    assert status == 200 and len(first["answers"]) == 400
    # Byte by byte " yes" and " no" begin with the same token, so that each question is read in two
    # places.
    assert usage["input_tokens"] == usage["total_tokens"] == 400 * (2 * prompt + 1)
    assert (
        799 * shared
        <= usage["input_tokens_details"]["cached_tokens"]
        <= 400 * (2 * prompt - page) + 400 * page
    )
    assert (
        sum(usage["input_tokens_details"].values()) == usage["input_tokens"]
        and usage["output_tokens"] == 0
    )
    restarts = metric(server, "onehead_engine_restarts_total")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            server.post,
            "/v1/decisions",
            {"input": state, "questions": questions, "cache_salt": "again"},
        )
        wait_until(lambda: metric(server, "onehead_requests_running") > 0, "the questions run")
        os.kill(server.engine_pid, signal.SIGKILL)
        status, again = running.result()
    assert (
        status == 200
        and again["answers"] == first["answers"]
        and metric(server, "onehead_engine_restarts_total") == restarts + 1
    )


def test_systemone_answers_the_same_questions_by_their_ids(server: ServerProcess) -> None:
    one = server.post("/v1/decisions", {"input": STATE, "questions": [YES_NO, STARS]})[1]["answers"]
    questions: dict[str, Any] = {
        "torn": {"type": "noul", "instructions": "The box was damaged."},
        "tone": {
            "type": "choice",
            "instructions": "Which tone?",
            "criteria": {"calm": None, "loud": "many capitals"},
        },
        "stars": {
            "type": "score",
            "instructions": "How urgent?",
            "criteria": ["low - days", "mid", "high"],
        },
        "bare": {"type": "noul", "criteria": {"true": "it rains", "false": None}},
    }
    status, answer = server.post("/v1/systemone", {"state": STATE, "questions": questions})
    assert (
        status == 200
        and answer["object"] == "structured_decision"
        and answer["id"].startswith("decision-")
    )
    torn, tone, stars, bare = answer["answers"].values()
    assert list(answer["answers"]) == list(questions)
    assert torn["noul"] == one[0]["probability"] and torn["probabilities"] == {
        "yes": torn["noul"],
        "no": pytest.approx(1 - torn["noul"]),
    }
    assert stars["score"] == one[1]["score"] and stars["confidence"] == one[1]["confidence"]
    assert stars["legend"] == {"0": "low - days", "1": "mid", "2": "high"} and list(
        stars["probabilities"]
    ) == ["0", "1", "2"]
    assert (
        tone["choice"] in tone["probabilities"]
        and list(tone["probabilities"]) == ["calm", "loud"]
        and 0 <= bare["noul"] <= 1
    )
    for found, text in zip((torn, stars), one, strict=True):
        assert (
            found["label_mass"] == text["label_mass"]
            and 0 < found["confidence"] < found["label_mass"] <= 1
        )
    assert torn["confidence"] == max(torn["probabilities"].values()) * torn["label_mass"]
    as_json = server.post(
        "/v1/systemone", {"state": {"a": [1, "ü"]}, "questions": {"q": questions["torn"]}}
    )[1]
    as_text = server.post(
        "/v1/systemone", {"state": '{"a": [1, "ü"]}', "questions": {"q": questions["torn"]}}
    )[1]
    assert as_json["answers"] == as_text["answers"] != {"q": torn}


def test_a_conversation_is_asked_by_the_chat_template(embedded_server: ServerProcess) -> None:
    def tokens(text: str) -> list[int]:
        ids: list[int] = embedded_server.post("/tokenize", {"prompt": text})[1]["tokens"]
        return ids

    said = [{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "good"}]
    end = "<|endoftext|>\n"
    for messages, before in (
        (said, f"# user: x = 1{end}# assistant: good{end}# user: "),
        (
            [*said, {"role": "user", "content": [{"type": "input_text", "text": "x = 2"}]}],
            f"# user: x = 1{end}# assistant: good{end}# user: x = 2\n\n",
        ),
    ):
        status, answer = embedded_server.post(
            "/v1/decisions", {"input": messages, "questions": [COLOURS]}
        )
        ids = [*tokens(before), *tokens(TEXTS[1][0]), *tokens(f"{end}# assistant:")]
        assert status == 200 and answer["usage"]["input_tokens"] == len(ids)
        labels = [
            tokens(f"{end}# assistant:{letter}")[len(tokens(f"{end}# assistant:")) :]
            for letter in "AB"
        ]
        body = {
            "prompt": ids,
            "max_tokens": 1,
            "logprobs": 1,
            "logprob_token_ids": [label[0] for label in labels],
        }
        top = embedded_server.post("/v1/completions", body | {"return_tokens_as_token_ids": True})[
            1
        ]["choices"][0]["logprobs"]["top_logprobs"][0]
        shares = [math.exp(top[f"token_id:{label[0]}"]) for label in labels]
        (found,) = answer["answers"]
        assert probabilities(found) == pytest.approx(
            [share / sum(shares) for share in shares]
        ) and found["label_mass"] == pytest.approx(sum(shares))
    # A special token in the state is text: the answer differs from that to a state without it, and
    # is none of a broken template.
    status, answer = embedded_server.post("/v1/decisions", {"input": end, "questions": [COLOURS]})
    assert (
        status == 200
        and answer["usage"]["input_tokens"]
        > len(tokens("# user: \n\n") + tokens(TEXTS[1][0]) + tokens(f"{end}# assistant:")) + 4
    )


def test_calls_of_tools_and_what_they_returned_are_part_of_the_input() -> None:
    """In openai's form; calls in a row are those of one message."""
    items: list[Any] = [
        {"role": "user", "content": "Weather?"},
        {
            "type": "function_call",
            "call_id": "1",
            "name": "f",
            "arguments": '{"city": "Oslo"}',
            "status": "completed",
        },
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "Oslo", "id": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        {
            "type": "custom_tool_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "cold"}],
        },
        {"type": "message", "role": "assistant", "content": "Rain."},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": ""},
    ]
    body, ignored = check({"input": items, "questions": [YES_NO]}, DecisionBody)
    assert ignored == ["input.status", "input.id"]
    messages = plain_messages(body.input)
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "assistant",
    ]
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in messages[1]["tool_calls"]
    ]
    assert calls == [("1", "f", {"city": "Oslo"}), ("2", "g", {"input": "Oslo"})]
    results = [
        (message["tool_call_id"], message["name"], message["content"]) for message in messages[2:4]
    ]
    assert results == [("1", "f", "rain"), ("2", "g", "cold")]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (
            {"type": "function_call", "call_id": "1", "name": "a b", "arguments": "{}"},
            "`input.0.tool_calls.0.function.name` must match",
        ),
        (
            {"type": "function_call", "call_id": "1", "arguments": "{}"},
            "`input.0.tool_calls.0.function.name` must be of type string",
        ),
        (
            {"type": "function_call_output", "call_id": "1"},
            "only an assistant's message may have no content",
        ),
        (
            {"type": "function_call_output", "output": [{"type": "input_image", "image_url": "x"}]},
            "image_url` is not supported",
        ),
        (1, "`input.0` must be of type object"),
    ],
)
def test_an_item_that_is_incomplete_is_refused(item: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check({"input": [item], "questions": [YES_NO]}, DecisionBody)
    assert words in str(caught.value)


def test_a_loop_of_tools_is_asked_about(embedded_server: ServerProcess) -> None:
    """Of a model whose chat template knows no tools: what a call returned changes the answer."""

    def ask(output: str) -> Any:
        items = [
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": output},
        ]
        status, answer = embedded_server.post(
            "/v1/decisions", {"input": items, "questions": [YES_NO]}
        )
        assert status == 200, answer
        return answer["answers"][0]["probability"]

    assert ask("rain") == ask("rain") != ask("sunshine")


def test_a_single_option_is_certain_and_its_mass_says_how_likely_it_is(
    embedded_server: ServerProcess,
) -> None:
    option = {"type": "choice", "instructions": "Colour?", "choices": [{"value": "red"}]}
    level = {"type": "score", "instructions": "How?", "levels": [{"label": "low"}]}
    status, answer = embedded_server.post(
        "/v1/decisions", {"input": "a", "questions": [option, level]}
    )
    assert status == 200, answer
    choice, score = answer["answers"]
    assert choice["choice"] == "red" and choice["probabilities"] == [
        {"value": "red", "probability": 1.0}
    ]
    assert 0 < choice["label_mass"] < 1 and choice["confidence"] == choice["label_mass"]
    assert score["score"] == 0 and score["probabilities"][0]["probability"] == 1.0
    assert (
        answer["usage"]["output_tokens"] == 0
        and answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"]
    )
    asked = {"q": {"type": "choice", "instructions": "Colour?", "criteria": {"red": None}}}
    status, answer = embedded_server.post("/v1/systemone", {"state": "a", "questions": asked})
    assert status == 200, answer
    assert answer["answers"]["q"]["choice"] == "red"
    diagnostics = answer["diagnostics"]["q"]
    assert diagnostics["label_mass"] == answer["answers"]["q"]["label_mass"]
    assert isinstance(diagnostics["argmax_is_label"], bool)


def piece(top: dict[int, float]) -> Piece:
    return Piece(0, 0, "", logprob=0.0, top=tuple(top.items()))


def test_labels_are_read_up_to_the_token_that_tells_them_apart() -> None:
    labels = Labels([[(1, 2), (3, 2)], [(1, 4, 5)], [(6,)]])
    assert labels.next == {(): [1, 3, 6], (1,): [2, 4]}
    first = piece({1: math.log(0.5), 3: math.log(0.1), 6: math.log(0.2)})
    second = piece({2: math.log(0.4), 4: math.log(0.2)})
    pieces = iter([first, second, first])
    shares, mass, is_label = labels.read(pieces)
    assert shares == pytest.approx([0.3 / 0.6, 0.1 / 0.6, 0.2 / 0.6]) and mass == pytest.approx(0.6)
    assert not is_label, "the likeliest token is 0, and labels begin with 1, 3 and 6"
    assert next(pieces) is first, "the next question's are left"
    shares, mass, _ = labels.read(
        iter([piece({1: -2000.0, 3: -1e4, 6: -2001.0}), piece({2: 0.0, 4: -50.0})])
    )
    assert mass == 0 and shares[0] == pytest.approx(1 / (1 + math.exp(-1)))
    same: list[list[list[tuple[int, ...]]]] = [[[(1,)], [(1,)]], [[(1,)], [(1, 2)]], [[(1,)], [()]]]
    for answers in same:
        with pytest.raises(InvalidRequest, match="the same tokens"):
            Labels(answers)


def decision(**changes: Any) -> dict[str, Any]:
    return {"input": "x", "questions": [YES_NO | changes]}


def system(**changes: Any) -> dict[str, Any]:
    return {"state": "x", "questions": {"q": changes}}


ONE = {"value": "a"}
REFUSED: list[tuple[type[DecisionBody] | type[SystemBody], dict[str, Any], str]] = [
    (DecisionBody, {"input": "x"}, "`questions` is required"),
    (DecisionBody, {"questions": [YES_NO]}, "`input` is required"),
    (DecisionBody, {"input": "x", "questions": []}, "`questions` cannot be empty"),
    (DecisionBody, {"input": [], "questions": [YES_NO]}, "`input` cannot be empty"),
    (DecisionBody, {"input": 1, "questions": [YES_NO]}, "`input` must be of type string or array"),
    (
        DecisionBody,
        {"input": "x", "questions": [YES_NO] * 401},
        "`questions` supports up to 400 items",
    ),
    (
        DecisionBody,
        decision(type="rank"),
        "`questions.0.type` is supported only as 'predicate', 'choice' or 'score'",
    ),
    (DecisionBody, decision(choices=[ONE, {"value": "b"}]), "`choices` goes with the type choice"),
    (DecisionBody, decision(type="choice"), "`choices` goes with the type choice, which needs it"),
    (DecisionBody, decision(type="score"), "`levels` with the type score"),
    (DecisionBody, decision(type="choice", choices=[]), "`questions.0.choices` cannot be empty"),
    (DecisionBody, decision(type="score", levels=[]), "`questions.0.levels` cannot be empty"),
    (
        DecisionBody,
        decision(type="choice", choices=[{"value": str(i)} for i in range(256)]),
        "`questions.0.choices` supports up to 255",
    ),
    (
        DecisionBody,
        decision(type="choice", choices=[ONE, ONE]),
        "`choices` must have different values",
    ),
    (
        DecisionBody,
        decision(type="choice", choices=[ONE, {"value": 1}]),
        "`choices` must have different values, strings or booleans",
    ),
    (
        DecisionBody,
        decision(type="score", levels=[{"label": "a"}] * 11),
        "`questions.0.levels` supports up to 10 items",
    ),
    (
        DecisionBody,
        decision(instructions=[{"type": "input_image", "image_url": "x"}]),
        "`questions.0.instructions.0.image_url` is not supported: text alone",
    ),
    (
        DecisionBody,
        {"input": [{"type": "reasoning", "role": "user"}], "questions": [YES_NO]},
        "`input.0.type` is supported only as 'message', 'function_call', ",
    ),
    (DecisionBody, decision() | {"stream": True}, "`stream` is supported only as false"),
    (
        DecisionBody,
        decision() | {"question": []},
        "`question` is not a known field; did you mean `questions`?",
    ),
    (SystemBody, {"questions": {"q": {"type": "noul"}}}, "`state` is required"),
    (SystemBody, {"state": "x", "questions": {}}, "`questions` cannot be empty"),
    (
        SystemBody,
        system(type="noul", criteria={"yes": "x"}),
        "`criteria` of the type noul must be an object of `true` and `false`",
    ),
    (
        SystemBody,
        system(type="noul", criteria=["x"]),
        "`criteria` of the type noul must be an object of `true` and `false`",
    ),
    (
        SystemBody,
        system(type="choice"),
        "`criteria` of the type choice must be an object of 1 to 255 answers",
    ),
    (
        SystemBody,
        system(type="choice", criteria=["a", "b"]),
        "`criteria` of the type choice must be an object",
    ),
    (
        SystemBody,
        system(type="score", criteria=[]),
        "`criteria` of the type score must be a list of 1 to 10 levels",
    ),
    (
        SystemBody,
        system(type="score", criteria=["a"] * 11),
        "`criteria` of the type score must be a list of 1 to 10 levels",
    ),
    (
        SystemBody,
        system(type="score", criteria={"a": 1, "b": 2}),
        "`criteria` of the type score must be a list",
    ),
    (
        SystemBody,
        system(type="noul", criterias=1),
        "`questions.q.criterias` is not a known field; did you mean `criteria`?",
    ),
]


@pytest.mark.parametrize(
    ("schema", "body", "words"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_is_not_supported_is_refused_by_name(
    schema: Any, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(body, schema)
    assert words in str(caught.value)


def test_bounds_of_a_request(server: ServerProcess) -> None:
    status, answer = server.post(
        "/v1/decisions", {"input": "x" * 3000, "questions": [YES_NO] * 400}
    )
    assert (
        status == 400
        and answer["error"]["param"] == "questions"
        and "800 prompts of up to" in answer["error"]["message"]
    )
    noul = {"q": {"type": "noul", "instructions": "It is."}}
    bodies: dict[str, dict[str, Any]] = {
        "input": {"questions": [YES_NO | {"instructions": "It is."}]},
        "state": {"questions": noul},
    }
    for path, (field, body) in zip(("/v1/decisions", "/v1/systemone"), bodies.items(), strict=True):
        # Byte by byte: the question, and the space with which both labels begin, are in one of the
        # prompts.
        most = (
            4096
            - len("\n\nQuestion: It is.\nAnswer with yes or no, and nothing else.\nAnswer: ")
            - 1
        )
        assert server.post(path, body | {field: "x" * most})[0] == 200
        status, answer = server.post(path, body | {field: "x" * (most + 1)})
        error = answer["error"]
        assert (
            status == 400 and error["code"] == "context_length_exceeded" and error["param"] == field
        )
        assert (
            error["message"]
            == f"`{field}` and a question together must have less than 4096 tokens. Given: 4096"
        )
    assert (
        server.post("/v1/decisions", {"input": "x", "questions": [YES_NO], "model": "other"})[0]
        == 404
    )
    asked = {"state": "x", "questions": {"q": {"type": "noul"}}, "chat_template_kwargs": {"a": 1}}
    assert server.post("/v1/systemone", asked)[0] == 200
    status, answer = server.post(
        "/v1/decisions", {"input": STATE * 9, "questions": [YES_NO] * 200, "timeout_s": 0.01}
    )
    assert status == 504 and answer["error"]["code"] == "queue_timeout"
    wait_until(
        lambda: metric(server, "onehead_requests_running") == 0, "the sequences were cancelled"
    )
