"""``score``: new scores for saved rollouts, without sampling.

Invariants: rollouts are not touched; scores of earlier calls stay (a rollout's last row counts); a function that
fails on a rollout gives a row with status ``failed`` and no value.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.score.settings import ScoreConfig
from gymdata.commands.score.sources import RewardSources, load_sources
from gymdata.errors import DataError, UsageError, option
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures, Report, Row, path_of
from gymdata.rewards import Rewards, given_rewards
from gymdata.rewards.port import RewardFunction, refuse_total
from gymdata.rewards.scheduler import (
    VIEWED,
    Flips,
    PartTally,
    RewardScheduler,
    old_score,
    saved_view,
    score_rows,
    tallies,
)
from gymdata.rollouts.messages import ScoreRow
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.stats import mean_ci
from gymdata.store import StageOutput, find_run_json, read_table, scan_batches
from gymdata.store.fetch import fetched
from gymdata.store.lineage import parents_of, refuse_duplicates
from gymdata.store.paths import RunFacts, local_output, refuse_inputs
from gymdata.store.reading import check_content
from gymdata.user_code import in_thread
from gymdata.workers.signals import run_async

#: Scores that are Python objects at a time; they take ten times as much as in columns.
_HELD_ROWS = 8_192
_BATCH = 256
_COLUMNS = ("rollout_id", "run_id", "task_id", "rollout_index", "reward", "rewards", *VIEWED)


@dataclass(frozen=True, slots=True, repr=False)
class ScoreSummary(Report):
    """What was scored and who flipped. ``mean``: over scored rollouts, with a bootstrap interval over tasks.

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
    flips: Figures
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

    def to_dict(self) -> Figures:
        return {**asdict(self), "flips": {**self.flips, "flipped": list(self.flips["flipped"])}}

    def rows(self) -> list[Row]:
        flips = self.flips
        interval = f" (95 %: {self.ci95[0]:.3f} to {self.ci95[1]:.3f})" if self.ci95 else ""
        compared = (
            [
                ("changed", f"{flips['changed']:,} of {flips['compared']:,} compared"),
                ("flipped up / down", f"{flips['up']:,} / {flips['down']:,}"),
            ]
            if flips["compared"]
            else []
        )
        return [
            ("rollouts", self.rollouts),
            ("scored", self.scored),
            ("failed", self.failed),
            *((f"label {label}", n) for label, n in self.labels.items()),
            *(line for part in self.parts.values() for line in part.lines()),
            (self.name, "–" if self.mean is None else f"{self.mean:.3f}{interval}"),
            *compared,
            ("newly scored / no longer", f"{flips['newly_scored']:,} / {flips['no_longer_scored']:,}"),
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
    source = find_run_json(config.path)
    progress = progress or NullProgress()
    sources = load_sources(config, progress, functions)
    name = config.name or (config.recipe.stem if config.recipe is not None else "+".join(sources.names()))
    refuse_total(name, "the name of the scores", f"give them another with {option('name')}")
    if config.recipe is not None and name in sources.names():
        raise UsageError(
            f"the recipe and a reward of it are both named {name!r}", hint=f"give it another with {option('name')}"
        )
    if config.output is not None:
        place = local_output(config.output)
    elif source is not None and Path(config.path).is_dir():
        place = local_output(source.parent / f"scores-{name}")
    else:
        raise UsageError(
            f"{config.path} is not a run folder, so its scores have no place", hint=f"give one with {option('output')}"
        )
    out = StageOutput(place, "score", overwrite=config.overwrite)
    refuse_inputs(place, [config.path], ROLLOUTS, "scored")
    with out:
        there = (place / "scores.parquet").absolute()  # user code may change the current folder
        # Other rewards are added to what is there, other rollouts are not: run.json names those of all rows.
        out.refuse_other("", {}, "scores", parents=parents_of([config.path]))
        parts, parents = tallies(sources.rewards), parents_of((config.path, *sources.models))
        scored, values, tasks, flips = run_async(_score_all(config, sources, name, parts, progress))
        if not values:
            raise DataError.empty(config.path, "rollouts to score")
        # With the types of the scores table, a batch at a time.
        tables = (pa.Table.from_batches([batch]).cast(SCORES.arrow) for batch in scored.to_batches())
        rows: Iterable[pa.RecordBatch] = (batch for table in tables for batch in table.to_batches())
        if out.facts and not config.overwrite:
            notes = [*(out.facts.get("notes") or []), *check_content([there], SCORES), *notes]
            rows = itertools.chain(scan_batches(there, SCORES), _changed(rows, there))
        out.batches(there.name, rows, SCORES, SCORES.arrow)
        mean, low, high = mean_ci(np.frombuffer(values), tasks)
        summary = ScoreSummary(
            path=str(place),
            name=name,
            rollouts=len(values),
            scored=int(np.isfinite(values).sum()),
            failed=len(scored.filter(pc.equal(scored["status"].cast(pa.string()), "failed"))["rollout_id"].unique()),
            mean=None if mean != mean else mean,
            ci95=None if low != low else [low, high],
            parts=parts,
            flips={field.name: getattr(flips, field.name) for field in fields(flips)},
            labels=sources.of_label,
        )
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
        if sources.recipe is not None:
            facts |= {"recipe": {"path": str(config.recipe), "xxh3": sources.recipe_hash, "labels": summary.labels}}
        out.finish(facts)
        return summary


def _changed(rows: Iterable[pa.RecordBatch], there: Path) -> Iterator[pa.RecordBatch]:
    """``rows`` without those that equal the last row of their rollout and name in ``there``, so that repeating a
    scoring adds nothing."""
    parts = [_hashes(batch) for batch in scan_batches(there, SCORES)]
    keys, contents = (np.concatenate(part) for part in zip(*parts, strict=True))
    del parts
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    last = np.append(keys[1:] != keys[:-1], True)
    keys, contents = keys[last], contents[order[last]]
    for batch in rows:
        key, content = _hashes(batch)
        positions = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        # The whole row is compared: a key collision only writes a row again.
        yield batch.filter(pa.array((keys[positions] != key) | (contents[positions] != content)))


def _hashes(rows: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """64-bit hashes of each row's rollout and name, and of its whole content."""
    import polars as pl

    frame = pl.DataFrame(pl.from_arrow(rows))
    return frame.select("rollout_id", "name").hash_rows().to_numpy(), frame.hash_rows().to_numpy()


async def _score_all(
    config: ScoreConfig, sources: RewardSources, name: str, parts: dict[str, PartTally], progress: Progress
) -> tuple[pa.Table, array[float], np.ndarray, Flips]:
    """The rows of the scores, each rollout's new score (NaN: none) and a number for its task, and who flipped."""
    rewards, source_of = sources.rewards, sources.names()
    queue = RewardScheduler(rewards, in_thread, config.reward_timeout)
    rows: list[ScoreRow] = []
    tables: list[pa.Table] = []
    values, tasks = array("d"), list[pa.Array]()
    flips = Flips(config.threshold)
    alone = len(rewards) == 1 and sources.recipe is None
    compare, weight = (rewards[0].function.name, rewards[0].weight) if alone else (name, 1.0)
    # A model's scores are on another scale than other rewards.
    same_scale = not any(r.function.source.startswith(("model:", "url:")) for r in rewards)
    # Token ids are read only for functions that may look at them.
    columns = [*_COLUMNS, *([] if all(r.function.source.startswith("named:") for r in rewards) else ["turns"])]
    for rollouts in scan_batches(Path(config.path).absolute(), ROLLOUTS, columns, batch_size=_BATCH):
        if config.limit is not None:
            rollouts = rollouts.slice(0, config.limit - len(values))
            if not rollouts.num_rows:
                break
        batch = rollouts.to_pylist()
        views = [saved_view(row) for row in batch]
        scored = await asyncio.gather(*map(queue.score, views))
        sources.refuse_useless()
        for row, view, result in zip(batch, views, scored, strict=True):
            if not isinstance(view, DataError):
                sources.count(view["task"])
            for part in result.parts:
                parts[part.name].add(part.value, result.faults.get(part.name))
            new_rows, value = score_rows(row, result, source_of, name)
            rows += new_rows
            values.append(math.nan if value is None else value)
            flips.add(row, old_score(row, compare, weight=weight, or_total=same_scale), value)
        tasks.append(rollouts.column("task_id"))
        progress.update(done=len(values), failures=sum(part.failed for part in parts.values()))
        if len(rows) >= _HELD_ROWS:
            tables.append(_columns(rows))
            rows = []
    tables.append(_columns(rows))
    codes = pa.chunked_array(tasks, pa.string()).combine_chunks().dictionary_encode().indices.to_numpy()
    return pa.concat_tables(tables), values, codes, flips


def _columns(rows: list[ScoreRow]) -> pa.Table:
    """Rows of the scores table; of what is the same in most rows one copy is kept."""
    table = pa.Table.from_pylist(rows, schema=SCORES.arrow)
    for name in SCORES.dictionary:
        table = table.set_column(table.column_names.index(name), name, table[name].dictionary_encode())
    return table
