"""Validation of native rollouts: every planted fault is found at its place, clean rollouts are never flagged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymdata.checks.codes.duplicates import Duplicates
from gymdata.checks.violations import CheckSettings
from gymdata.commands.validate.run import validate
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turn_columns import Evidence, from_arrow
from tests.rollout_files import rollout, write_run
from tests.validate.generate import NATIVE_PLANTS, native_rows, one_in_two, reseal, write_native

FORMATS = ["parquet", "jsonl"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_clean_rollouts_are_never_flagged(tmp_path: Path, suffix: str) -> None:
    """Continuing turns, tool messages and differing rewards give an empty report that counts everything."""
    rows = native_rows(n=8, turns=5)
    report = validate(write_native(tmp_path, rows, suffix))
    assert report.violations == []
    assert (report.rollouts, report.turns) == (8, 40)
    assert report.tokens == sum(r["n_context_tokens"] + r["n_generated_tokens"] for r in rows)


@pytest.mark.parametrize("suffix", FORMATS)
def test_planted_faults_are_found_at_their_places(tmp_path: Path, suffix: str) -> None:
    """One fault in every second row is found in that row, turn and position, and the rows between them are clean."""
    rows = one_in_two(native_rows(n=2 * len(NATIVE_PLANTS)), NATIVE_PLANTS)
    report = validate(write_native(tmp_path, rows, suffix))
    violations, expected = [], []
    for row, fault in enumerate(NATIVE_PLANTS):
        position = rows[2 * row + 1]["turns"][3]["prefix_length"] + 1 if fault.code == "T206" else fault.position
        expected.append((fault.name, fault.turn, position))
        of_code = [v for v in report.violations if (v.row, v.code) == (2 * row + 1, fault.code)]
        violations += [(fault.name, v.turn, v.position if position is not None else None) for v in of_code]
    assert violations == expected
    assert {v.row for v in report.violations} == set(range(1, len(rows), 2))


@pytest.mark.parametrize("suffix", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_changed_number_is_found_at_exactly_its_turn(tmp_path: Path, suffix: str, data: st.DataObject) -> None:
    """Whatever id or log-probability is changed, T209 names its turn and nothing else."""
    rows = native_rows(n=3, turns=4)
    row = data.draw(st.integers(0, 2))
    k = data.draw(st.integers(0, 3))
    name = data.draw(st.sampled_from(["prompt_delta_ids", "generation_token_ids", "generation_log_probs"]))
    values = rows[row]["turns"][k][name]
    at = data.draw(st.integers(0, len(values) - 1))
    values[at] = -0.125 if name == "generation_log_probs" else values[at] ^ 1
    report = validate(write_native(tmp_path, rows, suffix), select=["T"])
    assert [(v.code, v.row, v.turn) for v in report.violations] == [("T209", row, k)]


#: Calls, and what they are told as: code, turn, position and severity.
CALLS = {
    "a rewritten token; the turns after it are fine": (
        [([1, 2], [3, 4]), ([1, 2, 3, 9, 5], [6, 7]), ([1, 2, 3, 9, 5, 6, 7, 8], [9])],
        [("T200", 1, 3, "error")],
    ),
    "the same prompt again, and another tool answer to an earlier call": (
        [([1, 2], [3, 4]), ([1, 2], [3, 5]), ([1, 2, 3, 5, 10, 11], [6]), ([1, 2, 3, 5, 20, 21], [7])],
        [("T211", 1, None, "info"), ("T211", 3, None, "info")],
    ),
    "a prompt and generation that begin the prompt of an earlier turn": (
        [([1, 2], [3, 4]), ([1, 2, 3, 4, 5, 6, 7, 8], [9]), ([1, 2, 3, 4, 5], [6, 7])],
        [("T208", 2, None, "error")],
    ),
    "a call that generated nothing": ([([1, 2], []), ([1, 2, 3], [4])], [("T212", 0, None, "info")]),
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("case", CALLS)
def test_calls_are_told_where_they_are(tmp_path: Path, suffix: str, case: str) -> None:
    """A break has the position where it begins; a retry, a branch and an empty generation are information."""
    calls, expected = CALLS[case]
    report = validate(write_native(tmp_path, [rollout("t", 0, 1.0, calls)], suffix), select=["T2"])
    told = [(v.code, v.turn, v.position if v.code == "T200" else None, v.severity) for v in report.violations]
    assert told == expected


def test_a_prefix_that_is_not_the_longest_is_found(tmp_path: Path) -> None:
    """A delta that repeats what the parent already holds is T210 even when its digest fits."""
    rows = native_rows(n=1)
    last = rows[0]["turns"][3]
    parent = rows[0]["turns"][2]
    last["prefix_length"] -= 1
    last["prompt_delta_ids"].insert(0, parent["generation_token_ids"][-1])
    reseal(rows[0])
    rows[0]["n_context_tokens"] += 1
    report = validate(write_native(tmp_path, rows, "parquet"))
    assert [(v.code, v.turn) for v in report.violations] == [("T210", 3)]


def test_missing_ids_are_an_error_unless_the_whole_file_has_none(tmp_path: Path) -> None:
    """T205 warns in a file of texts, and is an error beside rollouts that have ids."""
    texts = [rollout(f"t{i}", 0, 1.0, []) for i in range(2)]
    report = validate(write_native(tmp_path, texts, "parquet"), select=["T205"])
    assert [(v.row, v.severity) for v in report.violations] == [(0, "warning"), (1, "warning")]
    mixed = validate(write_native(tmp_path, [*native_rows(n=1), *texts], "jsonl"), select=["T205"])
    assert [(v.row, v.severity) for v in mixed.violations] == [(1, "error"), (2, "error")]


def test_a_rollout_cut_before_its_first_token_is_no_fault(tmp_path: Path) -> None:
    """A limit that struck before anything was sampled leaves no assistant message, and that is T212 alone."""
    row = rollout("t", 0, 1.0, [([1, 2], [])])
    row["messages"] = [m for m in row["messages"] if m["role"] != "assistant"]
    report = validate(write_native(tmp_path, [row], "parquet"), select=["T", "M"])
    assert [v.code for v in report.violations] == ["T212"]


def test_a_call_of_another_rollout_is_not_answered(tmp_path: Path) -> None:
    """M403 where a rollout begins with the result of a call that the rollout before it ends with."""
    call = {"role": "assistant", "content": "", "turn": 0, "tool_calls": '[{"id": "c0", "function": {"name": "f"}}]'}
    result, answer = {"role": "tool", "content": "4", "tool_call_id": "c0"}, {"role": "assistant", "content": "4"}
    first = rollout("t", 0, 1.0, [([1, 2], [3, 4])], messages=[{"role": "user", "content": "?"}, call])
    second = rollout("u", 0, 0.0, [([1, 2], [3, 5])], messages=[result, answer])
    report = validate(write_native(tmp_path, [first, second], "parquet"), select=["M"])
    assert [(v.code, v.row, v.got) for v in report.violations] == [("M403", 1, "text c0")]


def test_duplicates_and_groups_are_seen_across_files(tmp_path: Path) -> None:
    """D701, D702 and R503 hold over all files of a glob."""
    same = [([1, 2], [3, 4])]
    for index, name in enumerate(["a", "b"]):
        (tmp_path / name).mkdir()
        write_native(tmp_path / name, [rollout("t", index, 1.0, same), rollout("x", 0, 0.5, [([7], [8])])], "parquet")
    report = validate(str(tmp_path / "*" / "rollouts.parquet"))
    assert [(v.code, v.row) for v in report.violations] == [("R503", 0), ("D702", 0), ("D701", 1)]
    assert Path(report.violations[1].file or "").parent.name == "b"


def test_each_run_that_a_glob_matches_brings_its_settings(tmp_path: Path) -> None:
    """L304 is of the run that was sampled with them, also where the first one was not, and a reward is missing where every
    run was to be scored."""
    from gymdata.store import write_run_json

    for name, more in (("a", {}), ("b", {"top_p": 0.9})):
        rows = native_rows(n=2, seed=ord(name))
        run = write_run(tmp_path / name, [{**row, "rollout_id": f"{name}-{row['rollout_id']}"} for row in rows])
        write_run_json(run, {"run_id": name, "identity": {"temperature": 1.0, **more}, "files": []})
    report = validate(str(tmp_path / "*"), select=["L304"])
    assert [(v.code, Path(v.file or "").parents[1].name) for v in report.violations] == [("L304", "b")]


def test_a_run_folder_brings_its_settings(tmp_path: Path) -> None:
    """run.json decides L304, the vocabulary, and whether a missing reward is an error."""
    from gymdata.store import write_run_json

    run = write_run(tmp_path / "run", native_rows(n=2))
    rows = native_rows(n=2)
    rows[1]["reward"] = None
    run = write_run(tmp_path / "run", rows)
    facts = {
        "run_id": "r", "engine": {"vocab_size": 990}, "files": [],
        "identity": {"temperature": 0.7, "logprobs_mode": "raw_logprobs", "top_p": 0.9, "rewards": [{"name": "exact"}]},
    }  # fmt: skip
    write_run_json(run, facts)
    report = validate(run)
    assert [(v.code, v.severity) for v in report.violations] == [("L304", "warning"), ("R501", "error")]
    write_run_json(run, facts | {"engine": {"vocab_size": 500}})
    largest = max(i for r in rows for t in r["turns"] for i in t["generation_token_ids"] + t["prompt_delta_ids"])
    assert largest >= 500
    assert "T206" in validate(run).by_code


def test_select_ignore_and_strict(tmp_path: Path) -> None:
    """Prefixes select and ignore codes, one of which may be a text, not its letters; strict makes warnings errors."""
    rows = native_rows(n=2)
    rows[0]["reward"] = rows[1]["reward"] = 1.0
    rows[0]["turns"][0]["digest"] += 1
    path = write_native(tmp_path, rows, "parquet")
    assert validate(path).by_code == {"R503": 1, "T209": 1}
    assert validate(path, select=["T2"]).by_code == validate(path, select="T209").by_code == {"T209": 1}
    assert validate(path, ignore="T209").by_code == {"R503": 1}
    assert validate(path, ignore=["T", "R5"]).by_code == {}
    assert validate(path, ignore=["T"]).errors == 0
    assert validate(path, ignore=["T"], strict=True).errors == 1


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", "d", "é"]),
            st.sampled_from([None, "g", "h", ""]),
            st.sampled_from([(), (1,), (1, 2), (2,)]),
            st.sampled_from([None, 0.0, 1.0, float("nan"), float("inf")]),
        ),
        max_size=12,
    ),
    cut=st.integers(0, 12),
)
def test_what_is_alike_is_found_as_one_by_one(
    rows: list[tuple[str, str | None, tuple[int, ...], float | None]], cut: int
) -> None:
    """D701, D702 and R503 over two files are those that a walk over all rows with dictionaries finds."""
    across = Duplicates(CheckSettings())
    for file, part in (("x", rows[:cut]), ("y", rows[cut:])):
        if part:
            evidence = _evidence(part)
            evidence.file = file
            list(across.find(evidence))
    places = [("x", n) for n in range(len(rows[:cut]))] + [("y", n) for n in range(len(rows[cut:]))]
    seen: dict[str, tuple[str, int]] = {}
    same: dict[object, str] = {}
    groups: dict[str, list[tuple[tuple[str, int], float]]] = {}
    expected = []
    for place, (name, group, ids, reward) in zip(places, rows, strict=True):
        if seen.setdefault(name, place) != place:
            expected.append(("D701", *place, f"first seen at {seen[name][0]} row {seen[name][1]}"))
            continue
        if group is None:
            continue
        if ids and (group, ids) in same:
            expected.append(("D702", *place, f"same tokens as {same[group, ids]}"))
        elif ids:
            same[group, ids] = name
        if reward is not None:
            groups.setdefault(group, []).append((place, reward))
    for group, found in groups.items():
        rewards = [reward for _, reward in found]
        if len(found) > 1 and np.isfinite(rewards[0]) and len(set(rewards)) == 1:
            expected.append(("R503", *found[0][0], f"group {group}"))
    assert sorted((v.code, v.file, v.row, v.detail) for v in across.finish()) == sorted(expected)


def _evidence(rows: list[tuple[str, str | None, tuple[int, ...], float | None]]) -> Evidence:
    ids, groups, generated, rewards = zip(*rows, strict=True)
    turns = [{"parent": -1, "prefix_length": 0, "prompt_delta_ids": [7], "generation_token_ids": list(one),
              "generation_log_probs": [-1.0] * len(one), "digest": 0} for one in generated]  # fmt: skip
    columns: dict[str, Any] = {"rollout_id": ids, "group_id": groups, "reward": rewards, "turns": [[t] for t in turns]}
    kinds = {name: ROLLOUTS.schema.field(name).type for name in columns}
    return from_arrow(pa.record_batch({n: pa.array(v, kinds[n]) for n, v in columns.items()}), 0)
