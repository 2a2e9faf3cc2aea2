"""train-dpo against TRL's own DPOTrainer, train-rl against a bare transformers.Trainer: the same padded batches of the same
sequences on the CPU, the training loop alone. Both sides' losses are compared first, or the race would be of two things."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.rows import Row, Timing, interleave, seconds
from tests.rollout_files import write_table

#: What makes a stock trainer of a file (with further settings), and the tokens in it; and both with the file.
Stock = tuple[Callable[..., Any], int]
Sides = tuple[Path, Callable[..., Any], int]
VOCABULARY, RUNS = 4_096, 5
SETTINGS = {
    "num_train_epochs": 1, "save_strategy": "no", "learning_rate": 1e-5,
    "logging_steps": 1, "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    "gradient_checkpointing": False, "max_length": None, "dataloader_pin_memory": False,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sequences to train: ``siblings`` answers to each of ``prompts`` prompts, of lengths drawn from a half-open range."""

    name: str
    prompts: int
    siblings: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    batch: int

    def drawn(self, rng: np.random.Generator) -> Iterator[tuple[int, list[int], list[int]]]:
        """(number of the prompt, prompt, answer)."""
        for number in range(self.prompts):
            prompt = drawn(rng, *self.prompt)
            for _ in range(self.siblings):
                yield number, prompt, drawn(rng, *self.answer)


PLAIN = Shape("8 steps of 4", prompts=32, siblings=1, prompt=(30, 90), answer=(80, 160), batch=4)


def model_folder(folder: Path) -> Path:
    """A random Qwen3 of about 5 million parameters, with the sample policy's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from gymdata.commands.demo.run import sample_data

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sample_data() / "policy").save_pretrained(folder)
    return folder


def drawn(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(3, VOCABULARY, int(rng.integers(low, high))).tolist()


def started(algorithm: str, file: Path, model: Path, out: Path, shape: Shape, **own: Any) -> Any:
    """Our trainer of a job, as a training has it."""
    from gymdata.commands.train.prepared import DATA, prepare
    from gymdata.commands.train.settings import TRAINERS
    from gymdata.commands.train.trainers import run

    kind = TRAINERS[algorithm]
    reserved = {"max_length", "report_to", "disable_tqdm"}
    given = {name: value for name, value in SETTINGS.items() if name not in reserved}
    given |= {"per_device_train_batch_size": shape.batch}
    given |= {name: value for name, value in own.items() if name not in kind.model_fields}
    own = {name: value for name, value in own.items() if name in kind.model_fields}
    config = kind.load(None, {"model": str(model), "output": str(out), **own, **given})
    data = prepare(out / "job" / DATA, config.parts(str(file)))
    job = {
        **config.own(), "trainer": algorithm, "data": str(file), "model": str(model), "output": str(out),
        "policy_hash": "", "own_keys": [], "settings": given,
        "trained_tokens": data.trained().as_json(),
    }  # fmt: skip
    return run.assemble(job)[0]


def raced(ours: Any, rival: Any) -> Timing:
    """Both trainings in turn, once their losses were found alike."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        require_equal_losses(ours, rival)
        return interleave(ours.train, rival.train, RUNS)


def require_equal_losses(ours: Any, rival: Any) -> None:
    """Train both once; raises RuntimeError when their losses differ."""

    def losses(trainer: Any) -> list[float]:
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    ours.train(), rival.train()
    if not np.allclose(losses(ours), losses(rival), rtol=1e-3, atol=1e-4):
        raise RuntimeError(f"the two do not train the same: {losses(ours)} and {losses(rival)}")


def dpo_sides(folder: Path, model: Path, shape: Shape) -> Sides:
    """Pairs whose completions are all generated, and TRL's trainer of them."""
    from gymdata.rollouts.schema import PAIRS
    from tests.train.trainers.conftest import pair_table

    rng = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {name: [] for name in PAIRS.schema.names if name not in PAIRS.optional}
    for i, (_, prompt, chosen) in enumerate(shape.drawn(rng)):
        rejected = drawn(rng, *shape.answer)
        row = {
            "pair_id": f"{i}", "run_id": "r", "task_id": f"{i}", "prompt": [], "chosen": [], "rejected": [],
            "chosen_rollout_id": f"c{i}", "rejected_rollout_id": f"r{i}", "margin": 1.0, "weight": 1.0,
            "source": "reward", "policy_hash": "", "policy_version": 0, "temperature": 1.0,
            "prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected,
        }  # fmt: skip
        for side, ids in (("chosen", chosen), ("rejected", rejected)):
            row |= {f"{side}_mask": [1] * len(ids), f"{side}_logprobs": [-1.0] * len(ids)}
        for name, value in row.items():
            rows[name].append(value)
    file = write_table(pair_table(rows), folder / "pairs.parquet", PAIRS)
    return file, *dpo_stock(file, model, shape, folder)


def dpo_stock(file: Path, model: Path, shape: Shape, folder: Path) -> Stock:
    """TRL's trainer of a file of pairs. It has no masks inside a completion: its collator gets the file's."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    from gymdata.commands.train.trainers.exact import pad_id
    from gymdata.rollouts.schema import PAIRS
    from gymdata.store import read_table

    sides = ("chosen", "rejected")
    names = ("prompt_ids", *(f"{side}_{what}" for side in sides for what in ("ids", "mask")))
    columns = read_table(file, PAIRS, columns=names).to_pydict()

    class Tokenised(DPOTrainer):
        """TRL's trainer on ids that are there already: its loop is raced, not its tokenising."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _set_signature_columns_if_needed(self) -> None:
            super()._set_signature_columns_if_needed()
            self._signature_columns = [*self._signature_columns, "chosen_mask", "rejected_mask"]

    class Masked(DataCollatorForPreference):
        """Only what was generated counts."""

        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super().torch_call(examples)
            rows = [(len(e["prompt_ids"]), e[f"{side}_mask"]) for side in sides for e in examples]
            for row, (prompt, mask) in zip(batch["completion_mask"], rows, strict=True):
                row[prompt : prompt + len(mask)] = torch.tensor(mask)
            return batch

    def stock(**more: Any) -> Any:
        settings = SETTINGS | {"per_device_train_batch_size": shape.batch} | more
        tokenizer = AutoTokenizer.from_pretrained(model)
        return Tokenised(
            str(model),
            args=DPOConfig(str(folder / "stock"), precompute_ref_log_probs=True, **settings),
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            data_collator=Masked(pad_token_id=pad_id(tokenizer)),
        )

    ids = [columns[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
    return stock, sum(2 * len(p) + len(c) + len(r) for p, c, r in zip(*ids, strict=True))


def sft_sides(folder: Path, model: Path, shape: Shape) -> Sides:
    """Rollouts of one turn, all trained; and TRL's trainer of them."""
    from tests.rollout_files import rollout, write_run

    made = [(f"t{number}-{i}", p, a) for i, (number, p, a) in enumerate(shape.drawn(np.random.default_rng(2)))]
    file = write_run(folder / "run", [rollout(name, 0, 1.0, [(prompt, answer)]) for name, prompt, answer in made])
    return file, *sft_stock(file, model, shape, folder)


def sft_stock(file: Path, model: Path, shape: Shape, folder: Path) -> Stock:
    """TRL's trainer of the generated tokens of a run."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from gymdata.rollouts.schema import ROLLOUTS
    from gymdata.rollouts.sequences import stitch
    from gymdata.store import read_table

    table = read_table(file, ROLLOUTS, columns=("rollout_id", "turns"))
    sequences = stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())
    trained = np.where(sequences.is_trained, sequences.token_ids.values, -100)
    ids, labels = ([part.tolist() for part in np.split(values, sequences.token_ids.offsets[1:-1])]
                   for values in (sequences.token_ids.values, trained))  # fmt: skip

    class Tokenised(SFTTrainer):
        """TRL's trainer on ids that are there already."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    def stock(**more: Any) -> Any:
        settings = SETTINGS | {"per_device_train_batch_size": shape.batch} | more
        return Tokenised(
            str(model),
            args=SFTConfig(str(folder / "stock"), **settings),
            train_dataset=Dataset.from_dict({"input_ids": ids, "labels": labels}),
            processing_class=AutoTokenizer.from_pretrained(model),
        )

    return stock, sum(map(len, ids))


def rl_sides(folder: Path, model: Path, shape: Shape) -> Sides:
    """Experiences for PPO's clipped loss on saved log-probs; and a Trainer with that loss."""
    import pyarrow as pa

    from gymdata.rollouts.schema import EXPERIENCES

    rng = np.random.default_rng(1)
    rows = []
    for i, (number, prompt, answer) in enumerate(shape.drawn(rng)):
        pad, n = [0.0] * len(prompt), len(answer)
        rows.append({
            "run_id": "r", "task_id": f"{number}", "group_id": f"{number}", "rollout_id": f"{i}", "sequence_index": 0,
            "input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * n,
            "logprobs": pad + (-8.3 + 0.1 * rng.normal(size=n)).tolist(), "turn_starts": [len(prompt)], "reward": 1.0,
            "advantages": pad + rng.normal(size=n).tolist(), "returns": [*pad, *([1.0] * n)], "weight": 1.0,
            "temperature": 1.0, "policy_hash": "other", "policy_version": 0,
        })  # fmt: skip
    schema = pa.schema([f for f in EXPERIENCES.schema if f.name in rows[0]])
    file = write_table(pa.Table.from_pylist(rows, schema=schema), folder / "experiences.parquet", EXPERIENCES)
    return file, *rl_stock(file, model, shape, folder)


def rl_stock(file: Path, model: Path, shape: Shape, folder: Path) -> Stock:
    """A Trainer with PPO's clipped loss, of a file of experiences."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from trl.trainer.utils import selective_log_softmax

    from gymdata.rollouts.schema import EXPERIENCES
    from gymdata.store import read_table

    rows = read_table(file, EXPERIENCES, columns=("input_ids", "loss_mask", "logprobs", "advantages")).to_pylist()

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

    def bare(**more: Any) -> Any:
        settings = {name: value for name, value in SETTINGS.items() if name != "max_length"}
        settings |= {"per_device_train_batch_size": shape.batch} | more
        return Bare(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=TrainingArguments(str(folder / "bare"), remove_unused_columns=False, **settings),
            train_dataset=rows,
            data_collator=collate,
        )

    return bare, sum(len(row["input_ids"]) for row in rows)


def _rows(what: str, tokens: int, ours: Any, rival: Any) -> list[Row]:
    """Tokens/s by the clock, which the bound is for, and by CPU time, which other work on the machine disturbs less."""
    timing = raced(ours, rival)
    rows = []
    for name, mine, theirs in (("", timing.ours, timing.rival), (", CPU time", timing.ours_cpu, timing.rival_cpu)):
        ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
        speeds = [f"{tokens / statistics.median(t):,.0f} tokens/s, {seconds(t)}" for t in (mine, theirs)]
        rows.append(Row(f"{what}, {PLAIN.name}{name}", *speeds, ratio, None if name else 0.97))
    return rows


def main() -> list[Row]:
    rows = []
    kinds = {
        "dpo": (dpo_sides, "train-dpo against TRL's DPOTrainer"),
        "rl": (rl_sides, "train-rl against a bare Trainer"),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_folder(folder / "model")
        for kind, (sides, what) in kinds.items():
            (folder / kind).mkdir()
            file, rival, tokens = sides(folder / kind, model, PLAIN)
            rows += _rows(what, tokens, started(kind, file, model, folder / kind / "ours", PLAIN), rival())
    return rows
