"""NeMo Gym rows become rollouts rows with exact token evidence, and bad rows are named."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.formats.conversion.importing import Importing, Numbering, Reject
from gymdata.formats.nemo_gym.read import table_rows
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import resolve
from gymdata.store.columns import check_rollout
from tests.validate.generate import nemo_rows, with_ids, write_lines


def imported(folder: Path, rows: list[Any], reject: Reject | None = None) -> list[dict[str, Any]]:
    """The rows that an import would write, as a run takes them."""
    importing = Importing("run", Numbering(), reject)
    rollouts = list(table_rows(resolve(str(write_lines(folder / "a.jsonl", rows))), importing))
    return [{**row, "started_at": datetime.fromisoformat(row["started_at"])} for row in rollouts]


def test_tokens_are_taken_over_exactly(tmp_path: Path) -> None:
    """Prompts rebuilt from the imported turns, generations and log-probabilities are those of the source."""
    rows = nemo_rows(n=4)
    for made, source in zip(imported(tmp_path, rows), rows, strict=True):
        check_rollout(made)
        prompts = expand_prompts(made["turns"])
        for turn, prompt in enumerate(prompts):
            item = with_ids(source, turn)
            assert prompt.tolist() == item["prompt_token_ids"]
            assert made["turns"][turn]["generation_token_ids"].tolist() == item["generation_token_ids"]
            assert (
                made["turns"][turn]["generation_log_probs"].tolist()
                == np.float32(item["generation_log_probs"]).tolist()
            )


def test_a_position_in_a_file_of_tasks_is_no_name_of_a_task(tmp_path: Path) -> None:
    """Files of different tasks that both count from 0 do not become one group; rows of one task do, and a given id wins."""
    rows = nemo_rows(n=5)
    for row, (position, prompt) in zip(rows, [(0, "a"), (0, "a"), (0, "b"), (1, "a"), (0, "a")], strict=True):
        row["_ng_task_index"] = position
        row["responses_create_params"]["input"] = prompt
    rows[4]["task_id"] = "mine"
    one, same, other, later, named = (row["group_id"] for row in imported(tmp_path, rows))
    assert one == same
    assert len({one, other, later, named}) == 4
    assert (one.partition("-")[0], later.partition("-")[0], named) == ("0", "1", "mine")


@pytest.mark.parametrize("kind", ["input_image", "input_audio", "image_url", "input_file"])
def test_a_row_with_more_than_text_is_left_out_by_name(kind: str, tmp_path: Path) -> None:
    """Its ids would be trained without what they stand for."""
    row, more = nemo_rows(n=2)
    messages = row["responses_create_params"]["input"]
    messages.append({"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, {"type": kind}]})
    rejected: list[tuple[int, str, str]] = []
    rollouts = imported(tmp_path, [row, more], reject=lambda bad: rejected.append((bad.line, bad.code, bad.reason)))
    ((line, code, reason),) = rejected
    assert (len(rollouts), line, code) == (1, 1, "S102")
    assert "images, audio, video and files are not trained" in reason
    assert kind in reason


def test_a_row_with_audio_in_its_metadata_is_left_out_by_name(tmp_path: Path) -> None:
    """Code that names an address has none."""
    row, more = nemo_rows(n=2)
    row["responses_create_params"]["metadata"] = "{'audio_url': 'data:audio/wav;base64,UklGRg=='}"
    more["responses_create_params"]["metadata"] = {"test": "assert page.image_url == audio_url"}
    rejected: list[str] = []
    rollouts = imported(tmp_path, [row, more], reject=lambda bad: rejected.append(bad.reason))
    assert (len(rollouts), len(rejected)) == (1, 1)
    assert rejected[0].startswith("metadata.audio_url (images, audio and video are not trained)")


def test_odd_shapes_are_read(tmp_path: Path) -> None:
    """Input as text, content as parts, nested outputs, unknown roles and incomplete responses."""
    rows = nemo_rows(n=2, turns=1)
    rows[0]["responses_create_params"]["input"] = "what?"
    rows[0]["response"]["output"] = [rows[0]["response"]["output"]]
    rows[0]["response"] |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    rows[1]["responses_create_params"]["input"] = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "be"}, {"type": "input_text", "text": " kind"}],
        },
        {"role": "narrator", "content": None},
    ]
    first, second = imported(tmp_path, rows)
    assert (first["status"], first["stop_reason"]) == ("truncated", "max_output_tokens")
    assert first["messages"][0] == {"role": "user", "content": "what?"}
    assert [(m["role"], m["content"]) for m in second["messages"][:2]] == [("system", "be kind"), ("other", "")]
    for row in (first, second):
        check_rollout(row)
