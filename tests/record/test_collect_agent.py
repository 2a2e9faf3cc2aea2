"""``collect --agent``: a rollout is a session of an agent's run, scored by what the agent left, or a failed attempt."""

from __future__ import annotations

import asyncio
import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.collect.run import Parts, collect
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.record.agent import load_agent, prompt_of
from gymdata.commands.validate.run import validate
from gymdata.environments import SingleTurn
from gymdata.errors import DataError, OutsideError, StoreError, UsageError
from gymdata.rollouts.messages import Task
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_run_json, read_table
from gymdata.store.journal import read_failure_file
from gymdata.store.lock import claim
from tests.collect.fake_parts import FakeSampler, engine_fault
from tests.record.recorded_agent import ASK, asking, collected
from tests.record.scripted_engine import Letters

TASKS = [{"task_id": "a", "prompt": "it's $HOME", "answer": "2"}, {"task_id": "b", "prompt": "q2", "answer": "1"}]
REWARD = '''
def left(completion, stdout, stderr, exit_code, directory, answer) -> float:
    """1 where the agent's file, output and exit code agree."""
    text = (directory / "answer.txt").read_text()
    assert stdout == f"wrote {text}\\n" and stderr.startswith("of ") and completion == text
    return text == answer if exit_code == 0 else -exit_code
'''


def rows_of(run: Path) -> list[dict[str, Any]]:
    return sorted(read_table(run, ROLLOUTS).to_pylist(), key=lambda row: (row["task_id"], row["rollout_index"]))


def failures_of(run: Path) -> list[dict[str, Any]]:
    return read_failure_file(run / "failures.jsonl")


@pytest.mark.parametrize(("code", "status", "stop_reason"), [(0, "completed", None), (3, "truncated", "exit_3")])
def test_a_rollout_is_what_the_agent_did(tmp_path: Path, code: int, status: str, stop_reason: str | None) -> None:
    """Each task's group is recorded and scored by file, output and exit code, as often as was asked, and then stays; agents
    that all failed end the command with 1, and a remark says where the reason is."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    run, sampler = tmp_path / "run", FakeSampler()
    settings: dict[str, Any] = {"agent": asking(code), "num_rollouts": 2, "reward": [f"{reward}:left"]}
    summary = collected(TASKS, run, sampler, **settings)
    rows = rows_of(run)
    assert [(row["task_id"], row["rollout_index"]) for row in rows] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert {(row["status"], row["stop_reason"]) for row in rows} == {(status, stop_reason)}
    assert len({row["group_id"] for row in rows}) == 2
    assert [json.loads(row["task"]) for row in rows[::2]] == TASKS
    for row in rows:
        text = row["messages"][-1]["content"]
        assert row["messages"][0]["content"] == json.loads(row["task"])["prompt"]
        assert row["reward"] == (float(text == json.loads(row["task"])["answer"]) if code == 0 else -3.0)
        left = json.loads(row["extra"])["environment"]
        assert left == {"exit_code": code, "stdout": f"wrote {text}\n", "stderr": f"of {row['task_id']}\n"}
    assert (summary.rollouts, summary.failures, summary.exit_code, len(sampler.requests)) == (4, 0, int(code > 0), 4)
    remarks = [text.partition(" other than 0")[0] for text in summary.remarks() if "exit code" in text]
    assert (summary.agent_exits, remarks) == ((4, ["every agent ended with an exit code"]) if code else (0, []))
    assert validate(run).ok
    assert not list(Path(run).glob("sessions/*"))
    again = collected(TASKS, run, sampler, **settings)
    assert (again.new_rollouts, len(sampler.requests)) == (0, 4)


def test_the_ids_are_those_of_collect_with_the_same_seed(tmp_path: Path) -> None:
    """An agent that sends the task's prompt gets what ``collect`` alone samples."""
    collected(TASKS, tmp_path / "agent", FakeSampler(), agent=asking(), num_rollouts=2, run_id="r")
    parts = Parts(FakeSampler(), Letters(), SingleTurn(), [], {"policy": "fake", "policy_hash": "fake-0"})
    collect(TASKS, output=tmp_path / "alone", seed=3, num_rollouts=2, run_id="r", parts=parts)
    pairs = zip(rows_of(tmp_path / "agent"), rows_of(tmp_path / "alone"), strict=True)
    for recorded, alone in pairs:
        for name in ("rollout_id", "group_id", "task", "temperature"):
            assert recorded[name] == alone[name]
        for key in ("prompt_delta_ids", "generation_token_ids", "generation_log_probs"):
            assert recorded["turns"][0][key] == alone["turns"][0][key]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sh -c 'echo out of order >&2; exit 2' sh {prompt}",
         "agent: ended with exit code 2 without a model call: out of order"),
        ("true {prompt}", "agent: ended with exit code 0 without a model call: its client's base URL is OPENAI_BASE_URL"),
        ("./no-such-agent {prompt}", "agent: ./no-such-agent: cannot be run: No such file or directory"),
        (asking().replace("sys.exit(code)", "os.kill(os.getpid(), 9)"), "agent: was ended by signal SIGKILL"),
        (asking().replace("sys.exit(code)", "os.kill(os.getpid(), 40)"), "agent: was ended by signal 40"),
    ],
)  # fmt: skip
def test_an_agent_that_crashes_is_a_failed_attempt(tmp_path: Path, command: str, message: str) -> None:
    """Attributed to the agent, with what was sampled, and never a score."""
    run = tmp_path / "run"
    summary = collected(TASKS[1:], run, FakeSampler(), agent=command, reward=["exact_match"], max_attempts=1)
    assert (summary.rollouts, summary.failures, summary.exhausted, summary.exit_code) == (0, 1, 1, 1)
    (fault,) = failures_of(run)
    assert (fault["kind"], fault["place"], fault["message"], fault["attempt"]) == ("agent", "run", message, 1)
    assert len(fault["turns"]) == ("signal" in message)


def test_force_overrides_agents_and_is_of_the_runs_identity(tmp_path: Path) -> None:
    """As ``record --force`` does; a run that was forced is not resumed without it, and only agents can be overridden."""
    run, sampler = tmp_path / "run", FakeSampler()
    chooses = asking().replace('"model": "m"', '"model": "m", "temperature": 0.5')
    collected(TASKS[1:], run, sampler, agent=chooses, force=["temperature=1"])
    (row,) = rows_of(run)
    assert (sampler.requests[0].sampling, row["temperature"]) == (None, 1.0)
    assert read_run_json(run)["identity"]["force"] == {"temperature": 1}
    with pytest.raises(StoreError, match="force"):
        collected(TASKS[1:], run, sampler, agent=chooses)
    with pytest.raises(UsageError, match="KEY=VALUE"):
        collected(TASKS[1:], tmp_path / "bad", sampler, agent=chooses, force=["temperature"])
    with pytest.raises(UsageError, match="no effect without agent"):
        CollectConfig.of({"tasks": "-", "force": {"temperature": 1}}, "test")


def test_time_limits_truncate_and_the_agents_own_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--time-limit`` keeps what was recorded; ``--agent-timeout`` does not; both end the agent's process group."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    calls: list[object] = []

    async def late(request: object) -> None:
        """An agent's second call comes an hour after its first, by the clock of the loop."""
        calls.append(request)
        if len(calls) % 2 == 0:
            clock = (loop := asyncio.get_running_loop()).time
            monkeypatch.setattr(loop, "time", lambda: clock() + 3600)

    again = "urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))"
    held = 'lock = open(os.environ["HELD"], "w"); fcntl.flock(lock, fcntl.LOCK_EX)'
    start = f'{held}; subprocess.Popen(["sleep", "1000"], pass_fds=[lock.fileno()]); {again}; time.sleep(1000)'
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    hangs = asking().replace("sys.exit(code)", start).replace("import json", "import fcntl, subprocess, time, json")
    summary = collected(TASKS[1:], tmp_path / "cut", FakeSampler(before=late), agent=hangs, time_limit=600.0)
    (row,) = rows_of(tmp_path / "cut")
    assert (row["status"], row["stop_reason"], row["n_turns"], summary.exit_code) == ("truncated", "time_limit", 2, 0)
    settings: dict[str, Any] = {"agent": hangs, "agent_timeout": 600.0, "max_attempts": 1}
    summary = collected(TASKS[1:], tmp_path / "failed", FakeSampler(before=late), **settings)
    (fault,) = failures_of(tmp_path / "failed")
    assert (fault["kind"], fault["message"]) == ("agent", "agent: did not end within 600 s (--agent-timeout)")
    assert (summary.rollouts, len(fault["turns"]) > 0) == (0, True)
    # Held by each agent and the process that it started, until both have ended.
    with (tmp_path / "held").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def test_an_engine_that_fails_is_not_the_agents_fault(tmp_path: Path) -> None:
    """The attempt is the engine's failure, whatever the agent made of the error."""

    async def out(_: object) -> None:
        raise engine_fault()

    run = tmp_path / "run"
    careless = asking().replace(
        "answer = json.load(", "import contextlib\nwith contextlib.suppress(OSError): json.load("
    )
    careless = careless.partition("text =")[0] + "' {prompt} 0"
    for command in (asking(), careless):
        summary = collected(TASKS[1:], run, FakeSampler(before=out), agent=command, max_attempts=1, overwrite=True)
        assert (summary.rollouts, summary.failures) == (0, 1)
        assert {f["kind"] for f in failures_of(run)} == {"engine"}
        assert failures_of(run)[-1]["message"] == "engine: out of luck"


def test_an_engine_that_dies_ends_the_run(tmp_path: Path) -> None:
    """Every agent is ended, and no attempt is counted."""

    async def die(_: object) -> None:
        raise engine_fault("gone", fatal=True)

    waits = asking().replace("sys.exit(code)", "").replace("answer = ", "import time\ntry: answer = ")
    waits = waits.partition("text =")[0] + "\nexcept OSError: time.sleep(1000)' {prompt} 0"
    with pytest.raises(OutsideError, match="gone"):
        collected(TASKS, tmp_path / "run", FakeSampler(before=die), agent=waits)
    assert not any(f["counts"] for f in failures_of(tmp_path / "run"))


def test_an_agent_starts_from_files(tmp_path: Path) -> None:
    """Those of ``--agent-files``, and the task's own; another content is another run."""
    files = tmp_path / "files"
    (files / "bin").mkdir(parents=True)
    (files / "bin" / "start.sh").write_text('echo $1; cat src/x.txt; exec $2 -c "$(cat ask.py)" $1 0')
    (files / "ask.py").write_text(ASK)
    task = {"task_id": "a", "prompt": "q", "files": {"src/x.txt": "from the task\n"}}
    settings: dict[str, Any] = {
        "agent": f"sh bin/start.sh {{prompt}} {sys.executable}", "agent_files": files
    }  # fmt: skip
    collected([task], tmp_path / "run", FakeSampler(), **settings)
    (row,) = rows_of(tmp_path / "run")
    assert json.loads(row["extra"])["environment"]["stdout"].startswith("q\nfrom the task\nwrote ")
    (files / "ask.py").write_text(ASK + "\n")
    with pytest.raises(StoreError, match="other settings"):
        collected([task], tmp_path / "run", FakeSampler(), **settings)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("no-such-agent {prompt}", "'no-such-agent' is not a command that can be run"),
        ("python agent.py", r"has neither \{prompt\} nor \{prompt_file\}"),
        ("codex2", r"'codex2' has neither \{prompt\} nor"),
        ("python 'agent.py {prompt}", "a command line .No closing quotation."),
        ("python agent.py {prompt}", "agent.py is a file of this folder, and the agent runs in a folder of its own"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, message: str
) -> None:
    """By what is wrong with it, before anything is started."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").touch()
    with pytest.raises(UsageError, match=message):
        load_agent(agent)


@pytest.mark.parametrize(
    ("messages", "row", "message"),
    [
        ([{"role": "assistant", "content": "x"}], {}, "has a message of role 'assistant', expected a prompt"),
        ([], {}, "has no prompt for the agent"),
        ([{"role": "user", "content": "x\0"}], {}, "NUL or surrogates"),
        ([{"role": "user", "content": "x" * 200_000}], {}, "the prompt has 200,000 bytes, an argument of a command at most"),
        ([{"role": "user", "content": "x"}], {"files": {"../x": "y"}}, "expected a path below the agent's folder"),
        ([{"role": "user", "content": "x"}], {"files": ["x"]}, "expected an object of paths and texts"),
    ],
)  # fmt: skip
def test_a_task_that_no_agent_can_be_given_is_refused(messages: Any, row: dict[str, Any], message: str) -> None:
    """By name, before anything is started."""
    with pytest.raises(DataError, match=message):
        load_agent("true {prompt}").check(Task("t", messages, None, row, ""))


def test_a_prompt_is_system_and_user_text() -> None:
    """One after the other."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_of(Task("t", messages, None, {}, "")) == "Be brief.\n\nHi"


FUNCTION = """
import asyncio, json, urllib.request

async def solve(task, base_url, api_key, directory):
    body = {"model": "m", "messages": [{"role": "user", "content": task["prompt"]}]}
    headers = {"content-type": "application/json", "authorization": "Bearer " + api_key}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    (directory / "answer.txt").write_text(answer)
    if task["prompt"] == "raise":
        raise ValueError("no idea")
    return float(answer == task["answer"])
"""


def test_an_async_function_is_an_agent(tmp_path: Path) -> None:
    """It may block, gets what it names, and returns the reward; what it raises is a failed attempt with its line."""
    (tmp_path / "agent.py").write_text(FUNCTION)
    tasks = [*TASKS, {"task_id": "c", "prompt": "raise", "answer": "1"}]
    summary = collected(tasks, tmp_path / "run", FakeSampler(), agent=f"{tmp_path}/agent.py:solve", max_attempts=1)
    rows = rows_of(tmp_path / "run")
    assert [row["task_id"] for row in rows] == ["a", "b"]
    assert [row["reward"] for row in rows] == [
        float(row["messages"][-1]["content"] == json.loads(row["task"])["answer"]) for row in rows
    ]
    assert [row["rewards"][0]["name"] for row in rows] == ["reported", "reported"]
    (fault,) = failures_of(tmp_path / "run")
    assert (fault["kind"], len(fault["turns"]), summary.exhausted) == ("agent", 1, 1)
    assert fault["message"].startswith("agent: raised ValueError: no idea (")
    assert "agent.py:11" in fault["message"]


def test_a_function_that_calls_no_model_is_a_failed_attempt(tmp_path: Path) -> None:
    """And is said to have called none, with the argument that its client needs; it may be an ordinary function."""
    (tmp_path / "agent.py").write_text("def solve(task):\n    return 1.0\n")
    collected(TASKS[1:], tmp_path / "run", FakeSampler(), agent=f"{tmp_path}/agent.py:solve", max_attempts=1)
    (fault,) = failures_of(tmp_path / "run")
    assert fault["message"] == "agent: returned without a model call: its client's base URL is the argument base_url"


def test_a_function_that_takes_something_else_is_refused_with_what_it_may_take(tmp_path: Path) -> None:
    """By name."""
    solver = tmp_path / "solver.py"
    solver.write_text("async def solve(question): ...")
    with pytest.raises(UsageError, match="the function takes question") as refused:
        load_agent(f"{solver}:solve")
    assert "task, base_url, api_key, model, directory, rollout_index" in str(refused.value.hint)


def test_what_a_killed_command_left_is_removed_by_the_next_of_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a command that runs, and what has no lock, stay."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, running, unlocked = (tmp_path / f"gymdata-agents-{name}" for name in ("killed", "running", "unlocked"))
    for folder in (killed, running, unlocked):
        folder.mkdir()
    code = "import sys; from pathlib import Path; from gymdata.store.lock import claim; "
    code += "lock = claim(Path(sys.argv[1])); print(1, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(killed / "lock")]
    lock = claim(running / "lock")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"1\n"
        collected(TASKS, tmp_path / "one", FakeSampler(), agent=asking())
        assert killed.exists()
        owner.kill()
        owner.wait()
        collected(TASKS, tmp_path / "two", FakeSampler(), agent=asking())
    lock.release()
    assert sorted(tmp_path.glob("gymdata-agents-*")) == [running, unlocked]
