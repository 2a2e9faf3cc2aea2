"""The conversations of one rollout as a tree: versions of a conversation and its branches under the one that they come from.

A rollout's ``messages`` are one of them; a recorded session keeps the others in ``extra.other_messages``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from gymdata.commands.show.rollout import MessageView, messages_of, parsed
from gymdata.errors import printable
from gymdata.rollouts.messages import object_of


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A conversation. ``messages``: those that the one above it does not have; ``begins``: where it comes from; ``shown``:
    it is the rollout's own."""

    agent: str
    depth: int
    begins: str
    messages: list[MessageView]
    shown: bool


def conversations_of(row: Mapping[str, Any]) -> list[ConversationView]:
    """All conversations of a rollout, each after the one that it comes from; most rollouts have one."""
    extra, turns = object_of(parsed(row.get("extra"))), row["turns"] or []
    main, versions = _Branch(None, row["messages"], turns), _listed(extra.get("other_messages"))
    causes = {str(c.get("agent")): str(c.get("cause") or "") for c in _listed(extra.get("conversations"))}
    branches = (_Branch(v.get("agent"), v["messages"], turns) for v in versions if isinstance(v.get("messages"), list))
    ordered = sorted([main, *branches], key=lambda branch: branch.turns)
    below: dict[int, list[int]] = {}
    for k, branch in enumerate(ordered):
        branch.attach(ordered[:k], causes)
        below.setdefault(branch.above, []).append(k)

    def walk(above: int, depth: int) -> Iterator[ConversationView]:
        for k in below.get(above, ()):
            branch = ordered[k]
            messages = messages_of(branch.messages[branch.shared :], turns)
            yield ConversationView(branch.agent, depth, branch.begins, messages, branch is main)
            yield from walk(k, depth + 1)

    return list(walk(-1, 0))


class _Branch:
    """Messages up to a turn that nothing continues. ``above``: the number of the branch that it comes from, or -1;
    ``shared``: the number of messages that it has from there."""

    def __init__(
        self, agent: object, messages: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]
    ) -> None:
        self.messages = messages
        self.turns = [turn for message in messages if isinstance(turn := message.get("turn"), int)]
        last = self.turns[-1] if self.turns and self.turns[-1] < len(turns) else None
        named = agent if agent is not None or last is None else turns[last].get("agent")
        self.agent = printable(str(named or ""), lines=False)
        self.above, self.shared, self.begins = -1, 0, ""

    def attach(self, earlier: Sequence[_Branch], causes: Mapping[str, str]) -> None:
        """Find where it comes from."""
        common = [
            len(list(takewhile(lambda pair: pair[0] == pair[1], zip(self.turns, other.turns, strict=False))))
            for other in earlier
        ]
        cause = printable(causes.get(self.agent, ""), lines=False)
        why = f": {cause}" if cause and self.agent not in [other.agent for other in earlier] else ""
        if most := max(common, default=0):
            self.above = common.index(most)
            last = self.turns[most - 1]
            self.shared = 1 + next(k for k, message in enumerate(self.messages) if message.get("turn") == last)
            self.begins = f"branches after turn {last}{why}"
            return
        origin, dot, _ = self.agent.rpartition(".")
        names = [other.agent for other in earlier]
        if dot and origin in names:
            self.above = names.index(origin)
        if self.turns:
            self.begins = f"begins at turn {self.turns[0]}{why}"


def _listed(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
