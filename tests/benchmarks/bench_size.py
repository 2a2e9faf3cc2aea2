"""What the ``turns`` column costs on disk: bytes a unique token (id and, where generated, log-probability).

64-turn rollouts, two thirds of the unique tokens generated, log-probabilities drawn as −exponential. Ids are drawn from a
Zipf law over 151,000, or are those of real text and code (the sources and documents of installed packages, tokenised with
the vocabulary that mistral_common ships). The rival is the same tokens with every turn's whole prompt stored.
"""

from __future__ import annotations

import json
import site
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import Call, TurnEncoder
from tests.benchmarks.bench_query import write_rollouts
from tests.benchmarks.rows import Row
from tests.rollout_files import write_table

ROLLOUTS_N, TURNS, DELTA, GENERATED = 100, 64, 30, 60
UNIQUE = ROLLOUTS_N * TURNS * (DELTA + GENERATED)
VOCABULARY = 151_000


def main() -> list[Row]:
    rng = np.random.default_rng(0)
    ranks = np.arange(1, VOCABULARY + 1, dtype=np.float64)
    zipf = rng.permutation(VOCABULARY)[rng.choice(VOCABULARY, UNIQUE, p=(1 / ranks) / (1 / ranks).sum())]
    return [_measure("Zipf ids", zipf, rng, 4.5), _measure("ids of real text and code", _real_ids(), rng, 3.5)]


def _measure(what: str, ids: np.ndarray, rng: np.random.Generator, bound: float) -> Row:
    table, whole = _rollouts(ids.astype(np.int32), rng)
    with tempfile.TemporaryDirectory() as scratch:
        file = write_table(table, Path(scratch) / "rollouts.parquet", ROLLOUTS)
        groups = pq.ParquetFile(file).metadata
        size = sum(
            groups.row_group(g).column(c).total_compressed_size
            for g in range(groups.num_row_groups)
            for c in range(groups.num_columns)
            if groups.row_group(g).column(c).path_in_schema.startswith("turns.")
        )
    ours = f"{size / UNIQUE:.2f} bytes a unique token"
    return Row(
        f"turns on disk, {what}", ours, f"whole prompts: {whole / UNIQUE:.0f}× the tokens", size / UNIQUE, at_most=bound
    )


def _rollouts(ids: np.ndarray, rng: np.random.Generator) -> tuple[pa.Table, int]:
    """A rollouts table whose turns hold ``ids`` in order, and how many tokens whole prompts would be."""
    at, whole, rows = 0, 0, []
    for _ in range(ROLLOUTS_N):
        encoder, held = TurnEncoder(), np.empty(0, np.int32)
        for _ in range(TURNS):
            prompt = np.concatenate((held, ids[at : at + DELTA]))
            generation = ids[at + DELTA : at + DELTA + GENERATED]
            at += DELTA + GENERATED
            log_probs = -rng.exponential(size=GENERATED).astype(np.float32)
            encoder.add(Call(prompt, generation, log_probs, "stop"))
            held = np.concatenate((prompt, generation))
            whole += len(held)
        rows.append(encoder.turns)
    with tempfile.TemporaryDirectory() as scratch:
        write_rollouts(Path(scratch), ROLLOUTS_N)
        like = pq.read_table(next(Path(scratch).rglob("*.parquet")))
    turns = pa.array(rows, ROLLOUTS.schema.field("turns").type)
    return like.set_column(like.schema.get_field_index("turns"), ROLLOUTS.schema.field("turns"), turns), whole


def _real_ids() -> np.ndarray:
    """The first ids of Python sources and package documents, in the order of their paths."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    packages = Path(site.getsitepackages()[0])
    vocabulary = sorted((packages / "mistral_common" / "data").glob("tekken_*.json"))[-1]
    tokenizer = Tekkenizer.from_file(vocabulary)
    ids: list[int] = []
    for file in sorted([*(packages / "transformers").rglob("*.py"), *packages.glob("*.dist-info/METADATA")],
                       key=lambda f: json.dumps(f.name)):  # fmt: skip
        ids += tokenizer.encode(file.read_text(encoding="utf-8", errors="ignore"), bos=False, eos=False)
        if len(ids) >= UNIQUE:
            break
    return np.array(ids[:UNIQUE])
