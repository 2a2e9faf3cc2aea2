"""``train-* --annotate``: what each step saw of each sampled token, beside the rollouts."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import gymdata as library
from gymdata.errors import RefusedError, StoreError
from gymdata.rollouts.schema import ANNOTATIONS
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table, write_run_json
from gymdata.train.annotations import AnnotationWriter, TurnPlaces, parts, place_of, run_behind, turn_places
from tests.rollout_files import (
    BRANCH,
    BREAK,
    RETRY,
    experience_rows,
    rollout,
    rollouts_table,
    training_data,
    two_turns,
    write_experiences,
    write_run,
)
from tests.train.trainers.running import gymdata

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
SHAPES = [two_turns(5, 40), BREAK, BRANCH, RETRY, two_turns(6, 41), two_turns(7, 42)]


def rows(**columns: Any) -> list[dict[str, Any]]:
    """Two tasks of three rollouts, among them broken and branching ones; log-probs from −1 down."""
    return [rollout("ab"[i // 3], i, float(i % 3), shape, **columns) for i, shape in enumerate(SHAPES)]


def sampled(made: list[dict[str, Any]]) -> dict[tuple[str, int], Any]:
    """(rollout, turn) → the turn, with its whole prompt."""
    return {
        (row["rollout_id"], number): {**turn, "prompt": prompt}
        for row in made
        for number, (turn, prompt) in enumerate(
            zip(row["turns"], expand_prompts(row["turns"], check_digests=False), strict=True)
        )
    }


def logprobs_of(policy: Path, turn: Any, temperature: float = 1.0) -> list[float]:
    """float64 log π of a turn's generation after its prompt, alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = _models.setdefault(policy, AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64))
    prompt, own = turn["prompt"].tolist(), turn["generation_token_ids"].tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + own])).logits[0, len(prompt) - 1 : -1] / temperature
    found: list[float] = torch.log_softmax(logits, dim=-1)[torch.arange(len(own)), torch.tensor(own)].tolist()
    return found


_models: dict[Path, Any] = {}


def losses(out: Path) -> dict[int, float]:
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in logged if "loss" in row}


def train(kind: str, source: Path, policy: Path, out: Path, *more: object, rate: float = 0.0) -> Any:
    fixed = ("--set", f"learning_rate={rate}", "--set", "per_device_train_batch_size=2", "--json")
    done = gymdata(f"train-{kind}", source, "-m", policy, "-o", out, *fixed, *more)
    # Nothing is learned at a rate of 0.
    assert done.returncode == (0 if rate else 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_rl_rows_are_those_of_the_rollouts(policy: Path, tmp_path: Path, processes: int) -> None:
    """Each epoch has one row for each turn, token for token: log π is that of a float64 model on the turn alone, the ratio
    is to the turn's saved log-prob, PPO's bounds say what is clipped, and a step's parts add up to its loss."""
    made = rows(temperature=0.7)
    run = write_run(tmp_path / "run", made)
    words = ("experience", run, "--estimator", "reinforce-baseline", "--set", "abandoned=keep")
    assert (done := gymdata(*words)).returncode == 0, done.stderr
    source, out = run / "experiences-reinforce-baseline", tmp_path / "rl"
    report = train("rl", source, policy, out, "--annotate", "--set", "num_train_epochs=2",
                   "--set", f"gradient_accumulation_steps={3 - processes}", "--num-processes", processes)  # fmt: skip
    table = read_table(run, ANNOTATIONS)
    assert report["trained_tokens"]["equal"] is True
    assert report["annotations"] == {"file": str(run / "annotations-rl" / "annotations.parquet"), "rows": len(table)}
    turns, found = sampled(made), table.to_pylist()
    assert sorted((row["rollout_id"], row["turn"]) for row in found) == sorted([*turns, *turns])
    assert {row["training"] for row in found} == {"rl"}
    if processes == 1:
        assert [row["step"] for row in found] == sorted(row["step"] for row in found)
    advantage = {row["rollout_id"]: row["reward"] - 1.0 for row in made}
    total: dict[int, float] = defaultdict(float)
    for row in found:
        turn, a = turns[row["rollout_id"], row["turn"]], advantage[row["rollout_id"]]
        expected = logprobs_of(policy, turn, 0.7)
        saved = turn["generation_log_probs"].tolist()
        assert row["logprobs"] == pytest.approx(expected, abs=2e-5)
        assert row["ratios"] == pytest.approx([math.exp(e - s) for e, s in zip(expected, saved, strict=True)], rel=1e-4)
        outside = [(a > 0 and r > 1.2) or (a < 0 and r < 0.8) for r in row["ratios"]]
        assert [bool(c) for c in row["clipped"]] == outside
        total[row["step"]] += math.fsum(row["losses"])
    assert any(any(row["clipped"]) for row in found)
    assert dict(total) == pytest.approx(losses(out), rel=1e-4, abs=1e-4)
    assert not (out / "annotations").exists()
    sql = "SELECT step, sum(list_sum(losses)) AS loss FROM annotations GROUP BY step ORDER BY step"
    assert dict(zip(*library.query(sql, run).to_pydict().values(), strict=True)) == pytest.approx(dict(total))


@pytest.mark.matrix("True")
@pytest.mark.parametrize("packing", [False, True])
def test_sft_rows_are_those_of_the_rollouts(policy: Path, tmp_path: Path, packing: bool) -> None:
    """Supervised, cut and packed: log π at temperature 1, no ratio to a sampler, losses that add up; of a turn that the cut
    goes through, the tokens behind it have none, and turns behind it no row."""
    made = rows()
    run, out = write_run(tmp_path / "run", made), tmp_path / "sft"
    more = ["--packing", "--pack-length", 16] if packing else []
    words = [
        "--annotate",
        "--select",
        "all",
        "--abandoned",
        "keep",
        "--max-length",
        8,
        "--set",
        "num_train_epochs=1",
        *more,
    ]
    train("sft", run, policy, out, *words)
    turns, found = sampled(made), read_table(run, ANNOTATIONS).to_pylist()
    reached = {name: turn for name, turn in turns.items() if len(turn["prompt"]) < 8}
    assert sorted((row["rollout_id"], row["turn"]) for row in found) == sorted(reached)
    cut = 0
    for row in found:
        turn = turns[row["rollout_id"], row["turn"]]
        expected, room = logprobs_of(policy, turn), 8 - len(turn["prompt"])
        cut += room < len(expected)
        assert len(row["logprobs"]) == len(row["losses"]) == len(expected)
        assert row["logprobs"][:room] == pytest.approx(expected[:room], abs=2e-5)
        assert all(math.isnan(lp) for lp in row["logprobs"][room:])
        assert not any(row["losses"][room:])
        assert row["ratios"] is row["clipped"] is None
    # Of three answers of two tokens, each after seven, the first token is left.
    assert cut == 3
    total: dict[int, float] = defaultdict(float)
    for row in found:
        total[row["step"]] += math.fsum(row["losses"])
    assert dict(total) == pytest.approx(losses(out), rel=1e-4)


@pytest.mark.full
def test_value_rows_are_those_of_the_rollouts(policy: Path, tmp_path: Path) -> None:
    """A critic has a value for each token, here 0 of a head of zeros, and half its squared distance to the return, divided
    by the tokens of the step, as the token's part of the loss."""
    made = rows()
    run, out = write_run(tmp_path / "run", made), tmp_path / "value"
    assert (
        gymdata("experience", run, "--estimator", "gae", "--abandoned", "keep", "-o", tmp_path / "returns").returncode
        == 0
    )
    train("value", tmp_path / "returns", policy, out, "--annotate", "--set", "split=0", "--set", "num_train_epochs=1")
    found, reward = read_table(run, ANNOTATIONS).to_pylist(), {row["rollout_id"]: row["reward"] for row in made}
    assert sorted((row["rollout_id"], row["turn"]) for row in found) == sorted(sampled(made))
    tokens: dict[int, int] = defaultdict(int)
    for row in found:
        tokens[row["step"]] += len(row["values"])
    for row in found:
        assert row["values"] == [0.0] * len(row["values"])
        part = reward[row["rollout_id"]] ** 2 / 2 / tokens[row["step"]]
        assert row["losses"] == pytest.approx([part] * len(row["values"]))
        assert row["logprobs"] is row["ratios"] is row["clipped"] is None


@pytest.mark.full
def test_memory_is_bounded(tmp_path: Path) -> None:
    """What is held is written once it has ``max_tokens`` tokens; files come in the order of their steps, each process's
    apart, and beginning after a step drops those of later ones."""
    places = TurnPlaces(["a", "b"], np.array([0, 1]), np.array([0, 1]), np.array([2, 7]), np.array([4, 3]))
    writers = [AnnotationWriter(tmp_path / "annotations", places, "t", rank, max_tokens=10) for rank in (0, 1)]
    for step in (1, 2, 3):
        writers[0].add(step, np.array([2, 3, 5, 8]), {"losses": np.array([1.0, 2.0, 3.0, 4.0])})
        writers[1].add(step, np.array([9]), {"losses": np.array([float(step)])})
    for writer in writers:
        writer.flush()
    files = parts(tmp_path / "annotations")
    assert [file.name for file in files] == [
        "0000000001-0000-000000.parquet", "0000000001-0001-000000.parquet", "0000000003-0000-000001.parquet",
    ]  # fmt: skip
    assert pq.read_table(files[0]).to_pydict() == {
        "rollout_id": ["a", "b", "a", "b"], "turn": [0, 1, 0, 1], "step": [1, 1, 2, 2], "training": ["t"] * 4,
        "logprobs": [None] * 4, "ratios": [None] * 4, "clipped": [None] * 4,
        "values": [None] * 4, "losses": [[1.0, 2.0, 0.0, 3.0], [0.0, 4.0, 0.0]] * 2,
    }  # fmt: skip
    AnnotationWriter(tmp_path / "annotations", places, "t").begin(2)
    assert parts(tmp_path / "annotations") == files[:2]


def test_the_run_is_found_and_named(policy: Path, tmp_path: Path) -> None:
    """Beside the one run that the rollouts are of, also when it was moved; rollouts without a folder, or of two, and the
    place of another training are refused."""
    run = write_run(tmp_path / "run", rows())
    assert gymdata("experience", run).returncode == 0
    moved = run.rename(tmp_path / "moved")
    assert run_behind(moved / "experiences-grpo") == moved
    bare = write_experiences(tmp_path, experience_rows(policy))
    with pytest.raises(RefusedError, match="--annotate writes beside the rollouts, and no run folder holds them"):
        run_behind(bare)
    other = write_run(tmp_path / "other", rows())
    facts = {"stage": "experiences", "parents": [{"path": str(moved)}, {"path": str(other)}]}
    (tmp_path / "both").mkdir()
    write_run_json(tmp_path / "both", facts)
    with pytest.raises(RefusedError, match="they are of 2 runs"):
        run_behind(tmp_path / "both")
    (other / "annotations-rl").mkdir()
    write_run_json(other / "annotations-rl", {"stage": "annotations", "training": "/elsewhere/rl"})
    with pytest.raises(StoreError, match=r"annotations-rl: holds what another training saw, /elsewhere/rl"):
        place_of(other, tmp_path / "rl")
    assert place_of(other, tmp_path / "second") == other / "annotations-second"


def test_tokens_that_no_turn_sampled_are_refused(tmp_path: Path) -> None:
    """A sequence whose trained tokens are not all of turns of the run, or whose rollout is not there, is named."""
    made = rows()
    run = write_run(tmp_path / "run", made)
    data = training_data("sft", rollouts_table(made), select="all", keep_duplicates=True, abandoned="keep")
    places = turn_places(data, run)
    named = [places.rollout_ids[row] for row in places.sequence]
    assert sorted(zip(named, places.turn.tolist(), strict=True)) == sorted(sampled(made))
    data.sequences.loss_mask.values[data.sequences.loss_mask.offsets[1] - 4] = 1
    with pytest.raises(
        RefusedError, match=r"1 of \d+ sequences train tokens that no turn in .* sampled \(first: a-0/0\)"
    ):
        turn_places(data, run)
    some = training_data("sft", rollouts_table([rollout("z", 9, 1.0, BREAK)]), select="all")
    with pytest.raises(RefusedError, match="2 of 2 sequences"):
        turn_places(some, run)
