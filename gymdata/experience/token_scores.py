"""Token columns from models: reference log-probs and entropies of a policy, values of a critic.

Invariants: there is one number a sampled token, in turn order, scored under the prompts that were really read;
rollouts that are not kept are not scored, and hold zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gymdata.engines.port import Critic, PolicyModel
from gymdata.engines.scoring import RolloutOrder, ToScore, in_sampled_order
from gymdata.progress import Progress
from gymdata.rollouts.sequences import Stitched


@dataclass(frozen=True, slots=True)
class TokenScores:
    """``columns``: name → lists, one a rollout; ``after``: the value after each rollout's last sampled token."""

    columns: dict[str, pa.ListArray]
    after: np.ndarray | None


def score_tokens(
    batches: Iterator[tuple[int, list[Stitched], pa.RecordBatch]],
    kept: np.ndarray,
    temperature: np.ndarray,
    policy: PolicyModel | None,
    critic: Critic | None,
    progress: Progress | None = None,
) -> TokenScores:
    """Score the rollouts of ``batches`` (first row, the batch stitched, its rows); ``kept`` and ``temperature`` have one
    entry a rollout of all. Raises RefusedError for ids that a model cannot read."""
    lists: dict[str, list[pa.ListArray]] = {}
    after = np.zeros(len(kept)) if critic is not None else None
    if progress is not None:
        progress.update(done=0, total=len(kept))
    for row, parts, batch in batches:
        here = slice(row, row + batch.num_rows)
        order = RolloutOrder(parts, batch.num_rows)
        scored = [_scored(part, kept[here], temperature[here], policy, critic) for part in parts]
        bounds = pa.array(order.offsets, pa.int32())
        for name in scored[0]:
            values = order.tokens([one[name] for one in scored])
            if name == "after":
                assert after is not None
                filled = np.diff(order.offsets) > 0
                after[here][filled] = values[order.offsets[1:][filled] - 1]
            else:
                lists.setdefault(name, []).append(pa.ListArray.from_arrays(bounds, pa.array(values)))
        if progress is not None:
            progress.update(done=here.stop, total=len(kept))
    return TokenScores({name: pa.concat_arrays(parts) for name, parts in lists.items()}, after)


def _scored(
    part: Stitched, kept: np.ndarray, temperature: np.ndarray, policy: PolicyModel | None, critic: Critic | None
) -> dict[str, np.ndarray]:
    """Name → one number a sampled token of ``part``; ``after`` is the value of the state after it."""
    whole = ToScore.of(part, temperature)
    rows = np.flatnonzero(kept[part.rollout])
    given = whole.take(rows)
    places = [np.arange(s.start, s.stop) for s in map(whole.scored_span, rows.tolist())]
    place = np.concatenate(places) if places else np.empty(0, np.int64)
    found: dict[str, Any] = {}
    if policy is not None:
        found["ref_logprobs"], found["entropy"] = policy.log_probs(given, entropy=True)
    if critic is not None:
        found["values"], found["after"] = critic.values(given)
    result = {}
    for name, scores in found.items():
        full = np.zeros(whole.n_scored, np.float32)
        full[place] = scores
        result[name] = in_sampled_order(part, full)
    return result
