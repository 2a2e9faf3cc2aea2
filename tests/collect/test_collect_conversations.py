"""collect with a user in the conversation: step rewards on turns, several environments, the dry run, and credit by step."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.commands.collect.run import Parts, collect
from gymdata.commands.experience.run import experience
from gymdata.commands.validate.run import validate
from gymdata.environments import ByName, WithUser, load_environment, load_user
from gymdata.errors import DataError, UsageError
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.store import read_failures, read_run_json, read_table
from tests.collect.fake_parts import FakeSampler, parts
from tests.collect.saved_rows import rows_of

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
'''


#: It is only looked for: importing it takes seconds.
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
Play = Callable[..., tuple[Any, list[dict[str, Any]]]]
TASKS = [
    {"task_id": "a", "prompt": "1+1", "answer": "2", "env": "sum"},
    {"task_id": "q", "prompt": "which", "answer": "3", "env": "quiz"},
]


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "users.py"
    path.write_text(USERS)
    return path


def with_user(users: Path, name: str, **more: Any) -> Parts:
    playing = parts(**more)
    assert playing.environment is not None
    playing.environment = WithUser(playing.environment, load_user(f"{users}:{name}", timeout_s=5))
    return playing


def written(folder: Path, body: str) -> str:
    """An --env spec whose class has this body."""
    (folder / "e.py").write_text(f"from gymdata import Step\nclass E:\n{textwrap.indent(body, '    ')}\n")
    return f"{folder}/e.py:E"


def test_a_users_rewards_lie_on_the_turns_that_earned_them(play: Play, users: Path, tmp_path: Path) -> None:
    """Two turns: 0.25 and 1; the rollout has their sum, its user messages, a named end and no break; nothing is violated."""
    summary, rows = play(3, own_parts=with_user(users, "twice"), num_rollouts=2, seed=1)
    assert (summary.rollouts, summary.breaks) == (6, 0)
    assert summary.reward["mean"] == 1.25
    for row in rows:
        assert [turn["reward"] for turn in row["turns"]] == [0.25, 1.0]
        assert row["rewards"] == [{"name": "steps", "value": 1.25}]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert (row["status"], row["stop_reason"]) == ("completed", "enough")
        first, second = row["turns"]
        assert second["prefix_length"] == len(first["prompt_delta_ids"]) + len(first["generation_token_ids"])
    assert validate(tmp_path / "run").errors == 0
    identity = read_run_json(tmp_path / "run")["identity"]["environment"]
    assert identity["user"]["spec"] == "users.py:twice"


def test_steps_stay_apart_from_another_reward(play: Play, users: Path) -> None:
    """With a reward function the rollout has its value alone, and the turns keep theirs."""
    _, rows = play(4, own_parts=with_user(users, "twice", rewards=["exact_match"]), seed=1)
    for row in rows:
        assert [part["name"] for part in row["rewards"]] == ["exact_match"]
        assert [turn["reward"] for turn in row["turns"]] == [0.25, 1.0]


@pytest.mark.parametrize(("returns", "reward"), [(" -> Step", 0.0), ("", None)])
def test_a_rollout_that_a_limit_ends_has_the_sum_so_far(
    play: Play, tmp_path: Path, returns: str, reward: float | None
) -> None:
    """Cut at its first turn it has no step: 0 where the environment says that its steps have rewards, else no reward."""
    env = written(tmp_path, f"def respond(self, message){returns}:\n    return Step(reward=1, done=True)")
    _, (row,) = play(1, env=env, max_tokens=1)
    assert (row["status"], row["reward"]) == ("truncated", reward)


def test_a_users_answers_may_be_known_to_have_rewards(play: Play, users: Path) -> None:
    """A user function with the return type Step: a rollout that was cut before it heard the user has the sum 0."""
    _, (row,) = play(1, own_parts=with_user(users, "twice"), max_tokens=1)
    assert row["reward"] == 0.0


def test_get_reward_counts_for_a_truncated_rollout_too(play: Play, tmp_path: Path) -> None:
    """At the end of a rollout that max_turns cut, it lies on the last turn, as for a completed one."""
    env = written(tmp_path, "def respond(self, message):\n    return 'more'\ndef get_reward(self):\n    return 0.5")
    _, (row,) = play(1, env=env, max_turns=2)
    assert (row["stop_reason"], row["reward"]) == ("max_turns", 0.5)
    assert [turn["reward"] for turn in row["turns"]] == [None, 0.5]


def test_a_user_that_fails_is_a_failure_and_no_score(play: Play, tmp_path: Path) -> None:
    """Counted as the environment's, with what was sampled; the rollout stays pending."""
    (tmp_path / "u.py").write_text("def u(messages, task):\n    raise RuntimeError('asleep')\n")
    summary, _ = play(2, own_parts=with_user(tmp_path / "u.py", "u"), max_attempts=1)
    assert (summary.rollouts, summary.failures, summary.exhausted) == (0, 2, 2)
    failure, _ = read_failures(tmp_path / "run")
    assert failure["kind"] == "environment"
    assert re.fullmatch(r"environment: u raised RuntimeError: asleep \(.*u\.py:2, in u\)", failure["message"])
    assert len(failure["turns"]) == 1


def test_a_task_names_its_environment(users: Path, adder: str, tmp_path: Path) -> None:
    """Two environments in one run: each task gets the tools of its own; one that is not there is found before the start."""
    playing = parts()
    playing.environment = ByName({"sum": load_environment(adder), "quiz": load_environment(f"{users}:Quiz")})
    collect(tasks=TASKS, output=tmp_path / "run", seed=1, parts=playing)
    rows = rows_of(tmp_path / "run")
    tools = {row["task_id"]: json.loads(row["tools"])[0]["function"]["name"] for row in rows}
    assert tools == {"a": "add", "q": "hint"}
    with pytest.raises(DataError, match=r"task x: env: got 'sun', expected one of sum, quiz"):
        collect(tasks=[{"task_id": "x", "prompt": "?", "env": "sun"}], output=tmp_path / "other", parts=playing)
    assert not (tmp_path / "other").exists()


@needs_vllm
@pytest.mark.torch
def test_a_dry_run_names_every_environment(users: Path, adder: str, tmp_path: Path) -> None:
    """Each with its arguments; nothing is set up and nothing is written."""
    env = [f"sum={adder}", f"quiz={users}:Quiz"]
    planned = collect(
        dry_run=True, tasks=TASKS, model=POLICY, output=tmp_path / "run", env=env, env_args={"quiz": {"prize": 2.0}}
    )
    assert [value for name, value in planned.rows() if name == "environment"] == env
    assert planned.identity["environment"]["environments"]["quiz"]["arguments"] == {"prize": 2.0}
    assert not (tmp_path / "run").exists()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env": "users.py:Quiz", "user": "users.py:twice"}, "has a respond of its own"),
        ({"env": ["users.py:Quiz", "b=users.py:Quiz"]}, "NAME=SPEC for each of several environments"),
        ({"env": "users.py:Quiz", "env_args": {"price": 1}}, "unexpected keyword argument 'price'"),
        ({"env": "a=users.py:Quiz", "env_args": {"b": {}}}, "did you mean|expected one of"),
        ({"env_args": {"price": 1}}, "takes no arguments"),
        ({"env": "http://me:you@h"}, "a user name or password"),
    ],
)
def test_settings_that_cannot_be_meant(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any], said: str
) -> None:
    """Each is a usage error before anything is loaded for long."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        collect(dry_run=True, tasks=TASKS, model=POLICY, output=tmp_path / "run", **settings)


def test_step_rewards_are_credited_by_turn(play: Play, users: Path, tmp_path: Path) -> None:
    """The first turn's tokens get 0.25 + 0.5 · 1 = 0.75, the second's 1: γ once a turn. The rollout's reward, which is the
    sum of its steps, is not counted beside them."""
    play(2, own_parts=with_user(users, "twice"), seed=1)
    credited = {"estimator": "reinforce", "discount_unit": "turn", "gamma": 0.5}
    experience(tmp_path / "run", tmp_path / "e", rewards="steps", **credited)
    for row in read_table(tmp_path / "e" / "experiences.parquet", EXPERIENCES).to_pylist():
        trained = np.flatnonzero(row["loss_mask"])
        cut = int(np.flatnonzero(np.diff(trained) > 1)[0]) + 1
        returns = np.array(row["returns"])[trained]
        assert returns[:cut].tolist() == [0.75] * cut
        assert returns[cut:].tolist() == [1.0] * (len(trained) - cut)
    with pytest.raises(UsageError, match="the reward of these rollouts is the sum of their steps"):
        experience(tmp_path / "run", tmp_path / "f", estimator="reinforce", rewards="steps+outcome")


@needs_vllm
@pytest.mark.torch
def test_objects_are_taken_as_they_are(users: Path, tmp_path: Path) -> None:
    """A function as the user, a class as one of several environments: both are in the identity, by name and content."""

    class Die:
        def roll(self) -> str:
            """Roll."""
            return "6"

    def listener(messages: Sequence[Any], task: Mapping[str, Any]) -> gymdata.Step | None:
        return None

    tasks, out = [{"prompt": "?", "env": "die"}], tmp_path / "run"
    planned = collect(dry_run=True, tasks=tasks, model=POLICY, output=out, env={"die": Die}, user=listener)
    die = planned.identity["environment"]["environments"]["die"]
    assert (die["spec"], die["user"]["spec"]) == ("in memory:Die", "in memory:listener")


def test_a_user_who_never_ends_is_cut_by_max_turns(play: Play, users: Path) -> None:
    """Truncated, with the user's last words kept, and nothing scored."""
    sampler = FakeSampler(lambda prompt, rng: rng.choice("ab"))
    _, (row,) = play(1, own_parts=with_user(users, "talkative", sampler=sampler), max_turns=3)
    assert (row["stop_reason"], row["n_turns"], row["reward"]) == ("max_turns", 3, None)
    assert row["messages"][-1]["content"] == "go on"


@pytest.mark.parametrize("value", ["float('nan')", "float('-inf')", "10**400"])
@pytest.mark.parametrize(
    "method", ["get_reward(self): return VALUE", "respond(self, m): return Step('b', reward=VALUE)"]
)
def test_an_environments_reward_that_is_not_finite_fails_the_attempt(
    play: Play, tmp_path: Path, method: str, value: str
) -> None:
    """It is in failures.jsonl, names the method, and leaves no row, scored or unscored."""
    summary, _ = play(2, env=written(tmp_path, f"def {method.replace('VALUE', value)}"))
    assert (summary.rollouts, summary.failures, summary.pending, summary.exit_code) == (0, 2, 2, 1)
    messages = [failure["message"] for failure in read_failures(tmp_path / "run")]
    assert all(method.partition("(")[0] in message and len(message) < 200 for message in messages)


def test_an_environment_may_change_the_current_folder(
    tasks: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run and its tasks stay where they were named."""
    (tmp_path / "away").mkdir()
    written(tmp_path, f"def reset(self, **task):\n    __import__('os').chdir({str(tmp_path / 'away')!r})")
    monkeypatch.chdir(tmp_path)
    summary = collect(tasks=tasks(3).name, output="run", parts=parts(env="e.py:E"), concurrency=1)
    assert (summary.rollouts, summary.path, list((tmp_path / "away").iterdir())) == (3, "run", [])
    assert len(rows_of(tmp_path / "run")) == 3
