"""A real ``gymdata record`` is killed while agents call it, and started again: they go on with the same keys."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from tests.faulty_server import Settings, build
from tests.kills import DEADLINE_S, fork
from tests.servers import serving

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
POLICY = ROOT / "sample_data" / "policy"
CLIENTS, TURNS = 8, 6


@pytest.fixture
def engine() -> Iterator[str]:
    with serving(build(Settings(latency=0.05, vocab=51))) as url:
        yield url


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, however often the server is killed meanwhile."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return dict(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            if error.code not in (502, 503):
                raise
        except (OSError, http.client.HTTPException):
            threading.Event().wait(0.05)
    raise AssertionError("no answer")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.full)])
def test_kills_lose_only_requests_in_flight(engine: str, tmp_path: Path, kills: int) -> None:
    """Every answer that a client got is in its rollout once, in order, and every rollout is sound."""
    run = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answered: dict[str, list[list[int]]] = {f"client-{k}": [] for k in range(CLIENTS)}
    words = ["-o", str(run), "--port", str(port), "--endpoint", engine, "-m", "fake", "--seed", "3"]
    words += ["--tokenizer", str(POLICY), "--run-id", "kill-test"]
    process = fork(words, "record")

    def client(key: str) -> None:
        base, messages = f"http://127.0.0.1:{port}", [{"role": "user", "content": "How much is 1+2?"}]
        for turn in range(TURNS):
            body = {"model": "m", "messages": messages, "max_tokens": 8, "return_token_ids": True}
            (choice,) = post(f"{base}/s/{key}/v1/chat/completions", body)["choices"]
            answered[key].append(choice["token_ids"])
            messages += [choice["message"], {"role": "user", "content": f"How much is {turn}+3?"}]
        post(f"{base}/rollouts/{key}/finish", {"reward": 1.0})

    threads = [threading.Thread(target=client, args=(key,)) for key in answered]
    for thread in threads:
        thread.start()
    for kill in range(kills):
        goal = (kill + 1) * CLIENTS * (TURNS - 1) // kills
        while sum(map(len, answered.values())) < goal and any(thread.is_alive() for thread in threads):
            threading.Event().wait(0.005)
        process.kill()
        process.join()
        process = fork(words, "record")
    for thread in threads:
        thread.join()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    rows = {row["task_id"]: row for row in read_table(run, ROLLOUTS).to_pylist()}
    assert set(rows) == set(answered)
    for key, row in rows.items():
        shown = [row["turns"][m["turn"]]["generation_token_ids"] for m in row["messages"] if m["turn"] is not None]
        assert shown == answered[key]
        assert row["n_turns"] <= TURNS + kills
    assert not list(run.glob("sessions/*.journal"))
    assert validate(run).ok
