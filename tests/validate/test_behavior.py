"""Family B: each finding where it is, and none where a policy nearly behaves so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.checks.codes.behavior import loops
from gymdata.checks.violations import CODES
from gymdata.cli.main import main
from gymdata.rollouts.ragged import Ragged
from gymdata.store import read_run_json, write_run_json
from gymdata.validate.run import validate
from tests.rollout_files import rollout, two_turns, write_run

Row = dict[str, Any]


@pytest.fixture(params=["parquet", "jsonl"])
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def found(folder: Path, rows: Sequence[Row], suffix: str) -> list[tuple[str, int, int | None, int | None, str | None]]:
    """(code, row, turn, position, detail) of family B."""
    report = validate(write_run(folder / "run", rows, suffix), select=["B"])
    return [(v.code, v.row, v.turn, v.position, v.detail) for v in report.violations]


def generation(ids: Sequence[int], **columns: Any) -> Row:
    return rollout("t", 0, 1.0, [([1, 2], list(ids))], **columns)


FRESH = list(range(100, 130))


def test_a_loop_is_found_where_it_begins(tmp_path: Path, suffix: str) -> None:
    """B801: 30 other tokens, then [7, 8, 9] 30 times and an end token; or other tokens again; or the loop alone."""
    loop = [7, 8, 9] * 30
    rows = [
        rollout("t", i, float(i), [([1, 2], ids)])
        for i, ids in enumerate(([*FRESH, *loop, 2], [*FRESH, *loop, *FRESH], loop))
    ]
    assert found(tmp_path, rows, suffix) == [
        ("B801", 0, 0, 30, "3 tokens repeated 30 times"),
        ("B801", 1, 0, 30, "3 tokens repeated 30 times, then 30 tokens more"),
        ("B801", 2, 0, 0, "3 tokens repeated 30 times"),
    ]


@pytest.mark.parametrize(
    "ids",
    [
        [*FRESH, *[7, 8, 9] * 26, 2],  # over 78 tokens
        [*[7, 8, 9] * 26, *FRESH, *[7, 8, 9] * 26],  # twice over 78 tokens
        [*FRESH, *range(200, 260), *range(200, 260), *range(200, 260), 2],  # three times
        [*FRESH, *(x for n in range(40) for x in (7, 8, 500 + n)), 2],  # a list that counts
    ],
)  # fmt: skip
def test_what_nearly_loops_is_fine(tmp_path: Path, suffix: str, ids: list[int]) -> None:
    """B801 needs 4 repeats and 80 tokens at a stretch."""
    assert found(tmp_path, [generation(ids)], suffix) == []


@settings(max_examples=80)
@given(st.lists(st.lists(st.integers(0, 2), max_size=120), max_size=4), st.integers(1, 70), st.integers(0, 12),
       st.lists(st.integers(3, 5), max_size=90), st.sampled_from([np.int32, np.int64]))  # fmt: skip
def test_loops_are_those_of_the_definition(
    around: list[list[int]], period: int, times: int, after: list[int], kind: type
) -> None:
    """Against every period and every start tried by hand, on generations of few tokens and one that loops by construction,
    before, between and after others."""
    looping = [5, *([10 + i for i in range(period)] * times), *after]
    generations = [*around[:2], looping, *around[2:], []]
    expected = []
    for k, tokens in enumerate(generations):
        best = (0, 0, 0)
        for p in range(1, 65):
            start = 0
            while start + p < len(tokens):
                end = start + p
                while end < len(tokens) and tokens[end] == tokens[end - p]:
                    end += 1
                if end - start >= max(80, 4 * p) and end - start > best[2] - best[1]:
                    best = (p, start, end)
                start = max(end - p + 1, start + 1)
        if best[0]:
            expected.append((k, *best))
    assert loops(Ragged.of_arrays([np.array(one, kind) for one in generations], kind)) == expected


def cut(n: int, of: int) -> list[Row]:
    rows = [rollout("t", i, float(i % 2), [([1, 2], [40 + i, 2])]) for i in range(of)]
    for row in rows[of - n :]:
        row["turns"][0]["finish_reason"] = "length"
    return rows


def test_many_generations_that_are_cut_are_one_finding(tmp_path: Path, suffix: str) -> None:
    """B802: 2 of 20 calls, at the first of them; not 1 of 20, and not 2 of 19."""
    assert found(tmp_path, cut(2, 20), suffix) == [
        ("B802", 18, 0, None, "2 of 20 model calls were cut at a token limit (10%)")
    ]
    assert found(tmp_path, cut(1, 20), suffix) == []
    assert found(tmp_path, cut(2, 19), suffix) == []


def said(*messages: dict[str, Any], **columns: Any) -> Row:
    return rollout("t", 0, 1.0, two_turns(4, 50), messages=[{"role": "user", "content": "?"}, *messages], **columns)


@pytest.mark.parametrize(
    ("message", "empty"),
    [
        ({"content": ""}, True),
        ({"content": " \n\t "}, True),
        ({"content": None}, True),
        ({"content": " . "}, False),
        ({"content": None, "reasoning": "Hm."}, False),
        ({"content": "", "tool_calls": '[{"id": "a"}]'}, False),
    ],
)
def test_a_turn_that_says_nothing_is_found(tmp_path: Path, suffix: str, message: dict[str, Any], empty: bool) -> None:
    """B803: neither text nor reasoning nor a call, though tokens were sampled."""
    row = said({"role": "assistant", "turn": 0, **message})
    expected = [("B803", 0, 0, None, "message 1; 3 tokens sampled")] if empty else []
    assert found(tmp_path, [row], suffix) == expected


def test_a_turn_without_a_token_is_no_empty_turn(tmp_path: Path, suffix: str) -> None:
    """It is T212."""
    row = rollout("t", 0, 1.0, [([1, 2], [])], messages=[{"role": "assistant", "content": "", "turn": 0}])
    assert found(tmp_path, [row], suffix) == []


ERRORS = ['{"error": "no such tool"}', '{ "error" : {"code": 3}}', "Error: bad argument", "ERROR 500",
          "Traceback (most recent call last):\n  File"]  # fmt: skip
FINE = ["42", '{"error": null, "value": 3}', "Errors: 0", '{"result": "error"}', "No error"]


def results(texts: Sequence[str]) -> Row:
    messages: list[dict[str, Any]] = []
    for i, text in enumerate(texts):
        call = json.dumps([{"id": f"c{i}", "function": {"name": "f", "arguments": {}}}])
        messages.append({"role": "assistant", "content": "calling", "tool_calls": call})
        messages.append({"role": "tool", "content": text, "tool_call_id": f"c{i}"})
    return said(*messages)


def test_a_storm_of_tool_errors_is_found(tmp_path: Path, suffix: str) -> None:
    """B804: four errors, half of all; not three, and not four of nine; and what only speaks of errors is none."""
    assert found(tmp_path, [results(ERRORS[:4])], suffix) == [("B804", 0, None, None, "4 of 4 tool results are errors")]
    assert found(tmp_path, [results([*ERRORS, *FINE])], suffix) == [
        ("B804", 0, None, None, "5 of 10 tool results are errors")
    ]
    assert found(tmp_path, [results(ERRORS[:3])], suffix) == []
    assert found(tmp_path, [results([*ERRORS[:4], *FINE])], suffix) == []


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = '[{"type": "function", "function": {"name": "add"}}]'


def test_calls_that_nobody_parsed_are_found(tmp_path: Path, suffix: str) -> None:
    """B805: two messages spell calls, none is parsed, and there were tools."""
    spoken = 'I call {"name": "add", "arguments": {"a": 1}}.'
    for text in (CALL, spoken, "[TOOL_CALLS][{}]", "<function=add></function>"):
        rows = [said({"role": "assistant", "content": text, "turn": 0}, tools=TOOLS) for _ in range(2)]
        assert found(tmp_path / text[:3], rows, suffix) == [
            ("B805", 0, 0, None, "2 messages spell a tool call, and none was parsed")
        ]


def test_malformed_calls_are_not_blamed_on_the_parser(tmp_path: Path, suffix: str) -> None:
    """B805 shows one; a whole call among them is counted apart."""
    begun = '{"name": "add", "arguments": {'
    texts = ("<tool_call>55", '<tool_call>{"12', "<tool_call>55</tool_call>", "<function=add>", begun)
    for number, text in enumerate(texts):
        rows = [said({"role": "assistant", "content": text, "turn": 0}, tools=TOOLS) for _ in range(2)]
        assert found(tmp_path / str(number), rows, suffix) == [
            (
                *("B805", 0, 0, None),
                f"2 messages spell a tool call, and none was parsed; all of these calls are malformed, as {text!r}",
            )
        ]
    rows = [said({"role": "assistant", "content": text, "turn": 0}, tools=TOOLS) for text in (CALL, texts[0], texts[1])]
    ((*_, detail),) = found(tmp_path / "both", rows, suffix)
    assert str(detail).endswith("; 2 of these calls are malformed, as '<tool_call>55'")


@pytest.mark.parametrize("case", ["one", "no tools", "another was parsed", "plain text"])
def test_calls_that_may_be_text_are_fine(tmp_path: Path, suffix: str, case: str) -> None:
    """B805 needs two of them, tools, and not a single parsed call anywhere in the path."""
    text = "Use the function add." if case == "plain text" else CALL
    spelled = said({"role": "assistant", "content": text, "turn": 0}, tools="[]" if case == "no tools" else TOOLS)
    rows = [spelled] * (1 if case == "one" else 3)
    if case == "another was parsed":
        rows.append(said({"role": "assistant", "content": "", "tool_calls": '[{"id": "a"}]', "turn": 0}, tools=TOOLS))
    assert found(tmp_path, rows, suffix) == []


def rewarded(rewards: Sequence[float | None]) -> list[Row]:
    return [rollout(f"t{i}", 0, r, two_turns(4, 50 + i)) for i, r in enumerate(rewards)]


def test_equal_rewards_are_one_finding(tmp_path: Path, suffix: str) -> None:
    """B806: eight scored rollouts with one reward; not seven, and not when one differs."""
    assert found(tmp_path, rewarded([0.0] * 8 + [None]), suffix) == [
        ("B806", 0, None, None, "reward 0 for all 8 scored rollouts")
    ]
    assert found(tmp_path, rewarded([0.0] * 7 + [None]), suffix) == []
    assert found(tmp_path, rewarded([0.0] * 8 + [1e-9]), suffix) == []


def message(text: str | None, ids: Sequence[int] | None = None, prompt: Sequence[int] = (1, 2)) -> Row:
    content = [] if text is None else [{"type": "output_text", "text": text}]
    item: Row = {"type": "message", "role": "assistant", "content": content}
    if ids is not None:
        item |= {"prompt_token_ids": list(prompt), "generation_token_ids": list(ids),
                 "generation_log_probs": [-1.0] * len(ids)}  # fmt: skip
    return item


def tool(output: str) -> list[Row]:
    return [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": output}]  # fmt: skip


def of_nemo(path: Path, outputs: Sequence[Sequence[Row]], **more: Any) -> list[tuple[str, int, int | None, str | None]]:
    """(code, row, turn, detail) of family B in NeMo Gym rows with these outputs, whichever way a row is read."""
    given = {"input": "?", "tools": json.loads(TOOLS)} if more.pop("tools", False) else {"input": "?"}
    rows = [{"rollout_id": f"r{i}", "responses_create_params": given | {"input": f"{i}?"}, "reward": float(i % 2),
             "response": {"output": list(output), "status": "completed", **more}}
            for i, output in enumerate(outputs)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [(v.code, v.row, v.turn, v.detail) for v in validate(path, select=["B"]).violations]
    # A list in a list, and a number that no buffer holds: read by Python's json.
    for row in rows:
        row["nested"] = [[1, 2**70]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert found == [(v.code, v.row, v.turn, v.detail) for v in validate(path, select=["B"]).violations]
    return found


def test_nemo_gym_rows_have_loops_and_empty_turns(tmp_path: Path) -> None:
    """B801 and B803, at their turns; reasoning, calls and a turn without ids are no empty turns."""
    prompt = [1, 2, *FRESH]
    outputs = [
        [message("a", FRESH), {"role": "user", "content": "?"}, message("b", [7, 8, 9] * 30 + FRESH, prompt)],
        [message(None, [5, 6]), {"role": "user", "content": "?"}, message(" ", [5, 6], [1, 2, 5, 6, 3])],
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, message("", [5, 6])],
        [message(None, [5, 6]), *tool("4"), message("")],
    ]
    assert of_nemo(tmp_path / "nemo.jsonl", outputs) == [
        ("B801", 0, 1, "3 tokens repeated 30 times, then 30 tokens more"),
        ("B803", 1, 0, "2 tokens sampled"),
        ("B803", 1, 1, "2 tokens sampled"),
    ]


def test_nemo_gym_rows_have_storms_and_calls_that_nobody_parsed(tmp_path: Path) -> None:
    """B804 by row; B805 once, and not when a call was parsed or no tool was offered."""
    storm = [item for text in (*ERRORS[:4], FINE[0]) for item in tool(text)]
    calm = [item for text in (*ERRORS[:3], FINE[0]) for item in tool(text)]
    assert of_nemo(tmp_path / "a.jsonl", [calm, storm]) == [("B804", 1, None, "4 of 5 tool results are errors")]
    spelled = [[message("x")], [message(CALL)], [message("y"), {"role": "user", "content": "?"}, message(CALL)]]
    assert of_nemo(tmp_path / "b.jsonl", spelled, tools=True) == [
        ("B805", 1, 0, "2 messages spell a tool call, and none was parsed")
    ]
    assert of_nemo(tmp_path / "c.jsonl", spelled) == []
    assert of_nemo(tmp_path / "d.jsonl", [*spelled, tool("4")], tools=True) == []


def test_nemo_gym_rows_that_were_cut_or_have_one_reward_are_found(tmp_path: Path) -> None:
    """B802 by what the response says of its end; B806 of equal rewards."""
    path = tmp_path / "nemo.jsonl"
    rows = [{"responses_create_params": {"input": f"{i}?"}, "reward": 0.0,
             "response": {"output": [message("4")], "status": "completed", "incomplete_details": None}}
            for i in range(20)]  # fmt: skip
    for row in rows[18:]:
        row["response"] |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}  # type: ignore[operator]  # an object
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(v.code, v.row, v.turn, v.detail) for v in validate(path, select=["B"]).violations] == [
        ("B806", 0, None, "reward 0 for all 20 scored rollouts"),
        ("B802", 18, 0, "2 of 20 rollouts end in a model call that was cut at a token limit (10%)"),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:19]))
    assert [v.code for v in validate(path, select=["B802"]).violations] == []


def parts(exact: Sequence[float], style: Sequence[float], weight: float) -> list[Row]:
    return [
        rollout(f"t{i}", 0, e + weight * s, two_turns(4, 50 + i),
                rewards=[{"name": "exact", "value": e}, {"name": "style", "value": s}])
        for i, (e, s) in enumerate(zip(exact, style, strict=True))
    ]  # fmt: skip


def test_a_part_that_dominates_is_found(tmp_path: Path, suffix: str) -> None:
    """B807: the reward follows exact, and style varies for nothing; not when style counts, is constant, or agrees."""
    exact, style = [0.0, 1.0] * 5, [0.0, 0.0, 1.0, 1.0] * 2 + [0.0, 1.0]
    ((code, row, _, _, detail),) = found(tmp_path / "a", parts(exact, style, 0.01), suffix)
    assert (code, row) == ("B807", 0)
    assert detail is not None
    assert detail.startswith("the reward follows part 'exact' (correlation 1.000), whatever 'style' (0.2")
    assert found(tmp_path / "b", parts(exact, style, 1.0), suffix) == []
    assert found(tmp_path / "c", parts(exact, [1.0] * 10, 0.01), suffix) == []
    assert found(tmp_path / "d", parts(exact, exact, 0.01), suffix) == []
    assert found(tmp_path / "e", parts(exact[:7], style[:7], 0.01), suffix) == []
    # A part of weight 0 is measured only.
    run = write_run(tmp_path / "f" / "run", parts(exact, style, 0.01), suffix)
    weights = [{"name": "exact", "weight": 1}, {"name": "style", "weight": 0}]
    write_run_json(run, read_run_json(run) | {"identity": {"rewards": weights}})
    assert validate(run, select=["B"]).violations == []


def drifting(early: int, late: int, n: int = 200, *, ordered: bool = True) -> list[Row]:
    """Sizes jump in the middle; rows stand in the order of their ends when not ``ordered``."""
    rows = []
    for i in range(n):
        size = (early if i < n // 2 else late) + i % 3
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=i)
        rows.append(rollout(f"t{i}", 0, float(i % 2), [([1, i], list(range(9, 9 + size)))], started_at=at))
    return rows if ordered else sorted(rows, key=lambda row: row["n_generated_tokens"])


def test_a_length_that_drifts_over_the_run_is_found(tmp_path: Path, suffix: str) -> None:
    """B808: by when rollouts began, whatever the order of rows; not below a factor of 1.5, nor 200 rollouts."""
    text = "median of 11 sampled tokens in the first quarter of the run, 21 in the last"
    for name, rows in (("a", drifting(10, 20)), ("b", drifting(10, 20, ordered=False))):
        assert [(code, detail) for code, *_, detail in found(tmp_path / name, rows, suffix)] == [("B808", text)]
    assert found(tmp_path / "c", drifting(20, 29), suffix) == []
    assert found(tmp_path / "d", drifting(10, 20, 196), suffix) == []
    assert [code for code, *_ in found(tmp_path / "e", drifting(20, 10), suffix)] == ["B808"]


def test_rows_that_only_end_in_order_of_length_do_not_drift(tmp_path: Path, suffix: str) -> None:
    """Short rollouts end first in every run: rows sorted by length, begun in any order, are fine."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        rollout(f"t{i}", 0, float(i % 2), [([1, i], list(range(9, 19 + i // 5)))],
                started_at=start + timedelta(seconds=(i * 73) % 200))
        for i in range(200)
    ]  # fmt: skip
    assert found(tmp_path, rows, suffix) == []


def test_behavior_never_makes_a_rollout_untrainable(tmp_path: Path, suffix: str) -> None:
    """Findings of family B are warnings and information: exit code 0, and every rollout stays trainable."""
    run = write_run(tmp_path / "run", [generation([*FRESH, *[7, 8, 9] * 30, 2])], suffix)
    report = validate(run)
    assert (report.by_code, report.errors, report.trainable) == ({"B801": 1}, 0, 1)
    assert main(["validate", str(run)]) == 0
    assert all(code.severity in ("warning", "info") for name, code in CODES.items() if name.startswith("B"))


def test_clean_sample_rollouts_raise_no_alarm() -> None:
    """The shipped rollouts, played by a real policy, have no finding of family B."""
    import gymdata

    folder = Path(gymdata.__file__).parent / "sample_data/rollouts"
    for name in ("clean.jsonl", "nemo_gym.jsonl"):
        assert validate(folder / name, select=["B"]).violations == []
