"""Tinker's Datum: what goes in, and per token what comes next, moved by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from gymdata.formats import FORMATS, Format
from gymdata.formats.input_ids import Tokenized
from gymdata.rollouts.messages import JsonObject
from gymdata.store.lines import encode

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.rollouts.ragged import Array

#: What an experience has beside that a Datum has no place for, where it is not this.
_BESIDE = {"weight": "weights other than 1", "temperature": "temperatures other than 1"}


def _datum(ids: Array, **inputs: Array) -> JsonObject:
    """A Datum as the JSON of ``src/tinker/types`` in the package tinker. Position i predicts token i + 1."""
    arrays: dict[str, Array] = {"target_tokens": ids.astype(np.int64)}
    arrays |= {name: values.astype(np.float32) for name, values in inputs.items()}
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": ids[:-1]}]},
        "loss_fn_inputs": {
            name: {"data": values[1:], "dtype": str(values.dtype), "shape": [len(values) - 1]}
            for name, values in arrays.items()
        },
    }


@FORMATS.register("tinker-sft")
class TinkerSft(Tokenized):
    """A ``Datum`` of Tinker for the loss ``cross_entropy``: ``target_tokens``, and ``weights``, 1 where it was sampled
    (``datum_from_model_input_weights`` in ``tinker_cookbook/supervised/common.py`` of
    thinking-machines-lab/tinker-cookbook)."""

    def fields(self, ids: Array, mask: Array) -> JsonObject:
        return _datum(ids, weights=mask)


@FORMATS.register("tinker-rl")
class TinkerRl(Format):
    """A ``Datum`` of Tinker for ``importance_sampling`` and ``ppo``: ``target_tokens``, ``logprobs`` of the sampler and
    ``advantages``, both 0 where the target was not sampled. So ``trajectory_to_data`` in
    ``tinker_cookbook/rl/data_processing.py`` of thinking-machines-lab/tinker-cookbook makes it, less the ``mask`` that its
    ``train.py`` takes out before a step. Made of what `gymdata experience` wrote, and checked as `train-rl` checks it."""

    table = "experiences"
    suffixes = (".jsonl",)
    columns = (
        *("rollout_id", "sequence_index", "input_ids", "loss_mask", "logprobs", "advantages"),
        *("weight", "temperature", "policy_hash"),
    )
    holds_ids = True

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[bytes]:
        import pyarrow as pa

        from gymdata.commands.train.pair_data import sequences_of
        from gymdata.commands.train.sequence_data import training_experiences

        for batch in batches:
            data = training_experiences(pa.Table.from_batches([batch]), where=export.path)
            export.lost["sequences without a trained token (left out)"] += batch.num_rows - len(data)
            for name, kind in _BESIDE.items():
                export.lost[kind] += int((data.numbers(name) != 1).sum())
            of, credit = sequences_of(data), data.lists("advantages")
            for n in range(len(data)):
                trained = of.loss_mask[n] != 0
                logprobs, advantages = (np.where(trained, lists[n], 0) for lists in (of.logprobs, credit))
                yield encode(_datum(of.token_ids[n], logprobs=logprobs, advantages=advantages)) + b"\n"
