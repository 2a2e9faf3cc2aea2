"""How far a policy has moved: ``python -m gymdata.commands.train.trainers.kl_to_reference ROLLOUTS MODEL OUT N``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.compute as pc

from gymdata import credit
from gymdata.commands.train.rollout_data import no_token_ids
from gymdata.errors import DataError
from gymdata.models._torch import ForwardPolicy, Place
from gymdata.models.model_identity import base_of
from gymdata.models.scoring import ToScore
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.sequences import stitch
from gymdata.store import read_table
from gymdata.store.run_json import write_text


def measure(rollouts: str, model: str, limit: int) -> dict[str, float]:
    """``{"k1", "k3", "tokens", "rollouts"}`` of at most ``limit`` rollouts; greedy ones, which have no distribution to
    compare, are left out."""
    table = read_table(rollouts, ROLLOUTS, ("rollout_id", "temperature", "turns"))
    table = table.filter(pc.greater(table["temperature"], 0)).sort_by("rollout_id").slice(0, limit).combine_chunks()
    if not table.num_rows:
        raise DataError.empty(rollouts, "rollouts")
    sequences = stitch(table["turns"].chunk(0), table["rollout_id"].chunk(0), where=rollouts)
    to_score = ToScore.of(sequences, table["temperature"].to_numpy())
    if not to_score.n_scored:
        raise no_token_ids(rollouts)
    base, adapter = base_of(model)
    first = ForwardPolicy(Place(base, None if adapter is None else str(adapter), "float32"))
    scored, _ = first.log_probs(to_score)
    saved = sequences.logprobs.values[sequences.is_trained]
    means = {kind: float(credit.kl(saved, scored, kind).mean()) for kind in ("k1", "k3")}
    return {**means, "tokens": len(saved), "rollouts": table.num_rows}


def main(words: list[str]) -> int:
    """Write the figures to OUT, whole."""
    rollouts, model, out, limit = words
    write_text(Path(out), json.dumps(measure(rollouts, model, int(limit))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
