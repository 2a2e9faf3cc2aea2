"""A server is probed by asking it, and what it lacks is told from its being away."""

from __future__ import annotations

import asyncio
import json

import pytest

from gymdata.cli.main import main
from gymdata.engines.servers.vllm_server import Finding, probe
from gymdata.errors import EXIT_FAULTS, EXIT_OK, EXIT_OUTSIDE, OutsideError
from tests.faulty_server import Settings, serve

pytest.importorskip("aiohttp")


def findings(settings: Settings, model: str | None = None) -> dict[str, Finding]:
    async def ask() -> list[Finding]:
        runner, port = await serve(settings, 0)
        try:
            return (await probe(f"http://127.0.0.1:{port}", model))[0]
        finally:
            await runner.cleanup()

    return {f.name: f for f in asyncio.run(ask())}


@pytest.mark.parametrize(
    ("mode", "name", "flag", "needed"),
    [
        ("raw", "processed log-probabilities", "--logprobs-mode processed_logprobs", True),
        ("no_logprobs", "token ids and log-probabilities", "--max-logprobs", True),
        ("no_ids", "token ids and log-probabilities", "return_token_ids", True),
        ("raw", "tool calls parsed by the server", "--enable-auto-tool-choice --tool-call-parser", False),
    ],
)
def test_what_is_missing_names_what_switches_it_on(mode: str, name: str, flag: str, needed: bool):
    """Each NO comes with the flag of the server, or what a proxy must pass on. Log-probs that top_k 1 does not change are
    raw; tools that the server does not parse are parsed here."""
    by_name = findings(Settings(mode=mode))
    assert (by_name[name].ok, by_name[name].needed) == (False, needed)
    assert flag in str(by_name[name].cure)
    assert all(f.cure is None for f in by_name.values() if f.ok)
    assert by_name["models listed"].ok
    assert by_name["models listed"].detail == "fake"
    assert by_name["token ids and log-probabilities"].ok == (mode == "raw")


def test_a_model_that_is_not_served_is_a_finding():
    """A wrong name fails at the list of models, and says which are served."""
    said = findings(Settings(), "other")
    assert not said["models listed"].ok
    assert "fake" in said["models listed"].detail
    # The next step is the cure: once, for both are printed.
    assert "leave -m out" in str(said["models listed"].cure)
    assert "leave -m out" not in said["models listed"].detail


def test_a_server_that_is_away_is_an_outside_fault():
    """Nothing listens: that is no finding, and the command ends with 3."""
    with pytest.raises(OutsideError):
        asyncio.run(probe("http://127.0.0.1:9", None))
    assert main(["check", "--endpoint", "http://127.0.0.1:9"]) == EXIT_OUTSIDE


def test_a_real_server_is_ready(vllm_server: str, capsys: pytest.CaptureFixture[str]):
    """vLLM with processed log-probs passes; the report names the model."""
    code = main(["check", "--endpoint", vllm_server, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == (EXIT_OK if said["ok"] else EXIT_FAULTS)
    assert said["ok"], said
    assert said["logprobs_mode"] == "processed_logprobs"
