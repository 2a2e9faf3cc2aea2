"""verl's tables: of prompts, and of conversations for supervised training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from gymdata.formats import FORMATS
from gymdata.formats.text.export import (
    CALLS,
    COLUMNS,
    EMPTY,
    REASONING,
    TOOLS,
    UNTRAINED,
    TextFormat,
    count_common,
    has_tools,
    is_untrained,
)
from gymdata.rollouts.messages import JsonObject, TableRow, json_text, loads, object_of

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.stage_output import Part

#: Rows per row group.
_ROWS = 8_192
WITH_TOOLS = "rollouts with tools (left out: verl renders a message at a time, and its table has texts alone)"


@FORMATS.register("verl")
class Verl(TextFormat):
    """verl's Parquet of prompts: the messages before the first answer, and the task's ground truth, null where none is known
    (``examples/data_preprocess/gsm8k.py`` of volcengine/verl)."""

    suffixes = (".parquet",)
    columns: ClassVar[Sequence[str] | None] = (*COLUMNS, "task_id", "rollout_index", "task")
    holds_reward = True
    carries: ClassVar[tuple[str, ...]] = ("rewards",)

    def write(self, row: TableRow, lost: Counter[str]) -> Any:
        """The row of the table."""
        count_common(row, lost)
        messages = _texts(row)
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        lost["everything from the first answer on"] += first < len(messages)
        lost[CALLS] += any(m["role"] == "tool" for m in messages[:first])
        # verl takes tools from its own configuration.
        lost[TOOLS] += has_tools(row)
        task = object_of(loads(row["task"]))
        truth = next((task[k] for k in ("answer", "ground_truth", "expected_answer", "solution") if k in task), None)
        lost["ground truth (none known in the task)"] += truth is None
        answer = truth if truth is None or isinstance(truth, str) else json_text(truth)
        extra = {name: row[name] for name in ("task_id", "rollout_id", "reward", "task", "tools")}
        return {
            "data_source": str(task.get("data_source") or task.get("source") or "gymdata"),
            "prompt": messages[:first],
            "ability": str(task.get("ability") or ""),
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": row["rollout_index"], **extra},
        }

    def types(self) -> Mapping[str, pa.DataType]:
        """The columns of the file."""
        import pyarrow as pa

        text = pa.string()
        ids = [("index", pa.int64()), ("task_id", text), ("rollout_id", text)]
        return {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct([*ids, ("reward", pa.float64()), ("task", text), ("tools", text)]),
        }

    def save(self, converted: Iterable[JsonObject], part: Part, export: Export) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema, rows = pa.schema(self.types()), iter(converted)
        with pq.ParquetWriter(part.path.absolute(), schema, compression="zstd") as sink:
            while chunk := list(islice(rows, _ROWS)):
                sink.write_table(pa.Table.from_pylist(chunk, schema=schema))
                export.written += len(chunk)


def _texts(row: TableRow) -> list[JsonObject]:
    """The messages, with role and text alone."""
    return [{"role": m["role"], "content": m["content"] or ""} for m in row["messages"]]


@FORMATS.register("verl-sft")
class VerlSft(Verl):
    """verl's Parquet of ``messages`` with ``role`` and ``content``, of which each of the assistant's is trained
    (``MultiTurnSFTDataset`` in ``verl/utils/dataset/multiturn_sft_dataset.py`` of volcengine/verl)."""

    columns = COLUMNS
    holds_reward = False
    carries = ()

    def write(self, row: TableRow, lost: Counter[str]) -> Any:
        messages = row["messages"]
        tools = has_tools(row) or any(m["tool_calls"] or m["role"] == "tool" for m in messages)
        empty = not any(m["role"] == "assistant" for m in messages)
        lost[WITH_TOOLS] += tools
        lost[EMPTY] += empty and not tools
        if tools or empty:
            return None
        count_common(row, lost)
        lost[UNTRAINED] += sum(map(is_untrained, messages))
        lost[REASONING] += any(m["reasoning"] for m in messages)
        return {"messages": _texts(row)}

    def types(self) -> Mapping[str, pa.DataType]:
        return {"messages": super().types()["prompt"]}
