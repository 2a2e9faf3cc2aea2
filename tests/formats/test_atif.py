"""ATIF trajectories: there and back, ours and theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.formats import format_named
from gymdata.rollouts.messages import json_text
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.formats.trajectories import (
    as_spread,
    as_stored,
    exported,
    imported,
    lines,
    native,
    rejected,
    rows_read,
    same,
    some,
    text,
    there_and_back,
    through_a_run,
    through_json,
    value,
    write_lines,
)
from tests.rollout_files import rollout, two_turns, write_run

trajectory_of = format_named("atif").trajectory  # type: ignore[attr-defined]  # of ATIF alone
_SETTINGS = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_SETTINGS
@given(st.lists(native(st.none() | st.floats()), min_size=1, max_size=3, unique_by=lambda r: r["rollout_id"]))
def test_ours_come_back_whole(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """Every column, message and turn is what it was, and it is written the same again."""
    made, lost = exported(rows, trajectory_of)
    file = write_lines(tmp_path / "a.jsonl", made)
    back = as_stored(rows_read("atif", file))
    assert same(back, sorted(as_spread(rows), key=lambda row: row["rollout_id"]))
    again = [through_json(trajectory_of(row, lost)) for row in back]
    assert same(again, sorted(made, key=lambda one: one["trajectory_id"]))


@_SETTINGS
@given(native(st.none() | st.floats()))
def test_what_is_written_is_atif(row: dict[str, Any]) -> None:
    """Steps count from 1, agents' fields stand on agents' steps, results name calls of their step, numbers are finite, in
    strict JSON too, whatever is not known."""
    (made,), _ = exported([row], trajectory_of)
    orjson.loads(json_text(made))
    assert made["schema_version"] == "ATIF-v1.7"
    assert [step["step_id"] for step in made["steps"]] == list(range(1, len(made["steps"]) + 1))
    assert made["final_metrics"]["total_steps"] == len(made["steps"])
    for step in made["steps"]:
        assert step["source"] in ("system", "user", "agent")
        assert isinstance(step["message"], str)
        agents = {"model_name", "reasoning_content", "tool_calls", "metrics", "llm_call_count", "observation"}
        assert step["source"] == "agent" or not agents & step.keys()
        known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        assert all(isinstance(call["arguments"], dict) for call in step.get("tool_calls", ()))
        results = step.get("observation", {"results": []})["results"]
        assert all(r.get("source_call_id", next(iter(known), None)) in (known or {None}) for r in results)
        for number in step.get("metrics", {}).get("logprobs", ()):
            assert isinstance(number, float)
            assert number - number == 0


ids = st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=4))
log_probs = st.one_of(
    st.none(), st.lists(st.floats(-9, 0, width=32), max_size=3), st.lists(st.floats(-9, 0), max_size=3),
    st.lists(st.integers(-3, 0), max_size=3), value,
)  # fmt: skip
metrics = some(
    prompt_tokens=value, prompt_token_ids=ids, completion_token_ids=ids, logprobs=log_probs, cost_usd=value, extra=value
)
content = st.one_of(text, st.none(), st.lists(some(type=st.just("text"), text=text), max_size=2), value)
result = some(source_call_id=st.one_of(text, value), content=content, extra=value, subagent_trajectory_ref=value)
call = some(tool_call_id=text, function_name=text, arguments=value, extra=value)
step = st.builds(
    lambda made, source: made | {"source": source},
    some(
        step_id=value, timestamp=st.one_of(st.just("2026-01-02T03:04:05Z"), value), message=content, model_name=value,
        reasoning_content=st.one_of(text, value), tool_calls=st.one_of(value, st.lists(call, max_size=2)),
        observation=st.one_of(value, some(results=st.lists(result, max_size=2))), metrics=st.one_of(value, metrics),
        is_copied_context=st.sampled_from([True, False, None]), llm_call_count=st.sampled_from([None, 0, 1, 2]),
        extra=st.one_of(value, some(gymdata=value)),
    ),
    st.sampled_from(["system", "user", "agent", "agent"]),
)  # fmt: skip
trajectory = st.builds(
    lambda made, version, steps: made | {"schema_version": f"ATIF-v1.{version}", "steps": steps},
    some(session_id=text, agent=st.one_of(value, some(name=text, model_name=value, tool_definitions=value)), extra=value,
         subagent_trajectories=st.one_of(value, st.lists(some(trajectory_id=text, steps=st.lists(step, max_size=2))))),
    st.integers(0, 7),
    st.lists(step, max_size=4),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:atif. token ids in")
@_SETTINGS
# Equal trajectories without an id are one rollout twice, which an export refuses.
@given(st.lists(trajectory, min_size=1, max_size=4, unique_by=repr))
def test_theirs_come_back_whole(tmp_path: Path, theirs: list[Any]) -> None:
    """Of a trajectory of odd shape all is, exported and imported again, what it was: ids, log-probabilities, rewards, texts,
    and the turns of its subagents; or it is named with its reason."""
    theirs = through_json(theirs)
    done, back = through_a_run(write_lines(tmp_path / "a.jsonl", theirs), "atif")
    bad = {row["line"] for row in lines(tmp_path / "run" / "rejected.jsonl")}
    assert (done.rollouts, done.rejected) == (len(theirs) - len(bad), len(bad))
    assert len(back) == done.rollouts
    if done.rollouts:
        assert same(*there_and_back(tmp_path))


def agent_step(number: int, prompt: list[int], answer: list[int], **more: Any) -> dict[str, Any]:
    metrics = {"prompt_token_ids": prompt, "completion_token_ids": answer, "logprobs": [-0.5] * len(answer)}
    return {"step_id": number, "source": "agent", "message": "said", "metrics": metrics} | more


def test_steps_are_turns_when_they_were_sampled_here(tmp_path: Path) -> None:
    """Copied context and steps without a model call are no turns; tool answers are messages. The ids of several calls are
    not those of one, whose trajectory is rejected."""
    steps = [
        {"step_id": 1, "source": "user", "message": "q", "timestamp": "2026-01-01T00:00:00Z"},
        agent_step(2, [1], [2, 3], is_copied_context=True),
        agent_step(
            3, [1, 2, 3], [4],
            tool_calls=[{"tool_call_id": "c", "function_name": "f", "arguments": {"a": 1}}],
            observation={"results": [{"source_call_id": "c", "content": "42"}]},
        ),
        {"step_id": 4, "source": "agent", "message": "dispatch", "llm_call_count": 0},
        agent_step(5, [1, 2, 3, 4, 9], [5, 6], llm_call_count=1, timestamp="2026-01-01T00:00:07Z"),
    ]  # fmt: skip
    about = {"name": "a", "version": "1", "model_name": "m", "tool_definitions": [{"type": "function"}]}
    whole = {"schema_version": "ATIF-v1.7", "agent": about, "steps": steps}
    (tmp_path / "trajectory.json").write_text(json.dumps(whole, indent=2))
    done, back = through_a_run(tmp_path / "trajectory.json", "atif")
    assert back["steps"][2]["metrics"]["completion_token_ids"] == [4]
    assert same(*there_and_back(tmp_path))
    assert (done.turns, done.breaks) == (2, 0)
    row = to_rows(read_table(tmp_path / "run"))[0]
    assert [t["generation_token_ids"].tolist() for t in row["turns"]] == [[4], [5, 6]]
    assert [(m["role"], m["turn"]) for m in row["messages"]] == [
        ("user", None), ("assistant", None), ("assistant", 0), ("tool", None), ("assistant", None), ("assistant", 1),
    ]  # fmt: skip
    assert (row["policy"], row["duration_s"], row["reward"]) == ("m", 7.0, None)
    several = whole | {"steps": [*steps, agent_step(6, [7], [8], llm_call_count=2)]}
    (bad,) = rejected(write_lines(tmp_path / "several.jsonl", [several]), "atif")
    assert (bad["code"], bad["reason"][:25]) == ("T205", "steps[5].metrics: expecte")


def test_subagents_are_turns_of_their_own(tmp_path: Path) -> None:
    """An embedded subagent's calls come where the step that refers to it stands, with its name; none twice."""
    inner = {"trajectory_id": "i", "agent": {"name": "helper"}, "steps": [agent_step(1, [50], [51])]}
    refers = {"results": [{"content": "done", "subagent_trajectory_ref": [{"trajectory_id": "i"}]}]}
    steps = [agent_step(1, [1], [2], observation=refers), agent_step(2, [1, 2, 3], [4])]
    whole = {"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "steps": steps, "subagent_trajectories": [inner]}
    (back,) = through_a_run(write_lines(tmp_path / "a.jsonl", [whole]), "atif")[1]
    assert [one["agent"]["name"] for one in back["subagent_trajectories"]] == ["helper"]
    assert same(*there_and_back(tmp_path))
    row = to_rows(read_table(tmp_path / "run"))[0]
    assert [(t["agent"], t["generation_token_ids"].tolist()) for t in row["turns"]] == [
        (None, [2]), ("helper", [51]), (None, [4]),
    ]  # fmt: skip
    assert [m["turn"] for m in row["messages"]] == [0, None, 2]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"schema_version": "ATIF-v2.0"}, "S103"),
        ({"steps": None}, "S103"),
        ({"steps": [{"step_id": 1, "source": "robot", "message": ""}]}, "S103"),
        ({"steps": [agent_step(1, [1], [2**31])]}, "S102"),
        ({"steps": [agent_step(1, [1], [True])]}, "S102"),
    ],
)
def test_what_is_none_is_named(tmp_path: Path, wrong: dict[str, Any], code: str) -> None:
    """A trajectory that cannot be read is told with its code; the others are there."""
    good = {"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "steps": [agent_step(1, [1], [2])]}
    (bad,) = rejected(write_lines(tmp_path / "a.jsonl", [good, good | wrong, good]), "atif")
    assert (bad["line"], bad["code"]) == (2, code)


def test_arguments_that_a_chat_has_as_text_are_an_object(tmp_path: Path) -> None:
    """As ATIF has them; in gymdata they are the text again."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    gymdata.import_rollouts(tmp_path / "chat.jsonl", tmp_path / "run")
    summary = gymdata.export(tmp_path / "run", tmp_path / "out.jsonl", "atif")
    assert "tool calls" not in " ".join(summary.lost)
    (trajectory,) = lines(tmp_path / "out.jsonl")
    (call,) = trajectory["steps"][1]["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("f", {"a": 1})
    gymdata.import_rollouts(tmp_path / "out.jsonl", tmp_path / "again")
    rows = [to_rows(read_table(tmp_path / name))[0] for name in ("run", "again")]
    assert rows[0]["messages"] == rows[1]["messages"]


@pytest.mark.parametrize(
    ("name", "part", "field"), [("atif", "steps", "message"), ("nat-trajectories", "episode", "content")]
)
def test_what_another_program_changed_counts(tmp_path: Path, name: str, part: str, field: str) -> None:
    """A trajectory of ours is its row while it says what was written, in any order of keys. Changed, it is the same rollout
    with the messages and the reward that it says, not those of the row beside it; with other tokens it is another one."""
    run = write_run(tmp_path / "run", [rollout("t", 0, 0.5, two_turns(5, 40))])
    gymdata.export(run, tmp_path / "out.jsonl", name)
    (made,) = lines(tmp_path / "out.jsonl")
    free = made["extra" if name == "atif" else "metadata"]
    (tmp_path / "sorted.jsonl").write_text(json.dumps(made, sort_keys=True, indent=1))
    (row,) = imported(tmp_path / "sorted.jsonl", name)
    assert same(row, to_rows(read_table(run))[0])

    made[part][-1][field] = "other words"
    free["gymdata"]["reward"] = 7.0
    (other,) = imported(write_lines(tmp_path / "changed.jsonl", [made]), name)
    assert other["messages"][-1]["content"] == "other words"
    changed = {"messages", "rewards"}
    assert same(
        {k: v for k, v in other.items() if k not in changed}, {k: v for k, v in row.items() if k not in changed}
    )

    (free if name == "atif" else made)["reward"] = 0.25
    (other,) = imported(write_lines(tmp_path / "rewarded.jsonl", [made]), name)
    assert (other["reward"], other["rewards"]) == (0.25, {})
    assert [other[k] for k in ("rollout_id", "group_id", "temperature")] == [
        row[k] for k in ("rollout_id", "group_id", "temperature")
    ]

    text = json.dumps(made[part])
    made[part] = json.loads(text.replace("token_id:40", "token_id:99").replace("[40", "[99"))
    (other,) = imported(write_lines(tmp_path / "tokens.jsonl", [made]), name)
    assert not same(other["turns"], row["turns"])
    assert other["rollout_id"] != row["rollout_id"]
