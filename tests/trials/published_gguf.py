"""A published GGUF file, served over HTTP: 200 greedy tokens equal those of `transformers` with the
same file, alone and among 31 others.

    python -m tests.trials.published_gguf --model FILE.gguf --output DIR [--tokens 200] [--reference
    FOLDER]

Twenty prompts of code, prose, Japanese and other scripts, JSON and white space, one of them of some
3,000 tokens. A server takes them one after the other, and then all at once among twelve that
sample. `transformers` computes each prompt with its answer in one pass: the answer is greedy if
each of its tokens has the largest logit after those before it. --reference is a folder for
`transformers` in place of the file. Writes published_gguf.json into DIR. Exit status 1 where a
token differs.
"""

import argparse
import asyncio
import inspect
import json
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch

from tests.support.live import Ask, Server, exchange
from tests.support.report import Check, Found, conclude, progress, show
from tests.support.wire import http_request

OTHERS = 12
LONG_PROMPT_CHARACTERS = 11_500
"""Of Python source: some 3,000 tokens."""
PROMPTS = {
    "code, Python": 'def fibonacci(n):\n    """The n-th Fibonacci number."""\n    if n < 2:\n     '
    "   return n\n",
    "code, C": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n      "
    "  printf(",
    "code, SQL": "SELECT name, COUNT(*) AS orders\nFROM customers\nJOIN orders ON ",
    "code, shell": "#!/bin/sh\nset -eu\nfor file in *.txt; do\n\t",
    "code, HTML": "<table>\n  <tr><td>Name</td><td>Age</td></tr>\n  <tr><td>",
    "code, diff": "--- a/main.py\n+++ b/main.py\n@@ -1,3 +1,4 @@\n import sys\n+import ",
    "prose": "It was the best of times, it was the worst of times, it was the age of wisdom,",
    "prose, question": "Question: Why is the sky blue?\nAnswer:",
    "prose, list": "The planets of the solar system, from the Sun outwards:\n\n1. Mercury\n2. "
    "Venus\n3.",
    "prose, letter": "Dear Ms. O'Neill,\n\nThank you for your letter of 3 May. We don't think that",
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたか",
    "Japanese, mixed": "東京タワーの高さは333mで、1958年に",
    "Chinese": "人工智能是计算机科学的一个分支",
    "Russian": "Все счастливые семьи похожи друг на друга,",  # noqa: RUF001
    "Arabic": "في البدء كانت",
    "emoji": "Weather today: ☀️ then 🌧️. Tomorrow:",
    "JSON": '{"name": "Ada Lovelace", "born": 1815, "languages": ["English", "French"], "works": [',
    "JSON, nested": '{\n  "user": {\n    "id": 42,\n    "tags": ["a", "b"],\n    "address": {\n   '
    '   "city": ',
    "white space": "a\tb\tc\n\n\n\n    indented  twice\n        deeper\n\t\ttabs\n\n",
    "long code": "",
}


def prompts() -> dict[str, str]:
    """The prompts by name. The long one is source text of this Python, with at most 31 spaces
    together: of longer runs transformers' Gemma tokenizer makes other tokens than SentencePiece,
    and than llama.cpp and onehead, which do as SentencePiece does.
    """
    source = "".join(inspect.getsource(module) for module in (textwrap, argparse))
    return PROMPTS | {"long code": re.sub(" {32,}", " " * 31, source)[:LONG_PROMPT_CHARACTERS]}


async def asked(port: int, path: str, body: Any) -> Any:
    """The JSON of an answer. Raises AssertionError for any status but 200."""
    async with exchange(port, http_request("POST", path, body)) as reply:
        data = await reply.body()
    assert reply.status == 200, data
    return json.loads(data)


async def completed(
    port: int, prompt: str, tokens: int, seed: int | None = None
) -> tuple[list[int], list[int]]:
    """(token ids of the prompt, of its continuation)."""
    body = Ask("openai", prompt, tokens, seed, stream=False).body
    (choice,) = (await asked(port, "/v1/completions", body))["choices"]
    return choice["prompt_token_ids"], choice["token_ids"]


async def served(options: argparse.Namespace) -> tuple[Found, dict[str, Found]]:
    """The body of GET /info, and for each prompt its ids, the answer alone, and the answer among
    others.
    """
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "--model",
            str(options.model),
            "--engine.dtype",
            options.dtype,
            "--engine.quantization",
            options.quantization,
        ]
        server = await Server.start(Path(scratch) / "server.log", *arguments)
        try:
            found: dict[str, Found] = {}
            with progress() as bar:
                for name, prompt in bar.track(prompts().items(), description="alone"):
                    ids, answer = await completed(server.port, prompt, options.tokens)
                    found[name] = {"prompt": ids, "alone": answer}
            every = [(prompt, None) for prompt in prompts().values()]
            every += [(prompt, seed) for seed, prompt in enumerate(list(PROMPTS.values())[:OTHERS])]
            answers = await asyncio.gather(
                *(completed(server.port, prompt, options.tokens, seed) for prompt, seed in every)
            )
            for name, (_, answer) in zip(found, answers, strict=False):
                found[name]["among"] = answer
            async with exchange(server.port, http_request("GET", "/info")) as reply:
                info: Found = json.loads(await reply.body())
        finally:
            await server.stop()
    return info, found


def checked(options: argparse.Namespace, found: dict[str, Found]) -> list[Found]:
    """For each answer, by `transformers`: how many of its tokens have the largest logit, and the
    least margin over the second.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, more = (
        (options.model.parent, {"gguf_file": options.model.name})
        if options.reference is None
        else (options.reference, {})
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, **more)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **more
    ).eval()
    rows = []
    with progress() as bar, torch.inference_mode():
        for name, each in bar.track(found.items(), description="transformers"):
            prompt, answer = each["prompt"], each["alone"]
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
            best, second = logits.topk(2).values.T
            equal = logits.argmax(-1) == torch.tensor(answer)
            rows.append(
                {
                    "prompt": name,
                    "prompt_tokens": len(prompt),
                    "same_prompt_ids": tokenizer.encode(prompts()[name]) == prompt,
                    "tokens": len(answer),
                    "greedy": int(equal.sum()),
                    "first_difference": None if equal.all() else int((~equal).nonzero()[0]),
                    "closest_margin": float((best - second).min()),
                    "same_among_others": each["alone"] == each["among"],
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument(
        "--reference", type=Path, help="folder for transformers; default: it reads the file"
    )
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--dtype", default="float32", help="engine.dtype")
    parser.add_argument("--quantization", default="none", help="engine.quantization")
    options = parser.parse_args()
    info, found = asyncio.run(served(options))
    rows = checked(options, found)
    headings = (
        "prompt",
        "its tokens",
        "same ids",
        "answer",
        "greedy",
        "closest margin",
        "same among 31",
    )
    keys = (
        "prompt",
        "prompt_tokens",
        "same_prompt_ids",
        "tokens",
        "greedy",
        "closest_margin",
        "same_among_others",
    )
    show(
        headings,
        [tuple(row[key] for key in keys) for row in rows],
        "closest margin: of the two largest logits, over the answer",
    )
    different = [
        f"{row['prompt']} at {row['first_difference']}"
        for row in rows
        if row["first_difference"] is not None
    ]
    alone = [row["prompt"] for row in rows if not row["same_among_others"]]
    ids = [row["prompt"] for row in rows if not row["same_prompt_ids"]]
    checks = [
        Check(
            "prompts are tokenized as by transformers",
            not ids,
            ", ".join(ids) or f"{len(rows)} prompts",
        ),
        Check(
            "every token is transformers' greedy one",
            not different,
            ", ".join(different) or f"{len(rows)} x {options.tokens} tokens",
        ),
        Check(
            "the same tokens alone and among others",
            not alone,
            ", ".join(alone) or f"{len(rows)} prompts of 32",
        ),
    ]
    return conclude("published_gguf", options.output, info, {"prompts": rows}, checks)


if __name__ == "__main__":
    sys.exit(main())
