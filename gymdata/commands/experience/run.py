"""``gymdata experience``: scored rollouts in, sequences with an advantage for every token out, and an account of it.

The same rollouts and settings give the same file. Memory does not grow with the tokens of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata import credit
from gymdata.commands.experience import sequences as experiences
from gymdata.commands.experience.build import Crediting, ExperiencesReport, kl_account, refuse_short_horizon, tokens_of
from gymdata.commands.experience.group_rewards import Shaped
from gymdata.commands.experience.scalars import Scalars, mixed_tasks
from gymdata.commands.experience.settings import ExperienceConfig
from gymdata.commands.experience.token_scores import Scorers
from gymdata.credit.estimators import ALL
from gymdata.errors import RefusedError, UsageError, counted
from gymdata.progress import NullProgress, Progress
from gymdata.public import paths_of
from gymdata.rollouts.logprobs import SampledLogProbs
from gymdata.rollouts.ragged import Ragged
from gymdata.rollouts.schema import AUDIT, EXPERIENCES, ROLLOUTS
from gymdata.scores.chosen import default_score, scores_of, taken
from gymdata.store import StageOutput, read_run_json, scan_batches
from gymdata.store.lineage import Paths, lineage, parents_of, refuse_replaced, runs_of, stage_folder
from gymdata.store.paths import local_output, refuse_inputs
from gymdata.store.reading import check_content
from gymdata.store.task_contents import other_contents, refuse_others, task_contents
from gymdata.workers.tuning import ahead


def experience(
    path: Paths,
    output: str | Path | None = None,
    *,
    config: ExperienceConfig | None = None,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> ExperiencesReport:
    """Write experiences of the scored rollouts under ``path`` (run folder, file, glob, or several of them).

    ``config`` is an ``ExperienceConfig``. Written to ``RUN/experiences-<estimator>/experiences.parquet`` unless
    ``output`` names another folder. Raises RefusedError when no rollout is scored (R501), all groups lack variance
    (R503), token data or log-probs are missing (T205, L301 to L303), ids are outside the vocabulary (T206), or a rollout is
    listed twice (D701); StoreError when the output holds experiences that were made with other settings.
    """
    config = ExperienceConfig.called_with(experience, config, settings)
    sources = paths_of(path, "experience")
    notes = check_content(sources, ROLLOUTS)
    if config.baseline is not None:
        notes += check_content([config.baseline], ROLLOUTS)
    if config.token_columns is not None:
        notes += check_content([config.token_columns], AUDIT)
        refuse_replaced(config.token_columns, sources)
    if ALL[config.estimator].reads == "reward":
        reward, note = default_score(sources, config.reward)
        config = config.model_copy(update={"reward": reward})
        notes += [note] if note else []
    place = local_output(output or stage_folder(sources, "experiences", config.estimator))
    out = StageOutput(place, "experiences", overwrite=overwrite)
    refuse_inputs(place, sources, ROLLOUTS, "read")
    with out:
        out.refuse_other("config", config, "experiences that were made", parents=parents_of(sources))
        by_name = (
            ALL[config.estimator].reads == "parts" or config.reward is not None or config.rewards == "steps+outcome"
        )
        rollouts = Scalars.read(sources, named=by_name or config.token_columns is not None)
        score, values, scored_by, parts = _scores(sources, rollouts, config)
        allowed = None if config.overlong_buffer is None else config.max_new_tokens or _allowed(sources)
        baselines = _baselines(sources, config.baseline)
        work = Crediting(sources, rollouts, values, config, score, allowed, parts, baselines)
        if ALL[config.estimator].compares:
            notes += mixed_tasks(sources)
        report = ExperiencesReport(place / "experiences.parquet", config.estimator, score, notes=notes)
        models: dict[str, dict[str, Any]] = {}
        named = {"reference": config.reference, "critic": config.critic, "teacher": config.teacher}
        for name, model in named.items():
            if model is not None:
                from gymdata.models.model_identity import policy_facts

                models[name] = {"path": model, "policy_hash": policy_facts(model)["policy_hash"]}
        shaped = work.shape(report)
        refuse_short_horizon(report.counts["rollouts_used"], config)
        progress = progress or NullProgress()
        if models:
            _score(work, shaped, models, config, sources, progress)
        _write(out, work, shaped, report, progress)
        parents = [*sources, *scored_by, config.token_columns, config.baseline, *named.values()]
        facts = {
            "command": list(command),
            "config": config.model_dump(mode="json"),
            "parents": parents_of(parent for parent in parents if parent is not None),
            **{key: value for key, value in report.to_dict().items() if key != "path"},
            "dropped_groups": report.dropped_groups,
            "scored_by": [taken(sources, name) for name in parts or [config.reward]],
            **models,
        }
        out.finish(facts)
        return report


def _scores(
    sources: Sequence[str | Path], rollouts: Scalars, config: ExperienceConfig
) -> tuple[str, np.ndarray, list[Path], dict[str, np.ndarray] | None]:
    """The score's name, one score per rollout (NaN: none), the files of re-scorings behind it, and its parts for gdpo."""
    if ALL[config.estimator].reads != "parts":
        if config.reward is None:
            return "reward", rollouts.reward, [], None
        score, values, scored_by = scores_of(sources, rollouts.named, config.reward)
        return score, pc.fill_null(values, np.nan).to_numpy(), scored_by, None
    named = config.reward_parts or tuple(sorted(rollouts.reward_names))
    if not named:
        raise RefusedError(
            f"--estimator {config.estimator} compares the named parts of a reward, and these rollouts have none",
            code="R501",
            hint="score them with `gymdata score RUN --reward A --reward B`, or name re-scorings with --reward-parts a,b",
        )
    parts, files = {}, []
    for name in named:
        _, values, scored_by = scores_of(sources, rollouts.named, name, "reward_parts")
        parts[name] = pc.fill_null(values, np.nan).to_numpy()
        files += scored_by
    return " + ".join(named), np.sum(list(parts.values()), axis=0), files, parts


def _baselines(sources: Sequence[str | Path], baseline: str | None) -> np.ndarray | None:
    """The mean reward in the run ``baseline`` of each rollout's task, NaN for a task without one. Raises RefusedError for a
    run that was not sampled greedily, DataError for tasks of other content under the same id."""
    if baseline is None:
        return None
    table = pa.Table.from_batches(scan_batches(baseline, ROLLOUTS, ("task_id", "reward", "temperature")))
    if bool(pc.any(pc.greater(table["temperature"], 0)).as_py()):
        raise RefusedError(
            f"--baseline {baseline}: its rollouts were sampled, and remax compares with greedy ones",
            hint="`gymdata collect … --temperature 0 -n 1` collects them",
        )
    of_baseline = task_contents(baseline)
    for source in sources:
        refuse_others(baseline, source, other_contents(of_baseline, task_contents(source)))
    task_means = table.filter(pc.is_finite(table["reward"])).group_by("task_id").aggregate([("reward", "mean")])
    tasks = pa.chunked_array([b.column(0) for s in sources for b in scan_batches(s, ROLLOUTS, ("task_id",))])
    means = task_means["reward_mean"].take(pc.index_in(tasks, value_set=task_means["task_id"].combine_chunks()))
    return np.array(pc.fill_null(means, np.nan).to_numpy())


def _write(
    out: StageOutput,
    work: Crediting,
    shaped: Shaped,
    report: ExperiencesReport,
    progress: Progress,
) -> None:
    moments = work.moments(shaped)
    ours = {"reward": work.scores, "weight": shaped.weight}
    if work.config.optimal_value_beta is not None:
        ours["optimal_value"] = credit.optimal_value(work.scores, work.config.optimal_value_beta, work.groups)
    counts = dict.fromkeys(("sequences", "trained_tokens", "tokens", "abandoned_turns", "rollouts_cut"), 0)
    seen = seen_kl = credit.Moments()
    sampled = SampledLogProbs()

    def credited_tables() -> Iterator[pa.Table]:
        nonlocal seen, seen_kl
        for row, sequences, credited, batch in work.credited(shaped, experiences.CARRIED):
            n = batch.num_rows
            keep, agents = shaped.keep[row : row + n], work.config.target_agents
            if credited.kl is not None:
                seen_kl = credit.running_moments(seen_kl, tokens_of(credited.kl, sequences, keep, agents))
            finished = experiences.finish(credited, work.config, moments)
            numbers = {name: pa.array(of[row : row + n], from_pandas=name == "reward") for name, of in ours.items()}
            table = experiences.rows(sequences, finished, batch, numbers, heads=work.heads)
            if not keep.all():
                table = table.filter(pa.array(keep[sequences.rollout]))
            counts["abandoned_turns"] += sequences.abandoned
            counts["sequences"] += table.num_rows
            counts["rollouts_cut"] += int((np.bincount(sequences.rollout, minlength=n)[keep] > 1).sum())
            counts["tokens"] += len(table["input_ids"].combine_chunks().flatten())
            masks = Ragged.of(table["loss_mask"].combine_chunks())
            is_trained = masks.values != 0
            counts["trained_tokens"] += int(is_trained.sum())
            drawn = is_trained & ~masks.spread(table["temperature"].to_numpy() == 0)
            logprobs = table["logprobs"].combine_chunks().flatten().to_numpy()
            sampled.add(logprobs[drawn], np.roll(drawn, 1)[drawn], masks.sums(drawn))
            advantages = table["advantages"].combine_chunks().flatten().to_numpy()
            seen = credit.running_moments(seen, advantages[is_trained])
            progress.update(done=row + n, total=len(work.rollouts), tokens=counts["tokens"])
            yield table

    # Compression releases the GIL, so the next batches are prepared meanwhile.
    tables = ahead(credited_tables())
    first = next(tables)
    schema = pa.schema([EXPERIENCES.schema.field(name) for name in first.column_names])
    batches = (b for t in chain([first], tables) for b in pa.Table.from_arrays(t.columns, schema=schema).to_batches())
    out.batches("experiences.parquet", batches, EXPERIENCES, schema)
    if why := sampled.fault():
        if work.config.kl_coef > 0 or work.config.teacher_coef:
            raise RefusedError(
                f"the saved log-probabilities, to which a model's are compared, cannot be a sampler's: {why}",
                code="L306",
                hint="leave --kl-coef and --teacher out, or export the log-probabilities that the engine returned",
            )
        report.notes.append(f"{why}: no sampler's (L306); train-rl refuses them unless --allow-biased-logprobs")
    report.counts |= counts
    report.advantage = {"mean": seen.mean, "std": seen.std}
    report.kl = kl_account(seen_kl, report.counts["rollouts_used"], work.config)


def _allowed(sources: Sequence[str | Path]) -> int:
    """How many tokens a rollout could generate in all, from the runs' settings."""
    identities = [read_run_json(run).get("identity", {}) for run in runs_of(sources)]
    limits = {int(each.get("max_tokens") or 0) * int(each.get("max_turns") or 1) for each in identities}
    if len(limits) != 1 or 0 in limits:
        lengths = ", ".join(f"{limit:,}" if limit else "none" for limit in sorted(limits)) or "none"
        raise UsageError(
            f"--overlong-buffer: these runs give {lengths} as the maximum tokens of a rollout, expected one number",
            hint="give --max-new-tokens N",
        )
    return limits.pop()


def _score(
    work: Crediting,
    shaped: Shaped,
    models: dict[str, dict[str, Any]],
    config: ExperienceConfig,
    sources: Sequence[str | Path],
    progress: Progress,
) -> None:
    """Run the models over the sampled tokens; ``models`` gets the number format and device."""
    from gymdata.models.forward import load_critic, load_policy
    from gymdata.models.model_identity import check_tokenizer, model_facts

    for model in models.values():
        facts = model_facts(model["path"])
        for source in sources:
            check_tokenizer(list(lineage(source)), facts, str(source), progress)
    if config.teacher is not None:
        # Of a teacher that sampled the rollouts itself: its log-probabilities equal the saved ones.
        batches = [batch.column(0) for source in sources for batch in scan_batches(source, ROLLOUTS, ("policy_hash",))]
        by_teacher = sum(pc.sum(pc.equal(hashes, models["teacher"]["policy_hash"])).as_py() or 0 for hashes in batches)
        if by_teacher:
            progress.message(
                f"warning: --teacher {config.teacher} is the policy that sampled {by_teacher:,} of "
                f"{counted(sum(map(len, batches)), 'rollout')}: their advantages of the teacher are 0 up to rounding, with "
                "which nothing is learned"
            )
    how = config.dtype or "auto", config.device, config.batch_tokens
    loaded: dict[str, Any] = {}
    for name, model in models.items():
        models[name], loaded[name] = (load_critic if name == "critic" else load_policy)(model["path"], *how)
    work.fill(shaped, Scorers(**loaded), progress)
