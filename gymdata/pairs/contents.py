"""The contents of rollouts for pairs: prompt and completion with masks and log-probs, and keys of ids and words.

Invariants: a rollout becomes one row, and only when all its turns make one sequence from one first prompt; the prompt is
everything before the first generated token; keys are equal exactly when what they are of is equal (64-bit hashes).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gymdata.rollouts.messages import split_messages
from gymdata.rollouts.ragged import Array, Ragged, list_parts, offsets_of
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.sequences import RolloutSequences, stitch
from gymdata.rollouts.turn_columns import TurnColumns

#: ``n_sequences`` is 1 for a usable row, 0 without token data, more when breaks or branches cut the rollout; the lists
#: of an unusable row are empty. ``abandoned_turns``: retries that no later turn continues, whose tokens are left out.
#: ``rendered``: some of its ids were rendered from text; their log-probs are NaN.
TOKENS = pa.schema(
    [
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("completion_ids", pa.list_(pa.int32())),
        pa.field("completion_mask", pa.list_(pa.int8())),
        pa.field("completion_logprobs", pa.list_(pa.float32())),
        pa.field("n_sequences", pa.int32()),
        pa.field("abandoned_turns", pa.int32()),
        pa.field("rendered", pa.bool_()),
        pa.field("prompt_key", pa.uint64()),
        pa.field("generation_key", pa.uint64()),
    ]
)


#: Columns of rollouts that ``contents`` is made of, and that it has as they are.
_COPIED = ("rollout_id", "run_id", "task_id", "policy_hash", "policy_version", "temperature")
COLUMNS = (*_COPIED, "n_turns", "messages", "tools", "turns")
#: Columns that ``contents`` adds. Tools are few texts in many rows.
_MESSAGES = ROLLOUTS.schema.field("messages").type
CONTENTS = pa.schema(
    [
        *TOKENS,
        *(ROLLOUTS.schema.field(name) for name in _COPIED),
        pa.field("prompt_messages", _MESSAGES),
        pa.field("completion_messages", _MESSAGES),
        pa.field("text_key", pa.uint64()),
        pa.field("tools", pa.dictionary(pa.int32(), pa.string())),
    ]
)


def contents(
    batch: pa.RecordBatch,
    agents: Collection[str] = (),
    *,
    where: str = "",
    vocab_size: int | None = None,
    rendered: bool = False,
) -> pa.Table:
    """One row of ``CONTENTS`` for each row of ``batch`` (``COLUMNS``).

    ``agents``: generations of other agents are context (empty: none are). Raises as ``stitch`` does.
    """
    ids = batch.column("rollout_id")
    turns = batch.column("turns")
    tokens = token_columns(turns, ids, agents, where=where, vocab_size=vocab_size, rendered=rendered)
    prompt, completion = split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())
    tools = batch.column("tools").dictionary_encode()
    more = (*map(batch.column, _COPIED), prompt, completion, pa.array(text_keys(completion)), tools)
    fields = list(CONTENTS)[len(TOKENS) :]
    columns = [column.cast(field.type) for field, column in zip(fields, more, strict=True)]
    return pa.Table.from_arrays([*tokens.columns, *columns], schema=CONTENTS)


def token_columns(
    turns: pa.ListArray,
    rollout_ids: pa.Array,
    agents: Collection[str] = (),
    *,
    where: str = "",
    vocab_size: int | None = None,
    rendered: bool = False,
) -> pa.Table:
    """One row of ``TOKENS`` a rollout, in order; ``turns`` is the rollouts column of that name (one chunk)."""
    n = len(turns)
    found = stitch(
        turns, rollout_ids, "drop", where=where, vocab_size=vocab_size, prompts_apart=True, rendered=rendered
    )
    n_sequences = np.bincount(found.rollout, minlength=n)
    one = found.restricted(found.sampled.of_agents(agents)) if agents else found
    if (n_sequences > 1).any():
        one = one.take(np.flatnonzero(n_sequences[found.rollout] == 1))
    assert one.prompts is not None
    prompt, completion, mask = one.prompts, one.token_ids, one.loss_mask
    rows = one.rollout
    keys = _trained_keys(completion, mask) if agents else _generation_keys(found, rows)

    def lists(some: Ragged) -> pa.ListArray:
        """A list per rollout, empty for those without one sequence."""
        return Ragged(some.values, offsets_of(_filled(some.lengths, rows, n))).to_arrow()

    columns = [*map(lists, (prompt, completion, mask, one.logprobs)), pa.array(n_sequences.astype(np.int32))]
    flat = TurnColumns.of(turns)
    abandoned = np.diff(flat.offsets) - np.bincount(found.sampled.turn_rollout, minlength=n)
    columns += [pa.array(abandoned.astype(np.int32)), pa.array(flat.has_rendered())]
    columns += [pa.array(_filled(some, rows, n)) for some in (prompt.hashes(), keys)]
    return pa.Table.from_arrays(columns, schema=TOKENS)


def _filled(values: Array, rows: Array, n: int) -> Array:
    """``values`` at ``rows`` of n, 0 elsewhere."""
    result = np.zeros(n, values.dtype)
    result[rows] = values
    return result


def _generation_keys(found: RolloutSequences, rows: Array) -> Array:
    """Keys of what the rollouts ``rows`` sampled, and of where its turns begin."""
    sampled = found.sampled
    bounds = np.searchsorted(sampled.turn_rollout, np.arange(len(sampled.token_ids) + 1))
    return sampled.token_ids.take(rows).hashes(Ragged(sampled.turn_sizes, bounds).take(rows).hashes().tolist())


def _trained_keys(completion: Ragged, mask: Ragged) -> Array:
    """Keys of each completion up to its last trained token, and of its mask: later tokens are not trained."""
    last = np.zeros(len(mask), np.int64)
    at = np.flatnonzero(mask.values)
    owner = mask.owner[at]
    last[owner] = at - mask.offsets[owner] + 1
    return completion.first(last).hashes(mask.first(last).hashes().tolist())


def text_keys(generated: pa.ListArray) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of the assistant's words in each list: content, reasoning and tool calls without their ids.

    0 for a list without assistant messages.
    """
    offsets, flat = list_parts(generated)
    is_model = pc.fill_null(pc.equal(flat.field("role"), "assistant"), False)
    words = pc.binary_join_element_wise(
        flat.field("content"), flat.field("reasoning"), _without_call_ids(flat.field("tool_calls")), "\x1f",
        null_handling="replace",
    )  # fmt: skip
    bounds = offsets_of(is_model.to_numpy(zero_copy_only=False))[offsets].tolist()
    texts = words.filter(is_model).to_pylist()
    digest = xxhash.xxh3_64_intdigest
    return np.array([digest("\x1e".join(texts[a:b]).encode()) if b > a else 0 for a, b in pairwise(bounds)], np.uint64)


def _without_call_ids(calls: pa.Array) -> pa.Array:
    """Call ids are drawn at random, so two equal answers differ in them."""
    plain: list[str | None] = []
    for text in calls.to_pylist():
        try:
            parsed = json.loads(text) if text else None
        except ValueError:
            parsed = None
        if isinstance(parsed, list):
            text = json.dumps([{**c, "id": None} if isinstance(c, dict) else c for c in parsed], sort_keys=True)
        plain.append(text)
    return pa.array(plain, pa.string())
