"""NeMo Gym rows through import, export and import again: everything that the shape can hold is the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.rollouts.messages import meant_role
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.interop.trajectories import lines, same, some, text, through_a_run, through_json, value, write_lines
from tests.rollout_files import rollout, two_turns, write_run

_SETTINGS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
token = st.integers(0, 2**31 - 1)
log_prob = st.one_of(st.floats(-50, 0, width=32), st.integers(-3, 0))
# As many as there are tokens, these would be refused by the export.
unsound = st.sampled_from([math.nan, -math.inf, 1e300, "NaN"])
unknown = st.sampled_from([math.nan, "NaN"])


parts = st.lists(st.one_of(text, some(text=text, type=st.just("output_text"))), max_size=2)
content = st.one_of(st.none(), text, parts, value)


@st.composite
def with_ids(draw: st.DrawFn, item: dict[str, Any]) -> dict[str, Any]:
    """``item`` with token lists that are there, null, empty, missing, or of other lengths."""
    generation = draw(st.lists(token, max_size=4))
    size = len(generation)
    fits = st.one_of(*(st.lists(kind, min_size=size, max_size=size) for kind in (log_prob, log_prob, unknown)))
    others = st.lists(st.one_of(log_prob, unsound), max_size=3).filter(lambda found: len(found) != size)
    lists = {
        "prompt_token_ids": draw(st.one_of(st.none(), st.lists(token, max_size=6))),
        "generation_token_ids": draw(st.one_of(st.just(generation), st.none())),
        "generation_log_probs": draw(st.one_of(fits, fits, st.none(), others)),
    }
    for name in draw(st.sets(st.sampled_from(sorted(lists)), max_size=1)):
        del lists[name]
    return item | lists


reasoning = some(summary=content, content=content, id=text).map(lambda i: i | {"type": "reasoning"})
call = some(name=text, arguments=st.one_of(text, st.just('{"a": 1}'), value), call_id=text).map(
    lambda i: i | {"type": "function_call"}
)
said = some(content=content, tool_calls=value, type=st.just("message")).map(lambda i: i | {"role": "assistant"})
answer = some(call_id=text, output=content).map(lambda i: i | {"type": "function_call_output"})
other = some(
    role=st.one_of(st.sampled_from(["user", "system", "developer", "tool", "narrator"]), value).filter(
        lambda r: meant_role(r) is None
    ),
    content=content,
)
plain = st.one_of(reasoning, call, said, answer, other)
item = st.one_of(plain, st.one_of(reasoning, call, said).flatmap(with_ids))
items = st.lists(st.one_of(item, st.lists(item, max_size=2)), max_size=5)
row = st.builds(
    lambda top, response: top | {"response": response},
    some(
        responses_create_params=some(
            input=st.one_of(st.none(), text, st.lists(plain, max_size=2), st.just([])),
            tools=value,
            temperature=value,
            model=value,
        ),
        reward=st.one_of(st.none(), st.integers(-100, 20), st.floats(), st.just("NaN")),
        rollout_id=text,
        task_id=st.one_of(text, value),
    ),
    st.builds(
        lambda more, output: more | {"output": output},
        some(status=st.one_of(st.just("incomplete"), value), incomplete_details=value, created_at=value, model=value),
        items,
    ),
)


def imported(folder: Path, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]:
    """The run's rows, the rows exported from it, and the numbers of rejected lines."""
    summary, exported = through_a_run(write_lines(folder / "source.jsonl", rows), "nemo-gym")
    bad = [row["line"] for row in lines(folder / "run" / "rejected.jsonl")]
    return to_rows(read_table(folder / "run")) if summary.rollouts else [], exported, bad


@_SETTINGS
@given(st.lists(row, min_size=1, max_size=3))
def test_import_export_import_is_the_identity(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """The exported rows are the source's, and importing them gives the very same rollouts."""
    rows = [{"responses_create_params": {}, "response": {"output": []}}, *rows]
    first, exported, bad = imported(tmp_path, rows)
    assert len(first) + len(bad) == len(rows)
    good = [r for n, r in enumerate(rows, 1) if n not in bad]
    assert [sorted(r) for r in exported] == [sorted(r) for r in good]
    assert same([_shorn(r) for r in exported], [_shorn(through_json(r)) for r in good])
    assert same(imported(tmp_path, exported), (first, exported, []))


def _shorn(row: dict[str, Any]) -> dict[str, Any]:
    """Without log-probabilities, which become float32, and in sorted order, for token lists come last."""

    def items(values: list[Any]) -> list[Any]:
        return [
            items(v)
            if isinstance(v, list)
            else dict(sorted((k, x) for k, x in v.items() if k != "generation_log_probs"))
            for v in values
        ]

    return row | {"response": row["response"] | {"output": items(row["response"]["output"])}}


def test_a_row_with_a_task_and_a_group_keeps_both(tmp_path: Path) -> None:
    """So exported and imported runs of the same tasks can be compared; a row without a task has its group's name."""
    answer = {"role": "assistant", "content": "a", "type": "message"}
    row = {"responses_create_params": {"input": "q"}, "response": {"output": [answer]}, "reward": 1.0}
    named = [{"task_id": "t", "group_id": "g"}, {"task_id": 7}, {"group_id": "g"}]
    file = write_lines(tmp_path / "rows.jsonl", [row | names for names in named])
    run = gymdata.import_rollouts(file, tmp_path / "run").run
    rows = read_table(run, ROLLOUTS, ["task_id", "group_id"]).to_pylist()
    assert [(row["task_id"], row["group_id"]) for row in rows] == [("t", "g"), ("7", "7"), ("g", "g")]


@pytest.mark.parametrize("more", [{}, {"_ng_task_index": 0}, {"task_id": "0"}, {"group_id": "0"}])
@pytest.mark.parametrize("other", [{"input": "r"}, {"instructions": "In French."}, {"tools": [{"name": "add"}]}])
def test_other_messages_instructions_or_tools_are_another_task(
    more: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    """Also where both have one id, which the first keeps; what the environment answered, as a hand of cards, is no task."""
    answer = {"role": "assistant", "content": "a", "type": "message"}
    row = {"responses_create_params": {"input": "q"}, "response": {"output": [answer]}, "reward": 1.0, **more}
    changed = row | {"responses_create_params": {"input": "q"} | other}
    hand = {"type": "function_call_output", "call_id": "c", "output": "7"}
    played = row | {"response": {"output": [answer, hand, answer]}}
    file = write_lines(tmp_path / "rows.jsonl", [row, changed, played, changed | {"reward": 0.0}])
    rows = to_rows(read_table(Path(gymdata.import_rollouts(file, tmp_path / "run").run), ROLLOUTS))
    tasks = [(row["task_id"], row["group_id"]) for row in rows]
    assert tasks[0] == tasks[2] != tasks[1] == tasks[3]
    assert [row["rollout_index"] for row in rows] == [0, 0, 1, 1]
    assert tasks[0] == ("0", "0") or not more.keys() & {"task_id", "group_id"}


@pytest.mark.parametrize(("reward", "number"), [("0.5", 0.5), (" 1 ", 1.0), (True, 1.0), ("false", 0.0), ("NaN", None)])
def test_a_reward_as_text_or_boolean_is_its_number(reward: Any, number: float | None, tmp_path: Path) -> None:
    """The export writes it as it was, or the number that replaced it."""
    answer = {"role": "assistant", "content": "a", "type": "message"}
    row = {"responses_create_params": {"input": "q"}, "response": {"output": [answer]}, "reward": reward}
    run = Path(gymdata.import_rollouts(write_lines(tmp_path / "rows.jsonl", [row]), tmp_path / "run").run)
    (rollout,) = to_rows(read_table(run, ROLLOUTS))
    assert rollout["reward"] == number or (number is None and math.isnan(rollout["reward"]))
    for changed, written in (({}, reward), ({"reward": 3.0}, 3.0)):
        made = write_run(tmp_path / f"run {written}", [rollout | {"rewards": []} | changed])
        gymdata.export(made, tmp_path / f"{written}.jsonl", "nemo-gym")
        assert lines(tmp_path / f"{written}.jsonl")[0]["reward"] == written


def test_what_nemo_gym_has_no_place_for_comes_back_from_its_rows(tmp_path: Path) -> None:
    """The policy's hash tells whether rollouts are on-policy, and named rewards are what a score is of."""
    gymdata.export("sample_data/rollouts/clean.jsonl", tmp_path / "out.jsonl", "nemo-gym")
    run = gymdata.import_rollouts(tmp_path / "out.jsonl", tmp_path / "run").run
    names = ["rollout_id", "rollout_index", "policy_hash", "policy_version", "rewards", "duration_s"]
    before = read_table("sample_data/rollouts/clean.jsonl", ROLLOUTS, names).to_pylist()
    assert any(row["rewards"] and row["duration_s"] for row in before)
    assert read_table(run, ROLLOUTS, names).to_pylist() == before


def test_what_an_item_has_no_place_for_is_counted_or_beside_the_row(tmp_path: Path) -> None:
    """Rewards of turns, agents and the like are reported; extra, and a task's fields of the format's names, are kept."""
    row = rollout("t", 0, 1.0, two_turns(1, 20), extra='{"note": 1}')
    row["task"] = '{"reward": 5, "task_id": "t", "level": 2}'
    row["turns"][0] |= {"reward": 0.5, "agent": "a"}
    row["messages"][1]["extra"] = '{"weight": 0}'
    summary = gymdata.export(write_run(tmp_path / "run", [row]), tmp_path / "out.jsonl", "nemo-gym")
    assert summary.lost == {"reward of turns": 1, "agent of turns": 1, "extra of messages": 1}
    (written,) = lines(tmp_path / "out.jsonl")
    assert (written["reward"], written["level"]) == (1.0, 2)
    assert {name: written["gymdata"][name] for name in ("extra", "task")} == {
        "extra": {"note": 1},
        "task": {"reward": 5},
    }
