"""The compare server that online trainers call: /compare, /verify, /health, /metrics.

Invariants: requests and answers keep the published shapes; every request that was read ends in a reward or in a status with
the reason, also when the server stops; verdicts are saved before they are answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute

from gymdata import genrm
from gymdata.commands.judge.groups import response_transcript
from gymdata.commands.judge.pairwise import Candidate, Comparison, digest
from gymdata.commands.judge.serve.cohorts import Cohorts, Member
from gymdata.commands.judge.serve.group_judge import GroupJudge
from gymdata.commands.judge.settings import ServeConfig
from gymdata.commands.judge.verdict_cache import VerdictCache
from gymdata.errors import plural
from gymdata.rollouts.messages import JsonObject, Message
from gymdata.urls import OnlyHosts
from gymdata.workers.serving import Bodies, Refused

#: Time for judging in progress when the server stops; requests that wait for members are answered at once.
_GRACE_S = 1.0
#: Lists and objects in a body for each response that is allowed: a response of 100 items with their parts has some 500.
OBJECTS_PER_RESPONSE = 2_000
Id = str | int | None


class ResponseObject(pydantic.BaseModel):
    """A response in the Responses API's shape. Without ``output`` every response would be an empty answer, and every
    comparison a tie."""

    output: list[Any]


class CompareRequest(pydantic.BaseModel):
    """A conversation and all responses to it."""

    conversation_history: list[JsonObject] | str
    response_objs: list[ResponseObject]
    principle: str | None = None


class CreateParams(pydantic.BaseModel):
    """The request that a response answers; ``input`` is text or messages, whose content is text or parts."""

    input: list[JsonObject] | str


class VerifyRequest(pydantic.BaseModel):
    """One response. ``_ng_task_index`` or ``prompt_id``, with the prompt, say which responses belong together.
    ``group_id``, ``attempt`` and ``rollout_id`` make a request repeatable, also after a restart."""

    model_config = pydantic.ConfigDict(populate_by_name=True)
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
        judge: GroupJudge,
        answers: VerdictCache,
        run_id: str,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config, self.judge, self.run_id = config, judge, run_id
        size = max(2, config.num_rollouts_per_prompt)
        self.cohorts = Cohorts(size, config.cohort_timeout, judge.judge, answers)
        self._say = say
        self._hid_a_principle = False

    async def stop(self) -> None:
        """Answer every request, those that wait at once and those being judged after a second, and refuse new ones."""
        why = "the server is stopping"
        self.cohorts.close(why)
        await self.judge.stop(why, _GRACE_S)

    async def compare(self, request: CompareRequest) -> Response:
        """All responses to one prompt at once."""
        n, most = len(request.response_objs), self.config.max_responses
        if n > most:
            raise Refused.over(422, "responses", "responses", n, most, "max_responses")
        if n < 2:
            rewards = [self.config.default_score] * n
            return _json({"rewards": rewards, "comparison_results": [], "metrics": {}, "failures": []})
        conversation, principle = as_messages(request.conversation_history), self._principle(request.principle)
        candidates = [self._candidate(str(n), n, response) for n, response in enumerate(request.response_objs)]
        group = digest(repr(conversation), principle or "", *(candidate.answer for candidate in candidates))
        outcome = await self.judge.judge(Comparison(self.run_id, group, group, conversation, candidates, principle))
        body = {
            "rewards": outcome.rewards,
            "comparison_results": outcome.results(),
            "metrics": outcome.metrics,
            "failures": outcome.failures(),
        }
        without = [n for n, reward in enumerate(outcome.rewards) if reward is None]
        if not without:
            return _json(body)
        if self.config.on_judge_failure == "default-score":
            rewards = [self.config.default_score if reward is None else reward for reward in outcome.rewards]
            return _json({**body, "rewards": rewards, "judge_failed": True, "judge_failed_responses": without})
        reasons = {str(n): outcome.why_none(n) for n in without}
        names = f"{plural(len(without), 'response')} {', '.join(map(str, without))}"
        detail = f"no reward for {names}: {reasons[str(without[0])]}"
        return _json({**body, "detail": detail, "kind": "judge_failed", "reasons": reasons}, 503)

    async def verify(self, request: VerifyRequest, sent: Request) -> Response:
        """One response of a cohort. The answer is the request with its reward."""
        answer: JsonObject = {"reward": self.config.default_score, "judge_failed": False}
        try:
            if self.config.num_rollouts_per_prompt > 1:
                answer["reward"] = await self.cohorts.join(self._member(request))
        except Refused as refused:
            if refused.body["kind"] != "judge_failed" or self.config.on_judge_failure == "error":
                raise
            answer |= {"judge_failed": True, "judge_failure": refused.body["detail"]}
        return _json({**await sent.json(), **answer})

    def _member(self, request: VerifyRequest) -> Member:
        group, prompt, attempt, rollout, task = (
            None if value is None else str(value)
            for value in (request.group_id, request.prompt_id, request.attempt, request.rollout_id, request.task_index)
        )
        attempt = attempt or "0"
        # As published: the task's index, else the prompt's id, and the prompt itself with its principle in any case.
        belongs = ("task", task) if task is not None else ("prompt", prompt) if prompt is not None else ("", "")
        apart = ("group", group, attempt) if group is not None else ()
        # The same for the same prompt, in whatever order its keys were written.
        items = request.responses_create_params.input
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        typed = json.dumps([{"type": "message", **x} if "role" in x else x for x in items], sort_keys=True)
        key = digest(*belongs, *apart, typed, request.principle or "")
        identity = None if group is None or rollout is None else (group, attempt, rollout)
        written = "" if identity is None else f"{group}#{attempt}" if attempt != "0" else str(group)
        comparison = Comparison(
            self.run_id,
            written,
            prompt or group or task or "",
            as_messages(items),
            [self._candidate(rollout or "", 0, request.response)],
            self._principle(request.principle),
        )
        return Member(key, comparison, identity, None if task is None else request.rollout_index)

    def _principle(self, requested: str | None) -> str | None:
        shown = self.config.principle_for(requested)
        if requested and shown is None and not self._hid_a_principle:
            self._hid_a_principle = True
            self._say("a request brought a principle, which the judge is not shown: --use-principle shows it")
        return shown

    def _candidate(self, rollout_id: str, index: int, response: ResponseObject) -> Candidate:
        """A response with the text that the judge sees, and its reasoning, which counts for length alone."""
        items = {"output": response.output}
        answer = response_transcript(items) if self.config.show == "transcript" else genrm.answer_text(items)
        return Candidate(rollout_id, index, answer, genrm.reasoning_text(items))

    async def health(self) -> JsonObject:
        """The server's status, and the requests that wait."""
        return {
            "status": "ok",
            "judge": self.judge.pairwise.judge_name,
            "open_cohorts": self.cohorts.open(),
            "members_waiting": self.cohorts.waiting(),
            "cohorts_judging": self.cohorts.judging(),
        }

    async def metrics(self) -> PlainTextResponse:
        """Prometheus text."""
        figures: dict[str, float] = {
            "cohorts_open": self.cohorts.open(),
            "cohort_members_waiting": self.cohorts.waiting(),
            "cohorts_judging": self.cohorts.judging(),
            "cohorts_completed_total": self.cohorts.completed,
            "cohorts_expired_total": self.cohorts.expired,
            "cohorts_failed_total": self.cohorts.failed,
            **self.judge.figures(),
        }
        kinds = {name.partition("{")[0]: "counter" if "_total" in name else "gauge" for name in figures}
        lines = [f"# TYPE gymdata_genrm_{name} {kind}\n" for name, kind in kinds.items()]
        lines += [f"gymdata_genrm_{name} {value:g}\n" for name, value in figures.items()]
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")


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


def _json(body: JsonObject, status: int = 200) -> Response:
    # What a request holds is repeated with its NaN, which Python's clients write and FastAPI refuses.
    return Response(json.dumps(body), status, media_type="application/json")


class _ReadRequest(Request):
    """A request whose body was read and parsed within the limits."""

    def __init__(self, request: Request, raw: bytes, parsed: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._raw, self._parsed = raw, parsed

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._parsed


def route_within(bodies: Bodies) -> type[APIRoute]:
    """Routes that read bodies within the limits, and answer what is refused with its reason."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def read_and_handle(request: Request) -> Response:
                try:
                    if request.method == "POST":
                        raw = await bodies.read(request)
                        request = _ReadRequest(request, raw, await bodies.read_as(raw, bodies.parse))
                    return await handle(request)
                except RequestValidationError as error:
                    faults = [{name: fault[name] for name in ("type", "loc", "msg")} for fault in error.errors()]
                    return Refused(422, {"detail": faults, "kind": "fields"}).response()
                except Refused as refused:
                    return refused.response()

            return read_and_handle

    return Route


def create_app(service: Service) -> FastAPI:
    """The application."""
    config = service.config
    named = f"lists and objects in a request ({OBJECTS_PER_RESPONSE:,} for each response that is allowed)"
    most = OBJECTS_PER_RESPONSE * config.max_responses
    bodies = Bodies(config.max_body_bytes, config.max_depth, most, "max_responses", "responses", named)
    app = FastAPI(title="gymdata serve-genrm", docs_url=None, redoc_url=None)
    app.add_middleware(OnlyHosts, hosts=[config.host, *config.allow_host])
    app.router.route_class = route_within(bodies)
    app.post("/compare")(service.compare)
    app.post("/verify")(service.verify)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)
    return app
