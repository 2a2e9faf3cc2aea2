"""How far an output is that is not complete: what is done, how fast it goes, how long the rest takes, and what failed.

Invariants: nothing is written and no lock is taken, so that a run can be watched while it is written; what is shown is
counted from rows, failures and metrics that are on disk, not from what a process says of itself.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store.journal import read_failures
from gymdata.store.lines import read_metrics
from gymdata.store.paths import RunFacts
from gymdata.store.run_json import moment
from gymdata.store.tables import read_table

#: The rate is that of the last rows: those that ended in this many seconds before the latest.
WINDOW_S = 600.0
_METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """``done`` of ``wanted`` (None where that is not known): ``unit`` (rollouts or steps); ``per_minute``,
    ``tokens_per_s``: over the last ``WINDOW_S`` seconds of work; ``eta_s``: seconds left at that rate, while it is
    written; ``failures``: attempts that failed, by kind; ``away_s``: for how long no server can be reached, while it is
    waited for."""

    unit: str
    done: int
    wanted: int | None = None
    per_minute: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    failures: dict[str, int] = field(default_factory=dict)
    away_s: float | None = None

    def __str__(self) -> str:
        of = f" of {self.wanted:,} ({self.done / self.wanted:.0%})" if self.wanted else ""
        failed = ", ".join(f"{kind} {n:,}" for kind, n in self.failures.items())
        parts = [
            f"{self.done:,}{of} {self.unit}",
            None if self.per_minute is None else f"{self.per_minute:,.1f} {self.unit}/min",
            f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else None,
            None if self.eta_s is None else f"{_duration(self.eta_s)} left",
            None if self.away_s is None else f"no server can be reached for {_duration(self.away_s)}, the run waits",
            f"failed attempts: {failed}" if failed else None,
        ]
        return "; ".join(filter(None, parts))


def progress_of(folder: Path, facts: RunFacts, *, is_running: bool) -> RunProgress | None:
    """How far the collection, recording or training in ``folder`` is; None for other commands, which are repeated whole or
    have outputs of these kinds, and before there is anything to count. Raises DataError for what cannot be read."""
    stage = str(facts.get("stage"))
    shown: RunProgress | None = None
    if stage in ("collect", "record"):
        shown = _rollouts(folder, facts, is_running=is_running)
    elif stage.startswith("train-"):
        shown = _steps(folder, facts)
    if shown is None or not is_running or shown.wanted is None or not shown.per_minute or shown.away_s is not None:
        return shown
    return replace(shown, eta_s=max(0, shown.wanted - shown.done) / shown.per_minute * 60.0)


def _rollouts(run: Path, facts: RunFacts, *, is_running: bool) -> RunProgress:
    extent, attempt = facts.get("extent") or {}, ((facts.get("attempts") or [])[-1:] or [{}])[0]
    tasks, per_task = extent.get("tasks"), extent.get("num_rollouts")
    table = read_table(run, ROLLOUTS, ("started_at", "duration_s", "n_generated_tokens"))
    outages, away_s = find_outages(attempt, is_running=is_running)
    started = table["started_at"].cast(pa.int64()).to_numpy() / 1e6
    ended = started + table["duration_s"].to_numpy()
    latest, began = float(ended.max(initial=0.0)), moment(attempt.get("started_at"))
    # The time between two attempts is no work, nor is the start of the engine, nor the time without a server.
    since = max(latest - WINDOW_S, began.timestamp() if began is not None else 0.0)
    recent = ended >= since
    since = max(since, float(started[recent].min(initial=latest)))
    work = latest - since - sum(max(0.0, min(end, latest) - max(start, since)) for start, end in outages)
    is_known = work > 0 and bool(recent.any())
    return RunProgress(
        unit="rollouts",
        done=table.num_rows,
        wanted=tasks * per_task if isinstance(tasks, int) and isinstance(per_task, int) else None,
        per_minute=60.0 * int(recent.sum()) / work if is_known else None,
        tokens_per_s=float(table["n_generated_tokens"].to_numpy()[recent].sum()) / work if is_known else None,
        # What an outage ended is made again, and counts as no attempt.
        failures=dict(Counter(str(f.get("kind")) for f in read_failures(run) if f.get("counts", True))),
        away_s=away_s,
    )


def find_outages(attempt: RunFacts, *, is_running: bool) -> tuple[list[tuple[float, float]], float | None]:
    """Beginning and end of each outage of servers in an attempt, in seconds since the epoch, and the seconds of the one
    that lasts."""
    spans, away_s, clock = list[tuple[float, float]](), None, time.time()
    for outage in attempt.get("outages") or []:
        if (began := moment(outage.get("began_at"))) is not None:
            lasts = outage.get("seconds") is None
            if lasts and is_running:
                away_s = max(away_s or 0.0, clock - began.timestamp())
            end = clock if lasts else began.timestamp() + float(outage["seconds"])
            spans.append((began.timestamp(), end))
    return spans, away_s


def _steps(folder: Path, facts: RunFacts) -> RunProgress | None:
    """Of a training, from metrics.jsonl."""
    rows = read_metrics(folder / _METRICS)
    if not rows:
        return None
    step, epoch = int(rows[-1].get("step") or 0), float(rows[-1].get("epoch") or 0.0)
    # All settings are known once it has ended; until then those that its command named.
    settings = facts.get("settings") or (facts.get("config") or {}).get("trainer") or {}
    epochs, most, wanted = settings.get("num_train_epochs"), settings.get("max_steps"), None
    if isinstance(most, int) and most > 0:
        wanted = most
    elif epoch and isinstance(epochs, (int, float)):
        wanted = round(step / epoch * epochs)
    # Each process counts seconds from its own beginning: what it did is what came after the last row of the one before.
    seconds = [float(row.get("elapsed_s") or 0.0) for row in rows]
    resumed = max((n for n in range(1, len(rows)) if seconds[n] < seconds[n - 1]), default=0)
    before = int(rows[resumed - 1].get("step") or 0) if resumed else 0
    per_minute = 60.0 * (step - before) / seconds[-1] if seconds[-1] else None
    return RunProgress("steps", step, wanted, per_minute, rows[-1].get("tokens_per_s"))


def _duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
