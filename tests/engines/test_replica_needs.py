"""What a replica takes of its node, and where it has room."""

from __future__ import annotations

from typing import Any

import pytest

from gymdata.engines.servers.replicas import Needs, Node, check_room
from gymdata.errors import UsageError


@pytest.mark.parametrize(
    ("given", "engine", "bundle"),
    [
        ({}, {}, {"CPU": 1.0, "GPU": 1.0}),
        ({}, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, {"CPU": 1.0, "GPU": 8.0}),
        ({"num_gpus": 0.5, "num_cpus": 0}, {}, {"GPU": 0.5}),
        ({"num_gpus": 0, "resources": {"tpu": 2}}, {}, {"CPU": 1.0, "tpu": 2.0}),
    ],
)
def test_what_a_replica_takes_follows_from_the_engine(
    given: dict[str, Any], engine: dict[str, Any], bundle: dict[str, float]
) -> None:
    """A GPU for each parallel part where the cluster has GPUs, unless something else is given."""
    assert Needs.of(given, engine).bundle([Node("a", {"CPU": 96.0, "GPU": 8.0})]) == bundle


def test_without_gpus_none_is_asked_for() -> None:
    """On machines without one a replica is an engine on CPUs."""
    assert Needs.of({}, {"tensor_parallel_size": 2}).bundle([Node("a", {"CPU": 2.0})]) == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("given", "engine", "said"),
    [
        ({"num_gpu": 1}, {}, "num_gpu"),
        ({"num_gpus": "two"}, {}, "num_gpus"),
        ({"num_cpus": -1}, {}, "num_cpus"),
        ({"resources": {"tpu": True}}, {}, "resources"),
        ({"num_gpus": 1}, {"tensor_parallel_size": 2}, "2 GPUs"),
        ({}, {"data_parallel_size": 2}, "data_parallel_size"),
        ({}, {"distributed_executor_backend": "ray"}, "distributed_executor_backend"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], engine: dict[str, Any], said: str) -> None:
    """Keys, amounts and engine arguments that make no replica are named."""
    with pytest.raises(UsageError, match=said):
        Needs.of(given, engine)


def test_a_replica_lies_on_one_node() -> None:
    """Two nodes of 4 GPUs hold no engine of 8, and four engines of 2."""
    nodes = [Node(name, {"CPU": 8.0, "GPU": 4.0, "node:1.2.3.4": 1.0, "memory": 1e9}) for name in "ab"]
    with pytest.raises(UsageError, match=r"room for 0, each on one node: a \(CPU 8, GPU 4\): 0; b \(CPU 8, GPU 4\): 0"):
        check_room(1, {"CPU": 1.0, "GPU": 8.0}, nodes)
    assert check_room(4, {"CPU": 1.0, "GPU": 2.0}, nodes) == "4 × CPU 1, GPU 2, each on one node: room for 4 on 2 nodes"


def test_a_replica_takes_something() -> None:
    """Without any resource Ray has no place for it: what to raise is said."""
    with pytest.raises(UsageError, match="takes nothing"):
        Needs.of({"num_cpus": 0}, {}).bundle([Node("a", {"CPU": 2.0})])
