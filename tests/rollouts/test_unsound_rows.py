"""Whatever wrote them, rows with ids or log-probabilities that cannot be right reach no pair, trainer or export."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gymdata
from gymdata.commands.train.sequence_data import EXPERIENCE_COLUMNS, training_experiences
from gymdata.commands.train.settings import TrainKtoConfig, TrainSftConfig
from gymdata.errors import RefusedError
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.rollouts.turns import turn_digest
from gymdata.store import read_table, write_run_json
from gymdata.store.lineage import vocabulary
from tests.rollout_files import rollout, two_turns, write_run

#: Fault → (code, what the message says of it); each stands in turn 1 of rollout a-1.
FAULTS = {
    "negative id": ("T206", "token id -5 at position 0 of the generation, expected 0 to 2147483647"),
    "negative context": ("T206", "token id -5 at position 5 of the prompt"),
    "no log-probs": ("L301", "0 log-probabilities for 2 tokens"),
    "nan": ("L302", "a log-probability of nan at position 1, expected a finite number"),
    "infinite": ("L302", "a log-probability of -inf at position 1"),
    "positive": ("L303", "a log-probability of 0.5 at position 1, expected at most 0"),
}


def run_with(fault: str, folder: Path) -> Path:
    """Two groups of two; the digests fit what is stored."""
    rows = [rollout(task, i, float(i), two_turns(5, 40 + i)) for task in "ab" for i in range(2)]
    turn = rows[1]["turns"][1]
    if fault == "negative id":
        turn["generation_token_ids"] = np.array([-5, 2], np.int32)
    elif fault == "negative context":
        turn["prompt_delta_ids"] = np.array([-5, 31], np.int32)
    elif fault == "no log-probs":
        turn["generation_log_probs"] = np.array([], np.float32)
    elif fault in ("nan", "infinite", "positive"):
        value = {"nan": math.nan, "infinite": -math.inf, "positive": 0.5}[fault]
        turn["generation_log_probs"] = np.array([-1.0, value], np.float32)
    lists = [turn[name] for name in ("prompt_delta_ids", "generation_token_ids", "generation_log_probs")]
    turn["digest"] = turn_digest(rows[1]["turns"][0]["digest"], turn["prefix_length"], *lists)
    return write_run(folder, rows)


def prepare(kind: Any) -> Callable[[Path, Path], Any]:
    def of(run: Path, out: Path) -> Any:
        config = kind.load(None, {"model": "m", "output": out, **({"select": "all"} if kind is TrainSftConfig else {})})
        return list(config.parts(str(run)))

    return of


CONSUMERS: dict[str, Callable[[Path, Path], Any]] = {
    "pairs": lambda run, out: gymdata.pairs(run, output=out / "pairs"),
    "experience": lambda run, out: gymdata.experience(run, output=out / "experiences"),
    "train-sft": prepare(TrainSftConfig),
    "train-kto": prepare(TrainKtoConfig),
    **{
        f"export {format}": lambda run, out, format=format: gymdata.export(run, out / "out.jsonl", format)
        for format in ("nemo-gym", "nat-trajectories", "atif", "openai")
    },
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_no_consumer_takes_an_unsound_row(tmp_path: Path, consumer: str, fault: str) -> None:
    """Refused with the code, the file, the rollout and the turn; nothing is written."""
    run, out = run_with(fault, tmp_path / "run"), tmp_path / "out"
    with pytest.raises(RefusedError) as caught:
        CONSUMERS[consumer](run, out)
    code, says = FAULTS[fault]
    assert (caught.value.code, caught.value.exit_code) == (code, 1)
    assert str(run) in str(caught.value)
    assert f"rollout a-1, turn 1: {says}" in str(caught.value)
    assert not [p for p in out.rglob("*") if p.suffix in (".parquet", ".jsonl")]


@pytest.mark.parametrize("consumer", ["pairs", "experience", "export nemo-gym"])
def test_the_vocabulary_is_the_runs(tmp_path: Path, consumer: str) -> None:
    """Where run.json says how many ids the model has, one from there on is refused; without it, it is sound."""
    run, out = run_with("none", tmp_path / "run"), tmp_path / "out"
    assert vocabulary(run) is None
    CONSUMERS[consumer](run, out / "unknown")
    facts = {"run_id": "run-1", "files": [{"path": "rollouts/part-00000.parquet", "rows": 4}]}
    write_run_json(run, {**facts, "engine": {"vocab_size": 41}})
    with pytest.raises(RefusedError, match=r"T206: .*rollout a-1, turn 1: token id 41 .* expected 0 to 40"):
        CONSUMERS[consumer](run, out / "known")
    write_run_json(run, {**facts, "engine": {"vocab_size": 42}})
    CONSUMERS[consumer](run, out / "larger")


def test_an_export_keeps_unknown_log_probabilities(tmp_path: Path) -> None:
    """A turn of an import without any log-probability (NaN for all of its tokens) is no fault of the export."""
    rows = [rollout("a", 0, 1.0, two_turns(5, 40))]
    for turn in rows[0]["turns"]:
        turn["generation_log_probs"] = np.full(len(turn["generation_token_ids"]), math.nan, np.float32)
        above = rows[0]["turns"][0]["digest"] if turn["parent"] == 0 else 0
        lists = [turn[name] for name in ("prompt_delta_ids", "generation_token_ids", "generation_log_probs")]
        turn["digest"] = turn_digest(above, turn["prefix_length"], *lists)
    run = write_run(tmp_path / "run", rows)
    assert gymdata.export(run, tmp_path / "out.jsonl", "nemo-gym").rows_out == 1
    with pytest.raises(RefusedError, match="L302"):
        gymdata.experience(run, output=tmp_path / "e", zero_variance="keep")


@pytest.mark.parametrize(("column", "value", "code"), [("input_ids", -5, "T206"), ("logprobs", 0.5, "L303")])
def test_no_trainer_takes_an_unsound_experience(tmp_path: Path, column: str, value: float, code: str) -> None:
    """What another tool wrote into an experiences file is refused at its sequence."""
    gymdata.experience(run_with("none", tmp_path / "run"), output=tmp_path / "e")
    table = read_table(tmp_path / "e", EXPERIENCES, columns=EXPERIENCE_COLUMNS)
    assert len(training_experiences(table)) == 4
    lists = table[column].to_pylist()
    lists[1][-1] = value
    at = table.schema.get_field_index(column)
    damaged = table.set_column(at, column, pa.array(lists, table.schema.field(column).type))
    with pytest.raises(RefusedError, match=f"{code}: e.parquet: sequence a-1/0") as caught:
        training_experiences(damaged, where="e.parquet")
    assert caught.value.code == code
