"""Saved tokens are scored in a number format that the processor does not multiply as on one that does."""

from __future__ import annotations

import numpy as np
import pytest

from gymdata.models.forward import load_policy
from gymdata.models.scoring import ToScore
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.sequences import stitch
from gymdata.store import read_table
from tests.model_files import POLICY

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_are_rounded_as_a_processor_rounds_them(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 multiplies, most log-probs stay near the format's own, and apart from float32's."""
    table = read_table(POLICY.parent / "rollouts" / "clean.jsonl", ROLLOUTS).slice(0, 8)
    sequences = stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())
    to_score = ToScore.of(sequences, np.full(len(table), 5.0))

    def log_probs(dtype: str, multiplies: bool) -> np.ndarray:
        monkeypatch.setattr("gymdata.models._torch.multiplies", lambda dtype: multiplies)
        return load_policy(str(POLICY), dtype, "cpu")[1].log_probs(to_score)[0]

    exact, own, rounded = log_probs("float32", True), log_probs(dtype, True), log_probs(dtype, False)
    assert len(own) > 50
    apart = np.median(np.abs(exact - own))
    assert np.median(np.abs(rounded - own)) < apart / 2
    assert np.median(np.abs(rounded - exact)) > apart / 2
