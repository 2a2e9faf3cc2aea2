"""The generated schemas are fresh, and say what is written."""

from __future__ import annotations

import filecmp
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gymdata.rollouts.schema import TABLES

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "schemas"
WRITER = runpy.run_path(str(ROOT / ".ci" / "table_schemas.py"))


def test_the_schemas_in_the_repository_are_fresh():
    """schemas/ is what this code generates; `python .ci/table_schemas.py --write schemas/` renews it."""
    assert WRITER["stale"](SCHEMAS) == []


def test_schemas_and_pages_are_written_without_torch(tmp_path: Path):
    """`make schemas` needs none of the libraries that train or sample: each of its lines writes without them what is in
    the repository."""
    root = SCHEMAS.parent
    recipe = (root / "Makefile").read_text().split("\nschemas:")[1].split("\n\n")[0]
    lines = re.findall(r"^\t\$\(BIN\)/python (.*) (\S+)$", recipe, re.MULTILINE)
    assert len(lines) == recipe.count("\n")
    for name in ("torch", "transformers", "trl", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')")
    for number, (words, folder) in enumerate(lines):
        shutil.copytree(root / folder, tmp_path / str(number))
        subprocess.run(
            [sys.executable, *words.split(), str(tmp_path / str(number))],
            check=True,
            cwd=root,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        )
        assert not filecmp.dircmp(root / folder, tmp_path / str(number)).diff_files


def test_a_stale_schema_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A changed, a missing and a left-over file each fail the check."""
    assert WRITER["main"](["--write", str(tmp_path)]) == 0
    assert WRITER["main"](["--check", str(tmp_path)]) == 0
    (tmp_path / "pairs.schema.json").write_text("{}")
    (tmp_path / "scores.schema.json").unlink()
    (tmp_path / "old.schema.json").write_text("{}")
    (tmp_path / "run.schema.json").unlink()
    assert WRITER["main"](["--check", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count(": stale;") == 4


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_column_is_described(table):
    """A schema has the columns of its table, and requires those that may not be null."""
    schema = WRITER["json_schema"](table)
    assert [name for name in schema["properties"] if name != "crc32"] == table.schema.names
    assert set(schema["required"]) == {f.name for f in table.schema if not f.nullable and f.name not in table.optional}


def test_rows_that_are_written_are_valid_and_others_are_not():
    """The sample row passes; a changed type, a missing column and an unknown one do not."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((SCHEMAS / "scores.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    row = {"rollout_id": "a", "name": "exact", "value": "NaN", "status": "scored", "source": "f", "run_id": "r"}
    assert check.is_valid(row)
    assert check.is_valid(row | {"value": None, "detail": "why"})
    assert not check.is_valid(row | {"value": "1.0"})
    assert not check.is_valid(row | {"status": "guessed"})
    assert not check.is_valid(row | {"surprise": 1})
    assert not check.is_valid({k: v for k, v in row.items() if k != "run_id"})
