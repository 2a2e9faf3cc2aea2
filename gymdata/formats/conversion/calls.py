"""Logs of gateways that have a model call per line: the calls of a session are a rollout.

Invariants: calls are in the order of their times, whatever that of the lines; which call goes on from which is seen from
their ids. A session is in one file, which is read whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from gymdata.formats import Format
from gymdata.formats.conversion.importing import BadItem, documents
from gymdata.rollouts.messages import object_of

if TYPE_CHECKING:
    from gymdata.store.paths import Source


class PerCall(Format):
    """A row is a call; ``session`` names the column that calls of one rollout share."""

    holds_ids = holds_logprobs = True
    session: ClassVar[str]

    def recognise(self, value: Any) -> bool:
        call = value[0] if isinstance(value, list) and value else value
        return isinstance(call, dict) and super().recognise_row(call)

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """A document per session, at the line of its first call; what is no call of a session is one of its own."""
        for source in sources:
            sessions: dict[str, tuple[int, list[Any], bytes]] = {}
            for line, value, text in documents(source):
                if isinstance(value, BadItem):
                    yield source, line, value, text
                    continue
                for call in value if isinstance(value, list) else [value]:
                    name = object_of(call).get(self.session)
                    if isinstance(name, (str, int)):
                        sessions.setdefault(str(name), (line, [], text))[1].append(call)
                    else:
                        yield source, line, {"calls": [call]}, text
            yield from ((source, line, {"calls": calls}, text) for line, calls, text in sessions.values())
