"""Budgets of the code: length of functions, Python tokens in all, calls that are forbidden.

`python -m tests.budgets` prints the figures; tests/test_budgets.py fails where one is exceeded. Complexity is ruff's C90, import directions
are the contracts in pyproject.toml (`lint-imports`).
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("commands", "server", "model", "cache")
MAX_FUNCTION_LINES = 50
MAX_SERVING_TOKENS = 196_150
"""Python tokens of what `onehead serve` imports, imports inside functions included; docstrings, comments, line ends and indentation do not
count. An issue that adds a capability says by how much this may rise."""
MAX_TOKENS = 242_000
"""The same for all three packages, commands and studies included."""
SERVING_ROOTS = (
    "server.serve",
    "server.config",
    "server.logs",
    "server.hub.download",
    "server.engine.worker",
    "server.hub.tokenizer_conversion",
    "model.checkpoint.gguf.folder",
    "server.text.checkpoint_loading",
)
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

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
WEIGHTS_READER, WEIGHTS_ONLY = "commands.convert.convert", "weights_only=True"
ENVIRONMENT_READERS = {"server.config", "server.supervision.processors", "commands.bench.offline", "model.devices.gpu.card"}


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


def call_problems(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ" and name not in ENVIRONMENT_READERS:
            yield f"{name}:{node.lineno} reads os.environ"
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in FORBIDDEN_CALLS:
            weights = called == "torch.load" and WEIGHTS_ONLY in map(ast.unparse, node.keywords)
            if name != WEIGHTS_READER or not weights:
                yield f"{name}:{node.lineno} calls {called}"


def length_problems(name: str, tree: ast.Module) -> Iterator[str]:
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
    for name, _, tree in sources():
        found += length_problems(name, tree)
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
