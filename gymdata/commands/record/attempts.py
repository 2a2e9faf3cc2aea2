"""Agents in ``collect``: each attempt at a rollout is a session of a recorder that runs beside the loop.

Invariants: a session is known by its attempt alone, so that what an earlier attempt left running is refused; a rollout's row
is written by the recorder, as one of ``gymdata record``; an attempt whose agent, or whose last model call, failed is a
failure with all that was sampled in it, and has no reward; its folder is there until it is scored, and is then removed.
A command locks the folder of its attempts from the moment that others can see the lock: what is not locked was left by a
killed one, of whichever run, and the next command removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from gymdata.commands.collect import outcome as ends
from gymdata.commands.collect.episode import EpisodeConfig, Rollout
from gymdata.commands.collect.outcome import Outcome
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.collect.setup import Parts
from gymdata.commands.record.agent import Agent, Attempt
from gymdata.commands.record.ending import Ending
from gymdata.commands.record.recorder import Recorder
from gymdata.commands.record.returned import AgentResult
from gymdata.commands.record.rows import outline_of
from gymdata.commands.record.server import Service, create_app
from gymdata.commands.record.sessions import Session
from gymdata.commands.record.settings import RecordConfig
from gymdata.engines.port import Generation
from gymdata.errors import OutsideError, StoreError
from gymdata.rollouts.messages import RolloutRow, Task
from gymdata.store import Run
from gymdata.store.lock import LOCK, claim
from gymdata.urls import address_of, listening_socket
from gymdata.workers.serving import server_of
from gymdata.workers.signals import signal_name

#: Settings that the recorder has from ``collect`` under the same names.
_SHARED = ("policy_version", "reward_timeout", "request_timeout", "retries", "max_turns", "max_context", "force")
#: How the folder of a command's attempts is called, in the temporary folder.
_ROOT = "gymdata-agents-"
#: Characters of an agent's last line in an error.
_LAST = 300


class AgentRuns:
    """The recorder of a collect run, and the attempts whose agents it serves."""

    def __init__(
        self,
        config: CollectConfig,
        parts: Parts,
        run: Run,
        seed: int,
        context: int | None,
        say: Callable[[str], None],
    ) -> None:
        assert parts.agent is not None
        self.agent: Agent = parts.agent
        self.timeout_s = config.agent_timeout
        limits = config.limits()
        shared = {name: limits.get(name, getattr(config, name)) for name in _SHARED}
        self._settings = RecordConfig.of({"output": run.folder, "max_sessions": 1 << 20, **shared}, "settings")
        self._assigned: dict[str, tuple[Task, int]] = {}
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.recorder = Recorder(
            self._settings,
            parts,
            run,
            seed,
            say,
            self._died,
            assigned=self._assigned,
            sampling=config.sampling_parameters(),
        )
        self.recorder.context = context
        if limits["max_tokens"] is not None:
            self.recorder.max_tokens = limits["max_tokens"]
        self._root, self._url = Path(), ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[AgentRuns]:
        """Serve agents; what killed commands left is removed first. Raises StoreError.from_os."""
        await asyncio.to_thread(_clean_after_killed)
        try:
            # Outside of the run: what lies above an agent's folder is read by agents that look for a project.
            self._root = Path(tempfile.mkdtemp(prefix=_ROOT)).resolve()
            lock = claim(self._root / f"{LOCK}.new")
            (self._root / f"{LOCK}.new").rename(self._root / LOCK)
        except OSError as error:
            raise StoreError.from_os(Path(tempfile.gettempdir()), error) from error
        self.recorder.interrupted()
        service = Service(self._settings, self.recorder)

        async def nothing() -> None:
            """The engine is started and closed by the loop."""

        server = server_of(create_app(service, nothing, nothing), service.stop, signals=False)
        with contextlib.closing(listening_socket("127.0.0.1", 0)) as bound:
            self._url = address_of(bound)
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            try:
                while not server.started and not serving.done():
                    await asyncio.sleep(0.01)
                yield self
            finally:
                server.should_exit = True
                await serving
                self.recorder.log.close()
                await asyncio.to_thread(shutil.rmtree, self._root, True)
                lock.release()

    def rollout(self, setting: EpisodeConfig, task: Task, index: int) -> AgentRollout:
        """An attempt that has not begun."""
        return AgentRollout(setting, task, index, self)

    def assign(self, rollout: AgentRollout) -> Attempt:
        """A session and a folder for a new attempt."""
        key = f"{rollout.rollout_id}-{secrets.token_hex(4)}"
        self._assigned[key] = (rollout.task, rollout.index)
        return Attempt(rollout.task, rollout.index, key, f"{self._url}/s/{key}", self._root / key)

    async def run(self, attempt: Attempt) -> AgentResult:
        """Run the agent to its end. Raises OutsideError("agent"), and the error that ended the recorder."""
        try:
            await asyncio.to_thread(self.agent.prepare, attempt)
        except OSError as error:
            raise OutsideError("agent", f"its folder cannot be made: {error.strerror}: {error.filename}") from error
        running = asyncio.create_task(self.agent.run(attempt))
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                either: list[asyncio.Future[Any]] = [running, self._trouble]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            if not limit.expired():
                raise
            raise OutsideError("agent", f"did not end within {self.timeout_s:g} s (--agent-timeout)") from None
        finally:
            running.cancel()
            await asyncio.wait([running])
        if self._trouble.done():
            self._trouble.result()
        if (session := self.recorder.sessions.get(attempt.key)) is not None:
            await self.recorder.answered(session)
        return running.result()

    def session(self, attempt: Attempt) -> Session | None:
        """What was recorded of an attempt; None without a model call."""
        session = self.recorder.sessions.get(attempt.key)
        return session if session is not None and session.steps else None

    async def finish(self, rollout: Rollout) -> tuple[RolloutRow, Mapping[str, str]]:
        """Score a rollout and write its row; returns it, and the reward functions that failed."""
        assert isinstance(rollout, AgentRollout)
        assert rollout.attempt is not None
        assert rollout.outcome is not None
        session, result = self.session(rollout.attempt), rollout.result
        assert session is not None
        left = {**({} if result is None else result.answer), **rollout.attempt.output()}
        if result is not None:
            left["exit_code"] = result.exit_code
        ending = Ending(
            rollout.outcome.status,
            rollout.outcome.stop_reason,
            None if result is None else result.reward,
            left=left,
            masked={} if result is None else result.masked,
            directory=rollout.attempt.work,
        )
        try:
            async with session.lock:
                await self.recorder.answered(session)
                return await self.recorder.write(session, ending)
        finally:
            await self._forget(rollout.attempt)

    async def discard(self, rollout: Rollout) -> None:
        """Forget a failed attempt."""
        assert isinstance(rollout, AgentRollout)
        if rollout.attempt is None:
            return
        if (session := self.recorder.sessions.get(rollout.attempt.key)) is not None:
            await self.recorder.answered(session)
            self.recorder.discard(session)
        await self._forget(rollout.attempt)

    async def _forget(self, attempt: Attempt) -> None:
        self._assigned.pop(attempt.key, None)
        self.recorder.upstream.pop(attempt.key, None)
        await asyncio.to_thread(shutil.rmtree, attempt.folder, True)

    def _died(self, error: BaseException) -> None:
        if not self._trouble.done():
            self._trouble.set_exception(error)
            self._trouble.exception()  # it may be that nobody waits any more


class AgentRollout(Rollout):
    """A ``Rollout`` whose model calls an agent makes."""

    def __init__(self, setting: EpisodeConfig, task: Task, index: int, runs: AgentRuns) -> None:
        super().__init__(setting, task, index)
        self.runs = runs
        self.attempt: Attempt | None = None
        self.result: AgentResult | None = None

    async def begin(self) -> None:
        """Nothing: the agent has its own loop."""

    def out_of_time(self) -> None:
        """The time limit passed: what was recorded is the rollout, unless the engine could not be reached."""
        limit = self.setting.limits.time_limit
        if getattr(self.setting.sampler, "unreachable", False):
            self.failure = ends.server_was_gone(self.setting.limits, self._place)
        elif self.attempt is not None and (error := self.runs.recorder.upstream.get(self.attempt.key)) is not None:
            self.failure = ends.failure(error, self._place)
        elif self.attempt is None or self.runs.session(self.attempt) is None:
            text = f"called no model within the {limit:g} s limit"
            self.failure = ends.failure(OutsideError("agent", text), self._place)
        else:
            self.outcome = ends.TIME_LIMIT

    async def play(self, first: Generation | OutsideError | None = None) -> None:
        """Run the agent; a failure keeps what was recorded."""
        await super().play(first)
        if self.failure is None or self.attempt is None or (session := self.runs.session(self.attempt)) is None:
            return
        outline_of(session)  # the turns get their agents
        self.encoder = session.encoder
        for message, turn in session.numbered(len(session.steps) - 1):
            self.messages.append(message)
            self.produced_by.append(turn)

    async def _turns(self, first: object) -> None:  # noqa: ARG002 - nothing is sampled here, with a group or alone
        self._place = "run"
        self.attempt = self.runs.assign(self)
        try:
            self.result = result = await self.runs.run(self.attempt)
        except OutsideError as error:
            # What a function raises may follow from what its last request was answered.
            if (cause := self.runs.recorder.upstream.get(self.attempt.key)) is not None:
                raise cause from error
            if (session := self.runs.session(self.attempt)) is None or session.spent is None:
                raise
            self.outcome = Outcome(ends.TRUNCATED, session.spent)
            return
        if (failed_call := self.runs.recorder.upstream.get(self.attempt.key)) is not None:
            raise failed_call
        if self.runs.session(self.attempt) is None:
            output = self.attempt.output()
            last = (output.get("stderr", "").strip() or output.get("stdout", "").strip()).rpartition("\n")[2][:_LAST]
            # A function writes nothing to files of its own.
            how = f"ended with exit code {result.exit_code}" if output else "returned"
            last = last or f"its client's base URL is {'OPENAI_BASE_URL' if output else 'the argument base_url'}"
            raise OutsideError("agent", f"{how} without a model call: {last}")
        if result.exit_code < 0:
            raise OutsideError("agent", f"was ended by signal {signal_name(-result.exit_code)}")
        failed = Outcome(ends.TRUNCATED, f"exit_{result.exit_code}")
        self.outcome = failed if result.exit_code else Outcome(ends.COMPLETED, None)


def _clean_after_killed() -> None:
    """Remove the folders of killed commands' agents."""
    for path in Path(tempfile.gettempdir()).resolve().glob(f"{_ROOT}*/{LOCK}"):
        with contextlib.suppress(OSError):  # in use, another user's, or removed meanwhile
            lock = claim(path)
            shutil.rmtree(path.parent)
            lock.release()
