"""What a command writes and says is the same, byte for byte and word for word, whenever it is run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

import sample_data
from gymdata.cli.main import main
from gymdata.commands.import_export.run import import_rollouts
from gymdata.commands.pairs.run import pairs
from gymdata.rollouts.schema import ROLLOUTS
from tests.rollout_files import rollouts_table, write_table
from tests.store import odd_inputs as inputs
from tests.validate.generate import nemo_rows, write_lines, write_native

#: Facts of run.json that tell when and by which command it was made.
TOLD = {"attempts", "command", "created_at", "ended_at", "started_at"}
POLICY = Path(sample_data.__file__).parent / "policy"

#: Makes what a command reads in a folder, and names it.
Shape = Callable[[Path], str]


class Done(NamedTuple):
    """What a command left: its exit code, what it printed, and its files."""

    code: int
    out: str
    err: str
    files: dict[str, Any]


#: Runs a command, whose words may name {paths}, {out} and {policy}.
Same = Callable[[Shape, str], Done]


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


@pytest.fixture
def same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Same:
    """What a command does, after it was seen that it does so twice."""
    inputs.in_small_batches(monkeypatch)
    output = tmp_path / "out"

    def done(words: list[str]) -> Done:
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        code = main(words)
        out, err = capsys.readouterr()
        # How long it took, and how often progress is shown before its end, depend on the machine.
        out = re.sub(r"\(\d+\.\d\d s\)", "", out)
        err = re.sub(r"^\w+ ([\d,]+)/(?!\1\b)[\d,]+.*\n", "", err, flags=re.MULTILINE)
        err = re.sub(r"  took \d:\d\d:\d\d$", "", err, flags=re.MULTILINE)
        return Done(code, out, err, content(output))

    def both(shape: Shape, words: str) -> Done:
        typed = words.format(paths=shape(tmp_path), out=output, policy=POLICY).split()
        capsys.readouterr()
        one = done(typed)
        assert done(typed) == one
        return one

    return both


def gym_lines(folder: Path) -> str:
    return str(inputs.write_nemo(folder / "gym.jsonl", inputs.nemo()))


def gym_files(folder: Path) -> str:
    """Several files, plain and compressed, with rows that are in more than one; ids of their own, tasks and no rewards."""
    rows = inputs.nemo()
    for k, row in enumerate(rows[::3]):
        row.update(rollout_id=f"own-{k // 2}", task_id=f"task-{k % 4}")
    a = inputs.write_nemo(folder / "a.jsonl", rows[:40])
    return f"{inputs.compressed(a)} {inputs.write_nemo(folder / 'b.jsonl', rows[20:])} {a}"


def unfit_rows(folder: Path) -> str:
    """A row that no column can hold: all are tried alone, and that one is rejected."""
    rows = nemo_rows(40)
    rows[25]["response"]["created_at"] = 1.5
    rows[31]["responses_create_params"]["input"][1]["content"] = {"odd": [1, {"deep": None}]}
    lines = [json.dumps(row) for row in rows]
    lines[33] = lines[33].replace('"q16"', '"\\ud800"')
    return str(write_lines(folder / "gym.jsonl", lines))


def trajectories(folder: Path) -> str:
    """Another format."""
    inputs.write_parts(folder / "run", [inputs.native(20)])
    assert main(["export", str(folder / "run"), "--format", "atif", "-o", str(folder / "atif.jsonl")]) == 0
    return str(folder / "atif.jsonl")


@pytest.mark.matrix("jsonl-gym_lines", "parquet-unfit_rows")
@pytest.mark.parametrize("shape", [gym_lines, gym_files, unfit_rows, trajectories], ids=lambda s: s.__name__)
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_an_import_is_the_same(shape: Shape, format: str, same: Same) -> None:
    """Rows, ids, groups, rejected lines, counts, messages and exit code; in Parquet and in JSON lines."""
    one = same(shape, f"import {{paths}} --run-id run -o {{out}}/run --json --format {format}")
    assert json.loads(one.out)["rollouts"] > 10


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
def test_an_export_is_the_same(shape: Shape, format: str, suffix: str, same: Same) -> None:
    """Lines, account, messages and exit code, in every kind of format."""
    one = same(shape, f"export {{paths}} --format {format} -o {{out}}/rows.{suffix} --json")
    assert json.loads(one.out)["rows"] > 5


def negative_id(folder: Path) -> str:
    """An id that no consumer may take."""
    rows = inputs.native(40)
    rows[33]["turns"][0]["generation_token_ids"][0] = -4
    return str(inputs.write_parts(folder / "run", [rows[:20], rows[20:]]))


def other_bytes(folder: Path) -> str:
    """A file that is not as it was recorded."""
    rows = inputs.native(40)
    run = inputs.write_parts(folder / "run", [rows[:20], rows[20:]])
    facts = json.loads((run / "run.json").read_bytes())
    facts["files"][1]["xxh3"] = "0123456789abcdef"
    (run / "run.json").write_text(json.dumps(facts))
    return str(run)


def unsound(folder: Path) -> str:
    rows = inputs.scored(40)
    rows[30]["turns"][0]["generation_log_probs"][0] = float("nan")
    return str(inputs.write_parts(folder / "run", [rows]))


EXPORT = "export {paths} --format nemo-gym -o {out}/rows.jsonl --json"


@pytest.mark.matrix("other_bytes", "unsound")
@pytest.mark.parametrize(
    ("shape", "words"),
    [(negative_id, EXPORT), (other_bytes, EXPORT), (unsound, "pairs {paths} -o {out}/made --json")],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_stops_a_command_stops_it_with_the_same_words(shape: Shape, words: str, same: Same) -> None:
    """Nothing is left of the output."""
    one = same(shape, words)
    assert one.code != 0
    assert one.files == {}


def test_changed_files_are_read_where_that_is_allowed(same: Same) -> None:
    """The output is written."""
    assert same(other_bytes, f"{EXPORT} --allow-changed").files


def all_parts(folder: Path) -> str:
    """Files with many row groups, an empty one, groups that span files, and rows that no pair can need."""
    rows = inputs.scored(120)
    for row in rows[::7]:
        row["reward"] = None
    return str(inputs.write_parts(folder / "run", [rows[:50], [], rows[50:90], rows[90:]]))


def with_journal(folder: Path) -> str:
    """A run that is not finished, and another with other rollouts."""
    rows = inputs.scored(120)
    more = [{**row, "rollout_id": f"b-{row['rollout_id']}", "group_id": f"b-{row['group_id']}"} for row in rows[:30]]
    run = inputs.write_parts(folder / "run", [rows[:50]], rows[50:], torn=9)
    return f"{run} {inputs.write_parts(folder / 'more', [more])}"


@pytest.mark.matrix("pairs --split 0.3 --fork-with_journal", "experience --estimator rloo --whiten-all_parts")
@pytest.mark.parametrize("shape", [all_parts, with_journal], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    "words",
    [
        "pairs --strategy all --max-pairs-per-task 3",
        "pairs --split 0.3 --fork",
        "experience --estimator rloo --whiten",
        "experience --zero-variance keep",
    ],
)
def test_training_files_are_the_same(shape: Shape, words: str, tmp_path: Path, same: Same) -> None:
    """Pairs, experiences, their accounts and run.json; over the output that is there, too."""
    command, _, more = words.partition(" ")
    one = same(shape, f"{command} {{paths}} {more} -o {{out}}/made --json")
    assert one.code == 0
    paths = [str(tmp_path / name) for name in ("run", "more") if (tmp_path / name).exists()]
    assert main([command, *paths, *more.split(), "-o", str(tmp_path / "out" / "made")]) == 0


def run_with_journal(folder: Path) -> str:
    """Several parts, one of them empty; a journal with a damaged line and a torn end; a row in two files."""
    rows = inputs.faulty()
    run = inputs.write_parts(folder / "run", [rows[:30], [], rows[25:50], rows[50:]], rows[40:44], torn=25)
    journal = run / "rollouts" / "part-00004.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"done", b"dOne", 1))
    return str(run)


def one_file(folder: Path) -> str:
    return str(write_native(folder, inputs.faulty(), "parquet"))


def damaged_page(folder: Path) -> str:
    """The middle of the file cannot be read; another file follows."""
    file = write_native(folder, inputs.faulty(), "parquet")
    column = pq.ParquetFile(file).metadata.row_group(20).column(0)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset : column.data_page_offset + 8] = b"\xff" * 8
    file.write_bytes(data)
    write_table(rollouts_table(inputs.native(4, 1)), folder / "second.parquet", ROLLOUTS)
    return str(folder / "*.parquet")


def without_columns(folder: Path) -> str:
    """What the file lacks is a fault of the file, once."""
    file = write_native(folder, inputs.faulty(), "parquet")
    pq.write_table(pq.read_table(file).drop_columns(["reward", "messages"]), file, row_group_size=5)
    return str(file)


def lines(folder: Path) -> str:
    return str(inputs.damaged_lines(inputs.faulty(), folder / "rollouts.jsonl"))


def texts_only(folder: Path) -> str:
    """No ids in one file: T205 is a warning there, and an error in the other."""
    rows = inputs.native(40)
    for row in rows[:20]:
        row.update(turns=[], n_turns=0, n_context_tokens=0, n_generated_tokens=0)
    inputs.write_text(folder / "a.jsonl", inputs.lines_of(rows[:20]))
    inputs.write_text(folder / "b.jsonl", inputs.lines_of([*rows[20:], {**rows[0], "rollout_id": "x"}]))
    return str(folder / "*.jsonl")


def nemo_files(folder: Path) -> str:
    """Plain and compressed, with rows that are in both."""
    rows = inputs.nemo()
    inputs.compressed(inputs.write_nemo(folder / "a.jsonl", rows[:50]))
    inputs.write_nemo(folder / "b.jsonl", rows[10:])
    return str(folder / "*.jsonl*")


def mixed(folder: Path) -> str:
    """Rollouts and NeMo Gym rows under one glob; behavior that only all rows show."""
    rows = inputs.native(48)
    for row in rows:
        row["reward"] = 1.0
        row["turns"][-1]["finish_reason"] = "length"
    inputs.write_text(folder / "a.jsonl", inputs.lines_of(rows))
    write_lines(folder / "b.jsonl", inputs.nemo())
    return str(folder / "*.jsonl")


SHAPES = [
    run_with_journal, one_file, damaged_page, without_columns, lines, texts_only, gym_lines, nemo_files, mixed,
]  # fmt: skip


@pytest.mark.matrix("run_with_journal---json", "damaged_page--v", "gym_lines---json")
@pytest.mark.parametrize("how", ["--json", "-v"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.__name__)
def test_what_validate_finds_is_the_same(shape: Shape, how: str, same: Same) -> None:
    """JSON, text, standard error and exit code, whatever the input is."""
    assert same(shape, f"validate {{paths}} {how}").code == 1


def test_settings_reach_the_checks(same: Same) -> None:
    """Which codes count, and the tokenizer that bounds ids and tells the cause of a break, are those of the call."""
    one = same(gym_lines, "validate {paths} --strict --select T2 --ignore T206 --tokenizer {policy} --json")
    codes = json.loads(one.out)["by_code"]
    assert codes
    assert all(code.startswith("T2") and code != "T206" for code in codes)
