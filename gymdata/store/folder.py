"""The run folder: whose it is, what starting again removes, and what a crash left in it.

What always holds: nothing that gymdata did not write is ever removed; a journal is the truth until its part is named in
run.json, and the part is the truth from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymdata.core.schema import ROLLOUTS
from gymdata.errors import StoreError
from gymdata.store.failures import FAILURES
from gymdata.store.journal import Repair, repair
from gymdata.store.lock import LOCK
from gymdata.store.paths import JOURNAL, PART, ROLLOUTS_FOLDER, RUN_JSON, refuse_unwritable
from gymdata.store.run_json import sync_folder
from gymdata.store.sealing import describe, drop_journal
from gymdata.store.stage_output import intent_of
from gymdata.store.tables import read_table

#: Stage folders whose tables are made from the rollouts and mean nothing without them.
_DERIVED = ("scores-", "judge-", "pairs-", "experiences-")


@dataclass(frozen=True, slots=True)
class Segment:
    """A journal that is not sealed yet."""

    index: int
    path: Path
    rows: int


@dataclass(slots=True)
class Recovered:
    """What opening found: unsealed journals in order, repairs made, parts that run.json did not name."""

    journals: list[Segment] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    adopted: list[dict[str, Any]] = field(default_factory=list)
    next_segment: int = 0


def claim(folder: Path) -> None:
    """Make the folder, or accept one that is a run or empty. Raises StoreError for anything else."""
    refuse_foreign(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError.from_os(folder, error) from error


def refuse_foreign(folder: Path) -> None:
    """Raise StoreError when ``folder`` cannot be written, or holds something that is not a run. Makes nothing."""
    refuse_unwritable(folder)
    if not folder.exists() or (folder / RUN_JSON).exists():
        return
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in (LOCK, f".{RUN_JSON}.tmp"))
    if foreign:
        raise StoreError(
            f"{folder}: is not empty and not a run: it has no run.json (it holds {', '.join(foreign[:6])})",
            hint="give another output folder; gymdata does not write into, or remove, what it did not make",
        )


def wipe(folder: Path) -> None:
    """Remove what gymdata wrote: rollouts, failures, tables derived from them, run.json. The lock stays held."""
    rollouts = folder / ROLLOUTS_FOLDER
    if not (folder / RUN_JSON).exists():
        return
    # run.json goes last: until then a crash leaves a run that can be overwritten again.
    for file in _ours(rollouts):
        file.unlink()
    for stage in folder.iterdir():
        if stage.is_dir() and stage.name.startswith(_DERIVED):
            _wipe_stage(stage)
    for name in (FAILURES, FAILURES + ".torn", RUN_JSON):
        (folder / name).unlink(missing_ok=True)
    _remove_if_empty(rollouts)
    sync_folder(folder)


def _wipe_stage(stage: Path) -> None:
    """What describes the files goes last here, too; an intent that stayed would bring its run.json back."""
    described = [file for file in (intent_of(stage / RUN_JSON), stage / RUN_JSON) if file.is_file()]
    if not described:
        return
    for file in stage.iterdir():
        if file.suffix in (".parquet", ".jsonl", ".tmp"):
            file.unlink()
    for file in described:
        file.unlink()
    _remove_if_empty(stage)


def recover(folder: Path, files: Sequence[dict[str, Any]]) -> Recovered:
    """Bring the rollouts folder into a state that can be gone on with. ``files``: what run.json names as sealed."""
    rollouts = folder / ROLLOUTS_FOLDER
    found = Recovered()
    named = {Path(f["path"]).name for f in files}
    for name in sorted(named):
        if not (rollouts / name).is_file():
            raise StoreError(
                f"{rollouts / name}: is named in run.json but not there",
                hint="bring the file back, or start again with --overwrite",
            )
    journals = {int(m[1]): p for p in rollouts.iterdir() if (m := JOURNAL.fullmatch(p.name))}
    parts = {p.name: int(m[1]) for p in rollouts.iterdir() if (m := PART.fullmatch(p.name))}
    found.next_segment = max([*journals, *parts.values()], default=-1) + 1
    for leftover in rollouts.glob(".part-*.tmp"):
        leftover.unlink()
    for name, index in sorted(parts.items()):
        if name in named:
            if index in journals:
                drop_journal(journals.pop(index))
        elif index in journals:
            # Renamed but not named: the journal still holds these rows, and sealing gives the same file.
            (rollouts / name).unlink()
        else:
            rows = read_table(rollouts / name, ROLLOUTS, ["rollout_id"]).num_rows
            found.adopted.append(describe(rollouts / name, rows))
    for index, path in sorted(journals.items()):
        rows, repairs = repair(path)
        found.repairs += repairs
        found.journals.append(Segment(index, path, rows))
    return found


def holds_nothing(folder: Path, files: Sequence[dict[str, Any]]) -> bool:
    """Whether a run has neither rows nor failures. ``files``: what run.json names as sealed."""
    rollouts = folder / ROLLOUTS_FOLDER
    # A journal's rows are not looked into here: bytes in it may be a row, torn or not.
    kept = [*_ours(rollouts), folder / FAILURES, folder / (FAILURES + ".torn")]
    return not files and not any(file.is_file() and file.stat().st_size for file in kept)


def _ours(rollouts: Path) -> list[Path]:
    if not rollouts.is_dir():
        return []
    return [p for p in rollouts.iterdir() if _is_ours(p.name)]


def _is_ours(name: str) -> bool:
    bare = name.removesuffix(".torn").removesuffix(".tmp").removeprefix(".")
    return bool(PART.fullmatch(bare) or JOURNAL.fullmatch(bare))


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
