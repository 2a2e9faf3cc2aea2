"""An S3 server and a Hub for the tests of this folder, and a cache of their own."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from aiohttp import web

from tests.objects.stores import FaultyStore, faulty, s3
from tests.rollout_files import rollout, write_run
from tests.servers import serving

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
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
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


@dataclass
class Hub:
    """Answers as the Hub's API does for data sets: a fake at the port. Each commit is its files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    #: (ORG/NAME, branch) → commit.
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    status: int = 0
    url: str = ""

    def commit(self, sha: str, files: dict[str, bytes]) -> None:
        self.commits[sha] = files
        self.branches["org/repo", "main"] = sha

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        if self.status:
            return web.Response(status=self.status)
        found = re.fullmatch(r"(/api)?/datasets/([\w-]+/[\w-]+)(?:/(.*))?", request.path)
        if found is None or not any(repo == found[2] for repo, _ in self.branches):
            return web.Response(status=401, headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"})
        repo, (what, _, rest) = found[2], (found[3] or "").partition("/")
        revision, _, inside = rest.strip("/").partition("/")
        sha = self.branches.get((repo, revision or "main"), revision)
        if sha not in self.commits:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        there = self.commits[sha]
        if what in ("", "revision"):
            changed = "2026-11-01T10:00:00.000Z"
            return web.json_response({"id": repo, "sha": sha, "private": True, "lastModified": changed})
        if what == "resolve":
            body = there[inside]
            headers = {"X-Repo-Commit": sha, "ETag": f'"{_git_hash(body)}"', "Content-Length": str(len(body))}
            if request.method == "HEAD":
                return web.Response(headers=headers)
            if "Range" not in request.headers:
                return web.Response(body=body, headers=headers)
            span = request.http_range
            return web.Response(status=206, body=body[span.start : span.stop])
        wanted = (await request.post()).getall("paths") if what == "paths-info" else []
        names = [name for name in there if name in wanted or (not wanted and name.startswith(f"{inside}/".lstrip("/")))]
        if not wanted and not names:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        return web.json_response([self._entry(name, there[name]) for name in names])

    def _oid(self, name: str, body: bytes) -> str:
        return hashlib.sha256(body).hexdigest() if name.endswith(".parquet") else _git_hash(body)

    def _entry(self, name: str, body: bytes) -> dict[str, Any]:
        lfs = (
            {"oid": self._oid(name, body), "size": len(body), "pointerSize": 134} if name.endswith(".parquet") else None
        )
        return {"type": "file", "path": name, "size": len(body), "oid": _git_hash(body)} | ({"lfs": lfs} if lfs else {})


def _git_hash(body: bytes) -> str:
    return hashlib.sha1(f"blob {len(body)}\0".encode() + body, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub with a run of six rollouts at runs/a of org/repo, and the environment that leads there."""
    made = Hub()
    run = write_run(tmp_path / "seen", ROWS)
    files = {f"runs/a/{file.relative_to(run)}": file.read_bytes() for file in run.rglob("*") if file.is_file()}
    made.commit("c1", files)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    with serving(app) as made.url:
        monkeypatch.setenv("HF_TOKEN", "hf" + "_token")
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        # Read from the environment once, when the library is loaded.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # for the child that runs SQL
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield made
