"""aiohttp's place in a schedule: servers that answer, refuse, hang, hang up and go away as is drawn, without a socket."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import aiohttp

from gymdata.engines.port import Sampler
from gymdata.engines.servers.many import Servers
from gymdata.engines.servers.vllm_server import PROBE, ServerSampler
from tests.collect.fake_parts import END

if TYPE_CHECKING:
    from tests.collect.played import Attempt, World

TIMEOUT_S, PAUSE_S = 5.0, 0.5
#: What a try may end in, besides an answer.
BUSY, BROKEN, HANGS, REFUSED, GONE = "busy", "broken", "hangs", "refused", "gone"


@dataclass
class Try:
    """One try of a request at one server. ``wait_s``: what its Retry-After asks for."""

    server: str
    began: float
    ended: float = 0.0
    kind: str = ""
    wait_s: float = 0.0


@dataclass(eq=False)
class Wire:
    """All servers, and every try of every request by its id."""

    world: World
    urls: list[str]
    retries: int
    wait_s: float
    tries: dict[str, list[Try]] = field(default_factory=lambda: defaultdict(list))
    #: Until when a server is gone.
    gone_until: dict[str, float] = field(default_factory=dict)
    #: What the run was told of outages.
    outages: list[float | None] = field(default_factory=list)
    sessions: int = 0
    calm: bool = True

    @classmethod
    def drawn(cls, world: World) -> Wire:
        rng = world.rng
        urls = [f"http://s{k}:80" for k in range(rng.randint(1, 3))]
        return cls(world, urls, rng.randint(0, 3), rng.choice([0.0, 15.0]))

    async def started(self) -> Sampler:
        """A sampler on the servers, which are all there when it starts."""
        self.calm = True
        settings: dict[str, Any] = {"max_retries": self.retries, "alone": len(self.urls) < 2, "vocab_size": 400}
        samplers = [
            ServerSampler(url, "fake", request_timeout_s=TIMEOUT_S, pause_s=PAUSE_S, **settings) for url in self.urls
        ]
        sampler = samplers[0] if len(samplers) == 1 else Servers(samplers)
        with mock.patch("aiohttp.ClientSession", self.session), mock.patch("aiohttp.TCPConnector", mock.Mock()):
            await sampler.start()
        sampler.wait_for_server(self.wait_s, lambda _: None, self.outages.append)
        self.calm = False
        return sampler

    def session(self, **_: Any) -> Any:
        self.sessions += 1
        return SimpleNamespace(request=self.request, close=self.closed)

    async def closed(self) -> None:
        self.sessions -= 1

    def request(self, method: str, url: str, *, data: bytes | None, timeout: Any, **_: Any) -> Reply:
        return Reply(self, url, json.loads(data or b"{}"), timeout.total)

    # --- one try ----------------------------------------------------------------------------------------------------

    async def answer(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; raises what aiohttp raises."""
        if self.calm:
            return 200, {}, json.dumps(self.probed(url, body)).encode()
        world, request = self.world, body["request_id"]
        base = url.removesuffix("/v1/completions")
        members = world.members(request, body["n"])
        this = Try(base, world.loop.time())
        self.tries[request].append(this)
        try:
            kind = await self.drawn_end(base)
            if kind is None:
                answer = {"model": "fake", "choices": [self.choice(body, k, a) for k, a in enumerate(members)]}
                return 200, {}, json.dumps(answer).encode()
            this.kind = kind
            if kind == HANGS:
                await asyncio.Event().wait()
            return self.failed(this, kind, members)
        finally:
            this.ended = world.loop.time()

    async def drawn_end(self, base: str) -> str | None:
        """How the try ends, after its time; None: with an answer."""
        world = self.world
        if self.gone_until.get(base, 0.0) > world.loop.time():
            return GONE
        await world.loop.pause(world.pause_s)
        if world.loop.chance(world.rate / 4):
            self.gone_until[base] = world.loop.time() + world.rng.expovariate(0.1)
            return GONE
        if world.loop.chance(world.rate):
            return world.rng.choice([BUSY, BROKEN, BROKEN, HANGS, REFUSED])
        return None

    def failed(self, this: Try, kind: str, members: list[Attempt]) -> tuple[int, dict[str, str], bytes]:
        text = self.world.fault("engine", members).reason
        if kind == GONE:
            place = SimpleNamespace(host="s", port=80, ssl=None, is_ssl=False)
            raise aiohttp.ClientConnectorError(place, OSError(text))  # type: ignore[arg-type]
        if kind == REFUSED:
            return 400, {}, text.encode()
        if kind == BUSY:
            this.wait_s = self.world.rng.choice([0.0, 2.0])
            return self.world.rng.choice([429, 503]), {"Retry-After": f"{this.wait_s:g}"}, text.encode()
        if self.world.loop.chance(0.5):
            raise aiohttp.ServerDisconnectedError(text)
        return 200, {}, text.encode()  # no JSON

    def timed_out(self, body: dict[str, Any]) -> None:
        """The client waits no longer."""
        self.tries[body["request_id"]][-1].kind = HANGS
        for attempt in self.world.members(body["request_id"], body["n"]):
            attempt.faults.append("did not answer within")

    def choice(self, body: dict[str, Any], index: int, attempt: Attempt) -> dict[str, Any]:
        sampled = self.world.one(body["request_id"], body["prompt"], body["max_tokens"], attempt)
        return {
            "index": index,
            "prompt_token_ids": list(sampled.prompt_token_ids),
            "token_ids": list(sampled.token_ids),
            "logprobs": {"token_logprobs": list(sampled.log_probs)},
            "finish_reason": sampled.finish_reason,
        }

    def probed(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """What is answered before any sampling."""
        if url.endswith("/v1/models"):
            return {"data": [{"id": "fake"}]}
        log_probs = {"token_logprobs": [0.0] * body.get("max_tokens", 0)}
        choice = {"index": 0, "prompt_token_ids": list(PROBE), "logprobs": log_probs, "finish_reason": "length"}
        return {"model": "fake", "choices": [{**choice, "token_ids": [END] * body.get("max_tokens", 0)}]}

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """No request is tried more often than it may be, sooner than it may be, or after it was refused or answered."""
        assert self.sessions == 0, "a connection is left open"
        for request, tries in self.tries.items():
            for url in self.urls:
                here = [t for t in tries if t.server == url]
                counted = [t for t in here if t.kind != GONE or (len(self.urls) == 1 and not self.wait_s)]
                assert len(counted) <= self.retries + 1, f"{request} was tried {len(counted)} times at {url}"
                assert sum(t.kind == HANGS for t in here) <= 2, f"{request} hung more than twice at {url}"
            for before, after in itertools.pairwise(tries):
                assert before.kind not in ("", REFUSED), f"{request} was tried after it was {before.kind or 'answered'}"
                assert before.ended <= after.began, f"{request} was at two servers at a time"
                if before.server == after.server and before.kind in (BUSY, BROKEN, HANGS):
                    pause = after.began - before.ended
                    assert pause >= max(PAUSE_S / 2, before.wait_s) - 1e-6, f"{request} was tried again after {pause} s"
        self.tries.clear()
        downs, ups = self.outages[::2], self.outages[1::2]
        assert all(x is None for x in downs), "an outage began twice"
        assert all(x is not None for x in ups), "an outage ended twice"
        self.outages.clear()


class Reply:
    """``async with session.request(…) as response``."""

    def __init__(self, wire: Wire, url: str, body: dict[str, Any], timeout_s: float) -> None:
        self.wire, self.url, self.body, self.timeout_s = wire, url, body, timeout_s
        self.cookies: dict[str, Any] = {}
        self.content = self

    async def __aenter__(self) -> Reply:
        try:
            async with asyncio.timeout(self.timeout_s):
                self.status, self.headers, self.raw = await self.wire.answer(self.url, self.body)
        except TimeoutError:
            self.wire.timed_out(self.body)
            raise
        self.content_length = len(self.raw)
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self.raw

    def close(self) -> None: ...
