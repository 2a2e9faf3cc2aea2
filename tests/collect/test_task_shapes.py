"""Task files as they are published: formats, columns under other names, and what is said about a shape that is not known."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, ipc

import gymdata
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.collect.task_shapes import TaskShape, TextTemplate
from gymdata.commands.collect.tasks import TaskFile, TaskRows, parse_task
from gymdata.errors import DataError, UsageError
from gymdata.store import read_table
from tests.collect.fake_parts import parts

ROWS = [{"question": f"How much is {i}+1?", "answer": str(i + 1)} for i in range(700)]
ALPACA = {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"}
SHAREGPT = {
    "id": "c1",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2+3?"},
        {"from": "gpt", "value": "5"},
    ],
}
SFT = {"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]}


def one(row: dict[str, Any], *columns: str, system: str | None = None, template: str | None = None) -> Any:
    prompt = TextTemplate(template, "--prompt-template") if template is not None else None
    shape = TaskShape(dict(text.split("=") for text in columns), system, prompt)
    return parse_task(row, shape)


def text_table(separator: str) -> bytes:
    lines = ["question\tanswer", *(f'"{row["question"]}"\t{row["answer"]}' for row in ROWS)]
    return "\n".join(lines).replace("\t", separator).encode()


def write_stream(file: Path, table: pa.Table) -> None:
    """As an Arrow stream of several batches."""
    with pa.OSFile(str(file), "wb") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def written(file: Path) -> Path:
    """``ROWS`` in the format that the file's name says."""
    table = pa.Table.from_pylist(ROWS)
    if file.suffix == ".arrow":
        write_stream(file, table)
    elif file.suffix == ".feather":
        feather.write_feather(table, str(file))
    elif file.suffix == ".parquet":
        pq.write_table(table, file)
    else:
        plain = {
            ".csv": text_table(","), ".tsv": text_table("\t"), ".json": json.dumps(ROWS, indent=1).encode(),
            ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        }  # fmt: skip
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(file.suffix, bytes)
        file.write_bytes(pack(next(plain[suffix] for suffix in file.suffixes if suffix in plain)))
    return file


@pytest.mark.parametrize(
    "name",
    [
        *("t.jsonl", "t.jsonl.gz", "t.jsonl.zst", "t.json", "t.json.gz", "t.json.zst", "[1].json"),
        *("t.csv", "t.csv.gz", "t.tsv", "t.arrow", "t.feather", "t.parquet"),
    ],
)
def test_every_format_gives_the_same_tasks(tmp_path: Path, name: str) -> None:
    """JSON lines and arrays, CSV, TSV, Arrow (stream and file) and Parquet, compressed or not, give the rows in order."""
    assert list(TaskFile(written(tmp_path / name))) == list(TaskRows(rows=ROWS))


def test_a_glob_is_its_files_and_a_limit_takes_the_first(tmp_path: Path) -> None:
    written(tmp_path / "t.jsonl")
    assert list(TaskFile(f"{tmp_path}/t.js*l")) == list(TaskRows(rows=ROWS))
    assert list(TaskFile(tmp_path / "t.jsonl", limit=5)) == list(TaskRows(rows=ROWS[:5]))


@pytest.mark.parametrize("name", ["t.json", "t.arrow", "t.csv.gz", "t.parquet", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_truncated_file_is_unreadable(tmp_path: Path, name: str) -> None:
    """Half a file is an error that names it, not a shorter one."""
    file = written(tmp_path / name)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match=name):
        list(TaskFile(file))


def test_cells_of_text_tables_are_text_and_empty_ones_are_absent(tmp_path: Path) -> None:
    """007 stays 007, a quoted cell may hold commas and line breaks, and an empty cell is no value."""
    (tmp_path / "t.csv").write_text('prompt,answer,level\n"a, b\nc",007,\nd,,3\n')
    rows = [task.row for task in TaskFile(tmp_path / "t.csv")]
    assert rows == [{"prompt": "a, b\nc", "answer": "007"}, {"prompt": "d", "level": "3"}]


def test_a_row_of_a_text_table_with_other_cells_is_named(tmp_path: Path) -> None:
    """A CSV row with a cell too many is an error with its line, or is skipped and counted."""
    (tmp_path / "t.csv").write_text("prompt,answer\na,1\nb,2,3\nc,4\n")
    with pytest.raises(DataError, match=r"t\.csv, line 3: got '3 cells, of 2: b,2,3', expected a cell for each column"):
        list(TaskFile(tmp_path / "t.csv"))
    lenient = TaskFile(tmp_path / "t.csv", skip_bad_rows=True)
    assert [t.row["prompt"] for t in lenient] == ["a", "c"]
    assert lenient.skipped == 1


def test_json_files_may_hold_lines(tmp_path: Path) -> None:
    """A .json file that holds an object a line is read as lines, as it was."""
    (tmp_path / "t.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [t.row["prompt"] for t in TaskFile(tmp_path / "t.json")] == ["a", "b"]


def test_values_of_an_array_are_not_changed(tmp_path: Path) -> None:
    """Dates, numbers and mixed values of a JSON array are what orjson reads, not what a column's type makes of them."""
    rows = [{"prompt": "a", "x": "2020-01-01", "y": 1}, {"prompt": "b", "x": 2.5, "y": {"z": [None, "1"]}}]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    assert [t.row for t in TaskFile(tmp_path / "t.json")] == rows


def test_a_saved_dataset_is_a_folder(tmp_path: Path) -> None:
    """A folder of save_to_disk is read without datasets; one of several splits asks for one of them."""
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        write_stream(folder / "data-0.arrow", pa.Table.from_pylist(ROWS[:3]))
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(TaskFile(tmp_path / "saved" / "test")) == list(TaskRows(rows=ROWS[:3]))
    with pytest.raises(UsageError, match=r"holds the splits train, test(.|\n)*saved/train"):
        TaskFile(tmp_path / "saved")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert len(list(TaskFile(tmp_path / "saved"))) == 3


@pytest.mark.parametrize(
    ("row", "asked", "answer", "said"),
    [
        ({"question": "q", "answer": "#### 4"}, "q", "#### 4", "prompt = question"),
        ({"problem": "p", "solution": "s"}, "p", "s", "prompt = problem, answer = solution"),
        ({"prompt": "p", "target": 3}, "p", 3, "answer = target"),
        (ALPACA, "Add the numbers.\n\n2 and 3", "5", "prompt = instruction + input, answer = output"),
        ({**ALPACA, "input": ""}, "Add the numbers.", "5", "prompt = instruction, answer = output"),
        ({"input": "i", "output": "o"}, "i", "o", "prompt = input, answer = output"),
        ({"turns": ["q", "And then?"], "answer": "5"}, "q", "5", "prompt = turns[0] of 2"),
        ({"prompt_id": 1, "prompt": ["q", "And then?"], "answer": "5"}, "q", "5", "prompt = prompt[0] of 2"),
        (SHAREGPT, "2+3?", "5", "messages = conversations, answer = the last message"),
        (SFT, "2+3?", "5", "answer = the last message"),
    ],
)
def test_published_columns_are_recognised_and_reported(
    tmp_path: Path, row: dict[str, Any], asked: str, answer: Any, said: str
) -> None:
    """The prompt and the answer come from the columns that published datasets have, the note says which, the row stays."""
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    tasks = TaskFile(tmp_path / "t.jsonl")
    (task,) = tasks
    assert task.messages[-1] == {"role": "user", "content": asked}
    assert task.row["answer"] == answer
    assert tasks.notes() == [f"{tmp_path / 't.jsonl'}: {said} (1 task)"]
    # Of several texts of a user, the first is the prompt.
    assert {key: task.row[key] for key in row} == row | ({"prompt": asked} if "prompt" in row else {})


def test_plain_tasks_are_not_announced() -> None:
    """Nothing is said of rows that have prompt and answer."""
    tasks = TaskRows(rows=[{"prompt": "p", "answer": "a"}])
    assert len(list(tasks)) == 1
    assert tasks.notes() == []


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"prompt": "hi", "level": 3}, "475766f258e9803949093321093bfc11"),
        ({"prompt": "hi", "solution": "4", "question": "other"}, "c24d62abb3c55d5592cb22c7e0b15a53"),
        ({"task_id": "a", "messages": [{"role": "user", "content": "q"}]}, "e4bdc2da685472dfac1c93275873ba72"),
        ({"responses_create_params": {"input": "q"}, "expected_answer": "4"}, "548de388c3d625c6231dec20c1df36df"),
    ],
)
def test_tasks_keep_their_identity(row: dict[str, Any], content: str) -> None:
    """The content hash of a row that has a prompt is that of the row, whatever is recognised in it."""
    assert parse_task(row, TaskShape()).content_hash == content


def test_a_server_gets_its_row_as_it_is() -> None:
    """Nothing is added to a NeMo Gym row, but the system message that was asked for."""
    row = {"responses_create_params": {"input": "q"}, "expected_answer": "4"}
    assert parse_task(row, TaskShape()).row == row
    task = one(row, system="s")
    assert task.row["responses_create_params"] == {"input": "q", "instructions": "s"}
    assert [m["content"] for m in task.messages] == ["s", "q"]
    with pytest.raises(ValueError, match="--prompt-template"):
        one(row, template="x")


def test_map_names_columns_and_what_is_in_them() -> None:
    """--map beats what is recognised, reaches into columns, and names what is not there."""
    row = {"text": "q", "question": "no", "reward_model": {"ground_truth": "4"}, "id": 7}
    task = one(row, "prompt=text", "answer=reward_model.ground_truth", "task_id=id")
    assert (task.messages[-1]["content"], task.row["answer"], task.task_id) == ("q", "4", "7")
    with pytest.raises(ValueError, match=r"nothing: got none, expected the column that --map prompt=nothing names"):
        one(row, "prompt=nothing")
    assert one({"prompt": "no", "chat": SFT["messages"]}, "messages=chat").messages == SFT["messages"][:1]


def test_a_mapped_column_that_no_task_has_is_refused() -> None:
    """A misspelt column would score nothing: it is an error, but not where only some rows lack it."""
    rows: list[dict[str, Any]] = [{"prompt": "p", "label": "a"}, {"prompt": "q"}]
    assert [t.row.get("answer") for t in TaskRows(rows=rows, shape=TaskShape({"answer": "label"}))] == ["a", None]
    for limit in (1, None):
        with pytest.raises(UsageError, match=r"--map answer=labl: no task has this column(.|\n)*prompt, label"):
            list(TaskRows(rows=rows[:1], shape=TaskShape({"answer": "labl"}), limit=limit))


def test_a_system_file_that_is_not_there_is_no_text(tmp_path: Path) -> None:
    """A misspelt name of a text file is an error, not the system message; nor is a column that holds no text."""
    with pytest.raises(DataError, match=r"rules\.txt: no such file"):
        TaskShape.of([], str(tmp_path / "rules.txt"), None)
    with pytest.raises(ValueError, match="level: got 3, expected text"):
        one({"prompt": "p", "level": 3}, "system=level")


def test_the_system_message_is_for_tasks_without_one(tmp_path: Path) -> None:
    """--system is a text or a file of it; a conversation that has its own keeps it; a ShareGPT row may have it beside."""
    (tmp_path / "s.txt").write_text("From a file.\n")
    shape = TaskShape.of([], str(tmp_path / "s.txt"), None)
    assert parse_task({"prompt": "q"}, shape).messages[0] == {"role": "system", "content": "From a file."}
    assert one({"prompt": "q"}, system="s").row["prompt"] == "q"
    assert [m["content"] for m in one(SHAREGPT, system="s").messages] == ["Be brief.", "2+3?"]
    beside = {"system": "b", "conversations": SHAREGPT["conversations"][1:]}
    assert [m["content"] for m in one(beside, system="s").messages] == ["b", "2+3?"]


def test_a_template_makes_the_prompt_of_the_columns() -> None:
    """A template has the row's columns and the prompt; it needs no prompt column; a name that no column has is an error."""
    row = {"nums": [1, 2], "target": 3}
    task = one(row, template="Make {{ target }} of {{ nums | join(' and ') }}.")
    assert task.messages == [{"role": "user", "content": "Make 3 of 1 and 2."}]
    assert task.row["prompt"] == "Make 3 of 1 and 2."
    assert one({"question": "q"}, template="{{ prompt }} Think.").messages[0]["content"] == "q Think."
    assert one(SFT, template="{{ prompt }} Think.").messages[-1]["content"] == "2+3? Think."
    with pytest.raises(ValueError, match="'quest' is undefined"):
        one({"question": "q"}, template="{{ quest }}")
    with pytest.raises(UsageError, match="--prompt-template: line 1"):
        one({"question": "q"}, template="{{ quest")


@given(st.sampled_from(["a", "b"]), st.sampled_from(["a", "b"]))
def test_settings_are_part_of_a_tasks_content(first: str, second: str) -> None:
    """Two tasks of one row have one content hash exactly when system, template and map make the same of it."""
    row = {"prompt": "p", "a": "1", "b": "2"}
    assert (one(row, system=first).content_hash == one(row, system=second).content_hash) == (first == second)
    pair = [one(row, template=f"{{{{ {name} }}}}").content_hash for name in (first, second)]
    assert (pair[0] == pair[1]) == (first == second)
    mapped = [one(row, f"answer={name}").content_hash for name in (first, second)]
    assert (mapped[0] == mapped[1]) == (first == second)


@pytest.mark.parametrize(
    "row",
    [
        {"my text": "Which one?", "the label": "b", "n": 3},
        {"context": {"ask": "Which one?"}, "gold": 4},
        {"chat": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"a": "short", "b": "the longest text of them"},
    ],
)
def test_another_shape_is_answered_with_the_map_that_reads_it(tmp_path: Path, row: dict[str, Any]) -> None:
    """The error shows the columns and the row, and its --map flags make the file readable."""
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError) as caught:
        list(TaskFile(tmp_path / "t.jsonl"))
    assert all(name in caught.value.message for name in row)
    hint = str(caught.value.hint).partition(";")[0].removeprefix("pass ")
    shape = TaskShape.of(CollectConfig(tasks="t", map=shlex.split(hint)[1::2]).map, None, None)
    assert len(list(TaskFile(tmp_path / "t.jsonl", shape=shape))) == 1


@pytest.mark.parametrize("value", [["prompt"], ["promt=x"], ["prompt=a", "prompt=b"], ["prompt="], 3, [3]])
def test_a_map_that_is_none_is_refused(value: Any) -> None:
    """--map is FIELD=COLUMN with a field that tasks have, each once."""
    with pytest.raises(UsageError, match=r"--map: got .*, expected FIELD=COLUMN"):
        CollectConfig.load(None, {"tasks": "t", "map": value}, flags={"map": "--map"})


def test_tasks_in_memory_take_the_same_shapes(tmp_path: Path) -> None:
    """collect recognises and maps the columns of rows in memory; the map may be a mapping."""
    summary = gymdata.collect([ALPACA, SHAREGPT, SFT], output=tmp_path / "a", seed=1, parts=parts())
    assert summary.rollouts == 3
    rows = [{"text": "1+1?", "label": "2"}]
    mapping = {"prompt": "text", "answer": "label"}
    summary = gymdata.collect(rows, map=mapping, reward=["exact_match"], output=tmp_path / "b", seed=1, parts=parts())
    assert summary.rollouts == 1
    task = read_table(tmp_path / "b")["task"][0].as_py()
    assert json.loads(task) == {"text": "1+1?", "label": "2", "prompt": "1+1?", "answer": "2"}


@pytest.mark.torch
def test_a_hub_dataset_is_read_from_the_cache_without_a_network(tmp_path: Path) -> None:
    """hf:NAME:SPLIT reads what the cache of datasets holds; a split that is not there and a name that is not there are
    errors."""
    inside = tmp_path / "datasets" / "owner___sums" / "default" / "0.0.0" / "0123456789abcdef"
    inside.mkdir(parents=True)
    write_stream(inside / "sums-test.arrow", pa.Table.from_pylist(ROWS[:3]))
    column = {"dtype": "string", "_type": "Value"}
    split = {"name": "test", "num_bytes": 100, "num_examples": 3, "dataset_name": "sums"}
    info: dict[str, Any] = {"builder_name": "parquet", "dataset_name": "sums", "config_name": "default"}
    info |= {"version": {"version_str": "0.0.0"}}
    info |= {"features": {"question": column, "answer": column}, "splits": {"test": split}}
    (inside / "dataset_info.json").write_text(json.dumps(info))
    code = """
import sys
from gymdata.commands.collect.tasks import TaskFile
from gymdata.errors import GymdataError
for name in sys.argv[1:]:
    try:
        print([t.messages[0]["content"] for t in TaskFile(name)])
    except GymdataError as error:
        print(error.exit_code, type(error).__name__, str(error))
"""
    names = ["hf:owner/sums:test", "hf:owner/sums", "hf:owner/sums:valid", "hf:owner/none", "hf:owner/sums:test[:5]"]
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    out = subprocess.run([sys.executable, "-c", code, *names], env=env, capture_output=True, text=True, check=True)
    lines = [line for line in out.stdout.splitlines() if line[:1] in "[0123456789"]
    asked = str([row["question"] for row in ROWS[:3]])
    assert lines[:2] == [asked, asked], out.stdout + out.stderr
    assert lines[2].startswith("2 UsageError hf:owner/sums:valid"), out.stdout
    assert lines[3].startswith(("2 DataError hf:owner/none", "3 OutsideError hub: hf:owner/none")), out.stdout
    assert lines[4].startswith("2 UsageError tasks: got 'hf:owner/sums:test[:5]'"), out.stdout
