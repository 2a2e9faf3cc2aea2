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
    Aggregation,
    JudgeGroups,
    group_comparisons,
    refuse_odd_matches,
    rewards_of,
    score_table,
)
from gymdata.commands.judge.judges import load_judge
from gymdata.commands.judge.pairwise import STATUSES, Judged, PairwiseJudge
from gymdata.commands.judge.port import Judge, Served
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
    notes = check_content([config.path], ROLLOUTS)
    rollouts = read_table(config.path, ROLLOUTS, COLUMNS)
    refuse_duplicates(rollouts, [config.path])
    if masked := masked_rollouts([config.path]):
        # Compared with the others, an answer that its writer took back would move their scores.
        rollouts = rollouts.filter(pc.invert(pc.is_in(rollouts["rollout_id"], pa.array(list(masked)))))
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in Counter(masked.values()).items())
        (progress or NullProgress()).message(f"{counted(len(masked), 'rollout')} not compared: {reasons}")
    field = group_comparisons(rollouts, config.show, config.principle_for(None), config.limit)
    if not field.comparisons:
        raise DataError.empty(config.path, "groups of at least two rollouts to compare (collect with -r 2 or more)")
    source = find_run_json(config.path)
    how = Aggregation(config.aggregator_method, config.adjustments())
    the_judge = None if config.aggregate_only else judge or load_judge(config)
    if isinstance(the_judge, Served):
        # Its name is that of the folder, and of what the verdicts are kept under.
        asyncio.run(the_judge.find_model())
    folder = local_output(_folder(config, source, the_judge))
    refuse_total(
        config.name or folder.name.removeprefix("judge-"), "the name of the scores", "give another with --name"
    )
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(StageOutput(folder, "judge", overwrite=config.overwrite))
        if the_judge is None:
            if not (folder / "comparisons.parquet").is_file():
                raise DataError.missing_path(folder / "comparisons.parquet", "comparisons that were judged before")
            notes += check_content([folder], COMPARISONS)
            comparisons = read_table(folder / "comparisons.parquet", COMPARISONS)
            candidates, _, groups = field.numbered()
            ids = pa.array([candidate.rollout_id for candidate in candidates], pa.string())
            refuse_odd_matches(comparisons, ids, groups, folder / "comparisons.parquet")
            settings = {**out.facts.get("config", {}), "aggregator_method": how.method, **asdict(how.adjust)}
            notes = [*dict.fromkeys([*(out.facts.get("notes") or []), *notes])]
            again = {"command": list(command), "asked": 0, "aggregated_with": how.source, "config": settings}
            return _finish(out, config, field, how, comparisons, out.facts | again | {"notes": notes}, 0)
        # What the comparisons in a folder have in common.
        identity = {
            "judge": dict(the_judge.identity),
            "seed": config.seed,
            "comparison_strategy": config.comparison_strategy,
            "num_judges_per_comparison": config.num_judges_per_comparison,
            "verdicts": config.verdicts,
            "principle": config.principle_for(None),
            "show": config.show,
        }
        out.refuse_other("identity", identity, "comparisons that were made", parents=parents_of([config.path]))
        stack.enter_context(rare_collections())
        facts: RunFacts = {
            "command": list(command),
            "config": config.model_dump(mode="json"),
            "identity": identity,
            "parents": parents_of([config.path]),
            "notes": notes,
        }
        out.begin({**facts, "finished": False})
        verdicts = VerdictCache(folder / "verdicts.journal")
        stack.callback(verdicts.close)
        progress = progress or NullProgress()
        for repair in verdicts.repairs:
            progress.message(f"repaired after a crash: {repair}")
        if isinstance(the_judge, Served):
            the_judge.wait_for_server(config.wait_for_server, progress.message)
        pairwise = PairwiseJudge(config, the_judge, verdicts, retry_unparsed=config.retry_unparsed, stop_when_gone=True)
        comparisons = asyncio.run(_judge_groups(pairwise, field, progress))
        facts |= {"judge": pairwise.judge_name, "engine": dict(pairwise.facts), "asked": pairwise.tally.asked}
        return _finish(out, config, field, how, comparisons, facts, pairwise.tally.cached)


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
    field: JudgeGroups,
    how: Aggregation,
    comparisons: pa.Table,
    facts: RunFacts,
    cached: int,
) -> JudgeSummary:
    """Aggregate, write comparisons, rewards and run.json."""
    folder = out.place
    rewards, report, _ = rewards_of(comparisons, field, how)
    judge_is = str(facts.get("judge"))
    name = folder.name.removeprefix("judge-") if config.name is None else config.name
    scores = score_table(rewards, field, name, f"{judge_is} {how.source}")
    out.table("comparisons.parquet", comparisons, COMPARISONS)
    out.table("scores.parquet", scores, SCORES)
    statuses = Counter(comparisons["status"].to_pylist())
    summary = JudgeSummary(
        path=str(folder),
        name=name,
        judge=judge_is,
        rollouts=field.rollouts,
        groups=len(field.comparisons),
        groups_of_one=field.alone,
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


def _folder(config: JudgeConfig, source: Path | None, judge: Judge | None) -> Path:
    if config.output is not None:
        return config.output
    if source is None or not Path(config.path).is_dir():
        raise UsageError(
            f"{config.path} is not a run folder, so its comparisons have no place", hint="give one with -o"
        )
    run = source.parent
    if config.name is not None:
        return run / f"judge-{config.name}"
    named = config.genrm or config.model
    if judge is not None and named is None:
        named = str(judge.identity.get("model")).removeprefix("served:")
    if named is None:
        files = sorted(run.glob("judge-*/comparisons.parquet"))
        if len(files) != 1:
            have = ", ".join(p.parent.name.removeprefix("judge-") for p in files) or "none"
            raise UsageError(f"{run}: which judge's comparisons? (there are: {have})", hint="name one with --name")
        return files[0].parent
    return run / f"judge-{re.sub(r'[^A-Za-z0-9_.+-]', '_', named.rstrip('/').rpartition('/')[2])}"


__all__ = ["JudgeSummary", "judge"]
