"""Coding agents over ten tasks: real tools write files that the reward sees, and every id is the sampled one.

Each is skipped where its command is not on PATH (``npm install -g @openai/codex @anthropic-ai/claude-code opencode-ai
@mariozechner/pi-coding-agent @qwen-code/qwen-code``, ``pip install mini-swe-agent``).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table
from tests.record.recorded_agent import KeptSampler, collected

REWARD = '''
def written(directory, exit_code, answer) -> float:
    """1 where the agent wrote the answer."""
    file = directory / "answer.txt"
    return float(exit_code == 0 and file.exists() and file.read_text().strip() == answer)
'''
#: The tool that writes, and what it is called with besides the command.
WRITES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "codex": ("exec_command", "cmd", {}),
    "claude": ("Bash", "command", {"description": "Write"}),
    "pi": ("bash", "command", {}),
    "opencode": ("bash", "command", {"description": "Write"}),
    "qwen": ("run_shell_command", "command", {"is_background": False}),
    "mini": ("bash", "command", {}),
}
_PI = {"baseUrl": "{base_url}", "api": "openai-completions", "apiKey": "{key}", "models": [{"id": "policy"}]}
#: Of agents without a preset, the command.
COMMANDS = {
    "mini": "mini -m openai/policy -y --exit-immediately -o trajectory.json -t {prompt}",
    "pi": 'sh -c \'mkdir ../pi && printf %s "$1" > ../pi/models.json && PI_CODING_AGENT_DIR=../pi exec pi --provider gymdata'
    f" --model policy -p \"$2\"' sh '{json.dumps({'providers': {'gymdata': _PI}})}' {{prompt}}",
}
#: The tool that starts another agent, and the name of its prompt.
DELEGATES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "codex": ("spawn_agent", "message", {}),
    "claude": ("Agent", "prompt", {"description": "Write", "subagent_type": "general-purpose"}),
    "opencode": ("task", "prompt", {"description": "Write", "subagent_type": "general"}),
}


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What mini-swe-agent would ask for, and fetch."""
    for variable in ("LITELLM_LOCAL_MODEL_COST_MAP=True", "MSWEA_CONFIGURED=true", "MSWEA_COST_TRACKING=ignore_errors"):
        monkeypatch.setenv(*variable.split("="))


def runs(tmp_path: Path, name: str, prompt: str, script: list[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of ten tasks, after their ids were compared with what the engine read and sampled."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not on PATH")
    (tmp_path / "reward.py").write_text(REWARD)
    tasks = [{"task_id": f"t{n}", "prompt": prompt.format(n), "answer": str(n)} for n in range(10)]
    sampler, run = KeptSampler(script, delegates="delegate "), tmp_path / "run"
    settings: dict[str, Any] = {"concurrency": 2, "reward": [f"{tmp_path}/reward.py:written"]}
    summary = collected(tasks, run, sampler, agent=COMMANDS.get(name, name), **settings)
    assert (summary.rollouts, summary.failures, summary.breaks) == (10, 0, 0)
    rows = read_table(run, ROLLOUTS).to_pylist()
    recorded = [
        (prompt.tolist(), list(turn["generation_token_ids"]))
        for row in rows
        for turn, prompt in zip(row["turns"], expand_prompts(row["turns"]), strict=True)
    ]
    key = Counter(json.dumps(pair) for pair in recorded)
    assert key == Counter(json.dumps([one["prompt"], one["generation"]]) for one in sampler.sampled)
    assert validate(run).ok
    return rows


@pytest.mark.full
@pytest.mark.parametrize("name", WRITES)
def test_ten_tasks_are_solved_by_real_tools(tmp_path: Path, name: str) -> None:
    """Each file is seen by the reward; the tool's result is in the messages; OpenCode's title is a side request."""
    tool, argument, more = WRITES[name]
    script = [(f"write {n}.", tool, {argument: f"echo {n} > answer.txt", **more}) for n in range(10)]
    rows = runs(tmp_path, name, "write {}.", script)
    assert [row["reward"] for row in rows] == [1.0] * 10
    assert all(any(m["role"] == "tool" for m in row["messages"]) for row in rows)
    labels = (*(["side-"] if name == "opencode" else []), "main", "main")
    for row in rows:
        agents = [turn["agent"] for turn in row["turns"]]
        assert all(agent.startswith(label) for agent, label in zip(agents, labels, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", DELEGATES)
def test_ten_tasks_are_solved_by_sub_agents(tmp_path: Path, name: str) -> None:
    """Two rollouts at a time, each with an agent that starts another one; both are told apart."""
    tool, argument, more = WRITES[name]
    starts, prompt, others = DELEGATES[name]
    script = [(f"delegate {n}.", starts, {prompt: f"write {n}.", **others}) for n in range(10)]
    script += [(f"write {n}.", tool, {argument: f"echo {n} > answer.txt", **more}) for n in range(10)]
    rows = runs(tmp_path, name, "delegate {}.", script)
    assert [row["reward"] for row in rows] == [1.0] * 10
    label = "collab_spawn" if name == "codex" else "sub-agent"
    assert all({turn["agent"] for turn in row["turns"]} >= {"main", label} for row in rows)
