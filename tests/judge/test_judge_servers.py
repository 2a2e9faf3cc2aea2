"""Several real judge servers behind one command: they share the work, serve the same model, and may go and return."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.errors import OutsideError, UsageError
from gymdata.judge.run import JudgeSummary
from gymdata.judge.run import judge as run_judge
from gymdata.rollouts.schema import COMPARISONS, SCORES
from gymdata.store import read_run_json, read_table
from tests.judge_server import Behaviour, judge_server
from tests.rollout_files import rollout, two_turns, write_run
from tests.servers import JUDGE, ServerProcess, Watcher, server_processes

#: Two answers at a time, 0.05 s each.
PACED = ("--latency", "0.05", "--slots", "2")
TABLES = (("comparisons", COMPARISONS), ("scores", SCORES))


@pytest.fixture
def up() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers; at the end all are gone."""
    with server_processes(JUDGE) as start:
        yield start


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten groups of four: 120 comparisons in both positions."""
    rows = [
        rollout(f"t{task}", n, 0.0, two_turns(1, 40 + n), text=f"q={1 + (task + n) % 5} t{task}r{n}")
        for task in range(10)
        for n in range(4)
    ]
    return write_run(tmp_path / "run", rows)


def judged(run: Path, endpoint: Any, name: str = "judge", **settings: Any) -> JudgeSummary:
    given = {"model": "judge", "name": name, "retry_pause": 0.01, "concurrency": 16}
    return run_judge(path=str(run), endpoint=endpoint, **{**given, **settings})


def servers_of(run: Path, name: str = "judge") -> dict[str, dict[str, Any]]:
    """URL → what the server did."""
    return {server["url"]: server for server in read_run_json(run / f"judge-{name}")["engine"]["servers"]}


def same_tables(run: Path, one: str, other: str) -> bool:
    """Whether both judgements say the same; scores have the name of theirs."""
    found = [
        [read_table(run / f"judge-{name}" / f"{file}.parquet", table) for file, table in TABLES]
        for name in (one, other)
    ]
    (comparisons, scores), (others, other_scores) = found
    return comparisons.equals(others) and scores["value"].equals(other_scores["value"])


@pytest.mark.full
def test_two_servers_share_the_work(up: Callable[..., ServerProcess], run: Path) -> None:
    """Verdicts, rewards and the judge's name are those of one server; run.json counts the answers of each."""
    a, b = up(*PACED), up(*PACED)
    assert judged(run, [a.url, f"{b.url}/v1"], "two").exit_code == 0
    assert judged(run, a.url, "one").exit_code == 0
    assert same_tables(run, "two", "one")
    counts = {url: server["answers"] for url, server in servers_of(run, "two").items()}
    assert sum(counts.values()) == 120
    assert min(counts.values()) >= 30


@pytest.mark.full
def test_a_server_that_is_killed_and_restarted_loses_nothing(up: Callable[..., ServerProcess], run: Path) -> None:
    """Its requests go to the other, it is used again when it returns, and every verdict is there once."""
    a, b = up(*PACED), up(*PACED)
    watch = Watcher((20, b.kill))
    watch.on(f"{b.url} is not used until it answers again (1 of 2 left)", b.start)
    watch.on(f"{b.url} is used again after", lambda: None)
    summary = judged(run, f"{a.url},{b.url}", progress=watch)
    assert watch.expected == []
    assert (summary.comparisons["judged"], summary.asked, summary.exit_code) == (120, 120, 0)
    ids = read_table(run / "judge-judge", COMPARISONS)["comparison_id"].to_pylist()
    assert len(set(ids)) == len(ids) == 120
    assert sum(server["answers"] for server in servers_of(run).values()) == 120
    assert servers_of(run)[b.url]["outages"] == 1
    judged(run, a.url, "one")
    assert same_tables(run, "judge", "one")


@pytest.mark.full
def test_a_server_of_another_model_is_refused_by_name(up: Callable[..., ServerProcess], run: Path) -> None:
    """By the name that it lists, also where no name was given; and by its logprobs, where both show them."""
    a, b, other, mute = up("--weights", "3"), up("--name", "other"), up("--weights", "4"), up()
    for given, says in (
        ([a.url, b.url], f"{b.url} serves "),
        ([a.url, other.url], f"weights: other tokens are likely for the same prompts at {a.url} and {other.url}"),
    ):
        with pytest.raises(UsageError) as caught:
            judged(run, given)
        assert says in caught.value.message
    with pytest.raises(UsageError, match=r"must serve the same model: model: judge at .*, other at"):
        judged(run, [a.url, b.url], model=None, name="unnamed")
    assert not list(run.glob("judge-*/comparisons.parquet"))
    assert judged(run, [a.url, mute.url], "mute").exit_code == 0
    assert [server["logprob_difference"] for server in servers_of(run, "mute").values()] == [0.0, None]


@pytest.mark.full
def test_a_file_gains_a_server_while_it_runs(up: Callable[..., ServerProcess], run: Path, tmp_path: Path) -> None:
    """A line that is added is a server more; one that is removed gets no more requests."""
    a, b = up(*PACED), up(*PACED)
    listed = tmp_path / "servers.txt"
    listed.write_text(f"# node 1\n{a.url}\n")
    watch = Watcher((4, lambda: listed.write_text(f"{b.url}/v1\n") and None))
    assert judged(run, f"@{listed}", progress=watch, concurrency=4).exit_code == 0
    states = {url: (server["state"], server["answers"] > 0) for url, server in servers_of(run).items()}
    assert states == {a.url: ("removed", True), b.url: ("up", True)}
    assert f"{a.url} is no longer listed and gets no more requests" in watch.said


def test_all_servers_lost_are_the_judge_s_fault_and_repaid_is_nothing(
    up: Callable[..., ServerProcess], run: Path
) -> None:
    """Exit 3 naming the judge when none came back in time; no verdict was made of it, and a rerun judges only the rest."""
    a, b = up(*PACED), up(*PACED)

    def both() -> None:
        a.kill()
        b.kill()

    watch = Watcher((20, both))
    with pytest.raises(OutsideError, match="none of 2 servers can be reached") as caught:
        judged(run, [a.url, b.url], progress=watch, wait_for_server=0.5)
    assert (caught.value.system, caught.value.exit_code) == ("judge", 3)
    assert "no server can be reached, retrying for 0.5 s (--wait-for-server)" in watch.said
    assert not (run / "judge-judge" / "comparisons.parquet").exists()
    b.start()
    summary = judged(run, b.url)
    assert summary.comparisons["judged"] == 120
    assert summary.cached >= 20
    assert summary.asked + summary.cached == 120


@pytest.mark.full
def test_one_server_that_stops_answering_is_waited_for(up: Callable[..., ServerProcess], run: Path) -> None:
    """As with several: killed and started again, with no retries left for it, nothing is missing."""
    a = up(*PACED)
    watch = Watcher((20, a.kill))
    watch.on("server unreachable, retrying for 10 min (wait_for_server=)", a.start)
    watch.on("server reachable again after", lambda: None)
    summary = judged(run, a.url, progress=watch, retries=1)
    assert watch.expected == []
    assert (summary.comparisons["judged"], summary.exit_code) == (120, 0)


def test_what_one_server_refuses_is_no_verdict_of_another(run: Path) -> None:
    """A comparison that a server answers with garbage goes to the other; one that is refused has no numbers."""
    bad, good = Behaviour(always="garbage"), Behaviour(poisoned={"q=1 t0r0": "400"})
    with judge_server(bad) as a, judge_server(good) as b:
        summary = judged(run, [a, b], constrain="off", retries=1)
        asked_bad = len(bad.requests)
        faults = servers_of(run)[a]["faults"]
    assert summary.comparisons == {"judged": 114, "unparsed": 0, "refused": 6, "failed": 0}
    assert asked_bad == faults > 0
    refused = [row for row in read_table(run / "judge-judge", COMPARISONS).to_pylist() if row["status"] == "refused"]
    assert {row["score_1"] for row in refused} == {None}


def test_the_command_line_repeats_endpoint(
    up: Callable[..., ServerProcess], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--endpoint A --endpoint B`` uses both; run.json has the URLs as they were given."""
    a, b = up(*PACED), up(*PACED)
    assert main(["judge", str(run), "--endpoint", a.url, "--endpoint", b.url, "-m", "judge", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"]["judged"] == 120
    assert read_run_json(run / "judge-judge")["config"]["endpoint"] == [a.url, b.url]
    assert {server["state"] for server in servers_of(run).values()} == {"up"}


@pytest.mark.parametrize("several", [False, True])
def test_a_judge_without_a_name_has_that_of_the_served_model(
    several: bool, up: Callable[..., ServerProcess], run: Path
) -> None:
    """The folder, the reward and the identity are those of the same judgement with --model."""
    servers = [up() for _ in range(2 if several else 1)]
    endpoint = [server.url for server in servers]
    summary = judged(run, endpoint, model=None, name=None, limit=1)
    assert (Path(summary.path).name, summary.name) == ("judge-judge", "judge")
    again = judged(run, endpoint, name=None, limit=1)
    assert (again.path, again.judge, again.asked) == (summary.path, summary.judge, 0)


@pytest.mark.full
def test_a_server_that_lists_no_model_yet_is_left_out_until_it_does(
    up: Callable[..., ServerProcess], run: Path
) -> None:
    """It is loading: the others work, and it is named; alone it is a fault of the judge, not of the command."""
    a, b, watch = up(*PACED), up("--name", ""), Watcher()
    assert judged(run, [a.url, b.url], model=None, progress=watch).exit_code == 0
    assert any(f"{b.url} is not used until it answers" in text and "lists no models" in text for text in watch.said)
    with pytest.raises(OutsideError, match="lists no models"):
        judged(run, b.url, name="alone", model=None)
