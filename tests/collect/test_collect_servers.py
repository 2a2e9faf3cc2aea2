"""collect with its environment behind HTTP: what lands on disk and what is pending."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gymdata
from gymdata.commands.collect.run import collect, load_parts
from gymdata.commands.collect.settings import CollectConfig
from gymdata.errors import UsageError
from gymdata.store import read_run_json
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts
from tests.collect.saved_rows import rows_of
from tests.engine_fixtures import InProcess
from tests.environments.env_server import Server, serving

pytestmark = pytest.mark.torch

SAMPLE = Path(__file__).parents[2] / "sample_data"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as up:
        yield up


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Four tasks with the tool add."""
    rows = [
        {"task_id": f"t{i}", "responses_create_params": {"input": f"q{i}", "tools": [ADD]}, "answer": str(i)}
        for i in range(4)
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def in_server(server: Server, **settings: Any) -> Any:
    """The fakes' engine with the environment behind HTTP, as a configuration would join them."""
    config = CollectConfig.load(
        None,
        {"tasks": "x", "env": server.url, "model": str(SAMPLE / "policy"), "retries": 0, "tool_timeout": 5, **settings},
    )
    playing = parts(FakeSampler(add_or_answer))
    playing.environment = load_parts(config).environment
    return playing


@pytest.mark.parametrize("max_turns", [16, 1])
def test_the_servers_reward_is_a_part_and_its_words_are_kept(
    server: Server, tasks: Path, tmp_path: Path, max_turns: int
) -> None:
    """Every rollout, also one that ran out of turns, has the part "environment", the total that it gives, and what verify
    said in extra."""
    settings = {"max_turns": max_turns, "num_rollouts": 2, "seed": 1}
    summary = collect(tasks=str(tasks), output=tmp_path / "run", parts=in_server(server), **settings)
    assert (summary.rollouts, summary.truncated, summary.exit_code) == (8, 8 * (max_turns == 1), 0)
    rows = rows_of(tmp_path / "run")
    assert {row["reward"] for row in rows} == {0.5}
    assert all(row["rewards"] == [{"name": "environment", "value": 0.5}] for row in rows)
    assert len({json.loads(row["extra"])["environment"]["graded_by"] for row in rows}) == 8
    assert gymdata.validate(tmp_path / "run").errors == 0
    assert read_run_json(tmp_path / "run")["identity"]["environment"] == {"name": "resource_server"}


def test_a_server_may_move(server: Server, tasks: Path, tmp_path: Path) -> None:
    """Another address is no other run; it is recorded with the attempt."""
    settings: dict[str, Any] = {"tasks": str(tasks), "output": tmp_path / "run", "seed": 1}
    collect(**settings, num_rollouts=1, parts=in_server(server), env=server.url)
    with serving(Server()) as other:
        summary = collect(**settings, num_rollouts=2, parts=in_server(other), env=other.url)
    assert summary.rollouts == 8
    attempts = read_run_json(tmp_path / "run")["attempts"]
    assert [attempt["operation"]["env"] for attempt in attempts] == [server.url, other.url]


def test_the_servers_reward_keeps_its_name(server: Server, tmp_path: Path) -> None:
    """A reward function named environment would be mixed up with it."""
    file = tmp_path / "mine.py"
    file.write_text("def environment(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    with pytest.raises(UsageError, match="named 'environment'"):
        in_server(server, reward=[f"{file}:environment"])


# --- the sample server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample_server() -> Iterator[str]:
    """sample_data/calculator_server.py in a process of its own."""
    command = [sys.executable, str(SAMPLE / "calculator_server.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def test_every_answer_of_the_sample_server_names_its_session(sample_server: str) -> None:
    """NeMo Gym's simple_agent sends the cookies of the answer before, and no others."""
    cookies = httpx.post(f"{sample_server}/seed_session", json={}).cookies
    verdict = {"response": {"output": []}, "answer": "5"}
    for path, body, status in [
        ("calculate", {"expression": "2+3"}, 200),
        ("calculate", {}, 400),
        ("verify", verdict, 200),
    ]:
        answer = httpx.post(f"{sample_server}/{path}", json=body, cookies=cookies)
        assert (answer.status_code, answer.cookies["session"]) == (status, cookies["session"])
        cookies = answer.cookies
    assert answer.json()["tool_calls"] == 2


def samples_of(row: dict[str, Any]) -> tuple[Any, ...]:
    ids = [turn["generation_token_ids"] for turn in row["turns"]]
    return row["rollout_id"], ids, [(m["role"], m["content"]) for m in row["messages"]]


def test_tools_behind_http_give_the_rollouts_that_tools_in_process_give(
    sample_server: str, vllm_sampler: InProcess, tmp_path: Path, policy: str
) -> None:
    """With one seed, a real engine samples the same ids, and messages are the same; verify's reward is the named one's."""
    collected: list[list[dict[str, Any]]] = []
    for name, env in (("http", sample_server), ("python", str(SAMPLE / "calculator.py") + ":Calculator")):
        vllm_sampler.collect(
            tasks=str(SAMPLE / "tasks" / "nemo_gym.jsonl"), limit=12, num_rollouts=2, model=policy, env=env,
            reward=["numeric"], max_tokens=48, seed=3, run_id="same", output=str(tmp_path / name),
        )  # fmt: skip
        collected.append(rows_of(tmp_path / name))
    for ours, theirs in zip(*collected, strict=True):
        assert samples_of(ours) == samples_of(theirs)
        scores = {part["name"]: part["value"] for part in ours["rewards"]}
        assert scores["environment"] == scores["numeric"]
    assert len(collected[0]) == 24
    assert any(len(row["turns"]) > 1 for row in collected[0])
    assert gymdata.validate(tmp_path / "http").errors == 0
