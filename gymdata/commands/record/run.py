"""``record``: joins settings to an engine, a run folder and the server, and serves until it is stopped or its command ends.

Invariants: everything that can be wrong with the settings is found before an engine is started or a folder is made; however
serving ends, rows that were journaled are sealed, sessions that are open stay on disk, and the engine is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gymdata.commands.collect.report import COLUMNS, facts_of
from gymdata.commands.collect.run import close_or_remove, sampled_by
from gymdata.commands.collect.settings import CollectConfig, forced
from gymdata.commands.collect.setup import Parts, identity_of, load_parts
from gymdata.commands.record.ending import COMPLETED, TRUNCATED, Ending
from gymdata.commands.record.recorder import Recorder
from gymdata.commands.record.report import RecordSummary
from gymdata.commands.record.server import Service, create_app
from gymdata.commands.record.settings import RecordConfig
from gymdata.engines.servers.many import Servers
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.environments import SingleTurn
from gymdata.errors import OutsideError, StoreError, UsageError, counted
from gymdata.store import Run, read_run_json
from gymdata.store.paths import Identity, refuse_unwritable
from gymdata.urls import address_of, listening_socket
from gymdata.workers.serving import server_of
from gymdata.workers.signals import OWN_GROUP, send, sigterm_interrupts

#: Seconds between two looks for idle sessions and two writes of journals to the disk.
_TICK_S = 1.0
#: Seconds between two looks for a signal while the engine starts.
_LOOK_S = 0.1
#: Seconds that a command has to end after it was told to.
_GRACE_S = 5.0


def record(
    config: RecordConfig | None = None,
    *,
    parts: Parts | None = None,
    agent: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
    command: Sequence[str] = (),
    agent_output: int | None = None,
    **settings: Any,
) -> RecordSummary:
    """Serve agents and write their rollouts to ``output`` until a signal comes, or until ``agent``, a command line that is
    run with OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, ends.

    Settings are those of ``RecordConfig``. ``parts``: an engine and tokenizer that are there already. ``agent_output``: the
    descriptor of a file that gets what the agent prints; None: where this program prints. Raises UsageError and
    DataError before anything is started, StoreError when the folder is another run's or the disk is full,
    OutsideError("engine") when the engine cannot start or dies, KeyboardInterrupt for a signal while it starts.
    """
    config = RecordConfig.called_with(record, config, settings).checked()
    if agent and shutil.which(agent[0]) is None:
        hint = f"python {agent[0]}, or make it executable" if Path(agent[0]).is_file() else "give its full path"
        raise UsageError(f"{agent[0]!r} is not a command that can be run", hint=hint)
    began = time.monotonic()
    refuse_unwritable(config.output)
    collecting = config.as_collect()
    parts = parts or load_parts(collecting)
    recorded = read_run_json(config.output)["identity"] if (config.output / "run.json").is_file() else {}
    recorded = {} if config.overwrite else recorded
    seed = config.seed if config.seed is not None else recorded.get("seed")
    seed = secrets.randbits(32) if not isinstance(seed, int) else seed
    with contextlib.ExitStack() as stack:
        bound = listening_socket(config.host, config.port)
        stack.callback(bound.close)
        run = Run.open(
            config.output.absolute(),
            identity=_identity(config, collecting, parts, seed, recorded),
            extent={},
            operation={"endpoint": config.endpoint, "port": bound.getsockname()[1], "command": list(command)},
            facts={
                "stage": "record",
                "command": list(command),
                "config": config.model_dump(mode="json", exclude={"token"}),
                **sampled_by(config.model, parts),
            },
            run_id=config.run_id,
            overwrite=config.overwrite,
            format=config.format,
        )
        # Closing seals: also after an error, because rows that are there are good whatever happened to the others.
        stack.push(lambda _, error, __: close_or_remove(run, error))
        for text in [*parts.notes, *(f"repaired after a crash: {repair}" for repair in run.repairs)]:
            say(text)
        serving = _Serving(config, parts, run, seed, say, agent, agent_output, address_of(bound))
        interrupted = False
        stack.enter_context(sigterm_interrupts())
        try:
            with contextlib.suppress(SystemExit):
                serving.server.run(sockets=[bound])
        except KeyboardInterrupt:
            interrupted = True
        if serving.trouble is not None:
            raise serving.trouble
        if interrupted and not serving.started:
            raise KeyboardInterrupt
        run.seal()
        rows = facts_of(run.existing(COLUMNS))
        counts = serving.recorder.counts
        summary = RecordSummary(
            path=str(config.output),
            run_id=run.run_id,
            **{
                name: rows[name]
                for name in ("rollouts", "completed", "truncated", "turns", "tokens_generated", "reward")
            },
            new_rollouts=counts["rollouts_total"],
            failures=counts["upstream_failures_total"],
            unparsed_calls=counts["unparsed_calls_total"],
            unread_turns=counts["unread_turns_total"],
            open=len(serving.recorder.sessions),
            command_exit=serving.command_exit,
            interrupted=interrupted,
            seconds=round(time.monotonic() - began, 3),
        )
        run.note(counts={**{k: v for k, v in rows.items() if k != "parts"}, "open": summary.open})
        return summary


class _Serving:
    """One server's life: the engine, the sessions' clock and the command."""

    def __init__(
        self,
        config: RecordConfig,
        parts: Parts,
        run: Run,
        seed: int,
        say: Callable[[str], None],
        agent: Sequence[str],
        agent_output: int | None,
        url: str,
    ) -> None:
        self.config, self.run, self.say, self.agent, self.agent_output = config, run, say, list(agent), agent_output
        self.url = url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        self.trouble: BaseException | None = None
        self.command_exit: int | None = None
        #: Whether the engine was up.
        self.started = False
        self.recorder = Recorder(config, parts, run, seed, say, self._died)
        if isinstance(parts.sampler, (ServerSampler, Servers)):
            parts.sampler.wait_for_server(config.wait_for_server, say, run.server_away)
        self.service = Service(config, self.recorder)
        self.server = server_of(create_app(self.service, self._start, self._stop), self.service.stop)
        self._tasks: list[asyncio.Task[None]] = []

    def _died(self, error: BaseException) -> None:
        self.trouble = self.trouble or error
        self.server.should_exit = True

    async def _start(self) -> None:
        sampler = self.recorder.sampler
        engine = ", ".join(self.config.endpoint) or (sampler.base if isinstance(sampler, ServerSampler) else "")
        self.say(f"connecting to {engine} …" if engine else f"starting vLLM with {self.recorder.model} …")
        starting = asyncio.ensure_future(self.recorder.start())
        while not starting.done() and not self.server.should_exit:
            await asyncio.wait([starting], timeout=_LOOK_S)
        if self.server.should_exit:
            # A signal: whatever became of the engine, which the same signal may have reached, is no fault of it.
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        try:
            facts = starting.result()
        except Exception as error:  # noqa: BLE001 - uvicorn would only print it; it is raised to the caller
            self._died(error)
            return
        self.started = True
        self.run.note(engine=facts)
        if self.recorder.sessions:
            self.say(f"{counted(len(self.recorder.sessions), 'open session')} resumed")
        self._tasks.append(asyncio.create_task(self._tick()))
        if self.agent:
            self._tasks.append(asyncio.create_task(self._run_agent()))
        else:
            self.say(f"recording on {self.url}; Ctrl-C stops it. For an agent:")
            key = f"gymdata-KEY:{'TOKEN' if self.config.token else ''}".rstrip(":")
            self.say(f"  OPENAI_BASE_URL={self.url}/v1 OPENAI_API_KEY={key}")
            self.say(f"  ANTHROPIC_BASE_URL={self.url} ANTHROPIC_API_KEY={key}")

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            self.recorder.log.close()
        except StoreError as error:
            self._died(error)
        await self.recorder.sampler.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await asyncio.to_thread(self.recorder.log.sync)
                await self.recorder.end_idle()
            except Exception as error:  # noqa: BLE001 - a full disk ends the recording
                self._died(error)
                return

    async def _run_agent(self) -> None:
        """Run the command, and end what it left open."""
        while not self.server.started:
            await asyncio.sleep(0.01)
        began = time.time()
        try:
            environment = agent_environment(self.url, self.config)
            process = subprocess.Popen(self.agent, env=environment, stdout=self.agent_output, **OWN_GROUP)
        except OSError as error:
            self._died(OutsideError("environment", f"{self.agent[0]}: cannot be run: {error.strerror}"))
            return
        self.say(f"recording {' '.join(self.agent)[:200]}")
        try:
            self.command_exit = await asyncio.to_thread(process.wait)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                send(process, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
        ending = Ending(COMPLETED) if self.command_exit == 0 else Ending(TRUNCATED, f"exit_{self.command_exit}")
        try:
            # A session of an earlier command that this one did not continue has lost its agent.
            await self.recorder.end_all(Ending(TRUNCATED, "interrupted"), before=began)
            await self.recorder.end_all(ending)
        except Exception as error:  # noqa: BLE001 - raised to the caller
            self._died(error)
        self.server.should_exit = True


def agent_environment(url: str, config: RecordConfig) -> dict[str, str]:
    """The variables of a command whose requests are recorded."""
    key = config.token or "gymdata"
    ours = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
    return {**os.environ, **ours, "GYMDATA_RECORD_URL": url}


def _identity(config: RecordConfig, collecting: CollectConfig, parts: Parts, seed: int, recorded: Identity) -> Identity:
    """What a resumed recording must share. What clients chose stays as it was recorded."""
    identity = identity_of(collecting, replace(parts, environment=SingleTurn()), seed)
    sampling = {**(recorded.get("sampling") or {}), **(identity.get("sampling") or {})}
    return {
        **identity,
        **({"sampling": sampling} if sampling else {}),
        **config.limits(),
        "max_tokens": None,
        "environment": {"name": "agent"},
        "force": forced(config.force),
    }
