"""``gymdata push``: an output on the Hub, or in a folder, as others can look at it and take it back.

Invariants: only files that are as run.json recorded them are published, and none in which ``scan`` finds something; all of
it appears at once (one commit on the Hub, one rename of a folder); what others wrote into the same repository meanwhile is
never overwritten. The published run.json says of each file what the local one says, without what ``scan`` finds in it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gymdata.errors import DataError, RefusedError, StoreError, option
from gymdata.progress import NullProgress, Progress
from gymdata.public import Report, Row
from gymdata.publish.card import CARD, card
from gymdata.publish.preview import PREVIEW, TEXTS, write_preview
from gymdata.publish.repository import data_set, publish
from gymdata.rollouts.schema import ROLLOUTS, TABLES, Table
from gymdata.scan.files import all_rows, rewritten, texts_in
from gymdata.scan.patterns import Find, finder, without
from gymdata.store import find_run_json, read_run_json, resolve
from gymdata.store.paths import RUN_JSON, RunFacts, local_output
from gymdata.store.reading import altered
from gymdata.store.run_json import is_written, state_left, sync
from gymdata.store.tables import schema_of

__all__ = ["PushReport", "push"]

#: Names of files that a summary lists.
_SHOWN = 3


@dataclass(slots=True, repr=False)
class PushReport(Report):
    """What ``gymdata.push`` published. ``files``: their names there; ``removed``: those of an earlier push that are no
    longer there; ``findings``: kind → how many, where they were allowed; ``private``: None for a folder; ``revision``: the
    commit; ``card_kept``: README.md was written by a person; ``sent``: False after a dry run."""

    path: str
    target: str
    n_rows: int
    bytes: int
    files: list[str]
    findings: dict[str, int]
    removed: list[str] = field(default_factory=list)
    private: bool | None = None
    revision: str | None = None
    card_kept: bool = False
    sent: bool = False

    def rows(self) -> list[Row]:
        summary: list[Row] = [("rows", self.n_rows), ("files", len(self.files)), ("bytes", self.bytes)]
        if self.removed:
            summary.append(("removed there", ", ".join(self.removed[:_SHOWN]) + " …" * (len(self.removed) > _SHOWN)))
        if self.findings:
            summary.append(("published findings", _listed(self.findings)))
        if self.card_kept:
            summary.append((CARD, "kept, a person wrote it"))
        if self.private is not None:
            summary.append(("visibility", "private" if self.private else "public"))
        return [*summary, ("published to" if self.sent else "would be published to", self.target)]


def push(
    path: str | Path,
    target: str | Path,
    *,
    public: bool = False,
    allow_findings: bool = False,
    overwrite: bool = False,
    write: bool = True,
    progress: Progress | None = None,
) -> PushReport:
    """Publish the rollouts, pairs or other table of the output at ``path`` (a folder, or a file with a run.json beside it).

    ``target``: ``hf:ORG/NAME[@BRANCH]``, a data set on the Hub that is made as a private one unless ``public``, or a new
    local folder. ``allow_findings``: also where ``gymdata.scan`` finds something. ``overwrite``: add to a repository that
    holds something else. ``write``: False checks and counts only. The same push again sends only what is missing.

    Raises DataError for files that are not as run.json recorded them, RefusedError for findings, StoreError where the
    target holds something else or has changed meanwhile, OutsideError("object store") when the Hub cannot be reached.
    """
    repository, source = data_set(target), local_output(path, "push")
    facts, run_json = read_run_json(source), find_run_json(source)
    assert run_json is not None
    if is_written(run_json):
        raise StoreError(f"{source}: is being written", hint="push it when its command has ended")
    if state_left(facts) == "interrupted":
        raise StoreError(f"{source}: was interrupted", hint="run the command that wrote it again, which completes it")
    table, files = _files(source, run_json, facts)
    find, findings, n_rows = finder(), Counter[str](), 0
    for file in files.values():
        for _, _, row in all_rows(file):
            findings.update(finding.kind for _, text in texts_in(row) for finding in find(text))
            (progress or NullProgress()).update(done=(n_rows := n_rows + 1))
    if findings and not allow_findings:
        raise RefusedError(
            f"{source} is not pushed: it holds what should not be published: {_listed(findings)}",
            hint=f"`gymdata scan {source}` lists them, `gymdata scan {source} --redact -o OUT` writes a copy without "
            f"them; {option('allow_findings', True)} publishes it nevertheless",
        )
    name = repository[0] if repository is not None else Path(target).absolute().name
    with tempfile.TemporaryDirectory(prefix="gymdata-push-") as scratch:
        taken_out = None if allow_findings else find
        contents = _contents(source, run_json, facts, table, files, n_rows, name, taken_out, Path(scratch))
        size = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in contents.values())
        report = PushReport(str(source), str(target), n_rows, size, sorted(contents), dict(findings.most_common()))
        if not write:
            return report
        if repository is None:
            _to_folder(contents, local_output(target, "push to"))
        else:
            commit = publish(*repository, contents, private=not public, overwrite=overwrite)
            report.removed, report.private, report.revision = commit.removed, commit.private, commit.sha
            report.card_kept = commit.card_kept
    report.sent = True
    return report


def _listed(findings: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} ({n:,})" for kind, n in findings.items())


def _files(source: Path, run_json: Path, facts: RunFacts) -> tuple[Table, dict[str, Path]]:
    """The table that an output holds, and its files by their names in a folder; what other commands wrote below it is
    published on its own."""
    run_files = {run_json.parent / str(entry["path"]) for entry in facts.get("files") or []}
    # A file is of the table that its command writes; in a folder, names tell tables apart.
    names = TABLES if source.is_dir() else facts.get("schemas") or [ROLLOUTS.name]
    for table in (TABLES[name] for name in names if name in TABLES):
        if paths := [part.path for part in resolve(source, table) if part.path in run_files]:
            break
    else:
        raise DataError(
            f"{source}: {run_json.name} names no file of a table, expected rollouts, pairs or experiences",
            hint="models go to the Hub with `hf upload`",
        )
    for changed, why in altered(run_json, paths):
        raise DataError.changed(changed, run_json, why)
    if run_json.name == RUN_JSON:
        return table, {path.relative_to(run_json.parent).as_posix(): path for path in paths}
    return table, {f"{table.name}{paths[0].suffix}": paths[0]}


def _contents(
    source: Path,
    run_json: Path,
    facts: RunFacts,
    table: Table,
    files: Mapping[str, Path],
    n_rows: int,
    name: str,
    find: Find | None,
    scratch: Path,
) -> dict[str, Path | bytes]:
    """Every file of the data set: those of the table, their plain columns, run.json and the card. ``find``: what is taken
    out of the last two."""
    home = f"{Path.home()}/"

    def clean(_: str, text: str) -> str:
        text = text.replace(home, "~/")
        return without(text, find(text)) if find is not None else text

    published: RunFacts = rewritten(dict(facts), clean)
    names = {file: filename for filename, file in files.items()}
    entries = {names.get(run_json.parent / str(entry["path"])): entry for entry in facts.get("files") or []}
    published["files"] = [{**entries[filename], "path": filename} for filename in files]
    splits: dict[str, list[str]] = {}
    for filename in files:
        splits.setdefault(str(entries[filename].get("side") or "train"), []).append(filename)
    contents: dict[str, Path | bytes] = dict(files)
    rewards = sorted((facts.get("counts") or {}).get("parts") or {})
    previews: dict[str, str] = {}
    for split, filenames in splits.items() if table.name in TEXTS else ():
        previews[split] = f"{PREVIEW}/{split}.parquet"
        contents[previews[split]] = scratch / f"{split}.parquet"
        write_preview([files[filename] for filename in filenames], table, rewards, scratch / f"{split}.parquet")
    first = next(iter(files.values()))
    schema = schema_of(first) if first.suffix == ".parquet" else table.schema
    contents[RUN_JSON] = json.dumps(published, indent=2, ensure_ascii=False).encode() + b"\n"
    contents[CARD] = clean("", card(source, facts, table, schema, splits, previews, n_rows, name)).encode()
    return contents


def _to_folder(contents: Mapping[str, Path | bytes], target: Path) -> None:
    """Write the files into a new folder, which appears whole; one that holds them already stays as it is."""
    if all((target / name).is_file() for name in contents) and (target / RUN_JSON).read_bytes() == contents[RUN_JSON]:
        return
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise StoreError(f"{target}: exists, and is not what would be written there", hint="give another folder")
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.absolute().parent) as scratch:
        for name, content in contents.items():
            file = Path(scratch, "data", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                file.write_bytes(content)
            else:
                shutil.copyfile(content, file)
            sync(file)
        Path(scratch, "data").replace(target)
