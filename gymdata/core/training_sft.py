"""Rollouts as a supervised trainer gets them: which are chosen, and their exact ids with masks on every generation.

What always holds: a rollout without a known reward is never chosen for its reward; a rollout that breaks or branches
gives several sequences, each sampled token trained once; the choice does not depend on the order of the rows.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.core.stitched import stitch
from gymdata.core.training_experiences import TrainingExperiences, training_experiences
from gymdata.errors import RefusedError

#: Columns of rollouts that supervised training reads.
SFT_COLUMNS = ("rollout_id", "group_id", "rollout_index", "reward", "policy_hash", "turns")
Select = Literal["best", "above", "all"]
_BATCH_ROWS = 4_096


def chosen_rollouts(table: pa.Table, select: Select, min_reward: float | None) -> np.ndarray:
    """Row numbers, rising. ``best``: the highest reward of each group (ties: the first rollout_index); ``above``: all;
    ``all``: also those without a reward. ``min_reward`` is a floor in every case where it is given."""
    reward = pc.fill_null(table["reward"], np.nan).to_numpy()
    good = np.isfinite(reward) if select != "all" or min_reward is not None else np.ones(len(reward), np.bool_)
    if min_reward is not None:
        good &= np.where(np.isfinite(reward), reward, -np.inf) >= min_reward
    rows = np.flatnonzero(good)
    if select != "best":
        return rows
    groups = table["group_id"].combine_chunks().dictionary_encode().indices.to_numpy()[rows]
    order = np.lexsort((table["rollout_index"].to_numpy()[rows], -reward[rows], groups))
    first = np.ones(len(order), np.bool_)
    first[1:] = groups[order][1:] != groups[order][:-1]
    return np.sort(rows[order[first]])


def training_rollouts(
    table: pa.Table,
    select: Select = "best",
    min_reward: float | None = None,
    max_length: int | None = None,
    where: str = "rollouts",
) -> TrainingExperiences:
    """Sequences of the chosen rollouts of a table (``SFT_COLUMNS``), weight 1, scored at temperature 1.

    Raises RefusedError when no rollout is chosen (R501) or the tokens must not be trained on (T205, L301, L302).
    """
    rows = chosen_rollouts(table, select, min_reward)
    if not len(rows):
        floor = "" if min_reward is None else f" with a reward of at least {min_reward:g}"
        raise RefusedError(
            f"{where}: none of {table.num_rows:,} rollouts has a reward to be chosen by{floor}",
            code="R501",
            hint="score them with `gymdata score RUN --reward …`, lower --min-reward, or --select all",
        )
    picked = table.take(pa.array(rows))
    parts = [_sequences(batch) for batch in picked.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)]
    made = pa.concat_tables(parts)
    if not made.num_rows:
        raise RefusedError(f"{where}: the chosen rollouts have no token ids", code="T205")
    return training_experiences(made, max_length, where)


def _sequences(batch: pa.RecordBatch) -> pa.Table:
    tables = []
    for part in stitch(batch.column("turns"), batch.column("rollout_id")):
        of, n = pa.array(part.rollout), len(part.rollout)
        bounds = pa.array(part.starts.astype(np.int32))
        lists = {"input_ids": part.ids, "loss_mask": part.mask.astype(np.int8), "logprobs": part.spread(part.log_probs),
                 "advantages": np.zeros(len(part.ids), np.float32)}  # fmt: skip
        tables.append(
            pa.table(
                {
                    "rollout_id": batch.column("rollout_id").take(of),
                    "sequence_index": pa.array(part.index),
                    **{name: pa.ListArray.from_arrays(bounds, pa.array(values)) for name, values in lists.items()},
                    "weight": pa.array(np.ones(n)),
                    "temperature": pa.array(np.ones(n, np.float32)),
                    "policy_hash": batch.column("policy_hash").take(of),
                }
            )
        )
    return pa.concat_tables(tables)
