"""Which score a command means: the named one, the only one, or a refusal that lists them; never the newest."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pyarrow as pa
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.finetune.selection import Source
from gymdata.commands.view.evidence.selection import Query, select
from gymdata.commands.view.evidence.tables import Tables
from gymdata.errors import UsageError
from gymdata.rollouts.schema import SCORES
from gymdata.scores.chosen import default_score, with_score
from gymdata.store import hash_file, read_run_json, write_run_json
from gymdata.store.reading import DataWarning, warn_of_changed_scores
from tests.rollout_files import rollout, two_turns, write_run, write_table


def write_scores(run: Path, name: str, values: dict[int, float], kind: str = "scores") -> None:
    """RUN/scores-NAME as `gymdata score` leaves it, or RUN/judge-NAME: by rollout index, failed for the others."""
    write_score_rows(run / f"{kind}-{name}", name, score_rows(run, name, values))


def score_rows(run: Path, name: str, values: dict[int, float]) -> list[dict[str, object]]:
    return [
        {"rollout_id": row["rollout_id"], "name": name, "value": values.get(row["rollout_index"]), "source": "function",
         "status": "scored" if row["rollout_index"] in values else "failed", "run_id": "r", "detail": "no answer"}
        for row in gymdata.load_rollouts(run).select(["rollout_id", "rollout_index"]).to_pylist()
    ]  # fmt: skip


def write_score_rows(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    file = write_table(pa.Table.from_pylist(rows, schema=SCORES.schema), folder / "scores.parquet", SCORES)
    files = [{"path": file.name, "rows": len(rows), "bytes": file.stat().st_size, "xxh3": hash_file(file)}]
    write_run_json(folder, {"stage": "score", "files": files, "rewards": [{"source": f"file:{name}"}]})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in which every rollout has the reward 0, scored again by its index."""
    rows = [rollout(f"t{k}", i, 0.0, two_turns(1, 5 + i + 10 * k)) for k in range(2) for i in range(3)]
    folder = write_run(tmp_path / "run", rows)
    write_scores(folder, "mine", {0: 0.0, 1: 1.0, 2: 2.0})
    return folder


def test_pairs_are_made_by_the_only_score(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says which, and its name is that of the folder; run.json has it as a setting, as a parent and by what made
    it."""
    assert main(["pairs", str(run)]) == 0
    assert "score: mine, the only re-scoring" in capsys.readouterr().err
    facts = read_run_json(run / "pairs-mine")
    assert facts["config"]["reward"] == "mine"
    assert facts["scored_by"] == [{"name": "mine", "source": {"run-1": {"folder": "scores-mine", "by": ["file:mine"]}}}]
    assert str((run / "scores-mine").resolve()) in [parent["path"] for parent in facts["parents"]]


@pytest.mark.parametrize("name", ["pairs-mine", "experiences-grpo"])
def test_what_was_made_of_scores_that_changed_is_named(tmp_path: Path, name: str) -> None:
    """After another scoring under the same name, also in a run that was moved; the same scoring again changes nothing."""
    run = write_run(tmp_path / "run", [rollout("t", i, 0.0, two_turns(1, 5 + i)) for i in range(4)])
    reward = tmp_path / "rew.py"

    def scored(sign: str) -> None:
        reward.write_text(
            f"def mine(completions, **_):\n    return [{sign}float(c[-1]['content'].split()[0]) for c in completions]\n"
        )
        gymdata.score(run, reward=f"{reward}:mine")

    scored("+")
    gymdata.pairs(run)
    gymdata.experience(run, estimator="grpo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored("+")
        warn_of_changed_scores(run / name)
    scored("-")
    line = f"scores-mine changed after .*{name} was made from it → rerun `gymdata {name[:5]}"
    with pytest.warns(DataWarning, match=line):
        warn_of_changed_scores(run / name)
    with pytest.warns(DataWarning, match=line):
        warn_of_changed_scores(run.rename(tmp_path / "moved") / name)


def test_a_training_and_validate_warn_of_scores_that_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr; the data is used as it is."""
    shutil.rmtree(run / "scores-mine")
    (run.parent / "rew.py").write_text("def late(completions, **_):\n    return list(range(len(completions)))\n")
    late = f"{run.parent / 'rew.py'}:late"
    assert main(["score", str(run), "--reward", late]) == 0
    assert main(["pairs", str(run)]) == 0
    assert main(["score", str(run), "--reward", f"{late}=-1"]) == 0
    capsys.readouterr()
    assert main(["validate", str(run / "pairs-late")]) == 0
    assert capsys.readouterr().err.count("scores-late changed after") == 1
    main(["train-dpo", str(run / "pairs-late"), "--model", str(run), "-o", str(run.parent / "model"), "--dry-run"])
    assert capsys.readouterr().err.count("scores-late changed after") == 1


def test_no_experiences_name_the_scores(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Groups that a score leaves without variance may have it by another."""
    write_scores(run, "flat", dict.fromkeys(range(3), 0.0))
    before = sorted(run.rglob("*"))
    assert main(["experience", str(run), "--reward", "flat"]) == 1
    assert "every flat is 0: is it right?" in (err := " ".join(capsys.readouterr().err.split()))
    assert "or choose another score: --reward reward or mine" in err
    assert sorted(run.rglob("*")) == before


def test_two_scores_are_listed_and_a_named_one_or_the_only_one_counts(run: Path) -> None:
    """Whatever the times of their files; a score without values is no choice, and of runs of which one lacks a score it has
    to be named."""
    write_scores(run, "broken", {})
    assert default_score([run], None)[0] == "mine"
    other = write_run(run.parent / "other", [rollout("t9", 0, 1.0, two_turns(1, 90))])
    with pytest.raises(UsageError, match=r"2 scores could be meant: reward, mine \(not of 1 source\)"):
        default_score([run, other], None)
    write_scores(run, "later", {0: 1.0})
    for file, time in (("mine", 1), ("later", 2**61)):
        os.utime(run / f"scores-{file}" / "run.json", ns=(time, time))
    with pytest.raises(UsageError, match="3 scores could be meant: reward, later, mine"):
        default_score([run], None)
    assert default_score([run], "mine") == ("mine", None)


@pytest.mark.parametrize("words", ["pairs", "experience", "show --best", "report --json",
                                   "export --format nemo-gym -o x.jsonl",
                                   "filter --where reward>0 -o kept", "train-sft -m x -o out"])  # fmt: skip
def test_a_command_stops_where_two_scores_could_be_meant(
    words: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written, and the message lists them with the flag to choose."""
    monkeypatch.chdir(run.parent)
    write_scores(run, "later", {0: 1.0})
    before = sorted(run.parent.rglob("*"))
    name, *flags = words.split()
    assert main([name, str(run), *flags]) == 2
    printed = capsys.readouterr()
    assert "3 scores could be meant: reward, later, mine" in (text := " ".join((printed.err + printed.out).split()))
    assert ("reward_NAME" if name == "filter" else "--reward NAME") in text
    assert sorted(run.parent.rglob("*")) == before


def test_a_score_of_one_run_is_not_put_together_with_a_stored_reward_of_its_name(run: Path) -> None:
    """Both are called `exact`: the other run is named, alone each has its own."""
    write_scores(run, "exact", {0: 5.0, 1: 6.0, 2: 7.0})
    other = write_run(run.parent / "other", [rollout("t9", 0, 1.0, two_turns(1, 90), rollout_id="o")])
    rows = gymdata.load_rollouts(run), gymdata.load_rollouts(other)
    assert with_score([run], rows[0], "exact")[0]["reward"].to_pylist() == [5.0, 6.0, 7.0] * 2
    assert with_score([other], rows[1], "exact")[0]["reward"].to_pylist() == [1.0]
    with pytest.raises(UsageError, match=r"exact: .*scores-exact re-scores some rollouts, and .*other has no such"):
        gymdata.experience([run, other], reward="exact", output=run.parent / "e")


def test_two_scores_of_one_name_are_refused(run: Path) -> None:
    """One of a function and one of a judge: neither is the first."""
    write_scores(run, "mine", {0: 1.0}, kind="judge")
    with pytest.raises(UsageError, match=r"two scores are called mine: .*scores-mine and .*judge-mine"):
        gymdata.experience(run, reward="mine")


@pytest.mark.parametrize("way", ["name", "function", "part", "recipe", "judge", "collect"])
def test_no_score_may_have_the_name_of_the_total(way: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the way to give it another; `--reward reward` stays the stored total."""
    folder = run.parent
    (folder / "rew.py").write_text("def reward(completions, **_):\n    return [9.0 for _ in completions]\n")
    spec = f"{folder / 'rew.py'}:reward"
    (folder / "reward.yaml").write_text(f"default: {{'{spec if way == 'part' else 'numeric'}': 1}}\n")
    (folder / "tasks.jsonl").write_text('{"prompt": "1+1?"}\n')
    recipe = ["--recipe", str(folder / "reward.yaml")]
    commands = {
        "name": ["score", str(run), "--reward", "numeric", "--name", "reward"],
        "function": ["score", str(run), "--reward", spec],
        "part": ["score", str(run), *recipe, "--name", "other"],
        "recipe": ["score", str(run), *recipe],
        "judge": ["judge", str(run), "--aggregate-only", "--name", "reward"],
        "collect": [
            "collect",
            str(folder / "tasks.jsonl"),
            "-m",
            str(folder),
            "--reward",
            spec,
            "-o",
            str(folder / "out"),
        ],
    }
    assert main(commands[way]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "got 'reward', expected another name: this one is the total reward's" in text
    assert ("rename the function" if way in ("function", "part", "collect") else "--name") in text
    assert not [*run.glob("*-reward")]
    assert with_score([run], gymdata.load_rollouts(run), "reward")[0]["reward"].to_pylist() == [0.0] * 6


def test_experience_and_filter_use_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reward that experience credits and that a filter compares; what is filtered keeps its own reward."""
    assert main(["experience", str(run), "--estimator", "grpo"]) == 0
    assert read_run_json(run / "experiences-grpo")["config"]["reward"] == "mine"
    assert main(["filter", str(run), "--where", "reward > 1.5", "-o", str(run.parent / "kept")]) == 0
    assert "reward is the score 'mine'" in capsys.readouterr().err
    kept = gymdata.load_rollouts(run.parent / "kept")
    assert (kept["rollout_index"].to_pylist(), kept["reward"].to_pylist()) == ([2, 2], [0.0, 0.0])
    total = ["filter", str(run), "--where", "reward_reward < reward and n_scored = 3", "-o", str(run.parent / "total")]
    assert main(total) == 0
    assert gymdata.load_rollouts(run.parent / "total")["rollout_index"].to_pylist() == [1, 2, 1, 2]


def test_a_score_is_that_of_its_rollout_in_whatever_order_they_were_written(run: Path) -> None:
    """The last row of a rollout counts, wherever the rows of others are."""
    first, last = (score_rows(run, "mine", values) for values in ({0: 7.0, 1: 7.0, 2: 7.0}, {1: 1.0, 2: 2.0}))
    again = [row for row in last if row["status"] == "scored"]
    write_score_rows(run / "scores-mine", "mine", [*reversed(first), *reversed(again)])
    rollouts, _ = with_score([run], gymdata.load_rollouts(run), "mine")
    by_index = zip(rollouts["rollout_index"].to_pylist(), rollouts["reward"].to_pylist(), strict=True)
    assert sorted(by_index) == [(0, 7.0), (0, 7.0), (1, 1.0), (1, 1.0), (2, 2.0), (2, 2.0)]


@pytest.mark.parametrize("named", [[], ["--reward", "mine"]])
def test_show_best_prints_the_score(run: Path, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The rollout with the highest score, and that score."""
    assert main(["show", str(run), "--best", *named]) == 0
    assert "score mine" in capsys.readouterr().out
    assert main(["show", str(run), "--best", *named, "--json"]) == 0
    (best,) = json.loads(capsys.readouterr().out)["rollouts"]
    assert (best["rollout_index"], best["score"]) == (2, {"name": "mine", "value": 2.0})


def test_a_report_is_of_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one run and of two: the figures, the headline and the examples; --reward reward is the total."""
    with pytest.warns(DataWarning, match="score: mine"):
        made = gymdata.report(run, write=False).to_dict()
    assert (made["score"], made["rewards"]["mean"]) == ("mine", 1.0)
    assert made["headline"].endswith("score mine")
    assert made["examples"]["best"]["score"] == {"name": "mine", "value": 2.0}
    assert gymdata.report(run, write=False, reward="reward").to_dict()["rewards"]["mean"] == 0.0
    compared = gymdata.report(run, run, write=False, reward="mine").to_dict()
    assert compared["difference"]["before"] == 1.0
    assert main(["report", str(run)]) == 0
    assert "mine 2" in (run / "report.html").read_text()
    assert "score: mine, the only re-scoring" in capsys.readouterr().err


def test_an_export_holds_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In formats with a reward; where the score has no value there is none."""
    write_scores(run, "later", {1: 5.0})

    def rewards(*flags: str) -> list[float | None]:
        words = ["--format", "nemo-gym", "--overwrite", *flags]
        assert main(["export", str(run), "-o", str(run.parent / "gym.jsonl"), *words]) == 0
        return [json.loads(line)["reward"] for line in (run.parent / "gym.jsonl").read_text().splitlines()]

    assert rewards("--reward", "later") == [None, 5.0, None] * 2
    assert rewards("--reward", "mine") == [0.0, 1.0, 2.0] * 2
    assert rewards("--reward", "reward") == [0.0] * 6
    words = ["export", str(run), "-o", str(run.parent / "text.jsonl"), "--format", "openai", "--reward", "mine"]
    assert main(words) == 2
    assert "openai holds no rewards" in capsys.readouterr().err


def test_a_viewer_shows_it(run: Path) -> None:
    """In its table, on a rollout's page and under a filter, whose command keeps the same rollouts; a score and
    where a second one is made while it runs, the total with a note that lists them."""
    index = Tables([run], fresh_s=0)
    snapshot = index.snapshot()
    assert (snapshot.score, snapshot.table["reward"].to_pylist()) == ("mine", [0.0, 1.0, 2.0] * 2)
    assert snapshot.row(2)["reward"] == 2.0
    rows = select(snapshot, Query(where="reward > 1.5")).rows.tolist()
    assert rows == [2, 5]
    write_scores(run, "later", {0: 9.0})
    snapshot = index.snapshot()
    assert (snapshot.score, snapshot.table["reward"].to_pylist()) == (None, [0.0] * 6)
    assert "3 scores could be meant: reward, later, mine" in snapshot.problems[0]
    assert index.snapshot() is index.snapshot()


def test_a_viewer_filters_by_what_a_judge_said_last(run: Path) -> None:
    """Rewards of a judge that are made again while it runs count from then on."""
    index = Tables([run], fresh_s=0)
    by_judge = Query(where="reward_tiny > 0.5")
    for judged in ({0: 1.0}, {1: 1.0, 2: 1.0}):
        write_scores(run, "tiny", judged, kind="judge")
        rows = select(index.snapshot(), by_judge).rows.tolist()
        assert rows == [row for row in range(6) if row % 3 in judged]


def test_a_glob_means_the_scores_of_all_its_runs(tmp_path: Path) -> None:
    """As if each run were given: a score that one of them lacks has to be named, and each has its own values."""
    runs = [
        write_run(tmp_path / name, [rollout("t", 0, 0.5, two_turns(1, 5), rollout_id=name, run_id=name)])
        for name in "ab"
    ]
    paths = [tmp_path / "*" / "rollouts" / "*.parquet"]
    table = gymdata.load_rollouts(paths[0])
    write_scores(runs[0], "mine", {0: 1.0})
    with pytest.raises(UsageError, match="not of 1 source"):
        default_score(paths, None)
    write_scores(runs[1], "mine", {0: 2.0})
    assert default_score(paths, None)[0] == "mine"
    assert with_score(paths, table, "mine")[0]["reward"].to_pylist() == [1.0, 2.0]


def test_a_loop_uses_the_reward_that_its_file_names(run: Path) -> None:
    """A score that somebody made of an epoch's rollouts since changes nothing."""
    assert set(Source(run).scores()["reward"].to_pylist()) == {0.0}
