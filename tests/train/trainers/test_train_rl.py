"""``train-rl`` whole: refusals before a process starts, the ratio before the first step, and the folder it leaves."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from gymdata.errors import RefusedError
from gymdata.models.model_identity import model_facts
from gymdata.store import read_run_json, write_run_json
from tests.rollout_files import experience_rows, write_experiences
from tests.servers import Watcher
from tests.train.trainers.conftest import start
from tests.train.trainers.running import gymdata

pytestmark = pytest.mark.torch

SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed_logprobs", "temperature": 0.5}


def make(folder: Path, policy: Path, rows: list[dict[str, Any]] | None = None, **identity: Any) -> Path:
    """An experiences file that leads back to a run of ``policy``."""
    facts = model_facts(str(policy))
    run = folder / "run"
    tokens = {"tokenizer_hash": facts.tokenizer_hash, "chat_template_hash": facts.chat_template_hash}
    write_run_json(run, {"run_id": "run", "identity": {**tokens, **SAMPLING, **identity}})
    place = run / "experiences-grpo"
    place.mkdir(parents=True, exist_ok=True)
    write_experiences(place, rows or experience_rows(policy, noise=0.0))
    write_run_json(place, {"stage": "experiences", "parents": [{"path": str(run), "run_id": "run"}]})
    return place


def test_the_output_is_a_model_with_its_ratio(policy: Path, tmp_path: Path) -> None:
    """A dry run prints the ratio and the steps and leaves nothing; a training leaves model, proof, ratio, metrics, curve."""
    file, out = make(tmp_path, policy), tmp_path / "trained"
    dry = gymdata("train-rl", file, "-m", policy, "-o", out, "--dry-run", "--json", "--set", "num_train_epochs=2")
    assert dry.returncode == 0, dry.stderr
    assert json.loads(dry.stdout)["ratio"]["mean"] == pytest.approx(1.0, abs=1e-6)
    assert "effective sample size 100.0%" in dry.stderr
    assert not out.exists()
    done = gymdata("train-rl", file, "-m", policy, "-o", out, "--json", "--loss", "cispo", "--kl-beta", 0.01,
                   "--set", "num_train_epochs=2", "--set", "learning_rate=1e-3", "--set", "clip_high=0.3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts == read_run_json(out)
    assert facts["steps"] == json.loads(dry.stdout)["steps"] > 0
    assert facts["trained_tokens"]["equal"] is True
    assert facts["ratio"]["tokens"] == facts["trained_tokens"]["file"]["count"]
    assert facts["parents"][0]["path"] == str(file)
    assert (out / "SUCCESS").is_file()
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert logged[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert model_facts(str(out)).policy_hash != model_facts(str(policy)).policy_hash


def test_a_stale_policy_version_is_shown(policy: Path, tmp_path: Path) -> None:
    """Before the first step: tokens, mean ratio, effective sample size and share clipped of each; report shows them."""
    rows = [{**row, "policy_version": i % 2} for i, row in enumerate(experience_rows(policy, noise=0.0))]
    for row in rows[::2]:  # version 0 gave each token e^0.5 times the probability
        row["logprobs"] = [lp + 0.5 * m for lp, m in zip(row["logprobs"], row["loss_mask"], strict=True)]
    out = tmp_path / "out"
    done = gymdata("train-rl", make(tmp_path, policy, rows), "-m", policy, "-o", out, "--set", "clip_low=0.2")
    assert done.returncode == 0, done.stderr
    old, new = read_run_json(out)["ratio_by_version"].values()
    assert old["mean"] == pytest.approx(math.exp(-0.5), abs=1e-4)
    assert new["mean"] == pytest.approx(1, abs=1e-4)
    assert old["tokens"] == sum(sum(row["loss_mask"]) for row in rows[::2])
    worse = sum(a < 0 for row in rows[::2] for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if m)
    assert (old["clipped"], new["clipped"]) == (pytest.approx(worse / old["tokens"]), 0)
    line = f"policy version 0: {old['tokens']} tokens, mean ratio 0.6065, effective sample size 100.0%, clipped "
    assert line in done.stderr
    assert "policy version 1" in done.stderr
    shown = gymdata("report", out)
    assert "mean ratio 0.6065" in shown.stdout + shown.stderr
    assert "mean ratio 0.6065" in (out / "report.html").read_text()


@pytest.mark.parametrize("identity", [{"top_p": 0.9}, {"logprobs_mode": "raw_logprobs"}], ids=str)
def test_biased_files_are_refused(policy: Path, tmp_path: Path, identity: dict[str, Any]) -> None:
    """Truncated sampling, or raw log-probs at another temperature: exit 1 before anything is loaded, or a warning."""
    words = ["train-rl", make(tmp_path, policy, **identity), "-m", policy, "-o", tmp_path / "out", "--dry-run"]
    refused = gymdata(*words)
    assert (refused.returncode, "L304" in refused.stderr) == (1, True), refused.stderr
    if "top_p" in identity:
        allowed = gymdata(*words, "--allow-biased-logprobs")
        assert (allowed.returncode, "warning" in allowed.stderr) == (0, True), allowed.stderr


def test_log_probs_of_another_checkpoint_are_noticed(policy: Path, tmp_path: Path) -> None:
    """A file that says it was sampled with this model, and whose log-probs are not this model's, is L305."""
    rows = [{**row, "policy_hash": model_facts(str(policy)).policy_hash} for row in experience_rows(policy, noise=0.5)]
    done = gymdata("train-rl", make(tmp_path, policy, rows), "-m", policy, "-o", tmp_path / "out")
    assert (done.returncode, "L305" in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "out" / "SUCCESS").exists()


@pytest.mark.parametrize("sampled_in", ["bfloat16", "float32"])
def test_what_the_samplers_number_format_rounds_is_no_fault(policy: Path, tmp_path: Path, sampled_in: str) -> None:
    """Log-probs of this model that are 0.03 off in turn are its own where it sampled in bfloat16, and L305 in float32."""
    rows = experience_rows(policy, noise=0.0)
    for row in rows:
        off = [0.03 * (-1) ** k * m for k, m in enumerate(row["loss_mask"])]
        row["logprobs"] = [saved + one for saved, one in zip(row["logprobs"], off, strict=True)]
    file = make(tmp_path, policy, rows)
    write_run_json(tmp_path / "run", {**read_run_json(tmp_path / "run"), "engine": {"dtype": sampled_in}})
    trainer, _ = start("rl", file, policy, tmp_path / "out", {})
    trainer.on_policy = True
    if sampled_in == "bfloat16":
        assert trainer.compare(refuse=True)["mean_abs_difference"] == pytest.approx(0.03, abs=1e-4)
    else:
        with pytest.raises(RefusedError, match=r"L305.*\(rounding: 0.0001\)"):
            trainer.compare(refuse=True)


@pytest.mark.parametrize(("by", "refused"), [(-1_000.0, True), (-0.5, False)])
def test_one_token_is_refused_by_the_mean_ratio_alone(policy: Path, tmp_path: Path, by: float, refused: bool) -> None:
    """As ``audit`` says: an outlier is no departure, and what it makes of the mean ratio is."""
    rows = experience_rows(policy, noise=0.0)
    at = rows[0]["loss_mask"].index(1)
    rows[0]["logprobs"] = [saved + by * (k == at) for k, saved in enumerate(rows[0]["logprobs"])]
    trainer, _ = start("rl", make(tmp_path, policy, rows), policy, tmp_path / "out", {}, allow_biased_logprobs=True)
    trainer.on_policy = True
    if refused:
        with pytest.raises(RefusedError, match="mean ratio inf"):
            trainer.compare(refuse=True)
    else:
        assert trainer.compare(refuse=True)["max_abs_difference"] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    ("poison", "says"),
    [
        (lambda k, lp: -5.0, "mean ratio"),
        (lambda k, lp: 0.0, "all of them are 0"),
        (lambda k, lp: lp - 2 if k % 4 == 0 else min(lp + 2, -1e-3), "effective sample size"),
    ],
    ids=["a constant", "zeros", "noise"],
)
def test_log_probs_of_no_model_are_named(policy: Path, tmp_path: Path, poison: Any, says: str) -> None:
    """Of a file that names another policy: numbers that no policy can have sampled with are warned of (L305), and honest
    ones and losses without ratios are not."""
    honest = experience_rows(policy)
    rows = [
        {
            **row,
            "logprobs": [
                poison(*each) if m else 0.0
                for each, m in zip(enumerate(row["logprobs"]), row["loss_mask"], strict=True)
            ],
        }
        for row in honest
    ]
    texts = []
    for given, loss in ((rows, "ppo_clip"), (honest, "ppo_clip"), (rows, "filtered_bc")):
        start("rl", write_experiences(tmp_path, given), policy, tmp_path / "out", {}, notes := Watcher(), loss=loss)
        texts.append("\n".join(notes.said))
    assert re.search(
        f"warning: the saved log-probabilities are not those of the tokens \\(L305\\): .*{says}", texts[0]
    ), texts[0]
    assert "ratio" in texts[1]
    assert "L305" not in texts[1] + texts[2]


def test_tokens_of_another_policy_are_refused(policy: Path, tmp_path: Path) -> None:
    """With an effective sample size below a tenth a loss of ratios is refused (L305); the flag and other losses train."""
    rows = experience_rows(policy, noise=0.0)
    at = rows[0]["loss_mask"].index(1)
    rows[0]["logprobs"] = [saved - 8.0 * (k == at) for k, saved in enumerate(rows[0]["logprobs"])]
    file = make(tmp_path, policy, rows)
    with pytest.raises(RefusedError, match=r"L305.*effective sample size.*at least 10%") as refused:
        start("rl", file, policy, tmp_path / "out", {})
    assert "--allow-biased-logprobs" in str(refused.value.hint)
    trainer, _ = start("rl", file, policy, tmp_path / "out", {}, notes := Watcher(), allow_biased_logprobs=True)
    assert trainer.compare(refuse=False)["effective_sample_size"] < 0.1
    assert "warning: the saved log-probabilities are not those of the tokens (L305)" in "\n".join(notes.said)
    start("rl", file, policy, tmp_path / "out", {}, loss="filtered_bc")


@pytest.mark.full
def test_the_loss_is_in_run_json(policy: Path, tmp_path: Path) -> None:
    """Its settings as they were used; of a function of one's own the file's hash, and a changed file is another training."""
    file, mine = make(tmp_path, policy), tmp_path / "mine.py"
    told = gymdata("train-rl", file, "-m", policy, "-o", tmp_path / "gspo", "--loss", "gspo", "--dry-run", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["loss"] == {"name": "gspo", "clip_low": 0.0003, "clip_high": 0.0004}
    mine.write_text("def f(logprobs, saved, advantages, mask, reference=None):\n    return -advantages * logprobs\n")
    words = ["train-rl", file, "-m", policy, "-o", tmp_path / "out", "--loss", f"{mine}:f", "--json"]
    done = gymdata(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"]["code"].startswith("mine.py:f@")
    mine.write_text(mine.read_text() + "# changed\n")
    again = gymdata(*words)
    assert (again.returncode, "mine.py changed since" in again.stderr) == (2, True), again.stderr
    mine.write_text("def f(logprobs, *_):\n    return logprobs.mean()\n")
    wrong = gymdata(*words, "--overwrite")
    assert (wrong.returncode, "expected (" in wrong.stderr, "one number per token" in wrong.stderr) == (2, True, True)
    idle = gymdata("train-rl", file, "-m", policy, "-o", tmp_path / "no", "--loss", "topr", "--set", "tau=2")
    assert (idle.returncode, "no effect without --loss awr, dro, oapl or opmd" in idle.stderr) == (2, True), idle.stderr
