"""The account of an export: of every kind, what was written and what is lost is what the run held, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.formats import exported
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_table
from tests.rollout_files import rollout, two_turns, write_run, write_table

#: A call by a sub-agent that no message names, its retry, which branches, and a turn that continues the retry.
BRANCHED = [
    ([1, 5], [9, 2]),
    ([1, 5, 9, 2, 30], [7, 2]),
    ([1, 5, 9, 2, 30], [8, 2]),
    ([1, 5, 9, 2, 30, 8, 2, 6], [4, 2]),
]
OF_ROLLOUTS = [name for name, format in exported().items() if format.table == "rollouts"]
OF_PAIRS = [name for name, format in exported().items() if format.table == "pairs"]


def asked(task: str, turns: list[int]) -> list[dict[str, Any]]:
    answers = [{"role": "assistant", "content": f"a{turn}", "turn": turn} for turn in turns]
    return [{"role": "user", "content": f"question {task}"}, *answers]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five rollouts with twelve turns, of which one branches, three have a reward and two an agent; two failed attempts."""
    rows = [rollout("t", k, float(k), two_turns(5, 40 + k)) for k in range(3)]
    rows.append(rollout("t", 3, 0.25, BRANCHED, messages=asked("t", [0, 2, 3])))
    rows.append(rollout("t", 4, None, two_turns(5, 50), rewards=[], messages=asked("t", [1])))
    for number, turn in enumerate(rows[3]["turns"]):
        turn["reward"], turn["agent"] = (0.5 if number else None), ("sub" if number in (1, 2) else None)
    folder = write_run(tmp_path / "run", rows)
    failures = [{"kind": "engine", "attempt": k, "counts": True, "rollout_id": f"t-{5 + k}"} for k in range(2)]
    (folder / "failures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in failures))
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.torch] * (name == "verl-skip")) for name in OF_ROLLOUTS]
)
def test_what_went_out_and_what_is_lost_is_what_there_was(run: Path, tmp_path: Path, name: str) -> None:
    """Turns, branches, rewards and their parts, step rewards, agents and failures; read back where that is possible."""
    file = tmp_path / f"out{exported()[name].suffixes[0]}"
    done = gymdata.export(run, file, name)
    account = done.to_dict()["account"]
    read = {"turns": 12, "branches": 1, "rewards": 4, "named rewards": 4, "step rewards": 3, "facts of turns": 2}
    assert {kind: n["read"] for kind, n in account.items()} == read | {"failures": 2}
    assert all(n["written"] + n["lost"] == n["read"] for n in account.values())
    assert (done.turns, done.turns_lost) == (12, account["turns"]["lost"])
    written = {kind: n["written"] for kind, n in account.items()}
    if name in ("nemo-gym", "atif", "nat-trajectories"):
        gymdata.import_rollouts(file, tmp_path / "back")
        back = read_table(tmp_path / "back").to_pylist()
        turns = [turn for row in back for turn in row["turns"]]
        assert (written["turns"], written["rewards"]) == (len(turns), sum(row["reward"] is not None for row in back))
        assert written["step rewards"] == sum(turn["reward"] is not None for turn in turns)
        assert written["facts of turns"] == sum(turn["agent"] is not None for turn in turns)
        assert done.lost.get("turns that no message names", 0) == (2 if name == "nemo-gym" else 0)
    elif name == "verl-skip":  # no place for a rollout without a reward
        assert (written["turns"], written["branches"], done.rows_out) == (9, 0, 4)
    elif exported()[name].holds_ids:
        assert (written["turns"], written["branches"], done.rows_out) == (11, 1, 5)
    else:
        assert written["turns"] == 0


@pytest.mark.parametrize("name", OF_PAIRS)
def test_weights_and_margins_of_pairs_are_accounted_for(run: Path, tmp_path: Path, name: str) -> None:
    """Of pairs: the weights that are not 1, and the margins."""
    gymdata.pairs(run, output=tmp_path / "made", breaks="drop")
    made = read_table(tmp_path / "made", PAIRS)
    n = made.num_rows
    weighted = made.set_column(made.schema.get_field_index("weight"), made.schema.field("weight"), pa.array([0.5] * n))
    single = weighted.set_column(
        made.schema.get_field_index("margin"), made.schema.field("margin"), pa.array([float("nan")] + [1.0] * (n - 1))
    )
    write_table(single, tmp_path / "pairs.parquet", PAIRS)
    done = gymdata.export(tmp_path / "pairs.parquet", tmp_path / f"out{exported()[name].suffixes[0]}", name)
    read = {kind: account["read"] for kind, account in done.account.items()}
    assert read == {"weights": n, "margins": n - 1}
    assert all(kind["written"] + kind["lost"] == kind["read"] for kind in done.account.values())
    carried = {"trl-preference": (0, n - 1)}
    assert (done.account["weights"]["written"], done.account["margins"]["written"]) == carried.get(name, (0, 0))


def test_zero_loss_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts of what was written are printed, and that nothing is lost where it is so."""
    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(5, 40))])
    assert main(["export", str(run), "--format", "atif", "-o", str(tmp_path / "a.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "turns written" in out
    assert "2 of 2" in out
    assert "nothing" in out
