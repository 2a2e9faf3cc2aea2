"""schemas/SPEC.md and the checker beside it, which shares no code with gymdata: both say what gymdata says."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import Call, TurnEncoder, count_breaks, expand_prompts
from gymdata.store import read_table
from gymdata.store.lines import encode
from tests.rollout_files import rollout, write_table

ROOT = Path(__file__).parents[1]
SCRIPT, SPEC = ROOT / "schemas" / "check_rollouts.py", ROOT / "schemas" / "SPEC.md"
STOP = 2
Row = dict[str, Any]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_rollouts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKER = load()


def check(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["check_rollouts.py", *map(str, words)])
    return int(CHECKER.main())


def encoded(row: Row, calls: Sequence[tuple[list[int], list[int], list[float]]]) -> Row:
    """``row`` with these calls for its turns, but with the counts that it had."""
    encoder = TurnEncoder()
    for prompt, ids, log_probs in calls:
        encoder.add(Call(np.int32(prompt), np.int32(ids), np.float32(log_probs), "stop"))
    return {**row, "turns": encoder.turns}


def clean() -> Row:
    return rollout("a", 0, 1.0, [([1, 5], [10, 11, STOP]), ([1, 5, 10, 11, STOP, 30, 31], [12, STOP])])


def calls_of(row: Row) -> list[tuple[list[int], list[int], list[float]]]:
    return [
        (prompt.tolist(), turn["generation_token_ids"].tolist(), turn["generation_log_probs"].tolist())
        for prompt, turn in zip(expand_prompts(row["turns"]), row["turns"], strict=True)
    ]


def changed(turn: int, **fields: Any) -> Callable[[Row], Row]:
    def damage(row: Row) -> Row:
        row["turns"][turn] |= fields
        return row

    return damage


def rewritten(row: Row) -> Row:
    (first, (_, *second)) = calls_of(row)
    return encoded(row, [first, ([1, 5, 10, 12, STOP, 30, 31], *second)])


def without_stop(row: Row) -> Row:
    (prompt, ids, log_probs), (_, *second) = calls_of(row)
    return encoded(row, [(prompt, ids[:-1], log_probs[:-1]), ([1, 5, 10, 11, STOP, 30, 31], *second)])


def shifted(row: Row) -> Row:
    (prompt, ids, log_probs), second = calls_of(row)
    return encoded(row, [(prompt, ids, [0.5, *log_probs[:-1]]), second])


#: What is done to a clean row, where the checker finds it, and in which words.
DAMAGE: dict[str, tuple[Callable[[Row], Row], str]] = {
    "digest": (changed(1, digest=7), "row 0, turn 1: digest: got 7, its content has"),
    "content": (changed(0, generation_token_ids=np.int32([10, 13, STOP])), "row 0, turn 0: digest: got"),
    "one log-prob less": (changed(0, generation_log_probs=np.float32([-1, -2])),
                          "turn 0: generation_log_probs: got 2, expected 3"),
    "one log-prob more": (changed(1, generation_log_probs=np.float32([-1, -2, -3])),
                          "turn 1: generation_log_probs: got 3, expected 2"),
    "positive": (shifted, "turn 0: generation_log_probs[0]: got 0.5, expected a finite number, at most 0"),
    "not a number": (changed(1, generation_log_probs=np.float32([-1, np.nan])), "turn 1: generation_log_probs[1]: got nan"),
    "negative id": (changed(0, prompt_delta_ids=np.int32([-1, 5])), "turn 0: prompt_delta_ids[0]: got -1"),
    "later parent": (changed(0, parent=1), "turn 0: parent: got 1"),
    "prefix too long": (changed(1, prefix_length=9), "turn 1: prefix_length: got 9, expected 0 to 5"),
    "does not continue": (rewritten, "turn 1: n_breaks: got 0, the turns have 1: the prompt leaves turn 0 at token 3"),
    "missing stop": (without_stop, "turn 0: the stop token is missing: got [11] at the end, expected one of {2}"),
    "finish reason": (changed(1, finish_reason="done"), "turn 1: finish_reason: got 'done'"),
    "turn lost": (lambda row: {**row, "turns": row["turns"][:1]}, "row 0: n_turns: got 2, the turns have 1"),
    "generated tokens": (lambda row: {**row, "n_generated_tokens": 4}, "row 0: n_generated_tokens: got 4, the turns have 5"),
    "hash": (lambda row: {**row, "generation_hash": 1}, "row 0: generation_hash: got 1, the turns have"),
    "no turns": (lambda row: {k: v for k, v in row.items() if k != "turns"}, "row 0: cannot be read as a rollout"),
    "message": (lambda row: {**row, "messages": [{"role": "assistant", "turn": 2}]}, "row 0: messages: got turn 2, of 2"),
}  # fmt: skip


def test_the_checker_is_small_and_imports_no_gymdata() -> None:
    """Nothing but the standard library, xxhash and pyarrow, in fewer than 220 lines."""
    text = SCRIPT.read_text()
    assert len(text.splitlines()) < 220
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"xxhash", "pyarrow"}
    run = [sys.executable, "-P", str(SCRIPT)]
    assert "run folder" in subprocess.run([*run, "--help"], capture_output=True, text=True, check=True, cwd="/").stdout
    arguments = ["x", str(ROOT / "sample_data" / "tour" / "after")]
    probe = (
        f"import runpy, sys; sys.argv = {arguments!r}\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not any(name.startswith('gymdata') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", probe], check=True, cwd="/")


def test_the_shipped_rollouts_are_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As JSON lines, as Parquet and as run folders, whose stop tokens are known."""
    samples = ROOT / "sample_data"
    table = read_table(samples / "rollouts" / "clean.jsonl", ROLLOUTS)
    write_table(table, tmp_path / "clean.parquet", ROLLOUTS)
    for path in (samples / "rollouts" / "clean.jsonl", tmp_path / "clean.parquet"):
        assert check(monkeypatch, path) == 0
        assert capsys.readouterr().out == "faults: 0 in 24 rollouts, 48 turns, 0 breaks, 612 sampled tokens\n"
    assert check(monkeypatch, samples / "tour" / "before", samples / "tour" / "after") == 0
    assert "300 rollouts, 595 turns, 8 breaks" in capsys.readouterr().out
    assert check(monkeypatch, samples / "rollouts" / "broken.jsonl") == 1
    assert check(monkeypatch, samples / "rollouts" / "nemo_gym.jsonl") == 1
    assert check(monkeypatch, tmp_path / "not-there.jsonl") == 1


@pytest.mark.parametrize("name", DAMAGE)
def test_each_kind_of_damage_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With file, row and turn, in both forms; the row without the damage is clean."""
    damage, words = DAMAGE[name]
    for number, row in enumerate((clean(), damage(copy.deepcopy(clean())))):
        file = tmp_path / f"{number}.jsonl"
        file.write_bytes(encode({**row, "rewards": {}}) + b"\n")
        assert check(monkeypatch, file, "--stop-id", str(STOP)) == number, capsys.readouterr().out
        if number and "turns" in row and name not in ("later parent", "negative id"):
            batch = pa.Table.from_pylist([row], schema=ROLLOUTS.arrow)
            write_table(batch, tmp_path / "1.parquet", ROLLOUTS)
            assert check(monkeypatch, tmp_path / "1.parquet", "--stop-id", str(STOP)) == 1
    assert f"1.jsonl: {words}" in (out := capsys.readouterr().out) or f", {words}" in out, out


def test_a_rollout_that_is_there_twice_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Across files, too."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(encode({**clean(), "rewards": {}}) + b"\n")
    assert check(monkeypatch, tmp_path / "a.jsonl", tmp_path / "b.jsonl") == 1
    assert f"{tmp_path / 'b.jsonl'}: row 0: rollout_id: is there twice" in capsys.readouterr().out


def test_the_example_of_the_specification_is_right() -> None:
    """Its digests, counts and hashes are those of the checker and of gymdata."""
    row = json.loads(re.findall(r"```json\n(.*?)```", SPEC.read_text(), re.DOTALL)[0])
    faults: list[tuple[int | None, str]] = []
    assert CHECKER.check_row(copy.deepcopy(row) | {"extra": "{}", "messages": []}, {2}, False, faults) == [1, 2, 0, 5]
    assert faults == []
    encoder = TurnEncoder()
    prompts = [prompt.tolist() for prompt in expand_prompts(row["turns"])]
    assert prompts[1] == [1, 15, 7, 40, 41, 2, 9, 1]
    for prompt, turn in zip(prompts, row["turns"], strict=True):
        encoder.add(Call(np.int32(prompt), turn["generation_token_ids"], turn["generation_log_probs"], "stop"))
    assert [turn["digest"] for turn in encoder.turns] == [turn["digest"] for turn in row["turns"]]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=5), st.sampled_from("ab")
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_checker_counts_the_breaks_that_gymdata_counts(calls: list[tuple[list[int], list[int], str]]) -> None:
    """On conversations that continue, fork and rewrite anywhere."""
    encoder = TurnEncoder()
    whole: list[list[int]] = []
    for prompt, ids, agent in calls:
        before = whole[prompt[0] % len(whole)][: len(prompt) * 3] if whole and prompt else []
        encoder.add(
            Call(np.int32([*before, *prompt]), np.int32(ids), np.full(len(ids), -1, np.float32), "length", agent)
        )
        whole.append([*before, *prompt, *ids])
    row = clean() | encoder.columns()
    lists = ("prompt_delta_ids", "generation_token_ids", "generation_log_probs")
    turns = [{**turn, **{name: turn[name].tolist() for name in lists}} for turn in encoder.turns]
    faults: list[tuple[int | None, str]] = []
    counted = CHECKER.check_row(row | {"turns": turns, "messages": []}, set(), False, faults)
    assert (faults, counted[2]) == ([], count_breaks(encoder.turns))
