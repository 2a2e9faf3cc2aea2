"""``gymdata serve``: the line, a real server that has what collecting needs, and nothing that is left of it."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import psutil
import pytest

pytest.importorskip("vllm")

import gymdata
from gymdata.cli.main import main
from gymdata.commands.serve.run import PARSERS, parser_for, words_of
from gymdata.engines._vllm import tool_parsers
from gymdata.store import read_run_json
from tests.engine_fixtures import await_health, free_port, server_environment

pytestmark = pytest.mark.engine
TASKS = "sample_data/tasks/train.jsonl"


class Served(NamedTuple):
    """A running ``gymdata serve``, its address, and what it printed."""

    process: subprocess.Popen[bytes]
    url: str
    printed: IO[bytes]


@contextlib.contextmanager
def starting(policy: str) -> Iterator[Served]:
    """``gymdata serve`` from its first moment; what is left of it is ended."""
    port = free_port()
    command = [sys.executable, "-m", "gymdata.cli", "serve", "-m", policy, "--port", str(port)]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, env=server_environment(), stdout=printed, stderr=subprocess.STDOUT)
        try:
            yield Served(process, f"http://127.0.0.1:{port}", printed)
        finally:
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def served(policy: str) -> Iterator[Served]:
    with starting(policy) as server:
        await_health(server.process, int(server.url.rpartition(":")[2]), server.printed)
        yield server


def test_the_line_alone_is_printed(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--dry-run`` prints a line that a shell takes, with what collecting needs, and starts nothing."""
    assert main(["serve", "-m", policy, "--set", "engine.max_model_len=128", "--port", "8123", "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("-m") + 1] == "vllm.entrypoints.openai.api_server"
    flags = {word: words[n + 1] if n + 1 < len(words) else "" for n, word in enumerate(words) if word.startswith("--")}
    assert flags["--model"] == policy
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--max-model-len"] == "128"
    assert flags["--tool-call-parser"] == "hermes"
    assert flags["--port"] == "8123"


def test_the_model_may_be_the_argument(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``serve MODEL`` is ``serve -m MODEL``; both at once are an error."""
    assert main(["serve", policy, "--dry-run"]) == 0
    assert f"--model {policy}" in capsys.readouterr().out
    assert main(["serve", policy, "-m", policy, "--dry-run"]) == 2
    assert "given twice" in capsys.readouterr().err
    for words, name in (([], "MODEL"), (["-m"], "-m / --model")):
        assert main(["serve", *words, "http://me:secret@host/v1", "--dry-run"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {name}: got")


def test_settings_that_vllm_has_not_are_named(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started: exit 2 and the nearest name."""
    assert main(["serve", "-m", policy, "--set", "engine.max_model_length=128"]) == 2
    assert "max_model_len" in capsys.readouterr().err
    assert main(["serve", "-m", policy, "--set", "engine.gpu_mem=0.5", "--dry-run"]) == 2
    assert "did you mean 'gpu_memory_utilization'?" in capsys.readouterr().err
    assert main(["serve", "-m", policy, "--tool-parser", "nobody", "--dry-run"]) == 2
    assert "got 'nobody', expected one of" in capsys.readouterr().err


def test_a_server_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """There is none to take by default."""
    assert main(["serve", "--dry-run"]) == 2
    assert "error: model is missing\n  → give --model, or set it in --config" in capsys.readouterr().err


def test_an_address_that_is_taken_is_named(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3, and not after a minute of loading."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["serve", "-m", policy, "--port", port]) == 3
    assert f"127.0.0.1:{port} cannot be served on" in capsys.readouterr().err


def test_engine_arguments_become_flags() -> None:
    """True and False are switches, objects are JSON, and None is not given."""
    given = {"max_model_len": 8, "enforce_eager": True, "enable_chunked_prefill": False, "seed": None, "a_b": {"c": 1}}
    switches = ["--enforce-eager", "--no-enable-chunked-prefill"]
    assert words_of(given) == ["--max-model-len", "8", *switches, "--a-b", '{"c": 1}']


def test_the_parsers_are_those_of_vllm() -> None:
    """A name that vLLM has not would end the server at its start; a template without tool calls gets none."""
    assert set(PARSERS.values()) <= set(tool_parsers())
    assert parser_for("{{ messages }}") is None
    assert parser_for("x <tool_call>\n<function=f>") == "qwen3_coder"


@pytest.mark.full
def test_a_served_model_has_what_collecting_needs(served: Served) -> None:
    """Every check of the server passes, the tool calls of other clients included."""
    found = gymdata.check_endpoint(served.url)
    assert [(f.name, f.ok) for f in found.findings if not f.ok] == []


@pytest.mark.full
def test_collect_asks_the_server_for_model_and_tokenizer(served: Served, policy: str, tmp_path: Path) -> None:
    """Neither -m nor --tokenizer: the name is the served one, the tokenizer that of the folder that is served."""
    words = ["collect", TASKS, "--endpoint", served.url, "-n", "2", "-r", "2", "--max-tokens", "8", "--seed", "1"]
    assert main([*words, "-o", str(tmp_path / "run")]) == 0
    facts = read_run_json(tmp_path / "run")
    assert facts["policy"] == "policy"
    assert facts["engine"]["served_from"] == policy
    assert facts["engine"]["logprobs_mode"] == "processed_logprobs"
    assert gymdata.validate(tmp_path / "run").errors == 0


@pytest.mark.full
def test_what_to_do_with_the_server_is_printed_first(served: Served) -> None:
    """The line, then the next command with the address; the rest is what vLLM prints."""
    served.printed.seek(0)
    text = served.printed.read().decode()
    assert "-m vllm.entrypoints.openai.api_server" in text.splitlines()[0]
    assert f"  gymdata collect TASKS --endpoint {served.url}\n" in text


@pytest.mark.full
def test_a_signal_ends_the_server_and_leaves_nothing(served: Served) -> None:
    """SIGTERM to the command: no process of the server is there any more."""
    theirs = psutil.Process(served.process.pid).children(recursive=True)
    assert theirs
    served.process.send_signal(signal.SIGTERM)
    served.process.wait(60)
    _, alive = psutil.wait_procs(theirs, timeout=30)
    assert alive == []


@pytest.mark.full
def test_a_killed_command_leaves_nothing(policy: str) -> None:
    """SIGKILL, which nothing can handle: the kernel ends the engine's processes with the command."""
    with starting(policy) as server:
        await_health(server.process, int(server.url.rpartition(":")[2]), server.printed)
        theirs = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        _, alive = psutil.wait_procs(theirs, timeout=30)
        assert theirs
        assert alive == []
