"""``gymdata record`` around a command: what it sets, how it ends, and what it refuses before it serves."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymdata.cli.main import main
from gymdata.commands.record.run import record
from gymdata.errors import UsageError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_run_json, read_table
from tests.faulty_server import Settings, build
from tests.servers import serving

pytestmark = pytest.mark.torch
POLICY = str(Path(__file__).parents[2] / "sample_data" / "policy")
AGENT = """
import json, os, sys, urllib.request
for base in (os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"] + "/v1"):
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": base[-3:]}]}
    path = "/chat/completions" if base == os.environ["OPENAI_BASE_URL"] else "/messages"
    headers = {"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(base + path, json.dumps(body).encode(), headers)).read()
print("done")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def engine() -> Iterator[str]:
    with serving(build(Settings(vocab=51))) as url:
        yield url


@pytest.mark.parametrize(("code", "status", "stop_reason"), [(0, "completed", None), (3, "truncated", "exit_3")])
def test_the_recording_ends_with_its_command(
    engine: str, tmp_path: Path, code: int, status: str, stop_reason: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each conversation is a rollout that ends as the command does, without a reward; its exit code is reported. With --json
    the summary is alone on standard output."""
    run, words = tmp_path / "run", ["--port", "0", "--endpoint", engine, "-m", "fake", "--tokenizer", POLICY]
    agent = [sys.executable, "-c", AGENT, str(code)]
    assert main(["record", "-o", str(run), *words, "--token", "a-secret-token", "--json", "--", *agent]) == int(
        code > 0
    )
    output, errors = capfd.readouterr()
    summary = json.loads(output)
    assert (summary["command_exit"], summary["rollouts"], "done\n" in errors) == (code, 2, True)
    rows = read_table(run, ROLLOUTS).to_pylist()
    assert {(row["status"], row["stop_reason"], row["reward"]) for row in rows} == {(status, stop_reason, None)}
    assert read_run_json(run)["stage"] == "record"


def test_a_server_without_ids_is_refused_with_what_switches_them_on(tmp_path: Path) -> None:
    """And nothing is left on disk."""
    with serving(build(Settings(mode="no_ids"))) as url, pytest.raises(UsageError) as refused:
        record(output=tmp_path / "run", port=0, endpoint=[url], model="fake", tokenizer=POLICY)
    assert "return_token_ids" in str(refused.value.hint)
    assert not (tmp_path / "run").exists()


def test_a_command_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    """Before anything is started, and nothing is left on disk."""
    with pytest.raises(UsageError, match="'no-such-agent' is not a command that can be run"):
        record(output=tmp_path / "run", port=0, endpoint=["http://127.0.0.1:9"], agent=["no-such-agent"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_engine_starts_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """One line and exit code 130, and no summary of a recording that never began."""
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        signal.raise_signal(number)

    monkeypatch.setattr("gymdata.cli.record.note", note)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = ["-o", str(tmp_path / "run"), "--port", "0", "--endpoint", url, "-m", "fake", "--tokenizer", POLICY]
        assert main(["record", *words]) == 130
    output, errors = capfd.readouterr()
    assert (output, errors, [text.partition(" to ")[0] for text in notes]) == ("", "interrupted\n", ["connecting"])
