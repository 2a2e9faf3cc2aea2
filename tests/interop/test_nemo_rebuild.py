"""Prompts that NeMo Gym rows lack are rebuilt from captured ids, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import StoreError, UsageError
from gymdata.interop.run import import_rollouts
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_run_json, read_table
from gymdata.store.columns import to_rows
from gymdata.validate.run import fix
from tests.interop.trajectories import lines, through_json
from tests.validate.generate import write_lines

SAMPLES = Path(__file__).parents[2] / "sample_data"
POLICY = str(SAMPLES / "policy")
SOURCE = lines(SAMPLES / "rollouts" / "nemo_gym.jsonl")
Row = dict[str, Any]


def calls(row: Row) -> list[Row]:
    return [item for item in row["response"]["output"] if "generation_token_ids" in item]


def rows(change: Callable[[Row], None], source: list[Row] = SOURCE) -> list[Row]:
    made: list[Row] = through_json(source)
    for row in made:
        change(row)
    return made


def without_prompts(row: Row) -> None:
    """Missing, null and empty, one after another."""
    for number, item in enumerate(calls(row)):
        if number % 3 == 0:
            del item["prompt_token_ids"]
        else:
            item["prompt_token_ids"] = None if number % 3 == 1 else []


def tokens(run: Path) -> list[list[tuple[list[int], list[int], list[float]]]]:
    return [
        [
            (p.tolist(), list(t["generation_token_ids"]), list(t["generation_log_probs"]))
            for t, p in zip(row["turns"], expand_prompts(row["turns"]), strict=True)
        ]
        for row in to_rows(read_table(run))
    ]


def brought(folder: Path, given: list[Row], name: str = "run", **options: Any) -> tuple[Path, Any, list[Row]]:
    """The run, the summary and what was not rebuilt."""
    done = import_rollouts(write_lines(folder / f"{name}.jsonl", given), folder / name, run_id="r", **options)
    return folder / name, done, lines(folder / name / "not_rebuilt.jsonl")


def test_rebuilt_prompts_are_the_ones_that_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every prompt taken out, all turns come back with the ids of the source, and each row says which; each is counted
    once, over however many batches."""
    monkeypatch.setattr("gymdata.store.tables.PARSE_BYTES", 1)
    whole, _, _ = brought(tmp_path, SOURCE, "whole")
    run, done, refused = brought(tmp_path, rows(without_prompts), tokenizer=POLICY)
    assert tokens(run) == tokens(whole)
    made = to_rows(read_table(run))
    assert [json.loads(r["extra"])["prompts_rebuilt"] for r in made] == [list(range(r["n_turns"])) for r in made]
    assert (done.prompts_rebuilt, done.prompts_refused, refused) == (sum(r["n_turns"] for r in made), 0, [])
    facts = read_run_json(run)
    assert facts["counts"]["prompts_rebuilt"] == done.prompts_rebuilt > 24
    assert facts["tokenizer"]["path"] == POLICY
    assert facts["tokenizer"]["tokenizer_hash"]


def test_nothing_is_rebuilt_unless_asked(tmp_path: Path) -> None:
    """Without a tokenizer calls without prompts give no turns; with one, captured prompts stay and rows are the same."""
    run, done, _ = brought(tmp_path, rows(without_prompts))
    assert (done.turns, done.prompts_rebuilt, done.without_token_data) == (0, 0, len(SOURCE))
    with pytest.raises(StoreError, match="tokenizer_hash"):
        import_rollouts(tmp_path / "run.jsonl", run, tokenizer=POLICY)
    plain, with_tokenizer = (brought(tmp_path, SOURCE, n, **o)[0] for n, o in (("a", {}), ("b", {"tokenizer": POLICY})))
    assert to_rows(read_table(plain)).__repr__() == to_rows(read_table(with_tokenizer)).__repr__()


def edit_call(row: Row) -> None:
    without_prompts(row)
    for item in row["response"]["output"]:
        if item["type"] == "function_call":
            item["arguments"] = '{"expression": "1+1+1"}'


def test_a_message_that_its_ids_do_not_say_is_refused(tmp_path: Path) -> None:
    """The turn after an edited call is refused with position and both windows; the row and its first turn stay."""
    run, done, refused = brought(tmp_path, rows(edit_call, SOURCE[:2]), tokenizer=POLICY)
    assert (done.rollouts, done.rejected, done.prompts_rebuilt) == (2, 0, 2)
    assert [(r["line"], r["turn"]) for r in refused] == [(1, 1), (2, 1)]
    assert "'1+1+1', which its ids do not" in refused[0]["reason"]
    prompt = calls(SOURCE[0])[0]["prompt_token_ids"]
    assert refused[0]["position"] > len(prompt)
    assert "773" in refused[0]["expected"]
    assert "1+1" in refused[0]["got"]
    assert [[len(turn[0]) for turn in row] for row in tokens(run)] == [[len(prompt)], [len(prompt)]]
    assert refused[0]["rollout_id"] == to_rows(read_table(run))[0]["rollout_id"]


def edit_question(row: Row) -> None:
    del calls(row)[0]["prompt_token_ids"]
    row["responses_create_params"]["input"][0]["content"] = "How much is 773*8?"


def test_a_captured_prompt_speaks_against_a_rebuilt_one(tmp_path: Path) -> None:
    """A first prompt that the next captured one does not begin with is taken back; that captured one is kept."""
    run, done, refused = brought(tmp_path, rows(edit_question, SOURCE[:1]), tokenizer=POLICY)
    assert (done.prompts_rebuilt, done.prompts_refused) == (0, 1)
    assert "captured prompt of turn 1" in refused[0]["reason"]
    at = refused[0]["position"]
    assert calls(SOURCE[0])[0]["prompt_token_ids"][:at] == calls(SOURCE[0])[1]["prompt_token_ids"][:at]
    assert "9" in refused[0]["expected"]
    assert "8" in refused[0]["got"]
    assert [turn[0] for turn in tokens(run)[0]] == [calls(SOURCE[0])[1]["prompt_token_ids"]]


def odd_ids(row: Row) -> None:
    without_prompts(row)
    calls(row)[0]["generation_token_ids"][3] = 2**31 - 1


def no_first_generation(row: Row) -> None:
    without_prompts(row)
    for name in ("generation_token_ids", "generation_log_probs"):
        del calls(row)[0][name]


def instructions(row: Row) -> None:
    without_prompts(row)
    row["responses_create_params"]["instructions"] = "Be brief."


def unknown_part(row: Row) -> None:
    without_prompts(row)
    row["responses_create_params"]["input"][0]["content"] = [{"type": "input_memory", "memory": "x"}]


def early_end(row: Row) -> None:
    """An end of turn inside a generation: how many turns the ids hold is not clear."""
    without_prompts(row)
    calls(row)[0]["generation_token_ids"].insert(1, 2)
    calls(row)[0]["generation_log_probs"].insert(1, -0.5)


@pytest.mark.parametrize(
    ("change", "turn", "reason"),
    [
        (odd_ids, 0, "not one of this tokenizer's"),
        (no_first_generation, 1, "no generation ids"),
        (instructions, 0, "instructions"),
        (unknown_part, 0, "more than text"),
        (early_end, 1, "turns were closed"),
    ],
)
def test_what_cannot_be_proved_is_named(tmp_path: Path, change: Callable[[Row], None], turn: int, reason: str) -> None:
    """Each such row is kept, and its first refused turn says why."""
    _, done, refused = brought(tmp_path, rows(change, SOURCE[:1]), tokenizer=POLICY)
    assert (done.rollouts, done.rejected) == (1, 0)
    assert refused[0]["turn"] == turn
    assert reason in refused[0]["reason"]


def test_an_export_writes_rebuilt_prompts_and_says_so(tmp_path: Path) -> None:
    """Exported rows hold the ids and a mark beside them, and importing them without a tokenizer keeps both."""
    run, _, _ = brought(tmp_path, rows(without_prompts), tokenizer=POLICY)
    out = tmp_path / "out.jsonl"
    gymdata.export(run, out, "nemo-gym")
    exported = lines(out)
    for made, source in zip(exported, SOURCE, strict=True):
        for item, was in zip(calls(made), calls(source), strict=True):
            assert item["prompt_token_ids"] == was["prompt_token_ids"]
            assert item["prompt_token_ids_rebuilt"] is True
    again, done, _ = brought(tmp_path, exported, "again")
    assert (tokens(again), done.prompts_rebuilt) == (tokens(run), 0)
    named = [[json.loads(r["extra"])["prompts_rebuilt"] for r in to_rows(read_table(x))] for x in (run, again)]
    assert named[0] == named[1]
    gymdata.export(again, tmp_path / "twice.jsonl", "nemo-gym")
    assert lines(tmp_path / "twice.jsonl") == exported


def test_the_command_tells_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table counts rebuilt prompts, a refusal is told on stderr, and no row being lost the exit code is 0."""
    source = write_lines(tmp_path / "a.jsonl", [*rows(without_prompts, SOURCE[:2]), *rows(edit_call, SOURCE[2:3])])
    assert main(["import", str(source), "-o", str(tmp_path / "run"), "--tokenizer", POLICY]) == 0
    told = capsys.readouterr()
    assert "prompts rebuilt" in told.out
    assert "not_rebuilt.jsonl" in told.err


def test_other_formats_have_no_prompts_to_rebuild(tmp_path: Path) -> None:
    """A tokenizer for a format that it does not serve is a usage error."""
    source = write_lines(tmp_path / "a.jsonl", SOURCE[:1])
    with pytest.raises(UsageError, match="NeMo Gym rows only"):
        import_rollouts(source, tmp_path / "run", source="atif", tokenizer=POLICY)


def third_call(row: Row) -> None:
    """A third call without a prompt, after a captured second one that rewrites what the first one sampled."""
    del calls(row)[1]["prompt_token_ids"][35]
    last = calls(row)[1]
    row["response"]["output"] += [{"role": "user", "content": "Sure?"}, {**last, "prompt_token_ids": None}]


def test_repaired_parts_still_name_their_rebuilt_turns(tmp_path: Path) -> None:
    """When a rollout is split at a break, each part counts its own rebuilt turns."""
    run, done, _ = brought(tmp_path, rows(third_call, SOURCE[:1]), tokenizer=POLICY)
    assert (done.turns, done.breaks, done.prompts_rebuilt) == (3, 1, 1)
    assert json.loads(to_rows(read_table(run))[0]["extra"])["prompts_rebuilt"] == [2]
    fix(run, "split", tmp_path / "fixed.parquet")
    parts = to_rows(read_table(tmp_path / "fixed.parquet"))
    assert [(p["n_turns"], json.loads(p["extra"])["prompts_rebuilt"]) for p in parts] == [(1, []), (2, [1])]
    gymdata.export(tmp_path / "fixed.parquet", tmp_path / "fixed.jsonl", "nemo-gym")
    exported = lines(tmp_path / "fixed.jsonl")
    marks = [["prompt_token_ids_rebuilt" in item for item in calls(row)] for row in exported]
    assert [[m for m in row if m] for row in marks] == [[], [True]]
