"""``gymdata pull``: what ``push`` published, as an output on this machine.

Invariants: the folder appears whole, and only when every file is as its run.json says; after a kill the same command
downloads what is missing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from gymdata.errors import DataError, StoreError
from gymdata.progress import NullProgress, Progress
from gymdata.public import Report, Row
from gymdata.publish.repository import data_set, fetch
from gymdata.store.lock import Lock
from gymdata.store.paths import RUN_JSON, local_output, read_facts
from gymdata.store.reading import altered

__all__ = ["PullReport", "pull"]


@dataclass(slots=True, repr=False)
class PullReport(Report):
    """What ``gymdata.pull`` brought. ``revision``: the commit, None for a folder; ``fetched``: False where it was there."""

    source: str
    path: str
    n_rows: int
    files: list[str]
    revision: str | None
    fetched: bool = True

    def rows(self) -> list[Row]:
        where = ("written to" if self.fetched else "is there already", self.path)
        revision = [("commit", self.revision)] if self.revision is not None else []
        return [("rows", self.n_rows), ("files", len(self.files)), *revision, where]


def pull(source: str | Path, output: str | Path, *, progress: Progress | None = None) -> PullReport:
    """Download the data set ``source`` (``hf:ORG/NAME[@REVISION]``, or a folder that was pushed to) into the new folder
    ``output``, which all commands read. The same pull again resumes, or finds it there.

    Raises RefusedError for a data set that gymdata did not push, DataError for files that are not as its run.json says,
    StoreError where ``output`` holds something else, OutsideError("object store") when the Hub cannot be reached.
    """
    progress, repository, target = progress or NullProgress(), data_set(source), local_output(output).absolute()
    partial = target.with_name(f".{target.name}.pulling")
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(target.parent, f".{target.name}.pulling.lock")
    try:
        progress.message(f"downloading {source}")
        if repository is not None:
            revision = fetch(*repository, partial)
            shutil.rmtree(partial / ".cache", ignore_errors=True)
        else:
            revision = None
            if not (Path(source) / RUN_JSON).is_file():
                raise DataError.missing_path(Path(source), "a folder that was pushed to")
            shutil.copytree(source, partial, dirs_exist_ok=True)
        facts = read_facts(partial / RUN_JSON)
        names = [str(entry["path"]) for entry in facts.get("files") or []]
        n_rows = sum(int(entry.get("rows") or 0) for entry in facts.get("files") or [])
        for file, why in altered(partial / RUN_JSON, [partial / name for name in names]):
            raise DataError.changed(file, RUN_JSON, why)
        report = PullReport(str(source), str(output), n_rows, names, revision)
        if target.is_dir() and any(target.iterdir()):
            existing = target / RUN_JSON
            if not existing.is_file() or existing.read_bytes() != (partial / RUN_JSON).read_bytes():
                raise StoreError(f"{output}: holds something else", hint="give another output folder")
            shutil.rmtree(partial)
            report.fetched = False
        else:
            partial.replace(target)
    finally:
        lock.remove()
    return report
