"""Tables beside the rollouts: pairs, comparisons, scores, experiences, audits. Keys are in memory, rows on disk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import GymdataError
from gymdata.query.views import find_files
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import TABLES, Table
from gymdata.store.partial_reads import RowGroup, row_groups
from gymdata.store.paths import RunFacts, Source, find_run_json, read_facts, resolve
from gymdata.store.tables import read_table

#: The columns by which rows of a table are found and listed.
KEYS = {
    "pairs": ["pair_id", "run_id", "task_id", "chosen_rollout_id", "rejected_rollout_id", "margin", "weight", "source",
              "score"],
    "comparisons": ["comparison_id", "group_id", "task_id", "rollout_i", "rollout_j", "judge_idx", "score_1", "score_2",
                    "ranking", "status", "judge"],
    "experiences": ["rollout_id", "group_id", "sequence_index", "reward", "weight"],
    "audit": ["rollout_id"],
    "scores": ["rollout_id", "name", "value", "status"],
}  # fmt: skip


def sources_of(path: Path, table: Table) -> list[Source]:
    """The files of ``table`` under a path argument; none where a path holds another table."""
    if path.is_dir():
        return resolve(path, table)
    return find_files([path]).by_table.get(table.name, [])


@dataclass(frozen=True)
class Rows:
    """A table of several files. ``keys``: its key columns, all rows."""

    keys: pa.Table
    files: tuple[Path, ...]
    groups: tuple[RowGroup, ...]
    #: The first row of each file, and of each group.
    file_starts: Any
    group_starts: Any

    def __len__(self) -> int:
        return int(self.keys.num_rows)

    def where(self, column: str, value: str) -> list[int]:
        """The rows with this text in a key column."""
        if not len(self):
            return []
        rows: list[int] = np.flatnonzero(pc.equal(self.keys[column], value).to_numpy()).tolist()
        return rows

    def file(self, number: int) -> Path:
        return self.files[self.file_number(number)]

    def file_number(self, number: int) -> int:
        return int(np.searchsorted(self.file_starts, number, side="right")) - 1

    def span(self, file: int) -> range:
        """The rows of a file."""
        return range(*np.append(self.file_starts, len(self))[file : file + 2].tolist())

    def row(self, number: int) -> RolloutRow:
        return self.rows([number])[0]

    def rows(self, numbers: Sequence[int]) -> list[RolloutRow]:
        """Some rows (rising), all columns; a group of them is read once."""
        which = np.searchsorted(self.group_starts, numbers, side="right") - 1
        rows: list[RolloutRow] = []
        for group in np.unique(which).tolist():
            indices = np.asarray(numbers)[which == group] - int(self.group_starts[group])
            rows += self.groups[group].load().take(pa.array(indices)).to_pylist()
        return rows


class Stages:
    """The tables of stages under several paths."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._guard = threading.Lock()
        self._held: dict[str, tuple[Any, Rows]] = {}

    def rows(self, name: str) -> Rows:
        """The table ``name``, empty if missing. Raises DataError for a damaged or changed file."""
        table = TABLES[name]
        sources = {s.path.resolve(): s for path in self.paths for s in sources_of(path, table)}
        state = tuple((file, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sources)
        with self._guard:
            entry = self._held.get(name)
        if entry is not None and entry[0] == state:
            return entry[1]
        parts, groups, file_starts, start = [], [], [], 0
        for file in sources:
            parts.append(read_table(file, table, KEYS[name]))
            groups += row_groups(file, table)
            file_starts.append(start)
            start += parts[-1].num_rows
        # A nullable column that a file lacks is null.
        keys = pa.concat_tables([table.schema.empty_table().select(KEYS[name]), *parts], promote_options="permissive")
        sizes = np.cumsum([0, *(group.rows for group in groups)])[:-1]
        rows = Rows(keys, tuple(s.path for s in sources.values()), tuple(groups), np.array(file_starts), sizes)
        with self._guard:
            self._held[name] = (state, rows)
        return rows

    def has(self, name: str) -> bool:
        """Whether there is a table of that name; also True when that cannot be determined, so that its page shows the
        error."""
        try:
            return any(sources_of(path, TABLES[name]) for path in self.paths)
        except (GymdataError, OSError):
            return True


def facts_of(path: Path) -> RunFacts:
    """The run.json that describes a path; empty if it is missing or cannot be read."""
    try:
        run_json = find_run_json(path)
        return read_facts(run_json) if run_json is not None else {}
    except (GymdataError, OSError):
        return {}
