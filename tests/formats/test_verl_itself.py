"""verl's own loader of saved rollouts reads what was filtered here (``pip install --no-deps verl TransferQueue tensordict
pyvers omegaconf hydra-core codetiming`` in an environment of its own)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import gymdata
from tests.formats.dumped import DUMPS, VERL

pytestmark = [pytest.mark.full, pytest.mark.torch]


def test_a_filtered_dump_is_loaded_by_verl_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's dump, imported, filtered and exported, is what its trainer puts into its queue in place of sampling: the ids,
    log-probabilities, masks and rewards of the two rollouts that were kept. Only the queue is a list here."""
    skip = pytest.importorskip("verl.utils.skip.rollout_skip")
    transfer_queue = pytest.importorskip("transfer_queue")
    from omegaconf import OmegaConf

    shutil.copy(DUMPS / "verl-gen_batch-numpy.dp", tmp_path / "gen_batch.dp")
    gymdata.import_rollouts(tmp_path / "gen_batch.dp", tmp_path / "run")
    gymdata.filter(tmp_path / "run", tmp_path / "kept", where="reward > 0")
    settings = {"action": "cache", "enable": True, "dump_dir": str(tmp_path / "dump"), "steps": [1]}
    trainer = {
        "trainer": {"experiment_name": "e", "project_name": "p", "v1": {"trainer_mode": "sync"}},
        "data": {"gen_batch_size": 1, "train_batch_size": 1, "max_prompt_length": 8, "max_response_length": 8},
        "actor_rollout_ref": {"rollout": {"n": 2, "prompt_length": 8, "response_length": 8}},
    }
    loader = skip.RolloutTqSkip(OmegaConf.create(settings), OmegaConf.create(trainer))
    folder = Path(settings["dump_dir"], "e_p", "GBS1_N2_in8_out8", "1", "0")
    folder.mkdir(parents=True)
    gymdata.export(tmp_path / "kept", folder / "tq_batch.pt", "verl-skip")
    (folder / "meta.json").write_text("{}")
    assert loader.has_v1_cache(1)

    queued: list[dict[str, Any]] = []
    monkeypatch.setattr(transfer_queue, "kv_batch_put", lambda **put: queued.append(put))
    loader.load_dump_data(1, ["new"], n=2, global_steps=7)
    trajectories, prompts = queued
    assert (trajectories["keys"], prompts["keys"]) == (["new_0_0", "new_1_0"], ["new"])
    assert {tag["global_steps"] for tag in trajectories["tags"]} == {7}

    def loaded(name: str) -> list[list[float]]:
        return [row.tolist() for row in trajectories["fields"][name].unbind()]

    first, second = VERL[:2]
    assert loaded("prompts") == [first[0], second[0]] == [[5, 6], [5, 6]]
    assert loaded("responses") == [[1, 2, 3, 9], [1, 2]]
    assert loaded("response_mask") == [[1, 1, 0, 1], [1, 1]]
    assert loaded("rollout_log_probs") == [[-0.5, -0.25, 0.0, -1.0], [-0.5, -0.25]]
    assert loaded("rm_scores") == [[0.0, 0.0, 0.0, 1.0], [0.0, 0.5]]
