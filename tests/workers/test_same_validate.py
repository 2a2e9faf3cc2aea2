"""``gymdata validate`` says the same, word for word, with one process and with several."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import sample_data
from gymdata.cli.main import main
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import write_table
from gymdata.validate.run import validate
from tests.rollout_files import rollouts_table
from tests.validate.generate import write_lines, write_native
from tests.workers import inputs


def run_with_journal(folder: Path) -> Path:
    """Several parts, one of them empty; a journal with a damaged line and a torn end; a row in two files."""
    rows = inputs.faulty()
    run = inputs.write_parts(folder / "run", [rows[:30], [], rows[25:50], rows[50:]], rows[40:44], torn=25)
    journal = run / "rollouts" / "00004.journal"
    journal.write_bytes(journal.read_bytes().replace(b"done", b"dOne", 1))
    return run


def one_file(folder: Path) -> Path:
    return write_native(folder, inputs.faulty(), "parquet")


def damaged_page(folder: Path) -> Path:
    """The middle of the file cannot be read; another file follows."""
    file = write_native(folder, inputs.faulty(), "parquet")
    column = pq.ParquetFile(file).metadata.row_group(20).column(0)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset : column.data_page_offset + 8] = b"\xff" * 8
    file.write_bytes(data)
    write_table(rollouts_table(inputs.native(4, 1)), folder / "second.parquet", ROLLOUTS)
    return folder / "*.parquet"


def without_columns(folder: Path) -> Path:
    """What the file lacks is a fault of the file, once."""
    file = write_native(folder, inputs.faulty(), "parquet")
    pq.write_table(pq.read_table(file).drop_columns(["reward", "messages"]), file, row_group_size=5)
    return file


def lines(folder: Path) -> Path:
    return inputs.damaged_lines(inputs.faulty(), folder / "rollouts.jsonl")


def texts_only(folder: Path) -> Path:
    """No ids in one file: T205 is a warning there, and an error in the other."""
    rows = inputs.native(40)
    for row in rows[:20]:
        row.update(turns=[], n_turns=0, n_context_tokens=0, n_generated_tokens=0)
    inputs.write_text(folder / "a.jsonl", inputs.lines_of(rows[:20]))
    inputs.write_text(folder / "b.jsonl", inputs.lines_of([*rows[20:], {**rows[0], "rollout_id": "x"}]))
    return folder / "*.jsonl"


def nemo(folder: Path) -> Path:
    return inputs.write_nemo(folder / "gym.jsonl", inputs.nemo())


def nemo_files(folder: Path) -> Path:
    """Plain and compressed, with rows that are in both."""
    rows = inputs.nemo()
    inputs.compressed(inputs.write_nemo(folder / "a.jsonl", rows[:50]))
    inputs.write_nemo(folder / "b.jsonl", rows[10:])
    return folder / "*.jsonl*"


def mixed(folder: Path) -> Path:
    """Rollouts and NeMo Gym rows under one glob; behavior that only all rows show."""
    rows = inputs.native(48)
    for row in rows:
        row["reward"] = 1.0
        row["turns"][-1]["finish_reason"] = "length"
    inputs.write_text(folder / "a.jsonl", inputs.lines_of(rows))
    write_lines(folder / "b.jsonl", inputs.nemo())
    return folder / "*.jsonl"


SHAPES = [
    run_with_journal, one_file, damaged_page, without_columns, lines, texts_only, nemo, nemo_files, mixed,
]  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["validate", *words])
    out, err = capsys.readouterr()
    return code, re.sub(r"\(\d+\.\d\d s\)", "", out), err


@pytest.mark.matrix("run_with_journal", "damaged_page", "nemo")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.__name__)
def test_the_report_does_not_depend_on_the_workers(
    shape: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """JSON, text, standard error and exit code are those of one process, whatever the input is."""
    inputs.in_small_batches(monkeypatch)
    path = str(shape(tmp_path))
    as_json, shown = said(capsys, path, "--json"), said(capsys, path, "-v")
    assert as_json[0] == 1
    assert said(capsys, path, "--json", "--workers", "2") == as_json
    assert said(capsys, path, "-v", "--workers", "3") == shown


def test_settings_reach_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which codes count, and the tokenizer that bounds ids and tells the cause of a break, are those of the call."""
    inputs.in_small_batches(monkeypatch)
    file, tokenizer = str(nemo(tmp_path)), str(Path(sample_data.__file__).parent / "policy")
    for more in (["--strict"], ["--select", "T2", "--ignore", "T206"], ["--select", "T2", "--tokenizer", tokenizer]):
        assert said(capsys, file, *more, "--json", "--workers", "2") == said(capsys, file, *more, "--json")


def test_the_function_takes_workers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``gymdata.validate(path, workers=2)`` is the command."""
    inputs.in_small_batches(monkeypatch)
    file = one_file(tmp_path)
    assert validate(file, workers=2).to_dict() == validate(file).to_dict()
