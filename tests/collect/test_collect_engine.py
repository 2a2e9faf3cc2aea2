"""collect on a real vLLM engine: in this process, and behind HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.collect.run import collect
from gymdata.commands.validate.run import validate
from tests.collect.saved_rows import log_probs_of, rows_of, samples_of
from tests.engine_fixtures import InProcess

pytestmark = pytest.mark.engine
SAMPLE = Path(__file__).parents[2] / "sample_data"
TOOLS: dict[str, Any] = {
    "tasks": str(SAMPLE / "tasks" / "train.jsonl"), "env": f"{SAMPLE / 'calculator.py'}:Calculator",
    "reward": ["numeric"], "max_tokens": 48, "seed": 1,
}  # fmt: skip
SMALL = {"limit": 12, "num_rollouts": 4}


def served(policy: str) -> dict[str, Any]:
    return {"model": "sample-policy", "tokenizer": policy}


@pytest.fixture(scope="module")
def there(vllm_server: str, policy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the server, in ids."""
    run = tmp_path_factory.mktemp("there")
    collect(endpoint=vllm_server, output=run, **TOOLS, **SMALL, **served(policy))
    return run


def assert_same_samples(one: Path, other: Path) -> None:
    """Log-probabilities within 1e-4."""
    rows, others = rows_of(one), rows_of(other)
    assert samples_of(rows) == samples_of(others)
    np.testing.assert_allclose(log_probs_of(rows), log_probs_of(others), atol=1e-4)


def test_an_engine_and_a_server_give_the_same_tool_rollouts(
    vllm_sampler: InProcess, there: Path, policy: str, tmp_path: Path
) -> None:
    """Multi-turn tool rollouts of the sample policy have no break and no violation, and some are right; the same tasks and
    seed give the same ids over HTTP, where a group is one request."""
    summary = vllm_sampler.collect(model=policy, output=str(tmp_path / "run"), **TOOLS, **SMALL)
    assert (summary.rollouts, summary.breaks, summary.exit_code) == (48, 0, 0)
    assert validate(tmp_path / "run").errors == 0
    rows = rows_of(tmp_path / "run")
    assert any(r["n_turns"] > 1 and r["reward"] == 1.0 for r in rows)
    used = next(r for r in rows if r["n_turns"] > 1)
    call = json.loads(used["messages"][1]["tool_calls"])[0]
    assert call["function"]["name"] == "calculate"
    assert used["messages"][2]["role"] == "tool"
    assert_same_samples(tmp_path / "run", there)
