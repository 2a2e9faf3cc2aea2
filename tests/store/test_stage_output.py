"""What may be written where: other outputs, links, URLs, and what is said when the system refuses."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import StoreError
from gymdata.rollouts.schema import SCORES
from gymdata.store import Run, StageOutput, read_run_json, read_table, resolve
from gymdata.store.journal import Journal
from gymdata.store.run_json import hash_file, replacing
from gymdata.store.stage_output import single_file
from tests.kills import full_disk
from tests.rollout_files import rollout, write_run, write_table

ROWS = [
    rollout(f"t{task}", n, float(n), [([1, 5 + task], [40 + n, 2])], text=f"q={n + 1}")
    for task in range(3)
    for n in range(2)
]
#: Commands that write an output, without their -o; {run}: a collected run, {pairs}: a folder of pairs.
WRITERS = {
    "pairs": "pairs {run}",
    "experiences": "experience {run} --estimator rloo",
    "scores": "score {run} --reward regex:q",
    "a judge's comparisons": "judge {run} --endpoint http://127.0.0.1:9 -m judge",
    "filtered rollouts": "filter {run} --where reward>=0",
    "an imported run": "import {nemo}",
    "an audit": "audit {run} -m sample_data/policy",
    "a training": "train-sft {run} -m sample_data/policy",
    "collect": "collect sample_data/tasks/train.jsonl -m sample_data/policy",
    "what serve-genrm keeps": "serve-genrm --endpoint http://127.0.0.1:9 -m judge",
}
FILES = {
    "an export": "export {run} --format nemo-gym -o",
    "repaired rollouts": "validate {run} --fix drop -o",
    "a query": "query select(1)n {run} -o",
}


def score_rows(*values: float) -> pa.Table:
    rows = [
        {"rollout_id": f"r{n}", "name": "s", "value": v, "status": "scored", "source": "x", "run_id": "run-1"}
        for n, v in enumerate(values)
    ]
    return pa.Table.from_pylist(rows, schema=SCORES.schema)


def write_scores(folder: Path, value: float, *, fail: bool = False, overwrite: bool = True) -> None:
    with StageOutput(folder, "score", overwrite=overwrite) as out:
        out.table("scores.parquet", score_rows(value), SCORES)
        if fail:
            raise RuntimeError("stopped")
        out.finish({})


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hash_file(p) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What commands read, and no test changes."""
    folder = tmp_path_factory.mktemp("words")
    run, nemo, pairs = write_run(folder / "run", ROWS), folder / "nemo.jsonl", folder / "pairs"
    gymdata.export(run, nemo, format="nemo-gym")
    gymdata.pairs(run, output=pairs)
    return {"run": str(run), "nemo": str(nemo), "pairs": str(pairs)}


@pytest.mark.parametrize("writes", WRITERS)
def test_another_kind_of_output_is_refused(
    writes: str, words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with the output of another command stays as it is, also with --overwrite; the message says what it has."""
    overwrites = [[]] if writes == "what serve-genrm keeps" else [[], ["--overwrite"]]
    places = [(words["run"], "collect"), (words["pairs"], "pairs")]
    for more, (place, holds) in itertools.product(overwrites, places):
        if holds == writes:
            continue
        before = tree(Path(place))
        command = [*WRITERS[writes].format(**words).split(), "-o", place, *more]
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert f"{place}: holds the output of {holds}" in said
        assert "another output folder" in said
        assert tree(Path(place)) == before


@pytest.mark.parametrize("writes", FILES)
def test_a_file_of_another_output_is_refused(
    writes: str, words: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither one that a folder's run.json names, nor one among a run's rollouts; nor, without --overwrite, any other with
    another content, because nothing says what it is."""
    mine = tmp_path / "mine.jsonl"
    mine.write_text("{}\n")
    before = mine.read_bytes()
    assert main([*FILES[writes].format(**words).split(), str(mine)]) == 2
    assert f"{mine}: exists, and no run.json says what it is" in capsys.readouterr().err
    assert mine.read_bytes() == before
    places = {
        Path(words["pairs"], "pairs.parquet"): "is part of the output of pairs, ",
        Path(words["run"], "rollouts", "x.jsonl"): "is part of the output of collect, ",
    }
    for place, said in places.items():
        if writes == "an export" and place.suffix == ".parquet":
            continue
        before = tree(Path(words["run"]).parent), tree(tmp_path)
        overwrite = [] if writes == "a query" else ["--overwrite"]
        assert main([*FILES[writes].format(**words).split(), str(place), *overwrite]) == 2
        assert said in capsys.readouterr().err
        assert (tree(Path(words["run"]).parent), tree(tmp_path)) == before


@pytest.mark.parametrize("place", ["rollouts", "rollouts/part-00001.jsonl", "failures.jsonl"])
@pytest.mark.parametrize("writes", [w for w in WRITERS if w != "what serve-genrm keeps"])
def test_what_a_run_keeps_its_rows_in_is_no_output(
    writes: str, place: str, words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No command writes into a run's rollouts folder or its failures.jsonl, where the run's own readers would meet it."""
    before = tree(Path(words["run"]))
    for more in ([], ["--overwrite"]):
        output = str(Path(words["run"], place))
        assert main([*WRITERS[writes].format(**words).split(), "-o", output, *more]) == 2, more
        assert output in capsys.readouterr().err
        assert tree(Path(words["run"])) == before


def test_a_link_at_any_name_leads_nowhere(tmp_path: Path) -> None:
    """Links planted at the temporary name and at a single file's are named; those in a folder make it none of ours, or go
    with the output that is replaced. What they lead to is not touched."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mine").write_text("untouched")
    (tmp_path / ".s.tmp").symlink_to(victim)
    (tmp_path / "file.parquet").symlink_to(victim / "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "scores.parquet").symlink_to(victim / "mine")
    with pytest.raises(StoreError, match="is a symbolic link"):
        write_scores(tmp_path / "s", 1.0)
    with pytest.raises(StoreError, match="is a symbolic link"), single_file(tmp_path / "file.parquet", overwrite=True):
        pass
    for overwrite, said in ((False, "is not empty"), (True, "no run.json names it")):
        with pytest.raises(StoreError, match=said):
            write_scores(tmp_path / "other", 1.0, overwrite=overwrite)
    with pytest.raises(StoreError, match="symbolic link"):
        Journal(tmp_path / "file.parquet")
    replaced = tmp_path / "replaced"
    write_scores(replaced, 1.0)
    (replaced / "scores.parquet").unlink()
    (replaced / "scores.parquet").symlink_to(victim / "mine")
    write_scores(replaced, 2.0)
    assert read_table(replaced, SCORES)["value"].to_pylist() == [2.0]
    assert tree(victim) == {"mine": hash_file(victim / "mine")}
    assert (victim / "mine").read_text() == "untouched"


def test_a_run_does_not_follow_links(tmp_path: Path) -> None:
    """A lock that is a link stops a run before anything is written."""
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match="lock: is a symbolic link"):
        Run.open(tmp_path / "run", identity={}, extent={}, operation={})
    assert (tmp_path / "victim").read_text() == "untouched"


def test_only_what_is_safe_is_called_safe(tmp_path: Path) -> None:
    """Rows are said to be journaled where there is a journal with rows; a full disk asks for space, a folder for rights."""
    full = str(StoreError.from_os(tmp_path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert full.endswith("No space left on device\n  → free space and run the same command again")
    closed = str(StoreError.from_os(tmp_path, PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
    assert closed.endswith("make it writable or give another output folder and run the same command again")
    with pytest.raises(StoreError) as replaced, replacing(tmp_path / "a.json"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "journaled" not in str(replaced.value)


def test_too_little_memory_is_said_so(tmp_path: Path) -> None:
    """A command that may not have the memory ends with exit code 3 and says so, leaving what was there."""
    big = [rollout("t", n, float(n), [([1], [7 + n] * 400_000)]) for n in range(12)]
    small, run = write_run(tmp_path / "small", ROWS), write_run(tmp_path / "run", big)
    # Libraries and threads are there before the limit: native code ends a process that cannot have its first memory.
    code = (
        "import resource, sys; from gymdata.cli.main import main\n"
        "assert main(['pairs', sys.argv[1], '--strategy', 'all', '-o', sys.argv[1] + '-pairs']) == 0\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (16 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size)); sys.exit(main(sys.argv[2:]))\n"
    )
    words = [str(small), "pairs", str(run), "-o", str(tmp_path / "p"), "--strategy", "all"]
    # Arrow's own pools reserve more addresses than they use.
    own = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=own)
    assert (done.returncode, "out of memory" in done.stderr) == (3, True), done.stderr
    assert "defect" not in done.stderr
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("writes", ["pairs {}", "experience {} --estimator rloo", "filter {} --where reward>=0"])
def test_the_same_output_of_another_run_is_refused(
    writes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was made from one run with the same settings is not replaced by that of another, unless by --overwrite; a copy
    of the run, and its file, are that run."""
    one, other = (write_run(tmp_path / name, ROWS) for name in ("one", "other"))
    facts = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(facts | {"run_id": "run-2"}))
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    out = tmp_path / "out"

    def made_from(source: Path, *more: str) -> int:
        return main([*writes.format(source).split(), "-o", str(out), *more])

    assert made_from(one) == 0
    before = tree(out)
    capsys.readouterr()
    assert made_from(other) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"run run-1 ({one})" in said
    assert f"run run-2 ({other})" in said
    assert tree(out) == before
    assert [made_from(copy), made_from(one / "rollouts" / "part-00000.parquet")] == [0, 0]
    assert made_from(other, "--overwrite") == 0
    assert read_run_json(out)["parents"][0]["run_id"] == "run-2"


def test_a_task_file_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that reads rollouts says what the file holds, and which command makes rollouts of it."""
    assert main(["pairs", "sample_data/tasks/train.jsonl", "-o", str(tmp_path / "p")]) == 2
    said = capsys.readouterr().err
    assert "train.jsonl: contains tasks, expected rollouts\n  → `gymdata collect sample_data/tasks/train.jsonl" in said


def test_two_writers_never_share_an_output(tmp_path: Path) -> None:
    """The second is refused while the first writes, and what the first had made is untouched."""
    place = tmp_path / "out"
    with StageOutput(place, "score") as first:
        first.table("scores.parquet", score_rows(1.0), SCORES)
        with pytest.raises(StoreError, match="another process writes"), StageOutput(place, "score"):
            pass
        first.finish({"name": "s"})
    assert read_table(place, SCORES)["value"].to_pylist() == [1.0]
    assert [f["path"] for f in read_run_json(place)["files"]] == ["scores.parquet"]
    assert sorted(p.name for p in place.iterdir()) == ["run.json", "scores.parquet"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("command", ["validate {file} --fix drop", "export {file} --format {form}"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_a_command_reads_is_not_its_output(
    command: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by another name either, and not with --overwrite: sampled tokens cannot be made again."""
    run = write_run(tmp_path / "run", ROWS, "parquet" if suffix == ".parquet" else "jsonl")
    (sealed,) = (run / "rollouts").glob(f"*{suffix}")
    file, link = tmp_path / f"mine{suffix}", tmp_path / f"link{suffix}"
    shutil.copy(sealed, file)
    link.symlink_to(file)
    before, form = file.read_bytes(), "verl" if suffix == ".parquet" else "nemo-gym"
    for given in (file, link):
        assert main([*command.format(file=given, form=form).split(), "-o", str(file), "--overwrite"]) == 2
        assert "is one of the files that are" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_file_is_no_folder_of_an_output(tmp_path: Path) -> None:
    """It is named as one, and stays."""
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(StoreError, match="is a file, expected a folder"),
        StageOutput(tmp_path / "file", "score"),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_an_error_leaves_the_old_output(tmp_path: Path) -> None:
    """Nothing of an output that was not finished is seen, and a folder that was made for it is gone."""
    out = tmp_path / "out"
    with pytest.raises(RuntimeError):
        write_scores(out, 1.0, fail=True)
    assert not out.exists()
    write_scores(out, 2.0)
    before = tree(out)
    with pytest.raises(RuntimeError):
        write_scores(out, 3.0, fail=True, overwrite=False)
    assert tree(out) == before


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_stop_at_any_rename_leaves_the_old_or_the_new_whole(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a full disk, before each of the renames: the next command finds the old output, or the new one."""
    out, done = tmp_path / "out", list[Path]()
    write_scores(out, 0.0)
    (out / "notes.txt").write_text("mine")
    rename = Path.rename

    def stopping(path: Path, target: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopping)
        with pytest.raises(KeyboardInterrupt):
            write_scores(out, 1.0, overwrite=False)
    # What was renamed away has a run.json, and is no table of the folder around it.
    (tmp_path / "run.json").write_text('{"stage": "collect"}')
    assert len(resolve(tmp_path, SCORES)) == (0 if renames == 1 else 1)
    with StageOutput(out, "score"):
        pass
    assert read_table(out, SCORES)["value"].to_pylist() == [1.0 if renames == 2 else 0.0]
    assert read_run_json(out)["files"][0]["xxh3"] == hash_file(out / "scores.parquet")
    assert sorted(p.name for p in out.iterdir()) == ["notes.txt", "run.json", "scores.parquet"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run.json"]


def test_what_others_put_into_an_output_stays(tmp_path: Path) -> None:
    """Notes and an output that was made from it are in the folder that replaces it; its own earlier files are not. A file
    of somebody else's is not replaced, and a folder that is no output is written into with --overwrite alone."""
    out = tmp_path / "out"
    write_scores(out, 0.0)
    (out / "notes.txt").write_text("mine")
    write_scores(out / "judge-x", 5.0)
    with StageOutput(out, "score") as again:
        again.table("others.parquet", score_rows(1.0), SCORES)
        again.finish({})
    assert sorted(p.name for p in out.iterdir()) == ["judge-x", "notes.txt", "others.parquet", "run.json"]
    assert read_table(out / "judge-x", SCORES)["value"].to_pylist() == [5.0]
    (out / "scores.parquet").write_text("mine")
    mine = tmp_path / "mine"
    (mine / "thesis").mkdir(parents=True)
    (mine / "thesis" / "scores.parquet").write_text("mine")
    with pytest.raises(StoreError, match=r"is not empty, and no run.json says what it holds \(thesis\)"):
        write_scores(mine, 1.0, overwrite=False)
    write_scores(mine, 1.0)
    assert read_table(mine, SCORES)["value"].to_pylist() == [1.0]
    assert (mine / "thesis" / "scores.parquet").read_text() == "mine"
    (mine / "run.json").unlink()
    for place, overwrite in itertools.product((out, mine), (True, False)):
        before = tree(place)
        with pytest.raises(StoreError, match=r"no run.json (names|says)"):
            write_scores(place, 1.0, overwrite=overwrite)
        assert tree(place) == before


def test_half_of_a_run_json_is_no_file_of_others(tmp_path: Path) -> None:
    """A folder whose first run.json was being written when its process was killed is begun again."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".run.json.tmp").write_text('{"stage"')
    with StageOutput(tmp_path / "out", "judge") as out:
        out.begin({})
        out.table("scores.parquet", score_rows(1.0), SCORES)
        out.finish({})
    assert read_table(tmp_path / "out", SCORES)["value"].to_pylist() == [1.0]


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in it, or below it, would be nowhere afterwards; a folder in it is an output as any other."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    for place in (".", "..", tmp_path / "here"):
        with pytest.raises(StoreError, match=r"holds the current folder(.|\n)*give a folder in it"):
            write_scores(Path(place), 1.0)
    write_scores(Path("out"), 1.0)
    assert read_table(tmp_path / "here" / "below" / "out", SCORES)["value"].to_pylist() == [1.0]


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.jsonl"])
def test_a_disk_that_fills_at_any_byte_leaves_the_old_output(name: str, tmp_path: Path) -> None:
    """Of a folder and of a single file, whichever of its writes is refused; with room it is replaced."""
    place = tmp_path / name

    def write(value: float) -> None:
        rows = score_rows(*[value] * 40)
        if name != "out":
            write_table(rows, place, SCORES)
            return
        with StageOutput(place, "score", overwrite=True) as out:
            out.table("scores.parquet", rows, SCORES)
            out.finish({"notes": ["a note " * 100]})

    write(1.0)
    before = tree(tmp_path)
    refused = 0
    for at in range(0, 6_000, 250):
        try:
            with full_disk(at=at):
                write(2.0)
        except StoreError as error:
            refused += 1
            assert "free space" in str(error.hint)
            assert tree(tmp_path) == before
    assert refused >= 4
    assert read_table(place, SCORES)["value"].to_pylist() == [2.0] * 40


def test_a_run_json_that_names_files_elsewhere_is_not_carried_out(tmp_path: Path) -> None:
    """What a planted run.json says of other folders is not done."""
    (tmp_path / "precious").write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    entry = {"path": "../precious", "bytes": 4, "xxh3": "0"}
    (out / "run.json").write_text(json.dumps({"stage": "score", "files": [entry]}))
    write_scores(out, 1.0)
    assert (tmp_path / "precious").read_text() == "mine"


def test_the_other_folder_that_a_refusal_names_keeps_a_version_in_its_name(tmp_path: Path) -> None:
    """A folder's name may end in what looks like a suffix and is none."""
    place = tmp_path / "audit-model-0.1.2"
    place.mkdir()
    (place / "run.json").write_text(json.dumps({"stage": "audit", "config": {"dtype": "float32"}}))
    with (
        StageOutput(place, "audit") as out,
        pytest.raises(StoreError, match="dtype: run has 'float32', now") as refused,
    ):
        out.refuse_other("config", {"dtype": "bfloat16"}, "figures")
    assert str(tmp_path / "audit-model-0.1.2-bfloat16") in str(refused.value.hint).replace("'", " ").split()
