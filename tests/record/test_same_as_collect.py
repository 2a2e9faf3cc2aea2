"""Agents solve the sample tasks on the sample policy: the same tokens as ``collect --env``, and a policy that is better."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.chat.template import TransformersChat
from gymdata.commands.collect.run import collect
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.collect.setup import Parts
from gymdata.commands.record.agent import load_agent
from gymdata.commands.validate.run import validate
from gymdata.engines.port import Generation, SampleRequest
from gymdata.environments import load_environment
from gymdata.models.model_identity import policy_facts
from gymdata.rewards import load_rewards
from gymdata.rewards.scheduler import Weighted
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import expand_prompts
from gymdata.stats import paired_difference_ci
from gymdata.store import read_table
from tests.engine_fixtures import Borrowed, InProcess

SAMPLES = Path(__file__).parents[2] / "sample_data"
AGENTS = {
    "openai": f"{SAMPLES}/calculator_agent.py:solve",
    "served workflow": f"{SAMPLES}/served_workflow.py:run",
    "openai-agents": f"{Path(__file__).parent}/framework_agent.py:solve",
    "openai-agents, streamed": f"{Path(__file__).parent}/framework_agent.py:solve_streamed",
}


class Watched(Borrowed):
    """Keeps what the engine read and sampled."""

    def __init__(self, engine: InProcess, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine, loop)
        self.sampled: list[Generation] = []

    async def sample(self, request: SampleRequest) -> list[Generation]:
        generations = await super().sample(request)
        self.sampled += generations
        return generations


def collected(run: Path, engine: InProcess, policy: str, **settings: Any) -> list[dict[str, Any]]:
    """Rows of ten sample tasks, with the environment or an agent, which are what the engine read and sampled."""
    shared = {"tasks": str(SAMPLES / "tasks" / "train.jsonl"), "output": run, "seed": 11, "run_id": "same", "limit": 10}
    config = CollectConfig.of(
        {**shared, "num_rollouts": 2, "max_tokens": 48, "reward": ["numeric"], **settings}, "test"
    )

    async def work() -> list[Generation]:
        weighted = [Weighted(function, weight) for function, weight in load_rewards(config.reward)]
        sampler, chat = Watched(engine, asyncio.get_running_loop()), TransformersChat.load(policy)
        environment = load_environment(f"{SAMPLES}/calculator.py:Calculator", tool_timeout_s=5.0)
        agent = load_agent(config.agent) if config.agent else None
        parts = Parts(sampler, chat, None if agent else environment, weighted, policy_facts(policy), agent=agent)
        await asyncio.to_thread(collect, config=config, parts=parts)
        return sampler.sampled

    sampled = [
        (list(g.prompt_token_ids), list(g.token_ids), np.float32(g.log_probs).tolist()) for g in engine.run(work())
    ]
    rows = read_table(run, ROLLOUTS).to_pylist()
    turns = [
        (prompt.tolist(), turn["generation_token_ids"], turn["generation_log_probs"])
        for row in rows
        for prompt, turn in zip(expand_prompts(row["turns"]), row["turns"], strict=True)
    ]
    assert sorted(turns) == sorted(sampled)
    checked = validate(run, decode=True, tokenizer=policy)
    assert (checked.ok, checked.trainable) == (True, 20), checked.violations
    return sorted(rows, key=lambda row: (row["task_id"], row["rollout_index"]))


@pytest.fixture(scope="module")
def alone(policy: str, vllm_sampler: InProcess, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of the environment."""
    return collected(tmp_path_factory.mktemp("alone") / "run", vllm_sampler, policy)


@pytest.fixture
def sample_workflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The workflow of sample_data/calculator_server.py, in a process of its own."""
    command = [sys.executable, str(SAMPLES / "calculator_server.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            monkeypatch.setenv("WORKFLOW_URL", f"http://127.0.0.1:{int(process.stdout.readline())}/workflow")
            yield
        finally:
            process.terminate()


@pytest.mark.engine
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_s_rows_are_those_of_collect_with_an_environment(
    name: str,
    policy: str,
    vllm_sampler: InProcess,
    alone: list[dict[str, Any]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """With equal seeds, id for id: prompts, generations, breaks, rewards and the rollouts' own ids; and they train."""
    if name == "served workflow":
        request.getfixturevalue("sample_workflow")
    else:
        module = "agents" if name.startswith("openai-agents") else "openai"
        pytest.importorskip(module, reason=f"{name} is not installed")
    ours = collected(tmp_path / "agent", vllm_sampler, policy, agent=AGENTS[name])
    assert len(ours) == len(alone) == 20
    for recorded, expected in zip(ours, alone, strict=True):
        for column in ("rollout_id", "group_id", "task", "temperature", "n_turns", "n_breaks"):
            assert recorded[column] == expected[column], (column, expected["task_id"])
        # A workflow reports a reward of its own beside the run's.
        assert {part["value"] for part in recorded["rewards"]} == {expected["reward"]}
        for turn, other in zip(recorded["turns"], expected["turns"], strict=True):
            for column in ("prefix_length", "prompt_delta_ids", "generation_token_ids"):
                assert turn[column] == other[column], (column, expected["task_id"])
            np.testing.assert_allclose(turn["generation_log_probs"], other["generation_log_probs"], atol=1e-4)
    assert max(row["n_turns"] for row in ours) > 1
    dry = gymdata.train_sft(tmp_path / "agent", policy, tmp_path / "sft", select="all", dry_run=True)
    assert dry.counts["rollouts_chosen"] == 20


def run_command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "gymdata", *map(str, words)], check=True)


@pytest.mark.full
@pytest.mark.timeout(1200)  # 3,000 rollouts of an agent
@pytest.mark.parametrize("name", ["openai", "openai-agents"])
def test_what_an_agent_does_trains_a_better_policy(name: str, policy: str, tmp_path: Path) -> None:
    """One round of ``collect --agent``, ``experience`` and ``train-rl``: the held-out rate rises, interval above 0."""
    pytest.importorskip("agents" if name.startswith("openai-agents") else "openai", reason=f"{name} is not installed")
    tasks, heldout = SAMPLES / "tasks" / "train.jsonl", SAMPLES / "tasks" / "heldout.jsonl"
    solving = ["--agent", AGENTS[name], "--reward", "numeric", "--max-tokens", 48, "--seed", 5]
    run_command("collect", tasks, "-m", policy, "-o", tmp_path / "run", "-n", 300, "-r", 8, *solving)
    assert validate(tmp_path / "run").ok
    run_command("experience", tmp_path / "run", "-o", tmp_path / "experience")
    trained = tmp_path / "policy"
    run_command(
        "train-rl", tmp_path / "experience", "-m", policy, "-o", trained, "--config", SAMPLES / "rl.yaml", "--seed", 5
    )
    rates = []
    for model, run in ((policy, tmp_path / "before"), (trained, tmp_path / "after")):
        run_command("collect", heldout, "-m", model, "-o", run, "-n", 300, "-r", 1, *solving, "--temperature", 0)
        rows = sorted(read_table(run, ROLLOUTS).to_pylist(), key=lambda row: str(row["task_id"]))
        rates.append([row["reward"] == 1.0 for row in rows])
    rise = paired_difference_ci(rates[0], rates[1])
    print(json.dumps({"agent": name, "before": np.mean(rates[0]), "after": np.mean(rates[1]), "rise": rise}))
    assert rise[1] > 0.05
