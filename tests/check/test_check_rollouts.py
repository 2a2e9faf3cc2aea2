"""``gymdata check DUMP``: one answer to "can it be trained", of own files and of other projects', with nothing written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.check.rollouts import check_rollouts
from gymdata.store.lines import encode
from tests.formats.published_rows import rllm
from tests.rollout_files import Calls, rollout, write_run

ROLLOUTS = Path(__file__).parents[2] / "sample_data" / "rollouts"
Capture = pytest.CaptureFixture[str]


def one_turn(task: int, answer: int) -> Calls:
    return [([1, task], [10, answer, 2])]


def lines_file(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(encode(row) + b"\n" for row in rows))
    return path


def test_sound_rollouts_can_be_trained(capsys: Capture) -> None:
    """Exit code 0, the figures of ``validate``, and every trainer can use all of them."""
    assert main(["check", str(ROLLOUTS / "clean.jsonl"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "yes: 24 of 24 rollouts can be trained as they were sampled"
    assert (shown["rollouts"], shown["tokens"], shown["trainable"]) == (24, 1598, 24)
    assert (shown["log_probs"], shown["breaks"], shown["failures"]) == ("plausible", {}, {})
    assert shown["groups"] == {"n": 8, "of_several": 8, "without_signal": 0}
    assert {use["rollouts"] for use in shown["trainers"].values()} == {24}


def test_broken_rollouts_are_wrong_to_train(capsys: Capture) -> None:
    """Exit code 1; the text has the verdict, breaks by cause, the three worst findings with line and page, and no more."""
    assert main(["check", str(ROLLOUTS / "broken.jsonl")]) == 1
    shown = capsys.readouterr().out
    assert "no: none of 14 rollouts has sampled token ids and no error" in shown
    assert "T200 break" in shown
    assert "broken.jsonl line 1, turn 0" in shown
    assert shown.count("gymdata validate --explain") == 3
    assert len(shown.splitlines()) <= 30


def test_a_part_with_errors_is_counted_by_trainer(tmp_path: Path) -> None:
    """Rollouts of groups that differ in reward are pairs and advantages; a group without does not count there."""
    rows = [rollout("a", k, float(k), one_turn(5, 20 + k)) for k in range(2)]
    rows += [rollout("b", k, 1.0, one_turn(6, 20 + k)) for k in range(2)]
    rows += [rollout("c", 0, None, one_turn(7, 22))]
    report = check_rollouts(write_run(tmp_path / "run", rows))
    usable = {use.trainer: use.rollouts for use in report.trainers}
    assert usable == {"train-sft": 5, "train-dpo, train-reward": 2, "train-kto": 2, "train-value": 4, "train-rl": 2}
    assert report.groups == {"n": 3, "of_several": 2, "without_signal": 1}
    assert report.ok


def test_rows_with_errors_alone_cannot_be_trained(tmp_path: Path) -> None:
    """Also where rows have no name of their own, as those of NeMo Gym, and where two have the same one."""
    rows = [json.loads(line) for line in (ROLLOUTS / "nemo_gym.jsonl").read_text().splitlines()]
    rows[1]["reward"] = float("nan")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    twice = write_run(tmp_path / "run", [rollout("a", k, float(k), one_turn(5, 20)) for k in (0, 1, 1)])
    for path, n in ((tmp_path / "a.jsonl", 23), (twice, 2)):
        report = check_rollouts(path)
        assert (report.trainers[0].rollouts, report.validation.trainable, report.ok) == (n, n, False)


def test_a_foreign_dump_is_read_as_it_is(tmp_path: Path, capsys: Capture) -> None:
    """Another project's file needs no import, findings name its lines, and nothing is written beside it."""
    bad = rllm(2)
    bad["trajectories"][0]["steps"][1]["logprobs"] = [0.25, -1.5]
    dump = lines_file(tmp_path / "episodes.jsonl", [rllm(1), bad])
    assert main(["check", str(dump), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["format"], shown["trainable"]) == ("rllm", 1)
    assert shown["verdict"].startswith("not as it is: 1 of 2")
    worst = shown["findings"][0]
    assert (worst["code"], worst["where"]) == ("L303", f"{dump} line 2, turn 1, position 0")
    assert worst["page"] == "gymdata validate --explain L303"
    assert [path.name for path in tmp_path.iterdir()] == ["episodes.jsonl"]


def test_a_finding_names_the_file_and_the_sample_of_a_dump(tmp_path: Path) -> None:
    """Files of a glob have equal names, and a pickle has many samples in one value."""
    sound = {"tokens": [5, 6, 7], "response_length": 1, "reward": 1.0, "rollout_log_probs": [-0.5]}
    for step, ids in enumerate(([5, 6, 8], [5, 6, -3])):
        dump = tmp_path / str(step) / "dump.pt"
        dump.parent.mkdir()
        dump.write_bytes(pickle.dumps({"rollout_id": step, "samples": [sound, sound | {"tokens": ids}]}))
    (finding,) = [f for f in check_rollouts(f"{tmp_path}/*/dump.pt").findings if f.code == "T206"]
    assert finding.where == f"{tmp_path}/1/dump.pt line 1, samples[1], turn 0, position 0"


def test_the_twin_of_a_rollout_is_named_by_its_place_in_the_dump(tmp_path: Path) -> None:
    """A duplicate (D701), and one of the same tokens (D702), of which the temporary import has only a row and an id."""
    files = [
        lines_file(tmp_path / f"{k}.jsonl", rows) for k, rows in enumerate(([rllm(1), [rllm(2), rllm(3)]], [rllm(3)]))
    ]
    details = {f.code: (f.where, f.detail) for f in check_rollouts(f"{tmp_path}/*.jsonl").findings}
    assert details["D701"] == (f"{files[1]} line 1", f"first seen at {files[0]} line 2, row 1")
    assert details["D702"] == (f"{files[0]} line 2, row 0", f"same tokens as {files[0]} line 1")


def test_other_findings_are_listed_where_validate_reads(tmp_path: Path, capsys: Capture) -> None:
    """`validate` reads no dump of another project before it is imported."""
    sound = {"tokens": [5, 6, 7], "response_length": 1, "rollout_log_probs": [-0.5]}
    bad = [{"tokens": [5, 6, -3]}, {"rollout_log_probs": [0.5]}, {"rollout_log_probs": []}, {"response_length": 9}]
    dump = tmp_path / "dump.pt"
    dump.write_bytes(pickle.dumps({"rollout_id": 0, "samples": [sound | more for more in bad]}))
    assert main(["check", str(dump)]) == 1
    assert "after import, `gymdata validate RUN` lists rows, --json codes" in capsys.readouterr().out
    assert main(["check", str(ROLLOUTS / "broken.jsonl")]) == 1
    assert "findings: `gymdata validate` lists rows, --json codes" in capsys.readouterr().out


def test_rows_that_import_rejects_are_errors(tmp_path: Path, capsys: Capture) -> None:
    """With the reason and the line of the first; failed attempts are failures by their reason, and no errors."""
    bad = rllm(2)
    bad["trajectories"][0]["steps"][1]["logprobs"] = [-1.5]
    failed = rllm(3) | {"termination_reason": "error", "info": {"error": {"type": "ValueError", "message": "odd"}}}
    dump = lines_file(tmp_path / "episodes.jsonl", [rllm(1), failed, bad])
    assert main(["check", str(dump), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["rejected"] == {"L301": 1}
    assert shown["failures"] == {"environment: error": 1}
    assert shown["findings"][0]["where"] == f"{dump} line 3"
    assert check_rollouts(lines_file(tmp_path / "good.jsonl", [rllm(1), failed])).ok


def test_log_probs_that_no_sampler_gave_are_wrong_for_ratios(tmp_path: Path) -> None:
    """Whole numbers (L306) are exit code 1; trainers without ratios can use the rollouts, train-rl cannot."""
    rows = [rollout("a", k, float(k), [([1, 2], [5 + k] * 40)]) for k in range(2)]
    report = check_rollouts(write_run(tmp_path / "run", rows))
    usable = {use.trainer: use.rollouts for use in report.trainers}
    assert report.log_probs.startswith("cannot be a sampler's (L306)")
    assert (usable["train-sft"], usable["train-rl"], report.ok) == (2, 0, False)


def test_text_alone_is_trained_as_text(tmp_path: Path) -> None:
    """A data set without token ids is no fault; the verdict says what makes its ids."""
    rows = [{"prompt": "1+1?", "completion": "2"}, {"prompt": "1+2?", "completion": "3"}]
    report = check_rollouts(lines_file(tmp_path / "text.jsonl", rows))
    assert report.verdict == "only as text: 2 rollouts without token ids, which `-m` renders (T213)"
    assert report.ok


def test_preferences_as_text_are_pairs_as_text(tmp_path: Path) -> None:
    """Their table has the trainers of pairs, and what makes their ids."""
    rows = [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}]
    report = check_rollouts(lines_file(tmp_path / "pairs.jsonl", rows))
    assert report.verdict == "only as text: 1 pair without token ids, which `-m` renders (T213)"
    assert [use.why for use in report.trainers] == ["and 1 as text: -m renders their ids (T213)"]


def test_pairs_are_for_dpo(tmp_path: Path) -> None:
    """Pairs of a stage folder have the trainers of pairs alone."""
    run = write_run(tmp_path / "run", [rollout("a", k, float(k), one_turn(5, 20 + k)) for k in range(2)])
    gymdata.pairs(run, output=tmp_path / "pairs")
    report = check_rollouts(tmp_path / "pairs")
    assert report.verdict == "yes: 1 of 1 pairs can be trained as they were sampled"
    assert [use.trainer for use in report.trainers] == ["train-dpo, train-reward"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_files_of_a_run_are_read_alone(tmp_path: Path, suffix: str) -> None:
    """Parquet, JSON lines, a glob and the folder give the same figures."""
    rows = [rollout("a", k, float(k), one_turn(5, 20 + k)) for k in range(2)]
    run = write_run(tmp_path / "run", rows, suffix)
    reports = [check_rollouts(path) for path in (run, f"{run}/rollouts/*.{suffix}")]
    assert {tuple(report.trainers) for report in reports} == {tuple(reports[0].trainers)}


def test_tasks_are_no_rollouts(capsys: Capture) -> None:
    """A file of tasks is refused by name, as every reader of rollouts does."""
    assert main(["check", str(ROLLOUTS.parent / "tasks" / "train.jsonl")]) == 2
    assert "tasks" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_no_model(capsys: Capture) -> None:
    """Its suffix says that rollouts were meant."""
    for name in ("nowhere.jsonl", "nowhere.pt", "nowhere.dp", "nowhere.pkl"):
        assert main(["check", name]) == 2
        assert f"{name}: no such file or folder (expected a run folder, a file or a glob)" in capsys.readouterr().err


def test_an_empty_file_has_no_verdict(tmp_path: Path, capsys: Capture) -> None:
    """It is refused as `import` refuses it."""
    (tmp_path / "dump.pt").touch()
    assert main(["check", str(tmp_path / "dump.pt")]) == 2
    assert f"{tmp_path / 'dump.pt'}: is empty (expected rollouts or pairs)" in capsys.readouterr().err


def test_a_folder_of_dumps_is_given_as_a_glob(tmp_path: Path, capsys: Capture) -> None:
    """The error has the glob that names the files."""
    (tmp_path / "3" / "0").mkdir(parents=True)
    (tmp_path / "3" / "0" / "tq_batch.pt").touch()
    assert main(["check", str(tmp_path)]) == 2
    assert f"give its files as a glob: '{tmp_path}/*/*/tq_batch.pt'" in capsys.readouterr().err


@pytest.mark.tokenizer
def test_a_model_bounds_the_ids_of_a_dump_and_renders_its_text(tmp_path: Path, policy: Path, capsys: Capture) -> None:
    """With -m: an id beyond the model's vocabulary is T206 at its place, in own files and dumps; a row of text is rendered
    (T213), as `import -m` does. A second model is refused."""
    whole, wide, text = rllm(4), rllm(4), rllm(4)
    wide["trajectories"][0]["steps"][1]["response_ids"] = [4, 99_999]
    for step in text["trajectories"][0]["steps"]:
        step |= {"prompt_ids": [], "response_ids": [], "logprobs": []}
    file = lines_file(tmp_path / "a.jsonl", [whole, wide, text])
    assert main(["check", str(file), "-m", str(policy), "--json"]) == 1
    found = {f["code"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert (found["T206"]["times"], found["T206"]["where"]) == (1, f"{file} line 2, turn 1, position 1")
    assert found["T213"]["where"].startswith(f"{file} line 3, turn ")
    assert "T206" not in {finding.code for finding in check_rollouts(file).findings}
    run = write_run(tmp_path / "run", [rollout("a", 0, 1.0, one_turn(5, 99_999))])
    assert [f.code for f in check_rollouts(run, model=str(policy)).findings if f.severity == "error"] == ["T206"]
    capsys.readouterr()
    assert main(["check", str(policy), "-m", str(policy)]) == 2
    assert f"model: given twice: {policy} and {policy}" in capsys.readouterr().err
