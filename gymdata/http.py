"""JSON over HTTP to the outside systems: engines, judges, environments. One place for time limits, retries and wording.

Invariants: every request ends within its time limit; a passing fault (429, 408, 5xx, a broken connection, an answer
that cannot be read) is tried again a bounded number of times with growing pauses, no earlier than ``Retry-After`` asks,
and is then raised as the fault of the named system; no fault ever comes back as an answer. The wait for a server that
cannot be reached is limited over all requests together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeGuard, TypeVar

import orjson

from gymdata.errors import HIDDEN, OutsideError, needs, option
from gymdata.rollouts.messages import JsonObject
from gymdata.urls import Address

T = TypeVar("T")
_MAX_PAUSE_S = 30.0
_CONNECT_S = 30.0
#: Between tries to reach a server that is gone, by each request that waits for it.
_OUTAGE_PAUSE_S = 2.0
#: A request that hangs is tried this often only: each try costs the whole time limit.
_MAX_HANGS = 2
#: Shorter values of a query (``v=1``) are parts of too many words to be taken out of an answer that quotes them.
_SHORTEST_SECRET = 6
#: Bytes beyond any sensible answer whose length no request sets: lists of models, tool results, verdicts.
ORDINARY_BYTES = 16 << 20
#: What vLLM's API answers, with status 500, while its engine is gone and the server is about to follow.
_DEAD_ENGINE = ("EngineCore encountered an issue", "EngineDeadError")
#: Bytes that are read of a refusal.
_REFUSAL_BYTES = 64 << 10


def why_unreachable(error: Exception, host: str | None, port: int | None) -> str:
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
class Reply:
    """An answer with a status that the caller accepts."""

    status: int
    raw: bytes

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "replace")


class Receiver(Protocol):
    """Takes an answer as it comes. ``passed_on``: whether others have seen a part of it."""

    passed_on: bool

    def begin(self) -> None:
        """Another try begins."""
        ...

    def feed(self, part: bytes) -> None:
        """The next bytes. May raise OutsideError."""
        ...


class HttpClient:
    """Requests to one base URL (its query goes along with each) on behalf of ``system`` (engine, judge, environment).

    ``timeout_s`` is for one try. ``key_names``: environment variables that may hold the API key, the first one set
    wins. ``requests`` and ``retries`` count tries. ``notice`` is called once, at the first failure to connect, with how
    long that is retried. Not ``alone``: another server is asked where this one cannot be reached, so that is not retried.
    """

    def __init__(
        self,
        base: Address,
        system: str,
        *,
        timeout_s: float,
        max_retries: int,
        pause_s: float = 0.5,
        key_names: tuple[str, ...] = (),
        advice: Advice | None = None,
        notice: Callable[[str], object] | None = None,
        alone: bool = True,
    ) -> None:
        self.address = base
        #: Fit to be shown: without the values of a query.
        self.base = str(base)
        self.system = system
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self.pause_s = pause_s
        self.advice = advice or Advice()
        self.requests = self.retries = 0
        #: Seconds to wait for a server that cannot be reached; 0: retried like any other fault.
        self.wait_s = 0.0
        #: Called once per outage with None, and at its end with its seconds.
        self.on_outage: Callable[[float | None], None] = lambda _: None
        self._down_since: float | None = None
        self._key_names = key_names
        self._notice = notice
        self._alone = alone
        self._session: Any = None

    async def open(self, *, own_cookies: bool = False) -> None:
        """``own_cookies``: each request brings its own (see ``exchange``) and none are kept here."""
        if self._session is not None:
            return
        with needs("collect"):
            import aiohttp
        key = next((value for name in self._key_names if (value := os.environ.get(name))), None)
        self._session = aiohttp.ClientSession(
            # Shorter than the usual keep-alive of servers (5 s), so that they rarely hang up on a connection in use.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            cookie_jar=aiohttp.DummyCookieJar() if own_cookies else None,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: JsonObject | None,
        read: Callable[[JsonObject], T],
        *,
        retries: int | None = None,
        timeout_s: float | None = None,
        cookies: dict[str, str] | None = None,
        most_bytes: int = ORDINARY_BYTES,
    ) -> T:
        """``read`` applied to the JSON object of the answer. ``read`` may raise a retryable OutsideError."""

        def take(reply: Reply) -> T:
            answer = _loads(reply.raw)
            if not isinstance(answer, dict):
                raise self.garbage("a JSON object", reply.text)
            return read(answer)

        return await self.exchange(
            method, path, body, take, retries=retries, timeout_s=timeout_s, cookies=cookies, most_bytes=most_bytes
        )

    async def exchange(
        self,
        method: str,
        path: str,
        body: JsonObject | None,
        take: Callable[[Reply], T],
        *,
        is_answer: Callable[[int], bool] = lambda status: status == 200,
        repeatable: bool = True,
        retries: int | None = None,
        timeout_s: float | None = None,
        cookies: dict[str, str] | None = None,
        most_bytes: int = ORDINARY_BYTES,
        stream: Receiver | None = None,
    ) -> T:
        """``take`` applied to a reply whose status ``is_answer``, after at most ``retries`` more tries.

        Not ``repeatable``: a request that the server may have carried out (no answer in time, a connection that broke)
        is not sent again. ``cookies`` are sent, and what the server sets is put into them. ``most_bytes``: the largest
        sensible answer to this request; a longer one is a fault, and not read to its end. ``stream`` gets the answer as it
        comes, and the reply is empty; nothing is sent again once it has passed something on.
        """
        # tenacity and stamina know tries and pauses, but no limit for one kind of fault (hangs) besides that of all, so
        # their predicates would carry the same state; the loop below is what their hooks for Retry-After and counting
        # would be.
        retries = self.max_retries if retries is None else retries
        timeout_s = timeout_s or self.timeout_s
        hangs = attempt = 0
        while True:
            try:
                sent = self._once(method, path, body, is_answer, repeatable, timeout_s, cookies, most_bytes, stream)
                return take(await sent)
            except OutsideError as error:
                if stream is not None and stream.passed_on:
                    error.retryable = False
                if not error.retryable or (error.fatal and not self._alone):
                    raise
                if error.fatal and self.wait_s:
                    await self._wait(error)
                    self.retries += 1
                    continue
                hangs += isinstance(error.__cause__, TimeoutError)
                if attempt == retries or hangs >= _MAX_HANGS:
                    raise
                self.retries += 1
                if error.fatal and self._notice is not None:
                    say, self._notice = self._notice, None
                    total_s = sum(min(_MAX_PAUSE_S, self.pause_s * 2**k) for k in range(retries))
                    say(f"{error.message}; retried for about {max(1, round(total_s))} s")
                pause = min(_MAX_PAUSE_S, self.pause_s * 2**attempt) * random.uniform(0.5, 1.5)
                attempt += 1
                await asyncio.sleep(max(pause, min(error.retry_after_s or 0.0, timeout_s)))

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

        self.wait_s, self.on_outage = seconds, outage

    @property
    def unreachable(self) -> bool:
        """Whether the server is waited for."""
        return self._down_since is not None

    async def _wait(self, error: OutsideError) -> None:
        """Until the next try to reach a server that is gone. Raises ``error`` when it was waited for long enough."""
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            self.on_outage(None)
        left = self._down_since + self.wait_s - now
        if left <= 0:
            raise error
        await asyncio.sleep(min(left, _OUTAGE_PAUSE_S * random.uniform(0.5, 1.5)))

    def _reached(self, sent_at: float) -> None:
        """The server answered. While it goes down it may answer what it had before."""
        if self._down_since is not None and sent_at > self._down_since:
            since, self._down_since = self._down_since, None
            self.on_outage(time.monotonic() - since)

    def garbage(self, expected: str, answer: object) -> OutsideError:
        """An answer that is not what it must be; another try may give a better one."""
        body = self._without_secrets(str(answer))[:200]
        return OutsideError(self.system, f"the server's answer is not {expected}: got {body!r}", retryable=True)

    def _without_secrets(self, text: str) -> str:
        """The text without secrets, because a server may quote the request's address."""
        for secret in self.address.secrets:
            text = text.replace(secret, HIDDEN) if len(secret) >= _SHORTEST_SECRET else text
        return text

    async def _once(
        self,
        method: str,
        path: str,
        body: JsonObject | None,
        is_answer: Callable[[int], bool],
        repeatable: bool,
        timeout_s: float,
        cookies: dict[str, str] | None,
        most_bytes: int,
        stream: Receiver | None,
    ) -> Reply:
        import aiohttp

        if self._session is None:
            raise OutsideError(self.system, "the connection is closed", fatal=True)
        url = self.address.url(path)
        data = _dumps(body) if body is not None else None
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        self.requests += 1
        sent_at = time.monotonic()
        try:
            # A request, its key and its body go to the address that was given and to no other.
            sending = self._session.request(
                method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            )
            async with sending as response:
                if cookies is not None:
                    cookies.update({name: morsel.coded_value for name, morsel in response.cookies.items()})
                answers = is_answer(response.status)
                if answers and stream is not None:
                    stream.begin()
                    raw, complete = await _read(response, most_bytes, stream.feed)
                else:
                    raw, complete = await _read(response, most_bytes if answers else _REFUSAL_BYTES)
                if not complete:
                    response.close()  # the rest is not read, so the connection cannot be reused
                dead = response.status == 500 and any(text in _message(raw) for text in _DEAD_ENGINE)
                if dead:
                    reason, advice = f"{self.base} cannot be reached: its engine died", self.advice.unreachable
                    raise OutsideError(
                        self.system, reason, hint=advice, retryable=True, fatal=True, status=response.status
                    )
                self._reached(sent_at)
                if answers and not complete:
                    text = f"{url} answers with more than {most_bytes:,} bytes, more than requested"
                    hint = "is this the right server? The rest of its response is not read"
                    raise OutsideError(self.system, text, hint=hint, status=response.status)
                if not answers:
                    raise self._refusal(url, response.status, response.headers, raw)
                return Reply(response.status, raw)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # A machine that is gone does not even refuse.
            why = f"no connection within {min(_CONNECT_S, timeout_s):g} s"
            if isinstance(error, aiohttp.ClientConnectorError):
                cause = getattr(error, "certificate_error", None) or error.os_error
                why = why_unreachable(cause, error.host, error.port)
            text, hint = f"{self.base} cannot be reached: {why}", self.advice.unreachable
            raise OutsideError(self.system, text, hint=hint, retryable=True, fatal=True) from error
        except TimeoutError as error:
            text = f"{url} did not answer within {timeout_s:g} s"
            raise OutsideError(self.system, text, hint=self.advice.slow, retryable=repeatable) from error
        except aiohttp.InvalidURL as error:
            raise OutsideError(self.system, f"{url!r} is not a URL", fatal=True) from error
        except aiohttp.ClientPayloadError as error:
            text = f"{url}: the response's body is incomplete or not encoded as its headers say ({error})"
            raise OutsideError(self.system, text, retryable=repeatable) from error
        except (aiohttp.ClientError, OSError) as error:
            raise OutsideError(self.system, f"{url}: {type(error).__name__}: {error}", retryable=repeatable) from error

    def _refusal(self, url: str, status: int, headers: Mapping[str, str], raw: bytes) -> OutsideError:
        body = self._without_secrets(_message(raw))
        if 300 <= status < 400:
            where = self._without_secrets(headers.get("Location") or "another place")[:200]
            hint = "give the address of the server itself, if that is it"
            return OutsideError(self.system, f"{url} answered {status}, which leads to {where}", hint=hint, fatal=True)
        if status in (408, 429) or status >= 500:
            return OutsideError(
                self.system,
                f"{url} answered {status}: {body}",
                retryable=True,
                retry_after_s=_seconds(headers.get("Retry-After")),
                status=status,
            )
        advice = self.advice.statuses.get(status)
        return OutsideError(
            self.system, f"the request was refused ({status}): {body}", hint=advice, fatal=advice is not None
        )


async def _read(response: Any, most: int, feed: Callable[[bytes], None] | None = None) -> tuple[bytes, bool]:
    """(the body, whether it is complete): at most about ``most`` bytes are held, none where ``feed`` takes them."""
    if (response.content_length or 0) > most:
        return b"", False
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if feed is not None and size <= most:
            feed(part)
        else:
            parts.append(part)
        if size > most:
            return b"".join(parts)[:most], False
    return b"".join(parts), True


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
    answer = _loads(raw)
    if answer is None:
        return raw[:200].decode(errors="replace") or "nothing"
    detail = answer
    if isinstance(answer, dict):
        detail = answer.get("error", answer.get("detail", answer))
    return str(detail.get("message", detail) if isinstance(detail, dict) else detail)[:400]


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After is a number of seconds or an HTTP date."""
    if not retry_after:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(retry_after))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value of an answer is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer beyond any float
        return False
