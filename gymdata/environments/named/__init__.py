"""Environments of other packages by name: ``--env NAME:WHICH``, such as ``reasoning_gym:chain_sum``.

One file each here, and those that other packages add under the entry points ``gymdata.environments``: a class decorated
with ``@ENVIRONMENTS.register(NAME)``. Tasks and scores are those of the package; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

from gymdata.environments.port import Episode
from gymdata.errors import UsageError, needs
from gymdata.registry import Registry
from gymdata.rollouts.messages import Task

#: ``--set env_args`` that are not the package's: the seed of the first task, and how many tasks there are.
SEED, SIZE = "seed", "size"


class NamedEnvironment:
    """What another package asks and how it scores, as an ``Environment`` with tasks of its own."""

    #: The module of the package, and the extra that brings it.
    module: ClassVar[str]
    extra: ClassVar[str]

    def __init__(self, which: str, arguments: Mapping[str, Any], timeout_s: float) -> None:
        """``which``: one of its task families or games; ``arguments``: its settings (``--set env_args.KEY=VALUE``).
        Raises UsageError for those that it does not have, and where the package or one that it imports is missing."""
        with needs(self.extra):
            import_module(self.module)
        self.which, self.timeout_s = which, timeout_s
        self.arguments: Mapping[str, Any] = {SEED: 0, **arguments}
        spec = f"{self.module}:{which}"
        for key, expected in ((SEED, "an integer"), (SIZE, "an integer above 0")):
            value = self.arguments.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int) or (key == SIZE and value < 1):
                raise UsageError.bad_value(f"--set env_args.{key} of {spec}", value, expected)
        self.identity: Mapping[str, Any] = {
            "name": "named",
            "spec": spec,
            "version": version(self.module),
            "arguments": dict(self.arguments),
        }

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Its tasks as rows, the same ones each time. A row has what ``start`` needs to find the task again."""
        raise NotImplementedError

    async def start(self, task: Task, rollout_index: int) -> Episode:
        """Raises OutsideError("environment", …)."""
        raise NotImplementedError

    async def close(self) -> None: ...


ENVIRONMENTS: Registry[type[NamedEnvironment]] = Registry(
    "environment", "gymdata.environments.named", "gymdata.environments"
)


def is_named(spec: object) -> bool:
    """Whether a spec is ``NAME:WHICH``. Raises UsageError for a name that is spelt with a hyphen, as its extra is."""
    name, colon, which = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    names, spelt = ENVIRONMENTS.names(), name.replace("-", "_")
    if colon and spelt in names and name not in names:
        raise UsageError.bad_value("--env", spec, "an environment", hint=f"did you mean '{spelt}:{which}'?")
    return bool(colon) and name in names


def named_environment(
    spec: str | None, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0
) -> NamedEnvironment | None:
    """The environment of ``NAME:WHICH``; None for a spec of another kind. Raises UsageError."""
    if spec is None or not is_named(spec):
        return None
    name, _, which = spec.partition(":")
    if not which:
        raise UsageError.bad_value("--env", spec, f"{name}:NAME, such as {ENVIRONMENTS[name].facts['example']}")
    return ENVIRONMENTS[name].object(which, arguments or {}, timeout_s)
