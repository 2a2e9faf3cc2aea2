"""L306: log-probabilities that no sampler can have recorded, by file, with their count."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from gymdata.cli.main import main
from gymdata.commands.validate.run import validate
from gymdata.rollouts.logprobs import SampledLogProbs
from tests.rollout_files import rollout, write_run
from tests.validate.generate import nemo_rows, with_ids, write_lines

SAMPLED = tuple(np.float32(-np.random.default_rng(7).exponential(size=80)).tolist())


def rows_of(logprobs: list[float], turns: int = 4, **columns: Any) -> list[dict[str, Any]]:
    """Rollouts of ``turns`` generated turns of four tokens each, as many as ``logprobs`` fill."""
    each = 4 * turns
    rows = []
    for start in range(0, len(logprobs), each):
        calls, held = [], [1, 2]
        for turn in range(turns):
            calls.append((held, [10 + turn, 11, 12, start + 20]))
            held = [*held, *calls[-1][1], 5]
        row = rollout(f"t{start}", 0, 1.0, calls, **columns)
        for turn, stored in enumerate(row["turns"]):
            at = start + 4 * turn
            stored["generation_log_probs"] = logprobs[at : at + 4]
        rows.append(row)
    return rows


def found(path: Path) -> list[str]:
    violations = validate(path, select=["L306"]).violations
    assert all(v.severity == "warning" and v.file is not None for v in violations)
    return [v.detail or "" for v in violations]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda values: values, None),
        (lambda values: [0.0] * 80, "all 80 log-probabilities are 0"),
        (lambda values: [-0.0] * 80, "all 80 log-probabilities are 0"),
        (lambda values: [-0.6931] * 80, "all 80 log-probabilities are -0.6931"),
        (lambda values: [-9999.0] * 80, "80 of 80 log-probabilities are below -87.3 (least: -9999)"),
        (lambda values: [-9999.0, *values[1:]], "1 of 80"),
        (lambda values: [*values[:70], *[-100.0] * 10], "10 of 80"),
        (lambda values: [-1e9, -3.4028235e38, *values[2:]], "2 of 80"),
        (lambda values: [round(v, 2) for v in values], "at most two decimals"),
        (lambda values: [round(v, 1) for v in values], "at most two decimals"),
        (lambda values: [float(round(v)) for v in values], "at most two decimals"),
        (lambda values: [round(v, 3) for v in values], None),
        (lambda values: [values[4 * (k // 4)] for k in range(80)], "all log-probabilities of a turn are equal"),
        (lambda values: [-80.0, *values[1:]], None),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "nemo"])
def test_what_no_sampler_records_is_one_warning_per_file(
    tmp_path: Path, change: Callable[[list[float]], list[float]], why: str | None, kind: str
) -> None:
    """Constants, sentinels, averages and rounded numbers are named with their count; a sampler's numbers are not."""
    values = change(list(SAMPLED))
    if kind == "nemo":
        rows = nemo_rows(n=10, turns=2)
        for k in range(20):
            ids = with_ids(rows[k // 2], k % 2)
            ids["generation_token_ids"] = [10, 11, 12, 20 + k]
            ids["generation_log_probs"] = values[4 * k : 4 * k + 4]
        path = write_lines(tmp_path / "a.jsonl", rows)
    else:
        path = write_run(tmp_path / "run", rows_of(values), kind)
    details = found(path)
    assert len(details) == (why is not None)
    assert why is None or why in details[0]


def test_each_file_is_judged_over_64_tokens(tmp_path: Path) -> None:
    """63 tokens, or 48 in each of two files, may be alike by chance; of two files the filled one is named."""
    for name, values in (("a", [0.0] * 48), ("b", [0.0] * 48)):
        write_run(tmp_path / name, rows_of(values, turns=1))
    assert found(tmp_path / "[ab]") == []
    write_run(tmp_path / "b", rows_of([0.0] * 64, turns=1))
    (violation,) = validate(tmp_path / "[ab]", select=["L306"]).violations
    assert "/b/" in str(violation.file)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "nemo"])
def test_rollouts_of_one_number_are_counted_among_others(tmp_path: Path, kind: str) -> None:
    """A source that recorded the log-probabilities of some rollouts alone: the tokens of the others are counted, from 64 on.
    Seven tokens may be certain, and so may all but one of a rollout."""
    numbers = [*[0.0] * 48, *[-1.5] * 16, *SAMPLED[:16], *[0.0] * 15, -0.5]
    if kind == "nemo":
        rows = nemo_rows(n=6, turns=4)
        for k in range(24):
            ids = with_ids(rows[k // 4], k % 4)
            ids["generation_token_ids"], ids["generation_log_probs"] = [10, 11, 12, 20 + k], numbers[4 * k : 4 * k + 4]
        path, fewer = write_lines(tmp_path / "a.jsonl", rows), write_lines(tmp_path / "b.jsonl", rows[1:])
    else:
        path = write_run(tmp_path / "run", rows_of(numbers), kind)
        fewer = write_run(tmp_path / "fewer", rows_of(numbers[16:]), kind)
    assert found(path) == ["64 of 96 log-probabilities are of rollouts in which all are equal"]
    assert found(fewer) == []
    short = write_run(tmp_path / "short", rows_of([*[0.0] * 4, *SAMPLED], turns=1))
    assert found(short) == []


def test_greedy_and_rendered_turns_are_not_judged(tmp_path: Path) -> None:
    """At temperature 0 an engine may record 0 everywhere (L304 names it), and ids from text have no log-probability."""
    greedy = write_run(tmp_path / "greedy", rows_of([0.0] * 80, temperature=0.0))
    assert [v.code for v in validate(greedy, select=["L"], ignore=["T"]).violations] == ["L304"]
    rows = rows_of([math.nan] * 80)
    for row in rows:
        for turn in row["turns"]:
            turn["rendered"] = True
    assert validate(write_run(tmp_path / "rendered", rows), select=["L"]).violations == []


def test_the_code_is_explained_and_counts_as_an_error_when_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--explain says what to do; exit code 0 with the warning, 1 with --strict."""
    assert main(["validate", "--explain", "L306"]) == 0
    assert "-9999" in capsys.readouterr().out
    run = write_run(tmp_path / "run", rows_of([0.0] * 80))
    assert main(["validate", str(run), "--select", "L306"]) == 0
    assert main(["validate", str(run), "--select", "L306", "--strict"]) == 1


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, -0.25, -1.375, -2.0, -9999.0, math.nan, -math.inf, 0.5]), max_size=40),
        max_size=6,
    )
)
def test_parts_in_any_cut_give_the_same_judgement(turns: list[list[float]]) -> None:
    """All at once and a turn at a time: the same sentence."""
    values = np.array([v for turn in turns for v in turn], np.float32)
    follows = np.array([k > 0 for turn in turns for k in range(len(turn))], bool)
    whole, by_turn = SampledLogProbs(), SampledLogProbs()
    whole.add(values, follows, np.array([len(turn) for turn in turns], int))
    start = 0
    for turn in turns:
        part = slice(start, start + len(turn))
        by_turn.add(values[part], follows[part], np.array([len(turn)]))
        start += len(turn)
    assert whole.fault() == by_turn.fault()
