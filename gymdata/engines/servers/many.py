"""Several servers of one model behind one ``Pool``: of a policy that samples (``Servers``, behind URLs), or of
a judge.

Invariants: a server is used only after it has proven to be like the first (same model name, tokenizer, template, kind of
log-probabilities, and the same log-probabilities for fixed prompts), also when it comes back or is added while others run;
one that is not is refused by name. A request belongs to one server at a time: where that fails, another gets it, so no
answer is lost or kept twice. A generation names the server that sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from gymdata.engines.port import Generation, Sampler, SampleRequest
from gymdata.engines.servers.fingerprint import Fingerprint
from gymdata.engines.servers.vllm_server import server_address
from gymdata.errors import DataError, GymdataError, OutsideError, UsageError, counted
from gymdata.rollouts.messages import JsonObject
from gymdata.store.paths import Facts
from gymdata.urls import Address

#: Between two tries to use a lost server again, between two looks whether one is there, and between readings of the list.
_PAUSE_S, _TICK_S, _READ_S = 0.5, 0.25, 2.0
#: Rollouts and groups whose server is remembered.
_KEPT = 200_000
#: Mean difference of log-probabilities, in nats: more than number formats and kernels explain, and more than kernels alone.
_OTHER_WEIGHTS, _OTHER_NUMBERS = 0.05, 0.005
#: Answers of a server that has more requests than it can take.
_BUSY = (429, 503)


class Pooled(Protocol):
    """A server as a pool has it. It does not retry by itself; a fatal OutsideError says that it is gone."""

    #: Requests to keep in flight unless the user says otherwise.
    default_concurrency: int

    async def start(self) -> Facts:
        """Connect. Raises UsageError when it cannot serve this, OutsideError when it cannot be reached."""
        ...

    def facts(self) -> Facts:
        """Facts for run.json; empty before ``start``."""
        ...

    async def fingerprint(self) -> Fingerprint:
        """The fingerprint of its model; after ``start``. Raises UsageError when that is too little, OutsideError."""
        ...

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        ...


class Member(Sampler, Pooled, Protocol):
    """One of several samplers of one policy."""


M = TypeVar("M", bound=Pooled)
T = TypeVar("T")


class Places:
    """Where the servers are. ``noun``: what a person calls one of them; ``may_change``: whether ``read`` may give others
    while the run goes."""

    noun: str
    may_change: bool

    def read(self) -> dict[str, str]:
        """Every server once, in order: its name as it may be shown, and what its sampler is made of."""
        raise NotImplementedError

    def check(self) -> str:
        """A description of what will be used. Raises UsageError when it can never be available. Ray is started here
        where it is to be, which only a program's main thread can do."""
        return counted(len(self.read()), self.noun)

    async def open(self) -> None:
        """Before the first sampler is started. By default nothing: servers run already."""

    async def close(self) -> None:
        """After the last was closed; safe to call twice, and without ``open``. By default servers are left running."""


class Endpoints(Places):
    """The base URLs that were given: each a URL, or ``@FILE`` with one per line (``#`` begins a comment). ``address_of``
    checks one."""

    noun = "server"

    def __init__(self, urls: Sequence[str], address_of: Callable[[str], Address] = server_address) -> None:
        self._urls, self._address_of = list(urls), address_of
        self.may_change = any(text.startswith("@") for text in urls)

    def read(self) -> dict[str, str]:
        """Every server once, in order: its URL as it may be shown, without ``/v1`` and secrets, and as it was given. Raises
        UsageError for what is no URL, DataError for a file that cannot be read or names none."""
        servers: dict[str, str] = {}
        for text in self._urls:
            file = Path(text[1:]) if text.startswith("@") else None
            try:
                for url in [text] if file is None else _listed(file):
                    servers.setdefault(str(self._address_of(url)), url)
            except UsageError as error:
                if file is None:
                    raise
                raise UsageError(f"{file}: {error.message}", hint=error.hint) from error
        return servers


def _listed(file: Path) -> list[str]:
    """The URLs in a file. Raises DataError."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError.unreadable(file, str(error), "give a text file with one URL per line") from error
    urls = [word for line in lines for word in line.partition("#")[0].replace(",", " ").split()]
    if not urls:
        raise DataError.empty(file, "at least one URL")
    return urls


@dataclass(eq=False)
class Server(Generic[M]):
    """One of the servers. ``url``: its name, fit to be shown; ``target``: as it was given; ``generations``, ``faults``: so
    far; ``sampled_as``: generations by the name that they have of it; ``lasting``: it is of another policy, and is not
    tried again."""

    url: str
    target: str
    sampler: M
    up: bool = False
    refused: str | None = None
    lasting: bool = False
    listed: bool = True
    in_flight: int = 0
    generations: int = 0
    sampled_as: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    outages: int = 0
    difference: float | None = None
    last_fault: GymdataError | None = None
    down_since: float = 0.0
    reviving: asyncio.Task[None] | None = None


class Pool(Generic[M]):
    """Requests to several servers of one model.

    ``places``: where they are, read again while it runs where that may change. ``make``: the member of one of them. A
    request goes to the server that had the last one with one of its keys, else to the one with the fewest in flight, and
    of these to the one that has answered least; ``retries``: how often another try is made after a fault.
    """

    #: Whose fault it is when no server can be reached.
    system: ClassVar[str] = "engine"
    #: Nouns for what they serve and for their answers.
    of_one: ClassVar[str] = "of one run must serve the same policy"
    answers: ClassVar[str] = "generations"
    #: Seconds without an answer after which, at the start, a server is not waited for while others answer.
    late_s: ClassVar[float] = 30.0

    def __init__(self, places: Places, make: Callable[[str], M], *, retries: int = 5, pause_s: float = 0.5) -> None:
        self.places, self._make, self._retries, self._pause_s = places, make, retries, pause_s
        self._noun = places.noun
        self.servers = [Server(url, target, make(target)) for url, target in places.read().items()]
        self.default_concurrency = sum(server.sampler.default_concurrency for server in self.servers)
        self._wait_s = 0.0
        self._say: Callable[[str], None] = lambda _: None
        self._proof: Fingerprint | None = None
        self._facts: Facts = {}
        #: The samplers that servers had before they were lost.
        self._replaced: list[M] = []
        self._sticky: OrderedDict[str, Server[M]] = OrderedDict()
        self._reader: asyncio.Task[None] | None = None
        self._none_since: float | None = None
        self._away: Callable[[float | None], None] = lambda _: None
        #: What was wrong with the list of servers when it was last read.
        self._list_fault: str | None = None

    async def start(self) -> Facts:
        """Check every server. Raises UsageError naming one that is unlike the first, OutsideError when none can be reached;
        one that cannot be reached while others can is tried again while they work."""
        try:
            await self.places.open()
            proofs = await self._first_proofs()
            for server, proof in zip(self.servers, proofs, strict=True):
                if isinstance(proof, Fingerprint):
                    if self._proof is None:
                        self._proof, self._facts = proof, server.sampler.facts()
                    if (unlike := self._unlike(server, proof)) is not None:
                        raise unlike
                    server.up = True
        except BaseException:
            await self.close()
            raise
        for server, proof in zip(self.servers, proofs, strict=True):
            if isinstance(proof, OutsideError):
                self._down(server, proof)
        if self.places.may_change:
            self._reader = asyncio.create_task(self._read_repeatedly())
        return self.facts()

    async def _first_proofs(self) -> list[Fingerprint | BaseException]:
        """The proof of each server, or why it cannot be reached; retried for a while when none can. Raises GymdataError."""
        began, pause = time.monotonic(), self._pause_s
        for tries in range(self._retries, -1, -1):
            proofs = await self._proofs()
            away = [proof for proof in proofs if isinstance(proof, OutsideError)]
            for proof in proofs:
                if isinstance(proof, BaseException) and not isinstance(proof, OutsideError):
                    raise proof
            if len(away) < len(self.servers):
                return proofs
            # What takes long, as an engine that fails to start, is not repeated.
            if not tries or not all(error.retryable for error in away) or time.monotonic() - began > self.late_s:
                break
            await asyncio.sleep(pause)
            pause *= 2
        raise self._none(away[0]) if len(away) > 1 else away[0]

    async def _proofs(self) -> list[Fingerprint | BaseException]:
        """The proof of each server, or the error instead. Servers that have not answered when others have are left
        out."""
        tasks = [asyncio.ensure_future(self._prove(server)) for server in self.servers]
        waiting, done = set(tasks), set(tasks)
        try:
            while waiting and done:
                some = any(task.done() and task.exception() is None for task in tasks)
                done, waiting = await asyncio.wait(
                    waiting, timeout=self.late_s if some else None, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for task in waiting:
                task.cancel()
            proofs = await asyncio.gather(*tasks, return_exceptions=True)
        silent = OutsideError(self.system, f"no answer within {self.late_s:g} s of the others", retryable=True)
        return [silent if task in waiting else proof for task, proof in zip(tasks, proofs, strict=True)]

    def facts(self) -> Facts:
        """What run.json keeps about the servers; empty before ``start``."""
        return {**self._facts, "servers": self.account(), "notes": self._notes()}

    def account(self) -> list[JsonObject]:
        """The account of each server so far."""
        return [
            {
                # A replica has the name of its node as well.
                "url": getattr(server.sampler, "name", server.url),
                "engine_version": server.sampler.facts().get("engine_version"),
                "state": "refused" if server.refused else "up" if server.up else "down" if server.listed else "removed",
                self.answers: server.generations,
                "faults": server.faults,
                "outages": server.outages,
                "logprob_difference": server.difference,
                **({"sampled_as": dict(server.sampled_as)} if set(server.sampled_as) - {server.url} else {}),
            }
            for server in self.servers
        ]

    def remarks(self) -> list[str]:
        """Servers that are away in the end."""
        away = [s for s in self.servers if s.listed and not s.up]
        reasons = ", ".join(f"{s.url} ({s.last_fault.message if s.last_fault else 'no answer'})" for s in away)
        return [f"{len(away)} of {len(self.servers)} {self._noun}s are not used in the end: {reasons}"] if away else []

    def wait_for_server(
        self, seconds: float, say: Callable[[str], None], away: Callable[[float | None], None] = lambda _: None
    ) -> None:
        """From now on wait this long when no server can be reached; ``say`` is called for every loss and return, ``away``
        with None when none is left, and with the seconds of that when one is back."""
        self._wait_s, self._say, self._away = seconds, say, away

    @property
    def unreachable(self) -> bool:
        """Whether none of the servers can be reached."""
        return not any(server.up for server in self.servers)

    async def ask(self, work: Callable[[M], Awaitable[T]], keys: Sequence[str] = (), n: int = 1) -> tuple[T, Server[M]]:
        """The result of ``work`` with one server, for ``n`` answers, and that server. ``keys``: requests with the same one
        begin alike, the likest first. Raises OutsideError."""
        avoid: frozenset[str] = frozenset()
        tries, pause = self._retries + len(self.servers), self._pause_s
        while True:
            while (server := self._choose(keys, avoid)) is None:
                await self._wait_for_any()
            sampler = server.sampler
            server.in_flight += n
            try:
                answers = await work(sampler)
            except OutsideError as error:
                if not self._fault(server, sampler, error, avoid) or tries <= 0:
                    raise
                tries -= 1
                if server.url in avoid:
                    await asyncio.sleep(max(pause, min(error.retry_after_s or 0.0, 30.0)))
                    pause = min(2 * pause, 30.0)
                avoid |= {server.url}
            else:
                server.generations += n
                return answers, server
            finally:
                server.in_flight -= n

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        running = [task for task in (self._reader, *(s.reviving for s in self.servers)) if task is not None]
        self._reader = None
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for server in self.servers:
            server.reviving = None
        for sampler in [*self._replaced, *(server.sampler for server in self.servers)]:
            await sampler.close()
        self._replaced.clear()
        await self.places.close()

    # --- which server gets a request --------------------------------------------------------------------------------

    def _choose(self, keys: Sequence[str], avoid: frozenset[str]) -> Server[M] | None:
        """The server for a request; None when none can be reached."""
        up = [server for server in self.servers if server.up]
        if not up:
            return None
        fit = [server for server in up if server.url not in avoid] or up
        named = [key for key in keys if key]
        before = next((self._sticky[key] for key in named if key in self._sticky), None)
        server = before if before in fit else min(fit, key=lambda s: (s.in_flight, s.generations))
        assert server is not None
        for key in named:
            self._sticky[key] = server
            self._sticky.move_to_end(key)
        while len(self._sticky) > _KEPT:
            self._sticky.popitem(last=False)
        return server

    async def _wait_for_any(self) -> None:
        """A moment, while no server can be used. Raises OutsideError when that was so for too long, or for good."""
        now = time.monotonic()
        if self._none_since is None:
            self._none_since = now
            span = f"{self._wait_s / 60:g} min" if self._wait_s >= 60 else f"{self._wait_s:g} s"
            self._away(None)
            self._say(f"no {self._noun} can be reached, retrying for {span} (--wait-for-server)")
        hopeless = not self.places.may_change and all(server.lasting for server in self.servers)
        if hopeless or now - self._none_since >= self._wait_s:
            listed = sorted(self.servers, key=lambda server: not server.listed)
            raise self._none(next((s.last_fault for s in listed if s.last_fault is not None), None))
        await asyncio.sleep(_TICK_S)

    # --- servers that fail, come back, and are added ------------------------------------------------------------------

    def _fault(self, server: Server[M], sampler: M, error: OutsideError, avoid: frozenset[str]) -> bool:
        """Whether the request may be sent again. ``avoid``: servers that failed it before."""
        others = [s.url for s in self.servers if s.up and s is not server]
        # An answer that is no use (too long) may be better elsewhere; what refuses the request, others would refuse too.
        elsewhere = error.fatal or (error.status == 200 and not avoid.issuperset(others))
        if not error.retryable and not (elsewhere and others):
            return False
        server.faults += 1
        if server.sampler is not sampler or not server.up:
            return True  # it is away already, or back since
        cause = error.__cause__
        # The connection broke while the request was on its way, or the server itself did.
        broken = (type(cause).__module__.startswith("aiohttp") and not isinstance(cause, TimeoutError)) or (
            (error.status or 0) >= 500 and error.status not in _BUSY
        )
        if error.fatal or broken:
            self._down(server, error)
        return True

    def _down(self, server: Server[M], error: OutsideError) -> None:
        server.up, server.last_fault, server.down_since = False, error, time.monotonic()
        server.outages += 1
        others = sum(other.up for other in self.servers)
        self._say(
            f"{server.url} is not used until it answers again ({others} of {len(self.servers)} left): {error.message}"
        )
        self._try_again(server)

    def _try_again(self, server: Server[M]) -> None:
        if server.reviving is None or server.reviving.done():
            server.reviving = asyncio.create_task(self._revive(server))

    def _none(self, last: GymdataError | None) -> OutsideError:
        """The error when no server can be used. ``last``: what is wrong with one of them."""
        why = "none is listed" if last is None else last.reason if isinstance(last, OutsideError) else last.message
        verb = "reached" if last is None or isinstance(last, OutsideError) else "used"
        return OutsideError(
            self.system,
            f"none of {len(self.servers)} {self._noun}s can be {verb}: {why}",
            fatal=True,
            retryable=True,
            hint=None if last is None else last.hint,
        )

    async def _revive(self, server: Server[M]) -> None:
        """Compare a server with the first until it can be used: again, or for the first time."""
        while server.listed and not server.up and not server.lasting:
            fresh = replace(server, sampler=self._make(server.target))
            try:
                proof = await self._prove(fresh)
                if (why := self._unlike(fresh, proof)) is not None:
                    server.lasting = True
                    raise why
            except GymdataError as error:
                await fresh.sampler.close()
                # What it lacks may come (a model that is loaded later), unless that is ``lasting``.
                refused = None if isinstance(error, OutsideError) else error.message
                if refused is not None and refused != server.refused:
                    until = "" if server.lasting else " until that changes"
                    self._say(f"{server.url} is refused{until}: {refused}")
                server.refused, server.last_fault = refused or server.refused, error
                await asyncio.sleep(_PAUSE_S)
                continue
            except asyncio.CancelledError:
                await fresh.sampler.close()
                raise
            if not server.listed:
                await fresh.sampler.close()
                return
            # Its other connections may be sound, with requests on their way: they are closed in the end.
            self._replaced.append(server.sampler)
            server.sampler, server.difference = fresh.sampler, fresh.difference
            server.up, server.refused = True, None
            if self._none_since is not None:
                self._away(time.monotonic() - self._none_since)
                self._none_since = None
            away = f" again after {time.monotonic() - server.down_since:.0f} s" if server.outages else ""
            self._say(f"{server.url} is used{away} ({sum(s.up for s in self.servers)} of {len(self.servers)})")

    async def _read_repeatedly(self) -> None:
        """Read the list of servers again and again: new servers are checked first, removed ones get no more requests."""
        while True:
            await asyncio.sleep(max(_READ_S, _TICK_S))
            try:
                urls = self.places.read()
            except (DataError, UsageError) as error:
                # The file may be incomplete while it is written.
                if self._list_fault != error.message:
                    self._say(f"the list of servers stays as it was: {error.message}")
                self._list_fault = error.message
                continue
            self._list_fault = None
            self._take_list(urls)

    def _take_list(self, urls: Mapping[str, str]) -> None:
        present = {server.url: server for server in self.servers}
        self.servers += [Server(url, target, self._make(target)) for url, target in urls.items() if url not in present]
        for server in self.servers:
            if not server.listed and server.url in urls:
                server.listed, server.lasting, server.refused = True, False, None
            elif server.listed and server.url not in urls:
                server.listed = server.up = False
                self._say(f"{server.url} is no longer listed and gets no more requests")
            if server.listed and not server.up:
                self._try_again(server)

    # --- the proof that a server is like the first --------------------------------------------------------------------

    async def _prove(self, server: Server[M]) -> Fingerprint:
        try:
            await server.sampler.start()
            return await server.sampler.fingerprint()
        except BaseException:
            await server.sampler.close()
            raise

    def _unlike(self, server: Server[M], proof: Fingerprint) -> UsageError | None:
        assert self._proof is not None
        first = self._proof
        origin = f"{first.url} at first" if first.url == proof.url else first.url
        shown = bool(first.next_tokens and proof.next_tokens)
        server.difference = first.difference(proof) if shown else None
        faults = [
            f"{what}: {was} at {origin}, {now} at {proof.url}"
            for what, was, now in (
                ("model", first.model, proof.model),
                ("logprobs", first.mode, proof.mode),
                ("tokenizer", first.tokens, proof.tokens),
                ("chat template", first.rendered, proof.rendered),
            )
            if was is not None and now is not None and was != now
        ]
        if shown and (server.difference is None or server.difference > _OTHER_WEIGHTS):
            by = (
                "other tokens are likely"
                if server.difference is None
                else f"logprobs differ by {server.difference:.3g} nats"
            )
            faults.append(f"weights: {by} for the same prompts at {origin} and {proof.url}")
        if not faults:
            return None
        return UsageError(
            f"{self._noun}s {self.of_one}: {'; '.join(faults)}",
            hint=f"leave that {self._noun} out, or start it with the model and settings of the first",
        )

    def _notes(self) -> list[str]:
        away = [
            f"{server.url} is not used until it answers: {server.last_fault.message}"
            for server in self.servers
            if server.listed and not server.up and server.last_fault is not None
        ]
        return away + [
            f"logprobs of {server.url} differ by {server.difference:.3g} nats from the first {self._noun}'s: another "
            "dtype or GPU?"
            for server in self.servers
            if server.difference is not None and server.difference > _OTHER_NUMBERS
        ]


class Servers(Pool[Member]):
    """A ``Sampler`` on several servers: a request goes to the one that has the rollout's earlier turns, or its group's."""

    prefers_groups = True

    def facts(self) -> Facts:
        """What run.json keeps about the servers; empty before ``start``."""
        up = [server for server in self.servers if server.up]
        limits = [limit for server in up if (limit := server.sampler.facts().get("max_model_len"))]
        return {**super().facts(), "max_model_len": min(limits, default=None)}

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """``request.n`` generations of one server. Raises OutsideError("engine")."""
        keys = (request.request_id.rpartition("-")[0], request.group)
        generations, server = await self.ask(lambda sampler: sampler.sample(request), keys, request.n)
        # A replica that was moved to another node says so itself.
        generations = [g if g.server is not None else replace(g, server=server.url) for g in generations]
        server.sampled_as.update(str(g.server) for g in generations)
        return generations
