"""``train-rl`` with the sampler's heads: score centering and kept sets, against sums over a whole vocabulary in float64."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata as library
from gymdata.commands.train.losses import LOSSES
from gymdata.commands.train.settings import TrainRlConfig
from gymdata.errors import RefusedError, UsageError
from gymdata.store import read_run_json, write_run_json
from tests.rollout_files import experience_rows, reference_logps, write_experiences
from tests.servers import Watcher
from tests.train.trainers.conftest import start
from tests.train.trainers.running import assert_same, gymdata, loss_and_gradients

pytestmark = pytest.mark.torch
PROCESSED = {"top_p": 0.1, "logprobs_mode": "processed_logprobs", "temperature": 0.5}
#: What limits some ratios of the rows.
SETTINGS: dict[str, dict[str, float]] = {
    "gpg": {}, "tis_reinforce": {"tis_cap": 1.2}, "cispo": {"clip_low": 1.0, "clip_high": 0.2},
    "icepop": {"clip_low": 0.3, "clip_high": 0.3},
}  # fmt: skip


def log_softmax(model: Any, row: dict[str, Any]) -> Any:
    """log p of every id at each position from 1 on, float64 (L − 1, vocabulary)."""
    import torch

    logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1].double()
    return torch.log_softmax(logits / row["temperature"], dim=-1)


def with_heads(policy: Path, rows: list[dict[str, Any]], k: int, nucleus: float | None = None) -> list[dict[str, Any]]:
    """A sampler that is the policy with noise; its k most likely ids are saved at each trained token. ``nucleus``: it keeps
    the ids of that much probability alone, samples the first of them, and all of them are saved."""
    import torch

    rng, made = np.random.default_rng(3), []
    for row in rows:
        row = {**row, "input_ids": list(row["input_ids"]), "logprobs": list(row["logprobs"])}
        ids, logprobs = [], []
        for position, trained in enumerate(row["loss_mask"]):
            ids.append([])
            logprobs.append([])
            if not trained:
                continue
            model, _ = reference_logps(policy, row)
            with torch.no_grad():
                log_p = log_softmax(model, row)[position - 1].numpy()
            log_q = log_p + 0.4 * rng.normal(size=len(log_p))
            log_q -= np.log(np.exp(log_q).sum())
            order = np.argsort(-log_q)
            n = k if nucleus is None else int(np.searchsorted(np.cumsum(np.exp(log_q[order])), nucleus)) + 1
            kept = order[:n]
            values = log_q[kept] if nucleus is None else log_q[kept] - np.log(np.exp(log_q[kept]).sum())
            ids[-1], logprobs[-1] = kept.tolist(), values.tolist()
            if nucleus is not None:
                row["input_ids"][position], row["logprobs"][position] = int(kept[0]), float(values[0])
        made.append({**row, "top_ids": ids, "top_log_probs": logprobs})
    return made


def by_hand(policy: Path, rows: list[dict[str, Any]], name: str, kept_sets: bool) -> tuple[float, dict[str, Any]]:
    """−w·A·log p + A·C of each trained token, with C from every id of the vocabulary where it has a model of the tail."""
    import torch

    weight = {
        "gpg": lambda r: r**0, "tis_reinforce": lambda r: r.clamp(max=1.2), "cispo": lambda r: r.clamp(0, 1.2),
        "icepop": lambda r: torch.where((r >= 0.7) & (r <= 1.3), r, 0.0),
    }[name]  # fmt: skip
    total, count = torch.zeros((), dtype=torch.float64), sum(sum(row["loss_mask"]) for row in rows)
    for row in rows:
        model, _ = reference_logps(policy, row)
        every = log_softmax(model, row)
        for t in range(1, len(row["input_ids"])):
            if not row["loss_mask"][t]:
                continue
            log_p, head = every[t - 1], torch.tensor(row["top_ids"][t], dtype=torch.int64)
            if kept_sets:
                log_p = log_p - log_p[head].logsumexp(0)
            advantage = float(np.float32(row["advantages"][t]))
            own = log_p[row["input_ids"][t]]
            token = -weight(torch.exp(own.detach() - float(np.float32(row["logprobs"][t])))) * advantage * own
            if len(head):
                q_head = torch.tensor(row["top_log_probs"][t], dtype=torch.float32).double().exp()
                p = log_p.detach().exp()
                rho = torch.tensor(0.0) if kept_sets else (1 - q_head.sum()) / (1 - p[head].sum())
                q = rho * p
                q[head] = q_head
                scores = q * torch.nan_to_num(weight(p / q)) * log_p
                token = token + advantage * (scores[head] if kept_sets else scores).sum()
            total = total + row["weight"] * token / count
    model.zero_grad()
    total.backward()
    return float(total.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_same_gradients(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]]) -> None:
    """Values differ by what has no gradient: the tail's part of C."""
    assert_same((0.0, found[1]), (0.0, expected[1]), 2e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_is_that_of_sums_over_the_vocabulary(policy: Path, tmp_path: Path, name: str) -> None:
    """Heads of 5 ids, the tail as ρ·p; one rollout without heads has the loss alone; micro-batches change nothing."""
    rows = with_heads(policy, experience_rows(policy), 5)
    rows[1] |= {"top_ids": [[]] * len(rows[1]["input_ids"]), "top_log_probs": [[]] * len(rows[1]["input_ids"])}
    expected = by_hand(policy, rows, name, kept_sets=False)
    for size in (4, 1):
        settings, more = {"per_device_train_batch_size": size}, {"loss": name, **SETTINGS[name]}
        file = write_experiences(tmp_path / str(size), rows)
        trainer, _ = start("rl", file, policy, tmp_path / f"out{size}", settings, score_centering=True, **more)
        assert_same_gradients(loss_and_gradients(trainer), expected)
    without = [{k: v for k, v in row.items() if not k.startswith("top_")} for row in rows]
    plain, _ = start("rl", write_experiences(tmp_path, without), policy, tmp_path / "plain", {}, **more)
    _, gradients = loss_and_gradients(plain)
    apart = max(float((gradients[n] - gradient).abs().max()) for n, gradient in expected[1].items())
    assert apart > 1e-4  # five times what the others may differ by


def run_of(folder: Path, rows: list[dict[str, Any]], **identity: Any) -> Path:
    """An experiences file that leads back to a run with this identity."""
    write_run_json(folder / "run", {"run_id": "run", "identity": identity})
    place = folder / "run" / "experiences-grpo"
    place.mkdir(parents=True)
    write_experiences(place, rows)
    write_run_json(place, {"stage": "experiences", "parents": [{"path": str(folder / "run"), "run_id": "run"}]})
    return place


@pytest.mark.parametrize("centering", [False, True])
def test_over_kept_sets_the_model_is_normalized(policy: Path, tmp_path: Path, centering: bool) -> None:
    """top_p with every head saved: ratios, loss and term are over the kept ids, and nothing is refused."""
    rows = with_heads(policy, experience_rows(policy), 0, nucleus=0.1)
    more = {"loss": "tis_reinforce", "score_centering": centering, **SETTINGS["tis_reinforce"]}
    trainer, _ = start("rl", run_of(tmp_path, rows, **PROCESSED), policy, tmp_path / "out", {}, **more)
    assert trainer.kept_sets
    facts = trainer.before_training["ratio"]
    ratios = []
    for row in rows:
        model, _ = reference_logps(policy, row)
        every = log_softmax(model, row).detach()
        for t, head in enumerate(row["top_ids"]):
            if head:
                log_p = every[t - 1] - every[t - 1][head].logsumexp(0)
                ratios.append(float((log_p[row["input_ids"][t]] - row["logprobs"][t]).exp()))
    assert facts["mean"] == pytest.approx(np.mean(ratios), abs=1e-4)
    if centering:
        assert_same_gradients(loss_and_gradients(trainer), by_hand(policy, rows, "tis_reinforce", kept_sets=True))


def test_the_command_logs_the_heads(policy: Path, tmp_path: Path) -> None:
    """metrics.jsonl has the covered mass, ρ, |C| and the share without a head; what is trained is proven with the heads."""
    rows = with_heads(policy, experience_rows(policy), 5)
    rows[0] |= {"top_ids": [[]] * len(rows[0]["input_ids"]), "top_log_probs": [[]] * len(rows[0]["input_ids"])}
    file, out = run_of(tmp_path, rows, **{**PROCESSED, "top_p": 1.0}), tmp_path / "out"
    done = gymdata("train-rl", file, "-m", policy, "-o", out, "--loss", "icepop", "--score-centering",
                   "--set", "per_device_train_batch_size=64", "--set", "learning_rate=0.001")  # fmt: skip
    assert done.returncode == 0, done.stderr
    n_without, n_tokens = sum(rows[0]["loss_mask"]), sum(sum(row["loss_mask"]) for row in rows)
    assert f"{n_without} of {n_tokens} trained tokens have no head" in " ".join(done.stderr.split())
    assert "score_centering" in str(read_run_json(out)["config"])
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in logged if "loss" in row)
    assert first["centering/without_head"] == pytest.approx(n_without / n_tokens)
    covered = [np.exp(head).sum() for row in rows for head in row["top_log_probs"] if head]
    assert first["centering/covered"] == pytest.approx(np.mean(covered), abs=1e-5)
    assert first["centering/rho"] > 0 < first["centering/term"]


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - set(SETTINGS)))
def test_other_losses_are_refused_by_name(loss: str) -> None:
    """As is a sequence mask, which drops whole sequences from the loss."""
    with pytest.raises(UsageError, match=r"--score-centering[\s\S]*gpg or icepop|cispo"):
        TrainRlConfig.load(None, {"model": "m", "output": "o", "loss": loss, "score_centering": True})
    with pytest.raises(UsageError, match=r"sequence.mask"):
        TrainRlConfig.load(
            None, {"model": "m", "output": "o", "loss": "gpg", "score_centering": True, "sequence_mask": 1.0}
        )


@pytest.mark.parametrize(("moved", "says"), [
    (0, None),
    (1, r"11 of 11 heads have another log-probability of the sampled id than is saved \(first: rollout-0/0\)"),
])  # fmt: skip
def test_heads_of_other_tokens_are_counted(moved: int, says: str | None, policy: Path, tmp_path: Path) -> None:
    """A warning where heads have another number of the sampled token than its own, as those of the next token have."""
    rows = with_heads(policy, experience_rows(policy)[:2], 0, nucleus=0.1)
    for row in rows:
        trained = np.flatnonzero(row["loss_mask"])
        for name in ("top_ids", "top_log_probs"):
            lists = [row[name][t] for t in trained]
            for t, of_token in zip(trained, [*lists[moved:], *lists[:moved]], strict=True):
                row[name][t] = of_token
    file = run_of(tmp_path, rows, **{**PROCESSED, "top_p": 1.0})
    done = gymdata(
        "train-rl", file, "-m", policy, "-o", tmp_path / "out", "--loss", "gpg", "--score-centering", "--dry-run"
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert re.search(says, said) if says else "heads have another" not in said


@pytest.mark.parametrize(("change", "says"), [
    (lambda head: [], "reads the sampler's head of each token, and .* has no top_ids"),
    (lambda head: [(i, -9.0) for i in range(65)], "65 ids of one token, expected at most 64"),
    (lambda head: [(i, 0.5) for i, _ in head], "log-probability of top_log_probs is above 0"),
    (lambda head: [(i, -0.1) for i, _ in head], "sum to more than 1"),
    (lambda head: [(head[0][0], lp - 3) for _, lp in head], "an id is twice in top_ids"),
    (lambda head: [(i + 100_000, lp) for i, lp in head], "top_ids: token id 1.* is not in the vocabulary"),
    (lambda head: [*head[1:], (-1, -5.0)], "token 4 of rollout-0/0: an id of top_ids is negative"),
], ids=["none", "65", "positive", "too much", "twice", "unknown", "negative"])  # fmt: skip
def test_heads_that_no_sampler_has_are_refused(policy: Path, tmp_path: Path, change: Any, says: str) -> None:
    """With the place: the rollout and the token."""
    rows = with_heads(policy, experience_rows(policy)[:2], 3)
    for row in rows:
        for t, head in enumerate(row["top_ids"]):
            changed = change(list(zip(head, row["top_log_probs"][t], strict=True))) if head else []
            row["top_ids"][t], row["top_log_probs"][t] = [i for i, _ in changed], [lp for _, lp in changed]
    file = run_of(tmp_path, rows, **{**PROCESSED, "top_p": 1.0})
    with pytest.raises((RefusedError, UsageError), match=says):
        library.train_rl(
            file, model=str(policy), output=tmp_path / "out", loss="gpg", score_centering=True, dry_run=True
        )


def test_a_head_that_is_not_its_kept_set_leaves_the_file_biased(policy: Path, tmp_path: Path) -> None:
    """One sampled id outside of its own head: L304, whatever the loss reads."""
    rows = with_heads(policy, experience_rows(policy)[:2], 0, nucleus=0.1)
    t = rows[0]["loss_mask"].index(1)
    rows[0]["input_ids"][t] = next(i for i in range(3, 200) if i not in rows[0]["top_ids"][t])
    notes = Watcher()
    with pytest.raises(RefusedError, match=r"L304.*top_p 0.1"):
        library.train_rl(run_of(tmp_path, rows, **PROCESSED), model=str(policy), output=tmp_path / "out", dry_run=True,
                 progress=notes)  # fmt: skip
