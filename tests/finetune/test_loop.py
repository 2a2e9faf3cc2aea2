"""The loop over epochs: what it does in which order, what it leaves, and that a crash anywhere costs nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gymdata.commands.finetune.epochs import EpochLoop
from gymdata.commands.finetune.plan import Judging
from gymdata.commands.finetune.selection import Source, select
from gymdata.curriculum import CurriculumConfig
from gymdata.errors import OutsideError, RefusedError, StoreError
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_run_json, read_table
from gymdata.store.lock import Lock
from tests.finetune.parts import SCORES, Adapter, Builder, Calls, Crash, Watched, plan
from tests.judge_server import Behaviour, judge_server
from tests.rollout_files import rollout, two_turns, write_run

pytestmark = pytest.mark.torch

CURRICULUM = {"enabled": True, "initial_percentile": 0.3, "increment_percentile": 0.4, "expansion_interval": 1}


@pytest.fixture(autouse=True)
def _one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run draws the same ID, so that the files of two can be compared."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "given")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return found


def loop(
    out: Path,
    calls: Calls | None = None,
    *,
    builder: Builder | None = None,
    adapter: Any = None,
    watched: Watched | None = None,
    **planned: Any,
) -> Any:
    """Run or resume the plan of ``parts.plan`` over its parts."""
    calls = calls or Calls()
    parts = builder or Builder(calls), adapter or Adapter(calls), watched or Watched()
    return EpochLoop().run(plan(out, calls, **planned), *parts)


def test_an_epoch_leaves_rollouts_selection_data_policy_and_figures(tmp_path: Path) -> None:
    """Two epochs of pairs: the curriculum grows, versions are recorded, and missing scores are no zeros."""
    calls, out = Calls(), tmp_path / "out"
    builder, adapter, watched = Builder(calls), Adapter(calls), Watched()
    validated = {"curriculum": CURRICULUM, "validation": Builder(calls), "kl": True}
    result = loop(out, calls, builder=builder, adapter=adapter, watched=watched, **validated)
    first, second = metrics(out)
    assert [order.policy_version for order in builder.orders] == [0, 1]
    assert [order.run_id for order in builder.orders] == ["given-epoch-001", "given-epoch-002"]
    assert [order.seed for order in builder.orders] == [1, 2]
    assert [job.model for job in adapter.jobs] == [tmp_path / "start", out / "epoch-001" / "policy"]
    assert (first["groups"], first["groups_selected"], second["groups_selected"]) == (5, 2, 3)
    assert first["groups_left_out"] == {"beyond the epoch's percentile": 2, "rewards too alike": 1}
    assert (first["rollouts"], first["unscored"]) == (20, 2)
    known = [score for scores in SCORES.values() for score in scores if score is not None]
    assert first["reward_mean"] == pytest.approx(sum(known) / len(known))
    assert (first["reward_min"], first["reward_max"]) == (0.0, 1.0)
    assert (first["kl_to_start"], second["kl_to_start"]) == (0.0, 0.5)
    assert [row["validation"] is None for row in (first, second)] == [True, False]
    assert second["curriculum"]["current_percentile"] == 0.7
    chosen = json.loads((out / "epoch-001" / "selection.json").read_text())
    assert chosen["curriculum"]["included_groups"] == ["easy", "even"]
    rows = read_table(out / "epoch-001" / "selected" / "rollouts.parquet")
    assert set(rows["task_id"].to_pylist()) == {"easy", "even"}
    pairs = read_table(out / "epoch-001" / "pairs" / "pairs.parquet", PAIRS)
    assert set(pairs["task_id"].to_pylist()) == {"easy", "even"}
    assert result["validation"]["first"]["epoch"] == 0
    assert result["validation"]["difference"]["n"] == 5
    assert [row["epoch"] for row in watched.rows] == [1, 2]
    assert state(out)["status"] == read_run_json(out)["status"] == "completed"


def test_a_crash_before_or_after_any_call_costs_nothing(tmp_path: Path) -> None:
    """Whatever call the process dies in, the same command ends with the same files, and finishes no call twice more than
    the one whose end nobody saw."""

    def run(out: Path, calls: Calls, adapter: Adapter) -> None:
        builder = Builder(calls, {"even": (1.0, 0.0)})
        loop(out, calls, builder=builder, adapter=adapter, validation=builder, kl=True)

    whole, calls = tmp_path / "whole" / "out", Calls()
    run(whole, calls, Adapter(calls))
    expected, total = facts_of(whole), calls.begun
    assert total == 11
    for at in range(total):
        for after in (False, True):
            out = tmp_path / f"{at}-{after}" / "out"
            calls = Calls(at=at, after=after)
            adapter = Adapter(calls)
            with pytest.raises(Crash):
                run(out, calls, adapter)
            assert state(out)["status"] == "running"
            run(out, calls, adapter)
            assert facts_of(out) == expected
            twice = {name: n for name, n in calls.done.items() if n > 1}
            assert len(twice) <= int(after), twice
            assert set(twice.values()) <= {2}


def facts_of(out: Path) -> dict[str, Any]:
    """What must not depend on when the loop was stopped."""
    found: dict[str, Any] = {"metrics": metrics(out)}
    for file in sorted(out.glob("epoch-*/selection.json")):
        found[str(file.relative_to(out))] = json.loads(file.read_text())
    for file in sorted(out.glob("epoch-*/*/*.parquet")):
        found[str(file.relative_to(out))] = pq.read_table(file).to_pylist()
    return found


def test_a_job_that_failed_ends_the_loop(tmp_path: Path) -> None:
    """It is the trainer's failure, exit code 3, and nothing says completed; the same command trains the epoch again."""
    calls, out = Calls(), tmp_path / "out"
    adapter = Adapter(calls, failures=[OutsideError("trainer", "out of memory")])
    with pytest.raises(OutsideError, match="out of memory") as caught:
        loop(out, calls, adapter=adapter)
    assert (caught.value.system, caught.value.exit_code) == ("trainer", 3)
    assert state(out)["status"] == "failed"
    assert "out of memory" in state(out)["failure"]
    assert state(out)["epochs"]["1"]["train"]["state"] == "failed"
    assert "completed" not in (out / "run.json").read_text()
    assert not (out / "result.json").exists()
    loop(out, calls, adapter=adapter)
    assert [(job.epoch, job.job_id) for job in adapter.jobs] == [
        (1, "given-epoch-001"),
        (1, "given-epoch-001"),
        (2, "given-epoch-002"),
    ]
    assert calls.done["epoch-001 rollouts"] == 1


def test_what_an_adapter_reports_is_shown(tmp_path: Path) -> None:
    """Counts and messages of a training go where those of the loop go."""
    watched = Watched()

    class Telling(Adapter):
        def train(self, job: Any, progress: Any) -> None:
            progress.message("job 7 is queued")
            progress.update(done=1, total=4, loss=0.5)
            super().train(job, progress)

    loop(tmp_path / "out", adapter=Telling(Calls()), watched=watched, num_epochs=1)
    assert watched.messages == ["job 7 is queued"]
    assert {"done": 1, "total": 4, "loss": 0.5} in watched.counts


def test_a_judge_in_the_place_of_rewards(tmp_path: Path) -> None:
    """With a generative judge the curriculum goes by its scores, pairs come of its comparisons, and reports name it."""
    calls, out = Calls(), tmp_path / "out"
    with judge_server(Behaviour()) as url:
        judging = Judging("fair", {"endpoint": url, "model": "judge", "retry_pause": 0.0})
        builder, curriculum = Builder(calls, judged=True), {"enabled": True, "initial_percentile": 1.0}
        loop(out, calls, builder=builder, judging=judging, num_epochs=1, validation=builder, curriculum=curriculum)
    folder, row = out / "epoch-001", metrics(out)[0]
    assert (row["unscored"], row["reward_min"], row["reward_max"]) == (0, 2.0, 3.0)
    assert row["groups_left_out"] == {"rewards too alike": 1}
    chosen = read_table(folder / "selected" / "rollouts.parquet")
    assert set(chosen["reward"].to_pylist()) == {2.0, 3.0}
    pairs = read_table(folder / "pairs" / "pairs.parquet", PAIRS)
    assert set(pairs["source"].to_pylist()) == {"genrm"}
    assert {Path(p["path"]).name for p in read_run_json(folder / "selected")["parents"]} == {"rollouts", "judge-fair"}
    assert row["validation"]["reward_mean"] > 2.0


def test_rollouts_of_another_policy_are_refused(tmp_path: Path) -> None:
    """What a builder gives has the version of the policy that is trained, or nothing is trained on it."""
    calls, out = Calls(), tmp_path / "out"
    adapter = Adapter(calls)

    class Behind(Builder):
        def collect(self, order: Any, progress: Any) -> None:
            super().collect(dataclasses.replace(order, policy_version=0), progress)

    with pytest.raises(RefusedError, match="epoch 2: rollouts of policy version 0, expected 1"):
        loop(out, calls, builder=Behind(calls), adapter=adapter)
    assert [job.epoch for job in adapter.jobs] == [1]


def test_two_groups_of_one_task_are_selected_whole(tmp_path: Path) -> None:
    """Each is judged by its own scores, and is copied with all its rollouts."""
    rewards = {"new": (0.0, 1.0), "old": (1.0, 1.0)}
    rows = [
        rollout("a", k, reward, two_turns(1, k), rollout_id=f"{name}-{k}", group_id=f"{name}-a", policy_version=0)
        for name, own in rewards.items()
        for k, reward in enumerate(own)
    ]
    run = write_run(tmp_path / "run", rows)
    (tmp_path / "epoch").mkdir()
    counts = select(Source(run), tmp_path / "epoch", 1, 0, CurriculumConfig(enabled=False))
    assert (counts["groups_selected"], counts["groups_learnable"], counts["rollouts_selected"]) == (2, 1, 4)
    assert set(json.loads((tmp_path / "epoch" / "selection.json").read_text())["groups"]) == {"a", "a#2"}
    copied = read_table(tmp_path / "epoch" / "selected", columns=["rollout_id"])["rollout_id"].to_pylist()
    assert copied == ["new-0", "new-1", "old-0", "old-1"]


def test_the_kl_coefficient_is_carried_over_epochs(tmp_path: Path) -> None:
    """Each epoch multiplies it by 1 + clip(KL/target − 1, ±0.2)·n/horizon; a loop that died goes on with the same one, and
    state.json, metrics.jsonl, result.json and run.json hold it."""
    names = [f"given-epoch-00{e}-{task}-{i}" for e in (1, 2, 3) for task in SCORES for i in range(4)]
    # The saved log-probs are those of tests.rollout_files; the reference is far away from them in the second epoch only.
    far = [[-9.0, -9.0] if "epoch-002" in name else [-0.5, -0.5] for name in names]
    pq.write_table(pa.table({"rollout_id": names, "ref_logprobs": far}), tmp_path / "columns.parquet")
    settings = {"kl_coef": 0.1, "kl_target": 0.5, "kl_horizon": 100, "token_columns": str(tmp_path / "columns.parquet")}

    def run(out: Path, calls: Calls, adapter: Adapter) -> dict[str, Any]:
        made = plan(out, calls, num_epochs=3)
        trainer = made.trainer.model_copy(update={"experience": settings})
        return EpochLoop().run(dataclasses.replace(made, trainer=trainer), Builder(calls), adapter, Watched())

    out = tmp_path / "whole"
    result = run(out, Calls(), Adapter(Calls(), "experiences"))
    rows = metrics(out)
    value = 0.1
    for row, epoch in zip(rows, (1, 2, 3), strict=True):
        made = read_run_json(out / f"epoch-00{epoch}" / "experiences")
        assert row["kl_coef"] == made["config"]["kl_coef"] == pytest.approx(value)
        assert row["kl_to_reference"] == made["kl"]["mean"]
        used = made["counts"]["rollouts_used"]
        value *= 1 + min(max(row["kl_to_reference"] / 0.5 - 1, -0.2), 0.2) * used / 100
        assert row["next_kl_coef"] == pytest.approx(value)
    assert rows[0]["next_kl_coef"] < 0.1
    assert rows[1]["next_kl_coef"] > rows[0]["next_kl_coef"]
    assert result["next_kl_coef"] == read_run_json(out)["next_kl_coef"] == rows[2]["next_kl_coef"]
    assert state(out)["epochs"]["2"]["data"]["result"]["next_kl_coef"] == rows[1]["next_kl_coef"]
    again, adapter = tmp_path / "again", Adapter(Calls(), "experiences")
    with pytest.raises(Crash):
        run(again, Calls(at=5), adapter)
    run(again, Calls(), adapter)
    assert metrics(again) == rows


def test_an_interrupted_loop_says_so_and_goes_on(tmp_path: Path) -> None:
    """Ctrl-C ends the loop as interrupted, with a line on how to resume; the same command resumes."""
    calls, out, watched = Calls(), tmp_path / "out", Watched()

    class Interrupted(Builder):
        def collect(self, order: Any, progress: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(out, calls, builder=Interrupted(calls), watched=watched)
    assert watched.messages == [f"{out}: stopped in epoch 1 (collect); rerun the same command to resume"]
    assert state(out)["status"] == state(out)["epochs"]["1"]["collect"]["state"] == "interrupted"
    loop(out, calls)
    assert state(out)["status"] == "completed"


def test_starting_again_removes_what_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--overwrite runs everything anew under a new run, and leaves a stranger's file where it is."""
    calls, out = Calls(), tmp_path / "out"
    loop(out, calls)
    (out / "notes.txt").write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "again")
    again = dataclasses.replace(plan(out, calls, num_epochs=1), overwrite=True)
    EpochLoop().run(again, Builder(calls), Adapter(calls), Watched())
    assert state(out)["run_id"] == "again"
    assert not (out / "epoch-002").exists()
    assert (out / "notes.txt").read_text() == "mine"


def test_an_epoch_with_nothing_to_learn_is_not_trained(tmp_path: Path) -> None:
    """Where all rewards agree the policy and its version stay, and the row says why; nothing scored is R501, not an epoch of
    zeros."""
    calls, out = Calls(), tmp_path / "out"
    adapter = Adapter(calls)
    loop(out, calls, builder=Builder(calls, {"solved": (1.0, 1.0)}), adapter=adapter)
    assert adapter.jobs == []
    why = "no selected group has rewards that differ"
    assert [(row["policy_version"], row["skipped"]) for row in metrics(out)] == [(0, why)] * 2
    with pytest.raises(RefusedError, match="R501"):
        loop(tmp_path / "unscored", calls, builder=Builder(calls, {"a": (None, None)}))


def test_more_epochs_go_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    """A finished run is done again at no cost and may grow; another input or owner is an error naming it."""
    calls, out = Calls(), tmp_path / "out"
    loop(out, calls, num_epochs=1)
    before, watched = calls.begun, Watched()
    loop(out, calls, watched=watched, num_epochs=1)
    assert (calls.begun, watched.stages, watched.rows) == (before, [], [])
    loop(out, calls, watched=watched, num_epochs=2)
    assert [row["epoch"] for row in metrics(out)] == [1, 2]
    assert {epoch for epoch, _ in watched.stages} == {2}
    with pytest.raises(StoreError, match="tasks: run has 'hash', now 'other'"):
        loop(out, calls, identity={"tasks": "other"})
    held = Lock(out)
    try:
        with pytest.raises(StoreError, match="another process"):
            loop(out, calls)
    finally:
        held.release()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"notes\.txt"):
        loop(tmp_path / "theirs", calls)
