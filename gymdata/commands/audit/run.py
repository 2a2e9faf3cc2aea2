"""``gymdata audit``: saved log-probabilities against a forward pass of a model, and where that says they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.checks.violations import ValidationReport
from gymdata.commands.audit.causes import explain
from gymdata.commands.audit.compare import departures
from gymdata.commands.audit.context import (
    cuts,
    disagreeing_runs,
    first_prompts,
    logprob_settings,
    run_metadata,
    worst_tokens,
)
from gymdata.commands.audit.report import Audit, AuditReport
from gymdata.commands.audit.settings import AuditConfig
from gymdata.commands.validate.run import validate
from gymdata.errors import DataError, UsageError, require
from gymdata.models.forward import load_policy
from gymdata.models.model_identity import sampler_formats
from gymdata.models.scoring import PolicyModel
from gymdata.progress import NullProgress, Progress
from gymdata.public import paths_of
from gymdata.rollouts.kept_sets import KeptSets
from gymdata.rollouts.logprobs import Rounding
from gymdata.rollouts.schema import AUDIT, HEADED_ROWS, HEADS, ROLLOUTS, VIOLATIONS
from gymdata.store import StageOutput, files_of, read_run_json, read_table, scan_batches
from gymdata.store.lineage import Paths, lineage, own_run, parents_of, refuse_duplicates, stage_folder
from gymdata.store.paths import RUN_JSON, Identity, RunFacts, local_output
from gymdata.store.reading import check_content
from gymdata.store.stage_output import refuse_other_kind

_SCALARS = ("rollout_id", "run_id", "policy_hash", "policy_version", "temperature")


def audit(
    path: Paths,
    model: str | None = None,
    output: str | Path | None = None,
    *,
    config: AuditConfig | None = None,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> AuditReport:
    """Compare the saved log-probabilities under ``path`` with those that ``model`` gives the same tokens.

    ``config`` is an ``AuditConfig``. Of a run folder the report goes to ``RUN/audit-<model>/``: run.json,
    violations.parquet, and audit.parquet with ``write_as``; elsewhere to ``output``, or nowhere. Raises
    RefusedError when no rollout has log-probabilities (T205, L301 to L303) or ids are not in the model's vocabulary (T206);
    StoreError when the folder holds an audit of something else.
    """
    config = AuditConfig.called_with(audit, config, {**settings, "model": model})
    sources = paths_of(path, "audit")
    for source in sources:
        files_of(source)
    notes = check_content(sources, ROLLOUTS)
    runs = [facts for source in sources for facts in lineage(source)]
    progress = progress or NullProgress()
    with contextlib.ExitStack() as stack:
        named = config.model or _own_policy(runs)
        target = None if output is None else local_output(output)
        if target is None and (config.write_as is not None or own_run(sources) is not None):
            target = stage_folder(sources, "audit", Path(named).resolve().name or "model")
        if target is not None:
            refuse_other_kind(target, "audit")  # before a model is loaded
        rollouts = pa.concat_tables([read_table(p, ROLLOUTS, _SCALARS) for p in sources])
        if not rollouts.num_rows:
            raise DataError.empty(sources[0], "rollouts")
        refuse_duplicates(rollouts, sources)
        # Before the work, not after it.
        require("train", "torch")
        facts, loaded = load_policy(named, config.dtype, config.device, config.batch_tokens)
        identity = {"policy_hash": facts["policy_hash"], "dtype": facts["dtype"], "limit": config.limit}
        if target is not None and output is None and (target / RUN_JSON).is_file():
            # Models with other weights are often called the same, as checkpoints are.
            other = (read_run_json(target).get("identity") or {}).get("policy_hash") != facts["policy_hash"]
            target = target.with_name(f"{target.name}-{facts['policy_hash'][:8]}") if other else target
        out = None
        if target is not None:
            out = stack.enter_context(StageOutput(target, "audit", overwrite=overwrite))
            out.refuse_other("identity", identity, "an audit that was made", parents=parents_of(sources))
        report, work = _compare(sources, rollouts, runs, loaded, facts, config, progress)
        if out is not None:
            _write(out, sources, work, report, config, identity, command, notes)
        return report


def _compare(
    sources: Sequence[str | Path],
    rollouts: pa.Table,
    runs: Sequence[RunFacts],
    loaded: PolicyModel,
    facts: RunFacts,
    config: AuditConfig,
    progress: Progress,
) -> tuple[AuditReport, Audit]:
    rounding = Rounding.of(facts["dtype"], *sampler_formats(runs, facts["checkpoint_dtype"]))
    report = AuditReport(facts, rounding if config.tolerance is None else rounding.tolerating(config.tolerance))
    impossible = [v for source in sources for v in validate(source, select=("L306",)).violations]
    kept_sets = _kept_sets(sources, runs)
    report.first = [f"{v.file}: {v.detail}: no sampler's, so they say nothing of a model (L306)" for v in impossible]
    settings = rollouts["policy_hash"], rollouts["temperature"], runs, facts
    report.first += logprob_settings(*settings, kept_sets=kept_sets)
    n = rollouts.num_rows
    chosen = np.unique(np.linspace(0, n - 1, min(config.limit or n, n)).astype(np.int64))
    work = Audit(sources, rollouts, chosen, loaded, report.rounding, kept_sets=kept_sets)
    work.run(report, entropy=config.write_as is not None, progress=progress)
    if impossible:
        # Filled in, averaged or rounded: another checkpoint explains none of it, and each turn would be a finding.
        report.violations, report.summary["departures"] = impossible, []
    elif kept_sets and not report.ok:
        # Causes are found with other distributions over the whole vocabulary, which say nothing of kept sets.
        report.notes = ["no cause is sought where the model is normalized over kept sets"]
    elif not report.ok:
        off = np.unique([v.row for v in report.violations if v.turn is not None]).astype(np.int64)
        policies = rollouts["policy_hash"].take(pa.array(off if len(off) else work.compared.rows))
        metadata = run_metadata(policies, runs, facts["policy_hash"])
        renderings = partial(first_prompts, sources, facts["tokenizer"] or facts["path"])
        agreeing = ~np.isin(work.compared.rows, off)
        agree = bool(agreeing.any()) and not departures(work.compared, agreeing, report.rounding)
        report.explanation = explain(work.samples, loaded, report.rounding, metadata, renderings, agree)
        report.notes = disagreeing_runs(rollouts, work.compared, off) if agree else []
    report.worst = worst_tokens(work.compared, sources, facts["tokenizer"], config.worst)
    return report, work


def _kept_sets(sources: Sequence[str | Path], runs: Sequence[RunFacts]) -> bool:
    """Whether the sampling left ids out and changed nothing else, and each saved head is all that could be sampled."""
    if not cuts(runs) or cuts(runs, kept_sets=True):
        return False
    kept = KeptSets()
    for source in sources:
        for batch in scan_batches(source, HEADS, ("turns",), HEADED_ROWS):
            kept.add(batch.column("turns"))
    return kept.all_kept


def _own_policy(runs: Sequence[RunFacts]) -> str:
    policies = {str(run["policy"]) for run in runs if run.get("stage") in ("collect", "record") and run.get("policy")}
    if len(policies) == 1 and Path(policy := policies.pop()).is_dir():
        return policy
    raise UsageError("which model? the rollouts do not name one that is a folder here", hint="-m MODEL")


def _write(
    out: StageOutput,
    sources: Sequence[str | Path],
    work: Audit,
    report: AuditReport,
    config: AuditConfig,
    identity: Identity,
    command: Sequence[str],
    notes: Sequence[str],
) -> None:
    # Columns of an earlier audit go with it, for this run.json does not describe them.
    tables = [(VIOLATIONS, ValidationReport(violations=report.violations).table())]
    if config.write_as is not None:
        tables.append((AUDIT, work.columns()))
    for table, rows in tables:
        out.table(f"{table.name}.parquet", rows, table)
    model = report.model["path"]
    report.path = out.place
    summary = {key: value for key, value in report.to_dict().items() if key not in ("path", "violations", "worst")}
    out.finish(
        {
            "command": list(command),
            "config": config.model_dump(mode="json"),
            "identity": identity,
            "parents": parents_of([*sources, model]),
            **summary,
            "violations": len(report.violations),
            "notes": [*notes, *report.notes],
        }
    )
