"""Rewards by name, from users' Python files, from reward models and from reward servers.

How a reward is spelled on the command line: ``NAME[:ARGUMENT][=WEIGHT]``, ``path.py:function[=WEIGHT]``, or the URL of a
reward server, ``http://…[=WEIGHT]`` (see ``gymdata.rewards.remote``). The weight is the number after the last
``=`` (default 1), so ``regex:a=1`` is the pattern ``a`` with weight 1; write ``regex:a=1=1`` for the pattern ``a=1``.

| name | 1 when | needs |
| --- | --- | --- |
| ``exact_match`` | the last message is the answer, white space at its ends aside | ``answer`` (or a list of them) |
| ``numeric`` | the last number in the last message equals the answer within 1e-6 relative | ``answer`` |
| ``math_verify`` | the two are mathematically equal | ``answer``, the ``rewards`` extra |
| ``regex[:PATTERN]`` | the pattern is found in the last message | the argument, or ``pattern`` in the task |
| ``json_schema[:FILE]`` | the last message is JSON that fits the schema | the argument, or ``schema`` in the task |

and 0 otherwise. A task without what a reward needs makes the part null, which the total leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gymdata.errors import UsageError
from gymdata.rewards.named import NAMED, TAKE_ARGUMENT, named_reward
from gymdata.rewards.port import RewardFunction
from gymdata.rewards.user import UserReward

__all__ = ["load_rewards", "parse_spec"]
_URL = ("http://", "https://")


def load_rewards(
    specs: Sequence[str], decode: Callable[[Sequence[int]], str] | None = None
) -> list[tuple[RewardFunction, float]]:
    """Reward functions with their weights, in order. Raises UsageError on an unknown or repeated one.

    ``decode`` spells the ids that a reward server gets the text of; without it the server gets the messages' text.
    """
    loaded: list[tuple[RewardFunction, float]] = []
    for spec in specs:
        name, argument, weight = parse_spec(spec)
        function: RewardFunction
        if name.startswith(_URL):
            from gymdata.rewards.remote import RemoteReward

            function = RemoteReward(name, decode=decode)
        elif name.endswith(".py"):
            function = UserReward.load(f"{name}:{argument}")
        else:
            function = named_reward(name, argument)
        if any(function.name == other.name for other, _ in loaded):
            raise UsageError(f"--reward {spec}: a reward named {function.name!r} is already there")
        loaded.append((function, weight))
    return loaded


def parse_spec(spec: str) -> tuple[str, str | None, float]:
    """``(name, file or URL, argument or function, weight)``."""
    body, weight = spec, 1.0
    head, equals, tail = spec.rpartition("=")
    number = _finite(tail) if equals else None
    if number is not None:
        body, weight = head, number
    if body.startswith(_URL):
        return body, None, weight
    at = body.find(".py:")
    if at >= 0:
        if "=" in body[at:]:
            raise _no_weight(spec, body[at:].partition("=")[2])
        return body[: at + 3], body[at + 4 :], weight
    name, colon, argument = body.partition(":")
    before, wrong, rest = name.partition("=")
    if wrong and before in NAMED:
        raise _no_weight(spec, rest, f"an argument follows a colon: {before}:ARG" if before in TAKE_ARGUMENT else None)
    if name not in NAMED:
        raise UsageError.unknown_choice("--reward", name, [*NAMED, "path.py:function", "http://…"])
    return name, argument if colon else None, weight


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _no_weight(spec: str, got: str, hint: str | None = None) -> UsageError:
    text = f"--reward {spec}: the weight is not a number: got {got!r}, expected a finite one, as in =0.5"
    return UsageError(text, hint=hint)
