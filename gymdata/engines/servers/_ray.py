"""Engines as actors of a Ray cluster, behind one ``Sampler``. Ray starts an actor that died again, here or on another node,
repeats its calls, and brings its errors here.

Invariants: an actor is one engine on one node, with the weights of this machine's model; where its engine dies its process
ends, so that Ray starts both again. Actors, their engines and a Ray that was started or joined here end with the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import xxhash
from ray.exceptions import RayError

from gymdata.engines._vllm import DEFAULT_MAX_NUM_SEQS, VllmSampler
from gymdata.engines.port import Generation, Sampler, SampleRequest
from gymdata.errors import DataError, GymdataError, OutsideError, UsageError, first_line
from gymdata.models.model_identity import policy_facts
from gymdata.settings import Settings
from gymdata.store.paths import Facts

#: Seconds that closing engines have, and in which the head of a cluster must take a connection.
_CLOSED_S, _REACH_S = 20.0, 10.0
_ALIKE = "`ray status` must answer there; every node needs this machine's Python and install, with the extra ray"
_AGAIN: Settings = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 100_000}
Make = Callable[[], Sampler]


class _Replica:
    """The class of an actor: one sampler, made there by ``make``."""

    def __init__(self, make: Make, number: int) -> None:
        self._make, self._starting = make, asyncio.Lock()
        self._server = f"ray:{os.uname().nodename}/replica-{number}"
        self._sampler: Any = None

    async def start(self) -> Facts:
        """Start the sampler."""
        sampler = self._make()
        facts = await sampler.start()
        self._sampler = sampler
        return facts

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """Continue one prompt; an actor that Ray started again starts its sampler first."""
        running = self._sampler is not None
        async with self._starting:
            if self._sampler is None:
                await self.start()
        try:
            return [replace(each, server=self._server) for each in await self._sampler.sample(request)]
        except OutsideError as error:
            if running and error.fatal:
                os._exit(1)
            raise

    async def close(self) -> None:
        if self._sampler is not None:
            await self._sampler.close()


class RaySampler:
    """``count`` engines that ``make`` makes. ``address``: local (Ray is started here), auto or HOST:PORT. What one takes is
    in ``needs``, its GPUs are ``parts`` where the cluster has some; ``each``: requests in flight that suit it."""

    prefers_groups = True

    def __init__(self, count: int, make: Make, address: str, needs: Settings, parts: int = 1, each: int = 512) -> None:
        self.count, self.default_concurrency = count, count * each
        self._make, self._address, self._needs, self._parts = make, address, {"num_cpus": 1, **needs}, parts
        self._joined, self._actors = False, list[Any]()

    async def start(self) -> Facts:
        """Start every replica. Raises UsageError where they can never have room, or a node lacks the model."""
        if not ray.is_initialized():
            # Beside the main thread Ray leaves SIGTERM alone: it would end the command in the middle of a write.
            await asyncio.to_thread(_join, self._address)
            self._joined = True
        self._check_room()
        try:
            replica: Any = ray.remote(**self._needs, **_AGAIN)(_Replica)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--set replica: {first_line(error)}") from error
        self._actors = [replica.remote(self._make, number) for number in range(self.count)]
        started = await asyncio.gather(*(_answer(actor.start.remote()) for actor in self._actors))
        return {**started[0], "transport": "ray"}

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """Continue one prompt; those of a group go to one replica, which has their beginning in its cache."""
        key = (request.group or request.request_id).encode("utf-8", "surrogatepass")
        actor = self._actors[xxhash.xxh3_64_intdigest(key) % self.count]
        return list(await _answer(actor.sample.remote(request)))

    async def close(self) -> None:
        """End every replica, and Ray where it was started or joined here. Safe to call twice."""
        actors, self._actors = self._actors, []
        with contextlib.suppress(RayError):
            # In order where they can: a killed engine leaves shared memory to be cleaned up.
            if closing := [actor.close.remote() for actor in actors]:
                await asyncio.to_thread(ray.wait, closing, num_returns=len(closing), timeout=_CLOSED_S)
        if self._joined:
            ray.shutdown()

    def _check_room(self) -> None:
        """Raises UsageError where the replicas can never have room: Ray would wait for it."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray's
        self._needs.setdefault("num_gpus", self._parts if any(node.get("GPU") for node in nodes) else 0)
        taken = {"CPU": self._needs["num_cpus"], "GPU": self._needs["num_gpus"], **self._needs.get("resources", {})}
        room = sum(min([self.count, *(int(node.get(n, 0) / a) for n, a in taken.items() if a)]) for node in nodes)
        if room < self.count:
            text = f"{self.count} replicas of {taken} can never be placed: room for {room} on {len(nodes)} nodes"
            raise UsageError(text)


async def _answer(call: Any) -> Any:
    """What an actor answers. Raises what it raised; OutsideError where Ray could not call it."""
    try:
        return await call
    except asyncio.CancelledError:
        with contextlib.suppress(RayError, ValueError):
            ray.cancel(call)
        raise
    except RayError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, GymdataError):
            raise cause from None
        raise OutsideError("engine", f"a replica: {first_line(cause)}", hint=_ALIKE, fatal=True) from error


def _join(address: str) -> None:
    """Join a cluster, or start one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, colon, port = address.rpartition(":")
    try:
        if colon:  # where none listens, Ray itself tries for many minutes
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        quiet: Settings = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address, **quiet)
    except (OSError, RayError, RuntimeError, ValueError) as error:
        text = f"no Ray cluster answers at {address}: {first_line(error)}"
        raise OutsideError("engine", text, hint=_ALIKE, fatal=True) from error


def replicated(count: int, address: str | None, needs: Settings, model: str, args: Settings, **more: Any) -> RaySampler:
    """``count`` replicas of a model, not started. ``args``: of the engine; ``more``: as ``engine`` takes it."""
    # The actor may be in another folder.
    path = str(Path(model).absolute()) if Path(model).exists() else model
    make = partial(engine, path, engine_args=dict(args), **more)
    parts = (args.get("tensor_parallel_size") or 1) * (args.get("pipeline_parallel_size") or 1)
    # Requests in an engine's queue fill the slots that a whole group frees at once.
    at_once = 2 * int(args.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS)
    return RaySampler(count, make, address or "local", needs, parts, at_once)


def engine(model: str, *, policy_hash: str, kind: Callable[..., Sampler] = VllmSampler, **settings: Any) -> Sampler:
    """vLLM in an actor, with the very weights that the machine of the command has."""
    node = os.uname().nodename
    try:
        found = policy_facts(model)["policy_hash"]
    except DataError as error:
        found = error.message
    if found != policy_hash:
        hint = f"a replica reads the model from its path: {node} must see it there; put it on a disk that all nodes see"
        raise UsageError(f"{node} lacks the weights of the machine of the command, {policy_hash}: {found}", hint=hint)
    return kind(model, **settings)
