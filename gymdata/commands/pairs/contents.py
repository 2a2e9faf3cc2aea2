"""The contents of rollouts for pairs: prompt and completion with masks and log-probs, and keys of words.

A rollout becomes one row, and only when all its turns make one sequence from one first prompt; the prompt is everything
before the first generated token; keys are equal exactly when what they are of is equal (64-bit hashes).
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

from gymdata.rollouts.ragged import Array, Ints, Ragged, list_parts, offsets_of
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.sequences import stitch
from gymdata.rollouts.turn_columns import TurnColumns

#: ``n_sequences`` is 1 for a usable row, 0 without token data, more when breaks or branches cut the rollout; the lists
#: of an unusable row are empty. ``abandoned_turns``: unread turns, whose tokens are left out.
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
    ]
)


#: Columns of rollouts that contents have as they are, and all that they are made of.
COPIED = ("rollout_id", "run_id", "task_id", "policy_hash", "policy_version", "temperature")
COLUMNS = (*COPIED, "n_turns", "messages", "tools", "extra", "turns")
_MESSAGES = ROLLOUTS.schema.field("messages").type
#: Tools are few texts in many rows.
CONTENTS = pa.schema(
    [
        *TOKENS,
        *(ROLLOUTS.schema.field(name) for name in COPIED),
        pa.field("prompt_messages", _MESSAGES),
        pa.field("completion_messages", _MESSAGES),
        pa.field("tools", pa.dictionary(pa.int32(), pa.string())),
    ]
)


def token_columns(
    turns: pa.ListArray,
    rollout_ids: pa.Array,
    agents: Collection[str] = (),
    *,
    extra: pa.Array | None = None,
    where: str = "",
    vocab_size: int | None = None,
    rendered: bool = False,
) -> pa.Table:
    """One row of ``TOKENS`` a rollout, in order; ``turns`` is the rollouts column of that name (one chunk)."""
    n = len(turns)
    stitched = stitch(
        turns,
        rollout_ids,
        "drop",
        extra,
        where=where,
        vocab_size=vocab_size,
        prompts_apart=True,
        rendered=rendered,
        ratios=False,
    )
    n_sequences = np.bincount(stitched.rollout, minlength=n)
    single = stitched.restricted(stitched.sampled.of_agents(agents)) if agents else stitched
    if (n_sequences > 1).any():
        single = single.take(np.flatnonzero(n_sequences[stitched.rollout] == 1))
    assert single.prompts is not None
    prompt, completion, mask = single.prompts, single.token_ids, single.loss_mask
    rows = single.rollout

    def lists(ragged: Ragged) -> pa.ListArray:
        """A list per rollout, empty for those without one sequence."""
        lengths = np.zeros(n, np.int64)
        lengths[rows] = ragged.lengths
        return Ragged(ragged.values, offsets_of(lengths)).to_arrow()

    columns = [*map(lists, (prompt, completion, mask, single.logprobs)), pa.array(n_sequences.astype(np.int32))]
    flat = TurnColumns.of(turns)
    abandoned = np.diff(flat.offsets) - np.bincount(stitched.sampled.turn_rollout, minlength=n)
    columns += [pa.array(abandoned.astype(np.int32)), pa.array(flat.has_rendered())]
    return pa.Table.from_arrays(columns, schema=TOKENS)


def trained_keys(completion: Ragged, mask: Ragged) -> Array:
    """Keys of each completion up to its last trained token, and of its mask: later tokens are not trained."""
    last = np.zeros(len(mask), np.int64)
    trained = np.flatnonzero(mask.values)
    owner = mask.owner[trained]
    last[owner] = trained - mask.offsets[owner] + 1
    return completion.first(last).hashes(mask.first(last).hashes().tolist())


def message_keys(completion: pa.ListArray) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """64-bit hashes of each list's messages: of the assistant's words (content, reasoning, and tool calls without their
    ids), and of the others' contents. 0 where there are none."""
    offsets, flat = list_parts(completion)
    is_model = pc.fill_null(pc.equal(flat.field("role"), "assistant"), False)
    # Call ids are drawn at random, so two equal answers differ in them.
    plain: list[str | None] = []
    for text in flat.field("tool_calls").to_pylist():
        try:
            parsed = json.loads(text) if text else None
        except ValueError:
            parsed = None
        if isinstance(parsed, list):
            text = json.dumps([{**c, "id": None} if isinstance(c, dict) else c for c in parsed], sort_keys=True)
        plain.append(text)
    words = pc.binary_join_element_wise(
        flat.field("content"),
        flat.field("reasoning"),
        pa.array(plain, pa.string()),
        "\x1f",
        null_handling="replace",
    )
    return _joined_hashes(words, is_model, offsets), _joined_hashes(flat.field("content"), pc.invert(is_model), offsets)


def _joined_hashes(texts: pa.Array, chosen: pa.Array, offsets: Ints) -> npt.NDArray[np.uint64]:
    """A hash of the ``chosen`` texts of each list; 0 for none."""
    bounds = offsets_of(chosen.to_numpy(zero_copy_only=False))[offsets].tolist()
    words = pc.fill_null(texts.filter(chosen), "").to_pylist()
    digest = xxhash.xxh3_64_intdigest
    return np.array([digest("\x1e".join(words[a:b]).encode()) if b > a else 0 for a, b in pairwise(bounds)], np.uint64)
