"""Dumps of three systems, made of the shipped rollouts: imported, checked, and trained on the ids that they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

import gymdata as library
from gymdata.commands.check.rollouts import check_rollouts
from tests.formats.dumped import pickled
from tests.train.trainers.running import gymdata

pytestmark = pytest.mark.torch
SAMPLE_DATA = Path(__file__).parents[3] / "sample_data"


class Sequence(NamedTuple):
    """A rollout as trainers dump it: the ids of its last call, 1 where one was sampled, log-probs that are 0 elsewhere."""

    n_prompt: int
    ids: list[int]
    mask: list[int]
    log_probs: list[float]
    reward: float

    @property
    def sampled(self) -> list[int]:
        return [token for token, is_sampled in zip(self.ids, self.mask, strict=True) if is_sampled]


def sequence_of(row: dict[str, Any]) -> Sequence:
    """The sequence of a row of NeMo Gym whose calls go on from each other."""
    calls = [item for item in row["response"]["output"] if "generation_token_ids" in item]
    sequence = Sequence(len(calls[0]["prompt_token_ids"]), [], [], [], row["reward"])
    for call in calls:
        context, sampled = call["prompt_token_ids"][len(sequence.ids) :], call["generation_token_ids"]
        sequence.ids.extend(context + sampled)
        sequence.mask.extend([0] * len(context) + [1] * len(sampled))
        sequence.log_probs.extend([0.0] * len(context) + call["generation_log_probs"])
    return sequence


SEQUENCES = [
    sequence_of(json.loads(line)) for line in (SAMPLE_DATA / "rollouts" / "nemo_gym.jsonl").read_text().splitlines()
]


def verl(folder: Path) -> Path:
    """``gen_batch.dp``: prompts are padded before, responses after."""
    prompt = max(s.n_prompt for s in SEQUENCES)
    response = max(len(s.ids) - s.n_prompt for s in SEQUENCES)
    columns: dict[str, list[Any]] = {}
    for s in SEQUENCES:
        before, after = [0] * (prompt - s.n_prompt), [0] * (response - len(s.ids) + s.n_prompt)
        row = {
            "prompts": before + s.ids[: s.n_prompt],
            "responses": s.ids[s.n_prompt :] + after,
            "response_mask": s.mask[s.n_prompt :] + after,
            "attention_mask": before + [1] * len(s.ids) + after,
            "rollout_log_probs": np.array(s.log_probs[s.n_prompt :] + after, np.float32),
            "rm_scores": np.array([s.reward, *[0] * (response - 1)], np.float32),
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    arrays = {name: np.array(values) for name, values in columns.items()}
    state = {k: (str(a.dtype), a.shape, np.frombuffer(a.tobytes(), np.uint8)) for k, a in arrays.items()}
    file = folder / "gen_batch.dp"
    file.write_bytes(pickled("verl.protocol", "DataProto", (((len(SEQUENCES),), None, state), {}, {})))
    return file


def slime(folder: Path) -> Path:
    """``--save-debug-rollout-data``."""
    import torch

    samples = [
        {"index": n, "group_index": n // 3, "prompt": "", "response": "", "tokens": s.ids, "reward": s.reward,
         "response_length": len(s.ids) - s.n_prompt, "loss_mask": s.mask[s.n_prompt :], "status": "completed",
         "rollout_log_probs": s.log_probs[s.n_prompt :]}
        for n, s in enumerate(SEQUENCES)
    ]  # fmt: skip
    torch.save({"rollout_id": 0, "samples": samples}, folder / "0.pt")
    return folder / "0.pt"


def prime_rl(folder: Path) -> Path:
    """``enable_token_export``."""
    rows = [
        {"step": 0, "export_sequence_idx": n, "env_name": "sums", "token_ids": s.ids, "advantages": [0.0] * len(s.ids),
         "loss_mask": [bool(value) for value in s.mask], "inference_logprobs": s.log_probs}
        for n, s in enumerate(SEQUENCES)
    ]  # fmt: skip
    (folder / "rank_0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rank_0.jsonl"


def saved(completion_ids: list[list[int]]) -> list[float]:
    """The rewards, of rollouts by their ids after the prompt."""
    rewards = {tuple(s.ids[s.n_prompt :]): s.reward for s in SEQUENCES}
    return [rewards[tuple(ids)] for ids in completion_ids]


@pytest.mark.parametrize("written", [verl, slime, prime_rl])
def test_the_ids_that_are_trained_are_those_that_the_dump_says_were_sampled(
    written: Callable[[Path], Path], tmp_path: Path
) -> None:
    """With the log-probs of the policy that sampled them; prime-rl writes no rewards, so its rollouts are scored first."""
    file, run = written(tmp_path), tmp_path / "run"
    report = check_rollouts(file)
    assert (report.ok, report.validation.trainable, report.log_probs) == (True, len(SEQUENCES), "plausible")
    library.import_rollouts(file, run)
    if written is prime_rl:
        library.score(run, reward=saved)
    library.experience(run, output=tmp_path / "experiences")
    rows = pq.read_table(tmp_path / "experiences" / "experiences.parquet")
    ids = [
        [token for token, is_trained in zip(*lists, strict=True) if is_trained]
        for lists in zip(rows["input_ids"].to_pylist(), rows["loss_mask"].to_pylist(), strict=True)
    ]
    assert sorted(ids) == sorted(s.sampled for s in SEQUENCES)
    trained = gymdata("train-rl", tmp_path / "experiences", "-m", SAMPLE_DATA / "policy", "-o", tmp_path / "policy",
                      "--config", SAMPLE_DATA / "rl.yaml", "--set", "max_steps=2", "--json")  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    facts = json.loads(trained.stdout)
    n_tokens = sum(len(s.sampled) for s in SEQUENCES)
    assert (facts["steps"], facts["trained_tokens"]["equal"], facts["ratio"]["tokens"]) == (2, True, n_tokens)
    assert facts["ratio"]["mean"] == pytest.approx(1, abs=1e-4)
