"""The budgets of the code, measured: file and function length, tokens in all, import directions, calls that must not be.

`python -m tests.budgets` prints the figures; tests/test_budgets.py fails where one is exceeded. Complexity is ruff's C90.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("server", "model", "cache")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_SERVING_TOKENS = 103_150
"""Python tokens of what `onehead serve` imports, imports inside functions included; docstrings, comments, line ends and indentation do not
count. An issue that adds a capability says by how much this may rise."""
MAX_TOKENS = 143_400
"""The same for all three packages, commands and studies included."""
SERVING_ROOTS = ("server.serve", "server.config", "server.logs", "server.hub", "server.engine.worker", "server.tokenizer_conversion")
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

# Who may not import whom: every rule whose prefix fits a module binds it, and speaks of imports inside functions too.
FORBIDDEN = {
    "cache": ("server", "model", "fastapi", "pydantic"),
    "cache.pages": ("torch", "cache"),
    "cache.layout": ("torch", "cache"),
    "cache.table": ("torch", "cache.pool"),
    "model": ("server", "fastapi", "pydantic", "uvicorn"),
    "model.step": ("torch", "cache", "model"),
    "model.spec": ("torch", "cache", "model"),
    "model.config": ("torch", "cache"),
    "model.rope": ("torch", "cache"),
    "model.names": ("torch", "cache"),
    "model.families": ("torch", "cache"),
    "server.cli": ("torch", "server.engine"),
    "server.api": ("torch",),
    "server.serve": ("torch",),
    "server.generation": ("torch", "server.api", "server.transport", "server.engine"),
    "server.hub": ("torch", "transformers", "server.api", "server.serve", "server.supervisor"),
    "server.tokenizer_file": ("torch", "transformers", "server.api", "server.supervisor"),
    "server.tokenizer_conversion": ("torch", "server.api", "server.config", "server.supervisor"),
    "server.text": ("torch", "server.api", "server.supervisor"),
    "server.transport": ("torch", "server.api", "server.supervisor"),
    "server.protocol": ("server", "torch"),
    "server.errors": ("server", "torch"),
    "server.stream_buffer": ("torch", "time", "random", "asyncio", "server"),
    "server.logs": ("torch", "server"),
    "server.connection": ("torch", "server.api", "server.generation", "server.supervisor"),
    "server.drain": ("torch", "server.api", "server.connection"),
    "server.offline": ("torch", "fastapi", "uvicorn", "server.api", "server.supervisor", "server.transport"),
    "server.comparison": ("torch", "server.bench", "server.client", "server.config"),
    "server.supervisor": ("torch", "time", "random", "asyncio", "server.api", "server.transport"),
    "server.engine": ("fastapi", "uvicorn", "pydantic", "server.api", "server.supervisor", "server.text", "server.config", "torch"),
    "server.engine.scheduler": ("time", "random", "asyncio", "server.protocol", "model.runner"),
    "server.engine.sequence": ("time", "random", "asyncio", "server.protocol", "model.runner"),
    "server.engine.drafts": ("time", "random", "asyncio", "server.protocol", "model", "cache"),
}
# Nothing that serves imports the teaching side or the tools.
SERVING = """
attention batch backends config decoder families layers names quantization rope runner safetensors_file sampling spec step weights
"""
for serving in SERVING.split():
    FORBIDDEN[f"model.{serving}"] = (*FORBIDDEN.get(f"model.{serving}", ()), "model.reference", "model.tools")
FORBIDDEN["server.engine"] += ("model.reference", "model.tools")
# The two that run the engine in their own process; only the first imports the second.
IN_PROCESS = ("server.cli", "server.offline")
# Siblings that never import each other.
STRANGERS = ("model.families", "model.backends")
# The two dialects share fields, body and sse, and never each other.
TGI = ("generate", "tgi_fields")
OPENAI = ("openai", "openai_fields", "chat_fields", "infill_fields", "completions", "chat", "infill", "replies")
for ours, theirs in ((TGI, OPENAI), (OPENAI, TGI)):
    for dialect in ours:
        FORBIDDEN[f"server.api.{dialect}"] = tuple(f"server.api.{other}" for other in theirs)
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "pickle.load",
    "pickle.loads",
    "pickle.dumps",
    "os.system",
}
# The one reader of weights in pickles: of their tensors alone.
WEIGHTS_READER, WEIGHTS_ONLY = "model.tools.convert", "weights_only=True"
ENVIRONMENT_READERS = {"server.config", "server.processors", "server.offline"}
FORBIDDEN_MODULES = {"pickle", "dill", "marshal", "shelve"}


def sources() -> Iterator[tuple[str, Path, ast.Module]]:
    """(dotted module name, path, syntax tree) of every file of the packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, path, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module that the file imports, with `from a import b` as a.b too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def import_problems(name: str, tree: ast.Module) -> Iterator[str]:
    banned = set(FORBIDDEN_MODULES)
    for prefix, modules in FORBIDDEN.items():
        if _within(name, prefix):
            banned.update(modules)
    if not _within(name, "server.engine") and name not in IN_PROCESS and _within(name, "server"):
        banned.update(("model", "server.engine"))
    if name not in IN_PROCESS:
        banned.add("server.offline")
    for imported in imports(tree):
        if any(_within(imported, module) for module in banned):
            yield f"{name} imports {imported}"
        for group in STRANGERS:
            own, sibling = (module.removeprefix(group + ".").split(".")[0] for module in (name, imported))
            place = ROOT / group.replace(".", "/") / sibling
            is_module = place.with_suffix(".py").exists() or place.is_dir()
            if name.startswith(group + ".") and imported.startswith(group + ".") and is_module and sibling != own:
                yield f"{name} imports its sibling {imported}"


def call_problems(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ" and name not in ENVIRONMENT_READERS:
            yield f"{name}:{node.lineno} reads os.environ"
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in FORBIDDEN_CALLS:
            weights = called == "torch.load" and WEIGHTS_ONLY in map(ast.unparse, node.keywords)
            if name != WEIGHTS_READER or not weights:
                yield f"{name}:{node.lineno} calls {called}"


def length_problems(name: str, path: Path, tree: ast.Module) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8").count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{name} has {lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"


def docstring_problems(name: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield f"{name} has no module docstring"


def _docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where the docstrings of a file begin."""
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
    texts = (statement for node in owners for statement in node.body if isinstance(statement, ast.Expr))
    return {(text.lineno, text.col_offset) for text in texts if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)}


def num_tokens(path: Path, tree: ast.Module) -> int:
    """Python tokens of a file without its docstrings, comments, line ends and indentation."""
    docstrings = _docstrings(tree)
    tokens = tokenize.tokenize(io.BytesIO(path.read_bytes()).readline)
    return sum(token.type not in LAYOUT_TOKENS and token.start not in docstrings for token in tokens)


def serving_modules(trees: dict[str, ast.Module]) -> set[str]:
    """The modules that `onehead serve` and its engine process import, those imported inside functions included."""
    found: set[str] = set()
    remaining = list(SERVING_ROOTS)
    while remaining:
        name = remaining.pop()
        while name and name not in trees:
            name = name.rpartition(".")[0]
        if name and name not in found:
            found.add(name)
            remaining += [name.rpartition(".")[0], *imports(trees[name])]
    return found


def token_totals() -> tuple[int, int]:
    """Tokens of what `onehead serve` imports, and of all packages."""
    trees = {name: tree for name, _, tree in sources()}
    counts = {name: num_tokens(path, tree) for name, path, tree in sources()}
    return sum(counts[name] for name in serving_modules(trees)), sum(counts.values())


def problems() -> list[str]:
    """Everything that exceeds a budget, in words."""
    found: list[str] = []
    for name, path, tree in sources():
        found += length_problems(name, path, tree)
        found += import_problems(name, tree)
        found += call_problems(name, tree)
        found += docstring_problems(name, tree)
    serving, total = token_totals()
    if serving > MAX_SERVING_TOKENS:
        found.append(f"{serving} tokens in what `onehead serve` imports, more than {MAX_SERVING_TOKENS}")
    if total > MAX_TOKENS:
        found.append(f"{total} tokens in {', '.join(PACKAGES)}, more than {MAX_TOKENS}")
    return found


if __name__ == "__main__":
    serving, total = token_totals()
    print(f"{serving} tokens in what `onehead serve` imports, of at most {MAX_SERVING_TOKENS}")
    print(f"{total} tokens in {' + '.join(PACKAGES)}, of at most {MAX_TOKENS}")
    for problem in problems():
        print(problem)
    sys.exit(bool(problems()))
