"""``gymdata doctor URL``: the store itself is tried, and nothing stays there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from tests.objects.stores import FaultyStore


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/not/there/yet"])
def test_an_object_is_written_replaced_and_deleted(url: str, store: FaultyStore) -> None:
    """Below the URL, which need not be there; the disk that is reported is named as the spool's."""
    found = {check.name: check for check in gymdata.doctor(url).checks}
    assert (found["folder"].state, found["folder"].found) == (
        "ok", f"{url}: an object was written, replaced on condition, and deleted",
    )  # fmt: skip
    assert (
        f"free on this machine in {os.environ['GYMDATA_SPOOL']}, where outputs wait for their upload"
        in found["spool"].found
    )
    assert "disk" not in found
    assert store.names() == []


def test_a_store_that_refuses_is_a_fault(store: FaultyStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, with what the store said."""
    assert main(["doctor", "s3://other-bucket/x"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "FAULT: s3://other-bucket/x: object store: s3://other-bucket: there is no such bucket" in shown


def test_a_url_that_cannot_be_is_a_usage_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing is looked at."""
    assert main(["doctor", "ftp://host/x"]) == 2
    assert "a URL that begins with s3://" in capsys.readouterr().err
