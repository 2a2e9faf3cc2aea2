"""``judge``: rollouts of a group compared pairwise, and rewards from the comparisons, beside the rollouts.

Invariants: rollouts are not touched; a judge is started only when something is left to judge; stopped at any moment
and started again, no judgement is paid for twice; aggregating again judges nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.judge.groups import (
    COLUMNS,
    JudgeGroups,
    aggregation_of,
    group_comparisons,
    refuse_odd_matches,
    rewards_of,
    score_table,
)
from gymdata.commands.judge.judges import load_judge
from gymdata.commands.judge.pairwise import STATUSES, Judged, PairwiseJudge
from gymdata.commands.judge.port import Judge
from gymdata.commands.judge.settings import JudgeConfig
from gymdata.commands.judge.verdict_cache import VerdictCache
from gymdata.errors import DataError, UsageError, counted
from gymdata.progress import NullProgress, Progress
from gymdata.public import Report, Row, path_of, rate_text
from gymdata.rewards.port import refuse_total
from gymdata.rollouts.schema import COMPARISONS, ROLLOUTS, SCORES
from gymdata.store import StageOutput, find_run_json, read_table
from gymdata.store.fetch import fetched
from gymdata.store.lineage import masked_rollouts, parents_of, refuse_duplicates
from gymdata.store.paths import RunFacts, local_output
from gymdata.store.reading import check_content
from gymdata.workers.tuning import rare_collections


@dataclass(frozen=True, slots=True, repr=False)
class JudgeSummary(Report):
    """What was judged and how far the judge can be trusted. ``asked`` counts calls of the judge by this command."""

    path: str
    name: str
    judge: str
    rollouts: int
    groups: int
    groups_of_one: int
    comparisons: dict[str, int]
    asked: int
    cached: int
    scored: int
    unscored: int
    aggregator: str
    bias: dict[str, Any]

    @property
    def ok(self) -> bool:
        return sum(self.comparisons.values()) == self.comparisons["judged"] and not self.unscored

    def rows(self) -> list[Row]:
        counts = self.comparisons
        return [
            ("judge", self.judge),
            ("groups", self.groups),
            *([("  of one rollout, left out", self.groups_of_one)] if self.groups_of_one else []),
            ("comparisons", sum(counts.values())),
            *((f"  {status}", n) for status, n in counts.items() if n),
            ("judge calls / cached verdicts", f"{self.asked:,} / {self.cached:,}"),
            (
                f"rewards ({self.aggregator})",
                f"{self.scored:,}" + (f", {self.unscored:,} without" * bool(self.unscored)),
            ),
            *((name.replace("_", " "), rate_text(b, b["n"])) for name, b in self.bias.items() if "ci95" in b),
            (
                "cycles a > b > c > a",
                f"{self.bias['cycles']['triples']:,} in {counted(self.bias['cycles']['groups'], 'group')}",
            ),
            ("written to", self.path),
        ]


def judge(
    path: str | Path | None = None,
    *,
    config: JudgeConfig | None = None,
    judge: Judge | None = None,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    **settings: Any,
) -> JudgeSummary:
    """Compare the rollouts of each group of ``path`` and write RUN/judge-NAME (or ``output``): comparisons.parquet,
    scores.parquet with rewards by that name, run.json with the bias report.

    Settings are those of ``JudgeConfig``. Raises DataError for a path without groups of two, StoreError when the folder
    holds what another judge or schedule made, OutsideError("judge") when the judge is gone: what was judged is kept.
    """
    if path is not None or config is None:
        settings["path"] = str(path_of(path, "judge"))
    config = JudgeConfig.called_with(globals()["judge"], config, settings)  # here its name is that of an argument
    config = config.model_copy(update={"path": str(fetched(config.path))})
    progress = progress or NullProgress()
    notes = check_content([config.path], ROLLOUTS)
    groups = _groups(config, progress)
    the_judge = None if config.aggregate_only else judge or load_judge(config, progress.message)
    folder = local_output(_folder(config, the_judge))
    name = config.name or folder.name.removeprefix("judge-")
    refuse_total(name, "the name of the scores", "give another with --name")
    with StageOutput(folder, "judge", overwrite=config.overwrite) as out:
        if the_judge is None:
            comparisons, facts, cached = _judged_before(out, config, groups, notes)
        else:
            comparisons, facts, cached = _judged_now(out, config, groups, the_judge, progress, notes)
        return _finish(out, config, groups, comparisons, {**facts, "command": list(command)}, name, cached)


def _groups(config: JudgeConfig, progress: Progress) -> JudgeGroups:
    """What is to be compared. Raises DataError when that is nothing."""
    rollouts = read_table(config.path, ROLLOUTS, COLUMNS)
    refuse_duplicates(rollouts, [config.path])
    if masked := masked_rollouts([config.path]):
        # Compared with the others, an answer that its writer took back would move their scores.
        rollouts = rollouts.filter(pc.invert(pc.is_in(rollouts["rollout_id"], pa.array(list(masked)))))
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in Counter(masked.values()).items())
        progress.message(f"{counted(len(masked), 'rollout')} not compared: {reasons}")
    groups = group_comparisons(rollouts, config.show, config.principle_for(None), config.limit)
    if not groups.comparisons:
        raise DataError.empty(config.path, "groups of at least two rollouts to compare (collect with -r 2 or more)")
    return groups


def _judged_before(
    out: StageOutput, config: JudgeConfig, groups: JudgeGroups, notes: list[str]
) -> tuple[pa.Table, RunFacts, int]:
    """The comparisons that are there, run.json with the settings that aggregate them now, and no cached verdicts."""
    file = out.place / "comparisons.parquet"
    if not file.is_file():
        raise DataError.missing_path(file, "comparisons that were judged before")
    notes = [*dict.fromkeys([*(out.facts.get("notes") or []), *notes, *check_content([out.place], COMPARISONS)])]
    comparisons = read_table(file, COMPARISONS)
    candidates, _, numbers = groups.numbered()
    ids = pa.array([candidate.rollout_id for candidate in candidates], pa.string())
    refuse_odd_matches(comparisons, ids, numbers, file)
    how = aggregation_of(config)
    settings = {**out.facts.get("config", {}), "aggregator_method": how.method, **asdict(how.adjust)}
    again = {"asked": 0, "aggregated_with": how.source, "config": settings, "notes": notes}
    return comparisons, {**out.facts, **again}, 0


def _judged_now(
    out: StageOutput, config: JudgeConfig, groups: JudgeGroups, judge: Judge, progress: Progress, notes: list[str]
) -> tuple[pa.Table, RunFacts, int]:
    """Judge what has no verdict yet. Returns all comparisons, what run.json says of them, and how many were cached."""
    # What the comparisons in a folder have in common.
    identity = {
        "judge": dict(judge.identity),
        "seed": config.seed,
        "comparison_strategy": config.comparison_strategy,
        "num_judges_per_comparison": config.num_judges_per_comparison,
        "verdicts": config.verdicts,
        "principle": config.principle_for(None),
        "show": config.show,
    }
    parents = parents_of([config.path])
    out.refuse_other("identity", identity, "comparisons that were made", parents=parents)
    facts: RunFacts = {
        "config": config.model_dump(mode="json"),
        "identity": identity,
        "parents": parents,
        "notes": notes,
    }
    out.begin({**facts, "finished": False})
    with contextlib.closing(VerdictCache(out.place / "verdicts.journal")) as verdicts, rare_collections():
        for repair in verdicts.repairs:
            progress.message(f"repaired after a crash: {repair}")
        pairwise = PairwiseJudge(config, judge, verdicts, retry_unparsed=config.retry_unparsed, stop_when_gone=True)
        comparisons = asyncio.run(_judge_groups(pairwise, groups, progress))
    facts |= {"judge": pairwise.judge_name, "engine": dict(pairwise.facts), "asked": pairwise.tally.asked}
    return comparisons, facts, pairwise.tally.cached


async def _judge_groups(pairwise: PairwiseJudge, groups: JudgeGroups, progress: Progress) -> pa.Table:
    """The comparisons of all groups as a table, in the order of the groups."""
    results: list[list[Judged]] = [[] for _ in groups.comparisons]
    total, done = sum(len(pairwise.plan(comparison)) for comparison in groups.comparisons), 0

    def finished(number: int, judged: list[Judged]) -> None:
        nonlocal done
        results[number] = judged
        done += len(judged)
        missing = sum(n for status, n in pairwise.tally.by_status.items() if status != "judged")
        progress.update(done=done, total=total, failures=missing)

    try:
        await pairwise.compare_all(groups.comparisons, finished)
    finally:
        await pairwise.close()
    rows = [row for compared in zip(groups.comparisons, results, strict=True) for row in pairwise.rows(*compared)]
    return pa.Table.from_pylist(rows, schema=COMPARISONS.schema)


def _finish(
    out: StageOutput,
    config: JudgeConfig,
    groups: JudgeGroups,
    comparisons: pa.Table,
    facts: RunFacts,
    name: str,
    cached: int,
) -> JudgeSummary:
    """Aggregate, write comparisons, rewards and run.json."""
    how, judge_name = aggregation_of(config), str(facts.get("judge"))
    rewards, report, _ = rewards_of(comparisons, groups, how)
    scores = score_table(rewards, groups, name, f"{judge_name} {how.source}")
    out.table("comparisons.parquet", comparisons, COMPARISONS)
    out.table("scores.parquet", scores, SCORES)
    statuses = Counter(comparisons["status"].to_pylist())
    summary = JudgeSummary(
        path=str(out.place),
        name=name,
        judge=judge_name,
        rollouts=groups.rollouts,
        groups=len(groups.comparisons),
        groups_of_one=groups.alone,
        comparisons={status: statuses[status] for status in STATUSES},
        asked=int(facts["asked"]),
        cached=cached,
        scored=len(scores) - scores["value"].null_count,
        unscored=scores["value"].null_count,
        aggregator=how.source,
        bias=report,
    )
    counts = {k: v for k, v in summary.to_dict().items() if k in ("rollouts", "groups", "groups_of_one", "comparisons")}
    out.finish(
        {
            **facts,
            "finished": True,
            "reward": name,
            "aggregator": how.source,
            "counts": {**counts, "scored": summary.scored, "unscored": summary.unscored},
            "bias": report,
        }
    )
    return summary


def _folder(config: JudgeConfig, judge: Judge | None) -> Path:
    """-o, else RUN/judge-NAME; without any judge that is named, the only such folder."""
    if config.output is not None:
        return config.output
    source = find_run_json(config.path)
    if source is None or not Path(config.path).is_dir():
        text = f"{config.path} is not a run folder, so its comparisons have no place"
        raise UsageError(text, hint="give one with -o")
    run = source.parent
    if config.name is not None:
        return run / f"judge-{config.name}"
    named = config.genrm or config.model
    if judge is not None and named is None:
        named = str(judge.identity.get("model"))
    if named is not None:
        return run / f"judge-{re.sub(r'[^A-Za-z0-9_.+-]', '_', named.rstrip('/').rpartition('/')[2])}"
    files = sorted(run.glob("judge-*/comparisons.parquet"))
    if len(files) != 1:
        have = ", ".join(p.parent.name.removeprefix("judge-") for p in files) or "none"
        raise UsageError(f"{run}: which judge's comparisons? (there are: {have})", hint="name one with --name")
    return files[0].parent


__all__ = ["JudgeSummary", "judge"]
