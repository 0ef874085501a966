"""Tiny random checkpoints whose vocabularies have the marks of a format of calls, with chat
templates that write it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.checkpoints import make_tokenizer

POSITIONS = 4096
TURNS = ("<start_of_turn>", "<end_of_turn>")
GEMMA_ARGUMENTS = (
    "{%- macro written(value, quote) -%}{%- if value is string -%}{{ quote + value + quote }}"
    "{%- elif value is boolean -%}{{ 'true' if value else 'false' }}{%- elif value is none -%}null"
    "{%- elif value is mapping -%}{ {%- for key, item in value | dictsort -%}{{ key }}:{{ "
    "written(item, quote) }}{%- if not loop.last %},{% endif -%}{%- endfor -%} }"
    "{%- elif value is iterable -%}[{%- for item in value -%}{{ written(item, quote) }}{%- if not "
    "loop.last %},{% endif -%}{%- endfor -%}]{%- else -%}{{ value }}{%- endif -%}{%- endmacro -%}"
)


def _gemma(
    quote: str,
    tool: str,
    tool_end: str,
    call: str,
    call_end: str,
    response: str,
    response_end: str,
    thought: str = "",
) -> str:
    """A template in the form of FunctionGemma's and Gemma 4's."""
    return (
        GEMMA_ARGUMENTS + "{{ bos_token }}{%- for tool in tools or [] -%}"
        f"{tool}declaration:{{{{ tool.function.name }}}}{{{{ written(tool.function.parameters, "
        f"'{quote}') }}}}{tool_end}"
        "{%- endfor -%}{%- for message in messages -%}"
        f"{{%- if message.role == 'tool' -%}}{response}response:{{{{ message.name }}}}{{{{ "
        f"'{{value:' }}}}{{{{ written(message.content, '{quote}') }}}}{{{{ '}}' }}}}{response_end}"
        "{%- else -%}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role "
        "}}\n{{ message.content }}"
        f"{{%- for call in message.tool_calls or [] -%}}{call}call:{{{{ call.function.name }}}}"
        f"{{{{ written(call.function.arguments, '{quote}') }}}}{call_end}{{%- endfor "
        f"-%}}<end_of_turn>\n{{%- endif -%}}{{%- endfor -%}}"
        "{%- if add_generation_prompt -%}<start_of_turn>model\n"
        f"{thought}{{%- endif -%}}"
    )


@dataclass(frozen=True)
class ToolModel:
    """A format: the marks of its vocabulary beside TURNS, and a chat template."""

    marks: tuple[str, ...]
    template: str
    stop: str = ""
    are_special: bool = True
    """Whether the marks are special tokens, or only added ones."""


_FUNCTION_GEMMA = (
    "<start_function_declaration>",
    "<end_function_declaration>",
    "<start_function_call>",
    "<end_function_call>",
    "<start_function_response>",
    "<end_function_response>",
)
_GEMMA_4 = (
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
)
PLAIN = (
    "{%- for message in messages -%}{%- if message.role not in ('system', 'user', 'assistant') -%}"
    "{{ raise_exception('no role ' ~ message.role) }}{%- endif -%}"
    "<start_of_turn>{{ message.role }}\n{{ message.content | trim }}<end_of_turn>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<start_of_turn>assistant\n{%- endif -%}"
)
_JSON_TOOLS = (
    "{%- for tool in tools or [] -%}{{ tool.function | tojson }}\n{%- endfor -%}{%- for message "
    "in messages -%}"
    "<start_of_turn>{{ message.role }}\n{{ message.content }}{%- for call in message.tool_calls "
    "or [] -%}OPEN{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson "
    "}}CLOSE{%- endfor -%}<end_of_turn>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<start_of_turn>assistant\n{%- endif -%}"
)
TOOL_MODELS = {
    "functiongemma": ToolModel(
        (*_FUNCTION_GEMMA, "<escape>"),
        _gemma("<escape>", *_FUNCTION_GEMMA),
        "<start_function_response>",
        False,
    ),
    "gemma4": ToolModel(
        (*_GEMMA_4, '<|"|>', "<|channel>", "<channel|>"),
        _gemma('<|"|>', *_GEMMA_4, "{% if enable_thinking %}<|channel>thought\n{% endif %}"),
        "<|tool_response>",
    ),
    "granite": ToolModel(
        (), _JSON_TOOLS.replace("OPEN", "<function_call> ").replace("CLOSE", "\n")
    ),
    "plain": ToolModel((), PLAIN),
}


def _spelling_tokenizer() -> Tokenizer:
    """One that spells `<function_call>`, which is no token of its vocabulary, with two tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>", *TURNS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["<function", "_call>", "_call>\n"] * 9, trainer)
    return tokenizer


def make_tool_tokenizer(name: str, folder: Path) -> Path:
    """Writes the tokenizer and the chat template of one of TOOL_MODELS; token 0 ends a text. -> the
    folder
    """
    model = TOOL_MODELS[name]
    tokenizer = (
        _spelling_tokenizer() if name == "granite" else make_tokenizer((*TURNS, *model.marks), 290)
    )
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] not in model.marks or model.are_special
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    (folder / "chat_template.jinja").write_text(model.template)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})
    )
    return folder


def make_tool_checkpoint(name: str, folder: Path, seed: int = 0) -> Path:
    """Writes the random checkpoint of one of TOOL_MODELS. -> the folder"""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    torch.manual_seed(seed)
    config = GPTBigCodeConfig(
        vocab_size=290,
        n_positions=POSITIONS,
        n_embd=64,
        n_layer=2,
        n_head=4,
        multi_query=True,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.15,
    )
    GPTBigCodeForCausalLM(config).save_pretrained(folder)
    return make_tool_tokenizer(name, folder)
