"""A vLLM server behind an OpenAI-compatible URL: ids in through /v1/completions, ids and log-probabilities out.

Invariants: the server is checked once, before any sampling (it serves the model, leaves prompts alone, returns ids, and
returns log-probabilities of the distribution that it sampled); what it answers is checked every time; a passing fault
is retried with growing pauses and then raised, and never becomes a generation. Every finding comes from a request that
was made; a server that cannot be reached is an outside fault and no finding.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gymdata.engines.port import Generation, SampleRequest
from gymdata.engines.sampling import AnswerFaultError, Sampling
from gymdata.engines.servers.completions_response import generations
from gymdata.errors import OutsideError, UsageError, abridged
from gymdata.http import Advice, HttpClient, Request
from gymdata.rollouts.messages import JsonObject
from gymdata.store.paths import Facts
from gymdata.urls import Address, address
from gymdata.workers.signals import run_async

#: A tool for requests that only ask whether tools reach the model.
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of a server. ``needed``: collecting cannot do without it; ``cure``: what switches on what is missing."""

    name: str
    ok: bool
    needed: bool
    detail: str
    cure: str | None = None


async def probe(endpoint: str, model: str | None) -> tuple[list[Finding], Facts]:
    """Findings, and facts of the server (empty when it refused). Raises OutsideError("engine") when it is not there."""
    sampler = ServerSampler(endpoint, model, max_retries=1, allow_raw_logprobs=True, request_timeout_s=60.0)
    try:
        try:
            facts = dict(await sampler.start())
        except UsageError as error:
            # In the sampler's order: a name in the error means that the model was found before ids were requested.
            if not sampler.model_found:
                return [Finding("models listed", False, True, error.message, error.hint)], {}
            first = Finding("models listed", True, True, sampler.model or "")
            return [first, Finding("token ids and log-probabilities", False, True, error.message, error.hint)], {}
        mode = str(facts["logprobs_mode"])
        processed = mode == "processed_logprobs"
        findings = [
            Finding("models listed", True, True, str(facts["served_model"])),
            Finding("token ids and log-probabilities", True, True, "returned, prompts left alone"),
            Finding("processed log-probabilities", processed, True, mode, None if processed else _PROCESSED),
            # Collecting renders conversations and parses tool calls itself; a server that does too serves others as well.
            await _takes_chat(sampler, "chat template", "start it with --chat-template FILE"),
            await _takes_chat(
                sampler, "tool calls parsed by the server", _TOOL_PARSER, tools=[TOOL], tool_choice="auto"
            ),
        ]
        return findings, facts
    finally:
        await sampler.close()


class ServedModel(NamedTuple):
    """A model that a server lists. ``root``: where its weights are on the server's machine, where it says."""

    name: str
    root: str | None


def not_served(server: str, model: str, names: Sequence[str]) -> UsageError:
    """The error for a server that serves ``names`` and not ``model``."""
    served = ", ".join(names)
    hint = "give one of them with -m/--model" if len(names) > 1 else f"leave -m out, or give -m {served}"
    return UsageError(f"{server} serves {served}, not {model}", hint=hint).at("-m/--model", model, served)


def served_models(endpoint: str) -> list[ServedModel]:
    """The models that a server lists. Raises OutsideError("engine") when it cannot be reached."""
    address, advice = server_address(endpoint), Advice("start it (`gymdata serve MODEL`), or correct its base URL")
    http = HttpClient(address, "engine", timeout_s=30.0, max_retries=1, advice=advice)

    def models(answer: JsonObject) -> list[ServedModel]:
        cards = answer.get("data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise http.garbage("a list of models", answer)
        return [
            ServedModel(str(card["id"]), card.get("root") if isinstance(card.get("root"), str) else None)
            for card in cards
        ]

    async def listed() -> list[ServedModel]:
        await http.open()
        try:
            return await http.ask(Request("GET", "/v1/models"), models)
        finally:
            await http.close()

    return run_async(listed())


_PROCESSED = "start it with --logprobs-mode processed_logprobs"
_TOOL_PARSER = "start it with --enable-auto-tool-choice --tool-call-parser NAME (collect parses tool calls itself)"


async def _takes_chat(sampler: ServerSampler, name: str, cure: str, **more: object) -> Finding:
    messages = [{"role": "user", "content": "What is 7+5?"}]
    try:
        await sampler.ask(
            "/v1/chat/completions", {"model": sampler.model, "messages": messages, "max_tokens": 1, **more}
        )
    except OutsideError as error:
        return Finding(name, False, False, str(error.message), cure)
    return Finding(name, True, False, "yes")


#: Ids that every vocabulary has; what they mean does not matter to the checks.
PROBE = (1, 2, 3, 4)
PROBE_TOKENS = 8
_KEY = "set VLLM_API_KEY or OPENAI_API_KEY to the server's key"
_ADVICE = Advice(
    unreachable="start the server, or correct the URL: `curl URL/v1/models` must answer; `gymdata serve MODEL` starts one",
    slow="raise the request timeout, or lower -c/--concurrency",
    statuses={401: _KEY, 403: _KEY, 404: "is this the base URL of a vLLM server (with or without /v1)?"},
)

#: Bytes of an answer: besides its tokens; for a token or alternative with text, bytes and log-probability; for an id of
#: the prompt.
_ANSWER_BYTES, _TOKEN_BYTES, _ID_BYTES = 1 << 20, 1 << 10, 16

#: Sequences that a vLLM server runs at once by default; it does not tell how many it was started with.
RUNS_AT_ONCE = 256
#: Twice as many: what waits in its queue fills the places that a whole group frees together. With as many as it runs, the
#: engine idles between an answer and the next request.
DEFAULT_CONCURRENCY = 2 * RUNS_AT_ONCE


def server_address(endpoint: str) -> Address:
    """The base URL of a server, given with or without ``/v1``. Raises UsageError for an invalid URL."""
    return address(endpoint, "--endpoint", "http://localhost:8000").without("/v1")


class ServerSampler:
    """A ``Sampler`` on a vLLM server.

    ``endpoint``: base URL, with or without ``/v1``. ``model``: the served name, or the path it was served from; may be
    left out when one model is served. An API key is taken from VLLM_API_KEY or OPENAI_API_KEY. ``request_timeout_s`` is
    for one try. ``allow_raw_logprobs`` collects although log-probabilities ignore the sampling settings. ``vocab_size``:
    ids from there on are the server's fault (None: not known). ``alone``: no other server is asked where this one cannot be
    reached.
    """

    prefers_groups = True

    def __init__(
        self,
        endpoint: str,
        model: str | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        request_timeout_s: float = 300.0,
        max_retries: int = 5,
        pause_s: float = 0.5,
        concurrency: int = DEFAULT_CONCURRENCY,
        allow_raw_logprobs: bool = False,
        vocab_size: int | None = None,
        alone: bool = True,
    ) -> None:
        served_at = server_address(endpoint)
        self.base = str(served_at)
        self.model = model
        self.model_found = False
        self.sampling = Sampling.of(sampling or {})
        self.default_concurrency = concurrency
        self.allow_raw_logprobs = allow_raw_logprobs
        self.vocab_size = vocab_size
        #: The model name in the probe's answers; every later answer must have the same.
        self._answers_as: str | None = None
        self._probing = False
        self._root: Any = None
        self._http = HttpClient(
            served_at,
            "engine",
            timeout_s=request_timeout_s,
            max_retries=max_retries,
            pause_s=pause_s,
            advice=_ADVICE,
            alone=alone,
        )
        self._max_model_len: int | None = None
        self._facts: Facts = {}

    async def start(self) -> Facts:
        """Check the server. Raises UsageError when it cannot serve this, OutsideError when it cannot be reached."""
        await self._http.open()
        try:
            card = await self._choose_model()
            self._probing = True
            mode = await self._check_answers()
            self._probing = False
            version = await self._version()
        except BaseException:
            await self.close()
            raise
        self._facts = {
            "engine": "vllm",
            "engine_version": version,
            "transport": "http",
            "served_model": self.model,
            "served_from": card.get("root"),
            "max_model_len": self._max_model_len,
            "logprobs_mode": mode,
            "request_seeds": True,
            "vocab_size": self.vocab_size,
            "dtype": None,  # a server does not say
            "device": None,
        }
        return self.facts()

    def facts(self) -> Facts:
        """Facts about the server for run.json; empty before ``start``."""
        return dict(self._facts)

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """Continue one prompt ``request.n`` times. Cancelling the task drops the connection, and the server aborts."""
        body = self._body(
            request.prompt_token_ids,
            self._room(request),
            request.n,
            request.seed,
            self.sampling.changed(request.sampling),
        )
        return await self._complete({**body, "request_id": request.request_id})

    async def ask(self, path: str, body: JsonObject) -> JsonObject:
        """The server's answer to any other request. Raises OutsideError("engine")."""
        return await self._http.ask(Request("POST", path, body), dict)

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        await self._http.close()

    def wait_for_server(
        self, seconds: float, say: Callable[[str], None], away: Callable[[float | None], None] = lambda _: None
    ) -> None:
        """From now on wait for a server that cannot be reached; ``say`` and ``away`` are called when an outage begins, with
        None, and when it ends, with its seconds."""
        self._http.wait_for_server(seconds, say, away)

    @property
    def unreachable(self) -> bool:
        """Whether the server is waited for."""
        return self._http.unreachable

    # --- the checks before any sampling -----------------------------------------------------------------------------

    async def _choose_model(self) -> JsonObject:
        answer = await self._http.ask(Request("GET", "/v1/models"), dict)
        cards = answer.get("data")
        if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards) or not cards:
            raise OutsideError(
                "engine", f"{self.base}/v1/models lists no models", hint="is this a vLLM server?", fatal=True
            )
        names = [str(card["id"]) for card in cards]
        card = _pick(cards, self.model)
        if card is None:
            if self.model is None:
                raise UsageError(
                    f"{self.base} serves {len(names)} models: {abridged(names)}", hint="choose one with -m/--model"
                )
            raise not_served(self.base, self.model, names)
        self.model, self.model_found = str(card["id"]), True
        parent: JsonObject = next((c for c in cards if c["id"] == card.get("parent")), {})
        limit = card.get("max_model_len") or parent.get("max_model_len")
        self._max_model_len = int(limit) if limit else None
        self._root = card.get("root")
        return card

    def _room(self, request: SampleRequest) -> int:
        """Tokens that the continuation may have. Raises OutsideError when the prompt leaves no room."""
        if self._max_model_len is None:
            return request.max_tokens
        room = self._max_model_len - len(request.prompt_token_ids)
        if room <= 0:
            raise OutsideError(
                "engine",
                f"the prompt has {len(request.prompt_token_ids):,} tokens and leaves no room to generate: the server's "
                f"max_model_len is {self._max_model_len:,}",
                final=True,
            )
        return min(request.max_tokens, room)

    async def _check_answers(self) -> str:
        """Two short requests. Returns the log-probability mode that they prove."""
        for sampling in (Sampling(ignore_eos=True), Sampling(top_k=1, ignore_eos=True)):
            body = self._body(PROBE, PROBE_TOKENS, 1, 1, sampling)
            best = (await self._complete(body))[0]
        return self._mode(best)

    def _mode(self, best: Generation) -> str:
        """The logprobs mode that a sample under top_k 1 proves; UsageError when they cannot be used."""
        # Under top_k 1 a processed log-prob is exactly 0; a raw one is what the model gives its best token.
        if all(value > -1e-3 for value in best.log_probs):
            return "processed_logprobs"
        if self.sampling.processing_matters and not self.allow_raw_logprobs:
            raise UsageError(
                f"{self.base} returns raw log-probabilities, without the temperature and the other sampling settings: "
                "ratios of them would be wrong",
                hint="start it with --logprobs-mode processed_logprobs, or sample at temperature 1 without top-p, top-k, "
                "min-p and penalties",
            )
        return "raw_logprobs"

    async def _version(self) -> str | None:
        with contextlib.suppress(OutsideError):  # not every server has this, and nothing depends on it
            version = (await self._http.ask(Request("GET", "/version", retries=0), dict)).get("version")
            return str(version) if version else None
        return None

    # --- one request ------------------------------------------------------------------------------------------------

    def _body(
        self, prompt: Sequence[int], max_tokens: int, n: int, seed: int | None, sampling: Sampling | None = None
    ) -> JsonObject:
        sampling = sampling or self.sampling
        body = {
            "model": self.model,
            "prompt": [int(i) for i in prompt],
            "max_tokens": max_tokens,
            "n": n,
            **sampling.request_fields(),
            "logprobs": sampling.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # names alternatives by id, not by text that several ids share
            "skip_special_tokens": False,
        }
        if seed is not None:
            body["seed"] = seed
        return body

    async def _complete(self, body: JsonObject) -> list[Generation]:
        """The generations of one request, checked."""
        request = Request("POST", "/v1/completions", body, most_bytes=self.most_bytes(body))
        return await self._http.ask(request, lambda answer: self._take(answer, body))

    def most_bytes(self, body: Mapping[str, Any]) -> int:
        """The largest sensible answer to a request."""
        generated = body["n"] * body["max_tokens"] * (2 + int(body["logprobs"]))
        return int(_ANSWER_BYTES + _TOKEN_BYTES * generated + _ID_BYTES * len(body["prompt"]) * body["n"])

    def _take(self, answer: JsonObject, body: JsonObject) -> list[Generation]:
        try:
            sampled = generations(answer, body, vocab_size=self.vocab_size)
        except AnswerFaultError as error:
            if self._probing and (refusal := self._refusal(error)) is not None:
                raise refusal from error
            raise
        self._check_model(answer.get("model"))
        return sampled

    def _check_model(self, named: object) -> None:
        """Raises OutsideError for an answer that names another model than the probe's answer did."""
        if self._probing and (named is None or named in (self.model, self._root)):
            self._answers_as = None if named is None else str(named)
        elif named != self._answers_as or self._probing:
            expected = self.model if self._probing else self._answers_as
            raise AnswerFaultError("model", f"the answer is of model {str(named)[:100]!r}, expected {expected!r}")

    def _refusal(self, error: AnswerFaultError) -> UsageError | None:
        """The error for a fault that follows from the server's settings, which no retry can cure; None for others."""
        if error.fault in ("no_ids", "no_logprobs"):
            return UsageError(f"{self.base}: {error.reason}", hint=error.hint)
        if error.fault not in _REFUSED:
            return None
        what, hint = _REFUSED[error.fault]
        return UsageError(f"{self.base} {what}: {error.reason}", hint=hint)


#: Fault → what such a server does, and how to make it stop.
_REFUSED = {
    "prompt": ("changes prompts", "serve the model without a proxy that tokenises again or adds tokens"),
    "positive": ("returns logits, not log-probabilities", _PROCESSED.replace("it", "the server", 1)),
}


def _pick(cards: list[JsonObject], model: str | None) -> JsonObject | None:
    if model is None:
        own = [c for c in cards if not c.get("parent")] or cards
        return own[0] if len(own) == 1 else None
    for card in cards:
        if card["id"] == model:
            return card
    real = os.path.realpath(model)
    return next((c for c in cards if os.path.realpath(str(c.get("root") or c["id"])) == real), None)
