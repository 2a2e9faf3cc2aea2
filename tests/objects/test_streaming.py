"""Parquet on an object store is read where it is: no copy of it, no byte unchecked, and every fault named by the URL."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.remote import client
from gymdata.remote.places import place_of
from gymdata.remote.reading import refer
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import hash_file, write_table
from gymdata.store.partial_reads import verified_datasets
from tests.forks import Forks
from tests.objects.appending import forked
from tests.objects.conftest import parquet_held, upload
from tests.objects.stores import FaultyStore
from tests.rollout_files import rollout, rollouts_table

URL = "s3://bucket/runs/large"
PARTS, EACH = 3, 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three parts of more than 2 MB, which no single read brings whole, as its run.json describes them."""
    folder = tmp_path_factory.mktemp("large")
    random = np.random.default_rng(0)
    files = []
    for part in range(PARTS):
        rows = [
            rollout(f"t{part}", n, float(n % 2), [([1, 5], random.integers(3, 1 << 30, 100_000).tolist())])
            for n in range(EACH)
        ]
        file = folder / f"rollouts/part-0000{part}.parquet"
        write_table(rollouts_table(rows), file, ROLLOUTS)
        assert file.stat().st_size > 2 << 20
        files.append(
            {"path": f"rollouts/{file.name}", "rows": EACH, "bytes": file.stat().st_size, "xxh3": hash_file(file)}
        )
    (folder / "run.json").write_text(json.dumps({"run_id": "run-1", "files": files}))
    return folder


def elsewhere(processes: Forks, folder: Path) -> str:
    """What a query says that another process makes, after which this one has nothing of the run in memory."""
    typed = ["query", "select sum(reward) from rollouts", URL]
    assert processes.start(forked, dict(os.environ), str(folder / "said"), "gymdata", typed).wait() == 0
    return (folder / "said").read_text()


def served(store: FaultyStore) -> int:
    return sum(size for key, size in store.served if key.endswith(".parquet"))


def test_only_what_is_read_travels(large: Path, store: FaultyStore, processes: Forks, tmp_path: Path) -> None:
    """Each part is read once from end to end, to be compared with run.json, then its columns; another process reads the
    columns alone, and no part ever lies on this disk."""
    upload(store, large, "runs/large")
    spool = Path(os.environ["GYMDATA_SPOOL"])
    found: list[int] = []
    store.look = lambda: found.append(parquet_held(spool))
    whole = sum(file.stat().st_size for file in large.rglob("*.parquet"))
    assert gymdata.load_rollouts(URL).equals(gymdata.load_rollouts(large))
    assert whole <= served(store) < 2.5 * whole
    store.served.clear()
    assert "6\n" in elsewhere(processes, tmp_path)
    assert 0 < served(store) < whole / 5
    sys.stdout.write(
        f"\nREAD WHERE IT IS: {whole:,} bytes; a query of one column {served(store):,}; on the disk {max(found)}\n"
    )
    assert max(found) == 0


def test_many_threads_read_one_object(large: Path, store: FaultyStore) -> None:
    """DuckDB, Polars and validate read several columns at once: the values are those of the local run."""
    upload(store, large, "runs/large")
    tokens = "list_sum(list_transform(turns, lambda t: list_sum(t.generation_token_ids)))"
    sql = f"select rollout_id, {tokens} s from rollouts order by 1"
    for _ in range(3):
        assert gymdata.query(sql, URL).equals(gymdata.query(sql, large))
    assert main(["validate", URL]) == 0
    assert main(["filter", URL, "--where", "reward>=1", "-o", "s3://bucket/kept"]) == 0
    assert gymdata.load_rollouts("s3://bucket/kept").num_rows == PARTS * EACH // 2
    assert parquet_held(Path(os.environ["GYMDATA_SPOOL"])) == 0


@pytest.mark.matrix("query;select sum(len(turns)) from rollouts;{url}-3")
@pytest.mark.parametrize(
    ("words", "good"),
    [
        ("query;select sum(len(turns)) from rollouts;{url}", 3),
        ("query;select count(*) from rollouts where reward>=1;{url}", 2),
        ("query;select sum(len(turns)) from rollouts where reward>=1;{url}", 6),
        ("filter;{url};--where;reward>=1;-o;{new}", 1),
        ("validate;{url}", 1),
        ("pairs;{url};-o;{new}", 1),
        ("export;{url};--format;nemo-gym;-o;{new}.jsonl", 1),
    ],
)
def test_a_store_that_goes_away_while_it_is_read(
    words: str, good: int, large: Path, store: FaultyStore, processes: Forks, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """After so many good requests all fail: exit code 3 and the URL, from every reader; the same command then works."""
    upload(store, large, "runs/large")
    elsewhere(processes, tmp_path)
    typed = words.format(url=URL, new=tmp_path / "new").split(";")
    monkeypatch.setenv("GYMDATA_OBJECT_RETRY_S", "0.3")
    store.fail("none", "GET", "parquet$", good)
    store.fail("503", "GET", "parquet$", 999)
    assert main(typed) == 3
    err = capsys.readouterr().err
    assert "object store: s3://bucket/runs/large/rollouts/part-0000" in err
    assert str(tmp_path / "spool") not in err
    store.faults.clear()
    assert main(typed) == 0


def test_what_was_refused_once_is_not_called_an_error_of_the_query(
    large: Path, store: FaultyStore, processes: Forks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request that is refused while DuckDB reads, once: the error is the store's, though every file can be read again."""
    upload(store, large, "runs/large")
    elsewhere(processes, tmp_path)
    store.fail("none", "GET", "parquet$", PARTS)
    store.fail("403", "GET", "parquet$", 1)
    assert main(["query", "select sum(len(turns)) from rollouts", URL]) == 3
    assert "object store: s3://bucket/runs/large/rollouts/part-0000" in capsys.readouterr().err


def test_an_object_that_changes_while_it_is_read_is_an_error(
    large: Path, store: FaultyStore, processes: Forks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never rows of two states: the part that is replaced between two requests is named, and the next command compares
    what is there now with run.json."""
    upload(store, large, "runs/large")
    other = (large / "rollouts/part-00001.parquet").read_bytes()
    elsewhere(processes, tmp_path)

    def replace() -> None:
        store.put("bucket/runs/large/rollouts/part-00000.parquet", other)

    store.fail("none", "GET", "part-00000.parquet$", 1)
    store.fail("stop", "GET", "part-00000.parquet$", act=replace)
    assert main(["validate", URL]) == 3
    assert "s3://bucket/runs/large/rollouts/part-00000.parquet: was changed or removed while" in capsys.readouterr().err
    assert main(["pairs", URL, "-o", "never"]) == 1
    assert "s3://bucket/runs/large/rollouts/part-00000.parquet" in capsys.readouterr().err


def test_a_damaged_page_is_found_where_changed_files_are_allowed(
    large: Path, store: FaultyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checksum of each page is looked at on the way, as for a local file: the part is named by its URL."""
    upload(store, large, "runs/large")
    body = bytearray(store.get("bucket/runs/large/rollouts/part-00001.parquet"))
    # The texts of the messages come first, then the token ids.
    body[len(body) * 3 // 4] ^= 1
    store.put("bucket/runs/large/rollouts/part-00001.parquet", bytes(body))
    words = ["experience", URL, "--estimator", "rloo", "-o", str(tmp_path / "new")]
    assert main(words) == 1
    assert "other bytes (xxh3)" in capsys.readouterr().err
    assert main([*words, "--allow-changed"]) == 1
    err = capsys.readouterr().err
    assert "s3://bucket/runs/large/rollouts/part-00001.parquet" in err
    assert "checksum" in err


def test_a_part_that_is_uploaded_while_it_is_read(large: Path, store: FaultyStore, tmp_path: Path) -> None:
    """A reader of staged rows goes on with those of the store once the writer has sent and removed them."""
    upload(store, large, "runs/large")
    part = tmp_path / "spool/staging/s3/bucket/runs/large/rollouts/part-00000.parquet"
    part.parent.mkdir(parents=True)
    shutil.copyfile(large / "rollouts/part-00000.parquet", part)
    (data,) = verified_datasets([part], ROLLOUTS)
    place = place_of(f"{URL}/rollouts/part-00000.parquet")
    there = client.head(place)
    assert there is not None
    refer(place, there, part)
    assert parquet_held(Path(os.environ["GYMDATA_SPOOL"])) == 0
    assert data.scanner(columns=["rollout_id"]).to_reader().read_all().num_rows == EACH
    assert hash_file(part) == hash_file(large / "rollouts/part-00000.parquet")
