"""What only JSON lines can get wrong: keys of no column, odd values beside the tokens, columns that some rows lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.commands.query.run import query
from gymdata.commands.validate.fix import fix
from gymdata.commands.validate.run import validate
from gymdata.errors import DataError
from gymdata.store import read_table
from tests.validate.generate import native_rows, nemo_rows, write_lines, write_native


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Clean rows as gymdata writes them."""
    path = write_native(tmp_path, native_rows(), "jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def found(tmp_path: Path, rows: list[Any]) -> list[tuple[Any, ...]]:
    report = validate(write_lines(tmp_path / "rows.jsonl", rows), ignore=["R503", "D702"])
    return [(v.code, v.severity, v.row, v.turn, v.got) for v in report.violations]


@pytest.mark.parametrize(
    ("where", "key"),
    [
        (lambda row: row, "temprature"),
        (lambda row: row["turns"][1], "turns[].id"),
        (lambda row: row["messages"][0], "messages[].x"),
    ],
)
def test_a_key_of_no_column_is_told_once(tmp_path: Path, rows: list[Any], where: Any, key: str) -> None:
    """Nothing would read it, and it may be misspelt: a warning at the first row that has it."""
    for row in rows[2:]:
        where(row)[key.rpartition(".")[2]] = 1
    assert found(tmp_path, rows) == [("S102", "warning", 2, None, key)]


@pytest.mark.parametrize(
    ("path", "value", "got"),
    [
        (("reward",), "1", "text 1"),
        (("reward",), True, "true"),
        (("rewards",), {"a": "b"}, "text b"),
        (("status",), "weird", "text weird"),  # there is no third way for a rollout to end
        (("n_generated_tokens",), 10**30, "number 1e+30"),
        (("rollout_index",), 2**31, "number 2147483648"),
        (("started_at",), "yesterday", "text yesterday"),
        (("task",), "a\ud800", "text a\ud800"),
        (("temperature",), None, "null"),
        (("temperature",), -1, "-1.0"),  # training would divide by it
        (("temperature",), "NaN", "nan"),
        (("messages", 1, "role"), None, "null"),
        (("messages", 1, "content"), [{"text": "a"}], "list"),
        (("messages", 1, "turn"), "1", "text 1"),
        (("turns", 1, "finish_reason"), 3, "number 3"),
        (("turns", 1, "reward"), "high", "text high"),
        (("turns", 1, "top_log_probs"), 5, "number 5"),
        (("turns", 1, "top_log_probs"), [[{"id": "x", "log_prob": -1.0}]], "text x"),
        (("turns", 1, "top_log_probs"), [{"id": 1, "log_prob": -1.0}], "object"),
        (("turns", 1, "generation_token_ids", 0), 3.0, "number 3.0"),
        (("turns", 1, "prompt_delta_ids", 1), [3], "list"),
    ],
)
def test_a_value_of_another_type_is_found_and_hides_no_other_row(
    tmp_path: Path, rows: list[Any], path: tuple[Any, ...], value: Any, got: str
) -> None:
    """What no reader would load is S102 at its place with its field, and a wrong count in the next row is still seen."""
    *above, last = path
    target = rows[3]
    for key in above:
        target = target[key]
    target[last] = value
    rows[4]["n_context_tokens"] += 1
    report = validate(write_lines(tmp_path / "rows.jsonl", rows), ignore=["R503", "D702"])
    first, second = report.violations
    turn, position = (path[1] if path[0] == "turns" else None), (path[3] if len(path) == 4 else None)
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]
    assert (first.code, first.row, first.turn, first.position) == ("S102", 3, turn, position)
    assert (first.got, str(first.detail)[: len(field)]) == (got, field)
    assert (second.code, second.row) == ("S102", 4)


def test_sound_values_of_a_turn_pass(tmp_path: Path, rows: list[Any]) -> None:
    """A step reward, alternatives, and all of them null."""
    rows[0]["turns"][0] |= {"reward": 1, "top_log_probs": [[{"id": 4, "log_prob": -0.5}], []], "agent": "a"}
    rows[1]["turns"][0] |= {"reward": None, "top_log_probs": None, "agent": None}
    assert found(tmp_path, rows) == []


@pytest.mark.parametrize("name", ["n_turns", "n_context_tokens", "n_generated_tokens"])
def test_a_row_without_a_count_hides_no_other(tmp_path: Path, rows: list[Any], name: str) -> None:
    """A wrong count is found although the row before has none, which no command reads."""
    del rows[1][name]
    rows[2][name] += 1
    assert [(code, row) for code, _, row, _, _ in found(tmp_path, rows)] == [("S103", 1), ("S102", 2)]


def test_a_file_of_tasks_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, with what to do, and not as a fault of each row."""
    path = write_lines(tmp_path / "tasks.jsonl", [{"prompt": "hi", "answer": 1}] * 30)
    assert main(["validate", str(path)]) == 2
    said = capsys.readouterr().err
    assert "contains tasks" in said
    assert "gymdata collect" in said
    with pytest.raises(DataError, match="contains tasks"):
        fix(path, "drop", tmp_path / "out.jsonl")


def test_rollouts_that_lost_their_answers_are_no_tasks(tmp_path: Path) -> None:
    """One NeMo Gym row with a response makes the others bad rows."""
    rows = nemo_rows()
    del rows[0]["response"]
    report = validate(write_lines(tmp_path / "a.jsonl", rows), ignore=["R503", "D702"])
    assert [(v.code, v.row) for v in report.violations] == [("S103", 0)]


@pytest.mark.parametrize("place", ["top", "turn", "message"])
def test_a_key_given_twice_is_a_fault(tmp_path: Path, rows: list[Any], place: str) -> None:
    """A parser keeps the last one in silence; a text that looks like a key is none."""
    rows[1]["messages"][1]["content"] = 'a "reward": 1, and \\"reward\\": 2, of \\\\'
    lines = [json.dumps(row) for row in rows]
    key = {"top": '"task_id": ', "turn": '"parent": ', "message": '"role": '}[place]
    at = lines[3].index(key)
    lines[3] = lines[3][:at] + key + ("0, " if place == "turn" else '"x", ') + lines[3][at:]
    report = validate(write_lines(tmp_path / "a.jsonl", lines), ignore=["R503", "D702"])
    name = key[1:-3]
    found = [(v.code, v.row, v.detail) for v in report.violations]
    assert found == [("S102", 3, f"the key {name!r} is given twice")]


def test_hostile_lines_are_named_and_hide_nothing(tmp_path: Path, rows: list[Any]) -> None:
    """Every line is in the report or among the clean rollouts, whatever it is, and nothing is raised."""
    good = [json.dumps(row) for row in rows]
    hostile = {
        "not JSON": "S101",
        "[" * 100_000: "S101",
        '{"a":' * 50_000 + "1" + "}" * 50_000: "S101",
        "[1, 2]": "S101",
        json.dumps({key: value for key, value in rows[0].items() if key != "turns"}): "S103",
        good[0].replace('"t0"', '"\\ud800"', 1): "S102",
        good[0].replace('"parent": -1', f'"parent": {2**70}', 1): "S102",
        good[0].replace('"generation_token_ids": [', '"generation_token_ids": [1.0, ', 1): "S102",
        good[0].replace('"generation_token_ids": [', '"generation_token_ids": ["7", ', 1): "S102",
        good[0].replace('"generation_token_ids": [', '"generation_token_ids": [[7], ', 1): "S102",
        good[0][:-30]: "S101",
        json.dumps("x" * 2_000_000): "S101",
    }
    path = tmp_path / "a.jsonl"
    broken = good[0].encode().replace(b"t0-0", b"\xff\xfe", 1)
    lines = [good[0].encode(), *(text.encode() for text in hostile), broken, b"", good[1].encode() + b"\r", b"\t"]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n" + good[2].encode())
    report = validate(path, ignore=["R503", "D702", "R501"])
    assert report.rollouts == 3
    assert [(v.row, v.code) for v in report.violations] == list(enumerate([*hostile.values(), "S101"], 1))


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", '"NaN"'])
def test_literals_that_are_no_numbers_are_found_at_their_place(tmp_path: Path, rows: list[Any], literal: str) -> None:
    """Python writes them, so they are read, and are L302 where they stand."""
    rows[2]["turns"][1]["generation_log_probs"][1] = 12345.5
    lines = [json.dumps(row).replace("12345.5", literal) for row in rows]
    report = validate(write_lines(tmp_path / "a.jsonl", lines), ignore=["R503", "D702", "T209"])
    assert [(v.code, v.row, v.turn, v.position) for v in report.violations] == [("L302", 2, 1, 1)]


def test_what_validate_faults_no_command_reads(tmp_path: Path, rows: list[Any]) -> None:
    """A key given twice and a row without a column are refused by line; rows in one list are read as lines are."""
    whole = [json.dumps(row) for row in rows]
    twice = [*whole[:2], whole[2].replace('"reward": ', '"reward": 7, "reward": ', 1)]
    lacking = [*whole[:1], json.dumps({key: value for key, value in rows[1].items() if key != "task_id"})]
    for lines, code, said in (
        (twice, "S102", "line 3, field 'reward': got two"),
        (lacking, "S103", "line 2, field 'task_id'"),
    ):
        path = write_lines(tmp_path / "a.jsonl", lines)
        assert [v.code for v in validate(path).violations if v.severity == "error"] == [code]
        for read in (read_table, lambda path: read_table(path, columns=["reward"])):
            with pytest.raises(DataError, match=said):
                read(path)
    in_one_list = write_lines(tmp_path / "b.jsonl", [f"[{whole[0]},{whole[1]}]"])
    assert query("SELECT count(*) AS n FROM rollouts", in_one_list).to_pylist() == [{"n": 2}]
    assert read_table(in_one_list).num_rows == 2


def test_an_id_that_is_none_is_named_by_who_reads_hashes_only(tmp_path: Path, rows: list[Any]) -> None:
    """The turns of which they are made are read for them."""
    rows[1]["turns"][0]["generation_token_ids"][0] = 1.5
    for row in rows:
        row.pop("generation_hash", None)
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        DataError, match=r"line 2, field 'turns.*generation_token_ids.*got number 1.5, expected a whole"
    ):
        read_table(path, columns=["rollout_id", "generation_hash"])
