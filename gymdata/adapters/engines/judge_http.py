"""A judge behind an OpenAI-compatible chat endpoint.

What always holds: a request that fails in passing is tried again with growing pauses, no earlier than the server asks, and
then raised as the judge's fault; what cannot be read as a chat answer is such a failure and never a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import orjson

from gymdata.adapters.engines.judge_prompt import Form, Roles
from gymdata.core.genrm import VERDICT_SCHEMA
from gymdata.errors import OutsideError, UsageError
from gymdata.ports import JudgeAnswer, Message

T = TypeVar("T")
_MAX_PAUSE_S = 30.0
#: A request that hangs is tried this often only: each try costs the whole timeout.
_MAX_HANGS = 2
_CHAT = "/v1/chat/completions"
_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT_SCHEMA},
}


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
        self.base = endpoint.rstrip("/").removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            raise UsageError.bad_value("--endpoint", endpoint, "a URL such as http://localhost:8000")
        self.model = model
        self.form = form or Roles()
        self.sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        self.constrain = constrain
        self.request_timeout_s = request_timeout_s
        self.max_retries = max_retries
        self.pause_s = pause_s
        self.default_concurrency = concurrency
        self.requests = self.retries = 0
        self._schema = constrain != "off"
        self._session: Any = None

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
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise UsageError.missing_extra("aiohttp", "collect") from error
        key = next((v for n in ("JUDGE", "VLLM", "OPENAI") if (v := os.environ.get(f"{n}_API_KEY"))), None)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=self.request_timeout_s, sock_connect=min(30.0, self.request_timeout_s)),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
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
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _only_model(self) -> str:
        answer = await self._request("GET", "/v1/models", None, dict)
        cards = answer.get("data")
        names = [str(c["id"]) for c in cards if isinstance(c, dict) and "id" in c] if isinstance(cards, list) else []
        if len(names) != 1:
            raise UsageError(
                f"{self.base} serves {len(names)} models: {', '.join(names) or 'none'}", hint="name one with --model"
            )
        return names[0]

    async def _answer(self, body: Mapping[str, Any]) -> JudgeAnswer:
        return await self._request("POST", _CHAT, body, _read)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[dict[str, Any]], T]
    ) -> T:
        """What ``read`` makes of the answer, after at most ``max_retries`` more tries."""
        hangs = 0
        for attempt in range(self.max_retries + 1):
            try:
                return read(await self._once(method, path, body))
            except OutsideError as error:
                hangs += isinstance(error.__cause__, TimeoutError)
                if not error.retryable or attempt == self.max_retries or hangs >= _MAX_HANGS:
                    raise
                await self._pause(attempt, error.retry_after_s)
        raise AssertionError("unreachable")

    async def _pause(self, attempt: int, at_least: float | None) -> None:
        self.retries += 1
        pause = min(_MAX_PAUSE_S, self.pause_s * 2**attempt) * random.uniform(0.5, 1.5)
        await asyncio.sleep(max(pause, min(at_least or 0.0, self.request_timeout_s)))

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        import aiohttp

        if self._session is None:
            raise OutsideError("judge", "the connection to the judge is closed", fatal=True)
        data = orjson.dumps(body) if body is not None else None
        headers = {"Content-Type": "application/json"} if data is not None else {}
        self.requests += 1
        try:
            async with self._session.request(method, self.base + path, data=data, headers=headers) as response:
                raw = await response.read()
                if response.status != 200:
                    raise _refusal(self.base + path, response.status, response.headers.get("Retry-After"), raw)
        except TimeoutError as error:
            raise OutsideError(
                "judge", f"{self.base}{path} did not answer within {self.request_timeout_s:g} s", retryable=True
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise OutsideError(
                "judge", f"{self.base} cannot be reached: {error}", hint="is it up?", retryable=True, fatal=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise OutsideError(
                "judge", f"{self.base}{path}: {type(error).__name__}: {error}", retryable=True
            ) from error
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise _garbage(raw[:200].decode(errors="replace"))
        return answer


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


def _refusal(url: str, status: int, retry_after: str | None, raw: bytes) -> OutsideError:
    said = raw[:200].decode(errors="replace") or "nothing"
    with contextlib.suppress(orjson.JSONDecodeError):
        answer = orjson.loads(raw)
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        said = str(error.get("message", error) if isinstance(error, dict) else error)[:400]
    if status in (408, 429) or status >= 500:
        return OutsideError(
            "judge", f"{url} answered {status}: {said}", retryable=True, retry_after_s=_seconds(retry_after)
        )
    hint = {
        401: "set JUDGE_API_KEY to the endpoint's key",
        403: "set JUDGE_API_KEY to the endpoint's key",
        404: "is this the base URL (with or without /v1) and the served model's name?",
    }.get(status)
    return OutsideError("judge", f"the request was refused ({status}): {said}", hint=hint, fatal=hint is not None)


def _garbage(got: object) -> OutsideError:
    return OutsideError("judge", f"the answer is no chat completion: got {str(got)[:200]!r}", retryable=True)


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After is a number of seconds or an HTTP date."""
    if not retry_after:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None
