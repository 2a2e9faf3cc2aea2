"""What the tasks of a path are: identity by content, for whatever pairs tasks of two paths by their id.

Invariant: a task is all messages before the model's first one, the tools, and the fields that its check needs; two tasks of
one id that differ in any of these are two tasks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, GymdataError, counted
from gymdata.rollouts.messages import TaskRow, loads, object_of, split_messages
from gymdata.rollouts.ragged import list_parts
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, Table
from gymdata.store.lineage import lineage, parent_paths, rollouts_behind
from gymdata.store.paths import resolve
from gymdata.store.tables import scan_batches

_COLUMNS = ("task_id", "n_turns", "prompt_hash", "messages", "tools", "task")
_TEXTS = ("role", "content", "tool_calls", "tool_call_id", "name")
#: Fields of a task's row that hold its given messages.
_ASKED = frozenset(["prompt", "messages", "conversations", "responses_create_params"])
#: Its id, and the tools, which are compared as the rollouts had them.
_UNCOMPARED = ("task_id", "tools")
_SYSTEM = ("system", "developer")
_BATCH = 4_096
_NAMED = 3


@dataclass(frozen=True, slots=True)
class TaskContent:
    """``prompts``: hashes of its rollouts' given messages and tools, equal in a process; ``row``: the task's row."""

    prompts: frozenset[int]
    row: TaskRow

    def difference(self, other: TaskContent) -> str | None:
        """What makes the other another task: ``messages or tools``, or a field that both rows have with other values."""
        if self.prompts != other.prompts:
            return "messages or tools"
        names = (name for name in self.row.keys() & other.row.keys() if name not in _UNCOMPARED and name[:1] != "_")
        return next((name for name in sorted(names) if self.row[name] != other.row[name]), None)


def given_hashes(messages: pa.ListArray, without: tuple[str, ...] = ()) -> npt.NDArray[np.uint64]:
    """A hash of each list of messages, (n,), ``without`` some roles; equal ones have equal hashes in a process."""
    import polars as pl

    offsets, flat = list_parts(messages)
    frame = pl.DataFrame({name: pl.Series(pl.from_arrow(flat.field(name)), dtype=pl.String) for name in _TEXTS})
    hashes = frame.with_columns(pl.all().fill_null("")).hash_rows().to_numpy()
    counts = ~frame["role"].fill_null("").is_in(without).to_numpy()
    # Each message's number among those that count, from 1: their order counts, too.
    before = np.append(0, np.cumsum(counts))
    numbers = before[1:] - np.repeat(before[offsets[:-1]], np.diff(offsets))
    sums = np.append(np.uint64(0), np.cumsum(hashes * (2 * numbers + 1).astype(np.uint64) * counts.astype(np.uint64)))
    return np.asarray(sums[offsets[1:]] - sums[offsets[:-1]], np.uint64)


def task_contents(path: str | Path) -> dict[str, TaskContent]:
    """The content of each task that has rollouts under ``path``, by task_id."""
    prompts, rows = dict[str, set[int]](), dict[str, str]()
    for batch in scan_batches(path, ROLLOUTS, _COLUMNS, _BATCH):
        opening = split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())[0]
        # A row holds the system prompt that belongs to its task; another one is a setting of the run.
        asked = np.array(
            [not _ASKED.isdisjoint(object_of(loads(row or "{}"))) for row in batch.column("task").to_pylist()]
        )
        hashes = np.where(asked, given_hashes(opening, _SYSTEM), given_hashes(opening))
        # Without messages a prompt is its ids.
        ids = pc.fill_null(batch.column("prompt_hash"), 0).to_numpy().view(np.uint64)
        hashes = np.where(np.diff(list_parts(opening)[0]) > 0, hashes, ids)
        tools = {text: hash(_canonical(text)) for text in pc.unique(batch.column("tools")).to_pylist()}
        columns = (batch.column(name).to_pylist() for name in ("task_id", "tools", "task"))
        for prompt, task, offered, row in zip(hashes.tolist(), *columns, strict=True):
            prompts.setdefault(task, set()).add(hash((prompt, tools[offered])))
            rows.setdefault(task, row)
    return {task: TaskContent(frozenset(prompts[task]), object_of(loads(rows[task] or "{}"))) for task in prompts}


def trained_tasks(model: str | Path, run: str | Path) -> int:
    """How many tasks of ``run`` are in the data that ``model`` and the models behind it were trained on, as far as their
    parents lead to it: by their given messages without the system's, which a training may have had otherwise."""
    trained = set[int]()
    for facts in lineage(model):
        stage = str(facts.get("stage"))
        for parent in parent_paths(facts) if stage.startswith("train-") else ():
            with contextlib.suppress(GymdataError):  # moved or deleted, or a model
                of_pairs = stage in ("train-dpo", "train-reward") and resolve(parent, PAIRS)
                sources = [(parent, PAIRS)] if of_pairs else [(path, ROLLOUTS) for path in rollouts_behind(parent)]
                trained |= {question for path, table in sources for _, question in _questions(path, table)}
    return len({task for task, question in _questions(run, ROLLOUTS) if question in trained}) if trained else 0


def _questions(path: str | Path, table: Table) -> Iterator[tuple[str, int]]:
    """The task and the hash of the given messages of each row."""
    columns = ("task_id", "prompt") if table is PAIRS else ("task_id", "n_turns", "messages")
    for batch in scan_batches(path, table, columns, _BATCH):
        opening = batch.column(columns[-1])
        if table is not PAIRS:
            opening = split_messages(opening, batch.column("n_turns").to_numpy())[0]
        hashes = given_hashes(opening, _SYSTEM).tolist()
        # Without a message nothing is asked.
        yield from (
            (task, hashed) for task, hashed in zip(batch.column("task_id").to_pylist(), hashes, strict=True) if hashed
        )


def _canonical(text: str | None) -> str:
    tools = loads(text) if text else None
    return json.dumps(tools, sort_keys=True) if tools else ""


def other_contents(first: Mapping[str, TaskContent], second: Mapping[str, TaskContent]) -> dict[str, str]:
    """Task → what differs, for the tasks of both whose content is not the same, by id."""
    common = sorted(first.keys() & second.keys())
    return {task: why for task in common if (why := first[task].difference(second[task])) is not None}


def named(others: Mapping[str, str]) -> str:
    """``5 tasks have other content under the same id (answer of t1; messages or tools of t2, …)``."""
    listed = [f"{why} of {task}" for task, why in others.items()]
    first = "; ".join(listed[:_NAMED]) + (", …" if len(listed) > _NAMED else "")
    return f"{counted(len(others), 'task has', 'tasks have')} other content under the same id ({first})"


def refuse_others(first: str | Path, second: str | Path, others: Mapping[str, str]) -> None:
    """Raises DataError where tasks of two paths have other content under one id. ``others``: of ``other_contents``."""
    if others:
        raise DataError(f"{second}: {named(others)} than in {first}", hint="compare runs of the same task file")
