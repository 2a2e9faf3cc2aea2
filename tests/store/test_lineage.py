"""Which score of a rollout counts."""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.schema import SCORES
from gymdata.scores.chosen import scores_of
from gymdata.store import Run, find_run_json, read_run_json, write_run_json
from gymdata.store.lineage import keys_of, lineage, parent_of, refuse_repeats, refuse_replaced
from tests.rollout_files import rollout, rollouts_table, two_turns, write_run, write_table


def test_the_last_score_of_a_rollout_counts(tmp_path: Path) -> None:
    """Of several rows of a re-scoring the last one counts, in the rollouts' order; a rollout without one has no score."""
    run = write_run(tmp_path / "run", [rollout("t", index, 1.0, two_turns(1, 2 + index)) for index in range(3)])
    rows = [
        {"rollout_id": name, "name": "later", "value": value, "status": "scored", "source": "f", "run_id": "run-1",
         "detail": None}
        for name, value in (("t-2", 0.25), ("t-0", 0.5), ("t-2", None), ("t-0", 0.75), ("elsewhere-0", 1.0))
    ]  # fmt: skip
    write_table(pa.Table.from_pylist(rows, schema=SCORES.schema), run / "scores-later/scores.parquet", SCORES)
    write_run_json(run / "scores-later", {"stage": "score"})
    table = rollouts_table([rollout("t", index, 1.0, two_turns(1, 2 + index)) for index in (2, 0, 1)])
    _, values, files = scores_of([run], table, "later")
    assert values.to_pylist() == [None, 0.75, None]
    assert [path.name for path in files] == ["scores-later"]


def test_keys_of_ids_do_not_depend_on_chunks() -> None:
    """Equal ids have equal keys, wherever they stand, and other ids other ones."""
    ids = pa.chunked_array([["a", "b"], ["a", "a much longer id than the others"]])
    keys = keys_of(ids)
    assert keys.dtype == np.uint64
    assert keys[0] == keys[2] == keys_of(pa.array(["x", "a"]).slice(1))[0]
    assert len(set(keys.tolist())) == 3
    assert len(keys_of(pa.chunked_array([], pa.string()))) == 0


def test_equal_keys_are_not_equal_ids() -> None:
    """Rollouts are refused as doubles by their ids, and not because two ids share a key."""
    ids = pa.array(["a", "b", "c", "grown"])
    refuse_repeats(np.full(3, 7, np.uint64), [ids.slice(0, 2), ids.slice(2)], [])
    with pytest.raises(RefusedError, match="1 rollout"):
        refuse_repeats(np.array([7, 8, 7], np.uint64), [pa.array(["a", "b"]), pa.array(["a", "a"])], [])


def test_the_hint_of_a_repeated_rollout_is_a_command_that_lists_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one path and of several; a file that is given twice is named."""
    rows = [rollout("t", k, float(k), two_turns(4, 20 + k)) for k in range(2)]
    one, both = write_run(tmp_path / "one", rows), write_run(tmp_path / "its twin", [rows[0], rows[0], rows[1]])
    for given in ([both], [one, both]):
        with pytest.raises(RefusedError) as caught:
            gymdata.pairs(given, output=tmp_path / "p")
        assert caught.value.hint is not None
        command = shlex.split(caught.value.hint.split("`")[1])
        assert command[0] == "gymdata"
        main(command[1:])
        assert "t-0" in capsys.readouterr().out
    with pytest.raises(RefusedError, match=r"part-00000\.parquet is given twice"):
        gymdata.filter([one, one], tmp_path / "f", where="reward > 0")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_reward_that_is_no_finite_number_is_no_reward_for_every_command(tmp_path: Path, suffix: str) -> None:
    """Null, NaN and both infinities count as not scored: in filter, pairs, experience and report alike."""
    rewards = [0.0, 1.0, None, math.nan, math.inf, -math.inf]
    run = write_run(tmp_path / "run", [rollout("t", k, r, two_turns(4, 20 + k)) for k, r in enumerate(rewards)], suffix)

    def kept(**conditions: str) -> int:
        return gymdata.filter(run, write=False, **conditions).rollouts_out

    assert kept(where="reward is null") == kept(where="reward_exact is null") == 4
    assert kept(where="reward >= 0") == 2
    assert kept(group_where="n_scored == 2 and max_reward == 1") == 6
    for reward in (None, "exact"):
        out = tmp_path / f"pairs-{reward}"
        assert gymdata.pairs(run, output=out, reward=reward).counts.rollouts_unscored == 4
        assert gymdata.experience(run, tmp_path / f"x-{reward}", reward=reward).left_out == {"not_scored": 4}
    assert gymdata.report(run).to_dict()["rewards"]["n"] == 2


def test_the_hint_for_a_score_without_values_names_only_scores_with_values(tmp_path: Path) -> None:
    """A re-scoring that failed for every rollout is never recommended, and its most common reason is given."""
    run = write_run(tmp_path / "run", [rollout("t", k, None, two_turns(4, 20 + k)) for k in range(3)])

    def rescored(name: str, values: list[float | None], details: list[str | None]) -> None:
        rows = [
            {"rollout_id": f"t-{k}", "name": name, "value": value, "status": "scored" if value is not None else "failed",
             "source": "f", "run_id": "run-1", "detail": detail}
            for k, (value, detail) in enumerate(zip(values, details, strict=True))
        ]  # fmt: skip
        write_table(pa.Table.from_pylist(rows, schema=SCORES.schema), run / f"scores-{name}/scores.parquet", SCORES)
        write_run_json(run / f"scores-{name}", {"stage": "score"})

    rescored("boom", [None] * 3, ["rare", "division by zero", "division by zero"])
    for make in (gymdata.pairs, gymdata.experience):
        with pytest.raises(RefusedError, match=r"then choose that score: --reward NAME; .*boom"):
            make(run, reward="boom")
    rescored("other", [None] * 3, [None] * 3)
    rescored("good", [None, 1.0, math.nan], ["late", None, None])
    with pytest.raises(RefusedError, match=r"--reward good; boom has no value.*, most often: division by zero$"):
        gymdata.pairs(run, reward="boom")
    with pytest.raises(RefusedError, match=r"--reward good; boom has no value.*, most often: division by zero$"):
        gymdata.experience(run, reward="boom")


def collected(folder: Path, rewards: tuple[float, ...], ids: int) -> Path:
    """A run called "same" whose rollouts have these rewards, and token ids from ``ids`` on."""
    shutil.rmtree(folder, ignore_errors=True)
    with Run.open(folder, identity={}, extent={}, operation={}, run_id="same", facts={"stage": "collect"}) as run:
        for index, reward in enumerate(rewards):
            run.append(rollout("t", index, reward, two_turns(4, ids + index)))
    return folder


def test_what_was_made_of_overwritten_rollouts_is_refused(tmp_path: Path) -> None:
    """The run has the same ID and the same rollout IDs, and other tokens: the error names the file with both hashes."""
    run = collected(tmp_path / "run", (0.0, 1.0), 20)
    was = read_run_json(run)["files"][0]["xxh3"]
    gymdata.pairs(run, output=tmp_path / "pairs")
    audited = {"stage": "audit", "parents": [parent_of(run)]}
    write_run_json(tmp_path / "audit", audited)
    (tmp_path / "audit" / "audit.parquet").touch()
    refuse_replaced(tmp_path / "pairs")
    collected(run, (0.0, 1.0), 40)
    now = read_run_json(run)["files"][0]["xxh3"]
    with pytest.raises(DataError, match=rf"part-00000\.parquet was {was}, and is {now} now"):
        refuse_replaced(tmp_path / "pairs")
    moved = run.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="made from rollouts that were overwritten"):
        gymdata.experience(moved, estimator="grpo", token_columns=tmp_path / "audit" / "audit.parquet")
    moved.rename(run)
    assert {one.path: one.state for one in gymdata.ls(tmp_path).outputs}["pairs"] == "parents changed"


@pytest.mark.parametrize("pattern", ["*", "*/rollouts/*.parquet"])
def test_every_run_that_a_glob_matches_is_a_parent(pattern: str, tmp_path: Path) -> None:
    """The parents, the settings that all runs share, and what leads back are those of all runs and not of the first."""
    for name, settings in (("a", {"temperature": 1.0, "top_k": 0}), ("b", {"temperature": 1.0, "top_k": 20})):
        with Run.open(tmp_path / "runs" / name, identity=settings, extent={}, operation={}) as run:
            for index in range(2):
                run.append(rollout(f"t-{name}", index, float(index), two_turns(1 + index, 20)))
    sources = str(tmp_path / "runs" / pattern)
    gymdata.filter(sources, where="reward >= 0", output=tmp_path / "kept")
    run_ids = [read_run_json(tmp_path / "runs" / name)["run_id"] for name in ("a", "b")]
    facts = read_run_json(tmp_path / "kept" / "rollouts.parquet")
    assert [parent["run_id"] for parent in facts["parents"]] == run_ids
    assert facts["identity"] == {"temperature": 1.0}
    for path in (sources, tmp_path / "kept" / "rollouts.parquet"):
        assert [run["run_id"] for run in lineage(path) if run.get("run_id")] == run_ids
    assert find_run_json(sources) is None
    assert [output.state for output in gymdata.ls(tmp_path).outputs] == ["complete"] * 3


def test_a_run_that_grew_has_its_earlier_rollouts(tmp_path: Path) -> None:
    """What was made from them stays good: sealed files do not change."""
    run = collected(tmp_path / "run", (0.0, 1.0), 20)
    gymdata.pairs(run, output=tmp_path / "pairs")
    with Run.open(run, identity={}, extent={}, operation={}) as grown:
        grown.append(rollout("t", 2, 1.0, two_turns(4, 50)))
    refuse_replaced(tmp_path / "pairs")
    assert {one.path: one.state for one in gymdata.ls(tmp_path).outputs}["pairs"] == "complete"


def test_a_single_file_says_what_it_does_not_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows have their temperature and policy; that it has no run.json with the other settings is said by whoever
    writes it. In the folder of its run it has that of the run, and in another's it is refused."""
    run, other = (
        write_run(tmp_path / name, [rollout("t", k, float(k), [([1, 5], [40 + k, 2])], text=f"{k}") for k in range(2)])
        for name in ("run", "other")
    )
    facts = read_run_json(run)
    write_run_json(run, {**facts, "identity": {"top_p": 0.9, "tokenizer_hash": "abc", "temperature": 1.0}})
    command = ["validate", str(run), "--fix", "drop", "-o"]
    written = set()
    for place in (tmp_path / "made", run):
        file = place / "fixed.parquet"
        assert main([*command, str(file)]) == 0
        said = " ".join("".join(capsys.readouterr()).split())
        told = f"{file} is a single file, without a run.json: how its rollouts were sampled (top_p 0.9: L304)"
        assert (told in said) == (place != run)
        assert find_run_json(file) == (run / "run.json" if place == run else None)
        written.add(file.read_bytes())
    assert len(written) == 1
    assert main([*command, str(other / "x.parquet"), "--overwrite"]) == 2
    assert f"{other / 'run.json'} would count as its run.json" in " ".join(capsys.readouterr().err.split())
    assert not (other / "x.parquet").exists()
