"""Task files: JSON Lines (also gzip and zstd) and Parquet, read row by row.

Invariants: tasks stream, so a file of any length costs one row of memory plus about 200 bytes per task; a row that
cannot be used is an error that names file, line and field (or is counted, when asked to skip); two rows never share a
task_id; a task's content hash depends on every field of its row except ``task_id``, and on no key order.

A row has one of

* ``prompt``: a string (one user message) or a list of chat messages,
* ``messages``: a list of chat messages,
* ``responses_create_params``: ``{"input": string or list, "tools": [...], "instructions": ...}`` as NeMo Gym writes it;

and may have ``task_id`` (string or integer), ``tools`` (chat or Responses style function schemas) and ``answer``. Every
field of the row is kept in ``Task.row``. Without a ``task_id`` the id is the first 16 hex digits of the content hash, so
it stays the same when lines are moved. A second identical row gets ``-2``, a third ``-3``, with a ``task_id`` as without;
rows that share a ``task_id`` and differ are refused with both places.

A ``reasoning`` item of a Responses-shaped input is the reasoning of the assistant message after it. Content other than text
(images, audio, files) is refused.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson
import xxhash

from gymdata.errors import DataError, UsageError
from gymdata.public import described, wrong_argument
from gymdata.rollouts.messages import Message, Task
from gymdata.store import hash_file
from gymdata.store.paths import BOM

_ROLES = {"system", "user", "assistant", "tool", "function", "developer", "environment"}
#: In the types of content parts that no policy of ours is shown.
_NOT_TEXT = ("image", "audio", "video", "file")
_SOURCES = ("prompt", "messages", "responses_create_params")


class _FieldError(ValueError):
    """A field of one row is wrong; the reader adds file and line."""

    def __init__(self, name: str | None, got: str, expected: str) -> None:
        super().__init__(f"{name}: got {got}, expected {expected}")
        self.name, self.got, self.expected = name, got, expected


@dataclass
class TaskFile:
    """The tasks of one path: a file or a glob of files, first ``limit`` tasks only when given.

    Iterating again reads the files again. ``skipped`` counts the bad rows of the last full pass (only with
    ``skip_bad_rows``); ``first_bad`` is the text of the first of them.
    """

    path: Path | str
    limit: int | None = None
    skip_bad_rows: bool = False
    #: The prompt may come from elsewhere (a workflow), so an empty ``input`` is one.
    prompt_elsewhere: bool = False
    skipped: int = 0
    first_bad: str | None = None
    files: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.files = _expand(self.path)

    def __iter__(self) -> Iterator[Task]:
        self.skipped, self.first_bad = 0, None
        #: Short hash of a task_id → how often, and the file, line and content of the first.
        seen: dict[bytes, tuple[int, Path, int, str]] = {}
        count = 0
        for file, line, row in self._rows():
            if self.limit is not None and count >= self.limit:
                return
            try:
                task = parse_task(row, prompt_elsewhere=self.prompt_elsewhere)
                task = self._unique(task, file, line, seen)
            except _FieldError as bad:
                self._bad(DataError.bad_row(file, line, bad.name, bad.got, bad.expected))
                continue
            count += 1
            yield task
        if not count:
            raise DataError.empty(self.path, "at least one task")

    def _rows(self) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        for file in self.files:
            for line, row in _rows(file, self._bad_line):
                yield file, line, row

    def facts(self) -> list[dict[str, Any]]:
        """What run.json says of where the tasks are from: path and hash of each file."""
        return [{"path": str(file), "xxh3": hash_file(file)} for file in self.files]

    def _bad(self, error: DataError) -> None:
        if not self.skip_bad_rows:
            error.hint = error.hint or "correct the row, or pass --skip-bad-rows to leave such rows out"
            raise error
        self.skipped += 1
        self.first_bad = self.first_bad or error.message

    def _bad_line(self, file: Path, line: int, why: str) -> None:
        self._bad(DataError.bad_row(file, line, None, why, "one JSON object a line"))

    def _unique(self, task: Task, file: Path, line: int, seen: dict[bytes, tuple[int, Path, int, str]]) -> Task:
        key = hashlib.blake2b(task.task_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
        times, first_file, first_line, content = seen.get(key, (0, file, line, task.content_hash))
        if content != task.content_hash:
            got = f"{task.task_id!r} a second time with other content (first at {first_file}, line {first_line})"
            raise _FieldError("task_id", got, "every task_id once")
        seen[key] = times + 1, first_file, first_line, content
        if not times:
            return task
        return Task(f"{task.task_id}-{times + 1}", task.messages, task.tools, task.row, task.content_hash)


IN_MEMORY = "in memory"


@dataclass
class TaskRows(TaskFile):
    """The tasks of a list of dicts, a Hugging Face ``Dataset`` or any other iterable of mappings.

    In messages a row is a line of ``in memory``, counted from 1.
    """

    path: Path | str = IN_MEMORY
    rows: Iterable[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        self.files = []
        # What can be read only once is kept: tasks are counted and hashed before they are sampled.
        if iter(self.rows) is self.rows:
            self.rows = list(self.rows)

    def _rows(self) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        # A Dataset gives every row all columns; a null means that it was not there.
        columnar = hasattr(self.rows, "column_names")
        for number, row in enumerate(self.rows, 1):
            if not isinstance(row, Mapping):
                expected = f"tasks as rows that are dicts (row {number} is {described(row)})"
                raise wrong_argument(self.rows, "collect", expected)
            try:
                plain: dict[str, Any] = orjson.loads(orjson.dumps(dict(row)))
            except TypeError as error:
                got = f"a value that JSON has no form for ({error})"
                self._bad(DataError.bad_row(IN_MEMORY, number, None, got, "JSON values"))
                continue
            if columnar:
                plain = {k: _drop_nulls(v) for k, v in plain.items() if v is not None}
            yield Path(IN_MEMORY), number, plain

    def facts(self) -> list[dict[str, Any]]:
        digest = xxhash.xxh3_64()
        for _, _, row in self._rows():
            digest.update(_canonical(row) + b"\n")
        return [{"path": IN_MEMORY, "xxh3": digest.hexdigest()}]


Tasks = str | Path | Iterable[Mapping[str, Any]]


def parse_task(row: dict[str, Any], *, prompt_elsewhere: bool = False) -> Task:
    """One source row as a Task. Raises ValueError naming the field that is wrong. ``prompt_elsewhere``: a missing or empty
    ``responses_create_params.input`` is a task without messages."""
    content = hashlib.blake2b(_canonical({k: v for k, v in row.items() if k != "task_id"}), digest_size=16).hexdigest()
    given = row.get("task_id")
    if given is None:
        task_id = content[:16]
    elif (isinstance(given, str) and given) or (isinstance(given, int) and not isinstance(given, bool)):
        task_id = str(given)
    else:
        raise _FieldError("task_id", _short(given), "a non-empty string or an integer")
    name = next((s for s in _SOURCES if row.get(s) is not None), None)
    if name is None:
        raise _FieldError("prompt", "none", "one of prompt, messages, responses_create_params")
    if name == "responses_create_params":
        messages, tools = _from_responses(row[name], prompt_elsewhere)
    else:
        messages, tools = _messages(row[name], name, allow_text=name == "prompt"), None
    if row.get("tools") is not None:
        tools = _tools(row["tools"], "tools")
    return Task(task_id, messages, tools, row, content)


def _messages(value: Any, where: str, *, allow_text: bool) -> list[Message]:
    if allow_text and isinstance(value, str):
        if not value.strip():
            raise _FieldError(where, "an empty string", "a prompt")
        return [{"role": "user", "content": value}]
    expected = "a string or a list of messages" if allow_text else "a list of messages"
    if not isinstance(value, list):
        raise _FieldError(where, _short(value), expected)
    if not value:
        raise _FieldError(where, "an empty list", "at least one message")
    messages = list(_with_reasoning(value, where))
    if messages[-1]["role"] == "assistant":
        raise _FieldError(f"{where}[{len(messages) - 1}]", "an assistant message at the end", "a message to answer")
    return messages


def _with_reasoning(items: list[Any], where: str) -> Iterator[Message]:
    """The messages of items. What a ``reasoning`` item says belongs to the assistant message after it."""
    thoughts: list[str] = []
    for i, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "reasoning":
            given = item.get("summary") or item.get("content") or ""
            thoughts.append(_text(given, f"{where}[{i}].{'summary' if item.get('summary') else 'content'}"))
            continue
        message = _message(item, f"{where}[{i}]")
        reasoning = "\n".join(filter(None, thoughts))
        thoughts = []
        if reasoning and message["role"] == "assistant":
            message.setdefault("reasoning", reasoning)
        elif reasoning:
            yield {"role": "assistant", "content": "", "reasoning": reasoning}
        yield message
    if thoughts:
        yield {"role": "assistant", "content": "", "reasoning": "\n".join(filter(None, thoughts))}


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise _FieldError(where, _short(value), "a message object with role and content")
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
        raise _FieldError(f"{where}.role", _short(role), f"one of {', '.join(sorted(_ROLES))}")
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


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _FieldError(where, _short(value), "tool calls with a function name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise _FieldError(where, "arguments that are not JSON", "a JSON object") from error
    return {"id": value.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = (str(p.get("type")) for p in value if isinstance(p, dict))
        odd = next((kind for kind in kinds if any(word in kind for word in _NOT_TEXT)), None)
        if odd is not None:
            what = next(word for word in _NOT_TEXT if word in odd)
            raise _FieldError(where, f"a part of type {odd!r}: {what} content is not supported", "text only")
        parts = [p.get("text") if isinstance(p, dict) else p for p in value]
        if all(isinstance(p, str) for p in parts):
            return "".join(parts)  # type: ignore[arg-type]  # all() above does not narrow for mypy
    raise _FieldError(where, _short(value), "text, or a list of text parts")


def _from_responses(value: Any, prompt_elsewhere: bool) -> tuple[list[Message], list[dict[str, Any]] | None]:
    where = "responses_create_params"
    if not isinstance(value, dict):
        raise _FieldError(where, _short(value), "an object with input and optional tools")
    given = value.get("input")
    empty = prompt_elsewhere and (given is None or given == [] or given == "")
    messages = [] if empty else _messages(given, f"{where}.input", allow_text=True)
    if value.get("instructions"):
        messages = [{"role": "system", "content": _text(value["instructions"], f"{where}.instructions")}, *messages]
    tools = value.get("tools")
    return messages, _tools(tools, f"{where}.tools") if tools else None


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Chat-style schemas; the flat Responses style is wrapped."""
    if isinstance(value, str):  # Parquet files often hold nested schemas as JSON text
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise _FieldError(where, _short(value), "a list of function schemas") from error
    if not isinstance(value, list):
        raise _FieldError(where, _short(value), "a list of function schemas")
    tools = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise _FieldError(f"{where}[{i}]", _short(tool), "a function schema")
        flat = "function" not in tool
        function = {k: v for k, v in tool.items() if k not in ("type", "strict")} if flat else tool["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _FieldError(f"{where}[{i}]", _short(tool), "a function schema with a name")
        tools.append({"type": "function", "function": function})
    return tools or None


def _rows(file: Path, bad_line: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or 1-based row, row) of one file."""
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file)
        return
    with _open(file) as stream:
        try:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    line = line.removeprefix(BOM)
                if not line.strip():
                    continue
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    bad_line(file, number, f"text that is not JSON ({error})")
                    continue
                if not isinstance(row, dict):
                    bad_line(file, number, _short(row))
                    continue
                yield number, row
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise DataError.unreadable(file, str(error)) from error


def _parquet_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as source:
            for batch in source.iter_batches(batch_size=512):
                for row in batch.to_pylist():
                    number += 1
                    # Arrow gives every struct all keys of the column; a null key means that it was not there.
                    yield number, {k: _drop_nulls(v) for k, v in row.items() if v is not None}
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError.unreadable(file, str(error), "is it a whole Parquet file?") from error


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_drop_nulls(v) for v in value]
    return value


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    with file.open("rb") as raw:
        if file.name.endswith(".gz"):
            with gzip.open(raw) as stream:
                yield stream  # type: ignore[misc]  # GzipFile reads like IO[bytes] but is not typed as one
        elif file.name.endswith(".zst"):
            import zstandard

            try:
                yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))
            except zstandard.ZstdError as error:
                raise DataError.unreadable(file, str(error)) from error
        else:
            yield raw


def _expand(path: Path | str) -> list[Path]:
    text = str(path)
    # A file of that very name wins over a pattern: "tasks[1].jsonl" is a name, too.
    is_pattern = glob.has_magic(text) and not Path(text).exists()
    found = [Path(p) for p in sorted(glob.glob(text))] if is_pattern else [Path(text)]  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not found or not found[0].exists():
        raise DataError.missing_path(path, "a task file (.jsonl, .parquet, .gz, .zst) or a glob")
    for file in found:
        if file.is_dir():
            raise UsageError(
                f"{file}: is a folder, expected a task file", hint=f"give a file or a glob: {file}/*.jsonl"
            )
    return found


def _canonical(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    except TypeError:  # lone surrogates, integers above 64 bits
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
