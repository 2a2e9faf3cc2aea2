"""A seeded sample of small faults planted in the code, and which of them the tests of its room find.

``python -m tests.mutants OUT.json [ROOM …]`` copies the tree, plants one fault at a time (a comparison or sign turned round,
an ``and`` for an ``or``, a condition negated, a number one too large) and runs the room's tests until one fails: first
those that reach the line, then all, for a process that a test starts reaches lines that no one sees. A fault is named
by its function, so that the same functions can be tried again after a rewrite: ``--again FIRST.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parent.parent
#: The code of each room and the tests that have to find what is wrong in it.
ROOMS: dict[str, tuple[str, list[str]]] = {
    "rollouts": ("gymdata/rollouts", ["tests/rollouts", "tests/validate"]),
    "store": ("gymdata/store", ["tests/store"]),
    "credit": ("gymdata/credit", ["tests/credit"]),
    "losses": (
        "gymdata/commands/train/losses",
        ["tests/train/trainers/test_losses.py", "tests/train/trainers/test_rl_losses.py"],
    ),
    "pairs": ("gymdata/commands/pairs", ["tests/pairs"]),
    "curriculum": ("gymdata/curriculum.py", ["tests/test_curriculum.py"]),
}
SAMPLE, SEED, LIMIT_S = 25, 57, 900
QUICK = "not full and not engine and not ray and not browser and not wheel and not store"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", QUICK]
OPERATORS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
}  # fmt: skip


@dataclass
class Mutant:
    """One planted fault: ``site`` counts the places of its function, in the order of the source."""

    room: str
    file: str
    function: str
    site: int
    line: int
    before: str
    after: str
    killed: bool | None = None


def changed(node: ast.AST, source: str) -> str | None:
    """The source of ``node`` with its fault, or None where none is known for it."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in OPERATORS:
            return f"{text(left)} {OPERATORS[type(operator)]} {text(right)}"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            return f"({text(left)}) {OPERATORS[type(operator)]} ({text(right)})"
        case ast.BoolOp(op=operator, values=values):
            return (" or " if isinstance(operator, ast.And) else " and ").join(f"({text(v)})" for v in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return text(operand)
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() as value):
            return str(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({text(body)}) if not ({text(test)}) else ({text(orelse)})"
    return None


def places(room: str, file: Path) -> Iterator[tuple[Mutant, ast.expr]]:
    """Every fault that can be planted in the functions of a file."""
    source = file.read_text()

    def of(body: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(body):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{name}.{child.name}".lstrip(".")
                yield from ((inner, child),) if not isinstance(child, ast.ClassDef) else ()
                yield from of(child, inner)

    for name, function in of(ast.parse(source), ""):
        nodes = [n for part in function.body for n in ast.walk(part) if isinstance(n, ast.expr)]
        nodes.sort(key=lambda n: (n.lineno, n.col_offset, -(n.end_col_offset or 0)))
        for site, node in enumerate(nodes):
            before, after = ast.get_source_segment(source, node), changed(node, source)
            if before and after and after != before:
                where = str(file.relative_to(ROOT))
                yield Mutant(room, where, name, site, node.lineno, before, after), node


def sample(room: str) -> list[tuple[Mutant, ast.expr]]:
    path = ROOT / ROOMS[room][0]
    every = [place for f in (sorted(path.rglob("*.py")) if path.is_dir() else [path]) for place in places(room, f)]
    return random.Random(f"{room} {SEED}").sample(every, min(SAMPLE, len(every)))


def again(room: str, first: list[Mutant]) -> list[tuple[Mutant, ast.expr]]:
    """Faults in the functions that ``first`` names, one for one where the function is still there."""
    path = ROOT / ROOMS[room][0]
    every = [place for f in (sorted(path.rglob("*.py")) if path.is_dir() else [path]) for place in places(room, f)]
    found = []
    for mutant in (m for m in first if m.room == room):
        inside = [p for p in every if p[0].function.split(".")[-1] == mutant.function.split(".")[-1]]
        same = [p for p in inside if (p[0].before, p[0].after) == (mutant.before, mutant.after)]
        found += (same or inside)[:1]
    return found


def plant(tree: Path, mutant: Mutant, node: ast.expr) -> str:
    """Writes the fault into the copy; returns what was there."""
    file = tree / mutant.file
    source = file.read_text()
    lines = source.encode().split(b"\n")
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    start = sum(len(line) + 1 for line in lines[: node.lineno - 1]) + node.col_offset
    end = sum(len(line) + 1 for line in lines[: node.end_lineno - 1]) + node.end_col_offset
    data = source.encode()
    file.write_bytes(data[:start] + mutant.after.encode() + data[end:])
    return source


def reached(tree: Path, room: str, environment: dict[str, str], folder: Path) -> dict[tuple[str, int], list[str]]:
    """The tests of a room that reach each line of its code, from one run that measures them."""
    settings = folder / f"{room}.coverage.ini"
    settings.write_text("[run]\nparallel = false\n")
    data = folder / f"{room}.coverage"
    code = ROOMS[room][0].removesuffix(".py")
    measured = [f"--cov={code}", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    subprocess.run(
        [*PYTEST, *measured, *ROOMS[room][1]], cwd=tree, env={**environment, "COVERAGE_FILE": str(data)}, check=True
    )
    lines = CoverageData(str(data))
    lines.read()
    tests: dict[tuple[str, int], list[str]] = {}
    for file in lines.measured_files():
        for line, contexts in lines.contexts_by_lineno(file).items():
            names = sorted({context.rpartition("|")[0] for context in contexts} - {""})
            tests[str(Path(file).relative_to(tree)), line] = names
    return tests


def is_killed(tests: list[str], tree: Path, environment: dict[str, str]) -> bool:
    try:
        run = subprocess.run([*PYTEST, "-x", *tests], cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True
    if run.returncode not in (0, 1, 2):  # neither passed, failed nor an import that breaks
        raise RuntimeError(f"pytest ended with {run.returncode}: {run.stdout.decode()[-500:]}")
    return run.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("rooms", nargs="*", default=list(ROOMS))
    parser.add_argument("--again", type=Path, help="try the functions of this earlier result")
    given = parser.parse_args()
    results = [Mutant(**row) for row in json.loads(given.output.read_text())] if given.output.exists() else []
    done = {(m.room, m.file, m.function, m.site, m.after) for m in results}
    first = [Mutant(**row) for row in json.loads(given.again.read_text())] if given.again else []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__")
        )
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        for room in given.rooms:
            tests = reached(tree, room, environment, Path(folder))
            for mutant, node in again(room, first) if first else sample(room):
                if (mutant.room, mutant.file, mutant.function, mutant.site, mutant.after) in done:
                    continue
                source = plant(tree, mutant, node)
                near = tests.get((mutant.file, mutant.line), [])
                mutant.killed = (bool(near) and is_killed(near, tree, environment)) or is_killed(
                    ROOMS[room][1], tree, environment
                )
                (tree / mutant.file).write_text(source)
                results.append(mutant)
                given.output.write_text(json.dumps([asdict(m) for m in results], indent=1) + "\n")
                print(room, mutant.file, mutant.line, mutant.function, mutant.before, "→", mutant.after, mutant.killed)
    for room in given.rooms:
        of_room = [m for m in results if m.room == room]
        print(f"{room}: {sum(bool(m.killed) for m in of_room)} of {len(of_room)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
