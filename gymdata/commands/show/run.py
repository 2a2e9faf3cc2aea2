"""Which rollouts or pair to show, and all that there is to see of each: its row and its violations."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gymdata.checks.violations import Violation
from gymdata.commands.show.rollout import parsed, violations
from gymdata.commands.show.settings import FIRST, ShowConfig
from gymdata.errors import DataError, MissingExtraError, UsageError
from gymdata.models._transformers import reader_of
from gymdata.public import Figures, Report, Row, path_of
from gymdata.rollouts.messages import Message, RolloutRow
from gymdata.rollouts.next_prompt import common_length
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.scores.chosen import default_score, scores_of, unscored_hint
from gymdata.store import read_table, scan_batches
from gymdata.store.formats import tables_in
from gymdata.store.lineage import vocabulary
from gymdata.store.partial_reads import rows_at
from gymdata.store.paths import find_run_json, read_facts
from gymdata.store.reading import warn

if TYPE_CHECKING:
    from gymdata.checks.breaks import Reading

_KEYS = ("rollout_id", "task_id", "rollout_index")
#: The shortest prefix of an id that identifies it.
_SHORTEST = 4


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """One rollouts row (JSON texts parsed) and its violations, in order. ``score``: name and value of a score that it was
    chosen by."""

    row: RolloutRow
    violations: list[Violation] = field(default_factory=list)
    score: tuple[str, float] | None = None

    def to_dict(self) -> Figures:
        """The object of ``--json``: the row, and ``violations``."""
        chosen_by = {} if self.score is None else {"score": dict(zip(("name", "value"), self.score, strict=True))}
        return {**self.row, **chosen_by, "violations": [v.as_dict() for v in self.violations]}


@dataclass(frozen=True, slots=True)
class ShownPair:
    """One pairs row (JSON texts parsed), and where its sides part: ``fork_message`` counts the messages after the prompt
    that both have, ``fork_token`` the ids after the prompt's that both have."""

    row: RolloutRow
    fork_message: int
    fork_token: int

    def to_dict(self) -> Figures:
        """The object of ``--json``."""
        return {**self.row, "fork_message": self.fork_message, "fork_token": self.fork_token}


@dataclass(frozen=True, repr=False)
class Shown(Report):
    """The selected rollouts, or one pair. ``total``: how many there are to choose from; ``by_default``: nothing was
    chosen; ``reading``: decodes ids, if a tokenizer is known."""

    rollouts: list[ShownRollout]
    pair: ShownPair | None
    total: int
    by_default: bool
    reading: Reading | None = None

    def to_dict(self) -> Figures:
        """The object of ``--json``."""
        if self.pair is not None:
            return {"pair": self.pair.to_dict(), "total": self.total}
        return {"rollouts": [rollout.to_dict() for rollout in self.rollouts], "total": self.total}

    def rows(self) -> list[Row]:
        """How many are shown, and of how many."""
        return [("shown", len(self.rollouts) if self.pair is None else 1), ("of", self.total)]


def show(
    path: str | Path, rollout_id: str | None = None, *, config: ShowConfig | None = None, **settings: Any
) -> Shown:
    """The selected rollouts at ``path``, or the pair. Without a choice: the first ``limit`` rollouts, or the first pair of
    a path that has no rollouts.

    ``rollout_id`` may be the beginning of an id. Settings are those of ``ShowConfig``. Raises UsageError for two choices,
    DataError where there is nothing to show.
    """
    path = path_of(path, "show")
    config = ShowConfig.called_with(show, config, settings)
    choices = {"ROLLOUT_ID": rollout_id} | {
        f"--{name}": getattr(config, name) or None for name in ("task", "best", "worst", "random", "pair")
    }
    chosen = [name for name, value in choices.items() if value is not None]
    if rollout_id is not None and config.limit is not None:
        chosen.append(config.called("limit"))
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other", hint="choose rollouts in one way")
    run_json = find_run_json(path)
    reader = reader_of(config.tokenizer, {} if run_json is None else read_facts(run_json))
    if config.pair is not None or (not chosen and tables_in(path).keys() & {"rollouts", "pairs"} == {"pairs"}):
        if config.limit is not None:
            name = config.called("limit")
            raise UsageError(
                f"{name}: got {config.limit}, but pairs are shown one at a time", hint="choose it with --pair"
            )
        pair, total = _pair(path, config.pair)
        return Shown([], pair, total, not chosen, _read(reader))
    keys: dict[str, list[Any]] = {name: [] for name in _KEYS}
    for batch in scan_batches(path, ROLLOUTS, _KEYS, 65_536):
        for name in _KEYS:
            keys[name] += batch.column(name).to_pylist()
    if not keys["rollout_id"]:
        raise DataError.empty(path, "rollouts")
    score = None  # the total reward
    if config.best or config.worst:
        score, note = default_score([path], config.reward)
        if note:
            warn(note)
    rows = _choose(path, keys, rollout_id, config, score)
    rollouts = _load(path, keys, rows, None if reader is None else lambda: _read(reader))
    if score is not None:
        values = _scores(path, score)
        rollouts = [replace(rollout, score=(score, values[row])) for rollout, row in zip(rollouts, rows, strict=True)]
    return Shown(rollouts, None, len(keys["rollout_id"]), not chosen, _read(reader))


def _read(reader: Any) -> Reading | None:
    """The tokenizer's texts; None where the tokenizer's library is not installed: ids are shown then."""
    with contextlib.suppress(MissingExtraError):
        return None if reader is None else reader()
    return None


def _choose(
    path: str | Path, keys: Mapping[str, list[Any]], rollout_id: str | None, config: ShowConfig, score: str | None
) -> list[int]:
    ids = keys["rollout_id"]
    if rollout_id is not None:
        return [_row_of(path, "rollout_id", rollout_id, ids)]
    if config.task is not None:
        rows = [row for row, name in enumerate(keys["task_id"]) if name == config.task]
        if not rows:
            raise DataError.unknown_id(path, "task_id", config.task, sorted(set(keys["task_id"])))
        return sorted(rows, key=lambda row: (keys["rollout_index"][row], ids[row]))[: config.limit]
    if config.best or config.worst:
        # A run in progress may have grown since.
        rewards = _scores(path, score)[: len(ids)]
        scored = [row for row, reward in enumerate(rewards) if reward is not None]
        if not scored:
            raise DataError(f"{path}: no rollout has a reward", hint=unscored_hint([path]))
        sign = -1 if config.best else 1
        return sorted(scored, key=lambda row: (sign * rewards[row], keys["task_id"][row], ids[row]))[
            : config.limit or 1
        ]
    if config.random is not None:
        drawn: list[int] = np.random.default_rng(config.seed).permutation(len(ids))[: config.random].tolist()
        return sorted(drawn)
    return list(range(min(config.limit or 1, len(ids))))


def _scores(path: str | Path, name: str | None) -> list[Any]:
    """Per rollout its score, None where it has none."""
    rollouts = read_table(path, ROLLOUTS, ("rollout_id", "reward", "rewards"))
    scores: list[Any] = scores_of([path], rollouts, name)[1].to_pylist()
    return scores


def _row_of(path: str | Path, column: str, prefix: str, ids: Sequence[str]) -> int:
    """The row of an id, or of the only one that begins with ``prefix``."""
    if prefix in ids:
        return ids.index(prefix)
    rows = [row for row, name in enumerate(ids) if name.startswith(prefix)] if len(prefix) >= _SHORTEST else []
    if len({ids[row] for row in rows}) > 1:
        raise UsageError(
            f"{column} {prefix!r}: {len(rows):,} begin with it, such as {ids[rows[0]]} and {ids[rows[1]]}",
            hint="give more of it",
        )
    if not rows:
        raise DataError.unknown_id(path, column, prefix, ids)
    return rows[0]


def _load(path: str | Path, keys: Mapping[str, list[Any]], rows: Sequence[int], reader: Any) -> list[ShownRollout]:
    """The rollouts in the order of ``rows``, which count over all files."""
    order = np.argsort(rows)
    rising = [rows[k] for k in order]
    parts = list(rows_at(path, ROLLOUTS, np.array(rising)))
    if [name for part in parts for name in part["rollout_id"].to_pylist()] != [keys["rollout_id"][n] for n in rising]:
        raise DataError(f"{path}: changed while it was read", hint="run it again")
    table = pa.concat_tables(parts, promote_options="default").take(pa.array(np.argsort(order)))
    vocab, shown = vocabulary(path), list[ShownRollout]()
    for number, row in zip(rows, table.to_pylist(), strict=True):
        (batch,) = table.slice(len(shown), 1).combine_chunks().to_batches()
        for name in ("task", "tools", "extra"):
            row[name] = parsed(row[name])
        row["messages"] = [_message(m) for m in row["messages"]]
        shown.append(ShownRollout(row, violations(batch, number, vocab, reader)))
    return shown


def _message(message: Message) -> Message:
    fields = {key: value for key, value in message.items() if value is not None}
    return fields | {key: parsed(fields[key]) for key in ("tool_calls", "extra") if key in fields}


def _pair(path: str | Path, pair: str | None) -> tuple[ShownPair, int]:
    ids: list[str] = []
    for batch in scan_batches(path, PAIRS, ["pair_id"]):
        ids += batch.column("pair_id").to_pylist()
    if not ids:
        raise DataError(f"{path}: has no pairs", hint=f"`gymdata pairs {path}` builds some")
    index = 0 if pair in (None, FIRST) else _row_of(path, "pair_id", pair, ids)
    (row,) = next(rows_at(path, PAIRS, np.array([index]))).to_pylist()
    for name in ("prompt", "chosen", "rejected"):
        row[name] = [_message(m) for m in row[name]]
    row["tools"] = parsed(row.get("tools") or "[]")
    sides = [[{**m, "turn": None} for m in row[name]] for name in ("chosen", "rejected")]
    return ShownPair(row, common_length(*sides), common_length(row["chosen_ids"], row["rejected_ids"])), len(ids)
