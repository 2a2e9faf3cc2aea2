"""The floors hold, and light commands stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "gymdata.installed": -1,
    "gymdata.errors": 0,
    "gymdata.core": 1,
    "gymdata.config": 2,
    "gymdata.store": 2,
    "gymdata.ports": 3,
    "gymdata.stages": 4,
    "gymdata.adapters": 4,
    "gymdata.serve": 5,
    "gymdata.api": 6,
    "gymdata_cli": 7,
}
#: One file an outside system, and what speaks HTTP, passes Ctrl-C on or finds models for several of them.
SHARED_BY_ADAPTERS = {"children", "http_client", "local_models"}
HEAVY = {"torch", "vllm", "trl", "transformers", "datasets", "accelerate", "peft", "matplotlib", "numba"}
#: What `core` may never touch: the outside, the clock and hidden randomness.
IMPURE = {"os", "io", "pathlib", "time", "datetime", "logging", "random", "subprocess", "socket", "asyncio", "tempfile"}


def module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts[0] = {"cli": "gymdata_cli"}.get(parts[0], parts[0])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str | None:
    return next((name for name in FLOORS if module == name or module.startswith(name + ".")), None)


def imports(tree: ast.AST, module: str) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


SOURCES = sorted([*(ROOT / "gymdata").rglob("*.py"), *(ROOT / "cli").glob("*.py")])


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_module_imports_only_lower_floors(file: Path):
    """errors → core → config, store → ports → stages | adapters → serve → api → cli, and neighbours stay apart."""
    module = module_name(file)
    mine = floor_of(module)
    if mine is None:
        return
    for name in imports(ast.parse(file.read_text()), module):
        theirs = floor_of(name)
        if theirs is None or theirs == mine:
            if theirs == "gymdata.adapters" and name.split(".")[2] not in SHARED_BY_ADAPTERS:
                assert name.split(".")[2] == module.split(".")[2], f"{module} imports its neighbour {name}"
            continue
        assert FLOORS[theirs] < FLOORS[mine], f"{module} (floor {mine}) imports {name} (floor {theirs})"


@pytest.mark.parametrize("file", sorted((ROOT / "gymdata" / "core").rglob("*.py")), ids=lambda f: f.name)
def test_the_core_touches_nothing_outside(file: Path):
    """core has no I/O, no clock, no logging and no unseeded randomness."""
    names = {name.split(".")[0] for name in imports(ast.parse(file.read_text()), "gymdata.core")}
    assert not names & IMPURE
    assert "default_rng()" not in file.read_text()


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["query", "--help"], ["validate", "--help"],
                                     ["collect", "--help"], ["pairs", "--help"]])  # fmt: skip
def test_help_never_loads_a_heavy_library(command: list[str]):
    """No heavy library is in sys.modules after a light command."""
    code = (
        "import sys; from gymdata_cli.main import main; code = main(sys.argv[1:]); "
        f"loaded = {HEAVY!r} & set(sys.modules); sys.exit(f'loaded {{loaded}}' if loaded or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_stay_small_enough_to_read():
    """A file of the package over 800 lines is a design question."""
    long = {str(f.relative_to(ROOT)): n for f in SOURCES if (n := len(f.read_text().splitlines())) > 800}
    assert not long
