"""hf:// paths: files of repositories on the Hub are read where they are, as they were at one commit, and never written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import gymdata
from gymdata.cli.main import main
from gymdata.errors import DataError, OutsideError, UsageError
from tests.objects.conftest import ROWS, parquet_held
from tests.rollout_files import write_run
from tests.servers import serving

URL = "hf://datasets/org/repo/runs/a"


@dataclass
class Hub:
    """Answers as the Hub's API does for one dataset, ``org/repo``: a fake at the port. Each commit is its files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    status: int = 0
    url: str = ""

    def commit(self, sha: str, files: dict[str, bytes], branch: str = "main") -> None:
        self.commits[sha] = files
        self.branches[branch] = sha

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        if self.status:
            return web.Response(status=self.status)
        if (found := re.fullmatch(r"/api/datasets/org/repo(?:/revision/(\w+))?", request.path)) is not None:
            if (sha := self._sha(found[1] or "main")) is None:
                return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
            return web.json_response({"id": "org/repo", "sha": sha, "lastModified": "2026-11-01T10:00:00.000Z"})
        if (found := re.fullmatch(r"/api/datasets/org/repo/(tree|paths-info)/(\w+)/?(.*)", request.path)) is not None:
            there = self.commits[found[2]]
            inside = found[3]
            wanted = (await request.post()).getall("paths") if found[1] == "paths-info" else []
            names = [
                name for name in there if name in wanted or (not wanted and name.startswith(f"{inside}/".lstrip("/")))
            ]
            if not wanted and not names:
                return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
            return web.json_response([self._entry(name, there[name]) for name in names])
        if (found := re.fullmatch(r"/datasets/org/repo/resolve/(\w+)/(.*)", request.path)) is not None:
            body = self.commits[found[1]][found[2]]
            span = request.http_range
            return web.Response(status=206, body=body[span.start : span.stop])
        return web.Response(status=401, headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"})

    def _sha(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)

    def _entry(self, name: str, body: bytes) -> dict[str, Any]:
        oid = str(hash(body))
        lfs = {"oid": f"sha-{oid}", "size": len(body), "pointerSize": 134} if name.endswith(".parquet") else None
        return {"type": "file", "path": name, "size": len(body), "oid": oid} | ({"lfs": lfs} if lfs else {})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub with a run of six rollouts at runs/a, and the environment that leads there."""
    made = Hub()
    run = write_run(tmp_path / "run", ROWS)
    files = {f"runs/a/{file.relative_to(run)}": file.read_bytes() for file in run.rglob("*") if file.is_file()}
    made.commit("c1", files)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    with serving(app) as made.url:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        # Read from the environment once, when the library is loaded.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # for the child that runs SQL
        monkeypatch.setenv("GYMDATA_SPOOL", str(tmp_path / "spool"))
        yield made


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
