"""train-dpo against TRL's own DPOTrainer, train-rl against a bare transformers.Trainer: the same padded batches of the same
sequences on the CPU, the training loop alone. Both sides' losses are compared first, or the race would be of two things."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.rows import Row, Timing, interleave, seconds

STEPS, BATCH, VOCABULARY, RUNS = 8, 4, 4_096, 5
SETTINGS = {
    "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "save_strategy": "no", "learning_rate": 1e-5,
    "logging_steps": 1, "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    "gradient_checkpointing": False, "max_length": None, "dataloader_pin_memory": False,
}  # fmt: skip


def model_folder(folder: Path) -> Path:
    """A random Qwen3 of about 5 million parameters, with the sample policy's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from gymdata.demo.run import sample_data

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sample_data() / "policy").save_pretrained(folder)
    return folder


def drawn(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(3, VOCABULARY, int(rng.integers(low, high))).tolist()


def started(algorithm: str, file: Path, model: Path, out: Path, **own: Any) -> Any:
    """Our trainer of a job, as the training process has it."""
    from gymdata.store import read_table
    from gymdata.train.settings import TRAINERS
    from gymdata.train.trainers import run

    kind = TRAINERS[algorithm]
    reserved = {"max_length", "report_to", "disable_tqdm"}
    given = {name: value for name, value in SETTINGS.items() if name not in reserved}
    config = kind.load(None, {"model": str(model), "output": str(out), **own, **given})
    data = config.prepare(read_table(file, kind.table, columns=kind.columns), str(file))
    out.mkdir()
    job = {
        **config.own(), "trainer": algorithm, "data": str(file), "model": str(model), "output": str(out),
        "policy_hash": "", "own_keys": [], "num_processes": 1, "settings": given,
        "trained_tokens": data.sequences.trained().as_json(),
    }  # fmt: skip
    return run.assemble(job)[0]


def raced(ours: Any, rival: Any) -> Timing:
    """Both trainings in turn, once their losses were found alike."""

    def losses(trainer: Any) -> list[float]:
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        ours.train(), rival.train()
        if not np.allclose(losses(ours), losses(rival), rtol=1e-3, atol=1e-4):
            raise RuntimeError(f"the two do not train the same: {losses(ours)} and {losses(rival)}")
        return interleave(ours.train, rival.train, RUNS)


def dpo(folder: Path, model: Path) -> list[Row]:
    """Pairs whose completions are all generated, since stock TRL has no other masks."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from gymdata.rollouts.schema import PAIRS
    from gymdata.store import read_table, write_table
    from tests.train.trainers.conftest import pair_table

    rng = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {name: [] for name in PAIRS.schema.names if name not in PAIRS.optional}
    for i in range(STEPS * BATCH):
        chosen, rejected = drawn(rng, 80, 160), drawn(rng, 80, 160)
        row = {
            "pair_id": f"{i}", "run_id": "r", "task_id": f"{i}", "prompt": [], "chosen": [], "rejected": [],
            "chosen_rollout_id": f"c{i}", "rejected_rollout_id": f"r{i}", "margin": 1.0, "weight": 1.0,
            "source": "reward", "policy_hash": "", "policy_version": 0, "temperature": 1.0,
            "prompt_ids": drawn(rng, 30, 90), "chosen_ids": chosen, "rejected_ids": rejected,
        }  # fmt: skip
        for side, ids in (("chosen", chosen), ("rejected", rejected)):
            row |= {f"{side}_mask": [1] * len(ids), f"{side}_logprobs": [-1.0] * len(ids)}
        for name, value in row.items():
            rows[name].append(value)
    file = write_table(pair_table(rows), folder / "pairs.parquet", PAIRS)
    ours = started("dpo", file, model, folder / "dpo")
    columns = read_table(file, PAIRS, columns=("prompt_ids", "chosen_ids", "rejected_ids")).to_pydict()

    class Tokenised(DPOTrainer):
        """TRL's trainer on ids that are there already: its loop is raced, not its tokenising."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    stock = Tokenised(
        str(model),
        args=DPOConfig(str(folder / "stock"), precompute_ref_log_probs=True, **SETTINGS),
        train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    tokens = sum(2 * len(p) + len(c) + len(r) for p, c, r in zip(*columns.values(), strict=True))
    return _rows("train-dpo against TRL's DPOTrainer", tokens, ours, stock)


def rl(folder: Path, model: Path) -> list[Row]:
    """PPO's clipped loss on saved log-probs."""
    import pyarrow as pa
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from trl.trainer.utils import selective_log_softmax

    from gymdata.rollouts.schema import EXPERIENCES
    from gymdata.store import write_table

    rng = np.random.default_rng(1)
    rows = []
    for i in range(STEPS * BATCH):
        prompt, answer = drawn(rng, 30, 90), drawn(rng, 80, 160)
        pad, n = [0.0] * len(prompt), len(answer)
        rows.append({
            "run_id": "r", "task_id": f"{i}", "group_id": f"{i}", "rollout_id": f"{i}", "sequence_index": 0,
            "input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * n,
            "logprobs": pad + (-8.3 + 0.1 * rng.normal(size=n)).tolist(), "turn_starts": [len(prompt)], "reward": 1.0,
            "advantages": pad + rng.normal(size=n).tolist(), "returns": [*pad, *([1.0] * n)], "weight": 1.0,
            "temperature": 1.0, "policy_hash": "other", "policy_version": 0,
        })  # fmt: skip
    schema = pa.schema([f for f in EXPERIENCES.schema if f.name in rows[0]])
    file = write_table(pa.Table.from_pylist(rows, schema=schema), folder / "experiences.parquet", EXPERIENCES)
    ours = started("rl", file, model, folder / "rl")

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        def column(name: str, kind: Any) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([torch.tensor(e[name], dtype=kind) for e in examples], True)

        batch = {name: column(name, torch.int64) for name in ("input_ids", "loss_mask")}
        batch |= {name: column(name, torch.float32) for name in ("logprobs", "advantages")}
        attention = torch.nn.utils.rnn.pad_sequence([torch.ones(len(e["input_ids"])) for e in examples], True)
        return {**batch, "attention_mask": attention.long()}

    class Bare(Trainer):
        """The loss in ten lines."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            ids, mask = inputs["input_ids"], inputs["loss_mask"][:, 1:]
            logits = model(input_ids=ids, attention_mask=inputs["attention_mask"], use_cache=False).logits[:, :-1]
            ratio = torch.exp(selective_log_softmax(logits, ids[:, 1:]) - inputs["logprobs"][:, 1:])
            gain = inputs["advantages"][:, 1:]
            tokens = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            return (tokens * mask).sum() / mask.sum()

    settings = {name: value for name, value in SETTINGS.items() if name != "max_length"}
    bare = Bare(
        AutoModelForCausalLM.from_pretrained(model),
        args=TrainingArguments(str(folder / "bare"), remove_unused_columns=False, **settings),
        train_dataset=[
            {name: row[name] for name in ("input_ids", "loss_mask", "logprobs", "advantages")} for row in rows
        ],
        data_collator=collate,
    )
    return _rows("train-rl against a bare Trainer", sum(len(row["input_ids"]) for row in rows), ours, bare)


def _rows(what: str, tokens: int, ours: Any, rival: Any) -> list[Row]:
    """Tokens/s by the clock, which the bound is for, and by CPU time, which other work on the machine disturbs less."""
    timing = raced(ours, rival)
    rows = []
    for name, mine, theirs in (("", timing.ours, timing.rival), (", CPU time", timing.ours_cpu, timing.rival_cpu)):
        ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
        speeds = [f"{tokens / statistics.median(t):,.0f} tokens/s, {seconds(t)}" for t in (mine, theirs)]
        rows.append(Row(f"{what}, {STEPS} steps of {BATCH}{name}", *speeds, ratio, None if name else 0.97))
    return rows


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_folder(folder / "model")
        return [*dpo(folder, model), *rl(folder, model)]
