"""The named rewards; the package's docstring says what each does."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymdata.errors import OutsideError, RewardError, UsageError, needs

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
#: Hyphen, minus and dashes that models write for a minus sign.
_MINUS = str.maketrans({"−": "-", "–": "-", "‒": "-"})

Check = Callable[[str, Mapping[str, Any]], float | None]


class NamedReward:
    """Scores the last message's text against the task.

    ``quick``: microseconds, so it needs no thread. ``needs``: what it reads, for messages about rollouts that it does
    not apply to.
    """

    bounded = False
    useless: OutsideError | None = None

    def __init__(self, name: str, check: Check, *, quick: bool, source: str | None = None) -> None:
        self.name = name
        self.needs: str | None = NEEDS[name]
        self.source = source or f"named:{name}"
        self.quick = quick
        self._check = check

    def __call__(self, rollouts: Sequence[Mapping[str, Any]]) -> list[float | None]:
        return [self._check(r["text"], r["task"]) for r in rollouts]

    def applies(self, task: Mapping[str, Any]) -> bool:
        """Whether the task's row has what it reads; False only if no rollout of it could be scored."""
        if self.quick:
            return self._check("", task) is not None
        return self.source != f"named:{self.name}" or task.get(_COLUMN.get(self.name, "answer")) is not None


def named_reward(name: str, argument: str | None) -> NamedReward:
    """One of ``NAMED``. Raises UsageError for an argument that it does not take or cannot use."""
    return NAMED[name](argument)


def _exact(argument: str | None) -> NamedReward:
    _no_argument("exact_match", argument)

    def check(text: str, task: Mapping[str, Any]) -> float | None:
        answers = _answers(task)
        return None if answers is None else float(text.strip() in [a.strip() for a in answers])

    return NamedReward("exact_match", check, quick=True)


def _numeric(argument: str | None) -> NamedReward:
    _no_argument("numeric", argument)
    # Cached, because the members of a group share the answer.
    wanted_number = functools.lru_cache(maxsize=1024)(last_number)

    def check(text: str, task: Mapping[str, Any]) -> float | None:
        answers = _answers(task)
        wanted = [n for n in map(wanted_number, answers or ()) if n is not None]
        if not wanted:
            return None
        got = last_number(text)
        return float(got is not None and any(math.isclose(got, w, rel_tol=1e-6, abs_tol=1e-9) for w in wanted))

    return NamedReward("numeric", check, quick=True)


def last_number(text: str) -> float | None:
    """The last number in a text, or None: 1,234.5 and −3e4 are numbers."""
    if not text.isascii():
        text = text.translate(_MINUS)
    last: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    digits = last.group().replace(",", "")
    # In "12-5" the hyphen is between numbers: an operator or a range, not a sign.
    if digits[0] in "+-" and last.start() > 0 and text[last.start() - 1].isalnum():
        digits = digits[1:]
    return float(digits)


def _math_verify(argument: str | None) -> NamedReward:
    _no_argument("math_verify", argument)
    with needs("rewards"):
        import math_verify

    def check(text: str, task: Mapping[str, Any]) -> float | None:
        answers = _answers(task)
        if answers is None:
            return None
        try:
            # Its own timeouts use signals, which only the main thread may; the caller bounds the whole batch.
            got = math_verify.parse(text, parsing_timeout=None)
            gold = [math_verify.parse(a if "$" in a or "\\" in a else f"${a}$", parsing_timeout=None) for a in answers]
            return float(any(math_verify.verify(g, got, timeout_seconds=None) for g in gold))
        except Exception as error:  # sympy raises many kinds of exceptions on what models write
            raise RewardError(f"math_verify raised {type(error).__name__}: {error}") from error

    return NamedReward("math_verify", check, quick=False)


def _regex(argument: str | None) -> NamedReward:
    fixed = _compile(argument) if argument is not None else None

    def check(text: str, task: Mapping[str, Any]) -> float | None:
        pattern = fixed
        if pattern is None:
            if not isinstance(task.get("pattern"), str):
                return None
            try:
                pattern = re.compile(task["pattern"])
            except re.error as error:
                raise RewardError(f"regex: the task's pattern is not one: {error}") from error
        return float(pattern.search(text) is not None)

    # A pattern can take exponential time, so it runs where it can be left behind.
    return NamedReward("regex", check, quick=False, source=f"named:regex:{argument}" if argument else None)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError.bad_value("--reward regex", pattern, f"a regular expression ({error})") from error


def _json_schema(argument: str | None) -> NamedReward:
    with needs("rewards"):
        import jsonschema
    import orjson

    def validator(schema: Any) -> Any:
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    fixed = None
    if argument is not None:
        try:
            fixed = validator(orjson.loads(Path(argument).read_bytes()))
        except (OSError, orjson.JSONDecodeError, jsonschema.SchemaError) as error:
            raise UsageError(f"--reward json_schema: {argument} is not a JSON Schema file: {error}") from error

    def check(text: str, task: Mapping[str, Any]) -> float | None:
        use = fixed
        if use is None:
            if task.get("schema") is None:
                return None
            schema = task["schema"]
            try:
                use = validator(orjson.loads(schema) if isinstance(schema, str) else schema)
            except (orjson.JSONDecodeError, jsonschema.SchemaError) as error:
                raise RewardError(f"json_schema: the task's schema is not one: {error}") from error
        try:
            value = orjson.loads(_without_fence(text))
        except orjson.JSONDecodeError:
            return 0.0
        return float(use.is_valid(value))

    source = None
    if argument is not None:
        import hashlib

        source = f"named:json_schema:{hashlib.blake2b(Path(argument).read_bytes(), digest_size=16).hexdigest()}"
    return NamedReward("json_schema", check, quick=False, source=source)


def _without_fence(text: str) -> str:
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", text, re.DOTALL)
    return fenced.group(1) if fenced else text


def _answers(task: Mapping[str, Any]) -> list[str] | None:
    answer = task.get("answer")
    if answer is None:
        return None
    return [str(a) for a in answer] if isinstance(answer, list) else [str(answer)]


def _no_argument(name: str, argument: str | None) -> None:
    if argument is not None:
        raise UsageError(f"--reward {name}:{argument}: {name} takes no argument", hint=f"write {name} or {name}=WEIGHT")


NAMED: dict[str, Callable[[str | None], NamedReward]] = {
    "exact_match": _exact,
    "numeric": _numeric,
    "math_verify": _math_verify,
    "regex": _regex,
    "json_schema": _json_schema,
}

#: The columns that each reads, for messages.
NEEDS = {
    "exact_match": "the task column `answer`",
    "numeric": "the task column `answer`, with a number in it",
    "math_verify": "the task column `answer`",
    "regex": "`--reward regex:PATTERN` or the task column `pattern`",
    "json_schema": "`--reward json_schema:FILE` or the task column `schema`",
}
#: The columns of rewards that do not read ``answer`` and may take an argument instead.
_COLUMN = {"regex": "pattern", "json_schema": "schema"}
TAKE_ARGUMENT = frozenset({"regex", "json_schema"})
