"""How many replicas of an engine Ray starts, and what each takes of a machine.

Invariants: a replica is on one node, so that its tensor and pipeline parallel parts never communicate over the network;
what can never be placed is refused with numbers before any engine is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gymdata.errors import UsageError

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


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of one replica on its node. ``gpus``: None for ``parts`` where the cluster has GPUs, else none;
    ``parts``: processes that hold a part of the model (tensor × pipeline parallel)."""

    cpus: float = 1.0
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    parts: int = 1

    @classmethod
    def of(cls, given: Mapping[str, Any], engine: Mapping[str, Any]) -> Needs:
        """From ``--set replica.KEY=VALUE`` and the arguments of the engine. Raises UsageError for what does not fit."""
        known = {"num_cpus": "cpus", "num_gpus": "gpus", "resources": "resources"}
        for key in given:
            if key not in known:
                raise UsageError.unknown_key(key, known, _FLAG)
        for key in ("num_cpus", "num_gpus"):
            if key in given and given[key] is not None and not _amount(given[key]):
                raise UsageError.bad_value(f"{_FLAG}.{key}", given[key], "a number of at least 0")
        own = given.get("resources") or {}
        if not isinstance(own, Mapping) or not all(_amount(one) for one in own.values()):
            raise UsageError.bad_value(
                f"{_FLAG}.resources", own, "a number for each of Ray's own resources, as {name: 1}"
            )
        parts = _parts(engine)
        values = {known[key]: value for key, value in given.items() if value is not None}
        needs = cls(**{**values, "parts": parts})
        if needs.gpus is not None and 0 < needs.gpus < parts and parts > 1:
            raise UsageError(
                f"{_FLAG}.num_gpus: got {needs.gpus:g}, and an engine of {parts} parallel parts needs {parts} GPUs",
                hint="leave it out: it is taken from the engine's arguments",
            )
        return needs

    def bundle(self, nodes: Sequence[Node]) -> dict[str, float]:
        """Ray's names and amounts, as this cluster needs them. Raises UsageError when there are none."""
        gpus = self.gpus
        if gpus is None:
            gpus = float(self.parts) if any(node.resources.get("GPU") for node in nodes) else 0.0
        wanted = {"CPU": float(self.cpus), "GPU": float(gpus), **{k: float(v) for k, v in self.resources.items()}}
        taken = {name: amount for name, amount in wanted.items() if amount}
        if not taken:
            raise UsageError(f"{_FLAG}: a replica that takes nothing has no place",
                             hint=f"raise {_FLAG}.num_cpus or .num_gpus: a part such as 0.1 is enough")  # fmt: skip
        return taken


def _parts(engine: Mapping[str, Any]) -> int:
    if engine.get("distributed_executor_backend") == "ray":
        raise UsageError(
            "--set engine.distributed_executor_backend=ray: a replica's engine starts its own processes on one node",
            hint="leave it out; a model that needs several nodes is served by vLLM, and given with --endpoint",
        )
    if engine.get("data_parallel_size") not in (None, 1):
        raise UsageError("--set engine.data_parallel_size: replicas are independent engines",
                         hint="leave it out, and give their number with --replicas")  # fmt: skip
    sizes = [engine.get(key) or 1 for key in ("tensor_parallel_size", "pipeline_parallel_size")]
    return sizes[0] * sizes[1] if all(type(size) is int and size > 0 for size in sizes) else 1


def check_room(count: int, bundle: Mapping[str, float], nodes: Sequence[Node], *, growing: str = "add nodes") -> str:
    """A description of what the replicas take and where they have room. Raises UsageError when they can never be
    placed."""
    room = [_room(bundle, node) for node in nodes]
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


def _room(bundle: Mapping[str, float], node: Node) -> int:
    """Replicas that fit on an empty node. A node without a resource has 0 of it."""
    # Amounts such as 0.1 are counted in ten-thousandths, as Ray does.
    shares = [
        round(node.resources.get(name, 0.0) * 10_000) // round(amount * 10_000) for name, amount in bundle.items()
    ]
    return min(shares, default=1_000_000)


def spelt(resources: Mapping[str, float]) -> str:
    """Resources for a person: what Ray adds for itself is left out."""
    plain = {k: v for k, v in resources.items() if ":" not in k and k not in ("memory", "object_store_memory")}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(plain.items())) or "no resources"


def _amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
