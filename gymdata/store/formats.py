"""Which format of another project a file is in. Every command that reads JSON lines asks here.

Formats are files of ``gymdata/formats/`` and entry points of the group ``gymdata.formats``.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from gymdata.errors import DataError, abridged
from gymdata.registry import Registry
from gymdata.rollouts.messages import RolloutRow
from gymdata.store.lines import decode, row_lines, values_of
from gymdata.store.paths import Source, resolve

#: Rows that are looked at.
_LOOKED_AT = 20
#: Columns of gymdata's own tables.
_OWN = frozenset({"rollout_id", "comparison_id", "policy_hash", "rollout_index"})
_OURS = _OWN | {"messages", "run_id", "group_id", "task_id", "status", "stop_reason", "n_turns", "temperature"}
#: Keys of which a task has one, and keys that no task has.
TASK = {"prompt", "responses_create_params"}
ANSWERED = {"turns", "response", "chosen", "completion", "completions"}
#: Columns of published text data, of which ``collect`` makes tasks.
_TEXTS = {"prompt", "conversations", "instruction", "question", "problem", "query", "turns"}
#: Parts of the names of columns that hold answers, or what no policy here sees or hears.
_NO_TASKS = ("response", "completion", "chosen", "reject", "output", "answers", "image", "audio", "video")
#: Faulty lines that are named each.
_FEW = 3


def is_own(names: Collection[str]) -> bool:
    """Whether columns are those of a table of gymdata's; others have a ``pair_id``, too."""
    return not _OWN.isdisjoint(names) or {"pair_id", "run_id"}.issubset(names)


class ForeignFormat:
    """What reading needs to know of a format; formats are subclasses of ``gymdata.formats.Format``."""

    #: What a file of this format holds, for messages: "ATIF trajectories". Empty: it is never imported.
    content: ClassVar[str] = ""
    #: The table that its rows are of: "rollouts" or "pairs", or, of one that is exported, "experiences".
    table: ClassVar[str] = "rollouts"
    #: Whether it is answers or preferences as text, without token ids.
    holds_text: ClassVar[bool] = False
    #: Whether its rows have the token ids: those formats are asked first.
    holds_ids: ClassVar[bool] = False
    #: Whether commands read its rollouts without an import.
    read_in_place: ClassVar[bool] = False
    #: Whether rows of other formats have its columns as well: those are asked before.
    general: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def recognise(self, value: Any) -> bool:
        """Whether a JSON value, a row or a whole file, is in this format."""
        raise NotImplementedError

    def refused(self, source: Source, expected: str) -> DataError:
        """The error of a command that reads ``expected`` from a file of this format."""
        scored = "train-sft and train-kto take it as it is, and train-dpo where it has rewards"
        trains = f"; {scored if self.table == 'rollouts' else 'train-dpo takes it as it is'}" * self.holds_text
        hint = f"`gymdata import {shlex.quote(str(source.path))} -o RUN` reads it{trains}"
        content = self.content + " as text" * self.holds_text
        return DataError(f"{source.path}: contains {content}, expected {expected}", hint=hint)

    def rollouts(self, source: Source) -> Iterator[RolloutRow]:
        """The rollouts rows of a file that is read in place (arrays are numpy, times are text)."""
        raise NotImplementedError


FORMATS = Registry[type[ForeignFormat]]("format", "gymdata.formats", "gymdata.formats")


def head(source: Source) -> list[bytes]:
    """The first rows of a file of JSON, each as a line."""
    return [line for _, line in islice(row_lines(source), _LOOKED_AT)]


def format_of(source: Source) -> ForeignFormat | None:
    """The format of a file, by its first rows or the one value that it is; None for gymdata's own, for one that is not
    known, and for a file that cannot be read."""
    if source.kind == "segment":
        return None
    try:
        for value in first_values(source):
            for form in _known():
                with contextlib.suppress(TypeError, LookupError, AttributeError):  # of another type than its format has
                    if form.recognise(value):
                        return form
            if isinstance(value, dict) and is_own(value):
                return None
    except (DataError, OSError, ValueError):  # Arrow's errors of a Parquet file are ValueErrors
        # The reader reports what is wrong with the file.
        return None
    return None


def _known() -> Iterator[ForeignFormat]:
    """The formats that are read, those with token ids first; NeMo Gym's rows are told before other formats are loaded."""
    yield FORMATS.alone("nemo-gym").object("nemo-gym")
    known = [entry.object(entry.name) for entry in FORMATS if entry.object.content]
    yield from sorted(known, key=lambda form: (not form.holds_ids, form.general))


def refuse_foreign(path: Path, expected: str) -> None:
    """Raises DataError for a file in another project's format, of a command that reads ``expected``."""
    try:
        (source,) = resolve(path)
    except DataError:  # a kind of file that only tasks have
        return
    if (foreign := format_of(source)) is not None:
        raise foreign.refused(source, expected)


def refuse_unknown(source: Source, expected: str) -> None:
    """Raises DataError for a file of JSON in whose first rows there is no column of gymdata's own, with their keys, and for
    lines of which none is JSON: what is wrong with each of them would say nothing. Tasks are named by their reader.
    ``expected``: what the command reads."""
    if source.kind != "jsonl":
        return
    rows, faults = list[Any](), list[ValueError]()
    for _, line in islice(row_lines(source), _LOOKED_AT):
        try:
            rows.append(decode(line))
        except ValueError as error:
            faults.append(error)
    if len(faults) > _FEW and not any(isinstance(row, (dict, list)) for row in rows):
        why = f"its first {len(faults)} lines are no JSON ({faults[0]})"
        raise DataError.unreadable(source.path, why, "is it a whole file of JSON lines, or one JSON value?")
    unknown = [row for row in rows if isinstance(row, dict) and row and _OURS.isdisjoint(row)]
    are_tasks = all(row.keys() & TASK and not row.keys() & ANSWERED for row in unknown)
    if unknown and len(unknown) == len(rows) and not faults and not are_tasks:
        hint = f"its first row has the keys {abridged(unknown[0])}; `gymdata docs your-data` lists the formats that are read"
        hint += instead(unknown[0], source.path)
        raise DataError(f"{source.path}: contains rows of no known format, expected {expected}", hint=hint)


def instead(row: Mapping[Any, Any], path: Path) -> str:
    """What ends the hint about a row of no known format: that ``collect`` reads it, or what it lacks; empty where neither is
    sure."""
    of_gym = "responses_create_params" in row
    if not of_gym and any(word in str(name) for name in row for word in _NO_TASKS):
        return ""
    messages = row["messages"] if isinstance(row.get("messages"), list) else []
    is_asked = any(isinstance(message, dict) and message.get("role") == "user" for message in messages)
    prompts = [
        isinstance(value, str) or (isinstance(value, list) and value != [] and isinstance(value[0], (str, dict)))
        for name, value in row.items()
        if name in _TEXTS
    ]
    if of_gym or is_asked or any(prompts):
        samples = f"; prompts alone are tasks: `gymdata collect {path} -m MODEL -o RUN` samples answers"
        return samples + ("; `import` and train-sft read `answer`, too" if isinstance(row.get("answer"), str) else "")
    if "text" in row and row.keys().isdisjoint(_TEXTS):
        return "; text alone has no prompt and no answer to train"
    return ""


def first_values(source: Source) -> Iterator[Any]:
    """The values of the first lines of a file. Of Parquet the first rows, without nulls, but none of gymdata's own."""
    if source.kind == "parquet":
        from gymdata.store.parquet import parquet_file

        with parquet_file(source.path) as file:
            own = is_own(file.schema_arrow.names)
            batch = None if own else next(file.iter_batches(_LOOKED_AT), None)
            rows = batch.to_pylist() if batch is not None else []
        yield from ({name: cell for name, cell in row.items() if cell is not None} for row in rows)
        return
    for _, value, _ in islice(values_of(source), _LOOKED_AT):
        if not isinstance(value, ValueError):
            # After a list the first of its rows.
            yield from (value, *(value[:_LOOKED_AT] if isinstance(value, list) else ()))
