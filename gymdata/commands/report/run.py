"""``gymdata.report``: the figures of one path, or of several on the same tasks, and the page of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymdata.commands.report.compare import comparison, example
from gymdata.commands.report.rollouts import figures as rollout_figures
from gymdata.commands.report.sampling import sampled_as
from gymdata.commands.report.settings import ReportConfig
from gymdata.commands.report.several import compared, expanded, names_of, settings_that_differ
from gymdata.commands.report.several import headline as several_headline
from gymdata.commands.report.stages import figures as stage_figures
from gymdata.commands.report.stages import stage_table
from gymdata.errors import DataError, UsageError, counted, shown
from gymdata.public import Figures, Report, Row, path_of
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.logprobs import ratio_of_version
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.scores.chosen import default_score
from gymdata.store import find_run_json, read_run_json, resolve
from gymdata.store.fetch import is_copy
from gymdata.store.lineage import parent_paths
from gymdata.store.paths import RunFacts, local_output
from gymdata.store.reading import warn
from gymdata.store.run_json import moment, replacing
from gymdata.workers.tuning import give_back

__all__ = ["ReportPage", "report"]

#: Largest pass@k in the headline; larger ones are in the table.
_LARGEST_K = 64
#: Figures of a path without rollouts.
_NO_ROLLOUTS: Figures = {"score": None, "rewards": None, "pass_at_k": [], "validation": None}


@dataclass(frozen=True, repr=False)
class ReportPage(Report):
    """The figures of a report: ``headline``, ``rewards``, ``pass_at_k``, ``validation``, ``training`` and more. Of two paths
    also ``difference`` and ``flips``, of more ``compared`` (each against the first); of several ``settings`` (those that
    differ), and under ``runs`` the figures of each. ``path``: the page, where one was written."""

    figures: Figures
    path: Path | None = None

    @property
    def headline(self) -> str:
        """The result in a sentence."""
        return str(self.figures["headline"])

    def to_dict(self) -> Figures:
        """The figures; ``path`` of the page."""
        return {**self.figures, "path": None if self.path is None else str(self.path)}

    def rows(self) -> list[Row]:
        """The summary below the headline: names and values."""
        trainings = [row for row in self.figures.get("training") or [] if isinstance(row, dict)]
        versions = [item for row in trainings for item in row["ratio_by_version"].items()]
        rows: list[Row] = [(f"policy version {version}", ratio_of_version(facts)) for version, facts in versions]
        return rows + ([("written to", self.path)] if self.path is not None else [])


def report(
    path: str | Path,
    *others: str | Path,
    config: ReportConfig | None = None,
    write: bool = True,
    **settings: Any,
) -> ReportPage:
    """Report on the run, stage or model folder at ``path``; with ``others``, compare them on the same tasks, each with the
    first: rewards, or the curves of trainings, and the settings that differ.

    Settings are those of ``ReportConfig``. Writes ``output``, by default report.html in the folder that is reported on
    (of several: that of the last), unless ``write`` is False. Raises DataError where there is nothing to report on, or
    files were changed.
    """
    config = ReportConfig.called_with(report, config, settings)
    named = [Path(path_of(run_path, "report")) for run_path in (path, *others)]
    paths = expanded(named)
    score, note = default_score(paths, config.reward)
    if note:
        warn(note)
    runs = [_figures(run_path, config, score) for run_path in paths]
    figures = dict(runs[0])
    if len(runs) > 2 or (len(runs) == 2 and all(run["training"] and not run["rewards"] for run in runs)):
        # Every run against the first: by rewards where all have them, else by the curves of their trainings.
        rewarded = all(run["rewards"] for run in runs)
        if not rewarded and not all(run["training"] for run in runs):
            lacking = next(p for p, run in zip(paths, runs, strict=True) if not run["rewards"])
            raise DataError.empty(lacking, "rollouts; without them only trainings are compared")
        rows, by_setting = compared(paths, score) if rewarded else ([], [])
        title = several_headline(
            rows, by_setting, runs, binary=rewarded and all(run["rewards"]["binary"] for run in runs)
        )
        figures = {
            "headline": title,
            "compared": rows,
            "by_setting": by_setting,
            "settings": settings_that_differ(paths),
        }
        figures |= {"names": names_of(paths), "runs": runs, **_lists(runs)}
    elif len(runs) == 2:
        if not all(run["rewards"] for run in runs):
            raise DataError.empty(next(p for p, run in zip(paths, runs, strict=True) if not run["rewards"]), "rollouts")
        of_two = comparison(paths[0], paths[1], score)
        figures = {"headline": compared_headline(of_two) + _by(score), **of_two, "runs": runs}
        figures |= {"settings": settings_that_differ(paths), **_lists(runs)}
    else:
        figures = {"headline": _headline(figures), **figures}
    for run_path, run in zip(paths, runs, strict=True):
        if "trained_on" in run:
            figures["headline"] += f"; {f'{shown(str(run_path))}: ' if len(runs) > 1 else ''}{run['trained_on']}"
    figures["paths"] = [shown(str(run_path)) for run_path in paths]
    target = _target([*paths, *(path for path in named[-1:] if path.is_dir())], config) if write else None
    from gymdata.commands.report.page import page

    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.write_text(page(figures), encoding="utf-8")
    return ReportPage(figures, target)


def _lists(runs: Sequence[Figures]) -> Figures:
    """What ``--json`` has once for each run."""
    return {key: [run[key] for run in runs] for key in ("rewards", "pass_at_k", "validation", "training")}


def _target(paths: Sequence[Path], config: ReportConfig) -> Path:
    if config.output is not None:
        target = local_output(config.output)
        if target.is_dir() or not target.suffix:
            target /= "report.html"
        if target.suffix not in (".html", ".htm"):
            raise UsageError.bad_value("-o", str(config.output), "a folder, or a name ending in .html")
        from gymdata.commands.report.page import is_page

        if target.is_file() and not is_page(target):
            raise UsageError(f"-o {target}: exists and is no report", hint="give another name, or remove it")
        return target
    folder = paths[-1] if paths[-1].is_dir() and not is_copy(paths[-1]) else Path.cwd()
    return folder / "report.html"


def _by(score: str | None) -> str:
    """The end of a headline: the score where it is not the total reward."""
    return "" if score in (None, TOTAL) else f", score {score}"


def _figures(path: Path, config: ReportConfig, score: str | None) -> Figures:
    run_json = find_run_json(path)
    facts = read_run_json(run_json) if run_json is not None else {}
    stages = stage_figures(path)
    rollouts = _NO_ROLLOUTS
    if stage_table(path) is None and resolve(path, ROLLOUTS):
        of_rollouts = rollout_figures(path, config.threshold, score, config.sample, config.limit)
        give_back()
        from gymdata.commands.show.run import show
        from gymdata.commands.validate.run import validate

        checked = validate(path)
        counted_names = ("rollouts", "trainable", "errors", "warnings", "infos", "by_code")
        validation = {name: getattr(checked, name) for name in counted_names}
        validation["behavior"] = {v.code: v.detail for v in checked.violations if v.code.startswith("B")}
        rollouts = {**of_rollouts, "validation": validation, "score": score or TOTAL}
        # Each by name: its rollout's id and score.
        of_examples = of_rollouts["examples"]
        rollouts["examples"] = {
            name: example(show(path, rollout_id).rollouts[0], score, value)
            for name, (rollout_id, value) in of_examples.items()
        }
        if config.sample is not None:
            n, total = len(of_examples), of_rollouts["rewards"]["rollouts"]
            rollouts["sample"] = sampled_as(config.sample, n, total, score)
    elif not any(stages[key] for key in ("pairs", "scores", "experiences", "judge", "training", "epochs")):
        raise DataError.empty(path, "rollouts, pairs, scores, experiences, judgements or a training")
    # The overall result of a finetuning run, once it has ended.
    file = path / "result.json"
    end = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    end = end if isinstance(end, dict) else None
    file = path / "results.json"
    measured = json.loads(file.read_text(encoding="utf-8")) if rollouts is not _NO_ROLLOUTS and file.is_file() else {}
    if trained := measured.get("trained_tasks"):
        rollouts["trained_on"] = f"{trained:,} of {measured['tasks']:,} tasks are in the training data of this model"
    return {"path": str(path), "what": _what(facts), "threshold": config.threshold, **rollouts, **stages, "end": end}


def _what(facts: RunFacts) -> Figures:
    """Facts of the run: model, data, command, versions and time."""
    attempts = facts.get("attempts") or []
    command = facts.get("command") or ""
    config, engine = facts.get("config") or {}, facts.get("engine") or {}
    config = config if isinstance(config, Mapping) else {}
    times = [(moment(a.get("started_at")), moment(a.get("ended_at"))) for a in attempts]
    spent = [(end - start).total_seconds() for start, end in times if start and end]
    model = facts.get("policy") or config.get("model") or (facts.get("model") or {}).get("path")
    versions = facts.get("versions") if isinstance(facts.get("versions"), Mapping) else {}
    summary = {
        "stage": facts.get("stage"),
        "model": model,
        "data": config.get("tasks") or ", ".join(parent_paths(facts)),
        "command": shlex.join(command),
        "rewards": config.get("reward"),
        "environment": ", ".join(env) if isinstance(env := config.get("env"), list) else env,
        "gymdata": facts.get("gymdata"),
        "engine": " ".join(str(engine[k]) for k in ("engine", "engine_version") if engine.get(k)) or None,
        "versions": ", ".join(f"{k} {v}" for k, v in (versions or {}).items()) or None,
        "started": attempts[0].get("started_at") if attempts else None,
        "seconds": round(sum(spent), 1) if spent else None,
        "run_id": facts.get("run_id"),
    }
    return {key: value for key, value in summary.items() if value not in (None, "", [], {})}


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def span(ends: Sequence[float] | None, scale: float = 1.0, digits: int = 1) -> str:
    """An interval in brackets; empty without one."""
    return "" if not ends else " (" + "–".join(f"{scale * end:.{digits}f}" for end in ends) + ")"


def compared_headline(compared: Figures) -> str:
    """``48.3 % → 71.7 %, +23.3 points (10.0–36.7), 600 tasks``; means of rewards where these are not 0 and 1."""
    d = compared["difference"]
    sides = f"reward {d['before']:.3f} → {d['after']:.3f}"
    moved = f"{d['rate']:+.3f}{_signed(d['ci95'], 1.0, 3)}, {counted(d['n'], 'task')}"
    if d["binary"]:
        sides = f"{percent(d['before'])} → {percent(d['after'])}"
        moved = f"{100 * d['rate']:+.1f} points{_signed(d['ci95'], 100.0, 1)}, {counted(d['n'], 'task')}"
    # The bootstrap of equal tasks has no variance, so there is no interval.
    equal = d["rate"] == 0 and d["ci95"] is None and d["n"] > 1
    others = f"; left out: {d['other_content']}" if d.get("other_content") else ""
    return f"{sides}, " + (f"all {d['n']:,} tasks equal" if equal else moved) + others


def _signed(ends: Sequence[float] | None, scale: float, digits: int) -> str:
    """With a dash, a negative bound would be misread."""
    if ends and min(ends) < 0:
        return " ({} to {})".format(*(f"{scale * end:+.{digits}f}" for end in ends))
    return span(ends, scale, digits)


def _headline(figures: Figures) -> str:
    measured = (figures["end"] or {}).get("validation") or {}
    first, last, d = (measured.get(key) or {} for key in ("first", "last", "difference"))
    if d.get("rate") is not None:
        sides = f"{percent(first['rate'])} → {percent(last['rate'])}, {100 * d['rate']:+.1f} points"
        return f"{sides}{_signed(d['ci95'], 100.0, 1)}, {counted(d['n'], 'held-out task')}"
    rewards = figures["rewards"]
    if rewards is not None:
        # The others are of no task that a figure is about.
        scored = "scored " if rewards["n"] < rewards["rollouts"] else ""
        size = f"{counted(rewards['n'], scored + 'rollout')} of {counted(rewards['tasks'], 'task')}"
        masked = "".join(f"; {why} {n:,}" for why, n in figures["masked"].items())
        if rewards["mean"] is None:
            return f"{counted(rewards['rollouts'], 'rollout')}, none scored{masked}"
        if rewards["binary"]:
            text = f"{percent(rewards['mean'])} correct{span(rewards['ci95'], 100.0)}"
        else:
            text = f"mean reward {rewards['mean']:.3f}{_signed(rewards['ci95'], 1.0, 3)}"
        complete = [row for row in figures["pass_at_k"][1:] if not row["too_few"] and row["k"] <= _LARGEST_K]
        best = complete[-1] if complete else None
        more = f", pass@{best['k']} {percent(best['value'])}" if best else ""
        return f"{text}{more}, {size}{_by(figures['score'])}{masked}"
    if figures["epochs"]:
        rewards = [row["reward_mean"] for row in figures["epochs"] if row.get("reward_mean") is not None]
        moved = f", training reward {rewards[0]:.3f} → {rewards[-1]:.3f}" if rewards else ""
        return f"{counted(len(figures['epochs']), 'epoch')}{moved}"
    if figures["training"]:
        row = figures["training"][0]
        loss = [means.get("loss") for means in (row["first"], row["last"])]
        moved = f", loss {loss[0]:.4g} → {loss[1]:.4g}" if None not in loss else ""
        return f"{row['stage']}: {row['steps'] or 0:,} steps, {row['trained_tokens'] or 0:,} tokens{moved}"
    if figures["pairs"]:
        n, tasks = (sum(row[key] for row in figures["pairs"]) for key in ("pairs", "tasks"))
        return f"{counted(n, 'pair')} of {counted(tasks, 'task')}"
    if figures["experiences"]:
        texts = []
        for row in figures["experiences"]:
            size, rate = (
                f"{counted(row['sequences'], 'sequence')} of {counted(row['groups'], 'group')}",
                row["positive"]["rate"],
            )
            signs = f", advantage positive in {percent(rate)} of sequences" if rate is not None else ""
            texts.append(f"{size}, {counted(row['trained_tokens'], 'token')} to train on{signs}")
        return "; ".join(texts)
    if figures["scores"] and not figures["judge"]:
        return "; ".join(
            f"{row['name']}: {counted(row['scored'], 'score')}, "
            + (f"mean {row['mean']:.3f}" if row["mean"] is not None else "no value")
            for row in figures["scores"]
        )
    counts = figures["judge"][0]["comparisons"] or {}
    first = figures["judge"][0]["bias"].get("position_bias") or {}
    rate = first.get("rate")
    won = "" if rate is None else f", the first position won {percent(rate)}{span(first.get('ci95'), 100.0)}"
    return counted(sum(counts.values()), "comparison") + won
