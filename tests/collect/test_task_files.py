"""Task files: what a row may be, and what is said about one that it may not."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gymdata.commands.collect.task_shapes import TaskShape
from gymdata.commands.collect.tasks import TaskFile, parse_task
from gymdata.environments.responses import verify_body
from gymdata.errors import DataError, UsageError
from gymdata.rollouts.messages import messages_of
from gymdata.store.lines import row_lines
from gymdata.store.paths import Source


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_prompt_is_a_string_or_messages(tmp_path: Path) -> None:
    """prompt as text, prompt as messages and messages give the same conversation; every field stays in the row."""
    said = [{"role": "user", "content": "hi"}]
    file = write(
        tmp_path / "t.jsonl", {"prompt": "hi", "level": 3}, {"prompt": said, "n": 1}, {"messages": said, "n": 2}
    )
    tasks = list(TaskFile(file))
    assert [t.messages for t in tasks] == [said] * 3
    assert tasks[0].row == {"prompt": "hi", "level": 3}


def test_nemo_gym_rows(tmp_path: Path) -> None:
    """responses_create_params: text or items, content in parts, flat tool schemas, instructions, calls and their outputs."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
    ]
    rows = [
        {"responses_create_params": {"input": items, "tools": [tool]}},
        {"responses_create_params": {"input": "q", "instructions": "i"}},
    ]
    first, second = TaskFile(write(tmp_path / "t.jsonl", *rows))
    assert [m["role"] for m in first.messages] == ["system", "user", "assistant", "tool"]
    assert first.messages[1]["content"] == "ab"
    assert first.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert first.tools == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert [m["content"] for m in second.messages] == ["i", "q"]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"answer": 1}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "prompt[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"prompt": "x", "tools": "nonsense"}, "tools"),
        ({"prompt": "x", "tools": [{"function": {}}]}, "tools[0]"),
        ({"prompt": "x", "task_id": ""}, "task_id"),
        ({"prompt": "x", "task_id": 1.5}, "task_id"),
        ({"responses_create_params": []}, "responses_create_params"),
        ({"responses_create_params": {"tools": []}}, "responses_create_params.input"),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    """The error says which file, line and field, and --skip-bad-rows leaves exactly that row out."""
    file = write(tmp_path / "t.jsonl", {"prompt": "good"}, row)
    with pytest.raises(DataError) as caught:
        list(TaskFile(file))
    assert f"{file}, line 2, field {field!r}" in str(caught.value)
    lenient = TaskFile(file, skip_bad_rows=True)
    assert len(list(lenient)) == 1
    assert lenient.skipped == 1


def test_a_look_at_the_first_task_changes_no_count_of_the_last_full_pass(tmp_path: Path) -> None:
    """Notes and skipped rows are those of the whole file, whoever has looked at its beginning since."""
    rows = [{"question": "a"}, {"question": 3}, {"question": "b"}, {"question": "c"}]
    tasks = TaskFile(write(tmp_path / "t.jsonl", *rows), skip_bad_rows=True)
    assert [len(list(tasks)), next(iter(tasks)).messages[0]["content"]] == [3, "a"]
    assert (tasks.skipped, tasks.notes()) == (1, [f"{tmp_path / 't.jsonl'}: prompt = question (3 tasks)"])


def test_a_line_that_is_not_json(tmp_path: Path) -> None:
    """A broken line is an error naming it, or is skipped and counted."""
    file = write(tmp_path / "t.jsonl", {"prompt": "a"}, '{"prompt": "b', "[1]", {"prompt": "c"})
    with pytest.raises(DataError, match="line 2: got text that is not JSON"):
        list(TaskFile(file))
    lenient = TaskFile(file, skip_bad_rows=True)
    assert [t.messages[0]["content"] for t in lenient] == ["a", "c"]
    assert lenient.skipped == 2


def test_a_task_id_twice_is_an_error(tmp_path: Path) -> None:
    """Two rows with one given task_id and other content are refused at the second, and both places are named."""
    rows = {"task_id": "x", "prompt": "a"}, {"task_id": "y", "prompt": "a"}, {"task_id": "x", "prompt": "b"}
    file = write(tmp_path / "t.jsonl", *rows)
    with pytest.raises(DataError, match=rf"line 3, field 'task_id'.*first at {file}, line 1"):
        list(TaskFile(file))


def test_identical_rows_are_told_apart(tmp_path: Path) -> None:
    """The same row again is another task of the same content, with a task_id as without; an id that is made from the
    content stays when lines move."""
    row = {"task_id": "x", "prompt": "a"}
    assert [t.task_id for t in TaskFile(write(tmp_path / "t.jsonl", row, row, row))] == ["x", "x-2", "x-3"]
    # An id that another row has is passed over; a row that comes later with one is refused.
    other = {"task_id": "x-2", "prompt": "b"}
    assert [t.task_id for t in TaskFile(write(tmp_path / "o.jsonl", other, row, row, row))] == [
        "x-2",
        "x",
        "x-3",
        "x-4",
    ]
    with pytest.raises(DataError, match=r"line 3, field 'task_id': got 'x-2' a second time"):
        list(TaskFile(write(tmp_path / "l.jsonl", row, row, other)))
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}]
    forward = [t.task_id for t in TaskFile(write(tmp_path / "f.jsonl", *rows))]
    backward = [t.task_id for t in TaskFile(write(tmp_path / "b.jsonl", *reversed(rows)))]
    assert sorted(forward) == sorted(backward)
    assert forward[0] != forward[1]
    assert forward[2] == f"{forward[0]}-2"


def test_reasoning_items_belong_to_the_message_after_them() -> None:
    """A Responses-shaped input with reasoning is read as chat messages that carry it."""
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
        {"role": "assistant", "content": "a", "type": "message"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "more"},
    ]
    messages = parse_task({"responses_create_params": {"input": items}}, TaskShape()).messages
    assert [(m["role"], m.get("reasoning")) for m in messages] == [
        ("user", None), ("assistant", "Hm."), ("tool", None), ("assistant", "So."), ("user", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fault"), [('"\\ud800"', "a lone surrogate"), ("1e400", "not finite or too long"), ("NaN", "not finite")]
)
def test_what_only_python_reads_is_named(tmp_path: Path, text: str, fault: str) -> None:
    """Text that is not Unicode is not called a number."""
    (tmp_path / "t.jsonl").write_text(f'{{"prompt": "a", "x": {text}}}\n')
    with pytest.raises(DataError, match=f"line 1.*{fault}"):
        list(TaskFile(tmp_path / "t.jsonl"))


def test_text_and_calls_of_one_answer_are_one_message() -> None:
    """As the model wrote them, and as a rollout's messages hold the same items; a call after a result is a new one."""

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    def result(name: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": "r"}

    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": "I look.", "type": "message"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Both."}]},
        *(call("f"), call("g"), result("f"), result("g"), call("h"), result("h")),
        {"role": "user", "content": "more"},
    ]
    messages = parse_task({"responses_create_params": {"input": items}}, TaskShape()).messages
    assert [
        (m["role"], m["content"], m.get("reasoning"), [c["id"] for c in m.get("tool_calls", ())]) for m in messages
    ] == [
        ("user", "q", None, []), ("assistant", "I look.", "Hm.\nBoth.", ["f", "g"]), ("tool", "r", None, []),
        ("tool", "r", None, []), ("assistant", None, None, ["h"]), ("tool", "r", None, []), ("user", "more", None, []),
    ]  # fmt: skip
    saved = list(messages_of(items, (), {}))
    assert [(m["role"], m["content"]) for m in saved] == [(m["role"], m["content"]) for m in messages]


@pytest.mark.parametrize("params", [{"input": []}, {"input": ""}, {}])
def test_an_input_without_a_prompt_is_refused(tmp_path: Path, params: dict[str, Any]) -> None:
    """By the name of its field."""
    file = write(tmp_path / "t.jsonl", {"responses_create_params": params, "answer": 1})
    with pytest.raises(DataError, match=r"responses_create_params\.input"):
        list(TaskFile(file))


@pytest.mark.parametrize("kind", ["input_image", "image_url", "image"])
def test_images_are_refused_in_their_own_words(tmp_path: Path, kind: str) -> None:
    """Whoever gives images learns that text is all that is taken."""
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, "image_url": "data:"}]
    file = write(tmp_path / "t.jsonl", {"messages": [{"role": "user", "content": parts}]})
    with pytest.raises(DataError, match=f"'{kind}': image content is not supported, expected text only"):
        list(TaskFile(file))


@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.parametrize("shape", ["flat", "chat", "params", "params without input", "text"])
def test_servers_get_a_tool_as_the_task_has_it(strict: bool | None, shape: str) -> None:
    """``strict`` and every other field of a tool are sent unchanged, whatever shape the task's row has."""
    function = {"name": "f", "parameters": {"type": "object"}, "description": "d", "strict": strict}
    flat = {"type": "function", **function}
    messages = [{"role": "user", "content": "q"}]
    row: dict[str, Any] = {
        "flat": {"messages": messages, "tools": [flat]},
        "chat": {"messages": messages, "tools": [{"type": "function", "function": function}]},
        "params": {"responses_create_params": {"input": messages, "tools": [flat]}},
        "params without input": {"messages": messages, "responses_create_params": {"tools": [flat]}},
        "text": {"messages": messages, "tools": json.dumps([flat])},
    }[shape]
    task = parse_task(row, TaskShape())
    body = verify_body(task, [*messages, {"role": "assistant", "content": "a"}], None, "m")
    assert body["responses_create_params"]["tools"] == [flat]
    assert body["response"]["tools"] == [flat]


def test_a_compressed_file_that_is_torn_says_how_far_it_was_read(tmp_path: Path) -> None:
    """Some lines before the cut are read, and none of them is counted that was not."""
    rows = b"".join(b'{"prompt": "%s"}\n' % os.urandom(40).hex().encode() for _ in range(4_000))
    packed = gzip.compress(rows)
    (tmp_path / "t.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    read = list[int]()
    with pytest.raises(DataError, match=r"t\.jsonl\.gz: cannot be read: .*\(after line ([\d,]+)\)") as error:
        read.extend(number for number, _ in row_lines(Source(tmp_path / "t.jsonl.gz", "jsonl")))
    assert f"(after line {len(read):,})" in str(error.value)
    assert 1_000 < len(read) < 2_100


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_compressed_file_is_read_whatever_its_name_says(tmp_path: Path, pack: Any) -> None:
    (tmp_path / "t.jsonl").write_bytes(pack(b'{"prompt": "q1"}\n'))
    (tmp_path / "t.jsonl.gz").write_bytes(b'{"prompt": "q1"}\n')
    for name in ("t.jsonl", "t.jsonl.gz"):
        assert [task.row for task in TaskFile(tmp_path / name)] == [{"prompt": "q1"}]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize(("name", "text"), [("t.jsonl", '\ufeff{"prompt": "q1"}\n'), ("t.csv", "\ufeffprompt\nq1\n")])
def test_utf_16_is_named(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    (tmp_path / name).write_bytes(text.removeprefix("\ufeff" * (encoding == "utf-16")).encode(encoding))
    with pytest.raises(DataError, match=f"{name}: cannot be read: its text is UTF-16, expected UTF-8"):
        list(TaskFile(tmp_path / name))


def test_a_header_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt,answer\n\n")
    with pytest.raises(DataError, match=r"t\.csv: cannot be read: a header \(prompt, answer\), and no row below it"):
        list(TaskFile(tmp_path / "t.csv"))


def test_a_row_of_a_csv_file_has_the_line_that_it_begins_on(tmp_path: Path) -> None:
    """Also after line breaks in cells and empty lines; a row with other cells has its text."""
    (tmp_path / "t.csv").write_text('prompt,answer\n"a\n\nb",1\n\n"c\nd",2\nhello world\n')
    assert [(number, json.loads(line)) for number, line in row_lines(Source(tmp_path / "t.csv", "jsonl", "csv"))] == [
        (2, {"prompt": "a\n\nb", "answer": "1"}),
        (6, {"prompt": "c\nd", "answer": "2"}),
        (8, "1 cells, of 2: hello world"),
    ]


@pytest.mark.parametrize("name", ["t.jsonl.zst", "t.csv.zst"])
def test_a_zstd_file_that_ends_between_two_blocks_is_not_a_shorter_one(tmp_path: Path, name: str) -> None:
    """Every line before the cut can be read, and the file's end is missing."""
    compressor = zstandard.ZstdCompressor().compressobj()
    lines = b"prompt\nq1\nq2\n" if name == "t.csv.zst" else b'{"prompt": "q1"}\n{"prompt": "q2"}\n'
    (tmp_path / name).write_bytes(compressor.compress(lines) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    with pytest.raises(DataError, match=name):
        list(TaskFile(tmp_path / name))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_csv_file_is_read_by_the_separator_of_its_header(tmp_path: Path, separator: str) -> None:
    """Spreadsheets write semicolons where the comma is the decimal sign; a comma in a cell stays."""
    (tmp_path / "t.csv").write_text(
        separator.join(("prompt", "answer")) + "\n" + separator.join(('"1,5;2"', "7")) + "\n"
    )
    assert [task.row for task in TaskFile(tmp_path / "t.csv")] == [{"prompt": "1,5;2", "answer": "7"}]


def test_the_line_that_tells_excel_the_separator_is_no_header(tmp_path: Path) -> None:
    """The separator that it names holds, and the lines keep their numbers."""
    (tmp_path / "t.csv").write_bytes(b"sep=;\r\nprompt;answer, short\r\na,b;7\r\n")
    assert [(number, json.loads(line)) for number, line in row_lines(Source(tmp_path / "t.csv", "jsonl", "csv"))] == [
        (3, {"prompt": "a,b", "answer, short": "7"})
    ]


def test_a_csv_file_of_one_column_is_no_other_for_a_semicolon_in_a_cell(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt\nfirst; then\n")
    assert [task.row for task in TaskFile(tmp_path / "t.csv")] == [{"prompt": "first; then"}]


@pytest.mark.parametrize(
    "header",
    ['prompt;"answer, short"', "prompt;answer, short;;", "\nprompt;answer, short", '"prompt\n";"answer, short"'],
)
def test_a_header_of_a_spreadsheet_is_divided_at_its_separator_alone(tmp_path: Path, header: str) -> None:
    """A comma, a line break or an empty column in it divides nothing, and an empty line before it is none."""
    (tmp_path / "t.csv").write_text(f"{header}\na;7{';;' * header.endswith(';;')}\n")
    ((_, line),) = row_lines(Source(tmp_path / "t.csv", "jsonl", "csv"))
    row = json.loads(line)
    assert list(row.values()) == ["a", "7"]
    assert "answer, short" in row


@pytest.mark.parametrize(("name", "content"), [("t.xlsx", b"PK\x03\x04\x00"), ("t.py", b"import os\n")])
def test_a_file_of_another_kind_is_answered_with_the_kinds_that_are_read(
    tmp_path: Path, name: str, content: bytes
) -> None:
    """No row of it is bad: none is a row."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read: .*\.csv, \.tsv"):
        list(TaskFile(tmp_path / name))


def test_what_is_no_file(tmp_path: Path) -> None:
    """A missing file, a glob without matches and a folder are told apart."""
    for path in (tmp_path / "no.jsonl", f"{tmp_path}/*.jsonl"):
        with pytest.raises(DataError, match="no such file"):
            TaskFile(path)
    with pytest.raises(UsageError, match="is a folder"):
        TaskFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is no regular file"):
        TaskFile(tmp_path / "pipe")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)))  # fmt: skip
def test_no_row_makes_the_reader_fall_over(value: Any) -> None:
    """Whatever JSON stands in a field, the row is a task or a ValueError that names the field."""
    for key in ("prompt", "messages", "responses_create_params", "task_id", "tools"):
        try:
            task = parse_task({"prompt": "x", key: value}, TaskShape())
        except ValueError as error:
            assert str(error)
        else:
            assert task.task_id


@given(st.dictionaries(st.text(min_size=1), st.integers() | st.text(), max_size=5))
def test_the_content_hash_knows_no_key_order(fields: dict[str, Any]) -> None:
    """Reordering a row's keys or renaming the task changes no content hash; another value does."""
    row = {**fields, "prompt": "x"}
    shape = TaskShape()
    hash_ = parse_task({k: v for k, v in row.items() if k not in ("task_id", "tools", "messages")}, shape).content_hash
    again = {k: row[k] for k in reversed(list(row)) if k not in ("task_id", "tools", "messages")}
    assert parse_task({**again, "task_id": "other"}, shape).content_hash == hash_
    assert parse_task({**again, "prompt": "y"}, shape).content_hash != hash_


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_a_byte_order_mark_is_no_part_of_the_first_task(tmp_path: Path, pack: Any) -> None:
    """Editors that write one spoil nothing, compressed files included."""
    suffix = {bytes: "", gzip.compress: ".gz", zstandard.compress: ".zst"}[pack]
    file = tmp_path / f"t.jsonl{suffix}"
    file.write_bytes(pack(b'\xef\xbb\xbf{"prompt": "hi"}\n{"prompt": "ho"}\n'))
    assert [t.row["prompt"] for t in TaskFile(file)] == ["hi", "ho"]


def test_a_name_with_brackets_is_a_name_when_it_is_there(tmp_path: Path) -> None:
    """tasks[1].jsonl is the file of that name before it is a pattern for tasks1.jsonl."""
    write(tmp_path / "tasks1.jsonl", {"prompt": "pattern"})
    assert [t.row["prompt"] for t in TaskFile(tmp_path / "tasks[1].jsonl")] == ["pattern"]
    write(tmp_path / "tasks[1].jsonl", {"prompt": "name"})
    assert [t.row["prompt"] for t in TaskFile(tmp_path / "tasks[1].jsonl")] == ["name"]
