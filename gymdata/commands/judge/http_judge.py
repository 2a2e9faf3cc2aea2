"""A judge behind an OpenAI-compatible chat endpoint, or behind several of them.

Invariants: a request that fails in passing is tried again with growing pauses, no earlier than the server asks, and
then raised as the judge's fault; what cannot be read as a chat answer is such a failure and never a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gymdata.commands.judge.pairwise import digest
from gymdata.commands.judge.port import JudgeAnswer
from gymdata.commands.judge.prompt import Form, Roles
from gymdata.engines.servers.many import Pool
from gymdata.errors import OutsideError, UsageError, abridged
from gymdata.genrm.verdict import VERDICT_SCHEMA
from gymdata.http import ORDINARY_BYTES, Advice, HttpClient, Request
from gymdata.rollouts.messages import JsonObject, Message
from gymdata.store.paths import Facts, Identity
from gymdata.urls import Address, address

_CHAT = "/v1/chat/completions"
#: Bytes of an answer: besides its text, and per token of it, twice (content and reasoning).
_ANSWER_BYTES, _TOKEN_BYTES = 1 << 20, 256
_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT_SCHEMA},
}
_KEY = "set JUDGE_API_KEY to the endpoint's key"
_ADVICE = Advice(
    statuses={401: _KEY, 403: _KEY, 404: "is this the base URL (with or without /v1) and the served model's name?"}
)


def judge_address(endpoint: str) -> Address:
    """The base URL of a judge, given with or without ``/v1``. Raises UsageError for an invalid URL."""
    return address(endpoint, "--endpoint", "http://localhost:8000").without("/v1")


class HttpJudge:
    """A ``Judge`` on ``endpoint`` (base URL, with or without /v1).

    ``model`` may be left out when one is served. ``constrain``: ``auto`` requests the verdict's schema until the
    endpoint refuses it. An API key is taken from JUDGE_API_KEY, VLLM_API_KEY or OPENAI_API_KEY. ``alone``: no other server
    is asked where this one cannot be reached.
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
        alone: bool = True,
    ) -> None:
        served_at = judge_address(endpoint)
        self.base = str(served_at)
        self.model = model
        self.form = form or Roles()
        self.sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        self.constrain = constrain
        self.default_concurrency = concurrency
        self._schema = constrain != "off"
        self._patience: Callable[[], None] | None = None
        self._http = HttpClient(
            served_at,
            "judge",
            timeout_s=request_timeout_s,
            max_retries=max_retries,
            pause_s=pause_s,
            advice=_ADVICE,
            alone=alone,
        )

    @property
    def identity(self) -> Identity:
        """The endpoint's address is no part of it: a judge may move."""
        return {
            "model": f"served:{self.model}",
            **self.form.identity,
            **self.sampling,
            "constrain": self.constrain,
        }

    async def find_model(self) -> None:
        """Learn the name of the served model, where none was given; opens no lasting connection."""
        if self.model is None:
            await self._http.open()
            try:
                self.model = await self._only_model()
            finally:
                await self._http.close()

    async def start(self) -> Facts:
        """Open connections; requests the served model's name only when none was given."""
        await self._http.open()
        if self.model is None:
            self.model = await self._only_model()
        return self.facts()

    def facts(self) -> Facts:
        """What run.json keeps about the server."""
        return {"engine": "http", "endpoint": self.base, "served_model": self.model}

    def wait_for_server(self, seconds: float, say: Callable[[str], None]) -> None:
        """From the first answer on, wait for the server when it cannot be reached; ``say`` is called once per
        outage."""
        self._patience = lambda: self._http.wait_for_server(seconds, say)

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
        # Refused because of the schema, or for another reason: only an answer without the schema shows which.
        answer = await self._answer(body)
        self._schema = False
        return answer

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        await self._http.close()

    async def _models(self) -> list[str]:
        answer = await self._http.ask(Request("GET", "/v1/models"), dict)
        cards = answer.get("data")
        return [str(c["id"]) for c in cards if isinstance(c, dict) and "id" in c] if isinstance(cards, list) else []

    async def _only_model(self) -> str:
        names = await self._models()
        if not names:
            raise OutsideError(
                "judge", f"{self.base}/v1/models lists no models", hint="is it still loading?", fatal=True
            )
        if len(names) > 1:
            raise UsageError(f"{self.base} serves {len(names)} models: {abridged(names)}", hint="name one with --model")
        return names[0]

    async def _answer(self, body: JsonObject) -> JudgeAnswer:
        max_tokens = self.sampling["max_tokens"]
        most = ORDINARY_BYTES if max_tokens is None else _ANSWER_BYTES + _TOKEN_BYTES * int(max_tokens)
        answer = await self._http.ask(Request("POST", _CHAT, body, most_bytes=most), _read)
        if self._patience is not None:
            self._patience()
            self._patience = None
        return answer


class HttpJudges(Pool[HttpJudge]):
    """A ``Judge`` on several servers of one model: comparisons with the same first response go to one, which has it in its
    cache."""

    def wait_for_server(
        self, seconds: float, say: Callable[[str], None], away: Callable[[float | None], None] = lambda _: None
    ) -> None:
        """From the first answer on, wait this long when no server can be reached; ``say`` is called for every loss and
        return."""
        super().wait_for_server(0.0, say, away)
        self._patience_s = seconds

    @property
    def identity(self) -> Identity:
        """The identity that all of them share."""
        return self.members[0].identity

    async def find_model(self) -> None:
        """The model of the first server that answers is that of all."""
        for member in self.members:
            try:
                await member.find_model()
            except OutsideError:
                if member is self.members[-1]:
                    raise
            else:
                for other in self.members:
                    other.model = member.model
                return

    async def start(self) -> Facts:
        """Open connections. Raises UsageError where no model was named and they serve several."""
        return {name: value for name, value in (await super().start()).items() if name != "endpoint"}

    async def compare(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None, seed: int | None
    ) -> JudgeAnswer:
        """One chat completion of one server. Raises OutsideError("judge")."""
        begins = digest(repr(conversation), response_1)
        answer, _ = await self.ask(
            lambda judge: judge.compare(conversation, response_1, response_2, principle, seed), begins
        )
        self._wait_s = self._patience_s
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
