"""The shipped settings of the trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymdata.train.settings import TRAINERS

FOLDER = Path(__file__).parents[2] / "sample_data"


@pytest.mark.parametrize("algorithm", sorted(TRAINERS))
def test_every_trainer_has_settings_that_load(algorithm: str) -> None:
    """``sample_data/<trainer>.yaml`` loads, and every key that is not ours is one that the trainer has."""
    import importlib

    from trl.trainer.model_config import ModelConfig

    from gymdata.train.trainer_settings import fields_of, sort_settings

    config = TRAINERS[algorithm].load(FOLDER / f"{algorithm}.yaml", {"model": "m", "output": "o"})
    module = importlib.import_module(f"gymdata.train.trainers.{algorithm}")
    sorted_settings = sort_settings(
        config.trainer, {"trainer": fields_of(module.CONFIG), "model": fields_of(ModelConfig)}
    )
    assert sorted_settings["trainer"]["learning_rate"] > 0
