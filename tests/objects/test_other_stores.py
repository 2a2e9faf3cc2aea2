"""Google Cloud Storage and Azure: what differs from S3 in how they list and compare objects changes nothing for a reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gymdata
from gymdata.errors import OutsideError
from gymdata.store.fetch import fetched
from tests.objects.conftest import ROWS
from tests.objects.stores import Objects, objects

pytestmark = pytest.mark.store
ENVIRONMENT = {
    "gs": {"GOOGLE_BEARER_TOKEN": "hidden-secret"},
    "az": {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "aGlkZGVuLXNlY3JldA=="},
}
ADDRESS = {"gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}


@pytest.fixture(params=["gs", "az"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def held(scheme: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """A bucket of that kind with a run, and the environment that leads there."""
    with objects(azure=scheme == "az") as (made, url):
        for name, value in {
            **ENVIRONMENT[scheme],
            ADDRESS[scheme]: url,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        for file in run.rglob("*"):
            if file.is_file():
                made.put(f"run/{file.relative_to(run)}", file.read_bytes())
        yield made


def test_a_run_is_read_and_fetched_again_when_it_changed(scheme: str, held: Objects) -> None:
    """An object that was fetched is known again in a list, with or without the quotes of its tag."""
    url = f"{scheme}://bucket/run"
    assert gymdata.load_rollouts(url).num_rows == len(ROWS)
    held.asked.clear()
    assert gymdata.load_rollouts(url).num_rows == len(ROWS)
    assert not [path for path in held.asked if path.endswith(".parquet")]
    held.put("run/rollouts/part-00000.parquet", b"other")
    assert fetched(f"{url}/rollouts/part-00000.parquet").read_bytes() == b"other"


def test_no_key_leads_out_of_the_cache(scheme: str, held: Objects, tmp_path: Path) -> None:
    """A store may list any key: one with dotted parts is left out, or refused as a whole."""
    held.put("run/../../../../../escaped", b"x")
    try:
        assert gymdata.load_rollouts(f"{scheme}://bucket/run").num_rows == len(ROWS)
    except OutsideError as error:
        assert "escaped" in str(error)
    assert not [file for file in tmp_path.rglob("escaped*") if file.is_file()]


def test_a_missing_bucket_is_named(scheme: str, held: Objects) -> None:
    """A bucket or a container that is not there is an error of the store."""
    with pytest.raises(OutsideError, match=f"object store: {scheme}://other/run: "):
        gymdata.load_rollouts(f"{scheme}://other/run")
