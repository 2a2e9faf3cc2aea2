"""Rollouts that were sampled with top_p: where each saved head is all that could be sampled, they are no L304, and ``audit``
normalizes the model over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.rollouts.logprobs import sampling_biases
from gymdata.rollouts.turns import Call, encode_turns, expand_prompts
from tests.audit.conftest import POLICY, log_softmax_of, saved_run

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
TEMPERATURE, TOP_P = 2.5, 0.8
PROCESSED = {"temperature": TEMPERATURE, "top_p": TOP_P, "logprobs_mode": "processed_logprobs"}


def kept(logps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a nucleus of ``TOP_P``, most likely first, and their log-probs over it."""
    order = np.argsort(-logps)
    n = int(np.searchsorted(np.cumsum(np.exp(logps[order])), TOP_P)) + 1
    ids = order[:n]
    return ids, logps[ids] - np.log(np.exp(logps[ids]).sum())


@pytest.fixture(scope="module")
def nucleus_rows(clean_rows: list[dict[str, Any]], sample_model: Any) -> list[dict[str, Any]]:
    """Six rollouts of the sample policy, drawn with top_p in float64, every head saved."""
    rng, rows = np.random.default_rng(0), []
    for row in clean_rows[:6]:
        prompt, generation, logprobs, heads = expand_prompts(row["turns"])[0].tolist(), [], [], []
        for _ in range(20):
            ids, logps = kept(log_softmax_of(sample_model, [*prompt, *generation], TEMPERATURE)[-1])
            choice = int(rng.choice(len(ids), p=np.exp(logps) / np.exp(logps).sum()))
            generation.append(int(ids[choice]))
            logprobs.append(logps[choice])
            heads.append([{"id": int(i), "log_prob": float(lp)} for i, lp in zip(ids, logps, strict=True)])
        call = Call(
            np.array(prompt, np.int32), np.array(generation, np.int32), np.array(logprobs, np.float32), "length"
        )
        (turn,) = encode_turns([call])
        sizes = {"n_turns": 1, "n_context_tokens": len(prompt), "n_generated_tokens": 20, "temperature": TEMPERATURE}
        messages = [*row["messages"][:1], {"role": "assistant", "content": "x", "turn": 0}]
        rows.append({**row, **sizes, "messages": messages, "turns": [{**turn, "top_log_probs": heads}]})
    return rows


def changed_head(rows: list[dict[str, Any]], change: Callable[[list[Any], int], list[Any]]) -> list[dict[str, Any]]:
    """With the head of the first token that has several ids changed."""
    row = rows[0]
    (turn,) = row["turns"]
    heads, ids = list(turn["top_log_probs"]), turn["generation_token_ids"]
    place = next(k for k, head in enumerate(heads) if len(head) > 1)
    heads[place] = change(heads[place], ids[place])
    return [{**row, "turns": [{**turn, "top_log_probs": heads}]}, *rows[1:]]


def l304(run: Path) -> list[str | None]:
    return [v.detail for v in gymdata.validate(run, select=["L304"]).violations]


def test_heads_that_are_kept_sets_are_no_bias(tmp_path: Path, nucleus_rows: list[dict[str, Any]]) -> None:
    """The model is normalized over them: ratios of 1, where those over the whole vocabulary are far from it."""
    run = saved_run(tmp_path / "run", nucleus_rows, **PROCESSED)
    assert l304(run) == []
    report = gymdata.audit(run, str(POLICY))
    assert report.ok
    after, before = report.summary, report.summary["before_kept_sets"]
    assert after["ratio"]["mean"] == pytest.approx(1, abs=1e-4)
    assert (after["share_outside"], before["mean"] < 0.97) == (0, True)
    assert before["share_outside"] > 0.1
    shown = dict(report.rows())
    assert float(str(shown["without kept sets: ratio, mean"])) == pytest.approx(before["mean"], abs=1e-4)
    assert any("top_p 0.8: the model is normalized over the kept set" in line for line in report.first)
    assert (run / "audit-policy" / "run.json").is_file()


def test_without_heads_the_log_probabilities_are_biased(tmp_path: Path, nucleus_rows: list[dict[str, Any]]) -> None:
    """L304 as before, and the audit finds them off."""
    bare = [{**row, "turns": [{**row["turns"][0], "top_log_probs": None}]} for row in nucleus_rows]
    run = saved_run(tmp_path / "run", bare, **PROCESSED)
    assert l304(run) == ["top_p 0.8"]
    assert "before_kept_sets" not in gymdata.audit(run, str(POLICY)).summary


@pytest.mark.parametrize("change", [
    lambda head, sampled: [entry for entry in head if entry["id"] != sampled],
    lambda head, _: [{**entry, "log_prob": entry["log_prob"] - 0.002} for entry in head],
], ids=["the sampled id outside", "a sum below 0.999"])  # fmt: skip
def test_one_head_that_is_not_its_kept_set_is_named(
    tmp_path: Path, nucleus_rows: list[dict[str, Any]], change: Callable[[list[Any], int], list[Any]]
) -> None:
    """L304 stays, with the number of tokens."""
    run = saved_run(tmp_path / "run", changed_head(nucleus_rows, change), **PROCESSED)
    assert l304(run) == ["top_p 0.8; the saved heads of 1 of 120 tokens are not all that could be sampled"]


@pytest.mark.parametrize(("more", "reason"), [
    ({"repetition_penalty": 1.1}, "repetition_penalty 1.1"), ({"logprobs_mode": "raw_logprobs"}, "raw log-probabilities"),
    ({"logprobs_mode": None}, "top_p 0.8"), ({"sampling": {"logit_bias": {"3": 1}}}, "logit_bias"),
])  # fmt: skip
def test_what_changes_more_than_which_ids_are_left_stays_a_bias(
    tmp_path: Path, nucleus_rows: list[dict[str, Any]], more: dict[str, Any], reason: str
) -> None:
    """Penalties, raw log-probabilities and parameters that are not known, whatever the heads."""
    assert sampling_biases({**PROCESSED, **more}, kept_sets=True) or more == {"logprobs_mode": None}
    (detail,) = l304(saved_run(tmp_path / "run", nucleus_rows, **{**PROCESSED, **more}))
    assert reason in str(detail)
