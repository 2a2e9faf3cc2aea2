"""Configurations of NeMo Gym: which tasks its datasets name, and which server scores them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gymdata.errors import UsageError
from gymdata.settings import Settings

_KINDS = ("responses_api_agents", "resources_servers", "responses_api_models")


def of_nemo_gym(values: Settings, file: Path, given: Settings) -> Settings:
    """``values`` as settings of ``collect``: the dataset as ``tasks``, its repeats as ``num_rollouts``, the server as
    ``env``; any other file's as they are. ``given``: settings that beat the file's.

    Raises UsageError where several datasets could be meant, and where the server's address is not in the file.
    """
    servers = {name: part for name, part in values.items() if isinstance(part, Mapping) and {*_KINDS} & part.keys()}
    if not servers:
        return values
    datasets = [d for agent in _parts(servers, "responses_api_agents") for d in agent.get("datasets") or []]
    paths = {str(data["jsonl_fpath"]): data for data in datasets if isinstance(data, Mapping) and "jsonl_fpath" in data}
    settings: Settings = {}
    tasks = given.get("tasks")
    if tasks is None:
        if len(paths) != 1:
            several = f"{len(paths)} datasets ({', '.join(Path(p).name for p in paths)})" if paths else "no dataset"
            hint = f"gymdata collect {next(iter(paths), 'TASKS.jsonl')} --config {shlex.quote(str(file))}"
            raise UsageError(f"{file}: a configuration of NeMo Gym with {several}, expected one", hint=hint)
        ((tasks, data),) = paths.items()
        settings["tasks"] = tasks = _found(tasks, file)
        if "num_repeats" in data:
            settings["num_rollouts"] = data["num_repeats"]
    if not (given.get("env") or given.get("agent")):
        names = [name for name, part in servers.items() if "resources_servers" in part]
        addresses = [
            f"http://{server['host']}:{server['port']}"
            for server in _parts(servers, "resources_servers")
            if server.get("host") and server.get("port")
        ]
        if len(addresses) != 1:
            named = f"server{'s' * (len(names) > 1)} {', '.join(names) or 'elsewhere'}"
            hint = f"start it, then: gymdata collect {shlex.quote(str(tasks))} --config {shlex.quote(str(file))}"
            raise UsageError(
                f"{file}: a configuration of NeMo Gym, which does not say where its {named} listens",
                hint=f"{hint} --env http://HOST:PORT",
            )
        settings["env"] = addresses
    return settings


def _parts(servers: Mapping[str, Any], kind: str) -> Iterator[Mapping[str, Any]]:
    """The agents or servers of one kind."""
    for server in servers.values():
        parts = server.get(kind)
        yield from (
            part for part in (parts.values() if isinstance(parts, Mapping) else ()) if isinstance(part, Mapping)
        )


def _found(path: str, file: Path) -> str:
    """A path of NeMo Gym's, which is relative to its root: in the working directory, or else in the folder above ``file``
    that has it."""
    above = (folder / path for folder in file.absolute().parents)
    return path if Path(path).exists() else str(next((place for place in above if place.exists()), path))
