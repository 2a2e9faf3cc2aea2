"""Users' code runs apart, and what it raises stays its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from gymdata import user_code
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

late = importlib.import_module("late")

def value():
    import lazy
    return [helper.f, deep.f, lazy.f, late.f]
"""


@pytest.mark.parametrize(
    "changed", ["helper.py", "lib/deep.py", "lib/deeper.py", "lib/__init__.py", "lazy.py", "late.py"]
)
def test_the_source_of_a_users_file_covers_its_helpers(tmp_path: Path, changed: str) -> None:
    """A changed helper of the folder tree, however it is imported, is another source and is what runs; a file that is
    not imported is not part of it."""
    (tmp_path / "lib").mkdir()
    for name in ("helper.py", "lib/deeper.py", "lazy.py", "late.py", "unused.py"):
        (tmp_path / name).write_text("f = 1.0\n")
    (tmp_path / "lib" / "__init__.py").write_text("g = 1.0\n")
    (tmp_path / "lib" / "deep.py").write_text("from .deeper import f\n")
    (tmp_path / "rw.py").write_text(HELPED)
    spec = f"{tmp_path / 'rw.py'}:value"
    value, source = load_symbol(spec, "--reward")
    assert value() == [1.0] * 4
    (tmp_path / "unused.py").write_text("f = 2.0\n")
    assert load_symbol(spec, "--reward")[1] == source
    text = (tmp_path / changed).read_text()
    (tmp_path / changed).write_text(text.replace("1.0", "2.0").replace("import f", "import f as f"))
    _, now = load_symbol(spec, "--reward")
    assert set(now.split("+")) - set(source.split("+")) == {part for part in now.split("+") if part.startswith(changed)}
    assert now != source


@pytest.mark.parametrize("line", ["    from lazy_up.deep import f", "from two_up.deep import f\ndef value():"])
def test_the_source_covers_packages_outside_of_the_folder(tmp_path: Path, line: str) -> None:
    """A package that the file puts on the import path, wherever it lies, is part of its source."""
    package = line.split()[1].partition(".")[0]
    (tmp_path / package).mkdir()
    (tmp_path / package / "deep.py").write_text("f = 1.0\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = tmp_path / "a" / "b" / "rw.py"
    body = line if line.endswith(":") else f"def value():\n{line}"
    file.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{body}\n    return f\n")
    value, source = load_symbol(f"{file}:value", "--reward")
    assert asyncio.run(called(value)) == 1.0
    assert f"+../../{package}/deep.py@" in source
    (tmp_path / package / "deep.py").write_text("f = 2.00\n")  # of another size: compiled files are compared by seconds
    value, now = load_symbol(f"{file}:value", "--reward")
    assert (now != source, asyncio.run(called(value))) == (True, 2.0)


def test_a_helper_that_no_source_covers_is_not_imported_in_a_call(tmp_path: Path) -> None:
    """A module whose name is computed in a call could change unnoticed between two rollouts: it is refused by name."""
    (tmp_path / "computed.py").write_text("f = 1.0\n")
    code = "import importlib\ndef value():\n    return importlib.import_module('comp' + 'uted').f\n"
    (tmp_path / "rw.py").write_text(code)
    value, _ = load_symbol(f"{tmp_path / 'rw.py'}:value", "--reward")
    with pytest.raises(ImportError, match="computed name; import it at the top"):
        asyncio.run(called(value))
    (tmp_path / "rw.py").write_text(f"import computed\n{code}")
    value, source = load_symbol(f"{tmp_path / 'rw.py'}:value", "--reward")
    assert (asyncio.run(called(value)), "+computed.py@" in source) == (1.0, True)


@pytest.mark.parametrize("place", ["elsewhere", "project", "project/rewards"])
def test_a_package_that_was_installed_in_place_is_imported_whenever_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """``pip install -e`` makes it an installed one, which no file's source covers unless it is of the same project."""
    project, metadata = tmp_path / "project", tmp_path / "site" / "in_place-1.dist-info"
    for folder in (project / "src" / "placed", project / "rewards", tmp_path / "elsewhere", metadata):
        folder.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: in-place\nVersion: 1\n")
    (metadata / "direct_url.json").write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))
    (project / "src" / "placed" / "__init__.py").touch()
    (project / "src" / "placed" / "late.py").write_text("f = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(project / "src")
    monkeypatch.chdir(project)
    for name in ("placed", "placed.late"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    user_code.editable.cache_clear()
    file = tmp_path / place / "rw.py"
    file.write_text(
        "import importlib\nimport placed\ndef value():\n    return importlib.import_module('placed.la' + 'te').f\n"
    )
    value, source = load_symbol(f"{file}:value", "--reward")
    assert (asyncio.run(called(value)), "placed" in source) == (1.0, place != "elsewhere")
    user_code.editable.cache_clear()


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


@pytest.mark.parametrize(
    "line", ["import os; os._exit(0)", "from os import _exit; _exit(0)", "import sys; sys.exit(0)"]
)
def test_a_file_that_ends_the_process_cannot_be_imported(tmp_path: Path, line: str) -> None:
    """It is an error with its line, not the end of the command with exit code 0."""
    (tmp_path / "quits.py").write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"cannot be imported: RuntimeError: SystemExit: 0 \(.*quits\.py:1\)"):
        load_symbol(f"{tmp_path}/quits.py:f", "--env")


def test_a_function_that_was_imported_by_name_does_not_end_the_process(tmp_path: Path) -> None:
    """``from os import _exit`` in the file is held, too, in a thread and in the loop."""
    (tmp_path / "quits.py").write_text("from os import _exit\ndef f():\n    _exit(0)\nasync def g():\n    _exit(0)\n")
    for name in ("f", "g"):
        function, _ = load_symbol(f"{tmp_path}/quits.py:{name}", "--env")
        with pytest.raises(RuntimeError, match="SystemExit: 0"):
            asyncio.run(called(function))
