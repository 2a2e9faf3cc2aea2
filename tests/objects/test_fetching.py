"""Every command that reads takes s3:// paths, from a real S3 server, also on its bad days."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, OutsideError, UsageError
from gymdata.store import read_run_json
from gymdata.store.fetch import copy_of, fetched, is_copy
from gymdata.store.lineage import lineage, rollouts_behind
from tests.objects.conftest import ROWS
from tests.objects.stores import FaultyStore

PART = "bucket/runs/a/rollouts/part-00000.parquet"
READS = {
    "validate": "validate {url}",
    "query of a glob": 'query "select count(*) from rollouts" s3://bucket/runs/*/rollouts/*.parquet',
    "report": "report {url} -o {new}.html",
    "view": "view {url} --export {new}.html",
    "pairs": "pairs {url} -o {new}",
    "score": "score {url} --reward regex:q -o {new}",
    "export of a file": "export {url}/rollouts/part-00000.parquet --format nemo-gym -o {new}.jsonl",
    "the rollouts folder": "validate {url}/rollouts",
}


@pytest.fixture
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymdata.store.fetch._RETRIES", {"max_retries": 1})


def copies(cache: Path) -> list[str]:
    """Every complete copy, and what is left of others."""
    return [str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file() and "tags" not in p.parts]


@pytest.mark.parametrize("reads", READS)
def test_a_command_reads_what_a_url_names(
    reads: str, stored: str, run: Path, store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command on the URL and on the local run ends alike; nobody is shown where the copy lies, and nothing is
    written to the store, or beside the copy."""
    words = shlex.split(READS[reads].format(url=stored, new=tmp_path / "remote"))
    code = main(words)
    remote = capsys.readouterr()
    assert code == 0, remote.err
    assert str(tmp_path / "cache") not in remote.out + remote.err
    here = [word.replace("s3://bucket/runs/*", str(run)).replace(stored, str(run)) for word in words]
    assert main([word.replace(str(tmp_path / "remote"), str(tmp_path / "local")) for word in here]) == 0
    local = capsys.readouterr().out.replace(str(run), stored).replace(str(tmp_path / "local"), str(tmp_path / "remote"))
    if reads in ("query of a glob", "pairs"):
        assert remote.out == local
    if (page := tmp_path / "remote.html").exists():
        assert str(tmp_path / "cache") not in page.read_text()
        assert reads == "view" or stored in page.read_text()
    assert {method for method, _ in store.asked} <= {"GET", "HEAD"}
    assert set(copies(tmp_path / "cache/gymdata/fetched")) <= {
        f"s3/{name}" for name in (PART, "bucket/runs/a/run.json")
    }


def test_parquet_of_other_formats_is_imported_from_a_url(
    store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As from the local file, whose name may have a colon: the same rows."""
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    local = tmp_path / "a:b.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": chat}] * 3), local)
    store.put("bucket/chat/a.parquet", local.read_bytes())
    rows = []
    for source in (local, "s3://bucket/chat/a.parquet"):
        target = tmp_path / f"out{len(rows)}"
        assert main(["import", str(source), "-o", str(target)]) == 0, capsys.readouterr().err
        rows.append(gymdata.query("SELECT messages, status FROM rollouts", target).to_pylist())
    assert len(rows[0]) == 3
    assert rows[0] == rows[1]


def test_the_python_functions_take_urls(stored: str) -> None:
    """load_rollouts, open and query read a URL like a folder; a Path of it, which lost a slash, is the same URL."""
    assert gymdata.load_rollouts(stored).num_rows == len(ROWS)
    assert gymdata.load_rollouts(Path(stored)).num_rows == len(ROWS)
    assert gymdata.open(stored).facts["run_id"] == "run-1"
    assert gymdata.query("select count(*) n from rollouts", stored).to_pylist() == [{"n": 6}]


def test_what_is_made_of_a_url_names_the_url(stored: str, tmp_path: Path) -> None:
    """run.json names the parent by its URL, the lineage is walked through its copy, and no secret is in any file."""
    assert main(["experience", stored, "--estimator", "rloo", "-o", str(tmp_path / "e")]) == 0
    assert [one["path"] for one in read_run_json(tmp_path / "e")["parents"]] == [stored]
    assert [facts["run_id"] for facts in lineage(tmp_path / "e") if "run_id" in facts] == ["run-1"]
    assert list(rollouts_behind(tmp_path / "e")) == [copy_of(stored)]
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"hidden-secret" not in file.read_bytes(), file


def test_a_copy_is_fetched_again_when_its_source_changed(
    stored: str, store: FaultyStore, run: Path, tmp_path: Path
) -> None:
    """An unchanged object is fetched once; a changed one again, also of the same size; what the store lost is gone here,
    and what another path of the same bucket names stays."""
    store.put("bucket/other.jsonl", b"{}\n")
    other = fetched("s3://bucket/other.jsonl")
    assert gymdata.open(stored).facts["run_id"] == "run-1"
    store.asked.clear()
    assert gymdata.open(stored).facts["run_id"] == "run-1"
    assert not [path for method, path in store.asked if method == "GET" and path != "/bucket"]
    facts = json.loads((run / "run.json").read_bytes())
    store.put("bucket/runs/a/run.json", json.dumps({**facts, "run_id": "run-2"}).encode())
    assert gymdata.open(stored).facts["run_id"] == "run-2"
    # By a file's own path, too, with the run.json that describes it.
    store.put("bucket/runs/a/run.json", json.dumps({**facts, "run_id": "run-3"}).encode())
    assert read_run_json(fetched(f"s3://{PART}").parent.parent)["run_id"] == "run-3"
    store.delete(PART)
    with pytest.raises(DataError, match="names it with 6 rows"):
        gymdata.load_rollouts(stored)
    store.delete("bucket/runs/a/run.json")
    with pytest.raises(DataError, match="s3://bucket/runs/a: no such file or folder"):
        gymdata.load_rollouts(stored)
    assert copies(tmp_path / "cache/gymdata/fetched") == ["s3/bucket/other.jsonl"]
    assert other.read_bytes() == b"{}\n"


def test_a_changed_object_is_refused_as_a_changed_file_is(
    stored: str, store: FaultyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are not those that run.json recorded are found in a copy, too, and are named by the URL."""
    body = store.get(PART)
    store.put(PART, body[:40] + bytes([body[40] ^ 1]) + body[41:])
    assert main(["validate", stored]) == 1
    capsys.readouterr()
    assert main(["pairs", stored, "-o", "never"]) == 1
    assert f"s3://{PART}" in capsys.readouterr().err


def test_an_object_that_changes_while_it_is_fetched_is_an_error(
    stored: str, store: FaultyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never files of two states: exit code 3, and the next command reads what is there then."""
    body = store.get(PART)
    store.fail("stop", "GET", "parquet$", act=lambda: store.put(PART, b"other"))
    assert main(["validate", stored]) == 3
    assert f"object store: s3://{PART}: " in capsys.readouterr().err
    store.put(PART, body)
    assert main(["validate", stored]) == 0


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("503", "/bucket$"),
        ("lost", "/bucket$"),
        ("503", "run.json$"),
        ("503", "parquet$"),
        ("lost", "parquet$"),
        ("cut", "parquet$"),
    ],
)
def test_a_fault_that_passes_costs_nothing(kind: str, key: str, stored: str, store: FaultyStore) -> None:
    """A listing or a read that fails twice (503, a connection lost before the answer or in its middle) is tried again."""
    store.fail(kind, "GET", key, 2)
    assert gymdata.load_rollouts(stored).num_rows == len(ROWS)
    assert all(fault.count == 0 for fault in store.faults)


@pytest.mark.usefixtures("few_retries")
def test_an_interrupted_download_is_no_copy(
    stored: str, store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, the system and the URL named, and no half of a file where a reader could take it for the whole; an older
    copy is not read in its place."""
    for there, code in (("no copy", 0), ("an older copy", 1)):
        store.fail("cut", "GET", "parquet$", 99)
        assert main(["validate", stored]) == 3
        said = capsys.readouterr().err
        assert f"object store: s3://{PART}" in said
        assert "hidden-secret" not in said
        assert not [name for name in copies(tmp_path / "cache/gymdata/fetched") if "partial" in name]
        assert there == "an older copy" or not copy_of(f"s3://{PART}").exists()
        store.faults.clear()
        assert main(["validate", stored]) == code
        store.put(PART, store.get(PART) + b"more")


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("s3://bucket/none", 2, "s3://bucket/none: no such file or folder"),
        ("s3://other-bucket/x", 3, "object store: s3://other-bucket/x: "),
        ("s3://key:hidden-secret@bucket/x", 2, "credentials and options do not belong in the path"),
        ("s3://bucket/x?versionId=hidden-secret", 2, "s3://bucket/x?versionId=***: credentials and options do not"),
        ("s3://bucket/x#hidden-secret", 2, "s3://bucket/x#***: credentials and options do not belong"),
        ("s3://bucket/a/../b", 2, "without empty or dotted parts"),
        ("ftp://bucket/x", 2, "a URL that begins with s3://, gs://, az://, hf://, https://"),
        ("s3://bucket/*/none", 2, "s3://bucket/*/none: no such file"),
        ("s3:bucket/runs", 2, "got 's3:bucket/runs', expected a local path, or a URL"),
        ("https://127.0.0.1", 2, "expected https://the address of a file"),
    ],
)
def test_a_url_that_leads_nowhere_is_named(
    url: str, code: int, said: str, store: FaultyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong is said with the URL, without its secrets, and with the exit code of its kind."""
    assert main(["validate", url]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "hidden-secret" not in err


@pytest.mark.usefixtures("few_retries")
@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ("127.0.0.1:9000", 2, "expected a URL such as http://127.0.0.1:9000, without a key"),
        ("http://key:hidden-secret@127.0.0.1:9", 2, "without a key"),
        ("http://127.0.0.1:9", 3, "http://127.0.0.1:9/bucket"),
    ],
)
def test_a_server_that_cannot_be_is_named(
    value: str, code: int, said: str, store: FaultyStore, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The variable with what it must be; or the address where nothing answers, in one line each, without a key."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", value)
    assert main(["validate", "s3://bucket/x"]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "hidden-secret" not in err
    assert len(err.splitlines()) <= 2


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path on an object store needs the extra s3, and says so."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match="obstore"):
        fetched(Path("s3://bucket/x"))


def test_a_key_that_is_refused_is_an_outside_error(stored: str, store: FaultyStore) -> None:
    """403 is attributed to the store and names the variables that hold the key."""
    store.fail("403", "GET", "/bucket$", 9)
    with pytest.raises(OutsideError) as caught:
        fetched(stored)
    assert "AWS_ACCESS_KEY_ID" in (caught.value.hint or "")


#: Commands with an output, or a folder of runs, that is a URL.
OUTPUTS = [
    "pairs {run} -o s3://bucket/x", "filter {run} --where reward>=1 -o gs://b/x", "score {run} --reward regex:q -o s3://b/x",
    "experience {run} --estimator rloo -o hf:org/repo/e", "export {run} --format nemo-gym -o https://host/x.jsonl",
    "validate {run} --fix drop -o s3://bucket/x", "import {run}/none.jsonl -o az://box/x/y", "tour -o s3://bucket/x",
    "query select(1)n {run} -o s3://bucket/x.parquet", "report {run} -o s3://bucket/x.html", "demo -o s3://bucket/x",
    "train-sft {run} -m sample_data/policy -o s3://bucket/x", "doctor s3://bucket/runs",
    "collect sample_data/tasks/train.jsonl -m m -o s3://bucket/x", "pairs {run} -o s3:bucket/pairs",
]  # fmt: skip


def test_outputs_are_local(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 before anything is made, nor a folder that is called like the URL."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample_data").symlink_to(Path(__file__).parents[2] / "sample_data")
    for words in OUTPUTS:
        assert main(words.format(run=run).split()) == 2, words
        assert "outputs are written to local paths" in capsys.readouterr().err, words
    for words, said in (
        ("ls s3://bucket/runs", "s3://bucket/runs: is a URL, expected a local folder"),
        ("serve-genrm --endpoint http://127.0.0.1:9 -m judge -o s3://bucket/x", "://"),
    ):
        assert main(words.split()) == 2, words
        assert said in capsys.readouterr().err, words
    assert {path.name for path in tmp_path.iterdir()} == {"run", "sample_data"}


@pytest.mark.parametrize("command", ["pairs {url}", "score {url} --reward regex:q"])
def test_nothing_is_written_beside_what_was_fetched(
    command: str, stored: str, store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No object, and nothing in the cache but the copies."""
    before = store.names()
    assert main(command.format(url=stored).split()) == 2
    assert "nothing is written beside what was fetched" in capsys.readouterr().err
    assert store.names() == before
    assert set(copies(tmp_path / "cache")) <= {
        f"gymdata/fetched/s3/{name}" for name in (PART, "bucket/runs/a/run.json")
    }


def test_a_relative_name_with_a_colon_is_a_local_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outputs are written and read there, Parquet too."""
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--format", "nemo-gym", "-o", "x.jsonl"]) == 0
    for words in (
        "import x.jsonl -o gym:1", "pairs gym:1 -o pp:1", "filter gym:1 --where reward>=0 -o mm:1",
        "experience gym:1 --estimator rloo -o ee:1", "export gym:1 --format verl -o v:1.parquet", "validate mm:1",
    ):  # fmt: skip
        assert main(words.split()) == 0, capsys.readouterr().err
    assert main(["query", "select count(*) as n from rollouts", "mm:1", "-o", "q:1.parquet"]) == 0
    assert gymdata.query("select count(*) as n from pairs", "pp:1").to_pylist() == [{"n": 3}]
    assert not is_copy("mm:1")


@pytest.mark.full
def test_a_large_object_is_fetched_whole(store: FaultyStore, tmp_path: Path) -> None:
    """70 MB, over a connection that is lost twice: every byte arrives."""
    body = b"".join(bytes([97 + number % 26]) * (1 << 20) for number in range(70))
    store.put("bucket/large.jsonl", body)
    store.fail("cut", "GET", "large", 2)
    assert fetched("s3://bucket/large.jsonl").read_bytes() == body
    assert copies(tmp_path / "cache/gymdata/fetched") == ["s3/bucket/large.jsonl"]
