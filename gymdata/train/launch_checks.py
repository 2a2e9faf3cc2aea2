"""A training run from saved files: what is refused, what is announced, what is left behind. Knows no trainer.

Invariants: data whose tokenizer is not the model's, or that cannot be a reference, is refused with its reason
before a trainer starts; nothing is cut without a count; the output folder says SUCCESS only when the model in it was
trained on proven tokens, and its run.json leads back to the data and through it to the rollouts. All trainers take this way.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from gymdata.engines.model_facts import ModelFacts
from gymdata.errors import GymdataError, StoreError, UsageError
from gymdata.progress import Progress
from gymdata.store import find_run_json, hash_file, read_run_json, read_table, resolve, write_run_json
from gymdata.store.lineage import lineage
from gymdata.store.lock import Lock, refuse_held
from gymdata.store.paths import RUN_JSON, local_output, refuse_unwritable
from gymdata.store.run_json import complete, differences, plain, replacing
from gymdata.store.stage_output import refuse_other_kind
from gymdata.train.checks import check
from gymdata.train.settings import TrainConfig

SUCCESS = "SUCCESS"
JOB = "job"
#: Runs a prepared job file and returns what the trainer announced; raises what it reported.
Runner = Callable[[Path, Progress], Mapping[str, Any]]
#: In a job file, but not part of what is trained: free to change on a resume.
_OPERATION = ("num_processes", "dry_run", "output", "own_keys")


def train_resolved(
    source: str | Path,
    config: TrainConfig,
    model: ModelFacts,
    run_job: Runner,
    progress: Progress,
    *,
    command: list[str],
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Train ``config.model`` on a file; returns run.json's content (of a dry run: what it would begin).

    Raises DataError, RefusedError (with the code), UsageError, StoreError, or OutsideError("trainer").
    """
    source = str(source)
    data = config.prepare(read_table(source, config.table, columns=config.columns), source)
    check(config, data, list(lineage(source)), model, source, progress)
    files = [found.path for found in resolve(source, config.table)]
    if said := data.cost.text():
        progress.message(said)
    expected = data.sequences.trained()
    out = local_output(config.output)
    job = {
        **config.own(),
        "trainer": config.algorithm,
        "data": absolute(source),
        "data_xxh3": [hash_file(file) for file in files],
        "model": absolute(config.model),
        "policy_hash": model.policy_hash,
        "output": str(out.resolve()),
        "settings": config.trainer,
        "trained_tokens": expected.as_json(),
        "num_processes": config.num_processes,
        "own_keys": sorted(type(config).model_fields),
        "dry_run": dry_run,
    }
    begun = {
        "stage": f"train-{config.algorithm}",
        "command": list(command),
        "config": config.model_dump(mode="json"),
        "parents": [parent_of(source)],
        "model": vars(model),
        "counts": {**data.counts, "trained_tokens": expected.count},
        "length_limit": data.cost.as_json(),
    }
    del data
    return run_training(out, job, begun, run_job, progress, overwrite=overwrite, dry_run=dry_run)


def run_training(
    out: Path,
    job: dict[str, Any],
    begun: dict[str, Any],
    run_job: Runner,
    progress: Progress,
    *,
    overwrite: bool,
    dry_run: bool,
) -> dict[str, Any]:
    """Start, resume or find finished the training in ``out``; ``overwrite`` starts again."""
    refuse_other_kind(out / RUN_JSON, str(begun["stage"]))
    job_file = out / JOB / "job.json"
    found = _found(out, job, overwrite=overwrite)
    if dry_run:
        return _rehearse(job, begun, run_job, progress)
    if found == "finished":
        progress.message(f"{out}: this training is finished, nothing to do (--overwrite starts again)")
        return read_run_json(out)
    refuse_held(out)
    made, fresh = not out.exists(), not job_file.is_file()
    out.mkdir(parents=True, exist_ok=True)
    lock = Lock(out)
    failed_at_once = False
    try:
        if overwrite and not fresh:
            _clear(out)
        job_file.parent.mkdir(exist_ok=True)
        _write(job_file, json.dumps(plain(job), indent=2))
        write_run_json(out, {**begun, "status": "running"})
        try:
            told = run_job(job_file.resolve(), progress)
        except (GymdataError, KeyboardInterrupt) as error:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            write_run_json(out, {**begun, "status": "failed", "failure": why})
            if isinstance(error, KeyboardInterrupt) and _checkpoints(out):
                progress.message(f"{out}: stopped; the same command resumes from the last checkpoint")
            failed_at_once = fresh and isinstance(error, UsageError) and not _checkpoints(out)
            raise
        result = json.loads((out / JOB / "result.json").read_text())
        facts = complete({**begun, "status": "completed", **result, **_announced(told)})
        write_run_json(out, facts)
        _write(out / SUCCESS, "")
        if "save_total_limit" not in job["settings"]:
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
        return facts
    finally:
        if failed_at_once:
            _clear(out)  # settings that the trainer refuses: nothing was trained, and nothing is to be resumed
        lock.release()
        (out / "lock").unlink(missing_ok=True)
        if failed_at_once and made:
            with contextlib.suppress(OSError):
                out.rmdir()


def _found(out: Path, job: dict[str, Any], *, overwrite: bool) -> Literal["nothing", "resumable", "finished"]:
    """What ``out`` holds of this very training. Raises StoreError when it cannot be written or holds something else.

    A training without a checkpoint holds nothing that could be resumed, so another one may take its place.
    """
    refuse_unwritable(out)
    ours = (out / JOB / "job.json").is_file()
    if out.is_dir() and not ours and (inside := sorted({p.name for p in out.iterdir()} - {"lock", JOB})):
        raise StoreError(
            f"{out}: is not empty and not a training (it holds {', '.join(inside[:6])})",
            hint="give another output folder",
        )
    finished = (out / SUCCESS).is_file()
    if overwrite or not ours or not (finished or _checkpoints(out)):
        return "nothing"
    was = json.loads((out / JOB / "job.json").read_text())
    changed = differences(*({k: v for k, v in side.items() if k not in _OPERATION} for side in (was, job)))
    if changed:
        raise StoreError.other_identity(out, changed)
    return "finished" if finished else "resumable"


def _checkpoints(out: Path) -> bool:
    return any((out / "checkpoints").glob("checkpoint-*"))


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def _rehearse(job: dict[str, Any], begun: dict[str, Any], run_job: Runner, progress: Progress) -> dict[str, Any]:
    """Everything up to the first step, in a folder that is gone afterwards."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gymdata-dry-run-") as folder:
        job_file = Path(folder) / JOB / "job.json"
        job_file.parent.mkdir()
        job_file.write_text(json.dumps(plain({**job, "output": folder}), indent=2))
        told = run_job(job_file, progress)
    proof = told.get("proof", {})
    proven = {k: proof.get(k) for k in ("file", "batches", "equal")}
    return {**begun, "status": "dry run", "trained_tokens": proven, **_announced(told)}


def _announced(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer measured before its first step, other than the proof."""
    return {"ratio": {k: v for k, v in told["ratio"].items() if k != "event"}} if "ratio" in told else {}


def _clear(out: Path) -> None:
    """Remove an earlier training's files; the folder itself stays, and so does the lock that we hold."""
    (out / SUCCESS).unlink(missing_ok=True)
    for path in out.iterdir():
        if path.name == "lock":
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def parent_of(source: str) -> dict[str, Any]:
    found = find_run_json(source)
    run_id = read_run_json(found).get("run_id") if found else None
    return {"path": absolute(source), "run_id": run_id, "run_json_xxh3": hash_file(found) if found else None}


def absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path
