"""``gymdata audit --endpoint``: real servers score the tokens; they share the work, and may go and return."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.engines.servers.many import Endpoints, Servers
from gymdata.engines.servers.served_policy import served_policy
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import RefusedError, UsageError
from gymdata.store import read_run_json, read_table
from tests.collect.conftest import up  # noqa: F401 - a fixture
from tests.faulty_server import Settings, build
from tests.rollout_files import write_run
from tests.servers import ServerProcess, serving

POLICY = Path(__file__).parents[2] / "sample_data" / "policy"


@pytest.fixture
def run(clean_rows: list[dict[str, Any]], tmp_path: Path) -> Path:
    """Rollouts of the sample policy, sampled at temperature 1."""
    return write_run(tmp_path / "run", [copy.deepcopy(row) for row in clean_rows[:40]])


def servers_of(report: Any) -> dict[str, dict[str, Any]]:
    return {server["url"]: server for server in report.to_dict()["model"]["servers"]}


def test_two_servers_give_the_figures_of_a_forward_pass_here(run: Path, sample_model: Any) -> None:
    """Both score with the policy itself: nothing is found, and each sequence was scored once by one of them."""
    import torch

    def scores(ids: list[int]) -> list[float]:
        with torch.no_grad():
            logits = sample_model(torch.tensor([ids])).logits[0, :-1]
        logps = torch.log_softmax(logits.double(), -1)
        return [float(logps[place, token]) for place, token in enumerate(ids[1:])]

    with (
        serving(build(Settings(name=str(POLICY), scores=scores))) as a,
        serving(build(Settings(name=str(POLICY), scores=scores))) as b,
    ):
        report = gymdata.audit(run, str(POLICY), endpoint=f"{a},{b}", tolerance=1e-3, output=run / "served")
        here = gymdata.audit(run, str(POLICY), dtype="float32", device="cpu", tolerance=1e-3, output=run / "here")
    assert report.ok
    assert here.ok
    for name in ("tokens", "rollouts", "turns"):
        assert report.summary[name] == here.summary[name]
    assert report.summary["mean_abs_difference"] == pytest.approx(here.summary["mean_abs_difference"], abs=1e-5)
    assert read_run_json(run / "served")["model"]["policy_hash"] == read_run_json(run / "here")["model"]["policy_hash"]
    assert sum(server["generations"] for server in servers_of(report).values()) >= report.summary["rollouts"]


def test_an_interruption_within_the_servers_work_is_raised() -> None:
    """Ray raises one in the thread that waits for it: the caller gets it, and does not wait for a loop that has ended."""

    class Interrupted(Endpoints):
        async def open(self) -> None:
            raise KeyboardInterrupt

        async def close(self) -> None:
            raise KeyboardInterrupt

    servers = Servers(Interrupted(["http://127.0.0.1:9"]), ServerSampler)
    with pytest.raises(KeyboardInterrupt), served_policy(servers):
        raise AssertionError("never reached")


def test_servers_that_can_never_be_used_are_named_in_a_notebook_too() -> None:
    """Where a loop runs already, the error is that of the servers."""

    class Unusable(Endpoints):
        def check(self) -> str:
            raise UsageError("no such cluster")

    async def cell() -> None:
        with served_policy(Servers(Unusable(["http://127.0.0.1:9"]), ServerSampler)):
            raise AssertionError("never reached")

    with pytest.raises(UsageError, match="no such cluster"):
        asyncio.run(cell())


def test_servers_of_other_weights_are_refused_by_name(run: Path, up: Callable[..., ServerProcess]) -> None:
    """Both are named and nothing is written."""
    a, b = up(), up("--weights", "9")
    with pytest.raises(UsageError, match=f"weights: .* {b.url}"):
        gymdata.audit(run, endpoint=[a.url, b.url], output=run / "audited")
    assert not (run / "audited").exists()


def test_what_a_server_cannot_say_is_refused(
    run: Path, up: Callable[..., ServerProcess], tmp_path: Path, capsys: Any
) -> None:
    """Another temperature than 1, entropies, and how this process computes."""
    a = up()
    assert main(["audit", str(run), "--endpoint", a.url, "--dtype", "float32"]) == 2
    assert "--dtype float32 and --endpoint were both given" in capsys.readouterr().err
    assert main(["audit", str(run), "--endpoint", a.url, "--write-as", "ref_logprobs"]) == 2
    assert main(["audit", str(run), "--wait-for-server", "5"]) == 2
    rows = [row | {"temperature": 0.7} for row in read_table(run).to_pylist()]
    with pytest.raises(RefusedError, match="temperature 1, and rows were sampled at"):
        gymdata.audit(write_run(tmp_path / "warm", rows), endpoint=a.url)
