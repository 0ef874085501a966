"""A conversation as a chat template receives it, and its form for templates that know no tools.

Invariant: roles are fixed words; all else is text of clients, and is changed as a whole. Of a
template it reads only the source text.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

Message = dict[str, Any]


class ChatInput(msgspec.Struct, frozen=True):
    """The input of a chat template."""

    messages: list[Message]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] = []
    variables: dict[str, Any] = {}
    """Further variables of the template."""
    continues: bool = False
    """Whether the prompt ends with the text of the last message."""
    describes: bool = True
    """Whether tools are described to the model by a message where the template does not write
    them."""

    @property
    def has_calls(self) -> bool:
        """Whether messages hold calls or their results."""
        return any(
            message["role"] == "tool" or "tool_calls" in message for message in self.messages
        )

    def changed(self, change: Callable[[str], str]) -> "ChatInput":
        """The input with all of its texts changed but the roles of messages."""
        messages = [
            _changed(message, change) | {"role": message["role"]} for message in self.messages
        ]
        tools, variables = _changed(self.tools, change), _changed(self.variables, change)
        return msgspec.structs.replace(self, messages=messages, tools=tools, variables=variables)

    def adapted(self, source: str) -> list[Message]:
        """The messages for a template. Where its source does not name `developer`, that role is
        `system`. What it does not name of tools, calls and results becomes text: tools are
        described at the beginning of the conversation, calls are written as JSON, results are
        messages of the user.
        """
        messages = self.messages[:]
        if "developer" not in source:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        tools = [] if names_tools(source) or not self.describes else self.tools
        calls = "tool_calls" not in source
        results = calls and not re.search("[\"']tool[\"']", source)
        if not tools and not (calls and self.has_calls):
            return messages
        plain: list[Message] = []
        for message in messages:
            changed = _without_tools(message, results) if calls else message
            if calls and plain and plain[-1]["role"] == changed["role"] != "tool":
                plain[-1] |= {"content": f"{plain[-1]['content']}\n\n{changed['content']}"}
            else:
                plain.append(dict(changed))
        if tools:
            plain[0] |= {"content": f"{_described(tools)}\n\n{plain[0]['content']}"}
        return plain


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict):
        changed: dict[str, Any] = {}
        for key, item in value.items():
            name = change(key)
            while name in changed:  # Different keys stay different.
                name += str(len(changed))
            changed[name] = _changed(item, change)
        return changed
    return value


def names_tools(source: str) -> bool:
    """Whether a template writes the tools that it is given."""
    return re.search(r"\btools\b", source) is not None


def _without_tools(message: Message, results: bool) -> Message:
    role, content = message["role"], message["content"]
    if role == "tool" and results:
        text = f"Result of {message.get('name', 'a call')}:\n{content}"
        return {"role": "user", "content": text}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = json.dumps(calls, ensure_ascii=False) if calls else ""
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join(filter(None, (content, written)))}


def _described(tools: list[dict[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = '[{"name": NAME, "arguments": {...}}, ...]'
    return (
        f"These functions can be called:\n{functions}\nTo call some of them, answer with a "
        f"JSON array and nothing else: {example}"
    )
