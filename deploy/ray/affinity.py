"""Prefix affinity: which replicas have computed the beginning of a prompt before, and which of them
a request should go to.

A prompt is cut into blocks of characters, and the key of a block is a hash of everything up to its
end: equal keys mean equal prefixes, as with the pages of a replica's prefix cache. Invariant: at
most `capacity` keys are kept, and those that were used longest ago go first. It knows neither Ray
nor tokens, nor what a replica has evicted.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

BLOCK = 256
"""Characters of a block: about what a page of 64 tokens holds."""
MAX_BLOCKS = 256
"""Blocks of a prompt that are looked at: what follows 64 Ki characters does not matter to where it
goes."""
MIN_SHARE = 0.5
"""Share of a prompt that a replica has to know to be preferred. Below it, most must be computed
anyway, and load alone decides."""
MAX_HOLDERS = 4
"""Replicas that are remembered for one key, the latest ones: a system prompt that all requests
share spreads over several."""
PROMPT_FIELDS = (
    *("tools", "system", "instructions", "messages", "input", "prompt", "inputs"),
    *("input_extra", "input_prefix"),
)
"""Fields of a request's body that make its prompt, in the order in which their text stands in
it."""

GENERATING = frozenset(
    {
        "/",
        "/generate",
        "/generate_stream",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/fim/completions",
        "/v1/decisions",
    }
    | {"/v1/systemone", "/fim/completions", "/infill", "/completion"}
    | {"/api/generate", "/api/chat", "/v1/messages", "/v1/responses"}
)
"""Paths whose requests leave pages in a replica's cache."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request on its way to a replica."""

    method: str
    path: str
    """With its query, as it came."""
    headers: tuple[tuple[str, str], ...]
    body: bytes
    prefix: tuple[bytes, ...] = ()
    """Keys of the prompt's blocks, the shortest prefix first; none where it generates nothing."""
    replica: str = ""
    """The only replica that can answer it; empty where all can."""


def prefix_keys(body: bytes, owner: str = "") -> tuple[bytes, ...]:
    """The keys of the whole blocks of a request's prompt; none where it has no prompt, or is no
    JSON. `owner` tells apart callers who share no pages.
    """
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            return ()
        text = "".join(_text(fields[name]) for name in PROMPT_FIELDS if name in fields)
    except (
        ValueError,
        RecursionError,
    ):
        # The server refuses both: what is no JSON, and what is nested too deeply.
        return ()
    state = blake2b(
        f"{owner}\0{fields.get('cache_salt')}\0".encode(errors="replace"), digest_size=8
    )
    keys = []
    for start in range(0, min(len(text), MAX_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
        state.update(text[start : start + BLOCK].encode(errors="replace"))
        keys.append(state.digest())
    return tuple(keys)


def _text(value: Any) -> str:
    """A text as it is; anything else as JSON without what closes it, which is where a longer list
    would go on.
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).rstrip("]}")


class PrefixTable:
    """Remembers the replicas that have been sent a prefix. `slack`: open requests that a replica
    may have more than the least busy one and still be preferred for what it knows.
    """

    def __init__(self, capacity: int = 200_000, slack: int = 8) -> None:
        self.capacity, self.slack = capacity, slack
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        """The replicas of each key, the latest first; the keys in the order of their last use."""
        self._held: Counter[str] = Counter()
        """Number of keys of each replica."""

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """The replica for a prompt with these keys, among those whose numbers of open requests are
        `loads` (not empty): the least busy of those that know the longest prefix, or of all.
        """
        limit = min(loads.values()) + self.slack
        for number in range(len(keys), 0, -1):
            if number < MIN_SHARE * len(keys):
                break
            if able := [
                name
                for name in self._holders.get(keys[number - 1], ())
                if loads.get(name, limit + 1) <= limit
            ]:
                return min(able, key=lambda name: loads[name])
        return min(loads, key=lambda name: (loads[name], self._held[name], name))

    def remember(self, keys: Sequence[bytes], replica: str) -> None:
        """Notes that a prompt with these keys goes to a replica. It stays noted where the replica
        then refuses the request.
        """
        for key in keys:
            before = self._holders.pop(key, ())
            self._set(
                key, (replica, *(name for name in before if name != replica))[:MAX_HOLDERS], before
            )
        while len(self._holders) > self.capacity:
            self._held.subtract(self._holders.popitem(last=False)[1])

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forgets all other replicas, which have ended."""
        kept = set(replicas)
        if not set(self._held) <= kept:
            for key, before in list(self._holders.items()):
                self._set(key, tuple(name for name in before if name in kept), before)
            self._held = Counter(
                {name: count for name, count in self._held.items() if name in kept}
            )

    def _set(self, key: bytes, holders: tuple[str, ...], before: tuple[str, ...]) -> None:
        self._held.subtract(before)
        self._held.update(holders)
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]


class StreamOwners:
    """The replicas of the latest resumable streams, by the stream's id."""

    def __init__(self, capacity: int = 100_000) -> None:
        self.capacity = capacity
        self._owners: OrderedDict[str, str] = OrderedDict()

    def remember(self, stream: str, replica: str) -> None:
        """Notes where a stream is."""
        self._owners[stream] = replica
        if len(self._owners) > self.capacity:
            self._owners.popitem(last=False)

    def forget(self, stream: str) -> None:
        """Forgets where a stream is."""
        self._owners.pop(stream, None)

    def find(self, stream: str) -> str | None:
        """The replica of a stream; None where it is not known."""
        return self._owners.get(stream)
