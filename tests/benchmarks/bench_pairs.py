"""How fast pairs are selected from a million scored rollouts, against plain Python over the same columns.

Groups of 8, shuffled, 2 % unscored, text ids. The Python rival starts from columns as lists, without tokens.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from gymdata.core.pairs import Strategy, select_pairs
from tests.benchmarks.rows import Row, interleave, seconds

ROLLOUTS, GROUP, CAP = 1_000_000, 8, 4


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


def plain(columns: dict[str, list], strategy: Strategy) -> Callable[[], int]:
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


def compare(data: pa.Table, columns: dict[str, list], strategy: Strategy, at_least: float) -> Row:
    cap = CAP if strategy == "all" else None
    rival = plain(columns, strategy)

    def ours() -> int:
        return select_pairs(data, strategy, max_per_task=cap).counts.pairs

    assert ours() == rival()
    timing = interleave(ours, rival)
    what = f"pairs {strategy}, {data.num_rows:,} rollouts, against plain Python"
    return Row(what, seconds(timing.ours), seconds(timing.rival), timing.speedup, at_least=at_least)


def main() -> list[Row]:
    data = frame()
    columns = {name: data[name].to_pylist() for name in data.column_names}
    return [compare(data, columns, "best-worst", 4), compare(data, columns, "all", 3)]
