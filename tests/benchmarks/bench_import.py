"""How fast NeMo Gym rollouts are imported, and rollouts are exported: megabytes a CPU second.

The import runs against ``json.loads`` of the same lines; an export against a straightforward writer with orjson, which reads
the same columns and makes the same rows (it checks no digest and no token, and gives back nothing that an import put aside),
and, for its megabytes a second, against ``json.loads`` of the lines that it wrote.
Run: ``python -m tests.benchmarks import``. Counted is CPU time, which a loaded machine changes less than the clock.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq

import gymdata
from gymdata.commands.import_export.run import import_rollouts
from tests.benchmarks.bench_experience import write_run
from tests.benchmarks.bench_validate import nemo_row, write_nemo
from tests.benchmarks.rows import Row, interleave, seconds

MEGABYTES = 60
#: 150 and 100 MB a CPU second on a machine whose json.loads reads 113 MB of the import's lines; another machine's is the
#: measure of its speed.
IMPORT_RATIO, EXPORT_TO_JSON = 150 / 113, 100 / 113
EXPORT_RATIO = 1.5
#: Characters of a turn's reasoning and of a tool's output: four for each of 40 sampled and 60 new tokens.
SAID, ANSWERED = 160, 240
SHORT = 12_500


def main() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="gymdata-bench-"))
    try:
        source, lines = folder / "texts.jsonl", folder / "rollouts.jsonl"
        write_nemo(lines, MEGABYTES)
        rows = [imported(lines, folder / "run")]
        beside = partial(exported, lines)
        rows += beside(folder / "run", "nemo-gym", nemo_rows, "12 calls of 100 tokens")
        short = write_run(folder / "short", SHORT)
        rows += beside(short, "nemo-gym", nemo_rows, "3 calls of 120 tokens", bounds=False)
        write_texts(source, 4 * MEGABYTES)
        import_rollouts(source, folder / "texts")
        for name in ("trl-messages", "openai"):
            rows += beside(folder / "texts", name, message_rows, "4 characters a token", bounds=False)
        write_texts(source, 4 * MEGABYTES, alike=False)
        import_rollouts(source, folder / "unlike")
        for name in ("trl-messages", "openai"):
            rows += beside(folder / "unlike", name, message_rows, "no two tool calls alike", bounds=False)
        return rows
    finally:
        shutil.rmtree(folder)


def imported(lines: Path, run: Path) -> Row:
    timing = interleave(lambda: import_rollouts(lines, run, overwrite=True), lambda: parse(lines))
    ours, its = statistics.median(timing.ours_cpu), statistics.median(timing.rival_cpu)
    size = lines.stat().st_size / 1e6
    return Row(
        f"import nemo-gym, {size:.0f} MB to a run, CPU time",
        f"{size / ours:.0f} MB/s, {seconds(timing.ours_cpu)}",
        f"json.loads {size / its:.0f} MB/s, {seconds(timing.rival_cpu)}",
        its / ours,
        at_least=IMPORT_RATIO,
    )


def parse(lines: Path) -> int:
    """json.loads of each line."""
    with lines.open("rb") as file:
        return sum(len(json.loads(line)["response"]["output"]) for line in file)


def exported(
    lines: Path, run: Path, name: str, rows: Callable[[Path], Any], what: str, *, bounds: bool = True
) -> list[Row]:
    """CPU time against the writer of ``rows``, and megabytes of it a second against json.loads of ``lines``."""
    ours, rival = run.parent / f"{run.name}-{name}.jsonl", run.parent / "rival.jsonl"

    def export() -> object:
        return gymdata.export(run, ours, name, overwrite=True)

    def write() -> None:
        with rival.open("wb") as file:
            for row in rows(run):
                file.write(orjson.dumps(row) + b"\n")

    # Wait until the disk has written the input of this measurement.
    os.sync()
    # A tenth of a second each.
    timing = interleave(export, write, 15)
    beside_json = interleave(export, lambda: parse(lines))
    took, its = statistics.median(timing.ours_cpu), statistics.median(timing.rival_cpu)
    size, its_size = ours.stat().st_size / 1e6, rival.stat().st_size / 1e6
    rate = size / statistics.median(beside_json.ours_cpu)
    json_rate = lines.stat().st_size / 1e6 / statistics.median(beside_json.rival_cpu)
    title = f"export {name}, {what}, {size:.0f} MB"
    least, fast = (EXPORT_RATIO, EXPORT_TO_JSON) if bounds else (None, None)
    return [
        Row(
            f"{title}, CPU time",
            f"{size / took:.0f} MB/s, {seconds(timing.ours_cpu)}",
            f"orjson {its_size / its:.0f} MB/s, {seconds(timing.rival_cpu)}",
            its / took,
            at_least=least,
        ),
        Row(
            f"{title}, MB/s",
            f"{rate:.0f} MB/s, {seconds(beside_json.ours_cpu)}",
            f"json.loads {json_rate:.0f} MB/s",
            rate / json_rate,
            at_least=fast,
        ),
    ]


def nemo_rows(run: Path) -> Any:
    """NeMo Gym rows as one writes them when nothing is to be checked."""
    for row in _read(run, ["rollout_id", "task_id", "reward", "messages", "tools", "turns"]):
        wholes: list[list[int]] = []
        lists: list[dict[str, Any]] = []
        for turn in row["turns"]:
            before = wholes[turn["parent"]] if turn["parent"] >= 0 else []
            prompt = before[: turn["prefix_length"]] + turn["prompt_delta_ids"]
            wholes.append(prompt + turn["generation_token_ids"])
            kept = {name: turn[name] for name in ("generation_token_ids", "generation_log_probs")}
            lists.append({"prompt_token_ids": prompt} | kept)
        output: list[dict[str, Any]] = []
        for message in row["messages"]:
            if message["role"] == "assistant":
                shown = [{"type": "output_text", "text": message["content"] or ""}]
                item = {"type": "message", "role": "assistant", "content": shown}
                output.append(item | (lists[message["turn"]] if message["turn"] is not None else {}))
            else:
                output.append({"role": message["role"], "content": message["content"]})
        yield {
            "responses_create_params": {"input": output[:1], "tools": orjson.loads(row["tools"])},
            "response": {"id": row["rollout_id"], "output": output[1:]},
            "reward": row["reward"], "task_id": row["task_id"], "rollout_id": row["rollout_id"],
        }  # fmt: skip


def message_rows(run: Path) -> Any:
    """Conversations for SFT, of rows whose turns are read and not looked at."""
    for row in _read(run, ["messages", "tools", "turns"], unused=["turns"]):
        messages = []
        for message in row["messages"]:
            made = {"role": message["role"], "content": message["content"]}
            if message["tool_calls"]:
                made["tool_calls"] = orjson.loads(message["tool_calls"])
            for name, key in (("reasoning", "reasoning_content"), ("tool_call_id", "tool_call_id"), ("name", "name")):
                if message[name] is not None:
                    made[key] = message[name]
            messages.append(made)
        tools = orjson.loads(row["tools"])
        yield {"messages": messages} | ({"tools": tools} if tools else {})


def _read(run: Path, columns: list[str], unused: list[str] | None = None) -> Any:
    for part in sorted((run / "rollouts").glob("*.parquet")):
        for batch in pq.ParquetFile(part).iter_batches(1024, columns=columns):
            yield from batch.drop_columns(unused or []).to_pylist()


def write_texts(path: Path, megabytes: int, *, alike: bool = True) -> None:
    """Rows of ``write_nemo`` in which the tokens' text is there, too. ``alike``: tool calls of all rows have the same ids
    and arguments, which the export then makes once."""
    rng = np.random.default_rng(1)
    size = 0
    with path.open("w") as file:
        while size < megabytes * 1_000_000:
            row = nemo_row(rng, len_delta=60, len_gen=40)
            for number, item in enumerate(row["response"]["output"]):
                if not alike and "call_id" in item:
                    item["call_id"] += f"-{size}"
                if item["type"] == "reasoning":
                    item["summary"][0]["text"] = f"Step {number}: " + "so it is 359. " * (SAID // 14)
                elif item["type"] == "function_call_output":
                    item["output"] = f"Result {number}\n" + "3 5 9 " * (ANSWERED // 6)
            line = json.dumps(row) + "\n"
            file.write(line)
            size += len(line)


if __name__ == "__main__":
    from tests.benchmarks.rows import markdown

    print(markdown(main()))
