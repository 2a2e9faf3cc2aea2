"""The compare server that online trainers call: /compare, /verify, /health, /metrics.

What always holds: requests and answers keep the published shapes; every request ends in a reward or in a status that says
why there is none; what was judged is written down before it is answered.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import pydantic
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from gymdata.config.genrm import ServeConfig
from gymdata.core import genrm
from gymdata.serve.cohorts import Cohorts, Member, NotAnswered
from gymdata.serve.desk import Desk
from gymdata.stages.judge import Contest, Entrant, digest
from gymdata.stages.judge_rollouts import response_transcript
from gymdata.store.verdicts import Kept

_STATUS = {"conflict": 409, "cohort_incomplete": 503, "judge_failed": 503}
Id = str | int | None


def _has_output(response: dict[str, Any]) -> dict[str, Any]:
    # Without it every response would be an empty answer, and every comparison a tie.
    if not isinstance(response.get("output"), list):
        raise ValueError(f"a response has a list 'output' of items, got the keys {', '.join(map(repr, response))}")
    return response


ResponseObject = Annotated[dict[str, Any], pydantic.AfterValidator(_has_output)]


class CompareRequest(pydantic.BaseModel):
    """A conversation and all responses to it, in the Responses API's shape."""

    conversation_history: list[dict[str, Any]] | str
    response_objs: list[ResponseObject]
    principle: str | None = None


class CreateParams(pydantic.BaseModel):
    """Of the request that a response answers; ``input`` is text or messages, whose content is text or parts."""

    model_config = pydantic.ConfigDict(extra="allow")
    input: list[dict[str, Any]] | str


class VerifyRequest(pydantic.BaseModel):
    """One response. ``group_id``, ``attempt`` and ``rollout_id`` make it repeatable; ``prompt_id`` only says which
    responses belong together."""

    model_config = pydantic.ConfigDict(extra="allow")
    responses_create_params: CreateParams
    response: ResponseObject
    principle: str | None = None
    group_id: Id = None
    prompt_id: Id = None
    attempt: Id = None
    rollout_id: Id = None


class Service:
    """The endpoints' work. ``run_id`` goes into every comparison."""

    def __init__(self, config: ServeConfig, desk: Desk, answers: Kept, run_id: str) -> None:
        self.config, self.desk, self.run_id = config, desk, run_id
        self.cohorts = Cohorts(max(2, config.num_rollouts_per_prompt), config.cohort_timeout, desk.decide, answers)
        self.requests: dict[tuple[str, int], int] = {}

    async def compare(self, request: CompareRequest) -> tuple[int, dict[str, Any]]:
        """All at once. (status, body)."""
        texts = [self._texts(response) for response in request.response_objs]
        if len(texts) < 2:
            rewards = [self.config.default_score] * len(texts)
            return 200, {"rewards": rewards, "comparison_results": [], "metrics": {}, "failures": []}
        principle = self.config.principle_for(request.principle)
        conversation = as_messages(request.conversation_history)
        entrants = [Entrant(str(n), n, answer, reasoning) for n, (reasoning, answer) in enumerate(texts)]
        group = digest(repr(conversation), principle or "", *(e.answer for e in entrants))
        outcome = await self.desk.decide(Contest(self.run_id, group, group, conversation, entrants, principle))
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
        detail = f"no reward for response(s) {', '.join(map(str, without))}: {reasons[str(without[0])]}"
        return 503, {**body, "detail": detail, "kind": "judge_failed", "reasons": reasons}

    async def verify(self, request: VerifyRequest) -> tuple[int, dict[str, Any]]:
        """One of a cohort. (status, body)."""
        echo = request.model_dump(mode="json", exclude_unset=True)
        if self.config.num_rollouts_per_prompt == 1:
            return 200, {**echo, "reward": self.config.default_score, "judge_failed": False}
        try:
            reward = await self.cohorts.join(self._member(request))
        except NotAnswered as why:
            if why.kind == "judge_failed" and self.config.on_judge_failure == "default-score":
                body = {"reward": self.config.default_score, "judge_failed": True, "judge_failure": why.reason}
                return 200, {**echo, **body}
            return _STATUS[why.kind], {"detail": why.reason, "kind": why.kind}
        return 200, {**echo, "reward": reward, "judge_failed": False}

    def _member(self, request: VerifyRequest) -> Member:
        conversation = as_messages(request.responses_create_params.input)
        principle = self.config.principle_for(request.principle)
        group, prompt, attempt, rollout = (
            None if value is None else str(value)
            for value in (request.group_id, request.prompt_id, request.attempt, request.rollout_id)
        )
        attempt = attempt or "0"
        named = group is not None and rollout is not None
        belongs = group if group is not None else prompt
        what = belongs if belongs is not None else digest(repr(conversation))
        key = digest(
            "id" if belongs is not None else "prompt", what, attempt if group is not None else "", principle or ""
        )
        reasoning, answer = self._texts(request.response)
        entrant = Entrant(rollout or "", 0, answer, reasoning)
        written = (f"{group}#{attempt}" if attempt != "0" else str(group)) if named else ""
        contest = Contest(self.run_id, written, prompt or group or "", conversation, [entrant], principle)
        identity = (str(group), attempt, str(rollout)) if named else None
        return Member(key, identity, contest)

    def _texts(self, response: dict[str, Any]) -> tuple[str, str]:
        """(reasoning, what the judge sees)."""
        if self.config.show == "transcript":
            return genrm.reasoning_text(response), response_transcript(response)
        return genrm.response_texts(response)

    def counted(self, path: str, status: int, body: dict[str, Any]) -> Response:
        """The answer, counted."""
        self.requests[path, status] = self.requests.get((path, status), 0) + 1
        return Response(json.dumps(body), status, media_type="application/json")

    def health(self) -> dict[str, Any]:
        """That it runs, and what it is waiting for."""
        return {
            "status": "ok",
            "judge": self.desk.referee.judge_name,
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
            **self.desk.figures(),
        }
        lines, typed = [], ""
        for name, value in figures.items():
            bare = f"gymdata_genrm_{name.partition('{')[0]}"
            if bare != typed:
                lines.append(f"# TYPE {bare} {'counter' if bare.endswith('_total') else 'gauge'}")
                typed = bare
            lines.append(f"gymdata_genrm_{name} {value:g}")
        return "\n".join(lines) + "\n"


def as_messages(given: list[dict[str, Any]] | str) -> list[dict[str, Any]]:
    """Messages of role and text. Items without a role (calls and results of tools) are shown as what they are."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [_message(item) for item in given]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if "role" in item:
        return {"role": str(item["role"]), "content": genrm.plain_text(item.get("content"))}
    if item.get("type") == "function_call":
        return {"role": "assistant", "content": f"{item.get('name')}({item.get('arguments')})"}
    text = item.get("output") if item.get("type") == "function_call_output" else item.get("summary")
    return {"role": "tool" if "output" in item else "assistant", "content": genrm.plain_text(text)}


def create_app(service: Service, start: Callable[[], Any], stop: Callable[[], Any]) -> FastAPI:
    """The application; ``start`` and ``stop`` are awaited around its life."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await start()
        try:
            yield
        finally:
            await service.cohorts.close()
            await stop()

    app = FastAPI(title="gymdata serve-genrm", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.post("/compare")
    async def compare(request: CompareRequest) -> Response:
        return service.counted("/compare", *await service.compare(request))

    @app.post("/verify")
    async def verify(request: VerifyRequest) -> Response:
        return service.counted("/verify", *await service.verify(request))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return service.health()

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")

    return app
