"""The log of a run folder: what it records, what it leaves out, and that nothing depends on it."""

from __future__ import annotations

import json
import logging.config
import os
import re
from pathlib import Path

import pytest

from gymdata.cli.main import main
from gymdata.progress import log_to, printed, start_logging, stop_logging
from tests.docs_blocks import prepare

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 (DEBUG|INFO|WARNING|ERROR) +")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)


def imported(*more: str) -> int:
    return main(["import", "sample_data/rollouts/nemo_gym.jsonl", "-o", "runs/x", *more])


def log(folder: str = "runs/x") -> str:
    return Path(folder, "gymdata.log").read_text()


def test_every_line_has_a_time_and_a_level_and_attempts_are_counted() -> None:
    """The command, its summary and its exit code are in the log; a second attempt is appended with its number."""
    assert imported() == 0
    assert imported() == 0
    lines = log().splitlines()
    assert [line for line in lines if not LINE.match(line)] == []
    words = [LINE.sub("", line) for line in lines]
    assert [word.partition(",")[0] for word in words if word.startswith("attempt")] == ["attempt 1", "attempt 2"]
    assert words[1] == "gymdata import sample_data/rollouts/nemo_gym.jsonl -o runs/x"
    assert words[-1] == "ended with exit code 0"
    assert sum("rollouts 24" in word for word in words) == 2


def test_the_level_chooses_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``error`` the log of a good run names its attempt alone, and an unknown level is a usage error."""
    assert imported("--log-level", "error") == 0
    assert [LINE.sub("", line).partition(",")[0] for line in log().splitlines()] == ["attempt 1"]
    assert main(["pairs", "runs/x", "--log-level", "loud"]) == 2
    assert "expected one of debug, info, warning, error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("warning: a disk is nearly full", " WARNING a disk is nearly full"),
        ("asking http://host/v1?api_key=SECRET \x1b[2J", "asking http://host/v1?api_key=*** \\x1b[2J"),
    ],
)
def test_what_is_printed_is_in_the_log(tmp_path: Path, text: str, line: str) -> None:
    """A warning with the log's level, the key of a URL as everywhere else, and an escape as its text."""
    (tmp_path / "run.json").write_text("{}")
    start_logging("info")
    printed(text)
    log_to(tmp_path)
    stop_logging()
    assert log(str(tmp_path)).splitlines()[1].endswith(line)


def test_the_log_survives_a_library_that_configures_logging(tmp_path: Path) -> None:
    """vLLM configures logging while it starts, which closes every handler; what follows is still in the log."""
    (tmp_path / "run.json").write_text("{}")
    start_logging(None)
    log_to(tmp_path)
    printed("starting")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    printed("ended")
    stop_logging()
    assert [LINE.sub("", line) for line in log(str(tmp_path)).splitlines()[1:]] == ["starting", "ended"]


def test_stages_that_take_seconds_have_no_log() -> None:
    """Pairs of a run leave its log, and their own folder, as they are."""
    assert imported() == 0
    before = log()
    assert main(["pairs", "runs/x"]) == 0
    assert log() == before
    assert not Path("runs/x/pairs-reward/gymdata.log").exists()


def test_the_log_is_no_part_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """It is in no file list, readers and a new start accept a folder that has it, and its content changes nothing."""
    assert imported() == 0
    facts = json.loads(Path("runs/x/run.json").read_text())
    assert [file["path"] for file in facts["files"]] == ["rollouts/part-00000.parquet"]
    Path("runs/x/gymdata.log").write_text("other\n")
    assert main(["validate", "runs/x"]) == 0
    assert imported("--overwrite") == 0
    assert log().startswith("other\n")
    Path("runs/x/run.json").unlink()
    Path("runs/x/rollouts/part-00000.parquet").unlink()
    Path("runs/x/rollouts").rmdir()
    assert imported() == 0


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_log_that_cannot_be_written_stops_nothing(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written through a link, into a pipe or a folder: one warning, and the command is done."""
    assert imported() == 0
    place, aim = Path("runs/x/gymdata.log"), Path("aim")
    place.unlink()
    aim.write_text("mine")
    if kind == "link":
        place.symlink_to(aim.resolve())
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    capsys.readouterr()
    assert imported("--overwrite") == 0
    assert capsys.readouterr().err.count("this command writes no log") == 1
    assert aim.read_text() == "mine"


def test_a_refused_command_leaves_no_folder() -> None:
    """Where nothing was made, no log makes a folder."""
    assert main(["pairs", "sample_data/rollouts/clean.jsonl", "-o", "made", "--strategy", "none-such"]) == 2
    assert main(["import", "missing.jsonl", "-o", "made"]) == 2
    assert not Path("made").exists()


def test_a_command_that_has_ended_leaves_logging_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """A program that ran a command hears of later records what its own levels let through."""
    before = logging.getLogger("gymdata").level
    start_logging("debug")
    stop_logging()
    printed("nobody asked for this")
    assert logging.getLogger("gymdata").level == before
    assert caplog.records == []


def test_a_long_log_becomes_the_one_before(tmp_path: Path) -> None:
    """Above 10 MB, so that a folder has at most two of them."""
    start_logging(None)
    try:
        log_to(tmp_path)
        for text in ("x" * 11_000_000, "after", "y" * 11_000_000, "last"):
            printed(text)
    finally:
        stop_logging()
    first, second = log(f"{tmp_path}"), (tmp_path / "gymdata.log.1").read_text()
    assert ("last" in first, "after" in second, "x" in second) == (True, True, False)
    assert len(list(tmp_path.glob("gymdata.log*"))) == 2
