"""A default is no measurement: what its writer masked, cancelled or failed is in no baseline, no pair and no training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.formats import imported as formats
from gymdata.rollouts.failures import SIGNALS
from gymdata.rollouts.schema import EXPERIENCES, PAIRS
from gymdata.store import read_failures, read_table
from gymdata.store.columns import to_rows
from tests.formats.failed_rows import COUNTED, FAILED, JUDGE, MASKED, ROW, Rewarded, nemo_gym, responding
from tests.formats.trajectories import lines, write
from tests.rollout_files import training_data

#: Rows of traces have ids that are not read, which their import says.
pytestmark = pytest.mark.filterwarnings("ignore::gymdata.store.reading.DataWarning")
#: What was sampled in the rows of a format with ids.
GENERATED = {"nemo-gym": [[11, 2]], "rllm": [[2], [4, 5]], "verifiers-traces": [[9], [9]]}


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row | {"extra": json.loads(row["extra"])} for row in to_rows(read_table(run))]


def four(folder: Path, name: str, rewarded: Rewarded, failed: dict[str, Any]) -> Path:
    """The run of rows with the rewards 1, none, 0 and 0, imported."""
    file = write(folder / "rows.jsonl", rewarded(1.0, 0), failed, rewarded(0.0, 2), rewarded(0.0, 3))
    gymdata.import_rollouts(file, folder / "run", source=name)
    return folder / "run"


@pytest.mark.parametrize("failed", [MASKED[0][2], FAILED[0][2]], ids=["masked", "failed"])
def test_rewards_of_1_none_0_and_0_are_centered_without_the_second(tmp_path: Path, failed: dict[str, Any]) -> None:
    """Through experience: 0.667, −0.333, −0.333 before scaling; through pairs: the others only."""
    run = four(tmp_path, "nemo-gym", nemo_gym, failed)
    counted = [row["rollout_id"] for row in rows_of(run) if row["reward"] is not None]
    gymdata.experience(run, tmp_path / "experience", estimator="reinforce_baseline")
    made = read_table(tmp_path / "experience", EXPERIENCES).to_pylist()
    assert [row["rollout_id"] for row in made] == counted
    assert [max(row["advantages"], key=abs) for row in made] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    gymdata.pairs(run, output=tmp_path / "pairs", strategy="all")
    pairs = read_table(tmp_path / "pairs", PAIRS).to_pylist()
    assert [(p["chosen_rollout_id"], p["rejected_rollout_id"]) for p in pairs] == [
        (counted[0], other) for other in counted[1:]
    ]


@pytest.mark.parametrize(("name", "rewarded", "masked", "kind", "reason"), MASKED, ids=[case[-1] for case in MASKED])
def test_what_its_writer_masked_or_cancelled_is_a_rollout_without_a_reward(
    tmp_path: Path, name: str, rewarded: Rewarded, masked: dict[str, Any], kind: str, reason: str
) -> None:
    """``extra.failure`` has kind and reason, the number stays in ``extra``, and no rewards have names."""
    row = rows_of(four(tmp_path, name, rewarded, masked))[1]
    assert (row["reward"], row["rewards"], row["extra"]["failure"]) == (None, {}, {"kind": kind, "reason": reason})
    assert row["extra"]["unscored"]["reward"] == 1.0


@pytest.mark.parametrize(("name", "rewarded", "failed", "kind", "reason"), FAILED, ids=[case[-1] for case in FAILED])
def test_an_attempt_that_failed_is_a_line_of_failures_and_never_a_row(
    tmp_path: Path, name: str, rewarded: Rewarded, failed: dict[str, Any], kind: str, reason: str
) -> None:
    """With what is at fault, why, and all that was sampled in it."""
    run = four(tmp_path, name, rewarded, failed)
    assert [row["reward"] for row in rows_of(run)] == [1.0, 0.0, 0.0]
    (attempt,) = read_failures(run)
    assert (attempt["kind"], attempt["message"]) == (kind, reason)
    generated = [turn["generation_token_ids"] for turn in attempt["turns"]]
    assert generated == GENERATED.get(name, [])
    assert not lines(run / "rejected.jsonl")


@pytest.mark.parametrize("name", COUNTED)
def test_a_reward_that_nothing_takes_back_stays(tmp_path: Path, name: str) -> None:
    """A limit, an error of an earlier try and fields that say false are no failure."""
    gymdata.import_rollouts(write(tmp_path / "rows.jsonl", *COUNTED[name]), tmp_path / "run", source=name)
    assert [row["reward"] for row in rows_of(tmp_path / "run")] == [1.0] * len(COUNTED[name])
    assert not read_failures(tmp_path / "run")


def test_an_incomplete_response_is_a_truncated_answer(tmp_path: Path) -> None:
    """By the response's status, or by that of the last item which the model wrote; a mask takes the reward all the same."""
    item = ROW["response"]["output"][0]
    rows = [
        responding(ROW, status="incomplete"),
        responding(ROW, output=[item | {"status": "incomplete"}]),
        responding(ROW, status="incomplete") | {"mask_sample": True},
        responding(ROW, output=[item | {"status": "incomplete"}, item]),
    ]
    gymdata.import_rollouts(write(tmp_path / "rows.jsonl", *rows), tmp_path / "run")
    ends = [(row["status"], row["finish_reason"], row["reward"]) for row in rows_of(tmp_path / "run")]
    cut = ("truncated", "length")
    assert ends == [(*cut, 1.0), (*cut, 1.0), (*cut, None), ("completed", "stop", 1.0)]


def test_a_masked_row_is_exported_with_its_number(tmp_path: Path) -> None:
    """And with its mask, so that it is masked again."""
    rows = [nemo_gym(1, 0) | {"mask_sample": True}, nemo_gym(0.5, 1) | {"instance_config": {"mask_sample": True}}]
    gymdata.import_rollouts(write(tmp_path / "rows.jsonl", *rows), tmp_path / "run")
    gymdata.export(tmp_path / "run", tmp_path / "back.jsonl", "nemo-gym")
    back = lines(tmp_path / "back.jsonl")
    assert [row["reward"] for row in back] == [1, 0.5]
    assert (back[0]["mask_sample"], back[1]["instance_config"]) == (True, {"mask_sample": True})


def masked_run(folder: Path) -> Path:
    """A group with the rewards 1, masked, cancelled, 0, 0, and a failed attempt."""
    rows = [
        nemo_gym(1.0, 0),
        nemo_gym(1.0, 1) | {"mask_sample": True},
        responding(nemo_gym(0.0, 2), status="cancelled"),
        nemo_gym(0.0, 3),
        nemo_gym(0.0, 4),
        nemo_gym(0.0, 5) | JUDGE,
    ]
    gymdata.import_rollouts(write(folder / "rows.jsonl", *rows), folder / "run")
    return folder / "run"


def test_every_summary_counts_them_by_reason(tmp_path: Path) -> None:
    """import, experience, pairs, report and validate; validate and experience also of the file itself."""
    masked = {"masked: mask_sample": 1, "cancelled: response.status cancelled": 1}
    failed = {"judge: judge_failed": 1}
    run = masked_run(tmp_path)
    again = gymdata.import_rollouts(tmp_path / "rows.jsonl", tmp_path / "again")
    assert (again.masked, again.failed, again.rows_in, again.without_reward) == (masked, failed, 6, 2)
    assert {"  judge: judge_failed", "  masked: mask_sample"} <= {name for name, _ in again.rows()}
    for source in (run, tmp_path / "rows.jsonl"):
        assert gymdata.experience(source, tmp_path / "out", overwrite=True).left_out == masked
    left_out = gymdata.pairs(run, output=tmp_path / "pairs").left_out
    assert {why: n for why, n in left_out.items() if n} == masked
    figures = gymdata.report(run, write=False)
    assert figures.to_dict()["masked"] == masked
    assert "masked: mask_sample 1" in figures.headline
    checked = gymdata.validate(run)
    assert (checked.masked, checked.by_code["R501"], checked.trainable) == (masked, 2, 3)
    unread = gymdata.validate(tmp_path / "rows.jsonl")
    assert (unread.masked, unread.trainable, unread.errors) == (masked | failed, 3, 0)


def test_a_later_score_changes_nothing(tmp_path: Path) -> None:
    """Scored again, a masked rollout is in no baseline, on no side of a pair, and not trained."""
    run = masked_run(tmp_path)
    masked = {row["rollout_id"] for row in rows_of(run) if row["reward"] is None}

    def position(completion: list[dict[str, str]]) -> float:
        return float(completion[-1]["content"])

    gymdata.score(run, reward=[position], name="position")
    gymdata.experience(run, tmp_path / "experience", reward="position", estimator="reinforce_baseline")
    made = read_table(tmp_path / "experience", EXPERIENCES).to_pylist()
    assert sorted(max(row["advantages"], key=abs) for row in made) == pytest.approx([-7 / 3, 2 / 3, 5 / 3])
    gymdata.pairs(run, output=tmp_path / "pairs", reward="position", strategy="all")
    pairs = read_table(tmp_path / "pairs", PAIRS)
    sides = set(pairs["chosen_rollout_id"].to_pylist() + pairs["rejected_rollout_id"].to_pylist())
    assert len(sides) == 3
    for algorithm, settings in (("sft", {"select": "above"}), ("sft", {"select": "all"}), ("kto", {})):
        data = training_data(algorithm, run, reward="position", **settings)
        assert masked.isdisjoint(data.rollout_ids)
        assert len(set(data.rollout_ids)) == 3
    # Also without any score; how many is counted.
    assert training_data("sft", run, select="all").counts["left_out_masked"] == 2


@pytest.mark.parametrize("files", ["rollouts.jsonl", "rollouts*.jsonl"])
def test_the_failures_that_nemo_gym_writes_beside_a_file_are_read_as_failures(tmp_path: Path, files: str) -> None:
    """Named or in a glob, whatever their rows say; a failed attempt and its retry have one index."""
    write(tmp_path / "rollouts.jsonl", nemo_gym(1.0, 4), nemo_gym(0.0, 5) | {"_ng_attempt_index": 1})
    without_response = {name: value for name, value in nemo_gym(0.0, 6).items() if name != "response"}
    beside = [nemo_gym(0.0, 5) | JUDGE | {"_ng_attempt_index": 0}, nemo_gym(1.0, 7), without_response]
    write(tmp_path / "rollouts_failures.jsonl", *beside)
    summary = gymdata.import_rollouts(str(tmp_path / files), tmp_path / "run")
    assert [(row["rollout_index"], row["reward"]) for row in rows_of(tmp_path / "run")] == [(4, 1.0), (5, 0.0)]
    attempts = [(attempt["rollout_index"], attempt["attempt"]) for attempt in read_failures(tmp_path / "run")]
    assert attempts == [(5, 0), (7, None), (6, None)]
    assert (summary.rows_in, sum(summary.failed.values()), summary.rejected) == (5, 3, 0)


def test_importing_again_adds_no_failure(tmp_path: Path) -> None:
    """The same command leaves the same run."""
    run = masked_run(tmp_path)
    before = [row["rollout_id"] for row in rows_of(run)], read_failures(run)
    gymdata.import_rollouts(tmp_path / "rows.jsonl", run)
    assert ([row["rollout_id"] for row in rows_of(run)], read_failures(run)) == before


def test_each_format_says_by_which_field_a_row_failed_or_that_it_has_none() -> None:
    """In the table of formats; a name in the table of signals is one of a format."""
    page = (Path(gymdata.__file__).parent / "docs/your-data.md").read_text()
    table = [row.split("|") for row in page.partition("<!-- end of imports -->")[0].splitlines()]
    cells = {row[1].strip(" `"): row[6].strip() for row in table if len(row) > 6}
    of_rollouts = [name for name, form in formats().items() if form.table == "rollouts"]
    assert SIGNALS.keys() <= set(of_rollouts)
    assert Counter(cells[name] == "no field" for name in of_rollouts) == {
        True: len(of_rollouts) - len(SIGNALS),
        False: len(SIGNALS),
    }
