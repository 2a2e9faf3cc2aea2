"""Family B: each finding where it is, and none where a policy nearly behaves so."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.checks.codes.behavior import loops
from gymdata.checks.violations import CODES
from gymdata.cli.main import main
from gymdata.commands.validate.run import validate
from gymdata.rollouts.ragged import Ragged
from gymdata.store import read_run_json, write_run_json
from gymdata.store.journal import line_of
from tests.rollout_files import rollout, two_turns, write_run

Row = dict[str, Any]
#: (code, row, turn, position, detail)
Findings = list[tuple[str, int, int | None, int | None, str | None]]


@pytest.fixture(params=["parquet", "jsonl"])
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def found(folder: Path, rows: Sequence[Row], suffix: str) -> Findings:
    """What of family B is found."""
    report = validate(write_run(folder / "run", rows, suffix), select=["B"])
    return [(v.code, v.row, v.turn, v.position, v.detail) for v in report.violations]


FRESH = list(range(100, 130))
LOOP = [7, 8, 9] * 30


def sampled(*generations: Sequence[int]) -> list[Row]:
    return [rollout("t", i, float(i), [([1, 2], list(ids))]) for i, ids in enumerate(generations)]


def cut(n: int, of: int) -> list[Row]:
    rows = sampled(*([40 + i, 2] for i in range(of)))
    for row in rows[of - n :]:
        row["turns"][0]["finish_reason"] = "length"
    return rows


def said(*messages: dict[str, Any], **columns: Any) -> Row:
    return rollout("t", 0, 1.0, two_turns(4, 50), messages=[{"role": "user", "content": "?"}, *messages], **columns)


def answer(**message: Any) -> list[Row]:
    return [said({"role": "assistant", "turn": 0, **message})]


ERRORS = ['{"error": "no such tool"}', '{ "error" : {"code": 3}}', "Error: bad argument", "ERROR 500",
          "Traceback (most recent call last):\n  File"]  # fmt: skip
FINE = ["42", '{"error": null, "value": 3}', "Errors: 0", '{"result": "error"}', "No error"]


def results(texts: Sequence[str]) -> list[Row]:
    messages: list[dict[str, Any]] = []
    for i, text in enumerate(texts):
        call = json.dumps([{"id": f"c{i}", "function": {"name": "f", "arguments": {}}}])
        messages.append({"role": "assistant", "content": "calling", "tool_calls": call})
        messages.append({"role": "tool", "content": text, "tool_call_id": f"c{i}"})
    return [said(*messages)]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = '[{"type": "function", "function": {"name": "add"}}]'
PARSED = said({"role": "assistant", "content": "", "tool_calls": '[{"id": "a"}]', "turn": 0}, tools=TOOLS)
BEGUN = (
    "<tool_call>55",
    '<tool_call>{"12',
    "<tool_call>55</tool_call>",
    "<function=add>",
    '{"name": "add", "arguments": {',
)


def spelled(*texts: str, tools: str = TOOLS) -> list[Row]:
    return [said({"role": "assistant", "content": text, "turn": 0}, tools=tools) for text in texts]


UNPARSED = [("B805", 0, 0, None, "2 messages spell a tool call, and none was parsed")]


def rewarded(*rewards: float | None) -> list[Row]:
    return [rollout(f"t{i}", 0, r, two_turns(4, 50 + i)) for i, r in enumerate(rewards)]


def parts(exact: Sequence[float], style: Sequence[float], weight: float) -> list[Row]:
    return [
        rollout(f"t{i}", 0, e + weight * s, two_turns(4, 50 + i),
                rewards=[{"name": "exact", "value": e}, {"name": "style", "value": s}])
        for i, (e, s) in enumerate(zip(exact, style, strict=True))
    ]  # fmt: skip


EXACT, STYLE = [0.0, 1.0] * 5, [0.0, 0.0, 1.0, 1.0] * 2 + [0.0, 1.0]


def grown(sizes: Sequence[int], begun: Callable[[int], int] = lambda i: i) -> list[Row]:
    """Rollouts of so many tokens, begun at these seconds."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        rollout(f"t{i}", 0, float(i % 2), [([1, i], list(range(9, 9 + size)))],
                started_at=start + timedelta(seconds=begun(i)))
        for i, size in enumerate(sizes)
    ]  # fmt: skip


def jump(early: int, late: int, n: int = 200) -> list[int]:
    return [(early if i < n // 2 else late) + i % 3 for i in range(n)]


def by_size(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["n_generated_tokens"])


DRIFT = "median of 11 sampled tokens in the first quarter of the run, 21 in the last"
STARTS = [("B808", 0, None, None, DRIFT)]
CASES: dict[str, tuple[list[Row], Findings]] = {
    "B801 where a loop begins: before an end token, before other tokens, alone": (
        sampled([*FRESH, *LOOP, 2], [*FRESH, *LOOP, *FRESH], LOOP),
        [
            ("B801", 0, 0, 30, "3 tokens repeated 30 times"),
            ("B801", 1, 0, 30, "3 tokens repeated 30 times, then 30 tokens more"),
            ("B801", 2, 0, 0, "3 tokens repeated 30 times"),
        ],
    ),
    "B801 not over 78 tokens, once or twice": (
        sampled([*FRESH, *[7, 8, 9] * 26, 2], [*[7, 8, 9] * 26, *FRESH, *[7, 8, 9] * 26]), [],
    ),
    "B801 not three times": (sampled([*FRESH, *[*range(200, 260)] * 3, 2]), []),
    "B801 not a list that counts": (sampled([*FRESH, *(x for n in range(40) for x in (7, 8, 500 + n)), 2]), []),
    "B802 2 of 20 calls, at the first of them": (
        cut(2, 20), [("B802", 18, 0, None, "2 of 20 model calls were cut at a token limit (10%)")],
    ),
    "B802 not 1 of 20": (cut(1, 20), []),
    "B802 not 2 of 19": (cut(2, 19), []),
    **{
        f"B803 neither text nor reasoning nor a call: {content!r}": (
            answer(content=content), [("B803", 0, 0, None, "message 1; 3 tokens generated")],
        )
        for content in ("", " \n\t ", None)
    },
    "B803 not a dot": (answer(content=" . "), []),
    "B803 not with reasoning": (answer(content=None, reasoning="Hm."), []),
    "B803 not with a call": (answer(content="", tool_calls='[{"id": "a"}]'), []),
    "B803 not without a token, which is T212": (
        [rollout("t", 0, 1.0, [([1, 2], [])], messages=[{"role": "assistant", "content": "", "turn": 0}])], [],
    ),
    "B804 four errors": (results(ERRORS[:4]), [("B804", 0, None, None, "4 of 4 tool results are errors")]),
    "B804 half of all": (results([*ERRORS, *FINE]), [("B804", 0, None, None, "5 of 10 tool results are errors")]),
    "B804 not three errors": (results(ERRORS[:3]), []),
    "B804 not four of nine": (results([*ERRORS[:4], *FINE]), []),
    **{
        f"B805 two messages spell calls: {text!r}": (spelled(text, text), UNPARSED)
        for text in (CALL, 'I call {"name": "add", "arguments": {"a": 1}}.', "[TOOL_CALLS][{}]", "<function=add></function>",
                     *BEGUN)
    },
    "B805 not one": (spelled(CALL), []),
    "B805 not without tools": (spelled(CALL, CALL, tools="[]"), []),
    "B805 not where another was parsed": ([*spelled(CALL, CALL), PARSED], []),
    "B805 not plain text": (spelled(*["Use the function add."] * 3), []),
    "B806 eight scored rollouts with one reward": (
        rewarded(*[0.0] * 8, None), [("B806", 0, None, None, "reward 0 for all 8 scored rollouts")],
    ),
    "B806 not seven": (rewarded(*[0.0] * 7, None), []),
    "B806 not when one differs": (rewarded(*[0.0] * 8, 1e-9), []),
    "B807 not when style counts": (parts(EXACT, STYLE, 1.0), []),
    "B807 not when style is constant": (parts(EXACT, [1.0] * 10, 0.01), []),
    "B807 not when style agrees": (parts(EXACT, EXACT, 0.01), []),
    "B807 not of seven": (parts(EXACT[:7], STYLE[:7], 0.01), []),
    "B808 by when rollouts began": (grown(jump(10, 20)), STARTS),
    "B808 whatever the order of rows": (by_size(grown(jump(10, 20))), STARTS),
    "B808 not below a factor of 1.5": (grown(jump(20, 29)), []),
    "B808 not below 200 rollouts": (grown(jump(10, 20, 196)), []),
    "B808 not of rows that only end in order of length": (
        grown([10 + i // 5 for i in range(200)], lambda i: (i * 73) % 200), [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "expected"), CASES.values(), ids=CASES)
def test_each_finding_is_at_its_place_and_none_where_it_is_nearly_so(
    tmp_path: Path, suffix: str, rows: list[Row], expected: Findings
) -> None:
    """The bounds of family B, one case for each side of them."""
    assert found(tmp_path, rows, suffix) == expected


def test_a_length_that_falls_drifts_too(tmp_path: Path, suffix: str) -> None:
    """B808 in both directions."""
    assert [code for code, *_ in found(tmp_path, grown(jump(20, 10)), suffix)] == ["B808"]


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
        ("B803", 1, 0, "item 1; 2 tokens generated"),
        ("B803", 1, 1, "item 3; 2 tokens generated"),
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
        ("B802", 18, 0, "2 of 20 model calls were cut at a token limit (10%)"),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:19]))
    assert [v.code for v in validate(path, select=["B802"]).violations] == []


def test_a_part_that_dominates_is_found(tmp_path: Path, suffix: str) -> None:
    """B807: the reward follows exact, and style varies for nothing; a part of weight 0 is measured only."""
    rows = parts(EXACT, STYLE, 0.01)
    ((code, row, _, _, detail),) = found(tmp_path, rows, suffix)
    assert (code, row) == ("B807", 0)
    assert str(detail).startswith("the reward follows part 'exact' (correlation 1.000), whatever 'style' (0.2")
    run = tmp_path / "run"
    weights = [{"name": "exact", "weight": 1}, {"name": "style", "weight": 0}]
    write_run_json(run, read_run_json(run) | {"identity": {"rewards": weights}})
    assert validate(run, select=["B"]).violations == []


def test_behavior_never_makes_a_rollout_untrainable(tmp_path: Path, suffix: str) -> None:
    """Findings of family B are warnings and information: exit code 0, and every rollout stays trainable."""
    run = write_run(tmp_path / "run", sampled([*FRESH, *LOOP, 2]), suffix)
    report = validate(run, ignore=["L306"])
    assert (report.by_code, report.errors, report.trainable) == ({"B801": 1}, 0, 1)
    assert main(["validate", str(run)]) == 0
    assert all(code.severity in ("warning", "info") for name, code in CODES.items() if name.startswith("B"))


def test_clean_sample_rollouts_raise_no_alarm() -> None:
    """The shipped rollouts, played by a real policy, have no finding of family B."""
    folder = Path(gymdata.__file__).parent / "sample_data/rollouts"
    for name in ("clean.jsonl", "nemo_gym.jsonl"):
        assert validate(folder / name, select=["B"]).violations == []


def attempts(folder: Path, tool: tuple[int, int], plain: tuple[int, int], **failure: Any) -> Path:
    """A run with (rollouts, failed attempts) that called a tool, and that did not."""
    calls = {"role": "assistant", "tool_calls": '[{"type": "function", "function": {"name": "add", "arguments": {}}}]'}
    texts = {"role": "assistant", "content": "5"}
    shapes = [(calls, *tool), (texts, *plain)]
    kept = [message for message, n, _ in shapes for _ in range(n)]
    rows = [rollout("t", i, float(i), [([1, 2], [40 + i, 2])], messages=[m]) for i, m in enumerate(kept)]
    run = write_run(folder / "run", rows)
    lines = [
        line_of(json.dumps({"kind": "environment", "counts": True, "messages": [m], **failure}).encode())
        for m, _, n in shapes
        for _ in range(n)
    ]
    (run / "failures.jsonl").write_bytes(b"".join(lines))
    return run


@pytest.mark.parametrize(
    ("tool", "plain", "detail"),
    [
        ((8, 12), (30, 0), "12 of 20 attempts with a tool call failed (60%, 95 %: 39 to 78), "
                           "0 of 30 attempts without a tool call failed (0%, 95 %: 0 to 11)"),
        ((30, 0), (8, 12), "0 of 30 attempts with a tool call failed (0%, 95 %: 0 to 11), "
                           "12 of 20 attempts without a tool call failed (60%, 95 %: 39 to 78)"),
        ((18, 2), (28, 2), None),
        ((2, 1), (3, 0), None),
        ((0, 20), (0, 0), None),
        ((20, 0), (20, 0), None),
    ],
)  # fmt: skip
def test_failures_that_depend_on_what_the_rollout_did(
    tmp_path: Path, tool: Any, plain: Any, detail: str | None
) -> None:
    """B809 gives both shares with their intervals where these do not overlap, and nothing where chance may do it."""
    report = validate(attempts(tmp_path, tool, plain), select=["B809"])
    assert [(v.detail, v.severity) for v in report.violations] == ([(detail, "warning")] if detail else [])


@pytest.mark.parametrize("failure", [{"kind": "reward", "counts": False}, {"kind": "engine", "counts": False}])
def test_an_outage_and_a_reward_that_failed_are_no_failed_attempts(tmp_path: Path, failure: dict[str, Any]) -> None:
    """An engine that died fails all that is in flight, and a rollout whose reward failed was kept."""
    assert not validate(attempts(tmp_path, (8, 12), (30, 0), **failure), select=["B809"]).violations
