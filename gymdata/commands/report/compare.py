"""Two runs on the same tasks: the paired difference, and which tasks went which way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.report.rollouts import Rewards, fields_to_split_by, interval, task_fields
from gymdata.errors import DataError
from gymdata.public import Figures
from gymdata.rewards.named import answers_of
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.messages import object_of
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.scores.chosen import with_score
from gymdata.stats import paired_difference_ci
from gymdata.store import read_table
from gymdata.store.lineage import lineage
from gymdata.store.run_json import differences
from gymdata.store.task_contents import TaskContent, named, other_contents, refuse_others, task_contents

if TYPE_CHECKING:
    from gymdata.commands.show.run import ShownRollout

#: Means closer than this are equal.
SAME = 1e-9
_EXAMPLES = 3
#: Parts of the identity of a run that say how it was sampled, whatever the model.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("sampling", "max_tokens", "max_turns", "max_context", "time_limit", "force", "environment"),
)


@dataclass(frozen=True)
class Side:
    """A run of a comparison. ``by_task``: task → mean score, of all that it has."""

    path: str | Path
    table: pa.Table
    rewards: Rewards
    by_task: dict[str, float]
    contents: dict[str, TaskContent]

    @classmethod
    def read(cls, path: str | Path, score: str | None) -> Side:
        """By a score, None for the total reward."""
        columns = ["rollout_id", "task_id", "reward", "task", *([] if score is None else ["rewards"])]
        table = with_score([path], read_table(path, ROLLOUTS, columns), score)[0]
        rewards = Rewards.of(table)
        return cls(path, table, rewards, rewards.by_task(), task_contents(path))


@dataclass(frozen=True)
class Paired:
    """Two runs on the same tasks, by id and content. ``ways``: each task that both have scored → ``up``, ``down`` or
    ``same``; ``others``: each that both have scored and whose content differs → what differs."""

    first: Side
    second: Side
    ways: dict[str, str]
    others: dict[str, str]

    @classmethod
    def of(cls, first: Side, second: Side) -> Paired:
        """Raises DataError without a task that both have scored."""
        before, after = first.by_task, second.by_task
        common = before.keys() & after.keys()
        others = {t: why for t, why in other_contents(first.contents, second.contents).items() if t in common}
        if common and len(others) == len(common):
            refuse_others(first.path, second.path, others)
        if not common:
            raise DataError(
                f"{first.path} and {second.path}: have no scored task in common",
                hint="compare runs of the same task file",
            )
        gains = {t: after[t] - before[t] for t in sorted(common - others.keys())}
        ways = {t: "same" if abs(gain) <= SAME else "up" if gain > 0 else "down" for t, gain in gains.items()}
        return cls(first, second, ways, others)

    @property
    def flips(self) -> dict[str, int]:
        """How many tasks went each way."""
        return {way: sum(moved == way for moved in self.ways.values()) for way in ("up", "down", "same")}

    def difference(self) -> Figures:
        """Mean of second minus first over the tasks of both, with its paired 95 % interval."""
        a, b = ([side.by_task[t] for t in self.ways] for side in (self.first, self.second))
        mean, low, high = paired_difference_ci(a, b)
        return {
            "rate": mean,
            "ci95": interval(low, high),
            "n": len(a),
            "before": sum(a) / len(a),
            "after": sum(b) / len(b),
            "binary": self.first.rewards.binary and self.second.rewards.binary,
            "only_first": len(self.first.by_task) - len(a) - len(self.others),
            "only_second": len(self.second.by_task) - len(a) - len(self.others),
            **({"other_content": named(self.others)} if self.others else {}),
        }


def sampling_that_differs(before: Path, after: Path) -> dict[str, list[Any]]:
    """Setting of sampling and of the environment → its values in the runs that two paths are or were made from, for those
    that differ; none where a run.json does not say."""
    runs = [next((run for run in lineage(path) if run.get("stage") == "collect"), {}) for path in (before, after)]
    if not all(run.get("identity") for run in runs):
        return {}
    sides = [
        {name: value for name, value in (run.get("identity") or {}).items() if name in _SAMPLING}
        | {"rollouts per task": (run.get("config") or {}).get("num_rollouts")}
        for run in runs
    ]
    differing: dict[str, list[Any]] = {}
    for key, was, now in differences(*sides):
        if not key.startswith("environment."):
            differing[key] = [was, now]
        elif "env" not in differing:
            environments = [side.get("environment") or {} for side in sides]
            values = [env.get("spec", env.get("name")) for env in environments]
            # Another version of one file.
            differing["env"] = (
                values if values[0] != values[1] else [f"{values[0]} ({key}: {value})" for value in (was, now)]
            )
    return differing


def comparison(first: str | Path, second: str | Path, score: str | None) -> Figures:
    """``difference`` (second minus first) and ``flips`` by a score, None for the total reward. Raises DataError without a
    task that both have scored."""
    paired = Paired.of(Side.read(first, score), Side.read(second, score))
    before, after, ways = paired.first.by_task, paired.second.by_task, paired.ways
    # Counts and mean scores by the values of each task field that has few.
    fields_of = {name: task for name, task in task_fields(paired.second.table).items() if name in ways}
    by_field: dict[str, list[Figures]] = {}
    for field in fields_to_split_by(list(fields_of.values())):
        counts: dict[Any, Figures] = {}
        for name, task in fields_of.items():
            value = task.get(field)
            row = counts.setdefault(
                repr(value), {"value": value, "before": 0.0, "after": 0.0, "up": 0, "down": 0, "same": 0}
            )
            row[ways[name]] += 1
            row["before"] += before[name]
            row["after"] += after[name]
        by_field[field] = [counts[key] for key in sorted(counts)]
        for row in by_field[field]:
            tasks = row["up"] + row["down"] + row["same"]
            row["before"], row["after"] = row["before"] / tasks, row["after"] / tasks
    examples = _examples((first, second), paired, score)
    return {"difference": paired.difference(), "flips": {**paired.flips, "by_field": by_field, "examples": examples}}


def example(shown: ShownRollout, score: str | None, value: float | None) -> Figures:
    """A rollout as ``show --json`` has it, with the value of the score that is reported on, and the task's ``expected``
    answer."""
    row = (shown if score in (None, TOTAL) or value is None else replace(shown, score=(str(score), value))).to_dict()
    # As the rewards read it.
    answers = answers_of(object_of(row["task"]))
    return row | {"expected": None if answers is None else " or ".join(answers)}


def _examples(paths: Sequence[str | Path], paired: Paired, score: str | None) -> dict[str, list[Figures]]:
    """The tasks that moved most, in each direction, with a rollout of each run that shows it: of a task that went up the
    worst one before and the best one after."""
    from gymdata.commands.show.run import show

    before, after = paired.first.by_task, paired.second.by_task

    def extreme(path: str | Path, table: pa.Table, task: str, *, best: bool) -> Figures:
        scored = table.filter(pc.and_(pc.equal(table["task_id"], task), pc.is_finite(table["reward"])))
        order = "descending" if best else "ascending"
        row = scored.take(pc.sort_indices(scored, [("reward", order), ("rollout_id", "ascending")])[:1]).to_pylist()[0]
        shown = show(path, row["rollout_id"]).rollouts[0]
        return example(shown, score, None if score is None else row["reward"])

    examples = {}
    for way, sign in (("up", -1), ("down", 1)):
        tasks = [t for t, moved in paired.ways.items() if moved == way]
        tasks.sort(key=lambda t: (sign * (after[t] - before[t]), t))
        examples[way] = [
            {"task_id": t, "before": before[t], "after": after[t]}
            | {"first": extreme(paths[0], paired.first.table, t, best=way == "down")}
            | {"second": extreme(paths[1], paired.second.table, t, best=way == "up")}
            for t in tasks[:_EXAMPLES]
        ]
    return examples
