"""verl's prompt table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS
from gymdata.interop.formats._text import COLUMNS, TextFormat

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.interop.exporting import Export
    from gymdata.store.stage_output import Part

#: Rows per row group.
_ROWS = 8_192


@FORMATS.register("verl")
class Verl(TextFormat):
    """verl's Parquet of prompts: the messages before the first answer, and the task's ground truth."""

    suffixes = (".parquet",)
    columns = (*COLUMNS, "task_id", "rollout_index", "task")
    holds_reward = True

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> list[dict[str, Any]]:
        from gymdata.interop.chat_text import Chat
        from gymdata.interop.text_export import TRL, count_common
        from gymdata.store.columns import to_rows

        count_common(batch, Chat(batch.column("messages"), TRL), lost)
        return [_row(row, lost) for row in to_rows(batch.drop_columns(["turns"]))]

    def save(self, converted: Iterable[list[dict[str, Any]]], part: Part, export: Export) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        text = pa.string()
        extra = {
            "index": pa.int64(),
            "task_id": text,
            "rollout_id": text,
            "reward": pa.float64(),
            "task": text,
            "tools": text,
        }
        columns = {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct(extra),
        }
        schema, rows = pa.schema(columns), chain.from_iterable(converted)
        with pq.ParquetWriter(part.path.absolute(), schema, compression="zstd") as sink:
            while chunk := list(islice(rows, _ROWS)):
                sink.write_table(pa.Table.from_pylist(chunk, schema=schema))
                export.written += len(chunk)


def _row(row: Mapping[str, Any], lost: Counter[str]) -> dict[str, Any]:
    from gymdata.interop.text_export import CALLS, TOOLS, has_tools
    from gymdata.rollouts.messages import json_text, loads, object_of

    messages = [{"role": m["role"], "content": m["content"] or ""} for m in row["messages"]]
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    lost["everything from the first answer on"] += first < len(messages)
    lost[CALLS] += any(m["role"] == "tool" for m in messages[:first])
    # verl takes tools from its own configuration.
    lost[TOOLS] += has_tools(row)
    task = object_of(loads(row["task"]))
    truth = next((task[k] for k in ("answer", "ground_truth", "expected_answer", "solution") if k in task), None)
    lost["ground truth (none known in the task)"] += truth is None
    return {
        "data_source": str(task.get("data_source") or task.get("source") or "gymdata"),
        "prompt": messages[:first],
        "ability": str(task.get("ability") or ""),
        "reward_model": {"style": "rule", "ground_truth": truth if isinstance(truth, str) else json_text(truth)},
        "extra_info": {
            "index": row["rollout_index"],
            "task_id": row["task_id"],
            "rollout_id": row["rollout_id"],
            "reward": row["reward"],
            "task": row["task"],
            "tools": row["tools"],
        },
    }
