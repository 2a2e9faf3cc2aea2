"""How fast validation is, as ratios against named rivals in the same run.

Native Parquet: `gymdata validate` against pyarrow reading the same columns. NeMo-Gym-shaped JSONL: against `json.loads`
and list comparison, whole processes, by CPU time on the critical path, of which what a child does at the same time is no
part. Run: ``python -m tests.benchmarks.bench_validate [--tokens N] [--megabytes M ...]``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.store.columns import content_hashes
from tests.benchmarks.rows import Row, markdown

TURNS = 8
DELTA, GENERATED = 86, 172
GROUP_TOKENS = 4_000_000


def native_batch(first: int, rollouts: int, rng: np.random.Generator, vocabulary: int = 151_000) -> pa.Table:
    """Clean tool rollouts of 8 turns: 258 new tokens a turn, two thirds of them generated."""
    n = rollouts * TURNS
    index = np.tile(np.arange(TURNS, dtype=np.int32), rollouts)

    def nested(values: pa.Array, size: int, count: int) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * size), values)

    columns = {
        "parent": pa.array(index - 1),
        "prefix_length": pa.array(index * (DELTA + GENERATED)),
        "prompt_delta_ids": nested(pa.array(_zipf(rng, n * DELTA, vocabulary)), DELTA, n),
        "generation_token_ids": nested(pa.array(_zipf(rng, n * GENERATED, vocabulary)), GENERATED, n),
        "generation_log_probs": nested(pa.array(-rng.exponential(1.0, n * GENERATED).astype(np.float32)), GENERATED, n),
        "finish_reason": pa.array(["stop"] * n),
        "digest": pa.array(np.zeros(n, np.int64)),
    }
    fields = list(ROLLOUTS.schema.field("turns").type.value_type)

    def turns() -> pa.ListArray:
        made = [columns[f.name] if f.name in columns else pa.nulls(n, f.type) for f in fields]
        return nested(pa.StructArray.from_arrays(made, fields=fields), TURNS, rollouts)

    columns["digest"] = pa.array(_digests(turns(), index))
    names = [f"{first + i:032x}" for i in range(rollouts)]
    data: dict[str, Any] = {f.name: pa.array([""] * rollouts) for f in ROLLOUTS.schema if f.type == pa.string()}
    data |= {
        "rollout_id": pa.array(names),
        "status": pa.array(["completed"] * rollouts),
        "group_id": pa.array([f"g{(first + i) // 8}" for i in range(rollouts)]),
        "rollout_index": pa.array(np.arange(rollouts, dtype=np.int32) % 8),
        "policy_version": pa.array(np.zeros(rollouts, np.int32)),
        "reward": pa.array(rng.random(rollouts)),
        "rewards": pa.array([[]] * rollouts, ROLLOUTS.schema.field("rewards").type),
        "temperature": pa.array(np.ones(rollouts, np.float32)),
        "n_turns": pa.array(np.full(rollouts, TURNS, np.int32)),
        "n_breaks": pa.array(np.zeros(rollouts, np.int32)),
        "n_context_tokens": pa.array(np.full(rollouts, TURNS * DELTA)),
        "n_generated_tokens": pa.array(np.full(rollouts, TURNS * GENERATED)),
        "messages": _messages(rollouts),
        "turns": turns(),
        "started_at": pa.array([0] * rollouts, pa.timestamp("us", tz="UTC")),
        "duration_s": pa.array(np.ones(rollouts)),
    }
    data |= content_hashes(data["turns"])
    return pa.table([data[f.name] for f in ROLLOUTS.schema], schema=ROLLOUTS.arrow)


def _zipf(rng: np.random.Generator, n: int, vocabulary: int) -> np.ndarray:
    return (np.exp(rng.random(n, np.float32) * np.float32(np.log(vocabulary))) - 1).astype(np.int32)


def _digests(turns: pa.ListArray, index: np.ndarray) -> np.ndarray:
    columns = TurnColumns.of(turns)
    for turn in range(TURNS):
        columns = replace(columns, digest=np.where(index == turn, columns.digests(), columns.digest))
    return columns.digest


def _messages(rollouts: int) -> pa.Array:
    kind = ROLLOUTS.schema.field("messages").type
    one: list[dict[str, Any]] = [{"role": "user", "content": "What is 417 - 58?"}]
    for turn in range(TURNS):
        call = {"id": f"call-{turn}", "type": "function", "function": {"name": "f", "arguments": {"a": turn}}}
        one.append({"role": "assistant", "content": "Let me see.", "tool_calls": json.dumps([call]), "turn": turn})
        one.append({"role": "tool", "content": "359", "tool_call_id": f"call-{turn}"})
    return pa.array([one] * rollouts, kind)


def write_native(path: Path, tokens: int, vocabulary: int = 151_000) -> int:
    """A rollouts file of about ``tokens`` tokens with the encodings of the format; returns the exact number."""
    rng = np.random.default_rng(0)
    a_group = GROUP_TOKENS // (TURNS * (DELTA + GENERATED))
    left = max(1, tokens // (TURNS * (DELTA + GENERATED)))
    total = left
    with pq.ParquetWriter(
        path, ROLLOUTS.arrow, compression="zstd", compression_level=1, use_dictionary=list(ROLLOUTS.dictionary),
        use_byte_stream_split=list(ROLLOUTS.split), write_page_checksum=True,
    ) as writer:  # fmt: skip
        while left:
            n = min(left, a_group)
            writer.write_table(native_batch(total - left, n, rng, vocabulary), row_group_size=n)
            left -= n
    return total * TURNS * (DELTA + GENERATED)


NEMO_TURNS = 12


def write_nemo(path: Path, megabytes: int) -> None:
    """NeMo-Gym-shaped rows: 12 calls with whole prompts, tool outputs between them."""
    rng = np.random.default_rng(0)
    size = 0
    with path.open("w") as file:
        while size < megabytes * 1_000_000:
            line = json.dumps(nemo_row(rng, len_delta=60, len_gen=40)) + "\n"
            file.write(line)
            size += len(line)
        # Written to the disk later, it would slow what is measured.
        file.flush()
        os.fsync(file.fileno())


def nemo_row(rng: np.random.Generator, len_delta: int, len_gen: int) -> dict[str, Any]:
    prompt: list[int] = []
    output: list[dict[str, Any]] = []
    for turn in range(NEMO_TURNS):
        prompt = prompt + rng.integers(0, 151_000, len_delta * (4 if turn == 0 else 1)).tolist()
        generated = rng.integers(0, 151_000, len_gen).tolist()
        output.append({"type": "reasoning", "id": f"rs_{turn}", "summary": [{"type": "summary_text", "text": "Hm."}]})
        output.append(
            {
                "type": "function_call", "name": "f", "arguments": '{"a": 1}', "call_id": f"c{turn}", "id": f"fc_{turn}",
                "prompt_token_ids": prompt, "generation_token_ids": generated,
                "generation_log_probs": (-rng.exponential(1.0, len_gen)).tolist(),
            }
        )  # fmt: skip
        output.append({"type": "function_call_output", "call_id": f"c{turn}", "output": "359"})
        prompt = prompt + generated
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "What is 417 - 58?"}], "tools": []},
        "response": {"id": f"resp_{rng.integers(1 << 60)}", "output": output},
        "reward": float(rng.random()),
    }


RIVAL_NEMO = """
import json, sys
rows = breaks = 0
for line in open(sys.argv[1]):
    seen = []
    for item in json.loads(line)["response"]["output"]:
        if "prompt_token_ids" in item:
            prompt = item["prompt_token_ids"]
            breaks += prompt[:len(seen)] != seen
            seen = prompt + item["generation_token_ids"]
    rows += 1
print(rows, breaks)
"""
RIVAL_NATIVE = """
import sys, pyarrow.parquet as pq
from gymdata.commands.validate.scan import READ
from gymdata.store.parquet_rows import known_leaves
file = pq.ParquetFile(sys.argv[1])
columns = known_leaves(file, READ.schema.names, READ)
import time
file.read_row_group(0, columns=columns)
began = time.perf_counter()
n = file.read(columns=columns).num_rows
print(time.perf_counter() - began)
"""
OURS_NATIVE = """
import sys, time
from gymdata.commands.validate.scan import READ
from gymdata.store.parquet_rows import known_leaves
from gymdata.commands.validate.run import validate
import pyarrow.parquet as pq
file = pq.ParquetFile(sys.argv[1])
file.read_row_group(0, columns=known_leaves(file, READ.schema.names, READ))
began = time.perf_counter()
report = validate(sys.argv[1])
took = time.perf_counter() - began
assert report.ok, report.by_code
print(took)
"""


def _script(code: str, *arguments: str) -> float:
    """Seconds that the script says it took."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[0])


def _process(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


#: Ends with the CPU seconds of the process, or of its children where these took longer.
CPU_OF = """
import resource, runpy, sys
try:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
finally:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(max(one.ru_utime + one.ru_stime for one in used), file=sys.stderr)
"""


def _cpu(script: Path, *arguments: str) -> float:
    """CPU seconds on the critical path of a script, its start among them."""
    command = [sys.executable, "-c", CPU_OF, str(script), *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stderr.split()[-1])


def _interleaved(ours: Callable[[], float], rival: Callable[[], float], times: int) -> tuple[float, float]:
    pairs = [(ours(), rival()) for _ in range(times)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def native(folder: Path, tokens: int, times: int) -> Row:
    """`validate` in a warm process against pyarrow reading the same leaves."""
    path = folder / "native.parquet"
    exact = write_native(path, tokens)
    ours, rival = _interleaved(lambda: _script(OURS_NATIVE, str(path)), lambda: _script(RIVAL_NATIVE, str(path)), times)
    path.unlink()
    return Row(
        f"validate, native Parquet, {exact / 1e6:.0f} M tokens, digests included",
        f"{ours:.2f} s",
        f"pyarrow reading the same columns, {rival:.2f} s",
        ours / rival,
        at_most=1.5,
    )


def nemo(folder: Path, megabytes: int, times: int) -> Row:
    """`validate` against a plain script, both as whole processes."""
    path, rival_script = folder / "nemo.jsonl", folder / "rival.py"
    write_nemo(path, megabytes)
    rival_script.write_text(RIVAL_NEMO)
    gymdata = Path(sys.executable).with_name("gymdata")
    ours, rival = _interleaved(
        lambda: _cpu(gymdata, "validate", str(path)), lambda: _cpu(rival_script, str(path)), times
    )
    path.unlink()
    return Row(
        f"validate, NeMo Gym JSONL, {megabytes} MB, whole process, CPU on the critical path",
        f"{ours:.2f} s",
        f"json.loads + list comparison, {rival:.2f} s",
        rival / ours,
        at_least=2.5 if megabytes < 500 else 5,
    )


def behavior(folder: Path, megabytes: int, times: int) -> Row:
    """`validate` with checks of behavior against without, both as whole processes."""
    path = folder / "nemo.jsonl"
    write_nemo(path, megabytes)
    command = [str(Path(sys.executable).with_name("gymdata")), "validate", str(path), "--quiet"]
    ours, rival = _interleaved(lambda: _process(*command), lambda: _process(*command, "--ignore", "B"), times)
    path.unlink()
    return Row(
        f"validate with checks of behavior, NeMo Gym JSONL, {megabytes} MB, whole process",
        f"{ours:.2f} s",
        f"the same with --ignore B, {rival:.2f} s",
        ours / rival,
        at_most=1.3,
    )


def main(tokens: int = 100_000_000, megabytes: Sequence[int] = (90, 1000), times: int = 5) -> list[Row]:
    """The rows of the benchmark table."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [native(Path(folder), tokens, times)] if tokens else []
        rows += [behavior(Path(folder), size, times) for size in megabytes[:1]]
        # Half a second each: many, for a machine whose two cores are not always its own.
        return rows + [nemo(Path(folder), size, 3 * times if size < 500 else min(times, 3)) for size in megabytes]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[90, 1000])
    parser.add_argument("--times", type=int, default=5)
    chosen = parser.parse_args()
    print(markdown(main(chosen.tokens, chosen.megabytes, chosen.times)))
