"""A user's reward, from a file or given as an object: a function, an instance that can be called, or an evaluator."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from gymdata.errors import UsageError
from gymdata.rewards.evaluator import EvaluatorReward, is_evaluator
from gymdata.rewards.user import CONCURRENT, UserReward
from gymdata.user_code import in_memory, load_symbol, place_in, place_of


def load_user_reward(spec: str) -> UserReward:
    """From ``path.py:function``, or ``path.py:Class{…}``: an instance made with the JSON object's keys. A class of the
    NeMo Agent Toolkit's evaluators needs no braces. Raises UsageError."""
    place, brace, keys = spec.partition("{")
    function, source = load_symbol(place, "--reward")
    if inspect.isclass(function):
        name = place.rpartition(":")[2]
        if not brace and not is_evaluator(function):
            # It can be called, which makes an instance and no rewards.
            raise UsageError(
                f"--reward {spec}: got the class {name}, expected a function",
                hint=f"name an instance in the file (reward = {name}()) and give that, or {place}{{}}",
            )
        given = _keys(spec, brace + keys)
        if is_evaluator(function) and _needs_concurrency(function):
            given.setdefault("max_concurrency", CONCURRENT)
        function = made_by(function, given, f"--reward {spec}")
        source += brace + keys
    elif brace:
        raise UsageError(f"--reward {spec}: only a class takes arguments, got {type(function).__name__}")
    if is_evaluator(function):
        return EvaluatorReward(function, source)
    if not callable(function):
        raise UsageError.bad_value("--reward", spec, f"a function, got {type(function).__name__}")
    try:
        return UserReward(function, source)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--reward {spec}: its parameters cannot be read: {error}") from error


def given_reward(function: Any) -> UserReward:
    """From a function, or an evaluator's instance, that was given as an object. Raises UsageError."""
    if inspect.isclass(function) or not (callable(function) or is_evaluator(function)):
        raise UsageError.bad_value("reward", function, "a name, path.py:function, or a function")
    name, source = in_memory(function)
    if is_evaluator(function):
        return EvaluatorReward(function, source)
    try:
        reward = UserReward(function, source)
        reward.name = name
        return reward
    except (TypeError, ValueError) as error:
        raise UsageError(f"reward {name}: its parameters cannot be read: {error}") from error


def made_by(kind: Any, keys: Mapping[str, Any], what: str) -> Any:
    """An instance of a user's class. Raises UsageError with the file and line for whatever its constructor raises."""
    try:
        return kind(**keys)
    except Exception as error:  # user code may raise anything
        at = place_in(error, getattr(inspect.getmodule(kind), "__file__", None)) or place_of(kind)
        raise UsageError(f"{what}: {kind.__name__} raised {type(error).__name__}: {error} ({at})") from error


def _needs_concurrency(kind: Any) -> bool:
    """Whether an evaluator's constructor must be given ``max_concurrency``, as the toolkit does."""
    try:
        parameter = inspect.signature(kind).parameters.get("max_concurrency")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty


def _keys(spec: str, text: str) -> dict[str, Any]:
    try:
        keys = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"--reward {spec}: its arguments are no JSON object: {error}") from error
    if not isinstance(keys, dict):
        raise UsageError.bad_value(f"--reward {spec}", text, "a JSON object of arguments")
    return keys
