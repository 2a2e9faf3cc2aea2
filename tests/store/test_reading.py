"""What readers do with data that is not as it was written: damaged journals, changed sealed files, damaged Parquet."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, GymdataError
from gymdata.store import hash_file, read_failures, read_run_json, read_table, write_run_json
from gymdata.store.journal import line_of
from gymdata.store.lines import encode
from gymdata.store.reading import DataWarning, reading
from tests.rollout_files import edit_segment, rollout, two_turns, write_run
from tests.store.conftest import make_row

#: Every kind of thing that DuckDB answers without, or with, the values: totals, filters, nulls, extremes, tokens.
QUERIES = [
    "SELECT * FROM rollouts",
    "SELECT * FROM turns",
    "SELECT count(*) AS n FROM rollouts",
    "SELECT task_id, avg(reward) AS r FROM rollouts WHERE reward > 0.5 GROUP BY 1 ORDER BY 1",
    "SELECT count(*) AS n FROM rollouts WHERE reward IS NULL",
    "SELECT max(n_turns) AS m FROM rollouts WHERE task_id >= 't3'",
]
#: Commands that read rollouts, light enough for a test; RUN and OUT are replaced.
READERS = [
    ["query", "SELECT avg(reward) FROM rollouts", "RUN"],
    ["pairs", "RUN", "-o", "OUT"],
    ["experience", "RUN", "-o", "OUT"],
    ["filter", "RUN", "--where", "reward >= 0", "-o", "OUT"],
    ["score", "RUN", "--reward", "regex:5", "-o", "OUT"],
    ["export", "RUN", "-o", "OUT.jsonl", "--format", "trl-messages"],
]


def described(folder: Path, suffix: str = "parquet") -> Path:
    """A run whose run.json has the size and hash of its part."""
    rows = [rollout(f"t{t}", i, float(i), two_turns(t, 50 + i)) for t in range(3) for i in range(2)]
    run = write_run(folder, rows, suffix)
    part = run / "rollouts" / f"part-00000.{suffix}"
    facts = read_run_json(run)
    entry = facts["files"][0] | {"bytes": part.stat().st_size, "xxh3": hash_file(part)}
    write_run_json(run, facts | {"files": [entry]})
    return run


def test_a_part_of_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that the run.json of an ended run does not name is not read, by any reader; validate reports it as T209.
    While the run is not ended it is read: a part has its name before run.json has it."""
    run, other = described(tmp_path / "run"), described(tmp_path / "other")
    (other / "rollouts" / "part-00000.parquet").rename(run / "rollouts" / "part-00001.parquet")
    facts = read_run_json(run)
    attempt = {"started_at": "2026-01-01T00:00:00Z", "ended_at": None, "outcome": None}
    write_run_json(run, facts | {"attempts": [attempt]})
    assert read_table(run).num_rows == 12
    write_run_json(run, facts | {"attempts": [attempt | {"ended_at": "2026-01-01T00:00:01Z", "outcome": "closed"}]})
    for command in READERS:
        out = str(tmp_path / "out")
        assert main([word.replace("RUN", str(run)).replace("OUT", out) for word in command]) == 1
        assert "part-00001.parquet: is not among the files of" in capsys.readouterr().err
    (found,) = [v for v in gymdata.validate(run).violations if v.code == "T209"]
    assert str(found.file).endswith("part-00001.parquet")
    with reading(allow_changed=True), pytest.warns(DataWarning, match="not among the files"):
        assert read_table(run).num_rows == 12


def journaled(folder: Path, rows: int = 4) -> Path:
    """A run whose rows are still in its journal, as after Ctrl-C. Returns the journal."""
    run = write_run(folder, [rollout("t0", 0, 0.0, two_turns(1, 5))])
    journal = run / "rollouts" / "part-00001.jsonl"
    journal.write_bytes(b"".join(line_of(encode(make_row(i, reward=float(i % 2)))) for i in range(rows)))
    return journal


def words(command: list[str], run: Path, out: Path) -> list[str]:
    return [word.replace("RUN", str(run)).replace("OUT", str(out)) for word in command]


def damaged(whole: Path, file: Path, column: str, at: int = -2) -> None:
    """Write a copy of ``whole`` to ``file``, with a changed byte near the end of each page of ``column``."""
    data, group = bytearray(whole.read_bytes()), pq.ParquetFile(whole).metadata.row_group(0)
    for chunk in map(group.column, range(group.num_columns)):
        if chunk.path_in_schema.split(".")[0] == column:
            data[chunk.data_page_offset + chunk.total_compressed_size + at] ^= 0x10
    file.write_bytes(data)


def test_no_bit_flip_of_a_sealed_run_is_silent(tmp_path: Path) -> None:
    """Of 200 flipped bits anywhere in a part, each gives an error or the same values, in SQL and in Python, though only its
    size is compared with run.json."""
    run = described(tmp_path / "run")
    file = run / "rollouts" / "part-00000.parquet"
    whole, loaded = file.read_bytes(), gymdata.load_rollouts(run)
    expected = [gymdata.query(sql, run).to_pylist() for sql in QUERIES]
    draw = random.Random(11)
    errors = []
    for flip in range(200):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        sql, values = QUERIES[flip % len(QUERIES)], expected[flip % len(QUERIES)]
        try:
            assert gymdata.query(sql, run).to_pylist() == values
            assert gymdata.load_rollouts(run).equals(loaded)
        except GymdataError as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert all(str(file) in error for error in errors)


@pytest.mark.matrix("pairs-cut", "validate-cut", "query-name")
@pytest.mark.parametrize("damage", ["cut", "name"])
@pytest.mark.parametrize(
    "command", [["validate", "RUN"], ["show", "RUN"], ["report", "RUN"], *READERS], ids=lambda c: c[0]
)
def test_a_damaged_footer_is_said_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], damage: str
) -> None:
    """A Parquet file that is cut off, or with a column whose name is no UTF-8, is unreadable data, and never a crash."""
    whole = bytearray((described(tmp_path / "run") / "rollouts" / "part-00000.parquet").read_bytes())
    whole[whole.index(b"rollout_id", len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")) + 1] ^= 128
    file = tmp_path / "alone.parquet"
    file.write_bytes(whole if damage == "name" else whole[:-100])
    assert main(words(command, file, tmp_path / "out")) == (1 if command[0] == "validate" else 2)
    said = "".join(capsys.readouterr())
    assert str(file) in said
    assert "cannot be read" in said
    assert "defect" not in said


def test_a_damaged_page_ends_a_query_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file, the row group and the checksum; a query of other columns still has its answer."""
    alone = tmp_path / "alone.parquet"
    damaged(described(tmp_path / "run") / "rollouts" / "part-00000.parquet", alone, "reward")
    assert main(["query", "SELECT avg(reward) FROM rollouts", str(alone)]) == 1
    assert f"{alone}: is damaged: row group 0: the checksum of a page does not match" in capsys.readouterr().err
    assert main(["query", "SELECT count(*) FROM turns", str(alone)]) == 0
    with pytest.raises(DataError, match="row group 0: the checksum"):
        read_table(alone, columns=["reward"])


def test_statistics_are_not_taken_for_values(tmp_path: Path) -> None:
    """A filter finds a stored NaN as NULL, which a file's least and greatest values leave out."""
    rows = [rollout("t0", i, r, two_turns(1, 5 + i)) for i, r in enumerate([0.0, float("nan"), 1.0])]
    run = write_run(tmp_path / "run", rows)
    assert gymdata.query("SELECT count(*) AS n FROM rollouts WHERE reward < 5", run)["n"].to_pylist() == [2]
    assert gymdata.query("SELECT count(*) AS n FROM rollouts WHERE reward IS NULL", run)["n"].to_pylist() == [1]


def test_a_query_reads_only_the_columns_that_it_names(tmp_path: Path) -> None:
    """Rewards and their filters are answered while the page of the turns cannot be read."""
    alone = tmp_path / "alone.parquet"
    damaged(described(tmp_path / "run") / "rollouts" / "part-00000.parquet", alone, "turns", -1)
    sql = "SELECT avg(reward) AS r FROM rollouts WHERE task_id <> 't0' AND reward_exact >= 0"
    assert gymdata.query(sql, alone).to_pylist() == [{"r": 0.5}]
    with pytest.raises(DataError, match="is damaged"):
        gymdata.query("SELECT * FROM turns", alone)


@pytest.mark.matrix("0-pairs", "40-query", "-3-export")
@pytest.mark.parametrize("command", READERS, ids=lambda c: c[0])
@pytest.mark.parametrize("at", [0, 40, -3])
def test_a_damaged_journal_line_is_said_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], at: int
) -> None:
    """Wherever a line is damaged: the result is made of the good rows, the message names the file and the line."""
    journal = journaled(tmp_path / "run")
    lines = journal.read_bytes().splitlines(keepends=True)
    broken = bytearray(lines[2])
    broken[at] ^= 0x01
    journal.write_bytes(b"".join([*lines[:2], bytes(broken), *lines[3:]]))
    assert main(words(command, tmp_path / "run", tmp_path / "out")) == 1
    offset = len(lines[0]) + len(lines[1])
    assert f"{journal}: 1 damaged row left out (line 3 at byte {offset:,})" in capsys.readouterr().err
    with pytest.warns(DataWarning, match="1 damaged row left out"):
        assert read_table(tmp_path / "run").num_rows == 4


def test_the_torn_tail_of_a_live_journal_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a run is written its last line may be on its way; of a run that nobody writes it is a warning, exit code 0."""
    from gymdata.store.lock import Lock

    journal = journaled(tmp_path / "run", rows=2)
    journal.write_bytes(journal.read_bytes()[:-40])
    command = ["filter", str(tmp_path / "run"), "--where", "reward >= 0", "--dry-run", "--json"]
    lock = Lock(tmp_path / "run")
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    lock.release()
    assert main(command) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rollouts_in"] == 2
    assert f"{journal}: its last line is torn" in shown.err


def replaced_part(folder: Path, suffix: str) -> tuple[Path, Path]:
    """A run whose part was replaced by that of other rollouts, and the part."""
    run = described(folder / "run", suffix)
    part = run / "rollouts" / f"part-00000.{suffix}"
    changed = [rollout(f"t{t}", i, float(1 - i), two_turns(t, 50 + i)) for t in range(3) for i in range(2)]
    write_run(folder / "other", changed, suffix)
    part.write_bytes((folder / "other" / "rollouts" / part.name).read_bytes())
    return run, part


@pytest.mark.matrix("pairs-parquet", "query-jsonl", "export-parquet")
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("command", READERS, ids=lambda c: c[0])
def test_changed_sealed_files_are_refused_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], suffix: str
) -> None:
    """A part of another size than in its run.json ends every reading command with 1; --allow-changed reads it with a
    warning, in the same words."""
    run, part = replaced_part(tmp_path, suffix)
    facts = read_run_json(run)
    recorded = part.stat().st_size + 1
    write_run_json(run, facts | {"files": [facts["files"][0] | {"bytes": recorded}]})
    told = words(command, run, tmp_path / "out")
    why = f"{part}: differs from what {run / 'run.json'} recorded: {recorded - 1:,} bytes, not {recorded:,}"
    assert main(told) == 1
    assert f"error: {why}" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert main([*told, "--allow-changed"]) == 0
    assert capsys.readouterr().err.count(f"warning: {why}") == 1


@pytest.mark.matrix("pairs-parquet", "export-jsonl", "filter-parquet")
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("command", [c for c in READERS if c[0] != "query"], ids=lambda c: c[0])
def test_what_is_built_is_made_of_the_recorded_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], suffix: str
) -> None:
    """A part of the same size with other bytes is refused, too; --allow-changed reads it with one warning, which the
    run.json of the output keeps."""
    run, part = replaced_part(tmp_path, suffix)
    facts = read_run_json(run)
    write_run_json(run, facts | {"files": [facts["files"][0] | {"bytes": part.stat().st_size}]})
    told = words(command, run, tmp_path / "out")
    why = f"{part}: differs from what {run / 'run.json'} recorded: other bytes (xxh3)"
    assert main(told) == 1
    assert f"error: {why}" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert main([*told, "--allow-changed"]) == 0
    assert capsys.readouterr().err.count(f"warning: {why}") == 1
    made = read_run_json(tmp_path / "out") if command[0] != "export" else {"notes": [why]}
    assert why in made["notes"]


@pytest.mark.parametrize(
    "command", [["pairs"], ["filter", "--where", "reward >= 0"], ["score", "--reward", "contains:4"]]
)
def test_scores_are_those_of_the_recorded_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Scores with other bytes are neither the default nor what others are added to."""
    run = described(tmp_path / "run")
    assert main(["score", str(run), "--reward", "regex:5", "--name", "again"]) == 0
    file = run / "scores-again" / "scores.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    told = [command[0], str(run), *command[1:], "-o", str(tmp_path / "out")]
    if command[0] == "score":
        told[-1:] = [str(file.parent)]
    assert main(told) == 1
    assert f"error: {file}: differs from what {file.parent / 'run.json'} recorded: other bytes (xxh3)" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("command", [["judge", "--genrm", "none"], ["audit", "--model", "none"]], ids=lambda c: c[0])
def test_what_costs_begins_with_the_recorded_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """A part with other bytes is refused before a model is looked at."""
    run, part = replaced_part(tmp_path, "jsonl")
    facts = read_run_json(run)
    write_run_json(run, facts | {"files": [facts["files"][0] | {"bytes": part.stat().st_size}]})
    assert main([command[0], str(run), *command[1:]]) == 1
    assert f"error: {part}: differs from what" in capsys.readouterr().err


def test_a_part_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    """Also where it was read before it was moved."""
    run = described(tmp_path / "run")
    part = run / "rollouts" / "part-00000.parquet"
    facts = read_run_json(run)
    write_run_json(run, facts | {"stage": "import"})
    assert read_table(run).num_rows == 6
    part.rename(tmp_path / "moved.parquet")
    part.symlink_to(tmp_path / "moved.parquet")
    assert read_table(run).num_rows == 6
    assert "T209" not in {v.code for v in gymdata.validate(run).violations}


def test_a_training_reads_the_recorded_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part with other bytes is refused before the model is looked at."""
    run, part = replaced_part(tmp_path, "jsonl")
    facts = read_run_json(run)
    write_run_json(run, facts | {"files": [facts["files"][0] | {"bytes": part.stat().st_size}]})
    told = ["train-sft", str(run), "--model", str(tmp_path / "none"), "-o", str(tmp_path / "model"), "--dry-run"]
    assert main(told) == 1
    assert f"error: {part}: differs from what" in capsys.readouterr().err
    assert main([*told, "--allow-changed"]) == 2
    shown = capsys.readouterr().err
    assert f"warning: {part}: differs from what" in shown
    assert str(tmp_path / "none") in shown


def test_python_reads_changed_files_where_it_is_allowed(tmp_path: Path) -> None:
    """The block allows it, with a warning, and not beyond."""
    run = described(tmp_path / "run", "jsonl")
    part = run / "rollouts" / "part-00000.jsonl"
    size = part.stat().st_size
    edit_segment(part, '"reward":0.0', '"reward":0.25')
    with pytest.raises(DataError, match="differs from what"):
        gymdata.load_rollouts(run)
    with gymdata.reading(allow_changed=True), pytest.warns(DataWarning, match="differs"):
        assert gymdata.load_rollouts(run)["reward"].to_pylist()[0] == 0.25
    with pytest.raises(DataError, match="differs from what"):
        gymdata.load_rollouts(run)
    (changed,) = [v for v in gymdata.validate(run).violations if v.turn is None and v.code == "T209"]
    why = f"differs from what {run / 'run.json'} recorded: {part.stat().st_size:,} bytes, not {size:,}"
    assert (changed.file, changed.detail) == (str(part), why)


@pytest.mark.parametrize(
    "command", [["report", "FILE"], ["export", "FILE", "-o", "OUT.jsonl", "--format", "trl-messages"]]
)
def test_a_rollout_is_shown_and_exported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """A file that holds a rollout twice is refused, as by commands that train on it."""
    file = described(tmp_path / "run", "jsonl") / "rollouts" / "part-00000.jsonl"
    alone = tmp_path / "alone.jsonl"
    alone.write_bytes(file.read_bytes() + file.read_bytes().splitlines(keepends=True)[0])
    assert main([word.replace("FILE", str(alone)).replace("OUT", str(tmp_path / "out")) for word in command]) == 1
    assert "D701: 1 rollout is there more than once, such as t0-0" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_failures_carry_checksums(tmp_path: Path, open_run, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines are JSON with a checksum as the last key; a changed one is reported and left out; one without a checksum, of
    another program, is read."""
    with open_run() as run:
        for attempt in range(3):
            run.fail({"kind": "engine", "attempt": attempt, "message": "gone"})
    file = tmp_path / "run" / "failures.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert pl.read_ndjson(file)["attempt"].to_list() == [0, 1, 2]
    assert lines[0] == b'{"kind":"engine","attempt":0,"message":"gone","crc32":"%08x"}\n' % zlib.crc32(
        b'{"kind":"engine","attempt":0,"message":"gone"'
    )
    file.write_bytes(
        lines[0] + lines[1].replace(b"gone", b"lost") + lines[2] + b'{"kind":"judge","attempt":9}\n' + b"{x\n"
    )
    with pytest.warns(
        DataWarning, match=rf"2 damaged records left out \(line 2 at byte {len(lines[0])}, line 5 at byte"
    ):
        assert [f["attempt"] for f in read_failures(tmp_path / "run")] == [0, 2, 9]
    assert main(["query", "SELECT count(*) AS n FROM failures", str(tmp_path / "run"), "--csv"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "n\n3\n"
    assert "failures.jsonl: 2 damaged records left out" in shown.err


def test_blocks_nest_and_end(tmp_path: Path) -> None:
    """What a block found is its own, and the terms before it hold again after it."""
    journal = journaled(tmp_path / "run")
    journal.write_bytes(journal.read_bytes().replace(b'"tiny"', b'"tinx"', 1))
    with reading(report=lambda line: None) as outer:
        with reading(allow_changed=True) as inner:
            read_table(tmp_path / "run")
        assert len(inner.damage) == 1
        assert outer.damage == []
        assert outer.allow_changed is False
