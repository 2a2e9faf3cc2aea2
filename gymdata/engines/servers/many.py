"""Several servers of one model behind one ``Pool``: of a policy that samples (``Servers``), or of a judge.

Invariants: requests that begin alike go to one server, by a hash; one that cannot be reached gets none for 30 s, and the
next one gets them. A request is at one server at a time, so no answer is lost or kept twice. All serve the same model in
the same way, so no answer depends on the server that gave it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import xxhash

from gymdata.engines.port import Generation, SampleRequest
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import OutsideError, UsageError, option
from gymdata.store.paths import Facts

#: Seconds without requests for a server that could not be reached; and between two tries while none can.
OUT_S, _PAUSE_S = 30.0, 2.0


class Member(Protocol):
    """One server. It repeats a request by itself, but not one that did not reach it: its OutsideError is then fatal."""

    base: str
    default_concurrency: int

    async def start(self) -> Facts: ...
    async def close(self) -> None: ...


M = TypeVar("M", bound=Member)
T = TypeVar("T")


class Pool(Generic[M]):
    """Requests to the servers of ``members``."""

    def __init__(self, members: Sequence[M]) -> None:
        self.members = list({member.base: member for member in members}.values())
        self.default_concurrency = sum(member.default_concurrency for member in self.members)
        #: Until when a server that was lost gets no requests; once it answers, it is no longer here.
        self._out_until: dict[str, float] = {}
        #: Whether, and since when, none can be reached.
        self.unreachable, self._none_since = False, 0.0
        self.wait_for_server(0.0, lambda _: None)

    def wait_for_server(
        self, seconds: float, say: Callable[[str], None], away: Callable[[float | None], None] = lambda _: None
    ) -> None:
        """From now on wait this long when no server can be reached; ``say`` is called for every loss and return, ``away``
        with None when none is left, and with the seconds of that when one is back."""
        self._wait_s, self._say, self._away = seconds, say, away

    async def start(self) -> Facts:
        """Start every server; those that cannot be reached are left out. Raises OutsideError when that is all of them, and
        UsageError for one that cannot serve this or serves something else than another."""
        results = await asyncio.gather(*(member.start() for member in self.members), return_exceptions=True)
        facts = {m.base: found for m, found in zip(self.members, results, strict=True) if isinstance(found, dict)}
        away = [found for found in results if isinstance(found, OutsideError)]
        refused = [found for found in results if isinstance(found, BaseException) and found not in away]
        for name in ("served_model", "logprobs_mode", "max_model_len"):
            if len({found.get(name) for found in facts.values()}) > 1:
                differences = ", ".join(f"{found.get(name)} at {url}" for url, found in facts.items())
                refused.append(UsageError(f"several servers must serve the same, and {name} is {differences}"))
        if refused or not facts:
            await self.close()
            raise (refused or away)[0]
        for member in [member for member in self.members if member.base not in facts]:
            self.members.remove(member)
            await member.close()
        notes = [f"a server is left out: {error}" for error in away]
        return {**facts[self.members[0].base], "servers": list(facts), "notes": notes}

    async def ask(self, work: Callable[[M], Awaitable[T]], key: str) -> tuple[T, str]:
        """The result of ``work`` with a server, and its URL. ``key``: of requests that begin alike. Raises OutsideError."""
        first = xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) % len(self.members)
        order, failed = self.members[first:] + self.members[:first], dict[str, OutsideError]()
        while True:
            # A server's own retries of a request are all that it gets of it.
            out = {base for base, until in self._out_until.items() if until > time.monotonic()} | failed.keys()
            up = [member for member in order if member.base not in out]
            if failed and not up:
                raise list(failed.values())[-1]
            member = (up or order)[0]
            order.remove(member)
            order.append(member)
            try:
                result = await work(member)
            except OutsideError as error:
                if error.fatal:
                    await self._lost(member, error)
                elif error.retryable:
                    failed[member.base] = error
                else:
                    raise
            else:
                self._answered(member)
                return result, member.base

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        for member in self.members:
            await member.close()

    async def _lost(self, member: M, error: OutsideError) -> None:
        """Send a server nothing for a while. Raises OutsideError when none could be reached for too long."""
        now = time.monotonic()
        if len(self.members) > 1 and member.base not in self._out_until:
            self._say(f"{member.base} gets no requests for {OUT_S:g} s: {error.reason}")
        self._out_until[member.base] = now + OUT_S
        if any(self._out_until.get(other.base, 0.0) <= now for other in self.members):
            return
        if not self.unreachable:
            self.unreachable, self._none_since = True, now
            self._away(None)
            if self._wait_s > 0.0:
                self._say(f"no server can be reached, retrying for {self._wait_s:g} s ({option('wait_for_server')})")
        if not error.retryable or now - self._none_since >= self._wait_s:
            if len(self.members) == 1:
                raise error
            text = f"none of {len(self.members)} servers can be reached: {error.reason}"
            raise OutsideError(error.system, text, hint=error.hint, retryable=True, fatal=True) from error
        await asyncio.sleep(_PAUSE_S)

    def _answered(self, member: M) -> None:
        if self.unreachable:
            self._away(time.monotonic() - self._none_since)
            self.unreachable = False
        if self._out_until.pop(member.base, None) is not None:
            self._say(f"{member.base} answers again")


class Servers(Pool[ServerSampler]):
    """A ``Sampler`` on several servers: the rollouts of a group go to one, which has their beginning in its cache."""

    prefers_groups = True

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """``request.n`` generations of one server. Raises OutsideError("engine")."""
        generations, url = await self.ask(lambda sampler: sampler.sample(request), request.group or request.request_id)
        return [replace(generation, server=url) for generation in generations]
