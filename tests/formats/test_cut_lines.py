"""Rows whose prompts repeat what came before are read by their new ids alone, with the same result as read whole."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import gymdata
from gymdata.errors import DataError
from gymdata.formats.nemo_gym import rows as nemo_rows
from gymdata.formats.nemo_gym.read import table_rows
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import resolve
from gymdata.store.columns import build, to_rows
from tests.benchmarks.bench_validate import write_nemo
from tests.formats.trajectories import same, text

_SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
number = st.one_of(st.integers(-(2**70), 2**70), st.floats())
value = st.recursive(
    st.one_of(
        st.none(), st.booleans(), number, text, st.sampled_from(['":', "\0" + "0", '"prompt_token_ids": [1]', "a\\"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(text, inner, max_size=2)),
    max_leaves=4,
)
token = st.one_of(st.integers(0, 3), st.integers(-1, 2**31 - 1), st.sampled_from([2**31, 1.5, None]))
ids = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), token), max_size=4)
log_prob = st.one_of(
    st.floats(-50, 0, width=32), st.floats(-50, 0), st.integers(-3, 0), st.sampled_from([math.nan, -1e300])
)


@st.composite
def outputs(draw: st.DrawFn) -> list[Any]:
    """Calls with tool outputs between them; most prompts continue the call before, some do not."""
    held: list[Any] = []
    made: list[Any] = []
    for _ in range(draw(st.integers(0, 4))):
        new, generation = draw(ids), draw(ids)
        prompt = (held if draw(st.integers(0, 5)) else held[:-1]) + new
        held = prompt + generation
        size = len(generation) + (draw(st.integers(0, 9)) == 0)
        item = {
            "type": draw(st.sampled_from(["function_call", "reasoning", "message"])), "role": "assistant",
            "content": draw(value), "prompt_token_ids": prompt, "generation_token_ids": generation,
            "generation_log_probs": draw(st.lists(log_prob, min_size=size, max_size=size)),
        }  # fmt: skip
        if not draw(st.integers(0, 9)):
            del item[draw(st.sampled_from(sorted(item)))]
        if not draw(st.integers(0, 9)):
            item |= {"token_ids_rendered": True}
        between = st.sampled_from([{"type": "function_call_output", "output": "x"}, {"role": "user", "content": "y"},
                                   {"type": "reasoning"}, {"role": "human"}, [], "z"])  # fmt: skip
        made += [item, *draw(st.lists(between, max_size=2))]
    return made


def read(folder: Path, line: str) -> Any:
    """The row, or why there is none."""
    path = folder / "rows.jsonl"
    path.write_text('{"responses_create_params": {}, "response": {"output": []}}\n' + line + "\n", encoding="utf-8")
    try:
        return [
            to_rows(build([row], ROLLOUTS, ROLLOUTS.schema.names, "", [1]))
            for row in table_rows(list(resolve(path, ROLLOUTS)))
        ]
    except DataError as error:
        # Another spelling of a key moves what stands behind it.
        return re.sub(r": line 1 column .*?\)", "", str(error))


def of(row: nemo_rows.Row) -> Any:
    """All of a row but its value, whose lists may be numbers of calls."""
    calls = [
        call
        and (
            call.whole_prompt().tolist(),
            call.generation.tolist(),
            None if call.log_probs is None else repr(call.log_probs.tolist()),
        )
        for call in row.calls
    ]
    return replace(row, value={}, output=[], calls=[]), calls


def whole(line: str) -> str:
    """The same JSON with the names of token lists spelled so that no list is cut out of the text."""
    for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        line = line.replace(f'"{name}"', '"' + name[:-1] + '\\u0073"')
    return line


def is_read_alike(folder: Path, line: str) -> bool:
    """Whether the row of a line, or the reason why there is none, is the same to the checks when Python's json reads it, and
    to the import when no list is cut out of it."""
    parsed = []
    for reader in (nemo_rows.read_row, nemo_rows.read_carefully):
        try:
            parsed.append(of(reader(line.encode())))
        except nemo_rows.BadRow as bad:
            parsed.append((bad.code, bad.detail, bad.more))
    return parsed[0] == parsed[1] and same(read(folder, line), read(folder, whole(line)))


@_SETTINGS
@given(outputs(), value, st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]), st.booleans())
@example([], "\0" + "0", (",", ":"), False)
def test_cut_lines_are_read_as_whole_ones(
    tmp_path: Path, output: list[Any], beside: Any, separators: tuple[str, str], ascii: bool
) -> None:
    """Breaks, odd ids, odd log-probabilities and odd text among them."""
    row = {"responses_create_params": {"input": "q", "metadata": beside}, "response": {"output": output}, "reward": 1.0}
    assert is_read_alike(tmp_path, json.dumps(row, separators=separators, ensure_ascii=ascii))


ITEM = '"prompt_token_ids":[1,2],"generation_token_ids":[3],"generation_log_probs":[-1.0]'
PLAIN = '{"type":"reasoning",' + ITEM + "}"


def test_only_the_new_ids_of_a_prompt_are_parsed() -> None:
    """A prompt that begins with the call before is that and its new ids; any other is parsed as a whole."""
    after = PLAIN.replace("[1,2]", "[1,2,3,8,9]")
    line = f'{{"responses_create_params":{{}},"response":{{"output":[{PLAIN},{after}]}}}}'.encode()
    for spelled, new in ((line, [8, 9]), (line.replace(b"3,8,9", b"4,8,9"), [1, 2, 4, 8, 9]),
                      (line.replace(b"3,8,9", b"38,9"), [1, 2, 38, 9])):  # fmt: skip
        first, second = nemo_rows.read_row(spelled).calls
        assert first is not None
        assert second is not None
        assert (first.prompt.tolist(), second.prompt.tolist()) == ([1, 2], new)
        assert of(nemo_rows.read_row(spelled)) == of(nemo_rows.read_carefully(spelled))


def test_rows_of_nemo_gym_and_ours_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the benchmark's rows, of the sample's or of an export goes through Python's json, which takes several times as
    long."""
    write_nemo(tmp_path / "benchmark.jsonl", 1)
    sample = Path(__file__).parents[2] / "sample_data/rollouts/nemo_gym.jsonl"
    gymdata.import_rollouts(sample, tmp_path / "run")
    gymdata.export(tmp_path / "run", tmp_path / "ours.jsonl", "nemo-gym")
    slow: list[bytes] = []
    monkeypatch.setattr(nemo_rows, "read_carefully", slow.append)
    for path in (tmp_path / "benchmark.jsonl", sample, tmp_path / "ours.jsonl"):
        for line in path.read_bytes().splitlines():
            assert nemo_rows.read_row(line).calls
    assert slow == []


ODD = {
    "lists in another order": '{"type":"reasoning","generation_token_ids":[3],"prompt_token_ids":[1,2]}',
    "a key twice": '{"type":"reasoning","id":1,"id":2,' + ITEM + "}",
    "a list twice": '{"type":"reasoning",' + ITEM + ',"prompt_token_ids":[7]}',
    "a list in a list": '{"type":"reasoning",' + ITEM.replace("[1,2]", "[1,[2]]") + "}",
    "a comma too many": '{"type":"reasoning",' + ITEM.replace("[1,2]", "[1,2,]") + "}",
    "a comma too many after what is repeated": '{"type":"reasoning",' + ITEM.replace("[1,2]", "[1,2,3,]") + "}",
    "a comma and spaces too many": '{"type":"reasoning",' + ITEM.replace("[1,2]", "[1,2,3,  ]") + "}",
    "an id that is no whole number": '{"type":"reasoning",' + ITEM.replace("[1,2]", "[1,2.0]") + "}",
    "an id as text": '{"type":"reasoning",' + ITEM.replace("[1,2]", '[1,"2"]') + "}",
    "an object in a list": '{"type":"reasoning",' + ITEM.replace("[1,2]", '[{"a":1},2]') + "}",
    "lists of a tool": '{"type":"function_call_output",' + ITEM + "}",
    "log-probabilities after another key": '{"type":"reasoning",'
    + ITEM.replace('],"generation_log', '],"id":1,"generation_log')
    + "}",
    "an id of more than 32 bits": '{"type":"reasoning",' + ITEM.replace("[1,2]", "[1,2147483648]") + "}",
    "a tab before a comma too many": '{"type":"reasoning",' + ITEM.replace("[1,2]", "[1,2,3,\t]") + "}",
    "spaces in an empty list": '{"type":"reasoning",' + ITEM.replace("[1,2]", "[ ]") + "}",
    "words in place of the lists of a tool": (
        '{"type":"function_call_output",' + ITEM + '},{"type":"reasoning","prompt_token_ids":"\\u00003",'
        '"generation_token_ids":"\\u00004","generation_log_probs":"\\u00005"}'
    ),
    "a word in place of a list": '{"type":"reasoning",' + ITEM.replace("[1,2]", '"\\u00000"') + "}",
}


@pytest.mark.parametrize("what", ODD)
def test_odd_lists_are_read_as_whole_ones(tmp_path: Path, what: str) -> None:
    """What is no list of ids is no list of ids in any way of reading."""
    line = f'{{"responses_create_params":{{}},"response":{{"output":[{{"type":"reasoning",{ITEM}}},{ODD[what]}]}}}}'
    assert is_read_alike(tmp_path, line)
