"""``filter`` on files: what is kept is what was read, and where it came from is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, RefusedError, StoreError, UsageError
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.store import read_run_json, read_table, write_run_json
from tests.rollout_files import rollout, rollouts_table, two_turns, write_run, write_table


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six tasks of two categories, four rollouts each: rewards 0, 1, none and 0.5; index 3 repeats the tokens of 0."""
    rows = []
    for task in range(6):
        about = json.dumps({"task_id": f"t{task}", "category": "math" if task < 4 else "code", "meta": {"level": task}})
        for index, reward in enumerate((0.0, 1.0, None, 0.5)):
            calls = two_turns(task, 20 if index == 3 else 20 + index)
            rows.append(rollout(f"t{task}", index, reward, calls, temperature=0.7) | {"task": about})
    folder = write_run(tmp_path / "run", rows)
    facts = read_run_json(folder)
    write_run_json(folder, facts | {"identity": {"model": "tiny", "top_p": 1.0}})
    return folder


@pytest.mark.parametrize(
    ("flag", "condition", "kept"),
    [
        ("where", "(reward - mean_reward) / std_reward > 0.5", 3),
        ("where", "reward / max_reward > 0.5", 7),
        ("where", "reward / mean_reward > 1.2", 3),
        ("group_where", "std_reward / mean_reward > 0.5", 8),
    ],
)
def test_groups_without_signal_pass_no_quotient(tmp_path: Path, flag: str, condition: str, kept: int) -> None:
    """Of four groups, all wrong, all right, one right and two right: 0/0 keeps no rollout, and is counted as missing."""
    rewards = ((0.0,) * 4, (1.0,) * 4, (1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0))
    rows = [
        rollout(f"t{t}", k, r, two_turns(t, 20)) for t, of_task in enumerate(rewards) for k, r in enumerate(of_task)
    ]
    report = gymdata.filter(write_run(tmp_path / "run", rows), tmp_path / "o", **{flag: condition})
    assert report.rollouts_out == kept
    assert report.steps[0].dropped["a value is missing"] == (8 if "/ std_reward" in condition else 4)


def names(path: Path) -> list[str]:
    return read_table(path, ROLLOUTS, ["rollout_id"])["rollout_id"].to_pylist()


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("reward > 0.4", {1, 3}),
        ("reward_exact == 1", {1}),
        ("list_filter(rewards, lambda r: r.name = 'exact')[1].value = 1", {1}),
        ("temperature == 0.7 and n_turns == 2", {0, 1, 2, 3}),
        ("reward > mean_reward", {1}),
        ("rollout_index >= n_scored", {3}),
        ("started_at >= '2026-01-01' and starts_with(rollout_id, 't')", {0, 1, 2, 3}),
    ],
)
def test_where_keeps_what_is_true(run: Path, tmp_path: Path, where: str, kept: set[int]) -> None:
    """Exactly the rollouts for which the condition is true are in the output, in their order."""
    report = gymdata.filter(run, tmp_path / "o", where=where)
    assert names(tmp_path / "o") == [f"t{t}-{k}" for t in range(6) for k in sorted(kept)]
    assert (report.rollouts_in, report.rollouts_out) == (24, 6 * len(kept))


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("contains(prompt, '12')", ["t12-0", "t12-1"]),
        ("text LIKE 'I cannot%do this' and status = 'completed'", ["t12-1"]),
        ("not contains(text, 'tool') and not contains(text, 'secret')", ["t12-0", "t12-1", "t3-0"]),
        ("length(text) = 0", ["t3-0"]),
        ('tool_calls LIKE \'%run({"code": "f("x")"}%\'', ["t3-0"]),
        ("length(tool_calls) = 0", ["t12-0", "t12-1"]),
    ],
)
def test_texts_of_messages_are_columns(tmp_path: Path, where: str, kept: list[str]) -> None:
    """prompt is what stands before the model's first message, text what the model wrote, without reasoning and tools, and
    tool_calls the names and arguments of its calls."""

    def messages(question: str, *answers: tuple[str, str | None]) -> list[dict[str, Any]]:
        later = [{"role": role, "content": content, "turn": 0} for role, content in answers]
        return [{"role": "user", "content": question}, *later]

    calls = two_turns(12, 20)
    answers = (("assistant", "I cannot"), ("tool", "a tool"), ("assistant", "do this"))
    rows = [
        rollout("t12", 0, 1.0, calls, messages=messages("What is 12?", ("assistant", "It is 12."))),
        rollout("t12", 1, 1.0, calls, messages=messages("What is 12?", *answers)),
        rollout("t3", 0, 1.0, calls, messages=messages("What is 3?", ("assistant", None))),
    ]
    rows[2]["messages"][1]["reasoning"] = "a secret"
    rows[2]["messages"][1]["tool_calls"] = json.dumps([{"function": {"name": "run", "arguments": {"code": 'f("x")'}}}])
    gymdata.filter(write_run(tmp_path / "run", rows), tmp_path / "o", where=where)
    assert names(tmp_path / "o") == kept


def test_kept_rows_are_the_rows_that_were_read(run: Path, tmp_path: Path) -> None:
    """All columns of a kept row equal the source's, its digests hold, and they lead back to the run."""
    out = tmp_path / "o"
    gymdata.filter(run, out, where="reward > 0.4")
    source = read_table(run)
    expected = source.filter(pc.is_in(source["rollout_id"], value_set=pa.array(names(out))))
    assert read_table(out).equals(expected)
    gymdata.expand_turns(read_table(out))
    assert not [v for v in gymdata.validate(out).violations if v.code.startswith(("S", "T", "L"))]
    facts = read_run_json(out)
    assert facts["parents"][0]["run_id"] == "run-1"
    assert facts["identity"] == {"model": "tiny", "top_p": 1.0}
    assert facts["files"][0]["rows"] == 12


def test_group_columns_describe_the_group_as_it_came_in(run: Path, tmp_path: Path) -> None:
    """A condition on groups sees all rewards of the group, not those that an earlier condition left."""
    gymdata.filter(run, tmp_path / "o", where="reward > 0.4", group_where="mean_reward BETWEEN 0.1 AND 0.6")
    assert len(names(tmp_path / "o")) == 12
    with pytest.raises(UsageError, match=r"no column of groups(.|\n)*mean_reward"):
        gymdata.filter(run, group_where="reward > 0", write=False)


def test_every_step_is_accounted_for(run: Path, tmp_path: Path) -> None:
    """Each step says what went in, what came out, and why the rest did not, in run.json too."""
    report = gymdata.filter(
        run, tmp_path / "out", where="n_turns == 2 and reward >= 0", group_where="task.meta.level > 0", dedupe=True,
        best_n=1, balance="category", seed=1,
    )  # fmt: skip
    told = [(s.name, s.rows_in, s.rows_out, s.dropped) for s in report.steps]
    assert told == [
        ("where", 24, 18, {"a value is missing": 6}),
        ("group-where", 18, 15, {"not true": 3}),
        ("dedupe", 15, 10, {"same as another of its group": 5}),
        ("best-n", 10, 5, {"not among the best 1": 5}),
        ("balance", 5, 4, {"over the 2 of the rarest": 1}),
    ]
    assert all(name.endswith("-1") for name in names(tmp_path / "out"))
    assert [s["rows_out"] for s in read_run_json(tmp_path / "out")["counts"]["steps"]] == [18, 15, 10, 5, 4]


def test_of_equal_generations_the_best_is_kept_for_best_n(run: Path, tmp_path: Path) -> None:
    """Duplicates go before the best are chosen: of the rollouts with one generation that with the highest --best-by stays
    (index 3, whose reward is 0.5, and not index 0), without --best-n that with the lowest index."""
    gymdata.filter(run, tmp_path / "best", dedupe=True, best_n=2)
    assert {name[-1] for name in names(tmp_path / "best")} == {"1", "3"}
    gymdata.filter(run, tmp_path / "by", dedupe=True, best_n=4, best_by="0 - rollout_index")
    assert {name[-1] for name in names(tmp_path / "by")} == {"0", "1", "2"}
    gymdata.filter(run, tmp_path / "plain", dedupe=True)
    assert {name[-1] for name in names(tmp_path / "plain")} == {"0", "1", "2"}


def test_a_split_keeps_tasks_apart(run: Path, tmp_path: Path) -> None:
    """Train and test files share no task, hold every rollout between them, and depend on the seed alone."""
    report = gymdata.filter(run, tmp_path / "a", split_by="task", test_share=0.34, seed=5)
    train, test = names(tmp_path / "a/train.parquet"), names(tmp_path / "a/test.parquet")
    assert not {n.split("-")[0] for n in train} & {n.split("-")[0] for n in test}
    assert sorted(train + test) == sorted(names(run))
    assert report.sides["test"] == {"rollouts": 8, "tasks": 2}


def test_scores_made_afterwards_are_columns(run: Path, tmp_path: Path) -> None:
    """reward_NAME is a re-scoring beside the run when there is one, and lineage names it."""
    rows = [
        {"rollout_id": name, "name": "later", "value": float(name.endswith("-2")), "status": "scored", "source": "f",
         "run_id": "run-1", "detail": None}
        for name in names(run)
    ]  # fmt: skip
    write_table(pa.Table.from_pylist(rows, schema=SCORES.schema), run / "scores-later/scores.parquet", SCORES)
    write_run_json(run / "scores-later", {"stage": "score"})
    gymdata.filter(run, tmp_path / "o", where="reward_later > 0", group_where="mean_reward_later > 0")
    assert names(tmp_path / "o") == [f"t{t}-2" for t in range(6)]
    assert [Path(p["path"]).name for p in read_run_json(tmp_path / "o")["parents"]] == ["run", "scores-later"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"where": "rewrd > 1"}, '"rewrd" not found.*Candidate bindings: "reward"'),
        ({"where": "reward_exakt > 1"}, "got 'exakt', not a score(.|\n)*available: exact"),
        ({"where": "task.categry == 'math'"}, 'find key "categry" in struct.*"category"'),
        ({"where": "task.meta == 'math'"}, "--where: .*STRUCT"),
        ({"where": "status == completed"}, '"completed"(.|\n)*single quotes'),
        ({"best_n": 1, "best_by": "status"}, "--best-by: 'status': .*Could not convert"),
        ({}, "nothing to filter by"),
        ({"where": "status == 'x'", "split_by": "tsk"}, "task"),
    ],
)
def test_a_mistake_names_what_was_meant(run: Path, settings: dict[str, Any], told: str) -> None:
    """Unknown names are errors that name the nearest ones."""
    with pytest.raises(UsageError, match=told):
        gymdata.filter(run, write=False, **settings)


def test_nothing_is_written_when_nothing_is_left(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty selection is refused with the reasons, and with the step to loosen; exit code 1."""
    command = ["filter", str(run), "-o", str(tmp_path / "o"), "--where", "reward > 5", "--dedupe"]
    assert main(command) == 1
    assert "loosen --where, which dropped 24 (reward > 5)" in capsys.readouterr().err
    with pytest.raises(RefusedError, match=r"a value is missing 6; where: not true 18"):
        gymdata.filter(run, tmp_path / "o", where="reward > 5")
    assert not (tmp_path / "o").exists()


def test_what_is_there_is_not_replaced_unasked(run: Path, tmp_path: Path) -> None:
    """Other settings, a run of its own, or an input file as output are refused; the same settings are not."""
    out = tmp_path / "o"
    for _ in range(2):
        gymdata.filter(run, out, where="reward > 0.4")
    with pytest.raises(StoreError, match="other settings"):
        gymdata.filter(run, out, where="reward > 0.6")
    gymdata.filter(run, out, where="reward > 0.6", overwrite=True)
    assert len(names(out)) == 6
    with pytest.raises(StoreError, match="holds the output of collect"):
        gymdata.filter(out, run, where="reward > 0.6")
    with pytest.raises(UsageError, match="one of the files"):
        gymdata.filter(out, out, where="reward > 0.6", overwrite=True)


def test_rollouts_of_several_files_are_filtered_together(run: Path, tmp_path: Path) -> None:
    """Several inputs make one output."""
    other = tmp_path / "other.jsonl"
    write_table(rollouts_table([rollout("u", 0, 1.0, two_turns(9, 9))]), other, ROLLOUTS)
    gymdata.filter([run, other], tmp_path / "o", where="reward == 1")
    assert len(names(tmp_path / "o")) == 7


def test_the_command_prints_the_account(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of steps and the path on stdout; --json is one object; --dry-run writes nothing; usage errors are 2."""
    words = ["filter", str(run), "--where", "reward > 0.4", "--group-where", "min_reward < max_reward"]
    assert main([*words, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rollouts_out"], told["files"]) == (12, {})
    assert main([*words, "-o", str(tmp_path / "out")]) == 0
    assert "12 of 24" in capsys.readouterr().out
    assert main(words) == 2
    assert "-o is missing" in capsys.readouterr().err
    assert main(["filter", str(run), "--where", "reward > 5", "--dry-run"]) == 1


def test_many_categories_are_not_all_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names eight and counts the rest; --json has every one."""
    run = write_run(tmp_path / "run", [rollout(f"t{n}", 0, 1.0, two_turns(n, n)) for n in range(20)])
    words = ["filter", str(run), "--balance", "task_id", "--dry-run"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "12 more" in printed
    assert "t9: 1 before" not in printed
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["steps"][0]["notes"]) == 20


def test_an_output_holds_one_choice(run: Path, tmp_path: Path) -> None:
    """What an earlier filter wrote with a split is gone when it is replaced without one, and the other way about."""
    split = {"split_by": "task", "test_share": 0.34}
    place = tmp_path / "f" / "o"
    for settings in ({"where": "reward >= 0"}, split, {"where": "reward == 1"}, split):
        report = gymdata.filter(run, place, overwrite=True, **settings)
        there = {p.name for p in (tmp_path / "f").rglob("*.parquet")}
        assert there == {p.name for p in report.files.values()}
        assert len(list((tmp_path / "f").rglob("*run.json"))) == 1
    with pytest.raises(StoreError, match="other settings"):
        gymdata.filter(run, place, where="reward == 1")


def test_only_what_a_filter_wrote_is_removed(run: Path, tmp_path: Path) -> None:
    """Files of others in the folder stay, and so does a file that would be filtered into its own folder: it is refused."""
    own = tmp_path / "p"
    gymdata.filter(run, own, where="reward >= 0")
    (own / "train.parquet").write_text("mine")
    gymdata.filter(run, own, where="reward >= 0")
    assert (own / "train.parquet").read_text() == "mine"
    with pytest.raises(UsageError, match="holds one of the files that are filtered"):
        gymdata.filter(own / "rollouts.parquet", own, split_by="task", test_share=0.34, overwrite=True)
    assert {p.name for p in own.glob("*.parquet")} == {"rollouts.parquet", "train.parquet"}


def test_long_numbers_are_balanced_apart(tmp_path: Path) -> None:
    """Numbers of seven digits and more, and fractions that differ late, are categories of their own."""
    rows = [
        rollout(f"t{i}", 0, 1.0, two_turns(5, 10 + i))
        | {"task": json.dumps({"task_id": f"t{i}", "bucket": 1234560 + (i % 3 == 2), "x": 0.1234567 + (i % 3) * 1e-8})}
        for i in range(9)
    ]
    folder = write_run(tmp_path / "run", rows)
    report = gymdata.filter(folder, write=False, balance="task.bucket")
    assert report.rollouts_out == 6
    assert [note for step in report.steps for note in step.notes] == ["1234560: 6 before", "1234561: 3 before"]
    assert gymdata.filter(folder, write=False, balance="task.x").steps[0].rows_out == 9
    assert "3 values" in gymdata.filter(folder, write=False, balance="task.x").steps[0].detail


@pytest.mark.parametrize("given", [lambda row: True, {"reward": 1}])
def test_conditions_are_text(run: Path, tmp_path: Path, given: Any) -> None:
    """A condition that is not text is refused, and nothing is written."""
    with pytest.raises(UsageError, match=r"where.*: got .*, expected a valid (list|string)"):
        gymdata.filter(run, tmp_path / "o", where=given)
    assert not (tmp_path / "o").exists()


def test_a_folder_of_something_else_is_refused(run: Path, tmp_path: Path) -> None:
    """Pairs, or a trained model, given beside rollouts are named, not read as no rollouts."""
    gymdata.pairs(run, output=tmp_path / "pairs")
    write_run_json(tmp_path / "model", {"stage": "train-sft", "schemas": {}})
    for other, held in (("pairs", "pairs"), ("model", "the output of train-sft")):
        with pytest.raises(DataError, match=f"{other}: contains {held}, expected rollouts"):
            gymdata.filter([run, tmp_path / other], tmp_path / "o", where="reward > 0.4")
        with pytest.raises(DataError, match=f"{other}: contains {held}, expected rollouts"):
            gymdata.experience([run, tmp_path / other], tmp_path / "e")
        with pytest.raises(DataError, match=f"{other}: contains {held}, expected rollouts"):
            gymdata.load_rollouts(tmp_path / other)


def test_a_folder_of_scores_may_stand_beside_rollouts(run: Path, tmp_path: Path) -> None:
    """Scores are columns of rollouts, and are given with them."""
    gymdata.score(run, reward=["numeric"], output=tmp_path / "scores")
    report = gymdata.filter([run, tmp_path / "scores"], tmp_path / "o", where="reward > 0.4")
    assert report.rollouts_out == 12


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("task.id = 9007199254740993", ["t1-0"]),
        ("task.id > 9007199254740992", ["t1-0", "t2-0"]),
        ("generation_hash = -9007199254740993", ["t0-0"]),
    ],
)
def test_long_integers_are_compared_digit_for_digit(tmp_path: Path, where: str, kept: list[str]) -> None:
    """Ids and hashes that one double would stand for are not the same."""
    rows = [
        rollout(f"t{n}", 0, 1.0, two_turns(n, 20))
        | {"task": json.dumps({"id": 2**53 + n}), "generation_hash": n - 2**53 - 1}
        for n in range(3)
    ]
    run = write_run(tmp_path / "run", rows)
    assert gymdata.filter(run, tmp_path / "o", where=where).rollouts_out == len(kept)
    assert names(tmp_path / "o") == kept


def test_a_stored_nan_is_missing(tmp_path: Path) -> None:
    """In a column of rollouts, and in the figures of its group, which are of the others."""
    rows = [
        rollout("t", k, r, two_turns(k, 20), temperature=0.7) for k, r in enumerate((math.nan, math.inf, 0.5, None))
    ]
    rows[0]["temperature"] = rows[0]["duration_s"] = math.nan
    run = write_run(tmp_path / "run", rows)
    for where, kept in (
        ("reward IS NULL", 3), ("reward > 0", 1), ("temperature IS NULL", 1), ("temperature = 0.7", 3),
        ("duration_s IS NULL", 1), ("mean_reward = 0.5 AND n_scored = 1 AND std_reward IS NULL", 4),
    ):  # fmt: skip
        assert gymdata.filter(run, write=False, where=where).rollouts_out == kept


def test_scores_that_differ_in_case_only_are_not_taken_for_one_another(tmp_path: Path) -> None:
    """SQL ignores case, the names of scores do not: each alone is itself, both at once are refused."""
    parts = [{"name": name, "value": value} for name, value in (("A", 1.0), ("a", 2.0), ("my score", 3.0))]
    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(5, 40), rewards=parts)])
    for where in ("reward_A = 1", "reward_a = 2", '"reward_my score" = 3'):
        assert gymdata.filter(run, write=False, where=where).rollouts_out == 1
    with pytest.raises(UsageError, match="differ in case only"):
        gymdata.filter(run, write=False, where="reward_A < reward_a")


def test_agents_and_errors_are_columns(tmp_path: Path) -> None:
    """Which agents called the model, and what failed in the attempts, each once and in order; null where there is none."""
    rows = [rollout("t", k, 1.0, two_turns(5, 40 + k)) for k in range(2)]
    for turn, agent in zip(rows[0]["turns"], ("planner", "coder"), strict=True):
        turn["agent"] = agent
    run = write_run(tmp_path / "run", rows)
    failed = [("engine", "x"), ("reward", "reward exact"), ("engine", "y")]
    lines = [json.dumps({"kind": kind, "place": place, "attempt": 1, "rollout_id": "t-1"}) for kind, place in failed]
    (run / "failures.jsonl").write_text("\n".join(lines) + "\n")
    for where, kept in (
        ("agents = 'coder, planner'", "t-0"), ("agents IS NULL", "t-1"), ("errors = 'engine, reward exact'", "t-1"),
        ("errors IS NULL", "t-0"),
    ):  # fmt: skip
        gymdata.filter(run, tmp_path / "o", where=where, overwrite=True)
        assert names(tmp_path / "o") == [kept]
