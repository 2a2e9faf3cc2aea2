"""The three rules of the layout hold: what a folder may import, where heavy libraries live, and what stays pure."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Shared by everything; imports none of the others.
KERNEL = {
    "rollouts", "checks", "store", "errors", "installed", "settings", "urls", "progress", "stats", "http",
    "user_code", "public", "workers", "registry", "texts",
}  # fmt: skip
#: Public maths: pure, imports the kernel only.
MATHS = {"credit", "genrm", "curriculum", "losses", "tokens"}
#: Where tokens, worlds and rewards come from; they import the kernel and each other along PLUG_EDGES.
PLUGS = {"models", "chat", "engines", "environments", "rewards", "formats"}
PLUG_EDGES = {
    ("chat", "models"), ("engines", "models"), ("environments", "models"), ("rewards", "models"),
    # An export takes a score where one is named, and Tinker's holds what a training here would read.
    ("formats", "scores"), ("formats", "train"),
}  # fmt: skip
#: A command's folder may use these modules of another command's folder, and no more. ``*``: any.
EDGES = {
    **{
        (command, "scores"): {"chosen"}
        for command in ("pairs", "experience", "filter", "train", "show", "report", "view", "import_export")
    },
    ("collect", "check"): {"run"},
    ("collect", "validate"): {"rollouts"},
    ("collect", "record"): {"agent", "attempts", "presets"},
    ("check", "collect"): {"task_shapes", "tasks"},
    ("check", "import_export"): {"rendering", "rows", "run", "summaries"},
    ("check", "validate"): {"rollouts", "run"},
    ("record", "collect"): {"*"},
    ("audit", "validate"): {"run"},
    ("pairs", "judge"): {"groups"},
    ("eval", "collect"): {"report", "run", "settings", "tasks"},
    ("eval", "report"): {"compare", "rollouts", "run"},
    ("finetune", "collect"): {"*"},
    ("finetune", "experience"): {"settings"},
    ("finetune", "judge"): {"settings"},
    ("finetune", "pairs"): {"settings"},
    ("finetune", "train"): {"settings", "trainer_settings"},
    ("train", "import_export"): {"run", "splitting"},
    ("train", "pairs"): {"run"},
    ("demo", "judge"): {"groups"},
    ("filter", "query"): {"views"},
    ("view", "filter"): {"columns", "conditions"},
    ("view", "judge"): {"groups"},
    ("view", "train"): {"losses"},
    ("view", "query"): {"views"},
    ("report", "show"): {"run", "rollout"},
    ("view", "report"): {"charts", "drawing", "rollouts", "sampling"},
    ("view", "show"): {"conversations", "rollout"},
    ("report", "validate"): {"run"},
    ("finetune", "report"): {"run"},
    ("demo", "report"): {"run"},
    ("sweep", "finetune"): {"jobs"},
    ("sweep", "report"): {"rollouts"},
    ("sweep", "scores"): {"chosen"},
    ("doctor", "pairs"): {"run"},
    ("doctor", "validate"): {"run"},
}
HEAVY = {"torch", "vllm", "trl", "transformers", "ray", "datasets", "accelerate", "peft", "numba"}
#: What pure modules never touch: the outside, the clock and hidden randomness.
IMPURE = {"os", "io", "pathlib", "time", "datetime", "logging", "random", "subprocess", "socket", "asyncio", "tempfile"}
PURE = ("rollouts", "checks", "credit", "genrm", "curriculum.py", "losses.py", "tokens.py")

#: Python files of the product, each once (gymdata/cli and gymdata/sample_data lead to the folders at the top).
SOURCES = sorted([*(ROOT / "gymdata").rglob("*.py"), *(ROOT / "cli").glob("*.py")])
#: Lines of all of them, as they stand. It only falls.
LINES = 70_474


def name_of(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts = ["gymdata", *parts] if parts[0] == "cli" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in SOURCES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def module_of(name: str) -> str:
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imports(file: Path) -> Iterator[str]:
    """Every name that a file imports, at module level, within functions and for types; relative ones in full."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name_of(file).split(".") if file.stem == "__init__" else name_of(file).split(".")[:-1]
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def ours(file: Path) -> set[str]:
    return {module_of(n) for n in imports(file) if n.startswith("gymdata.")}


def place_of(module: str) -> list[str]:
    """The room of a module and what is below it: rooms of commands are in gymdata/commands."""
    parts = module.split(".")[1:] or [""]
    return parts[1:] if parts[0] == "commands" and len(parts) > 1 else parts


def folder_of(module: str) -> str:
    return place_of(module)[0]


def allowed(here: str, there: str, module: str) -> bool:
    if there in ("", here) or here in ("cli", "__main__"):
        return True
    if here == "":
        return True
    if here in KERNEL:
        return there in KERNEL
    if here in MATHS:
        return there in KERNEL
    if here in PLUGS:
        return there in KERNEL or (here, there) in PLUG_EDGES
    if there in KERNEL | MATHS | PLUGS:
        return True
    used = EDGES.get((here, there), set())
    return "*" in used or place_of(module)[1] in used


def test_a_folder_imports_only_what_it_may():
    """Commands import kernel, maths and plugs, and another command along a declared edge; plugs import the kernel."""
    refused = [
        f"{name} imports {other}"
        for name, file in MODULES.items()
        for other in sorted(ours(file))
        if not allowed(folder_of(name), folder_of(other), other)
    ]
    assert not refused


def test_every_declared_edge_is_used():
    """An edge that no import needs any more is taken out of the list."""
    used = {(folder_of(name), folder_of(m)) for name, file in MODULES.items() for m in ours(file)}
    assert not (set(EDGES) | PLUG_EDGES) - used


def test_every_module_that_is_imported_exists():
    """No import of gymdata names a module that was moved, within functions and for types too (mypy passes over those)."""
    known = MODULES.keys() | {"gymdata.sample_data"}
    stale = [
        f"{file.relative_to(ROOT)}: {node.module}"
        for file in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / ".ci").glob("*.py")]
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gymdata"
        if node.module not in known and not (node.module or "").startswith("gymdata.sample_data.")
    ]
    assert not stale


def test_a_file_that_a_message_names_is_there():
    """Hints that send the reader to a file of ours name one that exists."""
    gone = [
        f"{file.relative_to(ROOT)}: {named}"
        for file in SOURCES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for named in re.findall(r"\bgymdata/[\w/]+(?:\.py)?", node.value)
        if not (ROOT / named).exists()
    ]
    assert not gone


def test_no_modules_import_each_other_in_a_circle():
    """The graph of imports has no cycle: at module level, within functions, or for types alone."""
    graph = {name: ours(file) - {name} for name, file in MODULES.items()}
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                walk(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        walk(name, ())


def test_heavy_libraries_live_in_files_named_for_them():
    """torch, vllm and the like are imported in ``_torch.py``, ``_vllm.py`` … or below ``train/trainers/`` only."""
    named = [f for f in SOURCES if (f.stem.startswith("_") and f.stem != "__init__") or "trainers" in f.parts]
    assert not [f for f in SOURCES if f not in named and {n.split(".")[0] for n in imports(f)} & HEAVY]


def test_pure_modules_touch_nothing_outside():
    """Rollouts and the public maths have no I/O, no clock, no logging and no unseeded randomness."""
    pure = [f for f in SOURCES if f.relative_to(ROOT).parts[1] in PURE]
    assert not [f for f in pure if {n.split(".")[0] for n in imports(f)} & IMPURE or "default_rng()" in f.read_text()]


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["query", "--help"], ["validate", "--help"],
                                     ["collect", "--help"], ["pairs", "--help"]])  # fmt: skip
def test_help_never_loads_a_heavy_library(command: list[str]):
    """No heavy library is in sys.modules after a light command."""
    code = (
        "import sys; from gymdata.cli.main import main; code = main(sys.argv[1:]); "
        f"loaded = {HEAVY!r} & set(sys.modules); sys.exit(f'loaded {{loaded}}' if loaded or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_product_only_gets_smaller():
    """Its lines are at most what they were; who adds removes as many."""
    assert sum(file.read_text().count("\n") for file in SOURCES) <= LINES
