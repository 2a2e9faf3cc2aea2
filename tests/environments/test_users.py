"""Users: a class that responds, a function beside tools, one that asks a model; and what a step may say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.environments import SingleTurn, WithUser, given_user, load_environment, load_user
from gymdata.environments.port import Environment, StepResult
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.messages import Task
from tests.docs_blocks import BLOCKS
from tests.environments.env_server import Server, serving

SOURCE = '''
import asyncio
from gymdata import Step

class Shop:
    """Tools, a user, and rewards of steps."""

    log = []

    def __init__(self, stock: int = 1):
        self.stock = stock

    def reset(self, **task):
        self.wants = task.get("wants", "pear")

    def buy(self, what: str) -> Step:
        """Buy something.

        Args:
            what: what to buy
        """
        if what == "nothing":
            return Step(reward=-1)
        if what == "all":
            return Step("sold out", reward=0.5, done=True)
        return Step({"bought": what}, reward=0.25 * self.stock)

    async def respond(self, message):
        await asyncio.sleep(0)
        says = {"end": None, "two": ["a", {"role": "user", "content": "b"}], "bad": 7, "robot":
                {"role": "assistant", "content": "I am you"}, "paid": Step("Thanks", reward=1)}
        return says.get(message["content"], f"I want a {self.wants}")

    def step_reward(self, message):
        if message["content"] == "stop me":
            return Step(reward=0.125, done=True, stop_reason="gave_up")
        return -0.0625 if message.get("tool_calls") else None

    def get_reward(self):
        return 8.0

    def close(self):
        self.log.append("closed")

class Plain:
    def look(self) -> str:
        """Look."""
        return "x"

class Guest:
    """A user with a memory."""

    def reset(self, **task):
        self.heard = [task["answer"]]

    def respond(self, message):
        self.heard.append(message["content"])
        return "/".join(self.heard)

    def helper(self, undocumented):
        return undocumented

def count(messages, task):
    messages.clear()
    return None if task["answer"] == "quiet" else str(len(task))

async def later(messages, task):
    return gymdata_step(len(messages))

def gymdata_step(n):
    return Step(f"{n} so far", reward=0.5)

def slow(messages, task):
    import threading
    threading.Event().wait()

def one(messages):
    return None

TEXT = "no user"
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shop.py"
    path.write_text(SOURCE)
    return path


def says(content: str | None, *calls: tuple[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(calls)
        ]
    return message


def play(environment: Environment, *messages: dict[str, Any], **row: Any) -> list[StepResult]:
    """Every step of one episode."""

    async def run() -> list[StepResult]:
        task = Task("t", [{"role": "user", "content": "q"}], None, {"answer": "4", **row}, "h")
        try:
            episode = await environment.start(task, 0)
            try:
                return [await episode.step(message) for message in messages]
            finally:
                await episode.close()
        finally:
            await environment.close()

    return asyncio.run(run())


def contents(result: StepResult) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in result.messages]


def test_a_class_responds_when_no_tool_is_called(file: Path) -> None:
    """Text, a list, and None to end; respond and step_reward are no tools, and get_reward comes with the end alone."""
    shop = load_environment(f"{file}:Shop")
    assert [schema["function"]["name"] for schema in shop.schemas] == ["buy"]  # type: ignore[union-attr]  # PythonTools
    first, two, end = play(shop, says("hi"), says("two"), says("end"), wants="fig")
    assert (contents(first), first.done, first.reward) == ([("user", "I want a fig")], False, None)
    assert contents(two) == [("user", "a"), ("user", "b")]
    assert (end.messages, end.done, end.reward, end.stop_reason) == ([], True, 8.0, None)


def test_a_step_has_a_reward_and_may_end_the_rollout(file: Path) -> None:
    """Rewards of tools, respond and step_reward of one turn add up; the policy reads the content alone; after a call that
    ended the rollout no other is made."""
    shop = load_environment(f"{file}:Shop")
    bought, paid, stopped = play(
        shop, says(None, ("buy", {"what": "fig"}), ("buy", {"what": "nothing"})), says("paid"), says("stop me")
    )
    assert contents(bought) == [("tool", '{"bought": "fig"}'), ("tool", "")]
    assert bought.reward == 0.25 - 1 - 0.0625
    assert (contents(paid), paid.reward) == ([("user", "Thanks")], 1.0)
    assert (stopped.done, stopped.stop_reason, stopped.reward) == (True, "gave_up", 8.125)
    (ended,) = play(shop, says(None, ("buy", {"what": "all"}), ("buy", {"what": "fig"})))
    assert contents(ended) == [("tool", "sold out")]
    assert (ended.done, ended.stop_reason, ended.reward) == (True, "environment_done", 0.5 - 0.0625 + 8)


@pytest.mark.parametrize("said", ["bad", "robot"])
def test_what_nobody_can_say_is_the_environments_fault(file: Path, said: str) -> None:
    """A number, and a message in the policy's name, never become messages."""
    with pytest.raises(OutsideError, match=r"environment: respond gave .*, expected text, a message with role"):
        play(load_environment(f"{file}:Shop"), says(said))


def test_the_constructor_gets_its_arguments(file: Path) -> None:
    """They are part of the identity; one that it does not have is named before anything is started."""
    shop = load_environment(f"{file}:Shop", arguments={"stock": 3})
    assert shop.identity["arguments"] == {"stock": 3}
    (bought,) = play(shop, says(None, ("buy", {"what": "fig"})))
    assert bought.reward == 0.75 - 0.0625
    with pytest.raises(UsageError, match="unexpected keyword argument 'stok'"):
        load_environment(f"{file}:Shop", arguments={"stok": 3})


def test_a_user_stands_beside_an_environment_with_tools(file: Path) -> None:
    """Tools answer calls, the user everything else; it reads all messages so far, a copy of them."""
    user = load_user(f"{file}:later", timeout_s=5)
    looked, replied = play(WithUser(load_environment(f"{file}:Plain"), user), says(None, ("look", {})), says("hi"))
    assert contents(looked) == [("tool", "x")]
    assert (contents(replied), replied.reward) == ([("user", "4 so far")], 0.5)
    counting = WithUser(SingleTurn(), load_user(f"{file}:count", timeout_s=5))
    assert [contents(step) for step in play(counting, says("a"), says("b"))] == [[("user", "1")], [("user", "1")]]
    assert play(counting, says("a"), answer="quiet")[0].done


def test_a_class_of_users_has_one_for_each_rollout(file: Path) -> None:
    """It is reset with the task, hears what the policy says, and its other methods are its own."""
    user = load_user(f"{file}:Guest", timeout_s=5)
    assert [contents(s) for s in play(WithUser(SingleTurn(), user), says("a"), says("b"))] == [
        [("user", "4/a")],
        [("user", "4/a/b")],
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one", "messages so far and the task's row"),
        ("TEXT", "expected a function or a class"),
        ("Plain", "no respond"),
    ],
)
def test_what_is_no_user(file: Path, name: str, said: str) -> None:
    """A function of one argument, a text and a class that does not respond are usage errors."""
    with pytest.raises(UsageError) as error:
        load_user(f"{file}:{name}", timeout_s=5)
    assert said in f"{error.value} {error.value.hint}"
    with pytest.raises(UsageError, match=r"expected path\.py:NAME, a function or a class"):
        given_user(7, timeout_s=5)


def test_a_user_that_hangs_is_the_environments_fault(file: Path) -> None:
    """The function is named."""
    with pytest.raises(OutsideError, match=r"environment: slow gave no answer within 0\.1 s"):
        play(WithUser(SingleTurn(), load_user(f"{file}:slow", timeout_s=0.1)), says("a"))


def test_a_change_of_the_users_file_is_another_run(file: Path) -> None:
    """The identity has the environment's keys, and the user with the hash of its file."""
    before = WithUser(load_environment(f"{file}:Plain"), load_user(f"{file}:count", timeout_s=5)).identity
    assert before["spec"] == "shop.py:Plain"
    assert before["user"]["spec"] == "shop.py:count"
    file.write_text(SOURCE + "# changed\n")
    assert load_user(f"{file}:count", timeout_s=5).identity["file_hash"] != before["user"]["file_hash"]


def test_step_is_public() -> None:
    """Content, reward, done, in this order."""
    assert gymdata.Step("a", 0.5, True) == gymdata.Step(content="a", reward=0.5, done=True)


# --- a model as the user -------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as up:
        yield up


CHAT = "/v1/chat/completions"


def answers(text: Any) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def customer(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The user of the page, who asks ``server``."""
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (block,) = (block for block in BLOCKS if block.file == "customer.py")
    (tmp_path / "customer.py").write_text(block.text)
    return f"{tmp_path}/customer.py:customer"


def test_a_function_asks_a_model_with_the_roles_the_other_way_about(server: Server, file: Path, customer: str) -> None:
    """It reads its own prompt, the policy as user, itself as assistant, and no tool; its stop text ends the rollout."""
    server.modes[CHAT] = ["more", "stop"]
    server.answers |= {"more": answers("And 5?"), "stop": answers("Thanks STOP")}
    environment = WithUser(load_environment(f"{file}:Plain"), load_user(customer, timeout_s=30))
    _, more, stop = play(environment, says(None, ("look", {})), says("4"), says("5"), goal="4")
    assert (contents(more), more.done, more.stop_reason) == ([("user", "And 5?")], False, None)
    assert (contents(stop), stop.done, stop.stop_reason) == ([("user", "Thanks STOP")], True, "user_stop")
    first, second = (body["messages"] for body in server.bodies(CHAT))
    assert [m["role"] for m in first] == ["system", "assistant", "user"]
    assert first[0]["content"].startswith("You are a customer who wants 4.")
    assert [m["content"] for m in second[1:]] == ["q", "4", "And 5?", "5"]


@pytest.mark.parametrize("answer", [answers(None), "{}"])
def test_an_answer_that_is_none_is_a_fault_and_never_a_message(server: Server, customer: str, answer: str) -> None:
    """The function raises at it, which is the environment's failure: the attempt is made again."""
    server.modes[CHAT], server.answers["odd"] = ["odd"], answer
    with pytest.raises(OutsideError, match="customer raised") as fault:
        play(WithUser(SingleTurn(), load_user(customer, timeout_s=30)), says("4"), goal="4")
    assert fault.value.system == "environment"


# --- rewards of steps from a server --------------------------------------------------------------------------------


def test_a_flood_of_words_is_cut_as_tool_output_is(file: Path) -> None:
    """Five megabytes that a user says become 64 KiB, and the message says so."""
    (file.parent / "flood.py").write_text("def flood(messages, task):\n    return 'a' * 5_000_000\n")
    (result,) = play(WithUser(SingleTurn(), load_user(f"{file.parent}/flood.py:flood", timeout_s=5)), says("a"))
    ((_, text),) = contents(result)
    assert text == "a" * 65_536 + "\n[output cut: 5,000,000 bytes, the first 65,536 are shown]"
