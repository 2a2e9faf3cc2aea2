"""Peak memory of a training as its experiences grow: of the command and of the training process, 4 times the data.

Run: ``python -m tests.benchmarks memory``, or ``python -m tests.benchmarks.bench_memory 4 16`` for other sizes in GB
(these need 30 GB of disk). Experiences of 1,000 tokens each; two steps of a tiny model. Peak: VmHWM, which counts mapped
pages too. At most 300 MB apart.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.rollouts.schema import EXPERIENCES
from tests.benchmarks.rows import Row

SIZES = (0.5, 2.0)
APART_MB = 300
ALGORITHMS = ("rl", "value")
_ROWS, _LENGTH, _PROMPT = 512, 1000, 200
#: Bytes of a token in the file: an id, a mask (which Parquet stores in 4) and three numbers.
_BYTES = 21.0


def main(sizes: tuple[float, ...] = SIZES) -> list[Row]:
    peaks: dict[str, dict[float, dict[str, float]]] = {name: {} for name in ALGORITHMS}
    with tempfile.TemporaryDirectory(prefix="gymdata-bench-") as scratch:
        here = Path(scratch)
        model = tiny_model(here / "model")
        for size in sizes:
            file = write_experiences(here / "experiences.parquet", size * 1e9)
            for name in ALGORITHMS:
                peaks[name][size] = peak_mb(name, file, model, here / f"out-{name}-{size:g}")
                print(f"{name}, {file.stat().st_size / 1e9:.2f} GB: {peaks[name][size]}", file=sys.stderr, flush=True)
            file.unlink()
    return [row for name, found in peaks.items() for row in _rows(name, found)]


def _rows(name: str, found: dict[float, dict[str, float]]) -> Iterator[Row]:
    small, large = min(found), max(found)
    for process in ("command", "training process"):
        ours, rival = found[large][process], found[small][process]
        what = f"peak memory of train-{name}, {process}: difference / {APART_MB} MB"
        apart = abs(ours - rival) / APART_MB
        yield Row(what, f"{ours:,.0f} MB at {large:g} GB", f"{rival:,.0f} MB at {small:g} GB", apart, at_most=1.0)


def peak_mb(algorithm: str, file: Path, model: Path, out: Path) -> dict[str, float]:
    """Peak resident memory of the command and of its training process, MB. Raises RuntimeError when it fails."""
    command = [
        sys.executable,
        "-m",
        "gymdata.cli",
        f"train-{algorithm}",
        str(file),
        "-m",
        str(model),
        "-o",
        str(out),
    ]
    settings = {"max_steps": 2, "per_device_train_batch_size": 8, "save_strategy": "no", "split": 0.02}
    for name, value in settings.items():
        if name != "split" or algorithm == "value":
            command += ["--set", f"{name}={value}"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        ended = threading.Event()
        peaks = {"command": 0.0, "training process": 0.0}

        def watch() -> None:
            while not ended.wait(0.05):
                for pid in _with_children(process.pid):
                    kind = "command" if pid == process.pid else "training process"
                    peaks[kind] = max(peaks[kind], _peak_of(pid))

        watching = threading.Thread(target=watch)
        watching.start()
        code = process.wait()
        ended.set()
        watching.join()
        if code:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)}: {log.read()[-2000:].decode()}")
    return peaks


def _with_children(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(int(child) for child in children)]


def _peak_of(pid: int) -> float:
    try:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


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
