"""Checks rollouts, as JSON lines or Parquet, against SPEC.md. Needs xxhash, and pyarrow for Parquet; nothing else."""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest as xxh3

Json = dict[str, Any]
Ids = list[int]
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def digest_of(turn: Json, above: int) -> int:
    value = xxh3(struct.pack("<qi", above, turn["prefix_length"]))
    for name, code in (("prompt_delta_ids", "i"), ("generation_token_ids", "i"), ("generation_log_probs", "f")):
        value = xxh3(struct.pack(f"<{len(turn[name])}{code}", *turn[name]), value)
    return signed(value)


def common_prefix(a: Ids, b: Ids) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def claims(tail: Ids, generation: Ids, before: int) -> bool:
    """Whether ``tail`` has the generation, or most of it; ``before``: tokens between the border and the generation."""
    size = len(generation)
    middle, least = size // 2, min(max(size // 2 + 1, 3), size)
    for at in (k for k, token in enumerate(tail) if size and token == generation[middle]):
        back = common_prefix(tail[: at + 1][::-1], generation[: middle + 1][::-1])
        if back + common_prefix(tail[at + 1 :], generation[middle + 1 :]) >= least:
            return True
    for at in (k for k, token in enumerate(tail) if size and token == generation[-1] and before <= 8):
        back = common_prefix(tail[: at + 1][::-1], generation[::-1])
        if at + 1 - back <= before + 2 and (back >= 2 or size - back <= 2 >= before):
            return True
    return False


def is_break(turns: list[Json], prompts: list[Ids], whole: list[Ids], k: int) -> bool:
    turn, prompt, at, chain = turns[k], prompts[k], turns[k]["parent"], []
    shared = turn["prefix_length"]
    if at < 0 or shared == len(whole[at]) or prompt == prompts[at] or turn.get("agent") != turns[at].get("agent"):
        return False
    while at >= 0 and len(whole[at]) > shared:
        chain.append(at)
        above = turns[at]["parent"]
        keeps = above >= 0 and turns[at]["prefix_length"] >= min(len(whole[above]), shared)
        at = above if keeps else -1
    if at < 0 or shared >= len(prompts[chain[-1]]):
        return True
    return any(claims(prompt[shared:], turns[t]["generation_token_ids"], len(prompts[t]) - shared) for t in chain)


def read_turn(turn: Json) -> None:
    """Check the types of a turn, and read its log-probabilities as numbers."""
    for name in ("parent", "prefix_length", "digest"):
        if type(turn[name]) is not int:
            raise ValueError(f"{name}: got {turn[name]!r}, expected an integer")
    for name in ("prompt_delta_ids", "generation_token_ids"):
        for at, token in enumerate(turn[name]):
            if type(token) is not int or not 0 <= token < 1 << 31:
                raise ValueError(f"{name}[{at}]: got {token!r}, expected a token id")
    count, values = len(turn["generation_token_ids"]), turn["generation_log_probs"]
    values = [NON_FINITE.get(value, value) if isinstance(value, str) else value for value in values]
    for name in ("generation_log_probs", "top_log_probs"):
        if turn.get(name) is not None and len(turn[name]) != count:
            raise ValueError(f"{name}: got {len(turn[name])}, expected {count}, one per generated token")
    for at, value in enumerate(values):
        if type(value) not in (int, float):
            raise ValueError(f"generation_log_probs[{at}]: got {value!r}, expected a number")
        if not (turn.get("rendered") and math.isnan(value)) and not (math.isfinite(value) and value <= 1e-6):
            raise ValueError(f"generation_log_probs[{at}]: got {value!r}, expected a finite number, at most 0")
    turn["generation_log_probs"] = values
    if turn["finish_reason"] not in ("stop", "length", "repetition", "abort"):
        raise ValueError(f"finish_reason: got {turn['finish_reason']!r}, expected stop, length, repetition or abort")
    spans = turn.get("weight_versions")
    if spans and [*(span["start"] for span in spans), count] != [0, *(span["end"] for span in spans)]:
        raise ValueError(f"weight_versions: the spans do not follow each other from 0 to {count}")


def check_turn(turns: list[Json], prompts: list[Ids], whole: list[Ids], stop_ids: set[int], text_stops: bool) -> None:
    """Check the turn after those that ``prompts`` and ``whole`` (prompt and generation) have, and add its own."""
    k = len(whole)
    turn, parent, shared = turns[k], turns[k]["parent"], turns[k]["prefix_length"]
    if not -1 <= parent < k or (parent < 0) != (k == 0):
        raise ValueError(f"parent: got {parent}, expected {f'0 to {k - 1}' if k else '-1 at the first turn'}")
    before = whole[parent] if k else []
    if not 0 <= shared <= len(before):
        raise ValueError(f"prefix_length: got {shared}, expected 0 to {len(before)}")
    if (digest := digest_of(turn, turns[parent]["digest"] if k else 0)) != turn["digest"]:
        raise ValueError(f"digest: got {turn['digest']}, its content has {digest}: one of them was changed")
    prompts.append(before[:shared] + turn["prompt_delta_ids"])
    lengths = [common_prefix(other, prompts[k]) for other in whole]
    best = max(range(k), key=lambda other: (lengths[other], other), default=-1)
    generation = turn["generation_token_ids"]
    whole.append(prompts[k] + generation)
    if k and (best, lengths[best]) != (parent, shared):
        raise ValueError(f"parent {parent}, prefix_length {shared}: its prompt shares {lengths[best]} with turn {best}")
    ended = generation and (not stop_ids or generation[-1] in stop_ids)
    if turn["finish_reason"] == "stop" and not (ended or text_stops or turn.get("rendered")):
        raise ValueError(f"the stop token is missing: got {generation[-1:]} at the end, expected one of {stop_ids}")


def check_row(row: Json, stop_ids: set[int], text_stops: bool, faults: list[tuple[int | None, str]]) -> list[int]:
    """Add what is wrong with a row to ``faults``; returns how many rollouts, turns, breaks and sampled tokens were read."""
    turns, prompts, whole = row["turns"], list[Ids](), list[Ids]()
    chosen = {entry["turn"] for entry in json.loads(row["extra"]).get("sampling", []) if entry.get("stop")}
    for k, turn in enumerate(turns):
        try:
            read_turn(turn)
            check_turn(turns, prompts, whole, stop_ids, text_stops or k in chosen)
        except (ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
            faults.append((k, str(error) if type(error) is ValueError else f"not a turn: {error!r}"))
            if len(whole) <= k:
                return [1, k, 0, 0]  # later turns may be built on this one
    breaks = [k for k in range(len(turns)) if is_break(turns, prompts, whole, k)]
    generated = [token for turn in turns for token in turn["generation_token_ids"]]
    context = sum(len(turn["prompt_delta_ids"]) for turn in turns)
    if row["n_breaks"] != len(breaks):
        left = [f"leaves turn {turns[k]['parent']} at token {turns[k]['prefix_length']}" for k in breaks[:1]]
        what = " ".join([f"n_breaks: got {row['n_breaks']!r}, the turns have {len(breaks)}: the prompt", *left])
        faults.append((breaks[0] if breaks else None, what.removesuffix(": the prompt")))
    counts = {"n_turns": len(turns), "n_context_tokens": context, "n_generated_tokens": len(generated)}
    for name, ids in (("prompt_hash", prompts[0] if turns else []), ("generation_hash", generated)):
        counts |= {name: signed(xxh3(struct.pack(f"<{len(ids)}i", *ids)))} if row.get(name) is not None else {}
    faults += [(None, f"{k}: got {row[k]!r}, the turns have {count}") for k, count in counts.items() if row[k] != count]
    named = [message["turn"] for message in row["messages"] if message.get("turn") is not None]
    faults += [(None, f"messages: got turn {turn}, of {len(turns)}") for turn in named if not 0 <= turn < len(turns)]
    return [1, len(turns), len(breaks), len(generated)]


def files_of(path: Path) -> list[Path]:
    """A file itself; of a run its segments: a Parquet file before its lines."""
    parts = sorted((path / "rollouts").glob("part-*"))
    segments = {part.stem: part for part in parts if part.suffix in (".jsonl", ".parquet")}
    return list(segments.values()) if path.is_dir() else [path]


def row_of(line: bytes, in_run: bool) -> Any:
    """The value of a line, without its checksum, which it has in the folder of a run."""
    content, key, checksum = line.rstrip(b"\n").rpartition(b',"crc32":"')
    if (key or in_run) and checksum != b'%08x"}' % zlib.crc32(content):
        raise ValueError("the checksum of the line is another")
    return json.loads(content + b"}" if key else line)


def rows_of(path: Path, in_run: bool) -> Iterator[Any]:
    """The rows of a Parquet file, or lines of JSON."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches(batch_size=64):
            yield from batch.to_pylist()
    else:
        with path.open("rb") as lines:
            for line in lines:
                if in_run and not line.endswith((b"\n", b'"}')):
                    sys.stdout.write(f"{path}: its torn last line is no row\n")
                elif line.strip():
                    yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Exit code 1 for a fault. Rows count from 0.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=".jsonl or .parquet file, or a run folder")
    about = "token that ends a generation; repeatable (default: those in the run folder's run.json, else not checked)"
    parser.add_argument("--stop-id", type=int, action="append", metavar="ID", help=about)
    arguments = parser.parse_args()
    seen, n_faults, totals = set[str](), 0, [0, 0, 0, 0]
    for file in (file for path in arguments.paths for file in files_of(path)):
        facts = file.parent.parent / "run.json"
        run = json.loads(facts.read_text()) if file.parent.name == "rollouts" and facts.is_file() else {}
        stop_ids = set(arguments.stop_id or run.get("chat", {}).get("stop_token_ids", ()))
        text_stops = bool((run.get("identity", {}).get("sampling") or {}).get("stop"))
        in_run = file.absolute().parent.name == "rollouts" and file.name.startswith("part-")
        rows, number = rows_of(file, in_run), -1
        while True:
            faults: list[tuple[int | None, str]] = []
            number += 1
            try:
                row = next(rows)
                row = row_of(row, in_run) if isinstance(row, bytes) else row
                totals = [a + b for a, b in zip(totals, check_row(row, stop_ids, text_stops, faults), strict=True)]
                faults += [(None, "rollout_id: is there twice")] if row["rollout_id"] in seen else []
                seen.add(row["rollout_id"])
            except StopIteration:
                break
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                faults.append((None, f"cannot be read as a rollout: {error!r}"))
            n_faults += len(faults)
            for turn, what in faults:
                sys.stdout.write(f"{file}: row {number}" + ("" if turn is None else f", turn {turn}") + f": {what}\n")
    counts = "{:,} rollouts, {:,} turns, {:,} breaks, {:,} sampled tokens".format(*totals)
    sys.stdout.write(f"faults: {n_faults} in {counts}\n")
    return 1 if n_faults or not totals[0] else 0


if __name__ == "__main__":
    sys.exit(main())
