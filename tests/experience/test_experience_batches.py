"""``load_experiences``: every saved token once, in the published shapes, padded or packed, streamed or shuffled."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import gymdata
from gymdata.errors import DataError, UsageError
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.store import hash_file, tables, write_run_json
from tests.rollout_files import rollout, two_turns, write_run, write_table

pytestmark = pytest.mark.torch

N = 23
OPTIONAL = ("ref_logprobs", "values", "rl_weight", "ce_weight", "ref_kl_weight", "teacher_logprobs")


def rows(n: int = N, optional: bool = True) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    made = []
    for i in range(n):
        context, length = int(rng.integers(1, 6)), int(rng.integers(2, 9))
        mask = [0] * context + [1] + rng.integers(0, 2, length - 1).tolist()
        floats = {
            name: [float(np.float32(x)) if m else 0.0 for x, m in zip(rng.normal(size=len(mask)), mask, strict=True)]
            for name in ("logprobs", "advantages", "returns", *(OPTIONAL if optional else ()))
        }
        made.append({
            "run_id": "r", "task_id": "t", "group_id": "g", "rollout_id": f"rollout-{i}", "sequence_index": 0,
            "input_ids": (rng.integers(3, 90, len(mask))).tolist(), "loss_mask": mask, "turn_starts": [context],
            "reward": float(i), "weight": 1.5, "temperature": 0.5, "policy_hash": "p", "policy_version": 0, **floats,
        })  # fmt: skip
    return made


def write(path: Path, made: list[dict[str, Any]]) -> Path:
    schema = pa.schema([f for f in EXPERIENCES.schema if f.name in made[0]])
    return write_table(pa.Table.from_pylist(made, schema=schema), path, EXPERIENCES)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Several row groups."""
    monkeypatch.setattr(tables.ParquetSink, "group_bytes", 2_000)
    return write(tmp_path / "experiences.parquet", rows())


FIELDS = {"action_log_probs": "logprobs", "base_action_log_probs": "ref_logprobs", "values": "values",
          "returns": "returns", "advantages": "advantages"}  # fmt: skip
#: In ``info``, under their own names.
BESIDE = ("rl_weight", "ce_weight", "ref_kl_weight", "teacher_logprobs")


def test_padded_batches_hold_the_rows(file: Path) -> None:
    """sequences (B, S) padded left, action fields (B, A) for the last A places, nothing added, every row once in order."""
    seen = []
    batches = gymdata.load_experiences(file, 4)
    assert len(batches) == math.ceil(N / 4)
    for batch in batches:
        n, width = batch.sequences.shape
        actions = batch.action_mask.shape[1]
        assert batch.attention_mask.shape == (n, width)
        assert batch.kl is batch.action_entropy is batch.packed_seq_lens is None
        for line in range(n):
            row = rows()[len(seen)]
            length = len(row["input_ids"])
            assert batch.sequences[line, width - length :].tolist() == row["input_ids"]
            assert batch.attention_mask[line].tolist() == [0] * (width - length) + [1] * length
            whole = [0] * (width - length) + row["loss_mask"]
            assert batch.action_mask[line].tolist() == [bool(m) for m in whole[width - actions :]]
            assert sum(whole[: width - actions]) == 0
            values = {column: getattr(batch, field) for field, column in FIELDS.items()}
            for column, value in (values | {name: batch.info[name] for name in BESIDE}).items():
                assert (value.shape, value.dtype) == ((n, actions), torch.float32)
                expected = ([0.0] * (width - length) + row[column])[width - actions :]
                assert value[line].tolist() == expected
            assert batch.info["rollout_id"][line] == row["rollout_id"]
            assert (batch.info["reward"][line], batch.info["total_length"][line]) == (row["reward"], length)
            seen.append(row["rollout_id"])
    assert len(seen) == N


def test_packed_batches_hold_the_rows(file: Path) -> None:
    """(1, total_length), the sequences' lengths, and attention_mask numbering them from 1."""
    at = 0
    for batch in gymdata.load_experiences(file, 5, packed=True):
        some = rows()[at : at + len(batch.packed_seq_lens)]
        at += len(some)
        assert batch.packed_seq_lens.tolist() == [len(r["input_ids"]) for r in some]
        assert batch.sequences.tolist() == [[x for r in some for x in r["input_ids"]]]
        assert batch.action_mask.int().tolist() == [[x for r in some for x in r["loss_mask"]]]
        assert batch.advantages.tolist() == [[x for r in some for x in r["advantages"]]]
        assert batch.info["ce_weight"].tolist() == [[x for r in some for x in r["ce_weight"]]]
        assert batch.attention_mask.tolist() == [[i + 1 for i, r in enumerate(some) for _ in r["input_ids"]]]
        assert batch.samples().sequences is batch.sequences
    assert at == N


def test_heads_are_beside_the_tokens(tmp_path: Path) -> None:
    """(B, A, K) for the last A places, −1 and −inf without an entry, packed (1, total_length, K); a row may have none."""
    made = [
        {**row, "input_ids": ids, "loss_mask": mask, "turn_starts": [1], "top_ids": top_ids, "top_log_probs": top,
         **{name: [0.0] * len(ids) for name in ("logprobs", "advantages", "returns")}}
        for row, ids, mask, top_ids, top in zip(
            rows(3, optional=False), ([3, 4, 5], [6, 7], [8, 9]), ([0, 1, 1], [0, 1], [0, 1]),
            ([[], [4, 9], [5]], [[], [7]], []), ([[], [-0.5, -1.0], [-0.25]], [[], [-0.75]], []), strict=True,
        )
    ]  # fmt: skip
    file, none = write(tmp_path / "experiences.parquet", made), -math.inf
    (batch,) = gymdata.load_experiences(file, 8)
    info = batch.info
    assert info["top_ids"].tolist() == [[[4, 9], [5, -1]], [[-1, -1], [7, -1]], [[-1, -1], [-1, -1]]]
    assert info["top_log_probs"].tolist() == [[[-0.5, -1.0], [-0.25, none]], [[none, none], [-0.75, none]],
                                              [[none, none], [none, none]]]  # fmt: skip
    assert (info["top_ids"].dtype, info["top_log_probs"].dtype) == (torch.int64, torch.float32)
    (packed,) = gymdata.load_experiences(file, 8, packed=True, shuffle_seed=None, columns=["top_ids"])
    assert packed.info["top_ids"].tolist() == [
        [[-1, -1], [4, 9], [5, -1], [-1, -1], [7, -1], [-1, -1], [-1, -1]],
    ]
    assert "top_log_probs" not in packed.info
    shuffled = [
        i for b in gymdata.load_experiences(file, 1, shuffle_seed=1) for i in b.info["top_ids"].ravel().tolist()
    ]
    assert sorted(i for i in shuffled if i >= 0) == [4, 5, 7, 9]


@pytest.mark.parametrize("seed", [None, 7])
def test_ranks_share_the_rows(file: Path, seed: int | None) -> None:
    """Every row on exactly one rank, equally many steps everywhere; what only fills up has no trained token."""
    seen, steps = [], []
    for rank in range(3):
        batches = list(gymdata.load_experiences(file, 2, shuffle_seed=seed, rank=rank, world_size=3))
        steps.append(len(batches))
        seen += [i for b in batches if b.action_mask.any() for i in b.info["rollout_id"]]
    assert len(set(steps)) == 1
    assert sorted(seen) == sorted(r["rollout_id"] for r in rows())
    some = list(gymdata.load_experiences(file, 2, rank=2, world_size=4))[-1]
    assert some.info["rollout_id"] == ["rollout-18"] or some.action_mask.any()


def test_shuffling_is_repeatable_and_the_cache_is_built_once(file: Path) -> None:
    """A seed is an order; another file under the same name is cached anew."""

    def ids(seed: int) -> list[str]:
        return [i for b in gymdata.load_experiences(file, 4, shuffle_seed=seed) for i in b.info["rollout_id"]]

    first = ids(1)
    cache = file.with_name(".experiences.parquet.arrow")
    made = cache.stat().st_mtime_ns
    assert ids(1) == first != ids(2)
    assert sorted(ids(2)) == sorted(first) != first
    assert cache.stat().st_mtime_ns == made
    write(file, rows(5))
    assert sorted(ids(1)) == [f"rollout-{i}" for i in range(5)]
    batch = next(iter(gymdata.load_experiences(file, 5, shuffle_seed=0)))
    line = batch.info["rollout_id"].index("rollout-3")
    length = len(rows()[3]["input_ids"])
    assert batch.sequences[line, -length:].tolist() == rows()[3]["input_ids"]


def test_going_on_from_a_step(file: Path) -> None:
    """start_step gives the batches that were left, shuffled or not."""
    for seed in (None, 3):
        whole = [b.info["rollout_id"] for b in gymdata.load_experiences(file, 4, shuffle_seed=seed)]
        rest = [b.info["rollout_id"] for b in gymdata.load_experiences(file, 4, shuffle_seed=seed, start_step=2)]
        assert rest == whole[2:]
    assert list(gymdata.load_experiences(file, 4, start_step=99)) == []


def test_moving_a_batch_with_missing_fields(tmp_path: Path) -> None:
    """to_device and pin_memory take a batch of a file without optional columns, and one with chosen columns."""
    path = write(tmp_path / "e.jsonl", rows(3, optional=False))
    (batch,) = gymdata.load_experiences(path, 8, columns=["advantages"])
    assert batch.values is batch.action_log_probs is None
    moved = batch.pin_memory().to_device("cpu")
    assert moved.advantages is not None
    assert moved.samples().pin_memory().to_device("cpu").total_length.tolist() == moved.info["total_length"].tolist()
    assert isinstance(moved, gymdata.Experience)
    assert isinstance(moved.samples(), gymdata.Samples)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Tasks with an answer, one with a label too, one whose prompt has two messages, and rollouts with several turns."""
    tasks: dict[str, dict[str, Any]] = {
        "a": {"answer": "4", "label": "math"},
        "b": {"answer": ["x", "y"]},
        "c": {"answer": 7},
    }
    made = [rollout(name, i, float(i), two_turns(5, 40)) for name in tasks for i in range(2)]
    made = [{**row, "task": json.dumps(tasks[row["task_id"]])} for row in made]
    made[4]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    return write_run(tmp_path / "run", made)


@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 3}, {"packed": True}])
def test_texts_are_those_of_the_rollouts(run: Path, options: dict[str, Any]) -> None:
    """prompts, labels and references of each row, in any order, padded and packed; ``samples`` has them too."""
    path = gymdata.experience(run, estimator="grpo").path
    expected = {"a": ("4", "math"), "b": ('["x", "y"]', None), "c": ("7", None)}
    rows = 0
    for batch in gymdata.load_experiences(path, 4, **options):
        samples = batch.samples()
        assert (samples.prompts, samples.labels, samples.references) == (batch.prompts, batch.labels, batch.references)
        assert batch.pad_len == samples.pad_len == (0 if options.get("packed") else None)
        for line, name in enumerate(batch.info["rollout_id"]):
            task = name[0]
            assert batch.prompts[line] == ("Be brief.\n\n" if name == "c-0" else "") + f"question {task}"
            assert batch.references[line] == expected[task][0]
            assert (batch.labels or [None] * 4)[line] == expected[task][1]
            rows += 1
    assert rows == 6


def test_texts_are_found_in_a_run_that_was_moved_and_only_where_asked_for(run: Path) -> None:
    """A run that was moved whole has its rollouts; columns without texts read none."""
    inside = gymdata.experience(run, estimator="grpo").path.relative_to(run)
    moved = run.rename(run.with_name("moved"))
    (batch,) = gymdata.load_experiences(moved / inside, 8, columns=["advantages", "references"])
    assert (batch.references[0], batch.prompts, batch.labels) == ("4", None, None)


def test_rollouts_that_are_gone_or_overwritten_give_no_texts(run: Path, tmp_path: Path) -> None:
    """Texts are None where other rollouts have the same IDs by now, and where no rollouts are left."""
    part = run / "rollouts" / "part-00000.parquet"

    def seal() -> None:
        facts = json.loads((run / "run.json").read_text())
        facts["files"][0]["xxh3"] = hash_file(part)
        (run / "run.json").write_text(json.dumps(facts))

    seal()
    path = gymdata.experience(run, tmp_path / "apart", estimator="grpo").path
    (batch,) = gymdata.load_experiences(path, 8)
    assert batch.prompts is not None
    changed = [{**row, "messages": row["messages"][1:]} for row in gymdata.load_rollouts(run).to_pylist()]
    for change in (lambda: (write_run(run, changed), seal()), part.unlink, lambda: shutil.rmtree(run)):
        change()
        (batch,) = gymdata.load_experiences(path, 8)
        assert batch.prompts is batch.labels is batch.references is None


def test_mistakes_are_named(file: Path, tmp_path: Path) -> None:
    """Before the first batch: no file, another table, numbers that make no sense."""
    with pytest.raises(DataError, match="no such file"):
        gymdata.load_experiences(tmp_path / "none.parquet", 2)
    for bad in ({"batch_size": 0}, {"batch_size": 1, "rank": 2, "world_size": 2}, {"batch_size": 1, "start_step": -1},
                {"batch_size": 1, "columns": ["advantage"]}):  # fmt: skip
        with pytest.raises(UsageError):
            gymdata.load_experiences(file, **bad)
    write_run_json(tmp_path / "empty", {"stage": "experiences"})
    with pytest.raises(DataError, match="is empty"):
        gymdata.load_experiences(tmp_path / "empty", 2)
