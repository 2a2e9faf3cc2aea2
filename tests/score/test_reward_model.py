"""A reward model reads the saved ids, and its scores are those of the model itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.score.run import score
from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_run_json, read_table, write_run_json
from tests.rollout_files import rollout, rollouts_table, two_turns, write_run, write_table
from tests.train.trainers.conftest import (
    policy,  # noqa: F401 - fixture
    save_classifier,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def reward_model(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier of one label with the policy's tokenizer."""
    folder = save_classifier(policy, tmp_path_factory.mktemp("models") / "judge of taste")
    write_run_json(folder, {"stage": "train-reward", "run_id": "rm-1"})
    return folder


@pytest.fixture
def run(tmp_path: Path, policy: Path) -> Path:
    """Rollouts of several lengths, one too long, one without ids, one that ends with the padding token."""
    from gymdata.models.model_identity import model_facts

    rows = [
        rollout(f"t{k}", 0, None, two_turns(k + 3, 20 + k) if k % 2 else [([5] * (k + 1), [9, 2])]) for k in range(9)
    ]
    rows.append(rollout("long", 0, None, [([5] * 70, [9, 2])]))
    rows.append(rollout("bare", 0, None, []))
    rows.append(rollout("padded", 0, None, [([5], [9, 0])]))
    folder = write_run(tmp_path / "run", rows)
    identity = {"tokenizer_hash": model_facts(str(policy)).tokenizer_hash}
    write_run_json(folder, read_run_json(folder) | {"identity": identity})
    return folder


def alone(folder: Path, ids: list[int]) -> float:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    with torch.inference_mode():
        return float(model(torch.tensor([ids])).logits[0, 0])


def test_scores_are_those_of_the_saved_ids(run: Path, reward_model: Path) -> None:
    """Each score is the model's on prompt and generation of the last turn, alone; lineage names the model."""
    summary = score(path=str(run), reward_model=str(reward_model))
    assert (summary.name, summary.scored, summary.failed, summary.exit_code) == ("judge_of_taste", 9, 3, 1)
    rows = {r["rollout_id"]: r for r in read_table(run / "scores-judge_of_taste", SCORES).to_pylist()}
    for row in read_table(run).to_pylist():
        if row["rollout_id"].startswith("t"):
            turns: Any = row["turns"]
            ids = [*expand_prompts(turns)[-1].tolist(), *turns[-1]["generation_token_ids"]]
            assert np.isclose(rows[row["rollout_id"]]["value"], alone(reward_model, ids), atol=1e-5)
    assert "reads at most 64" in rows["long-0"]["detail"]
    assert "T205" in rows["bare-0"]["detail"]
    assert "padding" in rows["padded-0"]["detail"]
    assert rows["t0-0"]["source"].startswith("model:")
    assert [p["run_id"] for p in read_run_json(run / "scores-judge_of_taste")["parents"]] == ["run-1", "rm-1"]


def test_another_tokenizer_is_refused(run: Path, reward_model: Path) -> None:
    """Ids of another tokenizer would be other text to the model."""
    write_run_json(run, read_run_json(run) | {"identity": {"tokenizer_hash": "other"}})
    with pytest.raises(RefusedError, match="sampled with tokenizer other"):
        score(path=str(run), reward_model=str(reward_model))


def test_a_model_without_a_scoring_head_is_refused(
    run: Path,
    policy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model for generation would score with random weights; the error alone says so, without transformers' report."""
    told: list[logging.LogRecord] = []
    listening = logging.Handler()
    monkeypatch.setattr(listening, "emit", told.append)
    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "handlers", [*library.handlers, listening])
    library.setLevel(logging.WARNING)
    with pytest.raises(DataError, match=r"is no reward model.*score"):
        score(path=str(run), reward_model=str(policy))
    assert told == []
    assert library.level == logging.WARNING


def test_a_changed_rollout_is_not_scored(run: Path, reward_model: Path) -> None:
    """Turns whose digest does not hold are refused."""
    rows = read_table(run).to_pylist()
    rows[0]["turns"][0]["generation_token_ids"][0] += 1
    write_table(rollouts_table(rows), next((run / "rollouts").glob("part-*")), ROLLOUTS)
    with pytest.raises(DataError, match="T209"):
        score(path=str(run), reward_model=str(reward_model))
