"""Users' code runs apart, and what it raises stays its own."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path

import pytest

from gymdata.errors import DataError, UsageError
from gymdata.settings import read_yaml
from gymdata.user_code import called, in_thread, load_symbol


@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt, StopIteration])
def test_code_that_would_end_the_process_is_only_an_error(fault: type[BaseException]):
    """Exceptions that mean "stop" to Python come back as errors of the code that raised them."""

    def leave() -> None:
        raise fault

    with pytest.raises(RuntimeError, match=fault.__name__):
        asyncio.run(in_thread(leave))


def test_a_mistyped_file_is_answered_with_its_neighbour(tmp_path: Path):
    """A Python file or a configuration that is not there names the nearest file of its folder."""
    (tmp_path / "calculator.py").touch()
    (tmp_path / "dpo.yaml").touch()
    with pytest.raises(UsageError, match=r"no such file\n.*did you mean 'calculator\.py'\?"):
        load_symbol(f"{tmp_path}/calculater.py:Calculator", "--env")
    with pytest.raises(DataError, match=r"did you mean 'dpo\.yaml'\?"):
        read_yaml(tmp_path / "dpoo.yaml")
    with pytest.raises(DataError, match="no such file or folder"):
        read_yaml(tmp_path / "gone" / "dpo.yaml")


HELPED = """
import importlib
import helper
from lib import deep
from json import dumps

late = importlib.import_module("la" + "te")

def value():
    return [helper.f, deep.f, late.f]
"""


@pytest.mark.parametrize("changed", ["helper.py", "lib/deep.py", "lib/deeper.py", "lib/__init__.py", "late.py"])
def test_the_source_of_a_users_file_covers_its_helpers(tmp_path: Path, changed: str) -> None:
    """A changed helper of the folder tree, however the file imports it at its top, is another source and is what runs; a
    file that is not imported is not part of it."""
    (tmp_path / "lib").mkdir()
    for name in ("helper.py", "lib/deeper.py", "late.py", "unused.py"):
        (tmp_path / name).write_text("f = 1.0\n")
    (tmp_path / "lib" / "__init__.py").write_text("g = 1.0\n")
    (tmp_path / "lib" / "deep.py").write_text("from .deeper import f\n")
    (tmp_path / "rw.py").write_text(HELPED)
    spec = f"{tmp_path / 'rw.py'}:value"
    value, source = load_symbol(spec, "--reward")
    assert value() == [1.0] * 3
    (tmp_path / "unused.py").write_text("f = 2.0\n")
    assert load_symbol(spec, "--reward")[1] == source
    text = (tmp_path / changed).read_text()
    (tmp_path / changed).write_text(text.replace("1.0", "2.0").replace("import f", "import f as f"))
    value, now = load_symbol(spec, "--reward")
    assert set(now.split("+")) - set(source.split("+")) == {part for part in now.split("+") if part.startswith(changed)}
    assert now != source
    assert (2.0 in value()) == (changed in ("helper.py", "lib/deeper.py", "late.py"))


def test_what_else_was_loaded_changes_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two files of a folder, each has its own helpers; a helper that the caller imported is covered, too, and stays the
    caller's."""
    for name, helper in (("one", "first"), ("two", "second")):
        (tmp_path / f"{name}.py").write_text(f"import {helper}_helper\n\ndef value(): ...\n")
        (tmp_path / f"{helper}_helper.py").write_text("f = 1.0\n")
    sources = [load_symbol(f"{tmp_path}/{name}.py:value", "--reward")[1] for name in ("one", "two", "one", "two")]
    assert sources[:2] == sources[2:]
    assert [source.count("+") for source in sources] == [1] * 4
    (tmp_path / "third_helper.py").write_text("f = 1.0\n")
    (tmp_path / "one.py").write_text("import third_helper\n\ndef value(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    callers = importlib.import_module("third_helper")
    assert "+third_helper.py@" in load_symbol(f"{tmp_path}/one.py:value", "--reward")[1]
    assert sys.modules.pop("third_helper") is callers


def test_a_changed_helper_is_what_runs_next(tmp_path: Path) -> None:
    """Loaded again in the same process, a file runs with its helper as it is now, and never with another folder's."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"f = {name!r}\n")
        (tmp_path / name / "rw.py").write_text("import helper\n\ndef value():\n    return helper.f\n")
    first, _ = load_symbol(f"{tmp_path}/a/rw.py:value", "--reward")
    other, _ = load_symbol(f"{tmp_path}/b/rw.py:value", "--reward")
    (tmp_path / "a" / "helper.py").write_text("f = 'c'\n")
    again, _ = load_symbol(f"{tmp_path}/a/rw.py:value", "--reward")
    assert [first(), other(), again()] == ["a", "b", "c"]


def test_a_file_that_exits_cannot_be_imported(tmp_path: Path) -> None:
    """It is an error with its line, not the end of the command with exit code 0."""
    (tmp_path / "quits.py").write_text("import sys; sys.exit(0)\n")
    with pytest.raises(UsageError, match=r"cannot be imported: SystemExit: 0 \(.*quits\.py:1\)"):
        load_symbol(f"{tmp_path}/quits.py:f", "--env")


def test_a_function_that_exits_does_not_end_the_process(tmp_path: Path) -> None:
    """In a thread and in the loop."""
    (tmp_path / "quits.py").write_text("from sys import exit\ndef f():\n    exit(0)\nasync def g():\n    exit(0)\n")
    for name in ("f", "g"):
        function, _ = load_symbol(f"{tmp_path}/quits.py:{name}", "--env")
        with pytest.raises(RuntimeError, match="SystemExit: 0"):
            asyncio.run(called(function))
