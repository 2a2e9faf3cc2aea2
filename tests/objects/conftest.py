"""An S3 server for the tests of this folder, and a spool of their own."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.forks import Forks, forks
from tests.objects.stores import FaultyStore, faulty, s3
from tests.rollout_files import rollout, write_run

ROWS = [
    rollout(f"t{task}", n, float(n), [([1, 5 + task], [40 + n, 2])], text=f"q={n + 1}")
    for task in range(3)
    for n in range(2)
]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3() as url:
        yield url


@pytest.fixture(scope="session")
def processes() -> Iterator[Forks]:
    """Where writers that are killed come from."""
    loaded = [
        "gymdata.cli.main", "gymdata.cli.pairs", "gymdata.pairs.run", "gymdata.remote.reading", "obstore.store",
        "pandas", "polars", "numpy.random",
    ]  # fmt: skip
    with forks("tests.objects.appending", *loaded) as made:
        yield made


@pytest.fixture
def store(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """An empty bucket, faults to come, and the environment that leads there."""
    urlopen(Request(f"{server}/moto-api/reset", method="POST")).close()
    urlopen(Request(f"{server}/bucket", method="PUT")).close()
    with faulty(server) as store:
        for name, value in {
            "AWS_ENDPOINT_URL": store.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "hidden-secret",
            "AWS_REGION": "us-east-1",
            "GYMDATA_SPOOL": str(tmp_path / "spool"),
        }.items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A collected run of six rollouts, on this machine."""
    return write_run(tmp_path / "run", ROWS)


def upload(store: FaultyStore, folder: Path, key: str) -> None:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != "lock":
            store.put(f"bucket/{key}/{file.relative_to(folder)}", file.read_bytes())


@pytest.fixture
def stored(store: FaultyStore, run: Path) -> str:
    """That run as s3://bucket/runs/a."""
    upload(store, run, "runs/a")
    return "s3://bucket/runs/a"


def parquet_held(*folders: Path) -> int:
    """Bytes of Parquet that lie below these folders, under whatever name: a stand-in holds none."""
    held = 0
    for folder in folders:
        for file in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if file.is_file() and file.stat().st_size and file.open("rb").read(4) == b"PAR1":
                    held += file.stat().st_size
    return held


def plain(names: Iterable[str]) -> list[str]:
    """Names of objects, sorted, without the hashes of their content."""
    return sorted(re.sub(r"-[0-9a-f]{16}(?=\.)", "", name) for name in names)
