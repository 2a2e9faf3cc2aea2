"""Peak memory of a training as its experiences grow: 4 times the data.

Run: ``python -m tests.benchmarks memory``, or ``python -m tests.benchmarks.bench_memory 4 16`` for other sizes in GB
(these need 30 GB of disk). Experiences of 1,000 tokens each; two steps of a tiny model. The peak counts mapped pages too.
At most 300 MB apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.rollouts.schema import EXPERIENCES
from tests.benchmarks.rows import Row

SIZES = (0.5, 2.0)
APART_MB = 300
ALGORITHMS = ("rl", "value")
SETTINGS = {"max_steps": 2, "per_device_train_batch_size": 8, "save_strategy": "no"}
_ROWS, _LENGTH, _PROMPT = 512, 1000, 200
#: Bytes of a token in the file: an id, a mask (which Parquet stores in 4) and three numbers.
_BYTES = 21.0


def main(sizes: tuple[float, ...] = SIZES) -> list[Row]:
    peaks: dict[str, dict[float, float]] = {name: {} for name in ALGORITHMS}
    with tempfile.TemporaryDirectory(prefix="gymdata-bench-") as scratch:
        here = Path(scratch)
        model = tiny_model(here / "model")
        for size in sizes:
            file = write_experiences(here / "experiences.parquet", size * 1e9)
            for name in ALGORITHMS:
                settings = SETTINGS | ({"split": 0.02} if name == "value" else {})
                peaks[name][size] = peak_mb(name, file, model, here / f"out-{name}-{size:g}", settings)
                print(f"{name}, {file.stat().st_size / 1e9:.2f} GB: {peaks[name][size]}", file=sys.stderr, flush=True)
            file.unlink()
    return [_row(name, found) for name, found in peaks.items()]


def _row(name: str, found: dict[float, float]) -> Row:
    small, large = min(found), max(found)
    ours, rival = (f"{found[size]:,.0f} MB at {size:g} GB" for size in (large, small))
    apart = abs(found[large] - found[small]) / APART_MB
    return Row(f"peak memory of train-{name}: difference / {APART_MB} MB", ours, rival, apart, at_most=1.0)


def peak_mb(algorithm: str, file: Path, model: Path, out: Path, settings: Mapping[str, object]) -> float:
    """Peak resident memory of a training, MB. Raises RuntimeError when it fails."""
    command = [sys.executable, "-m", "gymdata.cli", f"train-{algorithm}", *map(str, (file, "-m", model, "-o", out))]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)}: {log.read()[-2000:].decode()}")
    return usage.ru_maxrss / 1024


def write_experiences(path: Path, size: float) -> Path:
    """A file of about ``size`` bytes, not compressed: groups of 8 sequences with one prompt, with random numbers."""
    schema = pa.schema(
        [EXPERIENCES.schema.field(name) for name in EXPERIENCES.required()], metadata=EXPERIENCES.metadata
    )
    rng = np.random.default_rng(3)
    offsets = np.arange(0, (_ROWS + 1) * _LENGTH, _LENGTH, dtype=np.int32)
    ids = rng.integers(3, 400, (_ROWS, _LENGTH), np.int32)
    ids[:, :_PROMPT] = np.repeat(ids[::8, :_PROMPT], 8, axis=0)
    lists = {name: rng.standard_normal(_ROWS * _LENGTH, np.float32) for name in ("advantages", "returns")}
    lists["logprobs"] = -np.abs(rng.standard_normal(_ROWS * _LENGTH, np.float32))
    lists |= {"input_ids": ids.ravel(), "loss_mask": np.tile((np.arange(_LENGTH) >= _PROMPT).astype(np.int8), _ROWS)}
    columns = {name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()}
    same = {"run_id": "run", "policy_hash": "other", "turn_starts": [_PROMPT], "sequence_index": 0, "policy_version": 0,
            "reward": 1.0, "weight": 1.0, "temperature": 1.0}  # fmt: skip
    columns |= {name: pa.array([value] * _ROWS) for name, value in same.items()}
    columns = {name: column.cast(schema.field(name).type) for name, column in columns.items()}
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as sink:
        for first in range(0, max(_ROWS, int(size / _BYTES / _LENGTH)), _ROWS):
            number = range(first, first + _ROWS)
            columns["task_id"] = columns["group_id"] = pa.array([f"task-{i // 8}" for i in number])
            columns["rollout_id"] = pa.array([f"{i:032x}" for i in number])
            sink.write_table(pa.table([columns[name] for name in schema.names], schema=schema))
    return path


def tiny_model(folder: Path) -> Path:
    """A model of one layer, with the tokenizer of the sample policy."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from gymdata.commands.demo.run import sample_data

    config = Qwen3Config(
        vocab_size=439, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sample_data() / "policy").save_pretrained(folder)
    return folder


if __name__ == "__main__":
    from tests.benchmarks.rows import markdown

    print(markdown(main(tuple(float(word) for word in sys.argv[1:]) or SIZES)))
