"""Data that would spoil a training, or teach nothing, is refused by name before a trainer starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.train import run
from gymdata.commands.train.settings import TRAINERS
from gymdata.errors import GymdataError, RefusedError
from gymdata.models.model_identity import ModelFacts
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import write_run_json
from tests.rollout_files import experiences, rollout, rollouts_table, two_turns, write_table
from tests.servers import Watcher
from tests.train.prepared_only import only_prepared

MODEL = ModelFacts("model", "policy", "tokens", "template", vocab_size=50, max_length=100)


def train(algorithm: str, source: str, folder: Path, **settings: Any) -> list[str]:
    """The messages of a dry run whose trainer does nothing; ``value`` holds nothing out."""
    settings |= {"split": 0} if algorithm == "value" else {}
    config = TRAINERS[algorithm].load(None, {"model": "model", "output": folder / "out", **settings})
    watch = Watcher()
    run.train(source, config, model=MODEL, run_job=only_prepared, dry_run=True, progress=watch)
    return watch.said


@pytest.mark.parametrize("algorithm", ["rl", "value"])
@pytest.mark.parametrize("name", ["weight", "temperature"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_or_temperature_that_means_nothing_is_refused_with_its_row(
    algorithm: str, name: str, bad: float, tmp_path: Path
) -> None:
    """A negative weight would teach the opposite, and NaN spoils all: the file, the row, the column and what to do."""
    source = experiences(tmp_path, [{}, {}, {name: bad}, {}])
    with pytest.raises(GymdataError, match=rf"{source}, row 2, sequence r2/0: {name}: got {bad}, expected") as refused:
        train(algorithm, source, tmp_path)
    assert refused.value.hint == "correct these rows, or leave them out"
    assert refused.value.exit_code in (1, 2)


def test_a_reference_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """NaN at one trained token, where every other row has numbers."""
    known, unknown = {"ref_logprobs": [0.0, -1.0, -1.0]}, {"ref_logprobs": [0.0, -1.0, float("nan")]}
    source = experiences(tmp_path, [known, known, known, unknown, known])
    with pytest.raises(GymdataError, match="sequence r3/0: a log-probability of nan at position 2"):
        train("rl", source, tmp_path)


def test_weights_that_are_all_zero_are_refused(tmp_path: Path) -> None:
    """With them the loss is 0, whatever the advantages."""
    with pytest.raises(GymdataError, match="weight is 0 in every row: nothing would be learned"):
        train("rl", experiences(tmp_path, [{"weight": 0.0}, {"weight": 0.0}]), tmp_path)
    train("rl", experiences(tmp_path, [{"weight": 0.0}, {"weight": 1.0}]), tmp_path)


@pytest.mark.parametrize("algorithm", ["sft", "kto"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 3])
def test_a_reward_that_is_no_number_is_refused_with_its_row(
    algorithm: str, bad: float, place: int, tmp_path: Path
) -> None:
    """Whether the rollout would be chosen or not: a missing reward is null, and anything else was computed wrongly."""
    rows = solved_and_not()
    rows[place]["reward"] = bad
    source = written(tmp_path, rows)
    name = rows[place]["rollout_id"]
    with pytest.raises(
        GymdataError, match=rf"{source}, row {place}, rollout {name}: reward: got {bad}, expected a finite"
    ):
        train(algorithm, source, tmp_path)
    rows[place]["reward"] = None
    train(algorithm, written(tmp_path, rows), tmp_path)


@pytest.mark.parametrize("algorithm", ["rl", "value"])
def test_a_reward_of_experiences_that_is_no_number_is_refused(algorithm: str, tmp_path: Path) -> None:
    """A loss may be computed from it."""
    source = experiences(tmp_path, [{}, {"reward": float("inf")}, {"reward": None}])
    with pytest.raises(GymdataError, match=rf"{source}, row 1, experience r1/0: reward: got inf, expected a finite"):
        train(algorithm, source, tmp_path)


@pytest.mark.parametrize(("algorithm", "settings"), [("sft", {}), ("sft", {"select": "all"}), ("kto", {})])
@pytest.mark.parametrize("whole", [True, False])
def test_a_rollout_that_is_there_twice_is_refused(
    algorithm: str, settings: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    """A row twice, or one name on two rows of which only one would be trained."""
    rows = solved_and_not()
    rows = [*rows, rows[0]] if whole else [*rows[:-1], {**rows[-1], "rollout_id": rows[0]["rollout_id"]}]
    source = written(tmp_path, rows)
    with pytest.raises(GymdataError, match=rf"{source}: duplicate"):
        train(algorithm, source, tmp_path, **settings)


@pytest.mark.parametrize("algorithm", ["rl", "value"])
@pytest.mark.parametrize("bad", [-3, 4, 10**6])
def test_a_turn_that_begins_outside_of_its_row_is_refused(algorithm: str, bad: int, tmp_path: Path) -> None:
    """Also where no loss reads it: such a row was put together wrongly."""
    source = experiences(tmp_path, [{}, {}, {"turn_starts": [1, bad]}])
    with pytest.raises(
        GymdataError, match=rf"{source}, row 2, sequence r2/0: turn_starts: got {bad}, expected a place"
    ):
        train(algorithm, source, tmp_path)


def test_the_best_of_equal_rewards_is_told(tmp_path: Path) -> None:
    """In a group whose rewards are all equal there is no best: how many there are, of how many, and what else to do."""
    rows = solved_and_not()
    for row in rows[:3]:
        row["reward"] = 1.0
    source = written(tmp_path, rows)
    assert "in 1 of 2 chosen groups all rewards are equal" in "".join(train("sft", source, tmp_path))
    assert "rewards are equal" not in "".join(train("sft", source, tmp_path, select="above"))
    assert "rewards are equal" not in "".join(train("sft", written(tmp_path, solved_and_not()), tmp_path))


def solved_and_not() -> list[dict[str, Any]]:
    """Two groups of three rollouts, of which the first succeeds."""
    return [rollout(task, i, float(i == 0), two_turns(5 + i, 40 + i)) for task in ("a", "b") for i in range(3)]


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_table(rollouts_table(rows), folder / "rollouts.parquet", ROLLOUTS))


@pytest.mark.parametrize(
    ("logprobs", "why"),
    [
        ([0.0, 0.0, 0.0], "all 64 log-probabilities are 0"),
        ([0.0, -0.5, -1.25], "at most two decimals"),
        ([0.0, -0.503, -9999.0], "32 of 64 log-probabilities are below -87.3"),
    ],
)
def test_ratios_to_what_no_sampler_recorded_are_refused(logprobs: list[float], why: str, tmp_path: Path) -> None:
    """train-rl refuses 64 such log-probabilities (L306); the flag trains with a warning, and greedy rows are L304."""
    source = experiences(tmp_path, [{"logprobs": logprobs}] * 32)
    with pytest.raises(RefusedError, match=f"L306.*{why}") as refused:
        train("rl", source, tmp_path)
    assert "--allow-biased-logprobs" in str(refused.value.hint)
    said = train("rl", source, tmp_path, allow_biased_logprobs=True)
    assert any("biased log-probabilities (L306)" in line and why in line for line in said)
    assert not any(
        "L306" in line for line in train("rl", experiences(tmp_path, [{"logprobs": logprobs}] * 31), tmp_path)
    )
    greedy = experiences(tmp_path, [{"logprobs": logprobs, "temperature": 0.0}] * 32)
    with pytest.raises(RefusedError, match=r"L304.*greedy"):
        train("rl", greedy, tmp_path)


def test_ratios_to_sequences_that_no_sampler_recorded_are_refused(tmp_path: Path) -> None:
    """Half of the sequences have zeros, 8 tokens each: they are named from 64 tokens on."""
    ids, mask = list(range(1, 10)), [0, *[1] * 8]
    rows = [
        {"input_ids": ids, "loss_mask": mask, "advantages": [0.0, *[1.0] * 8], "logprobs": [0.0, *numbers]}
        for numbers in ([0.0] * 8, [-0.123 * k for k in range(1, 9)])
    ]
    with pytest.raises(RefusedError, match=r"L306.*64 of 128 log-probabilities are of rollouts in which all are equal"):
        train("rl", experiences(tmp_path, rows * 8), tmp_path)


def test_what_is_not_known_of_the_origin_is_said_as_it_is(tmp_path: Path) -> None:
    """Of a file without run.json, and of one whose run names no tokenizer: two warnings that are true."""
    source = experiences(tmp_path, [{}] * 4)
    assert [line for line in train("rl", source, tmp_path) if "tokenizer" in line] == [
        f"warning: {source}: nothing beside it names a tokenizer, which is not checked"
    ]
    write_run_json(tmp_path, {"stage": "import"})
    assert [line for line in train("rl", source, tmp_path) if "tokenizer" in line] == [
        f"warning: {source}: no run.json that it leads to (import) names a tokenizer, which is not checked"
    ]
