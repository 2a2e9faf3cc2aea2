"""hf:// paths: files of repositories on the Hub are read where they are, as they were at one commit, and never written."""

from __future__ import annotations

from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, OutsideError, UsageError
from tests.objects.conftest import ROWS, Hub, parquet_held

URL = "hf://datasets/org/repo/runs/a"


def ids(url: str) -> list[str]:
    return sorted(gymdata.load_rollouts(url, ["rollout_id"])["rollout_id"].to_pylist())


def test_a_run_on_the_hub_is_read_where_it_is(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is validated, queried, listed and turned into pairs here; no Parquet of it comes to rest on this disk."""
    assert main(["validate", URL]) == 0
    assert main(["query", "SELECT count(*) AS n FROM rollouts", URL, "--json"]) == 0
    assert '"n": 6' in capsys.readouterr().out
    assert main(["ls", "hf://datasets/org/repo"]) == 0
    assert "runs/a" in capsys.readouterr().out
    assert main(["pairs", URL, "-o", str(tmp_path / "pairs.parquet")]) == 0
    assert parquet_held(tmp_path / "spool") == 0
    assert ids(f"{URL}/rollouts/*.parquet") == sorted(row["rollout_id"] for row in ROWS)


def test_one_commit_is_read(hub: Hub) -> None:
    """What is pushed while a command runs does not mix with what it began to read; a revision is named behind @."""
    before = ids(URL)
    hub.commit("c2", {"other.txt": b"-"})
    assert ids(URL) == before
    assert ids("hf://datasets/org/repo@c1/runs/a") == before
    with pytest.raises(DataError, match="no such file or folder"):
        ids("hf://datasets/org/repo@main/runs/a")
    with pytest.raises(OutsideError, match="no such revision"):
        ids("hf://datasets/org/repo@c3/runs/a")


def test_the_hub_is_not_written(hub: Hub, tmp_path: Path) -> None:
    """An output there is refused before anything is made."""
    with pytest.raises(UsageError, match="only read"):
        gymdata.pairs(URL, output="hf://datasets/org/repo/pairs")
    assert all(method in ("GET", "HEAD") or "paths-info" in path for method, path in hub.asked)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hf://datasets/org/other/x", "there is no such repository"),
        ("hf://datasets", "hf://datasets/ORG/REPO"),
        ("hf://datasets/org", "hf://datasets/ORG/REPO"),
        ("hf://datasets/org/re..po/x", "the name of a repository"),
    ],
)
def test_what_is_not_there_is_named(hub: Hub, url: str, said: str) -> None:
    """A repository that does not exist, and a path that names none, are told apart."""
    with pytest.raises((OutsideError, UsageError), match=said):
        ids(url)


def test_a_server_that_fails_is_an_error_of_the_store(hub: Hub) -> None:
    """It is attributed, and says which server it was."""
    hub.status = 500
    with pytest.raises(OutsideError, match=r"object store: .*the server answered 500") as error:
        ids(URL)
    assert hub.url in str(error.value)


def test_offline_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is named as the reason."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OutsideError, match="HF_HUB_OFFLINE is set"):
        ids(URL)
