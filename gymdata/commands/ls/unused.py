"""``gymdata ls --unused``: which outputs below a folder no trained model's lineage needs.

An output is needed when its path, its run ID or the hash of its run.json is named by one that is needed, when a symbolic
link leads to it, and when it contains one that is needed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gymdata.commands.ls.output import Output, parent_path
from gymdata.errors import DataError, StoreError
from gymdata.store import hash_file
from gymdata.store.paths import RUN_JSON, read_facts, run_jsons
from gymdata.store.stage_output import kind_of_stage

#: Outputs that are wanted for their own sake.
_ROOTS = ("train", "finetune")


def unused(top: Path, outputs: Mapping[Path, Output]) -> list[Output]:
    """Those of ``outputs`` (path of the run.json → output, all that are below ``top``) that no trained model below it,
    or behind a link below it, was made from.

    Raises DataError for a damaged run.json and for a folder that cannot be read, StoreError while something is written that
    has no run.json yet: what they need is not known.
    """
    for run_json, output in outputs.items():
        if output.state == "damaged":
            raise DataError.unreadable(
                run_json, "what it was made from is not known", "restore it, or remove the output"
            )
    open_outputs = [file.parent for file, output in outputs.items() if output.is_running]
    trainings = [job.parents[1] for job in sorted(top.rglob("job/job.json"))]
    for folder in (*open_outputs, *trainings):
        if not (folder / RUN_JSON).is_file():
            raise StoreError(
                f"{folder}: is not finished, and what it needs is not recorded yet",
                hint="finish it (the same command resumes), or remove it",
            )
    by_path = {run_json.resolve(): run_json for run_json in outputs}
    by_name: dict[str, list[Path]] = {}
    for run_json in filter(Path.is_file, outputs):
        for name in (hash_file(run_json), read_facts(run_json).get("run_id")):
            by_name.setdefault(str(name), []).append(run_json)
    waiting = [file for file, o in outputs.items() if kind_of_stage(o.kind) in _ROOTS or o.is_running]
    for target in _link_targets(top):
        waiting += [file for file in outputs if file.resolve().parent in (target, *target.parents)]
        waiting += [Path(folder, RUN_JSON) for folder, _, files in os.walk(target) if RUN_JSON in files]
        waiting += [file for file in outputs if target in file.resolve().parents]
    needed: set[Path] = set()
    while waiting:
        file = waiting.pop()
        run_json = by_path.get(file.resolve(), file)
        if run_json in needed:
            continue
        needed.add(run_json)
        # `rm -r` of a folder takes what is in it; a finetuning run is resumed from what is in it.
        above = run_json.resolve().parent.parents
        waiting += [file for file in outputs if file.resolve().parent in above]
        if run_json in outputs and outputs[run_json].kind == "finetune":
            waiting += [file for file in outputs if run_json.parent in file.parents]
        for parent in read_facts(run_json).get("parents") or [] if run_json.is_file() else []:
            if parent.get("path"):
                waiting += run_jsons(parent_path(run_json, str(parent["path"])))
            # Also where the path leads to an output: the parent may have been moved, or copied together with its child.
            for key in ("run_json_xxh3", "run_id"):
                waiting += by_name.get(str(parent.get(key) or "none"), [])
    return [output for run_json, output in outputs.items() if run_json not in needed]


def removal(folder: str, outputs: Sequence[Output]) -> str | None:
    """The shell command that removes ``outputs`` below ``folder``, None when there are none. An output inside of another
    one goes with it."""
    paths = {Path(folder, output.path) for output in outputs}
    outermost = sorted(path for path in paths if paths.isdisjoint(path.parents))
    return f"rm -r {' '.join(shlex.quote(str(path)) for path in outermost)}" if outermost else None


def _link_targets(top: Path) -> Iterator[Path]:
    """What the symbolic links below ``top`` lead to, and the links in those folders."""
    waiting, visited = [top.resolve()], {top.resolve(), *top.resolve().parents}
    while waiting:
        for folder, folders, files in os.walk(waiting.pop()):
            for target in (
                Path(folder, name).resolve() for name in (*folders, *files) if Path(folder, name).is_symlink()
            ):
                if target not in visited:
                    visited.add(target)
                    waiting.append(target)
                    yield target
