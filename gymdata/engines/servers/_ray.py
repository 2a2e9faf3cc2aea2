"""Replicas of an engine as actors of a Ray cluster, each a ``Member`` of ``Servers``.

Invariants: an actor is one engine on one node, in a placement group of its own; it leaves by ``os._exit`` when its engine is
dead, and Ray starts it again, here or on another node, where it is compared again before it gets a request. No call is
tried twice by Ray: what was in flight when a process or a node died is a broken connection, and the caller's to repeat.
Answers are plain data, so that an error means the same here as there. Actors, their engines and a Ray that was started here
end with the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, TaskCancelledError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gymdata.engines.port import Generation, SampleRequest
from gymdata.engines.servers.fingerprint import Fingerprint
from gymdata.engines.servers.many import Member, Places, Servers
from gymdata.engines.servers.replicas import LOCAL, Needs, Node, check_room, checked_address, spelt
from gymdata.errors import DataError, GymdataError, OutsideError, UsageError, reported
from gymdata.models.model_identity import base_of
from gymdata.rollouts.messages import JsonObject
from gymdata.settings import Settings
from gymdata.store.paths import Facts

#: Answers are small and go straight to the caller: what Ray keeps of them needs little room.
_STORE_BYTES = 256 << 20
#: Seconds until a replica that got no place is left for later, and that a closing engine has.
_PLACED_S, _CLOSED_S = 30.0, 20.0
#: Seconds in which the head of a cluster must take a connection.
_REACH_S = 10.0
#: Calls of one actor at a time: more than the scheduler of ``Servers`` ever gives it.
_CALLS = 100_000
#: Seconds between a last answer and the end of its process.
_LEAVE_S = 0.2
#: Settings of this process's engine that are not another machine's.
_NOT_SENT = ("VLLM_API_KEY", "VLLM_HOST_IP", "VLLM_PORT")


class Replica:
    """The class of an actor: one sampler, made here by ``make``. Every answer is ("ok", value), ("fault", facts), or
    ("fresh", None) where the process was started again since."""

    def __init__(self, make: Callable[[], Member], environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._make = make
        self._sampler: Member | None = None
        self._starting = asyncio.Lock()

    async def where(self) -> tuple[str, int]:
        """Ray's ID of the node, and the process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def call(self, method: str, *arguments: Any) -> tuple[str, Any]:
        """A method of the sampler; "start" starts it unless it runs, and gives its facts."""
        try:
            if method == "start":
                async with self._starting:
                    if self._sampler is None:
                        sampler = self._make()
                        await sampler.start()
                        self._sampler = sampler
                return "ok", self._sampler.facts()
            if self._sampler is None:
                return "fresh", None
            return "ok", await getattr(self._sampler, method)(*arguments)
        except GymdataError as error:
            if isinstance(error, OutsideError) and error.fatal:
                # A dead engine leaves nothing for the next one to use. After exit_actor Ray would not restart the
                # actor.
                asyncio.get_running_loop().call_later(_LEAVE_S, os._exit, 1)
            return "fault", error.to_dict()

    async def close(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            await sampler.close()


class ReplicaSampler:
    """A ``Member`` that is a replica on Ray. Closing it leaves the replica to ``Replicas``."""

    prefers_groups = True

    def __init__(self, pool: Replicas, index: int) -> None:
        self._pool, self._index = pool, index
        self.default_concurrency = pool.concurrency
        self.name = f"replica-{index}"
        self._facts: Facts = {}

    async def start(self) -> Facts:
        """Wait for the replica's process and start its engine. Raises UsageError, OutsideError when it has no place."""
        node_id, _ = await self._pool.placed(self._index)
        node = self._pool.node_name(node_id)
        self.name = f"ray:{node}/replica-{self._index}"
        try:
            facts = await self._call("start")
        except DataError as error:
            raise UsageError(
                f"{self.name}: {error.message}",
                hint=f"a replica reads the model from its path: node {node} must see it there, as this machine does",
            ) from error
        self._facts = {**facts, "transport": "ray"}
        return self.facts()

    def facts(self) -> Facts:
        """Facts about the engine for run.json; empty before ``start``."""
        return dict(self._facts)

    async def fingerprint(self) -> Fingerprint:
        """The fingerprint of its policy. Raises UsageError when it holds other weights than this machine's folder."""
        proof: Fingerprint = replace(await self._call("fingerprint"), url=self.name)
        expected = self._pool.policy_hash
        if expected is not None and proof.model != expected:
            raise UsageError(
                f"{self.name} has other weights: {proof.model}, and on this machine the model is {expected}",
                hint="copy the model to that node again, or put it on a disk that all nodes see",
            )
        return proof

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """Continue one prompt. Cancelling the task cancels it in the replica."""
        generations = await self._call("sample", replace(request, conversation=None, on_tokens=None))
        return [replace(generation, server=self.name) for generation in generations]

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of ``ids[1:]``, each after those before it, at temperature 1. Raises OutsideError("engine")."""
        return list(await self._call("score", list(ids)))

    async def close(self) -> None:
        """Nothing: the replica outlives a try to reach it."""

    async def _call(self, method: str, *arguments: Any) -> Any:
        kind, value = await self._pool.call(self._index, self.name, "call", method, *arguments)
        if kind == "ok":
            return value
        if kind == "fresh":
            raise _gone(self.name)
        error = reported(value)
        # A dead engine affects one replica only, and that one comes back.
        if isinstance(error, OutsideError) and error.fatal:
            error.retryable = True
        raise error


class Replicas(Places):
    """The replicas of one engine on Ray: the ``Places`` of ``Servers``.

    ``make``: makes the sampler in its actor; ``address``: see ``checked_address``; ``policy_hash``: what replicas must hold
    (None: not checked); ``concurrency``: generations in flight that suit one replica.
    """

    noun = "replica"
    may_change = False

    def __init__(
        self,
        count: int,
        make: Callable[[], Member],
        *,
        needs: Needs,
        address: str,
        policy_hash: str | None = None,
        concurrency: int = 512,
    ) -> None:
        self.count, self.concurrency, self.policy_hash = count, concurrency, policy_hash
        self._make, self._needs, self._address = make, needs, address
        self._bundle: dict[str, float] = {}
        self._groups: dict[int, Any] = {}
        self._actors: dict[int, Any] = {}
        self._reached: set[int] = set()
        self._joined = False

    def read(self) -> dict[str, str]:
        """Names before they have a node."""
        return {f"replica-{index}": str(index) for index in range(self.count)}

    def member(self, number: str) -> ReplicaSampler:
        """The sampler of one of ``read``."""
        return ReplicaSampler(self, int(number))

    async def open(self) -> None:
        """Join or start Ray and request every replica. Raises UsageError when they can never be placed."""
        self.check()
        for index in range(self.count):
            self._groups[index] = placement_group([self._bundle], strategy="STRICT_PACK")
            self._actors[index] = self._actor(index)

    def check(self) -> str:
        """Join or start Ray; what the replicas take and where they have room, in words."""
        if not self._joined:
            self._joined = _join(self._address)
        nodes = [Node(_name_of(node), node["Resources"]) for node in _nodes() if node["Alive"]]
        self._bundle = self._needs.bundle(nodes)
        alone = self._address == LOCAL and len(nodes) == 1
        return check_room(
            self.count, self._bundle, nodes, growing="join a cluster (--ray HOST:PORT)" if alone else "add nodes"
        )

    async def close(self) -> None:
        """End every replica, and Ray where it was started or joined here. Safe to call twice."""
        actors, self._actors = self._actors, {}
        if actors:
            # In order where they can: a killed engine leaves shared memory to be cleaned up.
            with contextlib.suppress(RayError):
                closing = [actors[index].close.remote() for index in self._reached & actors.keys()]
                await asyncio.to_thread(ray.wait, closing, num_returns=max(1, len(closing)), timeout=_CLOSED_S)
        for index, actor in actors.items():
            with contextlib.suppress(RayError):
                ray.kill(actor)
                remove_placement_group(self._groups[index])
        self._groups = {}
        if self._joined:
            self._joined = False
            ray.shutdown()

    def node_name(self, node_id: str) -> str:
        """A node's name, as a person knows it."""
        return next((_name_of(node) for node in _nodes() if node["NodeID"] == node_id), node_id[:12])

    async def placed(self, index: int) -> tuple[str, int]:
        """Node and process of a replica, once it has them. Raises OutsideError when no node has room for it now."""
        call = asyncio.ensure_future(self.call(index, f"replica-{index}", "where"))
        try:
            while not (await asyncio.wait([call], timeout=_PLACED_S))[0]:
                state = placement_group_table(self._groups[index]).get("state")
                if state != "CREATED":
                    raise OutsideError(
                        "engine",
                        f"no node has room for replica-{index} now ({spelt(self._bundle)}; placement {state})",
                        hint="`ray status` shows what is in use",
                        retryable=True,
                        fatal=True,
                    )
            node_id, process = await call
            self._reached.add(index)
            return str(node_id), int(process)
        finally:
            call.cancel()

    async def call(self, index: int, name: str, method: str, *arguments: Any) -> Any:
        """The result of the replica's method. Raises OutsideError where its process or node is gone."""
        actor = self._actors[index]
        ref = getattr(actor, method).remote(*arguments)
        try:
            return await ref
        except asyncio.CancelledError:
            with contextlib.suppress(RayError, ValueError):
                ray.cancel(ref)
            raise
        except ActorDiedError as error:
            if self._actors.get(index) is actor:  # every call in flight learns of the same death
                self._actors[index] = self._actor(index)
            raise _gone(name, error) from error
        except (RayActorError, TaskCancelledError) as error:
            raise _gone(name, error) from error
        except RayError as error:
            raise OutsideError("engine", f"{name}: {_first(error)}", retryable=True) from error

    def _actor(self, index: int) -> Any:
        where = PlacementGroupSchedulingStrategy(self._groups[index], placement_group_bundle_index=0)
        others = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        environment = {k: v for k, v in os.environ.items() if k.startswith("VLLM_") and k not in _NOT_SENT}
        actor: Any = ray.remote(Replica)
        return actor.options(
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            resources=others,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=_CALLS,
            scheduling_strategy=where,
        ).remote(self._make, environment)


def _gone(name: str, error: RayError | None = None) -> OutsideError:
    text = str(error)
    if "ModuleNotFoundError" in text:
        missing = next(line.strip() for line in text.splitlines() if "ModuleNotFoundError" in line)
        return OutsideError(
            "engine",
            f"{name} cannot be started: {missing}",
            retryable=True,
            fatal=True,
            hint="every node needs the same install as this machine, with the extra ray",
        )
    away = "its process or its node is gone, or is being started"
    return OutsideError("engine", f"{name} does not answer: {away}", retryable=True, fatal=True)


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The last line of a traceback has the error.
    return (lines[-1] if lines else type(error).__name__)[:300]


def _nodes() -> list[JsonObject]:
    nodes: Any = ray.nodes  # it has no types
    return list(nodes())


def _name_of(node: JsonObject) -> str:
    name, address = str(node["NodeName"]), str(node["NodeManagerAddress"])
    return name if name and name != address else str(node["NodeManagerHostname"] or address)


def _join(address: str) -> bool:
    """Whether Ray was joined or started here; False where this process had done so. Raises OutsideError, UsageError."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: Settings = {"log_to_driver": False, "logging_level": "ERROR"}
    if address in (LOCAL, "auto"):
        address = checked_address(os.environ.get("RAY_ADDRESS") or address)
    if address == LOCAL:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "Ray can only be started in a program's main thread",
                hint="call ray.init() before, or give --ray HOST:PORT",
            )
        quiet |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    with _handler_stays():
        try:
            _reach(address)
            ray.init(address=address, **quiet)
        except (OSError, RayError) as error:
            raise OutsideError(
                "engine",
                f"no Ray cluster answers at {address}: {_first(error)}",
                hint="`ray status` on a node of it must answer; --ray auto is the cluster of this machine",
                fatal=True,
            ) from error
        except (RuntimeError, ValueError) as error:  # another version of Ray or Python, or an invalid address
            raise UsageError(f"Ray cannot be used at {address}: {_first(error)}") from error
        except Exception as error:
            if type(error) is not Exception:  # which Ray raises where a busy machine starts it too slowly
                raise
            raise OutsideError("engine", f"Ray did not start: {_first(error)}", hint="try again", fatal=True) from error
    # Private, and without another form: deaths of nodes are written to stdout, where data goes. We report them ourselves.
    ray._private.worker._worker_logs_enabled = False
    return True


def _reach(address: str) -> None:
    """Connect to a cluster's head and hang up: where none listens, Ray itself tries for many minutes. Raises OSError."""
    if address == "auto":
        # Where Ray keeps the address of this machine's cluster, which may be gone.
        file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        address = file.read_text().strip() if file.is_file() else ""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()


@contextlib.contextmanager
def _handler_stays() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and would end the command in the middle of a write."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def replicated(
    count: int,
    address: str | None,
    resources: Settings,
    model: str,
    engine_args: Settings,
    *,
    policy_hash: str,
    retries: int,
    kind: Callable[..., Member] | None = None,
    **settings: Any,
) -> Servers:
    """``count`` replicas of a model behind one sampler, not started. ``kind``: a class of ``VllmSampler``'s arguments, by
    default that one, which gets ``settings``. Raises UsageError for settings that make no replica."""
    from gymdata.engines._vllm import DEFAULT_MAX_NUM_SEQS, refuse_unknown_arguments

    refuse_unknown_arguments(engine_args)
    needs = Needs.of(resources, engine_args)
    replicas = Replicas(
        count,
        engine_maker(model, engine_args, needs, kind, **settings),
        needs=needs,
        address=checked_address(address or LOCAL),
        policy_hash=policy_hash,
        # Requests in an engine's queue fill the slots that a whole group frees at once.
        concurrency=2 * int(engine_args.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS),
    )
    return Servers(replicas, replicas.member, retries=retries)


def engine_maker(
    model: str, engine_args: Settings, needs: Needs, kind: Callable[..., Member] | None = None, **settings: Any
) -> Callable[[], Member]:
    """Makes vLLM in an actor. A local folder is named by its whole path: the actor may be in another folder."""
    path = str(Path(model).absolute()) if Path(model).exists() else model
    args = dict(engine_args)
    if needs.parts > 1:
        # In a placement group vLLM would put its parts into actors, for which there is no room.
        args.setdefault("distributed_executor_backend", "mp")
    return partial(_vllm, kind, path, engine_args=args, **settings)


def _vllm(kind: Callable[..., Member] | None, model: str, **settings: Any) -> Member:
    from gymdata.engines._vllm import VllmSampler
    from gymdata.models._transformers import local_folder

    # Found before vLLM is imported, which takes a while.
    local_folder(base_of(model)[0])
    return (kind or VllmSampler)(model, **settings)
