"""Which columns of a task row are the prompt and the reference answer: as named by ``--map``, or known by their names.

Invariants: a row that has a prompt column of gymdata's own is read by it; what is recognised is reported, never silent;
without settings a task's content hash is that of its row as the file has it, so that recognising changes no identity.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gymdata.commands.collect.task_files import short
from gymdata.errors import DataError, UsageError, abridged
from gymdata.rollouts.column_names import (
    ANSWERS,
    CONVERSATIONS,
    PROMPTS,
    TASK_FIELDS,
    columns_of,
    fields_in,
    lower_case,
)
from gymdata.rollouts.messages import TaskRow, field_at
from gymdata.store.run_json import flat

if TYPE_CHECKING:
    import jinja2

SOURCES = ("prompt", "messages", "responses_create_params")
#: Validates ``map``.
checked = fields_in(TASK_FIELDS)
#: Suffixes of file names that a system message hardly ends with.
TEXT_FILES = (".txt", ".md", ".jinja", ".j2")
#: Substrings of unknown column names that make good hints.
_LIKE_PROMPT = ("question", "prompt", "problem", "instruct", "query", "input", "task", "text")
_SIDES = ("chosen", "reject")
_LIKE_ANSWER = ("answer", "solution", "target", "output", "truth", "gold", "label", "response", "completion", "result")


class FieldError(ValueError):
    """A field of one row is wrong; the reader adds file and line."""

    def __init__(self, name: str | None, actual: str, expected: str, hint: str | None = None) -> None:
        super().__init__(f"{name}: got {actual}, expected {expected}")
        self.name, self.actual, self.expected, self.hint = name, actual, expected, hint


class Shaped(NamedTuple):
    """A row as it is kept, and where its prompt is: ``value`` of ``column``. ``system``: for a conversation without one."""

    row: TaskRow
    column: str
    value: Any
    system: str | None
    #: The recognised columns, for messages.
    read_as: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextTemplate:
    """Jinja text that is filled with the columns of a task. ``flag``: what gives it."""

    text: str
    flag: str

    def render(self, row: TaskRow) -> str:
        """With the columns of ``row``. Raises FieldError when one is missing, UsageError for what cannot be filled in."""
        import jinja2

        try:
            return self._compiled.render(row)
        except jinja2.UndefinedError as error:
            raise FieldError(None, f"the columns {abridged(row)}", f"those of {self.flag} ({error})") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise UsageError(f"{self.flag}: cannot be filled in: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        try:
            return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"{self.flag}: line {error.lineno}: {error.message}") from error


@dataclass(frozen=True)
class TaskShape:
    """``columns``: field → column, where a dotted name reaches into a column. ``template``: makes the prompt of the row's
    columns."""

    columns: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    template: TextTemplate | None = None

    @classmethod
    def of(cls, columns: Sequence[str], system: str | None, template: Path | None) -> TaskShape:
        """As the settings ``map``, ``system`` (text, or a file of it) and ``prompt_template`` say. Raises DataError."""
        system = text_or_file(system, "a system message") if system is not None else None
        prompt = TextTemplate(_text_of(template), "--prompt-template") if template is not None else None
        return cls(columns_of(columns), system, prompt)

    @cached_property
    def _sources(self) -> Sequence[str]:
        return [name for name in SOURCES if name in self.columns] or SOURCES

    @cached_property
    def is_given(self) -> bool:
        """Whether any setting changes how a row is read."""
        return bool(self.columns) or self.system is not None or self.template is not None

    def shape(self, source: TaskRow) -> Shaped:
        """``source`` with its prompt and answer found. Raises FieldError."""
        known = lower_case(source)
        # User code and templates may name a column as the file spells it.
        spelled, row = dict(zip(known, source, strict=True)), source if known is source else {**source, **known}
        row = {**row, **dict(self._mapped(source))} if self.columns else row
        read_as = [f"{n} = {column}" for n, column in self.columns.items() if field_at(source, column) is not None]
        column = next((name for name in self._sources if row.get(name) is not None), None)
        if column is not None and spelled.get(column, column) != column:
            read_as.append(f"{column} = {spelled[column]}")
        system = row.get("system", self.system) if "system" in self.columns else self.system
        if system is not None and not isinstance(system, str):
            raise FieldError(self.columns["system"], short(system), "text")
        if column is None:
            system = row["system"] if _is_text(row.get("system")) else system
            column = next((name for name in (*CONVERSATIONS, *PROMPTS) if row.get(name) not in (None, "")), None)
            if column is not None:
                read_as.append(f"{'messages' if column in CONVERSATIONS else 'prompt'} = {spelled.get(column, column)}")
        value = row[column] if column is not None else None
        turns = row.get("turns") if column is None else value if column == "prompt" else None
        if isinstance(turns, list) and turns and all(map(_is_text, turns)):
            # Questions of MT-Bench: the texts of a user, of which each answers the model's last.
            column, value = column or "turns", turns[0]
            read_as.append(f"prompt = {column}[0] of {len(turns)}")
        for kind in ("image", "video", "audio"):
            if row.get(media := f"{kind}s") and f"<{kind}>" in str(value):
                raise FieldError(media, short(row[media]), f"text only: <{kind}> of a prompt is not given to a policy")
        if column == "instruction" and isinstance(value, str) and _is_text(row.get("input")):
            value = f"{value}\n\n{row['input']}"
            read_as[-1] += " + input"
        if column is None and self.template is None:
            shown = abridged(f"{name}: {short(value)}" for name, value in source.items())
            expected = f"one of {abridged((*SOURCES, *CONVERSATIONS, *PROMPTS), 40)}"
            actual = f"none; the row's columns are {shown}" if source else "none; the row is empty"
            raise FieldError("prompt", actual, expected, _hint(source))
        if self.template is not None and (column is None or isinstance(value, str)):
            value = self.template.render({**row, "prompt": value} if column is not None else row)
            column = "prompt"
        # Rewards see the prompt as text where it is text.
        if isinstance(value, str) and column not in SOURCES[1:] and row.get("prompt") is not value:
            row = {**row, "prompt": value}
        # A resource server gets the row as its author wrote it.
        if row.get("answer") is None and column != SOURCES[2]:
            answer = next((name for name in ANSWERS if row.get(name) is not None and name != column), None)
            if answer is not None and "answer" not in self.columns:
                row = {**row, "answer": row[answer]}
                read_as.append(f"answer = {spelled.get(answer, answer)}")
        return Shaped(row, str(column), value, system, tuple(read_as))

    def check_columns(self, read_as: Iterable[str], row: TaskRow) -> None:
        """Raise UsageError for a column of ``columns`` that no task has. ``read_as``: of all tasks; ``row``: of one."""
        for name, column in self.columns.items():
            if f"{name} = {column}" not in read_as:
                raise UsageError(
                    f"--map {name}={column}: no task has this column", hint=f"the columns are {abridged(row)}"
                )

    def _mapped(self, row: TaskRow) -> Iterator[tuple[str, Any]]:
        for name, column in self.columns.items():
            value = field_at(row, column)
            if value is None and name in SOURCES:
                expected = f"the column that --map {name}={column} names (columns: {abridged(row)})"
                raise FieldError(column, "none", expected, _hint(row))
            if value is not None:
                yield name, value


def text_or_file(text: str, noun: str) -> str:
    """``text``, or what is in the file that it names. Raises DataError."""
    file = Path(text) if len(text) < 256 and "\n" not in text else None
    if file is not None and file.is_file():
        return _text_of(file).strip()
    if file is not None and file.suffix in TEXT_FILES and not any(map(str.isspace, file.name)):
        raise DataError.missing_path(file, f"the file of {noun}")
    return text


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError.missing_path(file, "a file of text") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError.unreadable(file, str(error)) from error


def _hint(row: TaskRow) -> str | None:
    columns = _leaves(row)
    texts = {name: value for name, value in columns.items() if _is_text(value)}
    firsts = {name: value[0] for name, value in columns.items() if isinstance(value, list) and value}
    keys = {name: first.keys() for name, first in firsts.items() if isinstance(first, dict)}
    chat = next((name for name, of_message in keys.items() if of_message & {"role", "from"}), None)
    answer = _answer_like({name: value for name, value in columns.items() if name != chat})
    candidates = {name: value for name, value in texts.items() if name != answer} or texts
    near = next((name for word in _LIKE_PROMPT for name in candidates if word in name.lower()), None)
    # An id, a time and a model are one word; a side of a preference is no prompt.
    worded = [name for name, text in candidates.items() if " " in text.strip() and not any(w in name for w in _SIDES)]
    prompt = near or max(worded, key=lambda name: len(candidates[name]), default=None)
    if chat is None and prompt is None:
        return None
    named = [f"messages={chat}" if chat is not None else f"prompt={prompt}"]
    named += [f"answer={answer}"] if answer not in (None, prompt, "answer") else []
    return (
        f"pass {' '.join(f'--map {shlex.quote(text)}' for text in named)}; --prompt-template FILE joins several columns"
    )


def answer_hint(row: TaskRow) -> str | None:
    """The ``--map`` for the answer of a row without a known one, guessed from the names of its columns."""
    column = _answer_like(_leaves(row))
    return None if column is None else f"pass --map {shlex.quote(f'answer={column}')}"


def _answer_like(columns: Iterable[str]) -> str | None:
    return next((name for word in _LIKE_ANSWER for name in columns if word in name.lower()), None)


def _leaves(row: TaskRow) -> TaskRow:
    return {name: value for name, value in flat(row).items() if value is not None and value != ""}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
