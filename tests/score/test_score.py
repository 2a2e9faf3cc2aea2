"""Scoring saved rollouts again, and scoring in batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.collect.run import collect
from gymdata.commands.score.run import score
from gymdata.errors import RefusedError, RewardError, StoreError, UsageError
from gymdata.rewards import load_rewards
from gymdata.rewards.port import RewardPart
from gymdata.rewards.scheduler import RewardScheduler, Weighted, total
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.store import StageOutput, read_run_json, read_table
from gymdata.user_code import in_thread
from tests.collect.conftest import adder, tasks  # noqa: F401 - fixtures
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts
from tests.rewards.rollouts import rollout
from tests.rollout_files import write_table

Tasks = Callable[..., Path]


@pytest.fixture
def run(tasks: Tasks, tmp_path: Path, adder: str) -> Path:
    folder = tmp_path / "run"
    made = parts(FakeSampler(add_or_answer), env=adder, rewards=["exact_match"])
    collect(tasks=str(tasks(8)), output=folder, num_rollouts=2, seed=1, parts=made)
    return folder


@pytest.mark.filterwarnings("error")
def test_scoring_again_gives_what_collecting_gave(run: Path) -> None:
    """The same reward on saved rollouts equals the stored part; run.json names the run it came from. Nobody
    is warned of anything."""
    summary = score(path=str(run), reward=["exact_match"])
    assert (summary.rollouts, summary.scored, summary.failed) == (16, 16, 0)
    rows = read_table(run, columns=["rollout_id", "reward"]).to_pylist()
    scores = read_table(run / "scores-exact_match", SCORES).to_pylist()
    assert {r["rollout_id"]: r["reward"] for r in rows} == {s["rollout_id"]: s["value"] for s in scores}
    assert read_run_json(run / "scores-exact_match")["parents"][0]["run_id"] == read_run_json(run)["run_id"]


def test_an_example_in_the_prompt_is_no_answer(tmp_path: Path) -> None:
    """A rollout whose time ran out before its first token said nothing, whatever an assistant says in its task."""
    opening = [("user", "1+1?"), ("assistant", "2"), ("user", "4-2?")]
    row = {"messages": [{"role": role, "content": text} for role, text in opening], "answer": "2"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))

    async def hang(_: object) -> None:
        await asyncio.Event().wait()

    late = parts(FakeSampler(before=hang), rewards=["exact_match"])
    collect(tasks=str(tmp_path / "tasks.jsonl"), output=tmp_path / "run", time_limit=0.05, parts=late)
    summary = score(path=str(tmp_path / "run"), reward=["exact_match"])
    assert (summary.scored, summary.mean) == (1, 0.0)


def test_a_few_are_scored_first_and_then_the_others(run: Path) -> None:
    """``limit`` bounds what a trial costs, over several batches, too; the whole scoring adds the rows that are missing."""
    summary = score(path=str(run), reward=["exact_match"], limit=3)
    assert (summary.rollouts, summary.scored) == (3, 3)
    first = read_table(run / "scores-exact_match", SCORES).to_pylist()
    assert [row["rollout_id"] for row in first] == read_table(run)["rollout_id"].to_pylist()[:3]
    assert score(path=str(run), reward=["exact_match"]).rollouts == 16
    rows = read_table(run / "scores-exact_match", SCORES).to_pylist()
    assert rows[:3] == first
    assert len(rows) == len({row["rollout_id"] for row in rows}) == 16


def test_old_scores_stay(run: Path, tmp_path: Path) -> None:
    """Other scores under one name are added after the old ones, equal ones are not; --overwrite replaces all."""
    reward = tmp_path / "mine.py"
    for value, expected in ((1.0, 16), (1.0, 16), (0.5, 32), ("float('nan')", 48), ("float('nan')", 48), (1.0, 64)):
        reward.write_text(f"def mine(completions, **_):\n    return [{value} for _ in completions]\n")
        score(path=str(run), reward=[f"{reward}:mine"], name="mine")
        assert read_table(run / "scores-mine", SCORES).num_rows == expected
    score(path=str(run), reward=[f"{reward}:mine"], name="mine", overwrite=True)
    assert read_table(run / "scores-mine", SCORES).num_rows == 16


def test_one_scores_at_a_time(run: Path) -> None:
    """A second scoring under the same name is refused while the first writes, and loses nothing."""
    score(path=str(run), reward=["numeric"])
    with StageOutput(run / "scores-numeric", "score"), pytest.raises(StoreError, match="another process"):
        score(path=str(run), reward=["numeric"])
    score(path=str(run), reward=["numeric"])
    assert read_table(run / "scores-numeric", SCORES).num_rows == 16


def test_a_place_that_cannot_be_written_is_told_at_once(run: Path) -> None:
    """Before anything is scored: a file of that name is the caller's to move."""
    (run / "scores-numeric").write_text("in the way")
    with pytest.raises(StoreError, match="scores-numeric: is a file, expected a folder") as caught:
        score(path=str(run), reward=["numeric"])
    assert caught.value.exit_code == 2


def test_several_rewards_have_a_total(run: Path) -> None:
    """Each part has its rows, and the weighted total has rows under the name of the scoring."""
    summary = score(path=str(run), reward=["numeric=2", "regex:."], name="both")
    rows = read_table(run / "scores-both", SCORES).to_pylist()
    by_name = {name: [r["value"] for r in rows if r["name"] == name] for name in ("numeric", "regex", "both")}
    assert by_name["both"] == [2 * n + r for n, r in zip(by_name["numeric"], by_name["regex"], strict=True)]
    assert summary.name == "both"


def test_the_weight_of_a_single_reward_counts(run: Path) -> None:
    """The score of one reward is its weighted value, compared with its stored part alike."""
    summary = score(path=str(run), reward=["exact_match=2"])
    parts = {row["rollout_id"]: 2 * row["reward"] for row in read_table(run).to_pylist()}
    rows = read_table(run / "scores-exact_match", SCORES).to_pylist()
    assert {row["rollout_id"]: row["value"] for row in rows} == parts
    assert max(parts.values()) == 2
    assert summary.mean == sum(parts.values()) / 16


def test_a_total_beyond_float64_is_a_failure(run: Path, tmp_path: Path) -> None:
    """A weighted part, or two parts of 1e308, have no sum that a file could hold: the total's rows say so; their mean alone
    is a number."""
    code = "def {}(completions, **_):\n    return [1e308 for _ in completions]\n"
    (tmp_path / "huge.py").write_text(code.format("one") + code.format("two"))
    one, two = (f"{tmp_path / 'huge.py'}:{name}" for name in ("one", "two"))
    assert score(path=str(run), reward=[one], name="single").mean == 1e308
    weighted = score(path=str(run), reward=[f"{one}=10"], name="weighted")
    assert (weighted.scored, weighted.failed, weighted.exit_code) == (0, 16, 1)
    summary = score(path=str(run), reward=[one, two], name="both")
    rows = [r for r in read_table(run / "scores-both", SCORES).to_pylist() if r["name"] == "both"]
    why = "the weighted sum of the parts is beyond float64"
    assert {(r["status"], r["value"], r["detail"]) for r in rows} == {("failed", None, why)}
    assert (summary.failed, summary.exit_code) == (16, 1)


def test_a_function_that_fails_gives_a_status_and_no_value(run: Path, tmp_path: Path) -> None:
    """Rows of a failing function have status failed, no value and the reason; the exit code is 1."""
    (tmp_path / "bad.py").write_text("def picky(level):\n    return 1 / (level - 3)\n")
    summary = score(path=str(run), reward=[f"{tmp_path / 'bad.py'}:picky"])
    rows = read_table(run / "scores-picky", SCORES).to_pylist()
    failed = [r for r in rows if r["status"] == "failed"]
    assert len(failed) == summary.failed == 2
    assert all(r["value"] is None and "ZeroDivisionError" in r["detail"] for r in failed)
    assert summary.exit_code == 1
    said = dict(summary.rows())["picky failed"]
    assert str(said).startswith("2; first: picky raised ZeroDivisionError")


def test_a_function_with_the_wrong_number_of_values_is_an_error(run: Path, tmp_path: Path) -> None:
    """What was got and expected, and nothing is written: whose value is whose cannot be known."""
    (tmp_path / "one.py").write_text("def one(completions, **_):\n    return [1.0]\n")
    with pytest.raises(RewardError, match=r"^reward: one returned 1 value for 16 rollouts.*one\.py:1"):
        score(path=str(run), reward=[f"{tmp_path / 'one.py'}:one"])
    assert not (run / "scores-one" / "scores.parquet").exists()


def test_what_a_function_prints_is_no_data(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With --json stdout is one JSON object; what the file prints when it is imported and called is on stderr."""
    (tmp_path / "loud.py").write_text(
        "print('imported')\ndef loud(completions, **_):\n    print('called')\n    return [1.0 for _ in completions]\n"
    )
    assert main(["score", str(run), "--reward", f"{tmp_path / 'loud.py'}:loud", "--json"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["mean"] == 1.0
    assert "imported" in shown.err
    assert "called" in shown.err


def test_the_traceback_of_a_function_is_shown_on_request(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason has file and line; -v shows the whole traceback, once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("def inner(x):\n    return 1 / x\ndef bad(**_):\n    return inner(0)\n")
    words = ["score", str(run), "--reward", "bad.py:bad"]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "16; first: bad raised ZeroDivisionError: division by zero (bad.py:2, in inner)" in shown.out
    assert "Traceback" not in shown.err
    assert main([*words, "-v"]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("Traceback") == 1
    assert "return inner(0)" in shown.err


def test_a_reward_that_applies_to_nothing_says_what_it_needs(run: Path) -> None:
    """regex without a pattern has no values, names the argument and the column that it reads, and ends with exit code 1."""
    summary = score(path=str(run), reward=["regex"])
    part = summary.parts["regex"]
    assert (part.does_not_apply, part.scored, part.failed, summary.exit_code) == (16, 0, 0, 1)
    said = str(dict(summary.rows())["regex does not apply"])
    assert said.startswith("16;")
    assert "regex:PATTERN" in said
    assert "`pattern`" in said


def test_scores_of_a_file_need_a_place(run: Path, tmp_path: Path) -> None:
    """A file of rollouts has no folder for its scores: -o is asked for, and taken."""
    part = next((run / "rollouts").glob("part-*"))
    with pytest.raises(UsageError, match="no place"):
        score(path=str(part), reward=["numeric"])
    summary = score(path=str(part), reward=["numeric"], output=tmp_path / "s")
    assert read_table(tmp_path / "s", SCORES).num_rows == summary.rollouts == 16


def test_a_reward_may_change_the_current_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rollouts are read from where they were named, and so are the scores written and added to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.py").write_text("import os\ndef away(completion) -> float:\n    os.chdir('/')\n    return 1.0\n")
    rows = read_table(run)
    for at in (0, 8):
        write_table(rows.slice(at, 8), tmp_path / f"half{at}.jsonl", ROLLOUTS)
    for path, output, written in (("run", None, "run/scores-away"), ("half*.jsonl", "s", "s")):
        for _ in range(2):
            monkeypatch.chdir(tmp_path)
            summary = score(path=path, reward=["c.py:away"], output=output)
            assert (summary.scored, summary.path) == (16, written)
        assert read_table(tmp_path / written, SCORES).num_rows == 16


def test_a_rollout_that_is_there_twice_is_refused(run: Path, tmp_path: Path) -> None:
    """It would count twice; no reward is called."""
    rows = read_table(run)
    twice = write_table(pa.concat_tables([rows, rows.slice(3, 1)]), tmp_path / "twice.jsonl", ROLLOUTS)
    with pytest.raises(RefusedError, match="D701: 1 rollout is there more than once"):
        score(path=twice, reward=["numeric"], output=tmp_path / "s")


def test_user_functions_see_the_ids_after_the_prompt(run: Path, tmp_path: Path) -> None:
    """completion_ids of a saved rollout is everything after the first prompt, in order."""
    (tmp_path / "n.py").write_text("def n(completion_ids, **_):\n    return [len(c) for c in completion_ids]\n")
    score(path=str(run), reward=[f"{tmp_path / 'n.py'}:n"])
    scores = {s["rollout_id"]: s["value"] for s in read_table(run / "scores-n", SCORES).to_pylist()}
    for row in read_table(run).to_pylist():
        first = len(row["turns"][0]["prompt_delta_ids"])
        assert scores[row["rollout_id"]] == row["n_context_tokens"] + row["n_generated_tokens"] - first


def test_the_total_leaves_out_what_does_not_apply() -> None:
    """None parts are left out of the sum; without any value there is no total."""
    assert total([RewardPart("a", 1.0, 2.0), RewardPart("b", None), RewardPart("c", 3.0, -1.0)]) == -1.0
    assert total([RewardPart("a", None)]) is None
    assert total([]) is None


def test_a_reward_that_hangs_is_left_behind(tmp_path: Path) -> None:
    """After --reward-timeout the batch has no values and says why, and later ones are scored. A reward that a recipe does
    not call for a rollout has not failed on it."""
    (tmp_path / "h.py").write_text(
        "import threading\ndef h(hang):\n    if hang:\n        threading.Event().wait()\n    return 1.0\n"
    )
    ((function, _),) = load_rewards([f"{tmp_path / 'h.py'}:h"])

    async def run() -> list[Any]:
        not_called = Weighted(load_rewards(["exact_match"])[0][0], choose=lambda _: None)
        queue = RewardScheduler([Weighted(function), not_called], in_thread, timeout_s=0.2)
        return [await queue.score(rollout("a", hang=hang)) for hang in (True, False)]

    slow, quick = asyncio.run(run())
    assert slow.faults == {"h": "reward: no answer within 0.2 s"}
    assert (slow.parts[0].value, quick.parts[0].value) == (None, 1.0)


def test_a_score_that_is_not_there_lists_each_choice_once(run: Path) -> None:
    """A part that was scored again too is one choice."""
    score(path=str(run), reward=["exact_match"])
    with pytest.raises(UsageError, match="'nope', not a score") as caught:
        gymdata.pairs(run, reward="nope", write=False)
    assert str(caught.value.hint) == "available: exact_match"
