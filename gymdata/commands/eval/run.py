"""``gymdata eval``: collect on held-out tasks, and pass@k with intervals, by field, and against an earlier run.

Invariants: the rollouts are an ordinary run, so that an evaluation is training data, resumes, and costs no sample twice;
every figure is computed from that run's files; figures of a part of the rollouts are written nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.commands.collect.report import CollectPlan
from gymdata.commands.collect.run import Parts, collect, default_output
from gymdata.commands.collect.tasks import IN_MEMORY, Tasks
from gymdata.commands.eval.settings import EvalConfig
from gymdata.commands.report.compare import Paired, Side, sampling_that_differs
from gymdata.commands.report.rollouts import Rewards, fields_to_split_by, pass_at_k, prompt_of, task_fields
from gymdata.commands.report.run import compared_headline
from gymdata.errors import DataError, UsageError, option
from gymdata.progress import Progress
from gymdata.public import Figures, Report, Row, markdown_table, path_of, rate_text
from gymdata.rewards import Rewards as RewardFunctions
from gymdata.rollouts.messages import TaskRow
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.run_json import write_text
from gymdata.store.task_contents import trained_tasks

__all__ = ["CollectPlan", "EvalReport", "evaluate"]

#: Files beside the rollouts: the report as an object, and its tables in Markdown.
RESULTS_JSON, RESULTS_MD = "results.json", "results.md"
_COLUMNS = ("task_id", "reward", "task", "status")


@dataclass(frozen=True, repr=False)
class EvalReport(Report):
    """An evaluation. ``pass_at_k``: ``k``, ``value``, ``ci95``, ``tasks`` for k = 1, 2, 4, …; ``reward``: mean with its 95 %
    interval; ``by_field``: field → one object per value; ``against``: the paired difference from an earlier run, the
    settings of ``sampling`` that differ (name → both values), and the tasks that ``regressed`` and ``improved`` with their
    mean rewards and the beginning of their prompt, None without one; ``missing``: rollouts that failed or were
    interrupted. Without a rollout that is scored the figures are empty."""

    path: str
    model: str | None
    tasks: int
    rollouts: int
    missing: int
    threshold: float
    pass_at_k: list[Figures]
    reward: Figures
    truncated: int
    by_field: dict[str, list[Figures]]
    against: Figures | None
    #: Tasks that are in the training data of the model, as far as its parents lead to it.
    trained_tasks: int = 0
    interrupted: bool = False
    files: list[Path] = field(default_factory=list)
    #: That of collecting: 130 interrupted; 1 while rollouts are missing or could not be scored; else 0.
    exit_code: int = 0

    def to_dict(self) -> Figures:
        figures = asdict(self)
        del figures["exit_code"]
        return {**figures, "files": [str(file) for file in self.files]}

    def rows(self) -> list[Row]:
        rows: list[Row] = [
            *([("trained on", self.trained_on)] if self.trained_tasks else []),
            *(
                (f"pass@{row['k']}", f"{rate_text({**row, 'rate': row['value']})} of {_tasks_of(row)}")
                for row in self.pass_at_k
            ),
            ("rollouts", self.rollouts),
        ]
        if not self.reward["binary"]:
            mean, bounds = self.reward["mean"], self.reward["ci95"]
            text = "not scored" if mean is None else f"{mean:.3f}"
            rows.append(("mean reward", text + (f" (95 %: {bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else "")))
        rows += [("truncated", self.truncated)] if self.truncated else []
        rows += [("missing (rerun to resume)", self.missing)] if self.missing else []
        if self.against is not None:
            rows += [
                (f"against {self.against['path']}", compared_headline(self.against)),
                *([("  which was sampled otherwise", self._sampling())] if self.against["sampling"] else []),
                *((way, len(self.against[way])) for way in ("regressed", "improved")),
            ]
        written = [(f"results, {file.suffix[1:]}", file) for file in self.files]
        return [*rows, *written, ("written to", self.path)]

    @property
    def trained_on(self) -> str:
        """How many of the tasks are in the training data of the model."""
        return f"{self.trained_tasks:,} of {self.tasks:,} tasks are in the training data of this model"

    def _sampling(self) -> str:
        """The settings of sampling in which the earlier run differs, which the difference is of, too."""
        shown = (
            (key, *("not set" if value is None else value for value in values))
            for key, values in (self.against or {})["sampling"].items()
        )
        return ", ".join(f"{key} {was} → {now}" for key, was, now in shown)

    def markdown(self) -> str:
        """The tables of results."""
        rows: list[tuple[object, ...]] = [
            (f"pass@{row['k']}", *_cells(row)[:2], _tasks_of(row).removesuffix(" tasks")) for row in self.pass_at_k
        ]
        trained = [f"{self.trained_on}.", ""] if self.trained_tasks else []
        lines = [f"# {self.model or 'Model'}", "", *trained, markdown_table(("", "value", "95 %", "tasks"), rows)]
        for name, values in self.by_field.items():
            rows = [(row["value"], *_cells(row)) for row in values]
            lines += [f"## By {name}", "", markdown_table((name, "pass@1", "95 %", "tasks"), rows)]
        if self.against is not None:
            lines += [f"## Against {self.against['path']}", "", f"{compared_headline(self.against)}.", ""]
            lines += [f"It was sampled otherwise: {self._sampling()}.", ""] if self.against["sampling"] else []
            for way in ("regressed", "improved"):
                rows = [
                    (
                        task["task_id"],
                        *(f"{task[side]:g}" for side in ("before", "after")),
                        " ".join(task["prompt"].split()),
                    )
                    for task in self.against[way]
                ]
                lines += [markdown_table((way, "before", "after", "prompt"), rows)] if rows else []
        return "\n".join(lines).rstrip() + "\n"


def evaluate(
    model: str | Path | None = None,
    tasks: Tasks | None = None,
    *,
    reward: RewardFunctions | None = None,
    env: Any = None,
    user: Any = None,
    agent: Any = None,
    config: EvalConfig | None = None,
    parts: Parts | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    **settings: Any,
) -> EvalReport | CollectPlan:
    """Evaluate ``model`` on ``tasks``: pass@k with 95 % intervals over tasks, by field, and against an earlier run.

    Collects as ``gymdata.collect`` does, greedily and one rollout per task by default, into ``output``; an existing run is
    resumed. ``tasks``, ``reward``, ``env``, ``user`` and ``agent`` are those of ``gymdata.collect``; settings are those of
    ``EvalConfig``. pass@k is the unbiased estimate of Chen et al. (2021), 1 − C(n−c, k) / C(n, k), averaged over tasks.
    Writes ``results.json`` and ``results.md`` into the run folder once no rollout is missing.
    Raises UsageError where nothing can score the rollouts, and what ``gymdata.collect`` raises.
    """
    named = {"model": None if model is None else str(model)}
    named["tasks"] = str(tasks) if isinstance(tasks, (str, Path)) else None if tasks is None else IN_MEMORY
    config = EvalConfig.called_with(evaluate, config, {**settings, **named})
    returns_reward = callable(agent) or ".py:" in str(agent or config.agent)
    if reward is None and not config.reward and env is None and not config.env and not returns_reward:
        raise UsageError(
            "eval: nothing scores the rollouts",
            hint=f"give {option('reward')}, such as numeric, exact or path.py:function",
        )
    config.refuse_equal_rollouts()
    against = None if config.against is None else Path(path_of(config.against, "eval"))
    if against is not None and not Rewards.of(read_table(against, ROLLOUTS, ["task_id", "reward"])).rollouts:
        raise DataError.empty(against, "rollouts")
    collecting = config.collecting()
    if config.output is None:
        named_by_time = default_output(collecting)
        collecting = collecting.model_copy(update={"output": named_by_time.with_name(f"eval-{named_by_time.name}")})
    summary = collect(
        tasks if named["tasks"] == IN_MEMORY else None,
        reward=reward,
        env=env,
        user=user,
        agent=agent,
        config=collecting,
        parts=parts,
        dry_run=dry_run,
        progress=progress,
        command=command,
    )
    if isinstance(summary, CollectPlan):
        return summary
    run = Path(summary.path)
    table = read_table(run, ROLLOUTS, list(_COLUMNS))
    rewards = Rewards.of(table)
    if not len(rewards.value) and summary.exit_code == 0:
        raise DataError(
            f"{run}: no rollout has a reward, so there is nothing to report",
            hint=f"gymdata score {run} --reward …, with a reward that these tasks have a reference for",
        )
    compared: Figures | None = None
    if against is not None and len(rewards.value):
        paired = Paired.of(Side.read(against, None), Side.read(run, None))
        compared, rows = {"path": str(against), "difference": paired.difference()}, task_fields(table)
        before, after = paired.first.by_task, paired.second.by_task
        compared["sampling"] = sampling_that_differs(against, run)
        for way, sign in (("regressed", "down"), ("improved", "up")):
            moved = [task for task, direction in paired.ways.items() if direction == sign]
            compared[way] = [
                {"task_id": t, "before": before[t], "after": after[t], "prompt": prompt_of(rows[t])} for t in moved
            ]
    report = EvalReport(
        path=str(run),
        model=config.model or (config.endpoint[0] if config.endpoint else None),
        tasks=summary.tasks,
        rollouts=summary.rollouts,
        missing=summary.pending + summary.exhausted,
        threshold=config.threshold,
        pass_at_k=pass_at_k(rewards, config.threshold),
        reward={**rewards.summary(), "binary": rewards.binary},
        truncated=summary.truncated,
        by_field=_by_field(rewards, task_fields(table), config.by, config.threshold),
        against=compared,
        trained_tasks=trained_tasks(config.model, run) if config.model else 0,
        interrupted=summary.interrupted,
        exit_code=summary.exit_code,
    )
    files = [run / RESULTS_JSON, run / RESULTS_MD]
    if summary.pending or summary.interrupted:
        for file in files:  # those of an earlier call: rollouts are missing now
            file.unlink(missing_ok=True)
        return report
    figures = {key: value for key, value in report.to_dict().items() if key not in ("files", "interrupted")}
    texts = [json.dumps({**figures, "at": datetime.now().astimezone().isoformat()}, indent=2) + "\n", report.markdown()]
    for file, text in zip(files, texts, strict=True):
        write_text(file, text)
    report.files.extend(files)
    return report


def _by_field(
    rewards: Rewards, tasks: Mapping[str, TaskRow], names: Sequence[str], threshold: float
) -> dict[str, list[Figures]]:
    """Field → value → pass@1 and the mean reward of its tasks."""
    fields = {name for row in tasks.values() for name in row}
    for name in names:
        if name not in fields:
            raise UsageError.unknown_key(name, fields, option("by"))
    labels = rewards.names.to_pylist()
    by_field: dict[str, list[Figures]] = {}
    for name in names or fields_to_split_by(list(tasks.values())):
        codes: dict[str, list[int]] = {}
        for code, task in enumerate(labels):
            codes.setdefault(json.dumps(tasks[task].get(name)), []).append(code)
        by_field[name] = []
        for value in sorted(codes):
            of_value = np.isin(rewards.task, codes[value])
            part = Rewards(rewards.task[of_value], rewards.value[of_value], int(of_value.sum()), rewards.names)
            if part.rollouts:
                first = pass_at_k(part, threshold)[0]
                shown = {"pass_at_1": first["value"], "ci95": first["ci95"], "tasks": first["tasks"]}
                by_field[name].append({"value": json.loads(value), **shown, "mean": part.summary()["mean"]})
    return by_field


def _cells(row: Figures) -> tuple[str, str, str]:
    """The value, its interval and the tasks of a row of ``pass_at_k``."""
    rate, bounds = row["pass_at_1"] if "pass_at_1" in row else row["value"], row["ci95"]
    interval = f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}" if bounds else "–"
    return (f"{100 * rate:.1f} %", interval, f"{row['tasks']:,}")


def _tasks_of(row: Figures) -> str:
    """How many tasks a pass@k is over, of how many where others have fewer than k scored rollouts."""
    of_all = f" of {row['tasks'] + row['too_few']:,}" if row["too_few"] else ""
    return f"{row['tasks']:,}{of_all} tasks"
