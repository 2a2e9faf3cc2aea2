"""Which rollouts a page shows: filter boxes and conditions in the language of ``gymdata filter``, order, pages, groups."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.filter.columns import TEXTS, evaluate
from gymdata.commands.filter.conditions import Expression, connection
from gymdata.commands.report.rollouts import Rewards, codes_of
from gymdata.commands.report.sampling import mixed
from gymdata.commands.view.evidence.tables import Snapshot
from gymdata.errors import GymdataError, UsageError
from gymdata.rollouts.schema import AGENTS
from gymdata.stats import paired_difference_ci

PAGE_ROWS = 50
PAGE_GROUPS = 25
SORTS = (
    "reward",
    "task_id",
    "n_turns",
    "n_breaks",
    "n_context_tokens",
    "n_generated_tokens",
    "duration_s",
    "started_at",
)
#: Columns of the list besides the task, and those shown without a choice; a field of tasks is one, too, as ``task.NAME``.
COLUMNS = (
    "run",
    "prompt",
    "answer",
    "reward",
    "parts",
    "status",
    "turns",
    "breaks",
    "context",
    "generated",
    "time",
    "id",
)
_SHOWN = ("run", "prompt", "answer", "reward", "parts", "status", "turns", "generated")
#: Up to this many distinct rewards have a bar each.
_BARS = 12
_BINS = 20
_BOXES = ("text", "task", "status", "min", "max", "breaks", "mixed", "run")
#: Columns that are known before a rollout is sampled: runs stay comparable when selected by them.
_POLICY = ("policy", "policy_hash", "policy_version", "temperature")
_GIVEN = frozenset(("run_id", "task_id", "group_id", "rollout_index", "n_rollouts", *_POLICY))
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Query:
    """The query of a page's address. ``where``: a condition; the others are boxes, empty when not used."""

    where: str = ""
    text: str = ""
    task: str = ""
    status: str = ""
    min: str = ""
    max: str = ""
    breaks: str = ""
    mixed: str = ""
    run: str = ""
    columns: str = ""
    sort: str = ""
    down: bool = False
    groups: bool = False
    page: int = 1
    #: A line for each order and column that there is not; the query is without them.
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, params: Mapping[str, str], offered: Sequence[str] = COLUMNS) -> Query:
        """The query of an address. ``offered``: the columns that a list can have."""
        sort = params.get("sort", "")
        columns = [name for name in params.get("columns", "").split(",") if name]
        shown = [name for name in columns if name in (*offered, "task", "run")]
        unknown = [UsageError.unknown_choice("columns", name, offered) for name in columns if name not in shown]
        unknown += [UsageError.unknown_choice("sort", sort, SORTS)] if sort and sort not in SORTS else []
        return cls(
            params.get("where", "").strip(),
            **{name: params.get(name, "").strip() for name in _BOXES},
            columns=",".join(shown),
            sort=sort if sort in SORTS else "",
            down=params.get("down") == "1",
            groups=params.get("by") == "group",
            page=page_of(params),
            unknown=tuple(map(str, unknown)),
        )

    def conditions(self) -> list[str]:
        """The boxes and the condition as conditions of ``gymdata filter``."""
        text = text_of_condition(self.text)
        clauses = [
            f"({' or '.join(f'contains({name}, {text})' for name in TEXTS)})" if self.text else "",
            f"contains(task_id, {text_of_condition(self.task)})" if self.task else "",
            f"status == {text_of_condition(self.status)}" if self.status else "",
            f"run_id == {text_of_condition(self.run)}" if self.run else "",
            f"reward >= {self.min}" if self.min else "",
            f"reward <= {self.max}" if self.max else "",
            "n_breaks > 0" if self.breaks else "",
            "min_reward < max_reward" if self.mixed else "",
            self.where,
        ]
        return [text for text in clauses if text]

    @property
    def filtered(self) -> bool:
        """Whether it leaves anything out."""
        return bool(self.conditions())

    @property
    def problem(self) -> str | None:
        """The message for an invalid box; None without one."""
        for name, value in (("the least reward", self.min), ("the highest reward", self.max)):
            try:
                wrong = bool(value) and not math.isfinite(float(value))
            except ValueError:
                wrong = True
            if wrong:
                return f"{name}: got {value!r}, expected a number such as 0.5"
        return None

    def outcomes(self) -> list[str]:
        """The criteria that are known only after a rollout was sampled. Runs selected by these are not comparable."""
        criteria: list[str] = []
        for text in self.conditions():
            with contextlib.suppress(GymdataError):
                names = Expression(text, "filter").names()
                criteria += [name for name in names if name not in _GIVEN and not name.startswith("task.")]
        return list(dict.fromkeys(criteria))

    def also(self, condition: str) -> str:
        """``where`` with one more condition, once."""
        if not self.where or self.where == condition:
            return condition
        return self.where if self.where.endswith(f") and {condition}") else f"({self.where}) and {condition}"

    def address(self, **changes: Any) -> str:
        """The address of this query with some parts changed; from its first page unless that is named."""
        other = replace(self, **{"page": 1, **changes})
        parts = {"where": other.where, **{name: getattr(other, name) for name in _BOXES}, "sort": other.sort}
        parts |= {"columns": other.columns, "down": "1" if other.down else "", "by": "group" if other.groups else ""}
        parts["page"] = str(other.page) if other.page > 1 else ""
        query = urlencode({key: value for key, value in parts.items() if value})
        return f"/?{query}" if query else "/"

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns of the list."""
        return tuple(self.columns.split(",")) if self.columns else _SHOWN

    def with_column(self, name: str) -> str:
        """The address that shows a column, or hides it."""
        shown = [column for column in self.shown if column != name]
        return self.address(columns=",".join(shown if name in self.shown else [*shown, name]) or "task", page=self.page)

    def sorted_by(self, column: str) -> str:
        """The address that sorts by a column, or turns its order round."""
        return self.address(sort=column, down=not self.down if self.sort == column else column != "task_id")


def page_of(params: Mapping[str, str]) -> int:
    """Which page of a list an address names, from 1."""
    text = params.get("page", "1")
    return max(1, int(text)) if text.isdecimal() and len(text) < 9 else 1


def page_slice(page: int, n_rows: int, size: int) -> tuple[int, int, slice]:
    """The page to show of a list, the number of its pages, and the rows on it; for a page beyond the last one, the last."""
    pages = max(1, -(-n_rows // size))
    page = min(page, pages)
    return page, pages, slice((page - 1) * size, page * size)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the reward histogram: its rewards, how many rollouts have them, and the condition that keeps these."""

    label: str
    count: int
    where: str
    #: The mean reward, for values of a column.
    mean: float | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The rollouts that a query keeps: their rows in order, and figures over all of them. ``error``: the reason when
    there are none."""

    rows: Rows
    error: str | None = None
    mean: float | None = None
    scored: int = 0
    groups: int = 0
    mixed: int = 0
    breaks: int = 0
    tokens: int = 0
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of a selection. ``difference``: its reward less that of the run ``against``, by task, on ``shared`` tasks,
    with its 95 % interval; None where no run before it has some of its tasks."""

    run_id: str
    rollouts: int
    mean: float | None
    groups: int
    mixed: int
    breaks: int
    shared: int = 0
    difference: tuple[float, float, float] | None = None
    against: str | None = None


def compare_runs(snapshot: Snapshot, rows: Rows) -> list[RunFigures]:
    """The runs of a selection, in reading order, each against the first that has some of its tasks, on these; none where it
    is of one run."""
    codes, is_mixed = groups_of(snapshot)
    rows = np.sort(rows)
    table = snapshot.table.select(["run_id", "task_id", "reward", "n_breaks"]).take(pa.array(rows))
    of_row, names = codes_of(table["run_id"].cast(pa.string()))
    earlier: dict[str, dict[str, float]] = {}
    stats = []
    for code, run in enumerate(names.to_pylist() if len(names) > 1 else []):
        of_run = table.filter(pa.array(of_row == code))
        scored = Rewards.of(of_run)
        tasks = scored.by_task()
        mean = float(scored.value.mean()) if len(scored.value) else None
        against = next((other for other, of_other in earlier.items() if tasks.keys() & of_other.keys()), None)
        first = earlier[against] if against is not None else {}
        common = [task for task in tasks if task in first]
        difference = paired_difference_ci([first[t] for t in common], [tasks[t] for t in common]) if common else None
        present = np.unique(codes[rows[of_row == code]])
        breaks, mixed = int((of_run["n_breaks"].to_numpy() > 0).sum()), int(is_mixed[present].sum())
        stats.append(
            RunFigures(run, scored.rollouts, mean, len(present), mixed, breaks, len(common), difference, against)
        )
        earlier[run] = tasks
    return stats


def command_of(snapshot: Snapshot, query: Query, selection: Selection) -> str:
    """The ``gymdata filter`` command that keeps what the query shows; empty if there is none, or nothing to keep."""
    if selection.error is not None or not query.filtered:
        return ""
    conditions = [word for text in query.conditions() for word in ("--where", text)]
    words = map(str, ["gymdata", "filter", *snapshot.paths, *conditions, "-o", "kept"])
    # Conditions have single quotes: a word with them is in double ones where these change nothing.
    return " ".join(f'"{w}"' if "'" in w and not re.search(r'["$`\\!]', w) else shlex.quote(w) for w in words)


def select(snapshot: Snapshot, query: Query) -> Selection:
    """The rollouts that pass all conditions of ``query``, in its order."""
    try:
        rows = _passing(snapshot, query)
    except GymdataError as error:
        return Selection(np.zeros(0, np.int64), str(error))
    names = {"reward", "n_breaks", "n_context_tokens", "n_generated_tokens", *([query.sort] if query.sort else [])}
    table = snapshot.table.select(sorted(names)).take(pa.array(rows))
    rewards = pc.fill_null(table["reward"], math.nan).to_numpy()
    finite = np.isfinite(rewards)
    codes, is_mixed = groups_of(snapshot)
    present = np.unique(codes[rows])
    if query.sort:
        key = [(query.sort, "descending" if query.down else "ascending", "at_end")]
        rows = rows[pc.sort_indices(table.select([query.sort]), sort_keys=key).to_numpy()]
    return Selection(
        rows,
        mean=float(rewards[finite].mean()) if finite.any() else None,
        scored=int(finite.sum()),
        groups=len(present),
        mixed=int(is_mixed[present].sum()),
        breaks=int((table["n_breaks"].to_numpy() > 0).sum()),
        tokens=int(sum(pc.sum(table[name]).as_py() or 0 for name in ("n_context_tokens", "n_generated_tokens"))),
        bars=_bars(rewards[finite], int((~finite).sum())),
    )


def _passing(snapshot: Snapshot, query: Query) -> Rows:
    if query.problem is not None:
        raise UsageError(query.problem)
    texts = query.conditions()
    if not texts or not len(snapshot):
        return np.arange(len(snapshot))
    expressions = {f"where_{k}": Expression(text, "filter") for k, text in enumerate(texts)}
    with connection() as con:
        evaluate(con, expressions, snapshot.paths, lambda names: snapshot.batches(AGENTS, names))
        passing = " AND ".join(expressions)
        rows: Rows = con.sql(f"SELECT row FROM rows WHERE {passing} ORDER BY row").to_arrow_table()["row"].to_numpy()
    # The texts of all rollouts may have been read.
    pa.default_memory_pool().release_unused()
    return rows


@lru_cache(maxsize=1)
def groups_of(snapshot: Snapshot) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """The group of each rollout as a number, and of each group whether its rewards differ, whatever a filter keeps."""
    codes, _ = codes_of(snapshot.table["group_id"])
    return codes, mixed(pc.fill_null(snapshot.table["reward"], math.nan).to_numpy(), codes)


def _bars(rewards: npt.NDArray[np.float64], without: int) -> tuple[Bar, ...]:
    """The histogram: a bar for each reward where there are few, else bins of equal width; and one for none at all."""
    values, counts = np.unique(rewards, return_counts=True)
    bars = []
    if len(values) <= _BARS:
        bars = [
            Bar(_number(v), int(n), f"reward == {v!r}") for v, n in zip(values.tolist(), counts.tolist(), strict=True)
        ]
    else:
        counts, edges = np.histogram(rewards, _BINS)
        for k, n in enumerate(counts.tolist()):
            low, high = float(edges[k]), float(edges[k + 1])
            upper = "<=" if k == _BINS - 1 else "<"
            bars.append(Bar(f"{_number(low)} to {_number(high)}", n, f"reward >= {low!r} and reward {upper} {high!r}"))
    return (*bars, *([Bar("none", without, "reward is null")] if without else []))


def _number(value: float) -> str:
    return f"{value:.4g}"


def text_of_condition(value: str) -> str:
    """Text as the language of conditions quotes it."""
    return "'" + value.replace("'", "''") + "'"
