"""Every command that reads takes s3:// paths, from a real S3 server, also on its bad days."""

from __future__ import annotations

import json
import os
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, OutsideError, RefusedError, UsageError
from gymdata.remote import client
from gymdata.remote.places import place_of
from gymdata.remote.reading import located
from gymdata.store import read_run_json, write_run_json
from gymdata.train.annotations import run_behind
from tests.objects.conftest import ROWS, parquet_held, upload
from tests.objects.stores import FaultyStore

READS = {
    "validate": "validate {url}",
    "query": 'query "select count(*) from rollouts" {url}',
    "query of a glob": 'query "select count(*) from rollouts" s3://bucket/runs/*/rollouts/*.parquet',
    "show": "show {url}",
    "report": "report {url} -o {new}.html",
    "pairs": "pairs {url} -o {new}",
    "filter": "filter {url} --where reward>=1 -o {new}",
    "experience": "experience {url} --estimator rloo -o {new}",
    "score": "score {url} --reward regex:q -o {new}",
    "export of a file": "export {url}/rollouts/part-00000.parquet --format nemo-gym -o {new}.jsonl",
    "the rollouts folder": "validate {url}/rollouts",
}


@pytest.mark.parametrize("reads", READS)
def test_a_command_reads_what_lies_on_an_object_store(
    reads: str, stored: str, run: Path, store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command on the URL and on the local run ends alike; nobody is shown where the copy lies, and nothing is
    written to the store."""
    words = shlex.split(READS[reads].format(url=stored, new=tmp_path / "remote"))
    code = main(words)
    remote = capsys.readouterr()
    assert code == 0, remote.err
    assert str(tmp_path / "spool") not in remote.out + remote.err
    here = [word.replace("s3://bucket/runs/*", str(run)).replace(stored, str(run)) for word in words]
    assert main([word.replace(str(tmp_path / "remote"), str(tmp_path / "local")) for word in here]) == 0
    local = capsys.readouterr().out.replace(str(run), stored).replace(str(tmp_path / "local"), str(tmp_path / "remote"))
    if reads in ("query", "query of a glob", "show", "pairs", "filter", "experience"):
        assert remote.out == local
    assert store.count("PUT") + store.count("DELETE") + store.count("POST") == 0
    assert parquet_held(tmp_path / "spool") == 0


def test_parquet_of_other_formats_is_imported_from_an_object_store(
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


def test_no_annotations_are_written_beside_a_url(stored: str, tmp_path: Path) -> None:
    """What training saw goes beside the rollouts, which cannot be in a copy of theirs: refused with the URL, also for what
    was made of it here."""
    with pytest.raises(RefusedError, match="beside the rollouts, and they lie in s3://bucket") as refused:
        run_behind(located(stored))
    assert str(refused.value).startswith(f"{stored}: ")
    assert main(["experience", stored, "--estimator", "rloo", "-o", str(tmp_path / "e")]) == 0
    with pytest.raises(RefusedError, match="beside the rollouts, and they lie in s3://bucket"):
        run_behind(tmp_path / "e")


def test_the_python_functions_take_urls(stored: str) -> None:
    """load_rollouts, open and query read a URL like a folder; a Path of it, which lost a slash, is the same URL."""
    assert gymdata.load_rollouts(stored).num_rows == len(ROWS)
    assert gymdata.load_rollouts(Path(stored)).num_rows == len(ROWS)
    assert gymdata.open(stored).facts["run_id"] == "run-1"
    assert gymdata.query("select count(*) n from rollouts", stored).to_pylist() == [{"n": 6}]


def test_what_is_made_of_a_url_names_the_url(stored: str, tmp_path: Path) -> None:
    """run.json names the parent by its URL, the lineage is walked through it, and no secret is in any file."""
    assert main(["pairs", stored, "-o", str(tmp_path / "p")]) == 0
    parents = read_run_json(tmp_path / "p")["parents"]
    assert [one["path"] for one in parents] == [stored]
    from gymdata.store.lineage import lineage

    assert [facts["run_id"] for facts in lineage(tmp_path / "p") if "run_id" in facts] == ["run-1"]
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"hidden-secret" not in file.read_bytes(), file


def test_a_run_json_is_read_anew(stored: str, store: FaultyStore, run: Path) -> None:
    """A second command sees what was changed."""
    assert gymdata.open(stored).facts["run_id"] == "run-1"
    facts = json.loads((run / "run.json").read_bytes())
    store.put("bucket/runs/a/run.json", json.dumps({**facts, "notes": ["changed"]}).encode())
    assert gymdata.open(stored).facts["notes"] == ["changed"]


def test_what_was_removed_from_the_store_is_gone_here(stored: str, store: FaultyStore) -> None:
    """A file that the store no longer has is not read from the copy."""
    located(stored)
    store.delete("bucket/runs/a/rollouts/part-00000.parquet")
    with pytest.raises(DataError, match="names it with 6 rows"):
        gymdata.load_rollouts(stored)


def test_a_changed_object_is_refused_as_a_changed_file_is(
    stored: str, store: FaultyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are not those that run.json recorded are found on an object store, too (T209, and a refusal)."""
    body = store.get("bucket/runs/a/rollouts/part-00000.parquet")
    store.put("bucket/runs/a/rollouts/part-00000.parquet", body[:40] + bytes([body[40] ^ 1]) + body[41:])
    assert main(["validate", stored]) == 1
    capsys.readouterr()
    assert main(["pairs", stored, "-o", "never"]) == 1
    assert "s3://bucket/runs/a/rollouts/part-00000.parquet" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["503", "cut", "lost"])
@pytest.mark.parametrize("key", ["/bucket$", "run.json$", "parquet$"], ids=["list", "run.json", "part"])
def test_a_fault_that_passes_costs_nothing(kind: str, key: str, stored: str, store: FaultyStore) -> None:
    """A listing or a read that fails twice (503, a connection lost before the answer or in its middle) is tried again."""
    store.fail(kind, "GET", key, 2)
    assert gymdata.load_rollouts(stored).num_rows == len(ROWS)
    assert all(fault.count == 0 for fault in store.faults)


def test_a_store_that_is_waited_for_is_named(
    stored: str, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request that gets no answer is given up after its bound and made again; whoever waits is shown for which server, and
    for how long at most."""
    monkeypatch.setenv("GYMDATA_OBJECT_REQUEST_S", "0.5")
    monkeypatch.setattr("gymdata.remote.client.LATE_S", 0.1)
    store.fail("hang", "GET", "parquet$", 1)
    assert main(["validate", stored]) == 0
    assert store.faults[0].count == 0
    assert f"no good answer from {store.url} for" in (said := capsys.readouterr().err)
    assert "retrying for up to 3 min" in said


def test_a_store_that_stays_away_is_an_outside_error(
    stored: str, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, the system and the URL named, and no half of a file where a reader could take it for the whole."""
    monkeypatch.setenv("GYMDATA_OBJECT_RETRY_S", "0.5")
    store.fail("cut", "GET", "parquet$", 99)
    assert main(["validate", stored]) == 3
    said = capsys.readouterr().err
    assert "object store: s3://bucket/runs/a/rollouts/part-00000.parquet" in said
    assert "hidden-secret" not in said
    assert parquet_held(Path(os.environ["GYMDATA_SPOOL"])) == 0
    store.faults.clear()
    assert main(["validate", stored]) == 0


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("s3://bucket/none", 2, "s3://bucket/none: no such file or folder"),
        ("s3://other-bucket/x", 3, "there is no such bucket"),
        ("s3://key:hidden-secret@bucket/x", 2, "credentials and options do not belong in the path"),
        ("s3://bucket/x?versionId=1", 2, "credentials and options do not belong in the path"),
        ("s3://bucket/a/../b", 2, "without empty or dotted parts"),
        ("ftp://bucket/x", 2, "a URL that begins with s3://, gs://, az://, hf://"),
        ("s3://bucket/*/none", 2, "s3://bucket/*/none: no such file"),
        ("s3://bucket/g?m", 2, "s3://bucket/g?***: '?' in a key is not supported"),
        ("s3://bucket/x#hidden-secret", 2, "s3://bucket/x#***: '#' in a key is not supported"),
        ("s3:bucket/runs", 2, "got 's3:bucket/runs', expected s3://BUCKET/KEY"),
        ("gs:", 2, "got 'gs:', expected gs://BUCKET/KEY"),
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
    assert "credentials" not in err or "credentials" in said or code == 3


@pytest.mark.parametrize(
    ("name", "value", "code", "said"),
    [
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000", 2, "expected a URL such as http://127.0.0.1:9000, without a key"),
        ("AWS_ENDPOINT_URL", "http://key:hidden-secret@127.0.0.1:9", 2, "without a key"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", 3, "is http://127.0.0.1:9 reachable?"),
    ],
)
def test_a_server_that_cannot_be_is_named(
    name: str, value: str, code: int, said: str, store: FaultyStore, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The variable with what it must be; or the address where nothing answers, in one line each, without a key."""
    monkeypatch.setenv("GYMDATA_OBJECT_RETRY_S", "0.2")
    monkeypatch.setenv(name, value)
    assert main(["validate", "s3://bucket/x"]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "hidden-secret" not in err
    assert len(err.splitlines()) <= 2


def test_pages_of_a_run_on_a_store(stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """view and report write the pages of a URL as of a local run, and name the URL."""
    page = tmp_path / "page.html"
    assert main(["view", stored, "--export", str(page)]) == 0, capsys.readouterr().err
    assert main(["report", stored, "-o", str(tmp_path / "report.html")]) == 0
    for written in (page, tmp_path / "report.html"):
        assert str(tmp_path / "spool") not in written.read_text()
    assert stored in (tmp_path / "report.html").read_text()


@pytest.mark.full
def test_a_large_object_is_sent_and_fetched_in_parts(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 64 MB several requests carry a file each way; one that is lost is made again, and every byte arrives. A file
    that has a name of its own goes in one, on condition."""
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        for number in range(70):
            file.write(bytes([97 + number % 26]) * (1 << 20))
    store.fail("lost", "PUT", "large", 1)
    client.put(place_of("s3://bucket/large-0123456789abcdef.jsonl"), large, by_content=True)
    assert store.count("PUT", "large-") >= 3
    client.put(place_of("s3://bucket/large.jsonl"), large)
    with pytest.raises(client.TakenError):
        client.put(place_of("s3://bucket/large.jsonl"), b"other")
    assert store.count("PUT", "large.jsonl$") == 2
    store.fail("cut", "GET", "large", 2)
    assert located("s3://bucket/large.jsonl").read_bytes() == large.read_bytes()
    assert located("s3://bucket/large-0123456789abcdef.jsonl").read_bytes() == large.read_bytes()


def test_ls_of_a_url_fetches_only_run_jsons(stored: str, run: Path, store: FaultyStore) -> None:
    """Runs and outputs below a URL with their rows and sizes as the store has them; the data stays there."""
    assert main(["pairs", str(run)]) == 0
    upload(store, run, "runs/b")
    found = {one.path: one for one in gymdata.ls("s3://bucket/runs").outputs}
    assert {path: (one.kind, one.rows) for path, one in found.items()} == {
        "a": ("unknown", 6),
        "b": ("unknown", 6),
        "b/pairs-reward": ("pairs", 3),
    }
    assert found["b/pairs-reward"].bytes == sum(p.stat().st_size for p in (run / "pairs-reward").iterdir())
    assert store.count("GET", "parquet$") == 0


def test_ls_of_a_url_is_of_one_experiment(run: Path, store: FaultyStore) -> None:
    """Tags and experiments choose below a URL as below a folder: there they were not looked at."""
    facts = read_run_json(run)
    for key, of in (("runs/a", {"experiment": "first"}), ("runs/b", {"experiment": "second", "tags": ["x"]})):
        write_run_json(run, {**facts, **of})
        upload(store, run, key)
    assert [one.path for one in gymdata.ls("s3://bucket/runs", experiment="first").outputs] == ["a"]
    assert [one.path for one in gymdata.ls("s3://bucket/runs", tags=["x"]).outputs] == ["b"]


def test_ls_of_an_empty_bucket_finds_no_runs(store: FaultyStore, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty bucket is there and has no runs, like an empty folder; a missing bucket or folder in it is an error."""
    assert main(["ls", "s3://bucket"]) == 0
    assert capsys.readouterr().out == "no runs below s3://bucket\n"
    assert main(["ls", "s3://bucket/runs"]) == 2
    assert main(["ls", "s3://nobucket"]) == 3


def test_a_run_json_that_names_a_newer_part_is_looked_at_again(stored: str, store: FaultyStore, run: Path) -> None:
    """A part that is sent while a reader is at work belongs to what the reader reads."""
    whole = json.loads((run / "run.json").read_bytes())
    part = store.get("bucket/runs/a/rollouts/part-00000.parquet")
    store.delete("bucket/runs/a/rollouts/part-00000.parquet")
    store.put("bucket/runs/a/run.json", json.dumps({**whole, "files": []}).encode())

    def sealed() -> None:
        store.put("bucket/runs/a/rollouts/part-00000.parquet", part)
        store.put("bucket/runs/a/run.json", json.dumps(whole).encode())

    store.fail("stop", "GET", "run.json$", act=sealed)
    assert gymdata.load_rollouts(stored).num_rows == len(ROWS)


@pytest.mark.parametrize("url", ["s3://bucket/x", Path("s3://bucket/x")])
def test_without_the_extra_the_command_that_installs_it_is_named(
    url: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path on an object store needs the extra s3, and says so."""
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match="obstore"):
        located(url)


def test_a_key_that_is_refused_is_an_outside_error(
    stored: str, store: FaultyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """403 is attributed to the store and names the variables that hold the key."""
    store.fail("403", "GET", "/bucket$", 9)
    with pytest.raises(OutsideError) as caught:
        located(stored)
    assert "AWS_ACCESS_KEY_ID" in (caught.value.hint or "")


@pytest.mark.parametrize("answers", [False, True], ids=["nothing listens", "another provider's server"])
def test_gs_without_credentials_is_said_at_once(
    answers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials in the environment, of gcloud or of a Google Cloud machine, no request is tried for minutes."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "SERVICE_ACCOUNT"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GYMDATA_OBJECT_RETRY_S", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        if answers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.socket.close()
        assert main(["ls", "gs://a-bucket/runs"]) == 3
        if answers:
            server.shutdown()
    said = capsys.readouterr().err
    assert "gs://a-bucket: found no credentials" in said
    assert "GOOGLE_APPLICATION_CREDENTIALS" in said
