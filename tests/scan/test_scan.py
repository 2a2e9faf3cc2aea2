"""``gymdata scan``: what should not be published is found and not shown, and ordinary text is left alone.

``test_redact.py`` has each kind of secret in each place of a rollout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import MissingExtraError
from tests.rollout_files import rollout, two_turns, write_run
from tests.scan.planted import planted

KINDS = planted()

pytest.importorskip("detect_secrets", reason="the extra scan (detect-secrets) is not installed")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_report_shows_no_secret(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not on the terminal and not as JSON, also where a secret is the name of a field, or in one."""
    rows = [
        rollout(f"t{n}", 0, 1.0, two_turns(20, 21), extra=json.dumps({"env": {text: 1, f"look: {text} and more": 1}}))
        for n, (text, _) in enumerate(KINDS.values())
    ]
    run = write_run(tmp_path / "run", rows, suffix)
    assert [main(["scan", str(run)]), main(["scan", str(run), "--json"])] == [1, 1]
    printed = "".join(capsys.readouterr())
    assert [kind for kind, (_, secret) in KINDS.items() if secret in printed] == []


def test_files_beside_the_rollouts_are_scanned(tmp_path: Path) -> None:
    """run.json, logs and other texts of a run folder hold secrets as well."""
    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(20, 21))])
    text, _ = KINDS["basic auth"]
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "config": {"endpoint": text}}, indent=1))
    (run / "gymdata.log").write_text(f"fine\nasked {text}\n")
    found = {(Path(one.file).name, one.row, one.field) for one in gymdata.scan(run).findings}
    assert found == {("run.json", 0, "config.endpoint"), ("gymdata.log", 1, "")}


def test_a_value_is_found_by_the_key_that_names_it(tmp_path: Path) -> None:
    """Of a secret without a form of its own: JSON is read by its texts and as a whole, once for each finding."""
    _, secret = KINDS["aws secret"]
    row = rollout("t", 0, 1.0, two_turns(20, 21))
    row["task"] = json.dumps({"task_id": "t", "env": {"aws_secret_access_key": secret}})
    row["messages"][1]["tool_calls"] = json.dumps(
        [{"function": {"name": "put", "arguments": json.dumps({"aws_secret_key": secret, "home": KINDS["home"][0]})}}]
    )
    found = {(one.field, one.kind) for one in gymdata.scan(write_run(tmp_path / "run", [row])).findings}
    called = "messages[1].tool_calls[0].function.arguments"
    assert found >= {("task", "aws-access-key"), (f"{called}.home", "home-path")}


def test_ordinary_text_is_not_taken_for_a_secret(tmp_path: Path) -> None:
    """Words, hashes, version numbers, code and documentation links are what rollouts are made of."""
    texts = [
        "commit 3f786850e387550fdab836ed7e6dc881de23001b, sha256 " + "0f" * 32,
        "uuid 123e4567-e89b-12d3-a456-426614174000, version 10.4.2.1, price 3@4",
        "class sk-estimator-doc-link-fitted, task-based-risk-assessment-of-many-things",
        "git clone git@github.com:org/repo.git; see https://example.com/home/index.html and /usr/home",
        "password: hunter2 is what the story says; key = value; token: end; import os.path",
        "@dataclass\nclass Home: pass  # /home is a folder",
        "{'a': 'b@c'} user@host x@y",
    ]
    rows = [rollout(f"t{n}", 0, 1.0, two_turns(20, 21), text=text) for n, text in enumerate(texts)]
    report = gymdata.scan(write_run(tmp_path / "run", rows))
    assert report.findings == []
    assert report.ok


def test_the_sample_data_is_clean() -> None:
    report = gymdata.scan(Path(__file__).parents[2] / "sample_data/rollouts/clean.jsonl")
    assert (report.rows_scanned, report.findings) == (24, [])


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """``scan`` never runs with half of its patterns."""
    from gymdata.scan.patterns import finder

    finder.cache_clear()
    monkeypatch.setitem(sys.modules, "detect_secrets.plugins.aws", None)
    with pytest.raises(MissingExtraError, match="detect_secrets") as refused:
        gymdata.scan(Path(__file__).parents[2] / "sample_data/rollouts/clean.jsonl")
    assert "scan" in (refused.value.hint or "")
    finder.cache_clear()
