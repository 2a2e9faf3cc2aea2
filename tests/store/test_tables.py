"""Tables as files: round trips, encodings, damage, other people's writers and readers."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymdata.errors import DataError, StoreError, UsageError
from gymdata.rollouts.schema import NAMED_VALUE, PAIRS, ROLLOUTS, SCORES, TABLES, VERSION_KEY, Table
from gymdata.store import read_table, scan_batches
from gymdata.store.lines import decode, encode
from gymdata.store.tables import shaped
from tests.rollout_files import with_hashes, write_table

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


def values(kind: pa.DataType, nullable: bool = False) -> st.SearchStrategy[Any]:
    """Any value that a column of this type may hold."""
    if nullable:
        return st.none() | values(kind)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_integer(kind):
        bound = 1 << (kind.bit_width - 1)
        return st.integers(-bound, bound - 1)
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width).map(lambda x: math.nan if math.isnan(x) else x)
    if pa.types.is_timestamp(kind):
        return st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC))
    if pa.types.is_list(kind):
        unique = (lambda part: part["name"]) if kind.value_type == NAMED_VALUE else None
        return st.lists(values(kind.value_type), max_size=3, unique_by=unique)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({f.name: values(f.type, f.nullable) for f in kind})
    return TEXT


@st.composite
def some_table(draw: st.DrawFn) -> tuple[Table, pa.Table]:
    """Up to three random rows of any table, with or without its optional columns."""
    table = draw(st.sampled_from(list(TABLES.values())))
    keep = [f for f in table.schema if f.name not in table.optional or draw(st.booleans())]
    row = st.fixed_dictionaries({f.name: values(f.type, f.nullable) for f in keep})
    rows = draw(st.lists(row, min_size=1, max_size=3))
    return table, pa.Table.from_pylist(rows, schema=pa.schema(keep, metadata=table.metadata))


def exactly(data: pa.Table) -> str:
    """Every value, NaN and the sign of zero included."""
    return repr(data.to_pylist())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some_table())
def test_json_lines_to_parquet_to_json_lines_is_the_identity(tmp_path: Path, case: tuple[Table, pa.Table]):
    """Any rows of any table, whichever format they go through, come back bit for bit, types and nulls included."""
    # What is written has its hashes.
    table, data = case[0], shaped(with_hashes(case[1]), case[0])
    lines, columns, again = tmp_path / "a.jsonl", tmp_path / "b.parquet", tmp_path / "c.jsonl"
    write_table(data, lines, table)
    from_lines = read_table(lines, table)
    assert from_lines.schema.equals(data.schema, check_metadata=True)
    assert exactly(from_lines) == exactly(data)
    write_table(from_lines, columns, table)
    from_columns = read_table(columns, table)
    assert from_columns.schema.equals(data.schema, check_metadata=True)
    assert exactly(from_columns) == exactly(data)
    write_table(from_columns, again, table)
    assert again.read_bytes() == lines.read_bytes()
    for line in lines.read_bytes().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"bare {name} in JSON"))


def test_float32_survive_json_bit_for_bit():
    """The digits that are written for a float32 are read back as the same float32, over the range of log-probs."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 400_000, dtype=np.uint32)
    anything = bits.view(np.float32)
    likely = -rng.exponential(2.0, 400_000).astype(np.float32)
    for numbers in (anything[np.isfinite(anything)], likely):
        back = np.array(decode(encode({"x": numbers}))["x"], np.float32)
        assert back.tobytes() == numbers.tobytes()


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_column_is_encoded_as_its_table_says(tmp_path: Path, table: Table):
    """Dictionary where named, BYTE_STREAM_SPLIT where named, plain elsewhere; zstd; name and version in the metadata."""
    rows = [_filled(table.schema, i) for i in range(50)]
    file = tmp_path / "x.parquet"
    write_table(pa.Table.from_pylist(rows, schema=table.schema), file, table)
    meta = pq.read_metadata(file)
    seen = set()
    for i in range(meta.num_columns):
        column = meta.row_group(0).column(i)
        path = column.path_in_schema
        seen.add(path)
        has = set(column.encodings)
        assert column.compression == "ZSTD"
        assert ("RLE_DICTIONARY" in has) == (path in table.dictionary), path
        assert ("BYTE_STREAM_SPLIT" in has) == (path in table.split), path
    assert seen >= {*table.dictionary, *table.split}
    assert meta.metadata[b"gymdata.schema"] == table.name.encode()
    assert meta.metadata[b"gymdata.version"] == str(table.version).encode()


def _filled(kind: Any, i: int) -> Any:
    """A value without nulls or empty lists."""
    if isinstance(kind, pa.Schema) or pa.types.is_struct(kind):
        return {f.name: _filled(f.type, i) for f in kind}
    if pa.types.is_list(kind):
        return [_filled(kind.value_type, i), _filled(kind.value_type, i + 1)]
    if pa.types.is_timestamp(kind):
        return dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    if pa.types.is_string(kind):
        return f"text {i}"
    if pa.types.is_boolean(kind):
        return True
    return i / 4 if pa.types.is_floating(kind) else i


@pytest.fixture
def rollouts(tmp_path: Path, row) -> pa.Table:
    file = tmp_path / "source.jsonl"
    file.write_bytes(b"".join(encode(row(i)) + b"\n" for i in range(4)))
    return read_table(file)


def test_json_lines_look_as_documented(tmp_path: Path, rollouts: pa.Table):
    """Rewards are an object, times end in Z, numbers that JSON lacks are words, a float32 has its own digits."""
    file = write_table(rollouts.slice(0, 1), tmp_path / "x.jsonl", ROLLOUTS)
    got = orjson.loads(file.read_bytes())
    assert got["rewards"] == {"exact": 0.5, "length": None}
    assert got["started_at"] == "2026-01-02T03:04:05.678901Z"
    assert b'"temperature":0.7,' in file.read_bytes()
    assert list(got) == ROLLOUTS.schema.names


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".ndjson", "", ".gz", ".gz.bin"])
def test_compressed_and_oddly_named_files_are_read(tmp_path: Path, rollouts: pa.Table, suffix: str):
    """gzip and zstd by name or by their first bytes; blank lines, a byte order mark and CRLF do no harm."""
    import zstandard

    plain = write_table(rollouts, tmp_path / "x.jsonl", ROLLOUTS).read_bytes()
    odd = b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n\r\n")
    packed = gzip.compress(odd) if ".gz" in suffix else zstandard.compress(odd) if ".zst" in suffix else odd
    file = tmp_path / f"odd{suffix}"
    file.write_bytes(packed)
    assert read_table(file).equals(rollouts)
    if ".gz" in suffix or ".zst" in suffix:
        file.write_bytes(packed[:-20])
        with pytest.raises(DataError, match=r"odd\..*: cannot be read: "):
            read_table(file)


def test_literals_that_python_writes_are_read(tmp_path: Path, rollouts: pa.Table):
    """Bare NaN and Infinity, which Python's json writes, are numbers."""
    row = orjson.loads(write_table(rollouts.slice(0, 1), tmp_path / "x.jsonl", ROLLOUTS).read_bytes())
    row["reward"] = math.nan
    row["turns"][0]["generation_log_probs"][:2] = [-math.inf, "Infinity"]
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    got = read_table(tmp_path / "x.jsonl").to_pylist()[0]
    assert math.isnan(got["reward"])
    assert got["turns"][0]["generation_log_probs"][:2] == [-math.inf, math.inf]


def test_lines_that_gymdata_writes_are_read_by_the_fast_parser(
    tmp_path: Path, rollouts: pa.Table, monkeypatch: pytest.MonkeyPatch
):
    """Python's json reads none of them, which would take many times as long and be seen by nobody."""
    file = write_table(rollouts, tmp_path / "x.jsonl", ROLLOUTS)
    slow = list[Any]()
    monkeypatch.setattr(json, "loads", lambda line, **_: slow.append(line))
    assert read_table(file).equals(rollouts)
    assert slow == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("turns", 0, "generation_token_ids", 1), "7", "got text 7, expected a whole number (int32)"),
        (
            ("turns", 0, "generation_token_ids", 1),
            7.0,
            "field 'turns[0].generation_token_ids[1]': got number 7.0, expected a whole number",
        ),
        (("turns", 0, "generation_token_ids", 1), True, "got true"),
        (("turns", 0, "generation_token_ids", 1), None, "got null"),
        (("turns", 0, "generation_token_ids", 1), [3], "got list, expected a whole number"),
        (("turns", 0, "generation_token_ids", 1), 1 << 31, "expected a whole number (int32)"),
        (("turns", 0, "generation_log_probs", 0), "-1.0", "got text -1.0, expected a number (float)"),
        (("turns", 0, "generation_log_probs", 0), None, "got null"),
        (("turns", 0, "prompt_delta_ids"), "12", "got text 12, expected a list"),
        (("turns", 0, "surprise"), 1, "unknown field turns[].surprise"),
        (("turns",), None, "got null, expected a list"),
        (("turns",), {"parent": 1}, "expected a list"),
        (("messages", 0), "hello", "got text hello, expected an object"),
        (("messages", 0, "content"), 3, "got number 3, expected text"),
        (("rollout_id",), None, "got null, expected text"),
        (("reward",), "high", "got text high"),
        (("rewards",), {"exact": "high"}, "field 'rewards[0].value': got text high"),
        (("started_at",), "yesterday", "started_at"),
        (("n_turns",), 1 << 70, "n_turns"),
        (("surprise",), 1, "unknown field surprise"),
    ],
)
def test_a_value_that_does_not_fit_is_named(tmp_path: Path, rollouts: pa.Table, path, value, message: str):
    """File, line and field of what is wrong; nothing is rounded, dropped or read as something else."""
    file = write_table(rollouts.slice(0, 2), tmp_path / "x.jsonl", ROLLOUTS)
    good, bad = map(json.loads, file.read_text().splitlines())
    *parents, last = path
    holder: Any = bad
    for key in parents:
        holder = holder[key]
    holder[last] = value
    file.write_text(json.dumps(good) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(DataError) as caught:
        read_table(file)
    assert f"{file}, line 3" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b'{"rollout_id": "a"}\n', "line 1, field 'run_id': got nothing"),
        (b'{"prompt": "a", "completion": "b"}\n', "contains prompts with completions as text, expected rollouts"),
        (b"[1, 2]\n", "line 1: got number 1, expected an object"),
        (b'{"rollout_id": \n', "line 1: got a line that is not JSON"),
        (b"\xff{}\n", "line 1: got a line that is not JSON"),
        ('{"rollout_id": "a"}\n'.encode("utf-16"), "its text is UTF-16, expected UTF-8"),
        pytest.param(
            b'{"rollout_id":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            "line 1: got a line that is not JSON (nested too deeply)",
            id="nested",
        ),
    ],
)
def test_a_file_that_is_not_the_table_is_named(tmp_path: Path, content: bytes, message: str):
    """Empty, foreign and broken JSON lines each say what they are."""
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_table(file)
    assert message in str(caught.value)
    with pytest.raises(DataError):
        list(scan_batches(file))


def test_pairs_of_text_are_named_with_what_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(
        DataError,
        match=r"contains preference pairs as text, expected pairs\n.*gymdata import .*; train-dpo takes it",
    ):
        read_table(file, PAIRS)


def test_versions_and_tables_are_checked(tmp_path: Path, rollouts: pa.Table):
    """A newer version and another table are refused by name."""
    file = tmp_path / "x.parquet"
    pq.write_table(rollouts.replace_schema_metadata(ROLLOUTS.metadata | {VERSION_KEY: b"2"}), file)
    for read in (lambda: read_table(file), lambda: list(scan_batches(file))):
        with pytest.raises(DataError, match="rollouts version 2 is newer"):
            read()
    pq.write_table(rollouts.replace_schema_metadata(ROLLOUTS.metadata | {VERSION_KEY: b"new"}), file)
    with pytest.raises(DataError, match=r"gymdata\.version in its metadata: got b'new', expected a whole number"):
        read_table(file)
    write_table(rollouts, file, ROLLOUTS)
    with pytest.raises(DataError, match="contains rollouts, expected pairs"):
        read_table(file, PAIRS)
    pq.write_table(rollouts.select(["task_id", "turns"]).replace_schema_metadata(None), file)
    with pytest.raises(DataError, match="lacks the column"):
        read_table(file)
    assert read_table(file, columns=["task_id"]).column_names == ["task_id"]


def test_columns_are_chosen_and_ordered(tmp_path: Path, rollouts: pa.Table):
    """Only what is asked for is read, in that order, from either format; an unknown name finds its neighbour."""
    for name in ("x.parquet", "x.jsonl"):
        file = write_table(rollouts, tmp_path / name, ROLLOUTS)
        expected = rollouts.select(["reward", "task_id"])
        assert read_table(file, columns=["reward", "task_id"]).equals(expected)
        streamed = pa.Table.from_batches(scan_batches(file, columns=["reward", "task_id"], batch_size=3))
        assert streamed.equals(expected)
        with pytest.raises(UsageError, match="did you mean 'reward'"):
            read_table(file, columns=["rewrd"])


def test_optional_columns_are_null_where_a_file_lacks_them(tmp_path: Path):
    """Files with and without optional columns read as one table."""
    schema = pa.schema([f for f in PAIRS.schema if f.name not in PAIRS.optional])
    write_table(pa.Table.from_pylist([_filled(schema, 1)], schema=schema), tmp_path / "a.parquet", PAIRS)
    write_table(pa.Table.from_pylist([_filled(PAIRS.schema, 2)], schema=PAIRS.schema), tmp_path / "b.jsonl", PAIRS)
    both = read_table(tmp_path / "[ab].*", PAIRS)
    assert both["ref_hash"].to_pylist() == [None, "text 2"]
    assert read_table(tmp_path / "a.parquet", PAIRS, ["ref_hash"])["ref_hash"].to_pylist() == [None]


def test_a_value_in_a_column_that_the_first_row_lacks_is_not_lost(tmp_path: Path):
    """Lines of two files in one, the second with more columns, are refused with the line and the column."""
    rows = [json.loads(json.dumps(_filled(PAIRS.schema, n), default=str)) for n in (1, 2)]
    del rows[0]["rendered"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="line 2, field 'rendered': got a value, expected none, as the first row"):
        read_table(tmp_path / "pairs.jsonl", PAIRS)
    assert read_table(tmp_path / "pairs.jsonl", PAIRS, ["rendered"])["rendered"].to_pylist() == [None, True]


def test_files_of_other_writers_are_brought_into_shape(tmp_path: Path, rollouts: pa.Table):
    """What Polars and DuckDB write of the same rows (large lists, nullable fields, no metadata) reads as the same table."""
    import duckdb
    import polars as pl

    ours = write_table(rollouts, tmp_path / "ours.parquet", ROLLOUTS)
    pl.read_parquet(ours).write_parquet(tmp_path / "polars.parquet")
    duckdb.sql(f"COPY (FROM '{ours}') TO '{tmp_path}/duckdb.parquet'")
    for name in ("polars", "duckdb"):
        got = read_table(tmp_path / f"{name}.parquet")
        assert got.equals(rollouts), name
        assert got.schema.equals(ROLLOUTS.arrow, check_metadata=True)


def test_plain_duckdb_and_datasets_open_the_files(tmp_path: Path, rollouts: pa.Table):
    """Nobody needs gymdata to read them."""
    import duckdb

    for name in ("x.parquet", "x.jsonl"):
        file = write_table(rollouts, tmp_path / name, ROLLOUTS)
        found = duckdb.sql(f"SELECT sum(n_turns), max(len(turns[1].generation_token_ids)) FROM '{file}'").fetchall()
        assert found == [(8, 3)]
    datasets = pytest.importorskip("datasets")
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "cache"))
    assert loaded[1]["turns"][0]["generation_token_ids"] == rollouts["turns"][1].as_py()[0]["generation_token_ids"]


def test_writing_is_all_or_nothing(tmp_path: Path, rollouts: pa.Table):
    """A table that is refused while it is written leaves the old file and no temporary one."""
    file = write_table(rollouts, tmp_path / "x.jsonl", ROLLOUTS)
    before = file.read_bytes()
    twice = pa.array(
        [[{"name": "a", "value": 1.0}, {"name": "a", "value": 2.0}]] * 4, ROLLOUTS.schema.field("rewards").type
    )
    bad = rollouts.set_column(rollouts.column_names.index("rewards"), ROLLOUTS.schema.field("rewards"), twice)
    with pytest.raises(DataError, match="distinct names"):
        write_table(bad, file, ROLLOUTS)
    assert file.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.jsonl", "x.jsonl"]
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(StoreError, match="could not be written"):
        write_table(rollouts, tmp_path / "folder.jsonl", ROLLOUTS)


def test_an_empty_table_keeps_its_schema(tmp_path: Path):
    """A Parquet file without rows is a table without rows."""
    file = write_table(SCORES.schema.empty_table(), tmp_path / "x.parquet", SCORES)
    assert read_table(file, SCORES).schema.equals(SCORES.arrow)
    assert list(scan_batches(file, SCORES)) == []
