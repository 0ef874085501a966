"""A conversation as a chat template receives it, and its form for templates that know no tools.

Invariant: roles are fixed words; all else is text of clients, and is changed as a whole. Of a template it reads only the source text.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec

Message = dict[str, Any]


class ChatInput(msgspec.Struct, frozen=True):
    """What a chat template is given."""

    messages: list[Message]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] = []
    variables: dict[str, Any] = {}
    """Further variables of the template."""
    continues: bool = False
    """Whether the prompt ends with the text of the last message."""

    def changed(self, change: Callable[[str], str]) -> "ChatInput":
        """The input with all of its texts changed but the roles of messages."""
        messages = [_changed(message, change) | {"role": message["role"]} for message in self.messages]
        tools, variables = _changed(self.tools, change), _changed(self.variables, change)
        return msgspec.structs.replace(self, messages=messages, tools=tools, variables=variables)

    def adapted(self, source: str) -> list[Message]:
        """The messages for a template. Where its source does not name `developer`, that role is `system`. Where it names no tools, they
        are described at the beginning of the conversation, calls are written as JSON, and their results are messages of the user.
        """
        messages = self.messages[:]
        if "developer" not in source:
            messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
        if "tool" in source or not (self.tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages)):
            return messages
        plain: list[Message] = []
        for role, content in map(_without_tools, messages):
            if plain and plain[-1]["role"] == role:
                plain[-1]["content"] += f"\n\n{content}"
            else:
                plain.append({"role": role, "content": content})
        if self.tools:
            plain[0]["content"] = f"{_described(self.tools)}\n\n{plain[0]['content']}"
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


def _without_tools(message: Message) -> tuple[str, str]:
    role, content = message["role"], message["content"]
    if role == "tool":
        return "user", f"Result of {message.get('name', 'a call')}:\n{content}"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return role, "\n".join(filter(None, (content, json.dumps(calls, ensure_ascii=False) if calls else "")))


def _described(tools: list[dict[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = '[{"name": NAME, "arguments": {...}}, ...]'
    return f"These functions can be called:\n{functions}\nTo call some of them, answer with a JSON array and nothing else: {example}"
