"""``import`` and ``export`` write the same bytes and say the same with one process and with several."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sample_data
from gymdata.cli.main import main
from gymdata.interop.run import import_rollouts
from gymdata.pairs.run import pairs
from gymdata.store import read_table, run
from tests.validate.generate import nemo_rows, with_ids, write_lines
from tests.workers import inputs

#: Facts of run.json that tell when and by which command it was made.
TOLD = {"attempts", "command", "created_at", "ended_at", "started_at"}


def content(folder: Path) -> dict[str, Any]:
    """Every file, byte for byte; of run.json what does not tell the time."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        if file.name.endswith("run.json"):
            facts = json.loads(file.read_bytes())
            found[file.name] = {key: value for key, value in facts.items() if key not in TOLD}
        elif file.is_file() and not file.name.endswith((".lock", ".log")):
            found[str(file.relative_to(folder))] = file.read_bytes()
    return found


def made(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[Any, ...]:
    """Exit code, what was printed, and the files of a command that writes into ``folder``, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    # How often progress is shown before its end depends on the machine.
    shown = re.sub(r"^\w+ ([\d,]+)/(?!\1\b)[\d,]+.*\n", "", err, flags=re.MULTILINE)
    return code, out, shown, content(folder)


def gym_lines(folder: Path) -> list[str]:
    return [str(inputs.write_nemo(folder / "gym.jsonl", inputs.nemo()))]


def gym_files(folder: Path) -> list[str]:
    """Several files, plain and compressed, with rows that are in more than one; ids of their own, tasks and no rewards."""
    rows = inputs.nemo()
    for k, row in enumerate(rows[::3]):
        row.update(rollout_id=f"own-{k // 2}", task_id=f"task-{k % 4}")
    a = inputs.write_nemo(folder / "a.jsonl", rows[:40])
    return [str(inputs.compressed(a)), str(inputs.write_nemo(folder / "b.jsonl", rows[20:])), str(a)]


def unfit_rows(folder: Path) -> list[str]:
    """A row that no column can hold: all are tried alone, and that one is rejected."""
    rows = nemo_rows(40)
    rows[25]["response"]["created_at"] = 1.5
    rows[31]["responses_create_params"]["input"][1]["content"] = {"odd": [1, {"deep": None}]}
    lines = [json.dumps(row) for row in rows]
    lines[33] = lines[33].replace('"q16"', '"\\ud800"')
    return [str(write_lines(folder / "gym.jsonl", lines))]


def trajectories(folder: Path) -> list[str]:
    """Another format, which one process reads whatever is given."""
    inputs.write_parts(folder / "run", [inputs.native(20)])
    assert main(["export", str(folder / "run"), "--format", "atif", "-o", str(folder / "atif.jsonl")]) == 0
    return [str(folder / "atif.jsonl")]


@pytest.mark.matrix("gym_lines", "unfit_rows")
@pytest.mark.parametrize("shape", [gym_lines, gym_files, unfit_rows, trajectories], ids=lambda s: s.__name__)
def test_an_import_is_the_same(
    shape: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows, ids, groups, rejected lines, counts, messages and exit code; in Parquet and in JSON lines."""
    inputs.in_small_batches(monkeypatch)
    files, output = shape(tmp_path), tmp_path / "out"
    capsys.readouterr()
    words = ["import", *files, "--run-id", "run", "-o", str(output / "run")]
    one = made(capsys, output, *words)
    assert json.loads(one[1])["rollouts"] > 10
    assert made(capsys, output, *words, "--workers", "2") == one
    as_lines = made(capsys, output, *words, "--format", "jsonl")
    assert made(capsys, output, *words, "--format", "jsonl", "--workers", "3") == as_lines


def test_files_of_a_run_end_at_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of several files, and one that was stopped after the first of them and is resumed, by either."""
    inputs.in_small_batches(monkeypatch)
    monkeypatch.setattr(run, "PART_TOKENS", 700)
    (file,) = gym_lines(tmp_path)
    for workers in (1, 2):
        import_rollouts(file, tmp_path / str(workers), run_id="run", workers=workers)
    one = content(tmp_path / "1")
    assert len([name for name in one if name.startswith("rollouts")]) == 3
    assert content(tmp_path / "2") == one
    # What a kill between the first file and the second leaves.
    stopped = tmp_path / "2"
    facts = json.loads((stopped / "run.json").read_bytes())
    for part in facts["files"][1:]:
        (stopped / part["path"]).unlink()
    facts["files"] = facts["files"][:1]
    (stopped / "run.json").write_text(json.dumps(facts))
    import_rollouts(file, stopped, run_id="run", workers=2)
    assert content(stopped) == one


@pytest.mark.torch
def test_prompts_are_rebuilt_by_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each worker loads the tokenizer; what cannot be rebuilt is named with its line and rollout."""
    inputs.in_small_batches(monkeypatch)
    rows = nemo_rows(20)
    for row in rows[3::4]:
        with_ids(row, 2).pop("prompt_token_ids")
    file, output = write_lines(tmp_path / "gym.jsonl", rows), tmp_path / "out"
    policy = str(Path(sample_data.__file__).parent / "policy")
    words = ["import", str(file), "--run-id", "run", "-o", str(output / "run"), "--tokenizer", policy]
    one = made(capsys, output, *words)
    assert json.loads(one[1])["prompts_refused"] == 5
    assert made(capsys, output, *words, "--workers", "2") == one


def parts(folder: Path) -> str:
    """Files with many row groups, an empty one, a journal with a torn end."""
    rows = inputs.native(60)
    for row in rows:
        row["messages"][1]["content"] = "what is \x00\u00e9 \U0001f600"
    return str(inputs.write_parts(folder / "run", [rows[:30], [], rows[30:50]], rows[50:], torn=10))


def imported(folder: Path) -> str:
    """What an import keeps of its source goes back into it."""
    import_rollouts(write_lines(folder / "gym.jsonl", nemo_rows(60)), folder / "run", run_id="run")
    return str(folder / "run")


def of_lines(folder: Path) -> str:
    """NeMo Gym rows and rows of ours, which no import has read."""
    write_lines(folder / "a.jsonl", nemo_rows(20))
    inputs.write_text(folder / "b.jsonl", inputs.lines_of(inputs.native(20)))
    return str(folder / "*.jsonl")


def of_pairs(folder: Path) -> str:
    run = inputs.write_parts(folder / "run", [inputs.scored(60)])
    pairs(run)
    return str(run)


FORMATS = [
    (parts, "nemo-gym", "jsonl"), (imported, "nemo-gym", "jsonl"), (of_lines, "nemo-gym", "jsonl"),
    (parts, "nat-trajectories", "json"), (parts, "atif", "jsonl"), (parts, "atif", "json"), (parts, "verl", "parquet"),
    (imported, "trl-messages", "jsonl"), (parts, "openai", "jsonl"), (of_pairs, "trl-preference", "jsonl"),
    (of_pairs, "nat-dpo", "jsonl"),
]  # fmt: skip


@pytest.mark.matrix("parts-nemo-gym-jsonl", "of_pairs-trl-preference-jsonl")
@pytest.mark.parametrize(("shape", "format", "suffix"), FORMATS, ids=lambda given: getattr(given, "__name__", given))
def test_an_export_is_the_same(
    shape: Callable[[Path], str],
    format: str,
    suffix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines, account, messages and exit code, in every kind of format."""
    inputs.in_small_batches(monkeypatch)
    path, output = shape(tmp_path), tmp_path / "out"
    capsys.readouterr()
    words = ["export", path, "--format", format, "-o", str(output / f"rows.{suffix}")]
    one = made(capsys, output, *words)
    assert json.loads(one[1])["rows"] > 5
    assert made(capsys, output, *words, "--workers", "2") == one


@pytest.mark.matrix("page")
@pytest.mark.parametrize("fault", ["id", "page"])
def test_what_stops_an_export_stops_it_with_the_same_words(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An id that no consumer may take, and a file that is not as it was recorded; nothing is left of the output."""
    inputs.in_small_batches(monkeypatch)
    rows = inputs.native(40)
    if fault == "id":
        rows[33]["turns"][0]["generation_token_ids"][0] = -4
    folder = inputs.write_parts(tmp_path / "run", [rows[:20], rows[20:]])
    if fault == "page":
        facts = json.loads((folder / "run.json").read_bytes())
        facts["files"][1]["xxh3"] = "0123456789abcdef"
        (folder / "run.json").write_text(json.dumps(facts))
    output = tmp_path / "out"
    words = ["export", str(folder), "--format", "nemo-gym", "-o", str(output / "rows.jsonl")]
    one = made(capsys, output, *words)
    assert one[0] != 0
    assert one[3] == {}
    assert made(capsys, output, *words, "--workers", "2") == one
    changed = made(capsys, output, *words, "--allow-changed")
    assert made(capsys, output, *words, "--allow-changed", "--workers", "2") == changed
    assert read_table(folder / "rollouts" / "part-00000.parquet").num_rows == 20


def all_parts(folder: Path) -> list[str]:
    """Files with many row groups, an empty one, groups that span files, and rows that no pair can need."""
    rows = inputs.scored(120)
    for row in rows[::7]:
        row["reward"] = None
    return [str(inputs.write_parts(folder / "run", [rows[:50], [], rows[50:90], rows[90:]]))]


def with_journal(folder: Path) -> list[str]:
    """A run that is not finished, and another with other rollouts."""
    rows = inputs.scored(120)
    more = [{**row, "rollout_id": f"b-{row['rollout_id']}", "group_id": f"b-{row['group_id']}"} for row in rows[:30]]
    run = inputs.write_parts(folder / "run", [rows[:50]], rows[50:], torn=9)
    return [str(run), str(inputs.write_parts(folder / "more", [more]))]


@pytest.mark.matrix("pairs---split-0.3---fork-with_journal", "experience---estimator-rloo---whiten-all_parts")
@pytest.mark.parametrize("shape", [all_parts, with_journal], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    "words",
    [
        ("pairs", "--strategy", "all", "--max-pairs-per-task", "3"),
        ("pairs", "--split", "0.3", "--fork"),
        ("experience", "--estimator", "rloo", "--whiten"),
        ("experience", "--zero-variance", "keep"),
    ],
    ids="-".join,
)
def test_training_files_are_the_same(
    shape: Callable[[Path], list[str]],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pairs, experiences, their accounts and run.json, which does not record the workers."""
    inputs.in_small_batches(monkeypatch)
    runs, output = shape(tmp_path), tmp_path / "out"
    command = [words[0], *runs, *words[1:], "-o", str(output / "made")]
    one = made(capsys, output, *command)
    assert (one[0], "workers" in json.dumps(one[3]["run.json"])) == (0, False)
    assert made(capsys, output, *command, "--workers", "2") == one
    # With other workers it is the same output, and no other settings.
    assert main([*command, "--workers", "3"]) == one[0]


def test_an_unsound_rollout_stops_pairs_with_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a worker refuses is named as one process names it."""
    inputs.in_small_batches(monkeypatch)
    rows = inputs.scored(40)
    rows[30]["turns"][0]["generation_log_probs"][0] = float("nan")
    output = tmp_path / "out"
    words = ["pairs", str(inputs.write_parts(tmp_path / "run", [rows])), "-o", str(output / "made")]
    one = made(capsys, output, *words)
    assert (one[0], one[3]) == (1, {})
    assert made(capsys, output, *words, "--workers", "2") == one
