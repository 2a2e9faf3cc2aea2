"""A run.json that says nothing is one clear error for every command, and no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.errors import DataError
from gymdata.store import Run, read_run_json, resolve
from tests.rollout_files import rollout, two_turns, write_run
from tests.store.conftest import make_row

COMMANDS = [
    ["validate", "RUN"],
    ["validate", "RUN", "--fix", "drop", "-o", "OUT.parquet"],
    ["validate", "RUN/rollouts/part-00000.parquet"],
    ["query", "SELECT count(*) FROM rollouts", "RUN"],
    ["pairs", "RUN"],
    ["score", "RUN", "--reward", "numeric"],
    ["experience", "RUN"],
    ["export", "RUN", "-o", "OUT.jsonl", "--format", "trl-messages"],
]


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", '{"run_id": "r", "files": ["x"]}'])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c[:3]))
def test_one_clear_error(tmp_path: Path, command: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the file by name, and what to do."""
    run = write_run(tmp_path / "run", [rollout("t0", i, float(i), two_turns(1, 5 + i)) for i in range(2)])
    (run / "run.json").write_text(text)
    assert main([w.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for w in command]) == 2
    said = capsys.readouterr().err
    assert f"error: {run / 'run.json'}: cannot be read" in said
    assert "restore it from a copy" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: {"stage": "collcet"}, 'stage: got "collcet"'),
        (lambda entry: {"files": [entry, entry]}, "rollouts/part-00000.parquet is named twice"),
        (
            lambda entry: {"files": [entry | {"bytes": None}]},
            "rollouts/part-00000.parquet is without its bytes or its xxh3",
        ),
        (
            lambda entry: {"files": [entry | {"xxh3": None}]},
            "rollouts/part-00000.parquet is without its bytes or its xxh3",
        ),
    ],
)
def test_a_closed_run_names_each_file_once_with_its_hash(
    tmp_path: Path, change: Callable[[Any], dict[str, Any]], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no command writes is not believed."""
    with Run.open(tmp_path / "run", identity={}, extent={}, operation={}) as run:
        run.append(make_row(0))
    file = tmp_path / "run" / "run.json"
    facts = json.loads(file.read_text())
    (entry,) = facts["files"]
    assert main(["query", "SELECT count(*) FROM rollouts", str(file.parent)]) == 0
    file.write_text(json.dumps(facts | change(entry)))
    assert main(["query", "SELECT count(*) FROM rollouts", str(file.parent)]) == 2
    assert said in capsys.readouterr().err


def test_the_files_beside_it_are_read_by_a_glob(tmp_path: Path) -> None:
    """What the error advises works."""
    run = write_run(tmp_path / "run", [rollout("t0", 0, 1.0, two_turns(1, 5))])
    (run / "run.json").write_text("{}")
    with pytest.raises(DataError, match="describes no run"):
        read_run_json(run)
    assert len(resolve(f"{run}/rollouts/*.parquet")) == 1
