"""Five hundred files of published rows with values, keys or bytes changed: read or named, never taken for another format."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.collect.tasks import TaskFile
from gymdata.errors import GymdataError
from gymdata.store.formats import format_of
from gymdata.store.paths import resolve
from tests.formats.published_rows import PUBLISHED
from tests.formats.trajectories import ROWS, copy_and_last, places

ODD: list[Any] = [
    None, True, 5, -1, 0.5, 2**31, 2**70, "x", "", "NaN", "\ud800", [], {}, [[]], [None], {"a": None}, float("nan"),
]  # fmt: skip
FILES: list[tuple[str, list[dict[str, Any]]]] = [(name, [row(4), row(5)]) for name, row in (ROWS | PUBLISHED).items()]
SEEDS = 25
EACH = 20


def mutated(row: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """A row with a value in some place replaced or taken out."""
    path = source.choice(list(places(row)))
    made, inner = copy_and_last(row, path)
    if source.random() < 0.1:
        del inner[path[-1]]
    else:
        inner[path[-1]] = copy.deepcopy(source.choice(ODD))
    return made


def text_of(rows: list[dict[str, Any]], source: random.Random) -> bytes:
    """The rows as a file: lines, a list, pretty-printed, cut off, or with a byte changed."""
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    kind = source.choice(["lines", "list", "pretty list", "pretty objects", "cut", "changed"])
    if kind == "list":
        return json.dumps(rows).encode()
    if kind == "pretty list":
        return json.dumps(rows, indent=1).encode()
    if kind == "pretty objects":
        return "\n".join(json.dumps(row, indent=1) for row in rows).encode()
    at = source.randrange(1, len(lines))
    byte = source.choice([b"\xff", b"\x00", b'"', b"}", b"[", b"NaN", b"\n"])
    return lines[:at] if kind == "cut" else lines if kind == "lines" else lines[:at] + byte + lines[at + 1 :]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::gymdata.store.reading.DataWarning")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_mutated_file_is_read_or_named(seed: int, tmp_path: Path) -> None:
    """No command ends with anything but an error of its own, and no file is taken for one of another format."""
    source = random.Random(seed)
    for n in range(EACH):
        name, rows = FILES[(seed * EACH + n) % len(FILES)]
        made = [mutated(row, source) if source.random() < 0.6 else row for row in rows]
        file = tmp_path / f"{n}.jsonl"
        file.write_bytes(text_of(made, source))
        known = format_of(resolve(file)[0])
        assert known is None or known.name == name
        for number, format in enumerate((None, name)):
            try:
                summary = gymdata.import_rollouts(file, tmp_path / f"{n}-{number}", source=format)
            except GymdataError:
                continue
            failed = sum(summary.failed.values())
            assert summary.rows_in == summary.rollouts + summary.pairs + summary.rejected + failed
        for read in (gymdata.validate, lambda path: list(TaskFile(path, skip_bad_rows=True))):
            try:
                read(file)
            except GymdataError:
                continue
