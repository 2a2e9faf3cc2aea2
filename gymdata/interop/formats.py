"""Which foreign format a file is in, how it is read, and how rows are written in it.

Invariants: files are checked before anything is written; all files of an import have one format; a format's module is
loaded when it is used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from gymdata.errors import DataError, UsageError
from gymdata.store import find_run_json, read_run_json
from gymdata.store.run_json import writing_into

if TYPE_CHECKING:
    from gymdata.interop.nemo_gym.rebuild import PromptRebuilder
    from gymdata.store.paths import Source
    from gymdata.store.stage_output import Part

#: Formats that can be imported, and the table that they become.
SOURCES = {
    "nemo-gym": "rollouts",
    "nat-trajectories": "rollouts",
    "atif": "rollouts",
    "nat-dpo": "pairs",
    "nat-dpo-items": "pairs",
}
#: Formats that can be exported.
FORMATS = (
    "nemo-gym", "nat-trajectories", "nat-dpo", "nat-dpo-items", "atif", "trl-messages", "trl-prompt-completion",
    "trl-preference", "openai", "verl",
)  # fmt: skip
OF_PAIRS = frozenset({"trl-preference", "nat-dpo", "nat-dpo-items"})
SUFFIXES = {
    "verl": (".parquet",),
    "nat-trajectories": (".json", ".jsonl"),
    "nat-dpo-items": (".json", ".jsonl"),
    "atif": (".jsonl", ".json"),
}
_EXPECTED = "NeMo Gym rows, trajectories or DPO rows of the NeMo Agent Toolkit, or ATIF trajectories"
#: Columns of published text data, of which ``collect`` makes tasks.
_TEXTS = {"prompt", "messages", "conversations", "instruction", "question", "problem", "query"}
#: Write buffer in bytes.
_BUFFER = 1 << 20
#: Rows per row group of verl's table.
_ROWS = 8_192
Row = Mapping[str, Any]


def detect(sources: Sequence[Source]) -> str:
    """The format that all of ``sources`` are in. Raises UsageError or DataError when they have no known format, or
    several."""
    if not sources:
        raise UsageError("no file to import", hint="gymdata import FILE… -o RUN")
    found: dict[str, Path] = {}
    for source in sources:
        if source.path.stat().st_size == 0:
            raise DataError.empty(source.path, _EXPECTED)
        found.setdefault(_format(source), source.path)
    if len(found) > 1:
        formats = ", ".join(f"{path.name} is {name}" for name, path in found.items())
        raise UsageError(f"files of several formats: {formats}", hint="import them one format at a time")
    return next(iter(found))


def _format(source: Source) -> str:
    from gymdata.store.lines import foreign_format

    known = foreign_format(source)
    if known is not None and known.name in SOURCES:
        return known.name
    from gymdata.interop.importing import first_value
    from gymdata.interop.trajectories import atif, nat, nat_pairs

    value = first_value(source) if source.kind == "jsonl" else None
    if atif.is_atif(value):
        return "atif"
    if nat_pairs.is_dpo_line(value[0] if isinstance(value, list) and value else value):
        return "nat-dpo"
    if nat.is_nat(value):
        return "nat-dpo-items" if nat.is_dpo(value) else "nat-trajectories"
    raise DataError(
        f"{source.path}: got no row of a known format among its first lines, expected {_EXPECTED}",
        hint=_hint(source.path, value[0] if isinstance(value, list) and value else value),
    )


def _hint(path: Path, row: Any) -> str:
    """What to do with a file that is in none of the formats; ``row``: its first."""
    if isinstance(row, Mapping) and "rollout_id" not in row and row.keys() & _TEXTS:
        return (
            f"prompts and conversations are tasks: `gymdata collect {path} -m MODEL -o RUN` samples rollouts of them; "
            "answers that a model wrote can be imported as NeMo Gym rows, and `gymdata tokenize` renders their ids"
        )
    return "files of gymdata need no import; --from names a format"


def read(
    name: str,
    sources: list[Source],
    *,
    run_id: str,
    reject: Callable[[Any], None],
    shapes: list[dict[str, Any]],
    rebuild: PromptRebuilder | None = None,
    check: Callable[[Row], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rollouts rows of files in the format ``name``, as the store turns them into columns. ``check`` raises DataError
    for a row that is to be rejected."""
    if name == "nemo-gym":
        from gymdata.interop.nemo_gym import read as nemo_import

        return nemo_import.table_rows(sources, run_id=run_id, reject=reject, rebuild=rebuild, check=check, columns=True)
    if name == "atif":
        from gymdata.interop.trajectories import atif

        return atif.table_rows(sources, run_id=run_id, reject=reject, check=check)
    from gymdata.interop.trajectories import nat

    return nat.table_rows(sources, run_id=run_id, reject=reject, shapes=shapes, check=check)


#: Formats of rollouts that hold their reward.
WITH_REWARD = ("nemo-gym", "nat-trajectories", "atif", "verl")


def table_of(name: str) -> str:
    """The table whose rows are written in the format ``name``."""
    return "pairs" if name in OF_PAIRS else "rollouts"


def writer_of(name: str) -> Callable[[Row, Counter[str]], Any]:
    """The function that converts a row to what ``write`` takes, or to None when the format cannot hold it, and counts
    what is lost. Not for ``nemo-gym`` and the text formats, which have writers of their own."""
    if name in ("nat-trajectories", "nat-dpo-items"):
        return partial(_trajectory, name)
    from gymdata.interop.trajectories import atif, nat_pairs
    from gymdata.store.lines import encode_any

    make = atif.trajectory_of if name == "atif" else nat_pairs.dpo_line

    def line(row: Row, lost: Counter[str]) -> bytes | None:
        made = make(row, lost)
        if made is None:
            return None
        return json.dumps(made, ensure_ascii=False).encode() if name == "atif" else encode_any(made)

    return line


def write(name: str, rows: Iterable[Any], part: Part, target: Path, came_from: Sequence[Any]) -> int:
    """Write ``rows``, as ``Export.made`` yields them, to ``part``, which becomes ``target``; returns their number.
    Raises StoreError.from_os."""
    with writing_into(target):
        return _write(name, rows, part, target, came_from)


def _write(name: str, rows: Iterable[Any], part: Part, target: Path, came_from: Sequence[Any]) -> int:
    path = part.path
    if name == "verl":
        return _parquet(chain.from_iterable(rows), path)
    if name in ("nat-trajectories", "nat-dpo-items"):
        from gymdata.interop.trajectories import nat

        return nat.write(iter(rows), path, lines=target.suffix == ".jsonl", shapes=came_from)
    from gymdata.interop.text_export import WRITERS

    count = 0
    if name in WRITERS:
        digest = xxhash.xxh3_64()
        with path.open("wb") as file:
            for lines in rows:
                file.write(lines.text)
                digest.update(lines.text)
                count += lines.rows
        part.xxh3 = digest.hexdigest()
        return count
    as_list = target.suffix == ".json"
    # NeMo Gym lines include their newlines.
    end = b"" if as_list or name == "nemo-gym" else b"\n"
    with path.open("wb", buffering=_BUFFER) as file:
        for row in rows:
            if as_list and count:
                # A single trajectory is the document itself; several are a list.
                file.write(b",\n")
            file.write(row)
            file.write(end)
            count += 1
    if as_list and count > 1:
        path.write_bytes(b"[" + path.read_bytes() + b"]\n")
    return count


def columns(name: str) -> Sequence[str] | None:
    """The columns of rollouts that a format is written from; None for all of them."""
    from gymdata.interop.text_export import COLUMNS, VERL_COLUMNS, WRITERS

    if name not in WRITERS or name in OF_PAIRS:
        return None
    return VERL_COLUMNS if name == "verl" else COLUMNS


def _trajectory(name: str, row: Row, lost: Counter[str]) -> tuple[str, str, dict[str, Any]] | None:
    from gymdata.interop.trajectories import nat, nat_pairs

    make, group = (
        (nat.trajectory_of, "group_id") if name == "nat-trajectories" else (nat_pairs.dpo_trajectory, "task_id")
    )
    made = make(row, lost)
    return None if made is None else (row[group], row["run_id"], made)


def _parquet(rows: Iterator[dict[str, Any]], path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    extra = {
        "index": pa.int64(),
        "task_id": text,
        "rollout_id": text,
        "reward": pa.float64(),
        "task": text,
        "tools": text,
    }
    schema = pa.schema({
        "data_source": text,
        "prompt": pa.list_(pa.struct({"role": text, "content": text})),
        "ability": text,
        "reward_model": pa.struct({"style": text, "ground_truth": text}),
        "extra_info": pa.struct(extra),
    })  # fmt: skip
    count = 0
    with pq.ParquetWriter(path.absolute(), schema, compression="zstd") as sink:
        while chunk := list(islice(rows, _ROWS)):
            sink.write_table(pa.Table.from_pylist(chunk, schema=schema))
            count += len(chunk)
    return count


def shapes_of(path: str | Path, name: str) -> list[Any]:
    """The shapes of the documents that the rows were imported from, when they are exported to the same format."""
    found = find_run_json(path)
    facts = read_run_json(found) if found is not None else {}
    if facts.get("stage") != "import" or facts.get("format") != name:
        return []
    return list(facts.get("documents") or [])
