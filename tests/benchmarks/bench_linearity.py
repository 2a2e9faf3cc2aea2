"""How the cost of validation grows: with tokens, with the length of a rollout, and with a tokenizer at hand.

Run: ``python -m tests.benchmarks linearity``. A token at 16 times the size may cost at most 1.3 times as much; one rollout
of 100 turns and 200,000 tokens is validated well under a second; telling the cause of breaks costs clean rollouts nothing.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.commands.validate.run import validate
from gymdata.rollouts.schema import ROLLOUTS
from tests.benchmarks.bench_validate import write_native
from tests.benchmarks.rows import Row, interleave, seconds
from tests.rollout_files import rollout, rollouts_table, write_table
from tests.validate.generate import nemo_row

SIZES = (1, 4, 16)
#: Tokens of the smallest file: enough that opening a file is nothing beside it.
TOKENS = 2_000_000
LONG_TURNS, LONG_TOKENS = 100, 200_000
#: Well under a second; whole prompts are fifty times the tokens, and reading them is most of it.
LONG_AT_MOST_S, WHOLE_PROMPTS_AT_MOST_S = 0.5, 0.8
GROWS_AT_MOST, TOKENIZER_AT_MOST = 1.3, 1.1
RUNS = 5
POLICY = Path(__file__).parents[2] / "sample_data" / "policy"
#: Ids that the sample policy's tokenizer has.
VOCABULARY = 400


def main() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="gymdata-bench-"))
    try:
        return [growth_of_files(folder), growth_of_rollouts(folder), *long_rollouts(folder), with_a_tokenizer(folder)]
    finally:
        shutil.rmtree(folder)


def growth_of_files(folder: Path) -> Row:
    """Files of rollouts of 8 turns, 1, 4 and 16 times as many."""
    files = {size: folder / f"native-{size}.parquet" for size in SIZES}
    tokens = {size: write_native(path, size * TOKENS) for size, path in files.items()}
    return _growth(f"validate, native Parquet, {TOKENS / 1e6:.0f} M tokens × 1, 4, 16", files, tokens)


def growth_of_rollouts(folder: Path) -> Row:
    """One rollout of 100 turns, whose turns are 1, 4 and 16 times as long, as JSON lines."""
    files, tokens = {}, {}
    for size in SIZES:
        tokens[size] = size * LONG_TOKENS
        files[size] = folder / f"long-{size}.jsonl"
        write_table(rollouts_table([rollout("t0", 0, 1.0, _calls(tokens[size]))]), files[size], ROLLOUTS)
    return _growth("validate, one rollout of 100 turns and 0.2 M tokens × 1, 4, 16, JSONL", files, tokens)


def long_rollouts(folder: Path) -> list[Row]:
    """Seconds for the long rollout: native, as NeMo Gym writes it with whole prompts, and with a break at every turn."""
    calls = _calls(LONG_TOKENS)
    native = folder / "one.parquet"
    write_table(rollouts_table([rollout("t0", 0, 1.0, calls)]), native, ROLLOUTS)
    nemo = folder / "one.jsonl"
    nemo.write_text(json.dumps(nemo_row(calls, "q", 1.0, 0)) + "\n")
    broken = folder / "broken.parquet"
    write_table(rollouts_table([rollout("t0", 0, 1.0, _broken(calls))]), broken, ROLLOUTS)
    rows = []
    for name, path, settings in (
        ("native Parquet", native, {}),
        (f"NeMo Gym JSONL, {nemo.stat().st_size / 1e6:.0f} MB", nemo, {}),
        ("native Parquet, every turn a break, causes told", broken, {"tokenizer": POLICY}),
    ):
        took = [_timed(path, **settings) for _ in range(RUNS + 1)][1:]
        rows.append(
            Row(
                f"validate one rollout of {LONG_TURNS} turns and {LONG_TOKENS:,} tokens, {name} (ratio: to 1 s)",
                seconds(took),
                "1 s",
                statistics.median(took),
                at_most=WHOLE_PROMPTS_AT_MOST_S if path == nemo else LONG_AT_MOST_S,
            )
        )
    return rows


def with_a_tokenizer(folder: Path) -> Row:
    """Clean rollouts: the same file with and without ``--tokenizer``, which only bounds the ids of clean turns."""
    path = folder / "clean.parquet"
    write_native(path, 8 * TOKENS, VOCABULARY)

    def ours() -> None:
        assert validate(path, tokenizer=POLICY).ok

    def rival() -> None:
        assert validate(path).ok

    timing = interleave(ours, rival, 2 * RUNS)
    return Row(
        f"validate --tokenizer, clean rollouts, {8 * TOKENS / 1e6:.0f} M tokens, CPU time",
        seconds(timing.ours_cpu),
        f"without, {seconds(timing.rival_cpu)}",
        statistics.median(timing.ours_cpu) / statistics.median(timing.rival_cpu),
        at_most=TOKENIZER_AT_MOST,
    )


def _growth(what: str, files: dict[int, Path], tokens: dict[int, int]) -> Row:
    """Seconds a token of the largest file to that of the smallest, measured in turn."""
    took: dict[int, list[float]] = {size: [] for size in files}
    for path in files.values():
        _timed(path)
    for _ in range(RUNS):
        for size, path in files.items():
            took[size].append(_timed(path))
    each = {size: statistics.median(values) / tokens[size] * 1e9 for size, values in took.items()}
    small, middle, large = (each[size] for size in SIZES)
    shown = f"{large:.1f} ns a token at 16× ({seconds(took[16])}), {middle:.1f} at 4×"
    return Row(what, shown, f"{small:.1f} ns at 1× ({seconds(took[1])})", large / small, at_most=GROWS_AT_MOST)


def _timed(path: Path, **settings: Any) -> float:
    """CPU seconds of one validation in this process, reading included; a loaded machine does not change them."""
    began = time.process_time()
    validate(path, **settings)
    return time.process_time() - began


def _calls(tokens: int) -> list[tuple[list[int], list[int]]]:
    """100 calls that continue each other, with ``tokens`` tokens in all, half of them generated."""
    rng = np.random.default_rng(0)
    each = tokens // LONG_TURNS // 2
    held: list[int] = []
    calls = []
    for _ in range(LONG_TURNS):
        prompt, generation = (
            held + rng.integers(10, VOCABULARY, each).tolist(),
            rng.integers(10, VOCABULARY, each).tolist(),
        )
        calls.append((prompt, generation))
        held = prompt + generation
    return calls


def _broken(calls: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """The same with one token changed near the end of what each later prompt repeats."""
    changed = []
    for turn, (prompt, generation) in enumerate(calls):
        ids = list(prompt)
        if turn:
            at = len(ids) - len(ids) // (turn + 1) - 20
            ids[at] = 10 + (ids[at] - 9) % (VOCABULARY - 10)
        changed.append((ids, generation))
    return changed


if __name__ == "__main__":
    from tests.benchmarks.rows import markdown

    print(markdown(main()))
