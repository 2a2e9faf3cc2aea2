"""Outputs on an object store: whole or not there, by one writer, on every bad day of a real S3 server."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, GymdataError
from tests.forks import Fork, Forks
from tests.objects.appending import forked
from tests.objects.conftest import plain, upload
from tests.objects.stores import FaultyStore
from tests.rollout_files import rollout, write_run

OUT = "s3://bucket/made/out"
WRITES = {
    "pairs": "pairs {run} -o {out}",
    "pairs in one file": "pairs {run} -o {out}.jsonl",
    "filter": "filter {run} --where reward>=1 -o {out}",
    "experience": "experience {run} --estimator rloo -o {out}",
    "score": "score {run} --reward regex:q -o {out}",
    "export": "export {run} --format nemo-gym -o {out}.jsonl",
    "fix": "validate {run} --fix drop -o {out}.parquet",
}


@pytest.fixture
def other_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on this is another machine: it has nothing of what the first one keeps."""
    return lambda: monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "elsewhere"))


def rows_at(url: str) -> int:
    return int(gymdata.query("select count(*) n from pairs", url)["n"][0].as_py())


@pytest.mark.parametrize("writes", WRITES)
def test_a_command_writes_to_an_object_store(
    writes: str, run: Path, store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    other_spool: Callable[[], None],
) -> None:  # fmt: skip
    """The objects are the files that the command writes here; another machine reads them; no marker and no local name is
    left in them."""
    words = WRITES[writes].format(run=run, out=OUT).split()
    assert main(words) == 0, capsys.readouterr().err
    assert str(tmp_path / "spool") not in "".join(capsys.readouterr())
    assert main([word.replace(OUT, str(tmp_path / "out")) for word in words]) == 0
    root = tmp_path
    names = {p.relative_to(root).as_posix() for p in root.glob("out*") if p.is_file()}
    names |= {p.relative_to(root).as_posix() for p in root.glob("out/*") if p.suffix != ".log"}
    assert plain(store.names()) == sorted(f"made/{name}" for name in names)
    for key in store.names():
        (name,) = plain([key.removeprefix("made/")])
        body = store.get(f"bucket/{key}")
        if name.endswith("run.json"):
            assert str(tmp_path / "spool") not in body.decode()
            assert "hidden-secret" not in body.decode()
        elif writes not in ("score", "fix"):
            assert body == (root / name).read_bytes(), name
    other_spool()
    target = next(word for word in words if word.startswith(OUT))
    assert gymdata.ls("s3://bucket/made").outputs[0].state == "complete"
    if writes in ("filter", "fix", "export"):
        assert main(["validate", target]) == 0


def test_an_output_beside_a_run_on_a_store_lies_there(stored: str, store: FaultyStore) -> None:
    """Without -o the pairs of s3://…/a are s3://…/a/pairs-reward, as for a local run; the run itself is not touched."""
    before = {key: store.get(f"bucket/{key}") for key in store.names()}
    assert main(["pairs", stored]) == 0
    added = set(store.names()) - before.keys()
    assert plain(added) == ["runs/a/pairs-reward/pairs.parquet", "runs/a/pairs-reward/run.json"]
    assert {key: store.get(f"bucket/{key}") for key in before} == before
    assert rows_at(stored) == 3


@pytest.mark.parametrize("key", ["parquet$", "out/run.json$"], ids=["data", "run.json"])
def test_a_store_that_stays_away_leaves_the_rest_for_the_same_command(
    key: str, run: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], other_spool: Callable[[], None],
) -> None:  # fmt: skip
    """Exit code 3; another machine reads nothing that is half there; the same command then sends what is left."""
    spool = os.environ["GYMDATA_SPOOL"]
    monkeypatch.setenv("GYMDATA_OBJECT_RETRY_S", "0.3")
    store.fail("503", "PUT", key, 99)
    assert main(["pairs", str(run), "-o", OUT]) == 3
    assert "the same command sends the rest" in capsys.readouterr().err
    other_spool()
    with pytest.raises(GymdataError, match=r"no such file or folder|has no run.json"):
        rows_at(OUT)
    monkeypatch.setenv("GYMDATA_SPOOL", spool)
    store.faults.clear()
    assert main(["pairs", str(run), "-o", OUT]) == 0
    other_spool()
    assert rows_at(OUT) == 3
    assert plain(store.names()) == ["made/out/pairs.parquet", "made/out/run.json"]


@pytest.mark.parametrize("replaces", [False, pytest.param(True, marks=pytest.mark.full)], ids=["new", "replaced"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_kill_at_any_request_leaves_nothing_half(
    done: bool, replaces: bool, run: Path, store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    processes: Forks,
) -> None:  # fmt: skip
    """The writer is killed before or after each of its changes to the store. Another machine then reads the old output,
    the new one, or that it is unfinished; the same command finishes, and leaves no marker."""
    old = 3 if replaces else None
    words = f"pairs {run} -o {OUT} --strategy all --overwrite"
    for number in range(1, 9):
        for key in store.names():
            store.delete(f"bucket/{key}")
        monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / f"spool{number}"))
        if replaces:
            assert main(["pairs", str(run), "-o", OUT]) == 0
        writer: list[Fork] = []
        store.stop_at("stop after" if done else "stop", "made/out", number, writer)
        said = tmp_path / "said"
        writer.append(processes.start(forked, dict(os.environ), str(said), "gymdata", shlex.split(words)))
        code = writer[0].wait()
        store.faults.clear()
        if code == 0:
            assert number > 1, said.read_text()
            sys.stdout.write(f"\nKILLED at {number - 1} changes of the store: 0 half outputs read, 0 lost\n")
            break
        assert code == -9, said.read_text()
        monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / f"reader{number}"))
        try:
            assert rows_at(OUT) in {old, 3}
        except DataError as error:
            assert not replaces, error
        monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / f"spool{number}"))
        assert main(shlex.split(words)) == 0
        assert plain(store.names()) == ["made/out/pairs.parquet", "made/out/run.json"]
        facts = json.loads(store.get("bucket/made/out/run.json"))
        assert facts["config"]["strategy"] == "all"
        monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / f"reader{number}"))
        assert rows_at(OUT) == 3
    else:
        pytest.fail("the writer makes more changes than this test kills")


def test_of_two_writers_one_wins(
    run: Path, store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: Forks
) -> None:
    """A command whose output another machine wrote meanwhile sends nothing, and says so; what the other wrote stays."""
    elsewhere = {**os.environ, "GYMDATA_SPOOL": str(tmp_path / "elsewhere")}
    other = shlex.split(f"pairs {run} -o {OUT} --strategy all")

    def first() -> None:
        assert processes.start(forked, elsewhere, str(tmp_path / "said"), "gymdata", other).wait() == 0

    store.fail("stop", "PUT", "parquet$", act=first)
    assert main(["pairs", str(run), "-o", OUT]) == 2
    assert "another command has written here meanwhile" in capsys.readouterr().err
    assert json.loads(store.get("bucket/made/out/run.json"))["config"]["strategy"] == "all"
    assert plain(store.names()) == ["made/out/pairs.parquet", "made/out/run.json"]


def test_runs_on_stores_become_one_on_a_store(
    stored: str, store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """filter reads and writes URLs."""
    other = [rollout("t9", n, 1.0, [([1, 5], [40 + n, 2])]) for n in range(2)]
    upload(store, write_run(tmp_path / "other", other), "runs/b")
    assert main(["filter", stored, "s3://bucket/runs/b", "-o", "s3://bucket/all"]) == 0, capsys.readouterr().err
    assert gymdata.load_rollouts("s3://bucket/all").num_rows == 8


REFUSED = {
    "a query": "query select(1)n {run} -o s3://bucket/x.parquet",
    "a report": "report {run} -o s3://bucket/x.html",
    "a training": "train-sft {run} -m sample_data/policy -o s3://bucket/x",
    "what is unused": "ls --unused {url}",
    "a tour": "tour -o s3://bucket/x",
    "a demo": "demo -o s3://bucket/x",
    "what serve-genrm keeps": "serve-genrm --endpoint http://127.0.0.1:9 -m judge -o s3://bucket/x",
    "a scheme that is not known": "pairs {run} -o ftp://host/x",
    "an hf dataset": "pairs {run} -o hf://datasets/a/b",
    "what lies among the rollouts": "filter {url} --where reward>=1 -o {url}/rollouts",
}


@pytest.mark.parametrize("writes", REFUSED)
def test_what_is_not_written_there_is_refused(
    writes: str, run: Path, stored: str, store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Exit code 2 before anything is made: no object, and no folder that is called like the URL."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample_data").symlink_to(Path(__file__).parents[2] / "sample_data")
    before = store.names()
    assert main(REFUSED[writes].format(run=run, url=stored).split()) == 2
    assert "://" in capsys.readouterr().err
    assert store.names() == before
    assert not list(tmp_path.glob("*:*"))


def test_a_relative_name_with_a_colon_is_a_local_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outputs are written and read there, Parquet too; only what begins like a URL of a store is refused, as one."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--format", "nemo-gym", "-o", "x.jsonl"]) == 0
    for words in (
        "import x.jsonl -o gym:1", "pairs gym:1 -o pp:1", "filter gym:1 --where true -o mm:1",
        "experience gym:1 --estimator rloo -o ee:1", "export gym:1 --format verl -o v:1.parquet", "validate mm:1",
    ):  # fmt: skip
        assert main(words.split()) == 0, capsys.readouterr().err
    assert main(["query", "select count(*) as n from rollouts", "mm:1", "-o", "q:1.parquet"]) == 0
    assert gymdata.query("select count(*) as n from pairs", "pp:1").to_pylist() == [{"n": 3}]
    assert main(["pairs", "gym:1", "-o", "s3:bucket/pairs"]) == 2
    assert "got 's3:bucket/pairs', expected s3://BUCKET/KEY" in capsys.readouterr().err
    assert not (tmp_path / "s3:bucket").exists()


def test_a_url_is_shown_with_both_slashes(run: Path, store: FaultyStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the message quotes the argument."""
    assert main(["export", str(run), "--format", "verl", "-o", "s3://bucket/verl.jsonl"]) == 2
    assert "-o: got 's3://bucket/verl.jsonl', expected a name ending in .parquet" in capsys.readouterr().err
