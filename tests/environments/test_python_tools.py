"""Tools from a Python file: what the policy is told, and what is the environment's fault."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.environments import load_environment
from gymdata.environments.port import StepResult
from gymdata.environments.tool_error import MAX_OUTPUT_BYTES
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.messages import Task

SOURCE = '''
import asyncio
import os
import threading

class Box:
    """Tools that behave in every way."""

    def reset(self, **task):
        self.task = task

    def echo(self, text: str) -> str:
        """Say it.

        Args:
            text: what to say
        """
        return text

    def data(self) -> dict:
        """Give something that is no text."""
        return {"n": [1, 2]}

    def fail(self) -> str:
        """Raise."""
        raise ValueError("no such thing")

    def leave(self) -> str:
        """Exit."""
        raise SystemExit(3)

    async def leaves(self) -> str:
        """Exit later."""
        raise SystemExit(0)

    def late(self) -> str:
        """Wait for another system in vain."""
        raise TimeoutError("no route")

    async def dropped(self) -> str:
        """Call what cancels."""
        raise asyncio.CancelledError("gone")

    def flood(self) -> str:
        """Answer ten megabytes."""
        return "é" * 5_000_000

    def broken(self) -> str:
        """Answer with what no file can hold."""
        return "a\\ud800b"

    async def later(self) -> str:
        """Answer later."""
        return "later"

    def get_reward(self):
        return 0.25

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: other
    """
    return a + b

TOOLS = [add]

def undocumented(a):
    return a

class Odd(Box):
    """Its reward is what the task says."""

    def get_reward(self):
        return self.task["reward"]

class Broken:
    def __init__(self):
        raise ValueError("no database")

    def go(self) -> str:
        """Go."""
        return ""

class Greets:
    def reset(self, **task):
        return " hello"

class Speaks:
    def respond(self, message):
        return self.state["state"]

    state = {}

class Nothing:
    pass

def nope(x: "Nope") -> str:
    """Go.

    Args:
        x: one
    """
    return ""

class Sulks:
    def reset(self, **task):
        raise RuntimeError("not today")

    def go(self) -> str:
        """Go."""
        return ""
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "box.py"
    path.write_text(SOURCE)
    return path


def calls(*wanted: tuple[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(wanted)
        ],
    }


def step(file: Path, message: dict[str, Any], name: str = "Box", timeout_s: float = 0.5, **row: Any) -> StepResult:
    """Start an episode and step it once."""

    async def run() -> StepResult:
        environment = load_environment(f"{file}:{name}", tool_timeout_s=timeout_s)
        task = Task("t", [{"role": "user", "content": "q"}], None, row, "h")
        episode = await environment.start(task, 0)
        try:
            return await episode.step(message)
        finally:
            await episode.close()

    return asyncio.run(run())


def test_tools_answer_in_order(file: Path) -> None:
    """Each call is answered by a tool message with its name and id; what is no text is written as JSON."""
    result = step(file, calls(("echo", {"text": "hi"}), ("data", {}), ("later", {})))
    assert not result.done
    assert [(m["name"], m["tool_call_id"], m["content"]) for m in result.messages] == [
        ("echo", "c0", "hi"),
        ("data", "c1", '{"n": [1, 2]}'),
        ("later", "c2", "later"),
    ]


def test_no_call_ends_the_episode_with_the_environments_reward(file: Path) -> None:
    """A message without tool calls is the end, and get_reward gives the last turn's reward; None is no reward."""
    result = step(file, {"role": "assistant", "content": "done"})
    assert (result.done, result.reward, result.messages) == (True, 0.25, [])
    assert step(file, {"role": "assistant", "content": "done"}, name="Odd", reward=None).reward is None


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fail", {}, "no such thing"),
        ("leave", {}, "SystemExit: 3"),
        ("leaves", {}, "SystemExit: 0"),
        ("late", {}, "TimeoutError: no route"),
        ("dropped", {}, "CancelledError: gone"),
        ("nothing", {}, "there is no tool 'nothing'"),
        ("reset", {}, "there is no tool 'reset'"),
        ("echo", {}, "missing a required argument: 'text'"),
        ("echo", {"text": "a", "loud": True}, "unexpected keyword argument 'loud'"),
        ("echo", "text", "must be a JSON object"),
        ("echo", None, "must be a JSON object"),
    ],
)
def test_what_the_policy_does_wrong_is_told_to_it(file: Path, name: str, arguments: Any, said: str) -> None:
    """Unknown tools, bad arguments and tools that raise give a tool message with the error, not a failure."""
    (message,) = step(file, calls((name, arguments))).messages
    assert said in json.loads(message["content"])["error"]


@pytest.mark.parametrize("how", ["async def", "def"])
def test_a_cancellation_of_its_own_is_the_environments_failure(tmp_path: Path, how: str) -> None:
    """Of a request that it made, as any other error: it is not taken for the end of the command."""
    file = tmp_path / "drops.py"
    file.write_text(
        f"import asyncio\n\nclass Drops:\n    {how} respond(self, message):\n        raise asyncio.CancelledError('gone')\n"
    )
    with pytest.raises(OutsideError, match=r"environment: respond raised .*CancelledError: gone \(.*drops\.py:5"):
        step(file, {"role": "assistant", "content": "hello"}, name="Drops")


def test_a_flood_is_cut_and_says_so(file: Path) -> None:
    """Ten megabytes become 64 KiB and a line that tells; a character is never cut in half."""
    (message,) = step(file, calls(("flood", {})), timeout_s=20).messages
    head, _, tail = message["content"].rpartition("\n")
    assert len(head.encode()) == MAX_OUTPUT_BYTES
    assert set(head) == {"é"}
    assert tail == "[output cut: 10,000,000 bytes, the first 65,536 are shown]"


def test_text_that_no_file_can_hold_is_made_whole(file: Path) -> None:
    """Lone surrogates are replaced."""
    (message,) = step(file, calls(("broken", {}))).messages
    assert message["content"] == "a?b"


def test_a_greeting_joins_the_last_message_of_a_task_that_stays_as_it_is(tmp_path: Path) -> None:
    """Whatever reset changes: each rollout of a task begins with the same row and messages, and that row is written."""
    file = tmp_path / "tags.py"
    file.write_text(
        "class Tags:\n    def reset(self, tags, **row):\n        tags.append('seen')\n        return ' '.join(tags)\n"
    )
    task = Task("t", [{"role": "user", "content": "q: "}], None, {"tags": ["a"]}, "h")

    async def run() -> list[Any]:
        environment = load_environment(f"{file}:Tags")
        return [(await environment.start(task, index)).messages[-1]["content"] for index in (0, 1)]

    assert asyncio.run(run()) == ["q: a seen", "q: a seen"]
    assert (task.row, task.messages[-1]["content"]) == ({"tags": ["a"]}, "q: ")


def test_functions_are_tools_too(file: Path) -> None:
    """A list of functions, or one function, is an environment without state."""
    for name in ("TOOLS", "add"):
        (message,) = step(file, calls(("add", {"a": 2, "b": 3})), name=name).messages
        assert message["content"] == "5"


def test_schemas_come_from_signatures_and_docstrings(file: Path) -> None:
    """Names, types and descriptions are those of the function; reset and get_reward are no tools."""
    environment: Any = load_environment(f"{file}:Box")
    names = [s["function"]["name"] for s in environment.schemas]
    assert names[:6] == ["broken", "data", "dropped", "echo", "fail", "flood"]
    assert names[6:] == ["late", "later", "leave", "leaves"]
    echo = environment.schemas[names.index("echo")]["function"]
    assert echo["description"] == "Say it."
    assert echo["parameters"]["properties"] == {"text": {"type": "string", "description": "what to say"}}


def test_a_change_of_the_file_is_another_environment(file: Path) -> None:
    """The identity holds the file's hash."""
    before = load_environment(f"{file}:Box").identity
    file.write_text(SOURCE + "# changed\n")
    after = load_environment(f"{file}:Box").identity
    assert before["file_hash"] != after["file_hash"]
    assert before["spec"] == after["spec"] == "box.py:Box"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Boxx", "did you mean 'Box'"),
        ("undocumented", "no tool schema"),
        ("Nothing", "has no public methods"),
        ("nope", r"tool 'nope': its type hint 'Nope' is not defined \(.*box\.py:\d+\)"),
        ("threading", "expected a class or functions"),
    ],
)
def test_what_is_no_environment(file: Path, name: str, said: str) -> None:
    """A wrong name, a tool without hints or docstring, and something else altogether are usage errors."""
    with pytest.raises(UsageError, match=said):
        load_environment(f"{file}:{name}")


@pytest.mark.parametrize("name", ["reset", "get_reward", "close"])
def test_an_async_method_that_is_no_tool_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nobody would await it: reset would do nothing, and the reward would be a coroutine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.py").write_text(
        "class Box:\n"
        f"    async def {name}(self, **_): ...\n"
        "    async def look(self) -> str:\n"
        '        """Look."""\n'
        "        return 'x'\n"
    )
    with pytest.raises(UsageError, match=rf"{name} is async \(e\.py:2\), expected a plain method"):
        load_environment("e.py:Box")


def test_the_environments_errors_have_a_place_and_a_next_step(file: Path) -> None:
    """File, line and method of the user's code, ``__init__`` by its own name; it is no fault of an outside system."""
    for name, where in (
        ("Broken", r"__init__ raised ValueError: no database \(.*box\.py:\d+, in __init__\)"),
        ("Sulks", r"reset raised RuntimeError: not today \(.*box\.py:\d+, in reset\)"),
        ("Speaks", r"respond raised KeyError: 'state' \(.*box\.py:\d+, in respond\)"),
    ):
        with pytest.raises(OutsideError, match=where) as caught:
            step(file, {"role": "assistant", "content": "hi"}, name=name)
        assert (caught.value.exit_code, "overwrite=True" in str(caught.value.hint)) == (1, True)


def test_an_environment_may_only_reset(file: Path) -> None:
    """Without tools or respond it is over after one answer."""
    assert step(file, {"role": "assistant", "content": "hi"}, name="Greets").done
