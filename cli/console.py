"""What commands print: tables, progress, JSON, and the ending of a command."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO, cast

from gymdata.errors import ACTS, GymdataError, printable, shown
from gymdata.progress import FIGURES, printed

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.progress import Progress as Bar
    from rich.progress import TaskID
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
#: The time left is known from this share of what is left.
_RATE_AFTER = 0.02
#: The narrowest that a value may be beside its name.
_NARROWEST = 20
_BAR_WIDTH = 24
#: Between two lines of progress where there is no bar.
_LINE_EVERY_S = 5.0
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
    if not sys.stdout.isatty():
        say(text)
        return
    from rich.text import Text

    _console().print(Text(printable(text)))


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
        say(f"next: gymdata {_if_rendered(then.replace('{}', shlex.quote(written[0])))}")
    return report.exit_code


def _if_rendered(then: str) -> str:
    """The command, with the flag without which it refuses its data where their first rows have ids rendered from text."""
    command, path, *_ = shlex.split(then)
    if command not in ("train-dpo", "train-sft", "pairs") or "--allow-rendered" in then:
        return then
    from gymdata.rollouts.schema import PAIRS, ROLLOUTS
    from gymdata.rollouts.soundness import is_rendered
    from gymdata.rollouts.turn_columns import TurnColumns
    from gymdata.store.tables import scan_batches

    if command == "train-dpo":
        rendered = (is_rendered(batch) for batch in scan_batches(path, PAIRS))
    else:
        turns = (batch.column("turns") for batch in scan_batches(path, ROLLOUTS, ["turns"]))
        rendered = (TurnColumns.of(column).has_rendered() for column in turns)
    with contextlib.suppress(GymdataError):  # what was written is no fault of its command
        return f"{then} --allow-rendered" if any(first.any() for first in islice(rendered, 1)) else then
    return then


def facts(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """A short two-column table, the summary of a command."""
    from rich import box
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
        grid.add_row(_Hanging(name), value)
    _print(grid)


class _Hanging:
    """A name for Rich whose second and later lines are indented: else they would look like other names."""

    def __init__(self, name: str) -> None:
        self._text, self._indent = name.strip(), len(name) - len(name.lstrip())

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement
        from rich.text import Text

        return Measurement.get(console, options, Text(" " * self._indent + self._text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        room = options.max_width - self._indent
        fits = Text(self._text).cell_len <= room
        lines = [Text(self._text)] if fits else Text(self._text).wrap(console, max(room - 2, 1))
        for number, line in enumerate(lines):
            line.pad_left(self._indent + (2 if number else 0))
            yield line


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
    """Tables are as wide as a terminal; elsewhere nothing is wrapped, so that a path in a file or a pipe stays whole."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_UNWRAPPED)


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
    """Progress of a long stage (implements ``Progress``): a bar on a terminal, else a line every few seconds.

    ``update`` takes running totals: done, total, and any of tokens, failures, attempts (that failed), given_up, reward (a
    mean), away_s (seconds without a server, which rates leave out), and the latest figures of a training. ``scored``: what
    a training scores before its steps, with a rate of its own. Meanwhile nothing but the command's data is written to
    stdout: prints go to stderr.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._counts: dict[str, float] = {}
        #: Whether they are of what a training scores before its steps.
        self._scores = False
        self._first: dict[str, float] = {}
        self._began = self._latest = self._last_line_at = time.monotonic()
        self._last_line = ""
        self.bar: Bar | None = None
        self._task: TaskID | None = None
        self._apart = prints_apart()

    def __enter__(self) -> Watch:
        self._apart.__enter__()
        if sys.stderr.isatty():
            self.bar = _two_line_bar()
            self._task = self.bar.add_task(self._stage, total=None, of="", facts="", left="")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.live.transient = not self._counts  # without a count it would stay as if it were stuck
            self.bar.stop()
            if self._counts:
                self._record(every_s=0)
        else:
            self.end()
        self._apart.__exit__(None, None, None)

    def end(self) -> None:
        """The last line of a stage without a bar."""
        if self._counts and not self._scores and self._line() != self._last_line and "  took " not in self._last_line:
            self._say()

    def update(self, *, scored: float | None = None, **counts: float) -> None:
        self._latest, scores = time.monotonic(), scored is not None
        if scored is not None:
            counts["done"] = scored
        if not self._counts or scores != self._scores:
            # Start-up (loading an engine), and what was counted until its end, is not part of the rate.
            self._began, self._first, self._counts, self._scores = self._latest, counts, {}, scores
        self._counts.update(counts)
        if self.bar is not None and self._task is not None:
            done, total = self._counts.get("done", 0), self._counts.get("total")
            self.bar.update(
                self._task, completed=done, total=total, of=self._of(), facts=self._facts(), left=self._left()
            )
            self._record(every_s=60)
        elif self._latest - self._last_line_at >= _LINE_EVERY_S:
            self._say()

    def message(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(printable(text), highlight=False)
            printed(text)
        else:
            note(text)

    def _say(self) -> None:
        self._last_line_at = time.monotonic()
        self._last_line = self._line()
        note(self._last_line)

    def _record(self, *, every_s: float) -> None:
        """A line for the log, which has no bar."""
        if time.monotonic() - self._last_line_at >= every_s:
            self._last_line_at = time.monotonic()
            printed(self._line())

    def _line(self) -> str:
        parts = (f"{self._stage} {self._of()}", self._facts(), self._left())
        return "  ".join(part for part in parts if part)

    def _since(self, name: str) -> float:
        """What was counted since the clock was started."""
        return self._counts.get(name, 0) - self._first.get(name, 0)

    def _done(self) -> float:
        """The part of ``done`` since the clock was started."""
        return self._since("fresh" if "fresh" in self._counts else "done")

    def _passed(self) -> float:
        return self._latest - self._began - self._since("away_s")

    def _of(self) -> str:
        done, total = self._counts.get("done", 0), self._counts.get("total")
        if self._scores:
            return f"(scoring {done:,.0f} of {total:,.0f})"
        # A fraction is a part of a cell of a sweep: it moves the time that is left, and is not counted.
        return f"{int(done):,}/{total:,.0f}" if total else f"{int(done):,}"

    def _facts(self) -> str:
        passed = self._passed()
        parts = [
            f"{label} {self._counts[name]:{form}}" for name, (label, form) in FIGURES.items() if name in self._counts
        ]
        if passed >= _RATE_AFTER_S:
            # A training shows the time left instead of its rate, because its figures need the room.
            if (done := self._done()) and "loss" not in self._counts:
                parts.append(f"{60 * done / passed:,.0f}/min")
            # A training begins to count again after its preparation.
            if (tokens := self._since("tokens")) > 0:
                parts.append(f"{tokens / passed:,.0f} tok/s")
        if self._counts.get("reward") is not None and "reward" in self._counts:
            parts.append(f"reward {self._counts['reward']:.3f}")
        if self._counts.get("failures"):
            parts.append(f"{self._counts['failures']:,.0f} failed")
        if attempts := self._counts.get("attempts"):
            parts.append(f"{attempts:,.0f} failed attempts")
        if given_up := self._counts.get("given_up"):
            parts.append(f"{given_up:,.0f} given up")
        return "  ".join(parts)

    def _left(self) -> str:
        """The time left, once there is a rate; the time taken, at the end."""
        passed, done, total = self._passed(), self._done(), self._counts.get("total")
        if passed < _RATE_AFTER_S or not done or not total:
            return ""
        left = total - self._counts.get("done", 0)
        if left <= 0:
            return f"took {_clock(passed)}"
        # The first of many rollouts in flight say nothing about the others.
        return f"{_clock(passed / done * left)} left" if done >= _RATE_AFTER * left else ""


def _clock(seconds: float) -> str:
    """Seconds as 0:05, 12:34 or 1:23:45."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _two_line_bar() -> Bar:
    """A bar on stderr with the facts behind it, or, from the first time that the terminal is too narrow, beneath it."""
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, Task, TextColumn
    from rich.text import Text

    class TwoLines(Progress):
        """Rich's bar; it has one task."""

        beneath = False

        def get_renderables(self) -> Iterable[RenderableType]:
            (task,) = self.tasks or (None,)
            if task is None:
                return
            facts = task.fields["facts"]
            self.beneath = self.beneath or self._width(task) > self.console.width
            task.fields["behind"] = "" if self.beneath else facts
            yield self.make_tasks_table([task])
            if self.beneath and facts:
                # A line may end between two facts, not between a label and its number.
                yield Text("  ".join(part.replace(" ", "\u00a0") for part in facts.split("  ")))

        def _width(self, task: Task) -> int:
            texts = (task.description, task.fields["of"], task.fields["facts"], task.fields["left"])
            return _BAR_WIDTH + sum(len(text) + 1 for text in texts)

    return TwoLines(
        TextColumn("{task.description}"),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[of]}"),
        TextColumn("{task.fields[behind]}"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
    )
