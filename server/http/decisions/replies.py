"""/v1/decisions and /v1/systemone: reads the probabilities of answers off the model's logits,
without generating.

Each answer has labels, texts with which a reply may begin. A label is read up to the token that
tells it from those of other answers, which is mostly its first: a sequence is submitted for what
stands before each such token, and its greedy draw reports the log-probabilities of all that may
follow there (`logprob_token_ids`). Invariant: what is read of a question depends on its own
sequences alone.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from math import exp, fsum
from typing import Any

from server import protocol
from server.errors import TOO_LONG, InvalidRequest, QueueTimeout
from server.generation.admission import RETRY_SECONDS, Reservation
from server.generation.generation import Generation
from server.generation.price import MAX_SENT_IDS
from server.generation.request import Request, prompt_tokens
from server.generation.stream import OpenStreams, Piece
from server.http.answer import Reply
from server.http.decisions.fields import AnyQuestion, DecisionBody, SystemBody, as_text
from server.http.openai.chat_fields import plain_messages
from server.http.openai.fields import MAX_SEQUENCES
from server.text.conversation import ChatInput
from server.text.jobs import AskedQuestions, EncodeQuestions

AnyBody = DecisionBody | SystemBody
Tokens = tuple[int, ...]


class Labels:
    """The labels of one question as token ids, several for each answer."""

    def __init__(self, answers: Sequence[Sequence[Tokens]]) -> None:
        owners = defaultdict[Tokens, set[int]](set)
        for answer, labels in enumerate(answers):
            for start in chain(*map(_starts, labels)):
                owners[start].add(answer)
        self._answers = [
            {next((s for s in _starts(label) if len(owners[s]) == 1), ()) for label in labels}
            for labels in answers
        ]
        if any(() in labels for labels in self._answers):
            raise InvalidRequest(
                "the model's tokenizer gives several labels of a question the same tokens",
                param="questions",
            )
        self.next = defaultdict[Tokens, list[int]](list)
        """The tokens that may follow each beginning of a label."""
        for *before, token in dict.fromkeys(chain(*map(_starts, chain(*self._answers)))):
            self.next[tuple(before)].append(token)

    def read(self, pieces: Iterator[Piece]) -> tuple[list[float], float, bool]:
        """The probability of each answer among all of them, and of all labels together among all
        texts; by the pieces of `next`. And whether the likeliest token begins a label.
        """
        read = [*zip(self.next, pieces, strict=False)]
        logprobs = {(*start, id): logprob for start, piece in read for id, logprob in piece.top}
        first = read[0][1]
        sums = [
            [fsum(map(logprobs.__getitem__, _starts(label))) for label in labels]
            for labels in self._answers
        ]
        # Relative to the largest, as all may be too small for a float.
        largest = max(map(max, sums))
        shares = [fsum(exp(logprob - largest) for logprob in labels) for labels in sums]
        total = fsum(shares)
        mass = min(1.0, exp(largest) * total)
        return [share / total for share in shares], mass, first.token in dict(first.top)


def _starts(label: Tokens) -> Iterator[Tokens]:
    """The beginnings of a label, the shortest of one token first, itself last."""
    return accumulate((token,) for token in label)


class DecisionReply(Reply):
    """The answers to the questions of one request."""

    def __init__(
        self,
        body: AnyBody,
        model_id: str,
        asked: Sequence[tuple[AnyQuestion, Labels]],
        streams: OpenStreams,
    ) -> None:
        self.body, self.model_id, self.asked, self.streams = body, model_id, asked, streams
        self.pieces: dict[int, Piece] = {}

    @classmethod
    async def open(
        cls, generation: Generation, body: AnyBody, model_id: str, reservation: Reservation
    ) -> "DecisionReply":
        """Encodes the questions and starts their sequences. Raises RequestError."""
        questions: list[AnyQuestion]
        if isinstance(body, DecisionBody):
            questions, messages, field = [*body.questions], plain_messages(body.input), "input"
        else:
            questions = [*body.questions.values()]
            messages = [{"role": "user", "content": as_text(body.state)}]
            field = "state"
        if messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n\n"
        else:
            messages.append({"role": "user", "content": ""})
        texts = sorted(
            {text for question in questions for texts in question.labels for text in texts}
        )
        job = EncodeQuestions(
            ChatInput(messages, variables=body.chat_template_kwargs or {}),
            questions=[question.text for question in questions],
            labels=texts,
        )
        asked: AskedQuestions = await generation.tokenize(job, reservation.client)
        ids = dict(zip(texts, map(tuple, asked.labels), strict=True))
        labels = [
            Labels([[ids[text] for text in texts] for texts in question.labels])
            for question in questions
        ]
        _check_size(asked, labels, field, generation.max_total_tokens)
        requests = [
            Request(
                prompt=[*asked.state, *own, *asked.end, *start],
                sampling=protocol.Sampling(temperature=0.0, logprob_token_ids=tokens),
                max_new_tokens=1,
                priority=body.priority or 0,
                timeout_s=body.timeout_s,
                salt=body.cache_salt or "",
            )
            for own, of in zip(asked.questions, labels, strict=True)
            for start, tokens in of.next.items()
        ]
        return cls(
            body,
            model_id,
            [*zip(questions, labels, strict=True)],
            generation.start(requests, reservation),
        )

    def take(self, piece: Piece) -> None:
        if piece.finish == "timeout":
            raise QueueTimeout(
                "the request's time limit passed before all questions were read",
                RETRY_SECONDS,
                code="queue_timeout",
            )
        self.pieces[piece.choice] = piece

    def full_response(self) -> dict[str, Any]:
        choices, reservation = self.streams.choices, self.streams.reservation
        pieces = (self.pieces[choice.index] for choice in choices)
        reads = [(question, *labels.read(pieces)) for question, labels in self.asked]
        answers: Any = [question.answer(shares, mass) for question, shares, mass, _ in reads]
        num_tokens = prompt_tokens(choices)
        num_cached = sum(choice.num_cached for choice in choices)
        usage = {
            "input_tokens": num_tokens,
            "input_tokens_details": {
                "cached_tokens": num_cached,
                "cache_write_tokens": num_tokens - num_cached,
            },
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_tokens,
        }
        head: dict[str, Any] = {}
        if isinstance(self.body, SystemBody):
            answers = dict(zip(self.body.questions, answers, strict=True))
            head = {
                "id": f"decision-{reservation.reply_id}",
                "object": "structured_decision",
                "created": reservation.created,
                "diagnostics": {
                    id: {"label_mass": mass, "argmax_is_label": is_label}
                    for id, (*_, mass, is_label) in zip(answers, reads, strict=True)
                },
            }
        return head | {"answers": answers, "model": self.model_id, "usage": usage}


def _check_size(
    asked: AskedQuestions, labels: Sequence[Labels], field: str, max_total_tokens: int
) -> None:
    """Raises InvalidRequest for a prompt that is too long, and for too many of them. `field`: what
    the questions are about.
    """
    most = (
        len(asked.state)
        + len(asked.end)
        + max(
            len(own) + len(max(of.next, key=len))
            for own, of in zip(asked.questions, labels, strict=True)
        )
    )
    if most >= max_total_tokens:
        raise InvalidRequest(
            f"`{field}` and a question together must have less than {max_total_tokens} tokens. "
            f"Given: {most}",
            param=field,
            code=TOO_LONG,
        )
    count = sum(len(of.next) for of in labels)
    if count > MAX_SEQUENCES or count * most > MAX_SENT_IDS:
        raise InvalidRequest(
            f"the questions make {count} prompts of up to {most} tokens; at most "
            f"{MAX_SEQUENCES}, of {MAX_SENT_IDS} tokens together, are allowed in one request: "
            "send several",
            param="questions",
        )
