"""Pairs from files: the saved ids and masks, refusals, re-scored rewards, splits, lineage."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, RefusedError, UsageError
from gymdata.rollouts.schema import PAIRS, SCORES
from gymdata.store import read_run_json, read_table, write_run_json
from tests.rollout_files import BRANCH, rollout, two_turns, write_run, write_table


def group(task: str, number: int, rewards: list[float | None], **columns: Any) -> list[dict[str, Any]]:
    return [rollout(task, i, r, two_turns(number, 50 + i), **columns) for i, r in enumerate(rewards)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    worse, better = rollout("a", 0, 0.0, two_turns(5, 50), logprob=-4.0), rollout("a", 1, 1.0, two_turns(5, 51))
    return write_run(tmp_path / "run", [worse, better, *group("b", 6, [1.0, 1.0]), *group("c", 7, [None, 1.0])])


def test_a_pair_has_the_saved_ids_masks_and_messages(run: Path) -> None:
    """The prompt ends before the first generated token; tool tokens have mask 0 and log-prob 0."""
    report = gymdata.pairs(run)
    assert report.files == {"train": run / "pairs-reward" / "pairs.parquet"}
    (pair,) = read_table(run / "pairs-reward", PAIRS).to_pylist()
    assert (pair["chosen_rollout_id"], pair["rejected_rollout_id"], pair["margin"]) == ("a-1", "a-0", 1.0)
    assert pair["prompt_ids"] == [1, 5]
    assert pair["chosen_ids"] == [10, 11, 2, 30, 31, 51, 2]
    assert pair["rejected_ids"] == [10, 11, 2, 30, 31, 50, 2]
    assert pair["chosen_mask"] == pair["rejected_mask"] == [1, 1, 1, 0, 0, 1, 1]
    assert pair["chosen_logprobs"] == [-1.0, -2.0, -3.0, 0.0, 0.0, -1.0, -2.0]
    assert pair["rejected_logprobs"] == [-4.0, -5.0, -6.0, 0.0, 0.0, -4.0, -5.0]
    assert [m["content"] for m in pair["prompt"]] == ["question a"]
    assert [m["content"] for m in pair["chosen"]] == ["calling", "42", "51 2"]
    assert (pair["source"], pair["policy_hash"], pair["temperature"]) == ("reward", "hash", 1.0)


def test_the_account_adds_up_and_is_in_run_json(run: Path) -> None:
    """Groups, candidates and dropped ones are counted, and run.json leads back to the rollouts."""
    counts = gymdata.pairs(run).to_dict()
    assert (counts["groups"], counts["groups_too_small"], counts["groups_without_variance"]) == (3, 1, 1)
    assert counts["candidates"] == counts["pairs"] + sum(counts["dropped"].values()) == 2
    facts = read_run_json(run / "pairs-reward")
    assert facts["counts"]["pairs"] == 1
    assert facts["parents"][0]["run_id"] == "run-1"
    assert facts["files"][0]["rows"] == 1
    assert read_table(run, PAIRS).num_rows == 1


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_row_order_and_format_change_nothing(tmp_path: Path, suffix: str) -> None:
    """Shuffled rows, as Parquet or JSON lines, give the same pairs file."""
    rows = [r for t in range(6) for r in group(f"t{t}", t, [0.0, 1.0, 0.5, 1.0])]
    first = gymdata.pairs(write_run(tmp_path / "one", rows), strategy="all", max_pairs_per_task=3)
    random.Random(1).shuffle(rows)
    second = gymdata.pairs(write_run(tmp_path / "two", rows, suffix), strategy="all", max_pairs_per_task=3)
    assert first.table.num_rows == 18
    assert first.table.equals(second.table)


def test_the_ids_of_groups_choose_no_pair(tmp_path: Path) -> None:
    """Groups of a run that was sampled again have other ids: the pairs are the same ones, in the order of their tasks, also
    where tasks have the same rollouts and a cap leaves some out."""
    rows = [row for task in "fbdace" for row in [*copies(task), rollout(task, 4, 0.5, two_turns(5, 60 + ord(task)))]]
    made = []
    for run_id, ids in (("one", "123456"), ("two", "641352")):
        named = [row | {"group_id": ids["abcdef".index(row["task_id"])]} for row in rows]
        run = write_run(tmp_path / run_id, named)
        made.append(gymdata.pairs(run, strategy="all", max_pairs_per_task=2).table)
    assert made[0]["task_id"].to_pylist() == sorted(made[0]["task_id"].to_pylist())
    assert made[0].equals(made[1])


def changed(row: dict[str, Any]) -> dict[str, Any]:
    """A token that was changed after collection."""
    row["turns"][1]["generation_token_ids"] = [52, 2]
    return row


@pytest.mark.parametrize(
    ("third", "code", "left_out"),
    [
        (rollout("a", 2, 0.5, [([1, 5], [10, 2]), ([1, 99, 30], [12, 2])]), "T200: 1 of 3", ("breaks", 0)),
        (rollout("a", 2, 0.5, BRANCH), "T211", ("branches", 2)),
        (rollout("a", 2, 0.5, []), "T205", None),
        (changed(rollout("a", 2, 0.5, two_turns(5, 54))), "T209: rollout a-2, turn 1", None),
    ],
    ids=["a break", "a branch", "no tokens", "a changed token"],
)
def test_what_cannot_be_trained_as_sampled_is_refused(
    third: dict[str, Any], code: str, left_out: tuple[str, int] | None, tmp_path: Path
) -> None:
    """With its code and exit code 1; ``drop`` leaves breaks and branches out and counts them."""
    run = write_run(tmp_path / "run", [*group("a", 5, [0.0, 1.0]), third])
    with pytest.raises((RefusedError, DataError), match=code) as refused:
        gymdata.pairs(run, strategy="all")
    assert refused.value.exit_code == 1
    if left_out is not None:
        report = gymdata.pairs(run, strategy="all", breaks="drop")
        name, dropped = left_out
        assert (report.left_out[name], report.counts.dropped["several_sequences"], report.counts.pairs) == (
            1,
            dropped,
            1,
        )


def test_retries_that_are_left_out_are_counted(tmp_path: Path) -> None:
    """A superseded try is no obstacle, and the pair holds the last one; the account, in every form, says how many turns the
    rollouts in pairs lost, each rollout once."""
    retried = rollout("a", 2, 0.5, [([1, 5], [77, 2]), ([1, 5], [79, 2]), ([1, 5], [78, 2])])
    unused = rollout("b", 0, 0.5, [([1, 5], [77, 2]), ([1, 5], [78, 2])])
    run = write_run(tmp_path / "run", [*group("a", 5, [0.0, 1.0]), retried, unused])
    report = gymdata.pairs(run, strategy="all")
    assert (report.counts.pairs, report.counts.abandoned_turns) == (3, 2)
    chosen = {pair["chosen_rollout_id"]: pair["chosen_ids"] for pair in report.table.to_pylist()}
    assert chosen["a-2"] == [78, 2]
    assert report.to_dict()["abandoned_turns"] == read_run_json(run / "pairs-reward")["counts"]["abandoned_turns"] == 2
    assert ("  abandoned turns dropped", 2) in report.rows()
    best = gymdata.pairs(run, write=False)
    assert best.counts.abandoned_turns == 0
    assert "abandoned" not in str(best.rows())


def length(completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def test_duplicate_and_unscored_rollouts_are_refused(tmp_path: Path, run: Path) -> None:
    """The same file twice is D701, and nothing scored at all is R501."""
    with pytest.raises(RefusedError, match="D701"):
        gymdata.pairs([run, run], output=tmp_path / "p")
    with pytest.raises(RefusedError, match="R501"):
        gymdata.pairs(none := write_run(tmp_path / "none", group("a", 5, [None, None])))
    gymdata.score(none, reward=length)
    with pytest.raises(RefusedError, match="choose a score that has values: --reward length"):
        gymdata.pairs(none, reward="reward")
    assert gymdata.pairs(none, write=False).score == "length"


def test_named_rewards_and_rescorings(tmp_path: Path) -> None:
    """--reward takes a stored part; a re-scoring of that name wins, its last row a rollout; unknown names are explained."""
    rows = group("a", 5, [0.0, 1.0])
    for row, value in zip(rows, (1.0, 0.0), strict=True):
        row["rewards"] = [{"name": "style", "value": value}, {"name": "other", "value": None}]
    run = write_run(tmp_path / "run", rows)
    part = gymdata.pairs(run, reward="style")
    assert part.table["chosen_rollout_id"].to_pylist() == ["a-0"]
    assert part.files["train"] == run / "pairs-style" / "pairs.parquet"
    with pytest.raises(UsageError, match="styel"):
        gymdata.pairs(run, reward="styel")
    again = [("a-0", 9.0), ("a-1", 0.5), ("a-0", 0.0)]
    scores = [
        {"rollout_id": r, "name": "style", "value": v, "status": "scored", "source": "function", "run_id": "run-1"}
        for r, v in again
    ]
    write_table(pa.Table.from_pylist(scores, schema=SCORES.arrow), run / "scores-style" / "scores.parquet", SCORES)
    write_run_json(run / "scores-style", {"stage": "score", "run_id": "run-1"})
    rescored = gymdata.pairs(run, reward="style")
    assert rescored.table["chosen_rollout_id"].to_pylist() == ["a-1"]
    assert rescored.table["pair_id"].to_pylist() != part.table["pair_id"].to_pylist()
    assert len(read_run_json(run / "pairs-style")["parents"]) == 2


def test_without_pairs_the_scores_that_would_work_are_named(tmp_path: Path) -> None:
    """The only score is the same for all: nothing is written, and the note names the total reward."""
    run = write_run(tmp_path / "run", group("a", 5, [0.0, 1.0]))
    gymdata.score(run, reward=length)
    before = sorted(run.rglob("*"))
    report = gymdata.pairs(run)
    assert (report.ok, report.score, report.files) == (False, "length", {})
    assert "or choose another score: --reward reward; nothing was written" in report.notes[-1]
    assert sorted(run.rglob("*")) == before
    assert gymdata.pairs(run, reward="reward").counts.pairs == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("strategy", "bestworst"), ("min_margin", -1.0), ("max_pairs_per_task", 0), ("length_balance", 1.5)],
)
def test_an_impossible_setting_is_refused_before_anything_is_read(name: str, value: Any) -> None:
    """An unknown strategy, or a number that cannot be."""
    with pytest.raises(UsageError, match=name):
        gymdata.pairs("nowhere", **{name: value})


def test_split_writes_two_files_that_share_no_task(tmp_path: Path) -> None:
    """Held-out tasks are in the second file only, and the whole is kept."""
    run = write_run(tmp_path / "run", [r for t in range(10) for r in group(f"t{t}", t, [0.0, 1.0])])
    report = gymdata.pairs(run, split=0.2, seed=3)
    assert report.heldout is not None
    train, held = (pq.read_table(report.files[s])["task_id"].to_pylist() for s in ("train", "heldout"))
    assert (len(train), len(held), set(train) & set(held)) == (8, 2, set())
    assert read_table(run / "pairs-reward", PAIRS).num_rows == 8
    gymdata.pairs(run, overwrite=True)
    assert not report.files["heldout"].exists()


def test_another_strategy_is_refused_with_the_output_that_keeps_both(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every strategy's pairs of a score have one default folder; the words that follow write beside it."""
    assert main(["pairs", str(run)]) == 0
    assert main(["pairs", str(run), "--strategy", "all"]) == 2
    said = capsys.readouterr().err
    more = said.strip().rpartition("keeps both: ")[2].split()
    assert more == ["--output", str(run / "pairs-reward-all")]
    assert main(["pairs", str(run), "--strategy", "all", *more]) == 0
    assert gymdata.pairs(run, output=run / "pairs-reward-all", strategy="all").table["score"].to_pylist() == ["reward"]


def test_files_and_globs_need_an_output(run: Path, tmp_path: Path) -> None:
    """A file has no folder of its own to write to; -o names one."""
    part = run / "rollouts" / "*.parquet"
    with pytest.raises(UsageError, match="output= is required"):
        gymdata.pairs(part)
    gymdata.pairs(part, output=tmp_path / "mine")
    assert read_table(tmp_path / "mine", PAIRS)["chosen_ids"].to_pylist() == [[10, 11, 2, 30, 31, 51, 2]]


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.csv", "x.jsonl.gz", "x.TXT"])
def test_the_name_of_a_file_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    """It would become a folder of that name; a folder whose name has a dot is one."""
    with pytest.raises(UsageError, match="expected the name of a folder"):
        gymdata.pairs(run, output=tmp_path / name)
    gymdata.pairs(run, output=tmp_path / "pairs.v2")
    assert (tmp_path / "pairs.v2" / "pairs.parquet").is_file()


def copies(task: str) -> list[dict[str, Any]]:
    """Four rollouts with two different answers, each of them twice."""
    answers = [(0.0, 50), (0.0, 50), (1.0, 51), (1.0, 51)]
    return [rollout(task, i, reward, two_turns(5, answer)) for i, (reward, answer) in enumerate(answers)]


def test_copies_are_counted_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four pairs with the same ids are one, also under two task names; the account, --json and the table say so, and
    --keep-duplicates keeps them."""
    run = write_run(tmp_path / "run", copies("a"))
    assert main(["pairs", str(run), "--strategy", "all", "--max-pairs-per-task", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pairs"], report["dropped"]["duplicate"], report["dropped"]["over_the_cap"]) == (1, 3, 0)
    assert main(["pairs", str(run), "--strategy", "all", "-o", str(tmp_path / "p")]) == 0
    table = capsys.readouterr().out
    assert any(line.split() == ["dropped:", "duplicate", "3"] for line in table.splitlines())
    assert main(["pairs", str(run), "--strategy", "all", "--keep-duplicates", "-o", str(tmp_path / "k"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 4
    two = gymdata.pairs(write_run(tmp_path / "two", copies("a") + copies("b")), strategy="all")
    assert (two.counts.pairs, two.counts.dropped["duplicate"]) == (1, 7)


def test_pairs_carry_the_tools(tmp_path: Path) -> None:
    """A pair has the tools that its prompt was rendered with; a file without the column is read as before."""
    tools = '[{"type": "function", "function": {"name": "add", "parameters": {}}}]'
    run = write_run(tmp_path / "run", group("a", 5, [0.0, 1.0], tools=tools) + group("b", 6, [0.0, 1.0], tools="[]"))
    report = gymdata.pairs(run)
    assert report.table["tools"].to_pylist() == [tools, "[]"]
    assert read_table(report.files["train"], PAIRS)["tools"].to_pylist() == [tools, "[]"]
    old = write_table(report.table.drop_columns(["tools"]), tmp_path / "old.parquet", PAIRS)
    assert "tools" not in read_table(old, PAIRS).column_names


@pytest.mark.filterwarnings("error")
def test_a_margin_beyond_float64_is_refused(tmp_path: Path) -> None:
    """Scores of −1e308 and 1e308 have no margin that a file could hold: R502 names both rollouts."""
    run = write_run(tmp_path / "run", group("a", 5, [-1e308, 1e308]))
    for strategy in ("best-worst", "all", "adjacent"):
        with pytest.raises(RefusedError, match=r"R502: .*rollouts a-1 and a-0, scores 1e\+308 and -1e\+308"):
            gymdata.pairs(run, strategy=strategy)
    wide = write_run(tmp_path / "wide", group("a", 5, [0.0, 1e308]))
    assert gymdata.pairs(wide).table["margin"].to_pylist() == [1e308]


@pytest.mark.parametrize(
    ("rewards", "settings", "why"),
    [
        ([0.0, 1.0], ["--min-margin", "2"], "2 rollouts of 1 group gave 1 candidate; dropped: 1 margin"),
        ([1.0, 1.0], [], "1 group without variance"),
        ([1.0], [], "1 group with fewer than two scored rollouts"),
    ],
)
def test_no_pairs_are_no_success(
    rewards: list[float], settings: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without pairs the exit code is 1, and a note gives the counts by reason and what to change, so that a pipeline stops;
    the function returns the same account, the table has the schema, and the run folder holds what it held."""
    run = write_run(tmp_path / "run", group("a", 5, list(rewards)))
    before = sorted(run.rglob("*"))
    assert main(["pairs", str(run), *settings]) == 1
    err = capsys.readouterr().err
    assert all(part in err for part in ("warning: no pairs: ", why, "→ "))
    assert main(["pairs", str(run), *settings, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["pairs"] == 0
    report = gymdata.pairs(run, min_margin=2.0 if settings else 0.0)
    assert (report.ok, report.exit_code, report.table.num_rows, report.files) == (False, 1, 0, {})
    assert [name for name in report.table.column_names if name not in ("tools", "score")] == PAIRS.required()
    assert sorted(run.rglob("*")) == before
    assert gymdata.pairs(write_run(tmp_path / "other", group("a", 5, [0.0, 1.0]))).ok
