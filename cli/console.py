"""What commands share: flags that mean the same everywhere, tables, progress, and the ending of a command.

What always holds: data goes to stdout, everything else to stderr; on a terminal progress is a bar, elsewhere a line every
few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; flags beat it.")]
SetFlag = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set any setting by its key.")]
OverwriteFlag = Annotated[bool, typer.Option("--overwrite", help="Start again, replacing what is there.")]
SeedFlag = Annotated[int | None, typer.Option("--seed", help="Makes everything that is drawn repeatable.")]

_UNWRAPPED = 1_000


def emit_json(value: Any) -> None:
    """One JSON value on stdout; non-finite numbers as the strings "NaN", "Infinity" and "-Infinity"."""
    import json

    sys.stdout.write(json.dumps(_finite(value), ensure_ascii=False, default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def facts(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """A short two-column table, which is what a command ends with."""
    from rich import box
    from rich.table import Table

    grid = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False, padding=(0, 1)
    )
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, show(value))
    _console().print(grid)


def grid(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """A table with a header; numbers are aligned to the right."""
    from rich import box
    from rich.table import Table

    rows = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], (int, float, type(None))) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(show(value) for value in row))
    _console().print(table)


def _console() -> Any:
    """Tables are as wide as a terminal; elsewhere nothing is wrapped, so that a path in a file or a pipe stays whole."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_UNWRAPPED)


def show(value: object) -> str:
    """A value as people read it: thousands separated, four significant digits, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("[", r"\[")


def note(text: str) -> None:
    """A line for whoever watches, on stderr."""
    sys.stderr.write(text + "\n")


class Watch:
    """Progress of a long stage (implements ports.Progress): a bar on a terminal, else a line every few seconds.

    ``update`` takes running totals: done, total, and any of tokens, failures, reward (a mean).
    """

    def __init__(self, what: str, *, every_s: float = 5.0) -> None:
        self._what = what
        self._every_s = every_s
        self._counts: dict[str, float] = {}
        self._began = self._said = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Watch:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[of]}"),
                TextColumn("{task.fields[facts]}"), TimeRemainingColumn(compact=True), console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task(self._what, total=None, of="", facts="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._counts:
            self._say()

    def update(self, **counts: float) -> None:
        if not self._counts:
            # Start-up (loading an engine) is not part of the rate.
            self._began = time.monotonic()
        self._counts.update(counts)
        if self._bar is not None and self._task is not None:
            done, total = self._counts.get("done", 0), self._counts.get("total")
            self._bar.update(self._task, completed=done, total=total, of=self._of(), facts=self._facts())
        elif time.monotonic() - self._said >= self._every_s:
            self._say()

    def message(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            note(text)

    def _say(self) -> None:
        self._said = time.monotonic()
        note(f"{self._what} {self._of()}  {self._facts()}")

    def _of(self) -> str:
        done, total = self._counts.get("done", 0), self._counts.get("total")
        return f"{done:,.0f}/{total:,.0f}" if total else f"{done:,.0f}"

    def _facts(self) -> str:
        # The first batch comes at once and is no rate.
        passed = max(time.monotonic() - self._began, 1.0)
        parts = [f"{60 * self._counts.get('fresh', self._counts.get('done', 0)) / passed:,.0f}/min"]
        if "tokens" in self._counts:
            parts.append(f"{self._counts['tokens'] / passed:,.0f} tok/s")
        if self._counts.get("reward") is not None and "reward" in self._counts:
            parts.append(f"reward {self._counts['reward']:.3f}")
        if self._counts.get("failures"):
            parts.append(f"{self._counts['failures']:,.0f} failed")
        return "  ".join(parts)
