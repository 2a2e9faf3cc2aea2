"""A judge behind an OpenAI-compatible chat endpoint.

Invariants: a request that fails in passing is tried again with growing pauses, no earlier than the server asks, and
then raised as the judge's fault; what cannot be read as a chat answer is such a failure and never a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymdata.errors import OutsideError, UsageError
from gymdata.genrm.verdict import VERDICT_SCHEMA
from gymdata.http import ORDINARY_BYTES, Advice, HttpClient
from gymdata.judge.port import JudgeAnswer
from gymdata.judge.prompt import Form, Roles
from gymdata.rollouts.messages import Message
from gymdata.urls import JUDGE_KEYS, address

_CHAT = "/v1/chat/completions"
#: Of an answer: beside its text, and for a token of it, twice (content and reasoning).
_ANSWER_BYTES, _TOKEN_BYTES = 1 << 20, 256
_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT_SCHEMA},
}
_KEY = "set JUDGE_API_KEY to the endpoint's key"
_ADVICE = Advice(
    statuses={401: _KEY, 403: _KEY, 404: "is this the base URL (with or without /v1) and the served model's name?"}
)


class HttpJudge:
    """A ``Judge`` on ``endpoint`` (base URL, with or without /v1).

    ``model`` may be left out when one is served. ``constrain``: ``auto`` asks for the verdict's schema until the endpoint
    refuses it. An API key is taken from JUDGE_API_KEY, VLLM_API_KEY or OPENAI_API_KEY.
    """

    def __init__(
        self,
        endpoint: str,
        model: str | None = None,
        *,
        form: Form | None = None,
        temperature: float = 0.6,
        top_p: float = 0.95,
        max_tokens: int | None = None,
        constrain: str = "auto",
        request_timeout_s: float = 300.0,
        max_retries: int = 5,
        pause_s: float = 0.5,
        concurrency: int = 128,
    ) -> None:
        served_at = address(endpoint, "--endpoint", "http://localhost:8000", JUDGE_KEYS).without("/v1")
        self.base = str(served_at)
        self.model = model
        self.form = form or Roles()
        self.sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        self.constrain = constrain
        self.default_concurrency = concurrency
        self._schema = constrain != "off"
        self._http = HttpClient(
            served_at,
            "judge",
            timeout_s=request_timeout_s,
            max_retries=max_retries,
            pause_s=pause_s,
            key_names=JUDGE_KEYS,
            advice=_ADVICE,
        )

    @property
    def identity(self) -> Mapping[str, Any]:
        """The endpoint's address is no part of it: a judge may move."""
        return {
            "model": f"served:{self.model}",
            **self.form.identity,
            **self.sampling,
            "constrain": self.constrain,
        }

    async def start(self) -> Mapping[str, Any]:
        """Open connections; asks the endpoint for its model only when none was named."""
        await self._http.open()
        if self.model is None:
            self.model = await self._only_model()
        return {"engine": "http", "endpoint": self.base, "served_model": self.model}

    async def compare(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None, seed: int | None
    ) -> JudgeAnswer:
        """One chat completion. Cancelling drops the connection."""
        body = {
            "model": self.model,
            "messages": self.form.messages(conversation, response_1, response_2, principle),
            **{name: value for name, value in self.sampling.items() if value is not None},
        }
        if seed is not None:
            body["seed"] = seed
        if not self._schema:
            return await self._answer(body)
        try:
            return await self._answer({**body, "response_format": _RESPONSE_FORMAT})
        except OutsideError as error:
            if self.constrain == "on" or error.retryable or error.fatal:
                raise
        # Refused: because of the schema, or for what was asked. Only an answer without it tells.
        answer = await self._answer(body)
        self._schema = False
        return answer

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        await self._http.close()

    async def _only_model(self) -> str:
        answer = await self._http.ask("GET", "/v1/models", None, dict)
        cards = answer.get("data")
        names = [str(c["id"]) for c in cards if isinstance(c, dict) and "id" in c] if isinstance(cards, list) else []
        if len(names) != 1:
            raise UsageError(
                f"{self.base} serves {len(names)} models: {', '.join(names) or 'none'}", hint="name one with --model"
            )
        return names[0]

    async def _answer(self, body: Mapping[str, Any]) -> JudgeAnswer:
        max_tokens = self.sampling["max_tokens"]
        most = ORDINARY_BYTES if max_tokens is None else _ANSWER_BYTES + _TOKEN_BYTES * int(max_tokens)
        return await self._http.ask("POST", _CHAT, body, _read, most_bytes=most)


def _read(answer: Mapping[str, Any]) -> JudgeAnswer:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(message, dict):
        raise _garbage(answer)
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise _garbage(message)
    usage = answer.get("usage")
    refused = message.get("refusal") or ("content filter" if first.get("finish_reason") == "content_filter" else None)
    return JudgeAnswer(content or "", usage if isinstance(usage, dict) else None, str(refused) if refused else None)


def _garbage(got: object) -> OutsideError:
    return OutsideError("judge", f"the answer is no chat completion: got {str(got)[:200]!r}", retryable=True)
