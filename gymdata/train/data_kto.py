"""Rollouts as a trainer on unpaired preferences gets them: exact sequences, each called desirable or not by its reward.

Invariants: a rollout without a known reward, or whose reward is the very bar that it is measured against, has no
label and is not trained; they are counted. The labels do not depend on the order of the rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, RefusedError
from gymdata.stats import unit_of
from gymdata.train.data_experiences import TrainingExperiences, training_experiences
from gymdata.train.data_sft import SFT_COLUMNS, of_model, sampled_sequences

#: Columns of rollouts that labelled training reads.
KTO_COLUMNS = (*SFT_COLUMNS, "task_id")
#: Rewards nearer to the bar than this, relative to the larger of the two, are ties.
_TIE = 1e-9


@dataclass(frozen=True)
class TrainingLabels(TrainingExperiences):
    """Sequences with one ``label`` each: True for a desirable one. ``first``: where their completion begins."""

    label: np.ndarray = None  # type: ignore[assignment]  # always given; the fields before have defaults

    def take(self, rows: np.ndarray) -> Self:
        return replace(super().take(rows), label=self.label[rows])

    @cached_property
    def first(self) -> np.ndarray:
        """int64 (n,): index in its sequence of each one's first trained token."""
        trained, starts = np.flatnonzero(self.sequences.is_trained), self.sequences.loss_mask.offsets[:-1]
        return np.asarray(trained[np.searchsorted(trained, starts)] - starts)


def labels(table: pa.Table, threshold: float | None) -> tuple[np.ndarray, np.ndarray]:
    """(row numbers, desirable or not) of the rollouts that have a label, rising.

    Desirable: a reward above ``threshold``, or without one above the mean of the task's known rewards; undesirable: below.
    A reward equal to that bar says nothing and has no label.
    """
    reward = pc.fill_null(table["reward"], np.nan).to_numpy().astype(np.float64)
    known = np.isfinite(reward)
    if threshold is not None:
        bar = np.full(len(reward), threshold)
    else:
        codes = table["task_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        tasks = int(codes.max(initial=-1)) + 1
        # Sorted, so that the sums do not depend on the order of the rows.
        order = np.lexsort((reward, codes))
        order = order[known[order]]
        unit = float(unit_of(np.abs(reward[known]).max(initial=0.0)))
        total = np.bincount(codes[order], weights=reward[order] / unit, minlength=tasks)
        count = np.bincount(codes[order], minlength=tasks)
        bar = (total / np.maximum(count, 1))[codes] * unit
    with np.errstate(over="ignore"):  # a difference beyond float64 is still above or below
        apart = np.where(known, reward - bar, 0.0)
    scale = np.maximum(np.abs(np.where(known, reward, 0.0)), np.abs(bar))
    rows = np.flatnonzero(known & (np.abs(apart) > _TIE * scale))
    return rows, apart[rows] > 0


def training_labels(
    table: pa.Table,
    threshold: float | None = None,
    max_length: int | None = None,
    where: str = "rollouts",
    *,
    target_agents: Collection[str] = (),
    target_model: str | None = None,
    keep_duplicates: bool = False,
) -> TrainingLabels:
    """Sequences of the labelled rollouts of a table (``KTO_COLUMNS``); all sequences of a rollout have its label.
    Of sequences with the same ids, mask (after the cut) and label the first is trained, unless ``keep_duplicates``.
    ``target_agents`` and ``target_model`` as for ``gymdata.train.data_sft.training_rollouts``.

    Raises RefusedError when no rollout has a label (R501: no reward at all, R503: no two rewards differ) or the tokens must
    not be trained on (T205, T206, L301 to L303).
    """
    if not table.num_rows:
        raise DataError.empty(where, "rollouts")
    table = of_model(table, target_model, where)
    rows, desirable = labels(table, threshold)
    known = int(pc.sum(pc.is_finite(pc.fill_null(table["reward"], np.nan))).as_py() or 0)
    if not known:
        raise RefusedError(
            f"{where}: none of {table.num_rows:,} rollouts has a reward",
            code="R501",
            hint="score them with `gymdata score RUN --reward …`",
        )
    if not len(rows):
        bar = "their task's mean" if threshold is None else f"the threshold {threshold:g}"
        raise RefusedError(
            f"{where}: all {known:,} rewards equal {bar}: none is desirable or undesirable",
            code="R503",
            hint="--threshold sets the reward above which a rollout is desirable",
        )
    made = sampled_sequences(table.take(pa.array(rows)), where, target_agents)
    data = training_experiences(made, max_length, where)
    label = dict(zip(table["rollout_id"].take(pa.array(rows)).to_pylist(), desirable.tolist(), strict=True))
    mine = np.array([label[rollout] for rollout in data.rollout_ids], np.bool_)
    whole = TrainingLabels(**{**vars(data), "label": mine})
    once = whole if keep_duplicates else whole.take(whole.sequences.first_of_equal(mine))
    counts = {
        "rollouts": table.num_rows,
        "desirable": int(desirable.sum()),
        "undesirable": int((~desirable).sum()),
        "left_out_tie": known - len(rows),
        "left_out_no_reward": table.num_rows - known,
        "left_out_duplicate": len(whole) - len(once),
    }
    return replace(once, chosen=counts)
