"""What commands print: tables, progress, JSON, and the ending of a command.

Invariant: while a command runs, stdout has its data alone. What user code, its threads and libraries print is on stderr.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from gymdata.errors import ACTS, printable, shown
from gymdata.progress import FIGURES, printed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task, TaskID
    from rich.table import Table

    from gymdata.public import Report

#: Columns, rows and title.
Grid = tuple[Sequence[str], Sequence[Sequence[object]], str]

_typed: list[str] = []
_answers: list[int] = []
#: The stdout of the command that runs.
_stdout: list[TextIO] = []


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


@contextlib.contextmanager
def data_alone() -> Iterator[None]:
    """Within this block stdout has what this module prints; ``sys.stdout`` is stderr."""
    _stdout.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        sys.stdout.flush()
    finally:
        _stdout.pop()


def stdout() -> TextIO:
    """The stream of the command's data."""
    return _stdout[-1] if _stdout else sys.stdout


#: Wider than any table.
_UNWRAPPED = 1_000_000
_COMMAND = re.compile(r"`[^`\n]+`")
_NO_BREAK = "\N{NO-BREAK SPACE}"
#: No rate is shown for less time than this.
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
    print(ACTS.sub(lambda match: json.dumps(match[0])[1:-1], text), file=stdout(), flush=True)


def say(text: str = "") -> None:
    """A line for people on stdout, as wide as it is, with control characters for a terminal escaped."""
    print(printable(text), file=stdout(), flush=True)


def paragraphs(text: str, indent: int = 0) -> None:
    """Prose on stdout: wrapped at words on a terminal, ``indent`` deeper where a line continues; elsewhere as it is."""
    say(folded(printable(text), stdout(), indent))


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


def finish(
    report: Report,
    text: str | Callable[[], None],
    *,
    json: bool,
    then: str = "",
    above: Iterable[Grid] = (),
    below: Iterable[str] = (),
) -> int:
    """The end of every command: prints the report as one JSON object, or as a summary titled ``text``, with the tables
    ``above`` its rows and the sentences ``below``; if ``text`` is a function, that prints the summary. ``then``: the next
    command for what was written, whose path stands in the place of ``{}``. Returns the exit code."""
    rows = report.rows()
    printed("; ".join(f"{name.strip()} {show(value)}" for name, value in rows).replace("\\[", "["))
    if json:
        emit_json(report.to_dict())
    elif callable(text):
        text()
    else:
        facts(text, rows, above=above)
        for line in below:
            paragraphs(line, 2)
    written = [str(value) for name, value in rows if name.strip() == "written to"]
    if then and written and not json and not report.exit_code:
        say(f"next: gymdata {then.replace('{}', shlex.quote(written[0]))}")
    return report.exit_code


def facts(title: str, rows: Iterable[tuple[str, object]], *, above: Iterable[Grid] = (), digits: int = DIGITS) -> None:
    """A title and a short two-column table, the summary of a command, with tables of more columns between them."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table

    _console().print(printable(title), style="bold", markup=False, highlight=False)
    for columns, lines, heading in above:
        if lines:
            grid(columns, lines, heading)
    shown = [(printable(name), show(value, digits, name)) for name, value in rows]
    names_and_values = Table(box=box.SIMPLE, show_header=False, padding=(0, 1))
    names_and_values.add_column(style="dim", overflow="fold")
    # Rich divides a narrow terminal by width alone, and a long name would leave no room for its value.
    narrowest = min(_NARROWEST, max((len(value) for _, value in shown), default=0))
    names_and_values.add_column(overflow="fold", min_width=narrowest)
    for name, value in shown:
        # A name that continues on the next line is indented there, too.
        names_and_values.add_row(Padding(name.strip(), (0, 0, 0, len(name) - len(name.lstrip()))), value)
    _print(_console(), names_and_values)


def grid(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "", *, digits: int = DIGITS) -> None:
    """A table with a header; numbers are aligned to the right, with ``digits`` significant digits (see ``show``)."""
    # A row is one line for a program that reads lines.
    console = _console() if stdout().isatty() else _console(_UNWRAPPED)
    _print(console, _table(columns, rows, title, digits))


def fits(columns: Sequence[str], rows: Sequence[Sequence[object]], *, digits: int = DIGITS) -> bool:
    """Whether ``grid`` would show these rows without folding a column."""
    console = _console()
    endless = console.options.update(max_width=_UNWRAPPED)
    return console.measure(_table(columns, rows, "", digits), options=endless).maximum <= console.width


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str, digits: int) -> Table:
    """Without lines between and around its cells where it is read by a program."""
    from rich import box
    from rich.table import Table

    table = Table(title=printable(title) or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    if not stdout().isatty():
        table.box, table.pad_edge, table.padding = None, False, (0, 2, 0, 0)
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], (int, float, type(None))) for row in rows)
        table.add_column(printable(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        # A value's own line ends would break the row.
        table.add_row(*(show(v, digits, name).replace("\n", "\\n") for name, v in zip(columns, row, strict=True)))
    return table


def _print(console: Console, table: Table) -> None:
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    # In a file or a pipe the padding of cells is noise.
    stdout().write(text if stdout().isatty() else "\n".join(line.rstrip() for line in text.split("\n")))


def _console(width: int | None = None) -> Console:
    """As wide as the terminal, or as COLUMNS says; elsewhere nothing is wrapped, so that a path in a file or a pipe stays
    whole."""
    from rich.console import Console

    has_width = stdout().isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=stdout(), width=width or (None if has_width else _UNWRAPPED))


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
    stdout().flush()
    sys.stderr.write(folded(printable(text), sys.stderr) + "\n")
    printed(text)


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
    own.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._counts: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._line = self._reported = ""
        self._reported_at = time.monotonic()

    def __enter__(self) -> Watch:
        self.has_bar = sys.stderr.isatty()
        self._bars = _bars(is_shown=self.has_bar)
        self._counted(self._stage)
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.live.transient = not self._line  # without a count it would stay as if it were stuck
        self._bars.stop()
        if self._line != self._reported:
            self._report()

    def update(self, *, scored: float | None = None, **counts: float) -> None:
        stage = self._stage
        if scored is not None:
            stage, counts["done"] = "scoring", scored
        self._counts |= counts
        task = self._counted(stage, counts.get("done"), counts.get("total"))
        tokens = self._counted(f"{stage}: tokens", counts.get("tokens"))
        of = f"{int(task.completed):,}" + (f"/{task.total:,.0f}" if task.total else "")
        facts, left = self._facts(_speed(task), _speed(tokens)), _left(task)
        self._bars.update(task.id, visible=True, of=of, facts=facts, left=left)
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

    def _counted(self, name: str, done: float | None = None, total: float | None = None) -> Task:
        """The task of Rich that counts ``name``, at ``done``. Start-up (loading an engine) is not part of its time, and what
        was done before the first count not of its rate."""
        if name not in self._tasks:
            hidden = name != self._stage
            self._tasks[name] = self._bars.add_task(
                name, start=False, total=None, visible=not hidden, of="", facts=(), left=""
            )
        task = self._bars.tasks[self._tasks[name]]
        if done is not None:
            is_first = not task.started
            self._bars.start_task(task.id)
            self._bars.update(task.id, completed=done, total=total)
            if is_first:
                # Else Rich's rate would begin with the first that is done, and many may be done in the next moment.
                self._bars.advance(task.id, 0)
        return task

    def _report(self) -> None:
        """A line for people, or, where they see a bar, for the log."""
        self._reported_at, self._reported = time.monotonic(), self._line
        (printed if self.has_bar else note)(self._line)

    def _facts(self, rate: float | None, tokens: float | None) -> list[str]:
        counts = self._counts
        facts = [f"{label} {counts[name]:{form}}" for name, (label, form) in FIGURES.items() if name in counts]
        # A training shows the time left instead of its rate, because its figures need the room.
        facts += [f"{60 * rate:,.0f}/min"] if rate and "loss" not in counts else []
        facts += [f"{tokens:,.0f} tok/s"] if tokens else []
        facts += [f"reward {counts['reward']:.3f}"] if counts.get("reward") is not None else []
        named = {"failures": "failed", "attempts": "failed attempts", "given_up": "given up"}
        return facts + [f"{counts[name]:,.0f} {label}" for name, label in named.items() if counts.get(name)]


def _speed(task: Task) -> float | None:
    """Per second, as Rich has it, and not of the first moments."""
    return task.speed if (task.elapsed or 0) >= _RATE_AFTER_S else None


def _left(task: Task) -> str:
    """The time left, once there is a rate; the time taken, at the end."""
    if task.finished:
        return f"took {timedelta(seconds=round(task.finished_time or 0))}"
    seconds = task.time_remaining if _speed(task) else None
    return f"{timedelta(seconds=seconds)} left" if seconds is not None else ""


def _bars(*, is_shown: bool) -> Progress:
    """Rich's bars on stderr; those that are not shown only count."""
    from rich.columns import Columns
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

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
