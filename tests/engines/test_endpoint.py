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


def test_a_server_that_returns_ids_is_found_so():
    """Ids and the model are there; log-probs that top_k 1 does not change are raw; tools it does not parse."""
    said = findings(Settings(mode="raw"))
    assert said["models listed"].detail == "fake"
    assert said["token ids and log-probabilities"].ok
    assert not said["processed log-probabilities"].ok
    assert not said["tool calls parsed by the server"].ok
    assert not said["tool calls parsed by the server"].needed


def test_a_server_without_ids_fails_there():
    """The model is listed and ids are not returned."""
    said = findings(Settings(mode="no_ids"))
    assert said["models listed"].ok
    assert not said["token ids and log-probabilities"].ok


@pytest.mark.parametrize(
    ("mode", "name", "flag"),
    [
        ("raw", "processed log-probabilities", "--logprobs-mode processed_logprobs"),
        ("no_logprobs", "token ids and log-probabilities", "--max-logprobs"),
        ("no_ids", "token ids and log-probabilities", "return_token_ids"),
        ("raw", "tool calls parsed by the server", "--enable-auto-tool-choice --tool-call-parser"),
    ],
)
def test_what_is_missing_names_what_switches_it_on(mode: str, name: str, flag: str):
    """Each NO comes with the flag of the server, or what a proxy must pass on."""
    said = findings(Settings(mode=mode))
    assert flag in str(said[name].cure)
    assert all(f.cure is None for f in said.values() if f.ok)


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
