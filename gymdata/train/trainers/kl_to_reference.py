"""How far a policy has moved: ``python -m gymdata.train.trainers.kl_to_reference ROLLOUTS MODEL OUT N``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from gymdata import credit
from gymdata.errors import DataError
from gymdata.models._torch import ForwardPolicy, Place
from gymdata.models.model_identity import base_of
from gymdata.models.scoring import ToScore
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.run_json import replacing
from gymdata.train.rollout_data import SFT_COLUMNS, made_sequences, no_token_ids
from gymdata.train.sequence_data import training_experiences


def measure(rollouts: str, model: str, limit: int) -> dict[str, float]:
    """``{"k1", "k3", "tokens", "rollouts"}`` of at most ``limit`` rollouts; greedy ones, which have no distribution to
    compare, are left out."""
    table = read_table(rollouts, ROLLOUTS, SFT_COLUMNS)
    table = table.filter(pc.greater(table["temperature"], 0)).sort_by("rollout_id").slice(0, limit)
    temperature = dict(zip(*(table[name].to_pylist() for name in ("rollout_id", "temperature")), strict=True))
    if not table.num_rows:
        raise DataError.empty(rollouts, "rollouts")
    made = made_sequences(table, rollouts)
    if not made.num_rows:
        raise no_token_ids(rollouts)
    data = training_experiences(made, where=rollouts)
    mask = data.sequences.loss_mask.like(data.sequences.is_trained)
    sampled_at = np.array([temperature[rollout] for rollout in data.rollout_ids])
    base, adapter = base_of(model)
    first = ForwardPolicy(Place(base, None if adapter is None else str(adapter), "float32"))
    scored, _ = first.log_probs(ToScore(data.sequences.token_ids, mask, sampled_at))
    saved = data.sequences.logprobs.values[mask.values]
    means = {kind: float(credit.kl(saved, scored, kind).mean()) for kind in ("k1", "k3")}
    return {**means, "tokens": len(saved), "rollouts": table.num_rows}


def main(words: list[str]) -> int:
    """Write the figures to OUT, whole."""
    rollouts, model, out, limit = words
    with replacing(Path(out)) as temporary:
        temporary.write_text(json.dumps(measure(rollouts, model, int(limit))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
