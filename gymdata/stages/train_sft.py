"""Supervised training on chosen rollouts: what is refused and announced before a trainer starts.

What always holds: the rollouts are chosen by their saved rewards alone, by the same rule here and in the training process;
the rest is the frame of ``gymdata.stages.train``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymdata
from gymdata.config.train import TrainSftConfig
from gymdata.core.schema import ROLLOUTS
from gymdata.core.training_sft import SFT_COLUMNS, training_rollouts
from gymdata.ports import Progress
from gymdata.stages.train import (
    ModelFacts,
    Runner,
    absolute,
    check_tokenizer,
    check_vocabulary,
    lineage,
    parent_of,
    run_training,
)
from gymdata.stages.train_rl import announce, check_lengths
from gymdata.store import read_table


def train_sft(
    rollouts: str | Path,
    config: TrainSftConfig,
    model: ModelFacts,
    run_job: Runner,
    progress: Progress,
    *,
    command: list[str],
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Train ``config.model`` on the chosen rollouts; returns run.json's content (of a dry run: what it would begin).

    Raises DataError, RefusedError (with the code), UsageError, StoreError, or OutsideError("trainer").
    """
    source = str(rollouts)
    table = read_table(source, ROLLOUTS, columns=SFT_COLUMNS)
    data = training_rollouts(table, config.select, config.min_reward, config.max_length, source)
    check_lengths(data.cost, len(data), model, source)
    check_vocabulary(data.sequences.ids, model, source)
    check_tokenizer(list(lineage(source)), model, source, progress)
    announce(data.cost, progress)
    expected = data.sequences.trained()
    out = config.output.resolve()
    job = {
        "trainer": "sft",
        "data": absolute(source),
        "model": absolute(config.model),
        "policy_hash": model.policy_hash,
        "output": str(out),
        "max_length": config.max_length,
        "select": config.select,
        "min_reward": config.min_reward,
        "settings": config.trainer,
        "trained_tokens": expected.as_json(),
        "num_processes": config.num_processes,
        "own_keys": sorted(type(config).model_fields),
        "resume": resume,
        "dry_run": dry_run,
    }
    begun = {
        "stage": "train-sft",
        "version": gymdata.__version__,
        "command": command,
        "config": config.model_dump(mode="json"),
        "parents": [parent_of(source)],
        "model": vars(model),
        "counts": {
            "rollouts": table.num_rows,
            "rollouts_chosen": len(set(data.rollout_ids)),
            "sequences": len(data),
            "trained_tokens": expected.count,
        },
        "length_limit": data.cost.as_json(),
    }
    del data, table
    return run_training(out, job, begun, run_job, progress, resume=resume, overwrite=overwrite, dry_run=dry_run)
