"""The page of a report: one HTML file that opens anywhere, in light and dark.

Invariants: what files hold is data, so all of it is escaped; the page loads nothing and runs nothing, and its content
security policy says so; a number on it is a number of the figures.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from gymdata.errors import counted, printable
from gymdata.report.charts import Chart, of_histogram, of_rates, of_series, svg
from gymdata.report.stages import EPOCH_CURVES, curve
from gymdata.rollouts.violations import CODES

_GENERATOR = '<meta name="generator" content="gymdata">'
_EPOCH = {
    "epoch": "epoch", "policy": "policy_version", "reward": "reward_mean", "rollouts": "rollouts", "groups": "groups",
    "trained on": "groups_selected", "tokens trained": "trained_tokens", "loss": "training_loss",
    "KL to start": "kl_to_start", "held-out": "validation.rate",
}  # fmt: skip


def is_page(file: Path) -> bool:
    """Whether a file is a report."""
    with file.open("rb") as stream:
        return _GENERATOR.encode() in stream.read(1_000)


def page(figures: Mapping[str, Any]) -> str:
    """The whole page of the figures of one run, or of two."""
    folder = files("gymdata.report")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    filters = (
        text, counted, left_out, columns, _gist, _apart, _reward_rows, _ending_rows, _finding_rows, _stage_rows,
        _lineage_rows, _epoch_row, _stage_title, _reward_charts, _size_charts, _time_charts, _stage_charts,
    )  # fmt: skip
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # What a terminal or browser would act on is an escape; Markup comes from the template itself.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {one.__name__.lstrip("_"): one for one in filters}
    as_json = partial(json.dumps, ensure_ascii=False, indent=1)
    environment.filters |= {"svg": lambda chart: Markup(svg(chart)), "as_json": as_json}
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        {"runs": [figures], **figures},
        codes=CODES,
        epoch_columns=list(_EPOCH),
        generator=Markup(_GENERATOR),
        policy=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        style=Markup(style),
    )


def columns(row: Mapping[str, Any], *names: str) -> list[Any]:
    """These values of a row, for a table."""
    return [row[name] for name in names]


def charts_of(figures: Mapping[str, Any]) -> list[Chart]:
    """Every chart of the page, in its order; of two runs with the run's number in their names."""
    runs: Sequence[Mapping[str, Any]] = figures.get("runs") or [figures]
    found = []
    for number, run in enumerate(runs, 1):
        charts = (*_reward_charts(run), *_size_charts(run), *_time_charts(run), *_stage_charts(run))
        for chart in charts:
            prefix = f"{number}-" if len(runs) > 1 else ""
            found.append(Chart(prefix + chart.name, *(getattr(chart, f) for f in Chart.__slots__[1:])))
    return found


def _reward_charts(run: Mapping[str, Any]) -> list[Chart]:
    rewards = run["rewards"]
    if rewards is None or not rewards["n"]:
        return []
    k = {f"pass@{one['k']}": one for one in run["pass_at_k"]}
    several = rewards["groups"]["of_several"]
    return _known(
        of_histogram("rewards", "Rewards of rollouts", rewards["histogram"], "reward"),
        of_histogram("groups", "Mean reward of groups", rewards["groups"]["means"], "mean reward") if several else None,
        of_rates("pass-at-k", "pass@k", k) if len(k) > 1 else None,
        of_rates("parts", "Reward parts", rewards["parts"]) if len(rewards["parts"]) > 1 else None,
    )


def _size_charts(run: Mapping[str, Any]) -> list[Chart]:
    if run["rewards"] is None:
        return []
    lengths, logprobs = run["lengths"], run["logprobs"]
    return _known(
        of_histogram(
            "tokens", "Sampled tokens per rollout", lengths.get("generated", {}).get("histogram", []), "tokens"
        ),
        of_histogram("turns", "Turns per rollout", lengths.get("turns", {}).get("histogram", []), "turns"),
        of_histogram("logprobs", "Log-probabilities of sampled tokens", logprobs["histogram"], "log-probability"),
    )


def _time_charts(run: Mapping[str, Any]) -> list[Chart]:
    over = run.get("over_time") or []
    if not over:
        return []
    speed = of_series(
        "speed", "Tokens per second", {"tokens/s": [(p["s"], p["tokens_per_s"]) for p in over]}, "seconds"
    )
    counts = {"rollouts": [(p["s"], p["rollouts"]) for p in over]}
    if any(p["failures"] for p in over):
        counts["failures"] = [(p["s"], p["failures"]) for p in over]
    return _known(speed, of_series("progress", "Rollouts finished", counts, "seconds"))


def _stage_charts(run: Mapping[str, Any]) -> list[Chart]:
    found: list[Chart | None] = []
    for n, one in enumerate(run["pairs"], 1):
        found.append(of_histogram(f"margins-{n}", f"Margins of {one['path']}", one["margin"]["histogram"], "margin"))
    for n, one in enumerate(run["scores"], 1):
        found.append(of_histogram(f"scores-{n}", f"Scores of {one['name']}", one["histogram"], "score"))
    for n, one in enumerate(run["experiences"], 1):
        bars = one["advantage"]["histogram"]
        found.append(of_histogram(f"advantages-{n}", "Advantages of sequences", bars, "mean advantage"))
    for n, one in enumerate(run["judge"], 1):
        rates = {name.replace("_", " "): rate for name, rate in one["bias"].items()}
        found.append(of_rates(f"judge-{n}", f"Bias of {one['judge']}", rates, (0.0, 1.0)))
    for n, one in enumerate(run["training"], 1):
        name = str(one["path"]).rsplit("/", 1)[-1]
        found += [of_series(f"training-{n}-{c.replace('/', '-')}", f"{name}: {c}", {c: points}, "step")
                  for c, points in one["curves"].items()]  # fmt: skip
    if epochs := run["epochs"]:
        rates = {
            "training reward": curve(epochs, "epoch", "reward_mean"),
            "held-out rate": curve(epochs, "epoch", "validation.rate"),
        }
        first = ((run["end"] or {}).get("validation") or {}).get("first") or {}
        if first.get("epoch") == 0 and first.get("rate") is not None:
            rates["held-out rate"] = [[0.0, first["rate"]], *rates["held-out rate"]]
        found.append(of_series("epochs-reward", "Reward and held-out rate", rates, "epoch"))
        found += [
            of_series(f"epochs-{c}", _spoken(c), {c: curve(epochs, "epoch", c)}, "epoch") for c in EPOCH_CURVES[2:]
        ]
    return _known(*found)


def _known(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def _gist(runs: Sequence[Mapping[str, Any]]) -> str:
    """The facts to know besides the headline."""
    sentences = []
    for run in runs:
        name = f"{run['path']}: " if len(runs) > 1 else ""
        if (checked := run["validation"]) is not None:
            faults = counted(checked["errors"], "error") if checked["errors"] else "no errors" if name else "No errors"
            rollouts = counted(checked["rollouts"], "rollout")
            sentences.append(f"{name}{faults}, {checked['trainable']:,} of {rollouts} trainable.")
        if run["rewards"] and run["rewards"]["rollouts"] > run["rewards"]["n"]:
            rewards = run["rewards"]
            sentences.append(f"{name}{rewards['n']:,} of {counted(rewards['rollouts'], 'rollout')} have a reward.")
    return " ".join(sentences)


def _stage_title(run: Mapping[str, Any]) -> str:
    """The title for the kinds of stages that are present: ``Scores and judges``."""
    kinds = {
        "pairs": "pairs",
        "scores": "scores",
        "experiences": "experiences",
        "judge": "judges",
        "training": "training",
    }
    names = [name for kind, name in kinds.items() if run[kind]] or ["training"]
    text = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return text[0].upper() + text[1:]


def text(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) and "rate" in value:
        ends = value.get("ci95")
        rate = "–" if value["rate"] is None else f"{100 * value['rate']:.1f} %"
        count = f", {value['count']:,} of {value['n']:,}" if value.get("n") else ""
        return rate + (f" ({100 * ends[0]:.1f}–{100 * ends[1]:.1f})" if ends and None not in ends else "") + count
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _ends(ends: Sequence[float] | None) -> str:
    return "–" if not ends else f"{ends[0]:.4g} to {ends[1]:.4g}"


def _reward_rows(run: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    rewards = run["rewards"]
    rows = [(run["score"], rewards["mean"], _ends(rewards["ci95"]), rewards["n"])]
    parts = rewards["parts"] if len(rewards["parts"]) > 1 else {}
    rows += [(name, one["mean"], _ends(one["ci95"]), one["n"]) for name, one in parts.items()]
    return rows + [(f"pass@{one['k']}", one["value"], _ends(one["ci95"]), one["tasks"]) for one in run["pass_at_k"]]


def _ending_rows(run: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [("truncated", run["truncated"]), ("rollouts with breaks", run["breaks"])]
    rows += [(f"finish reason {name}", n) for name, n in sorted(run["finish_reasons"].items())]
    rows += [(f"stop reason {name}", n) for name, n in sorted(run["stop_reasons"].items())]
    lengths = run["lengths"]
    rows += [
        (f"{name}, median", f"{one['median']:,.0f} (10–90 %: {one['p10']:,.0f}–{one['p90']:,.0f})")
        for name, one in lengths.items()
    ]
    rows.append(("mean log-probability", run["logprobs"]["mean"]))
    rows.append(("entropy per token, estimated", run["logprobs"]["entropy"]))
    if run["tools"]["n"]:
        rows.append(("tool results that are errors", run["tools"]))
        if len(run["tools"]["by_name"]) > 1:
            rows += [(f"  {name}", one) for name, one in run["tools"]["by_name"].items()]
    return rows


def _finding_rows(checked: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (f"{code} {CODES[code].name}", CODES[code].severity, n, checked["behavior"].get(code) or CODES[code].meaning)
        for code, n in checked["by_code"].items()
    ]


def _spoken(name: str) -> str:
    return {"training_loss": "training loss", "kl_to_start": "KL to the first policy"}.get(name, name.replace("_", " "))


def _epoch_row(row: Mapping[str, Any]) -> list[Any]:
    def at(key: str) -> Any:
        value: Any = row
        for word in key.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        return value

    return [at(key) for key in _EPOCH.values()]


def left_out(row: Mapping[str, Any]) -> str:
    """The reasons why an epoch left groups, rollouts or pairs out, with counts."""
    reasons = [f"{counted(n, 'group')}: {why}" for why, n in (row.get("groups_left_out") or {}).items()]
    reasons += [
        f"{counted(n, 'rollout')}: {why.replace('_', ' ')}" for why, n in (row.get("rollouts_left_out") or {}).items()
    ]
    reasons += [
        f"{counted(n, 'pair candidate')}: {why.replace('_', ' ')}"
        for why, n in (row.get("pairs_dropped") or {}).items()
    ]
    for name, what in (("unscored", "without a score"), ("missing", "missing"),
                       ("too_old_left_out", "of policies that are too old")):  # fmt: skip
        if row.get(name):
            reasons.append(f"{counted(row[name], 'rollout')} {what}")
    if row.get("skipped"):
        reasons.append(f"not trained: {row['skipped']}")
    return "; ".join(reasons) or "nothing"


def _stage_rows(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for one in run["pairs"]:
        made = f"{counted(one['pairs'], 'pair')} of {counted(one['tasks'], 'task')}"
        made += f", mean margin {text(one['margin']['mean'])}"
        sizes = f"{text(one['chosen_tokens'])} tokens chosen, {text(one['rejected_tokens'])} rejected"
        rows.append((one["path"], f"{made}; {sizes}; chosen is longer in {text(one['chosen_longer'])}"))
    for one in run["judge"]:
        counts = ", ".join(f"{n:,} {name}" for name, n in (one["comparisons"] or {}).items())
        rows.append((one["path"], f"judge {one['judge']}: {counts}"))
    for one in run["scores"]:
        failed = f", {one['failed']:,} failed" if one["failed"] else ""
        rows.append((one["path"], f"{one['name']}: {one['scored']:,} scored{failed}, mean {text(one['mean'])}"))
    for one in run["experiences"]:
        sequences, rollouts, groups = (counted(one[f"{what}s"], what) for what in ("sequence", "rollout", "group"))
        made = f"{sequences} of {rollouts} and {groups}"
        sizes = f"{one['trained_tokens']:,} of {counted(one['tokens'], 'token')} to train on"
        signs = f"positive in {text(one['positive'])}"
        rows.append((one["path"], f"{made}; {sizes}; mean advantage {text(one['advantage']['mean'])}, {signs}"))
    for one in run["training"]:
        equal = "" if one["tokens_equal"] is None else f"; trained tokens equal the file's: {text(one['tokens_equal'])}"
        rows.append(
            (
                one["path"],
                f"{one['stage']}, {one['status']}: {text(one['steps'])} steps, {text(one['trained_tokens'])} tokens{equal}",
            )
        )
    return rows


def _lineage_rows(run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = run["lineage"]
    return [(one["stage"] or "–", one["run_id"] or "–", one["command"], ", ".join(one["parents"])) for one in rows]


def _apart(difference: Mapping[str, Any]) -> str:
    """The tasks that are not compared."""
    apart = [f"{difference[f'only_{side}']:,} that only the {side} run has scored" for side in ("first", "second")
             if difference[f"only_{side}"]]  # fmt: skip
    return f" Left out of the tasks: {' and '.join(apart)}." if apart else ""
