"""Engines as actors of a Ray cluster, behind one ``Sampler``. Ray starts an actor that died again, here or on another node,
and repeats its calls.

Invariants: an actor is one engine on one node, with the weights of this machine's model; where its engine dies its process
ends, so that Ray starts both again. Answers are plain data: an error means the same here as there. Actors, their engines
and a Ray that was started or joined here end with the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import xxhash
from ray.exceptions import RayError

from gymdata.engines.port import Generation, Sampler, SampleRequest
from gymdata.errors import DataError, GymdataError, OutsideError, UsageError, reported
from gymdata.models.model_identity import base_of, policy_facts
from gymdata.settings import Settings
from gymdata.store.paths import Facts

#: Seconds that closing engines have, and in which the head of a cluster must take a connection.
_CLOSED_S, _REACH_S = 20.0, 10.0
_AGAIN = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 100_000}


class _Replica:
    """The class of an actor: one sampler, made there by ``make``. It answers (host, value, None) or (host, None, fault)."""

    def __init__(self, make: Callable[[], Sampler]) -> None:
        self._make, self._starting = make, asyncio.Lock()
        self._sampler: Any = None

    async def call(self, method: str, *arguments: Any) -> tuple[str, Any, Any]:
        """A method of the sampler, which is started before the first."""
        host, running = os.uname().nodename, self._sampler is not None
        try:
            async with self._starting:
                if self._sampler is None:
                    sampler: Any = self._make()
                    await sampler.start()
                    self._sampler = sampler
            value = getattr(self._sampler, method)(*arguments)
            return host, await value if asyncio.iscoroutine(value) else value, None
        except GymdataError as error:
            if running and isinstance(error, OutsideError) and error.fatal:
                os._exit(1)
            return host, None, error.to_dict()


class RaySampler:
    """``count`` replicas of an engine that ``make`` makes. ``address``: local (Ray is started here), auto or HOST:PORT.
    ``needs``: ``num_cpus``, ``num_gpus`` (default: ``parts`` where the cluster has GPUs) and ``resources`` of one;
    ``each``: requests in flight that suit it."""

    prefers_groups = True

    def __init__(
        self, count: int, make: Callable[[], Sampler], address: str, needs: Settings, parts: int = 1, each: int = 512
    ) -> None:
        self.count, self.default_concurrency = count, count * each
        self._make, self._address, self._needs, self._parts = make, address, {"num_cpus": 1, **needs}, parts
        self._actors: list[Any] = []
        self._joined = False

    def _join_with_room(self) -> None:
        """Join or start Ray. Raises UsageError where the replicas can never have room."""
        self._joined = _join(self._address) or self._joined
        listed: Any = ray.nodes  # it has no types
        nodes = [node["Resources"] for node in listed() if node["Alive"]]
        self._needs.setdefault("num_gpus", self._parts if any(node.get("GPU") for node in nodes) else 0)
        amounts = {"CPU": self._needs["num_cpus"], "GPU": self._needs["num_gpus"], **self._needs.get("resources", {})}
        taken = {name: amount for name, amount in amounts.items() if amount}
        each = ", ".join(f"{name} {amount:g}" for name, amount in taken.items())
        room = sum(min([self.count, *(int(node.get(n, 0) / a) for n, a in taken.items())]) for node in nodes)
        text = f"room for {room} on {len(nodes)} nodes"
        if room < self.count:
            hint = "lower --replicas, --set replica.num_cpus, .num_gpus or .resources, or join a larger cluster"
            raise UsageError(f"{self.count} replicas of {each} can never be placed: {text}", hint=hint)

    async def start(self) -> Facts:
        """Start every replica. Raises UsageError for a model that a node lacks, or that is another one there."""
        self._join_with_room()
        actor: Any = ray.remote(_Replica)
        try:
            actors = actor.options(**self._needs, **_AGAIN)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--set replica: {_last(error)}") from error
        self._actors = [actors.remote(self._make) for _ in range(self.count)]
        started = await asyncio.gather(*(self._call(number, "facts") for number in range(self.count)))
        return {**started[0][1], "transport": "ray"}

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """Continue one prompt; those of a group go to one replica, which has their beginning in its cache."""
        number = xxhash.xxh3_64_intdigest((request.group or request.request_id).encode()) % self.count
        host, generations = await self._call(number, "sample", replace(request, on_tokens=None))
        return [replace(generation, server=f"ray:{host}/replica-{number}") for generation in generations]

    async def close(self) -> None:
        """End every replica, and Ray where it was started or joined here. Safe to call twice."""
        actors, self._actors = self._actors, []
        with contextlib.suppress(RayError):
            # In order where they can: a killed engine leaves shared memory to be cleaned up.
            if closing := [actor.call.remote("close") for actor in actors]:
                await asyncio.to_thread(ray.wait, closing, num_returns=len(closing), timeout=_CLOSED_S)
            for actor in actors:
                ray.kill(actor)
        if self._joined:
            self._joined = False
            ray.shutdown()

    async def _call(self, number: int, method: str, *arguments: Any) -> tuple[str, Any]:
        ref = self._actors[number].call.remote(method, *arguments)
        try:
            host, value, fault = await ref
        except asyncio.CancelledError:
            with contextlib.suppress(RayError, ValueError):
                ray.cancel(ref)
            raise
        except RayError as error:
            hint = "does `ray status` answer? Every node needs the same install as this machine, with the extra ray"
            raise OutsideError("engine", f"replica-{number}: {_last(error)}", hint=hint, fatal=True) from error
        if fault is None:
            return host, value
        reason = reported(fault)
        if isinstance(reason, DataError):
            hint = f"a replica reads the model from its path: {host} must see it there, as this machine does"
            raise UsageError(f"ray:{host}/replica-{number}: {reason.message}", hint=hint)
        raise reason


def _last(error: BaseException) -> str:
    """The line of a traceback that has the error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:300]


def _join(address: str) -> bool:
    """Whether Ray was joined or started here; false where this process had done so."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, colon, port = address.rpartition(":")
    before = signal.getsignal(signal.SIGTERM)
    quiet: Any = {"log_to_driver": False, "logging_level": "ERROR"} | ({} if colon else {"include_dashboard": False})
    try:
        if colon:  # where none listens, Ray itself tries for many minutes
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        ray.init(address, **quiet)
    except (OSError, RayError) as error:
        text = f"no Ray cluster answers at {address}: {_last(error)}"
        raise OutsideError("engine", text, hint="`ray status` on a node of it must answer", fatal=True) from error
    except (RuntimeError, ValueError) as error:  # another version of Ray or Python
        raise UsageError(f"Ray cannot be used at {address}: {_last(error)}") from error
    finally:
        # Ray takes SIGTERM for itself, and would end the command in the middle of a write.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    return True


def replicated(count: int, address: str | None, needs: Settings, model: str, args: Settings, **more: Any) -> RaySampler:
    """``count`` replicas of a model, not started. ``args``: of the engine; ``more``: as ``engine`` takes it."""
    from gymdata.engines._vllm import DEFAULT_MAX_NUM_SEQS, refuse_unknown_arguments

    refuse_unknown_arguments(args)
    # The actor may be in another folder.
    path = str(Path(model).absolute()) if Path(model).exists() else model
    make = partial(engine, path, engine_args=dict(args), **more)
    parts = (args.get("tensor_parallel_size") or 1) * (args.get("pipeline_parallel_size") or 1)
    # Requests in an engine's queue fill the slots that a whole group frees at once.
    at_once = 2 * int(args.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS)
    return RaySampler(count, make, address or "local", needs, parts, at_once)


def engine(model: str, *, policy_hash: str, kind: Callable[..., Sampler] | None = None, **settings: Any) -> Sampler:
    """vLLM in an actor, with the very weights that the machine of the command has."""
    from gymdata.models._transformers import local_folder

    local_folder(base_of(model)[0])
    if (found := policy_facts(model)["policy_hash"]) != policy_hash:
        text = f"{os.uname().nodename} has other weights: {found}, and on the machine of the command they are {policy_hash}"
        raise UsageError(text, hint="copy the model to that node again, or put it on a disk that all nodes see")
    from gymdata.engines._vllm import VllmSampler

    return (kind or VllmSampler)(model, **settings)
