"""A run on an object store: killed at every request, resumed here and on another machine, by one writer at a time."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, OutsideError, StoreError
from gymdata.store import Run
from gymdata.store.paths import placed_output
from gymdata.store.reading import DataWarning
from tests.forks import Fork, Forks
from tests.objects.appending import append, forked
from tests.objects.conftest import plain
from tests.objects.stores import FaultyStore
from tests.store.conftest import make_row

URL = "s3://bucket/runs/new"
IDS = [f"{index:032x}" for index in range(5)]


IdsAt = Callable[[str], list[str]]


@pytest.fixture
def ids_at(tmp_path: Path) -> IdsAt:
    """What a machine reads whose spool has this name."""

    def read(spool: str) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GYMDATA_SPOOL", str(tmp_path / spool))
            return sorted(gymdata.load_rollouts(URL, ["rollout_id"])["rollout_id"].to_pylist())

    return read


@contextmanager
def journaling(processes: Forks, spool: Path) -> Iterator[Fork]:
    """A process that has appended five rows, the last in its journal, and that closes the run when the block ends."""
    fifo = spool.with_name("fifo")
    os.mkfifo(fifo)
    typed = [URL, str(spool), "0", "5", f"wait={fifo}"]
    writer = processes.start(forked, dict(os.environ), str(spool.with_name("said")), "append", typed)
    # It is opened here when it is opened there.
    with fifo.open("wb"):
        yield writer


def test_a_run_is_written_to_an_object_store(store: FaultyStore, tmp_path: Path, ids_at: IdsAt) -> None:
    """Sealed parts and run.json are there, and nothing else; another machine reads the rows and checks every byte."""
    append(URL, tmp_path / "a", 0, 5)
    assert plain(store.names()) == [f"runs/new/rollouts/part-0000{n}.parquet" for n in range(3)] + ["runs/new/run.json"]
    assert ids_at("b") == IDS
    assert main(["validate", URL]) == 0
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"hidden-secret" not in file.read_bytes()


def test_a_run_grows_while_it_is_read(store: FaultyStore, tmp_path: Path, ids_at: IdsAt) -> None:
    """What was sealed is on the store before the run ends: another machine reads it, and ls calls it being written."""
    folder = placed_output(URL, tmp_path / "a")
    with Run.open(folder, identity={}, extent={}, operation={}, rows_per_file=2) as run:
        for index in range(5):
            run.append(make_row(index))
        while b"part-00001" not in (
            store.get("bucket/runs/new/run.json") if "runs/new/run.json" in store.names() else b""
        ):
            pass
        assert ids_at("b") == IDS[:4]
        assert [one.state for one in gymdata.ls("s3://bucket/runs").outputs] == ["being written"]
        assert sorted(gymdata.load_rollouts(folder)["rollout_id"].to_pylist()) == IDS
    assert [one.state for one in gymdata.ls("s3://bucket/runs").outputs] == ["complete"]
    assert ids_at("b") == IDS


@pytest.mark.parametrize(
    ("done", "other"),
    [(False, True), pytest.param(True, False, marks=pytest.mark.full)],
    ids=["before, other machine", "after, same machine"],
)
def test_a_kill_at_any_request_loses_and_doubles_nothing(
    done: bool, other: bool, store: FaultyStore, tmp_path: Path, ids_at: IdsAt, processes: Forks
) -> None:
    """The writer is killed before or after each of its changes to the store. What is there then is a whole run with some of
    the rows; resumed here, or on another machine in its place, the run has each row once."""
    killed = 0
    for number in range(1, 16):
        for key in store.names():
            store.delete(f"bucket/{key}")
        spool = tmp_path / f"a{number}"
        writer: list[Fork] = []
        store.stop_at("stop after" if done else "stop", "runs/new", number, writer)
        said, typed = tmp_path / "said", [URL, str(spool), "0", "5", "each"]
        writer.append(processes.start(forked, dict(os.environ), str(said), "append", typed))
        code = writer[0].wait()
        store.faults.clear()
        if code == 0:
            break
        assert code == -9, said.read_text()
        killed += 1
        try:
            assert set(ids_at(f"reader{number}")) <= set(IDS)
        except DataError as error:
            # Before the first run.json.
            assert "runs/new/run.json" not in store.names(), error
        if other:
            append(URL, tmp_path / f"b{number}", 0, 5, "take-over")
        else:
            append(URL, spool, 0, 5)
        assert ids_at(f"reader{number}") == IDS
    else:
        pytest.fail("the writer makes more changes than this test kills")
    sys.stdout.write(f"\nKILLED at {killed} changes of the store: 0 rows lost, 0 doubled\n")
    assert killed >= 5


@pytest.mark.parametrize("kind", ["503", "truncated", "lost"])
@pytest.mark.parametrize("key", ["part-00000-\\w+.parquet$", "run.json$"])
def test_a_fault_that_passes_costs_nothing(
    kind: str, key: str, store: FaultyStore, tmp_path: Path, ids_at: IdsAt
) -> None:
    """503, half an upload and a lost answer, twice at each kind of request: the run is whole, each row once."""
    store.fail(kind, "PUT", key, 2)
    append(URL, tmp_path / "a", 0, 5)
    assert all(fault.count == 0 for fault in store.faults)
    assert ids_at("b") == IDS


@pytest.mark.full
def test_a_store_that_stays_away_costs_no_row(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids_at: IdsAt
) -> None:
    """Rows are taken while nothing can be sent; the run ends with an error of the store, and the same command sends the
    rest."""
    monkeypatch.setenv("GYMDATA_OBJECT_RETRY_S", "0.3")
    folder = placed_output(URL, tmp_path / "a")
    run = Run.open(folder, identity={"policy": "tiny"}, extent={}, operation={}, run_id="run", rows_per_file=2)
    store.fail("503", "PUT", "runs/new", 10_000)
    for index in range(5):
        run.append(make_row(index))
    with pytest.raises(OutsideError, match="object store"):
        run.close()
    store.faults.clear()
    asked = len(store.asked)
    append(URL, tmp_path / "a", 0, 5)
    assert len(store.asked) > asked
    assert ids_at("b") == IDS


def sent_parts(store: FaultyStore) -> int:
    return len(json.loads(store.get("bucket/runs/new/run.json"))["files"])


def test_what_a_lost_machine_loses(store: FaultyStore, tmp_path: Path, ids_at: IdsAt, processes: Forks) -> None:
    """Rows that were journaled and not sealed are on that machine alone: another that takes its place has the others, and
    the first one, back again, is told and keeps what it had."""
    with journaling(processes, tmp_path / "a") as lost:
        while sent_parts(store) < 2:
            pass  # they are on their way
        lost.kill()
        lost.wait()
    assert ids_at("b") == IDS[:4]
    with pytest.raises(StoreError, match=r"another machine writes this run .*it last sent something at"):
        append(URL, tmp_path / "b", 0, 5)
    append(URL, tmp_path / "b", 0, 5, "take-over")
    assert ids_at("c") == IDS
    with pytest.raises(StoreError, match="another machine has written here, and"):
        append(URL, tmp_path / "a", 0, 5)
    assert list((tmp_path / "a").rglob("*.journal"))


def test_a_writer_whose_place_was_taken_changes_nothing(
    store: FaultyStore, tmp_path: Path, ids_at: IdsAt, processes: Forks
) -> None:
    """A machine that was thought to be gone is refused at its next change of run.json, and the store stays as the other
    one left it."""
    with journaling(processes, tmp_path / "a") as zombie:
        while sent_parts(store) < 2:
            pass  # they are on their way, and run.json once more
        append(URL, tmp_path / "b", 0, 5, "take-over")
        before = {key: store.get(f"bucket/{key}") for key in store.names()}
    assert zombie.wait() == 2
    assert "another machine took over this run" in (tmp_path / "said").read_text()
    assert {key: store.get(f"bucket/{key}") for key in store.names() if key in before} == before
    assert ids_at("c") == IDS


def test_overwrite_removes_what_was_there(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids_at: IdsAt
) -> None:
    """With --overwrite the old parts, and what was made of them, leave the store once the new run.json is there."""
    append(URL, tmp_path / "a", 0, 5)
    with monkeypatch.context() as patch:
        patch.setenv("GYMDATA_SPOOL", str(tmp_path / "a"))
        assert main(["filter", URL, "--where", "reward>=0", "-o", f"{URL}/kept"]) == 0
        assert main(["score", URL, "--reward", "regex:7", "--name", "seven"]) == 0
    store.put("bucket/runs/new/audit-tiny/run.json", b'{"stage": "audit"}')
    folder = placed_output(URL, tmp_path / "b")
    with (
        pytest.warns(DataWarning, match=r"s3://bucket/runs/new: overwrite=True removes .* scores-seven/"),
        Run.open(folder, identity={"policy": "new"}, extent={}, operation={}, overwrite=True) as run,
    ):
        run.append(make_row(9))
    assert plain(store.names()) == [
        "runs/new/kept/rollouts.parquet", "runs/new/kept/run.json", "runs/new/rollouts/part-00000.parquet",
        "runs/new/run.json",
    ]  # fmt: skip
    assert ids_at("c") == [f"{9:032x}"]


def test_failures_are_sent(store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts that failed are on the store, too, and are counted on another machine."""
    folder = placed_output(URL, tmp_path / "a")
    with Run.open(folder, identity={}, extent={}, operation={}) as run:
        run.fail({"kind": "engine", "message": "gone"})
    monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "b"))
    assert gymdata.query("select kind from failures", URL).to_pylist() == [{"kind": "engine"}]


def test_an_import_goes_to_an_object_store(
    run: Path, store: FaultyStore, tmp_path: Path, ids_at: IdsAt, capsys: pytest.CaptureFixture[str]
) -> None:
    """import -o s3://…: the rows, and the file of those that were rejected."""
    nemo = tmp_path / "nemo.jsonl"
    assert main(["export", str(run), "-o", str(nemo), "--format", "nemo-gym"]) == 0
    with nemo.open("a") as file:
        file.write('{"no": "rollout"}\n')
    main(["import", str(nemo), "-o", URL])
    assert "runs/new/rejected.jsonl" in store.names()
    assert len(ids_at("b")) == 6
    assert str(os.environ["GYMDATA_SPOOL"]) not in json.dumps(json.loads(store.get("bucket/runs/new/run.json")))


def test_a_run_whose_writer_was_killed_on_this_machine_is_interrupted(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Forks
) -> None:
    """Its lock is still there: elsewhere it counts as being written, here, where its rows are, it does not."""
    with journaling(processes, tmp_path / "a") as writer:
        monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "a"))
        assert [one.state for one in gymdata.ls("s3://bucket/runs").outputs] == ["being written"]
        writer.kill()
        writer.wait()
    assert [one.state for one in gymdata.ls("s3://bucket/runs").outputs] == ["interrupted"]
    monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "b"))
    assert [one.state for one in gymdata.ls("s3://bucket/runs").outputs] == ["being written"]


def test_a_refused_command_leaves_no_lock(store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of other files is refused, and another machine may write the run afterwards; so is one without --overwrite
    where another machine's lock lies, which --overwrite takes over."""
    rows = (Path(__file__).parents[2] / "sample_data/rollouts/nemo_gym.jsonl").read_text().splitlines(keepends=True)
    whole, half = tmp_path / "whole.jsonl", tmp_path / "half.jsonl"
    whole.write_text("".join(rows))
    half.write_text("".join(rows[:5]))
    assert main(["import", str(whole), "-o", URL]) == 0
    before = store.names()
    assert main(["import", str(half), "-o", URL]) == 2
    assert store.names() == before
    facts = json.loads(store.get("bucket/runs/new/run.json"))
    facts["attempts"][-1] |= {"host": "elsewhere", "pid": 1, "ended_at": None}
    store.put("bucket/runs/new/run.json", json.dumps(facts).encode())
    monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "other"))
    with pytest.raises(StoreError, match="`import` with overwrite=True"):
        gymdata.import_rollouts([whole], output=URL)
    gymdata.import_rollouts([whole], output=URL, overwrite=True)
    assert plain(store.names()) == plain(before)


def test_an_upload_that_ends_after_the_run_was_taken_over_changes_nothing(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hangs in the upload of part 1, in several requests; B takes over and finishes; A's upload completes, A ends: every
    reader sees exactly B's rows, validate and pairs succeed, and ls calls the run complete."""
    monkeypatch.setattr("gymdata.remote.client.WHOLE", 1000)
    hangs, back = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert back.wait(60)

    store.fail("stop", "PUT", "part-00001", act=hang)
    first = Run.open(
        placed_output(URL, tmp_path / "a"), identity={"policy": "tiny"}, extent={"rows": 5}, operation={}, run_id="run",
        rows_per_file=2,
    )  # fmt: skip
    for index in (0, 1, 2, 7):
        first.append(make_row(index))
    assert hangs.wait(60)
    append(URL, tmp_path / "b", 0, 5, "take-over")
    before = {key: store.get(f"bucket/{key}") for key in store.names()}
    back.set()
    with pytest.raises(StoreError, match="another machine took over"):
        first.close()
    assert {key: store.get(f"bucket/{key}") for key in before} == before
    assert sorted(gymdata.load_rollouts(URL, ["rollout_id"])["rollout_id"].to_pylist()) == IDS
    ids = gymdata.query("select rollout_id from rollouts order by 1", f"{URL}/rollouts/*.parquet")["rollout_id"]
    assert ids.to_pylist() == IDS
    assert main(["validate", URL]) == 0
    assert main(["pairs", URL, "-o", str(tmp_path / "pairs"), "--strategy", "all"]) in (0, 1)
    assert "differs from" not in capsys.readouterr().err
    assert [each.state for each in gymdata.ls("s3://bucket/runs").outputs] == ["complete"]
