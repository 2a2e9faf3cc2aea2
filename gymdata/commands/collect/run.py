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
from gymdata.public import wrong_argument
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
    began = time.monotonic()
    how: dict[str, Any] = {
        "limit": config.limit,
        "skip_bad_rows": config.skip_bad_rows,
        "shape": TaskShape.of(config.map, config.system, config.prompt_template),
    }
    of_file = tasks is None or isinstance(tasks, (str, Path))
    read = TaskFile(config.tasks, **how) if of_file else TaskRows(rows=task_rows(tasks), **how)
    # Every task is read once before anything is started.
    digest, count = xxhash.xxh3_64(), 0
    for task in read:
        count += 1
        digest.update(f"{task.task_id}\0{task.content_hash}\n".encode("utf-8", "surrogatepass"))
    folder = local_output(config.output) if config.output else default_output(config)
    refuse_unwritable(folder)
    parts = parts or load_parts(config, objects)
    check_tasks(parts, read)
    if dry_run:
        return _plan(config, parts, read, count, folder)
    resumed = _seed(config, folder)
    seed = secrets.randbits(32) if resumed is None else resumed
    _check(config, parts, read, seed, folder)
    with contextlib.ExitStack() as stack:
        run = Run.open(
            folder.absolute(),  # user code may change the current folder
            identity=_identity(config, parts, seed, folder),
            defaults=CollectConfig.model_construct().identity(),
            extent={"num_rollouts": config.num_rollouts, "tasks": count},
            operation={**config.operation(), "command": list(command)},
            facts={
                "stage": "collect",
                "command": list(command),
                "config": config.model_dump(mode="json"),
                **sampled_by(config.model, parts),
                "tasks": {"files": read.facts(), "digest": digest.hexdigest(), "skipped_rows": read.skipped},
            },
            run_id=config.run_id,
            overwrite=config.overwrite,
            format=config.format,
            rows_per_file=config.rows_per_file,
        )
        stack.enter_context(rare_collections())
        # Closing seals: also after an error, because rows that are there are good whatever happened to the others.
        stack.push(lambda _, error, __: close_or_remove(run, error))
        return _collect(run, folder, config, parts, read, seed, progress or NullProgress(), began, count, read.notes())


def _plan(config: CollectConfig, parts: Parts, read: TaskFile, count: int, folder: Path) -> CollectPlan:
    """What ``collect`` would do, without starting an engine or writing anything.

    Raises what a start would raise for an output that cannot be written or holds another run, a server that does not answer
    or serves something else, and a prompt that the chat template refuses.
    """
    _check(config, parts, read, _seed(config, folder), folder)
    check_servers(config)
    return CollectPlan(
        path=str(folder),
        tasks=count,
        skipped_rows=read.skipped,
        rollouts_wanted=count * config.num_rollouts,
        identity=identity_of(config, parts, config.seed),
        notes=[*read.notes(), *parts.notes],
        config=redacted_all(config.model_dump(mode="json")),
        prompt=first_prompt(parts, read),
    )


def _check(config: CollectConfig, parts: Parts, tasks: TaskFile, seed: int | None, folder: Path) -> None:
    """Raise what resuming the run in ``folder`` would raise, for other settings and for edited tasks; nothing is written."""
    Run.check(
        folder,
        identity=_identity(config, parts, seed, folder),
        defaults=CollectConfig.model_construct().identity(),
        run_id=config.run_id,
        overwrite=config.overwrite,
    )
    if config.overwrite or not (folder / "run.json").is_file():
        return
    key = _key(str(read_run_json(folder)["run_id"]), config, parts)
    existing = read_table(folder, ROLLOUTS, LEDGER_COLUMNS)
    AttemptTracker(key, num_rollouts=config.num_rollouts, max_attempts=1, existing=existing).resume_state(tasks, folder)


def _key(run_id: str, config: CollectConfig, parts: Parts) -> RunKey:
    return RunKey(run_id, str(parts.model["policy"]), str(parts.model["policy_hash"]), config.policy_version)


def default_output(config: CollectConfig) -> Path:
    """runs/<task file>-<time>."""
    named = "" if config.tasks == IN_MEMORY else config.tasks
    stem = Path(named).name.split(".")[0].replace("*", "all").replace(":", "-") or "tasks"
    return Path("runs") / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"


def _collect(
    run: Run,
    shown: Path,
    config: CollectConfig,
    parts: Parts,
    tasks: TaskFile,
    seed: int,
    progress: Progress,
    began: float,
    count: int,
    notes: Sequence[str],
) -> CollectSummary:
    for text in [*notes, *parts.notes, *(f"repaired after a crash: {repair}" for repair in run.repairs)]:
        progress.message(text)
    key = _key(run.run_id, config, parts)
    fresh = not run.rows
    ledger = _ledger(run, key, config)
    resume_state = (
        ResumeState(count * config.num_rollouts, 0)
        if fresh and not run.resumed
        else ledger.resume_state(tasks, run.folder)
    )
    done = _Done()
    if resume_state.pending:
        try:
            done = run_async(_play(run, config, parts, tasks, ledger, seed, resume_state, key, progress))
        except OutsideError as error:
            if error.fatal and run.rows:
                error.hint = f"{counted(run.rows, 'rollout is', 'rollouts are')} safe; rerun the same command to resume"
            raise
        # Sealed first: scalar columns are read much faster from Parquet files than from journals.
        run.seal()
        resume_state = _ledger(run, key, config).resume_state(tasks, run.folder)
    else:
        spent = (
            f", {resume_state.exhausted:,} are out of attempts (see --max-attempts)" if resume_state.exhausted else ""
        )
        progress.message(f"nothing to do{spent}; engine not started")
    rows = facts_of(run.existing(SUMMARY_COLUMNS))
    for reward in parts.rewards:
        if reward.function.name in rows["parts"]:
            rows["parts"][reward.function.name].needs = reward.function.needs
    summary = CollectSummary(
        path=str(shown),
        run_id=run.run_id,
        tasks=count,
        **rows,
        new_rollouts=done.rollouts,
        failures=done.failed,
        empty_generations=done.empty,
        pending=resume_state.pending,
        exhausted=resume_state.exhausted,
        skipped_rows=tasks.skipped,
        seconds=round(time.monotonic() - began, 3),
        tokens_per_s=round(done.tokens / done.seconds, 1) if done.seconds else None,
        interrupted=done.interrupted,
        gave_up=config.give_up,
        behavior=behavior_of(run.folder) if done.rollouts else {},
        tokens_cached=done.cached_tokens,
        tokens_read=done.read_tokens,
        away_s=round(run.away_s, 1),
    )
    sampled_counts = {**rows, "parts": {name: asdict(part) for name, part in rows["parts"].items()}}
    left = {"pending": resume_state.pending, "exhausted": resume_state.exhausted, "skipped_rows": tasks.skipped}
    run.note(counts={**sampled_counts, **left})
    return summary


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


@dataclass(slots=True)
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


async def _play(
    run: Run,
    config: CollectConfig,
    parts: Parts,
    tasks: TaskFile,
    ledger: AttemptTracker,
    seed: int,
    resume_state: ResumeState,
    key: RunKey,
    progress: Progress,
) -> _Done:
    serving, agents = contextlib.AsyncExitStack(), None
    with ctrl_c(progress) as stop:
        try:
            progress.message(_starting(config, parts))
            # The first pyarrow array imports pandas, if it is installed: here, while the engine starts, and not at the
            # end.
            asyncio.get_running_loop().run_in_executor(None, pa.array, [0])
            from gymdata.engines._vllm import VllmSampler

            began_in = (read_run_json(run.folder).get("engine") or {}).get("dtype")
            if run.resumed and began_in and isinstance(parts.sampler, VllmSampler):
                # Another machine may have another default, and one run has one number format.
                parts.sampler.engine_args.setdefault("dtype", began_in)
            facts = dict(await parts.sampler.start())
            run.note(engine=facts)
            if isinstance(parts.sampler, (ServerSampler, Servers)):
                parts.sampler.wait_for_server(config.wait_for_server, progress.message, run.server_away)
            most = facts.get("max_model_len")
            named = [(n, name) for n, name in ((most, "max_model_len"), (config.max_context, "--max-context")) if n]
            tightest = min(named, default=(None, None))
            limits = config.limits() | {"max_context": tightest[0]}
            for text in facts.get("notes", ()):
                progress.message(text)
            if parts.agent is not None:
                from gymdata.commands.record.attempts import AgentRuns  # loads a server

                say = progress.message
                agents = AgentRuns(config, parts, run, seed, tightest[0], say)
                await serving.enter_async_context(agents.serving())
            # An agent is a process or more.
            most_agents = max(4, os.cpu_count() or 1)
            concurrency = parts.sampler.default_concurrency
            concurrency = config.concurrency or (concurrency if agents is None else min(concurrency, most_agents))

            setting = EpisodeConfig(
                parts.sampler,
                parts.chat,
                parts.environment,
                key,
                Limits(**limits, limited_by=tightest[1]),
                seed,
                float(config.temperature),
                agents=agents,
                sampling=config.sampling_parameters() | limits,
            )
            scheduler = RewardScheduler(parts.rewards, in_thread, config.reward_timeout)
            collector = Collector(run, setting, scheduler, ledger, resume_state.pending, progress, run.rows)
            began = time.monotonic()
            await stop.finish(collector.collect(tasks, concurrency=concurrency, stop=stop))
            wall = time.monotonic() - began - run.away_s
            # While the engine shuts down, which takes at least as long.
            run.seal(wait=False)
            return _Done(
                collector.done,
                collector.failed,
                collector.tokens,
                collector.empty,
                wall,
                stop.is_set(),
                parts.sampler.cached_tokens if isinstance(parts.sampler, VllmSampler) else None,
                parts.sampler.read_tokens if isinstance(parts.sampler, VllmSampler) else None,
            )
        finally:
            await serving.aclose()
            if parts.environment is not None:
                await parts.environment.close()
            await parts.sampler.close()


def _starting(config: CollectConfig, parts: Parts) -> str:
    policy = parts.model["policy"]
    if server := ", ".join(config.endpoint):
        return f"connecting to {redacted(server)} …"
    if config.replicas is not None:
        where = "Ray" if config.ray in (None, "local") else f"the Ray cluster at {config.ray}"
        return f"starting {config.replicas} replicas of vLLM with {config.model or policy} on {where} …"
    return f"starting vLLM with {config.model or policy} …"


def _ledger(run: Run, key: RunKey, config: CollectConfig) -> AttemptTracker:
    return AttemptTracker(
        key,
        num_rollouts=config.num_rollouts,
        max_attempts=config.max_attempts,
        existing=run.existing(LEDGER_COLUMNS),
        failures=run.failures(),
    )


def _seed(config: CollectConfig, folder: Path) -> int | None:
    """The given seed, else that of the run which is resumed; None for a fresh one."""
    if config.seed is not None or config.overwrite or not (folder / "run.json").is_file():
        return config.seed
    resumed = read_run_json(folder).get("identity", {}).get("seed")
    return resumed if isinstance(resumed, int) else None


def _identity(config: CollectConfig, parts: Parts, seed: int | None, folder: Path) -> Identity:
    """The identity of the run in ``folder``. The number format that a resumed run was sampled in is its own, set or not."""
    identity = identity_of(config, parts, seed)
    resumed = {} if config.overwrite or not (folder / "run.json").is_file() else read_run_json(folder)
    if identity["dtype"] != (resumed.get("engine") or {}).get("dtype"):
        return identity
    return {**identity, "dtype": (resumed.get("identity") or {}).get("dtype", "auto")}


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
