"""Preference pairs of the NeMo Agent Toolkit: there and back, ours and theirs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.commands.import_export.run import import_rollouts
from gymdata.errors import StoreError, UsageError
from gymdata.formats.nat_pairs import CALLS, IDS, SEVERAL
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_run_json, read_table
from tests.formats.trajectories import (
    lines,
    same,
    some,
    text,
    there_and_back,
    through_a_run,
    through_json,
    value,
    write_lines,
)
from tests.rollout_files import rollout, write_run

_SETTINGS = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
role = st.sampled_from(["system", "user", "assistant", "developer"])
message = st.builds(lambda more, r, c: more | {"role": r, "content": c}, some(), role, text)
#: What HH-RLHF has in one text is several messages, and sides are two different texts.
prompt = st.one_of(text, st.lists(message, min_size=1, max_size=3))
answer = text.filter(str.strip)
exact = st.builds(
    lambda p, c, r: {"prompt": p, "chosen_response": f"{c}+", "rejected_response": f"{r}-"}, prompt, answer, answer
)
line = st.one_of(exact, st.builds(lambda more, row: more | row, some(), exact))
item_trajectory = st.builds(
    lambda more, row, reward: more | {"episode": [row], "reward": reward},
    some(shaped_rewards=value, metadata=st.one_of(value, some(example_id=text, score_diff=st.floats(0, 2)))),
    line,
    st.floats(0, allow_nan=False, allow_infinity=False),
)


def finite(value_: Any) -> bool:
    return "NaN" not in json.dumps(value_) and "Infinity" not in json.dumps(value_)


@_SETTINGS
@given(st.lists(line.filter(finite), min_size=1, max_size=3))
def test_their_lines_come_back_whole(tmp_path: Path, theirs: list[Any]) -> None:
    """Prompts, sides and margins of a pair are, exported and imported again, what they were."""
    theirs = through_json(theirs)
    done, back = through_a_run(write_lines(tmp_path / "a.jsonl", theirs), "nat-dpo")
    assert (done.pairs, done.rejected, len(back)) == (len(theirs), 0, len(theirs))
    first, again = there_and_back(tmp_path)
    assert same(again, [pair | {"pair_id": other["pair_id"]} for pair, other in zip(first, again, strict=True)])


@_SETTINGS
@given(some(run_id=text).filter(finite), st.lists(st.lists(item_trajectory.filter(finite), max_size=2), max_size=2))
def test_their_collections_come_back_whole(tmp_path: Path, rest: dict[str, Any], groups: list[Any]) -> None:
    """Trajectories of one DPO item each give the same pairs, also exported and imported again."""
    theirs = through_json(rest | {"trajectories": groups})
    (tmp_path / "a.json").write_text(json.dumps(theirs))
    done, _ = through_a_run(tmp_path / "a.json", "nat-dpo-items")
    assert (done.pairs, done.rejected) == (sum(map(len, groups)), 0)
    if done.pairs:
        first, again = there_and_back(tmp_path)
        assert same(*(sorted(pairs, key=lambda pair: pair["pair_id"]) for pairs in (first, again)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with pairs of one task; a second task's answers are calls, a third's have two messages."""
    rows = [rollout("a", k, float(k), [([1, 2], [5 + k, 3])], text=f"answer {k}") for k in range(2)]
    for k in range(2):
        row = rollout("b", k, float(k), [([1, 4], [5 + k, 3])])
        said = {"role": "assistant", "content": None, "turn": 0, "tool_calls": json.dumps([{"id": f"c{k}", "n": k}])}
        rows.append(row | {"messages": [row["messages"][0], said]})
        row = rollout("c", k, float(k), [([1, 6], [5 + k, 3])], text=f"last {k}")
        rows.append(row | {"messages": [*row["messages"], {"role": "user", "content": "thanks"}]})
    folder = write_run(tmp_path / "run", rows)
    gymdata.pairs(folder)
    return folder


def test_our_pairs_are_written_as_text(run: Path, tmp_path: Path) -> None:
    """Pairs of one text a side become lines; what the format cannot hold is told, and such pairs are left out."""
    done = gymdata.export(run, tmp_path / "a.jsonl", "nat-dpo")
    (made,) = lines(tmp_path / "a.jsonl")
    asked = {"role": "user", "content": "question a"}
    assert made == {"prompt": [asked], "chosen_response": "answer 1", "rejected_response": "answer 0"}
    assert (done.rows_out, done.skipped) == (1, 2)
    assert {SEVERAL: 1, CALLS: 1, IDS: 1}.items() <= done.lost.items()


def test_our_pairs_come_back_from_trajectories(run: Path, tmp_path: Path) -> None:
    """A DPO item's metadata holds ids, masks and log-probabilities: the pair is what it was."""
    gymdata.export(run, tmp_path / "a.json", "nat-dpo-items")
    made = json.loads((tmp_path / "a.json").read_text())
    assert made["trajectories"][0][0]["reward"] == 1.0
    assert import_rollouts(tmp_path / "a.json", tmp_path / "back").pairs == 1
    before = [p for p in read_table(run, PAIRS).to_pylist() if p["task_id"] == "a"]
    assert read_table(tmp_path / "back", PAIRS).to_pylist() == before


def test_imported_pairs_say_what_they_are(tmp_path: Path) -> None:
    """Pairs of DPO lines have no margin and no ids; a score difference is a margin; rejected rows are named."""
    rows = [
        {"prompt": "q", "chosen_response": "a", "rejected_response": "b"},
        {"prompt": "q", "chosen_response": 1, "rejected_response": "b"},
        {"prompt": 7, "chosen_response": "a", "rejected_response": "b"},
        {"prompt": [{"content": "q"}], "chosen_response": "a", "rejected_response": "b"},
    ]
    file = write_lines(tmp_path / "a.jsonl", rows)
    done = import_rollouts(file, tmp_path / "pairs")
    assert (done.pairs, done.reasons) == (1, {"S102": 3})
    (pair,) = read_table(tmp_path / "pairs", PAIRS).to_pylist()
    assert math.isnan(pair["margin"])
    assert (pair["chosen_ids"], pair["prompt"][0]["content"], pair["chosen"][0]["content"]) == ([], "q", "a")
    assert read_run_json(tmp_path / "pairs")["stage"] == "import"
    other = write_lines(tmp_path / "b.jsonl", [{"episode": [rows[0]], "reward": 0.5, "metadata": {"score_diff": 0.4}}])
    with pytest.raises(StoreError, match="imported"):
        import_rollouts(other, tmp_path / "pairs")
    import_rollouts(other, tmp_path / "pairs", overwrite=True)
    assert read_table(tmp_path / "pairs", PAIRS)["margin"].to_pylist() == [0.4]


def test_files_of_two_formats_are_refused(tmp_path: Path) -> None:
    """One import is of one format."""
    a = write_lines(tmp_path / "a.jsonl", [{"prompt": "q", "chosen_response": "a", "rejected_response": "b"}])
    b = write_lines(tmp_path / "b.jsonl", [{"schema_version": "ATIF-v1.7", "steps": []}])
    with pytest.raises(UsageError, match="several formats"):
        import_rollouts([a, b], tmp_path / "x")


def test_pairs_without_a_margin_are_no_ties(tmp_path: Path) -> None:
    """An imported pair without a margin is not a tie and has none in TRL's rows."""
    row = {"prompt": "6?", "chosen_response": "six", "rejected_response": "five", "extra": 12345678901234567890123}
    assert through_a_run(write_lines(tmp_path / "dpo.jsonl", [row]), "nat-dpo")[0].pairs == 1
    assert "P603" not in {v.code for v in gymdata.validate(tmp_path / "run").violations}
    gymdata.export(tmp_path / "run", tmp_path / "trl.jsonl", "trl-preference")
    assert "margin" not in json.loads((tmp_path / "trl.jsonl").read_text())
