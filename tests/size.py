"""The size of the package against its bounds: ``python -m tests.size`` prints it, test_architecture asserts it.

Lines are counted as they stand, docstrings and blank lines included, for the formatter decides how dense they are.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: Lines that a folder of gymdata/, cli/ or a group of them may have. A change beyond its budget deletes elsewhere; the
#: folders of strategies, rewards, losses, formats, codes, charts and sampling parameters have room for one more of these.
BUDGETS: dict[str, int] = {
    ".": 3_999,
    "audit": 1_418,
    "chat": 1_762,
    "check": 2_726,
    "checks": 2_888,
    "cli": 4_348,
    "collect": 4_154,
    "credit": 1_296,
    "demo": 633,
    "doctor": 617,
    "engines": 3_723,
    "environments": 2_120,
    "eval": 441,
    "experience": 2_089,
    "filter": 1_110,
    "finetune": 3_475,
    "genrm": 1_081,
    "interop": 9_780,
    "judge": 2_669,
    "ls": 442,
    "merge": 414,
    "mix": 370,
    "models": 1_751,
    "pairs": 1_691,
    "publish": 584,
    "query": 1_532,
    "record": 5_078,
    "remote": 1_408,
    "report": 2_063,
    "rewards": 2_047,
    "rollouts": 3_404,
    "scan": 589,
    "score": 806,
    "scores": 632,
    "serve": 215,
    "show": 843,
    "status": 342,
    "store": 5_107,
    "sweep": 691,
    "tokenize": 808,
    "tour": 199,
    "train": 7_554,
    "validate": 1_455,
    "view": 4_121,
    "workers": 591,
}
#: What the whole may have, with room for one of them.
TOTAL, FILE_LINES = 89_030, 600
SINGLE_CALLER_HELPERS, OPEN_DICTS, FORMAT_SKIPS = 429, 317, 20
#: Pronouns and participles: what has such a name does not say what it is. How many are left.
PRONOUN = frozenset(
    ["found", "place", "one", "at", "known", "made", "given", "kept", "whole", "held", "mine", "wanted", "said"]
)
PRONOUNS = 7


def sources() -> list[Path]:
    """The Python files of the product, each once (gymdata/cli and gymdata/sample_data lead to the folders at the top)."""
    return sorted([*(ROOT / "gymdata").rglob("*.py"), *(ROOT / "cli").glob("*.py")])


def folder_of(file: Path) -> str:
    """``train`` for gymdata/train/trainers/rl.py, ``cli``, and ``.`` for the files of gymdata/ itself."""
    parts = file.relative_to(ROOT).parts
    return "cli" if parts[0] == "cli" else parts[1] if len(parts) > 2 else "."


def n_lines(file: Path) -> int:
    return file.read_text().count("\n")


def lines_by_folder() -> Counter[str]:
    lines = Counter[str]()
    for file in sources():
        lines[folder_of(file)] += n_lines(file)
    return lines


def single_caller_helpers() -> Iterator[str]:
    """Private functions of a module that are named exactly once in it, besides their own definition."""
    for file in sources():
        tree = ast.parse(file.read_text())
        names = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for function in functions:
            if function.name.startswith("_") and names[function.name] == 1 and not function.decorator_list:
                yield f"{file.relative_to(ROOT)}:{function.lineno} {function.name}"


def count(pattern: str) -> int:
    return sum(len(re.findall(pattern, file.read_text())) for file in sources())


def open_dicts() -> int:
    return count(r"(?:dict|Mapping)\[str, Any\]")


def format_skips() -> int:
    return count(r"# fmt: skip")


def pronouns() -> Iterator[str]:
    """Where a variable, a parameter or a function has a name of ``PRONOUN``."""
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()) if (
                    name in PRONOUN
                ):
                    yield f"{file.relative_to(ROOT)}:{node.lineno} {name}"


def faults() -> list[str]:
    """One sentence for each bound that does not hold."""
    lines = lines_by_folder()
    bounds = [
        *((name, lines[name], budget) for name, budget in BUDGETS.items()),
        ("all lines", lines.total(), TOTAL),
        *((str(file.relative_to(ROOT)), n_lines(file), FILE_LINES) for file in sources()),
        ("private helpers with one caller", len(list(single_caller_helpers())), SINGLE_CALLER_HELPERS),
        ("dict[str, Any]", open_dicts(), OPEN_DICTS),
        ("fmt: skip", format_skips(), FORMAT_SKIPS),
        ("pronouns as names", len(list(pronouns())), PRONOUNS),
    ]
    return [f"{name}: {size:,}, at most {bound:,}" for name, size, bound in bounds if size > bound]


def main() -> int:
    lines = lines_by_folder()
    for name, size in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{name:14}{size:8,}  {f'of {BUDGETS[name]:,}' if name in BUDGETS else ''}")
    longest = max(sources(), key=n_lines)
    tests = [file for file in (ROOT / "tests").rglob("*.py") if "benchmarks" not in file.parts]
    print(f"{'together':14}{lines.total():8,}  of {TOTAL:,}")
    print(f"longest file: {longest.relative_to(ROOT)}, {n_lines(longest)} of {FILE_LINES}")
    print(f"private helpers with one caller: {len(list(single_caller_helpers()))} of {SINGLE_CALLER_HELPERS}")
    print(f"dict[str, Any]: {open_dicts()} of {OPEN_DICTS}; fmt: skip: {format_skips()} of {FORMAT_SKIPS}")
    print(f"pronouns as names: {len(list(pronouns()))} of {PRONOUNS}")
    print(f"tests without benchmarks: {sum(map(n_lines, tests)):,}")
    if "--helpers" in sys.argv:
        print(*single_caller_helpers(), sep="\n")
    if "--pronouns" in sys.argv:
        print(*pronouns(), sep="\n")
    return 1 if faults() else 0


if __name__ == "__main__":
    sys.exit(main())
