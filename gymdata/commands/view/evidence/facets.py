"""Which values the fields of a selection's tasks have, with their counts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.report.rollouts import codes_of, fields_to_split_by
from gymdata.commands.view.evidence.selection import Bar, Query, Rows, text_of_condition
from gymdata.commands.view.evidence.tables import Snapshot
from gymdata.rollouts.messages import loads, object_of
from gymdata.rollouts.schema import ROLLOUTS

#: Values of one field that are listed, the most common first.
_MOST = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A field of tasks with few values: ``codes`` says which of ``values`` each rollout has, −1 for none."""

    name: str
    values: tuple[Any, ...]
    codes: npt.NDArray[np.int32]

    def of(self, row: int) -> Any:
        """The value of a rollout; None without one."""
        return None if self.codes[row] < 0 else self.values[self.codes[row]]

    def condition(self, code: int) -> str:
        """The condition that keeps a value."""
        value = self.values[code]
        if isinstance(value, bool):
            return f"{self.name} == {str(value).lower()}"
        return f"{self.name} == {text_of_condition(value) if isinstance(value, str) else value}"


def facets(snapshot: Snapshot, query: Query, rows: Rows) -> dict[str, list[Bar]]:
    """For each field how many of the selected ``rows`` have each of its values, the most common first, and their mean
    reward. A bar's ``where`` is the filter after a click.

    A field in which all of the selection is alike has none, unless the filter does not name it: that all failures are of
    one kind is worth a line.
    """
    listed, rewards_of = {}, pc.fill_null(snapshot.table["reward"], math.nan).to_numpy()[rows]
    for column in task_fields(snapshot):
        codes, bars = column.codes[rows], []
        for code in np.unique(codes[codes >= 0]).tolist():
            rewards = rewards_of[codes == code]
            scored = rewards[np.isfinite(rewards)]
            mean = float(scored.mean()) if len(scored) else None
            where = query.also(column.condition(code))
            bars.append(Bar(str(column.values[code]), len(rewards), where, mean))
        only = column.name not in query.where and len(rows) < len(column.codes)
        if len(bars) > 1 or (bars and (only or (codes < 0).any())):
            listed[column.name] = sorted(bars, key=lambda bar: (-bar.count, bar.label))
    return listed


@lru_cache(maxsize=1)
def task_fields(snapshot: Snapshot) -> list[Column]:
    """The fields by which tasks can be told apart at a glance."""
    batches = list(snapshot.batches(ROLLOUTS, ("task_id", "task")))
    if not batches:
        return []
    table = pa.Table.from_batches(batches)
    # Each text is decoded once. Tasks of two runs may have the same id, and other fields; those of one, the same fields.
    task_of, texts = codes_of(table["task"])
    tasks = [object_of(loads(text)) for text in texts.to_pylist()]
    of_tasks = np.unique(np.stack([codes_of(table["task_id"])[0], task_of]), axis=1)[1]
    columns = []
    for name in fields_to_split_by([tasks[code] for code in of_tasks.tolist()], _MOST):
        if not re.fullmatch(r"\w+", name):
            continue
        of_task = [task.get(name) for task in tasks]
        values = sorted({value for value in of_task if isinstance(value, (str, int))}, key=str)
        code = {value: n for n, value in enumerate(values)}
        codes = np.array([code.get(value, -1) if isinstance(value, (str, int)) else -1 for value in of_task], np.int32)
        # While a run is collected, rows may have been added since.
        columns.append(Column(f"task.{name}", tuple(values), codes[task_of][: len(snapshot)]))
    return columns
