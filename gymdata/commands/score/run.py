"""``score``: new scores for saved rollouts, without sampling.

Invariants: rollouts are not touched; scores of earlier calls stay (a rollout's last row counts); a function that
fails on a rollout gives a row with status ``failed`` and no value.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.commands.score.settings import ScoreConfig
from gymdata.commands.score.sources import RewardSources
from gymdata.errors import DataError, UsageError, option
from gymdata.progress import NullProgress, Progress
from gymdata.public import Report, Row, path_of
from gymdata.rewards import Rewards, given_rewards
from gymdata.rewards.port import RewardFunction, refuse_total
from gymdata.rewards.scheduler import PartTally, RewardScheduler, Scored, total
from gymdata.rewards.views import VIEWED, saved_view
from gymdata.rollouts.messages import RolloutRow, ScoreRow
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.stats import mean_ci
from gymdata.store import StageOutput, find_run_json, hash_file, read_table, scan_batches
from gymdata.store.fetch import fetched
from gymdata.store.lineage import parents_of, refuse_duplicates
from gymdata.store.paths import RunFacts, local_output, refuse_inputs
from gymdata.store.reading import check_content
from gymdata.user_code import in_thread
from gymdata.workers.signals import run_async

_BATCH = 256
_COLUMNS = ("rollout_id", "run_id", "task_id", *VIEWED)
_BEYOND = "the weighted sum of the parts is beyond float64"


@dataclass(frozen=True, slots=True, repr=False)
class ScoreSummary(Report):
    """What was scored. ``mean``: over scored rollouts, with a bootstrap interval over tasks.

    ``parts``: the counts of each reward function, with the first error of those that failed. ``labels``: rollouts that
    came under each label of a recipe.
    """

    path: str
    name: str
    rollouts: int
    scored: int
    failed: int
    mean: float | None
    ci95: list[float] | None
    parts: dict[str, PartTally]
    labels: dict[str, int]

    @property
    def ok(self) -> bool:
        return bool(self.scored) and not self.failed

    @property
    def failures(self) -> dict[str, str]:
        """Why each reward function failed, where it did first."""
        return {name: part.first_error for name, part in self.parts.items() if part.first_error is not None}

    def __repr__(self) -> str:
        shown = Report.__repr__(self)
        return f"{shown[:-1]}, failures={self.failures!r})" if self.failures else shown

    def rows(self) -> list[Row]:
        interval = f" (95 %: {self.ci95[0]:.3f} to {self.ci95[1]:.3f})" if self.ci95 else ""
        return [
            ("rollouts", self.rollouts),
            ("scored", self.scored),
            ("failed", self.failed),
            *((f"label {label}", n) for label, n in self.labels.items()),
            *(line for part in self.parts.values() for line in part.lines()),
            (self.name, "–" if self.mean is None else f"{self.mean:.3f}{interval}"),
            ("written to", self.path),
        ]


def score(
    path: str | Path | None = None,
    *,
    reward: Rewards | None = None,
    config: ScoreConfig | None = None,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    **settings: Any,
) -> ScoreSummary:
    """Score the rollouts of ``path`` again; writes RUN/scores-NAME/scores.parquet, or ``output``.

    Scores come from any of ``reward`` (names and functions, one or several; a pair (function, weight) weights one),
    ``reward_model``, ``reward_url``, or from a ``recipe``. Scores
    that are there already stay, before the new ones, unless ``overwrite``. Raises UsageError for an unknown reward or a
    path that is not a run and has no ``output``, DataError for a path that is not there or has no rollouts, RefusedError
    for a reward model with another tokenizer, OutsideError for a reward server that was never reached.
    """
    functions: dict[str, tuple[RewardFunction, float]] = {}
    if path is not None or config is None:
        settings["path"] = str(path_of(path, "score"))
    if reward is not None:
        settings["reward"], functions = given_rewards(reward)
    config = ScoreConfig.called_with(score, config, settings)
    config = config.model_copy(update={"path": str(fetched(config.path))})
    notes = check_content([config.path], ROLLOUTS)
    refuse_duplicates(read_table(config.path, columns=["rollout_id"]), [config.path])
    progress = progress or NullProgress()
    sources = RewardSources(config, progress, functions)
    name = _name(config, sources)
    place = _place(config, name)
    out = StageOutput(place, "score", overwrite=config.overwrite)
    refuse_inputs(place, [config.path], ROLLOUTS, "scored")
    with out:
        there = (place / "scores.parquet").absolute()  # user code may change the current folder
        parents = parents_of((config.path, *sources.models))
        # Other rewards are added to what is there, other rollouts are not: run.json names those of all rows.
        out.refuse_other("", {}, "scores", parents=parents_of([config.path]))
        scores = _Scores(sources, name)
        run_async(_score_all(config, sources, scores, progress))
        if not scores.values:
            raise DataError.empty(config.path, "rollouts to score")
        table = pa.concat_tables(scores.tables)
        if out.facts and not config.overwrite:
            notes = [*(out.facts.get("notes") or []), *check_content([there], SCORES), *notes]
            table = _added(read_table(there, SCORES), table)
        out.batches(there.name, table.to_batches(), SCORES, SCORES.arrow)
        summary = scores.summary(str(place))
        facts: RunFacts = {
            "command": list(command),
            "config": config.model_dump(mode="json"),
            "parents": parents,
            "rewards": [
                {"name": r.function.name, "source": r.function.source, "weight": r.weight} for r in sources.rewards
            ],
            "counts": {"rollouts": summary.rollouts, "scored": summary.scored, "failed": summary.failed},
            "notes": list(dict.fromkeys(notes)),
        }
        if config.recipe is not None:
            facts |= {
                "recipe": {"path": str(config.recipe), "xxh3": hash_file(config.recipe), "labels": summary.labels}
            }
        out.finish(facts)
        return summary


def _name(config: ScoreConfig, sources: RewardSources) -> str:
    name = config.name or (config.recipe.stem if config.recipe is not None else "+".join(sources.names()))
    refuse_total(name, "the name of the scores", f"give them another with {option('name')}")
    if name in sources.names() and (config.recipe is not None or len(sources.rewards) > 1):
        raise UsageError(
            f"the scores and one of their rewards are both named {name!r}",
            hint=f"give them another with {option('name')}",
        )
    return name


def _place(config: ScoreConfig, name: str) -> Path:
    """The output's folder. Raises UsageError where it is not given and the rollouts are not those of one run."""
    if config.output is not None:
        return local_output(config.output)
    source = find_run_json(config.path)
    if source is None or not Path(config.path).is_dir():
        raise UsageError(
            f"{config.path} is not a run folder, so its scores have no place", hint=f"give one with {option('output')}"
        )
    return local_output(source.parent / f"scores-{name}")


def _added(old: pa.Table, new: pa.Table) -> pa.Table:
    """``old``, and the rows of ``new`` that are not the last of their rollout and name there, so that repeating a scoring
    adds nothing."""
    import polars as pl

    last = pl.DataFrame(pl.from_arrow(old)).unique(["rollout_id", "name"], keep="last")
    rows = pl.DataFrame(pl.from_arrow(new))
    changed = rows.join(last, on=rows.columns, how="anti", nulls_equal=True, maintain_order="left")
    return pa.concat_tables([old.cast(SCORES.arrow), changed.to_arrow().cast(SCORES.arrow)])


async def _score_all(config: ScoreConfig, sources: RewardSources, scores: _Scores, progress: Progress) -> None:
    scheduler = RewardScheduler(sources.rewards, in_thread, config.reward_timeout)
    # Token ids are read only for functions that may look at them.
    named = all(reward.function.source.startswith("named:") for reward in sources.rewards)
    columns = _COLUMNS if named else (*_COLUMNS, "turns")
    for rollouts in scan_batches(Path(config.path).absolute(), ROLLOUTS, columns, batch_size=_BATCH):
        left = None if config.limit is None else config.limit - len(scores.values)
        rows = rollouts.slice(0, left).to_pylist()
        if not rows:
            break
        views = [saved_view(row) for row in rows]
        scored = await asyncio.gather(*map(scheduler.score, views))
        for result in scored:
            if result.fatal is not None:
                raise result.fatal
        if sources.recipe is not None:
            for view in views:
                if not isinstance(view, DataError):
                    label = sources.recipe.label_of(view["task"]) or "none fits"
                    scores.labels[label] = scores.labels.get(label, 0) + 1
        scores.add(rows, scored)
        progress.update(done=len(scores.values), failures=sum(part.failed for part in scores.parts.values()))


class _Scores:
    """The rows of the scores, and what the summary counts. ``values``: each rollout's score, NaN without one."""

    def __init__(self, sources: RewardSources, name: str) -> None:
        self.sources = sources.names()
        self.name = name
        self.parts = {r.function.name: PartTally(r.function.name, r.function.needs) for r in sources.rewards}
        self.labels = dict.fromkeys(sources.recipe.labels if sources.recipe is not None else (), 0)
        self.tables: list[pa.Table] = []
        self.values: list[float] = []
        self.tasks: list[str] = []
        self.failed = 0

    def add(self, rows: Sequence[RolloutRow], scored: Sequence[Scored]) -> None:
        of_batch: list[ScoreRow] = []
        for row, result in zip(rows, scored, strict=True):
            for part in result.parts:
                self.parts[part.name].add(part.value, result.faults.get(part.name))
            of_rollout = self._rows(row, result)
            of_batch += of_rollout
            value = next(one["value"] for one in of_rollout if one["name"] == self.name)
            self.values.append(math.nan if value is None else value)
            self.tasks.append(row["task_id"])
            self.failed += any(one["status"] == "failed" for one in of_rollout)
        self.tables.append(pa.Table.from_pylist(of_batch, schema=SCORES.arrow))

    def _rows(self, row: RolloutRow, scored: Scored) -> list[ScoreRow]:
        """A row for each part, and one for the total, which is that of a single reward where the scores have its name."""
        value = None if scored.faults else total(scored.parts)
        beyond = value is None and not scored.faults and any(part.value is not None for part in scored.parts)
        rows = {
            part.name: (part.value, self.sources[part.name], part.name in scored.faults, part.detail)
            for part in scored.parts
        }
        terms = " + ".join(f"{part.weight:g}*{part.name}" for part in scored.parts) or "no reward"
        _, source, failed, detail = rows.get(self.name, (None, terms, bool(scored.faults), None))
        rows[self.name] = (value, source, failed or beyond, _BEYOND if beyond else detail)
        return [
            {
                "rollout_id": row["rollout_id"],
                "name": name,
                "value": value,
                "status": "failed" if failed else "scored",
                "source": source,
                "run_id": row["run_id"],
                "detail": detail if failed or value is not None else "does not apply",
            }
            for name, (value, source, failed, detail) in rows.items()
        ]

    def summary(self, path: str) -> ScoreSummary:
        mean, low, high = mean_ci(np.asarray(self.values), np.unique(self.tasks, return_inverse=True)[1])
        return ScoreSummary(
            path=path,
            name=self.name,
            rollouts=len(self.values),
            scored=int(np.isfinite(self.values).sum()),
            failed=self.failed,
            mean=None if math.isnan(mean) else mean,
            ci95=None if math.isnan(low) else [low, high],
            parts=self.parts,
            labels=self.labels,
        )
