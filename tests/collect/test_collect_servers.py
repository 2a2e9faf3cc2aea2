"""collect with its environment, or all of it, behind HTTP: what lands on disk and what is pending."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.collect.run import collect, load_parts
from gymdata.collect.settings import CollectConfig
from gymdata.errors import OutsideError, RefusedError, UsageError
from gymdata.store import read_run_json
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts
from tests.collect.saved_rows import failures_of, rows_of
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


@pytest.mark.parametrize(
    ("path", "place"), [("/seed_session", "environment start"), ("/add", "turn 0"), ("/verify", "verdict")]
)
def test_a_failing_server_is_pending_and_never_scored(
    server: Server, tasks: Path, tmp_path: Path, path: str, place: str
) -> None:
    """Failures are the environment's, name their place, keep the turns so far, and the next call makes them good."""
    server.modes[path] = ["500"]
    settings: dict[str, Any] = {"tasks": str(tasks), "output": tmp_path / "run", "seed": 1, "run_id": "r"}
    summary = collect(**settings, parts=in_server(server))
    assert (summary.rollouts, summary.pending, summary.exit_code) == (0, 4, 1)
    records = failures_of(tmp_path / "run")
    assert {(r["kind"], r["place"], r["counts"]) for r in records} == {("environment", place, True)}
    assert all(bool(r["turns"]) == (path != "/seed_session") for r in records)
    server.modes.clear()
    summary = collect(**settings, parts=in_server(server))
    assert (summary.rollouts, summary.pending, summary.exit_code) == (4, 0, 0)
    assert {row["reward"] for row in rows_of(tmp_path / "run")} == {0.5}


def test_a_server_that_is_gone_costs_no_attempt(tasks: Path, tmp_path: Path) -> None:
    """Nobody listens: the command ends with exit code 3 and says so; nothing counts against --max-attempts."""
    with pytest.raises(OutsideError, match=r"environment: .*cannot be reached") as caught:
        collect(
            tasks=str(tasks), output=tmp_path / "run", max_attempts=1, parts=in_server(Server(url="http://127.0.0.1:9"))
        )
    assert caught.value.exit_code == 3
    assert all(not record["counts"] for record in failures_of(tmp_path / "run"))


def test_a_server_may_move(server: Server, tasks: Path, tmp_path: Path) -> None:
    """Another address is no other run; it is recorded with the attempt."""
    settings: dict[str, Any] = {"tasks": str(tasks), "output": tmp_path / "run", "seed": 1}
    collect(**settings, num_rollouts=1, parts=in_server(server), env=server.url)
    with serving(Server()) as other:
        summary = collect(**settings, num_rollouts=2, parts=in_server(other), env=other.url)
    assert summary.rollouts == 8
    attempts = read_run_json(tmp_path / "run")["attempts"]
    assert [attempt["operation"]["env"] for attempt in attempts] == [server.url, other.url]


# --- a workflow -------------------------------------------------------------------------------------------------------


def in_workflow(server: Server, tasks: Path, **settings: Any) -> dict[str, Any]:
    return {"tasks": str(tasks), "workflow_url": f"{server.url}/run", "retries": 0, "seed": 1, **settings}


def with_ids(number: int) -> str:
    """A conversation of two calls, the second continuing the first."""
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    first = dict(zip(names, ([1, 2], [10 + number, 3], [-0.5, -0.25]), strict=True))
    second = dict(zip(names, ([1, 2, 10 + number, 3, 4], [5, 3], [-1.0, -0.125]), strict=True))
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", **first},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "b", **second, "finish_reason": "stop"},
    ]
    return json.dumps({"messages": messages, "reward": number, "status": "completed"})


def test_rollouts_with_ids_are_token_data(server: Server, tasks: Path, tmp_path: Path) -> None:
    """Ids and log-probs land in turns as they came, contiguous, and the file validates and stitches."""
    server.answers = {"0x": with_ids(0), "1x": with_ids(1)}
    server.modes["/run"] = ["0x", "1x"] * 4
    summary = collect(**in_workflow(server, tasks, num_rollouts=2, output=tmp_path / "run", model="agent"))
    assert (summary.rollouts, summary.breaks, summary.exit_code) == (8, 0, 0)
    rows = rows_of(tmp_path / "run")
    assert {row["policy_hash"] for row in rows} == {"served:agent"}
    turns = rows[0]["turns"]
    assert [list(t["generation_token_ids"])[-1] for t in turns] == [3, 3]
    assert [list(t["prompt_delta_ids"]) for t in turns] == [[1, 2], [4]]
    assert [m["turn"] for m in rows[0]["messages"]] == [None, 0, None, 1]
    assert gymdata.validate(tmp_path / "run").errors == 0
    assert gymdata.experience(tmp_path / "run", output=tmp_path / "e.parquet").counts["sequences"] == 8


def test_rollouts_without_ids_are_no_token_data(server: Server, tasks: Path, tmp_path: Path) -> None:
    """They are kept with their messages and reward; validate says T205, and nothing trains from them."""
    summary = collect(**in_workflow(server, tasks, output=tmp_path / "run"))
    assert (summary.rollouts, summary.turns, summary.reward["mean"]) == (4, 0, 1.0)
    assert gymdata.validate(tmp_path / "run").by_code["T205"] == 4
    with pytest.raises(RefusedError, match="T205"):
        gymdata.experience(tmp_path / "run")


def test_rewards_see_the_answer_of_a_rollout_without_ids(server: Server, tasks: Path, tmp_path: Path) -> None:
    """A reward function scores what a workflow's messages say, one number or one per call, as ``score`` does later."""
    file = tmp_path / "mine.py"
    file.write_text("def calls(completions, **_):\n    return [[float(c[-1]['content'])] for c in completions]\n")
    rewards = ["exact_match", f"{file}:calls"]
    collect(**in_workflow(server, tasks, output=tmp_path / "run", reward=rewards))
    parts_of = [{part["name"]: part["value"] for part in row["rewards"]} for row in rows_of(tmp_path / "run")]
    assert sorted(part["exact_match"] for part in parts_of) == [0.0, 0.0, 0.0, 1.0]  # every answer is 3
    assert {part["calls"] for part in parts_of} == {3.0}
    assert gymdata.score(tmp_path / "run", reward=["exact_match"]).flips["changed"] == 0


@pytest.mark.parametrize("fault", ["500", "garbage", "hang", "disconnect"])
def test_a_failing_workflow_is_pending(server: Server, tasks: Path, tmp_path: Path, fault: str) -> None:
    """Its failures are the environment's; the same command later completes the run."""
    server.modes["/run"] = [fault]
    settings = in_workflow(server, tasks, output=tmp_path / "run")
    summary = collect(**settings, request_timeout=0.2)
    assert (summary.rollouts, summary.pending, summary.exit_code) == (0, 4, 1)
    assert {(r["kind"], r["place"]) for r in failures_of(tmp_path / "run")} == {("environment", "workflow")}
    server.modes.clear()
    assert collect(**settings).exit_code == 0


def test_the_time_limit_of_a_rollout_holds_for_a_workflow(server: Server, tasks: Path, tmp_path: Path) -> None:
    """Nothing came within it: a failure, for there is nothing to keep."""
    server.modes["/run"] = ["hang"]
    summary = collect(**in_workflow(server, tasks, output=tmp_path / "run", time_limit=0.1))
    assert (summary.rollouts, summary.failures) == (0, 4)
    assert "within the 0.1 s limit" in failures_of(tmp_path / "run")[0]["message"]


def test_a_workflow_takes_the_engines_place(server: Server, tasks: Path, policy: str) -> None:
    """What only an engine needs is refused beside it, and the plan names the address."""
    for flag, value in (("endpoint", "http://x"), ("env", "a.py:B"), ("tokenizer", policy)):
        with pytest.raises(UsageError, match=f"--{flag} and --workflow-url"):
            load_parts(CollectConfig.load(None, in_workflow(server, tasks, **{flag: value})))
    planned = collect(dry_run=True, **in_workflow(server, tasks))
    assert planned.identity["environment"] == {"name": "workflow"}
    assert planned.identity["policy_hash"] == "served:workflow"


def test_the_servers_reward_keeps_its_name(server: Server, tasks: Path, tmp_path: Path) -> None:
    """A reward function named environment would be mixed up with it."""
    file = tmp_path / "mine.py"
    file.write_text("def environment(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    with pytest.raises(UsageError, match="named 'environment'"):
        load_parts(CollectConfig.load(None, in_workflow(server, tasks, reward=[f"{file}:environment"])))


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


def test_the_sample_workflow_plays_the_sample_tasks(sample_server: str, tmp_path: Path) -> None:
    """Its agent is right about every task, and says so in messages without ids."""
    tasks, url = str(SAMPLE / "tasks" / "nemo_gym.jsonl"), f"{sample_server}/workflow"
    summary = collect(tasks=tasks, limit=20, output=tmp_path / "run", workflow_url=url)
    assert (summary.rollouts, summary.reward["mean"], summary.exit_code) == (20, 1.0, 0)
    row = rows_of(tmp_path / "run")[0]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(row["extra"]) == {"environment": {"agent": "rule"}}


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
