"""``collect``: joins a configuration to an engine, an environment, rewards and a run folder, and plays what is pending.

Invariants: everything that can be wrong with the input is found before an engine is started or a folder is made;
a run with nothing pending starts no engine; however the loop ends, what was journaled is sealed and the engine is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from gymdata.commands.collect.episode import EpisodeConfig
from gymdata.commands.collect.loop import Collector
from gymdata.commands.collect.outcome import Limits
from gymdata.commands.collect.report import COLUMNS as SUMMARY_COLUMNS
from gymdata.commands.collect.report import CollectPlan, CollectSummary, facts_of
from gymdata.commands.collect.resume import COLUMNS as LEDGER_COLUMNS
from gymdata.commands.collect.resume import AttemptTracker, ResumeState, RunKey
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.collect.setup import (
    Given,
    Parts,
    check_servers,
    check_tasks,
    first_prompt,
    identity_of,
    load_parts,
)
from gymdata.commands.collect.task_shapes import TaskShape
from gymdata.commands.collect.tasks import IN_MEMORY, TaskFile, TaskRows, Tasks, task_rows
from gymdata.commands.validate.rollouts import behavior_of
from gymdata.engines.servers.many import Servers
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import EXIT_USAGE, GymdataError, OutsideError, StoreError, counted, redacted, redacted_all
from gymdata.progress import LOG_FILES, NullProgress, Progress
from gymdata.public import Figures, wrong_argument
from gymdata.rewards import Rewards, given_rewards
from gymdata.rewards.scheduler import RewardScheduler
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import Run, read_run_json, read_table
from gymdata.store.lineage import model_parents
from gymdata.store.lock import Lock
from gymdata.store.paths import Identity, RunFacts, local_output, refuse_unwritable
from gymdata.store.run import holds_nothing, wipe
from gymdata.user_code import in_thread
from gymdata.workers.signals import ctrl_c, run_async
from gymdata.workers.tuning import rare_collections

__all__ = ["CollectPlan", "CollectSummary", "Parts", "collect"]


def collect(
    tasks: Tasks | None = None,
    *,
    reward: Rewards | None = None,
    env: Any = None,
    user: Any = None,
    agent: Any = None,
    config: CollectConfig | None = None,
    parts: Parts | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    **settings: Any,
) -> CollectSummary | CollectPlan:
    """Sample the rollouts of ``tasks`` that are pending and write them to ``output``; returns what the run amounts to.

    ``tasks``: a file or glob, a folder of ``save_to_disk``, ``hf:NAME[:SPLIT]``, a list of dicts or of questions as text, a
    data frame of pandas or Polars, or a Hugging Face ``Dataset``; columns are recognised in all of them, or named by
    ``map``. ``reward``: names and functions, one or several; a pair (function, weight) weights one. ``env``:
    ``path.py:Name``, a URL, or a class, an instance (each rollout gets a copy of it) or functions; or a dict of several by
    the name that a task's ``env`` gives. ``user``: who answers where no tool is called, ``path.py:Name``, a function of
    (messages, task) or a class. ``agent``: what calls the model in a loop of its own, as text or a function. Settings
    are those of ``CollectConfig``, as a config, keywords, or both (keywords win).
    Resumes a run that is there. With ``dry_run`` nothing is started or written: a ``CollectPlan`` says what would be done.
    Raises UsageError and DataError before anything is started, StoreError when the folder is another run's or the disk
    is full, OutsideError("engine") when the engine cannot start or dies. The first Ctrl-C starts nothing new and ends
    normally (``interrupted``); the second drops what is in flight.
    """
    config, objects = _config(config, tasks, reward, env, user, agent, settings)
    how: dict[str, Any] = {
        "limit": config.limit,
        "skip_bad_rows": config.skip_bad_rows,
        "shape": TaskShape.of(config.map, config.system, config.prompt_template),
    }
    of_file = tasks is None or isinstance(tasks, (str, Path))
    read = TaskFile(config.tasks, **how) if of_file else TaskRows(rows=task_rows(tasks), **how)
    session = Session(config, read, parts, objects, progress or NullProgress())
    return session.plan() if dry_run else session.collect(command)


class Session:
    """One call of ``collect``: what is played, by what, and in which folder."""

    def __init__(
        self, config: CollectConfig, tasks: TaskFile, parts: Parts | None, objects: Given, progress: Progress
    ) -> None:
        """Every task is read once before anything is started; then the parts are loaded, unless they are given."""
        self.began = time.monotonic()
        self.config, self.tasks, self.progress = config, tasks, progress
        digest, self.n_tasks = xxhash.xxh3_64(), 0
        for task in tasks:
            self.n_tasks += 1
            digest.update(f"{task.task_id}\0{task.content_hash}\n".encode("utf-8", "surrogatepass"))
        self.digest = digest.hexdigest()
        self.folder = local_output(config.output) if config.output else default_output(config)
        refuse_unwritable(self.folder)
        self.parts = parts or load_parts(config, objects)
        check_tasks(self.parts, tasks)
        #: run.json of the run that is resumed.
        resumes = not config.overwrite and (self.folder / "run.json").is_file()
        self.recorded: Mapping[str, Any] = read_run_json(self.folder) if resumes else {}

    def plan(self) -> CollectPlan:
        """What ``collect`` would do, without starting an engine or writing anything.

        Raises what a start would raise for an output that cannot be written or holds another run, a server that does not
        answer or serves something else, and a prompt that the chat template refuses.
        """
        config, parts = self.config, self.parts
        self._check(self._recorded_seed())
        check_servers(config)
        return CollectPlan(
            path=str(self.folder),
            tasks=self.n_tasks,
            skipped_rows=self.tasks.skipped,
            rollouts_wanted=self.n_tasks * config.num_rollouts,
            identity=identity_of(config, parts, config.seed),
            notes=[*self.tasks.notes(), *parts.notes],
            config=redacted_all(config.model_dump(mode="json")),
            prompt=first_prompt(parts, self.tasks),
        )

    def collect(self, command: Sequence[str]) -> CollectSummary:
        """Play what is pending, and seal it."""
        config = self.config
        recorded = self._recorded_seed()
        seed = secrets.randbits(32) if recorded is None else recorded
        self._check(seed)
        with contextlib.ExitStack() as stack:
            run = Run.open(
                self.folder.absolute(),  # user code may change the current folder
                identity=self._identity(seed),
                defaults=CollectConfig.model_construct().identity(),
                extent={"num_rollouts": config.num_rollouts, "tasks": self.n_tasks},
                operation={**config.operation(), "command": list(command)},
                facts={
                    "stage": "collect",
                    "command": list(command),
                    "config": config.model_dump(mode="json"),
                    **sampled_by(config.model, self.parts),
                    "tasks": {
                        "files": self.tasks.facts(), "digest": self.digest, "skipped_rows": self.tasks.skipped
                    },
                },
                run_id=config.run_id,
                overwrite=config.overwrite,
                format=config.format,
                rows_per_file=config.rows_per_file,
            )  # fmt: skip
            stack.enter_context(rare_collections())
            # Closing seals: also after an error, because rows that are there are good whatever happened to the others.
            stack.push(lambda _, error, __: close_or_remove(run, error))
            return self._collected(run, seed)

    def _check(self, seed: int | None) -> None:
        """Raise what resuming the run would raise, for other settings and for edited tasks; nothing is written."""
        config = self.config
        Run.check(
            self.folder,
            identity=self._identity(seed),
            defaults=CollectConfig.model_construct().identity(),
            run_id=config.run_id,
            overwrite=config.overwrite,
        )
        if self.recorded:
            key = self._key(str(self.recorded["run_id"]))
            existing = read_table(self.folder, ROLLOUTS, LEDGER_COLUMNS)
            tracker = AttemptTracker(key, num_rollouts=config.num_rollouts, max_attempts=1, existing=existing)
            tracker.resume_state(self.tasks, self.folder)

    def _key(self, run_id: str) -> RunKey:
        model = self.parts.model
        return RunKey(run_id, str(model["policy"]), str(model["policy_hash"]), self.config.policy_version)

    def _recorded_seed(self) -> int | None:
        """The given seed, else that of the run which is resumed; None for a fresh one."""
        resumed = (self.recorded.get("identity") or {}).get("seed") if self.config.seed is None else self.config.seed
        return resumed if isinstance(resumed, int) else None

    def _identity(self, seed: int | None) -> Identity:
        """The number format that a resumed run was sampled in is its own, set or not."""
        identity = identity_of(self.config, self.parts, seed)
        if identity["dtype"] != (self.recorded.get("engine") or {}).get("dtype"):
            return identity
        return {**identity, "dtype": (self.recorded.get("identity") or {}).get("dtype", "auto")}

    def _ledger(self, run: Run) -> AttemptTracker:
        return AttemptTracker(
            self._key(run.run_id),
            num_rollouts=self.config.num_rollouts,
            max_attempts=self.config.max_attempts,
            existing=run.existing(LEDGER_COLUMNS),
            failures=run.failures(),
        )

    def _collected(self, run: Run, seed: int) -> CollectSummary:
        repairs = (f"repaired after a crash: {repair}" for repair in run.repairs)
        for text in [*self.tasks.notes(), *self.parts.notes, *repairs]:
            self.progress.message(text)
        ledger, fresh = self._ledger(run), not run.rows and not run.resumed
        state = (
            ResumeState(self.n_tasks * self.config.num_rollouts, 0)
            if fresh
            else ledger.resume_state(self.tasks, run.folder)
        )
        done = _Done()
        if state.pending:
            try:
                done = run_async(self._play(run, ledger, state.pending, seed))
            except OutsideError as error:
                if error.fatal and run.rows:
                    rows = counted(run.rows, "rollout is", "rollouts are")
                    error.hint = f"{rows} safe; rerun the same command to resume"
                raise
            # Sealed first: scalar columns are read much faster from Parquet files than from journals.
            run.seal()
            state = self._ledger(run).resume_state(self.tasks, run.folder)
        else:
            spent = f", {state.exhausted:,} are out of attempts (see --max-attempts)" if state.exhausted else ""
            self.progress.message(f"nothing to do{spent}; engine not started")
        return self._summary(run, state, done)

    def _summary(self, run: Run, state: ResumeState, done: _Done) -> CollectSummary:
        """Of the whole run and of this call; its counts are noted in run.json."""
        rows = facts_of(run.existing(SUMMARY_COLUMNS))
        for reward in self.parts.rewards:
            if reward.function.name in rows["parts"]:
                rows["parts"][reward.function.name].needs = reward.function.needs
        left: Figures = {"pending": state.pending, "exhausted": state.exhausted, "skipped_rows": self.tasks.skipped}
        summary = CollectSummary(
            path=str(self.folder),
            run_id=run.run_id,
            tasks=self.n_tasks,
            **rows,
            **left,
            new_rollouts=done.rollouts,
            failures=done.failed,
            empty_generations=done.empty,
            seconds=round(time.monotonic() - self.began, 3),
            tokens_per_s=round(done.tokens / done.seconds, 1) if done.seconds else None,
            interrupted=done.interrupted,
            gave_up=self.config.give_up,
            behavior=behavior_of(run.folder) if done.rollouts else {},
            tokens_cached=done.cached_tokens,
            tokens_read=done.read_tokens,
            away_s=round(run.away_s, 1),
        )
        run.note(counts={**rows, "parts": {name: asdict(part) for name, part in rows["parts"].items()}, **left})
        return summary

    async def _play(self, run: Run, ledger: AttemptTracker, pending: int, seed: int) -> _Done:
        config, parts = self.config, self.parts
        serving, agents = contextlib.AsyncExitStack(), None
        with ctrl_c(self.progress) as stop:
            try:
                facts = await self._started(run)
                most = facts.get("max_model_len")
                named = [(n, name) for n, name in ((most, "max_model_len"), (config.max_context, "--max-context")) if n]
                max_context, limited_by = min(named, default=(None, None))
                if parts.agent is not None:
                    from gymdata.commands.record.attempts import AgentRuns  # loads a server

                    agents = AgentRuns(config, parts, run, seed, max_context, self.progress.message)
                    await serving.enter_async_context(agents.serving())
                limits = config.limits() | {"max_context": max_context}
                setting = EpisodeConfig(
                    parts.sampler,
                    parts.chat,
                    parts.environment,
                    self._key(run.run_id),
                    Limits(**limits, limited_by=limited_by),
                    seed,
                    float(config.temperature),
                    agents=agents,
                    sampling=config.sampling_parameters() | limits,
                )
                scheduler = RewardScheduler(parts.rewards, in_thread, config.reward_timeout)
                collector = Collector(run, setting, scheduler, ledger, pending, self.progress, run.rows)
                # An agent is a process or more.
                fitting = parts.sampler.default_concurrency
                fitting = fitting if agents is None else min(fitting, max(4, os.cpu_count() or 1))
                began = time.monotonic()
                await stop.finish(collector.collect(self.tasks, concurrency=config.concurrency or fitting, stop=stop))
                seconds = time.monotonic() - began - run.away_s
                # While the engine shuts down, which takes at least as long.
                run.seal(wait=False)
                return _Done.of(collector, parts.sampler, seconds, interrupted=stop.is_set())
            finally:
                await serving.aclose()
                if parts.environment is not None:
                    await parts.environment.close()
                await parts.sampler.close()

    async def _started(self, run: Run) -> Mapping[str, Any]:
        """Start the engine; what it says of itself is noted in run.json."""
        from gymdata.engines._vllm import VllmSampler

        sampler = self.parts.sampler
        self.progress.message(_starting(self.config, self.parts))
        # The first pyarrow array imports pandas, if it is installed: here, while the engine starts, and not at the end.
        asyncio.get_running_loop().run_in_executor(None, pa.array, [0])
        began_in = (read_run_json(run.folder).get("engine") or {}).get("dtype")
        if run.resumed and began_in and isinstance(sampler, VllmSampler):
            # Another machine may have another default, and one run has one number format.
            sampler.engine_args.setdefault("dtype", began_in)
        facts = dict(await sampler.start())
        run.note(engine=facts)
        if isinstance(sampler, (ServerSampler, Servers)):
            sampler.wait_for_server(self.config.wait_for_server, self.progress.message, run.server_away)
        for text in facts.get("notes", ()):
            self.progress.message(text)
        return facts


def default_output(config: CollectConfig) -> Path:
    """runs/<task file>-<time>."""
    named = "" if config.tasks == IN_MEMORY else config.tasks
    stem = Path(named).name.split(".")[0].replace("*", "all").replace(":", "-") or "tasks"
    return Path("runs") / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"


def close_or_remove(run: Run, error: BaseException | None) -> None:
    """Close a run; nothing is left of a new one whose settings were refused at the start."""
    run.close("closed" if error is None else f"{type(error).__name__}: {error}")
    refused = isinstance(error, GymdataError) and error.exit_code == EXIT_USAGE
    if refused and not run.resumed and holds_nothing(run.folder, []):
        with contextlib.suppress(StoreError, OSError):  # another process took it; it holds what is not ours
            lock = Lock(run.folder)
            wipe(run.folder)
            for name in LOG_FILES:
                (run.folder / name).unlink(missing_ok=True)
            lock.remove()
            run.folder.rmdir()


@dataclass(frozen=True, slots=True)
class _Done:
    """The counts of one call. ``seconds``: sampling time, without start-up and outages."""

    rollouts: int = 0
    failed: int = 0
    tokens: int = 0
    empty: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    cached_tokens: int | None = None
    read_tokens: int | None = None

    @classmethod
    def of(cls, collector: Collector, sampler: Any, seconds: float, *, interrupted: bool) -> _Done:
        """``sampler``: only the engine in this process knows what was in its prefix cache."""
        cache = getattr(sampler, "cached_tokens", None), getattr(sampler, "read_tokens", None)
        counts = collector.done, collector.failed, collector.tokens, collector.empty
        return cls(*counts, seconds, interrupted, *cache)


def _starting(config: CollectConfig, parts: Parts) -> str:
    policy = parts.model["policy"]
    if server := ", ".join(config.endpoint):
        return f"connecting to {redacted(server)} …"
    if config.replicas is not None:
        where = "Ray" if config.ray in (None, "local") else f"the Ray cluster at {config.ray}"
        return f"starting {config.replicas} replicas of vLLM with {config.model or policy} on {where} …"
    return f"starting vLLM with {config.model or policy} …"


def sampled_by(model: str | None, parts: Parts) -> RunFacts:
    """What run.json has of the policy that samples: the model, its chat template, and the run that made it."""
    return {
        "model": dict(parts.model),
        "policy": parts.model["policy"],
        "chat": dict(parts.chat.facts()),
        "parents": model_parents(model),
    }


def _config(
    config: CollectConfig | None,
    tasks: Tasks | None,
    reward: Rewards | None,
    env: Any,
    user: Any,
    agent: Any,
    settings: dict[str, Any],
) -> tuple[CollectConfig, Given]:
    """The settings, with a name in place of each object, and the objects."""
    objects = Given()
    if tasks is not None:
        of_files = isinstance(tasks, (str, Path))
        settings["tasks"] = str(tasks) if of_files else IN_MEMORY
        # Bytes and mappings are iterable but do not yield rows.
        if not of_files and (isinstance(tasks, (bytes, Mapping)) or not isinstance(task_rows(tasks), Iterable)):
            raise wrong_argument(tasks, "collect", "tasks: a file, a glob, a list of dicts or texts, or a data frame")
    if reward is not None:
        settings["reward"], objects.rewards = given_rewards(reward)
    if isinstance(env, Mapping):
        settings["env"] = {name: _text_for(environment) for name, environment in env.items()}
        objects.environments = {name: item for name, item in env.items() if not isinstance(item, str)}
    elif isinstance(env, (list, tuple)) and all(isinstance(spec, str) for spec in env):
        settings["env"] = list(env)
    elif env is not None:
        settings["env"] = _text_for(env)
        objects.environment = None if isinstance(env, str) else env
    if user is not None:
        settings["user"] = _text_for(user)
        objects.user = None if isinstance(user, str) else user
    if agent is not None:
        settings["agent"] = _text_for(agent)
        objects.agent = None if isinstance(agent, str) else agent
    return CollectConfig.called_with(collect, config, settings), objects


def _text_for(part: Any) -> str:
    """The name that represents an argument in the settings when it is an object."""
    return part if isinstance(part, str) else f"{IN_MEMORY}: {getattr(part, '__name__', type(part).__name__)}"
