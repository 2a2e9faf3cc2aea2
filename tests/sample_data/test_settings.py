"""The shipped settings of the trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymdata.commands.train.settings import TRAINERS

FOLDER = Path(__file__).parents[2] / "sample_data"
RECIPES = list((FOLDER / "recipes").iterdir())


FILES = [*(f"{algorithm}.yaml" for algorithm in sorted(TRAINERS)), *sorted(f"recipes/{file.name}" for file in RECIPES)]


def test_there_is_a_recipe_for_each_trainer_and_size() -> None:
    assert {file.stem for file in RECIPES} == {
        f"{algorithm}-{size}" for algorithm in ("sft", "dpo", "kto", "rl") for size in ("135m", "1.5b", "7b")
    }


@pytest.mark.parametrize("file", FILES)
def test_settings_load(file: str) -> None:
    """``sample_data/<trainer>.yaml`` and recipes load, and every key that is not ours is one that the trainer has."""
    import importlib

    from trl.trainer.model_config import ModelConfig

    from gymdata.commands.train.trainer_settings import fields_of, sort_settings

    algorithm = Path(file).stem.partition("-")[0]
    config = TRAINERS[algorithm].load(FOLDER / file, {"model": "m", "output": "o"})
    module = importlib.import_module(f"gymdata.commands.train.trainers.{algorithm}")
    sorted_settings = sort_settings(
        config.trainer, {"trainer": fields_of(module.CONFIG), "model": fields_of(ModelConfig)}
    )
    assert sorted_settings["trainer"]["learning_rate"] > 0
