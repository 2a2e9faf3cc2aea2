"""The HTTP side of ``gymdata record``: paths, sessions by key, streams, and errors in each client's own dialect.

A session is named by the path (``/s/KEY/v1/…``), the API key (``gymdata-KEY``), a header (``x-rollout-id``, ``session-id``,
``x-parent-session-id``, ``x-session-id``) or the body, in this order; a request that names none belongs to the session whose
conversation it continues, else it begins one.

Invariants: every request is answered, with a completion or with an error of its dialect; no key or token that a client sends
is written; a stream is written from the answer when it is whole, and ends with it or with an error; requests in flight are
answered when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gymdata.commands.collect.episode import turns_as_json
from gymdata.commands.record.dialects import DIALECTS
from gymdata.commands.record.dialects.chat import tokenize_request
from gymdata.commands.record.ending import Ending
from gymdata.commands.record.log import recorded
from gymdata.commands.record.recorder import Recorder
from gymdata.commands.record.request import AgentCompletion, AgentRequest, Client, Dialect, ErrorKind, RequestError
from gymdata.commands.record.settings import RecordConfig
from gymdata.errors import GymdataError
from gymdata.rollouts.messages import JsonObject
from gymdata.store.lines import encode
from gymdata.texts import raised
from gymdata.urls import OnlyHosts
from gymdata.workers.serving import Bodies, Refused

T = TypeVar("T")
_log = logging.getLogger(__name__)
KEY = re.compile(r"[\w.:-]{1,200}")
_API_KEY = "gymdata-"
_HEADERS = ("x-rollout-id", "session-id", "x-parent-session-id", "x-session-id")
#: Seconds between two signs of life in a stream whose answer is not there. Until the first one an error has its status.
_ALIVE_S = 10.0
_STREAM_HEADERS = {"cache-control": "no-cache"}
#: Seconds that requests in flight have to end when the server stops.
_GRACE_S = 10.0
_OBJECTS = 1_000_000
_STOPPING = "the recorder is stopping, and nothing of this request is recorded: send it again when it runs again"


class Service:
    """The endpoints' work."""

    def __init__(self, config: RecordConfig, recorder: Recorder) -> None:
        self.config, self.recorder = config, recorder
        self.bodies = Bodies(config.max_body_bytes, config.max_depth, _OBJECTS)
        self.grace_s, self.alive_s = _GRACE_S, _ALIVE_S
        self._stopping = False
        self._working: set[asyncio.Task[Any]] = set()

    # --- a completion ------------------------------------------------------------------------------------------------

    async def complete(self, request: Request, *, dialect: Dialect, count: bool) -> Response:
        """Answer a request of ``dialect``; ``count``: only the number of its tokens."""
        try:
            key = self._key(request)
            body = await self._body(request)
            headers = {name.lower(): value for name, value in request.headers.items()}
            agent_request = dialect.read(body, headers)
            session = self.recorder.session_for(key, agent_request)
            if count:
                n_tokens = len(self.recorder.prompt_of(session, agent_request).prompt)
                return _json(200, dialect.counted(agent_request, n_tokens))
            client = Client()
            # What was sampled is recorded, to its end.
            work = self._begin(self.recorder.complete(session, agent_request, client))
            waiting = asyncio.ensure_future(_wait_for_leave(request, client))
            work.add_done_callback(lambda _: waiting.cancel())
            await asyncio.wait([work], timeout=self.alive_s if agent_request.stream else None)
            if agent_request.stream:
                if work.done():
                    work.result()
                frames = self._frames(dialect, agent_request, work)
                return StreamingResponse(frames, 200, _STREAM_HEADERS, media_type="text/event-stream")
            return _json(200, dialect.write(agent_request, await asyncio.shield(work)))
        except Exception as error:  # noqa: BLE001 - every request is answered in its dialect
            refusal = _refusal(error)
            return _json(refusal.status, dialect.error(refusal), refusal.headers)

    async def _frames(
        self, dialect: Dialect, request: AgentRequest, work: asyncio.Task[AgentCompletion]
    ) -> AsyncIterator[bytes]:
        """A stream: comments, which clients pass over, as long as the answer is not there, and then all of it."""
        while not work.done():
            yield b": the model is writing\n\n"
            await asyncio.wait([work], timeout=self.alive_s)
        try:
            yield dialect.frames(request, dialect.write(request, work.result()))
        except RequestError as error:
            yield dialect.failed(request, error)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that goes on when its client goes away, and has time to end when the server stops. It raises RequestError
        alone."""
        stopping = RequestError("busy", _STOPPING, status=503, retry_after=5.0)
        if self._stopping:
            work.close()
            raise stopping

        async def guarded() -> T:
            try:
                return await work
            except asyncio.CancelledError:  # by ``stop``
                raise stopping from None
            except Exception as error:
                raise _refusal(error) from error

        task = asyncio.ensure_future(guarded())
        self._working.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, work: asyncio.Task[Any]) -> None:
        self._working.discard(work)
        if not work.cancelled():
            work.exception()  # it was answered

    def _key(self, request: Request) -> str | None:
        """The session that the request names. Raises RequestError for a wrong token or an invalid name."""
        header = request.headers.get("x-api-key") or request.headers.get("authorization", "")
        header = header.removeprefix("Bearer ").strip()
        named, token = None, header
        if header.startswith(_API_KEY):
            named, _, token = header.removeprefix(_API_KEY).partition(":")
        if self.config.token is not None and not hmac.compare_digest(token.encode(), self.config.token.encode()):
            raise RequestError(
                "authentication", "the API key is not this recorder's token: send TOKEN, or gymdata-KEY:TOKEN"
            )
        named = request.path_params.get("key") or named
        named = named or next((request.headers[name] for name in _HEADERS if request.headers.get(name)), None)
        if named is not None and KEY.fullmatch(named) is None:
            raise RequestError(
                "invalid", f"session {named[:40]!r}: expected at most 200 letters, digits, and . : _ -", where="session"
            )
        return named

    async def _body(self, request: Request) -> JsonObject:
        try:
            body = await self.bodies.read(request)
            parsed = await self.bodies.read_as(body, lambda text: self.bodies.parse(text, strict=True))
        except Refused as refused:
            kind: ErrorKind = "too_large" if refused.status == 413 else "invalid"
            # These APIs answer a body that is wrong with 400.
            status = None if refused.status == 422 else refused.status
            raise RequestError(kind, str(refused.body["detail"]), status=status) from refused
        except ClientDisconnect as gone:
            raise RequestError("invalid", "the client went away before the end of its body") from gone
        if not isinstance(parsed, dict):
            raise RequestError("invalid", f"the body: expected an object, got {type(parsed).__name__}")
        return parsed

    # --- rollouts ---------------------------------------------------------------------------------------------------

    async def finish(self, request: Request) -> Response:
        """POST /rollouts/KEY/finish."""

        async def work() -> JsonObject:
            empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
            ending = Ending.of({} if empty else await self._body(request))
            return await asyncio.shield(self._begin(self.recorder.finish(request.path_params["key"], ending)))

        return await self._plain(request, work)

    async def state(self, request: Request) -> Response:
        """GET /rollouts/KEY; with ``?turns=true`` also its turns, as they are stored."""

        async def work() -> JsonObject:
            key = request.path_params["key"]
            state, run = await self.recorder.state(key), self.recorder.run.folder
            if request.query_params.get("turns") != "true":
                return state
            if key in self.recorder.sessions:
                return {**state, "turns": turns_as_json(self.recorder.sessions[key].encoder.turns)}
            return {**state, **await asyncio.to_thread(recorded, run, state["rollout_id"], ["turns"])}

        return await self._plain(request, work)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize, as vLLM has it: the ids of the prompt that a request with these messages and tools reads."""

        async def work() -> JsonObject:
            asked = tokenize_request(await self._body(request))
            if isinstance(asked, str):
                ids = self.recorder.chat.encode(asked)
            else:
                session = self.recorder.session_for(self._key(request), asked)
                ids = list(self.recorder.prompt_of(session, asked).prompt)
            return {"count": len(ids), "max_model_len": self.recorder.context, "tokens": ids, "token_strs": None}

        return await self._plain(request, work)

    async def models(self, request: Request) -> Response:
        """GET /v1/models and /v1/models/ID, in the words of both OpenAI and Anthropic."""

        async def work() -> JsonObject:
            name, recorder = self.recorder.model, self.recorder
            card = {
                "id": name,
                "object": "model",
                "type": "model",
                "created": 0,
                "owned_by": "gymdata",
                "display_name": name,
                "created_at": "1970-01-01T00:00:00Z",
                "max_model_len": recorder.context,
            }
            if "model" in request.path_params:
                return {**card, "id": request.path_params["model"]}
            return {"object": "list", "data": [card], "has_more": False, "first_id": name, "last_id": name}

        return await self._plain(request, work)

    async def _plain(self, request: Request, work: Callable[[], Awaitable[JsonObject]]) -> Response:
        try:
            self._key(request)
            return _json(200, await work())
        except Exception as error:  # noqa: BLE001 - every request is answered with an object
            refusal = _refusal(error)
            body = {"type": refusal.kind, "message": refusal.message, "param": refusal.where, "code": refusal.kind}
            return _json(refusal.status, {"error": body}, refusal.headers)

    def health(self) -> JsonObject:
        """The server's status."""
        return {"status": "ok", "model": self.recorder.model, "sessions_open": len(self.recorder.sessions)}

    async def stop(self) -> None:
        """Take no more requests, and answer those in flight: with an error where the engine does not end in time."""
        self._stopping = True
        if self._working:
            await asyncio.wait(self._working, timeout=self.grace_s)
        if late := set(self._working):
            for work in late:
                work.cancel()
            await asyncio.wait(late, timeout=self.grace_s)


def create_app(
    service: Service, start: Callable[[], Awaitable[object]], stop: Callable[[], Awaitable[object]]
) -> Starlette:
    """The application; ``start`` and ``stop`` are awaited around its life."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await start()
        try:
            yield
        finally:
            await service.stop()
            service.bodies.threads.shutdown(wait=False)
            await stop()

    routes = []

    def add(path: str, method: str, work: Callable[[Request], Awaitable[Response]]) -> None:
        routes.append(Route(path, work, methods=[method]))
        if path.startswith(("/v1/", "/tokenize")):
            routes.append(Route(f"/s/{{key}}{path}", work, methods=[method]))

    for entry in DIALECTS:
        spoken = entry.object()
        for path in (*spoken.paths, *spoken.count_paths):
            count = path in spoken.count_paths
            add(path, "POST", partial(service.complete, dialect=spoken, count=count))
    add("/tokenize", "POST", service.tokenize)
    add("/v1/models", "GET", service.models)
    add("/v1/models/{model:path}", "GET", service.models)
    add("/rollouts/{key}/finish", "POST", service.finish)
    add("/rollouts/{key}", "GET", service.state)

    async def health(_: Request) -> Response:
        return _json(200, service.health())

    # Some clients look whether anything is there.
    routes += [Route("/health", health), Route("/", health)]

    async def no_such_path(request: Request, _: Exception) -> Response:
        text = f"{request.method} {request.url.path} is not served; expected one of {', '.join(r.path for r in routes)}"
        return _json(404, {"error": {"message": text, "type": "invalid_request_error", "code": "not_found"}})

    hosts = [service.config.host, *service.config.allow_host]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(OnlyHosts, hosts=hosts)],
        exception_handlers={404: no_such_path},
    )


async def _wait_for_leave(request: Request, client: Client) -> None:
    """After its body a request says no more than that its client is gone."""
    await request.receive()
    client.gone = True


def _refusal(error: Exception) -> RequestError:
    """What a client is told of an error."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, GymdataError):
        return RequestError("internal", error.message)
    _log.error("a request", exc_info=error)
    return RequestError("internal", raised(error))


def _json(status: int, body: JsonObject, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, media_type="application/json")
