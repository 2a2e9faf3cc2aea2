"""Validation of NeMo Gym rows: faults at their place, hostile rows named, the same findings however the file is read."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.commands.validate.run import validate
from gymdata.formats.nemo_gym import batches
from tests.validate.generate import NEMO_PLANTS, nemo_row, one_in_two, put_nemo, with_ids, write_lines
from tests.validate.generate import nemo_rows as clean_rows


def test_clean_rows_are_never_flagged(tmp_path: Path) -> None:
    """Reasoning, calls, tool outputs and brackets in texts give an empty report that counts unique tokens."""
    rows = clean_rows(n=6, turns=5)
    report = validate(write_lines(tmp_path / "a.jsonl", rows))
    assert report.violations == []
    assert (report.rollouts, report.turns) == (6, 30)
    last = [with_ids(r, 4) for r in rows]
    assert report.tokens == sum(len(i["prompt_token_ids"]) + len(i["generation_token_ids"]) for i in last)


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_line_that_breaks_off_is_told_as_import_tells_it(tmp_path: Path, end: str) -> None:
    """What is wrong at the end of a line is in that line, at one column for both commands, whatever ends it."""
    file = write_lines(tmp_path / "a.jsonl", clean_rows(n=2))
    with file.open("a", newline="") as rows:
        rows.write('{"a": 1,' + end)
    [fault] = [v for v in validate(file).violations if v.code == "S101"]
    gymdata.import_rollouts(file, tmp_path / "run")
    reason = json.loads((tmp_path / "run/rejected.jsonl").read_text())["reason"]
    assert fault.detail == reason
    assert "line 1 column 9 " in reason


def test_planted_faults_are_found_at_their_places(tmp_path: Path) -> None:
    """One fault in every second row is found in that row, turn and position, alone."""
    rows = one_in_two(clean_rows(n=2 * len(NEMO_PLANTS)), NEMO_PLANTS)
    report = validate(write_lines(tmp_path / "a.jsonl", rows))
    assert [(v.row, v.code, v.turn, v.position) for v in report.violations] == [
        (2 * index + 1, fault.code, fault.turn, fault.position) for index, fault in enumerate(NEMO_PLANTS)
    ]


def test_a_file_that_two_processes_read_has_the_same_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same rows, with the same first row of a duplicate, and with the line where it cannot be read on."""
    rows = one_in_two(clean_rows(n=2 * len(NEMO_PLANTS)), NEMO_PLANTS)
    lines = [json.dumps(row) for row in [*rows, rows[3], rows[0]]]
    lines[4:4] = ["", "no row", "{}"]
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress("\n".join(lines).encode())
    for content in (packed, packed[: len(packed) * 2 // 3]):
        path.write_bytes(content)
        alone = validate(path)
        assert alone.by_code["T200"]
        monkeypatch.setattr(batches, "LARGE", 0)
        for size in (1, 3_000, 20_000):
            monkeypatch.setattr(batches, "BLOCK", size)
            both = validate(path)
            assert both.violations == alone.violations
            assert (both.rollouts, both.tokens, both.trainable) == (alone.rollouts, alone.tokens, alone.trainable)
        monkeypatch.undo()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_mutated_token_is_found_at_exactly_that_place(tmp_path: Path, data: st.DataObject) -> None:
    """A changed id of an earlier turn in a prompt is a T200 at that position of that turn."""
    rows = clean_rows(n=2, turns=4)
    turn = data.draw(st.integers(1, 3))
    before = with_ids(rows[1], turn - 1)
    held = len(before["prompt_token_ids"]) + len(before["generation_token_ids"])
    at = data.draw(st.integers(0, held - 1))
    put_nemo(rows[1], turn, "prompt_token_ids", at, 995)
    report = validate(write_lines(tmp_path / "m.jsonl", rows), select=["T"])
    assert [(v.code, v.row, v.turn, v.position) for v in report.violations] == [("T200", 1, turn, at)]


def test_hostile_lines_are_named_and_hide_nothing(tmp_path: Path) -> None:
    """Torn, mistyped and odd lines are findings at their row; rows around them are read."""
    good = [json.dumps(r) for r in clean_rows(n=4)]
    twice = good[1].replace('"prompt_token_ids"', '"prompt_token_ids": [1], "prompt_token_ids"', 1)
    surrogate = good[1].replace("q0", "\\ud800")
    deep = good[1].replace('"q0"', "[" * 3000 + "]" * 3000)
    big = good[1].replace("q0", "x" * 2_000_000)
    wide = good[1].replace('"tools": []', '"tools": [], "metadata": 1180591620717411303424')
    lines = [
        "\ufeff" + good[0], "<PLACEHOLDER ROW>", "", twice, surrogate, wide + "\r", "[1, 2]", "null", good[2][:-20],
        big, deep,
    ]  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"response": "\xff"}\n' + good[3].encode())
    report = validate(path, ignore=["D", "R503"])
    assert [(v.row, v.code) for v in report.violations if v.code[0] == "S"] == [
        (1, "S101"), (2, "S102"), (3, "S101"), (5, "S101"), (6, "S101"), (7, "S101"), (9, "S101"), (10, "S101"),
    ]  # fmt: skip
    assert report.rollouts == 4


def test_duplicates_and_groups(tmp_path: Path) -> None:
    """The same row twice, the same generations in a group, and equal rewards of a group."""
    rows = clean_rows(n=4)
    rows[1]["reward"] = rows[0]["reward"]
    for turn in range(4):
        for name in ("prompt_token_ids", "generation_token_ids"):
            with_ids(rows[3], turn)[name] = with_ids(rows[2], turn)[name]
        size = len(with_ids(rows[2], turn)["generation_token_ids"])
        with_ids(rows[3], turn)["generation_log_probs"] = [-1.0 - k for k in range(size)]
    report = validate(write_lines(tmp_path / "a.jsonl", [*rows, rows[2]]))
    assert [(v.code, v.row) for v in report.violations] == [("R503", 0), ("D702", 3), ("D701", 4)]


def test_sampling_settings_and_vocabulary(tmp_path: Path) -> None:
    """Greedy rows are L304 once, and --tokenizer bounds the ids."""
    rows = clean_rows(n=4)
    for row in rows:
        row["responses_create_params"]["temperature"] = 0.0
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert validate(path).by_code == {"L304": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 899}}, "added_tokens": []}))
    ids = {v.got for v in validate(path, tokenizer=tmp_path).violations if v.code == "T206"}
    assert ids
    assert all(int(i or 0) >= 900 for i in ids)


@pytest.mark.parametrize("end", ["\n", ""])
def test_blank_lines_and_gzip_change_nothing(tmp_path: Path, end: str) -> None:
    """Rows are counted without blank lines, whether the last line has an end or none, and compressed."""
    rows = clean_rows(n=9)
    put_nemo(rows[4], 3, "generation_token_ids", 0, -1)
    put_nemo(rows[8], 2, "generation_log_probs", 0, 0.5)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["", json.dumps(rows[0]), "", *map(json.dumps, rows[1:])]) + end)
    whole = validate(path)
    assert [(v.code, v.row) for v in whole.violations] == [("T206", 4), ("L303", 8)]
    assert (whole.rollouts, whole.trainable) == (9, 7)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert validate(tmp_path / "a.jsonl.gz").by_code == {"L303": 1, "T206": 1}


def test_what_is_seen_across_rows_and_files(tmp_path: Path) -> None:
    """Rows with an id and without, copies in another file, rewards of which one is missing, and a line that is no row."""
    rows = clean_rows(n=8)
    for row, name in zip(rows, ["x", "ä", None, "x", None, None, "ä", "y"], strict=True):
        row |= {} if name is None else {"rollout_id": name}
        row |= {"group_id": "g", "reward": 0.5}
    rows[2]["reward"] = None
    lines = ["nothing", *rows, rows[2]]
    a = write_lines(tmp_path / "a.jsonl", lines)
    write_lines(tmp_path / "b.jsonl", [rows[4], rows[7]])
    found = validate(f"{tmp_path}/*.jsonl", select=["D", "R503"]).violations
    assert [(Path(v.file or "").name, v.row, v.rollout_id, v.code, v.got or v.detail) for v in found] == [
        ("a.jsonl", 1, "x", "R503", "0.5 for all 5"),
        ("a.jsonl", 4, "x", "D701", f"first seen at {a} row 1"),
        ("a.jsonl", 7, "ä", "D701", f"first seen at {a} row 2"),
        ("a.jsonl", 9, None, "D701", f"first seen at {a} row 3"),
        ("b.jsonl", 0, None, "D701", f"first seen at {a} row 5"),
        ("b.jsonl", 1, "y", "D701", f"first seen at {a} row 8"),
    ]


def test_other_shapes_of_real_files(tmp_path: Path) -> None:
    """Input as text or missing, user messages inside the output, nested output lists, endings without an answer."""
    calls = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])]
    rows = [nemo_row(calls, f"q{i}", float(i), i) for i in range(5)]
    for row in rows:
        # Not the same generations.
        row["task_index"] = row["response"]["id"]
    rows[0]["responses_create_params"]["input"] = "q"
    del rows[1]["responses_create_params"]["input"]
    rows[2]["response"]["output"].insert(3, {"role": "user", "content": "go on", "type": "message"})
    rows[3]["response"]["output"] = [rows[3]["response"]["output"]]
    tail = copy.deepcopy(rows[4]["response"]["output"][0])
    rows[4]["response"]["output"].append({"type": "function_call_output", "call_id": "c0", "output": "late"})
    rows[4]["response"]["output"].append(tail)
    report = validate(write_lines(tmp_path / "a.jsonl", rows))
    assert [(v.code, v.row, v.turn) for v in report.violations] == [("T205", 4, 2)]
