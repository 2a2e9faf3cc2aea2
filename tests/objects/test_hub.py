"""hf: paths: files of data sets on the Hub, as they were at one commit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.collect.task_files import task_files
from gymdata.errors import DataError, OutsideError, UsageError
from gymdata.store import read_run_json
from tests.objects.conftest import ROWS, Hub

URL = "hf:org/repo/runs/a"


def ids(url: str) -> list[str]:
    return sorted(gymdata.load_rollouts(url, ["rollout_id"])["rollout_id"].to_pylist())


def test_a_run_on_the_hub_is_read(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is validated, queried and turned into pairs here, whose parent names the commit; nothing is fetched twice."""
    assert main(["validate", URL]) == 0
    assert main(["query", "SELECT count(*) AS n FROM rollouts", URL, "--json"]) == 0
    assert '"n": 6' in capsys.readouterr().out
    assert main(["pairs", URL, "-o", str(tmp_path / "pairs")]) == 0
    assert [one["path"] for one in read_run_json(tmp_path / "pairs")["parents"]] == ["hf://datasets/org/repo@c1/runs/a"]
    expected = sorted(row["rollout_id"] for row in ROWS)
    for url in (f"{URL}/rollouts/*.parquet", "hf://datasets/org/repo/runs/a", f"{URL}/rollouts/part-00000.parquet"):
        assert ids(url) == expected
    assert sum(method == "GET" and path.endswith(".parquet") for method, path in hub.asked) == 1
    assert all(method in ("GET", "HEAD") for method, path in hub.asked)


def test_tasks_are_a_file_of_a_repository(hub: Hub) -> None:
    """A dataset's name alone is loaded by `datasets`; the URL of a file is fetched."""
    hub.commit("c2", {"tasks.jsonl": b'{"prompt": "q"}\n'})
    (file,) = task_files("hf://datasets/org/repo/tasks.jsonl")
    assert file.read_bytes() == b'{"prompt": "q"}\n'


def test_one_commit_is_read(hub: Hub) -> None:
    """The newest, or that of the revision behind @: what another one lacks is not read from an older copy."""
    before = ids(URL)
    hub.commit("c2", {"other.txt": b"-"})
    assert ids("hf:org/repo@c1/runs/a") == before
    with pytest.raises(DataError, match="no such file or folder"):
        ids(URL)
    with pytest.raises(OutsideError, match="c3"):
        ids("hf:org/repo@c3/runs/a")


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("hf:org/other/x", OutsideError, "hf://datasets/org/other/x: 401 Client Error"),
        ("hf://datasets", UsageError, r"hf:ORG/NAME\[@REVISION\]\[/PATH\]"),
        ("hf:org", UsageError, "hf:ORG/NAME"),
        ("hf://org/model/x", UsageError, "hf:ORG/NAME"),
        ("hf:org/re..po/x", OutsideError, "re..po"),
    ],
)
def test_what_is_not_there_is_named(hub: Hub, url: str, error: type[Exception], said: str) -> None:
    """A repository that does not exist, and a path that names none, are told apart."""
    with pytest.raises(error, match=said):
        ids(url)


def test_a_server_that_fails_is_an_error_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is attributed, and says which server it was; so is one that must not be asked."""
    hub.status = 500
    with pytest.raises(OutsideError, match=r"hub: hf://datasets/org/repo/runs/a: .*500") as error:
        ids(URL)
    assert hub.url in str(error.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OutsideError, match="HF_HUB_OFFLINE"):
        ids(URL)


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path on the Hub needs the extra hub, and says so."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="huggingface_hub"):
        ids(URL)
