"""``gymdata.import_rollouts`` and ``gymdata.export_rollouts``: other projects' files to runs and back.

What always holds: every row that goes in comes out as a rollout or is named in rejected.jsonl with its line and reason;
what a format cannot hold is counted and told; an output appears whole.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.core.schema import PAIRS, ROLLOUTS
from gymdata.errors import DataError, UsageError
from gymdata.store import Run, hash_file, resolve, scan_batches, write_run_json
from gymdata.store.columns import spread
from gymdata.store.lines import encode_any
from gymdata.store.run_json import replacing

if TYPE_CHECKING:
    from gymdata.adapters.formats.nemo_import import Rejected

FORMATS = ("nemo-gym", "trl-messages", "trl-prompt-completion", "trl-preference", "openai", "verl")
REJECTED = "rejected.jsonl"
_BATCH_ROWS = 256


@dataclass(slots=True)
class ImportSummary:
    """What came in. ``rows`` = ``rollouts`` + ``rejected``; ``reasons`` counts rejected rows by code."""

    run: str
    rows: int = 0
    rollouts: int = 0
    rejected: int = 0
    turns: int = 0
    breaks: int = 0
    without_token_data: int = 0
    without_reward: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class ExportSummary:
    """What went out. ``lost``: what the format cannot hold → in how many rows; ``skipped``: rows without a place in it."""

    output: str
    format: str
    rows: int = 0
    skipped: int = 0
    turns: int = 0
    turns_lost: int = 0
    lost: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def import_rollouts(
    files: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    run_id: str | None = None,
    overwrite: bool = False,
    format: str = "parquet",
    command: Sequence[str] = (),
) -> ImportSummary:
    """Bring NeMo Gym rollouts (JSONL, plain or compressed; files or globs) into the run ``output``.

    Rows that are no rollouts go to ``output/rejected.jsonl`` with file, line, code, reason and how they begin; all others
    become rollouts, those without token ids as well (they have no turns). Importing the same files again does nothing.
    Raises DataError when a file is missing, cannot be read to its end or holds no NeMo Gym rows, StoreError when the run is
    of other files and not ``overwrite``.
    """
    from gymdata.adapters.formats import nemo_import

    given = [files] if isinstance(files, (str, Path)) else list(files)
    sources = [source for one in given for source in resolve(one, ROLLOUTS)]
    _all_foreign(sources)
    summary = ImportSummary(str(output), files=[str(s.path) for s in sources])
    rejected: list[Rejected] = []
    read = [{"path": str(s.path.resolve()), "bytes": s.path.stat().st_size, "xxh3": hash_file(s.path)} for s in sources]
    identity = {"imported": [f["xxh3"] for f in read], "format": "nemo-gym"}
    parents = [{"path": f["path"], "run_id": None, "run_json_xxh3": None, "xxh3": f["xxh3"]} for f in read]
    with Run.open(
        output,
        identity=identity,
        extent={},
        operation={"files": summary.files},
        facts={"stage": "import", "command": list(command), "parents": parents, "sources": read},
        run_id=run_id,
        overwrite=overwrite,
        format="jsonl" if format == "jsonl" else "parquet",
    ) as run:
        # The order of rows is that of the files, so what an import that was stopped has written is their beginning.
        done = run.sealed_rows
        rows = nemo_import.table_rows(sources, run_id=run.run_id, reject=rejected.append)
        counted = _counted(rows, summary)
        collecting = gc.isenabled()
        # Rows make many short-lived objects and no cycles; looking for cycles costs a tenth of the time.
        gc.disable()
        try:
            for _ in islice(counted, done):
                pass
            run.write(counted)
        finally:
            if collecting:
                gc.enable()
        summary.rejected = len(rejected)
        summary.rows = summary.rollouts + summary.rejected
        summary.reasons = dict(sorted(Counter(r.code for r in rejected).items()))
        _write_rejected(Path(output) / REJECTED, rejected)
        run.note(counts={k: v for k, v in summary.to_dict().items() if k not in ("run", "files")})
    return summary


def _all_foreign(sources: Sequence[Any]) -> None:
    from gymdata.store.foreign import foreign_format

    if not sources:
        raise UsageError("no file to import", hint="gymdata import FILE… -o RUN")
    for source in sources:
        if source.path.stat().st_size == 0:
            raise DataError.empty(source.path, "NeMo Gym rollouts")
        if foreign_format(source) is None:
            raise DataError(
                f"{source.path}: got no NeMo Gym row among its first lines, expected rows with response.output",
                hint="files of gymdata need no import",
            )


def _counted(rows: Iterable[dict[str, Any]], summary: ImportSummary) -> Iterator[tuple[dict[str, Any], int]]:
    for row in rows:
        summary.rollouts += 1
        summary.turns += row["n_turns"]
        summary.breaks += row["n_breaks"]
        summary.without_token_data += not row["n_turns"]
        summary.without_reward += row["reward"] is None
        yield row, row["n_context_tokens"] + row["n_generated_tokens"]


def _write_rejected(path: Path, rejected: Sequence[Rejected]) -> None:
    if not rejected:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary, temporary.open("wb") as file:
        for bad in rejected:
            line = {"file": str(bad.file), "line": bad.line, "code": bad.code, "reason": bad.reason, "text": bad.text}
            file.write(encode_any(line) + b"\n")


def export_rollouts(
    path: str | Path,
    output: str | Path,
    format: str,
    *,
    overwrite: bool = False,
    command: Sequence[str] = (),
) -> ExportSummary:
    """Write the rollouts under ``path`` in another project's format, one of ``FORMATS``.

    ``nemo-gym`` keeps ids and log-probabilities, with whole prompts; the others are text. ``trl-preference`` is made from
    pairs: ``path`` is a pairs file or folder, or a run that holds one. ``verl`` writes Parquet, the others JSON lines.
    Raises UsageError for an unknown format or an output that exists, DataError when there is nothing to export.
    """
    from gymdata.adapters.formats.chat_export import WRITERS

    target = Path(output)
    if format not in FORMATS:
        raise UsageError.unknown_choice("--format", format, FORMATS)
    suffix = ".parquet" if format == "verl" else ".jsonl"
    if target.suffix != suffix:
        raise UsageError.bad_value("-o", str(output), f"a name ending in {suffix}, for {format}")
    table = PAIRS if format == "trl-preference" else ROLLOUTS
    sources = resolve(path, table)
    if any(target.exists() and target.samefile(s.path) for s in sources):
        raise UsageError(f"-o {target}: is one of the files that are exported", hint="give another name")
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: exists", hint="--overwrite replaces it, or give another -o")
    summary = ExportSummary(str(output), format)
    rows = (row for batch in scan_batches(path, table, batch_size=_BATCH_ROWS) for row in spread(batch))
    target.parent.mkdir(parents=True, exist_ok=True)
    lost: Counter[str] = Counter()
    with replacing(target) as temporary:
        if format == "nemo-gym":
            _write_nemo_gym(rows, temporary, summary)
            lost["turns that no message names"] = summary.turns_lost
        else:
            write = WRITERS[format][0]
            made = (one for row in rows if (one := write(row, lost)) is not None)
            _write_text(made, temporary, format, summary)
            summary.skipped = lost["rollouts without an assistant message"]
        if not summary.rows and not summary.skipped:
            raise DataError.empty(path, f"rows of {table.name}")
    summary.lost = {what: n for what, n in lost.items() if n}
    from gymdata.api.sources import parent_of

    facts = {"stage": "export", "command": list(command), "parents": [parent_of(path)], "counts": summary.to_dict()}
    write_run_json(target, facts)
    return summary


def _write_nemo_gym(rows: Iterable[Mapping[str, Any]], path: Path, summary: ExportSummary) -> None:
    from gymdata.adapters.formats.nemo_export import line_of, nemo_gym_row

    with path.open("wb") as file:
        for row in rows:
            made, lost = nemo_gym_row(row)
            summary.rows += 1
            summary.turns += row["n_turns"]
            summary.turns_lost += lost
            file.write(line_of(made))


def _write_text(rows: Iterator[dict[str, Any]], path: Path, format: str, summary: ExportSummary) -> None:
    if format == "verl":
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist(list(rows))
        summary.rows = table.num_rows
        pq.write_table(table, path, compression="zstd")
        return
    with path.open("wb") as file:
        for row in rows:
            summary.rows += 1
            file.write(encode_any(row) + b"\n")
