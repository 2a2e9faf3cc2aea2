"""Small inputs of every odd shape: row groups, lines, open segments, damage, what repeats across files."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import tables
from gymdata.store.journal import line_of
from gymdata.store.lines import encode
from tests.rollout_files import rollout, rollouts_table, two_turns, write_table
from tests.validate.generate import NATIVE_PLANTS, NEMO_PLANTS, native_rows, nemo_rows, plant, write_lines

Rows = list[dict[str, Any]]


def in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at a time is a few rows, and a row group of what is written is, too."""
    monkeypatch.setattr(tables.ParquetSink, "group_bytes", 4_000)
    monkeypatch.setattr(tables, "PARSE_BYTES", 20_000)


def planted(rows: Rows, plants: Sequence[Any]) -> Rows:
    """A fault in every second row, each of another kind."""
    for k, fault in enumerate(plants):
        rows = plant(rows, fault, (2 * k + 1) % len(rows))
    return rows


def native(n: int = 60, seed: int = 0) -> Rows:
    return native_rows(n, seed=seed)


def scored(n: int = 60) -> Rows:
    """Groups of four with one prompt each, of up to two turns, and with different rewards and answers."""
    calls = [two_turns(100 + k // 4, 300 + k) if k % 8 < 4 else [([1, 2], [300 + k, 3])] for k in range(n)]
    return [rollout(f"t{k // 4:03d}", k % 4, float(k % 3), calls[k]) for k in range(n)]


def faulty(n: int = 60) -> Rows:
    """Faults, and two rows that are there twice, far apart."""
    rows = planted(native(n), NATIVE_PLANTS)
    return [*rows, copy.deepcopy(rows[0]), {**copy.deepcopy(rows[2]), "rollout_id": "another"}]


def write_parts(folder: Path, parts: Sequence[Rows], journal: Sequence[dict[str, Any]] = (), torn: int = 0) -> Path:
    """A run with a Parquet file for each of ``parts``, and an open segment whose last ``torn`` bytes are missing."""
    (folder / "rollouts").mkdir(parents=True)
    files = []
    for k, rows in enumerate(parts):
        name = f"rollouts/part-{k:05d}.parquet"
        write_table(rollouts_table(rows), folder / name, ROLLOUTS)
        files.append({"path": name, "rows": len(rows)})
    if journal:
        data = b"".join(line_of(encode(row)) for row in journal)
        (folder / "rollouts" / f"part-{len(parts):05d}.jsonl").write_bytes(data[: len(data) - torn])
    (folder / "run.json").write_text(json.dumps({"run_id": "run-1", "files": files}))
    return folder


def lines_of(rows: Rows) -> list[str]:
    return [encode(row).decode() for row in rows]


def write_text(path: Path, lines: Sequence[str]) -> Path:
    path.write_bytes("\n".join(lines).encode())
    return path


def damaged_lines(rows: Rows, path: Path) -> Path:
    """Rows with a byte order mark, blank lines, lines that are no JSON, keys that nothing reads, and no last line end."""
    lines = lines_of(rows)
    lines[0] = "\ufeff" + lines[0]
    for at in (9, 33, 50):
        lines[at] = lines[at][:-7]
    for at in (4, 20, 57):
        lines[at] = lines[at].replace('"run_id"', '"runid":1,"run_id"')
    return write_text(path, ["", " ", *lines[:30], "", "\t", *lines[30:]])


def nemo(n: int = 60) -> Rows:
    rows = planted(nemo_rows(n), NEMO_PLANTS)
    for k, row in enumerate(rows):
        row["responses_create_params"]["temperature"] = 0.7 if k % 3 else 0.0
    return [*rows, copy.deepcopy(rows[0]), copy.deepcopy(rows[20])]


def write_nemo(path: Path, rows: Rows) -> Path:
    """With blank lines and lines that are no JSON."""
    lines = [json.dumps(row) for row in rows]
    return write_lines(path, [*lines[:10], "", '{"responses_create_params": {', *lines[10:40], "no", "  ", *lines[40:]])


def compressed(path: Path) -> Path:
    made = path.with_name(path.name + ".gz")
    made.write_bytes(gzip.compress(path.read_bytes()))
    return made
