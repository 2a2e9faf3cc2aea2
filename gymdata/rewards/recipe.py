"""Recipes of ``gymdata score --recipe``: which rewards a rollout gets, and how much each counts, by what its task says.

.. code-block:: yaml

    rules:
      - when: {category: math}            # a field of the task's row, or meta.level; a value, a list of them, or null
        rewards:
          - {name: numeric, weight: 1}
          - {url: "http://localhost:5000/get_reward", weight: 0.5}
      - when: {category: [chat, writing], lang: en}     # all of them must hold
        rewards:
          - {model: runs/reward-model, label: helpful}
          - {python: "rewards.py:politeness", weight: 0.2}
      - default: [exact_match]            # tasks that no rule fits; a text is what --reward takes

The first rule that fits counts. A reward is one of ``name`` (with ``argument``, as in ``regex``), ``python``, ``model``,
``url``; ``weight`` is 1 when not given, ``label`` its name in the scores. A rollout that no rule fits has no score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from gymdata.errors import UsageError
from gymdata.rollouts.messages import TaskRow, field_at
from gymdata.settings import Config, read_yaml
from gymdata.urls import REWARD_KEYS, refuse_userinfo

_KINDS = ("name", "python", "model", "url")


class RewardSource(Config):
    """One reward of a rule. Exactly one of ``name``, ``python``, ``model``, ``url`` says where it comes from."""

    name: str | None = None
    argument: str | None = None
    python: str | None = None
    model: str | None = None
    url: str | None = None
    label: str | None = pydantic.Field(None, pattern=r"^[\w.+-]+$")
    weight: float = pydantic.Field(1.0, allow_inf_nan=False)

    def what(self) -> tuple[str, str]:
        """(kind, where it comes from)."""
        return next((kind, getattr(self, kind)) for kind in _KINDS if getattr(self, kind) is not None)

    def key(self) -> tuple[str | None, ...]:
        """Equal for two that are the same reward, whatever their weights."""
        return (*self.what(), self.argument, self.label)


class _Rule(Config):
    when: dict[str, Any] | None = None
    rewards: list[Any] | None = None
    default: list[Any] | None = None


class _File(Config):
    rules: list[Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """``when``: field of the task → the values that fit; empty for the default."""

    when: Mapping[str, Sequence[Any]]
    rewards: Sequence[RewardSource]

    def fits(self, task: TaskRow) -> bool:
        # In Python true equals 1; in a task they differ.
        return all(
            any(isinstance(field, bool) == isinstance(value, bool) and bool(field == value) for value in values)
            for field, values in ((field_at(task, name), values) for name, values in self.when.items())
        )

    def __str__(self) -> str:
        conditions = ", ".join(f"{name}: {' or '.join(map(str, values))}" for name, values in self.when.items())
        return conditions or "default"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Rules in their order."""

    rules: Sequence[Rule]

    def rule_of(self, task: TaskRow) -> int | None:
        """The number of the first rule that fits a task's row, from 0."""
        return next((k for k, rule in enumerate(self.rules) if rule.fits(task)), None)

    def sources(self) -> list[RewardSource]:
        """Each reward once, in order of appearance."""
        return list({source.key(): source for rule in self.rules for source in rule.rewards}.values())

    def weight(self, source: RewardSource, task: TaskRow) -> float | None:
        """How much a reward counts for a task; None when it is not called."""
        rule = self.rule_of(task)
        weights = [s.weight for s in self.rules[rule].rewards if s.key() == source.key()] if rule is not None else []
        return weights[0] if weights else None


def read_recipe(file: Path) -> Recipe:
    """The recipe in a YAML file. Paths in it are looked for beside it first. Raises UsageError naming the place."""
    written = _File.of(read_yaml(file), str(file)).rules
    rules = [_rule(values, f"{file}: rules[{k}]", file.parent) for k, values in enumerate(written)]
    if not rules:
        raise UsageError.bad_value(f"{file}: rules", [], "one rule or more")
    for k, rule in enumerate(rules[:-1]):
        if not rule.when:
            raise UsageError(f"{file}: rules[{k + 1}] can never be reached: the default before it fits every task")
    return Recipe(rules)


def _rule(values: Any, where: str, beside: Path) -> Rule:
    rule = _Rule.of(values, where)
    if (rule.default is None) == (rule.when is None) or (rule.default is None) == (rule.rewards is None):
        raise UsageError.bad_value(where, sorted(values), "either when and rewards, or default")
    if rule.when is not None and not rule.when:
        raise UsageError(f"{where}: `when` names no field", hint="write `default:` for what fits every task")
    rewards = rule.rewards if rule.default is None else rule.default
    key = "rewards" if rule.default is None else "default"
    sources = [_source(reward, f"{where}.{key}[{k}]", beside) for k, reward in enumerate(rewards or ())]
    keys = [source.key() for source in sources]
    if len(set(keys)) < len(keys):
        raise UsageError(f"{where}: a reward is there twice", hint="give its whole weight once")
    when = {name: value if isinstance(value, list) else [value] for name, value in (rule.when or {}).items()}
    return Rule(when, sources)


def _source(values: Any, where: str, beside: Path) -> RewardSource:
    if isinstance(values, str):
        kind = "url" if values.startswith(("http://", "https://")) else "python" if ".py:" in values else "name"
        name, colon, argument = values.partition(":") if kind == "name" else (values, "", "")
        values = {kind: name} | ({"argument": argument} if colon else {})
    source = RewardSource.of(values, where)
    refuse_userinfo(source.url, where, REWARD_KEYS)
    kinds = [kind for kind in _KINDS if getattr(source, kind) is not None]
    if len(kinds) != 1:
        raise UsageError.bad_value(where, kinds or sorted(values), f"exactly one of {', '.join(_KINDS)}")
    if source.argument is not None and source.name is None:
        raise UsageError(f"{where}: only a named reward takes an argument")
    kind, location = source.what()
    file = location.rpartition(":")[0] if kind == "python" else location
    if kind in ("python", "model") and (beside / file).exists():
        return source.model_copy(update={kind: str(beside / location)})
    return source
