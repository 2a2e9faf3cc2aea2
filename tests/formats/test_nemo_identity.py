"""NeMo Gym rows through import, export and import again: IDs, log-probabilities, rewards, texts and masks are the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.formats.trajectories import lines, rejected, same, some, text, value, write_lines
from tests.rollout_files import rollout, two_turns, write_run

_SETTINGS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
token = st.integers(0, 2**31 - 1)
log_prob = st.one_of(st.floats(-50, 0, width=32), st.floats(-50, 0), st.integers(-3, 0))
unknown = st.sampled_from([math.nan, "NaN"])
name = text.filter(bool)
parts = st.lists(st.one_of(text, some(text=text, type=st.just("output_text"))), max_size=2)
content = st.one_of(st.none(), text, parts)
calls = st.builds(
    lambda n, a, c: {"type": "function_call", "name": n, "arguments": a, "call_id": c},
    text,
    st.one_of(text, st.just('{"a": 1}')),
    name,
)
answers = some(content=content, type=st.just("message")).map(lambda i: i | {"role": "assistant"})
results = st.builds(lambda c, o: {"type": "function_call_output", "call_id": c, "output": o}, name, content)
other = st.one_of(
    results,
    st.builds(
        lambda r, c: {"role": r, "content": c}, st.sampled_from(["user", "system", "developer", "narrator"]), content
    ),
)


@st.composite
def round_of(draw: st.DrawFn, *, has_ids: bool) -> list[Any]:
    """What one model call wrote, with its ids on the last item or without, and what others said after it."""
    reasoned = some(summary=content, content=content, id=text).map(lambda i: i | {"type": "reasoning"})
    items = [
        *draw(st.lists(reasoned, max_size=1)),
        *draw(st.lists(answers, max_size=1)),
        *draw(st.lists(calls, max_size=2)),
    ]
    items = items or [draw(answers)]
    if has_ids:
        generation = draw(st.lists(token, min_size=1, max_size=4))
        size = len(generation)
        kinds = (st.lists(kind, min_size=size, max_size=size) for kind in (log_prob, log_prob, unknown))
        items[-1] |= {
            "prompt_token_ids": draw(st.lists(token, min_size=1, max_size=6)),
            "generation_token_ids": generation,
            "generation_log_probs": draw(st.one_of(*kinds, st.none())),
        }
    # Calls without ids that follow each other are one.
    items += draw(st.lists(other, min_size=0 if has_ids else 1, max_size=2))
    return [items] if draw(st.booleans()) else items


#: Calls that all have ids, but for a last one in which nothing was written, or that all have none.
rounds = st.one_of(
    st.lists(round_of(has_ids=False), max_size=3),
    st.builds(
        lambda first, last: first + last,
        st.lists(round_of(has_ids=True), max_size=3),
        st.lists(st.just([{"type": "message", "role": "assistant", "content": ""}]), max_size=1),
    ),
)

marked = some(
    mask_sample=st.booleans(),
    instance_config=st.sampled_from([{"mask_sample": True}, {"mask_sample": False}, {}]),
    rollout_id=name,
    task_id=st.one_of(text, value),
    reward=st.none() | st.integers(-100, 20) | st.floats(allow_nan=False, allow_infinity=False) | st.just("0.5"),
)
requests = some(
    input=st.one_of(st.none(), text, st.lists(st.one_of(other, answers), max_size=3)),
    tools=st.sampled_from([[], [{"type": "function", "name": "f", "parameters": {}}]]),
    temperature=value,
    model=text,
)
responses = some(
    status=st.sampled_from(["completed", "incomplete", "cancelled"]),
    incomplete_details=st.sampled_from([None, {"reason": "max_output_tokens"}, {"reason": "content_filter"}]),
    created_at=st.one_of(value, st.integers(0, 2**31)),
    model=text,
)
row = st.builds(
    lambda top, params, response, made: (
        top
        | {"responses_create_params": params, "response": response | {"output": [i for items in made for i in items]}}
    ),
    marked,
    requests,
    responses,
    rounds,
)


def imported(file: Path, run: Path) -> list[dict[str, Any]]:
    summary = gymdata.import_rollouts(file, run, run_id="r", overwrite=True)
    assert summary.rejected == 0
    return to_rows(read_table(run))


def told(rows: list[dict[str, Any]]) -> list[Any]:
    """All of rollouts but their ``task`` and what ``extra`` has besides the reason of a missing reward. No text and an empty
    text are alike."""
    made = []
    for row in rows:
        extra = json.loads(row["extra"])
        messages = [m | {"content": m["content"] or ""} for m in row["messages"]]
        columns = {k: v for k, v in row.items() if k not in ("task", "messages")}
        made.append(columns | {"extra": [extra.get("failure"), extra.get("unscored")], "messages": messages})
    return made


@_SETTINGS
@given(st.lists(row, min_size=1, max_size=3))
def test_import_export_import_is_the_identity(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """IDs, log-probabilities, rewards, texts and masks of the source come back, and all else that is a column."""
    first = imported(write_lines(tmp_path / "source.jsonl", rows), tmp_path / "run")
    assume(len({row["rollout_id"] for row in first}) == len(first))  # a rollout that is there twice is not exported
    gymdata.export(tmp_path / "run", tmp_path / "back.jsonl", "nemo-gym", overwrite=True)
    again = imported(tmp_path / "back.jsonl", tmp_path / "again")
    assert same(told(again), told(first))
    # What a row says besides is in it as it was, except for numbers that strict JSON has not.
    for theirs, ours in zip(rows, lines(tmp_path / "back.jsonl"), strict=True):
        assert ours["response"].keys() >= theirs["response"].keys()
        assert ours.get("mask_sample") == theirs.get("mask_sample")


def test_calls_without_ids_are_not_those_of_the_message_before_them(tmp_path: Path) -> None:
    """A reasoning alone has the ids of its model call; the call after it is of another one, whose ids are missing."""
    lists = {"prompt_token_ids": [1, 5], "generation_token_ids": [7, 2], "generation_log_probs": [-0.5, -0.25]}
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Add."}], **lists},
        {"type": "function_call", "name": "add", "arguments": '{"a": 2}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]
    row = {"responses_create_params": {"input": "2+3?"}, "response": {"output": output}, "reward": 1.0}
    (bad,) = rejected(write_lines(tmp_path / "source.jsonl", [row]))
    assert (bad["code"], bad["reason"][:35]) == ("T205", "turn 1: the model call has no ids, ")


def test_a_rollout_that_another_program_masked_is_masked_for_nemo_gym(tmp_path: Path) -> None:
    """Its number would be trained there otherwise."""
    row = {"input_prompt": "q", "output_response": "a", "score": 1.0, "stop_reason": "abort", "env_class": "e"}
    gymdata.import_rollouts(write_lines(tmp_path / "a.jsonl", [row]), tmp_path / "run", source="skyrl-dump")
    gymdata.export(tmp_path / "run", tmp_path / "out.jsonl", "nemo-gym")
    (written,) = lines(tmp_path / "out.jsonl")
    assert (written["mask_sample"], written["reward"]) == (True, 1.0)
    (back,) = imported(tmp_path / "out.jsonl", tmp_path / "back")
    assert (back["reward"], json.loads(back["extra"])["failure"]["kind"]) == (None, "masked")


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


@pytest.mark.parametrize(("reward", "number"), [("0.5", 0.5), (" 1 ", 1.0), (True, 1.0), ("false", 0.0)])
def test_a_reward_as_text_or_boolean_is_its_number(reward: Any, number: float, tmp_path: Path) -> None:
    """The export writes the number, or the one that replaced it."""
    answer = {"role": "assistant", "content": "a", "type": "message"}
    row = {"responses_create_params": {"input": "q"}, "response": {"output": [answer]}, "reward": reward}
    run = Path(gymdata.import_rollouts(write_lines(tmp_path / "rows.jsonl", [row]), tmp_path / "run").run)
    (rollout,) = to_rows(read_table(run, ROLLOUTS))
    assert rollout["reward"] == number
    for changed, written in (({}, number), ({"reward": 3.0}, 3.0)):
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
