"""Rollouts as a supervised trainer gets them: which are chosen, and their exact ids with masks on every generation.

Invariants: a rollout without a known reward is never chosen for its reward; a rollout that breaks or branches
gives several sequences, each sampled token trained once; the choice does not depend on the order of the rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.sequences import require_agents, stitch
from gymdata.train.data_experiences import TrainingExperiences, training_experiences

#: Columns of rollouts that supervised training reads.
SFT_COLUMNS = ("rollout_id", "group_id", "rollout_index", "reward", "policy", "policy_hash", "turns")
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
    *,
    target_agents: Collection[str] = (),
    target_model: str | None = None,
    keep_duplicates: bool = False,
) -> TrainingExperiences:
    """Sequences of the chosen rollouts of a table (``SFT_COLUMNS``), weight 1, scored at temperature 1.

    Of sequences with the same ids and mask (after the cut) the first is trained, unless ``keep_duplicates``;
    ``target_agents``: train their turns only; ``target_model``: choose among the rollouts of the policy of that name only.
    Raises RefusedError when no rollout is chosen (R501) or the tokens must not be trained on (T205, T206, L301 to L303).
    """
    if not table.num_rows:
        raise DataError.empty(where, "rollouts")
    total, table = table.num_rows, of_model(table, target_model, where)
    rows = chosen_rollouts(table, select, min_reward)
    if not len(rows):
        floor = "" if min_reward is None else f" with a reward of at least {min_reward:g}"
        raise RefusedError(
            f"{where}: none of {table.num_rows:,} rollouts has a reward to be chosen by{floor}",
            code="R501",
            hint="score them with `gymdata score RUN --reward …`, lower --min-reward, or --select all",
        )
    data = training_experiences(sampled_sequences(table.take(pa.array(rows)), where, target_agents), max_length, where)
    once = data if keep_duplicates else data.take(data.sequences.first_of_equal())
    chosen = {
        "rollouts": total,
        "rollouts_chosen": len(set(data.rollout_ids)),
        "left_out_duplicate": len(data) - len(once),
    }
    return replace(once, chosen=chosen)


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Sequences put together into rows of at most ``capacity`` tokens: the sequence numbers of each row.

    Best fit, longest first; the same lengths always give the same rows. A sequence longer than ``capacity`` has a row of
    its own.
    """
    free: list[tuple[int, int]] = []  # (room left, row), rising
    rows: list[list[int]] = []
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sequence])
        at = bisect_left(free, (length, -1))
        if at < len(free):
            room, row = free.pop(at)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(sequence)
        insort(free, (room - length, row))
    return [np.array(row, np.int64) for row in rows]


def sampled_sequences(rollouts: pa.Table, where: str, agents: Collection[str] = ()) -> pa.Table:
    """The sequences of rollouts as ``training_experiences`` takes them: advantage 0, weight 1, temperature 1.

    ``agents``: only the turns of these are trained, when any are given. Raises RefusedError when there are no sequences
    (T205), no turns of these agents, or log-probs or ids that are unusable (T206, L301 to L303).
    """
    require_agents(rollouts["turns"].chunks, agents, where)
    batches = rollouts.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)
    parts = [_sequences(batch, agents, where) for batch in batches]
    made = pa.concat_tables(parts)
    if not made.num_rows:
        raise RefusedError(f"{where}: the chosen rollouts have no token ids", code="T205")
    return made


def of_model(rollouts: pa.Table, model: str | None, where: str) -> pa.Table:
    """The rollouts that the policy of that name sampled; all when ``model`` is None. Raises RefusedError for none."""
    if model is None:
        return rollouts
    mine = rollouts.filter(pc.equal(rollouts["policy"], model))
    if not mine.num_rows:
        there = ", ".join(sorted(rollouts["policy"].unique().to_pylist()))
        raise RefusedError(f"{where}: no rollout is of model {model}", hint=f"models there: {there}")
    return mine


def _sequences(batch: pa.RecordBatch, agents: Collection[str], where: str) -> pa.Table:
    found = stitch(batch.column("turns"), batch.column("rollout_id"), where=where)
    if agents:
        found = found.restricted(found.sampled.of_agents(agents))
    of, n = pa.array(found.rollout), len(found)
    advantages = found.token_ids.like(np.zeros(len(found.token_ids.values), np.float32))
    lists = {"input_ids": found.token_ids, "loss_mask": found.loss_mask, "logprobs": found.logprobs,
             "advantages": advantages}  # fmt: skip
    return pa.table(
        {
            "rollout_id": batch.column("rollout_id").take(of),
            "sequence_index": pa.array(found.index),
            **{name: ragged.to_arrow() for name, ragged in lists.items()},
            "weight": pa.array(np.ones(n)),
            "temperature": pa.array(np.ones(n, np.float32)),
            "policy_hash": batch.column("policy_hash").take(of),
        }
    )
