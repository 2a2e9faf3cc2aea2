"""Data that would spoil a training, or teach nothing, is refused by name before a trainer starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymdata.errors import GymdataError
from gymdata.models.model_identity import ModelFacts
from gymdata.train import run
from gymdata.train.settings import TRAINERS
from tests.train.experience_table import experiences

MODEL = ModelFacts("model", "policy", "tokens", "template", vocab_size=50, max_length=100)


def train(algorithm: str, source: str, folder: Path, **settings: Any) -> None:
    """A dry run whose trainer does nothing."""
    config = TRAINERS[algorithm].load(None, {"model": "model", "output": folder / "out", **settings})
    run.train(source, config, model=MODEL, run_job=lambda *_: {}, dry_run=True)


@pytest.mark.parametrize("algorithm", ["rl", "value"])
@pytest.mark.parametrize("name", ["weight", "temperature"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_or_temperature_that_means_nothing_is_refused_with_its_row(
    algorithm: str, name: str, bad: float, tmp_path: Path
) -> None:
    """A negative weight would teach the opposite, and NaN spoils all: the file, the row, the column and what to do."""
    source = experiences(tmp_path, [{}, {}, {name: bad}, {}])
    settings = {"split": 0} if algorithm == "value" else {}
    with pytest.raises(GymdataError, match=rf"{source}, row 2, sequence r2/0: {name}: got {bad}, expected") as refused:
        train(algorithm, source, tmp_path, **settings)
    assert refused.value.hint == "correct these rows, or leave them out"
    assert refused.value.exit_code in (1, 2)


@pytest.mark.parametrize(
    ("algorithm", "row", "says"),
    [
        ("rl", {"advantages": [0.0, 1e6, 1.0]}, "advantages of r3/0 is ±1e+06"),
        ("rl", {"advantages": [0.0, 1.0, -1e6]}, "advantages of r3/0 is ±1e+06"),
        ("rl", {"weight": 1e6}, "weight of r3/0 is ±1e+06"),
        ("rl", {"advantages": [0.0, 1.0, 1e30]}, "advantages of r3/0 is ±1e+30"),
        ("rl", {"logprobs": [0.0, -1.0, -1e6]}, "logprobs of r3/0 is ±1e+06"),
        ("rl", {"temperature": 1e6}, "temperature of r3/0 is ±1e+06"),
        ("value", {"returns": [0.0, 1.0, 1e6]}, "returns of r3/0 is ±1e+06"),
        ("value", {"values": [0.0, 0.0, 1e6]}, "values of r3/0 is ±1e+06"),
        ("rl", {"ref_logprobs": [0.0, -1.0, float("nan")]}, "sequence r3/0: a log-probability of nan at position 2"),
    ],
)
def test_a_number_beside_which_the_others_mean_nothing_is_refused(
    algorithm: str, row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """An advantage of 1e6 beside ones of 1, and the like in each column that a loss multiplies with."""
    extra = {name: [0.0, 0.0, 0.0] for name in row if name in ("ref_logprobs", "values")}
    source = experiences(tmp_path, [extra, extra, extra, row, extra])
    settings = {"split": 0} if algorithm == "value" else {}
    with pytest.raises(GymdataError, match=f"{source}: .*".replace("+", r"\+") + says.replace("+", r"\+")):
        train(algorithm, source, tmp_path, **settings)


@pytest.mark.parametrize(
    "rows",
    [
        [{"advantages": [0.0, 1e6, -2e6]}, {"advantages": [0.0, 3e5, 0.0]}, {"advantages": [0.0, 1e-9, 0.0]}],
        [{"advantages": [0.0, 1e-17, 0.0]}, {"advantages": [0.0, 1e-17, 0.0]}, {"advantages": [0.0, 1.5, 0.0]}],
        [{"advantages": [0.0, 0.0, 0.0]}, {"advantages": [0.0, 0.0, 0.0]}, {"advantages": [0.0, 900.0, 0.0]}],
        [{"advantages": [1e6, 1.0, 1.0]}, {}],
    ],
    ids=["large rewards", "rounding", "few", "not trained"],
)
def test_numbers_of_one_scale_are_trained(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Large rewards that nothing scaled, advantages that are rounding errors, one success among many, a prompt's number."""
    train("rl", experiences(tmp_path, rows), tmp_path)


def test_weights_that_are_all_zero_are_refused(tmp_path: Path) -> None:
    """With them the loss is 0, whatever the advantages."""
    with pytest.raises(GymdataError, match="weight is 0 in every row: nothing would be learned"):
        train("rl", experiences(tmp_path, [{"weight": 0.0}, {"weight": 0.0}]), tmp_path)
    train("rl", experiences(tmp_path, [{"weight": 0.0}, {"weight": 1.0}]), tmp_path)
