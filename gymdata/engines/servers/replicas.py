"""How many replicas of an engine Ray starts, and what each takes of a machine.

Invariants: a replica is on one node, so that its tensor and pipeline parallel parts never communicate over the network;
what can never be placed is refused with numbers before any engine is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import pydantic

from gymdata.errors import UsageError
from gymdata.settings import Config, Settings

#: Ray on this machine, which is started where none runs in this process.
LOCAL = "local"
_ADDRESS = re.compile(r"auto|local|[\w.-]+:\d{1,5}|\[[\da-fA-F:]+\]:\d{1,5}")
_FLAG = "--set replica"


def is_address(text: str) -> bool:
    """Whether ``text`` may name a Ray cluster, and not a file or an option."""
    return _ADDRESS.fullmatch(text) is not None or text.startswith("ray://")


def checked_address(text: str) -> str:
    """``text``, unless it names no Ray cluster that this process can join. Raises UsageError."""
    if text.startswith("ray://"):
        raise UsageError(
            f"--ray: got {text}, the address of Ray's client server, through which answers cannot be awaited",
            hint="run the command on a node of the cluster with --ray auto (ray job submit does), or give HOST:6379",
        )
    if not is_address(text):
        raise UsageError.bad_value("--ray", text, "auto, local or HOST:PORT of a Ray cluster")
    return text


class Node(NamedTuple):
    """A node of a Ray cluster, with all that it has, in use or not."""

    name: str
    resources: Mapping[str, float]


Amount = Annotated[float, pydantic.Field(ge=0, lt=1e9)]


class _Resources(Config):
    num_cpus: Amount = 1.0
    num_gpus: Amount | None = None
    resources: dict[str, Amount] = pydantic.Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of one replica on its node. ``own``: without ``num_gpus``, it takes ``parts`` where the cluster has
    GPUs; ``parts``: processes that hold a part of the model (tensor × pipeline parallel)."""

    own: _Resources
    parts: int

    @classmethod
    def of(cls, replica: Settings, engine: Settings) -> Needs:
        """From ``--set replica.KEY=VALUE`` and the arguments of the engine. Raises UsageError for what does not fit."""
        names = {key: f"{_FLAG}.{key}" for key in replica}
        own = _Resources.of({key: value for key, value in replica.items() if value is not None}, _FLAG, names)
        if engine.get("distributed_executor_backend") == "ray":
            raise UsageError(
                "--set engine.distributed_executor_backend=ray: a replica's engine starts its own processes on one node",
                hint="leave it out; a model that needs several nodes is served by vLLM, and given with --endpoint",
            )
        if engine.get("data_parallel_size") not in (None, 1):
            raise UsageError(
                "--set engine.data_parallel_size: replicas are independent engines",
                hint="leave it out, and give their number with --replicas",
            )
        sizes = [engine.get(key) or 1 for key in ("tensor_parallel_size", "pipeline_parallel_size")]
        parts = sizes[0] * sizes[1] if all(type(size) is int and size > 0 for size in sizes) else 1
        if parts > 1 and own.num_gpus is not None and 0 < own.num_gpus < parts:
            raise UsageError(
                f"{_FLAG}.num_gpus: got {own.num_gpus:g}, and an engine of {parts} parallel parts needs {parts} GPUs",
                hint="leave it out: it is taken from the engine's arguments",
            )
        return cls(own, parts)

    def bundle(self, nodes: Sequence[Node]) -> dict[str, float]:
        """Ray's names and amounts, as this cluster needs them. Raises UsageError when there are none."""
        own, gpus = self.own, self.own.num_gpus
        if gpus is None:
            gpus = float(self.parts) if any(node.resources.get("GPU") for node in nodes) else 0.0
        amounts = {"CPU": own.num_cpus, "GPU": gpus, **own.resources}
        taken = {name: amount for name, amount in amounts.items() if amount}
        if not taken:
            raise UsageError(
                f"{_FLAG}: a replica that takes nothing has no place",
                hint=f"raise {_FLAG}.num_cpus or .num_gpus: a part such as 0.1 is enough",
            )
        return taken


def check_room(count: int, bundle: Mapping[str, float], nodes: Sequence[Node], *, growing: str = "add nodes") -> str:
    """A description of what the replicas take and where they have room. Raises UsageError when they can never be
    placed."""
    # Amounts such as 0.1 are counted in ten-thousandths, as Ray does; a node without a resource has 0 of it.
    shares = {name: round(amount * 10_000) for name, amount in bundle.items()}
    room = [min(round(node.resources.get(n, 0.0) * 10_000) // share for n, share in shares.items()) for node in nodes]
    each = spelt(bundle)
    if sum(room) >= count:
        return f"{count} × {each}, each on one node: room for {sum(room)} on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    listed = "; ".join(
        f"{node.name} ({spelt(node.resources)}): {n}" for node, n in list(zip(nodes, room, strict=True))[:8]
    )
    raise UsageError(
        f"{count} replicas of {each} can never be placed: {'1 node has' if len(nodes) == 1 else f'{len(nodes)} nodes have'} "
        f"room for {sum(room)}, each on one node: {listed}",
        hint=f"lower --replicas, --set {_FLAG.split()[1]}.num_cpus, .num_gpus or .resources, or {growing}",
    )


def spelt(resources: Mapping[str, float]) -> str:
    """Resources for a person: what Ray adds for itself is left out."""
    plain = {k: v for k, v in resources.items() if ":" not in k and k not in ("memory", "object_store_memory")}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(plain.items())) or "no resources"
