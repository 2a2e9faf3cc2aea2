"""Tasks: the rows of task files, or of memory, as conversations to continue.

Invariants: tasks stream, so a file of any length costs one batch of memory plus about 200 bytes per task; a row that
cannot be used is an error that names file, line and field (or is counted, with ``skip_bad_rows``); two rows never share
a task_id; a task's content hash depends on every field of its row except ``task_id``, and on no key order; where
settings say how a row is read, it depends on what they make of it, too.

A row has one of

* ``prompt``: a string (one user message) or a list of chat messages,
* ``messages``: a list of chat messages; the assistant's at the end is no part of the prompt, but the reference answer,
* ``responses_create_params``: ``{"input": string or list, "tools": [...], "instructions": ...}`` as NeMo Gym writes it,
* or columns that ``task_shapes`` knows or was given;

and may have ``task_id`` (string or integer), ``tools`` (chat or Responses style function schemas) and ``answer``. Every
field of the row is kept in ``Task.row``, with the ``prompt`` (text) and the ``answer`` that were found in other columns.
Without a ``task_id`` the id is the first 16 hex digits of the content hash, so
it stays the same when lines are moved. A second identical row gets ``-2``, a third ``-3``, with a ``task_id`` as without;
rows that share a ``task_id`` and differ are refused with both places.

A ``reasoning`` item of a Responses-shaped input is the reasoning of the assistant message after it. Content other than text
(images, audio, files) is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import xxhash

from gymdata.commands.collect.task_files import rows_of, short, task_files
from gymdata.commands.collect.task_shapes import SOURCES, FieldError, Shaped, TaskShape
from gymdata.errors import DataError, counted
from gymdata.public import described, wrong_argument
from gymdata.rollouts.column_names import CONVERSATIONS
from gymdata.rollouts.messages import NOT_TEXT, Message, Task, TaskRow, ToolCall, ToolDefinition, drop_nulls
from gymdata.store import hash_file
from gymdata.store.formats import refuse_foreign
from gymdata.store.paths import FileEntry

#: ``from`` of ShareGPT messages, which have ``from`` and ``value``.
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
_ROLES = {"system", "user", "assistant", "tool", "function", "developer", "environment"}


@dataclass(slots=True)
class _Pass:
    """The findings of one pass over the rows. ``skipped`` counts the bad ones, and ``first_bad`` is the text of the
    first; ``recognised`` counts the tasks by what the shape found in columns of other names."""

    skipped: int = 0
    first_bad: str | None = None
    recognised: Counter[tuple[str, ...]] = field(default_factory=Counter)


@dataclass
class TaskFile:
    """The tasks of one path (what ``task_files`` takes), first ``limit`` tasks only when given.

    Iterating again reads the files again. ``skipped`` counts the bad rows of the last full pass (only with
    ``skip_bad_rows``); whoever looks at the first tasks only changes nothing of it.
    """

    path: Path | str
    limit: int | None = None
    skip_bad_rows: bool = False
    shape: TaskShape = field(default_factory=TaskShape)
    files: list[Path] = field(init=False)
    #: Where the paths of the files begin, which user code may leave later.
    _folder: str = field(default_factory=os.getcwd, init=False)
    _last: _Pass = field(default_factory=_Pass, init=False)

    def __post_init__(self) -> None:
        self.files = task_files(self.path)

    @property
    def skipped(self) -> int:
        return self._last.skipped

    def __iter__(self) -> Iterator[Task]:
        tally = _Pass()
        #: Short hash of a task_id → how often, and the file, line and content of the first.
        occurrences: dict[bytes, tuple[int, Path, int, str]] = {}
        count = 0
        for file, line, row in self._rows(tally):
            if self.limit is not None and count >= self.limit:
                break
            try:
                shaped = self.shape.shape(row)
                task = _task(row, shaped, self.shape)
                task = self._unique(task, file, line, occurrences)
            except FieldError as bad:
                if bad.name == "prompt" and not count:
                    refuse_foreign(file, "tasks")
                self._bad(tally, DataError.bad_row(file, line, bad.name, bad.actual, bad.expected, bad.hint))
                continue
            count += 1
            recognised = shaped.read_as
            if "answer" in task.row and "answer" not in shaped.row:
                recognised = (*recognised, "answer = the last message")
            if recognised:
                tally.recognised[recognised] += 1
            yield task
        if count:
            self.shape.check_columns({text for texts in tally.recognised for text in texts}, row)
        else:
            why = f" (skipped {counted(tally.skipped, 'row')}; the first: {tally.first_bad})" if tally.skipped else ""
            raise DataError.empty(self.path, f"at least one task{why}")
        self._last = tally

    def _rows(self, tally: _Pass) -> Iterator[tuple[Path, int, TaskRow]]:
        moved = not Path.cwd().samefile(self._folder)
        for file in self.files:
            path = Path(self._folder, file) if moved else file
            for line, row in rows_of(path, functools.partial(self._bad_line, tally)):
                yield file, line, row

    def facts(self) -> list[FileEntry]:
        """The source of the tasks for run.json: path and hash of each file."""
        return [{"path": str(file), "xxh3": hash_file(file)} for file in self.files]

    def notes(self) -> list[str]:
        """One line on the columns that the last pass recognised."""
        recognised = self._last.recognised
        if not recognised:
            return []
        most = recognised.most_common(3)
        columns = [f"{', '.join(texts)} ({counted(n, 'task')})" for texts, n in most]
        return [f"{self.path}: {'; '.join(columns)}{'; …' if len(recognised) > len(most) else ''}"]

    def _bad(self, tally: _Pass, error: DataError) -> None:
        if not self.skip_bad_rows:
            error.hint = error.hint or "correct the row, or pass --skip-bad-rows to leave such rows out"
            raise error
        tally.skipped += 1
        tally.first_bad = tally.first_bad or error.message

    def _bad_line(self, tally: _Pass, file: Path, line: int, actual: str, expected: str) -> None:
        self._bad(tally, DataError.bad_row(file, line, None, actual, expected))

    def _unique(self, task: Task, file: Path, line: int, occurrences: dict[bytes, tuple[int, Path, int, str]]) -> Task:
        key = _short_hash(task.task_id)
        times, first_file, first_line, content = occurrences.get(key, (0, file, line, task.content_hash))
        if content != task.content_hash:
            actual = f"{task.task_id!r} a second time with other content (first at {first_file}, line {first_line})"
            raise FieldError("task_id", actual, "every task_id once")
        number = times + 1
        while times and _short_hash(f"{task.task_id}-{number}") in occurrences:  # a row has this id itself
            number += 1
        occurrences[key] = number, first_file, first_line, content
        if not times:
            return task
        again = f"{task.task_id}-{number}"
        occurrences[_short_hash(again)] = 1, file, line, content
        return Task(again, task.messages, task.tools, task.row, task.content_hash)


def _short_hash(task_id: str) -> bytes:
    return hashlib.blake2b(task_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()


IN_MEMORY = "in memory"


def task_rows(tasks: Any) -> Any:
    """The rows of a data frame (pandas, Polars) or an Arrow table, without what is missing; anything else as it is."""
    if hasattr(tasks, "collect_schema") and not hasattr(tasks, "to_dicts"):  # a LazyFrame
        tasks = tasks.collect()
    rows = None
    if hasattr(tasks, "iloc") and hasattr(tasks, "to_dict"):
        rows = tasks.astype(object).where(tasks.notna(), None).to_dict("records")
    elif hasattr(tasks, "to_dicts"):
        rows = tasks.to_dicts()
    elif hasattr(tasks, "to_pylist"):
        rows = tasks.to_pylist()
    return tasks if rows is None else [drop_nulls(row) for row in rows]


@dataclass
class TaskRows(TaskFile):
    """The tasks of a list of dicts or of questions, a Hugging Face ``Dataset`` or any other iterable of mappings.

    In messages a row is a line of ``in memory``, counted from 1.
    """

    path: Path | str = IN_MEMORY
    rows: Iterable[TaskRow] = ()

    def __post_init__(self) -> None:
        self.files = []
        # An iterator is materialised: tasks are counted and hashed before they are sampled.
        if iter(self.rows) is self.rows:
            self.rows = list(self.rows)

    def _rows(self, tally: _Pass) -> Iterator[tuple[Path, int, TaskRow]]:
        # A Dataset gives every row all columns; a null means that it was not there.
        columnar = hasattr(self.rows, "column_names")
        for number, row in enumerate(self.rows, 1):
            if isinstance(row, str):
                row = {"prompt": row}
            if not isinstance(row, Mapping):
                expected = f"tasks as rows that are dicts (row {number} is {described(row)})"
                raise wrong_argument(self.rows, "collect", expected)
            try:
                plain: TaskRow = orjson.loads(orjson.dumps(dict(row), option=orjson.OPT_SERIALIZE_NUMPY))
            except TypeError as error:
                actual = f"a value that JSON has no form for ({error})"
                self._bad(tally, DataError.bad_row(IN_MEMORY, number, None, actual, "JSON values"))
                continue
            if columnar:
                plain = drop_nulls(plain)
            yield Path(IN_MEMORY), number, plain

    def facts(self) -> list[FileEntry]:
        digest = xxhash.xxh3_64()
        for _, _, row in self._rows(_Pass()):
            digest.update(_canonical(row) + b"\n")
        return [{"path": str(self.path), "xxh3": digest.hexdigest()}]


Tasks = str | Path | Iterable[TaskRow]


def parse_task(row: TaskRow, shape: TaskShape) -> Task:
    """One source row as a Task. Raises ValueError naming the field that is wrong."""
    return _task(row, shape.shape(row), shape)


def _task(source: TaskRow, shaped: Shaped, shape: TaskShape) -> Task:
    row, tools = shaped.row, None
    if shaped.column == SOURCES[2]:
        # A NeMo Gym row with the system message, which its server gets, too.
        params = row[SOURCES[2]]
        if shape.template is not None:
            expected = "a prompt that --prompt-template can replace"
            raise FieldError(SOURCES[2], "a prompt in the server's own form", expected)
        if shaped.system is not None and isinstance(params, dict) and not params.get("instructions"):
            row = {**row, SOURCES[2]: {**params, "instructions": shaped.system}}
        messages, tools = _from_responses(row[SOURCES[2]])
    else:
        messages = _messages(shaped.value, shaped.column, allow_text=shaped.column not in ("messages", *CONVERSATIONS))
        row, messages = _without_answer(row, messages, shaped.column)
        if shaped.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": shaped.system}, *messages]
        if shape.template is not None and not isinstance(shaped.value, str):
            question = {"prompt": messages[-1]["content"]}
            messages = [*messages[:-1], {**messages[-1], "content": shape.template.render({**row, **question})}]
    if row.get("tools") is not None:
        tools = _tools(row["tools"], "tools")
    hashed = {k: v for k, v in source.items() if k != "task_id"}
    if shape.is_given:
        hashed = {"": [messages, tools, row.get("answer")], **hashed}
    content = hashlib.blake2b(_canonical(hashed), digest_size=16).hexdigest()
    raw_id = row.get("task_id")
    if raw_id is None:
        task_id = content[:16]
    elif (isinstance(raw_id, str) and raw_id) or (isinstance(raw_id, int) and not isinstance(raw_id, bool)):
        task_id = str(raw_id)
    else:
        raise FieldError("task_id", short(raw_id), "a non-empty string or an integer")
    return Task(task_id, messages, tools, row, content)


def _without_answer(row: TaskRow, messages: list[Message], where: str) -> tuple[TaskRow, list[Message]]:
    """The messages up to the assistant's at the end, whose last one is the reference answer where the row names none."""
    if messages[-1]["role"] != "assistant":
        return row, messages
    end = max((i for i, message in enumerate(messages) if message["role"] != "assistant"), default=-1)
    # A prompt is not a conversation: what the assistant says at its end may be the beginning of an answer.
    if where not in ("messages", *CONVERSATIONS) or end < 0 or messages[end]["role"] == "system":
        raise FieldError(f"{where}[{len(messages) - 1}]", "an assistant message at the end", "a message to answer")
    answer = messages[-1]["content"]
    return {"answer": answer, **row} if answer else row, messages[: end + 1]


def _messages(value: Any, where: str, *, allow_text: bool) -> list[Message]:
    if allow_text and isinstance(value, str):
        if not value.strip():
            raise FieldError(where, "an empty string", "a prompt")
        return [{"role": "user", "content": value}]
    expected = "a string or a list of messages" if allow_text else "a list of messages"
    if not isinstance(value, list):
        raise FieldError(where, short(value), expected)
    if not value:
        raise FieldError(where, "an empty list", "at least one message")
    return _conversation(value, where)


def _conversation(items: list[Any], where: str) -> list[Message]:
    """The messages of items. One answer in the Responses interface may be several items: what a reasoning item says belongs
    to the assistant's message after it, a call to the one before it."""
    messages: list[Message] = []
    thoughts: list[str] = []
    for i, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "reasoning":
            parts = item.get("summary") or item.get("content") or ""
            thoughts.append(_text(parts, f"{where}[{i}].{'summary' if item.get('summary') else 'content'}"))
            continue
        message = _message(item, f"{where}[{i}]")
        if kind == "function_call" and messages and messages[-1]["role"] == "assistant":
            answer = messages.pop()
            thoughts = [answer.pop("reasoning", ""), *thoughts]
            message = {**answer, "tool_calls": [*answer.get("tool_calls", ()), *message["tool_calls"]]}
        reasoning = "\n".join(filter(None, thoughts))
        thoughts = []
        if reasoning and message["role"] == "assistant":
            message.setdefault("reasoning", reasoning)
        elif reasoning:
            messages.append({"role": "assistant", "content": "", "reasoning": reasoning})
        messages.append(message)
    if thoughts:
        messages.append({"role": "assistant", "content": "", "reasoning": "\n".join(filter(None, thoughts))})
    return messages


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise FieldError(where, short(value), "a message object with role and content")
    if "from" in value and "role" not in value:
        speaker = value["from"]
        role = _SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
        value = {**value, "role": role, "content": value.get("content", value.get("value"))}
    kind = value.get("type", "message")
    if kind == "function_call":
        call = {"id": value.get("call_id"), "function": {k: value.get(k) for k in ("name", "arguments")}}
        return {"role": "assistant", "content": None, "tool_calls": [_tool_call(call, where)]}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "content": _text(value.get("output"), f"{where}.output"),
            "tool_call_id": value.get("call_id"),
        }
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise FieldError(f"{where}.role", short(role), f"one of {', '.join(sorted(_ROLES))}")
    message: Message = {"role": "system" if role == "developer" else role, "content": None}
    calls = value.get("tool_calls")
    if value.get("content") is not None or not calls:
        message["content"] = _text(value.get("content"), f"{where}.content")
    if calls:
        message["tool_calls"] = [_tool_call(c, f"{where}.tool_calls") for c in calls]
    for key in ("reasoning", "tool_call_id", "name"):
        if value.get(key) is not None:
            message[key] = str(value[key])
    return message


def _tool_call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(where, short(value), "tool calls with a function name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise FieldError(where, "arguments that are not JSON", "a JSON object") from error
    return {"id": value.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = (str(p.get("type")) for p in value if isinstance(p, dict))
        odd = next((kind for kind in kinds if any(word in kind for word in NOT_TEXT)), None)
        if odd is not None:
            medium = next(word for word in NOT_TEXT if word in odd)
            raise FieldError(where, f"a part of type {odd!r}: {medium} content is not supported", "text only")
        parts = [p.get("text") if isinstance(p, dict) else p for p in value]
        if all(isinstance(p, str) for p in parts):
            return "".join(parts)  # type: ignore[arg-type]  # all() above does not narrow for mypy
    raise FieldError(where, short(value), "text, or a list of text parts")


def _from_responses(value: Any) -> tuple[list[Message], list[ToolDefinition] | None]:
    where = "responses_create_params"
    if not isinstance(value, dict):
        raise FieldError(where, short(value), "an object with input and optional tools")
    messages = _messages(value.get("input"), f"{where}.input", allow_text=True)
    _without_answer({}, messages, f"{where}.input")
    if value.get("instructions"):
        messages = [{"role": "system", "content": _text(value["instructions"], f"{where}.instructions")}, *messages]
    tools = value.get("tools")
    return messages, _tools(tools, f"{where}.tools") if tools else None


def _tools(value: Any, where: str) -> list[ToolDefinition] | None:
    """Chat-style schemas; the flat Responses style is wrapped."""
    if isinstance(value, str):  # Parquet files often hold nested schemas as JSON text
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise FieldError(where, short(value), "a list of function schemas") from error
    if not isinstance(value, list):
        raise FieldError(where, short(value), "a list of function schemas")
    tools = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise FieldError(f"{where}[{i}]", short(tool), "a function schema")
        flat = "function" not in tool
        function = {k: v for k, v in tool.items() if k not in ("type", "strict")} if flat else tool["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise FieldError(f"{where}[{i}]", short(tool), "a function schema with a name")
        tools.append({"type": "function", "function": function})
    return tools or None


def _canonical(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    except TypeError:  # lone surrogates, integers above 64 bits
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
