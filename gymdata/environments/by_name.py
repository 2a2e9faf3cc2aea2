"""Several environments in one run: a task's ``env`` names the one that it is played in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from gymdata.environments.port import Environment, Episode
from gymdata.errors import DataError
from gymdata.rollouts.messages import Task
from gymdata.store.paths import Identity


class ByName:
    """An ``Environment`` that hands each task to the one it names; with only one, a task need not name it."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self.environments = dict(environments)
        named = {name: dict(environment.identity) for name, environment in sorted(self.environments.items())}
        self.identity: Identity = {"name": "by_name", "environments": named}

    def check(self, task: Task) -> Environment:
        """The task's environment. Raises DataError naming the task for an unknown one."""
        name = task.row.get("env")
        if name is None and len(self.environments) == 1:
            return next(iter(self.environments.values()))
        environment = self.environments.get(name) if isinstance(name, str) else None
        if environment is None:
            value = "nothing" if name is None else repr(name)[:80]
            raise DataError(
                f"task {task.task_id}: env: got {value}, expected one of {', '.join(self.environments)}",
                hint="give the environment with --env NAME=SPEC, or correct the task",
            )
        return environment

    async def start(self, task: Task, rollout_index: int) -> Episode:
        """Raises OutsideError when the environment cannot be set up."""
        return await self.check(task).start(task, rollout_index)

    async def close(self) -> None:
        """Close all of them, also when one fails to close."""
        async with contextlib.AsyncExitStack() as stack:
            for environment in self.environments.values():
                stack.push_async_callback(environment.close)
