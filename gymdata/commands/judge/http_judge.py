"""A judge behind one or several OpenAI-compatible chat endpoints.

Invariants: a request that fails in passing is tried again with growing pauses, no earlier than the server asks, and
then raised as the judge's fault; what cannot be read as a chat answer is such a failure and never a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gymdata.commands.judge.pairwise import digest
from gymdata.commands.judge.port import JudgeAnswer
from gymdata.commands.judge.prompt import Form, Roles
from gymdata.engines.servers.many import Pool
from gymdata.errors import OutsideError
from gymdata.genrm.verdict import VERDICT_SCHEMA
from gymdata.http import ORDINARY_BYTES, Advice, HttpClient, Request
from gymdata.rollouts.messages import JsonObject, Message
from gymdata.store.paths import Facts, Identity
from gymdata.urls import address

_CHAT = "/v1/chat/completions"
#: Bytes of an answer: besides its text, and per token of it, twice (content and reasoning).
_ANSWER_BYTES, _TOKEN_BYTES = 1 << 20, 256
#: Judgements in flight for each server.
_CONCURRENCY = 128
_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT_SCHEMA},
}
_KEY = "set JUDGE_API_KEY to the endpoint's key"
_ADVICE = Advice(
    statuses={401: _KEY, 403: _KEY, 404: "is this the base URL (with or without /v1) and the served model's name?"}
)


class _Server:
    """One endpoint of a judge, as ``HttpJudge`` has them."""

    def __init__(self, http: HttpClient, model: str, constrain: str) -> None:
        self.base, self.default_concurrency = http.base, _CONCURRENCY
        self._http, self._model, self._constrain = http, model, constrain
        self._schema = constrain != "off"

    async def start(self) -> Facts:
        """Open connections."""
        await self._http.open()
        return {"engine": "http", "served_model": self._model}

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        await self._http.close()

    async def answer(self, body: JsonObject) -> JudgeAnswer:
        """One chat completion, held to the verdict's schema until the endpoint refuses that."""
        max_tokens = body.get("max_tokens")
        most = ORDINARY_BYTES if max_tokens is None else _ANSWER_BYTES + _TOKEN_BYTES * int(max_tokens)
        if self._schema:
            try:
                constrained = {**body, "response_format": _RESPONSE_FORMAT}
                return await self._http.ask(Request("POST", _CHAT, constrained, most_bytes=most), _read)
            except OutsideError as error:
                if self._constrain == "on" or error.retryable or error.fatal:
                    raise
        # Refused because of the schema, or for another reason: only an answer without the schema shows which.
        answer = await self._http.ask(Request("POST", _CHAT, body, most_bytes=most), _read)
        self._schema = False
        return answer


class HttpJudge(Pool[_Server]):
    """A ``Judge`` on the servers at ``endpoints`` (base URLs, with or without /v1), which serve ``model``: comparisons with
    the same first response go to one, which has it in its cache.

    ``constrain``: ``auto`` requests the verdict's schema until the endpoint refuses it. An API key is taken from
    JUDGE_API_KEY, VLLM_API_KEY or OPENAI_API_KEY. ``wait_s``: from the first answer on, how long to wait when no server can
    be reached; ``say`` is called for every loss and return.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        model: str,
        *,
        form: Form | None = None,
        temperature: float = 0.6,
        top_p: float = 0.95,
        max_tokens: int | None = None,
        constrain: str = "auto",
        request_timeout_s: float = 300.0,
        max_retries: int = 5,
        pause_s: float = 0.5,
        wait_s: float = 0.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        clients = [
            HttpClient(
                address(endpoint, "--endpoint", "http://localhost:8000").without("/v1"),
                "judge",
                timeout_s=request_timeout_s,
                max_retries=max_retries,
                pause_s=pause_s,
                advice=_ADVICE,
                alone=len(endpoints) == 1,
            )
            for endpoint in endpoints
        ]
        super().__init__([_Server(client, model, constrain) for client in clients])
        self.wait_for_server(0.0, say)
        self._wait_from_now_s = wait_s
        self.model, self.form = model, form or Roles()
        self.sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        #: The endpoints' addresses are no part of it: a judge may move.
        self.identity: Identity = {
            "model": f"served:{model}",
            **self.form.identity,
            **self.sampling,
            "constrain": constrain,
        }

    async def compare(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None, seed: int | None
    ) -> JudgeAnswer:
        """One chat completion of one server. Raises OutsideError("judge"). Cancelling drops the connection."""
        messages = self.form.messages(conversation, response_1, response_2, principle)
        settings = {**self.sampling, "seed": seed}
        body = {"model": self.model, "messages": messages, **{k: v for k, v in settings.items() if v is not None}}
        answer, _ = await self.ask(lambda server: server.answer(body), digest(repr(conversation), response_1))
        self._wait_s = self._wait_from_now_s
        return answer


def _read(answer: JsonObject) -> JudgeAnswer:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(message, dict) or answer.get("error") or first.get("error"):
        raise _garbage(answer)
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise _garbage(message)
    usage = answer.get("usage")
    # What a judge says beside a call of a tool is not its verdict, however its server names the end.
    finish_reason = "tool_calls" if message.get("tool_calls") else first.get("finish_reason")
    refused = message.get("refusal") or ("content filter" if finish_reason == "content_filter" else None)
    return JudgeAnswer(
        content or "",
        usage if isinstance(usage, dict) else None,
        str(refused) if refused else None,
        None if finish_reason is None else str(finish_reason),
    )


def _garbage(got: object) -> OutsideError:
    return OutsideError("judge", f"the answer is no chat completion: got {str(got)[:200]!r}", retryable=True)
