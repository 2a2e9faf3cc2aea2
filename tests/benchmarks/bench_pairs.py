"""How fast pairs are selected from a million scored rollouts, and what their ids and masks cost.

Selection: groups of 8, shuffled, 2 % unscored, text ids, against plain Python over columns as lists, without tokens.
Columns: the best and the worst of each group from their turns to prompt, ids, mask and log-probs of both sides, against
pyarrow's ``take`` of these columns had they been there. Checking every turn's ids,
log-probs and digest comes on top, in a row of its own.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from gymdata.commands.pairs.contents import token_columns
from gymdata.commands.pairs.select import select_pairs
from gymdata.rollouts.soundness import refuse_unsound_turns
from gymdata.rollouts.turn_columns import TurnColumns
from tests.benchmarks.bench_experience import rollouts
from tests.benchmarks.rows import Row, interleave, seconds

ROLLOUTS, GROUP, CAP = 1_000_000, 8, 4
TOKEN_ROLLOUTS = 100_000
LISTS = ("prompt_ids", "completion_ids", "completion_mask", "completion_logprobs")


def frame(n: int = ROLLOUTS) -> pa.Table:
    rng = np.random.default_rng(0)
    order = rng.permutation(n)
    scores = rng.integers(0, 5, n) / 4.0
    groups = [f"group-{i // GROUP:08d}" for i in order.tolist()]
    return pa.table(
        {
            "group_id": groups,
            "task_id": groups,
            "rollout_id": [f"{i:032x}" for i in order.tolist()],
            "rollout_index": pa.array(order % GROUP, pa.int32()),
            "score": pa.array(scores[order], mask=rng.random(n) < 0.02),
        }
    )


def plain(columns: dict[str, list], strategy: str) -> Callable[[], int]:
    """Dicts and loops."""

    def run() -> int:
        groups: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
        for group, score, index, rollout in zip(
            *(columns[c] for c in ("group_id", "score", "rollout_index", "rollout_id")), strict=True
        ):
            if score is not None:
                groups[group].append((-score, index, rollout))
        pairs = []
        for members in groups.values():
            members.sort()
            found = [(members[0], members[-1])] if strategy == "best-worst" else itertools.combinations(members, 2)
            made = [(a[0] - b[0], min(a[1], b[1]), max(a[1], b[1]), a[2], b[2]) for a, b in found if b[0] - a[0] > 1e-9]
            made.sort()
            pairs += made[:CAP]
        return len(pairs)

    return run


def compare(data: pa.Table, columns: dict[str, list], strategy: str, at_least: float) -> Row:
    cap = CAP if strategy == "all" else None
    rival = plain(columns, strategy)

    def ours() -> int:
        return select_pairs(data, strategy, max_per_task=cap).counts.pairs

    assert ours() == rival()
    timing = interleave(ours, rival)
    what = f"pairs {strategy}, {data.num_rows:,} rollouts, against plain Python"
    return Row(what, seconds(timing.ours), seconds(timing.rival), timing.speedup, at_least=at_least)


def training_columns() -> list[Row]:
    """Turns to ids and masks, against copying ids and masks; and the price of the digests."""
    table = rollouts(TOKEN_ROLLOUTS)
    table = table.append_column(
        "score", pa.chunked_array([np.random.default_rng(1).integers(0, 3, table.num_rows) / 2])
    )
    selection = select_pairs(table, "best-worst")
    wanted = np.unique(np.concatenate([selection.chosen, selection.rejected]))
    turns, ids = (table[name].combine_chunks().take(pa.array(wanted)) for name in ("turns", "rollout_id"))
    sides = [pa.array(np.searchsorted(wanted, rows)) for rows in (selection.chosen, selection.rejected)]
    there = token_columns(turns, ids).select(LISTS)

    def copied() -> list[pa.Table]:
        return [there.take(sides[0]), there.select(LISTS[1:]).take(sides[1])]

    def built() -> list[pa.Table]:
        columns = token_columns(turns, ids)
        return [columns.select(LISTS).take(sides[0]), columns.select(LISTS[1:]).take(sides[1])]

    def checked() -> None:
        columns = TurnColumns.of(turns)
        refuse_unsound_turns(columns, ids)
        columns.refuse_altered(ids)

    assert [t.to_pydict() for t in built()] == [t.to_pydict() for t in copied()]
    timing, digests = interleave(built, copied), interleave(checked, copied)
    whole = [w - c for w, c in zip(sorted(timing.ours), sorted(digests.ours), strict=True)]
    tokens = sum(len(column.combine_chunks().flatten()) for column in there.select(LISTS[:2]).columns)
    cost = statistics.median(whole) / statistics.median(timing.rival)
    what = f"ids and masks of {selection.counts.pairs:,} pairs ({tokens:,} tokens) from their turns, against `take` of them"
    return [
        Row(what, seconds(whole), seconds(timing.rival), cost, at_most=2),
        Row(
            "  checking their ids, log-probs and digests, against the same",
            seconds(digests.ours),
            seconds(digests.rival),
            digests.cost,
        ),
    ]


def main() -> list[Row]:
    data = frame()
    columns = {name: data[name].to_pylist() for name in data.column_names}
    return [compare(data, columns, "best-worst", 5), compare(data, columns, "all", 3), *training_columns()]
