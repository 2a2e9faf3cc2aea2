"""Reports of several runs or trainings: each against the first, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.report.compare import sampling_that_differs
from gymdata.commands.sweep import run as sweeping
from gymdata.errors import DataError
from gymdata.store import write_run_json
from tests.rollout_files import rollout, two_turns, write_run


def run_of(folder: Path, *rewards: float) -> Path:
    return write_run(folder, [rollout(f"t{n}", 0, reward, two_turns(5 + n, 40)) for n, reward in enumerate(rewards)])


def training_of(folder: Path, loss: float, rate: float) -> Path:
    folder.mkdir(parents=True)
    rows = [{"step": step, "loss": loss / step} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"learning_rate": rate, "output": str(folder), "seed": 1}
    facts = {"stage": "train-dpo", "status": "completed", "steps": 3, "config": config, "files": []}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def test_each_run_is_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four tasks: +1 of 4, then −1 of 4 by another task."""
    paths = [
        run_of(tmp_path / "base", 0, 0, 1, 0),
        run_of(tmp_path / "up", 1, 0, 1, 0),
        run_of(tmp_path / "down", 0, 0, 0, 0),
    ]
    figures = gymdata.report(*paths, write=False).figures
    first, up, down = figures["compared"]
    assert [row["name"] for row in figures["compared"]] == ["base", "up", "down"]
    assert (first["mean"], "difference" in first) == (0.25, False)
    assert (up["difference"]["rate"], up["flips"]) == (0.25, {"up": 1, "down": 0, "same": 3})
    assert (down["difference"]["rate"], down["flips"]) == (-0.25, {"up": 0, "down": 1, "same": 3})
    assert figures["headline"].startswith("3 runs; best up, 50.0 %: +25 points")
    assert main(["report", *map(str, paths), "-o", str(tmp_path / "page.html")]) == 0
    assert "best up" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert "Mean reward" in page
    assert page.count("<tr>") >= 4


def test_trainings_are_compared_by_their_curves_and_settings(tmp_path: Path) -> None:
    """One chart has a line for each; what only their folders differ in is left out."""
    paths = [training_of(tmp_path / name, loss, rate) for name, loss, rate in (("a", 1.0, 1e-5), ("b", 2.0, 5e-5))]
    figures = gymdata.report(*paths, output=tmp_path / "page.html").figures
    assert (figures["settings"], figures["names"]) == ({"learning_rate": [1e-5, 5e-5]}, ["a", "b"])
    assert figures["headline"] == "2 trainings of train-dpo"
    page = (tmp_path / "page.html").read_text()
    assert "<title>loss</title>" in page
    assert "<title>a, 1: 1</title>" in page
    assert "<title>b, 1: 2</title>" in page
    last = page.partition("Last values")[2]
    assert last.index("0.3333") < last.index("0.6667")


def test_a_setting_is_listed_once_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trainer's own values stand for what it was given, and a path that is wider than the terminal is not cut."""
    runs, name = [tmp_path / "a", tmp_path / "b"], "gradient_checkpointing_kwargs.use_reentrant"
    for number, run in enumerate(runs):
        training_of(run, 1.0, 1e-5)
        facts = json.loads((run / "run.json").read_text())
        facts["config"]["trainer"] = {
            "warmup_steps": 0.1 + number,
            "gradient_checkpointing_kwargs": {"use_reentrant": number},
        }
        facts["settings"] = {"warmup_steps": number, "gradient_checkpointing_kwargs": {"use_reentrant": number}}
        (run / "run.json").write_text(json.dumps(facts))
    assert gymdata.report(*runs, write=False).figures["settings"] == {name: [0, 1], "warmup_steps": [0, 1]}
    assert main(["report", *map(str, runs), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.count(name) == 1


def test_names_are_as_long_as_tells_them_apart(tmp_path: Path) -> None:
    """Of folders with the same name, with the one above."""
    paths = [run_of(tmp_path / name / "eval", 0, 1) for name in ("x", "y", "z")]
    assert gymdata.report(*paths, write=False).figures["names"] == ["x/eval", "y/eval", "z/eval"]


def test_runs_and_trainings_are_not_mixed(tmp_path: Path) -> None:
    """The path that has no rollouts is named."""
    paths = [run_of(tmp_path / "a", 0, 1), run_of(tmp_path / "b", 0, 1), training_of(tmp_path / "c", 1.0, 1e-5)]
    with pytest.raises(DataError, match="/c"):
        gymdata.report(*paths, write=False)


def test_another_version_of_the_environment_is_another_sampling(tmp_path: Path) -> None:
    """Named once, by its spec, with the hash of its file where that alone differs; weights and seeds are no sampling."""
    calculator = {"name": "python_tools", "spec": "calculator.py:Calculator", "file_hash": "a1"}
    places = {"none": {"name": "single_turn"}, "a": calculator, "b": calculator | {"file_hash": "b2"}}
    for seed, (name, place) in enumerate(places.items()):
        (tmp_path / name).mkdir()
        identity = {"environment": place, "temperature": 1.0, "seed": seed, "policy_hash": name}
        facts = {"stage": "collect", "run_id": name, "identity": identity, "config": {"num_rollouts": 4}}
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
    assert sampling_that_differs(tmp_path / "none", tmp_path / "a") == {
        "env": ["single_turn", "calculator.py:Calculator"]
    }
    versions = sampling_that_differs(tmp_path / "a", tmp_path / "b")["env"]
    assert ["a1" in versions[0], "b2" in versions[1]] == [True, True]
    assert sampling_that_differs(tmp_path / "a", tmp_path / "a") == {}


def test_the_first_run_may_be_the_best(tmp_path: Path) -> None:
    """Then the next one is against it; equal ones are tied, and where all are, it is said."""
    best, worse, worst = (
        run_of(tmp_path / n, *r) for n, r in (("a", (1, 1, 1, 0)), ("b", (1, 1, 0, 0)), ("c", (0, 0, 0, 0)))
    )
    same = run_of(tmp_path / "d", 1, 1, 0, 1)

    def headline(*paths: Path) -> str:
        return str(gymdata.report(*paths, write=False).figures["headline"])

    assert headline(best, worse, worst).startswith("3 runs; best a, 75.0 %; next b: -25 points")
    assert headline(worst, best, same).startswith("3 runs; best a and d (tied), 75.0 %: +75 points")
    assert headline(best, same, worst).startswith("3 runs; best a and d (tied), 75.0 %; next c: -75 points")
    assert headline(best, same, run_of(tmp_path / "e", 0, 1, 1, 1)) == "3 runs; all equal, 75.0 %, 4 tasks"


def test_the_best_is_named_on_the_tasks_that_all_have_scored(tmp_path: Path) -> None:
    """A run of the easy tasks alone is no better for that; without a common task none is the best."""
    first, better = run_of(tmp_path / "a", 1, 0, 0, 0), run_of(tmp_path / "b", 1, 1, 0, 0)
    easy = run_of(tmp_path / "easy", 1)
    figures = gymdata.report(first, better, easy, write=False).figures
    assert figures["headline"] == "3 runs on the 1 task that all have; all equal, 100.0 %, 1 task"
    assert [row["difference"]["rate"] for row in figures["compared"][1:]] == [0.25, 0.0]
    last = write_run(tmp_path / "last", [rollout("t3", 0, 1.0, two_turns(8, 40))])
    headline = str(gymdata.report(first, easy, last, write=False).figures["headline"])
    assert headline == "3 runs; no task is scored in all of them, so none is the best"


def evaluation(folder: Path, loss: str, seed: int, *rewards: float) -> Path:
    """An evaluation of a model that was trained with a loss and a seed, each in a folder of its own."""
    model, run = folder / "model", run_of(folder / "eval", *rewards)
    write_run_json(model, {"stage": "train-dpo", "settings": {"loss": loss, "seed": seed, "output": str(model)}})
    config = {"model": str(model), "temperature": 0.0}
    facts = {"stage": "collect", "config": config, "parents": [{"path": str(model)}]}
    write_run_json(run, {**json.loads((run / "run.json").read_text()), **facts})
    return run


def test_seeds_of_one_setting_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their mean over seeds under the setting's name, where nothing but the seed of what they were made from differs."""
    runs = [evaluation(tmp_path / f"{loss}_seed-{seed}", loss, seed, *rewards)
            for loss, seed, rewards in (("dpo", 1, (0, 0, 1, 0)), ("dpo", 2, (0, 0, 1, 1)),
                                        ("ipo", 1, (1, 0, 1, 1)), ("ipo", 2, (1, 0, 1, 0)))]  # fmt: skip
    figures = gymdata.report(*runs, write=False).figures
    dpo, ipo = figures["by_setting"]
    assert (dpo["name"], dpo["seeds"], dpo["mean"], "difference" in dpo) == ("dpo/eval", 2, 0.375, False)
    assert (ipo["name"], ipo["seeds"], ipo["mean"], ipo["difference"]["rate"]) == ("ipo/eval", 2, 0.625, 0.25)
    assert figures["headline"].startswith("4 runs of 2 settings; best ipo/eval, 62.5 %: +25 points")
    assert main(["report", *map(str, runs), "-o", str(tmp_path / "page.html")]) == 0
    assert "ipo/eval" in capsys.readouterr().out
    assert "<th>seeds</th>" in (tmp_path / "page.html").read_text()
    same_seed = [runs[0], evaluation(tmp_path / "again", "dpo", 1, 0, 0, 1, 0), runs[2]]
    assert gymdata.report(*same_seed, write=False).figures["by_setting"] == []


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("dpo/seed-1", "dpo/seed-2", "ipo/seed-3", "ipo/seed-4"), ("eval", "seed-3/eval and 1 other seed")),
        (("seed-1/dpo", "seed-2/dpo", "seed-1/ipo", "seed-2/ipo"), ("dpo/eval", "ipo/eval")),
        (("dpo1", "dpo2", "ipo1", "ipo2"), ("dpo1/eval and 1 other seed", "ipo1/eval and 1 other seed")),
    ],
)
def test_each_setting_has_a_name_that_no_run_and_no_other_setting_has(
    paths: tuple[str, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    """Whatever their folders are called, no setting takes the place of another."""
    losses = ("dpo", "dpo", "ipo", "ipo")
    runs = [
        evaluation(tmp_path / path, loss, seed, float(loss == "ipo"), 0)
        for seed, (path, loss) in enumerate(zip(paths, losses, strict=True))
    ]
    figures = gymdata.report(*runs, write=False).figures
    assert [(row["name"], row["seeds"], row["mean"]) for row in figures["by_setting"]] == [
        (names[0], 2, 0.0),
        (names[1], 2, 0.5),
    ]


def test_a_sweep_and_a_glob_are_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sweep the results of its cells by name, the baseline first; a sweep without one is refused."""
    monkeypatch.setattr(sweeping, "start", lambda words, log: main(list(words)[words.index("gymdata.cli") + 1 :]))
    monkeypatch.setattr(sweeping, "wait", lambda code, log, progress: code)
    for choice, rewards in (("a", (0, 0, 1, 0)), ("b", (1, 1, 1, 0))):
        run_of(tmp_path / f"source-{choice}", *rewards)
    steps = [f"filter {tmp_path}/source-{{choice}} -o {{output}}/eval --where 'reward >= {{seed}}'"]
    facts = {"output": str(tmp_path / "sweep"), "steps": steps, "grid": {"choice": ["a", "b"]}, "seeds": [0, -1],
             "baseline": {"choice": "b"}}  # fmt: skip
    (tmp_path / "sweep.yaml").write_text(json.dumps(facts))
    write_run_json(tmp_path / "empty", {"stage": "sweep"})
    with pytest.raises(DataError, match="cells with a result"):
        gymdata.report(tmp_path / "empty", write=False)
    assert main(["sweep", str(tmp_path / "sweep.yaml")]) == 0
    figures = gymdata.report(tmp_path / "sweep").figures
    assert [row["name"].partition("/")[0] for row in figures["compared"]] == [
        "choice-b_seed-0", "choice-b_seed-1", "choice-a_seed-0", "choice-a_seed-1",
    ]  # fmt: skip
    assert [(row["seeds"], row["mean"]) for row in figures["by_setting"]] == [(2, 0.75), (2, 0.25)]
    assert figures["headline"].startswith(
        "4 runs of 2 settings; best choice-b/eval, 75.0 %; next choice-a/eval: -50 points"
    )
    assert (tmp_path / "sweep" / "report.html").is_file()
    capsys.readouterr()
    assert main(["report", f"{tmp_path}/source-*", "-o", str(tmp_path / "page.html")]) == 0
    assert "25.0 % → 75.0 %" in capsys.readouterr().out


def test_the_expected_answer_is_beside_the_answers(tmp_path: Path) -> None:
    """As the rewards read it, several by name; of a task without one nothing."""
    rows = [rollout(f"t{n}", 0, float(n > 0), two_turns(5 + n, 40)) for n in range(3)]
    for row, answer in zip(rows, ('"answer": "forty-two"', '"answer": [7, 8]', '"other": 1'), strict=True):
        row["task"] = "{" + answer + "}"
    made = gymdata.report(write_run(tmp_path / "run", rows), sample="random", output=tmp_path / "page.html")
    assert sorted(str(row["expected"]) for row in made.figures["examples"].values()) == ["7 or 8", "None", "forty-two"]
    page = (tmp_path / "page.html").read_text()
    assert "<pre>forty-two</pre>" in page
    assert page.count("expected answer") == 2


def test_a_larger_k_says_over_how_many_tasks_it_is(tmp_path: Path) -> None:
    """Tasks with fewer scored rollouts than k are not among them."""
    rows = [
        rollout(f"t{n}", i, 1.0 if i < 2 or n else None, two_turns(5 + n, 40 + i)) for n in range(3) for i in range(4)
    ]
    made = gymdata.report(write_run(tmp_path / "run", rows), output=tmp_path / "page.html")
    assert [(row["k"], row["tasks"], row["too_few"]) for row in made.figures["pass_at_k"]] == [
        (1, 3, 0),
        (2, 3, 0),
        (4, 2, 1),
    ]
    page = (tmp_path / "page.html").read_text()
    assert "pass@4, of the 2 of 3 tasks with 4 scored rollouts" in page
    assert "pass@4" not in made.headline
