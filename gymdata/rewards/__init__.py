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
from typing import Any

from gymdata.errors import UsageError, option
from gymdata.rewards.named import REWARDS, named_reward
from gymdata.rewards.port import RewardFunction, refuse_total

__all__ = ["Reward", "Rewards", "given_rewards", "load_reward", "load_rewards", "name_apart", "parse_weight"]
#: A reward as on the command line, or a function (see ``gymdata.rewards.user``).
Reward = str | Callable[..., Any]
#: One or several; a pair gives a function its weight.
Rewards = Reward | Sequence[Reward | tuple[Callable[..., Any], float]]
#: Makes the reward of a URL.
Remote = Callable[[str], RewardFunction]


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
    functions: Mapping[str, tuple[RewardFunction, float]] | None = None,
    remote: Remote | None = None,
) -> list[tuple[RewardFunction, float]]:
    """Reward functions with their weights, in order. ``functions``: those of ``given_rewards``. Raises UsageError on an
    unknown one, and on two of one name."""
    loaded: list[tuple[RewardFunction, float]] = []
    for spec in specs:
        if functions is not None and spec in functions:
            loaded.append(functions[spec])
        else:
            body, weight = parse_weight(spec)
            loaded.append((load_reward(body, remote), weight))
    name_apart([function for function, _ in loaded])
    return loaded


def parse_weight(spec: str) -> tuple[str, float]:
    """A reward without its weight, and the weight."""
    body, _, tail = spec.rpartition("=")
    with contextlib.suppress(ValueError):
        if body and math.isfinite(weight := float(tail)):
            return body, weight
    return spec, 1.0


def load_reward(body: str, remote: Remote | None = None) -> RewardFunction:
    """The reward of a text without a weight. Raises UsageError."""
    if is_url(body):
        from gymdata.rewards.remote import RemoteReward

        return (remote or RemoteReward)(body)
    name, colon, argument = body.partition(":")
    before, equals, tail = body.partition("{")[0].partition("=")
    names = REWARDS.names()
    if equals and (before in names or ".py:" in before):
        raise UsageError(
            f"{option('reward', body)}: the weight is not a number: got {tail!r}, expected a finite one, as in =0.5",
            hint="an argument follows a colon, as in regex:PATTERN",
        )
    if ".py:" in body:
        from gymdata.rewards.loading import load_user_reward

        return load_user_reward(body)
    if name.endswith(".py"):
        raise UsageError(f"{option('reward')}: got {body!r}, which names no function", hint=f"{name}:FUNCTION")
    if name not in names:
        raise UsageError.unknown_choice(option("reward"), name, [*names, "path.py:function", "http://…"])
    return named_reward(name, argument if colon else None)


def is_url(text: str) -> bool:
    """Whether it is a reward server's."""
    return text.startswith(("http://", "https://"))


def name_apart(functions: Sequence[RewardFunction]) -> None:
    """Give each server a name of its own: ``remote``, ``remote_2``, … Raises UsageError for two rewards of one name, and for
    one that is called as the total reward."""
    servers = list(dict.fromkeys(function.source for function in functions if function.source.startswith("url:")))
    names = set[str]()
    for function in functions:
        if function.source in servers[1:]:
            function.name = f"remote_{servers.index(function.source) + 1}"
        refuse_total(function.name, option("reward"), "rename the function or the folder")
        if function.name in names:
            raise UsageError(f"{option('reward')}: two rewards are named {function.name!r}", hint="rename a function")
        names.add(function.name)
