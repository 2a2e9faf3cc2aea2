"""Rewards by name, from users' Python files, from reward models and from reward servers.

The syntax of a reward on the command line: ``NAME[:ARGUMENT][=WEIGHT]``, ``path.py:function[=WEIGHT]``,
``path.py:Class{"key": …}[=WEIGHT]`` (an instance), or the URL of a reward server, ``http://…[=WEIGHT]`` (see
``gymdata.rewards.user``, ``.evaluator`` and ``.remote``). The weight is the number after the last ``=`` (default 1), so
``regex:a=1`` is the pattern ``a`` with weight 1; write ``regex:a=1=1`` for the pattern ``a=1``.

The names are those of ``gymdata.rewards.named``: 1 where the reward holds, 0 otherwise. A task without what a reward needs
makes the part null, which the total leaves out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymdata.errors import UsageError, option
from gymdata.rewards.named import REWARDS, named_reward
from gymdata.rewards.port import RewardFunction, refuse_total

__all__ = ["Reward", "Rewards", "given_rewards", "load_rewards", "parse_spec"]
#: A reward as on the command line, or a function (see ``gymdata.rewards.user``).
Reward = str | Callable[..., Any]
#: One or several; a pair gives a function its weight.
Rewards = Reward | Sequence[Reward | tuple[Callable[..., Any], float]]
URLS = ("http://", "https://")


def given_rewards(rewards: Rewards) -> tuple[list[str], dict[str, tuple[RewardFunction, float]]]:
    """Rewards as texts, and the functions that some of these texts name. Raises UsageError."""
    from gymdata.rewards.loading import given_reward

    specs: list[str] = []
    functions: dict[str, tuple[RewardFunction, float]] = {}
    for entry in rewards if isinstance(rewards, Iterable) and not isinstance(rewards, str) else [rewards]:
        reward, weight = entry if isinstance(entry, tuple) else (entry, 1.0)
        if isinstance(reward, str):
            specs.append(reward)
            continue
        function = reward if isinstance(reward, RewardFunction) else given_reward(reward)
        if not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise UsageError.bad_value(f"weight of the reward {function.name}", weight, "a finite number")
        lambdas = sum(spec.startswith("in memory:lambda") for spec in specs)
        if function.name == "lambda" and lambdas:
            function.name = f"lambda_{lambdas + 1}"
        specs.append(f"in memory:{function.name}")
        if specs[-1] in functions:
            raise UsageError(f"reward: two functions are named {function.name!r}", hint="give one another __name__")
        functions[specs[-1]] = function, float(weight)
    return specs, functions


def load_rewards(
    specs: Sequence[str],
    decode: Callable[[Sequence[int]], str] | None = None,
    functions: Mapping[str, tuple[RewardFunction, float]] | None = None,
) -> list[tuple[RewardFunction, float]]:
    """Reward functions with their weights, in order. Raises UsageError on an unknown or repeated one, and on one that is
    called as the total reward.

    ``functions``: those of ``given_rewards``.

    ``decode`` gives the text of the ids that a reward server gets; without it the server gets the messages' text.
    """
    loaded: list[tuple[RewardFunction, float]] = []
    for spec in specs:
        if functions is not None and spec in functions:
            function, weight = functions[spec]
        else:
            name, argument, weight = parse_spec(spec)
            if name.startswith(URLS):
                from gymdata.rewards.remote import RemoteReward

                function = RemoteReward(name, decode=decode)
            elif name.endswith(".py"):
                from gymdata.rewards.loading import load_user_reward

                function = load_user_reward(f"{name}:{argument}")
            else:
                function = named_reward(name, argument)
        names = [other.name for other, _ in loaded]
        if function.name == "remote" and all(function.source != other.source for other, _ in loaded):
            numbered = ("remote", *(f"remote_{n}" for n in range(2, len(names) + 2)))
            function.name = next(name for name in numbered if name not in names)
        if function.name in names:
            raise UsageError(f"{option('reward', spec)}: a reward named {function.name!r} is already there")
        loaded.append((function, weight))
        refuse_total(function.name, option("reward", spec), "rename the function")
    return loaded


def parse_spec(spec: str) -> tuple[str, str | None, float]:
    """``(name, file or URL, argument or function, weight)``."""
    body, weight = spec, 1.0
    head, equals, tail = spec.rpartition("=")
    with contextlib.suppress(ValueError):
        if equals and math.isfinite(number := float(tail)):
            body, weight = head, number
    if body.startswith(URLS):
        return body, None, weight
    file, suffix, function = body.partition(".py:")
    if suffix:
        if "=" in (named := function.partition("{")[0]):
            raise _no_weight(spec, named.partition("=")[2])
        return f"{file}.py", function, weight
    name, colon, argument = body.partition(":")
    before, wrong, rest = name.partition("=")
    names = REWARDS.names()
    if wrong and before in names:
        takes = REWARDS[before].object.argument
        raise _no_weight(spec, rest, f"an argument follows a colon: {before}:{takes}" if takes else None)
    if name not in names:
        if name.endswith(".py"):
            raise UsageError(f"{option('reward')}: got {spec!r}, which names no function", hint=f"{name}:FUNCTION")
        error = UsageError.unknown_choice(option("reward"), name, [*names, "path.py:function", "http://…"])
        # `module:function`, as Python's entry points name it.
        module = Path(f"{name.replace('.', '/')}.py")
        if colon and (error.hint is None or module.is_file()):
            error.hint = f"did you mean {module}:{argument}?"
        raise error
    return name, argument if colon else None, weight


def _no_weight(spec: str, weight: str, hint: str | None = None) -> UsageError:
    text = f"{option('reward', spec)}: the weight is not a number: got {weight!r}, expected a finite one, as in =0.5"
    return UsageError(text, hint=hint)
