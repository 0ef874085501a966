"""Fields of a body that its model does not have: some are refused by name, the others are left out
and told.

Refused are typing errors, other servers' names of fields that there are here, and fields that would
change the answer in a way that is not served. Invariant: no field is left out without being named
in `Known.ignored`, which the response tells.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, get_args, get_origin
from urllib.parse import quote

from pydantic import AliasChoices, BaseModel

from server.errors import InvalidRequest

MAX_TOLD = 64
"""Most names that a body's unknown fields are told by, and are looked at for typing errors."""
MAX_HEADER_CHARS = 512
MAX_NAME_CHARS = 64
_ANY_KEY = ""
"""In the levels of a body: the members of an object whose keys the client chooses."""
Inner = type[BaseModel] | Mapping[str, type[BaseModel]]
Level = Mapping[str, Inner | None]


def _names(of: dict[str, str]) -> dict[str, str]:
    return {name: value for value, names in of.items() for name in names.split()}


ELSEWHERE = {
    "structured_outputs": "ebnf grammar guided_choice guided_grammar guided_json guided_regex "
    "json_schema regex structural_tag",
    "response_format": "format guided_json_object json_schema",
    "grammar": "guided_grammar guided_json guided_regex json_schema regex response_format "
    "structured_outputs",
    "prompt": "content input inputs messages text",
    "inputs": "content input messages prompt text",
    "messages": "input inputs instructions prompt system system_prompt",
    "input": "messages prompt",
    "max_tokens": "max_completion_tokens max_length max_new_tokens max_output_tokens n_predict "
    "num_predict",
    "max_new_tokens": "max_completion_tokens max_length max_output_tokens max_tokens n_predict "
    "num_predict",
    "n_predict": "max_completion_tokens max_length max_new_tokens max_output_tokens num_predict",
    "min_tokens": "min_length min_new_tokens",
    "repetition_penalty": "rep_pen repeat_penalty",
    "repeat_penalty": "rep_pen repetition_penalty",
    "temperature": "temp",
    "typical_p": "typ_p typical",
    "stop": "stop_sequence stop_sequences stop_strings stopping_strings",
    "stop_token_ids": "eos_token_id",
    "truncate": "truncate_prompt_tokens",
    "truncate_prompt_tokens": "truncate",
    "n": "n_cmpl num_return_sequences",
    "seed": "random_seed",
    "top_logprobs": "n_probs top_n_tokens",
    "logprobs": "n_probs top_logprobs top_n_tokens",
    "top_n_tokens": "n_probs top_logprobs",
    "details": "logprobs",
    "timeout_s": "max_time timeout",
    "chat_template_kwargs": "documents enable_thinking template_kwargs",
}
"""Fields here -> other servers' names of the same, which are refused with the name here."""
_OTHERS = "this route has nothing of the kind"
_TEXT = "text alone is read and written"
_FUNCTIONS = "functions are given as `tools`, and calls as `tool_calls`"
IN_MESSAGES = _names(
    {
        _TEXT: "audio file files image image_url image_urls images input_audio input_file "
        "input_image video video_url videos",
        _FUNCTIONS: "function_call",
        "an answer that has begun is continued with `continue_final_message`": "partial prefix",
    }
)
"""Fields of messages and their parts that are refused, and why."""
OF_PROMPTS = IN_MESSAGES | _names(
    {
        _TEXT: "image_data input_embeds inputs_embeds mm_data modalities multi_modal_data "
        "prompt_embeds",
        _FUNCTIONS: "functions",
        "there are no adapters": "adapter adapter_id adapters lora lora_adapter lora_path "
        "lora_request loras",
        "the operator gives the template, by server.chat_template": "chat_template",
        _OTHERS: "add_special_tokens chat_template_kwargs continue_final_message suffix tools",
    }
)
"""Fields of a body that are refused because they would change the prompt."""
UNSERVED = (
    _names({_OTHERS: " ".join(ELSEWHERE.values())})
    | OF_PROMPTS
    | _names(
        {
            "no tools are hosted here": "builtin_tools connectors data_sources mcp_servers plugins "
            "search_parameters web_search web_search_options",
            "there is no beam search": "beam_search beam_width num_beams use_beam_search",
            "there is no such sampler": "custom_logit_processor diversity_penalty dry_multiplier "
            "dynatemp_range epsilon_cutoff eta_cutoff guidance_scale logit_processors "
            "logits_processor logits_processors min_keep mirostat negative_prompt "
            "no_repeat_ngram_size penalty_alpha sequence_bias smoothing_factor suppress_tokens tfs "
            "tfs_z top_a top_n_sigma watermark xtc_probability",
            _OTHERS: "bad_words best_of echo n prompt_logprobs token_healing tool_choice",
            "give its members in the body itself": "extra_body generation_config model_kwargs "
            "options parameters sampling_params",
        }
    )
)
"""Fields of a body that generates which are refused because they would change the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("best_of", "min_keep", "n", "num_beams", "num_return_sequences", "repeat_penalty"), (1,)
    ),
    **dict.fromkeys(("tfs", "tfs_z", "typ_p"), (1,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    "modalities": (["text"],),
    "top_n_sigma": (-1,),
}
"""Values, beside those that are false, at which fields that are refused would change nothing."""
HARMLESS = _names(
    {
        "": "annotations cache_prompt id_slot include_obfuscation index metadata n_keep parsed "
        "parsed_arguments penalty_last_n response_fields slot_id t_max_prompt_ms prompt_cache_key "
        "provider_specific_fields refusal safety_identifier service_tier store user"
    }
)
"""Fields that clients send by default, which are never refused."""
NOT_MISSPELT = frozenset({"code", "context", "mode", "models", "top_a"})
"""Fields of other servers that are spelt nearly as one here."""


@cache
def level_of(schema: type[BaseModel]) -> Level:
    """Every name that a field of a model may be sent by -> the model of the objects in it, if there
    is one.
    """
    level: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        alias = field.validation_alias or name
        inner = next(_models(field.annotation), None)
        names = alias.choices if isinstance(alias, AliasChoices) else [alias]
        level |= {str(name): inner for name in names}
    return level


def _models(annotation: Any) -> Iterator[Inner]:
    """The models in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        for found in _models(part):
            yield (
                {_ANY_KEY: found}
                if get_origin(annotation) is dict and isinstance(found, type)
                else found
            )


class Known:
    """Reduces a body to the fields that its model has, without those that are null. `strict`: every
    other field is refused.
    """

    def __init__(self, schema: type[BaseModel], strict: bool) -> None:
        self.schema = schema
        self.strict = strict
        self.reasons = UNSERVED if "stream" in schema.model_fields else OF_PROMPTS
        self.ignored: dict[str, None] = {}
        """Places of the fields that were left out, without the numbers of items, in the order in
        which they were met."""

    def members(
        self, value: dict[str, Any], schema: type[BaseModel], path: str = "", place: str = ""
    ) -> dict[str, Any]:
        """The known members of an object. `path`: where it stands in the body; `place`: the same
        without numbers. Raises InvalidRequest.
        """
        level, kept = level_of(schema), {}
        for name, item in value.items():
            if item is None:
                continue
            if name not in level:
                self._leave_out(schema, name, item, path, place)
                continue
            if (inner := level[name]) is not None and isinstance(item, dict | list):
                item = self._inside(item, inner, f"{path}{name}.", f"{place}{name}.")
            kept[name] = item
        return kept

    def _inside(self, value: Any, inner: Inner, path: str, place: str) -> Any:
        if not isinstance(inner, type):  # The client chooses the keys.
            if not isinstance(value, dict):
                return value
            return {
                key: self._inside(item, inner[_ANY_KEY], f"{path}{printable(key)}.", place)
                for key, item in value.items()
            }
        if isinstance(value, dict):
            return self.members(value, inner, path, place)
        if isinstance(value, list):
            return [
                self.members(item, inner, f"{path}{number}.", place)
                if isinstance(item, dict)
                else item
                for number, item in enumerate(value)
            ]
        return value

    def _leave_out(
        self, schema: type[BaseModel], name: str, value: Any, path: str, place: str
    ) -> None:
        """Refuses an unknown field, or notes it."""
        strict, has_room = self.strict and name not in HARMLESS, len(self.ignored) < MAX_TOLD
        known = (
            (strict or has_room)
            and len(name) <= MAX_NAME_CHARS
            and self._meant(schema, name, value, path)
        )
        text = ""
        if known or strict:
            text = "is not a known field" + (f"; did you mean `{known}`?" if known else "")
        elif (
            (reason := self._reasons(path).get(name))
            and value
            and value not in NEUTRAL.get(name, ())
        ):
            text = f"is not supported: {reason}"
        if text:
            shown = f"{path}{printable(name)}"
            raise InvalidRequest(f"`{shown}` {text}", param=shown)
        if has_room:
            self.ignored[place + quoted(name)] = None

    def _reasons(self, path: str) -> Mapping[str, str]:
        return self.reasons if path in _TOP else IN_MESSAGES

    def _meant(self, schema: type[BaseModel], name: str, value: Any, path: str) -> str | None:
        """The field that an unknown one was probably meant to be."""
        says_nothing = value in ("", [], {}) or value in NEUTRAL.get(name, ())
        if path in _TOP and not says_nothing and (found := other_name(self.schema, schema, name)):
            return found
        return None if name in self._reasons(path) else nearest(schema, name)


_TOP = ("", "parameters.")
"""Paths of the objects that hold a request's own fields: the body, and TGI's `parameters`."""


@lru_cache(1024)
def other_name(body: type[BaseModel], schema: type[BaseModel], name: str) -> str | None:
    """The field of a body that another server's name stands for, or that stands outside or inside
    of `parameters`.
    """
    level, top = level_of(schema), level_of(body)
    inner, snake = top.get("parameters"), _snake(name)
    inside = level_of(inner) if isinstance(inner, type) else {}
    for ours, theirs in ELSEWHERE.items():
        if snake in theirs.split():
            if ours in level:
                return ours
            if ours in inside:
                return f"parameters.{ours}"
    if schema is not body and name in top and name not in ("model", "options", "use_cache"):
        return name
    return f"parameters.{name}" if schema is body and name in inside else None


@lru_cache(1024)
def nearest(schema: type[BaseModel], name: str) -> str | None:
    """The field of a model of which a name is a misspelling: up to two edits, and no more than a
    third of the letters.
    """
    snake, known = _snake(name), level_of(schema)
    if snake in NOT_MISSPELT:
        return None
    return next(
        (
            ours
            for edits in range(3)
            for ours in known
            if edits <= min(len(ours), len(name)) // 3 and _within(snake, ours, edits)
        ),
        None,
    )


def _snake(name: str) -> str:
    """`maxTokens` and `max-tokens` as `max_tokens`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")


def _within(a: str, b: str, edits: int) -> bool:
    """Whether one text becomes the other by so many letters that are added, left out, replaced or
    swapped with the next.
    """
    same = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    a, b = a[same:], b[same:]
    if abs(len(a) - len(b)) > edits or not (a or b):
        return not (a or b)
    if not edits:
        return False
    swapped = a[1:2] + a[:1] == b[:2] and _within(a[2:], b[2:], edits - 1)
    return swapped or any(
        _within(x, y, edits - 1) for x, y in ((a[1:], b), (a, b[1:]), (a[1:], b[1:]))
    )


def header(ignored: Collection[str]) -> str:
    """The value of x-onehead-ignored: as many names as have room, then `...` if there may be
    others.
    """
    value = ", ".join(ignored)
    if len(value) > MAX_HEADER_CHARS:
        value = value[:MAX_HEADER_CHARS].rpartition(", ")[0]
    elif len(ignored) < MAX_TOLD:
        return value
    return f"{value}, ..."


def quoted(name: str) -> str:
    """A name as the header, the metric and the log tell it: shortened, in printable ASCII without
    commas and spaces.
    """
    return quote(name[:MAX_NAME_CHARS], safe="/$@:")[:MAX_NAME_CHARS]


def printable(name: str) -> str:
    """A key from a body, shortened and escaped for messages and log lines."""
    return ascii(name[:64])[1:-1][:64]
