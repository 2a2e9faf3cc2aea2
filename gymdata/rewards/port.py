"""The protocol of reward functions, and the parts that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.messages import Message

if TYPE_CHECKING:
    from gymdata.rollouts.turns import Turn

#: The name of a rollout's stored total reward, which no part of it and no score may have.
TOTAL = "reward"

#: The row of a task, with the columns of its file.
TaskRow = Mapping[str, Any]


class View(TypedDict):
    """A rollout as a reward function sees it.

    ``prompt``: messages before the first generated one; ``completion``: that one and all after it; ``text``: content of
    the last generated message; ``completion_ids``: every id after the first prompt, in order; ``turns`` as they are
    saved; ``stdout``, ``stderr``, ``exit_code``: the fields of these names in the environment's verdict, or of an agent's
    run; ``output_obj``: the text that an agent's function returned; ``directory``: in which the agent ran, while it is
    there.
    """

    messages: list[Message]
    prompt: list[Message]
    completion: list[Message]
    text: str
    completion_ids: list[int]
    task: TaskRow
    tools: Sequence[Mapping[str, object]] | None
    turns: Sequence[Turn]
    status: str
    stdout: object
    stderr: object
    exit_code: object
    output_obj: object
    directory: object


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One named part of a reward. ``value`` None means not scored, and ``detail`` says why."""

    name: str
    value: float | None
    weight: float = 1.0
    detail: str | None = None
    #: One number per turn where the function scored the turns; ``value`` is their sum.
    steps: tuple[float | None, ...] | None = None


#: A number; None if the function does not apply; one number per turn; or the fault.
Value = float | tuple[float | None, ...] | OutsideError | None


@runtime_checkable
class RewardFunction(Protocol):
    """Scores finished rollouts in batches.

    An OutsideError is in the place of each rollout that it failed on. A fatal one says that no value of it can be used: a
    server that was never reached, a function that does not return one value for each rollout.
    """

    #: The names of its parts.
    name: str
    #: Its identity by content: the hash of a file or model, a named reward, a URL.
    source: str
    #: It takes microseconds, so it needs no thread.
    quick: bool
    #: It ends by itself, so no time limit cuts it off.
    bounded: bool
    #: What it reads of a task, for messages about rollouts that it does not apply to.
    needs: str | None

    def __call__(self, rollouts: Sequence[View]) -> Sequence[Value]:
        """One value each."""
        ...


def refuse_total(name: str, where: str, way: str) -> None:
    """Raises UsageError for a score that would be called as the total reward. ``way``: how to give it another name."""
    if name == TOTAL:
        raise UsageError.bad_value(where, name, "another name: this one is the total reward's", way)
