"""An agent on the real ``openai`` client against the sample policy: what is on disk is what the engine sampled."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

import gymdata
from gymdata.chat.template import TransformersChat
from gymdata.collect.setup import Parts
from gymdata.engines.port import Generation, SampleRequest
from gymdata.models.model_identity import policy_facts
from gymdata.record.run import record
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table
from gymdata.validate.run import validate
from tests.engine_fixtures import Borrowed, InProcess

pytestmark = pytest.mark.engine
TASKS = 3


class Watched(Borrowed):
    """Keeps what the engine sampled."""

    sampled: list[Generation]

    async def sample(self, request: SampleRequest) -> list[Generation]:
        made = await super().sample(request)
        self.sampled += made
        return made


def test_an_agent_s_tool_loop_is_recorded_id_for_id(policy: str, vllm_sampler: InProcess, tmp_path: Path) -> None:
    """Every prompt and every sampled id and log-probability on disk are the engine's; the run is clean, and trains."""
    pytest.importorskip("openai")
    run = tmp_path / "run"

    async def recording() -> Watched:
        sampler = Watched(vllm_sampler, asyncio.get_running_loop())
        sampler.sampled = []
        chat = TransformersChat.load(policy)
        parts = Parts(sampler, chat, None, [], policy_facts(policy))
        agent = [sys.executable, "-m", "tests.record.calculator_agent", str(TASKS)]
        summary = await asyncio.to_thread(record, parts=parts, output=run, port=0, model=policy, agent=agent)
        assert (summary.exit_code, summary.rollouts, summary.failures, summary.open) == (0, TASKS, 0, 0)
        return sampler

    sampler = vllm_sampler.run(recording())
    rows = read_table(run, ROLLOUTS).to_pylist()
    turns = [
        (prompt.tolist(), turn["generation_token_ids"], turn["generation_log_probs"])
        for row in rows
        for prompt, turn in zip(expand_prompts(row["turns"]), row["turns"], strict=True)
    ]
    assert turns == [
        (list(g.prompt_token_ids), list(g.token_ids), np.float32(g.log_probs).tolist()) for g in sampler.sampled
    ]
    assert any(row["n_turns"] > 1 for row in rows)
    assert sum(row["n_breaks"] for row in rows) == 0
    checked = validate(run, decode=True, tokenizer=policy)
    assert checked.ok, checked.violations
    assert checked.trainable == TASKS
    dry = gymdata.train_sft(run, policy, tmp_path / "sft", select="all", dry_run=True)
    assert dry.counts["rollouts_chosen"] == TASKS
