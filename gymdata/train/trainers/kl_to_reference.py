"""How far a policy has moved from the first one: ``python -m gymdata.train.trainers.kl_to_reference ROLLOUTS MODEL OUT N``.

Invariants: rollouts are the moved policy's own, so the estimate is of KL(policy ‖ first policy) a token, on what it
really does; the same rollouts give the same figure, since the N that are scored are chosen by their ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from trl.trainer.utils import selective_log_softmax

from gymdata import credit
from gymdata.errors import DataError
from gymdata.models._transformers import local_folder
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.run_json import replacing
from gymdata.train.rollout_data import SFT_COLUMNS, made_sequences, no_token_ids
from gymdata.train.sequence_data import training_experiences
from gymdata.train.trainers.batches import padded

_BATCH = 32


def measure(rollouts: str, model: str, limit: int) -> dict[str, Any]:
    """``{"k1", "k3", "tokens", "rollouts"}`` of at most ``limit`` rollouts; greedy ones, which have no distribution to
    compare, are left out."""
    from transformers import AutoModelForCausalLM

    table = read_table(rollouts, ROLLOUTS, SFT_COLUMNS)
    table = table.filter(pc.greater(table["temperature"], 0)).sort_by("rollout_id").slice(0, limit)
    temperature = dict(zip(*(table[name].to_pylist() for name in ("rollout_id", "temperature")), strict=True))
    if not table.num_rows:
        raise DataError.empty(rollouts, "rollouts")
    made = made_sequences(table, rollouts)
    if not made.num_rows:
        raise no_token_ids(rollouts)
    data = training_experiences(made, where=rollouts)
    gpu = torch.cuda.is_available()
    first: Any = AutoModelForCausalLM.from_pretrained(local_folder(model), dtype=torch.float32, local_files_only=True)
    first = first.to("cuda" if gpu else "cpu").eval()
    order = np.argsort(data.sequences.lengths, kind="stable")
    saved, scored = [], []
    for start in range(0, len(order), _BATCH):
        rows = order[start : start + _BATCH]
        heat = torch.tensor([temperature[data.rollout_ids[row]] for row in rows], device=first.device)
        ids, attention, mask = (
            torch.from_numpy(array).to(first.device) for array in padded(data.sequences, rows, 0, None)
        )
        with torch.no_grad():
            logits = first(input_ids=ids, attention_mask=attention).logits[:, :-1].float() / heat[:, None, None]
        found = selective_log_softmax(logits, ids[:, 1:]).cpu().numpy()
        for line, row in enumerate(rows):
            here = mask[line, 1 : data.sequences.lengths[row]].cpu().numpy() != 0
            scored.append(found[line, : len(here)][here])
            saved.append(data.sequences.logprobs[row][1:][here])
    policy, start_policy = np.concatenate(saved), np.concatenate(scored)
    means = {kind: float(credit.kl(policy, start_policy, kind).mean()) for kind in ("k1", "k3")}
    return {**means, "tokens": len(policy), "rollouts": table.num_rows}


def main(words: list[str]) -> int:
    """Write the figures to OUT, whole."""
    rollouts, model, out, limit = words
    with replacing(Path(out)) as temporary:
        temporary.write_text(json.dumps(measure(rollouts, model, int(limit))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
