"""``train_dpo``, ``train_kto`` and the others: checks, reports and outputs, independent of the trainer.

Invariant: the output folder says SUCCESS only when the model in it was trained on proven tokens.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

from gymdata.commands.train import process
from gymdata.commands.train.adapter import merge_adapter
from gymdata.commands.train.data_checks import check
from gymdata.commands.train.from_text import TEXT, naming_file, rendered, text_format
from gymdata.commands.train.job import Job, is_first
from gymdata.commands.train.prepared import DATA, prepare
from gymdata.commands.train.settings import RenderedConfig, RolloutsConfig, TrainConfig
from gymdata.commands.train.trainer_settings import check_settings
from gymdata.errors import DataError, GymdataError, StoreError, UsageError, abridged, counted
from gymdata.models.model_identity import ModelFacts, model_facts
from gymdata.progress import FIGURES, LOG_FILES, NullProgress, Progress, leave_log, log_to
from gymdata.public import Figures, Report, Row, rate_text
from gymdata.rollouts.schema import SCORES
from gymdata.scores.chosen import default_score, taken
from gymdata.settings import Settings
from gymdata.store import has_rows, hash_file, read_run_json, resolve, write_run_json
from gymdata.store.fetch import fetched
from gymdata.store.formats import tables_in
from gymdata.store.lineage import lineage, model_parents, parents_of, refuse_replaced
from gymdata.store.lock import LOCK, Lock, made_folder, refuse_held, sync
from gymdata.store.paths import RUN_JSON, RunFacts, local_output, refuse_unwritable
from gymdata.store.reading import check_content, warn_of_changed_scores
from gymdata.store.run_json import complete, differences, plain, write_text
from gymdata.store.stage_output import refuse_other_kind

SUCCESS = "SUCCESS"
JOB = "job"
MERGED = "merged"
CHECKPOINTS = "checkpoints"
#: Trains a job whose data is prepared, as ``process.run`` does, and returns the figures for run.json.
Runner = Callable[[Job, Progress], Figures]
#: The status of the processes that are not the first.
TOOK_PART = "took part"
#: Keys of run.json that are fields of the report.
_REPORTED = ("counts", "trained_tokens", "steps", "heldout", "ratio", "training")
#: What to do about a table without a row.
_NO_ROWS = {
    "pairs": "pairs need rollouts of one task with different rewards: `gymdata pairs RUN` prints what became of every "
    "group; collect more rollouts per task, or at a higher temperature",
    "experiences": "`gymdata experience RUN` prints which rollouts and groups it drops, and why",
    "rollouts": "`gymdata collect` or `gymdata import` writes rollouts; `gymdata filter` prints what it drops",
}
#: In a job file, but not part of what is trained: free to change on a resume.
_OPERATION = ("dry_run", "output", "own_keys")


@dataclass(frozen=True, slots=True, repr=False)
class TrainReport(Report):
    """The result of a training in ``output``; of a dry run, its checks. ``trained_tokens``: the token checksum of the
    file against those of the batches; ``heldout``: how the model does on held-out tasks; ``ratio``: how far the model
    was from the sampler before the first step; ``training``: figures of the first and of the last tenth of the steps
    (means), and tokens per second; ``merged``: the folder of the adapter and its base as one model; ``run_json``: all of
    it, as run.json holds it."""

    algorithm: str
    status: str
    output: Path
    counts: dict[str, int]
    trained_tokens: Figures
    run_json: Figures
    steps: int | None = None
    heldout: Figures | None = None
    ratio: Figures | None = None
    training: Figures | None = None
    merged: Path | None = None

    @classmethod
    def of(cls, facts: RunFacts) -> TrainReport:
        """The report of a training's run.json."""
        return cls(
            algorithm=facts["stage"].removeprefix("train-"),
            status=facts["status"],
            output=Path(facts["config"]["output"]),
            run_json=dict(facts),
            **{name: facts[name] for name in _REPORTED if name in facts},
        )

    def to_dict(self) -> Figures:
        return self.run_json if self.merged is None else {**self.run_json, "merged": str(self.merged)}

    def rows(self) -> list[Row]:
        shown = [name for name, n in self.counts.items() if name != "trained_tokens" and (n or "left_out" not in name)]
        # run.json has its keys in the order of the alphabet.
        shown.sort(key=lambda name: (not name.startswith("rollouts"), name.startswith(("heldout", "left_out"))))
        rows: list[Row] = [(name.replace("_", " "), self.counts[name]) for name in shown]
        rows += [("tokens per epoch", self.trained_tokens["file"]["count"]), ("token checksum", self._equal())]
        if self.ratio:
            rows.append(("ratio before training, mean", self.ratio["mean"]))
            rows.append(("  effective sample size", f"{100 * self.ratio['effective_sample_size']:.1f} %"))
        rows += [("steps", self.steps), *self._figures(), ("output", self.output)]
        rows += [("merged with its base", self.merged)] if self.merged else []
        if self.heldout and "accuracy" in self.heldout:
            accuracy = {"rate": self.heldout["accuracy"], "ci95": self.heldout["ci95"]}
            rows.append(("held-out preference accuracy", rate_text(accuracy)))
        elif self.heldout:
            # None where all returns are equal.
            variances = (part["explained_variance"] for part in (self.heldout["before"], self.heldout))
            before, after = ("–" if value is None else f"{value:.3g}" for value in variances)
            rows.append(("held-out explained variance", f"{before} → {after}"))
        return rows

    def _figures(self) -> list[Row]:
        if not self.training:
            return []
        first, last = self.training["first"], self.training["last"]
        rows: list[Row] = [
            (f"  {label}", f"{first[name]:{form}} → {last[name]:{form}}")
            for name, (label, form) in FIGURES.items()
            if name in first and name in last
        ]
        speed = self.training.get("tokens_per_s")
        return [*rows, ("  tokens per second", None if speed is None else f"{speed:,.0f}")]

    def _equal(self) -> object:
        """A training that stopped inside its first epoch could not feed the whole file; what it fed was compared with it."""
        proof = self.trained_tokens
        if self.steps == 0:
            return "nothing was trained"
        fed = (proof.get("epochs") or [{}])[-1]
        if proof["equal"] or not fed.get("equal"):
            return {True: "match", False: "MISMATCH"}.get(proof["equal"])
        return f"match as far as they went: {fed['count']:,} of {counted(proof['file']['count'], 'token')}"


@process.environment()
def train(
    source: str | Path,
    settings: TrainConfig,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    model: ModelFacts | None = None,
    run_job: Runner | None = None,
) -> TrainReport:
    """Train with any of ``gymdata.commands.train.settings.TRAINERS``.

    ``settings.trainer`` has keys of the library's arguments and of TRL's ModelConfig (``{"learning_rate": 1e-5,
    "use_peft": True}``). A training that is there is resumed from its last checkpoint, ``overwrite`` starts again,
    ``dry_run`` checks and proves the batches only. ``model``: the facts about ``settings.model``, where they are known.

    Returns what ``output``/run.json holds: ``trained_tokens`` (the proof), counts, settings, versions, parents.
    Raises DataError, RefusedError with a code when the data must not be trained on, UsageError, StoreError, and
    OutsideError("trainer").
    """
    if not is_first():
        return _taken_part(settings)
    progress = progress or NullProgress()
    # The cheap checks, before torch is loaded.
    source = str(fetched(source))
    out, stage = local_output(settings.output), f"train-{settings.algorithm}"
    files = resolve(source, settings.table)
    text = text_format(source, files, settings)
    if text is None and not files and (table := next(iter(tables_in(source)), None)) is not None:
        raise DataError.other_table(source, table, settings.table.name)
    if text is None and not any(has_rows(file, settings.table) for file in files):
        named = abridged([file.path for file in files] or [source])
        why = f"{named}: got 0 {settings.table.name}, expected at least 1 to train on"
        raise DataError(why, hint=_NO_ROWS[settings.table.name])
    refuse_other_kind(out, stage)
    refuse_unwritable(out)
    others = {p.name for p in out.iterdir()} - {LOCK, JOB, TEXT, *LOG_FILES} if out.is_dir() else set()
    if others and not _is_training(out):
        message = f"{out}: is not empty and not a training (it holds {', '.join(sorted(others)[:6])})"
        raise StoreError(message, hint="give another output folder")
    own_keys = type(settings).model_fields
    check_settings(settings.algorithm, settings.trainer, own_keys, settings.called, settings.model)
    with contextlib.ExitStack() as stack:
        if text is not None:
            assert isinstance(settings, RenderedConfig)  # text_format refuses text for others
            folder = out / TEXT
            if dry_run:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                stack.enter_context(naming_file(folder, files[0].path))
            # The tokens of a training that is resumed were made already: the same text is not rendered again.
            again = overwrite or not _is_kept(out)
            source, settings = rendered(
                text, files, settings, folder, overwrite=again, progress=progress, command=command
            )
        if isinstance(settings, RolloutsConfig):
            reward, note = default_score([source], settings.reward)
            settings = settings.model_copy(update={"reward": reward})
            if note:
                progress.message(note)
        check_content([source], settings.table)
        refuse_replaced(source)
        warn_of_changed_scores(source)
        training = _Training(
            source, settings, model or model_facts(settings.model), out, run_job or process.run, progress
        )
        words = list(command) or [f"gymdata.{stage.replace('-', '_')}"]
        report = TrainReport.of(training.run(words, overwrite=overwrite, dry_run=dry_run))
    if getattr(settings, "merge", False) and report.status == "completed":
        report = replace(report, merged=merge_adapter(out, out / MERGED, command=words).path)
    return report


@dataclass
class _Training:
    """A training of ``model`` on ``source`` in ``out``. ``job``: what the trainer gets; ``begun``: what run.json begins
    with."""

    source: str
    config: TrainConfig
    model: ModelFacts
    out: Path
    run_job: Runner
    progress: Progress
    job: Job = field(default_factory=Job)
    begun: Figures = field(default_factory=dict)

    def run(self, command: list[str], *, overwrite: bool, dry_run: bool) -> Figures:
        """Start, resume or find it finished; returns run.json's content (of a dry run: what it would begin)."""
        self.describe(command, dry_run=dry_run)
        out, job, defaults = self.out, self.job, self.config.defaults()
        finished = _is_finished(out, job, defaults, overwrite=overwrite)
        if dry_run:
            return self.in_temporary()
        if finished:
            process.dismiss(job)
            self.progress.message(f"{out}: this training is finished, nothing to do (--overwrite starts again)")
            if _checkpoints(out) or (out / LOCK).exists() or (out / JOB / DATA).exists():
                # It was killed after SUCCESS, or another process works there.
                with contextlib.suppress(StoreError):
                    lock = Lock(out)
                    try:
                        _drop_what_resumes(out, job)
                    finally:
                        lock.remove()
            return read_run_json(out)
        refuse_held(out)
        new_folder, fresh = not out.exists(), not _is_training(out)
        with made_folder(out):
            lock = Lock(out)
        failed_at_once = begins = False
        try:
            self.prepare(out)
            _is_finished(out, job, defaults, overwrite=overwrite)
            begins = True
            if overwrite and not fresh:
                _clear(out, keep=DATA)
            write_text(out / JOB / "job.json", json.dumps(plain(job), indent=2))
            write_run_json(out, {**self.begun, "status": "running"})
            log_to(out)
            try:
                return self.to_the_end()
            except (GymdataError, KeyboardInterrupt) as error:
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
                write_run_json(out, {**self.begun, "status": "failed", "failure": why})
                if isinstance(error, KeyboardInterrupt) and _checkpoints(out):
                    self.progress.message(f"{out}: stopped; the same command resumes from the last checkpoint")
                failed_at_once = fresh and isinstance(error, UsageError) and not _checkpoints(out)
                raise
        finally:
            if not begins:
                _drop_prepared(out)
            if failed_at_once:
                _clear(out)  # the trainer refused the settings: there is nothing to resume
            leave_log(out)
            lock.remove()
            if new_folder and (failed_at_once or not begins):
                with contextlib.suppress(OSError):
                    out.rmdir()

    def describe(self, command: list[str], *, dry_run: bool) -> None:
        """``job`` and ``begun`` as far as they are known without the data."""
        config, loss = self.config, self.config.facts()
        scored_by = [str(folder) for folder in config.scored_by(self.source)]
        read = [
            *resolve(self.source, config.table),
            *(file for folder in scored_by for file in resolve(folder, SCORES)),
        ]
        job: dict[str, object] = {
            **config.own(),
            **({"loss_facts": loss["loss"]} if loss else {}),
            "trainer": config.algorithm,
            "data": absolute(self.source),
            "data_xxh3": [hash_file(file.path) for file in read],
            "model": absolute(config.model),
            "policy_hash": self.model.policy_hash,
            "output": str(self.out.resolve()),
            "settings": config.trainer,
            "own_keys": sorted(type(config).model_fields),
            "dry_run": dry_run,
        }
        self.job = cast("Job", job)
        # Without the content of their files: a model stays as it is when its rollouts are overwritten, as is what is sampled
        # with it.
        parents = [
            {k: v for k, v in parent.items() if k != "files"}
            for parent in (*parents_of((self.source, *scored_by)), *model_parents(config.model))
        ]
        self.begun = {
            "stage": f"train-{config.algorithm}",
            "command": command,
            "config": config.model_dump(mode="json"),
            **loss,
            "parents": parents,
            **({"scored_by": [taken([self.source], config.reward)]} if isinstance(config, RolloutsConfig) else {}),
            "model": vars(self.model),
        }

    def prepare(self, folder: Path) -> None:
        """Prepare the data in ``folder`` and check it; ``job`` and ``begun`` get what is known of it."""
        data = prepare(folder / JOB / DATA, self.config.parts(self.source))
        check(self.config, data, list(lineage(self.source)), self.model, self.source, self.progress)
        if cost := data.facts.cost.text():
            self.progress.message(cost)
        expected = data.trained()
        self.job["trained_tokens"] = expected.as_json()
        counts = {**data.counts, "trained_tokens": expected.count}
        self.begun |= {"counts": counts, "length_limit": asdict(data.facts.cost)}

    def to_the_end(self) -> Figures:
        """Run the job; returns run.json's content."""
        result = self.run_job(cast("Job", plain(self.job)), self.progress)
        # What says that the training is finished is not on the disk before its model is.
        for path in (*filter(Path.is_file, sorted(self.out.iterdir())), self.out):
            sync(path)
        facts = complete({**self.begun, "status": "completed", **result})
        write_run_json(self.out, facts)
        write_text(self.out / SUCCESS, "")
        _drop_what_resumes(self.out, self.job)
        return facts

    def in_temporary(self) -> Figures:
        """A dry run, which is everything up to the first step, in a folder that is gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="gymdata-train-") as folder:
            self.prepare(Path(folder))
            job = cast("Job", {**plain(self.job), "output": folder})
            return {**self.begun, "status": "dry run", **self.run_job(job, self.progress)}


def _taken_part(settings: TrainConfig) -> TrainReport:
    """The training of the first process, of which this is another. The first one reports."""
    job = cast(
        "Job",
        {
            "trainer": settings.algorithm,
            "data": "",
            "model": settings.model,
            "output": str(settings.output),
            "settings": settings.trainer,
            "own_keys": sorted(type(settings).model_fields),
        },
    )
    process.follow(job)
    return TrainReport(settings.algorithm, TOOK_PART, settings.output, {}, {}, {})


def _drop_prepared(out: Path) -> None:
    """Remove the prepared data, and the folder of a job that never began."""
    shutil.rmtree(out / JOB / DATA, ignore_errors=True)
    with contextlib.suppress(OSError):
        (out / JOB).rmdir()


def _drop_what_resumes(out: Path, job: Job) -> None:
    _drop_prepared(out)
    if "save_total_limit" not in job["settings"]:
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def _is_training(out: Path) -> bool:
    """Does ``out`` hold what a training wrote? Its run.json, where it has one, is known to be of the right kind."""
    return (out / JOB / "job.json").is_file() or (out / RUN_JSON).is_file()


def _is_finished(out: Path, job: Job, defaults: Settings, *, overwrite: bool) -> bool:
    """Whether this training is finished in ``out``. Raises StoreError when that holds another one.

    A training without a checkpoint holds nothing that could be resumed, so another one may take its place.
    """
    was = None if overwrite else _recorded(out)
    if was is None:
        return False
    # The token counts come last, and follow from the rest.
    ignored = (*_OPERATION, *({"trained_tokens"} - job.keys()))
    recorded, requested = ({k: v for k, v in side.items() if k not in ignored} for side in (was, job))
    changed = differences(recorded, requested, defaults)
    if changed:
        raise StoreError.other_identity(out, changed)
    return (out / SUCCESS).is_file()


def _recorded(out: Path) -> Job | None:
    """The job of the training in ``out``; None where there is none that is finished or could be resumed. Raises
    StoreError when it is not known."""
    if not _is_kept(out):
        return None
    try:
        return cast("Job", json.loads((out / JOB / "job.json").read_text()))
    except (FileNotFoundError, ValueError) as error:
        why = "is not JSON" if isinstance(error, ValueError) else "is missing"
        raise StoreError(
            f"{out}: this training cannot be resumed: its settings are not known, as {out / JOB / 'job.json'} {why}",
            hint="bring the file back from a copy, start again with --overwrite, or give another output folder",
        ) from error


def _is_kept(out: Path) -> bool:
    """Whether ``out`` holds a training that is finished or could be resumed."""
    return (out / SUCCESS).is_file() or _checkpoints(out)


def _checkpoints(out: Path) -> bool:
    return any((out / CHECKPOINTS).glob("checkpoint-*"))


def _clear(out: Path, keep: str | None = None) -> None:
    """Remove an earlier training's files; the folder itself stays, and so do our lock, the data that was made of text, and
    ``keep`` of its job. The files that mark it as a training are removed last, so that after a kill it is still
    recognised."""
    (out / SUCCESS).unlink(missing_ok=True)
    sync(out)
    paths = [path for path in out.iterdir() if path.name not in (LOCK, JOB, TEXT, RUN_JSON)]
    for path in paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    sync(out)
    for path in [out / RUN_JSON, *((out / JOB).iterdir() if (out / JOB).is_dir() else ())]:
        if path.is_dir() and path.name != keep:
            shutil.rmtree(path)
        elif not path.is_dir():
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (out / JOB).rmdir()


def absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path
