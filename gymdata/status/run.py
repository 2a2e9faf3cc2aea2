"""``gymdata status``: how far a run or every unfinished run below a folder is, how fast it goes on, and what failed.

Invariants: nothing is written and no lock is taken, so that a run can be watched while it is written; what is shown is
counted from rows, failures and metrics that are on disk, not from what a process says of itself.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from gymdata.errors import DataError, OutsideError
from gymdata.ls.output import Output, Unfinished
from gymdata.ls.run import below, cells_of, output_of, unfinished_output
from gymdata.public import Report, Row, path_of
from gymdata.remote.places import mirrored
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store.journal import read_failures
from gymdata.store.lines import read_metrics
from gymdata.store.lock import LOCK, holder_of, is_held
from gymdata.store.paths import RUN_JSON, RunFacts, read_facts
from gymdata.store.run_json import moment
from gymdata.store.tables import read_table
from gymdata.urls import Address, address

__all__ = ["RunStatus", "StatusReport", "status"]

#: The speed is that of the last rows: those that ended in this many seconds before the latest.
WINDOW_S = 600.0
_COLUMNS = ("started_at", "duration_s", "n_generated_tokens")
_METRICS, _STATE = "metrics.jsonl", "state.json"
#: Figures of a training that are shown.
_FIGURES = ("loss", "accuracy", "kl/sampler")
_HOST = os.uname().nodename
#: Seconds between tries to tell a webhook, and of one try.
_PAUSES_S, _REQUEST_S = (1.0, 5.0, 20.0), 30.0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One output. ``state``: as in ``ls``, or ``on HOST`` where another machine holds its lock; ``done`` of ``wanted``:
    ``unit`` (rollouts, steps, epochs or rows; None where it is not known); ``per_minute``, ``tokens_per_s``: over the last
    ``WINDOW_S`` seconds of work; ``eta_s``: seconds left at that speed, while it is written; ``failures``: attempts that
    failed, by kind; ``figures``: the newest of a training; ``away_s``: for how long no server can be reached, while it
    is waited for; ``changed``: when its files changed last, ISO 8601, UTC."""

    path: str
    kind: str
    state: str
    unit: str
    done: int | None
    wanted: int | None
    per_minute: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    failures: dict[str, int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    stage: str | None = None
    servers: list[str] = field(default_factory=list)
    away_s: float | None = None
    changed: str = ""

    @property
    def is_running(self) -> bool:
        return self.state == "being written" or self.state.startswith("on ")

    def rows(self) -> list[Row]:
        """The lines that have something to say."""
        of = f" of {self.wanted:,} ({(self.done or 0) / self.wanted:.0%})" if self.wanted else ""
        changed = dt.datetime.fromisoformat(self.changed) if self.changed else dt.datetime.now(dt.UTC)
        age = _duration(max(0.0, (dt.datetime.now(dt.UTC) - changed).total_seconds()))
        lines: list[Row | None] = [
            ("state", self.state),
            None if self.stage is None else ("now", self.stage),
            None if self.done is None else (self.unit, f"{self.done:,}{of}"),
            None if self.per_minute is None else ("speed", self._speed()),
            None if self.eta_s is None else ("left", _duration(self.eta_s)),
            None
            if self.away_s is None
            else ("server", f"none can be reached, for {_duration(self.away_s)}; the run waits"),
            ("failed attempts", ", ".join(f"{kind} {n:,}" for kind, n in self.failures.items()))
            if self.failures
            else None,
            *((name, f"{value:.4g}") for name, value in self.figures.items()),
            ("servers", ", ".join(self.servers)) if self.servers else None,
            ("last change", f"{changed:%Y-%m-%d %H:%M:%S} UTC ({age} ago)") if self.changed else None,
        ]
        return [line for line in lines if line is not None]

    def _speed(self) -> str:
        tokens = f", {self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else ""
        return f"{self.per_minute:,.1f} {self.unit}/min{tokens}"


@dataclass(frozen=True, slots=True, repr=False)
class StatusReport(Report):
    """The outputs at or below ``path``: of a folder without a run.json of its own those that are not complete.
    ``disk_free``: bytes; None of a run on an object store."""

    path: str
    runs: list[RunStatus]
    disk_free: int | None

    @property
    def ok(self) -> bool:
        """Every output is complete or is being written."""
        return all(run.is_running or run.state == "complete" for run in self.runs)

    def rows(self) -> list[Row]:
        return [("runs", len(self.runs)), ("disk free", self.disk_free)]


def status(
    path: str | Path = ".", *, notify: str | None = None, stalled_after: float = 600.0, every: float = 15.0
) -> StatusReport:
    """How far the run at ``path`` is, or every run below it that is not complete; of a run on an object store, as of its
    last upload. Nothing is written.

    ``notify``: a URL. Then this waits, looking again ``every`` seconds, until no run is being written any more, or none of
    them has made progress for ``stalled_after`` seconds, and posts what it returns there as JSON, with ``event``: "ended" or
    "stalled", and ``text``, one line that says it (chat services show it).

    Raises DataError where there is nothing, OutsideError("webhook") when the URL does not take it.
    """
    report, event = _status(path), "ended"
    if notify is None:
        return report
    webhook = address(notify, "--notify", "https://hooks.example.org/x")
    progress, since = _progress(report), time.monotonic()
    while any(run.is_running for run in report.runs):
        if time.monotonic() - since >= stalled_after:
            event = "stalled"
            break
        time.sleep(every)
        report = _status(path)
        if (now := _progress(report)) != progress:
            progress, since = now, time.monotonic()
    _post(webhook, report, event)
    return report


def _progress(report: StatusReport) -> list[tuple[str, str, int | None, str]]:
    return [(run.path, run.state, run.done, run.changed) for run in report.runs]


def _post(webhook: Address, report: StatusReport, event: str) -> None:
    """Tell a webhook. Raises OutsideError."""
    states = [f"{run.path}: {run.state}" + (f", {run.done:,} {run.unit}" if run.done else "") for run in report.runs]
    text = f"gymdata: {report.path} {'has ended' if event == 'ended' else 'makes no progress'}"
    body = json.dumps({"event": event, "text": "; ".join([text, *states]), **report.to_dict()}).encode()
    request = urllib.request.Request(webhook.url(), body, {"content-type": "application/json"})
    for pause in (*_PAUSES_S, None):
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S):
                return
        except (OSError, ValueError) as error:
            if pause is None:
                hint = "is the URL right? `gymdata status` without --notify shows the same"
                raise OutsideError("webhook", f"{webhook}: {error}", hint=hint, retryable=True) from error
            time.sleep(pause)


def _status(path: str | Path) -> StatusReport:
    top = Path(path_of(path, "status", "the path of a run folder or of a folder of runs"))
    if not top.is_dir():
        raise DataError.missing_path(top, "a run folder or a folder of runs")
    if (top / RUN_JSON).is_file() or (top / _STATE).is_file():
        top_run = _loop(top) if (top / _STATE).is_file() else _run(top, top / RUN_JSON)
        runs = [replace(top_run, path=str(path))]
        runs += [run for run in _below(top) if top_run.kind in ("finetune", "sweep") and run.is_running]
    else:
        runs = [run for run in _below(top) if run.state != "complete"]
    return StatusReport(str(path), runs, shutil.disk_usage(top).free if mirrored(top) is None else None)


def _below(top: Path) -> list[RunStatus]:
    """Every run, loop and unfinished output below a folder."""
    loops, runs = dict[Path, RunStatus](), list[RunStatus]()
    for output in below(top):
        folder = output.path if isinstance(output, Unfinished) else output.parent
        for above in folder.parents:
            if above != top and above.is_relative_to(top) and (above / _STATE).is_file() and above not in loops:
                loops[above] = _loop(above)
        if folder == top or (folder / _STATE).is_file():
            continue
        runs.append(_of(unfinished_output(top, output)) if isinstance(output, Unfinished) else _run(top, output))
    return [*loops.values(), *runs]


def _of(output: Output) -> RunStatus:
    """What is known of any output."""
    total = output.rows if output.state == "complete" else None
    return RunStatus(output.path, output.kind, output.state, "rows", output.rows, total, changed=output.changed)


def _run(top: Path, run_json: Path) -> RunStatus:
    shown = _of(output_of(top, run_json))
    if shown.state == "damaged":
        return shown
    facts = read_facts(run_json)
    if shown.state == "interrupted" and (host := holder_of(run_json.parent / LOCK).get("host")) not in (None, _HOST):
        shown = replace(shown, state=f"on {host}")
    elif shown.state == "interrupted" and mirrored(run_json):
        shown = replace(shown, state="on another machine, or interrupted")
    if shown.kind in ("collect", "record"):
        return _of_rollouts(shown, run_json.parent, facts)
    if shown.kind == "sweep":
        # Those of run.json are from the start.
        steps, cells = len((facts.get("config") or {}).get("steps") or ()), cells_of(run_json.parent)
        done = 0
        for cell in cells:
            # A cell that is not begun has none; of a damaged one the sweep itself says what to do.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                done += len(json.loads((cell / "cell.json").read_bytes())["done"]) == steps
        running = ", ".join(cell.name for cell in cells if is_held(cell)) or None
        return replace(shown, unit="cells", done=done, wanted=(facts.get("counts") or {}).get("cells"), stage=running)
    return _of_training(shown, run_json.parent, facts) if shown.kind.startswith("train-") else shown


def _of_rollouts(shown: RunStatus, run: Path, facts: RunFacts) -> RunStatus:
    """A run of rollouts: how many there are, and the speed of the last ones."""
    extent, attempts = facts.get("extent") or {}, facts.get("attempts") or []
    tasks, per_task = extent.get("tasks"), extent.get("num_rollouts")
    total = tasks * per_task if isinstance(tasks, int) and isinstance(per_task, int) else None
    table = read_table(run, ROLLOUTS, _COLUMNS)
    done, per_minute, tokens_per_s = table.num_rows, None, None
    outages, away_s = _outages(attempts[-1] if attempts else {}, is_running=shown.is_running)
    if done:
        started = table["started_at"].cast(pa.int64()).to_numpy() / 1e6
        ended = started + table["duration_s"].to_numpy()
        began = [moment(attempt.get("started_at")) for attempt in attempts[-1:]]
        latest = float(ended.max())
        # The time between two attempts is no work, nor is that without a server.
        since = max([latest - WINDOW_S, *(t.timestamp() for t in began if t is not None)])
        recent = ended >= since
        since = max(since, float(started[recent].min(initial=latest)))  # nor is the start of the engine
        work = latest - since - sum(max(0.0, min(end, latest) - max(start, since)) for start, end in outages)
        if work > 0 and recent.any():
            per_minute = 60.0 * int(recent.sum()) / work
            tokens_per_s = float(table["n_generated_tokens"].to_numpy()[recent].sum()) / work
    left = None if total is None or not per_minute else max(0, total - done) / per_minute * 60.0
    endpoint = (attempts[-1].get("operation") or {}).get("endpoint") if attempts else None
    return replace(
        shown,
        unit="rollouts",
        done=done,
        wanted=total,
        per_minute=per_minute,
        tokens_per_s=tokens_per_s,
        eta_s=left if shown.is_running and away_s is None else None,
        away_s=away_s,
        # What an outage ended is made again, and counts as no attempt.
        failures=dict(Counter(str(f.get("kind")) for f in read_failures(run) if f.get("counts", True))),
        servers=[] if endpoint is None else [endpoint] if isinstance(endpoint, str) else list(endpoint),
    )


def _outages(attempt: RunFacts, *, is_running: bool) -> tuple[list[tuple[float, float]], float | None]:
    """Beginning and end of each outage of servers in an attempt, in seconds since the epoch, and the seconds of the one
    that lasts."""
    spans, away_s, clock = list[tuple[float, float]](), None, time.time()
    for outage in attempt.get("outages") or []:
        if (began := moment(outage.get("began_at"))) is not None:
            lasts = outage.get("seconds") is None
            away_s = max(0.0, clock - began.timestamp()) if lasts and is_running else None
            end = clock if lasts else began.timestamp() + float(outage["seconds"])
            spans.append((began.timestamp(), end))
    return spans, away_s


def _of_training(shown: RunStatus, folder: Path, facts: RunFacts) -> RunStatus:
    """A training: its steps and newest figures, from metrics.jsonl."""
    rows = read_metrics(folder / _METRICS)
    if not rows:
        return replace(shown, unit="steps", done=None, wanted=None)
    last = rows[-1]
    step, epoch = int(last.get("step") or 0), float(last.get("epoch") or 0.0)
    # All settings are known once it has ended; until then those that its command named.
    settings = facts.get("settings") or (facts.get("config") or {}).get("trainer") or {}
    epochs, most = settings.get("num_train_epochs"), settings.get("max_steps")
    total = facts.get("steps") if shown.state == "complete" else None
    if total is None and isinstance(most, int) and most > 0:
        total = most
    elif total is None and epoch and isinstance(epochs, (int, float)):
        total = round(step / epoch * epochs)
    # Each process counts seconds from its own beginning: what it did is what came after the last row of the one before.
    seconds = [float(row.get("elapsed_s") or 0.0) for row in rows]
    resumed = max((n for n in range(1, len(rows)) if seconds[n] < seconds[n - 1]), default=0)
    before = int(rows[resumed - 1].get("step") or 0) if resumed else 0
    per_minute = 60.0 * (step - before) / seconds[-1] if seconds[-1] else None
    left = None if total is None or not per_minute else max(0, total - step) / per_minute * 60.0
    newest = {name: value for row in rows for name, value in row.items() if name in _FIGURES}
    return replace(
        shown,
        unit="steps",
        done=step,
        wanted=total,
        per_minute=per_minute,
        tokens_per_s=last.get("tokens_per_s"),
        eta_s=left if shown.is_running else None,
        figures=newest,
    )


def _loop(folder: Path) -> RunStatus:
    """A finetuning run: its epochs, and the stage that runs."""
    state = json.loads((folder / _STATE).read_bytes())
    running = state.get("running") or {}
    stages = [stage for epoch in state.get("epochs", {}).values() for stage in epoch.values()]
    is_running = is_held(folder)
    ended = state.get("status")
    return RunStatus(
        path=str(folder),
        kind="finetune",
        state="being written" if is_running else "interrupted" if ended in ("running", "failed") else "complete",
        unit="stages",
        done=sum(stage.get("state") == "completed" for stage in stages),
        wanted=None,
        stage=f"epoch {running['epoch']}, {running['stage']}" if is_running and running else None,
        changed=dt.datetime.fromtimestamp((folder / _STATE).stat().st_mtime, dt.UTC).isoformat(timespec="seconds"),
    )


def _duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
