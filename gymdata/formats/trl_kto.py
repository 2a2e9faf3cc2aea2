"""TRL's rows for KTO, made of rollouts with rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import TableRow
from gymdata.formats.trl import TrlPromptCompletion
from gymdata.rollouts.messages import JsonObject

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export

UNLABELLED = "rollouts without a label (left out: no reward, or one of exactly 0.5)"
ABOVE_1 = "rewards above 1, labelled as all others by 0.5 (train-kto labels them by the mean of their task's)"


@FORMATS.register("trl-kto")
class TrlKto(TrlPromptCompletion):
    """``prompt`` and ``completion``, with ``label`` true for a reward above 0.5 and false for one below (`train-kto
    --threshold 0.5`). The rows are the unpaired preferences of ``docs/source/dataset_formats.md`` in huggingface/trl; pairs
    are read by its KTOTrainer as ``trl-preference``."""

    holds_reward = True

    def recognise(self, value: Any) -> bool:  # noqa: ARG002 - its rows look like trl-prompt-completion
        """Rows with a label are ``trl-prompt-completion``, whose label becomes the reward 1 or 0."""
        return False

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[bytes]:
        yield from super().convert((_labelled(batch, export.lost) for batch in batches), export)

    def fields(self, row: TableRow, prompt: list[JsonObject], completion: list[JsonObject]) -> JsonObject:
        return super().fields(row, prompt, completion) | {"label": row["label"]}


def _labelled(batch: pa.RecordBatch, lost: Counter[str]) -> pa.RecordBatch:
    """The rows that have a label, with it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from gymdata.scores.chosen import DESIRABLE, labels

    rows, desirable = labels(pa.Table.from_batches([batch]), DESIRABLE)
    lost[UNLABELLED] += batch.num_rows - len(rows)
    lost[ABOVE_1] += pc.sum(pc.greater(batch["reward"], 1.0)).as_py() or 0
    return batch.take(pa.array(rows)).append_column("label", pa.array(desirable))
