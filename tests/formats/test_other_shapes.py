"""The statements of the documentation make rows that are read of the files that people have most."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

import gymdata
from tests.formats.trajectories import ANSWER, CALLS, QUESTION, RESULT, imported, said, write

PAGE = Path(gymdata.__file__).parent / "docs" / "your-data.md"


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with each file as its project writes it, and what the statements make of them."""
    monkeypatch.chdir(tmp_path)
    choices = [{"index": 0, "finish_reason": "stop", "message": ANSWER | {"refusal": None}}]
    asked = [{"custom_id": name, "url": "/v1/chat/completions", "body": {"messages": [QUESTION]}} for name in "ab"]
    response = {"status_code": 200, "body": {"model": "m", "choices": choices}}
    write(tmp_path / "batch_input.jsonl", *asked)
    write(tmp_path / "batch_output.jsonl", {"id": "x", "custom_id": "b", "response": response, "error": None})
    write(tmp_path / "log.jsonl", {"id": "r", "messages": [QUESTION], "response": {"choices": choices}})
    tree = [("a", None, QUESTION["content"], None), ("b", "a", "x", 1), ("c", "a", "5", 0), ("d", "c", "Sure?", None)]
    named = [dict(zip(("message_id", "parent_id", "text", "rank"), row, strict=True)) for row in tree]
    write(tmp_path / "oasst.jsonl", *named)
    calls = json.dumps([{"name": "add", "arguments": {"a": 2}}])
    write(tmp_path / "xlam.jsonl", {"id": 1, "query": QUESTION["content"], "answers": calls, "tools": "[]"})
    called = {"role": "assistant", "content": None, "tool_calls": json.loads(CALLS)}
    write(tmp_path / "tau.json", [{"task_id": 3, "reward": 1.0, "traj": [QUESTION, called, RESULT, ANSWER]}])
    statements = PAGE.read_text().partition("### Other shapes")[2].partition("```sql\n")[2].partition("```")[0]
    for statement in duckdb.extract_statements(statements):
        duckdb.execute(statement)
    return tmp_path


def test_every_shape_is_read_as_its_statement_says(converted: Path) -> None:
    """Answers, calls, rewards and preferences are those of the files."""
    for name in ("batch", "requests"):
        (row,) = imported(converted / f"{name}.jsonl", "trl-prompt-completion")
        assert said(row["messages"]) == [QUESTION, ANSWER]
    (pair,) = imported(converted / "replies.jsonl", "trl-preference")
    assert [said(pair[side])[-1]["content"] for side in ("prompt", "chosen", "rejected")] == [
        QUESTION["content"], "5", "x",
    ]  # fmt: skip
    (row,) = imported(converted / "calls.jsonl", "trl-messages")
    assert json.loads(row["messages"][1]["tool_calls"])[0]["function"] == {"name": "add", "arguments": {"a": 2}}
    (row,) = imported(converted / "tau.jsonl", "trl-messages")
    assert (len(row["messages"]), row["reward"]) == (4, 1.0)
