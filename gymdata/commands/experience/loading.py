"""``load_experiences``: saved experiences as batches of tensors, in order or shuffled, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.commands.experience.fields import BESIDE, COLUMNS
from gymdata.errors import DataError, UsageError, needs
from gymdata.public import path_of

if TYPE_CHECKING:
    from gymdata.commands.experience._torch import Experience, Samples, pin_memory, to

__all__ = ["Experience", "Samples", "load_experiences", "pin_memory", "to"]
_ALWAYS = ("rollout_id", "sequence_index", "input_ids", "loss_mask", "reward", "weight", "temperature")
_TOKENS = (*COLUMNS.values(), *BESIDE, "top_ids", "top_log_probs")


def load_experiences(
    path: str | Path,
    batch_size: int,
    packed: bool = False,
    shuffle_seed: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    start_step: int = 0,
    columns: Sequence[str] | None = None,
) -> Iterator[Experience]:
    """One pass over saved experiences, as ``Experience`` batches of ``batch_size`` rows for each of ``world_size`` ranks.

    In the file's order Parquet is streamed row group by row group; with ``shuffle_seed`` rows come in an order that
    only depends on it, from an Arrow cache that is built on first use. ``start_step`` skips steps, to resume a run.
    ``columns``: what to load of the token columns (logprobs, advantages, returns, ref_logprobs, values, entropy, kl,
    rl_weight, ce_weight, ref_kl_weight, teacher_logprobs, top_ids, top_log_probs) and the texts (prompts, labels,
    references), all that are there when not given; ids and masks always come. Texts are read from the rollouts that the
    experiences were made from, where these are still on this machine. The result has ``len``: its steps, equally many on
    every rank.

    Raises DataError for a path without experiences and UsageError for numbers that make no sense.
    """
    import numpy as np

    from gymdata.commands.experience.texts import FIELDS, RolloutTexts
    from gymdata.rollouts.schema import EXPERIENCES
    from gymdata.store.partial_reads import cached_row_groups, row_groups

    path = path_of(path, "load_experiences")
    if batch_size < 1:
        raise UsageError.bad_value("batch_size", batch_size, "at least 1")
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError.bad_value("(rank, world_size)", (rank, world_size), "0 ≤ rank < world_size")
    if start_step < 0:
        raise UsageError.bad_value("start_step", start_step, "0 or more")
    requested = _TOKENS if columns is None else columns
    for name in requested:
        if name not in (*_TOKENS, *FIELDS, *_ALWAYS):
            raise UsageError.unknown_choice("column of experiences", name, (*_TOKENS, *FIELDS))
    texts = [name for name in FIELDS if columns is None or name in columns]
    names = [name for name in dict.fromkeys([*_ALWAYS, *requested]) if name not in FIELDS]
    order = None
    if shuffle_seed is None:
        groups = row_groups(path, EXPERIENCES, names)
    else:
        groups = cached_row_groups(path, EXPERIENCES, names)
        order = np.random.default_rng(shuffle_seed).permutation(sum(group.rows for group in groups))
    if not sum(group.rows for group in groups):
        raise DataError.empty(path, "experiences")
    with needs("train"):
        from gymdata.commands.experience._torch import ExperienceBatches
    return ExperienceBatches(groups, order, batch_size, rank, world_size, start_step, packed, RolloutTexts(path, texts))


def __getattr__(name: str) -> Any:
    if name in ("Experience", "Samples", "pin_memory", "to"):
        from gymdata.commands.experience import _torch as experience

        return getattr(experience, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
