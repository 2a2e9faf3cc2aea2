"""JSON over HTTP to the outside systems: engines, judges, rewards, environments. One place for time limits and retries.

Invariants: every request ends within its time limit; a passing fault (429, 408, 5xx, a broken connection, an answer
that cannot be read) is tried again a bounded number of times with growing pauses, no earlier than ``Retry-After`` asks,
and is then raised as the fault of the named system; no fault ever comes back as an answer. The wait for a server that
cannot be reached is limited over all requests together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeGuard, TypeVar

import orjson

from gymdata.errors import OutsideError, needs, option
from gymdata.rollouts.messages import JsonObject
from gymdata.urls import API_KEYS, Address

T = TypeVar("T")
_MAX_PAUSE_S = 30.0
_CONNECT_S = 30.0
#: Between tries to reach a server that is gone, by each request that waits for it.
_OUTAGE_PAUSE_S = 2.0
#: A request that hangs is tried this often only: each try costs the whole time limit.
_MAX_HANGS = 2
#: Bytes beyond any sensible answer whose length no request sets: lists of models, tool results, verdicts.
ORDINARY_BYTES = 16 << 20
#: What vLLM's API answers, with status 500, while its engine is gone and the server is about to follow.
_DEAD_ENGINE = ("EngineCore encountered an issue", "EngineDeadError")
#: Bytes that are read of a refusal.
_REFUSAL_BYTES = 64 << 10


def why_unreachable(error: OSError, host: str | None, port: int | None) -> str:
    """Why a connection failed, in plain words."""
    if isinstance(error, ConnectionRefusedError) or str(error).startswith("Multiple exceptions"):  # of its addresses
        return f"nothing answers at {host}:{port}"
    if isinstance(error, socket.gaierror):
        return f"no host is named {host}"
    return os.strerror(error.errno) if type(error) is OSError and error.errno else str(error)


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do next, by fault. A status with advice is one that every other request would meet too (fatal)."""

    unreachable: str = "start the server, or correct the URL"
    slow: str | None = None
    statuses: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """``is_answer``: the statuses that the caller accepts. ``repeatable``: sent again where the server may have carried it
    out (no answer in time, a connection that broke). ``cookies`` are sent, and what the server sets is put into them.
    ``most_bytes``: the largest sensible answer; a longer one is a fault, and not read to its end.
    """

    method: str
    path: str
    body: JsonObject | None = None
    _: KW_ONLY
    is_answer: Callable[[int], bool] = lambda status: status == 200
    repeatable: bool = True
    #: Where not those of the client.
    retries: int | None = None
    timeout_s: float | None = None
    cookies: dict[str, str] | None = None
    most_bytes: int = ORDINARY_BYTES


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with a status that the caller accepts."""

    status: int
    raw: bytes

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "replace")


class HttpClient:
    """Requests to one base URL (its query goes along with each) on behalf of ``system`` (engine, judge, environment).

    ``timeout_s`` is for one try. Not ``alone``: another server is asked where this one cannot be reached, so that is not
    retried.
    """

    def __init__(
        self,
        base: Address,
        system: str,
        *,
        timeout_s: float,
        max_retries: int,
        pause_s: float = 0.5,
        advice: Advice | None = None,
        alone: bool = True,
    ) -> None:
        self.address = base
        #: Fit to be shown: without the values of a query.
        self.base = str(base)
        self.system, self.advice = system, advice or Advice()
        self.timeout_s, self.max_retries, self.pause_s = timeout_s, max_retries, pause_s
        self._alone = alone
        #: Seconds to wait for a server that cannot be reached; 0: retried like any other fault.
        self._wait_s = 0.0
        self._on_outage: Callable[[float | None], None] = lambda _: None
        self._down_since: float | None = None
        self._session: Any = None

    async def open(self) -> None:
        """Have connections from now on. Safe to call twice."""
        if self._session is not None:
            return
        with needs("collect"):
            import aiohttp
        key = next((value for name in API_KEYS[self.system] if (value := os.environ.get(name))), None)
        self._session = aiohttp.ClientSession(
            # Shorter than the usual keep-alive of servers (5 s), so that they rarely hang up on a connection in use.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            # Sessions are those of rollouts, whose requests bring their own cookies.
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, request: Request, read: Callable[[JsonObject], T]) -> T:
        """``read`` applied to the JSON object of the answer. ``read`` may raise a retryable OutsideError."""

        def take(reply: Reply) -> T:
            answer = _loads(reply.raw)
            if not isinstance(answer, dict):
                raise self.garbage("a JSON object", reply.text)
            return read(answer)

        return await self.exchange(request, take)

    async def exchange(self, request: Request, take: Callable[[Reply], T]) -> T:
        """``take`` applied to the reply, after as many more tries as its faults allow."""
        # tenacity and stamina know no limit for one kind of fault (hangs) besides that of all.
        retries = self.max_retries if request.retries is None else request.retries
        hangs = attempt = 0
        while True:
            try:
                return take(await self._once(request))
            except OutsideError as error:
                if not error.retryable or (error.fatal and not self._alone):
                    raise
                if error.fatal and self._wait_s:
                    await self._wait(error)
                    continue
                hangs += isinstance(error.__cause__, TimeoutError)
                if attempt == retries or hangs >= _MAX_HANGS:
                    raise
                pause = min(_MAX_PAUSE_S, self.pause_s * 2**attempt) * random.uniform(0.5, 1.5)
                attempt += 1
                await asyncio.sleep(max(pause, min(error.retry_after_s or 0.0, request.timeout_s or self.timeout_s)))

    def wait_for_server(
        self, seconds: float, say: Callable[[str], None], away: Callable[[float | None], None] = lambda _: None
    ) -> None:
        """From now on wait for a server that cannot be reached. ``say`` and ``away`` are called once when an outage begins,
        ``away`` with None, and once when it ends, with its seconds."""

        def outage(took: float | None) -> None:
            span = f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
            gone = f"server unreachable, retrying for {span} ({option('wait_for_server')})"
            away(took)
            say(gone if took is None else f"server reachable again after {took:.0f} s")

        self._wait_s, self._on_outage = seconds, outage

    @property
    def unreachable(self) -> bool:
        """Whether the server is waited for."""
        return self._down_since is not None

    async def _wait(self, error: OutsideError) -> None:
        """Until the next try to reach a server that is gone. Raises ``error`` when it was waited for long enough."""
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            self._on_outage(None)
        left = self._down_since + self._wait_s - now
        if left <= 0:
            raise error
        await asyncio.sleep(min(left, _OUTAGE_PAUSE_S * random.uniform(0.5, 1.5)))

    def _reached(self, sent_at: float) -> None:
        """The server answered. While it goes down it may answer what it had before."""
        if self._down_since is not None and sent_at > self._down_since:
            since, self._down_since = self._down_since, None
            self._on_outage(time.monotonic() - since)

    def garbage(self, expected: str, answer: object) -> OutsideError:
        """An answer that is not what it must be; another try may give a better one."""
        body = self.address.without_secrets(str(answer))[:200]
        return OutsideError(self.system, f"the server's answer is not {expected}: got {body!r}", retryable=True)

    async def _once(self, request: Request) -> Reply:
        """One try."""
        import aiohttp

        if self._session is None:
            raise OutsideError(self.system, "the connection is closed", fatal=True)
        url, timeout_s = self.address.url(request.path), request.timeout_s or self.timeout_s
        connect_s = min(_CONNECT_S, timeout_s)
        headers = {"Content-Type": "application/json"} if request.body is not None else {}
        if request.cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in request.cookies.items())
        sending = self._session.request(
            request.method,
            url,
            data=_dumps(request.body) if request.body is not None else None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s),
            # A request, its key and its body go to the address that was given and to no other.
            allow_redirects=False,
        )
        try:
            return await self._reply(sending, request, url)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # A machine that is gone does not even refuse.
            why = f"no connection within {connect_s:g} s"
            if isinstance(error, aiohttp.ClientConnectorError):
                cause = getattr(error, "certificate_error", None) or error.os_error
                why = why_unreachable(cause, error.host, error.port)
            text, hint = f"{self.base} cannot be reached: {why}", self.advice.unreachable
            raise OutsideError(self.system, text, hint=hint, retryable=True, fatal=True) from error
        except TimeoutError as error:
            text = f"{url} did not answer within {timeout_s:g} s"
            raise OutsideError(self.system, text, hint=self.advice.slow, retryable=request.repeatable) from error
        except aiohttp.ClientPayloadError as error:
            text = f"{url}: the response's body is incomplete or not encoded as its headers say ({error})"
            raise OutsideError(self.system, text, retryable=request.repeatable) from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"{url}: {type(error).__name__}: {error}"
            raise OutsideError(self.system, text, retryable=request.repeatable) from error

    async def _reply(self, sending: Any, request: Request, url: str) -> Reply:
        sent_at = time.monotonic()
        async with sending as response:
            if request.cookies is not None:
                request.cookies.update({name: morsel.coded_value for name, morsel in response.cookies.items()})
            if not request.is_answer(response.status):
                raw, _ = await _read(response, _REFUSAL_BYTES)
                refusal = self._refusal(url, response.status, response.headers, raw)
                if not (refusal.retryable and refusal.fatal):
                    self._reached(sent_at)
                raise refusal
            raw, complete = await _read(response, request.most_bytes)
        self._reached(sent_at)
        if not complete:
            text = f"{url} answers with more than {request.most_bytes:,} bytes, more than requested"
            hint = "is this the right server? The rest of its response is not read"
            raise OutsideError(self.system, text, hint=hint, status=response.status)
        return Reply(response.status, raw)

    def _refusal(self, url: str, status: int, headers: Mapping[str, str], raw: bytes) -> OutsideError:
        body = self.address.without_secrets(_message(raw))
        if status == 500 and any(text in body for text in _DEAD_ENGINE):
            text, hint = f"{self.base} cannot be reached: its engine died", self.advice.unreachable
            return OutsideError(self.system, text, hint=hint, retryable=True, fatal=True, status=status)
        if 300 <= status < 400:
            where = self.address.without_secrets(headers.get("Location") or "another place")[:200]
            hint = "give the address of the server itself, if that is it"
            return OutsideError(self.system, f"{url} answered {status}, which leads to {where}", hint=hint, fatal=True)
        if status in (408, 429) or status >= 500:
            text, wait_s = f"{url} answered {status}: {body}", _seconds(headers.get("Retry-After"))
            return OutsideError(self.system, text, retryable=True, retry_after_s=wait_s, status=status)
        text, advice = f"the request was refused ({status}): {body}", self.advice.statuses.get(status)
        return OutsideError(self.system, text, hint=advice, fatal=advice is not None)


async def _read(response: Any, most: int) -> tuple[bytes, bool]:
    """(the body, whether it is complete): about ``most`` bytes of it."""
    parts, size = list[bytes](), 0
    if (response.content_length or 0) <= most:
        async for part in response.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > most:
                break
        else:
            return b"".join(parts), True
    response.close()  # the rest is not read, so the connection cannot be reused
    return b"".join(parts)[:most], False


def _dumps(body: JsonObject) -> bytes:
    try:
        return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS, default=str)
    except TypeError:  # lone surrogates, integers above 64 bits
        return json.dumps(body, default=str).encode()


def _loads(raw: bytes) -> Any:
    # Python servers write NaN and Infinity, which strict readers refuse.
    for loads in (orjson.loads, json.loads):
        with contextlib.suppress(ValueError, RecursionError):
            return loads(raw)
    return None


def _message(raw: bytes) -> str:
    """What a refusal says."""
    answer = _loads(raw)
    if answer is None:
        return raw[:200].decode(errors="replace") or "nothing"
    detail = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    return str(detail.get("message", detail) if isinstance(detail, dict) else detail)[:400]


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After is a number of seconds or an HTTP date."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(retry_after or ""))
    with contextlib.suppress(ValueError):
        return max(0.0, parsedate_to_datetime(retry_after or "").timestamp() - time.time())
    return None


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value of an answer is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
