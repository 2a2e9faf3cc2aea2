"""Conversations with a user on real vLLM: collected, checked, credited by step and trained from, and the rise from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gymdata
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.store import read_run_json, read_table

pytestmark = pytest.mark.engine
DATA = Path(__file__).parents[2] / "sample_data"
CALCULATOR = f"{DATA / 'calculator.py'}:Calculator"
REWARDED = f'''
import sys
sys.path.append({str(DATA)!r})
from calculator import Calculator as Plain

class Calculator(Plain):
    """Worth something: a call that the tool could read, and an answer that is a number."""

    def step_reward(self, message):
        if message.get("tool_calls"):
            return 0.25
        return float((message["content"] or "").strip().lstrip("-").isdigit())
'''

USER = """
from openai import AsyncOpenAI

OTHER = {"user": "assistant", "assistant": "user"}

async def user(messages, task):
    said = [{"role": OTHER[m["role"]], "content": m["content"]} for m in messages if m["role"] in OTHER and m["content"]]
    system = {"role": "system", "content": "You know that {left} {operator} {right} is asked.".format(**task)}
    async with AsyncOpenAI(max_retries=5) as client:
        answer = await client.chat.completions.create(model="sample-policy", messages=[system, *said], max_tokens=16)
    return answer.choices[0].message.content or None
"""


@pytest.mark.full
def test_a_model_as_the_user_from_collection_to_training(
    vllm_server: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools, a user who asks a chat endpoint and step rewards through vLLM: no error, no break, every turn's credit is the
    rewards from there on, and what is trained is what was sampled."""
    pytest.importorskip("trl")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{vllm_server}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "env.py").write_text(REWARDED)
    (tmp_path / "user.py").write_text(USER)
    summary = gymdata.collect(
        str(DATA / "tasks" / "train.jsonl"), endpoint=vllm_server, model="sample-policy", tokenizer=policy,
        env=f"{tmp_path / 'env.py'}:Calculator", user=f"{tmp_path / 'user.py'}:user",
        output=tmp_path / "run", limit=8, num_rollouts=4, max_tokens=32, max_turns=4, seed=1,
    )  # fmt: skip
    assert (summary.rollouts, summary.failures, summary.breaks) == (32, 0, 0)
    assert gymdata.validate(tmp_path / "run").errors == 0
    rows = read_table(tmp_path / "run").to_pylist()
    users = [[m["role"] for m in row["messages"]].count("user") for row in rows]
    assert max(users) > 1
    for row in rows:
        given = [turn["reward"] for turn in row["turns"] if turn["reward"] is not None]
        assert row["reward"] == sum(given)
    assert read_run_json(tmp_path / "run")["identity"]["environment"]["user"]["spec"] == "user.py:user"

    gymdata.experience(
        tmp_path / "run", tmp_path / "e", estimator="reinforce", rewards="steps", discount_unit="turn", gamma=0.5
    )
    known = {row["rollout_id"]: [turn["reward"] or 0.0 for turn in row["turns"]] for row in rows}
    for row in read_table(tmp_path / "e" / "experiences.parquet", EXPERIENCES).to_pylist():
        rewards = known[row["rollout_id"]]
        first = sum(reward * 0.5**turn for turn, reward in enumerate(rewards))
        assert np.array(row["returns"])[np.flatnonzero(row["loss_mask"])[0]] == pytest.approx(first)
    gymdata.train_rl(tmp_path / "e", policy, tmp_path / "policy", config=DATA / "rl.yaml")
    assert read_run_json(tmp_path / "policy")["trained_tokens"]["equal"]


def gymdata_(*words: object) -> None:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "gymdata.cli", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_tutored_tasks_show_a_rise(tmp_path: Path) -> None:
    """One short training from step-credited conversations raises the student's mean reward on held-out questions by 0.1 at
    least: it is right more often, on the first try too."""
    pytest.importorskip("vllm")
    pytest.importorskip("trl")
    student, played = (
        DATA / "student",
        ["--env", CALCULATOR, "--user", f"{DATA / 'tutor.py'}:tutor", "--max-tokens", 48],
    )

    def held_out(name: str, model: Path) -> np.ndarray:
        gymdata_("collect", DATA / "tasks" / "heldout.jsonl", "-n", 200, "-m", model, "-o", tmp_path / name,
                 "--temperature", 0, "--seed", 1, *played)  # fmt: skip
        assert gymdata.validate(tmp_path / name).errors == 0
        return read_table(tmp_path / name)["reward"].to_numpy()

    before = held_out("before", student)
    gymdata_(
        "collect", DATA / "tasks" / "tutor.jsonl", "-r", 8, "-m", student, "-o", tmp_path / "run", "--seed", 1, *played
    )
    assert gymdata.validate(tmp_path / "run").errors == 0
    gymdata_("experience", tmp_path / "run", "--rewards", "steps", "--discount-unit", "turn", "--gamma", 0.9)
    gymdata_("train-rl", tmp_path / "run" / "experiences-grpo", "-m", student, "-o", tmp_path / "policy",
             "--config", DATA / "rl.yaml")  # fmt: skip
    after = held_out("after", tmp_path / "policy")
    assert after.mean() >= before.mean() + 0.1
    assert (after == 1).mean() > (before == 1).mean()
