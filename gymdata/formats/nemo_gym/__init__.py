"""NeMo Gym rows: the format; ``rows`` reads one for import and validate, ``write`` writes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import Importing
from gymdata.rollouts.failures import is_rollout
from gymdata.rollouts.messages import RolloutRow, TableRow
from gymdata.rollouts.ragged import Ragged, list_parts

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.paths import Source

_REQUEST = "responses_create_params"
#: Fields for which an item has no place.
_NO_PLACE = {"turns": ("reward", "top_log_probs", "agent", "server", "weight_versions"), "messages": ("extra",)}


@FORMATS.register("nemo-gym")
class NemoGym(Format):
    """Rows of NeMo Gym: request, response with ids and log-probabilities on its items, reward."""

    content = "NeMo Gym rows"
    read_in_place = holds_ids = holds_logprobs = holds_reward = True
    suffixes = (".jsonl",)
    carries = ("turns", "branches", "rewards", "named rewards")

    def recognise(self, value: Any) -> bool:
        """A row with a response; rows with a request alone are tasks."""
        if not isinstance(value, dict) or "response" not in value:
            return False
        response = value["response"]
        return _REQUEST in value or ("request" not in value and isinstance(response, dict) and "output" in response)

    def rollouts(self, source: Source) -> Iterator[RolloutRow]:
        from gymdata.formats.nemo_gym.read import table_rows

        # A failed attempt is no rollout; an import keeps it.
        return (row for row in table_rows([source]) if is_rollout(row["extra"]))

    def read(self, sources: Iterable[Source], importing: Importing) -> Iterator[tuple[int, TableRow]]:
        from gymdata.formats.nemo_gym.read import table_rows

        for row in table_rows(list(sources), importing):
            yield 0, row

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[bytes]:
        from gymdata.formats.nemo_gym.write import nemo_gym_row
        from gymdata.store.columns import to_rows
        from gymdata.store.lines import encode

        def counted(batch: pa.RecordBatch) -> Iterable[RolloutRow]:
            for column, names in _NO_PLACE.items():
                offsets, items = list_parts(batch.column(column))
                for name in names:
                    has = items.field(name).is_valid().to_numpy(zero_copy_only=False)
                    export.lost[f"{name} of {column}"] += int((Ragged(has, offsets).sums(has) > 0).sum())
            return to_rows(batch)

        for row in export.rows(batches, counted):
            written, turns = nemo_gym_row(row)
            export.carry(self.carries, turns)
            yield encode(written) + b"\n"
