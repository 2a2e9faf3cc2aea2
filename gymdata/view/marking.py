"""Marks in the pages of ``gymdata view --annotate``: what people said, and writing what they say.

Invariants: nothing is written without ``--annotate``, from another machine, or by another site's script (the page's own
token stands in a header, which no form of another site can set); a mark goes to the run that its rollout is of.
"""

from __future__ import annotations

import getpass
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from gymdata.errors import DataError, GymdataError, UsageError
from gymdata.rollouts.messages import JsonObject, loads, object_of
from gymdata.scores.marks import KINDS, Mark, Marks, append, marks_file, now, read_marks, sizes_of_marks
from gymdata.view.answers import Missing, json_answer
from gymdata.view.evidence.index import Snapshot
from gymdata.view.text import Values

#: Bytes of a request.
_MOST_BYTES = 100_000


class Marking:
    """The marks of the paths that are shown."""

    def __init__(self, paths: Sequence[Path], *, annotate: bool) -> None:
        self.annotate = annotate
        self.token = secrets.token_urlsafe(16)
        try:
            self.person = getpass.getuser()
        except (OSError, KeyError):
            self.person = "someone"
        self._files = list(dict.fromkeys(file for path in paths if (file := marks_file(path)) is not None))
        self._paths = paths
        self._read: tuple[list[int], Marks] = ([], Marks())

    def now(self) -> Marks:
        """What holds now."""
        sizes = sizes_of_marks(self._paths)
        if self._read[0] != sizes:
            self._read = (sizes, read_marks(self._paths))
        return self._read[1]

    def values(self) -> Values:
        """What every page has of it."""
        marks = self.now()
        return {
            "annotate": self.annotate,
            "mark_token": self.token if self.annotate else "",
            "person": self.person,
            "selections": marks.selections,
            "marked": bool(marks.people),
        }

    def of_rollout(self, rollout_id: str, task_id: str) -> Values:
        """What a page shows of one rollout, or a script that has marked it."""
        marks = self.now()
        return {**marks.of_rollout(rollout_id), "bad_task": task_id in marks.bad_tasks}

    async def add(self, request: Request, find: Callable[[str], tuple[Snapshot, int]]) -> Response:
        """Write a mark: ``kind``, ``id`` of a rollout, ``value`` and ``over`` as JSON. ``find``: the rollout of an id."""
        token = request.headers.get("x-gymdata-token", "")
        if not self.annotate or not secrets.compare_digest(token.encode(), self.token.encode()):
            return json_answer({"error": "marks are made in a page of `gymdata view --annotate`"}, 403)
        body = await request.body()
        if len(body) > _MOST_BYTES:
            return json_answer({"error": f"a mark has at most {_MOST_BYTES:,} bytes"}, 413)
        try:
            mark, file = self._mark(object_of(loads(body.decode("utf-8", "replace"))), find)
            append(file, mark)
        except Missing as error:
            return json_answer({"error": str(error)}, 404)
        except GymdataError as error:
            return json_answer({"error": error.message}, 422)
        return json_answer(self.of_rollout(mark.rollout_id, mark.task_id) | {"selections": self.now().selections})

    def _mark(self, fields: JsonObject, find: Callable[[str], tuple[Snapshot, int]]) -> tuple[Mark, Path]:
        kind, who = str(fields.get("kind")), str(fields.get("who") or self.person)
        if kind not in KINDS:
            raise UsageError.unknown_choice("kind of mark", kind, KINDS)
        if kind == "selection":
            if not self._files:
                raise DataError("no run is shown that could keep a selection")
            return Mark("selection", "", "", who, now(), fields.get("value"), fields.get("over")), self._files[0]
        snapshot, number = find(str(fields.get("id")))
        rollout, task = (str(snapshot.table[name][number].as_py()) for name in ("rollout_id", "task_id"))
        over = fields.get("over")
        if kind in ("choice", "unchoice"):
            other = find(str(over))[1]
            over = str(snapshot.table["rollout_id"][other].as_py())
            if snapshot.table["group_id"][number] != snapshot.table["group_id"][other]:
                raise UsageError.bad_value(kind, over, "a rollout of the same group")
        file = marks_file(snapshot.file(number))
        if file is None:
            raise DataError("the rollout is in no run folder, beside which marks could be kept")
        value = fields.get("value")
        if kind == "reward":
            # As it was typed: only an emptied box takes a correction back, not a number that a script could not read.
            try:
                value = float(str(value)) if value != "" else None
            except ValueError:
                raise UsageError.bad_value("reward", value, "a finite number such as 0.5, or an empty box") from None
        return Mark(kind, rollout, task, who, now(), value, over), file
