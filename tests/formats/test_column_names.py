"""Columns of a prompt and its answer are known by their names, in any case, or named by --map: the same for collect, import
and training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.collect.task_shapes import TaskShape
from gymdata.commands.collect.tasks import TaskFile
from gymdata.errors import DataError, UsageError
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.formats.trajectories import ANSWER, QUESTION, imported, rejected, said, write

ASKED = QUESTION["content"]
PAIRS_OF_COLUMNS = [
    ("question", "answer"), ("input", "output"), ("problem", "solution"), ("prompt", "answer"), ("prompt", "target"),
]  # fmt: skip


@pytest.mark.tokenizer
@pytest.mark.parametrize("columns", PAIRS_OF_COLUMNS)
def test_each_pair_of_columns_is_trained_by_one_command(columns: tuple[str, str], tmp_path: Path) -> None:
    """As it is collected from, and imported."""
    file = write(tmp_path / "rows.jsonl", dict(zip(columns, (ASKED, "5"), strict=True)))
    report = gymdata.train_sft(file, "sample_data/policy", tmp_path / "out", dry_run=True)
    assert report.trained_tokens["equal"] is True
    (rollout,) = imported(file, "trl-prompt-completion")
    (task,) = TaskFile(file)
    assert said(rollout["messages"]) == [QUESTION, ANSWER]
    assert (task.messages, task.row["answer"]) == ([QUESTION], "5")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("columns", [*PAIRS_OF_COLUMNS, ("prompt", "completion"), ("query", "response")])
def test_columns_are_known_in_any_case_and_file(columns: tuple[str, str], suffix: str, tmp_path: Path) -> None:
    """A table as Excel saves it: a byte order mark, semicolons, capital letters."""
    file, row = tmp_path / f"rows.{suffix}", {columns[0].title(): ASKED, columns[1].upper(): "5"}
    if suffix == "csv":
        file.write_bytes(b"\xef\xbb\xbf" + f"{';'.join(row)}\r\n{';'.join(row.values())}\r\n".encode())
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), file)
    else:
        write(file, [row] if suffix == "json" else row)
    (rollout,) = imported(file)
    (task,) = TaskFile(file)
    assert said(rollout["messages"]) == [QUESTION, ANSWER]
    assert (task.messages, task.row["answer"]) == ([QUESTION], "5")


def test_labels_and_preferences_are_known_in_any_case(tmp_path: Path) -> None:
    row = {"Prompt": ASKED, "Completion": "5", "Label": "No"}
    assert imported(write(tmp_path / "a.jsonl", row))[0]["reward"] == 0.0
    pair = {"PROMPT": ASKED, "Chosen": "5", "Rejected": "6", "Margin": "2"}
    assert imported(write(tmp_path / "b.jsonl", pair), "trl-preference")[0]["margin"] == 2.0


@pytest.mark.parametrize(
    ("row", "columns", "name"),
    [
        ({"q": ASKED, "a": 5, "note": "x"}, {"prompt": "q", "answer": "a"}, "trl-prompt-completion"),
        ({"q": {"text": ASKED}, "a": "5", "x": "no"}, {"prompt": "q.text", "answer": "a"}, "trl-prompt-completion"),
        ({"problem": ASKED, "solution": "5", "answer": "4"}, {"answer": "solution"}, "trl-prompt-completion"),
        ({"chat": [QUESTION, ANSWER]}, {"messages": "chat"}, "trl-messages"),
    ],
)
def test_a_column_is_named_by_map(row: dict[str, Any], columns: dict[str, str], name: str, tmp_path: Path) -> None:
    """Where no name is known, or several may be meant."""
    file = write(tmp_path / "rows.jsonl", row)
    done = gymdata.import_rollouts(file, tmp_path / "run", map=columns)
    assert (done.format, done.rollouts) == (name, 1)
    (rollout,) = to_rows(read_table(tmp_path / "run"))
    assert said(rollout["messages"]) == [QUESTION, ANSWER]
    more = {} if name == "trl-messages" else {"task": next(iter(TaskFile(file, shape=TaskShape(columns))))}
    assert all(task.messages == [QUESTION] for task in more.values())


def test_preferences_are_named_by_map_too(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"q": ASKED, "good": "5", "bad": "6"})
    done = gymdata.import_rollouts(file, tmp_path / "run", map=["prompt=q", "chosen=good", "rejected=bad"])
    assert (done.format, done.pairs) == ("trl-preference", 1)


@pytest.mark.parametrize(
    "row",
    [
        {"question": ASKED, "answer": "5", "context": "Count."}, {"problem": ASKED, "solution": "So 5.", "answer": "5"},
        {"prompt": ASKED, "input": "2 and 3", "target": "5"}, {"question": ASKED, "answer": "5", "choices": ["4", "5"]},
    ],
)  # fmt: skip
def test_columns_that_may_be_part_of_a_question_are_named_with_the_way_out(row: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", row)
    for read in (gymdata.import_rollouts, lambda path, out: gymdata.train_sft(path, "sample_data/policy", out)):
        with pytest.raises(DataError, match="may be part of the question") as error:
            read(file, tmp_path / "out")
        assert "--map prompt=" in str(error.value.hint)


def test_a_column_that_map_names_and_a_row_lacks_leaves_that_row_out(tmp_path: Path) -> None:
    rows = [{"q": ASKED, "a": "5"}, {"q": ASKED}]
    done = gymdata.import_rollouts(
        write(tmp_path / "rows.jsonl", *rows), tmp_path / "run", map=["prompt=q", "answer=a"]
    )
    assert (done.rollouts, done.reasons) == (1, {"S103": 1})


def test_map_is_refused_where_it_names_no_field_and_where_it_means_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"q": ASKED, "a": "5"})
    for columns in (["wizard=q"], ["prompt"], ["prompt=q", "prompt=a"]):
        with pytest.raises(UsageError, match="each FIELD once"):
            gymdata.import_rollouts(file, tmp_path / "run", map=columns)
    with pytest.raises(UsageError, match="columns of its own"):
        gymdata.import_rollouts("sample_data/rollouts/nemo_gym.jsonl", tmp_path / "run", map=["label=reward"])
    with pytest.raises(UsageError, match="--map"):
        gymdata.train_sft(
            "sample_data/rollouts/clean.jsonl", "sample_data/policy", tmp_path / "m", map=["label=reward"]
        )


def test_a_number_as_an_answer_is_text_beside_a_question_too(tmp_path: Path) -> None:
    (rollout,) = imported(write(tmp_path / "rows.jsonl", {"question": ASKED, "answer": 200}))
    assert rollout["messages"][1]["content"] == "200"
    (named,) = rejected(
        write(tmp_path / "b.jsonl", {"question": ASKED, "answer": 1}, {"question": ASKED, "answer": ""})
    )
    assert named["line"] == 2


@pytest.mark.parametrize("named", ["reward=qualty", "answer=foo", "chosen=nope"])
def test_a_column_that_no_row_has_is_refused(named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt column would leave the file's own ones in its place."""
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"prompt": "1+1?", "answer": "2", "quality": 1, "reward": 0}) + "\n")
    assert main(["import", str(file), "--map", named, "-o", str(tmp_path / "run")]) == 2
    assert f"--map {named}: no row at the beginning of q.jsonl has this column" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
