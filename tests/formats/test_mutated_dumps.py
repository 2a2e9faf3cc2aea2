"""Mutated dumps with ids are read or named: no crash, and no id, mask, log-probability or reward that the dump has not."""

from __future__ import annotations

import copy
import json
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.commands.check.rollouts import check_rollouts
from gymdata.errors import DataError
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.formats.dumped import pickled, read
from tests.formats.trajectories import copy_and_last, places

ODD: list[Any] = [None, True, 1, 0, -1, 5, 0.5, -0.25, 2**31, 2**70, float("nan"), "x", [], {}, [5], [[1]], {"a": None}]
N = 250
#: Of a rollout up to its last sampled token: ids, 1 where one was sampled, log-probabilities of these, reward.
Facts = tuple[list[int], list[int], list[float], float | None]
IDS = {"tokens", "token_ids", "prompt_token_ids", "completion_token_ids", "generation_token_ids"}
MASKS = {"loss_mask", "mask"}
LOG_PROBS = {"rollout_log_probs", "inference_logprobs", "logprobs", "generation_log_probs"}

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

#: Of logs with a call per line: the prompt, what was sampled, its log-probabilities.
CALLS = [([1, 2], [3, 4], [-0.5, -0.25]), ([1, 2, 3, 4, 9], [5, 6], [-1.0, -2.0])]
SAID = {"role": "assistant", "content": "x"}
#: Format → the rows of a file.
DUMPS: dict[str, list[dict[str, Any]]] = {
    "slime": SAMPLES,
    "prime-rl-tokens": [EXPORTED, EXPORTED | {"export_sequence_idx": 5}],
    "verifiers-traces": [TRACE, TRACE | {"id": "u"}],
    "rllm-traces": [
        {"trace_id": f"t{n}", "session_id": "s", "messages": [{"role": "user", "content": "q"}, *[SAID] * n],
         "response_message": SAID, "prompt_token_ids": prompt, "completion_token_ids": ids, "logprobs": log_probs,
         "timestamp": 1.0 + n}
        for n, (prompt, ids, log_probs) in enumerate(CALLS)
    ],
    "nemo-gym-tokens": [
        {"rollout_id": "0-1", "model_call_id": f"c{n}", "prompt_token_ids": prompt, "generation_token_ids": ids,
         "generation_log_probs": log_probs, "output_items": [SAID | {"type": "message"}], "created_at": 1.0 + n}
        for n, (prompt, ids, log_probs) in enumerate(CALLS)
    ],
    "harbor": [
        {"task_name": "sum", "trial_name": name, "agent_info": {}, "verifier_result": {"rewards": {"reward": 1.0}},
         "agent_result": {"rollout_details": [dict(zip(("prompt_token_ids", "completion_token_ids", "logprobs"),
                                                       map(list, zip(*CALLS, strict=True)), strict=True))]}}
        for name in "ab"
    ],
    "agentcore": [
        {"rollout_id": name, "token_ids": [5, 6, 1, 2, 3, 9], "loss_mask": [1, 1, 0, 1], "response_length": 4,
         "logprobs": [-0.5, -0.25, 0.0, -1.0], "reward": 1.0, "status": "completed"}
        for name in "ab"
    ],
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


def inner_lists(value: Any, names: set[str]) -> Iterator[list[Any]]:
    """The lists of numbers in the columns of these names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            found = inner if name in names and isinstance(inner, list) and inner else None
            yield from () if found is None else found if isinstance(found[0], list) else [found]
            yield from inner_lists(inner, names)
    elif isinstance(value, list):
        for inner in value:
            yield from inner_lists(inner, names)


def holders(value: Any, names: set[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects with a column of these names, and its name."""
    if isinstance(value, dict):
        yield from ((value, name) for name in value if name in names and value[name])
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from holders(inner, names)


def broken(rows: list[dict[str, Any]], kind: str, source: random.Random) -> list[dict[str, Any]]:
    """The rows with one thing in them that contradicts the rest. Left out is what makes a dump that could have been written:
    another id or reward, a token more that is sampled with probability 1, ids without their last, no mask in slime."""
    rows = copy.deepcopy(rows)
    names = {"cut": LOG_PROBS | MASKS, "shifted": MASKS, "flipped": MASKS, "not a number": LOG_PROBS, "negative": IDS,
             "swapped": IDS & {"completion_token_ids", "generation_token_ids"}, "text": IDS | MASKS | LOG_PROBS}  # fmt: skip
    if kind == "gone":
        holder, name = source.choice(list(holders(rows, IDS | LOG_PROBS)))
        del holder[name]
        return rows
    found = list(inner_lists(rows, names[kind]))
    values = found[0] if kind == "swapped" else source.choice(found)  # from which the next call goes on
    at = source.randrange(len(values))
    if kind == "cut":
        del values[at:]
    elif kind == "shifted":
        values.insert(0, values.pop())
    elif kind == "flipped":
        values[values.index(True) if True in values else 0] = False
    elif kind == "swapped":
        values.reverse()
    else:
        values[at] = {"not a number": float("nan"), "negative": -5, "text": "x"}[kind]
    return rows


def written(name: str, rows: list[dict[str, Any]]) -> bytes:
    if name == "slime":
        return pickle.dumps({"rollout_id": 3, "samples": rows})
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def judged(folder: Path, content: bytes, name: str) -> tuple[list[str], set[Any]]:
    """What the rollouts of a dump have when it is imported, and all that is said of it."""
    folder.mkdir()
    (folder / "dump").write_bytes(content)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            report = check_rollouts(folder / "dump")
            summary = gymdata.import_rollouts(folder / "dump", folder / "run", source=name)
        except DataError as error:
            return [], {str(error)}
    rows = to_rows(read_table(folder / "run")) if summary.rollouts else []
    calls = [
        (prompt.tolist(), list(turn["generation_token_ids"]), list(turn["generation_log_probs"]), row["reward"])
        for row in rows
        for prompt, turn in zip(expand_prompts(row["turns"]), row["turns"], strict=True)
    ]
    said = {(finding.code, finding.times) for finding in report.findings} | {report.log_probs}
    return sorted(map(repr, calls)), said | {str(warning.message) for warning in warned}


@pytest.mark.full
@pytest.mark.parametrize("name", DUMPS)
def test_no_dump_that_contradicts_itself_is_read_without_a_word(name: str, tmp_path: Path) -> None:
    """What differs from the whole dump's ids, masks, log-probabilities and rewards has a finding, or the file an error."""
    whole, said_of_whole = judged(tmp_path / "whole", written(name, DUMPS[name]), name)
    assert whole
    kinds = ["gone", "cut", "shifted", "flipped", "not a number", "negative", "swapped", "text", "half", "twice"]
    has_mask = any(inner_lists(DUMPS[name], MASKS))
    has_calls = any(inner_lists(DUMPS[name], {"completion_token_ids", "generation_token_ids"}))
    kinds = [k for k in kinds if has_mask or k not in ("shifted", "flipped")]
    kinds = [k for k in kinds if has_calls or k != "swapped"]
    kinds = [k for k in kinds if name != "slime" or k != "twice"]
    for seed in range(45):
        kind, source = kinds[seed % len(kinds)], random.Random(seed)
        content = written(name, DUMPS[name] if kind in ("half", "twice") else broken(DUMPS[name], kind, source))
        content = content[: len(content) // 2 + 3] if kind == "half" else content * 2 if kind == "twice" else content
        facts_of_dump, said = judged(tmp_path / str(seed), content, name)
        assert facts_of_dump == whole or said - said_of_whole, (kind, seed)


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
