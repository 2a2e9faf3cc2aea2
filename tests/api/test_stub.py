"""What editors and type checkers know of the public functions."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import gymdata

ROOT = Path(gymdata.__file__).parent.parent
STUB = runpy.run_path(str(ROOT / ".ci" / "public_stub.py"))["stub"]()
FUNCTIONS = {node.name: node.args for node in ast.parse(STUB).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_stub_has_the_parameters_of_the_function_and_its_settings(name: str) -> None:
    """The stub that the build writes names what the function's signature does, with each setting of its class in the place
    of ``settings``, and no docstring has a parameter ``settings``."""
    arguments = FUNCTIONS[name]
    several = filter(None, [arguments.vararg, arguments.kwarg])
    names = {arg.arg for arg in [*arguments.args, *arguments.kwonlyargs, *several]}
    written = inspect.signature(getattr(gymdata, name)).parameters
    kind = getattr(gymdata, re.findall(r"\w+Config", str(written["config"].annotation))[0])
    # A trainer takes the keys of the library's own settings as well.
    rest = set() if "trainer" in kind.model_fields else {"settings"}
    assert names == (set(written) - rest) | (set(kind.model_fields) - {"trainer", "path"})
    assert "``settings``" not in str(inspect.getdoc(getattr(gymdata, name)))


def test_every_function_with_a_settings_class_is_in_the_stub() -> None:
    """Editors complete the settings of every public function that takes them as keywords."""
    configured = {name for name in gymdata.__all__ if name.islower() and "config" in parameters_of(name)}
    assert configured - set(FUNCTIONS) == {"finetune"}  # whose ``config`` is a file


def parameters_of(name: str) -> set[str]:
    value = getattr(gymdata, name)
    return set(inspect.signature(value).parameters) if inspect.isfunction(value) else set()


def test_the_stub_has_the_default_of_a_setting() -> None:
    names = {
        arg.arg: default
        for arg, default in zip(FUNCTIONS["pairs"].kwonlyargs, FUNCTIONS["pairs"].kw_defaults, strict=True)
    }
    assert ast.unparse(names["strategy"] or ast.Constant(None)) == "'best-worst'"


def test_a_type_checker_reads_the_stub(tmp_path: Path) -> None:
    """mypy takes a right call and names a wrong setting."""
    package = tmp_path / "stubs" / "gymdata"
    package.mkdir(parents=True)
    (package / "__init__.pyi").write_text(STUB)
    (tmp_path / "calls.py").write_text(
        'import gymdata\ngymdata.pairs("runs/x", strategy="all")\ngymdata.pairs("runs/x", strategi="all")\n'
    )
    words = ["--no-incremental", "--follow-imports", "silent", "--config-file", "", "calls.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words],
        cwd=tmp_path,
        env={"MYPYPATH": "stubs", "PATH": ""},
        capture_output=True,
        text=True,
    )
    faults = [line for line in done.stdout.splitlines() if line.startswith("calls.py") and " error: " in line]
    assert [line.split(": ")[0] for line in faults] == ["calls.py:3"], done.stdout + done.stderr
