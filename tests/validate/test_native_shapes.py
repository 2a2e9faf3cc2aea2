"""Rows and files that are not of the table's shape: each is a finding at its place, and hides nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from gymdata.errors import DataError
from gymdata.store import read_table
from tests.rollout_files import rollout
from tests.validate.generate import native_rows, write_native


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("rollout_id",), (1, None, None)),
        (("reward",), None),  # not scored
        (("messages", 1, "role"), (1, None, None)),
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
    assert found == [*([("S102", *place)] if place else []), ("T209", 3, 0, None)]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("path", "value", "code", "turn"),
    [
        (("n_breaks",), 7, "S102", None),
        (("n_breaks",), -1, "S102", None),
        (("task",), "a question", "S102", None),
        (("tools",), "{}", "S102", None),
        (("extra",), "", "S102", None),
        (("messages", 2, "tool_calls"), "f(1)", "S102", None),
        (("turns", 1, "finish_reason"), "done", "S102", None),
        (("turns", 1, "reward"), float("nan"), "R502", 1),
        (("turns", 1, "reward"), float("inf"), "R502", 1),
    ],
)
def test_a_value_that_means_nothing_in_its_column_is_found(
    tmp_path: Path, form: str, path: tuple[Any, ...], value: Any, code: str, turn: int | None
) -> None:
    """Commands that read the column would fail on the row, or take it for another."""
    rows = native_rows(n=3)
    *above, last = path
    target: Any = rows[1]
    for key in above:
        target = target[key]
    target[last] = value
    report = validate(write_native(tmp_path, rows, form), select=["S", "R502"])
    assert [(v.code, v.row, v.turn) for v in report.violations] == [(code, 1, turn)]


def test_a_break_that_is_not_counted_is_found(tmp_path: Path) -> None:
    """The count is what filters and pairs go by; that it is wrong is an error beside the break itself."""
    broken = rollout("t", 0, 1.0, [([1, 2], [3]), ([1, 9, 3, 4], [5])])
    assert broken["n_breaks"] == 1
    report = validate(write_native(tmp_path, [broken | {"n_breaks": 0}], "parquet"), select=["S", "T200"])
    assert [(v.code, v.turn, v.expected, v.got) for v in report.violations if v.code == "S102"] == [
        ("S102", None, "1", "0")
    ]
    assert "T200" in report.by_code


def _loose(kind: Any) -> Any:
    """The type with every field nullable."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _loose(f.type)) for f in kind])
    return pa.list_(_loose(kind.value_type)) if pa.types.is_list(kind) else kind


def test_a_cut_or_foreign_parquet_is_a_finding(tmp_path: Path) -> None:
    """A truncated file is S101, missing columns are S103, a newer table S104; without any column of a table it is an error,
    as JSON lines are."""
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
    with pytest.raises(DataError, match=r"other.parquet: contains rows of no known format.*\n.*the keys a"):
        validate(tmp_path / "other.parquet")


def test_fields_of_objects_are_those_of_the_table(tmp_path: Path) -> None:
    """What turns lack is S103; what no table has is a warning, as a key of JSON lines is; no command reads either."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(write_native(tmp_path, native_rows(n=4), "parquet"))
    kind, at = table.schema.field("turns").type.value_type, table.schema.get_field_index("turns")
    less = pa.struct([f for f in kind if f.name != "digest"])
    more = pa.struct([*kind, pa.field("extra", pa.string())])
    for name, turn, found in (
        ("less", less, [("S103", "error", "turns.digest")]),
        ("more", more, [("S102", "warning", "a column of the table")]),
    ):
        turns = pa.array(table["turns"].to_pylist(), pa.list_(turn))
        pq.write_table(table.set_column(at, "turns", turns), tmp_path / f"{name}.parquet")
        report = validate(tmp_path / f"{name}.parquet", ignore=["R503", "D702"])
        assert [(v.code, v.severity, v.expected) for v in report.violations] == found
        with pytest.raises(DataError, match=r"turns\.(digest|extra)|turns\[\]\.extra"):
            read_table(tmp_path / f"{name}.parquet")


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
    from gymdata.store.journal import line_of
    from gymdata.store.lines import encode

    (tmp_path / "rollouts").mkdir()
    (tmp_path / "run.json").write_text('{"run_id": "r"}')
    lines = [line_of(x.encode()) for x in write_native(tmp_path, native_rows(n=4), "jsonl").read_text().splitlines()]
    assert encode({}) == b"{}"
    lines[1] = lines[1].replace(b"system", b"System", 1)
    (tmp_path / "rollouts" / "part-00000.jsonl").write_bytes(b"".join(lines)[:-20])
    report = validate(tmp_path)
    assert [(v.code, v.row, v.severity) for v in report.violations] == [("S101", 1, "error"), ("S101", 3, "warning")]
    assert report.rollouts == 2
