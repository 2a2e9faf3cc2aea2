"""run.json is one model for every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

import gymdata
from gymdata.cli.main import main
from gymdata.errors import StoreError
from gymdata.settings import Config
from gymdata.store import write_run_json
from gymdata.store.run_json import differences
from tests.rollout_files import rollout, two_turns, write_run

SCHEMA = Path(__file__).parents[2] / "schemas" / "run.schema.json"
KEYS = {
    "gymdata", "command", "stage", "config", "identity", "extent", "attempts", "files", "schemas", "parents", "counts",
    "notes",
}  # fmt: skip


def run_of(folder: Path) -> Path:
    rows = [rollout(f"t{k}", i, float(i), two_turns(1, 5 + i + 10 * k)) for k in range(3) for i in range(3)]
    return write_run(folder, rows)


@pytest.mark.parametrize(
    ("words", "schemas"),
    [
        (["filter", "RUN", "-o", "OUT", "--where", "reward > 0"], {"rollouts"}),
        (["filter", "RUN", "-o", "OUT", "--split-by", "task"], {"rollouts"}),
        (["pairs", "RUN", "-o", "OUT"], {"pairs"}),
        (["experience", "RUN", "-o", "OUT"], {"experiences"}),
        (["score", "RUN", "--reward", "REWARD.py:length", "-o", "OUT"], {"scores"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_command_writes_the_same_model(tmp_path: Path, words: list[str], schemas: set[str]):
    """The run.json of each command fits schemas/run.schema.json, with the command as a list of words as typed."""
    jsonschema = pytest.importorskip("jsonschema")
    run = run_of(tmp_path / "run")
    (tmp_path / "reward.py").write_text(
        "def length(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    out, reward = str(tmp_path / "out"), str(tmp_path / "reward")
    typed = [w.replace("RUN", str(run)).replace("OUT", out).replace("REWARD", reward) for w in words]
    main(typed)
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(facts)
    assert facts.keys() >= KEYS
    assert facts["command"] == ["gymdata", *typed]
    assert facts["schemas"].keys() == schemas


def test_a_value_of_another_type_is_not_written(tmp_path: Path):
    """A defect in a command shows where the file would be written, not where somebody reads it."""
    with pytest.raises(ValidationError, match="command"):
        write_run_json(tmp_path, {"stage": "pairs", "command": "gymdata pairs runs/a"})
    assert not (tmp_path / "run.json").exists()


def test_a_missing_setting_is_compared_with_its_default(tmp_path: Path) -> None:
    """A setting that the run.json of pairs lacks blocks nothing unless it was changed."""
    run = write_run(tmp_path / "run", [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(2)])
    gymdata.pairs(run, output=tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    del facts["config"]["strategy"], facts["config"]["min_margin"]
    (tmp_path / "out" / "run.json").write_text(json.dumps(facts))
    gymdata.pairs(run, output=tmp_path / "out")
    (tmp_path / "out" / "run.json").write_text(json.dumps(facts))
    with pytest.raises(StoreError, match="min_margin"):
        gymdata.pairs(run, output=tmp_path / "out", min_margin=0.5)


def test_a_section_has_the_defaults_of_its_settings() -> None:
    """Settings in a section that is there count as unset where a record lacks them; a new section does not."""

    class Section(Config):
        size: int = 1
        name: str = "a"

    class Outer(Config):
        named: dict[str, Section]
        one: Section = Section()
        other: Section | None = None

    config = Outer(named={"x": Section(size=2)}, other=Section(size=3))
    recorded = {"named": {"x": {"size": 2}}, "one": {}, "other": None}
    assert differences(recorded, config.model_dump(), config.defaults()) == [
        ("other.name", None, "a"),
        ("other.size", None, 3),
    ]


def test_a_run_json_of_a_newer_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command that reads it, before any row is."""
    run = run_of(tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "schemas": {"rollouts": 99}}))
    assert main(["validate", str(run)]) != 0
    assert "99" in capsys.readouterr().err
