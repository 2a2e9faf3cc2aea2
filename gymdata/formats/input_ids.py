"""Data sets that are tokenized already: the exact ids of rollouts, and which of them were sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from gymdata.formats import FORMATS, Format
from gymdata.formats.text.export import LOG_PROBS
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.store.lines import encode

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.rollouts.ragged import Array

MESSAGES, RENDERED = "messages and tools, as text", "that ids were rendered from text (T213)"
UNREAD = "unread turns (left out)"
NO_TOKENS = "rollouts without a sampled token (left out)"


class Tokenized(Format):
    """A line per sequence of a rollout, which has one for each break more: those that `train-sft` trains."""

    suffixes = (".jsonl",)
    columns = ("rollout_id", "reward", "rewards", "extra", "turns")
    unread = ("turns.top_log_probs",)
    holds_ids = True
    carries = ("turns", "branches")

    def fields(self, ids: Array, mask: Array) -> JsonObject:
        """The columns of a sequence. ``mask``: 1 for the sampled tokens."""
        raise NotImplementedError

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[bytes]:
        from gymdata.rollouts.sequences import stitch

        for batch in batches:
            turns = batch.column("turns")
            ids, extra = batch.column("rollout_id"), batch.column("extra")
            sequences = stitch(turns, ids, "drop", extra, where=export.path, rendered=True, ratios=False)
            export.lost[UNREAD] += sequences.abandoned
            # The first token of a sequence is never trained.
            trainable = np.array([n for n in range(len(sequences)) if sequences.loss_mask[n][1:].any()], np.int64)
            rollouts = np.unique(sequences.rollout[trainable])
            n_rollouts = len(rollouts)
            export.carry(self.carries, rows=rollouts)
            export.carried["turns"] -= sequences.abandoned
            export.further += len(trainable) - n_rollouts
            export.lost[NO_TOKENS] += batch.num_rows - n_rollouts
            export.lost[RENDERED] += int(TurnColumns.of(turns).has_rendered().sum())
            for kind in (LOG_PROBS, MESSAGES):
                export.lost[kind] += n_rollouts
            for n in trainable.tolist():
                yield encode(self.fields(sequences.token_ids[n], sequences.loss_mask[n])) + b"\n"


@FORMATS.register("input-ids-labels")
class InputIdsLabels(Tokenized):
    """``input_ids``, ``attention_mask`` and ``labels``, -100 where a token was not sampled: axolotl with an empty ``type:``
    (``docs/dataset-formats/tokenized.qmd`` and ``_is_dataset_already_tokenized`` in ``src/axolotl/utils/data/wrappers.py``
    of axolotl-ai-cloud/axolotl), and, through ``save_to_disk`` of HF datasets, LLaMA-Factory's ``tokenized_path``
    (``src/llamafactory/data/loader.py`` of hiyouga/LLaMA-Factory)."""

    def fields(self, ids: Array, mask: Array) -> JsonObject:
        return {
            "input_ids": ids,
            "attention_mask": np.ones(len(ids), np.int8),
            "labels": np.where(mask != 0, ids, np.int32(-100)),
        }


@FORMATS.register("skyrl-pretokenized")
class SkyRLPretokenized(Tokenized):
    """``input_ids`` and ``loss_mask``, 1 where a token was sampled, for SkyRL's ``pretokenized_dataset_paths``
    (``skyrl/train/dataset/pretokenized.py`` of NovaSky-AI/SkyRL)."""

    def fields(self, ids: Array, mask: Array) -> JsonObject:
        return {"input_ids": ids, "loss_mask": mask}
