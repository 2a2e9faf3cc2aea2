"""What a served model can do for collecting, asked before anything is sampled.

What always holds: every answer comes from a request that was made; a server that cannot be reached is an outside fault and
no finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gymdata.adapters.engines.vllm_server import ServerSampler, server_address
from gymdata.adapters.http_client import Advice, HttpClient
from gymdata.config.urls import ENGINE_KEYS
from gymdata.errors import OutsideError, UsageError

_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was asked. ``needed``: collecting cannot do without it."""

    name: str
    ok: bool
    needed: bool
    detail: str


async def probe(endpoint: str, model: str | None) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and facts of the server (empty when it refused). Raises OutsideError("engine") when it is not there."""
    sampler = ServerSampler(endpoint, model, max_retries=1, allow_raw_logprobs=True, request_timeout_s=60.0)
    try:
        try:
            facts = dict(await sampler.start())
        except UsageError as error:
            # The sampler asks in this order: a name means that the model was found before ids were asked for.
            found = sampler.model_found
            first = Finding("models listed", found, True, sampler.model or "" if found else str(error))
            rest = [Finding("token ids and log-probabilities", False, True, str(error))] if found else []
            return [first, *rest], {}
        mode = str(facts["logprobs_mode"])
        findings = [
            Finding("models listed", True, True, str(facts["served_model"])),
            Finding("token ids and log-probabilities", True, True, "returned, prompts left alone"),
            Finding("processed log-probabilities", mode == "processed_logprobs", True, mode),
            await _tools(sampler),
        ]
        return findings, facts
    finally:
        await sampler.close()


def served_names(endpoint: str, timeout_s: float = 30.0) -> list[str]:
    """The names under which a server lists its models. Raises OutsideError("engine") when it cannot be asked."""
    import asyncio

    http = HttpClient(
        server_address(endpoint), "engine", timeout_s=timeout_s, max_retries=1, key_names=ENGINE_KEYS,
        advice=Advice("is the server up, and is this its base URL?"),
    )  # fmt: skip

    def names(answer: dict[str, Any]) -> list[str]:
        cards = answer.get("data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise http.garbage("a list of models", answer)
        return [str(card["id"]) for card in cards]

    async def asked() -> list[str]:
        await http.open()
        try:
            return await http.ask("GET", "/v1/models", None, names)
        finally:
            await http.close()

    return asyncio.run(asked())


async def _tools(sampler: ServerSampler) -> Finding:
    """Collecting parses tool calls itself, from ids; a server that does too serves other clients."""
    body = {
        "model": sampler.model,
        "messages": [{"role": "user", "content": "What is 7+5?"}],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "max_tokens": 1,
    }
    name = "tool calls parsed by the server"
    try:
        await sampler.ask("/v1/chat/completions", body)
    except OutsideError as error:
        return Finding(name, False, False, str(error.message))
    return Finding(name, True, False, "yes")
