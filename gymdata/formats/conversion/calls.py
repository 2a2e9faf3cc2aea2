"""Logs of gateways that have a model call per line: the calls of a session are a rollout.

Invariants: calls are in the order of their times, whatever that of the lines; which call goes on from which is seen from
their ids. A session is in one file, which is read whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gymdata.formats import Format
from gymdata.formats.conversion.importing import BadItem, documents
from gymdata.rollouts.messages import object_of

if TYPE_CHECKING:
    from gymdata.store.paths import Source


class PerCall(Format):
    """A row is a call; ``session`` names the column that calls of one rollout share, ``call`` that of a call's own name."""

    holds_ids = holds_logprobs = True
    session: ClassVar[str]
    call: ClassVar[str | None] = None

    def recognise(self, value: Any) -> bool:
        call = value[0] if isinstance(value, list) and value else value
        return isinstance(call, dict) and super().recognise_row(call)

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """A document per session, at the line of its first call; what is no call of a session is one of its own, and a
        session that has a call twice is none."""
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
            for line, calls, text in sessions.values():
                yield source, line, self._twice(calls) or {"calls": calls}, text

    def _twice(self, calls: Sequence[Any]) -> BadItem | None:
        """An error where calls of a session have one name."""
        names = Counter(str(call[self.call]) for call in map(object_of, calls) if self.call in call)
        name = next((name for name, n in names.items() if n > 1), None)
        return None if name is None else BadItem("D701", f"{self.call}: got {name!r} twice in one {self.session}")
