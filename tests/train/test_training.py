"""Training from Python: what is refused before anything heavy is loaded."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.train.settings import TRAINERS
from gymdata.errors import DataError, UsageError
from gymdata.rollouts.schema import ROLLOUTS, TABLES
from gymdata.store import read_table
from tests.rollout_files import rollout, two_turns, write_run, write_table
from tests.servers import Watcher
from tests.train.prepared_only import only_prepared


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("algorithm", sorted(TRAINERS))
def test_a_file_without_rows_is_refused_before_torch(
    tmp_path: Path, algorithm: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, that it has 0 rows, and what to do; no model is looked at and nothing is written."""
    for module in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    table = TRAINERS[algorithm].table
    rows = pa.schema([table.schema.field(name) for name in table.required()]).empty_table()
    file = write_table(rows, tmp_path / f"{table.name}.{suffix}", table)
    with pytest.raises(DataError, match=f"{file.name}: got 0 {table.name}, expected at least 1") as refused:
        getattr(gymdata, f"train_{algorithm}")(file, tmp_path / "no-model", tmp_path / "out")
    assert refused.value.hint is not None
    assert refused.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def made(run: Path, held: str, suffix: str) -> Path:
    """What the commands write of a run: a folder; or its rows in a file."""
    out = run.parent / held if suffix == "folder" else run.parent / f"{held}.{suffix}"
    if held == "rollouts":
        return run if suffix == "folder" else write_table(read_table(run), out, ROLLOUTS)
    folder = run.parent / held
    {"pairs": gymdata.pairs, "experiences": gymdata.experience}[held](run, output=folder)
    return out if suffix == "folder" else write_table(read_table(folder, TABLES[held]), out, TABLES[held])


@pytest.mark.parametrize("suffix", ["folder", "parquet", "jsonl"])
@pytest.mark.parametrize("held", ["rollouts", "pairs", "experiences"])
@pytest.mark.parametrize("algorithm", sorted(TRAINERS))
def test_another_table_is_named_with_the_way_on(
    tmp_path: Path, algorithm: str, held: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is given another table says what it got, what it expected, which command makes that, and which
    trainers read what it got; no model is looked at."""
    wanted = TRAINERS[algorithm].table.name
    run = write_run(tmp_path / "run", [rollout("a", 0, 0.0, two_turns(1, 50)), rollout("a", 1, 1.0, two_turns(1, 60))])
    given = made(run, held, suffix)
    if held == wanted:
        if find_spec("trl") is None:
            pytest.skip("trl is not installed")
        with pytest.raises(DataError, match=r"no-model: no such file"):
            getattr(gymdata, f"train_{algorithm}")(given, tmp_path / "no-model", tmp_path / "out")
        return
    for module in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=f"{given.name}: contains.*{held}.*{wanted}") as refused:
        getattr(gymdata, f"train_{algorithm}")(given, tmp_path / "no-model", tmp_path / "out")
    assert (refused.value.got, refused.value.expected) == (held, wanted)
    make = {"pairs": "pairs", "experiences": "experience"}.get(wanted)
    reads = (
        " and ".join(f"train-{name}" for name, kind in TRAINERS.items() if kind.table.name == held) + f" read {held}"
    )
    ways = {
        "rollouts": f"`gymdata {make} {given}` makes {wanted} of rollouts; {reads}",
        "": f"`gymdata {make} RUN` makes {wanted} of rollouts; {reads}",
    }
    assert refused.value.hint == (reads if make is None else ways.get(held, ways[""]))
    typed = gymdata_command("train-" + algorithm, given, "-m", tmp_path / "no-model", "-o", tmp_path / "out")
    assert typed == (2, f"error: {refused.value}\n")


def gymdata_command(*words: object) -> tuple[int, str]:
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        return main([*map(str, words)]), err.getvalue()


def test_tasks_are_no_training_data(tmp_path: Path) -> None:
    """A file of tasks is named as one, with the command that samples rollouts of them."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1 + 1 =", "level": 2}\n')
    for algorithm, kind in TRAINERS.items():
        with pytest.raises(DataError, match=f"contains tasks, expected {kind.table.name}\n.*gymdata collect"):
            getattr(gymdata, f"train_{algorithm}")(tasks, tmp_path / "no-model", tmp_path / "out")


def test_a_packed_row_that_is_too_short_is_refused_before_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--pack-length below a sequence: which ones are longer, and both ways out; --max-length makes them fit."""
    run = write_run(tmp_path / "run", [rollout("a", i, 1.0, two_turns(i, 50 + i)) for i in range(6)])
    started: list[dict[str, Any]] = []

    def take_note(job: dict[str, Any], _: Any) -> dict[str, Any]:
        started.append(job)
        return only_prepared(job, None)

    monkeypatch.setattr("gymdata.commands.train.process.run", take_note)
    given = {"select": "all", "packing": True, "dry_run": True}
    model, out = "sample_data/policy", tmp_path / "out"
    with pytest.raises(
        UsageError, match=r"--pack-length 3: 6 of 6 sequences of .* have more tokens: .* and 2 more"
    ) as no:
        gymdata.train_sft(run, model, out, pack_length=3, **given)
    longest = int(re.search(r"\((\d+)\)", str(no.value))[1])  # type: ignore[index]  # the message has it
    assert no.value.hint == (
        f"--pack-length {longest} holds them all; --max-length 3 cuts them and prints what that costs"
    )
    assert not started
    gymdata.train_sft(run, model, out, pack_length=longest, **given)
    gymdata.train_sft(run, model, out, pack_length=longest - 1, max_length=longest - 1, **given)
    assert [job["pack_length"] for job in started] == [longest, longest - 1]


@pytest.mark.parametrize(
    ("rewards", "loss", "warned"),
    [((1.0, 1.0), "ppo_clip", True), ((0.0, 1.0), "ppo_clip", False), ((1.0, 1.0), "awr", False)],
)
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_advantages_that_are_all_zero_are_warned_of(
    tmp_path: Path, rewards: tuple[float, float], loss: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every advantage is 0 a loss that is multiplied with it learns nothing: a warning says so and why; a loss that
    trains all the same is not warned of."""
    monkeypatch.setattr("gymdata.commands.train.process.run", only_prepared)
    run = write_run(
        tmp_path / "run", [rollout("a", i, reward, two_turns(1, 50 + i)) for i, reward in enumerate(rewards)]
    )
    gymdata.experience(run, output=tmp_path / "experiences", zero_variance="keep")
    notes = Watcher()
    gymdata.train_rl(
        tmp_path / "experiences", "sample_data/policy", tmp_path / "out", loss=loss, dry_run=True, progress=notes
    )
    said = [text for text in notes.said if "the advantage of every trained token is 0" in text]
    assert (len(said), "all have the same reward" in "".join(said)) == (int(warned), warned)
