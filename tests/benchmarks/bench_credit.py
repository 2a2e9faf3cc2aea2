"""GAE and returns on 4,096 × 4,096, 68 % valid with interior tool spans, against a column-by-column tensor loop.

The loop steps over masked tokens, as ours does: multiplying by the mask is faster, and another result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gymdata import credit
from gymdata.credit import recursions
from tests.benchmarks.rows import Row, interleave, seconds

SIZE, GAMMA, LAM = 4_096, 0.99, 0.95


def batch(size: int = SIZE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 rewards and values, and a mask: each row ends at random and has spans of tool tokens inside."""
    rng = np.random.default_rng(0)
    mask = np.arange(size) < rng.integers(size // 2, size + 1, (size, 1))
    for row in range(size):
        for start in rng.integers(0, size, 4):
            mask[row, start : start + rng.integers(16, 200)] = False
    shape = (size, size)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32), mask


def loop_gae(r: Any, v: Any, m: Any) -> tuple[Any, Any]:
    """One column at a time over torch tensors."""
    import torch

    advantages, returns = torch.zeros(r.shape, dtype=torch.float64), torch.zeros(r.shape, dtype=torch.float64)
    after, advantage = torch.zeros(len(r), dtype=torch.float64), torch.zeros(len(r), dtype=torch.float64)
    for t in range(r.shape[1] - 1, -1, -1):
        valid, value = m[:, t], v[:, t].double()
        fresh = r[:, t] + GAMMA * after - value + GAMMA * LAM * advantage
        advantage = torch.where(valid, fresh, advantage)
        after = torch.where(valid, value, after)
        advantages[:, t] = torch.where(valid, advantage, 0.0)
        returns[:, t] = torch.where(valid, advantage + value, 0.0)
    return advantages, returns


def loop_returns(r: Any, m: Any) -> Any:
    import torch

    out, total = torch.zeros(r.shape, dtype=torch.float64), torch.zeros(len(r), dtype=torch.float64)
    for t in range(r.shape[1] - 1, -1, -1):
        valid = m[:, t]
        total = torch.where(valid, r[:, t] + GAMMA * total, total)
        out[:, t] = torch.where(valid, total, 0.0)
    return out


def without_numba(run: Callable[[], object]) -> Callable[[], object]:
    def changed() -> object:
        kept, recursions.kernels = recursions.kernels, lambda: None
        try:
            return run()
        finally:
            recursions.kernels = kept

    return changed


def main() -> list[Row]:
    import torch

    r, v, m = batch()
    tensors = torch.from_numpy(r), torch.from_numpy(v), torch.from_numpy(m)
    cases = {
        "GAE": (lambda: credit.gae(r, v, m, GAMMA, LAM), lambda: loop_gae(*tensors)),
        "returns": (lambda: credit.cumulative_returns(r, m, GAMMA), lambda: loop_returns(tensors[0], tensors[2])),
    }
    rows = []
    for name, (ours, rival) in cases.items():
        np.testing.assert_allclose(np.asarray(ours()), np.asarray([np.asarray(x) for x in rival()]), atol=1e-4)
        for how, run, bound in (("numba", ours, 20.0), ("numpy alone", without_numba(ours), 2.0)):
            timing = interleave(run, rival, 5)
            what = f"{name} {SIZE:,}², interior masks, {how}, against a masked column loop"
            rows.append(Row(what, seconds(timing.ours), seconds(timing.rival), timing.speedup, at_least=bound))
    return rows
