"""Sessions, engine and run folder together: a request in, a completion out, and a row when a session ends.

Invariants: a call is journaled before it is answered, and answered as it is journaled; a request that the engine failed is a
failure and an error, never a turn; a budget ends a session as truncated and never gives it a reward; a session that ended
gets no more calls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from gymdata.commands.collect.episode import turns_as_json
from gymdata.commands.collect.resume import RunKey, request_seed
from gymdata.commands.collect.rows import table_message
from gymdata.commands.collect.settings import forced
from gymdata.commands.collect.setup import Parts
from gymdata.commands.record.answer import read_generation
from gymdata.commands.record.ending import FAILED, REPORTED, TRUNCATED, Ending
from gymdata.commands.record.log import SessionLog, facts_of, recorded
from gymdata.commands.record.messages import digests, tools_digest
from gymdata.commands.record.request import AgentCompletion, AgentRequest, Client, RequestError
from gymdata.commands.record.rows import Groups, Member, Outline, Score, outline_of, session_row
from gymdata.commands.record.sessions import Plan, Session
from gymdata.commands.record.settings import RecordConfig
from gymdata.engines.port import Chat, Generation, Sampler, SampleRequest
from gymdata.engines.sampling import cut_at_stop
from gymdata.errors import GymdataError, OutsideError, StoreError
from gymdata.rewards.port import RewardPart
from gymdata.rewards.scheduler import RewardScheduler, step_rewards, total
from gymdata.rewards.views import view_of
from gymdata.rollouts.logprobs import truncations
from gymdata.rollouts.messages import JsonObject, RolloutRow, Task
from gymdata.rollouts.turns import expand_prompts
from gymdata.settings import Settings
from gymdata.store import Run
from gymdata.store.paths import Facts
from gymdata.texts import raised

_log = logging.getLogger(__name__)


class Recorder:
    """Everything behind the server. ``died`` is called with the error that ends it: an engine that is gone, a full disk.
    ``assigned``: the task of each session and its number in the group, where ``collect`` decides them: then no other
    session begins, and no client ends one. ``sampling``: the run's own parameters."""

    def __init__(
        self,
        config: RecordConfig,
        parts: Parts,
        run: Run,
        seed: int,
        say: Callable[[str], None] = lambda _: None,
        died: Callable[[BaseException], None] = lambda _: None,
        *,
        assigned: Mapping[str, tuple[Task, int]] | None = None,
        sampling: Settings | None = None,
    ) -> None:
        self.config, self.run, self._seed, self._say, self._died = config, run, seed, say, died
        self.sampler: Sampler = parts.sampler
        self.chat: Chat = parts.chat
        self.model = str(parts.model["policy"])
        self.key = RunKey(run.run_id, self.model, str(parts.model["policy_hash"]), config.policy_version)
        self.scheduler = RewardScheduler(parts.rewards, timeout_s=config.reward_timeout)
        self.log = SessionLog(run)
        self.context: int | None = config.max_context
        existing = run.existing((*_ENDED, *_COUNTED, "rollout_id", "group_id"))
        #: Rollouts that are written.
        self._ended: dict[str, dict[str, Any]] = {row["rollout_id"]: _state_of(row) for row in existing.to_pylist()}
        self._groups = Groups(self.key, existing.select(["task_id", "rollout_index", "group_id"]).to_pylist())
        #: Sessions that are idle and could not be ended.
        self._stuck: set[str] = set()
        self.sessions: dict[str, Session] = {}
        for session in self.log.read():
            if session.rollout_id in self._ended:
                self.log.drop(session)
            else:
                self.sessions[session.key] = session
        for repaired in self.log.repairs:
            say(f"repaired after a crash: {repaired}")
        self.assigned = assigned
        #: Of assigned sessions whose last call the engine failed.
        self.upstream: dict[str, OutsideError] = {}
        #: The most tokens of one call.
        self.max_tokens = _MOST_TOKENS
        self.counts: Counter[str] = Counter()
        self._forced = forced(config.force)
        self._base = config.as_collect().sampling_parameters() if sampling is None else sampling

    async def start(self) -> Facts:
        """Start the engine. Raises UsageError, OutsideError("engine")."""
        facts = dict(await self.sampler.start())
        limits = [n for n in (facts.get("max_model_len"), self.config.max_context) if n]
        self.context = min(limits, default=None)
        return facts

    # --- sessions ---------------------------------------------------------------------------------------------------

    def session_for(self, key: str | None, request: AgentRequest) -> Session:
        """The session of a request. Raises RequestError when it has ended, or there are too many."""
        key = key or request.session_key or self.config.session
        if self.assigned is not None and (key is None or key not in self.assigned):
            text = f"session {key} is not one of this run's" if key else "the request names no session"
            raise RequestError("not_found", f"{text}: send it to OPENAI_BASE_URL or ANTHROPIC_BASE_URL as they are set")
        if key is None:
            session = self._by_conversation(request)
            if session is not None:
                return session
        elif key in self.sessions:
            return self.sessions[key]
        name = key or f"conversation-{secrets.token_hex(8)}"
        rollout_id = self._rollout_id(name)
        if rollout_id in self._ended:
            raise self._has_ended(name, rollout_id)
        if len(self.sessions) >= self.config.max_sessions:
            counts = f"{len(self.sessions):,} sessions are open, at most {self.config.max_sessions:,}"
            advice = "finish some with POST /rollouts/KEY/finish, or start the recorder with a higher --max-sessions"
            raise RequestError("busy", f"{counts}: {advice}", retry_after=5.0)
        return Session(name, rollout_id, named=key is not None)

    async def state(self, key: str) -> JsonObject:
        """What GET /rollouts/KEY answers, whichever process wrote the session's row. Raises RequestError for a key that no
        request had."""
        state = self.state_of(key)
        if key not in self.sessions and "agents" not in state:  # another process wrote it
            row = await asyncio.to_thread(recorded, self.run.folder, state["rollout_id"], ["extra"])
            state["agents"] = [c["agent"] for c in orjson.loads(row["extra"])["conversations"]]
        return state

    def state_of(self, key: str) -> JsonObject:
        """The same, without the agents of a row that another process wrote."""
        if key in self.sessions:
            return facts_of(self.sessions[key])
        rollout_id = self._rollout_id(key)
        if rollout_id not in self._ended:
            name = key.removeprefix("gymdata-")
            text = f"no session {key}: a request names session {name} by the API key gymdata-{name}, or by its path"
            raise RequestError("not_found", f"{text}: /s/{name}/v1 in place of /v1 in the base URL")
        return {"key": key, "rollout_id": rollout_id, **self._ended[rollout_id]}

    def _has_ended(self, key: str, rollout_id: str) -> RequestError:
        ended = f"session {key} has ended as rollout {rollout_id} of {self.run.folder}: a key is for one rollout"
        return RequestError("not_found", f"{ended}; use another key (the same task_id when it ends)", status=409)

    def _rollout_id(self, key: str) -> str:
        return self.key.rollout_id(*self._member(key))

    def _member(self, key: str) -> tuple[Task, int]:
        """The task of a session, and which member of its group the session is."""
        return (self.assigned or {}).get(key) or (Task(key, [], None, {}, "session"), 0)

    def _by_conversation(self, request: AgentRequest) -> Session | None:
        """The session without a name that holds the longest beginning of these messages; of several, one that nothing
        continues yet."""
        unnamed = [session for session in self.sessions.values() if not session.named]
        if request.previous_id is not None:
            return next((s for s in unnamed if any(step.id == request.previous_id for step in s.steps)), None)
        chain = list(digests(request.messages, tools_digest(request.tools)))
        candidates = []
        for session in unnamed:
            if (match := session.continued(request.messages, chain)) is not None:
                turn, n_before = match
                candidates.append((n_before, turn in session.last_turns(), session.last_at, session))
        return max(candidates, key=lambda candidate: candidate[:3])[3] if candidates else None

    # --- a request --------------------------------------------------------------------------------------------------

    def prompt_of(self, session: Session, request: AgentRequest) -> Plan:
        """The prompt that the request continues. Raises RequestError for messages that cannot be rendered."""
        try:
            orjson.dumps([request.messages, request.tools])
            return session.plan(request, self.chat)
        except TypeError as error:
            raise RequestError("invalid", f"the messages cannot be stored: {error}", where="messages") from error
        except GymdataError as error:
            raise RequestError("invalid", error.message, where="messages") from error

    async def complete(self, session: Session, request: AgentRequest, client: Client) -> AgentCompletion:
        """Sample, journal and return the completion of a request. Raises RequestError, and StoreError.from_os, which ends
        the recorder."""
        try:
            return await self._completed(session, request, client)
        except StoreError as error:
            # A full disk: nothing of the request is in the session.
            self._died(error)
            raise

    async def _completed(self, session: Session, request: AgentRequest, client: Client) -> AgentCompletion:
        # Requests that begin a session together are of one session; one that was discarded since then has no more calls.
        session = self.sessions.get(session.key) or Session(session.key, session.rollout_id, named=session.named)
        if session.lock.locked() or session.rollout_id in self._ended:
            # It ended, or is being scored, since the request came.
            raise self._has_ended(session.key, session.rollout_id)
        self._refuse_spent(session)
        if request.tool_choice not in ("auto", "none"):
            problem = f"got {request.tool_choice!r}, expected auto or none: the model is sampled as it is"
            raise RequestError.field("tool_choice", problem, "unsupported")
        plan = self.prompt_of(session, request)
        max_tokens, clamped = self._room(session, request, plan)
        self.sessions[session.key] = session
        session.in_flight += 1
        call = Call(request, client, plan, max_tokens, clamped, self._chosen(request), session.begin())
        try:
            return self._record(session, call, await self._sample(session, call))
        except BaseException:
            session.numbers.discard(call.number)
            raise
        finally:
            session.in_flight -= 1
            session.last_at = time.time()
            if not session.steps and not session.in_flight:
                # Nothing was sampled: there is no rollout to end.
                self.sessions.pop(session.key, None)

    def _room(self, session: Session, request: AgentRequest, plan: Plan) -> tuple[int, dict[str, int] | None]:
        """How many tokens the completion may have, and what the row says where the client asked for more. Raises
        RequestError for a prompt beyond the context."""
        room = None if self.context is None else self.context - len(plan.prompt)
        if room is not None and room < 1:
            raise RequestError(
                "context",
                # In the words, and without the commas, by which agents know that they have to compact.
                f"prompt is too long: {len(plan.prompt)} tokens > {self.context} maximum "
                f"(this model's maximum context length is {self.context} tokens)",
                where="messages",
            )
        budget = self.config.max_tokens_total
        left = None if budget is None else budget - session.encoder.n_generated_tokens
        asked = request.max_tokens
        most = min(n for n in (asked, room, left, self.max_tokens) if n is not None)
        return most, ({"max_tokens": asked, "used": most} if asked is not None and most < asked else None)

    def _refuse_spent(self, session: Session) -> None:
        config, turns, tokens = self.config, len(session.numbers), session.encoder.n_generated_tokens
        limits = (
            ("max_turns", config.max_turns, turns, "model calls"),
            ("max_tokens_total", config.max_tokens_total, tokens, "generated tokens"),
        )
        for name, limit, used, unit in limits:
            if limit is None or used < limit:
                continue
            if session.spent is None:
                session.spent = name
                if session.steps:  # else the line that begins the journal has it
                    self.log.append(session, {"spent": name})
            text = f"session {session.key} used {used:,} {unit}, at most {limit:,} (--{name.replace('_', '-')})"
            raise RequestError("budget", text, where=name)

    def _chosen(self, request: AgentRequest) -> Settings:
        """What the client, or --force, chooses besides the run's own settings, by vLLM's names."""
        chosen: Settings = {k: v for k, v in request.sampling.items() if v is not None and k != "seed"}
        if request.stop:
            chosen["stop"] = list(request.stop)
        if (request.logprobs or 0) > self._base.get("top_logprobs", 0):
            chosen["top_logprobs"] = request.logprobs
        if request.response_format is not None:
            schema = request.response_format.get("schema")
            chosen["structured_outputs"] = {"json_object": True} if schema is None else {"json": schema}
        chosen |= self._forced
        return {k: v for k, v in chosen.items() if self._base.get(k) != v}

    async def _sample(self, session: Session, call: Call) -> Generation:
        seed = call.request.sampling.get("seed")
        if not isinstance(seed, int):
            task, index = self._member(session.key)
            seed = request_seed(self._seed, task, call.number, index)
        sample = SampleRequest(
            request_id=f"{session.rollout_id}-{call.number}-{secrets.token_hex(4)}",
            prompt_token_ids=list(call.plan.prompt),
            max_tokens=call.max_tokens,
            seed=seed,
            group=session.key,
            sampling=call.chosen or None,
        )
        turn_name = f"turn {len(session.steps)}"
        try:
            (generation,) = await self.sampler.sample(sample)
            if generation.finish_reason == "abort":
                raise OutsideError("engine", f"the request ended with finish_reason {generation.finish_reason!r}")
            self.upstream.pop(session.key, None)
            min_tokens = int({**self._base, **call.chosen}.get("min_tokens") or 0)
            return cut_at_stop(generation, self.chat.decode, min_tokens)
        except OutsideError as error:
            if self.assigned is not None and error.status != 400:
                self.upstream[session.key] = error
            self._fail(session, "engine", turn_name, error.message)
            self.counts["upstream_failures_total"] += 1
            if error.fatal:
                self._died(error)
            if error.status == 400:
                raise RequestError("invalid", error.message) from error
            status = error.status if error.status in (429, 503, 504) else None
            raise RequestError("upstream", error.message, status=status, retry_after=1.0) from error

    def _record(self, session: Session, call: Call, generation: Generation) -> AgentCompletion:
        """Journal a call and take it in."""
        biases = {k: v for k, v in call.chosen.items() if truncations({"sampling": {k: v}})}
        if biases:
            self.run.sampled_with(**biases)
        message, completion = read_generation(self.chat, session, call.request, generation)
        event = session.event(
            call.request,
            call.plan,
            generation,
            message,
            id=completion.id,
            finish_reason=completion.finish_reason,
            temperature=float({**self._base, **call.chosen}["temperature"]),
            sampling=call.chosen or None,
            clamped=call.clamped,
            unread=call.client.gone,
            number=call.number,
        )
        self.log.append(session, event)
        session.add(event)
        self.counts["unparsed_calls_total"] += "unparsed_call" in message
        return completion

    # --- the end of a session ---------------------------------------------------------------------------------------

    async def finish(self, key: str, ending: Ending) -> dict[str, Any]:
        """Write the session's row, or its failure. Raises RequestError for a key that no request had."""
        if self.assigned is not None:
            text = f"session {key} ends with its agent, and is scored by the rewards of the run"
            raise RequestError("unsupported", text, status=409)
        failed = {"key": key, "status": FAILED, "rollout_id": self._rollout_id(key)}
        while (session := self.sessions.get(key)) is not None:
            async with session.lock:
                await self.answered(session)
                # Else another request has ended it, or its only call failed: a retry of that began the next.
                if self.sessions.get(key) is session:
                    if ending.status == FAILED:
                        why = ending.stop_reason or "the client reported a failure"
                        self._fail(session, *_REPORTED, why)
                        self.discard(session)
                        return failed
                    await self.write(session, ending)
                    return self.state_of(key)
        if ending.status == FAILED and failed["rollout_id"] not in self._ended:
            # Sent again, or never begun.
            for row in await asyncio.to_thread(self.run.failures):
                if (row["rollout_id"], row["kind"], row["place"]) == (failed["rollout_id"], *_REPORTED):
                    return failed
        return await self.state(key)

    async def answered(self, session: Session) -> None:
        """Calls in flight are answered first."""
        while session.in_flight:
            await asyncio.sleep(0.01)

    def discard(self, session: Session, *, written: bool = False) -> None:
        """Forget a session. Raises StoreError.from_os: then it is open again after a restart, unless its row is there."""
        self.sessions.pop(session.key, None)
        try:
            self.log.drop(session, at_once=not written)
        except StoreError as error:
            self._died(error)
            raise

    async def write(self, session: Session, ending: Ending) -> tuple[RolloutRow, Mapping[str, str]]:
        """Score a session, whose lock is held, and write its row. Returns it, and the reward functions that failed."""
        outline = outline_of(session)
        score = await self._scored(session, outline, ending)
        # Others have ended meanwhile. From here on nothing is awaited: this one is the next.
        member = self._member_of(session, ending, outline)
        _refuse_unproven(session)
        row = session_row(session, outline, self.key, member, ending, score)
        temperatures = {step.temperature for step in session.steps}
        if len(temperatures) > 1:
            self.run.sampled_with(mixed_temperatures=sorted(temperatures))
        try:
            self.run.append(row)
        except StoreError as error:
            self._died(error)
            raise
        # It has ended, whatever fails from here on.
        self._ended[session.rollout_id] = {**_state_of(row), "agents": list(outline.labels)}
        self._groups.add(row)
        self.counts["rollouts_total"] += 1
        self.counts["unread_turns_total"] += len(outline.unread)
        self.discard(session, written=True)
        for name, message in score.faults.items():
            self._fail(session, "reward", f"reward {name}", message, member.task_id)
        return row, score.faults

    async def _scored(self, session: Session, outline: Outline, ending: Ending) -> Score:
        """What the client reported and the run's own rewards say; a failure is no score."""
        status, stop_reason = (
            (ending.status, ending.stop_reason) if session.spent is None else (TRUNCATED, session.spent)
        )
        reported = ending.rewards or ({} if ending.reward is None else {REPORTED: ending.reward})
        parts = [RewardPart(name, value) for name, value in reported.items()]
        if not self.scheduler.rewards or ending.masked:
            whole = total(parts)
            if ending.reward is not None and not self.scheduler.rewards:
                whole = ending.reward
            return Score(status, stop_reason, whole, parts, {})
        shown, turns = session.numbered(outline.leaf), session.encoder.turns
        view = view_of(
            messages=[message for message, _ in shown],
            produced_by=[turn for _, turn in shown],
            task=self._member_of(session, ending, outline).task,
            tools=session.threads[session.steps[outline.leaf].thread].tools,
            turns=turns,
            status=status,
            environment={**ending.left, "directory": ending.directory},
        )
        scored = await self.scheduler.score(view)
        steps = step_rewards([] if scored.faults else scored.parts, len(turns))
        for turn, step_reward in zip(turns, steps, strict=True):
            turn["reward"] = step_reward
        parts += scored.parts
        return Score(status, stop_reason, None if scored.faults else total(parts), parts, scored.faults)

    def _member_of(self, session: Session, ending: Ending, outline: Outline) -> Member:
        if self.assigned is not None:
            task, index = self.assigned[session.key]
            return Member(task.task_id, index, self.key.group_id(task), task.row)
        return self._groups.member(session, ending, outline.labels)

    async def end_idle(self) -> None:
        """End every session that no request came to for too long. Raises StoreError."""
        for session in list(self.sessions.values()):
            idle = not session.in_flight and time.time() - session.last_at >= self.config.idle_timeout
            if idle and session.key not in self._stuck:
                await self._end(session, Ending(TRUNCATED, "idle_timeout"))

    async def end_all(self, ending: Ending, *, before: float = math.inf) -> None:
        """End every open session whose last call was ``before`` a time, in seconds since the epoch. Raises StoreError, and
        at the end the first defect."""
        sessions = [session for session in self.sessions.values() if session.last_at < before]
        defects = [defect for session in sessions if (defect := await self._end(session, ending)) is not None]
        if defects:
            raise defects[0]

    async def _end(self, session: Session, ending: Ending) -> Exception | None:
        """A defect in one session, which stays open, ends no other: it is reported and returned."""
        try:
            await self.finish(session.key, ending)
        except RequestError:
            pass  # its client ended it meanwhile
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is
            _log.error("session %s", session.key, exc_info=error)
            self._stuck.add(session.key)
            self._say(f"session {session.key} could not be ended, and stays open: {raised(error)}")
            return error
        return None

    def interrupted(self) -> None:
        """Put sessions aside that a killed run left open: their agents are gone."""
        for session in list(self.sessions.values()):
            self._fail(session, "agent", "run", "interrupted: the command was killed while it ran")
            self.discard(session)

    def _fail(self, session: Session, kind: str, operation: str, message: str, task_id: str | None = None) -> None:
        task, index = self._member(session.key)
        reported = kind in ("agent", "environment")
        self.run.fail(
            {
                "kind": kind,
                "place": operation,
                "message": message if kind == "reward" else f"{kind}: {message.removeprefix(f'{kind}: ')}",
                "attempt": None,
                "counts": False,
                "final": False,
                "rollout_id": session.rollout_id,
                "run_id": self.key.run_id,
                "group_id": None,
                "task_id": task_id or task.task_id,
                "rollout_index": index,
                "at": datetime.now(UTC).isoformat(),
                "turns": turns_as_json(session.encoder.turns) if reported else [],
                "messages": [table_message(m, t) for m, t in session.numbered(len(session.steps) - 1)]
                if reported
                else [],
                "duration_s": session.last_at - session.started_at,
            }
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is sampled. ``chosen``: what its client, or --force, chooses besides the run's own settings;
    ``clamped``: that it asked for more tokens; ``number``: by which it is seeded."""

    request: AgentRequest
    client: Client
    plan: Plan
    max_tokens: int
    clamped: dict[str, int] | None
    chosen: Settings
    number: int


def _refuse_unproven(session: Session) -> None:
    """expand(encode(x)) == x, or nothing is written."""
    for turn, prompt in enumerate(expand_prompts(session.encoder.turns)):
        step = session.steps[turn]
        if prompt.tolist() != [*session.ids_of(step.parent).tolist(), *step.tail.tolist()]:
            raise GymdataError(
                f"session {session.key}, turn {turn}: the encoded prompt does not expand to what the engine read",
                hint="this is a defect in gymdata: the session stays in RUN/sessions",
            )


#: Kind and place of the failure of a session whose client says that it failed.
_REPORTED = "environment", "agent"
#: As good as no limit, where neither client nor engine names one.
_MOST_TOKENS = 1 << 20
#: Of a rollout that is written, what its session's state has; under other names the second.
_ENDED = ("status", "stop_reason", "reward", "task_id", "rollout_index")
_COUNTED = {"n_turns": "turns", "n_generated_tokens": "tokens_generated"}


def _state_of(row: RolloutRow) -> JsonObject:
    return {name: row[name] for name in _ENDED} | {name: row[column] for column, name in _COUNTED.items()}
