"""``gymdata record`` in front of the conformance suite's engine, right and wrong: each wrong one changes one thing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gymdata.chat.template import TransformersChat
from gymdata.check.conformance.engine import ScriptedEngine
from gymdata.check.conformance.run import RecorderReport, run_cases
from gymdata.collect.setup import Parts, load_parts
from gymdata.engines.port import Generation, SampleRequest
from gymdata.record.answer import Answer
from gymdata.record.recorder import Recorder
from gymdata.record.request import AgentCompletion, AgentRequest, RequestError
from gymdata.record.server import Service, create_app
from gymdata.record.sessions import Event, Plan, Session
from gymdata.record.settings import RecordConfig
from gymdata.store import Run
from gymdata.urls import address_of, listening_socket
from gymdata.workers.serving import server_of

POLICY = str(Path(__file__).parents[2] / "sample_data" / "policy")


class Rounding:
    """An engine whose log-probabilities are rounded."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    async def sample(self, request: SampleRequest) -> list[Generation]:
        generations = await self.sampler.sample(request)
        return [replace(one, log_probs=[round(p, 4) for p in one.log_probs]) for one in generations]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


class Rounded(Recorder):
    """Log-probabilities with four decimals."""

    def __init__(self, config: RecordConfig, parts: Parts, run: Run, seed: int) -> None:
        super().__init__(config, replace(parts, sampler=Rounding(parts.sampler)), run, seed)


class Rerendered(Recorder):
    """Every prompt rendered from the client's messages."""

    def prompt_of(self, session: Session, request: AgentRequest) -> Plan:
        plan = super().prompt_of(session, request)
        if request.prompt is not None:
            return plan
        messages = list(request.messages)
        return Plan(self.chat.render(messages, request.tools), -1, messages, plan.edits, plan.cause)


class WithoutTools(Recorder):
    """Tool definitions that the model never reads."""

    def prompt_of(self, session: Session, request: AgentRequest) -> Plan:
        return super().prompt_of(session, replace(request, tools=None))


class StaleHistory(Recorder):
    """An edit of history that is passed over: the recorded conversation goes on."""

    def prompt_of(self, session: Session, request: AgentRequest) -> Plan:
        plan = super().prompt_of(session, request)
        if plan.edits is None or not session.steps:
            return plan
        turn, new = len(session.steps) - 1, list(request.messages)[-1:]
        bridge = self.chat.bridge(session.messages_of(turn), new, request.tools)
        return Plan([*session.ids_of(turn).tolist(), *bridge], turn, new)


class OtherText(Recorder):
    """An answer in other words than those that were sampled."""

    async def complete(self, session: Session, request: AgentRequest, answer: Answer) -> list[AgentCompletion]:
        completions = await super().complete(session, request, answer)
        return [replace(completion, content=completion.content.replace(" ", "  ")) for completion in completions]


class OtherSessions(Recorder):
    """Keeps its calls in sessions of another kind."""

    kind: type[Session]

    def session_for(self, key: str | None, request: AgentRequest) -> Session:
        session = super().session_for(key, request)
        return session if isinstance(session, self.kind) else self.kind(session.key, session.rollout_id, session.named)


class SwappingSession(Session):
    """Has the plans of the requests that are sampled now, and takes another's for each."""

    def plan(self, request: AgentRequest, chat: Any) -> Plan:
        plan = super().plan(request, chat)
        self.plans = [*getattr(self, "plans", ()), plan]
        return plan

    def event(self, request: AgentRequest, plan: Plan, *more: Any, **facts: Any) -> Event:
        others = [other for other in self.plans if other is not plan] if self.in_flight > 1 else []
        self.plans = [other for other in self.plans if other is not plan]
        return super().event(request, others[0] if others else plan, *more, **facts)


class Swapped(OtherSessions):
    """Of requests that are answered at the same time, each has the prompt of another."""

    kind = SwappingSession


class LosingSession(Session):
    def add(self, event: Event) -> None:
        if not self.steps:
            super().add(event)


class LostTurn(OtherSessions):
    """Calls after the first that are answered and not recorded."""

    kind = LosingSession


class FailuresAreTurns(Recorder):
    """A call that the engine failed, recorded as one that generated a stop token."""

    async def complete(self, session: Session, request: AgentRequest, answer: Answer) -> list[AgentCompletion]:
        try:
            return await super().complete(session, request, answer)
        except RequestError as error:
            if error.kind == "upstream":
                plan = self.prompt_of(session, request)
                made = Generation(list(plan.prompt), [self.chat.end_of_turn_ids[0]], [-0.5], "stop")
                facts = {"id": "failed", "finish_reason": "stop", "temperature": 1.0, "sampling": None, "clamped": None}
                session.add(session.event(request, plan, made, {"role": "assistant", "content": ""}, **facts))
                self.sessions[session.key] = session
            raise


@contextlib.asynccontextmanager
async def recorder_at(endpoint: str, folder: Path, kind: type[Recorder]) -> AsyncIterator[str]:
    """The URL of a recorder in front of the engine at ``endpoint``."""
    settings = {"output": folder, "endpoint": [endpoint], "tokenizer": POLICY, "keep_reasoning": False}
    config = RecordConfig.of({**settings, "retries": 0, "seed": 1}, "test")
    parts = await asyncio.to_thread(load_parts, config.as_collect())  # asks the engine for its models
    bound = listening_socket("127.0.0.1", 0)
    with (
        contextlib.closing(bound),
        Run.open(folder, identity={}, extent={}, operation={}, facts={"stage": "record"}) as run,
    ):
        recorder = kind(config, parts, run, 1)

        async def stop() -> None:
            recorder.log.close()
            await recorder.sampler.close()

        service = Service(config, recorder)
        server = server_of(create_app(service, recorder.start, stop), service.stop)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            yield address_of(bound)
        finally:
            server.should_exit = True
            await serving


def check(folder: Path, kind: type[Recorder] = Recorder) -> RecorderReport:
    """The conformance suite's report on a recorder."""

    async def checked() -> RecorderReport:
        engine = ScriptedEngine(TransformersChat.load(POLICY, tool_parser="none"))
        async with engine.serving("127.0.0.1", 0) as endpoint, recorder_at(endpoint, folder, kind) as url:
            return await run_cases(url, engine, wait=60.0)

    return asyncio.run(checked())
