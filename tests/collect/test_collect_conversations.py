"""collect with a user in the conversation: step rewards on turns, several environments, the dry run, and credit by step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.collect.run import Parts, collect
from gymdata.environments import ByName, WithUser, load_environment, load_user
from gymdata.errors import DataError, OutsideError, UsageError
from gymdata.experience.run import experience
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.store import read_failures, read_run_json, read_table
from gymdata.validate.run import validate
from tests.collect.fake_parts import FakeSampler, parts

POLICY = str(Path(__file__).parents[2] / "sample_data" / "policy")
USERS = '''
from gymdata import Step

def twice(messages, task) -> Step:
    """Two answers are wanted; each is worth something."""
    tries = sum(message["role"] == "user" for message in messages)
    return Step("again", reward=0.25) if tries < 2 else Step(reward=1.0, done=True, stop_reason="enough")

def talkative(messages, task):
    return "go on"

class Quiz:
    closed = []

    def __init__(self, prize: float = 1.0):
        self.prize = prize

    def reset(self, answer, **task):
        self.answer = answer

    async def hint(self) -> str:
        """Give a hint."""
        return self.answer

    def respond(self, message) -> Step:
        return Step(reward=self.prize, done=True) if message["content"] == self.answer else None

    def close(self):
        self.closed.append(self.answer)

class Broken(Quiz):
    def close(self):
        raise RuntimeError("still open")
'''


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "users.py"
    path.write_text(USERS)
    return path


def with_user(users: Path, name: str, **more: Any) -> Parts:
    made = parts(**more)
    assert made.environment is not None
    made.environment = WithUser(made.environment, load_user(f"{users}:{name}", timeout_s=5))
    return made


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return sorted(read_table(folder).to_pylist(), key=lambda row: (row["task_id"], row["rollout_index"]))


def test_a_users_rewards_lie_on_the_turns_that_earned_them(
    tasks: Callable[..., Path], users: Path, tmp_path: Path
) -> None:
    """Two turns: 0.25 and 1; the rollout has their sum, its user messages, a named end and no break; nothing is violated."""
    made = with_user(users, "twice")
    summary = collect(tasks=str(tasks(3)), output=tmp_path / "run", num_rollouts=2, seed=1, parts=made)
    assert (summary.rollouts, summary.breaks) == (6, 0)
    assert summary.reward["mean"] == 1.25
    for row in rows_of(tmp_path / "run"):
        assert [turn["reward"] for turn in row["turns"]] == [0.25, 1.0]
        assert row["rewards"] == [{"name": "steps", "value": 1.25}]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert (row["status"], row["stop_reason"]) == ("completed", "enough")
        first, second = row["turns"]
        assert second["prefix_length"] == len(first["prompt_delta_ids"]) + len(first["generation_token_ids"])
    assert validate(tmp_path / "run").errors == 0
    identity = read_run_json(tmp_path / "run")["identity"]["environment"]
    assert identity["user"]["spec"] == "users.py:twice"


def test_steps_stay_apart_from_another_reward(tasks: Callable[..., Path], users: Path, tmp_path: Path) -> None:
    """With a reward function the rollout has its value alone, and the turns keep theirs."""
    made = with_user(users, "twice", rewards=["exact_match"])
    collect(tasks=str(tasks(4)), output=tmp_path / "run", seed=1, parts=made)
    for row in rows_of(tmp_path / "run"):
        assert [part["name"] for part in row["rewards"]] == ["exact_match"]
        assert [turn["reward"] for turn in row["turns"]] == [0.25, 1.0]


@pytest.mark.parametrize("annotated", [True, False])
def test_a_rollout_that_a_limit_ends_has_the_sum_so_far(
    tasks: Callable[..., Path], tmp_path: Path, annotated: bool
) -> None:
    """Cut at its first turn it has no step: 0 where the environment says that its steps have rewards, else no reward."""
    said = " -> Step" if annotated else ""
    (tmp_path / "e.py").write_text(
        "from gymdata import Step\nclass E:\n"
        f"    def respond(self, message){said}:\n        return Step(reward=1, done=True)\n"
    )
    collect(tasks=str(tasks(2)), output=tmp_path / "run", seed=1, max_tokens=1, parts=parts(env=f"{tmp_path}/e.py:E"))
    assert [(row["status"], row["reward"]) for row in rows_of(tmp_path / "run")] == [
        ("truncated", 0.0 if annotated else None)
    ] * 2


def test_a_users_answers_may_be_known_to_have_rewards(tasks: Callable[..., Path], users: Path, tmp_path: Path) -> None:
    """A user function with the return type Step: a rollout that was cut before it heard the user has the sum 0."""
    collect(tasks=str(tasks(1)), output=tmp_path / "a", seed=1, max_tokens=1, parts=with_user(users, "twice"))
    assert [row["reward"] for row in rows_of(tmp_path / "a")] == [0.0]


def test_get_reward_counts_for_a_truncated_rollout_too(tasks: Callable[..., Path], tmp_path: Path) -> None:
    """At the end of a rollout that max_turns cut, it lies on the last turn, as for a completed one."""
    (tmp_path / "e.py").write_text(
        "class E:\n    def respond(self, message):\n        return 'more'\n    def get_reward(self):\n        return 0.5\n"
    )
    collect(tasks=str(tasks(1)), output=tmp_path / "run", seed=1, max_turns=2, parts=parts(env=f"{tmp_path}/e.py:E"))
    (row,) = rows_of(tmp_path / "run")
    assert (row["stop_reason"], row["reward"]) == ("max_turns", 0.5)
    assert [turn["reward"] for turn in row["turns"]] == [None, 0.5]


def test_a_user_that_fails_is_a_failure_and_no_score(tasks: Callable[..., Path], tmp_path: Path) -> None:
    """Counted as the environment's, with what was sampled; the rollout stays pending."""
    (tmp_path / "u.py").write_text("def u(messages, task):\n    raise RuntimeError('asleep')\n")
    made = with_user(tmp_path / "u.py", "u")
    summary = collect(tasks=str(tasks(2)), output=tmp_path / "run", seed=1, max_attempts=1, parts=made)
    assert (summary.rollouts, summary.failures, summary.exhausted) == (0, 2, 2)
    failure = json.loads((tmp_path / "run" / "failures.jsonl").read_text().splitlines()[0])
    assert failure["kind"] == "environment"
    assert re.fullmatch(r"environment: u raised RuntimeError: asleep \(.*u\.py:2, in u\)", failure["message"])
    assert len(failure["turns"]) == 1


def test_a_task_names_its_environment(tasks: Callable[..., Path], users: Path, adder: str, tmp_path: Path) -> None:
    """Two environments in one run: each task gets the tools of its own; one that is not there is found before the start."""
    rows = [
        {"task_id": "a", "prompt": "1+1", "answer": "2", "env": "sum"},
        {"task_id": "q", "prompt": "which", "answer": "2", "env": "quiz"},
    ]
    both = ByName({"sum": load_environment(adder), "quiz": load_environment(f"{users}:Quiz")})
    made = parts()
    made.environment = both
    collect(tasks=rows, output=tmp_path / "run", seed=1, parts=made)
    tools = {row["task_id"]: json.loads(row["tools"])[0]["function"]["name"] for row in rows_of(tmp_path / "run")}
    assert tools == {"a": "add", "q": "hint"}
    made = parts()
    made.environment = both
    with pytest.raises(DataError, match=r"task x: env: got 'sun', expected one of sum, quiz"):
        collect(tasks=[{"task_id": "x", "prompt": "?", "env": "sun"}], output=tmp_path / "other", parts=made)
    assert not (tmp_path / "other").exists()


TASKS = [
    {"task_id": "a", "prompt": "1+1", "answer": "2", "env": "sum"},
    {"task_id": "q", "prompt": "which", "answer": "3", "env": "quiz"},
]


@pytest.mark.torch
def test_a_dry_run_tries_every_environment(users: Path, adder: str, tmp_path: Path) -> None:
    """Each is set up on its first task and torn down; its tools and its user are named, and nothing is written."""
    pytest.importorskip("vllm")
    planned = collect(
        dry_run=True,
        tasks=TASKS, model=POLICY, output=tmp_path / "run", env=[f"sum={adder}", f"quiz={users}:Quiz"],
        env_args={"quiz": {"prize": 2.0}},
    )  # fmt: skip
    tried = {one.name: one for one in planned.environments}
    assert [tried["sum"].tools, tried["quiz"].tools] == [["add"], ["hint"]]
    assert [tried["sum"].user, tried["quiz"].user] == [None, {"name": "respond"}]
    assert (tried["quiz"].task_id, tried["quiz"].rewards_steps) == ("q", True)
    assert ("  tools", "hint") in planned.rows()
    assert not (tmp_path / "run").exists()
    assert planned.identity["environment"]["environments"]["quiz"]["arguments"] == {"prize": 2.0}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env": "users.py:Quiz", "user": "users.py:twice"}, "has a respond of its own"),
        ({"user": "users.py:twice", "user_model": "http://127.0.0.1:1"}, "--user and --user-model were both given"),
        ({"user_prompt": "You are kind."}, "--user-prompt was given without --user-model"),
        ({"user_model": "http://127.0.0.1:1"}, "--user-model needs --user-model-name and --user-prompt"),
        ({"env": "users.py:Quiz", "step_reward_field": "r"}, "--step-reward-field is for resource servers"),
        ({"env": ["users.py:Quiz", "b=users.py:Quiz"]}, "NAME=SPEC for each of several environments"),
        ({"env": "users.py:Quiz", "env_args": {"price": 1}}, "unexpected keyword argument 'price'"),
        ({"env": "a=users.py:Quiz", "env_args": {"b": {}}}, "did you mean|expected one of"),
        ({"env_args": {"price": 1}}, "takes no arguments"),
        ({"user_model": "http://me:you@h", "user_model_name": "u", "user_prompt": "x"}, "a user name or password"),
    ],
)
def test_settings_that_cannot_be_meant(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any], said: str
) -> None:
    """Each is a usage error before anything is loaded for long."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        collect(dry_run=True, tasks=TASKS, model=POLICY, output=tmp_path / "run", **settings)


@pytest.mark.torch
def test_a_column_that_the_users_prompt_needs_is_missed_before_the_start(tmp_path: Path) -> None:
    """The task and the column are named; no server was reached."""
    with pytest.raises(DataError, match=r"task a: .*those of --user-prompt \('goal' is undefined\)"):
        collect(
        dry_run=True,
            tasks=TASKS, model=POLICY, output=tmp_path / "run", user_model="http://127.0.0.1:1", user_model_name="u",
            user_prompt="You want {{ goal }}.",
        )  # fmt: skip


@pytest.mark.torch
def test_a_dry_run_says_what_fails(users: Path, tmp_path: Path) -> None:
    """A tear-down that raises is the environment's fault, found before a rollout is made."""
    with pytest.raises(OutsideError, match="environment: close raised RuntimeError: still open"):
        collect(dry_run=True, tasks=TASKS[1:], model=POLICY, output=tmp_path / "run", env=f"{users}:Broken")


def test_step_rewards_are_credited_by_turn(tasks: Callable[..., Path], users: Path, tmp_path: Path) -> None:
    """The first turn's tokens get 0.25 + 0.5 · 1 = 0.75, the second's 1: γ once a turn."""
    collect(tasks=str(tasks(2)), output=tmp_path / "run", seed=1, parts=with_user(users, "twice"))
    experience(
        tmp_path / "run", tmp_path / "e", estimator="reinforce", rewards="steps", discount_unit="turn", gamma=0.5
    )
    for row in read_table(tmp_path / "e" / "experiences.parquet", EXPERIENCES).to_pylist():
        trained = np.flatnonzero(row["loss_mask"])
        cut = int(np.flatnonzero(np.diff(trained) > 1)[0]) + 1
        returns = np.array(row["returns"])[trained]
        assert returns[:cut].tolist() == [0.75] * cut
        assert returns[cut:].tolist() == [1.0] * (len(trained) - cut)


def test_steps_are_not_counted_twice(tasks: Callable[..., Path], users: Path, tmp_path: Path) -> None:
    """Where the rollout's reward is the sum of its steps, both together are refused."""
    collect(tasks=str(tasks(2)), output=tmp_path / "run", seed=1, parts=with_user(users, "twice"))
    with pytest.raises(UsageError, match="the reward of these rollouts is the sum of their steps"):
        experience(tmp_path / "run", tmp_path / "e", estimator="reinforce", rewards="steps+outcome")


def test_objects_are_taken_as_they_are(users: Path, tmp_path: Path) -> None:
    """A function as the user, a class as one of several environments: both are in the identity, by name and content."""

    class Die:
        def roll(self) -> str:
            """Roll."""
            return "6"

    def listener(messages: Sequence[Any], task: Mapping[str, Any]) -> gymdata.Step | None:
        return None

    pytest.importorskip("vllm")
    tasks, out = [{"prompt": "?", "env": "die"}], tmp_path / "run"
    planned = collect(dry_run=True, tasks=tasks, model=POLICY, output=out, env={"die": Die}, user=listener)
    made = planned.identity["environment"]["environments"]["die"]
    assert (made["spec"], made["user"]["spec"]) == ("in memory:Die", "in memory:listener")
    assert [one.tools for one in planned.environments] == [["roll"]]


def test_a_user_who_never_ends_is_cut_by_max_turns(tasks: Callable[..., Path], users: Path, tmp_path: Path) -> None:
    """Truncated, with the user's last words kept, and nothing scored."""
    sampler = FakeSampler(lambda prompt, rng: rng.choice("ab"))
    made = with_user(users, "talkative", sampler=sampler)
    collect(tasks=str(tasks(1)), output=tmp_path / "run", seed=1, max_turns=3, parts=made)
    (row,) = rows_of(tmp_path / "run")
    assert (row["stop_reason"], row["n_turns"], row["reward"]) == ("max_turns", 3, None)
    assert row["messages"][-1]["content"] == "go on"


@pytest.mark.parametrize("value", ["float('nan')", "float('-inf')", "10**400"])
@pytest.mark.parametrize(
    "method", ["get_reward(self): return VALUE", "respond(self, m): return Step('b', reward=VALUE)"]
)
def test_an_environments_reward_that_is_not_finite_fails_the_attempt(
    tasks: Callable[..., Path], tmp_path: Path, method: str, value: str
) -> None:
    """It is in failures.jsonl, names the method, and leaves no row, scored or unscored."""
    (tmp_path / "e.py").write_text(
        f"from gymdata import Step\nclass E:\n    def reset(self, **task): pass\n    def {method.replace('VALUE', value)}\n"
    )
    summary = collect(tasks=str(tasks(2)), output=tmp_path / "run", parts=parts(env=f"{tmp_path}/e.py:E"))
    assert (summary.rollouts, summary.failures, summary.pending, summary.exit_code) == (0, 2, 2, 1)
    messages = [failure["message"] for failure in read_failures(tmp_path / "run")]
    assert all(method.partition("(")[0] in message and len(message) < 200 for message in messages)


def test_an_environment_may_change_the_current_folder(
    tasks: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run and its tasks stay where they were named."""
    (tmp_path / "away").mkdir()
    (tmp_path / "e.py").write_text(
        f"import os\nclass E:\n    def reset(self, **task):\n        os.chdir({str(tmp_path / 'away')!r})\n"
    )
    monkeypatch.chdir(tmp_path)
    made = parts(env="e.py:E")
    summary = collect(tasks=tasks(3).name, output="run", parts=made, concurrency=1)
    assert (summary.rollouts, summary.path, list((tmp_path / "away").iterdir())) == (3, "run", [])
    assert len(rows_of(tmp_path / "run")) == 3
