"""The plain columns of a published table, which the Hub's viewer and every reader of Parquet show as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.rollouts.messages import text_of
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, Table
from gymdata.store import scan_batches
from gymdata.store.columns import to_rows
from gymdata.view.evidence.lines import texts_of

#: Where they are in a data set.
PREVIEW = "preview"
_COLUMNS = {
    ROLLOUTS.name: ["rollout_id", "task_id", "status", "reward", "rewards", "n_generated_tokens", "messages", "task"],
    PAIRS.name: ["pair_id", "task_id", "margin", "prompt", "chosen", "rejected"],
}
#: The tables that have a preview, with its texts.
TEXTS = {ROLLOUTS.name: ("prompt", "answer", "reference"), PAIRS.name: ("prompt", "chosen", "rejected")}
_KEPT = {
    ROLLOUTS.name: ("rollout_id", "task_id", "status", "reward", "n_generated_tokens"),
    PAIRS.name: ("pair_id", "task_id", "margin"),
}
_BATCH_ROWS = 1_024


def write_preview(paths: Sequence[Path], table: Table, rewards: Sequence[str], target: Path) -> None:
    """Write the plain columns of the rows of ``paths`` to ``target``. ``rewards``: named rewards, a column each."""
    kinds = {field.name: field.type for field in table.schema}
    columns = [(name, kinds[name]) for name in _KEPT[table.name]] + [(name, pa.string()) for name in TEXTS[table.name]]
    columns += [(f"reward_{name}", pa.float64()) for name in rewards]
    schema = pa.schema(columns)
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for path in paths:
            for batch in scan_batches(path, table, _COLUMNS[table.name], _BATCH_ROWS):
                rows = list[dict[str, Any]]()
                for row in to_rows(batch):
                    rows.append({name: row[name] for name in _KEPT[table.name]})
                    if table is PAIRS:
                        # The last text of a conversation.
                        for name in TEXTS[table.name]:
                            texts = (text_of(message.get("content")) for message in reversed(row[name] or ()))
                            rows[-1][name] = next(filter(None, texts), "")
                        continue
                    shown, values = texts_of(row["messages"], row["task"]), row["rewards"] or {}
                    rows[-1] |= {"prompt": shown.prompt, "answer": shown.answer, "reference": shown.reference}
                    rows[-1] |= {f"reward_{name}": values.get(name) for name in rewards}
                writer.write_table(pa.Table.from_pylist(rows, schema))
