"""Figures of the rollouts of a path: rewards, pass@k, lengths, endings, tools, log-probabilities, and how it went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.report.sampling import Sample, sample
from gymdata.public import Figures
from gymdata.rollouts.messages import TaskRow, loads, object_of
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turn_columns import from_arrow
from gymdata.scores.chosen import with_score
from gymdata.stats import mean_ci, pass_at_k_by_task, wilson
from gymdata.store import read_failures, scan_batches
from gymdata.store.lineage import masked_rollouts, refuse_duplicates
from gymdata.store.run_json import moment
from gymdata.store.tables import read_coded

Numbers = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int32]
_TEXTS = ("task_id", "group_id", "status", "stop_reason")
_COLUMNS = (
    *_TEXTS,
    *("reward", "rewards", "n_turns", "n_breaks"),
    *("n_context_tokens", "n_generated_tokens", "started_at", "duration_s"),
)
#: Bins of a histogram, and points of a curve over time.
_BINS, _POINTS = 20, 24
_BATCH = 4_096
#: Below this, log-probabilities share one bin.
_LEAST_LOGPROB = -10.0


@dataclass(frozen=True, slots=True)
class Rewards:
    """The scored rollouts of a path: ``task`` (n,) places in ``names``, ``value`` (n,) finite rewards. ``rollouts``: of all,
    scored or not."""

    task: Codes
    value: Numbers
    rollouts: int
    names: pa.Array

    @classmethod
    def of(cls, table: pa.Table) -> Rewards:
        """From the columns task_id and reward."""
        values = pc.fill_null(table["reward"], math.nan).to_numpy()
        finite = np.isfinite(values)
        tasks, names = codes_of(table["task_id"])
        return cls(tasks[finite], values[finite], table.num_rows, names)

    @property
    def binary(self) -> bool:
        """Every reward is 0 or 1."""
        return len(self.value) > 0 and bool(np.isin(self.value, (0.0, 1.0)).all())

    def by_task(self) -> dict[str, float]:
        scored, codes = np.unique(self.task, return_inverse=True)
        means = np.bincount(codes, weights=self.value) / np.bincount(codes)
        return dict(zip(self.names.take(pa.array(scored)).to_pylist(), means.tolist(), strict=True))

    def summary(self) -> Figures:
        """Mean with its 95 % interval: Wilson's for zeros and ones with one rollout per task, else a bootstrap over
        tasks."""
        n, tasks = len(self.value), len(np.unique(self.task))
        if not n:
            return {"n": 0, "tasks": 0, "rollouts": self.rollouts, "mean": None, "ci95": None, "min": None, "max": None}
        mean, low, high = mean_ci(self.value, self.task)
        if self.binary and tasks == n:
            low, high = wilson(int(self.value.sum()), n)
        return {
            "n": n,
            "tasks": tasks,
            "rollouts": self.rollouts,
            "mean": mean,
            "ci95": interval(low, high),
            "min": float(self.value.min()),
            "max": float(self.value.max()),
        }


def codes_of(texts: pa.ChunkedArray) -> tuple[Codes, pa.Array]:
    """A number for each text, and the text of each number."""
    encoded = texts.dictionary_encode().combine_chunks()
    return encoded.indices.to_numpy(zero_copy_only=False), encoded.dictionary


def interval(low: float, high: float) -> list[float] | None:
    """The bounds, and None where the data support none. With equal tasks the bootstrap has no variance: equal bounds
    would suggest certainty."""
    return None if math.isnan(low) or math.isnan(high) or low == high else [float(low), float(high)]


def share(count: int, n: int) -> dict[str, object]:
    """A proportion with Wilson's 95 % interval."""
    return {"count": count, "n": n, "rate": count / n if n else None, "ci95": interval(*wilson(count, n))}


def histogram(values: npt.NDArray[Any], bins: int = _BINS) -> list[Figures]:
    """Counts by equal steps. Few values at equal distances have an entry each, with ``low`` = ``high``; else ``high``
    belongs to the last bin only."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    distinct, counts = np.unique(values, return_counts=True)
    step = float(np.diff(distinct).min()) if len(distinct) > 1 else 1.0
    indices = (distinct - distinct[0]) / step
    if indices[-1] < bins and np.allclose(indices, np.round(indices), atol=1e-6):
        by_index = dict(zip(np.round(indices).astype(int).tolist(), zip(distinct, counts, strict=True), strict=True))
        entries = [(k, by_index.get(k, (distinct[0] + k * step, 0))) for k in range(round(indices[-1]) + 1)]
        return [{"low": float(value), "high": float(value), "count": int(n)} for _, (value, n) in entries]
    edges: npt.NDArray[Any] | int = bins
    if (values == np.round(values)).all():  # else some bins would have a whole number more than others
        step = np.ceil(np.ptp(values) / bins)
        edges = values.min() + step * np.arange(np.ceil(np.ptp(values) / step) + 1)
    counts, edges = np.histogram(values, edges)
    return _bins(edges, counts)


def _bins(edges: npt.NDArray[Any], counts: npt.NDArray[Any]) -> list[Figures]:
    ends = zip(edges[:-1], edges[1:], counts, strict=True)
    return [{"low": float(low), "high": float(high), "count": int(n)} for low, high, n in ends]


def figures(path: str | Path, threshold: float, score: str | None, kind: Sample | None, limit: int) -> Figures:
    """All of a path's rollouts, as the object of ``--json`` has it; ``rewards`` … ``examples``. ``score``: what counts as
    the reward; None for the total reward. ``kind`` and ``limit``: which rollouts are examples. Raises RefusedError (D701)
    for a rollout that is there twice."""
    table, _ = with_score([path], read_coded([path], ROLLOUTS, ("rollout_id", *_COLUMNS), _TEXTS), score)
    refuse_duplicates(table, [path])
    rewards = Rewards.of(table)
    lengths = {}
    for name, column in (("generated", "n_generated_tokens"), ("context", "n_context_tokens"), ("turns", "n_turns")):
        values = table[column].to_numpy()
        if len(values):
            low, half, high = (float(x) for x in np.quantile(values, (0.1, 0.5, 0.9)))
            lengths[name] = {
                "sum": int(values.sum()),
                "mean": float(values.mean()),
                "max": int(values.max()),
                "p10": low,
                "median": half,
                "p90": high,
                "histogram": histogram(values),
            }
    # How many groups differ in reward within themselves, and the means of all.
    grouped = (
        table.select(["group_id", "reward"])
        .filter(pc.fill_null(pc.is_finite(table["reward"]), False))
        .group_by("group_id")
        .aggregate([("reward", "min"), ("reward", "max"), ("reward", "mean"), ("reward", "count")])
    )
    several = grouped.filter(pc.greater(grouped["reward_count"], 1))
    mixed = int(pc.sum(pc.greater(several["reward_max"], several["reward_min"])).as_py() or 0)
    return {
        "rewards": {
            **rewards.summary(),
            "binary": rewards.binary,
            "histogram": histogram(rewards.value),
            "parts": _parts(table),
            "groups": {
                "n": grouped.num_rows,
                "of_several": several.num_rows,
                "mixed": mixed,
                "without_variance": several.num_rows - mixed,
                "means": histogram(grouped["reward_mean"].to_numpy()),
            },
        },
        "pass_at_k": pass_at_k(rewards, threshold),
        "lengths": lengths,
        "truncated": share(_counts(table["status"]).get("truncated", 0), table.num_rows),
        "stop_reasons": _counts(table["stop_reason"]),
        "masked": dict(Counter(masked_rollouts([path]).values())),
        "breaks": int(pc.sum(pc.greater(table["n_breaks"], 0)).as_py() or 0),
        **_of_turns(path),
        **_over_time(table, Path(path)),
        "examples": _examples(table, path, kind, limit),
    }


def _parts(table: pa.Table) -> Figures:
    lists = table["rewards"].combine_chunks()
    flat, owner = lists.flatten(), pc.list_parent_indices(lists)
    values = pc.fill_null(flat.field("value"), math.nan).to_numpy(zero_copy_only=False)
    of_name, names = codes_of(pa.chunked_array([flat.field("name")]))
    tasks = codes_of(table["task_id"])[0][owner.to_numpy()]
    parts = {}
    for code, name in sorted(enumerate(names.to_pylist()), key=lambda pair: pair[1]):
        mask = (of_name == code) & np.isfinite(values)
        mean, low, high = mean_ci(values[mask], tasks[mask]) if mask.any() else (math.nan,) * 3
        parts[name] = {"n": int(mask.sum()), "mean": None if math.isnan(mean) else mean, "ci95": interval(low, high)}
    return parts


def pass_at_k(rewards: Rewards, threshold: float) -> list[Figures]:
    """pass@k for 1, 2, 4, … up to the most rollouts that a task has, with 95 % intervals by task."""
    if not len(rewards.value):
        return []
    correct = rewards.value > threshold
    codes = np.unique(rewards.task, return_inverse=True)[1]
    n = np.bincount(codes)
    c = np.bincount(codes, weights=correct).astype(int)
    rows, k = [], 1
    while k <= int(n.max()):
        mean = pass_at_k_by_task(codes, correct, k)
        enough = n >= k
        estimates = [
            1.0 - math.comb(a - b, k) / math.comb(a, k)
            for a, b in zip(n[enough].tolist(), c[enough].tolist(), strict=True)
        ]
        _, low, high = mean_ci(estimates)
        if k == 1 and (n == 1).all():
            low, high = wilson(int(c.sum()), len(n))
        rows.append(
            {"k": k, "value": mean.value, "ci95": interval(low, high), "tasks": mean.n_tasks, "too_few": mean.too_few}
        )
        k *= 2
    return rows


def _of_turns(path: str | Path) -> Figures:
    """The figures from turns and messages, in one pass."""
    finish, results, errors = Counter[str](), Counter[str](), Counter[str]()
    edges = np.linspace(_LEAST_LOGPROB, 0.0, _BINS + 1)
    counts, tokens, total, odd = np.zeros(_BINS, np.int64), 0, 0.0, 0
    for batch in scan_batches(path, ROLLOUTS, ("turns", "messages"), _BATCH):
        evidence = from_arrow(batch, 0)
        reasons = batch.column(batch.schema.get_field_index("turns")).flatten().field("finish_reason")
        finish.update(_counts(reasons))
        logprobs = evidence.turns.logprobs.values.astype(np.float64)
        good = logprobs[np.isfinite(logprobs)]
        odd += len(logprobs) - len(good)
        tokens += len(good)
        total += float(good.sum())
        counts += np.histogram(np.clip(good, _LEAST_LOGPROB, 0.0), edges)[0]
        if (messages := evidence.messages) is not None:
            tools = np.flatnonzero(messages.tool_results)
            column = (
                batch.column(batch.schema.get_field_index("messages")).flatten().field("name").take(pa.array(tools))
            )
            names = [name or "" for name in column.to_pylist()]
            results.update(names)
            errors.update(name for name, bad in zip(names, messages.fails[tools].tolist(), strict=True) if bad)
    bins = _bins(edges, counts)
    mean = total / tokens if tokens else None
    return {
        "finish_reasons": dict(finish),
        "logprobs": {
            "tokens": tokens,
            "not_finite": odd,
            "mean": mean,
            "entropy": None if mean is None else -mean,
            "histogram": bins if tokens else [],
        },
        "tools": {
            **share(sum(errors.values()), sum(results.values())),
            "by_name": {name: share(errors[name], n) for name, n in sorted(results.items())},
        },
    }


def _over_time(table: pa.Table, path: Path) -> Figures:
    """Rollouts and tokens by when they ended, and what failed."""
    failures = list(read_failures(path)) if path.is_dir() else []
    kinds = Counter(str(record.get("kind")) for record in failures)
    began = table["started_at"].cast(pa.int64()).to_numpy()
    points: list[Figures] = []
    if len(np.unique(began)) > 1:
        # Seconds since the start: since 1970 they would have lost what is below a microsecond.
        start = int(began.min())
        ended = (began - start) / 1e6 + table["duration_s"].to_numpy()
        edges = np.linspace(0.0, ended.max(), _POINTS + 1)
        done = np.histogram(ended, edges)[0]
        tokens = np.histogram(ended, edges, weights=table["n_generated_tokens"].to_numpy())[0]
        times = [
            time.timestamp() - start / 1e6 for record in failures if (time := moment(record.get("at"))) is not None
        ]
        failed = np.histogram(np.array(times, np.float64), edges)[0]
        step = edges[1] - edges[0]
        points = [
            {"s": float(edge), "rollouts": int(a), "tokens_per_s": float(b / step), "failures": int(c)}
            for edge, a, b, c in zip(edges[1:], done, tokens, failed, strict=True)
        ]
    return {"over_time": points, "failures": {"n": len(failures), "by_kind": dict(kinds)}}


def _examples(
    table: pa.Table, path: str | Path, kind: Sample | None, limit: int
) -> dict[str, tuple[str, float | None]]:
    """Id and reward of each rollout of a sample; without one of the best, the worst and a typical rollout: of the median
    reward, and of the median length among equal."""
    sizes = table["n_generated_tokens"].to_numpy()
    values = pc.fill_null(table["reward"], math.nan).to_numpy()
    if kind is not None:
        chosen = sample(kind, limit, values, codes_of(table["group_id"])[0])
        ids = _least_ids(path, {f"{kind} {n}": chosen[n - 1 : n] for n in range(1, len(chosen) + 1)})
        rewards = [None if math.isnan(value) else value for value in values[chosen].tolist()]
        return {name: (rollout, reward) for (name, rollout), reward in zip(ids.items(), rewards, strict=True)}
    rows = np.flatnonzero(np.isfinite(values))
    if not len(rows):
        middle = np.argsort(sizes, kind="stable")[len(sizes) // 2 :][:1]
        typical = _least_ids(path, {"typical": middle}) if len(sizes) else {}
        return {name: (rollout, None) for name, rollout in typical.items()}
    by_length = float(np.median(sizes[rows]))

    def near(value: float) -> npt.NDArray[np.int64]:
        same = rows
        for apart in (np.abs(values - value), np.abs(sizes - by_length)):
            same = same[apart[same] == apart[same].min()]
        return same

    half = float(np.quantile(values[rows], 0.5, method="lower"))
    ends = {"best": float(values[rows].max()), "worst": float(values[rows].min()), "typical": half}
    ids = _least_ids(path, {name: near(value) for name, value in ends.items()})
    # With two kinds of reward the typical one is the best or the worst.
    first = {rollout: name for name, rollout in reversed(ids.items())}
    return {name: (rollout, ends[name]) for name, rollout in ids.items() if first[rollout] == name}


def _least_ids(path: str | Path, rows: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, str]:
    """The least id among the rollouts in some rows (rising)."""
    ids: dict[str, str] = {}
    start = 0
    for batch in scan_batches(path, ROLLOUTS, ("rollout_id",)):
        for name, of in rows.items():
            in_batch = of[np.searchsorted(of, start) : np.searchsorted(of, start + batch.num_rows)] - start
            if len(in_batch):
                least = pc.min(batch.column("rollout_id").take(pa.array(in_batch))).as_py()
                ids[name] = min(ids.get(name, least), least)
        start += batch.num_rows
    return {name: ids[name] for name in rows}


def _counts(column: Any) -> dict[str, int]:
    return {
        str(row["values"]): row["counts"] for row in pc.value_counts(column).to_pylist() if row["values"] is not None
    }


def task_fields(table: pa.Table) -> dict[str, TaskRow]:
    """Each task's row as an object, by task_id. ``table``: the columns task_id and task."""
    tasks: dict[str, TaskRow] = {}
    for name, text in zip(table["task_id"].to_pylist(), table["task"].to_pylist(), strict=True):
        if name not in tasks:
            tasks[name] = object_of(loads(text))
    return tasks


def prompt_of(task: TaskRow) -> str:
    """The beginning of a task's prompt, or of its last message; empty where its row has neither as text."""
    messages = task.get("prompt") or task.get("messages") or ""
    last = messages[-1] if isinstance(messages, list) else messages
    text = object_of(last).get("content") if isinstance(last, dict) else last
    return text[:200] if isinstance(text, str) else ""


def fields_to_split_by(tasks: Sequence[TaskRow], most: int = 12) -> list[str]:
    """Fields that divide tasks into a few kinds."""
    values: dict[str, set[Any]] = {}
    for task in tasks:
        for name, value in task.items():
            if isinstance(value, (str, int, bool)):
                values.setdefault(name, set()).add(value)
    return [name for name, distinct in values.items() if 2 <= len(distinct) <= min(most, max(2, len(tasks) // 4))]
