"""Imports by several processes: NeMo Gym files in pieces, whose rows get their places where all of them are known.

Invariants: rows, ids, rejections and counts are those of one process; a worker keeps no more than its piece, and writes
nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gymdata.interop.importing import Numbering, Rejected, Unnumbered, rollout_id_of
from gymdata.interop.nemo_gym.read import table_rows
from gymdata.interop.nemo_gym.rebuild import NotRebuilt, PromptRebuilder
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store.columns import build, to_rows
from gymdata.store.tables import row_batches
from gymdata.workers.arrow import packed, unpacked
from gymdata.workers.processes import in_order
from gymdata.workers.tuning import rare_collections

if TYPE_CHECKING:
    from gymdata.chat.template import TransformersChat
    from gymdata.rollouts.schema import Table
    from gymdata.store.paths import Source


def fits(row: Mapping[str, Any], table: Table = ROLLOUTS) -> None:
    """Raises DataError, or what Arrow raises, for a row that cannot become columns and a row again."""
    from gymdata.errors import DataError

    columns = [name for name in table.schema.names if name in row]
    try:
        to_rows(build([row], table, columns, "", [0]))
    except DataError as error:
        # The row's place is reported beside the reason.
        raise DataError(error.reason) from error


def chat_of(tokenizer: str) -> TransformersChat:
    """The tokenizer and template that rebuild prompts, from the policy's folder."""
    from gymdata.chat.template import TransformersChat

    return TransformersChat.load(tokenizer, tool_parser="none")


@dataclass(slots=True)
class _Imported:
    """The rows of a piece, without places."""

    #: Packed by ``workers.arrow``; empty without a row.
    data: bytes
    #: For each row that was read, rejected ones as well: what its index is determined by.
    keys: list[tuple[bytes, str | None]]
    #: Which of these became rows.
    taken: list[int]
    rejected: list[Rejected]
    prompts_rebuilt: int
    #: With the row of each.
    refused: list[tuple[int, NotRebuilt]]


@dataclass(slots=True)
class _Imports:
    """Reads a piece, in a worker. ``careful``: each row is tried alone."""

    run_id: str
    tokenizer: str | None
    careful: bool
    _chat: TransformersChat | None = field(default=None, init=False)

    def __call__(self, source: Source) -> Iterator[_Imported]:
        places, rebuild = Unnumbered(), self._rebuilder()
        made = _Imported(b"", places.keys, [], [], 0, [])

        def rows() -> Iterator[tuple[int, dict[str, Any], int]]:
            refused = 0
            found = table_rows(
                [source],
                run_id=self.run_id,
                reject=made.rejected.append,
                rebuild=rebuild,
                check=fits if self.careful else None,
                numbering=places,
                columns=True,
            )
            for number, row in enumerate(found):
                made.taken.append(len(places.keys) - 1)
                if rebuild is not None:
                    made.refused += ((number, one) for one in rebuild.refused[refused:])
                    refused = len(rebuild.refused)
                yield number, row, 2000 + 12 * (row["n_context_tokens"] + row["n_generated_tokens"])

        with rare_collections():
            batches = list(row_batches(rows(), ROLLOUTS, ROLLOUTS.schema.names, str(source.path)))
        made.data = packed(pa.Table.from_batches(batches)) if batches else b""
        made.prompts_rebuilt = rebuild.rebuilt if rebuild is not None else 0
        yield made

    def _rebuilder(self) -> PromptRebuilder | None:
        if self.tokenizer is None:
            return None
        self._chat = self._chat or chat_of(self.tokenizer)
        return PromptRebuilder(self._chat)


def imported(
    sources: list[Source],
    workers: int,
    *,
    run_id: str,
    tokenizer: str | None,
    careful: bool,
    rejected: list[Rejected],
    rebuild: PromptRebuilder | None,
) -> Iterator[pa.RecordBatch]:
    """The rollouts rows of NeMo Gym files, as ``table_rows`` gives them; ``rebuild`` only counts."""
    numbering = Numbering()
    work = _Imports(run_id, tokenizer, careful)
    with contextlib.closing(in_order(work, sources, workers, lambda source: str(source.path))) as done:
        for piece in done:
            every = [numbering.of_key(*key) for key in piece.keys]
            places = [every[k] for k in piece.taken]
            without = [rollout_id_of(run_id, piece.keys[k][1] or "", -1) for k in piece.taken]
            ids: list[str] = []
            for batch in unpacked(piece.data).to_batches() if piece.data else ():
                here = slice(len(ids), len(ids) + batch.num_rows)
                made = _with_places(batch, run_id, places[here], without[here])
                ids += made.column("rollout_id").to_pylist()
                yield made
            rejected += piece.rejected
            if rebuild is not None:
                rebuild.rebuilt += piece.prompts_rebuilt
                rebuild.refused += [replace(one, rollout_id=ids[k]) for k, one in piece.refused]


def _with_places(
    batch: pa.RecordBatch, run_id: str, places: list[tuple[str, int]], without: list[str]
) -> pa.RecordBatch:
    """``without``: the id that each row has when it has none of its own."""
    own = batch.column("rollout_id").to_pylist()
    ids = [
        rollout_id_of(run_id, *place) if name == no_id else name
        for name, no_id, place in zip(own, without, places, strict=True)
    ]
    groups, indices = zip(*places, strict=True)
    made = {"rollout_id": ids, "task_id": groups, "group_id": groups, "rollout_index": indices}
    columns = [
        pa.array(made[field.name], field.type) if field.name in made else column
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
