"""What a reward function may take and return: one rollout or a batch, a number or one per turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gymdata.errors import RewardError, UsageError
from gymdata.rewards.port import RewardFunction
from gymdata.rewards.scheduler import Weighted, score_batch, step_rewards
from tests.rewards.conftest import Load
from tests.rewards.rollouts import rollout


def two() -> list[dict[str, Any]]:
    return [rollout("1", answer="1"), rollout("2", answer="1")]


@pytest.mark.parametrize(
    "text",
    [
        "def f(completion, answer) -> float:\n    return float(completion == answer)",
        "def f(completion, answer):\n    return completion == answer",
        "def f(prompt, messages, answer):\n    return float(messages[-1]['content'] == answer)",
        "def f(messages, answer):\n    return float(messages[-1]['content'] == answer)",
        "def f(messages, *, answer=None):\n    return int(messages[-1]['content'] == answer)",
        "async def f(completion, answer) -> float:\n    return float(completion == answer)",
        "def f(completion, **columns):\n    return float(completion == columns['answer'])",
        "def f(**columns):\n    return float(columns['completion'] == columns['answer'])",
        "class F:\n    async def __call__(self, completion, answer):\n        return completion == answer\nf = F()",
    ],
)
def test_a_function_is_called_for_each_rollout(load: Load, text: str) -> None:
    """By itself, whatever its annotation says."""
    function = load(text)
    assert function(two()) == [1.0, 0.0]
    assert function(two()[:1]) == [1.0]


@pytest.mark.parametrize("name", ["directory", "exit_code", "stderr"])
def test_what_one_agent_left(name: str, load: Load) -> None:
    """A function that names it gets it, for one rollout or a batch."""
    rollouts = [{**rollout("1"), name: value} for value in ("a", "b")]
    assert load(f"def f({name}):\n    return {name} == 'b'")(rollouts) == [0.0, 1.0]
    batch = f"def f(completions, {name}):\n    return [value == 'b' for value in {name}]"
    assert load(batch)(rollouts) == [0.0, 1.0]


def test_a_folder_that_is_gone_is_named(load: Load) -> None:
    """`score` has no agent's folder: the function is not called with None in its place."""
    (fault,) = load("def f(directory) -> float:\n    return float(directory.is_dir())")([rollout("1")])
    assert str(fault).startswith(
        "reward: f takes 'directory', the folder of an agent, which is there only while rollouts are"
    )
    assert load("def f(directory=None) -> float:\n    return float(directory is None)")([rollout("1")]) == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "def f(completions, answer) -> list[float]:\n    return [float(c == a) for c, a in zip(completions, answer)]",
        "def f(prompts, messages, answer):\n    return [float(m[-1]['content'] == a) for m, a in zip(messages, answer)]",
        "async def f(completions, answer) -> float:\n    return [float(c == a) for c, a in zip(completions, answer)]",
        "def f(completions, completion_ids, answer):\n    return [float(a == '1') - n for n, a in enumerate(answer)]",
        "def f(completion_ids, **columns):\n    return [len(ids) - 1.0 - n for n, ids in enumerate(completion_ids)]",
    ],
)
def test_a_plural_name_is_of_a_batch(load: Load, text: str) -> None:
    """Then everything is a list with one entry per rollout."""
    assert load(text)(two()) == [1.0, 0.0]


def test_a_batch_and_one_rollout_at_once_are_refused(load: Load) -> None:
    """``completion`` and ``completions`` together say nothing; the file and line are named before anything is scored."""
    with pytest.raises(UsageError, match=r"takes completion, .* and completions, .*\(r.py:1\)"):
        load("def f(completion, completions):\n    return 1.0")


def test_a_parameter_that_is_no_column_is_named(load: Load) -> None:
    """A misspelt column says which there are; one with a default is left to its default."""
    for text in ("completions, answr):\n    return [1.0 for _ in completions]", "completion, answr):\n    return 1.0"):
        (fault, _) = load(f"def f({text}")(two())
        assert isinstance(fault, RewardError)
        assert "f takes 'answr', which the task has no column for; it has answer (r.py:1)" in fault.message
    assert load("def f(completion, answr='x'):\n    return float(answr == 'x')")(two()) == [1.0, 1.0]


def test_what_the_environment_printed_is_there_for_functions_that_take_it(load: Load) -> None:
    """``stdout`` is the environment's; without one the task's column of that name; without both None."""
    function = load("def f(stdout) -> float:\n    return None if stdout is None else float(stdout)")
    said, column, neither = rollout("a"), rollout("b", stdout="2"), rollout("c")
    assert function([said | {"stdout": "3"}, column, neither]) == [3.0, 2.0, None]


def test_a_fault_of_one_rollout_costs_no_other_its_reward(load: Load) -> None:
    """Called one by one, only the rollout that it raised on has no value, after three tries, with file and line."""
    function = load("tries = []\ndef f(level) -> float:\n    tries.append(level)\n    return 1 / level")
    scored = score_batch([Weighted(function)], [rollout("a", level=n) for n in (1, 0, 2)])
    assert [s.parts[0].value for s in scored] == [1.0, None, 0.5]
    assert scored[1].faults == {"f": "reward: f raised ZeroDivisionError: division by zero (r.py:4, in f)"}
    # A Python function has globals.
    assert function.function.__globals__["tries"] == [1, 0, 0, 0, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    [
        "def f(completion):\n    return float(completion.strip() == '2')",
        "def f(completions):\n    return [float(one.strip() == '2') for one in completions]",
    ],
)
def test_messages_where_a_text_was_expected_are_named(load: Load, text: str) -> None:
    """With tools a completion is a list of messages; the fault of a function that takes it for a text says so."""
    with_tools = rollout("2") | {"tools": [{"type": "function", "function": {"name": "add"}}]}
    (scored,) = score_batch([Weighted(load(text))], [with_tools])
    assert "has no attribute 'strip'" in scored.faults["f"]
    assert "a completion is a list of messages here" in scored.faults["f"]
    assert "last text: completion[-1]['content']" in scored.faults["f"]
    (fine,) = score_batch([Weighted(load(text))], [rollout("2")])
    assert (fine.faults, fine.parts[0].value) == ({}, 1.0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 'x'", "returned 'x' for a rollout, expected a finite number or None"),
        (
            "return [1.0, 2.0, 3.0]",
            "returned 3 values for a rollout with 1 turn, expected a number, or one per turn",
        ),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("raise __import__('asyncio').CancelledError", "CancelledError"),
    ],
)
def test_what_is_no_value_is_a_fault(load: Load, body: str, said: str) -> None:
    """Of one rollout, too, a wrong value is a fault with file and line."""
    (fault,) = load(f"def f(completion):\n    {body}")([rollout("a")])
    assert isinstance(fault, RewardError)
    assert said in fault.message
    assert "r.py" in fault.message


def test_async_functions_of_one_rollout_run_together_up_to_a_limit(load: Load) -> None:
    """As many as 32 calls are awaited at a time: each waits until 32 have begun, and the 33rd begins after one has ended."""
    function = load(
        "import asyncio\n"
        "begun = peak = 0\n"
        "full = asyncio.Event()\n"
        "async def f(completion):\n"
        "    global begun, peak\n"
        "    begun += 1\n"
        "    peak = max(peak, begun)\n"
        "    if begun == 32:\n        full.set()\n"
        "    await full.wait()\n"
        "    begun -= 1\n"
        "    return 1.0\n"
    )
    assert function([rollout("a")] * 40) == [1.0] * 40
    assert function.function.__globals__["peak"] == 32  # type: ignore[attr-defined]  # a Python function has them


def test_calls_of_one_function_share_a_loop(load: Load) -> None:
    """A client that a file keeps is bound to the loop of its first call; the next batch finds the same loop."""
    for text in (
        "import asyncio\nloops = []\nasync def f(completion):\n    loops.append(asyncio.get_running_loop())\n    return 1.0",
        "import asyncio\nloops = []\nasync def f(completions):\n    loops.append(asyncio.get_running_loop())\n"
        "    return [1.0] * len(completions)",
    ):
        function = load(text)
        assert function([rollout("a")]) == function([rollout("b")]) == [1.0]
        # A Python function has globals.
        assert len(set(function.function.__globals__["loops"])) == 1  # type: ignore[attr-defined]


def turned(n: int) -> dict[str, Any]:
    return {**rollout("a"), "turns": [{}] * n}


@pytest.mark.parametrize(
    "text",
    [
        "def f(completion):\n    return [0.5, None, 2]",
        "def f(completions):\n    return [[0.5, float('nan'), 2] for _ in completions]",
        "def f(completions):\n    import numpy\n    return [numpy.array([0.5, float('nan'), 2.0]) for _ in completions]",
    ],
)
def test_one_number_per_turn_is_a_reward_per_turn(load: Load, text: str) -> None:
    """The value is their sum, the turns' rewards are the numbers times the weight."""
    function = load(text)
    (scored,) = score_batch([Weighted(function, 2.0)], [turned(3)])
    (part,) = scored.parts
    assert (part.value, part.weight, part.steps) == (2.5, 2.0, (0.5, None, 2.0))
    assert part.detail == "per turn: 0.5, none, 2"
    assert step_rewards(scored.parts, 3) == [1.0, None, 4.0]


def test_turns_of_a_rollout_without_ids_are_its_answers(load: Load) -> None:
    """An API model's rollout has no turns with ids; its assistant messages count."""
    messages = [{"role": r, "content": "x"} for r in ("assistant", "user", "assistant")]
    (value,) = load("def f(completion):\n    return [1.0, 0.0]")([{**rollout("a"), "completion": messages}])
    assert value == (1.0, 0.0)


@pytest.mark.parametrize(("keys", "value"), [("{}", 1.0), ('{"factor": 3}', 3.0), ('{"factor": 3}=0.5', 3.0)])
def test_a_class_in_braces_is_an_instance(load: Load, keys: str, value: float) -> None:
    """``path.py:Class{…}`` makes one with the JSON object's keys; its source tells them apart."""
    text = (
        "class F:\n    def __init__(self, factor=1):\n        self.factor = factor\n"
        "    def __call__(self, completion):\n        return float(self.factor)"
    )
    function = load(text, f"r.py:F{keys}")
    assert function([rollout("a")]) == [value]
    assert function.source.endswith(keys.partition("=")[0])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('{"factr": 3}', r"F raised TypeError: .*factr"),
        ("{3", "its arguments are no JSON object"),
        ("{3}", "its arguments are no JSON object"),
    ],
)
def test_arguments_that_do_not_fit_are_a_usage_error(load: Load, keys: str, said: str) -> None:
    """What the constructor raises, or what is no JSON object, is known before anything is scored."""
    with pytest.raises(UsageError, match=said):
        load(
            "class F:\n    def __init__(self, factor=1): ...\n    def __call__(self, completion): ...", f"r.py:F{keys}"
        )


def values(function: RewardFunction, rollouts: Sequence[dict[str, Any]]) -> list[Any]:
    return [one.message if isinstance(one, RewardError) else one for one in function(rollouts)]


EVALUATOR = """
class Output:
    def __init__(self, id, score, reasoning=None):
        self.id, self.score, self.reasoning = id, score, reasoning

class Accuracy:
    def __init__(self, max_concurrency=4, bonus=0.0):
        self.max_concurrency, self.bonus = max_concurrency, bonus

    async def evaluate_item(self, item):
        if item.output_obj == "crash":
            raise ValueError("no verdict")
        right = str(item.output_obj) == str(item.expected_output_obj)
        return Output(item.id, right + self.bonus, {"question": item.input_obj, "row": item.full_dataset_entry})

class Fallen:
    async def evaluate_item(self, item):
        return Output(item.id, 0.0, {"error": "Evaluator error: no verdict"})

class Mute:
    def evaluate_item(self, item):
        return 1.0

class Down:
    async def evaluate_item(self, item):
        output = Output(item.id, 0.0)
        output.error = "the judge is down"
        return output

class Other:
    async def evaluate_item(self, item):
        return Output("another", 1.0)

class Steps:
    async def evaluate_item(self, item):
        return Output(item.id, float(len(item.trajectory)))
"""


def test_an_evaluator_of_the_nemo_agent_toolkit_is_a_reward(load: Load) -> None:
    """The published class runs: its item has the task's answer and the last text, its score is the value."""
    function = load(EVALUATOR, 'r.py:Accuracy{"bonus": 0.25}')
    assert function.name == "Accuracy"
    assert values(function, two()) == [1.25, 0.25]


def test_an_evaluator_that_fails_is_a_fault_and_no_0(load: Load) -> None:
    """What it raises, also where the toolkit's base class hands a 0 on with an error beside it, is no score."""
    crash = [rollout("crash", answer="1"), rollout("1", answer="1")]
    fault, value = values(load(EVALUATOR, "r.py:Accuracy"), crash)
    assert value == 1.0
    assert fault.startswith("reward: Accuracy raised ValueError: no verdict (r.py:12, in evaluate_item)")
    (fault, _) = values(load(EVALUATOR, "r.py:Fallen"), crash)
    assert fault.startswith("reward: Fallen: Evaluator error: no verdict (r.py:17)")
    (fault, _) = values(load(EVALUATOR, "r.py:Mute"), crash)
    assert fault.startswith("reward: Mute gave a float, expected an output with a score (r.py:21)")
    (fault, _) = values(load(EVALUATOR, "r.py:Down"), crash)
    assert fault.startswith("reward: Down: the judge is down (r.py:25)")


def test_the_score_of_another_item_is_a_fault(load: Load) -> None:
    """An evaluator that mixes up its items gives no rollout the score of another."""
    (fault,) = values(load(EVALUATOR, "r.py:Other"), [rollout("a")])
    assert "Other gave the score of 'another', expected that of " in fault


def test_an_evaluator_that_reads_intermediate_steps_says_what_there_is(load: Load) -> None:
    """An empty list would be a wrong score; the messages are named instead."""
    (fault,) = values(load(EVALUATOR, "r.py:Steps"), [rollout("a")])
    assert "item.trajectory: gymdata keeps messages, not intermediate steps: read item.messages" in fault
