"""What one sealed run gives, stage by stage: the yardstick that a rewrite of a stage is held against.

``fixtures/first/run`` was collected from the shipped policy with the shipped tasks. ``fixtures/first/`` holds what the code
of that day made of it: violations, pairs of every strategy, experiences of three estimators, answers of SQL, and for each
trainer the trained tokens and the losses of two steps over all of its data. ``python -m tests.first FOLDER`` makes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import gymdata

ROOT = Path(__file__).parent.parent
FIRST = Path(__file__).parent / "fixtures" / "first"
RUN, POLICY = FIRST / "run", ROOT / "sample_data" / "policy"
STRATEGIES, ESTIMATORS = ("best-worst", "all", "adjacent"), ("grpo", "rloo", "gae")
QUERIES = {
    "rewards": "SELECT task_id, count(*) AS n, sum(reward) AS reward FROM rollouts GROUP BY 1 ORDER BY 1",
    "tokens": "SELECT rollout_id, turn, len(prompt_token_ids) AS prompt, len(generation_token_ids) AS generated,"
    " round(list_sum(generation_log_probs), 3) AS log_prob FROM turns ORDER BY 1, 2",
    "shape": "SELECT n_turns, status, finish_reason, count(*) AS n FROM rollouts GROUP BY ALL ORDER BY ALL",
}
#: What identifies a pair and a sequence, and everything of it that is trained.
PAIR = ("chosen_rollout_id", "rejected_rollout_id", "task_id", "margin", "weight", "prompt_ids", "chosen_ids",
        "rejected_ids", "chosen_mask", "rejected_mask", "chosen_logprobs", "rejected_logprobs")  # fmt: skip
SEQUENCE = ("rollout_id", "sequence_index", "task_id", "input_ids", "loss_mask", "logprobs", "turn_starts", "reward",
            "advantages", "returns", "weight", "temperature", "policy_hash", "policy_version")  # fmt: skip
#: One batch of everything, so that the losses do not hang on the order of rows.
STEPS = {
    "max_steps": 2, "per_device_train_batch_size": 1024, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
    "max_length": 256, "bf16": False, "seed": 3, "logging_steps": 1,
}  # fmt: skip


def ordered(table: pa.Table, columns: tuple[str, ...]) -> pa.Table:
    """The named columns, by the first two of them."""
    return table.select(columns).sort_by([(name, "ascending") for name in columns[:2]]).combine_chunks()


def violations() -> list[list[Any]]:
    """Code, row, turn and position of each that validate finds, sorted."""
    found = gymdata.validate(RUN).to_dict()["violations"]
    return sorted([v["code"], v["rollout_id"], v["turn"], v["position"]] for v in found)


def answers() -> dict[str, list[list[Any]]]:
    """The rows of each query."""
    return {name: [list(row.values()) for row in gymdata.query(sql, RUN).to_pylist()] for name, sql in QUERIES.items()}


def tables(work: Path) -> dict[str, pa.Table]:
    """Pairs by strategy and experiences by estimator, made below ``work``."""
    made: dict[str, pa.Table] = {}
    for strategy in STRATEGIES:
        gymdata.pairs(RUN, output=work / f"pairs-{strategy}", strategy=strategy)
        made[f"pairs-{strategy}"] = ordered(pq.read_table(work / f"pairs-{strategy}" / "pairs.parquet"), PAIR)
    for estimator in ESTIMATORS:
        gymdata.experience(RUN, output=work / f"experiences-{estimator}", estimator=estimator)
        file = work / f"experiences-{estimator}" / "experiences.parquet"
        made[f"experiences-{estimator}"] = ordered(pq.read_table(file), SEQUENCE)
    return made


def trainings(work: Path) -> dict[str, dict[str, Any]]:
    """Trained tokens and the losses of two steps for each trainer, from the files that ``tables`` made below ``work``."""
    trainers = {
        "sft": (gymdata.train_sft, RUN),
        "dpo": (gymdata.train_dpo, work / "pairs-all"),
        "kto": (gymdata.train_kto, RUN),
        "reward": (gymdata.train_reward, work / "pairs-all"),
        "value": (gymdata.train_value, work / "experiences-gae"),
        "rl": (gymdata.train_rl, work / "experiences-grpo"),
    }
    results = {}
    for name, (train, data) in trainers.items():
        output = work / f"train-{name}"
        report = train(data, model=POLICY, output=output, **STEPS).to_dict()
        logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in logged if "loss" in line]
        results[name] = {"trained_tokens": report["counts"]["trained_tokens"], "losses": losses}
    return results


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made = tables(folder / "work")
    for name, table in made.items():
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
    results = {"violations": violations(), "answers": answers(), "trainings": trainings(folder / "work")}
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result, indent=None if name != "trainings" else 1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
