"""Coding agents are recorded token for token, through a real call of a tool, with a script in the engine's place.

Each runs in a namespace that reaches nothing but the recorder, and is skipped where its command is not on PATH: ``npm
install @openai/codex @anthropic-ai/claude-code @mariozechner/pi-coding-agent opencode-ai @qwen-code/qwen-code``, ``pip
install mini-swe-agent``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table
from gymdata.validate.run import validate

ROOT = Path(__file__).parents[2]
WRITE = "echo 42 > answer.txt"
DELEGATE = "use a sub-agent"
PI = {
    "api": "openai-completions",
    "apiKey": "gymdata-key",
    "models": [{"id": "m", "contextWindow": 100_000, "maxTokens": 4_000}],
}
OPENCODE = {
    "permission": "allow",
    "provider": {
        "g": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "URL", "apiKey": "gymdata-key"},
            "models": {"m": {}},
        }
    },
}
CODEX = (
    "codex exec --skip-git-repo-check -s workspace-write -m m -c 'model_provider=\"g\"' "
    '-c "model_providers.g={name=\\"g\\",base_url=\\"$OPENAI_BASE_URL\\",env_key=\\"OPENAI_API_KEY\\",'
    'wire_api=\\"responses\\"}" '
)
QWEN = "qwen --auth-type openai --openai-api-key $OPENAI_API_KEY --openai-base-url $OPENAI_BASE_URL -m m --yolo -p "
CLAUDE = "claude --model m --allowedTools 'Bash(*)' Agent -p "


@dataclass(frozen=True)
class Agent:
    """``command``: without its prompt, for a shell; ``tool`` and ``arguments``: by which it writes the answer; the
    same in ``delegates`` of its tool that starts another agent; ``files``: what its home has, ``URL`` for the recorder's.
    ``labels``, ``delegated``: of its turns, alone and with the other agent."""

    command: str
    tool: str
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"command": WRITE})
    delegates: tuple[str, Mapping[str, Any]] = ("", {})
    files: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ("main", "main")
    delegated: tuple[str, ...] = ()


AGENTS = {
    "codex": Agent(
        CODEX,
        "exec_command",
        {"cmd": WRITE},
        ("spawn_agent", {"message": "write 42"}),
        delegated=("main", "collab_spawn"),
    ),
    "claude": Agent(
        CLAUDE,
        "Bash",
        {"command": WRITE, "description": "Write"},
        ("Agent", {"description": "Write", "prompt": "write 42", "subagent_type": "general-purpose"}),
        delegated=("main", "sub-agent", "sub-agent", "main"),
    ),
    "pi": Agent(
        "pi --provider g --model m -p ",
        "bash",
        files={".pi/agent/models.json": {"providers": {"g": {"baseUrl": "URL", **PI}}}},
    ),
    "opencode": Agent(
        "opencode run -m g/m ",
        "bash",
        {"command": WRITE, "description": "Write"},
        ("task", {"description": "Write", "prompt": "write 42", "subagent_type": "general"}),
        {".config/opencode/opencode.json": OPENCODE},
        ("side-", "main", "main"),
        ("side-", "main", "sub-agent", "sub-agent", "main"),
    ),
    "qwen": Agent(QWEN, "run_shell_command", {"command": WRITE, "is_background": False}),
    "mini": Agent("mini -m openai/m -y --exit-immediately -o trajectory.json -t ", "bash"),
}


def recorded(tmp_path: Path, name: str, prompt: str) -> tuple[list[dict[str, Any]], list[dict[str, list[int]]]]:
    """The rows of the run, and what the engine read and sampled."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not on PATH")
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces without a network here")
    agent = AGENTS[name]
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    copies = []
    for path, content in agent.files.items():
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(json.dumps(content))
        copies.append(f'sed -i "s,\\"URL\\",\\"$OPENAI_BASE_URL\\"," {home / path}')
    script = [[DELEGATE, *agent.delegates], ["", agent.tool, agent.arguments]]
    command = " && ".join([*copies, f"{agent.command}'{prompt}'"])
    record = [sys.executable, "-m", "tests.record.recorded_agent", str(tmp_path), json.dumps(script)]
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *record, "sh", "-c", command],
        cwd=work,
        env={
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_table(tmp_path / "run", ROLLOUTS).to_pylist(), json.loads((tmp_path / "sampled.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("name", AGENTS)
def test_an_agents_session_is_what_the_engine_read_and_sampled(tmp_path: Path, name: str) -> None:
    """One rollout without a break, whose tool call really wrote the file."""
    (row,), sampled = recorded(tmp_path, name, "write 42")
    assert (tmp_path / "work" / "answer.txt").read_text().strip() == "42"
    assert (row["status"], row["n_breaks"]) == ("completed", 0)
    turns = row["turns"]
    assert [list(turn["generation_token_ids"]) for turn in turns] == [one["generation"] for one in sampled]
    assert [prompt.tolist() for prompt in expand_prompts(turns)] == [one["prompt"] for one in sampled]
    labels = AGENTS[name].labels
    assert all(turn["agent"].startswith(label) for turn, label in zip(turns, labels, strict=True))
    assert [v.code for v in validate(tmp_path / "run").violations if v.severity == "error"] == []


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if agent.delegated])
def test_a_sub_agent_is_a_conversation_of_the_session(tmp_path: Path, name: str) -> None:
    """It has a label of its own, and the main one is not broken by it."""
    (row,), sampled = recorded(tmp_path, name, DELEGATE)
    assert (row["status"], row["n_breaks"]) == ("completed", 0)
    generated = [list(turn["generation_token_ids"]) for turn in row["turns"]]
    assert sorted(generated) == sorted(one["generation"] for one in sampled)
    agents = [turn["agent"] for turn in row["turns"]]
    assert {label for label in agents if not label.startswith("side-")} >= set(AGENTS[name].delegated) - {"side-"}
    assert [v.code for v in validate(tmp_path / "run").violations if v.severity == "error"] == []
