"""What commands print: tables, progress, JSON, and the ending of a command."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO, cast

from gymdata.errors import ACTS, printable, shown
from gymdata.progress import FIGURES, printed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from gymdata.public import Report

_typed: list[str] = []
_answers: list[int] = []


def command_words() -> list[str]:
    """The words of the command that ``main`` runs, as typed, for run.json."""
    return ["gymdata", *_typed]


def remember_command(words: Sequence[str]) -> None:
    """Called by ``main`` with its arguments."""
    _typed[:] = words
    _answers.clear()


def answered() -> bool:
    """Whether the command that ``main`` runs has printed its JSON."""
    return bool(_answers)


_UNWRAPPED = 1_000
_COMMAND = re.compile(r"`[^`\n]+`")
_NO_BREAK = "\N{NO-BREAK SPACE}"
#: No rate is shown for less time than this: early counts come in bursts.
_RATE_AFTER_S = 2.0
#: The time that a rate is taken over: rollouts end minutes apart.
_RATE_OVER_S = 600.0
#: The narrowest that a value may be beside its name.
_NARROWEST = 20
_BAR_WIDTH = 16
#: Between two lines of progress where there is no bar, and in the log where there is one.
_LINE_EVERY_S, _LOG_EVERY_S = 5.0, 60.0
#: Significant digits of a float in a summary.
DIGITS = 4


def emit_json(value: Any) -> None:
    """One JSON value on stdout; non-finite numbers as the strings "NaN", "Infinity" and "-Infinity"."""
    import json

    try:
        text = json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        from gymdata.store.lines import name_non_finite

        text = json.dumps(name_non_finite(value), ensure_ascii=False, default=str)
    text = shown(text)
    _answers.append(len(text))
    # Control characters for a terminal as JSON escapes: they only occur in strings.
    sys.stdout.write(ACTS.sub(lambda match: json.dumps(match[0])[1:-1], text) + "\n")


def say(text: str = "") -> None:
    """A line for people on stdout, with control characters for a terminal escaped."""
    print(printable(text))


def paragraphs(text: str) -> None:
    """Prose on stdout: wrapped at words on a terminal, elsewhere as it is."""
    print(folded(printable(text), sys.stdout, 0))


def folded(text: str, stream: TextIO, indent: int = 2) -> str:
    """``text`` with its lines broken between words where ``stream`` is a terminal, which would break them within words, and
    ``indent`` deeper where they continue. A command to copy stays whole, and elsewhere every line."""
    if not stream.isatty():
        return text
    import shutil
    import textwrap

    width, lines = shutil.get_terminal_size().columns, list[str]()
    for line in text.split("\n"):
        if len(line) <= width or line.lstrip(" →").startswith("gymdata "):
            lines.append(line)
            continue
        unbroken = _COMMAND.sub(lambda match: match[0].replace(" ", _NO_BREAK), line)
        deeper = " " * (len(line) - len(line.lstrip(" ")) + indent)
        parts = textwrap.wrap(unbroken, width, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False)
        lines.append("\n".join(parts).replace(_NO_BREAK, " "))
    return "\n".join(lines)


def finish(report: Report, text: str | Callable[[], None], *, json: bool, then: str = "") -> int:
    """The end of every command: prints the report as one JSON object, or as a summary table titled ``text``; if
    ``text`` is a function, that prints the summary. ``then``: the next command for what was written, whose path stands in
    the place of ``{}``. Returns the exit code."""
    printed("; ".join(f"{name.strip()} {show(value)}" for name, value in report.rows()).replace("\\[", "["))
    if json:
        emit_json(report.to_dict())
    elif callable(text):
        text()
    else:
        facts(text, report.rows())
    written = [str(value) for name, value in report.rows() if name.strip() == "written to"]
    if then and written and not json and not report.exit_code:
        say(f"next: gymdata {then.replace('{}', shlex.quote(written[0]))}")
    return report.exit_code


def facts(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """A short two-column table, the summary of a command."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table

    grid = Table(
        title=printable(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        show_header=False,
        padding=(0, 1),
    )
    shown = [(printable(name), show(value)) for name, value in rows]
    grid.add_column(style="dim", overflow="fold")
    # Rich divides a narrow terminal by width alone, and a long name would leave no room for its value.
    grid.add_column(overflow="fold", min_width=min(_NARROWEST, max((len(value) for _, value in shown), default=0)))
    for name, value in shown:
        # A name that continues on the next line is indented there, too.
        grid.add_row(Padding(name.strip(), (0, 0, 0, len(name) - len(name.lstrip()))), value)
    _print(grid)


def grid(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, *, digits: int = DIGITS
) -> None:
    """A table with a header; numbers are aligned to the right, with ``digits`` significant digits (see ``show``)."""
    _print(_table(columns, [list(row) for row in rows], title, digits))


def fits(columns: Sequence[str], rows: Sequence[Sequence[object]], *, digits: int = DIGITS) -> bool:
    """Whether ``grid`` would show these rows on the terminal without folding a column."""
    console = _console()
    endless = console.options.update(max_width=1_000_000)
    return console.measure(_table(columns, rows, None, digits), options=endless).maximum <= console.width


def room_beside(columns: Sequence[str]) -> int:
    """How many characters ``records`` has for a value."""
    return max(_console().width - max(map(len, columns), default=0) - 2, _NARROWEST)


def records(columns: Sequence[str], rows: Iterable[Sequence[object]], *, digits: int = DIGITS) -> bool:
    """Each row as lines of ``column  value``, for rows wider than the terminal. Returns whether a value is cut."""
    from rich.text import Text

    console, room, label = _console(), room_beside(columns), max(map(len, columns), default=0)
    cut = False
    for number, row in enumerate(rows, 1):
        console.print(f"row {number:,}", style="bold", highlight=False)
        for name, value in zip(columns, row, strict=True):
            # A value's own line ends and tabs would break the two columns.
            full = show(value, digits, name).replace("\\[", "[")
            text = Text("".join(c if c.isprintable() else repr(c)[1:-1] for c in full))
            text.truncate(room, overflow="ellipsis")
            cut = cut or "…" in text.plain
            console.print(
                Text.assemble((f"{printable(name):<{label}}  ", "dim"), text), soft_wrap=True, highlight=False
            )
    return cut


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None, digits: int) -> Table:
    from rich import box
    from rich.table import Table

    title = None if title is None else printable(title)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], (int, float, type(None))) for row in rows)
        table.add_column(printable(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(show(value, digits, name) for name, value in zip(columns, row, strict=True)))
    return table


def _print(table: Table) -> None:
    console = _console()
    if sys.stdout.isatty():
        console.print(table)
        return
    # In a file or a pipe the padding of cells is noise.
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().split("\n")))


def _console() -> Console:
    """Tables are as wide as a terminal, or as COLUMNS says; elsewhere nothing is wrapped, so that a path in a file or a pipe
    stays whole."""
    from rich.console import Console

    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console() if has_width else Console(width=_UNWRAPPED)


def show(value: object, digits: int = DIGITS, column: str = "") -> str:
    """A value as people read it: thousands separated, ``digits`` significant ones of a float, a dash for nothing, and
    control characters for a terminal escaped. What names something, by its ``column`` or size, is no amount."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        names = re.search("(^|_)(hash|digest|id)$", column) or abs(value) > 2**53
        return str(value) if names else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return printable(str(value)).replace("[", r"\[")


def note(text: str) -> None:
    """A line for people on stderr, after flushing stdout."""
    sys.stdout.flush()
    sys.stderr.write(folded(printable(text), sys.stderr) + "\n")
    printed(text)


@contextlib.contextmanager
def prints_apart() -> Iterator[None]:
    """Within this block, output of user code and libraries goes to stderr, so that stdout only has the command's
    data."""
    out = sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        # Code that hangs was left behind in its thread, and may still print.
        left = threading.active_count() > 1 and not isinstance(out, _MainThreadOnly)
        sys.stdout = cast("TextIO", _MainThreadOnly(out)) if left else out


class _MainThreadOnly:
    """Stdout for this thread; for the others, stderr."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._mine = out, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out if threading.get_ident() == self._mine else sys.stderr, name)


def warn_once(lines: Iterable[str]) -> None:
    """Notes of a report as warnings, without those that readers have reported already."""
    from gymdata.store.reading import current

    for line in lines:
        if line not in current().warnings:
            note(f"warning: {line}")


class Watch:
    """Progress of a long stage (implements ``Progress``): Rich's bar on a terminal, else a line every few seconds.

    ``update`` takes running totals: done, total, and any of tokens, failures, attempts (that failed), given_up, reward (a
    mean), and the latest figures of a training. ``scored``: what a training scores before its steps, which has a bar of its
    own. Meanwhile nothing but the command's data is written to stdout: prints go to stderr.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._counts: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._line = self._reported = ""
        self._reported_at = time.monotonic()
        self._apart = prints_apart()

    def __enter__(self) -> Watch:
        self._apart.__enter__()
        self.has_bar = sys.stderr.isatty()
        self._bars = _bars(is_shown=self.has_bar)
        self._task(self._stage)
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.live.transient = not self._line  # without a count it would stay as if it were stuck
        self._bars.stop()
        if self._line != self._reported:
            self._report()
        self._apart.__exit__(None, None, None)

    def update(self, *, scored: float | None = None, **counts: float) -> None:
        stage = self._stage
        if scored is not None:
            stage, counts["done"] = "scoring", scored
        self._counts |= counts
        # Start-up (loading an engine) is not part of the time; what was done before the first update not of the rate.
        for name, count in ((stage, "done"), (f"{stage}: tokens", "tokens")):
            if count in counts:
                task = self._task(name, visible=count == "done")
                self._bars.start_task(task)
                self._bars.update(task, completed=counts[count], total=counts.get("total") if count == "done" else None)
        of, facts, left = self._of(stage), self._facts(stage), self._left(stage)
        self._bars.update(self._task(stage), of=of, facts=facts, left=left)
        named = stage if stage == self._stage else f"{self._stage}: {stage}"
        self._line = "  ".join(filter(None, (f"{named} {of}", *facts, left)))
        if time.monotonic() - self._reported_at >= (_LOG_EVERY_S if self.has_bar else _LINE_EVERY_S):
            self._report()

    def message(self, text: str) -> None:
        if self.has_bar:
            self._bars.console.print(printable(text), highlight=False, markup=False)
            printed(text)
        else:
            note(text)

    def _task(self, name: str, *, visible: bool = True) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(
                name, start=False, total=None, visible=visible, of="", facts=(), left=""
            )
        return self._tasks[name]

    def _report(self) -> None:
        """A line for people, or, where they see a bar, for the log."""
        self._reported_at, self._reported = time.monotonic(), self._line
        (printed if self.has_bar else note)(self._line)

    def _of(self, stage: str) -> str:
        task = self._bars.tasks[self._task(stage)]
        # A fraction is a part of a cell of a sweep: it moves the time that is left, and is not counted.
        return f"{int(task.completed):,}/{task.total:,.0f}" if task.total else f"{int(task.completed):,}"

    def _facts(self, stage: str) -> list[str]:
        counts = self._counts
        facts = [f"{label} {counts[name]:{form}}" for name, (label, form) in FIGURES.items() if name in counts]
        # A training shows the time left instead of its rate, because its figures need the room.
        if (rate := self._speed(stage)) and "loss" not in counts:
            facts.append(f"{60 * rate:,.0f}/min")
        if rate := self._speed(f"{stage}: tokens"):
            facts.append(f"{rate:,.0f} tok/s")
        if counts.get("reward") is not None:
            facts.append(f"reward {counts['reward']:.3f}")
        named = {"failures": "failed", "attempts": "failed attempts", "given_up": "given up"}
        return facts + [f"{counts[name]:,.0f} {label}" for name, label in named.items() if counts.get(name)]

    def _speed(self, name: str) -> float | None:
        """Per second, as Rich has it, and not of the first moments: early counts come in bursts."""
        task = self._bars.tasks[self._tasks[name]] if name in self._tasks else None
        return task.speed if task is not None and (task.elapsed or 0) >= _RATE_AFTER_S else None

    def _left(self, stage: str) -> str:
        """The time left, once there is a rate; the time taken, at the end."""
        task = self._bars.tasks[self._task(stage)]
        if task.finished:
            return f"took {timedelta(seconds=round(task.finished_time or 0))}"
        seconds = task.time_remaining if self._speed(stage) else None
        return f"{timedelta(seconds=seconds)} left" if seconds is not None else ""


def _bars(*, is_shown: bool) -> Progress:
    """Rich's bars on stderr; those that are not shown only count."""
    from rich.columns import Columns
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn

    class Facts(ProgressColumn):
        """Side by side, on several lines where the terminal is narrow; a label and its number stay together."""

        def render(self, task: Task) -> Columns:
            return Columns(task.fields["facts"])

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[of]}"),
        Facts(),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        get_time=time.monotonic,
        speed_estimate_period=_RATE_OVER_S,
        disable=not is_shown,
    )
