"""``gymdata sweep`` over real commands: every cell once, whatever kills it, and a comparison that is counted by hand."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import gymdata
from gymdata.cli.main import main
from gymdata.commands.ls.run import ls
from gymdata.commands.sweep import run as running
from gymdata.commands.sweep.run import SweepPlan, SweepReport, sweep
from gymdata.errors import DataError, StoreError, UsageError
from gymdata.progress import NullProgress
from gymdata.store import write_run_json
from gymdata.store.lock import Lock
from tests.rollout_files import rollout, two_turns, write_run

#: Tasks t0 to t4; the rewards of the source runs by the value of ``choice`` and the seed.
REWARDS = {("a", 1): (0, 0, 1, 0, 1), ("a", 2): (0, 0, 1, 1, 1), ("b", 1): (1, 0, 1, 1, 1), ("b", 2): (1, 1, 1, 1, 1)}


def written(folder: Path, **changes: Any) -> Path:
    """A sweep file whose steps look at a run with known rewards, and copy it."""
    for (choice, seed), rewards in REWARDS.items():
        rows = [rollout(f"t{n}", 0, float(r), two_turns(5 + n, 40)) for n, r in enumerate(rewards)]
        write_run(folder / f"source-{choice}-{seed}", rows)
    facts: dict[str, Any] = {
        "output": str(folder / "sweep"),
        "steps": [
            f"query 'SELECT 1' {folder}/source-{{choice}}-{{seed}} -o {{output}}/one.csv",
            f"filter {folder}/source-{{choice}}-{{seed}} -o {{output}}/eval --where 'reward >= 0'",
        ],
        "grid": {"choice": ["a", "b"]},
        "seeds": [1, 2],
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump({**facts, **changes}))
    return folder / "sweep.yaml"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str], Path], int]:
    """Commands run in this process; the first test below starts one as a sweep does."""

    def run(words: Sequence[str], log: Path) -> int:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            return main(list(words)[words.index("gymdata.cli") + 1 :])

    monkeypatch.setattr(running, "start", run)
    monkeypatch.setattr(running, "wait", lambda code, log, progress: code)
    return run


def swept(file: Path, **settings: Any) -> SweepReport:
    report = sweep(file, **settings)
    assert isinstance(report, SweepReport)
    return report


def test_each_command_is_a_process_whose_output_is_in_its_log(tmp_path: Path) -> None:
    """As a user would type it, from the words of the step."""
    steps = [f"filter {tmp_path}/source-{{choice}}-{{seed}} -o {{output}}/eval --where 'reward >= 0'"]
    report = swept(written(tmp_path, steps=steps, grid={"choice": ["a"]}, seeds=[1]))
    assert (report.done, report.exit_code, report.combinations[0].rate) == (1, 0, pytest.approx(0.4))
    assert "eval" in (tmp_path / "sweep" / "choice-a_seed-1" / "logs" / "1-filter.log").read_text()


@pytest.mark.usefixtures("here")
def test_every_combination_runs_with_every_seed_and_is_compared_with_the_first(tmp_path: Path) -> None:
    """Means over tasks of means over seeds, and their paired difference."""
    report = swept(written(tmp_path))
    a, b = report.combinations
    assert (report.done, report.exit_code, a.is_baseline, b.is_baseline) == (4, 0, True, False)
    assert (a.rate, a.by_seed) == (pytest.approx(0.5), {"1": pytest.approx(0.4), "2": pytest.approx(0.6)})
    assert b.rate == pytest.approx(0.9)
    assert a.difference is None
    assert b.difference is not None
    # By task: 1, 0.5, 0, 0.5, 0.
    assert (b.difference["rate"], b.difference["n"], b.difference["seeds"]) == (pytest.approx(0.4), 5, 2)
    written_results = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert [one["rate"] for one in written_results["combinations"]] == [a.rate, b.rate]
    results = (tmp_path / "sweep" / "results.md").read_text()
    assert "| a | 50.0 %" in results
    assert "bootstrap over tasks and seeds" in results


def listed(folder: Path) -> str:
    """The state of the sweep in ``ls``."""
    (shown,) = (output for output in ls(folder).outputs if output.kind == "sweep")
    return shown.state


def test_a_sweep_that_was_killed_goes_on_at_the_step_that_was_not_done(
    tmp_path: Path, here: Callable[[Sequence[str], Path], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command runs once, whichever of them the interruption hits."""
    calls = list[str]()

    def counted(words: Sequence[str], log: Path) -> Any:
        calls.append(" ".join(words))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return here(words, log)

    monkeypatch.setattr(running, "start", counted)
    stopped = swept(written(tmp_path))
    assert (stopped.done, stopped.interrupted, stopped.exit_code) == (1, True, 130)
    assert "| 40.0, – |" in (tmp_path / "sweep" / "results.md").read_text()
    assert listed(tmp_path) == "interrupted"
    report = swept(tmp_path / "sweep.yaml")
    assert (report.done, report.exit_code) == (4, 0)
    assert len(calls) == 9
    assert len(set(calls)) == 8
    swept(tmp_path / "sweep.yaml")
    assert len(calls) == 9


def test_ls_knows_a_sweep_at_work_by_the_locks_of_its_cells_and_its_progress_counts_cells(
    tmp_path: Path, here: Callable[[Sequence[str], Path], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first command on."""
    seen, updates = list[str](), list[tuple[float, float]]()

    class Counts(NullProgress):
        def update(self, **counts: float) -> None:
            updates.append((counts["done"], counts["total"]))

    def start_and_look(words: Sequence[str], log: Path) -> int:
        seen.append(listed(tmp_path))
        return here(words, log)

    monkeypatch.setattr(running, "start", start_and_look)
    swept(written(tmp_path), progress=Counts())
    assert set(seen) == {"being written"}
    assert updates == [(0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.usefixtures("here")
def test_cells_of_another_process_are_left_to_it(tmp_path: Path) -> None:
    """The same command twice divides the cells."""
    file = written(tmp_path)
    cell = tmp_path / "sweep" / "choice-a_seed-1"
    cell.mkdir(parents=True)
    lock = Lock(cell)
    report = swept(file)
    lock.release()
    assert (report.done, report.elsewhere, report.combinations[0].missing) == (3, ["choice-a_seed-1"], 1)
    assert swept(file).done == 4


@pytest.mark.usefixtures("here")
def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """It is named, and the exit code is 1: here filter keeps no rollout of one source."""
    file = written(tmp_path)
    write_run(tmp_path / "source-a-1", [rollout("t0", 0, -1.0, two_turns(5, 40))])
    report = swept(file)
    assert (report.done, report.exit_code, list(report.failed)) == (3, 1, ["choice-a_seed-1"])
    assert report.combinations[0].missing == 1


def test_all_commands_are_read_before_the_first_one_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the last cell misspells does not cost the others; each fault is named once, with its cell."""
    steps = ["pairs {output} -o {output}/pairs --strategy {choice}", "filtr {output} -o {output}/eval --seed {seed}"]
    steps.append("filter {output} --no-such-flag")
    file = written(tmp_path, steps=steps, grid={"choice": ["all", "al"]})
    assert main(["sweep", str(file), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.count("choice-al_seed-1: gymdata pairs: --strategy: got 'al'") == 1
    assert said.count("gymdata filtr: command: got 'filtr'") == 1
    assert said.count("no-such-flag") == 1
    assert "choice-all_seed-1: gymdata pairs" not in said
    assert not (tmp_path / "sweep").exists()


@pytest.mark.usefixtures("here")
def test_files_that_an_earlier_step_writes_may_be_lacking(tmp_path: Path) -> None:
    """Settings that are not there yet are read when the command runs."""
    steps = ["filter {output}/{choice} -o {output}/eval --config {output}/settings{seed}.yaml"]
    assert main(["sweep", str(written(tmp_path, steps=steps)), "--dry-run"]) == 0


@pytest.mark.usefixtures("here")
def test_a_cell_that_was_begun_with_other_commands_is_refused(tmp_path: Path) -> None:
    """Naming the step; more values are more cells."""
    file = written(tmp_path)
    swept(file)
    settings = yaml.safe_load(file.read_text())
    settings["steps"][0] = settings["steps"][0].replace("SELECT 1", "SELECT 2")
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(StoreError, match="step 1"):
        sweep(file)
    assert swept(file, overwrite=True).done == 4


@pytest.mark.usefixtures("here")
def test_results_of_other_tasks_are_not_compared(tmp_path: Path) -> None:
    """A mean over different questions would say nothing."""
    file = written(tmp_path)
    swept(file)
    for choice, digest in (("a", "1"), ("b", "2")):
        for seed in (1, 2):
            facts = tmp_path / "sweep" / f"choice-{choice}_seed-{seed}" / "eval" / "run.json"
            values = json.loads(facts.read_text())
            facts.write_text(json.dumps({**values, "tasks": {"digest": digest}}))
    with pytest.raises(DataError, match="has other tasks"):
        sweep(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": ["filter x -o {output}"]}, "no step has {choice}"),
        ({"steps": ["filter {choice} {seed}"]}, "no step has {output}"),
        ({"grid": {"choice": ["a", "a"]}}, "two cells"),
        ({"baseline": {"choice": "c"}}, "baseline: choice"),
        ({"steps": []}, "steps"),
        ({"gird": {}}, "unknown key 'gird'"),
        ({"seeds": 3}, r"seeds: got 3, expected a list with each seed, such as \[1, 2, 3\]"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_before_a_command(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """What is missing, twice or unknown is named."""
    with pytest.raises(UsageError, match=said):
        sweep(written(tmp_path, **changes))
    assert not (tmp_path / "sweep").exists()


def test_a_dry_run_lists_the_commands(tmp_path: Path) -> None:
    """Values with spaces stay one word."""
    plan = sweep(written(tmp_path, grid={"choice": ["a", "b c"]}), dry_run=True)
    assert isinstance(plan, SweepPlan)
    assert (plan.cells, len(plan.steps)) == (4, 4)
    assert f"'{tmp_path}/source-b c-1'" in plan.steps["choice-b-c_seed-1"][0]
    assert not (tmp_path / "sweep").exists()


@pytest.mark.usefixtures("here")
def test_results_without_a_common_task_have_no_difference(tmp_path: Path) -> None:
    """Neither a number that is none in results.json, nor a rate of nothing: of b no task is scored in both."""
    file = written(tmp_path)
    write_run(tmp_path / "source-b-1", [rollout("other", 0, 1.0, two_turns(5, 40))])
    report = swept(file)
    a, b = report.combinations
    assert (a.rate, b.rate, b.n_tasks) == (pytest.approx(0.5), None, 0)
    assert b.difference is None
    assert "NaN" not in (tmp_path / "sweep" / "results.json").read_text()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("changed", ["data", "config", "reward", "folder"])
def test_a_cell_is_run_again_when_an_input_of_its_commands_changed(changed: str, tmp_path: Path) -> None:
    """Data, a configuration, what it names, and a folder: their content counts, not their names or times. An input that was
    written again with the same content changes nothing."""
    gymdata.filter(written(tmp_path).parent / "source-a-1", output=tmp_path / "r", where=["reward >= 0"])
    (tmp_path / "rew.py").write_text("def good(completions, **_):\n    return [1.0] * len(completions)\n")
    (tmp_path / "s.yaml").write_text(f"reward: ['{tmp_path}/rew.py:good']\n")
    data = tmp_path / ("source-a-1" if changed == "folder" else "r")
    steps = [
        f"score {tmp_path}/source-b-1 -o {{output}}/scores --config={tmp_path}/s.yaml --overwrite",
        f"filter {data} -o {{output}}/eval --where 'reward >= 0' --overwrite",
    ]
    file = written(tmp_path, steps=steps, grid={}, seeds=[])
    cell = tmp_path / "sweep" / "cell" / "cell.json"
    assert swept(file).combinations[0].rate == pytest.approx(0.4)
    before = cell.read_bytes()
    for file_of in (tmp_path / "r").iterdir():
        file_of.write_bytes(file_of.read_bytes())
    assert swept(file).done == 1
    assert cell.read_bytes() == before
    if changed == "data":
        gymdata.filter(tmp_path / "source-b-2", output=tmp_path / "r", where=["reward >= 0"], overwrite=True)
    elif changed == "config":
        (tmp_path / "s.yaml").write_text(f"reward: ['{tmp_path}/rew.py:good']\nlimit: 4\n")
    elif changed == "reward":
        (tmp_path / "rew.py").write_text("def good(completions, **_):\n    return [0.5] * len(completions)\n")
    else:
        write_run(data, [rollout("t0", 0, 1.0, two_turns(5, 40))])
    report = swept(file)
    assert (report.done, report.failed) == (1, {})
    assert cell.read_bytes() != before
    assert report.combinations[0].rate == pytest.approx(1.0 if changed in ("data", "folder") else 0.4)


@pytest.mark.usefixtures("here")
def test_a_new_cell_is_compared_with_results_of_the_same_input(tmp_path: Path) -> None:
    """What was made of the data as they were is not: of equal cells over other data than before, the difference is 0."""
    steps = [f"filter {tmp_path}/r -o {{output}}/eval --where 'n_turns > {{n}}'"]
    gymdata.filter(written(tmp_path).parent / "source-a-1", output=tmp_path / "r", where=["reward >= 0"])
    file = written(tmp_path, steps=steps, grid={"n": [0]}, seeds=[])
    assert swept(file).combinations[0].rate == pytest.approx(0.4)
    gymdata.filter(tmp_path / "source-b-2", output=tmp_path / "r", where=["reward >= 0"], overwrite=True)
    written(tmp_path, steps=steps, grid={"n": [0, 1]}, seeds=[])
    old, new = swept(file).combinations
    assert (old.rate, new.rate) == (1.0, 1.0)
    assert new.difference is not None
    assert new.difference["rate"] == 0.0


@pytest.mark.usefixtures("here")
def test_cells_that_trained_or_earned_the_same_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    """With the steps of each cell as a column, on the terminal and in both files."""
    file = written(tmp_path, steps=[f"filter {tmp_path}/source-a-1 -o {{output}}/eval --where 'reward >= {{low}}'"],
                   grid={"low": [0, -1, -2]}, seeds=[])  # fmt: skip
    swept(file)
    for low, steps in (("0", 1), ("1", 1), ("2", 9)):
        model = tmp_path / "sweep" / f"low-{low}" / "model"
        shutil.copytree(policy, model)
        write_run_json(model, {"stage": "train-rl", "steps": steps})
    (model / "model.safetensors").unlink()
    shutil.copy(Path(policy) / "config.json", model / "x.bin")
    assert main(["sweep", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    weights, rewards = "1 step each, trained weights equal in low-0, low-1", "rewards of all 5 tasks equal in all cells"
    assert weights in printed
    assert rewards in printed
    results = (tmp_path / "sweep" / "results.md").read_text()
    assert "| steps |" in results
    assert f"{weights}.\n" in results
    written_results = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert written_results["alike"] == [weights, rewards]
    assert [point["steps"] for point in written_results["combinations"]] == [["1"], ["1"], ["9"]]
