"""Replicas on a real Ray cluster of several nodes on this machine: nodes, processes and engines die, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.collect.run import Parts
from gymdata.errors import UsageError
from tests.collect import fake_parts
from tests.collect.fake_parts import LetterReplica
from tests.collect.saved_rows import failures_of, log_probs_of, rows_of, samples_of
from tests.engine_fixtures import InProcess
from tests.servers import Watcher

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
ENV = f"{ROOT / 'sample_data' / 'calculator.py'}:Calculator"
TASKS = str(ROOT / "sample_data" / "tasks" / "train.jsonl")
_STORE = 100 << 20
#: A node that is killed is gone after 2 s, not 10.
_QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Nodes:
    """A cluster whose head has no CPU, and nodes of one CPU each by name."""

    def __init__(self, folder: str) -> None:
        from ray._private.utils import get_ray_address_file
        from ray.cluster_utils import Cluster

        # Ray notes the cluster's address below its default folder, whatever the cluster's own is, and does not make it.
        Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0, "object_store_memory": _STORE, "include_dashboard": False, "node_name": "head",
                "temp_dir": folder, "_system_config": _QUICK,
            },
        )  # fmt: skip
        self.nodes: dict[str, Any] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self.nodes[name] = self.cluster.add_node(num_cpus=1, object_store_memory=_STORE, node_name=name, wait=False)

    def two(self) -> list[str]:
        """The names of the two nodes that there are now, whatever the test before has left."""
        while len(self.nodes) < 2:
            self.add(f"more {len(self.nodes)}")
        for name in list(self.nodes)[2:]:
            self.kill(name)
        self.cluster.wait_for_nodes()
        return list(self.nodes)

    def kill(self, name: str) -> None:
        """As a machine that loses its power."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes, "one" and "two"."""
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    term = signal.getsignal(signal.SIGTERM)
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    started = Nodes(folder)
    try:
        started.add("one", "two")
        started.cluster.wait_for_nodes()
        yield started
    finally:
        started.cluster.shutdown()
        signal.signal(signal.SIGTERM, term)
        shutil.rmtree(folder, ignore_errors=True)


def parts_of(nodes: Nodes, folder: Path, count: int = 2, needs: Any = None, env: str | None = None) -> Parts:
    """A run's parts with replicas of the deterministic sampler."""
    from gymdata.engines.servers._ray import RaySampler

    parts = fake_parts.parts(env=env)
    sampler: Any = RaySampler(count, partial(LetterReplica, folder), nodes.cluster.address, needs or {}, each=8)
    parts.sampler = sampler
    return parts


def without_server(run: Path) -> list[dict[str, Any]]:
    rows = rows_of(run)
    for row in rows:
        for turn in row["turns"]:
            del turn["server"]
    return rows


def test_nodes_processes_and_engines_that_die_lose_nothing(
    nodes: Nodes, tasks: Callable[..., Path], adder: str, tmp_path: Path
) -> None:
    """Two nodes killed and replaced, a process killed, an engine dead: the rows are those of one process, byte for byte."""
    one, two = nodes.two()
    settings: dict[str, Any] = {"tasks": str(tasks(50)), "num_rollouts": 4, "seed": 3, "run_id": "r", "env": adder}

    def replaced(name: str, by: str) -> None:
        nodes.kill(name)
        nodes.add(by)

    def process() -> None:
        newest = max(tmp_path.glob("*.pid"), key=lambda file: file.stat().st_mtime_ns)
        os.kill(int(newest.stem), signal.SIGKILL)

    watch = Watcher(
        (8, partial(replaced, two, "third")), (60, process), (100, (tmp_path / "die").touch),
        (140, partial(replaced, one, "fourth")),
    )  # fmt: skip
    summary = gymdata.collect(
        parts=parts_of(nodes, tmp_path, env=adder), output=tmp_path / "ray", progress=watch, concurrency=8, **settings
    )
    alone = fake_parts.parts(fake_parts.FakeSampler(fake_parts.add_or_answer), env=adder)
    gymdata.collect(parts=alone, output=tmp_path / "here", **settings)
    assert watch.then == []
    assert not (tmp_path / "die").exists()
    assert (summary.rollouts, summary.pending, summary.exit_code) == (200, 0, 0)
    assert without_server(tmp_path / "ray") == without_server(tmp_path / "here")
    assert failures_of(tmp_path / "ray") == []
    # Two processes at the start, and one after each of the four faults.
    assert len(list(tmp_path.glob("*.pid"))) == 6
    by = {turn["server"] for row in rows_of(tmp_path / "ray") for turn in row["turns"]}
    assert by == {f"ray:{os.uname().nodename}/replica-{number}" for number in range(2)}


def test_replicas_that_can_never_be_placed_are_refused_with_numbers(
    nodes: Nodes, tasks: Callable[..., Path], tmp_path: Path
) -> None:
    """More than there are CPUs, a GPU where none is: an error at once, with the room that there is."""
    nodes.two()
    for count, needs, room in ((3, {}, 2), (1, {"num_gpus": 1.0}, 0), (1, {"resources": {"tpu": 1.0}}, 0)):
        too_many = parts_of(nodes, tmp_path, count, needs)
        with pytest.raises(UsageError, match=f"can never be placed: room for {room} on 3 nodes"):
            gymdata.collect(parts=too_many, output=tmp_path / "run", tasks=str(tasks(1)), seed=1)


@pytest.mark.parametrize(
    ("folder", "said"), [("none", "must see it there"), ("policy", "put it on a disk that all nodes see")]
)
def test_a_model_that_a_node_has_not_is_named_with_the_node(
    nodes: Nodes, tasks: Callable[..., Path], policy: str, tmp_path: Path, folder: str, said: str
) -> None:
    """A model is read by its path on every node: the error says which node lacks it, or has other weights."""
    from gymdata.engines.servers._ray import RaySampler, engine

    nodes.two()
    make = partial(
        engine, policy if folder == "policy" else str(tmp_path / folder), policy_hash="other", sampling={}, seed=1
    )
    parts = fake_parts.parts()
    sampler: Any = RaySampler(1, make, nodes.cluster.address, {})
    parts.sampler = sampler
    with pytest.raises(UsageError, match=os.uname().nodename) as caught:
        gymdata.collect(parts=parts, output=tmp_path / "run", tasks=str(tasks(1)), seed=1)
    assert said in str(caught.value.hint)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ray", "auto"], "has no effect without --replicas"),
        (["--replicas", "2", "--endpoint", "http://a:1"], "--replicas and --endpoint were both given"),
        (["--replicas", "2", "--ray", "ray://a:1"], "--ray: got 'ray://a:1'"),
        (["--replicas", "0"], "--replicas"),
        (["--set", "replica.num_gpus=1"], "has no effect without --replicas"),
    ],
)
def test_flags_that_exclude_each_other(
    tasks: Callable[..., Path], policy: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Exit 2 and both flags named, before anything is started."""
    assert main(["collect", str(tasks(1)), "-m", policy, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_cluster_that_is_away_is_said_at_once(
    tasks: Callable[..., Path], policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 3 with the address, and not after minutes."""
    words = ["collect", str(tasks(1)), "-m", policy, "-o", str(tmp_path / "run")]
    words += ["--replicas", "2", "--ray", "127.0.0.1:9"]
    assert main(words) == 3
    assert "no Ray cluster answers at 127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(1200)  # three engines start
def test_real_engines_on_two_nodes_give_the_rows_of_one_in_this_process(
    nodes: Nodes, vllm_sampler: InProcess, policy: str, tmp_path: Path
) -> None:
    """vLLM in two replicas, one of whose nodes is killed and replaced: each rollout once, with the very same tokens."""
    for name in set(nodes.nodes) - {"one"}:
        nodes.kill(name)
    if "one" not in nodes.nodes:
        nodes.add("one")
    nodes.add("two")
    nodes.cluster.wait_for_nodes()
    settings: dict[str, Any] = {
        "tasks": TASKS, "model": policy, "env": ENV, "reward": ["numeric"], "limit": 40, "num_rollouts": 4,
        "max_tokens": 48, "top_logprobs": 2, "seed": 5, "run_id": "r",
    }  # fmt: skip

    def replace_two() -> None:
        nodes.kill("two")
        nodes.add("three")

    watch = Watcher((8, replace_two))
    summary = gymdata.collect(
        replicas=2, ray=nodes.cluster.address, concurrency=16, output=tmp_path / "ray", progress=watch, **settings
    )
    assert watch.then == []
    assert (summary.rollouts, summary.pending, summary.exit_code) == (160, 0, 0)
    vllm_sampler.collect(output=str(tmp_path / "here"), **settings)
    rows, expected = without_server(tmp_path / "ray"), without_server(tmp_path / "here")
    ids = [row["rollout_id"] for row in rows]
    assert ids == [row["rollout_id"] for row in expected]
    assert len(set(ids)) == 160
    assert samples_of(rows) == samples_of(expected)
    apart = np.abs(np.subtract(log_probs_of(rows), log_probs_of(expected))).max()
    print(f"log-probs at most {apart:.1e} apart")
    assert apart < 1e-4
    assert gymdata.validate(tmp_path / "ray").errors == 0
