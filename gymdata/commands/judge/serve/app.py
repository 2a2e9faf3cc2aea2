"""The compare server that online trainers call: /compare, /verify, /health, /metrics.

Invariants: requests and answers keep the published shapes; every request ends in a reward or in a status with the
reason, also when the server stops; verdicts are saved before they are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

import pydantic
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from gymdata import genrm
from gymdata.commands.judge.groups import response_transcript
from gymdata.commands.judge.pairwise import Candidate, Comparison, digest
from gymdata.commands.judge.serve.cohorts import Cohorts, Member, NotAnswered, RequestQueue
from gymdata.commands.judge.settings import ServeConfig
from gymdata.commands.judge.verdict_cache import VerdictCache
from gymdata.errors import abridged, plural
from gymdata.rollouts.messages import JsonObject, Message
from gymdata.urls import OnlyHosts
from gymdata.workers.serving import Bodies, Refused, refused_fields

_STATUS = {"conflict": 409, "cohort_incomplete": 503, "judge_failed": 503, "stopping": 503}
#: Time for judging in progress when the server stops; requests that wait for members are answered at once.
_GRACE_S = 1.0
#: Lists and objects in a body for each response that is allowed: a response of 100 items with their parts has some 500.
OBJECTS_PER_RESPONSE = 2_000
Id = str | int | None
M = TypeVar("M", bound=pydantic.BaseModel)


def _has_output(response: JsonObject) -> JsonObject:
    # Without it every response would be an empty answer, and every comparison a tie.
    if not isinstance(response.get("output"), list):
        raise ValueError(f"a response has a list 'output' of items, got the keys {abridged(map(repr, response))}")
    return response


ResponseObject = Annotated[JsonObject, pydantic.AfterValidator(_has_output)]


class CompareRequest(pydantic.BaseModel):
    """A conversation and all responses to it, in the Responses API's shape."""

    conversation_history: list[JsonObject] | str
    response_objs: list[ResponseObject]
    principle: str | None = None


class CreateParams(pydantic.BaseModel):
    """The request that a response answers; ``input`` is text or messages, whose content is text or parts."""

    model_config = pydantic.ConfigDict(extra="allow")
    input: list[JsonObject] | str


class VerifyRequest(pydantic.BaseModel):
    """One response. ``_ng_task_index`` or ``prompt_id``, with the prompt, say which responses belong together.
    ``group_id``, ``attempt`` and ``rollout_id`` make a request repeatable, also after a restart."""

    model_config = pydantic.ConfigDict(extra="allow", populate_by_name=True)
    responses_create_params: CreateParams
    response: ResponseObject
    principle: str | None = None
    #: The published names of a task's place in its data and of a rollout's among the task's.
    task_index: int | None = pydantic.Field(None, alias="_ng_task_index")
    rollout_index: int | None = pydantic.Field(None, alias="_ng_rollout_index")
    group_id: Id = None
    prompt_id: Id = None
    attempt: Id = None
    rollout_id: Id = None


class Service:
    """The endpoints' work. ``run_id`` goes into every comparison; ``say`` gets messages for the operator."""

    def __init__(
        self,
        config: ServeConfig,
        queue: RequestQueue,
        answers: VerdictCache,
        run_id: str,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config, self.queue, self.run_id = config, queue, run_id
        most = OBJECTS_PER_RESPONSE * config.max_responses
        named = f"lists and objects in a request ({OBJECTS_PER_RESPONSE:,} for each response that is allowed)"
        self.bodies = Bodies(config.max_body_bytes, config.max_depth, most, "max_responses", "responses", named)
        size = max(2, config.num_rollouts_per_prompt)
        self.cohorts = Cohorts(size, config.cohort_timeout, queue.decide, answers, config.max_waiting)
        self.requests: dict[tuple[str, int], int] = {}
        self._say = say
        self._hid_a_principle = False
        self._stopping: str | None = None
        self._working: set[asyncio.Task[Response]] = set()

    async def answer(self, request: Request, work: Callable[[bytes], Awaitable[Response]]) -> Response:
        """``work`` of the request's body, counted; a request that is refused, or still unanswered when the server stops, is
        answered with the reason."""

        async def read_and_work() -> Response:
            if self._stopping is not None:
                raise asyncio.CancelledError
            return await work(await self.bodies.read(request))

        task = asyncio.ensure_future(read_and_work())
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        try:
            response = await task
        except Refused as refused:
            response = refused.response()
        except asyncio.CancelledError:
            if self._stopping is None:
                raise
            response = _json(503, {"detail": self._stopping, "kind": "stopping"})
        path = request.url.path
        self.requests[path, response.status_code] = self.requests.get((path, response.status_code), 0) + 1
        return response

    async def stop(self, why: str) -> None:
        """Answer every request, those that wait at once and those being judged after a second, and refuse new ones."""
        self._stopping = why
        await self.cohorts.close(why, _GRACE_S)
        # The answers must still be sent.
        await asyncio.sleep(0)
        for task in list(self._working):
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)

    async def compare(self, body: bytes) -> Response:
        """All responses to one prompt at once."""
        comparison, n = await self.bodies.read_as(body, self._comparison)
        if comparison is None:
            rewards = [self.config.default_score] * n
            return _json(200, {"rewards": rewards, "comparison_results": [], "metrics": {}, "failures": []})
        return _json(*await self._compared(comparison))

    def _comparison(self, body: bytes) -> tuple[Comparison | None, int]:
        """What is to be judged, None for fewer than two responses; and how many there are."""
        request_json = self.bodies.parse(body)
        listed = request_json.get("response_objs") if isinstance(request_json, dict) else None
        if isinstance(listed, list) and len(listed) > self.config.max_responses:
            most = self.config.max_responses
            raise Refused.over(422, "responses", "responses", len(listed), most, "max_responses")
        request = _read(CompareRequest, request_json)
        texts = [self._texts(response) for response in request.response_objs]
        if len(texts) < 2:
            return None, len(texts)
        principle = self._principle(request.principle)
        conversation = as_messages(request.conversation_history)
        candidates = [Candidate(str(n), n, answer, reasoning) for n, (reasoning, answer) in enumerate(texts)]
        group = digest(repr(conversation), principle or "", *(e.answer for e in candidates))
        return Comparison(self.run_id, group, group, conversation, candidates, principle), len(texts)

    async def _compared(self, comparison: Comparison) -> tuple[int, JsonObject]:
        outcome = await self.queue.decide(comparison)
        without = [n for n, reward in enumerate(outcome.rewards) if reward is None]
        body = {
            "rewards": outcome.rewards,
            "comparison_results": outcome.results(),
            "metrics": outcome.metrics,
            "failures": outcome.failures(),
        }
        if not without:
            return 200, body
        reasons = {str(n): outcome.why_none(n) for n in without}
        if self.config.on_judge_failure == "default-score":
            rewards = [self.config.default_score if reward is None else reward for reward in outcome.rewards]
            return 200, {**body, "rewards": rewards, "judge_failed": True, "judge_failed_responses": without}
        names = f"{plural(len(without), 'response')} {', '.join(map(str, without))}"
        detail = f"no reward for {names}: {reasons[str(without[0])]}"
        return 503, {**body, "detail": detail, "kind": "judge_failed", "reasons": reasons}

    async def verify(self, body: bytes) -> Response:
        """One response of a cohort. The answer is the request with its reward."""
        member, taken = await self.bodies.read_as(body, self._member)
        if self.config.num_rollouts_per_prompt == 1:
            return _echo(body, taken, {"reward": self.config.default_score, "judge_failed": False})
        try:
            reward = await self.cohorts.join(member)
        except NotAnswered as why:
            if why.kind == "waiting":
                most = self.config.max_waiting
                raise Refused.over(429, "waiting", "waiting members", most + 1, most, "max_waiting") from why
            if why.kind == "judge_failed" and self.config.on_judge_failure == "default-score":
                failed = {"reward": self.config.default_score, "judge_failed": True, "judge_failure": why.reason}
                return _echo(body, taken, failed)
            return _json(_STATUS[why.kind], {"detail": why.reason, "kind": why.kind})
        return _echo(body, taken, {"reward": reward, "judge_failed": False})

    def _member(self, body: bytes) -> tuple[Member, bool]:
        """The member, and whether the request has a key that the answer adds."""
        request_json = self.bodies.parse(body)
        request = _read(VerifyRequest, request_json)
        conversation = as_messages(request.responses_create_params.input)
        group, prompt, attempt, rollout, task = (
            None if value is None else str(value)
            for value in (request.group_id, request.prompt_id, request.attempt, request.rollout_id, request.task_index)
        )
        attempt = attempt or "0"
        named = group is not None and rollout is not None
        # As published: the task's index, else the prompt's id, and the prompt itself with its principle in any case.
        belongs = ("task", task) if task is not None else ("prompt", prompt) if prompt is not None else ("", "")
        apart = ("group", group, attempt) if group is not None else ()
        # The same for the same prompt, in whatever order its keys were written.
        prompt_items = request.responses_create_params.input
        if isinstance(prompt_items, str):
            prompt_items = [{"role": "user", "content": prompt_items}]
        typed = json.dumps([{"type": "message", **x} if "role" in x else x for x in prompt_items], sort_keys=True)
        key = digest(*belongs, *apart, typed, request.principle or "")
        reasoning, answer = self._texts(request.response)
        candidate = Candidate(rollout or "", 0, answer, reasoning)
        written = (f"{group}#{attempt}" if attempt != "0" else str(group)) if named else ""
        principle = self._principle(request.principle)
        comparison = Comparison(
            self.run_id, written, prompt or group or task or "", conversation, [candidate], principle
        )
        identity = (str(group), attempt, str(rollout)) if named else None
        index = request.rollout_index if task is not None else None
        return Member(key, identity, comparison, index), not {"reward", "judge_failed", "judge_failure"}.isdisjoint(
            request_json
        )

    def _principle(self, requested: str | None) -> str | None:
        shown = self.config.principle_for(requested)
        if requested and shown is None and not self._hid_a_principle:
            self._hid_a_principle = True
            self._say("a request brought a principle, which the judge is not shown: --use-principle shows it")
        return shown

    def _texts(self, response: JsonObject) -> tuple[str, str]:
        """(reasoning, what the judge sees)."""
        if self.config.show == "transcript":
            return genrm.reasoning_text(response), response_transcript(response)
        return genrm.response_texts(response)

    def health(self) -> JsonObject:
        """The server's status, and the requests that wait."""
        return {
            "status": "ok",
            "judge": self.queue.pairwise_judge.judge_name,
            "open_cohorts": self.cohorts.open(),
            "members_waiting": self.cohorts.waiting(),
            "cohorts_judging": self.cohorts.judging(),
        }

    def metrics(self) -> str:
        """Prometheus text."""
        figures: dict[str, float] = {
            **{f'requests_total{{path="{p}",status="{s}"}}': n for (p, s), n in sorted(self.requests.items())},
            "cohorts_open": self.cohorts.open(),
            "cohort_members_waiting": self.cohorts.waiting(),
            "cohorts_judging": self.cohorts.judging(),
            "cohorts_completed_total": self.cohorts.completed,
            "cohorts_expired_total": self.cohorts.expired,
            "cohorts_failed_total": self.cohorts.failed,
            **self.queue.figures(),
        }
        lines, typed = [], ""
        for name, value in figures.items():
            bare = f"gymdata_genrm_{name.partition('{')[0]}"
            if bare != typed:
                lines.append(f"# TYPE {bare} {'counter' if bare.endswith('_total') else 'gauge'}")
                typed = bare
            lines.append(f"gymdata_genrm_{name} {value:g}")
        return "\n".join(lines) + "\n"


def as_messages(items: list[JsonObject] | str) -> list[Message]:
    """Messages of role and text. Items without a role become messages too: tool calls of the assistant, results of a
    tool."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages = []
    for item in items:
        if "role" in item:
            role, text = str(item["role"]), item.get("content")
        elif item.get("type") == "function_call":
            role, text = "assistant", f"{item.get('name')}({item.get('arguments')})"
        else:
            role = "tool" if "output" in item else "assistant"
            text = item.get("output") if item.get("type") == "function_call_output" else item.get("summary")
        messages.append({"role": role, "content": genrm.plain_text(text)})
    return messages


def _read(model: type[M], request_json: Any) -> M:
    try:
        return model.model_validate(request_json)
    except pydantic.ValidationError as error:
        raise refused_fields(error) from error


def _json(status: int, body: JsonObject) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


def _echo(body: bytes, taken: bool, added: JsonObject) -> Response:
    """The request as it was sent, with more keys; ``taken``: it may have some of them."""
    if taken:
        return _json(200, {**json.loads(body), **added})
    more = json.dumps(added).encode()
    return Response(body.rstrip()[:-1] + b", " + more[1:], 200, media_type="application/json")


def _described(model: type[pydantic.BaseModel]) -> JsonObject:
    """The body in /openapi.json, which does not come from a signature as the server reads bodies itself."""
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            return inlined(parts[name]) if name in parts else {k: inlined(v) for k, v in value.items()}
        return [inlined(v) for v in value] if isinstance(value, list) else value

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}


def create_app(service: Service, start: Callable[[], Any], stop: Callable[[], Any]) -> FastAPI:
    """The application; ``start`` and ``stop`` are awaited around its life."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await start()
        try:
            yield
        finally:
            await service.stop("the server is stopping")
            service.bodies.threads.shutdown(wait=False)
            await stop()

    app = FastAPI(title="gymdata serve-genrm", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(OnlyHosts, hosts=[service.config.host, *service.config.allow_host])

    @app.post("/compare", openapi_extra=_described(CompareRequest))
    async def compare(request: Request) -> Response:
        return await service.answer(request, service.compare)

    @app.post("/verify", openapi_extra=_described(VerifyRequest))
    async def verify(request: Request) -> Response:
        return await service.answer(request, service.verify)

    @app.get("/health")
    async def health() -> JsonObject:
        return service.health()

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")

    return app
