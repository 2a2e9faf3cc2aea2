"""Which rollouts an epoch learns from: groups chosen by the curriculum, the chosen rows copied beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from gymdata.curriculum import CurriculumConfig, group_statistics, select_groups
from gymdata.errors import RefusedError, abridged, counted
from gymdata.public import Figures
from gymdata.rollouts.schema import COMPARISONS, ROLLOUTS, SCORES
from gymdata.store import StageOutput, read_run_json, read_table, scan_batches
from gymdata.store.lineage import parents_of
from gymdata.store.reading import check_content
from gymdata.store.run_json import plain, write_json

SELECTION = "selection.json"
_COLUMNS = ("rollout_id", "task_id", "group_id", "policy_version", "reward")
_BATCH_ROWS = 4_096


@dataclass(frozen=True)
class Source:
    """A run of rollouts, and the folder of a judge's scores of it."""

    run: Path
    judge: Path | None = None

    def scores(self) -> pa.Table:
        """``_COLUMNS`` of the run, ``reward`` being the judge's where there is one."""
        table = read_table(self.run, ROLLOUTS, _COLUMNS)
        if self.judge is None:
            return table
        values = _values_of(table["rollout_id"], read_table(self.judge, SCORES, ["rollout_id", "value"]))
        return table.set_column(table.column_names.index("reward"), "reward", values)


def _values_of(rollout_ids: pa.Array | pa.ChunkedArray, judged: pa.Table) -> pa.ChunkedArray:
    """The judge's value of each rollout, null where it has none."""
    return judged["value"].take(pc.index_in(rollout_ids, value_set=judged["rollout_id"].combine_chunks()))


def select(source: Source, folder: Path, epoch: int, version: int, curriculum: CurriculumConfig) -> Figures:
    """Choose, copy the chosen rollouts to ``folder``/selected and write ``folder``/selection.json; returns its counts.

    ``version``: of the policy that will be trained. Raises RefusedError for rollouts of another one, and (R501) when no
    rollout has a score.
    """
    import polars as pl

    rows = source.scores()
    if others := set(pc.unique(rows["policy_version"]).to_pylist()) - {version}:
        text = f"epoch {epoch}: rollouts of policy version {abridged(map(str, others))}, expected {version}"
        raise RefusedError(text, hint="a trajectory builder's rollouts have the policy_version of its order")
    # Label → (group_id, scores). The label is the task, with a number where earlier groups are of the same task.
    frame = pl.DataFrame(pl.from_arrow(rows.select(["task_id", "group_id", "reward"])))
    groups: dict[str, tuple[str, list[float | None]]] = {}
    for name, group_id, scores in frame.group_by("task_id", "group_id", maintain_order=True).agg("reward").iter_rows():
        names = chain([name], (f"{name}#{number}" for number in count(2)))
        groups[next(label for label in names if label not in groups)] = group_id, scores
    stats = group_statistics({label: scores for label, (_, scores) in groups.items()})
    if not any(group.n > group.n_unscored for group in stats):
        text = f"epoch {epoch}: none of {counted(rows.num_rows, 'rollout')} has a finite score"
        hint = "name a reward that applies to these tasks in finetuning.reward_function"
        raise RefusedError(text, code="R501", hint=hint)
    chosen = select_groups(stats, epoch, curriculum)
    included = set(chosen.included)
    group_ids = {groups[label][0] for label in included}
    reasons = Counter(chosen.left_out.values())
    counts = {
        "rollouts": rows.num_rows,
        "groups": len(stats),
        "groups_selected": len(included),
        "groups_learnable": sum(group.score_range > 0 for group in stats if group.task_id in included),
        "groups_left_out": dict(sorted(reasons.items())),
    }
    counts["rollouts_selected"] = _copy(source, folder / "selected", group_ids, epoch)
    facts = {
        "epoch": epoch,
        "policy_version": version,
        "curriculum": chosen.state,
        "counts": counts,
        "left_out": dict(sorted(chosen.left_out.items())),
        "groups": {
            group.task_id: {
                "n": group.n,
                "unscored": group.n_unscored,
                "mean": group.mean,
                "min": group.minimum,
                "max": group.maximum,
                "included": group.task_id in included,
            }
            for group in sorted(stats, key=lambda group: group.task_id)
        },
    }
    write_json(folder / SELECTION, plain(facts))
    state = {k: v for k, v in chosen.state.items() if k not in ("included_groups", "config")}
    return {**counts, "curriculum": {"enabled": curriculum.enabled, **state}}


def _copy(source: Source, folder: Path, group_ids: set[str], epoch: int) -> int:
    """The rollouts of these groups to ``folder``/rollouts.parquet, and a judge's verdicts on them beside it."""
    id_array = pa.array(sorted(group_ids), pa.string())
    schema = ROLLOUTS.schema
    notes = check_content([source.run], ROLLOUTS)
    if source.judge is not None:
        notes += [*check_content([source.judge], SCORES), *check_content([source.judge], COMPARISONS)]
    values = source.judge and read_table(source.judge, SCORES, ["rollout_id", "value"])

    def chosen() -> Iterator[pa.RecordBatch]:
        for batch in scan_batches(source.run, ROLLOUTS, None, _BATCH_ROWS):
            part = batch.filter(pc.is_in(batch.column("group_id"), value_set=id_array))
            if not part.num_rows:
                continue
            # Every column of the schema; the judge's reward replaces the reward, and is named among the rewards.
            names, n = part.schema.names, part.num_rows
            columns = {f.name: part.column(f.name) if f.name in names else pa.nulls(n, f.type) for f in schema}
            if values is not None:
                columns["reward"] = _values_of(part.column("rollout_id"), values)
            arrays = {f.name: columns[f.name].cast(f.type) for f in schema}
            yield from pa.table(arrays, schema=schema).to_batches()

    file = folder / "rollouts.parquet"
    # A stopped stage is run again, so existing files may be replaced.
    with StageOutput(folder, "select", overwrite=True) as out:
        rows = out.batches(file.name, chosen(), ROLLOUTS, schema).rows or 0
        out.finish(
            {
                "epoch": epoch,
                "reward": "as collected" if source.judge is None else source.judge.name,
                "parents": parents_of(path for path in (source.run, source.judge) if path is not None),
                "notes": notes,
            }
        )
    if source.judge is not None:
        rollout_ids = (
            read_table(file, ROLLOUTS, ["rollout_id"])["rollout_id"].combine_chunks()
            if rows
            else pa.array([], pa.string())
        )
        _copy_verdicts(source.judge, folder / source.judge.name, rollout_ids)
    return rows


def _copy_verdicts(judge: Path, folder: Path, rollout_ids: pa.Array) -> None:
    with StageOutput(folder, "judge", overwrite=True) as out:
        for table, key in ((SCORES, "rollout_id"), (COMPARISONS, "rollout_i")):
            file = judge / f"{table.name}.parquet"
            if file.is_file():
                judged = read_table(file, table)
                out.table(file.name, judged.filter(pc.is_in(judged[key], value_set=rollout_ids)), table)
        origin = {"parents": parents_of([judge]), "notes": ["the rows of selected rollouts"]}
        out.finish({**read_run_json(judge), **origin})
