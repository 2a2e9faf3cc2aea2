r"""The SQL prompt: history, completion of views and columns, ``\d``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymdata.errors import GymdataError, UsageError
from gymdata.query.run import too_wide
from gymdata.query.saved import SAVED, saved
from gymdata.query.views import Views, find_files

_KEYWORDS = (
    "SELECT", "FROM", "WHERE", "GROUP BY", "ORDER BY", "HAVING", "LIMIT", "JOIN", "USING", "UNNEST", "COUNT(*)", "AVG",
    "MIN", "MAX", "SUM", "MEDIAN", "STDDEV", "LEN", "DISTINCT", "DESC", "find_ids",
)  # fmt: skip
#: Commands of other SQL prompts, and what they are here.
_ALIASES = {".help": r"\?", ".tables": r"\d", ".schema": r"\d", ".quit": r"\q", ".exit": r"\q"}
HELP = r"""A statement ends with ; or an empty line.
\d           views and how many columns they have
\d VIEW      its columns and their types
\l           saved queries; :NAME runs one
\x           whole values on, or off
\q           quit (or Ctrl-D)"""


class Shell:
    """``run(sql, full)`` prints a result, ``say`` a line, ``table`` columns and rows."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        run: Callable[[str, bool], None],
        say: Callable[[str], None],
        table: Callable[[Sequence[str], Iterable[Sequence[object]]], None],
    ) -> None:
        self._paths, self._run, self._say, self._table = paths, run, say, table
        self._full = False

    def views(self) -> Mapping[str, Mapping[str, str]]:
        """Each view and the types of its columns, as they are now."""
        return Views(find_files(self._paths)).columns()

    def loop(self, lines: Callable[[str], str]) -> None:
        """Answer until the input ends. ``lines`` gives the next line for a prompt, and raises EOFError at the end."""
        for text in _statements(lines):
            try:
                word, _, rest = text.partition(" ")
                word = _ALIASES.get(word, word)
                if word == r"\q":
                    return
                self.answer(f"{word} {rest}".strip())
            except GymdataError as error:
                self._say(f"error: {error}")
            except KeyboardInterrupt:
                self._say("interrupted")

    def answer(self, text: str) -> None:
        """One command or statement. Raises UsageError and DataError."""
        word, _, rest = text.partition(" ")
        if word == r"\d":
            self._describe(rest.strip())
        elif word == r"\l":
            self._table(("query", "SQL"), [(f":{name}", " ".join(sql.split())) for name, sql in SAVED.items()])
        elif word == r"\x":
            self._full = not self._full
            self._say(f"whole values are {'on' if self._full else 'off'}")
        elif word in (r"\?", r"\h", "help"):
            self._say(HELP)
        elif word.startswith(("\\", ".")):
            raise UsageError.unknown_choice("command", word, (r"\d", r"\l", r"\x", r"\q", r"\?"))
        else:
            self._run(saved(text) if text.startswith(":") else text, self._full)

    def _describe(self, view: str) -> None:
        views = self.views()
        if not view:
            self._table(("view", "columns"), [(name, len(columns)) for name, columns in views.items()])
            return
        if view not in views:
            raise UsageError.unknown_choice("view", view, views)
        shown = [(name, kind if self._full else too_wide(kind) or kind) for name, kind in views[view].items()]
        self._table(("column", "type"), shown)


def _statements(lines: Callable[[str], str]) -> Iterator[str]:
    """Whole statements: those that begin with a backslash, a dot or a colon are one line."""
    statement: list[str] = []
    while True:
        try:
            line = lines("    ...> " if statement else "gymdata> ").rstrip()
        except KeyboardInterrupt:
            # The incomplete statement is discarded.
            statement = []
            continue
        except EOFError:
            line, ended = "", True
        else:
            ended = False
        alone = not statement and (line.lstrip()[:1] in ("\\", ".", ":") or line.strip() == "help")
        statement += [line] if line.strip() else []
        if statement and (alone or not line or line.endswith(";")):
            yield "\n".join(statement).strip().rstrip(";").strip()
            statement = []
        if ended:
            return


def lines_of_terminal(views: Callable[[], Mapping[str, Mapping[str, str]]]) -> Callable[[str], str]:
    """Lines of the terminal, with history and completion; of a pipe, one after the other."""
    if not sys.stdin.isatty():

        def piped(_: str) -> str:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line

        return piped
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    history: Any = InMemoryHistory()
    file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state", "gymdata", "query_history")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        history = FileHistory(str(file))
    except OSError:
        pass  # a home that cannot be written has no history
    suggest = AutoSuggestFromHistory()
    session: PromptSession[str] = PromptSession(history=history, auto_suggest=suggest, completer=completer(views()))
    return lambda prompt: str(session.prompt(prompt))


def completer(views: Mapping[str, Iterable[str]]) -> Any:
    """Completes views, columns (after ``VIEW.`` those of the view), saved queries and the words of SQL."""
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document

    columns = sorted({column for names in views.values() for column in names})

    class Words(Completer):
        def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:  # noqa: ARG002 - its signature
            match = re.search(r"(?:(\w+)\.)?([\w:-]*)$", document.text_before_cursor)
            view, part = (match[1], match[2]) if match is not None else (None, "")
            if view is not None:
                candidates: Iterable[str] = views.get(view, columns)
            elif part.startswith(":"):
                candidates = [f":{name}" for name in SAVED]
            else:
                candidates = [*views, *columns, *_KEYWORDS]
            for word in candidates:
                if part and word.lower().startswith(part.lower()) and word != part:
                    yield Completion(word, start_position=-len(part))

    return Words()
