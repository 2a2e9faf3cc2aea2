"""Rows and files that are not of the table's shape: each is a finding at its place, and hides nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.validate.run import validate
from tests.validate.generate import native_rows, write_lines, write_native


def test_bad_lines_are_named_and_hide_nothing(tmp_path: Path) -> None:
    """Unreadable and mistyped rows are S1xx at their row, and the rows around them are still checked."""
    import orjson

    good = write_native(tmp_path, native_rows(n=4), "jsonl").read_text().splitlines()
    floats = orjson.loads(good[1])
    floats["turns"][1]["generation_token_ids"][2] = 3.0
    nested = orjson.loads(good[1])
    nested["turns"][0]["prompt_delta_ids"] = [nested["turns"][0]["prompt_delta_ids"]]
    literal = good[2].replace('"generation_log_probs":[-1.0', '"generation_log_probs":[NaN', 1)
    headless = orjson.loads(good[1])
    del headless["turns"]
    lines = ["\ufeff" + good[0], "{oops", "", floats, nested, headless, literal + "\r", "[1]", good[3][:-9]]
    report = validate(
        write_lines(tmp_path / "odd.jsonl", [x if isinstance(x, str) else orjson.dumps(x).decode() for x in lines])
    )
    found = [(v.row, v.code, v.turn, v.position) for v in report.violations if v.code[0] in "SL"]
    assert found == [
        (1, "S101", None, None),
        (2, "S102", 1, 2),
        (3, "S102", 0, 0),
        (4, "S103", None, None),
        (5, "L302", 0, 0),
        (6, "S101", None, None),
        (7, "S101", None, None),
    ]
    assert report.rollouts == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", "1"), ("reward", True), ("rewards", [1]), ("rewards", {"a": "b"}), ("n_turns", "7"), ("status", 5),
        ("n_generated_tokens", 10**30), ("rollout_index", 2**31), ("started_at", "yesterday"), ("started_at", None),
        ("task", "a\ud800"), ("temperature", None),
    ],
)  # fmt: skip
def test_a_column_of_another_type_is_found_and_hides_no_other_row(tmp_path: Path, field: str, value: Any) -> None:
    """What no reader would load is S102, and a wrong count in the next row is still seen."""
    lines = write_native(tmp_path, native_rows(n=4), "jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[1][field] = value
    rows[2]["n_context_tokens"] += 1
    report = validate(write_lines(tmp_path / "odd.jsonl", rows), select=["S"])
    assert sorted((v.row, v.code, (v.detail or "").split()[0]) for v in report.violations)[0] == (1, "S102", field)
    assert {v.row for v in report.violations} == {1, 2}


@pytest.mark.parametrize(("field", "value"), [("role", None), ("role", 5), ("content", [{"text": "a"}]), ("turn", "1")])
def test_a_message_of_another_type_is_found(tmp_path: Path, field: str, value: Any) -> None:
    """A message that no reader would load is S102 and named."""
    row = json.loads(write_native(tmp_path, native_rows(n=1), "jsonl").read_text())
    row["messages"][1][field] = value
    report = validate(write_lines(tmp_path / "odd.jsonl", [row]), select=["S"])
    assert [(v.code, v.detail) for v in report.violations] == [("S102", f"messages[1].{field}")]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("rollout_id",), (1, None, None)),
        (("turns", 2), (1, 2, None)),
        (("turns", 2, "parent"), (1, 2, None)),
        (("turns", 2, "prefix_length"), (1, 2, None)),
        (("turns", 2, "digest"), (1, 2, None)),
        (("turns", 2, "prompt_delta_ids", 1), (1, 2, 1)),
        (("turns", 3, "generation_token_ids", 0), (1, 3, 0)),
    ],
)
def test_a_null_in_parquet_is_found_at_its_place(tmp_path: Path, path: tuple[Any, ...], place: Any) -> None:
    """A file of another writer, in which anything may be null: one finding, and the other rows are as they were."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(write_native(tmp_path, native_rows(n=4), "parquet"))
    rows = table.to_pylist()
    *above, last = path
    target: Any = rows[1]
    for key in above:
        target = target[key]
    target[last] = None
    rows[3]["turns"][0]["generation_token_ids"][0] += 1
    loose = pa.schema([pa.field(f.name, _loose(f.type)) for f in table.schema], metadata=table.schema.metadata)
    pq.write_table(pa.Table.from_pylist(rows, schema=loose), tmp_path / "loose.parquet")
    report = validate(tmp_path / "loose.parquet", select=["S", "T"])
    found = [(v.code, v.row, v.turn, v.position) for v in report.violations]
    assert found == [("S102", *place), ("T209", 3, 0, None)]


def _loose(kind: Any) -> Any:
    """The type with every field nullable."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _loose(f.type)) for f in kind])
    return pa.list_(_loose(kind.value_type)) if pa.types.is_list(kind) else kind


def test_a_cut_or_foreign_parquet_is_a_finding(tmp_path: Path) -> None:
    """A truncated file is S101, missing columns are S103, a newer table S104; never an exception."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_native(tmp_path, native_rows(), "parquet")
    table = pq.read_table(path)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(path.read_bytes()[:-100])
    assert validate(cut).by_code == {"S101": 1}
    pq.write_table(table.drop_columns(["reward", "group_id"]), tmp_path / "less.parquet")
    assert [v.expected for v in validate(tmp_path / "less.parquet").violations] == ["group_id", "reward"]
    newer = table.replace_schema_metadata({b"gymdata.schema": b"rollouts", b"gymdata.version": b"99"})
    pq.write_table(newer, tmp_path / "newer.parquet")
    assert validate(tmp_path / "newer.parquet").by_code == {"S104": 1}
    odd = table.replace_schema_metadata({b"gymdata.schema": b"rollouts", b"gymdata.version": b"new"})
    pq.write_table(odd, tmp_path / "odd.parquet")
    assert validate(tmp_path / "odd.parquet").by_code == {"S102": 1}
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    assert set(validate(tmp_path / "other.parquet").by_code) == {"S103"}


def test_files_with_many_row_groups_or_one_keep_their_rows(tmp_path: Path) -> None:
    """Row numbers and findings do not depend on how the file is cut, nor on large list types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = native_rows(n=12)
    rows[7]["turns"][2]["digest"] += 1
    path = write_native(tmp_path, rows, "parquet")
    table = pq.read_table(path)
    for size in (1, 5, 100):
        pq.write_table(table, tmp_path / f"{size}.parquet", row_group_size=size)
        report = validate(tmp_path / f"{size}.parquet")
        assert [(v.code, v.row, v.turn) for v in report.violations] == [("T209", 7, 2)]
    large = pa.large_list(table.schema.field("turns").type.value_type)
    at = table.schema.get_field_index("turns")
    pq.write_table(
        table.set_column(at, pa.field("turns", large), table.column("turns").cast(large)), tmp_path / "l.parquet"
    )
    assert [(v.code, v.row, v.turn) for v in validate(tmp_path / "l.parquet").violations] == [("T209", 7, 2)]


def test_a_journal_is_read_with_its_torn_tail(tmp_path: Path) -> None:
    """Rows of an open segment are checked; a damaged line is an error, a torn last line only a warning."""
    from gymdata.store.journal import frame
    from gymdata.store.lines import encode

    (tmp_path / "rollouts").mkdir()
    (tmp_path / "run.json").write_text('{"run_id": "r"}')
    lines = [frame(x.encode()) for x in write_native(tmp_path, native_rows(n=4), "jsonl").read_text().splitlines()]
    assert encode({}) == b"{}"
    lines[1] = lines[1].replace(b"system", b"System", 1)
    (tmp_path / "rollouts" / "00000.journal").write_bytes(b"".join(lines)[:-20])
    report = validate(tmp_path)
    assert [(v.code, v.row, v.severity) for v in report.violations] == [("S101", 1, "error"), ("S101", 3, "warning")]
    assert report.rollouts == 2
