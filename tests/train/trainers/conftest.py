"""A tiny model with a real BPE tokenizer, and pairs whose ids are not what the tokenizer would make of their text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from filelock import FileLock

from gymdata.commands.train.prepared import DATA, PREPARED, opened, prepare
from gymdata.commands.train.settings import TRAINERS
from gymdata.progress import Progress
from gymdata.rollouts.schema import PAIRS
from gymdata.store import write_run_json
from tests.rollout_files import experience_rows, scored_run, write_experiences, write_table

WORDS = "what is the sum of seven and nine the answer is sixteen call tool result done"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Matrices this small are slower on several threads, much slower on a busy machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers with a byte-level BPE of about 300 tokens; special tokens <s>, <e>, <pad>."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "<e>"]
    bpe.train_from_iterator(
        [WORDS] * 20,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<e>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def save_classifier(policy: Path, folder: Path) -> Path:
    """A random classifier of one label with the policy's tokenizer, saved to ``folder``."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(policy)
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, num_labels=1,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pair_rows(policy: Path, n: int = 13, seed: int = 0, **columns: Any) -> dict[str, list[Any]]:
    """n pairs with two generated stretches and tool tokens between them; ids are drawn, so they would not come back from
    their text. ``columns`` replace whole columns."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    rng = np.random.default_rng(seed)
    vocabulary = len(tokenizer)

    def side() -> tuple[list[int], list[int], list[float]]:
        ids: list[int] = []
        mask: list[int] = []
        for length, trained in ((rng.integers(3, 9), 1), (rng.integers(2, 6), 0), (rng.integers(2, 7), 1)):
            ids += rng.integers(3, vocabulary, length).tolist()
            mask += [trained] * int(length)
        return ids, mask, [-float(x) if m else 0.0 for x, m in zip(rng.exponential(size=len(ids)), mask, strict=True)]

    rows: dict[str, list[Any]] = {name: [] for name in PAIRS.schema.names if name not in PAIRS.optional}
    for i in range(n):
        prompt = rng.integers(3, vocabulary, rng.integers(4, 12)).tolist()
        (chosen, chosen_mask, chosen_lp), (rejected, rejected_mask, rejected_lp) = side(), side()
        row = {
            "pair_id": f"pair-{i}", "run_id": "run", "task_id": f"task-{i // 2}",
            "prompt": [message("user", tokenizer.decode(prompt))],
            "chosen": [message("assistant", tokenizer.decode(chosen))],
            "rejected": [message("assistant", tokenizer.decode(rejected))],
            "chosen_rollout_id": f"good-{i}", "rejected_rollout_id": f"bad-{i}", "margin": 1.0, "weight": 1.0,
            "source": "reward", "policy_hash": "unknown", "policy_version": 0, "temperature": 1.0, "prompt_ids": prompt,
            "chosen_ids": chosen, "rejected_ids": rejected, "chosen_mask": chosen_mask, "rejected_mask": rejected_mask,
            "chosen_logprobs": chosen_lp, "rejected_logprobs": rejected_lp,
        }  # fmt: skip
        for name, value in row.items():
            rows[name].append(value)
    return rows | columns


def message(role: str, content: Any) -> dict[str, Any]:
    return {
        "role": role, "content": content, "reasoning": None, "tool_calls": None, "tool_call_id": None, "name": None,
        "turn": None, "extra": None,
    }  # fmt: skip


def pair_table(rows: dict[str, list[Any]]) -> pa.Table:
    schema = pa.schema([f for f in PAIRS.schema if f.name in rows])
    return pa.table({f.name: pa.array(rows[f.name], f.type) for f in schema}, schema=schema)


def write_pairs(folder: Path, rows: dict[str, list[Any]], identity: dict[str, Any] | None = None) -> Path:
    """A pairs file in a folder whose run.json leads to a run with ``identity``."""
    path = folder / "pairs.parquet"
    write_table(pair_table(rows), path, PAIRS)
    parents = []
    if identity is not None:
        write_run_json(folder / "run", {"run_id": "run", "identity": identity})
        parents = [{"path": str(folder / "run"), "run_id": "run"}]
    write_run_json(folder, {"stage": "pairs", "parents": parents})
    return path


@pytest.fixture
def pairs(policy: Path, tmp_path: Path) -> Path:
    return write_pairs(tmp_path, pair_rows(policy))


@pytest.fixture
def make_pairs(policy: Path, tmp_path: Path) -> Any:
    """A pairs file with some columns replaced."""

    def make(identity: dict[str, Any] | None = None, **columns: Any) -> Path:
        folder = tmp_path / "made"
        folder.mkdir(exist_ok=True)
        return write_pairs(folder, pair_rows(policy, **columns), identity)

    return make


def file_for(algorithm: str, policy: Path, folder: Path, **columns: Any) -> Path:
    """A small file of the table that a trainer reads; ``columns`` of pairs."""
    table = TRAINERS[algorithm].table.name
    if table == "pairs":
        return write_pairs(folder, pair_rows(policy, **columns))
    return write_experiences(folder, experience_rows(policy)) if table == "experiences" else scored_run(folder / "run")


def start(
    algorithm: str,
    file: Path,
    policy: Path,
    out: Path,
    settings: dict[str, Any],
    progress: Progress | None = None,
    **job: Any,
) -> tuple[Any, Any]:
    """Trainer and token_checksum of a job."""
    from gymdata.commands.train.trainers import run

    kind = TRAINERS[algorithm]
    given = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "save_strategy": "no", **settings}
    own = {name: value for name, value in job.items() if name in kind.model_fields}
    config = kind.load(None, {"model": str(policy), "output": str(out), **own, **given})
    out.mkdir(parents=True, exist_ok=True)
    # Of several processes the first one prepares what all map: another would take the files away under it.
    folder = out / "job" / DATA
    with FileLock(out / ".preparing"):
        shared = "RANK" in os.environ and (folder / PREPARED).is_file()
        expected = (opened(folder) if shared else prepare(folder, config.parts(str(file)))).trained()
    told: Any = (
        {
            **config.own(), "trainer": algorithm, "data": str(file), "model": str(policy), "output": str(out),
            "policy_hash": "this", "own_keys": [], "trained_tokens": expected.as_json(),
            "settings": given,
        }
        | job
    )  # fmt: skip
    trainer, token_checksum, _ = run.assemble(told, progress=progress)
    return trainer, token_checksum


@pytest.fixture
def assemble(policy: Path, pairs: Path, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """A DPO trainer and its token_checksum."""

    def build(
        file: Path = pairs,
        settings: dict[str, Any] | None = None,
        model: Path | str = policy,
        output: Path | str = tmp_path / "out",
        **job: Any,
    ) -> tuple[Any, Any]:
        return start("dpo", file, Path(model), Path(output), settings or {}, **job)

    return build
