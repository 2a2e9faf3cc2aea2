"""Whatever wrote them, rows with ids or log-probabilities that cannot be right reach no pair, trainer or export."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gymdata
from gymdata.commands.train.sequence_data import EXPERIENCE_COLUMNS, training_experiences
from gymdata.commands.train.settings import TrainDpoConfig, TrainKtoConfig, TrainSftConfig
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


def run_without_log_probs(folder: Path, rollouts: Sequence[int] = (0, 1, 2, 3), turns: Sequence[int] = (0, 1)) -> Path:
    """Two groups of two; in ``turns`` of ``rollouts`` no log-probability is known."""
    rows = [rollout(task, i, float(i), two_turns(5, 40 + i)) for task in "ab" for i in range(2)]
    for number in rollouts:
        above = 0
        for t, turn in enumerate(rows[number]["turns"]):
            if t in turns:
                turn["generation_log_probs"] = np.full(len(turn["generation_token_ids"]), math.nan, np.float32)
            lists = [turn[name] for name in ("prompt_delta_ids", "generation_token_ids", "generation_log_probs")]
            above = turn["digest"] = turn_digest(above, turn["prefix_length"], *lists)
    return write_run(folder, rows)


@pytest.mark.parametrize("consumer", ["pairs", "train-sft", "train-kto", "export nemo-gym", "export openai"])
def test_unknown_log_probabilities_are_no_fault_where_none_are_needed(tmp_path: Path, consumer: str) -> None:
    """A rollout without any log-probability that is known (NaN for all of its tokens) is sampled all the same."""
    run = run_without_log_probs(tmp_path / "run", (0, 1))
    CONSUMERS[consumer](run, tmp_path / "out")
    with pytest.raises(RefusedError, match="rollout a-0, turn 0: log-probabilities that are not known: nan for all 3"):
        gymdata.experience(run, output=tmp_path / "e")


@pytest.mark.parametrize("consumer", ["pairs", "train-sft"])
def test_a_turn_that_lost_its_log_probabilities_is_a_fault(tmp_path: Path, consumer: str) -> None:
    """Where the rollout's other turn has some; an export takes it, as it is."""
    run = run_without_log_probs(tmp_path / "run", (0,), (1,))
    with pytest.raises(RefusedError, match="rollout a-0, turn 1: a log-probability of nan at position 0"):
        CONSUMERS[consumer](run, tmp_path / "out")
    assert gymdata.export(run, tmp_path / "out.jsonl", "nemo-gym").rows_out == 4


@pytest.mark.parametrize(("rollouts", "severity"), [((0, 1, 2, 3), "warning"), ((0,), "error")])
def test_unknown_log_probabilities_are_one_finding_a_turn(
    tmp_path: Path, rollouts: tuple[int, ...], severity: str
) -> None:
    """An error where other rollouts of the file have some."""
    report = gymdata.validate(run_without_log_probs(tmp_path / "run", rollouts), select=["L302"])
    expected = [(turn, None, f"nan for all {3 - turn}") for turn in (0, 1)] * len(rollouts)
    assert [(v.turn, v.position, v.got) for v in report.violations] == expected
    assert {v.severity or "error" for v in report.violations} == {severity}


def test_pairs_without_log_probabilities_are_trained(tmp_path: Path) -> None:
    """Validation warns of both sides. The tasks' pairs are equal, so there is one."""
    gymdata.pairs(run_without_log_probs(tmp_path / "run"), output=tmp_path / "pairs")
    report = gymdata.validate(tmp_path / "pairs")
    assert (report.errors, report.by_code) == (0, {"L302": 2})
    config = TrainDpoConfig.load(None, {"model": "m", "output": tmp_path / "out"})
    (data,) = config.parts(str(tmp_path / "pairs"))
    assert len(data) == 1


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
