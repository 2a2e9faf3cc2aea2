"""Batches that trainers dump become rollouts with the ids, log-probabilities, spans and rewards that the dump has."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.import_export.summaries import ExportSummary
from gymdata.errors import DataError
from gymdata.formats import format_named
from gymdata.formats.conversion.importing import BadItem, Importing, Numbering
from gymdata.formats.conversion.masked import Masked
from gymdata.rollouts.turns import expand_prompts
from tests.formats.dumped import DUMPS, VERL, pickled, read, sequences
from tests.rollout_files import rollout, write_run

NAMES = ("response", "mask", "log_probs")


def batch(**changes: Any) -> bytes:
    """verl's padded batch of the rollouts of ``VERL``, with other values in some columns."""
    columns = {
        "prompts": [[5, 6], [5, 6], [0, 7]],
        "responses": [[1, 2, 3, 9], [1, 2, 0, 0], [8, 0, 0, 0]],
        "response_mask": [[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]],
        "rollout_log_probs": [[-0.5, -0.25, 0, -1.0], [-0.5, -0.25, 0, 0], [-2.0, 0, 0, 0]],
        "rm_scores": [[0, 0, 0, 1.0], [0, 0.5, 0, 0], [0, 0.0, 0, 0]],
    } | changes
    arrays = {name: np.array(value) for name, value in columns.items() if value is not None}
    state = {k: (str(a.dtype), a.shape, np.frombuffer(a.tobytes(), np.uint8)) for k, a in arrays.items()}
    return pickled("verl.protocol", "DataProto", (((3,), None, state), {}, {}))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["verl-gen_batch.dp", "verl-gen_batch-numpy.dp", "verl-tq_batch.pt"])
def test_batches_that_verl_wrote_are_rollouts_with_their_ids(name: str) -> None:
    """What was sampled is one turn per span of the mask, and the rest its prompt; groups and rewards are the file's."""
    rows, bad = read(DUMPS / name, "verl-skip")
    assert (sequences(rows), bad) == (VERL, [])
    assert [(row["group_id"], row["rollout_index"]) for row in rows] == [("u0", 0), ("u0", 1), ("u1", 0)]
    assert [row["rewards"] for row in rows] == [{"acc": 1.0}, {"acc": 0.0}, {"acc": 0.0}]
    task = json.loads(rows[0]["task"])
    assert task["messages"] == [{"role": "user", "content": "How much is 2+3?"}]
    assert task["reward_model"]["ground_truth"] == "5"
    assert rows[0]["turns"][1]["weight_versions"] == [{"version": "3", "start": 0, "end": 1}]
    assert all(row["messages"] == [] for row in rows)


def test_an_imported_batch_is_sound(tmp_path: Path) -> None:
    """The format is recognised, and validate finds nothing wrong in rollouts without text."""
    file = tmp_path / "gen_batch.dp"
    shutil.copy(DUMPS / "verl-gen_batch-numpy.dp", file)
    summary = gymdata.import_rollouts(file, tmp_path / "run")
    assert (summary.format, summary.rollouts, summary.rejected) == ("verl-skip", 3, 0)
    report = gymdata.validate(tmp_path / "run")
    assert (report.errors, report.warnings) == (0, 0)
    assert (report.turns, report.trainable) == (4, 3)


def test_equal_samples_of_a_prompt_are_rollouts_each(tmp_path: Path) -> None:
    """Their place in the batch, and its step, are part of their identity; the prompt's ids are their group."""
    same = {"responses": [[1, 2], [1, 2], [1, 2]], "prompts": [[5, 6]] * 3, "attention_mask": [[1] * 4] * 3}
    rest = {"response_mask": [[1, 1]] * 3, "rollout_log_probs": [[-0.5, -0.5]] * 3, "rm_scores": [[0.0, 1.0]] * 3}
    ids = []
    for step in ("3", "4"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "gen_batch.dp").write_bytes(batch(**same, **rest))
        rows, _ = read(tmp_path / step / "gen_batch.dp", "verl-skip")
        ids.append([json.loads(row["extra"])["step"] for row in rows])
        assert [row["rollout_index"] for row in rows] == [0, 1, 2]
        assert len({row["group_id"] for row in rows}) == 1
    assert ids == [[3] * 3, [4] * 3]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"response_mask": [[1, 0, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]]},
     "row 0: response_mask[1]: got 0, but rollout_log_probs[1]: the log-probability -0.25 says that it was sampled"),
    ({"response_mask": [[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], "rollout_log_probs": np.zeros((3, 4))},
     "row 2: response_mask: no token is marked as sampled"),
    ({"response_mask": [[1, 1, 0, 1], [1, 1, 0, 1], [1, 0, 0, 0]]},
     "row 1: response_mask[3]: got 1 after the response, in its padding"),
    ({"response_mask": [[1, 1, 0, 1], [1, 2, 0, 0], [1, 0, 0, 0]]}, "row 1: response_mask[1]: got 2, expected 0 or 1"),
    ({"rm_scores": [[0, 0, 0, 1.0], [0, math.nan, 0, 0], [0, 0, 0, 0]]}, "row 1: rm_scores: got nan, expected a finite"),
    ({"prompts": [[5, 2**31], [5, 6], [0, 7]]}, "row 0: prompts[1]: got 2147483648"),
    ({"attention_mask": [[1] * 6, [1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]]},
     "row 1: attention_mask[1]: got 0 between tokens that it counts"),
    ({"attention_mask": [[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]]},
     "row 0: attention_mask[3]: got 0 between tokens that it counts"),
    ({"rm_scores": [[0, 0, 0, 1.0], [0, 0, 0, 0.5], [0, 0, 0, 0]]},
     "row 1: rm_scores[3]: got 0.5 after the response, in its padding"),
    ({"rollout_log_probs": [[-0.5, -0.25, 0, -1.0], [0, -0.5, -0.25, 0], [-2.0, -1, -1, -1]]},
     "row 1: rollout_log_probs[2]: got -0.25 after the response, in its padding"),
])  # fmt: skip
def test_a_row_that_contradicts_itself_is_named_with_its_place(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The other rows are rollouts."""
    (tmp_path / "gen_batch.dp").write_bytes(batch(**changes))
    rows, bad = read(tmp_path / "gen_batch.dp", "verl-skip")
    assert len(rows) == 2
    assert [row.reason[: len(reason)] for row in bad] == [reason]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"attention_mask": None}, "attention_mask: missing, which says what is padding"),
    ({"attention_mask": [[1] * 5] * 3}, "attention_mask: got 5, expected 6, one per token of prompts and responses"),
    ({"rollout_log_probs": [[-0.5] * 5] * 3}, "rollout_log_probs: got 5, expected 4, one per token of responses"),
])  # fmt: skip
def test_a_padded_batch_of_columns_that_do_not_fit_is_none(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Nothing is cut to fit, and padding is not taken for tokens."""
    (tmp_path / "gen_batch.dp").write_bytes(batch(**changes))
    rows, bad = read(tmp_path / "gen_batch.dp", "verl-skip")
    assert (rows, [row.reason for row in bad]) == ([], [f"row {n}: {reason}" for n in range(3)])


def test_a_prompt_that_is_not_that_of_its_group_is_refused() -> None:
    """An advantage would compare answers to different questions."""
    ids = {"prompts": np.array([[5, 6], [7, 8], [5, 6]]), "responses": np.array([[1], [1], [2]])}
    value = {"batch": ids, "non_tensor_batch": {"uid": np.array(["u", "u", "u"])}, "meta_info": {}}
    first, second, third = (item for _, item in format_named("verl-skip").items(value))
    assert (first["row"], third["row"]) == (0, 2)
    assert isinstance(second, BadItem)
    assert str(second) == "uid: got that of row 0, whose prompt is another"


def test_a_column_of_a_batch_that_is_too_short_or_flat_is_named(tmp_path: Path) -> None:
    """Rows before its end are rollouts; each of the others is turned down."""
    dump = tmp_path / "gen_batch.dp"
    dump.write_bytes(batch(rm_scores=[[0, 0, 0, 1.0]]))
    rows, bad = read(dump, "verl-skip")
    assert len(rows) == 1
    assert [row.reason for row in bad] == [
        f"row {n}: rm_scores: got 1, expected 3, one per row of responses" for n in (1, 2)
    ]
    dump.write_bytes(batch(rm_scores=[1.0, 0.5, 0.0]))
    _, bad = read(dump, "verl-skip")
    assert [row.reason for row in bad] == [
        f"row {n}: rm_scores: got {got}, expected a list, one per token of responses"
        for n, got in enumerate((1.0, 0.5, 0.0))
    ]


@pytest.mark.parametrize(("keys", "reason"), [
    (["u0_0_0", "u0"], "row 1: keys[1]: got 'u0', expected UID_SESSION_OUTPUT"),
    (["u0_0_0"], "row 1: keys: got 1, expected 2, one per row of responses"),
])  # fmt: skip
def test_a_key_of_a_batch_that_names_no_rollout_is_named(tmp_path: Path, keys: list[str], reason: str) -> None:
    """The other rows are rollouts."""
    columns = {"prompts": [[5], [5]], "responses": [[1], [2]], "rollout_log_probs": [[-0.5], [-0.5]]}
    value = {"keys": keys, "tags": [{}, {}], "global_steps": 1, "tensordict": columns}
    (tmp_path / "tq_batch.pt").write_bytes(pickle.dumps(value))
    rows, bad = read(tmp_path / "tq_batch.pt", "verl-skip")
    assert (len(rows), [row.reason for row in bad]) == (1, [reason])


@pytest.mark.parametrize(("rewards", "reason"), [
    ({"exact": {"score": "1"}}, "rewards.exact.score: got '1', expected a valid number"),
    ({"exact": {"score": 1.0, "weight": None}}, "rewards.exact.weight: got null, expected a valid number"),
    ({"exact": {"weight": 1.0}}, "rewards.exact.score: is missing"),
    ({"exact": 1.0}, "rewards.exact: got 1.0, expected an object"),
    ([1.0], "rewards: got [1.0], expected an object"),
])  # fmt: skip
def test_a_reward_of_a_trace_that_is_no_term_is_named(tmp_path: Path, rewards: Any, reason: str) -> None:
    """By its path in the trace."""
    node = {"parent": None, "message": {"role": "user", "content": "hi"}}
    trace = {"task": {}, "agent": {}, "nodes": [node], "rewards": rewards}
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace))
    _, bad = read(tmp_path / "traces.jsonl", "verifiers-traces")
    assert [row.reason for row in bad] == [reason]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def zipped() -> bytes:
    """A log of Inspect, or anything else in a zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.json", "{}")
    return file.getvalue()


@pytest.mark.parametrize(("content", "why"), [
    (zipped(), "a zip archive that torch did not write"),
    (pickle.dumps({"batch": {"responses": [[1]]}, "non_tensor_batch": Evil()}), "it has objects of posix.mkdir, and only"),
    (pickle.dumps(Path("a")), "it has objects of pathlib.PosixPath, and only plain data is read"),
    (pickle.dumps([1, 2])[:-2], "damaged"),
    (b"PK\x03\x04 no zip", "damaged"),
])  # fmt: skip
@pytest.mark.torch
def test_a_pickle_of_anything_but_plain_data_is_refused(
    content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence that names the class; nothing of it is run, whatever reads the file."""
    monkeypatch.chdir(tmp_path)
    Path("x.pt").write_bytes(content)
    for reading in (lambda: gymdata.import_rollouts("x.pt", "run"), lambda: gymdata.validate("x.pt")):
        with pytest.raises(DataError, match=f"x.pt: cannot be read: {why}"):
            reading()
    assert not Path("evil").exists()


def test_a_pickle_of_other_content_is_no_known_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"weights": [1]}))
    assert main(["import", str(tmp_path / "x.pkl"), "-o", str(tmp_path / "run")]) == 2
    assert "contains rows of no known format" in capsys.readouterr().err
    assert main(["validate", str(tmp_path / "x.pkl")]) == 2
    assert "a pickle with other content than the batches" in capsys.readouterr().err


def test_spans_of_a_mask_are_turns_that_continue_each_other() -> None:
    """Context between two spans is the next turn's prompt; what follows the last span is no part of a turn."""
    masked = Masked([1], [2, 3, 4, 5, 6], [0, 1, 0, 1, 0], [0, -0.5, 0.0, -1, math.nan], NAMES)
    turns = masked.turns(truncated=True, versions=["7", "8"]).turns
    assert [t["prompt_delta_ids"].tolist() for t in turns] == [[1, 2], [4]]
    assert [(t["parent"], t["prefix_length"]) for t in turns] == [(-1, 0), (0, 3)]
    assert [t["generation_token_ids"].tolist() for t in turns] == [[3], [5]]
    assert [t["finish_reason"] for t in turns] == ["stop", "length"]
    assert [t["weight_versions"][0]["version"] for t in turns] == ["7", "8"]
    assert Masked([1], [2], None, None, NAMES).turns(versions=["7", "8"]).turns[0]["weight_versions"] is None


@pytest.mark.parametrize(("masked", "code", "reason"), [
    (Masked([], [1], None, None, NAMES), "T205", "the prompt has no token ids"),
    (Masked([1], [], None, None, NAMES), "S103", "mask: no token is marked as sampled"),
    (Masked([1], [2, 3], [1], None, NAMES), "L301", "mask: got 1, expected 2, one per token of response"),
    (Masked([1], [2, 3], None, [-1.0], NAMES), "L301", "log_probs: got 1, expected 2, one per token of response"),
    (Masked([1], [2, 3], [1, "x"], None, NAMES), "S102", r"mask\[1\]: got 'x', expected 0 or 1"),
    (Masked([1], [2, 3], [1, 0], [-1.0, -math.inf], NAMES), "S102", r"mask\[1\]: got 0, but log_probs\[1\]"),
])  # fmt: skip
def test_a_mask_that_cannot_be_is_refused(masked: Masked, code: str, reason: str) -> None:
    with pytest.raises(BadItem, match=reason) as error:
        masked.turns()
    assert error.value.code == code


@pytest.mark.torch
def test_samples_that_slime_wrote_are_rollouts_with_their_ids() -> None:
    """Of several spans each has the version of its weights; plain prompts with one span have messages."""
    rows, bad = read(DUMPS / "slime.pt", "slime")
    assert (sequences(rows), bad) == (VERL, [])
    first, second, third = rows
    assert [turn["weight_versions"][0]["version"] for turn in first["turns"]] == ["3", "4"]
    assert (first["status"], first["turns"][-1]["finish_reason"], first["messages"]) == ("truncated", "length", [])
    assert json.loads(first["extra"])["texts"] == {"prompt": "How much is 2+3?", "response": "5ok yes"}
    assert [(m["role"], m["content"], m["turn"]) for m in second["messages"]] == [
        ("user", "How much is 2+3?", None), ("assistant", "5", 0),
    ]  # fmt: skip
    assert [row["rollout_index"] for row in rows] == [0, 1, 0]
    assert first["group_id"] == second["group_id"] != third["group_id"]
    assert json.loads(first["task"])["ground_truth"] == "5"


SAMPLE = {
    "index": 4, "group_index": 1, "rollout_id": None, "prompt": "<|im_start|>user\nHi", "tokens": [5, 6, 1, 2],
    "response": "a", "response_length": 2, "reward": {"exact": 1.0, "why": "x"}, "loss_mask": None,
    "rollout_log_probs": None, "label": None, "weight_versions": ["1", "2"], "status": "completed", "remove_sample": False,
    "metadata": {"k": 1},
}  # fmt: skip


def dump(folder: Path, *samples: dict[str, Any]) -> Path:
    """A plain pickle, as a file of torch holds it."""
    (folder / "3.pt").write_bytes(pickle.dumps({"rollout_id": 3, "samples": [SAMPLE | sample for sample in samples]}))
    return folder / "3.pt"


def test_what_a_sample_does_not_say_is_not_known(tmp_path: Path) -> None:
    """Without log-probabilities they are NaN; of several rewards none is the total; text of a template is no message."""
    ((row,), bad) = read(dump(tmp_path, {}), "slime")
    assert sequences([row]) == [([5, 6], [([], [1, 2], [None, None])], None)]
    assert (row["rewards"], row["messages"], row["turns"][0]["weight_versions"]) == ({"exact": 1.0}, [], None)
    assert bad == []


def test_heads_that_miles_keeps_are_those_of_each_sampled_token(tmp_path: Path) -> None:
    """Of the spans that were sampled, without what fills a list up; a sample without heads has none."""
    sample = {
        "tokens": [5, 6, 1, 2, 3], "response_length": 3, "loss_mask": [1, 0, 1], "weight_versions": None,
        "rollout_topk_token_ids": np.array([[1, 8], [-1, -1], [3, -1]], np.int32),
        "rollout_topk_log_probs": np.array([[-0.5, -1.0], [-np.inf, -np.inf], [-0.25, -np.inf]], np.float32),
    }  # fmt: skip
    (first, second), bad = read(dump(tmp_path, sample, {"index": 5}), "slime")
    assert [turn["top_log_probs"] for turn in first["turns"]] == [
        [[{"id": 1, "log_prob": -0.5}, {"id": 8, "log_prob": -1.0}]], [[{"id": 3, "log_prob": -0.25}]],
    ]  # fmt: skip
    assert (second["turns"][0]["top_log_probs"], bad) == (None, [])


@pytest.mark.parametrize(("sample", "code", "reason"), [
    ({"rollout_topk_token_ids": [[1], [2]], "rollout_topk_log_probs": [[-1.0], []]}, "L301",
     "samples[0]: rollout_topk_token_ids, rollout_topk_log_probs: expected 2 lists each"),
    ({"rollout_topk_token_ids": [[1]], "rollout_topk_log_probs": [[-1.0]]}, "L301", "samples[0]: rollout_topk_token_ids"),
    ({"rollout_topk_token_ids": [[1], [2]]}, "L301", "samples[0]: rollout_topk_token_ids"),
    ({"response_length": 9}, "S102", "samples[0]: response_length: got 9, expected 0 to 4, as many as tokens"),
    ({"response_length": 4}, "T205", "samples[0]: the prompt has no token ids"),
    ({"loss_mask": [1]}, "L301", "samples[0]: loss_mask: got 1, expected 2, one per token of the response"),
    ({"loss_mask": [1, 0], "rollout_log_probs": [-1.0, -2.0]}, "S102", "samples[0]: loss_mask[1]: got 0, but rollout_log"),
    ({"rollout_log_probs": [-1.0, 0.0]}, "S103", "samples[0]: loss_mask: got null, and rollout_log_probs[1] is 0, as wh"),
    ({"rollout_log_probs": [-0.0, -1.0], "weight_versions": []}, "S103", "samples[0]: loss_mask: got null, and rollout_l"),
    ({"tokens": [1, True, 3, 4]}, "S102", "samples[0]: tokens[1]: got True"),
    ({"reward": math.nan}, "R502", "samples[0]: reward: got nan"),
    ({"multimodal_inputs": {"images": [1]}}, "S102", "samples[0]: multimodal_inputs: images, audio and video"),
])  # fmt: skip
def test_a_sample_that_cannot_be_trained_is_named(
    sample: dict[str, Any], code: str, reason: str, tmp_path: Path
) -> None:
    rows, bad = read(dump(tmp_path, sample, {"index": 5}), "slime")
    assert len(rows) == 1
    assert [(row.code, row.reason[: len(reason)]) for row in bad] == [(code, reason)]


@pytest.mark.parametrize("sample", [
    {"rollout_log_probs": [0.0, -1.0], "weight_versions": ["1"]},
    {"rollout_log_probs": [0.0, -1.0], "loss_mask": [1, 1]},
    {"rollout_log_probs": [-0.5, -1.0]},
])  # fmt: skip
def test_a_certain_token_of_one_call_or_of_a_mask_is_sampled(sample: dict[str, Any], tmp_path: Path) -> None:
    """A log-probability of 0 is a sampler's where nothing but its one call can have written the token."""
    ((row,), bad) = read(dump(tmp_path, sample), "slime")
    assert (row["n_generated_tokens"], bad) == (2, [])


def test_samples_that_slime_masks_or_that_failed_have_no_reward(tmp_path: Path) -> None:
    file = dump(
        tmp_path, {"remove_sample": True, "reward": 1.0}, {"status": "aborted", "reward": 1.0}, {"status": "failed"}
    )
    summary = gymdata.import_rollouts(file, tmp_path / "run")
    assert (summary.format, summary.rollouts, summary.rejected, sum(summary.failed.values())) == ("slime", 2, 0, 1)
    assert summary.without_reward == 2


def test_batches_that_skyrl_wrote_are_rollouts_with_their_ids() -> None:
    """Padding, of rows and within them, is left out; rewards are not in the file, and equal advantages are kept."""
    rows, bad = read(DUMPS / "skyrl-global_step_7_training_input.pkl", "skyrl-batch")
    assert (sequences(rows), bad) == ([(prompt, spans, None) for prompt, spans, _ in VERL], [])
    assert [json.loads(row["extra"]) for row in rows] == [
        {"step": 7, "row": 0, "advantage": 0.5}, {"step": 7, "row": 1, "advantage": -0.5},
        {"step": 7, "row": 2, "advantage": 0.0},
    ]  # fmt: skip
    assert [row["rollout_index"] for row in rows] == [0, 1, 0]


@pytest.mark.parametrize(("name", "values", "reason"), [
    ("attention_mask", [1, 0, 1, 1, 0, 1], "attention_mask[1]: got 0 between tokens that it counts"),
    ("rollout_logprobs", [-0.5, 0.0, 0.0, -2.0], "rollout_logprobs[0]: got -0.5 before the response, in its padding"),
    ("loss_mask", [0.0, 1.0, 0.0, 1.0], "loss_mask[1]: got 1.0 before the response, in its padding"),
])  # fmt: skip
def test_what_skyrl_says_of_padding_is_refused_with_its_place(name: str, values: list[float], reason: str) -> None:
    row = {
        "sequences": np.array([0, 0, 0, 0, 7, 8]), "attention_mask": np.array([0, 0, 0, 0, 1, 1]),
        "response_mask": np.array([0, 0, 0, 1]), "loss_mask": np.array([0.0, 0, 0, 1]),
        "rollout_logprobs": np.array([0.0, 0, 0, -2.0]), "step": 7, "row": 0, "group": 0,
    }  # fmt: skip
    importing = Importing("r", Numbering(text=False), lambda _: None)
    form = format_named("skyrl-batch")
    assert [turn["generation_token_ids"].tolist() for turn in form.row(dict(row), importing)["turns"]] == [[8]]
    with pytest.raises(BadItem, match=re.escape(reason)):
        form.row(row | {name: np.array(values)}, importing)


#: As ``TokenExporter.export`` in src/prime_rl/trainer/rl/token_export.py of PrimeIntellect-ai/prime-rl (559b447) writes it.
EXPORTED = {
    "schema_version": 1, "step": 3, "rank": 0, "micro_step": 0, "micro_sequence_idx": 1, "export_sequence_idx": 4,
    "env_name": "sums", "token_ids": [5, 6, 1, 2, 3, 9], "position_ids": [0, 1, 2, 3, 4, 5],
    "loss_mask": [False, False, True, True, False, True], "advantages": [0, 0, 0.5, 0.5, 0, 0.5],
    "inference_logprobs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0], "trainer_logprobs": [0.0, -1, -0.5, -0.25, -2, -1.0],
    "entropy": [1.0] * 6, "mismatch_kl": [None] * 6, "rl_weights": [None] * 6, "ce_weights": [None] * 6,
    "ref_kl_weights": [None] * 6,
}  # fmt: skip


def test_tokens_that_prime_rl_exported_are_rollouts(tmp_path: Path) -> None:
    """An exported sequence is a rollout of its own, also where it repeats another; a contradiction has its place."""
    odd = [False, False, True, False, False, True]
    begun_late = [False, False, False, True, False, True]
    rows = [EXPORTED, EXPORTED | {"export_sequence_idx": 5}, *(EXPORTED | {"loss_mask": m} for m in (odd, begun_late))]
    file = tmp_path / "rank_0.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = gymdata.import_rollouts(file, tmp_path / "run")
    assert (summary.format, summary.rollouts, summary.rejected, summary.duplicates) == ("prime-rl-tokens", 2, 2, 0)
    read_rows, bad = read(file, "prime-rl-tokens")
    assert sequences(read_rows) == [(*VERL[0][:2], None)] * 2
    assert [(row.line, row.reason.partition(":")[0]) for row in bad] == [(3, "loss_mask[3]"), (4, "loss_mask[2]")]
    assert json.loads(read_rows[0]["extra"])["advantage"] == 0.5


def trace(**node: Any) -> dict[str, Any]:
    """A trace of two turns as verifiers (a60a606, verifiers/v1/graph.py) has it, with other fields in its third node."""
    given = [("user", [5, 6], [False] * 2, []), ("assistant", [4, 1, 2], [False, True, True], [-0.5, -0.25])]
    given += [("user", [3], [False], []), ("assistant", [4, 9], [False, True], [-1.0])]
    nodes = [
        {"parent": n - 1 if n else None, "message": {"role": role, "content": role}, "sampled": role == "assistant",
         "token_ids": ids, "mask": mask, "logprobs": log_probs}
        for n, (role, ids, mask, log_probs) in enumerate(given)
    ]  # fmt: skip
    nodes[3] |= node
    return {
        "id": "t",
        "task": {"data": {}, "key": "k"},
        "agent": {},
        "nodes": nodes,
        "rewards": {"exact": {"score": 1.0}},
    }


def test_the_nodes_of_a_trace_are_turns_with_their_ids(tmp_path: Path) -> None:
    """The generation prompt on a node is context; each sampled message names its turn."""
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace()))
    ((row,), bad) = read(tmp_path / "traces.jsonl", "verifiers-traces")
    assert sequences([row]) == [([5, 6, 4], [([], [1, 2], [-0.5, -0.25]), ([3, 4], [9], [-1.0])], 1.0)]
    assert ([message["turn"] for message in row["messages"]], bad) == ([None, 0, None, 1], [])


def test_a_trace_that_was_scored_in_part_keeps_what_was_scored(tmp_path: Path) -> None:
    """Null in ``rewards`` says that scoring did not run (verifiers/v1/trace.py): the total is not known."""
    rewards = {"exact": {"score": 1.0, "weight": 0.5}, "judge": None}
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace() | {"rewards": rewards, "metrics": {"turns": 2.0}}))
    ((row,), bad) = read(tmp_path / "traces.jsonl", "verifiers-traces")
    assert (row["reward"], row["rewards"], bad) == (None, {"exact": 1.0, "turns": 2.0}, [])


def test_a_trace_whose_log_probabilities_are_rounded_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As verifiers 0.4 writes it (``RECORD_FLOAT_DECIMALS`` in verifiers/v1/graph.py), with the tools on its first node."""
    rounded, whole = (
        trace(token_ids=[4, 9, 8, 7], mask=[False, True, True, True], logprobs=[-1.0, -0.1234, last])
        for last in (-2.5678, -2.56781)
    )
    rounded["nodes"][0]["tools"] = [{"type": "function", "name": "add", "description": "Adds.", "parameters": {}}]
    for name, row, n in (("rounded", rounded, 1), ("whole", whole, 0)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        assert main(["import", str(tmp_path / f"{name}.jsonl"), "-o", str(tmp_path / name)]) == 0
        said = "log-probabilities beyond the fourth decimal, which the file rounds, of 1 row are not read"
        assert capsys.readouterr().err.count(said) == n
    ((row,), _) = read(tmp_path / "rounded.jsonl", "verifiers-traces")
    assert json.loads(row["tools"])[0]["function"]["name"] == "add"


@pytest.mark.parametrize(("node", "code", "reason"), [
    ({"sampled": False}, "S102", "nodes[3].mask[1]: got true in a message that was not sampled"),
    ({"mask": [True, False]}, "S102", "nodes[3].mask[1]: got false after a sampled token"),
    ({"mask": [True]}, "L301", "nodes[3].mask: got 1, expected 2, one per token"),
    ({"mask": [False, False], "logprobs": []}, "T205", "nodes[3]: ids of its generation are missing, and other model"),
    ({"logprobs": [-1.0, -2.0]}, "L301", "nodes[3]: got 2, expected 1, one per generated token"),
])  # fmt: skip
def test_a_node_that_contradicts_itself_is_named(node: dict[str, Any], code: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace(**node)))
    rows, bad = read(tmp_path / "traces.jsonl", "verifiers-traces")
    assert [(row.code, row.reason[: len(reason)]) for row in bad] == [(code, reason)]
    assert rows == []


@pytest.mark.parametrize(("ids", "reason"), [
    ({0: [5, 6], 1: [4, 1, 2], 2: [], 3: [4, 9]}, "nodes[2].token_ids: missing in a message that the call of nodes[3] read"),
    ({0: [], 1: [4, 1, 2], 2: [3], 3: [4, 9]}, "nodes[0].token_ids: missing in a message that the call of nodes[1] read"),
    ({0: [], 1: [4, 1, 2], 2: [], 3: [9]}, "nodes[2].token_ids: missing in a message that the call of nodes[3] read"),
    ({0: [], 1: [5, 6, 4, 1, 2], 2: [], 3: [3, 4, 9]}, None),
])  # fmt: skip
def test_a_message_without_ids_that_the_model_read_is_named(
    ids: dict[int, list[int]], reason: str | None, tmp_path: Path
) -> None:
    """Its tokens would be missing in the prompt. A client that does not part a prompt has all of it on the answer
    (``_commit_turn`` in verifiers/v1/graph.py)."""
    row = trace()
    for n, node in enumerate(row["nodes"]):
        sampled = {1: 2, 3: 1}.get(n, 0)
        node |= {"token_ids": ids[n], "mask": [False] * (len(ids[n]) - sampled) + [True] * sampled}
    (tmp_path / "traces.jsonl").write_text(json.dumps(row))
    rows, bad = read(tmp_path / "traces.jsonl", "verifiers-traces")
    assert [(row.code, row.reason) for row in bad] == ([] if reason is None else [("T205", reason)])
    assert [[prompt.tolist() for prompt in expand_prompts(row["turns"])] for row in rows] == (
        [[[5, 6, 4], [5, 6, 4, 1, 2, 3, 4]]] if reason is None else []
    )


@pytest.fixture
def batch_of_a_run(tmp_path: Path) -> tuple[ExportSummary, Path]:
    """A batch of verl's as a run, written as verl loads it."""
    shutil.copy(DUMPS / "verl-gen_batch-numpy.dp", tmp_path / "gen_batch.dp")
    gymdata.import_rollouts(tmp_path / "gen_batch.dp", tmp_path / "run")
    return gymdata.export(tmp_path / "run", tmp_path / "tq_batch.pt", "verl-skip"), tmp_path / "tq_batch.pt"


@pytest.mark.torch
def test_a_run_is_written_as_a_batch_that_verl_loads(
    batch_of_a_run: tuple[ExportSummary, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are those that its agent loop has, and its own function makes a batch of them; verl 0.9.1 was seen to put
    them into its queue (``RolloutTqSkip.maybe_load_and_inject``)."""
    import torch

    module = ModuleType("verl.utils.tensordict_utils")
    monkeypatch.setattr(module, "list_of_dict_to_tensordict", lambda rows: rows, raising=False)
    for name in ("verl", "verl.utils", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    loaded = torch.load(batch_of_a_run[1], weights_only=False)
    first, second, third = loaded["tensordict"]
    assert [first[k].tolist() for k in ("prompts", "responses", "response_mask")] == [
        [5, 6],
        [1, 2, 3, 9],
        [1, 1, 0, 1],
    ]
    assert first["rollout_log_probs"].tolist() == [-0.5, -0.25, 0.0, -1.0]
    assert first["rm_scores"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert (first["input_ids"].tolist(), first["position_ids"].tolist()) == ([5, 6, 1, 2, 3, 9], [0, 1, 2, 3, 4, 5])
    assert (first["num_turns"], first["multi_modal_inputs"]) == (4, {})
    assert first["uid"] == second["uid"] != third["uid"]
    assert [key.split("_")[1:] for key in loaded["keys"]] == [["0", "0"], ["1", "0"], ["0", "0"]]
    assert loaded["keys"][0].split("_")[0] == first["uid"]
    assert loaded["tags"][2] | {"status": ""} == {
        "status": "", "global_steps": 0, "min_global_steps": 0, "max_global_steps": 0,
        "prompt_len": 1, "response_len": 1, "seq_len": 2,
    }  # fmt: skip


@pytest.mark.torch
def test_a_written_batch_is_read_as_the_run_that_it_was(batch_of_a_run: tuple[ExportSummary, Path]) -> None:
    summary, file = batch_of_a_run
    assert (summary.rows_out, summary.account["named rewards"]["lost"]) == (3, 0)
    rows, bad = read(file, "verl-skip")
    assert (sequences(rows), bad) == (VERL, [])


@pytest.mark.torch
def test_what_a_batch_of_verl_has_no_place_for_is_counted(tmp_path: Path) -> None:
    """Rollouts without a reward, and those whose turns are several sequences, are left out."""
    broken = [([1, 2], [3]), ([1, 9], [4])]
    kinds = [(1.0, [([1], [2])]), (None, [([1], [2])]), (1.0, broken)]
    run = write_run(tmp_path / "run", [rollout("t", n, *kind) for n, kind in enumerate(kinds)])
    summary = gymdata.export(run, tmp_path / "tq_batch.pt", "verl-skip")
    assert summary.rows_out == 1
    lost = summary.lost
    assert lost["rollouts without a reward (left out)"] == lost["rollouts of several sequences (left out)"] == 1
