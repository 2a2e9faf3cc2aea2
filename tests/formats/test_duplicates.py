"""A line that stands twice in a file is one rollout twice, in the file and in the run that it is imported into."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.cli.main import main
from gymdata.commands.import_export.run import import_rollouts
from gymdata.commands.validate.fix import fix
from gymdata.commands.validate.run import validate
from gymdata.formats.conversion.importing import Numbering
from gymdata.store import read_table
from tests.formats.published_rows import rllm
from tests.formats.trajectories import ATIF, NAT, verifiers_traces, write_lines
from tests.validate.generate import nemo_rows

TRACE = {
    "trace_id": "t1", "session_id": "s-1", "messages": [{"role": "user", "content": "q"}], "prompt_token_ids": [1, 2],
    "response_message": {"role": "assistant", "content": "a"}, "completion_token_ids": [4, 9], "logprobs": [-0.5, -0.25],
}  # fmt: skip
DETAILS = [{"prompt_token_ids": [[1, 2]], "completion_token_ids": [[4, 9]], "logprobs": [[-0.5, -0.25]]}]
TRIAL = {
    "id": "t1", "task_name": "sum", "trial_name": "sum__1", "agent_info": {}, "agent_result": {"rollout_details": DETAILS},
    "verifier_result": {"rewards": {"reward": 1.0}},
}  # fmt: skip
#: What is changed in the text of a row for other tokens, and for another id.
CHANGES = {
    "rllm": (("[4, 5]", "[4, 6]"), ('"sum:4"', '"sum:5"')),
    "verifiers-traces": ((" 9]", " 8]"), ('"id": "t4"', '"id": "t5"')),
    "rllm-traces": (("[4, 9]", "[4, 8]"), ("t1", "t2")),
    "harbor": (("[4, 9]", "[4, 8]"), ("t1", "t2")),
}


@pytest.mark.parametrize(("source", "rows"), [("nemo-gym", nemo_rows(n=2)), ("nat-trajectories", NAT), ("atif", ATIF)])
def test_a_duplicate_line_is_a_duplicate_in_the_run(source: str, rows: list[Any], tmp_path: Path) -> None:
    """The import counts it and gives it the place of the first in its group, validate of the run names it as D701, and --fix
    drop leaves it out."""
    file = write_lines(tmp_path / "a.jsonl", [*rows, rows[0]])
    summary = import_rollouts(file, tmp_path / "run", source=source)
    assert (summary.rows_in, summary.rollouts, summary.duplicates) == (3, 3, 1)
    assert read_table(tmp_path / "run")["rollout_index"].to_pylist() == [0, 1, 0]
    found = [v for v in validate(tmp_path / "run").violations if v.code == "D701"]
    assert [v.row for v in found] == [2]
    assert "row 0" in (found[0].detail or "")
    fix(tmp_path / "run", "drop", tmp_path / "b.parquet")
    assert "D701" not in validate(tmp_path / "b.parquet").by_code


@pytest.mark.parametrize(("source", "row"), [
    ("rllm", rllm(4)), ("verifiers-traces", verifiers_traces(4)), ("rllm-traces", TRACE), ("harbor", TRIAL),
])  # fmt: skip
def test_a_rollout_of_one_id_in_two_files_is_a_duplicate(source: str, row: dict[str, Any], tmp_path: Path) -> None:
    """Also where the second file says more of it; the same id with other tokens is another rollout, as of another step, and
    so are the same tokens with another id."""
    other_tokens, other_id = ({**json.loads(json.dumps(row).replace(*change))} for change in CHANGES[source])
    for name, again, n in (
        ("same", row, 1),
        ("more", row | {"note": 1}, 1),
        ("tokens", other_tokens, 0),
        ("id", other_id, 0),
    ):
        files = [write_lines(tmp_path / f"{name}-{k}.jsonl", [each]) for k, each in enumerate((row, again))]
        summary = import_rollouts(files, tmp_path / name, source=source)
        assert (summary.rollouts, summary.rejected, summary.duplicates) == (2, 0, n), name
        assert validate(tmp_path / name).by_code.get("D701", 0) == n


def test_import_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command names the number, the code and what to do."""
    rows = nemo_rows(n=2)
    file = write_lines(tmp_path / "a.jsonl", [rows[0], rows[0]])
    assert main(["import", str(file), "-o", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert "1 of 2 rollouts are the same as an earlier one (D701)" in told
    assert "--fix drop" in told


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 3)), max_size=60))
def test_places_are_those_of_the_first_of_its_content(rows: list[tuple[int, int]]) -> None:
    """A row that is like an earlier one has its place; others are numbered in their group, or are groups of their own."""
    numbering, seen, counts = Numbering(), dict[bytes, tuple[str, int]](), Counter[str]()
    for content, group in rows:
        # Some groups are called as those that rows of no group get.
        line, named = b"%d %d" % (content, group), f"row-{group}" if group >= 0 else None
        if line not in seen:
            name = named or f"row-{len(seen)}"
            seen[line] = name, counts[name]
            counts[name] += 1
        assert numbering.of_content(line, named) == seen[line]
