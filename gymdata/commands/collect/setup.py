"""The parts of a collect run: the engine, tokenizer, environment and rewards that a configuration names.

Invariants: nothing is started here, nothing is sampled for a rollout and nothing is written; settings that cannot work
together are found before anything is loaded for long, and what cannot be known beforehand is not refused; a served model's
tokenizer is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata.commands.check import run as checking
from gymdata.commands.collect.loop import VERDICT
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.collect.task_shapes import answer_hint
from gymdata.commands.record.agent import Agent, load_agent
from gymdata.engines.port import Chat, Sampler
from gymdata.engines.servers.many import Servers
from gymdata.engines.servers.vllm_server import ServerSampler, not_served, served_models, server_address
from gymdata.environments import (
    ByName,
    WithUser,
    given_environment,
    given_user,
    load_environment,
    load_user,
    server_url,
)
from gymdata.environments.port import Environment
from gymdata.environments.resource_server import ResourceServer
from gymdata.environments.user import User
from gymdata.errors import OutsideError, UsageError, abridged, require
from gymdata.rewards import load_rewards
from gymdata.rewards.named import NamedReward
from gymdata.rewards.port import RewardFunction
from gymdata.rewards.remote import RemoteReward
from gymdata.rewards.scheduler import Weighted
from gymdata.rewards.user import UserReward
from gymdata.rollouts.messages import Task
from gymdata.store.paths import Facts, Identity

if TYPE_CHECKING:
    from gymdata.chat.template import TransformersChat


def check_servers(config: CollectConfig) -> None:
    """Ask every server that samples for its models. Raises OutsideError for one that does not answer, UsageError for one
    that has another model."""
    for url in config.endpoint:
        models = served_models(url)
        if config.model is not None and not any(config.model in (model.name, model.root) for model in models):
            raise not_served(str(server_address(url)), config.model, [model.name for model in models])


def first_prompt(parts: Parts, tasks: Iterable[Task]) -> str | None:
    """The text of the first task's prompt as the policy would read it, before an environment adds to it; None without a
    task. Raises DataError for one that the chat template refuses."""
    task = next(iter(tasks), None)
    if task is None:
        return None
    return parts.chat.decode(parts.chat.render(task.messages, task.tools))


def _check_columns(parts: Parts, tasks: Iterable[Task]) -> None:
    for function in (reward.function for reward in parts.rewards):
        if isinstance(function, NamedReward):
            if any(function.applies(task.row) for task in tasks):
                continue
        elif not isinstance(function, UserReward) or any(not function.lacking(task.row) for task in tasks):
            continue
        first = next(iter(tasks), None)
        if first is None:
            continue
        columns = f"the first has {abridged(first.row)}"
        if isinstance(function, NamedReward):
            hint = answer_hint(first.row) if "`answer`" in str(function.needs) and "answer" not in first.row else None
            text = f"reward {function.name} applies to no task: it needs {function.needs}; {columns}"
            parts.notes.append("; ".join(filter(None, [text, hint])))
        else:
            lacking = ", ".join(map(repr, function.lacking(first.row)))
            raise UsageError(
                f"reward {function.name}: takes {lacking}, which no task has a column for; {columns}",
                hint="name the parameters as the columns, or give them a default; see `gymdata docs your-reward`",
            )


def check_tasks(parts: Parts, tasks: Iterable[Task]) -> None:
    """Every task against what plays and scores it. Raises DataError naming the first task that names no environment,
    and UsageError for a reward function that takes a column that none has. A shipped reward that applies to none of them is
    a note."""
    _check_columns(parts, tasks)
    if parts.agent is not None:
        for task in tasks:
            parts.agent.check(task)
    if isinstance(parts.environment, ByName):
        for task in tasks:
            parts.environment.check(task)


@dataclass(slots=True)
class Parts:
    """The parts of a run, once loaded. Tests pass their own Sampler or Chat."""

    sampler: Sampler
    chat: Chat
    environment: Environment | None
    rewards: list[Weighted]
    model: Facts
    notes: list[str] = field(default_factory=list)
    #: Calls the model in the environment's place.
    agent: Agent | None = None


@dataclass(slots=True)
class Given:
    """Arguments that were given as objects instead of names: reward functions by their name in the settings, an
    environment, or several by the name that tasks give, a user, and an agent."""

    rewards: Mapping[str, tuple[RewardFunction, float]] = field(default_factory=dict)
    environment: Any = None
    environments: Mapping[str, Any] = field(default_factory=dict)
    user: Any = None
    agent: Any = None


def load_parts(config: CollectConfig, objects: Given | None = None) -> Parts:
    """The engine (not started), tokenizer, environment and rewards that the configuration names."""
    objects = objects or Given()
    from gymdata.chat import template as chat
    from gymdata.models import model_identity

    model: Facts

    # A misspelt reward is reported before the tokenizer is loaded, whose text a reward server gets.
    def decode(ids: Sequence[int]) -> str:
        return tokenizer_chat.decode(ids)

    loaded = load_rewards(config.reward, objects.rewards, partial(RemoteReward, decode=decode))
    rewards = [Weighted(function, weight) for function, weight in loaded]
    remote = any(map(server_url, config.environments().values()))
    if remote and any(reward.function.name == VERDICT for reward in rewards):
        raise UsageError(
            f"a reward function is named {VERDICT!r}, which is the name of the server's own reward",
            hint="give the function another name",
        )
    config.refuse_conflicts()
    agent, environment = player_of(config, objects)
    announced: list[str] = []
    if not config.endpoint:
        if config.model is None:
            raise UsageError("no model given", hint="name one with -m/--model, or a server with --endpoint")
        if config.replicas is None:
            require("engine", "vllm")
        else:  # the engine is on the replicas' machines
            require("ray", "ray")
        model = model_identity.policy_facts(config.model)
        tokenizer = config.tokenizer or model_identity.tokenizer_folder(config.model)
    else:
        name, tokenizer, announced = _served(config.endpoint, config)
        model = model_identity.served_facts(name)
    template = str(config.chat_template) if config.chat_template is not None else None
    tokenizer_chat = chat.TransformersChat.load(
        tokenizer, chat_template=template, tool_parser=config.tool_parser, keep_reasoning=False
    )
    tokenizer_chat, notes = (
        checking.patched_template(tokenizer_chat, config.tool_parser) if config.keep_reasoning else (tokenizer_chat, [])
    )
    return Parts(
        _sampler(config, tokenizer_chat, model["policy_hash"]),
        tokenizer_chat,
        environment,
        rewards,
        model,
        [*announced, *notes],
        agent=agent,
    )


def _served(servers: Sequence[str], config: CollectConfig) -> tuple[str, str, list[str]]:
    """The model's name at the first server that answers, and where its tokenizer is: what was given, else what that server
    says of itself, which is then announced."""
    tokenizer = config.tokenizer or (config.model if config.model and Path(config.model).is_dir() else None)
    if config.model is not None and tokenizer is not None:
        return config.model, tokenizer, []
    server, listed = servers[0], []
    for url in servers:
        try:
            server, listed = url, served_models(url)
            break
        except OutsideError as error:
            # A server that answers need not list its models; without an answer the tokenizer is not known.
            if url == servers[-1] and (config.model is None or error.status is None):
                raise
    names, shown = [model.name for model in listed], str(server_address(server))
    if config.model is None and len(listed) != 1:
        offer = f"serves {len(names)} models: {', '.join(names)}" if names else "lists no models"
        raise UsageError(f"{shown} {offer}", hint="choose one with -m/--model")
    model = listed[0] if config.model is None else next((m for m in listed if config.model in (m.name, m.root)), None)
    if model is None and listed:
        raise not_served(shown, str(config.model), names)
    name = model.name if model is not None else str(config.model)
    if config.tokenizer is not None:
        return name, config.tokenizer, [f"{shown} serves {name}"]
    folders = [
        folder for folder in (model.root if model is not None else None, name) if folder and Path(folder).is_dir()
    ]
    if not folders:
        raise UsageError(
            f"{name!r} is served by {shown} but is no local folder, so its tokenizer is not known",
            hint="give a folder or hub name with --tokenizer",
        )
    return name, folders[0], [f"{shown} serves {name}; its tokenizer: {folders[0]}"]


def player_of(config: CollectConfig, objects: Given) -> tuple[Agent | None, Environment | None]:
    """The agent, or the environment of the tasks where there is none. Raises UsageError."""
    if config.agent is None:
        return None, environment_of(config, objects)
    return load_agent(objects.agent or config.agent, config.agent_files, config.result_json_path), None


def environment_of(config: CollectConfig, objects: Given) -> Environment:
    """The environment of the tasks, with the user, if there is one. Raises UsageError."""
    specs, user = config.environments(), _user(config, objects)
    server = partial(
        ResourceServer,
        model=config.model or "policy",
        tool_timeout_s=config.tool_timeout,
        verify_timeout_s=config.reward_timeout,
        max_retries=config.retries,
    )
    arguments: Mapping[Any, Any] = config.env_args if set(specs) - {None} else {None: config.env_args}
    if unknown := set(arguments) - {*specs, None}:
        raise UsageError.unknown_choice("--set env_args: the environment", str(min(unknown)), map(str, specs))
    environments: dict[str | None, Environment] = {}
    for name, spec in specs.items() or [(None, None)]:
        instance = objects.environment if name is None else objects.environments.get(name)
        if instance is not None and arguments.get(name):
            raise UsageError(f"--set env_args: {spec} was given as an object", hint="give it with its arguments")
        environment = (
            given_environment(instance, tool_timeout_s=config.tool_timeout)
            if instance is not None
            else load_environment(
                spec, tool_timeout_s=config.tool_timeout, server=server, arguments=arguments.get(name)
            )
        )
        if user is not None and getattr(environment, "responds", False):
            raise UsageError(
                f"{spec} has a respond of its own, and --user was given",
                hint="one user answers: leave the other out",
            )
        environments[name] = environment if user is None else WithUser(environment, user)
    alone = environments.get(None)
    return alone if alone is not None else ByName({str(name): part for name, part in environments.items()})


def _user(config: CollectConfig, objects: Given) -> User | None:
    if objects.user is not None:
        return given_user(objects.user, timeout_s=config.tool_timeout)
    if config.user is not None:
        return load_user(config.user, timeout_s=config.tool_timeout)
    return None


def _sampler(config: CollectConfig, tokenizer_chat: TransformersChat, policy_hash: str) -> Sampler:
    """The engine, not started. The template's own end of turn must end a turn even where the checkpoint forgets it."""
    sampling = config.sampling_parameters()
    sampling["stop_token_ids"] = (*tokenizer_chat.stop_token_ids, *sampling.get("stop_token_ids", ()))
    if not config.endpoint:
        assert config.model is not None
        if config.replicas is not None:
            from gymdata.engines.servers._ray import replicated

            return replicated(
                config.replicas,
                config.ray,
                config.replica,
                config.model,
                config.engine,
                policy_hash=policy_hash,
                sampling=sampling,
                seed=config.seed,
            )
        from gymdata.engines._vllm import VllmSampler

        return VllmSampler(config.model, sampling=sampling, engine_args=config.engine, seed=config.seed)
    make = partial(
        ServerSampler,
        model=config.model,
        sampling=sampling,
        request_timeout_s=config.request_timeout,
        allow_raw_logprobs=config.allow_raw_logprobs,
        vocab_size=tokenizer_chat.most_ids,
        max_retries=config.retries,
        alone=len(config.endpoint) < 2,
    )
    samplers = [make(url) for url in config.endpoint]
    return samplers[0] if len(samplers) == 1 else Servers(samplers)


def identity_of(config: CollectConfig, parts: Parts, seed: int | None) -> Identity:
    """The identity of a run. ``chat.facts()`` and ``environment.identity`` bring their hashes."""
    chat = dict(parts.chat.facts())
    environment = parts.agent or parts.environment
    assert environment is not None
    return {
        **config.identity(),
        "policy_hash": parts.model["policy_hash"],
        "tokenizer_hash": chat.get("tokenizer_hash"),
        "chat_template_hash": chat.get("chat_template_hash"),
        "tool_parser": chat.get("tool_parser"),
        "end_of_turn_ids": list(parts.chat.end_of_turn_ids),
        "seed": seed,
        "environment": dict(environment.identity),
        "rewards": [{"name": r.function.name, "source": r.function.source, "weight": r.weight} for r in parts.rewards],
    }
