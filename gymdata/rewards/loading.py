"""A user's reward, from a file or given as an object: a function, an instance that can be called, or an evaluator."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from gymdata.errors import UsageError, option, raised
from gymdata.rewards.evaluator import EvaluatorReward
from gymdata.rewards.user import CONCURRENT, UserReward
from gymdata.user_code import in_memory, load_symbol, place_in, place_of

_EXPECTED = "a name, path.py:function, or a function"


def load_user_reward(spec: str) -> UserReward:
    """From ``path.py:function``, or ``path.py:Class{…}``: an instance made with the JSON object's keys. A class of the
    NeMo Agent Toolkit's evaluators needs no braces. Raises UsageError."""
    symbol, brace, keys = spec.partition("{")
    function, source = load_symbol(symbol, option("reward"))
    label = option("reward", spec)
    if inspect.isclass(function):
        if not brace and not _is_evaluator(function):
            # It can be called, which makes an instance and no rewards.
            raise UsageError(
                f"{label}: got the class {function.__name__}, expected a function",
                hint=f"{symbol}{{}} makes an instance of it",
            )
        try:
            arguments = json.loads(brace + keys or "{}")
        except ValueError as error:
            raise UsageError(f"{label}: its arguments are no JSON object: {error}") from error
        parameter = inspect.signature(function).parameters.get("max_concurrency") if _is_evaluator(function) else None
        if parameter is not None and parameter.default is parameter.empty:  # the toolkit gives it
            arguments.setdefault(parameter.name, CONCURRENT)
        function = instance_of(function, arguments, label)
        source += brace + keys
    elif brace:
        raise UsageError(f"{label}: only a class takes arguments, got {type(function).__name__}")
    _refuse_value(function, label)
    return _reward(function, source, label)


def given_reward(function: Any) -> UserReward:
    """From a function, or an evaluator's instance, that was given as an object. Raises UsageError."""
    if inspect.isclass(function):
        raise UsageError.bad_value("reward", function, _EXPECTED)
    _refuse_value(function, "reward")
    name, source = in_memory(function)
    return _reward(function, source, f"reward {name}", None if _is_evaluator(function) else name)


def _is_evaluator(value: Any) -> bool:
    """Whether a class or an instance has the method of the NeMo Agent Toolkit's evaluators."""
    return callable(getattr(value, "evaluate_item", None))


def _refuse_value(value: Any, label: str) -> None:
    if not (callable(value) or _is_evaluator(value)):
        raise UsageError.bad_value(label, value, _EXPECTED)


def _reward(function: Any, source: str, label: str, name: str | None = None) -> UserReward:
    if _is_evaluator(function):
        return EvaluatorReward(function, source)
    try:
        return UserReward(function, source, name)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{label}: its parameters cannot be read: {error}") from error


def instance_of(kind: Any, keys: Mapping[str, Any], label: str) -> Any:
    """An instance of a user's class. Raises UsageError with the file and line for whatever its constructor raises."""
    try:
        return kind(**keys)
    except Exception as error:  # user code may raise anything
        where = place_in(error, getattr(inspect.getmodule(kind), "__file__", None)) or place_of(kind)
        raise UsageError(f"{label}: {getattr(kind, '__name__', kind)} raised {raised(error)} ({where})") from error
