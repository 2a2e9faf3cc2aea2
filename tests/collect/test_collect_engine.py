"""collect on a real vLLM engine: in this process and behind HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.chat.template import TransformersChat
from gymdata.collect.run import Parts, collect
from gymdata.environments import load_environment
from gymdata.rewards import load_rewards
from gymdata.rewards.scheduler import Weighted
from gymdata.store import read_table
from gymdata.validate.run import validate
from tests.engine_fixtures import Borrowed, InProcess

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
ENV = f"{ROOT / 'sample_data' / 'calculator.py'}:Calculator"
TASKS = str(ROOT / "sample_data" / "tasks" / "train.jsonl")


def collect_in_process(engine: InProcess, policy: str, rewards: Sequence[str] = ("numeric",), **settings: Any) -> Any:
    """collect() in a thread, on the shared engine."""

    async def main() -> Any:
        parts = Parts(
            Borrowed(engine, asyncio.get_running_loop()),
            TransformersChat.load(policy),
            load_environment(ENV),
            [Weighted(function, weight) for function, weight in load_rewards(rewards)],
            {"policy": policy, "policy_hash": "sample"},
        )
        return await asyncio.to_thread(collect, parts=parts, **settings)

    return engine.run(main())


def test_tool_rollouts_validate_without_an_error(vllm_sampler: InProcess, policy: str, tmp_path: Path) -> None:
    """Multi-turn tool rollouts of the sample policy have no break and no violation, and some are right."""
    summary = collect_in_process(
        vllm_sampler, policy, tasks=TASKS, output=tmp_path / "run", limit=12, num_rollouts=4, max_tokens=48, seed=1
    )
    assert (summary.rollouts, summary.breaks, summary.exit_code) == (48, 0, 0)
    assert validate(tmp_path / "run").errors == 0
    rows = read_table(tmp_path / "run").to_pylist()
    assert any(r["n_turns"] > 1 and r["reward"] == 1.0 for r in rows)
    used = next(r for r in rows if r["n_turns"] > 1)
    call = json.loads(used["messages"][1]["tool_calls"])[0]
    assert call["function"]["name"] == "calculate"
    assert used["messages"][2]["role"] == "tool"


def test_a_server_gives_the_rows_of_the_engine_in_process(
    vllm_sampler: InProcess, vllm_server: str, policy: str, tmp_path: Path
) -> None:
    """The same tasks and seed give the same ids over HTTP (grouped) and in process, and log-probs within 1e-4."""
    settings: dict[str, Any] = {"tasks": TASKS, "limit": 8, "num_rollouts": 3, "max_tokens": 48, "seed": 5}
    collect_in_process(vllm_sampler, policy, output=tmp_path / "here", **settings)
    collect(
        endpoint=vllm_server, model="sample-policy", tokenizer=policy, env=ENV, reward=["numeric"],
        output=tmp_path / "there", **settings,
    )  # fmt: skip
    sides = []
    for name in ("here", "there"):
        rows = read_table(tmp_path / name).to_pylist()
        sides.append(sorted(rows, key=lambda r: (r["task_id"], r["rollout_index"])))
    for a, b in zip(*sides, strict=True):
        assert a["messages"] == b["messages"]
        assert a["reward"] == b["reward"]
        for x, y in zip(a["turns"], b["turns"], strict=True):
            assert x["prompt_delta_ids"] == y["prompt_delta_ids"]
            assert x["generation_token_ids"] == y["generation_token_ids"]
            np.testing.assert_allclose(x["generation_log_probs"], y["generation_log_probs"], atol=1e-4)
