"""Rollouts as trainers get them: which are trained or labelled, and their sequences.

Which rollouts are chosen or labelled does not depend on the order of the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.train.data import TrainingData
from gymdata.commands.train.pair_data import sequences_of
from gymdata.errors import DataError, RefusedError, counted
from gymdata.rollouts.sequences import Abandoned, head_columns, stitch
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.scores.chosen import labels, unscored_hint
from gymdata.stats import known_rewards

#: Columns of rollouts that supervised training reads.
SFT_COLUMNS: tuple[str, ...] = (
    "rollout_id",
    "group_id",
    "rollout_index",
    "reward",
    "policy",
    "policy_hash",
    "temperature",
    "extra",
    "turns",
)
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


def rollouts_to_train(
    table: pa.Table, select: Select, min_reward: float | None, where: str, model: str | None
) -> tuple[np.ndarray, int]:
    """Row numbers, rising, of the rollouts that are trained by likelihood, among those of the policy ``model``, and in how
    many groups ``best`` chose among equal rewards; the table needs no turns, and those that are ``masked`` in it are left
    out. Raises DataError for an empty table, and
    RefusedError when no rollout is chosen (R501)."""
    if not table.num_rows:
        raise DataError.empty(where, "rollouts")
    rows = of_model(table, model, where)
    if "masked" in table.column_names:
        rows = rows[~table["masked"].to_numpy()[rows]]
    chosen = chosen_rollouts(table.take(pa.array(rows)), select, min_reward)
    if not len(chosen):
        unset = "" if min_reward is None else " --set min_reward=null"
        fault, hint = "has a reward to be chosen by", f"{unscored_hint([where])}; or train all: --select all{unset}"
        rewards = known_rewards(table["reward"])[rows]
        if unset and np.isfinite(rewards).any():
            fault = f"has a reward of at least min_reward {min_reward:g}; the highest is {np.nanmax(rewards):g}"
            hint = f"lower --min-reward, or train without it:{unset}"
        raise RefusedError(f"{where}: none of {counted(len(rows), 'rollout')} {fault}", code="R501", hint=hint)
    groups = (
        table.take(pa.array(rows)).group_by("group_id").aggregate([("reward", what) for what in ("min_max", "count")])
    )
    equal = pc.equal(*(pc.struct_field(groups["reward_min_max"], end) for end in ("min", "max")))
    tied = pc.sum(pc.and_(equal, pc.greater(groups["reward_count"], 1))).as_py() or 0
    return np.asarray(rows[chosen]), tied if select == "best" else 0


def most_alternatives(parts: Iterable[pa.Table], where: str) -> int:
    """The most alternatives that were saved for a sampled token of rollouts (``rollout_id`` and ``turns``), in parts. Raises
    RefusedError unless every one of these rollouts has some."""
    most, n_rollouts, bare = 0, 0, list[str]()
    for part in parts:
        column = part["turns"].combine_chunks()
        turns = column.flatten()
        tops = turns.field("top_log_probs")
        generated = pc.list_value_length(turns.field("generation_token_ids"))
        counts = pc.list_value_length(tops.flatten())
        lacks = pc.not_equal(pc.fill_null(pc.list_value_length(tops), 0), generated).to_numpy(zero_copy_only=False)
        lacks = lacks | (pc.min(counts).as_py() == 0)
        owner = np.repeat(np.arange(len(column)), np.diff(column.offsets.to_numpy()))
        bare += part["rollout_id"].take(pa.array(np.unique(owner[lacks]))).to_pylist()
        most, n_rollouts = max(most, pc.max(counts).as_py() or 0), n_rollouts + len(column)
    if bare or not most:
        first = f" (first: {bare[0]})" if bare else ""
        raise RefusedError(
            f"{where}: {len(bare):,} of {counted(n_rollouts, 'rollout')} have no top_log_probs to distill{first}",
            hint="collect the teacher's rollouts with --top-logprobs K; without --distill their sampled tokens are trained",
        )
    return most


def trained_once(
    data: TrainingData, counts: Mapping[str, int], seen: set[bytes] | None, *label: np.ndarray
) -> TrainingData:
    """``data`` with ``counts``: of sequences with the same ids, mask and ``label`` the first is trained. ``seen``: keys of
    those in earlier parts, to which these are added; None keeps all."""
    once = data if seen is None else data.take(sequences_of(data).first_of_equal(*label, seen=seen))
    return replace(once, facts=replace(once.facts, counts={**counts, "left_out_duplicate": len(data) - len(once)}))


def made_sequences(
    rollouts: pa.Table,
    where: str,
    agents: Collection[str] = (),
    abandoned: Abandoned = "drop",
    *,
    rendered: bool = False,
    heads: bool = False,
) -> tuple[pa.Table, int]:
    """The sequences of rollouts as ``training_experiences`` takes them: advantage 0, weight 1, temperature 1; and how many
    turns are in none of them (see ``stitch``).

    ``agents``: only the turns of these are trained, when any are given; ``rendered``: ids rendered from text are taken,
    too (a column ``rendered`` says which); ``heads``: with the columns ``HEAD``, and the rollouts' temperatures.
    Raises RefusedError for log-probs or ids that are unusable (T206, T213, L301 to L303).
    """
    tables, n_abandoned = [], 0
    for batch in rollouts.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS):
        turns = batch.column("turns")
        source = turns, batch.column("rollout_id"), abandoned, batch.column("extra")
        sequences = stitch(*source, where=where, rendered=rendered, ratios=False)
        n_abandoned += sequences.abandoned
        if agents:
            sequences = sequences.restricted(sequences.sampled.of_agents(agents))
        of, n = pa.array(sequences.rollout), len(sequences)
        lists = {
            "input_ids": sequences.token_ids,
            "loss_mask": sequences.loss_mask,
            "logprobs": sequences.logprobs,
            "advantages": sequences.token_ids.like(np.zeros(len(sequences.token_ids.values), np.float32)),
        }
        temperature = pa.array(np.ones(n, np.float32))
        if heads:
            temperature = batch.column("temperature").take(of)
        columns = {
            "rollout_id": batch.column("rollout_id").take(of),
            "sequence_index": pa.array(sequences.index),
            **{name: ragged.to_arrow() for name, ragged in lists.items()},
            **(head_columns(sequences, turns) if heads else {}),
            "weight": pa.array(np.ones(n)),
            "temperature": temperature,
            "policy_hash": batch.column("policy_hash").take(of),
            "rendered": pa.array(TurnColumns.of(turns).has_rendered()).take(of),
        }
        tables.append(pa.table(columns))
    return pa.concat_tables(tables), n_abandoned


def no_token_ids(where: str) -> RefusedError:
    """The error for rollouts without token ids."""
    hint = (
        "`gymdata import FILE -m MODEL` renders ids of text, as second class: training takes them with --allow-rendered"
    )
    return RefusedError(f"{where}: the chosen rollouts have no token ids", code="T205", hint=hint)


def of_model(rollouts: pa.Table, model: str | None, where: str) -> np.ndarray:
    """Row numbers of the rollouts that the policy of that name sampled; all when ``model`` is None. Raises RefusedError
    when there are none."""
    if model is None:
        return np.arange(rollouts.num_rows)
    rows = np.flatnonzero(pc.fill_null(pc.equal(rollouts["policy"], model), False).to_numpy())
    if not len(rows):
        there = ", ".join(sorted(rollouts["policy"].unique().to_pylist()))
        raise RefusedError(f"{where}: no rollout is of model {model}", hint=f"models there: {there}")
    return rows


#: Columns of rollouts that labelled training reads.
KTO_COLUMNS: tuple[str, ...] = (*SFT_COLUMNS, "task_id")


def rollouts_to_label(
    table: pa.Table, threshold: float | None, where: str, model: str | None
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """(row numbers, desirable or not, counts) of the rollouts that have a label, rising; the table needs no turns. Raises
    DataError for an empty table, and RefusedError when no rollout has a label (R501: no reward at all, R503: no two rewards
    differ)."""
    if not table.num_rows:
        raise DataError.empty(where, "rollouts")
    of = of_model(table, model, where)
    table = table.take(pa.array(of))
    rows, desirable = labels(table, threshold)
    n_rewards = int(pc.sum(pc.is_finite(pc.fill_null(table["reward"], np.nan))).as_py() or 0)
    if not n_rewards:
        raise RefusedError(
            f"{where}: none of {counted(table.num_rows, 'rollout')} has a reward",
            code="R501",
            hint=unscored_hint([where]),
        )
    if not len(rows):
        bar = "their task's mean" if threshold is None else f"the threshold {threshold:g}"
        raise RefusedError(
            f"{where}: each of {counted(n_rewards, 'reward')} equals {bar}: none is desirable or undesirable",
            code="R503",
            hint="--threshold sets the reward above which a rollout is desirable",
        )
    counts = {
        "rollouts": table.num_rows,
        "desirable": int(desirable.sum()),
        "undesirable": int((~desirable).sum()),
        "left_out_tie": n_rewards - len(rows),
        "left_out_no_reward": table.num_rows - n_rewards,
    }
    return np.asarray(of[rows]), desirable, counts
