"""Batches that trainers dump become rollouts with the ids, log-probabilities, spans and rewards that the dump has."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.conversion.masked import Masked
from tests.formats.dumped import DUMPS, VERL, pickled, read, sequences

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
    arrays = {name: np.array(value) for name, value in columns.items()}
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
     "row 1: response_mask[3]: got tokens of the response after its padding"),
    ({"response_mask": [[1, 1, 0, 1], [1, 2, 0, 0], [1, 0, 0, 0]]}, "row 1: response_mask[1]: got 2, expected 0 or 1"),
    ({"rm_scores": [[0, 0, 0, 1.0], [0, math.nan, 0, 0], [0, 0, 0, 0]]}, "row 1: rm_scores: got nan, expected a finite"),
    ({"prompts": [[5, 2**31], [5, 6], [0, 7]]}, "row 0: prompts[1]: got 2147483648"),
])  # fmt: skip
def test_a_row_that_contradicts_itself_is_named_with_its_place(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The other rows are rollouts."""
    (tmp_path / "gen_batch.dp").write_bytes(batch(**changes))
    rows, bad = read(tmp_path / "gen_batch.dp", "verl-skip")
    assert len(rows) == 2
    assert [row.reason[: len(reason)] for row in bad] == [reason]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(("content", "why"), [
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
    assert "its first rows are of no known format" in capsys.readouterr().err
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
