"""What people say of rollouts: ``RUN/marks.jsonl``, one line for each mark, beside what was collected and never in it.

Invariants: a mark is appended with one write under the file's lock, and is on disk before it is answered; nothing is ever
changed or removed, a later mark stands for an earlier one of its kind; a line that a machine did not finish is no mark.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import orjson

from gymdata.errors import DataError, StoreError, UsageError
from gymdata.store.lineage import run_folder, runs_of
from gymdata.store.reading import warn

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "marks.jsonl"
Kind = Literal["tag", "untag", "comment", "reward", "choice", "unchoice", "bad_task", "good_task", "selection"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_MOST_CHARACTERS = 10_000
#: What people marked, as columns of rollouts: texts, and a truth value.
MARKED = ("tags", "comments", "bad_task")


@dataclass(frozen=True, slots=True)
class Mark:
    """``who`` says ``kind`` of a rollout. ``value``: the tag, the comment, the corrected reward (None takes a correction
    back), the address of a selection; ``over``: of a choice, the rollout that is worse; of an unchoice, the other one;
    of a selection, its name. ``marked_at``: ISO 8601, UTC."""

    kind: Kind
    rollout_id: str
    task_id: str
    who: str
    marked_at: str
    value: str | float | None = None
    over: str | None = None


@dataclass(slots=True)
class Marks:
    """What holds now. ``tags``, ``comments`` (by person), ``rewards``: by rollout; ``bad_tasks``: ids of tasks;
    ``choices``: (better, worse) rollouts → the people who chose so; ``selections``: name → address; ``people``: marks by
    person."""

    tags: dict[str, list[str]] = field(default_factory=dict)
    comments: dict[str, dict[str, str]] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    bad_tasks: set[str] = field(default_factory=set)
    choices: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    selections: dict[str, str] = field(default_factory=dict)
    people: Counter[str] = field(default_factory=Counter)

    def add(self, mark: Mark) -> None:
        """Let a later mark count."""
        self.people[mark.who] += 1
        tags = self.tags.setdefault(mark.rollout_id, []) if mark.kind in ("tag", "untag") else []
        if mark.kind == "tag" and mark.value not in tags:
            tags.append(str(mark.value))
        elif mark.kind == "untag" and mark.value in tags:
            tags.remove(str(mark.value))
        elif mark.kind == "comment":
            self.comments.setdefault(mark.rollout_id, {})[mark.who] = str(mark.value)
        elif mark.kind == "reward" and mark.value is None:
            self.rewards.pop(mark.rollout_id, None)
        elif mark.kind == "reward":
            self.rewards[mark.rollout_id] = float(mark.value or 0.0)
        elif mark.kind == "bad_task":
            self.bad_tasks.add(mark.task_id)
        elif mark.kind == "good_task":
            self.bad_tasks.discard(mark.task_id)
        elif mark.kind in ("choice", "unchoice") and mark.over is not None:
            # One person's last word on two rollouts.
            for pair in ((mark.rollout_id, mark.over), (mark.over, mark.rollout_id)):
                if mark.who in self.choices.get(pair, ()):
                    self.choices[pair].remove(mark.who)
            if mark.kind == "choice":
                self.choices.setdefault((mark.rollout_id, mark.over), []).append(mark.who)
        elif mark.kind == "selection" and mark.over is not None:
            self.selections.pop(mark.over, None)
            if mark.value:
                self.selections[mark.over] = str(mark.value)

    def of_rollout(self, rollout_id: str) -> dict[str, object]:
        """What a page shows of one rollout."""
        return {
            "tags": self.tags.get(rollout_id, []),
            "comments": {who: text for who, text in self.comments.get(rollout_id, {}).items() if text},
            "reward": self.rewards.get(rollout_id),
            "better_than": {
                worse: who for (better, worse), who in self.choices.items() if who and better == rollout_id
            },
            "worse_than": {better: who for (better, worse), who in self.choices.items() if who and worse == rollout_id},
        }

    def text(self, name: Literal["tags", "comments"], rollout_id: str) -> str:
        """A rollout's column: its tags joined by commas, or what people wrote as paragraphs."""
        if name == "tags":
            return ", ".join(self.tags.get(rollout_id, ()))
        return "\n\n".join(text for text in self.comments.get(rollout_id, {}).values() if text)

    def preferred(self) -> dict[tuple[str, str], int]:
        """(better, worse) → by how many people more; two rollouts on which people are divided are not there."""
        ahead = {pair: len(who) - len(self.choices.get(pair[::-1], ())) for pair, who in self.choices.items()}
        return {pair: n for pair, n in ahead.items() if n > 0}


def marks_file(path: str | Path) -> Path | None:
    """Where the marks of a path argument's rollouts are, whether or not there are any; None for what has no run folder."""
    folder = run_folder(path)
    return folder / FILE if folder is not None else None


def sizes_of_marks(paths: Iterable[str | Path]) -> list[int]:
    """The sizes of the logs, which only grow: other ones mean that there are new marks."""
    return [file.stat().st_size if file.is_file() else 0 for file in _logs(paths)]


def append(file: Path, mark: Mark) -> None:
    """Append a mark. Raises UsageError for one that says nothing, StoreError where it cannot be written."""
    _refuse_odd(mark)
    try:
        line = orjson.dumps(asdict(mark)) + b"\n"
    except orjson.JSONEncodeError as error:
        raise UsageError.bad_value(mark.kind, ascii(mark.value), "text that is Unicode") from error
    try:
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            # What a machine that stopped left of a line must not swallow this one.
            torn = size and os.pread(fd, 1, size - 1) != b"\n"
            rest = (b"\n" if torn else b"") + line
            try:
                # A disk that becomes full takes a part of it first.
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError.from_os(file, error) from error


def read_marks(paths: Iterable[str | Path]) -> Marks:
    """The marks of all the rollouts under path arguments. Raises DataError for a line that is no mark."""
    marks = Marks()
    for mark in _in_time(paths):
        marks.add(mark)
    return marks


def marks_table(paths: Sequence[str | Path]) -> pa.Table:
    """Every mark that was made, oldest first, for SQL: numbers of rewards apart from texts."""
    import pyarrow as pa

    rows = [
        asdict(mark)
        | {"value": mark.value if isinstance(mark.value, str) else None}
        | {"reward": None if isinstance(mark.value, str) else mark.value}
        for mark in _in_time(paths)
    ]
    texts = [(name, pa.string()) for name in ("marked_at", "who", "kind", "rollout_id", "task_id", "value", "over")]
    return pa.Table.from_pylist(rows, pa.schema([*texts, ("reward", pa.float64())]))


def now() -> str:
    """The time of a mark."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def _logs(paths: Iterable[str | Path]) -> list[Path]:
    """The logs of path arguments, each once."""
    return [folder / FILE for folder in runs_of(paths)]


def _in_time(paths: Iterable[str | Path]) -> list[Mark]:
    """Every mark under path arguments, oldest first."""
    return sorted((mark for file in _logs(paths) for mark in _lines(file)), key=lambda mark: mark.marked_at)


def _lines(file: Path) -> Iterable[Mark]:
    lines = file.read_bytes().split(b"\n") if file.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            mark = Mark(**orjson.loads(line))
            _refuse_odd(mark)
        except (orjson.JSONDecodeError, TypeError, AttributeError, UsageError) as error:
            if isinstance(error, orjson.JSONDecodeError):
                warn(f"{file}: line {number:,} was not finished and is no mark")
                continue
            raise DataError.bad_row(file, number, None, line[:80].decode("utf-8", "replace"), "a mark") from error
        yield mark


def _refuse_odd(mark: Mark) -> None:
    needs_text = mark.kind in ("tag", "untag", "comment", "selection")
    number = isinstance(mark.value, (int, float)) and not isinstance(mark.value, bool)
    if not (mark.over is None or isinstance(mark.over, str)):
        raise UsageError.bad_value("over", mark.over, "an id or a name")
    if not (mark.value is None or number or isinstance(mark.value, str)):
        raise UsageError.bad_value(mark.kind, mark.value, "a text or a number")
    if mark.kind not in KINDS:
        raise UsageError.unknown_choice("kind of mark", mark.kind, KINDS)
    if needs_text and (not isinstance(mark.value, str) or len(mark.value) > _MOST_CHARACTERS):
        raise UsageError.bad_value(mark.kind, mark.value, f"a text of at most {_MOST_CHARACTERS:,} characters")
    if mark.kind in ("tag", "untag") and (not str(mark.value).strip() or "," in str(mark.value)):
        raise UsageError.bad_value("tag", mark.value, "a word or words without a comma")
    if mark.kind == "reward" and not (mark.value is None or (number and abs(float(mark.value)) < float("inf"))):
        raise UsageError.bad_value("reward", mark.value, "a finite number")
    if mark.kind == "selection" and (not mark.over or not re.fullmatch(r"(/(?!/).*)?", str(mark.value))):
        raise UsageError.bad_value("selection", mark.value, "a name, and an address of this server that begins with /")
    if mark.kind in ("choice", "unchoice") and (not mark.over or mark.over == mark.rollout_id):
        raise UsageError.bad_value(mark.kind, mark.over, "another rollout, which is worse")
    if not mark.who.strip() or len(mark.who) > 100:
        raise UsageError.bad_value("name of a person", mark.who, "at most 100 characters")
