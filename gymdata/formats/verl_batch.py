"""Rollouts as the rows of a batch that verl loads in place of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gymdata.formats.input_ids import MESSAGES, NO_TOKENS, UNREAD
from gymdata.rollouts.messages import JsonObject, TableRow, json_text, loads, object_of

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.rollouts.ragged import Array

BROKEN = "rollouts of several sequences (left out)"
UNREWARDED = "rollouts without a reward (left out)"
_TRUTHS = ("answer", "ground_truth", "expected_answer", "solution")


def written(
    batches: Iterable[pa.RecordBatch], export: Export, carries: Sequence[str]
) -> Iterator[tuple[str, JsonObject]]:
    """(key, columns) of each rollout that is one sequence with a reward."""
    from gymdata.rollouts.sequences import stitch
    from gymdata.store.columns import to_rows

    for batch in batches:
        sequences = stitch(
            batch.column("turns"), batch.column("rollout_id"), "drop", batch.column("extra"), where=export.path
        )
        export.lost[UNREAD] += sequences.abandoned
        export.lost[MESSAGES] += batch.num_rows
        number = np.bincount(sequences.rollout, minlength=batch.num_rows)
        for n, row in enumerate(export.rows([batch.drop_columns(["turns"])], to_rows)):
            places = np.flatnonzero(sequences.rollout == n)
            lost = NO_TOKENS if not number[n] else BROKEN if number[n] > 1 else UNREWARDED * (row["reward"] is None)
            if lost:
                export.lost[lost] += 1
                continue
            export.carry(carries)
            export.carried["turns"] += len(sequences.turn_starts[int(places[0])])
            of = sequences.token_ids, sequences.loss_mask, sequences.logprobs
            yield _columns(row, *(lists[int(places[0])] for lists in of))


def _columns(row: TableRow, ids: Array, mask: Array, log_probs: Array) -> tuple[str, JsonObject]:
    """The key and columns that verl's agent loop has of a rollout: ``as_dict`` in
    ``verl/experimental/agent_loop/agent_loop.py``, and ``_agent_loop_postprocess`` in
    ``verl/trainer/ppo/v1/agent_loop_tq.py``."""
    first, ids = int(mask.argmax()), ids.astype(np.int64)
    sampled = mask[first:].astype(np.int64)
    rewards = np.zeros(len(sampled), np.float32)
    rewards[-1] = row["reward"]
    task = object_of(loads(row["task"]))
    truth = next((task[name] for name in _TRUTHS if task.get(name) is not None), None)
    uid = hashlib.blake2b(row["group_id"].encode(), digest_size=16).hexdigest()  # verl parts keys by "_"
    named = {name: value for name, value in row["rewards"].items() if value is not None}
    return f"{uid}_{row['rollout_index']}_0", {
        "prompts": ids[:first],
        "responses": ids[first:],
        "response_mask": sampled,
        "loss_mask": sampled,
        "input_ids": ids,
        "position_ids": np.arange(len(ids)),
        "rollout_log_probs": log_probs[first:].astype(np.float32),
        "rm_scores": rewards,
        "num_turns": 2 * int((np.diff(sampled, prepend=0) == 1).sum()),
        "multi_modal_inputs": {},
        "uid": uid,
        "data_source": str(task.get("data_source") or task.get("source") or "gymdata"),
        "reward_model": object_of(task.get("reward_model"))
        or {"style": "rule", "ground_truth": truth if truth is None or isinstance(truth, str) else json_text(truth)},
        "extra_fields": {"reward_extra_info": named},
    }
