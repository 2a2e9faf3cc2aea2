"""Rollouts of the sample policy with log-probs computed apart from the code under test, and ways to falsify them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.rollouts.turns import Call, encode_turns, expand_prompts
from gymdata.store import read_table, write_run_json
from tests.rollout_files import write_run

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "sample_data" / "policy"
CLEAN = ROOT / "sample_data" / "rollouts" / "clean.jsonl"
#: prompt, generation and log-probs of a call, and its number → the same, changed.
Change = Callable[[list[int], list[int], np.ndarray, int], tuple[Sequence[int], Sequence[int], Sequence[float]]]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Matrices this small are slower on several threads, much slower on a busy machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def clean_rows() -> list[dict[str, Any]]:
    """The sample rollouts, sampled by a real engine in float32 at temperature 1."""
    return read_table(CLEAN).to_pylist()


@pytest.fixture(scope="session")
def sample_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(POLICY).eval()


def changed(row: dict[str, Any], change: Change, **columns: Any) -> dict[str, Any]:
    """A rollout whose calls are others, stored as if they had been collected so."""
    prompts = expand_prompts(row["turns"])
    calls = []
    for number, (turn, prompt) in enumerate(zip(row["turns"], prompts, strict=True)):
        logps = np.array(turn["generation_log_probs"])
        p, g, lp = change(prompt.tolist(), list(turn["generation_token_ids"]), logps, number)
        calls.append(
            Call(np.array(p, np.int32), np.array(g, np.int32), np.array(lp, np.float32), turn["finish_reason"])
        )
    turns = encode_turns(calls)
    sizes = {
        "n_context_tokens": sum(len(t["prompt_delta_ids"]) for t in turns),
        "n_generated_tokens": sum(len(t["generation_token_ids"]) for t in turns),
    }
    return {**row, **sizes, "turns": turns, **columns}


def saved_run(folder: Path, rows: list[dict[str, Any]], **identity: Any) -> Path:
    """A run folder whose run.json says how it was sampled: by float32 on an engine."""
    write_run(folder, rows)
    facts = json.loads((folder / "run.json").read_text())
    engine = {"dtype": "float32"}
    write_run_json(folder, facts | {"stage": "collect", "engine": engine, "policy": str(POLICY), "identity": identity})
    return folder


def log_softmax_of(model: Any, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """log p of every next token after each of ``ids``, float64 (len(ids), vocabulary): one sequence, no batch."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)])).logits[0].double().numpy() / temperature
    top = logits.max(axis=1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def log_probs_of(model: Any, prompt: Sequence[int], generation: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """The log-prob of each generated token."""
    logps = log_softmax_of(model, [*prompt, *generation], temperature)
    at = np.arange(len(generation)) + len(prompt) - 1
    return logps[at, list(generation)]
