"""Rows with odd values in any place: each is a rollout (or pair) or is named, and costs no other row."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.commands.import_export.run import import_rollouts
from gymdata.formats import Format
from gymdata.formats import imported as imported_formats
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.store import read_table
from tests.formats.published_rows import PUBLISHED
from tests.formats.trajectories import ROWS, copy_and_last, lines, mutated, rejected, write_lines
from tests.rollout_files import rollout, two_turns, write_run

_CALL = {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"a": 1}})}
_SPOKEN = [{"from": "human", "value": "q"}, _CALL, {"from": "observation", "value": "r"}]
_SAID = {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "tools": [{"name": "f"}]}
#: A row of each format that is read and not written, with the answer n.
READ_ONLY: dict[str, Callable[[int], dict[str, Any]]] = {
    "alpaca": lambda n: {"instruction": "q", "input": "i", "output": f"a{n}", "history": [["q", "a"]], "system": "s"},
    "sharegpt": lambda n: {"conversations": [*_SPOKEN, {"from": "gpt", "value": f"a{n}"}], "tools": '[{"name": "f"}]'},
    "openai-preference": lambda n: {
        "input": _SAID,
        "preferred_output": [{"role": "assistant", "content": f"a{n}"}],
        "non_preferred_output": [{"role": "assistant", "content": "b"}],
    },
    **ROWS,
    **PUBLISHED,
}
#: Dumps with ids, of which several lines may be one rollout, have tests of this kind beside their other tests.
SOURCES = {
    name: form.table for name, form in imported_formats().items() if name in READ_ONLY or ".jsonl" in form.suffixes
}
FORMATS = [*SOURCES, "foreign nat-trajectories", "foreign atif"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Rows of each format, of rollouts with calls, tools, step rewards and alternatives; the foreign ones without ours."""
    folder = tmp_path_factory.mktemp("good")
    call = [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    rows = []
    for n in range(3):
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "reasoning": "hm", "content": None, "tool_calls": json.dumps(call), "turn": 0},
            {"role": "tool", "content": "r", "tool_call_id": "c0"},
            {"role": "assistant", "content": f"done {n}", "turn": 1},
        ]
        made = rollout("t", n, float(n), two_turns(5, 20 + n), messages=messages)
        for turn in made["turns"]:
            turn["top_log_probs"] = [[{"id": 3, "log_prob": -0.5}]] * len(turn["generation_token_ids"])
            turn["reward"] = 0.25
            turn["server"] = "http://a:1"
            turn["weight_versions"] = [{"version": "s1", "start": 0, "end": len(turn["generation_token_ids"])}]
        tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])
        rows.append(made | {"tools": tools, "rewards": [{"name": "numeric", "value": 1.0}]})
    run = write_run(folder / "run", rows)
    # The formats of pairs hold one text a response.
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "turn": 0}]
    short = [rollout(f"t{n // 2}", n % 2, float(n % 2), [([1, 5], [20 + n, 2])], messages=said) for n in range(6)]
    for row in short:
        row["messages"] = [said[0], said[1] | {"content": row["rollout_id"]}]
    gymdata.pairs(write_run(folder / "short", short), output=folder / "pairs")
    found = {}
    for name, table in SOURCES.items():
        if name in READ_ONLY:
            found[name] = [READ_ONLY[name](n) for n in range(3)]
            continue
        gymdata.export(folder / "pairs" if table == "pairs" else run, folder / f"{name}.jsonl", name)
        found[name] = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        found[f"foreign {name}"] = [_without_ours(row) for row in found[name]]
    return found


def _without_ours(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ours(inner) for key, inner in value.items() if key != "gymdata"}
    return [_without_ours(inner) for inner in value] if isinstance(value, list) else value


def _changed(row: Any, path: tuple[Any, ...], value: Any) -> Any:
    made, holder = copy_and_last(row, path)
    holder[path[-1]] = value
    return made


@pytest.mark.filterwarnings("ignore:.*token ids in .* are not read")
@pytest.mark.matrix("nemo-gym", "trl-preference", "verifiers", "atif", "nat-trajectories", "nat-dpo")
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_odd_row_costs_no_other(name: str, good: dict[str, list[Any]], data: st.DataObject) -> None:
    """Whatever became of some rows, all others are imported, and every row is imported or named."""
    first, changed, last = (json.dumps(row).encode() for row in good[name])
    rows = [first, *data.draw(st.lists(mutated(changed), min_size=1, max_size=8)), last]
    source = name.removeprefix("foreign ")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "a.jsonl").write_bytes(b"\n".join(rows) + b"\n")
        kind = data.draw(st.sampled_from(["parquet", "jsonl"]))
        summary = import_rollouts(folder / "a.jsonl", folder / "run", source=source, format=kind)
        assert summary.rows_in == summary.rollouts + summary.pairs + summary.rejected + sum(summary.failed.values())
        # A row of some formats is several, as an episode with two traces.
        form = imported_formats()[source]
        several = summary.rows_in > len(rows) and (form.several or type(form).items is not Format.items)
        assert summary.rows_in == len(rows) or several
        named = lines(folder / "run" / "rejected.jsonl")
        assert {bad["line"] for bad in named} <= set(range(2, len(rows)))
        assert all(bad["code"] and bad["reason"] for bad in named)
        assert len(named) == summary.rejected
        table = read_table(folder / "run", PAIRS if SOURCES[source] == "pairs" else ROLLOUTS)
        assert table.num_rows == summary.rollouts + summary.pairs


@pytest.mark.parametrize(
    ("name", "path", "value", "told"),
    [
        ("nat-trajectories", ("episode", 1, "logprobs", "content", 0, "top_logprobs"), 5, "top_logprobs: got 5, expected a"),
        ("nat-trajectories", ("metadata", "gymdata", "rewards"), {"numeric": "abc"}, "rewards[0].value': got text abc"),
        ("nat-trajectories", ("metadata", "gymdata", "rollout_index"), 2**40, "'rollout_index': got number 1099511627776"),
        ("atif", ("steps", 0, "source"), {}, "steps[0].source: got {}, expected 'system', 'user'"),
    ],
)  # fmt: skip
def test_a_reason_names_the_field(
    name: str, path: tuple[Any, ...], value: Any, told: str, good: dict[str, list[Any]], tmp_path: Path
) -> None:
    """A rejected row says which field it is, what was got and what was expected, with its line of the input."""
    rows = [good[name][0], _changed(good[name][1], path, value), good[name][2]]
    (bad,) = rejected(write_lines(tmp_path / "a.jsonl", rows), name)
    assert bad["line"] == 2
    assert told in bad["reason"]


def test_rows_that_no_column_can_hold_are_found_one_by_one(good: dict[str, list[Any]], tmp_path: Path) -> None:
    """A row that passes its parser and fits no column is rejected alone, and importing again changes nothing."""
    name, path = "nat-trajectories", ("metadata", "gymdata", "started_at")
    rows = good[name]
    # A week's date is ISO 8601 to Python, and none to Arrow.
    odd = _changed(rows[1], path, "2026-W01-1T00:00:00+00:00")
    file = write_lines(tmp_path / "a.jsonl", [rows[0], odd, rows[2], odd, rows[1]])
    for _ in range(2):
        summary = import_rollouts(file, tmp_path / "run", source=name)
        assert (summary.rows_in, summary.rollouts, summary.rejected) == (5, 3, 2)
        told = lines(tmp_path / "run" / "rejected.jsonl")
        assert [bad["line"] for bad in told] == [2, 4]
        assert told[0]["reason"].startswith("field 'started_at': got ")
        assert read_table(tmp_path / "run").num_rows == 3


SPOKEN = [{"role": "human", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("source", "row", "told"),
    [
        ("nat-trajectories", {"episode": [], "reward": 1.0}, "episode: got an empty list, expected at least one item"),
        ("atif", {"schema_version": "ATIF-v1.6", "steps": []}, "steps: got an empty list, expected at least one item"),
        ("nat-trajectories", {"episode": SPOKEN, "reward": 1.0}, "episode[0].role: got 'human', expected 'system', 'user'"),
        ("nat-dpo", {"prompt": SPOKEN[:1], "chosen_response": "a", "rejected_response": "b"},
         "prompt[0].role: got 'human', expected system, user, assistant or tool"),
        ("nemo-gym", {"responses_create_params": {"input": SPOKEN[:1]}, "response": {"output": SPOKEN[1:]}},
         "item 0: role; expected 'user'; got text human"),
    ],
)  # fmt: skip
def test_other_names_of_roles_and_empty_episodes_are_refused(
    source: str, row: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """A user that is called human would be nobody, and an episode without items is none: the row is named with both."""
    (bad,) = rejected(write_lines(tmp_path / "a.jsonl", [row]), source)
    assert told in bad["reason"]
