"""Mutated dumps with ids are read or named: no crash, and no id, mask, log-probability or reward that the dump has not."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.errors import DataError
from gymdata.rollouts.turns import expand_prompts
from tests.formats.dumped import pickled, read
from tests.formats.trajectories import copy_and_last, places

ODD: list[Any] = [None, True, 1, 0, -1, 5, 0.5, -0.25, 2**31, 2**70, float("nan"), "x", [], {}, [5], [[1]], {"a": None}]
N = 250
#: Of a rollout up to its last sampled token: ids, 1 where one was sampled, log-probabilities of these, reward.
Facts = tuple[list[int], list[int], list[float], float | None]

SAMPLES = [
    {"group_index": 0, "index": n, "prompt": "q", "tokens": [5, 6, 1, 2, 3, 9], "response": "a", "response_length": 4,
     "reward": 0.5, "loss_mask": [1, 1, 0, 1], "rollout_log_probs": [-0.5, -0.25, 0.0, -1.0], "status": "completed"}
    for n in range(2)
]  # fmt: skip
EXPORTED = {
    "step": 3, "export_sequence_idx": 4, "env_name": "sums", "token_ids": [5, 6, 1, 2, 3, 9], "advantages": [0.5] * 6,
    "loss_mask": [False, False, True, True, False, True], "inference_logprobs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0],
}  # fmt: skip
NODES = [
    {"parent": n - 1 if n else None, "message": {"role": role, "content": "x"}, "sampled": role == "assistant",
     "token_ids": ids, "mask": [False] * (len(ids) - len(log_probs)) + [True] * len(log_probs), "logprobs": log_probs}
    for n, (role, ids, log_probs) in enumerate([
        ("user", [5, 6], []), ("assistant", [4, 1, 2], [-0.5, -0.25]), ("tool", [3], []), ("assistant", [4, 9], [-1.0]),
    ])
]  # fmt: skip
TRACE = {"id": "t", "task": {"data": {}, "key": "k"}, "agent": {}, "nodes": NODES, "rewards": {"exact": {"score": 1.0}}}
COLUMNS = {
    "prompts": np.array([[5, 6], [0, 7]]), "responses": np.array([[1, 2, 3, 9], [8, 0, 0, 0]]),
    "response_mask": np.array([[1, 1, 0, 1], [1, 0, 0, 0]]),
    "attention_mask": np.array([[1] * 6, [0, 1, 1, 0, 0, 0]]),
    "rollout_log_probs": np.array([[-0.5, -0.25, 0, -1.0], [-2.0, 0, 0, 0]], np.float32),
    "rm_scores": np.array([[0, 0, 0, 1.0], [0.5, 0, 0, 0]], np.float32),
}  # fmt: skip
BATCH = {
    "sequences": np.array([[5, 6, 1, 2, 3, 9], [0, 0, 0, 0, 7, 8]]),
    "attention_mask": np.array([[1] * 6, [0, 0, 0, 0, 1, 1]]), "response_mask": np.array([[1] * 4, [0, 0, 0, 1]]),
    "loss_mask": np.array([[1, 1, 0, 1], [0, 0, 0, 1]], np.float32),
    "rollout_logprobs": np.array([[-0.5, -0.25, 0, -1.0], [0, 0, 0, -2.0]], np.float32),
}  # fmt: skip


def facts(ids: Any, mask: Any, log_probs: Any, reward: Any) -> Facts:
    """Of a source, in the plainest way."""
    mask = [int(value) for value in mask]
    end = max(n for n, value in enumerate(mask) if value) + 1
    known = [float("nan")] * len(mask) if log_probs is None else log_probs
    known = [float("nan") if value is None else value for value in known]
    sampled = [float(np.float32(value)) for value, one in zip(known[:end], mask, strict=False) if one]
    return list(map(int, ids[:end])), mask[:end], sampled, reward


def facts_of(row: dict[str, Any]) -> Facts:
    """Of a row that was read."""
    ids: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    for prompt, turn in zip(expand_prompts(row["turns"]), row["turns"], strict=True):
        assert prompt[: len(ids)].tolist() == ids
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(turn["generation_token_ids"])
        ids = [*prompt.tolist(), *turn["generation_token_ids"].tolist()]
        log_probs += map(float, turn["generation_log_probs"])
    return ids, mask, log_probs, row["reward"]


def mutated(row: Any, source: random.Random) -> Any:
    """A row with one to three values replaced or taken out."""
    for _ in range(source.randint(1, 3)):
        path = source.choice(list(places(row)))
        row, inner = copy_and_last(row, path)
        if source.random() < 0.15:
            del inner[path[-1]]
        else:
            inner[path[-1]] = copy.deepcopy(source.choice(ODD))
    return row


def mutated_columns(columns: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """A batch with a column changed in one value, cut, taken out, or of another type."""
    columns, name = dict(columns), source.choice(list(columns))
    array = columns[name].copy()
    kind = source.choice(["value", "value", "value", "cut", "gone", "float"])
    if kind == "gone":
        del columns[name]
        return columns
    array = array.astype(np.float32) if kind == "float" else array[:, :-1] if kind == "cut" else array
    at = source.randrange(array.shape[0]), source.randrange(array.shape[1])
    values = [0, 1, 2, -1, 7, *([0.5, np.nan, np.inf] if array.dtype.kind == "f" else [])]
    array[at] = source.choice(values)
    return columns | {name: np.ascontiguousarray(array)}


def of_slime(source: random.Random) -> tuple[str, bytes, Callable[[dict[str, Any]], Facts]]:
    samples = [mutated(sample, source) if source.random() < 0.7 else sample for sample in SAMPLES]

    def expected(row: dict[str, Any]) -> Facts:
        sample = samples[json.loads(row["extra"])["row"]]
        n = sample["response_length"]
        mask = sample.get("loss_mask")
        mask = [0] * (len(sample["tokens"]) - n) + ([1] * n if mask is None else mask)
        known = sample.get("rollout_log_probs")
        known = None if known is None else [0.0] * (len(sample["tokens"]) - n) + known
        reward = sample.get("reward")
        return facts(sample["tokens"], mask, known, None if isinstance(reward, dict) else reward)

    return "slime", pickle.dumps({"rollout_id": 3, "samples": samples}), expected


def of_prime_rl(source: random.Random) -> tuple[str, bytes, Callable[[dict[str, Any]], Facts]]:
    row = mutated(EXPORTED, source)
    known = lambda _: facts(row["token_ids"], row["loss_mask"], row["inference_logprobs"], None)  # noqa: E731 - as short as the others are long
    return "prime-rl-tokens", json.dumps(row).encode(), known


def of_traces(source: random.Random) -> tuple[str, bytes, Callable[[dict[str, Any]], Facts]]:
    trace = mutated(TRACE, source)

    def expected(row: dict[str, Any]) -> Facts:
        ids, mask, known = [], [], []
        for node in trace["nodes"]:
            values = iter(node.get("logprobs") or ())
            ids += node.get("token_ids") or []
            mask += node.get("mask") or []
            known += [next(values, float("nan")) if one else 0.0 for one in node.get("mask") or ()]
        return facts(ids, mask, known, row["reward"])

    return "verifiers-traces", json.dumps(trace).encode(), expected


def of_verl(source: random.Random) -> tuple[str, bytes, Callable[[dict[str, Any]], Facts]]:
    columns = mutated_columns(COLUMNS, source)

    def expected(row: dict[str, Any]) -> Facts:
        n = json.loads(row["extra"])["row"]
        if "attention_mask" not in columns:
            return facts_of(row)  # nothing says what is padding
        is_real = columns["attention_mask"][n] != 0
        prompt = columns["prompts"][n][is_real[: columns["prompts"].shape[1]]]
        length = int(is_real[columns["prompts"].shape[1] :].sum())
        before = [0] * len(prompt)
        mask = columns["response_mask"][n][:length] if "response_mask" in columns else [1] * length
        known = columns["rollout_log_probs"][n][:length] if "rollout_log_probs" in columns else [np.nan] * length
        reward = columns["rm_scores"][n][:length].sum() if "rm_scores" in columns else None
        return facts([*prompt, *columns["responses"][n][:length]], [*before, *mask], [*before, *known], reward)

    state = {k: (str(a.dtype), a.shape, np.frombuffer(a.tobytes(), np.uint8)) for k, a in columns.items()}
    return "verl-skip", pickled("verl.protocol", "DataProto", (((2,), None, state), {}, {})), expected


def of_skyrl(source: random.Random) -> tuple[str, bytes, Callable[[dict[str, Any]], Facts]]:
    columns = mutated_columns(BATCH, source)

    def expected(row: dict[str, Any]) -> Facts:
        n = json.loads(row["extra"])["row"]
        ids = columns["sequences"][n][columns["attention_mask"][n] != 0]
        length = int(columns["response_mask"][n].sum())
        first, before = columns["response_mask"].shape[1] - length, [0] * (len(ids) - length)
        known = columns["rollout_logprobs"][n][first:] if "rollout_logprobs" in columns else [np.nan] * length
        return facts(ids, [*before, *columns["loss_mask"][n][first:]], [*before, *known], None)

    tensors = {
        k: {"format": "numpy", "data": a.tobytes(), "shape": a.shape, "dtype": str(a.dtype)} for k, a in columns.items()
    }
    state = {"batch_dict": tensors, "batch_size": 2, "device": None, "metadata": {"pad_size": 0}}
    module = b"cskyrl.backends.skyrl_train.training_batch\n"
    body = b"\x80\x03" + module + b"_rebuild_tensor_batch\n" + module + b"TrainingInputBatch\n"
    return "skyrl-batch", body + pickle.dumps(state, 3)[2:-1] + b"\x86R.", expected


def cases(made: Callable[[random.Random], Any]) -> Iterator[Any]:
    yield from (made(random.Random(seed)) for seed in range(N))


@pytest.mark.parametrize("made", [of_slime, of_prime_rl, of_traces, of_verl, of_skyrl])
def test_a_mutated_dump_is_read_as_it_is_or_named(made: Callable[[random.Random], Any], tmp_path: Path) -> None:
    """Each row is read with what the source has, or is turned down with a code and a reason."""
    n_read = n_bad = 0
    for name, content, expected in cases(made):
        (tmp_path / "dump").write_bytes(content)
        rows, bad = read(tmp_path / "dump", name)
        assert all(row.code and row.reason for row in bad)
        for row in rows:
            np.testing.assert_equal(facts_of(row), expected(row))
        n_read, n_bad = n_read + len(rows), n_bad + len(bad)
    assert min(n_read, n_bad) > N / 20


@pytest.mark.parametrize("made", [of_slime, of_verl, of_skyrl])
def test_a_pickle_with_changed_bytes_is_read_or_refused(made: Callable[[random.Random], Any], tmp_path: Path) -> None:
    """Nothing but an error of ours leaves it."""
    for seed, (name, content, _) in enumerate(cases(made)):
        source = random.Random(seed)
        at = source.randrange(2, len(content))
        changed = content[:at] + (b"" if seed % 2 else bytes([source.randrange(256)]) + content[at + 1 :])
        (tmp_path / "dump").write_bytes(changed)
        try:
            read(tmp_path / "dump", name)
        except DataError:
            continue
