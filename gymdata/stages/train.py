"""A training run from saved files: what is refused, what is announced, what is left behind. Knows no trainer.

What always holds: data whose tokenizer is not the model's, or that cannot be a reference, is refused with its reason
before a trainer starts; nothing is cut without a count; the output folder says SUCCESS only when the model in it was
trained on proven tokens, and its run.json leads back to the pairs and through them to the rollouts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gymdata
from gymdata.config.train import TrainDpoConfig
from gymdata.core.schema import PAIRS
from gymdata.core.training import PAIR_COLUMNS, Cost, training_pairs
from gymdata.errors import DataError, GymdataError, RefusedError, StoreError
from gymdata.ports import Progress
from gymdata.store import find_run_json, hash_file, read_run_json, read_table, write_run_json
from gymdata.store.lock import Lock
from gymdata.store.run_json import differences, plain

SUCCESS = "SUCCESS"
JOB = "job"
#: Runs a prepared job file and returns what the trainer announced; raises what it reported.
Runner = Callable[[Path, Progress], Mapping[str, Any]]
#: In a job file, but not part of what is trained: free to change on a resume.
_OPERATION = ("num_processes", "resume", "dry_run", "output", "own_keys")


@dataclass(frozen=True)
class ModelFacts:
    """What the training stage must know of the model, measured by whoever can load it.

    ``max_length`` None: the model names no limit. The hashes are those of gymdata.core.fingerprint.
    """

    path: str
    policy_hash: str
    tokenizer_hash: str
    chat_template_hash: str
    vocab_size: int | None
    max_length: int | None


def train_dpo(
    pairs: str | Path,
    config: TrainDpoConfig,
    model: ModelFacts,
    run_job: Runner,
    progress: Progress,
    *,
    command: list[str],
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Train ``config.model`` on a pairs file with DPO; returns run.json's content (of a dry run: what it would begin).

    Raises DataError, RefusedError (with the code), UsageError, StoreError, or OutsideError("trainer").
    """
    source = str(pairs)
    data = training_pairs(read_table(source, PAIRS, columns=PAIR_COLUMNS), config.max_length, source)
    runs = list(lineage(source))
    _check_lengths(data.cost, model, source)
    check_vocabulary(data.sequences.ids, model, source)
    check_tokenizer(runs, model, source, progress)
    if config.ref == "saved":
        _check_reference(source, runs, model)
    _announce(data.cost, progress)
    expected = data.sequences.trained()
    out = config.output.resolve()
    job = {
        "trainer": "dpo",
        "data": absolute(source),
        "model": absolute(config.model),
        "policy_hash": model.policy_hash,
        "output": str(out),
        "max_length": config.max_length,
        "ref": config.ref,
        "pair_weights": config.pair_weights,
        "margin_scale": config.margin_scale,
        "settings": config.trainer,
        "trained_tokens": expected.as_json(),
        "num_processes": config.num_processes,
        "own_keys": sorted(type(config).model_fields),
        "resume": resume,
        "dry_run": dry_run,
    }
    begun = {
        "stage": "train-dpo",
        "version": gymdata.__version__,
        "command": command,
        "config": config.model_dump(mode="json"),
        "parents": [parent_of(source)],
        "model": vars(model),
        "counts": {"pairs": len(data), "trained_tokens": expected.count},
        "length_limit": data.cost.as_json(),
    }
    del data
    return run_training(out, job, begun, run_job, progress, resume=resume, overwrite=overwrite, dry_run=dry_run)


def lineage(path: str | Path) -> Iterator[dict[str, Any]]:
    """The run.json facts of a path argument and of all that it was made from, nearest first, each once.

    A parent that is no longer where its child says is skipped: what it would have said is then not known.
    """
    waiting, seen = [Path(path)], set()
    while waiting:
        at = waiting.pop(0)
        found = find_run_json(at)
        if found is None or found.resolve() in seen:
            continue
        seen.add(found.resolve())
        facts = read_run_json(found)
        yield facts
        for parent in facts.get("parents") or []:
            named = Path(str(parent.get("path", "")))
            waiting.append(named if named.is_absolute() or named.exists() else found.parent / named)


def run_training(
    out: Path,
    job: dict[str, Any],
    begun: dict[str, Any],
    run_job: Runner,
    progress: Progress,
    *,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
) -> dict[str, Any]:
    job_file = out / JOB / "job.json"
    if dry_run:
        return _rehearse(out, job, begun, run_job, progress)
    if (out / SUCCESS).is_file() and not overwrite:
        if resume:
            _same_job(out, job)
            progress.message(f"{out}: this training is done, nothing to do")
            return read_run_json(out)
        raise StoreError(f"{out}: holds a finished training", hint="give another -o, or --overwrite to start again")
    if job_file.is_file() and not (resume or overwrite):
        raise StoreError(
            f"{out}: holds a training that did not finish",
            hint="--resume goes on from its last checkpoint, --overwrite starts again",
        )
    if out.is_dir() and any(out.iterdir()) and not job_file.is_file():
        inside = ", ".join(sorted(p.name for p in out.iterdir())[:6])
        raise StoreError(f"{out}: is not empty and not a training (it holds {inside})", hint="give another -o")
    if resume and job_file.is_file():
        _same_job(out, job)
    out.mkdir(parents=True, exist_ok=True)
    lock = Lock(out)
    try:
        if overwrite:
            _clear(out)
        job_file.parent.mkdir(exist_ok=True)
        job_file.write_text(json.dumps(plain(job), indent=2))
        write_run_json(out, {**begun, "status": "running"})
        try:
            told = run_job(job_file, progress)
        except (GymdataError, KeyboardInterrupt) as error:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            write_run_json(out, {**begun, "status": "failed", "failure": why})
            raise
        result = json.loads((out / JOB / "result.json").read_text())
        facts = {**begun, "status": "completed", **result, **_announced(told)}
        write_run_json(out, facts)
        (out / SUCCESS).write_text("")
        if "save_total_limit" not in job["settings"]:
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
        return facts
    finally:
        lock.release()
        (out / "lock").unlink(missing_ok=True)


def _rehearse(
    out: Path, job: dict[str, Any], begun: dict[str, Any], run_job: Runner, progress: Progress
) -> dict[str, Any]:
    """Everything up to the first step, in a folder that is gone afterwards."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gymdata-dry-run-") as folder:
        job_file = Path(folder) / JOB / "job.json"
        job_file.parent.mkdir()
        job_file.write_text(json.dumps(plain({**job, "output": folder}), indent=2))
        told = run_job(job_file, progress)
    proof = told.get("proof", {})
    begun["config"]["output"] = str(out)
    proven = {k: proof.get(k) for k in ("file", "batches", "equal")}
    return {**begun, "status": "dry run", "trained_tokens": proven, **_announced(told)}


def _announced(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer measured before its first step, other than the proof."""
    return {"ratio": {k: v for k, v in told["ratio"].items() if k != "event"}} if "ratio" in told else {}


def _same_job(out: Path, job: dict[str, Any]) -> None:
    was = json.loads((out / JOB / "job.json").read_text())
    changed = differences(*({k: v for k, v in side.items() if k not in _OPERATION} for side in (was, job)))
    if changed:
        raise StoreError.other_identity(out, changed)


def _clear(out: Path) -> None:
    """Remove an earlier training's files; the folder itself stays, and so does the lock that we hold."""
    if not (out / JOB).is_dir():
        return
    (out / SUCCESS).unlink(missing_ok=True)
    for path in out.iterdir():
        if path.name == "lock":
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _check_lengths(cost: Cost, model: ModelFacts, source: str) -> None:
    limit = model.max_length
    if cost.pairs == 0:
        raise DataError.empty(source, "pairs to train on")
    if cost.left_out == cost.pairs:
        raise RefusedError(
            f"{source}: with --max-length {cost.max_length} no pair is left: {len(cost.identical):,} would be identical, "
            f"{len(cost.nothing_left):,} would have no trained token",
            code="P601",
        )
    effective = min(cost.longest, cost.max_length or cost.longest)
    if limit is not None and effective > limit:
        raise RefusedError(
            f"{source}: the longest sequence has {effective:,} tokens, {model.path} reads at most {limit:,}",
            hint=f"--max-length {limit} cuts longer ones and prints what that costs; --dry-run prints it without training",
        )


def check_vocabulary(ids: np.ndarray, model: ModelFacts, source: str) -> None:
    """Raises RefusedError (T206) for an id that the model has no embedding of."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (model.vocab_size is not None and high >= model.vocab_size):
        raise RefusedError(
            f"{source}: token id {low if low < 0 else high} is not in the vocabulary of {model.path} "
            f"(0 to {model.vocab_size})",
            code="T206",
            hint="these tokens were sampled with another tokenizer",
        )


def check_tokenizer(runs: list[dict[str, Any]], model: ModelFacts, source: str, progress: Progress) -> None:
    """Raises RefusedError when a run in the lineage had another tokenizer; says so when none is known."""
    known = [(run, identity) for run in runs if (identity := run.get("identity"))]
    hashes = {identity.get("tokenizer_hash") for _, identity in known} - {None}
    if not hashes:
        progress.message(f"warning: {source} does not lead back to a run: its tokenizer is not known and not checked")
    other = hashes - {model.tokenizer_hash}
    if other:
        raise RefusedError(
            f"{source}: was sampled with tokenizer {sorted(other)[0]}, {model.path} has {model.tokenizer_hash}: the same "
            "ids would mean other text",
            hint="train a model that has the tokenizer of the rollouts",
        )
    templates = {identity.get("chat_template_hash") for _, identity in known} - {None, model.chat_template_hash}
    for template in sorted(templates):
        progress.message(
            f"warning: {source} was sampled with chat template {template}, {model.path} has {model.chat_template_hash}: "
            "the tokens are trained as they were sampled"
        )


def _check_reference(source: str, runs: list[dict[str, Any]], model: ModelFacts) -> None:
    """``ref: saved`` needs the sampler's log-probabilities to be the model's own, over its whole distribution."""
    rows = read_table(source, PAIRS, columns=["policy_hash", "temperature"])
    reasons = [
        f"policy {p}, not {model.policy_hash}" for p in set(rows["policy_hash"].to_pylist()) - {model.policy_hash}
    ]
    reasons += [f"temperature {t:g}, not 1" for t in set(rows["temperature"].to_pylist()) - {1.0}]
    identities = [identity for run in runs if (identity := run.get("identity"))]
    if not identities:
        reasons.append("no run.json says how they were sampled")
    for identity in identities:
        reasons += truncations(identity)
    if reasons:
        raise RefusedError(
            f"{source}: the saved log-probabilities are not the reference's: {'; '.join(sorted(set(reasons)))}",
            code="L304",
            hint="--ref model computes the reference with the model",
        )


def truncations(identity: Mapping[str, Any]) -> list[str]:
    """Settings of a run under which its log-probabilities are not those of the whole distribution."""
    neutral: dict[str, tuple[object, ...]] = {
        "top_p": (None, 1),
        "top_k": (None, 0, -1),
        "min_p": (None, 0),
        "repetition_penalty": (None, 1),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "logprobs_mode": (None, "processed_logprobs", "raw_logprobs"),
    }
    settings = {**identity, **(identity.get("penalties") or {}), **(identity.get("sampling") or {})}
    return [f"{k} {settings[k]}" for k, fine in neutral.items() if settings.get(k) not in fine]


def _announce(cost: Cost, progress: Progress) -> None:
    if cost.pairs_cut or cost.left_out:
        progress.message(
            f"--max-length {cost.max_length}: {cost.pairs_cut:,} of {cost.pairs:,} pairs are cut, "
            f"{len(cost.identical):,} left out because both sides would be identical, {len(cost.nothing_left):,} left out "
            f"because no trained token remains; {cost.trained_tokens_lost:,} trained tokens lost in all"
        )


def parent_of(source: str) -> dict[str, Any]:
    found = find_run_json(source)
    run_id = read_run_json(found).get("run_id") if found else None
    return {"path": absolute(source), "run_id": run_id, "run_json_xxh3": hash_file(found) if found else None}


def absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path
