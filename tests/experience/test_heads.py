"""The sampler's head of each token in experiences: the two columns ``top_ids`` and ``top_log_probs``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.errors import RefusedError
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.store import read_table
from tests.definition import sequences
from tests.rollout_files import BRANCH, BREAK, RETRY, rollout, two_turns, write_run

SHAPES = [two_turns(5, 40), BREAK, RETRY, BRANCH, [([1, 5], [7, 8, 2])]]


def with_head(row: dict[str, Any], k: int = 3, turns: Any = None) -> dict[str, Any]:
    """Each sampled token with ``k`` saved ids, those of the vocabulary after it; ``turns``: only these (default: all)."""
    made = []
    for number, turn in enumerate(row["turns"]):
        head = [
            [{"id": token + rank, "log_prob": -0.5 - rank - position / 8} for rank in range(k)]
            for position, token in enumerate(turn["generation_token_ids"])
        ]
        made.append({**turn, "top_log_probs": head if turns is None or number in turns else None})
    return {**row, "turns": made}


def heads_by_hand(row: dict[str, Any], keep: bool) -> list[list[list[tuple[int, float]]]]:
    """For each sequence of a rollout, for each of its tokens: the saved ids where it is trained, else none."""
    result = []
    for sequence in sequences(row["turns"], "keep" if keep else "drop"):
        heads: list[list[tuple[int, float]]] = [[] for _ in sequence.input_ids]
        for turn, start, trained in zip(sequence.turns, sequence.turn_starts, sequence.trained, strict=True):
            for position, head in enumerate(row["turns"][turn]["top_log_probs"] or []) if trained else ():
                heads[start + position] = [(entry["id"], entry["log_prob"]) for entry in head]
        result.append(heads)
    return result


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("abandoned", ["keep", "drop"])
@pytest.mark.parametrize("size", [256, 2])
def test_each_trained_token_has_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, abandoned: str, size: int
) -> None:
    """Through breaks, retries, branches and a turn without a head, whatever the batches; context tokens have none."""
    monkeypatch.setattr(importlib.import_module("gymdata.commands.experience.build"), "HEADED_ROWS", size)
    rows = [with_head(rollout(task, i, float(i), SHAPES[i])) for task in "ab" for i in range(5)]
    rows[5] = with_head(rows[5], turns=[1])
    rows[9] = {**rows[9], "status": "truncated", "stop_reason": "max_tokens"}
    report = gymdata.experience(write_run(tmp_path / "run", rows, suffix), tmp_path / "out", abandoned=abandoned)
    found: dict[str, list[Any]] = {}
    for row in read_table(report.path, EXPERIENCES).to_pylist():
        pairs = zip(row["top_ids"], row["top_log_probs"], strict=True)
        found.setdefault(row["rollout_id"], []).append([list(zip(*head, strict=True)) for head in pairs])
        assert [bool(ids) for ids in row["top_ids"]] == [bool(m) for m in row["loss_mask"]] or row[
            "rollout_id"
        ] == "b-0"
    for row in rows:
        assert found[row["rollout_id"]] == heads_by_hand(row, abandoned == "keep")


def test_a_file_of_rollouts_without_heads_has_no_such_columns(tmp_path: Path) -> None:
    """And with one head among many rollouts, the others' lists are empty."""
    rows = [rollout("a", i, float(i), two_turns(5, 40)) for i in range(3)]
    bare = gymdata.experience(write_run(tmp_path / "bare", rows), tmp_path / "none")
    assert {"top_ids", "top_log_probs"}.isdisjoint(read_table(bare.path, EXPERIENCES).column_names)
    rows[2] = with_head(rows[2])
    some = read_table(gymdata.experience(write_run(tmp_path / "run", rows), tmp_path / "some").path, EXPERIENCES)
    filled = [sum(map(bool, row)) for row in some["top_ids"].to_pylist()]
    assert filled == [0, 0, sum(some["loss_mask"][2].as_py())]


def test_tokens_that_are_not_chosen_have_no_head(tmp_path: Path) -> None:
    """With --target-agents the turns of others are context, and cost no storage."""
    rows = [with_head(rollout("a", i, float(i), two_turns(5, 40))) for i in range(2)]
    for row in rows:
        row["turns"] = [{**turn, "agent": name} for turn, name in zip(row["turns"], ("solver", "critic"), strict=True)]
    report = gymdata.experience(write_run(tmp_path / "run", rows), tmp_path / "out", target_agents=("critic",))
    for row in read_table(report.path, EXPERIENCES).to_pylist():
        assert [bool(ids) for ids in row["top_ids"]] == [bool(m) for m in row["loss_mask"]]
        assert 0 < sum(row["loss_mask"]) < len(rows[0]["turns"]) + 4


def test_more_than_64_ids_of_a_token_are_refused(tmp_path: Path) -> None:
    """65 are named with the flag that collects fewer; 64 are written."""
    for k in (64, 65):
        rows = [with_head(rollout("a", i, float(i), two_turns(5, 40)), k) for i in range(2)]
        run = write_run(tmp_path / f"run{k}", rows)
        if k == 64:
            assert gymdata.experience(run, tmp_path / "out").counts["sequences"] == 2
            continue
        with pytest.raises(
            RefusedError, match=r"65 ids of one token, experiences hold at most 64[\s\S]*--top-logprobs 64"
        ):
            gymdata.experience(run, tmp_path / "more")


def test_log_probs_of_heads_are_written_byte_split(tmp_path: Path) -> None:
    """As all float lists: floats that differ little in their high bytes compress better so."""
    rows = [with_head(rollout("a", i, float(i), two_turns(5, 40))) for i in range(2)]
    report = gymdata.experience(write_run(tmp_path / "run", rows), tmp_path / "out")
    with pq.ParquetFile(report.path) as file:
        group = file.metadata.row_group(0)
        encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
    assert "BYTE_STREAM_SPLIT" in encodings["top_log_probs.list.element.list.element"]
    assert "RLE_DICTIONARY" not in encodings["top_ids.list.element.list.element"]
