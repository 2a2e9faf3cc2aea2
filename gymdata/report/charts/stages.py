"""What was made from rollouts: margins of pairs, scores, advantages, a judge's bias, and trainings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from gymdata.report.charts import Chart, Figures, bars, chart, lines, rates
from gymdata.report.stages import curve

#: Numbers of an epoch of ``finetune`` that are drawn, with their titles.
_EPOCH_CURVES = {"training_loss": "training loss", "kl_to_start": "KL to the first policy"}


@chart("data", section="stages")
def data(run: Figures) -> Iterator[Chart]:
    """Margins of pairs, values of scores, advantages of experiences, and rates of judges."""
    for n, row in enumerate(run["pairs"], 1):
        yield bars(f"margins-{n}", f"Margins of {row['path']}", row["margin"]["histogram"], "margin")
    for n, row in enumerate(run["scores"], 1):
        yield bars(f"scores-{n}", f"Scores of {row['name']}", row["histogram"], "score")
    for n, row in enumerate(run["experiences"], 1):
        yield bars(f"advantages-{n}", "Advantages of sequences", row["advantage"]["histogram"], "mean advantage")
    for n, row in enumerate(run["judge"], 1):
        of_judge = {name.replace("_", " "): rate for name, rate in row["bias"].items()}
        yield rates(f"judge-{n}", f"Bias of {row['judge']}", of_judge, (0.0, 1.0))


@chart("training", section="stages", order=1)
def training(run: Figures) -> Iterator[Chart]:
    """Each curve of each training."""
    for n, row in enumerate(run["training"], 1):
        for name, points in row["curves"].items():
            title = f"{PurePath(row['path']).name}: {name}"
            yield lines(f"training-{n}-{name.replace('/', '-')}", title, {name: points}, "step")


@chart("epochs", section="stages", order=2)
def epochs(run: Figures) -> Iterator[Chart]:
    """Reward, held-out rate, loss and KL over the epochs of finetuning."""
    rows = run["epochs"]
    held_out = curve(rows, "epoch", "validation.rate")
    first = ((run["end"] or {}).get("validation") or {}).get("first") or {}
    if rows and first.get("epoch") == 0 and first.get("rate") is not None:
        held_out = [[0.0, first["rate"]], *held_out]
    rewards = {"training reward": curve(rows, "epoch", "reward_mean"), "held-out rate": held_out}
    yield lines("epochs-reward", "Reward and held-out rate", rewards, "epoch")
    for name, title in _EPOCH_CURVES.items():
        yield lines(f"epochs-{name}", title, {name: curve(rows, "epoch", name)}, "epoch")
