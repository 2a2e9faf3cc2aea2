"""A Python environment, a reward function and an agent, of which the place that a variable names does wrong at task q1."""

from __future__ import annotations

import os
import threading
import urllib.error
from email.message import Message
from typing import Any

import gymdata


def refused(status: int) -> Any:
    """As a server of its own that refuses."""
    raise urllib.error.HTTPError("http://search.example", status, "spoiled", Message(), None)


def drop() -> Any:
    raise ConnectionResetError("spoiled")


def hang() -> Any:
    threading.Event().wait()


NAMES = {"refused": refused, "drop": drop, "hang": hang, "Step": gymdata.Step}


def given(place: str, prompt: Any, value: Any) -> Any:
    """The value, or what the variable says for this place."""
    where, _, how = os.environ.get("GYMDATA_TEST_FAULT", "").partition(" ")
    return eval(how, dict(NAMES)) if where == place and "q1" in str(prompt) else value


class World:
    """Has one tool, and scores each step and the end."""

    def reset(self, prompt: Any, **_: Any) -> None:
        self.prompt = prompt
        given("reset", prompt, None)

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number
            b: the other
        """
        return given("add", self.prompt, a + b)

    def respond(self, message: Any) -> Any:
        return given("respond", self.prompt, None)

    def step_reward(self, message: Any) -> Any:
        return given("step_reward", self.prompt, 0.25)

    def get_reward(self) -> Any:
        return given("get_reward", self.prompt, 0.5)


def length(completion: Any, prompt: Any) -> Any:
    """A reward function."""
    return given("length", prompt, float(len(completion)))
