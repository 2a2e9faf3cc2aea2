"""The shipped rewards, one file each, and those that other packages add under the entry points ``gymdata.rewards``.

A reward is a class with ``check``, decorated with ``@REWARDS.register(NAME)``; the first line of its docstring says when it
is 1. A file here, or an entry point that names such a class, is all that an addition needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gymdata.errors import RewardError, UsageError, option
from gymdata.registry import Registry
from gymdata.rewards.port import TaskRow, View


class NamedReward:
    """Scores the last message's text against the task."""

    #: What it reads, for messages about rollouts that it does not apply to and for the documentation.
    needs: str | None = None
    #: The column of the task that it cannot do without, unless it has an argument.
    column: ClassVar[str | None] = None
    #: The name of the argument in ``NAME:ARGUMENT``; None where it takes none.
    argument: ClassVar[str | None] = None
    #: Microseconds, so it needs no thread.
    quick = False
    bounded = False

    def __init__(self, name: str, argument: str | None) -> None:
        self.name = name
        self.given = argument
        self.source = f"named:{name}"
        if argument is not None:
            self.source = f"named:{name}:{self.prepare(argument)}"

    def prepare(self, argument: str) -> str:
        """Read the argument; returns what it is in the identity. Raises UsageError for one that cannot be used."""
        return argument

    def check(self, text: str, task: TaskRow) -> float | None:
        """The reward of a text; None where the task lacks what it needs. Raises RewardError."""
        raise NotImplementedError

    def __call__(self, rollouts: Sequence[View]) -> list[float | RewardError | None]:
        return [self._checked(r["text"], r["task"]) for r in rollouts]

    def _checked(self, text: str, task: TaskRow) -> float | RewardError | None:
        try:
            return self.check(text, task)
        except RewardError as error:
            return error
        except Exception as error:  # noqa: BLE001 - libraries raise many kinds on what models write and tasks ask for
            return RewardError(f"{self.name} raised {type(error).__name__}: {error}")

    def applies(self, task: TaskRow) -> bool:
        """Whether the task's row has what it reads; False only if no rollout of it could be scored."""
        if self.quick:
            return self.check("", task) is not None
        return self.given is not None or self.column is None or task.get(self.column) is not None


REWARDS: Registry[type[NamedReward]] = Registry("reward", "gymdata.rewards.named", "gymdata.rewards")


def named_reward(name: str, argument: str | None) -> NamedReward:
    """One of ``REWARDS``. Raises UsageError for an argument that it does not take or cannot use."""
    kind = REWARDS[name].object
    if argument is not None and kind.argument is None:
        raise UsageError(
            f"{option('reward', f'{name}:{argument}')}: {name} takes no argument", hint=f"write {name} or {name}=WEIGHT"
        )
    return kind(name, argument)


def answers_of(task: TaskRow) -> list[str] | None:
    """The reference answers of a task's row; None without any."""
    answer = task.get("answer")
    if answer is None:
        return None
    return [str(a) for a in answer] if isinstance(answer, list) else [str(answer)]


def names_and_columns() -> str:
    """For help texts: each name with its argument, and the column that it reads."""
    spelt = []
    for entry in REWARDS:
        argument, column = entry.object.argument, entry.object.column
        spelt.append(f"{entry.name}{f':{argument}' if argument else ''}{f' (column {column})' if column else ''}")
    return ", ".join(spelt)
