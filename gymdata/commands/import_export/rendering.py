"""Rows of text that an import renders to token ids with the template of a model (``import -m``).

Invariants: rows with ids stay as they were read; a row whose ids cannot be proven is rejected with its line and reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.import_export.summaries import ImportSummary
from gymdata.errors import DataError, RefusedError, UsageError
from gymdata.formats.conversion.batches import Imported
from gymdata.formats.conversion.importing import BadItem, Importing, Origin
from gymdata.rollouts.failures import is_rollout
from gymdata.rollouts.messages import TableRow
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, Table
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.store.columns import build, to_rows
from gymdata.store.lines import decode, encode

if TYPE_CHECKING:
    from gymdata.chat.rendering import TextRenderer
    from gymdata.formats import Format
    from gymdata.store.paths import RunFacts

#: The code of a row without ids that can be proven.
UNPROVEN = "T205"


def renderer_of(model: str, chat_template: str | Path | None, format: Format) -> TextRenderer:
    """The renderer of text in ``format``. Raises UsageError for conversations without a template."""
    from gymdata.chat.rendering import TextRenderer

    renderer = TextRenderer.load(model, chat_template)
    if renderer.plain and not format.holds_plain_text:
        raise UsageError(
            f"{model}: the tokenizer has no chat template, and {format.name} has conversations",
            hint="give one with --chat-template FILE",
        )
    return renderer


def rendered_identity(renderer: TextRenderer, model: str, facts: RunFacts) -> dict[str, str | None]:
    """What names the ids of rendered text, which is added to ``facts`` (a run.json)."""
    identity = {key: renderer.facts[key] for key in ("tokenizer_hash", "chat_template_hash")}
    facts |= {"chat": renderer.facts, "rendered": {"tokenizer": model, **identity}}
    facts["notes"] = ["token ids were rendered from text, not sampled (T213)"]
    return identity


def rendered(
    parts: Iterable[Imported], renderer: TextRenderer, table: Table, importing: Importing
) -> Iterator[Imported]:
    """The rows of ``parts`` with the ids of their text, in order; ``importing`` rejects those that cannot be proven."""
    for part in parts:
        batch = part.batch
        if table is PAIRS and "rendered" not in batch.schema.names:
            batch = batch.append_column(PAIRS.schema.field("rendered"), pa.nulls(batch.num_rows, pa.bool_()))
        has_none = _without_ids(batch, table)
        if not has_none.any():
            yield Imported(batch, part.origins)
        elif found := list(_with_ids(batch, has_none, table, renderer, part.origins, importing)):
            rows, origins = zip(*found, strict=True)
            whole = build(rows, table, batch.schema.names, f"rendered {table.name}", list(range(len(rows))))
            yield Imported(whole, [*origins])


def count_rendered(summary: ImportSummary, renderer: TextRenderer) -> None:
    """Count in ``summary`` what was rendered. Raises RefusedError when no row was, and none had ids."""
    for name in (count.name for count in fields(renderer.counts)):
        value = getattr(renderer.counts, name)
        setattr(summary, name, dict(value.most_common()) if isinstance(value, Counter) else value)
    if summary.refused and not summary.rollouts + summary.pairs:
        reason, n = next(iter(summary.refused.items()))
        more = f", and {len(summary.refused) - 1} other reasons" if len(summary.refused) > 1 else ""
        raise RefusedError(
            f"{summary.files[0]}: no row can be rendered, of {summary.rows_in:,}: {reason[:150]} ({n:,}{more})",
            hint="give another template with --chat-template FILE, or mend the rows",
        )


def _without_ids(batch: pa.RecordBatch, table: Table) -> np.ndarray:
    if table is PAIRS:
        n_ids = pc.list_value_length(batch.column("chosen_ids")).to_numpy(zero_copy_only=False)
    else:
        turns = TurnColumns.of(batch.column("turns"))
        n_ids = turns.count(turns.generation.lengths + turns.delta.lengths > 0)
        is_failed = [not is_rollout(extra) for extra in batch.column("extra").to_pylist()]
        n_ids[np.array(is_failed, bool)] = 1  # a failed attempt stays text
    return np.asarray(n_ids == 0)


def _with_ids(
    batch: pa.RecordBatch,
    has_none: np.ndarray,
    table: Table,
    renderer: TextRenderer,
    origins: Sequence[Origin],
    importing: Importing,
) -> Iterator[tuple[TableRow, Origin]]:
    """The rows of ``batch``, those that have no ids with those of their text, and where each was."""
    render = renderer.rollout if table is ROLLOUTS else renderer.pair
    for row, is_text, origin in zip(to_rows(batch), has_none, origins, strict=True):
        try:
            with_ids = render(row) if is_text else row
        except DataError as error:
            renderer.counts.refused[error.reason] += 1
            texts = {name: row[name] for name in ("messages", "prompt", "chosen", "rejected") if name in row}
            importing.turn_down(BadItem(UNPROVEN, error.message), origin, texts)
            continue
        yield decode(encode(with_ids)), origin  # through JSON, from which batches are built
