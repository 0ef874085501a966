"""Budgets of the code: Python tokens and other lines by folder, length of functions, forbidden
calls.

`python -m tests.budgets` prints the figures; tests/test_budgets.py fails where one is exceeded. The
ceilings are in tests/ceilings.toml and only fall: `python -m tests.budgets --lower` sets them to
today's figures where those are lower. Complexity is ruff's C90, import directions are the contracts
in pyproject.toml (`lint-imports`).
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = Path(__file__).with_name("ceilings.toml")
SERVING = ("server", "model", "cache")
"""Every Python file of these packages counts as code that serves, however it is reached."""
PACKAGES = ("commands", *SERVING)
WHOLE = ("commands", "bench", "tests", "deploy", "scripts")
"""Folders that have one ceiling with all that is below them; in the others each folder has its
own."""
LANGUAGES = {"C++": (".cpp", ".h"), "JavaScript": (".js",), "JSON": (".json",)}
"""Languages that are counted by lines, in what serves, without vendored files and models."""
NOT_OURS = ("ui/vendor", "model/pretrained")
MAX_FUNCTION_LINES = 50
"""Longer ones have ceilings of their own, which only fall."""
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
ENVIRONMENT_READERS = {
    "server.config",
    "server.listener",  # systemd says there which sockets it gives.
    "server.supervision.processors",
    "commands.bench.offline",
    "model.devices.gpu.card",
}


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
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) == "os.environ"
            and name not in ENVIRONMENT_READERS
        ):
            yield f"{name}:{node.lineno} reads os.environ"
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in FORBIDDEN_CALLS:
            weights = called == "torch.load" and WEIGHTS_ONLY in map(ast.unparse, node.keywords)
            if name != WEIGHTS_READER or not weights:
                yield f"{name}:{node.lineno} calls {called}"


def function_lines() -> Counter[str]:
    """Lines of the functions that have more than MAX_FUNCTION_LINES."""
    found = Counter[str]()
    for name, _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{name}.{node.name}"
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found[place] = max(found[place], length)
    return found


def docstring_problems(name: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield f"{name} has no module docstring"


def _docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where the docstrings of a file begin."""
    owners = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    texts = (
        statement for node in owners for statement in node.body if isinstance(statement, ast.Expr)
    )
    return {
        (text.lineno, text.col_offset)
        for text in texts
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def num_tokens(path: Path, tree: ast.Module) -> int:
    """Python tokens of a file without its docstrings, comments, line ends and indentation."""
    docstrings = _docstrings(tree)
    tokens = tokenize.tokenize(io.BytesIO(path.read_bytes()).readline)
    return sum(
        token.type not in LAYOUT_TOKENS and token.start not in docstrings for token in tokens
    )


def folder_of(path: Path) -> str:
    """The folder whose ceiling counts a file."""
    relative = path.relative_to(ROOT)
    return relative.parts[0] if relative.parts[0] in WHOLE else relative.parent.as_posix()


def tokens() -> Counter[str]:
    """Python tokens by folder."""
    found = Counter[str]()
    for package in (*SERVING, *WHOLE):
        for path in sorted((ROOT / package).rglob("*.py")):
            found[folder_of(path)] += num_tokens(path, ast.parse(path.read_text(encoding="utf-8")))
    return found


def lines() -> Counter[str]:
    """Lines of other languages in what serves."""
    found = Counter[str]()
    for package in SERVING:
        for path in (ROOT / package).rglob("*"):
            ours = not any(part in path.as_posix() for part in NOT_OURS)
            for language, suffixes in LANGUAGES.items():
                if ours and path.suffix in suffixes:
                    found[language] += path.read_text(encoding="utf-8").count("\n")
    return found


def tokens_per_line() -> float:
    """Python tokens for each line of code of what serves: dense lines are hard to read."""
    num_lines, layout = 0, {tokenize.COMMENT, tokenize.NL}
    for package in SERVING:
        for path in (ROOT / package).rglob("*.py"):
            docstrings = _docstrings(ast.parse(path.read_text(encoding="utf-8")))
            read = tokenize.tokenize(io.BytesIO(path.read_bytes()).readline)
            code = [
                token
                for token in read
                if token.type not in LAYOUT_TOKENS | layout and token.start not in docstrings
            ]
            num_lines += len({token.start[0] for token in code})
    return (
        sum(count for folder, count in tokens().items() if folder.split("/")[0] in SERVING)
        / num_lines
    )


def ceilings() -> dict[str, dict[str, int]]:
    """The ceilings of `tokens` and of `lines`."""
    return tomllib.loads(CEILINGS.read_text(encoding="utf-8"))


def excesses(kind: str, counts: Counter[str], most: dict[str, int]) -> list[str]:
    """What exceeds a ceiling, or has none, in words."""
    return [
        f"{name} has {count} {kind}, more than {most.get(name, 0)}"
        for name, count in counts.items()
        if count > most.get(name, 0)
    ]


def problems() -> list[str]:
    """Everything that exceeds a budget, in words."""
    found: list[str] = []
    for name, _, tree in sources():
        found += call_problems(name, tree)
        found += docstring_problems(name, tree)
    most = ceilings()
    found += excesses("Python tokens", tokens(), most["tokens"])
    found += excesses("lines", lines(), most["lines"])
    return found + excesses("lines", function_lines(), most["functions"])


def lower() -> None:
    """Sets each ceiling to today's figure where that is lower, and drops those of folders that are
    gone.
    """
    head = CEILINGS.read_text(encoding="utf-8").partition("\n[")[0]
    text, most = [head], ceilings()
    figures = {"tokens": tokens(), "lines": lines(), "functions": function_lines()}
    for kind, counts in figures.items():
        text += [f"[{kind}]"]
        text += [
            f'"{name}" = {min(counts[name], limit)}'
            for name, limit in most[kind].items()
            if name in counts
        ]
        text += [""]
    CEILINGS.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")


def main() -> int:
    if "--lower" in sys.argv:
        lower()
    counts, most = tokens(), ceilings()["tokens"]
    for name, count in counts.items():
        print(f"{count:8,} of {most.get(name, 0):8,} Python tokens in {name}")
    serving = sum(count for name, count in counts.items() if name.split("/")[0] in SERVING)
    print(
        f"{serving:8,} Python tokens in all of {', '.join(SERVING)}; {tokens_per_line():.1f} a "
        "line of code"
    )
    for language, count in lines().items():
        print(f"{count:8,} lines of {language} in what serves")
    found = problems()
    print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
