"""Several real servers behind one command: they share the work, serve the same, and may go and return."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.collect.settings import CollectConfig
from gymdata.engines.port import Generation, SampleRequest
from gymdata.engines.servers.many import Servers
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import DataError, OutsideError, UsageError
from gymdata.store import read_run_json
from tests.collect.saved_rows import failures_of, rows_of
from tests.faulty_server import Settings
from tests.servers import ServerProcess, Watcher

pytestmark = pytest.mark.torch


Serve = Callable[[Settings], str]
Start = Callable[..., ServerProcess]
Work = Callable[[Servers], Awaitable[Any]]
AWAY = "http://127.0.0.1:9"


@pytest.fixture
def settings(tasks: Any, tmp_path: Path, served: dict[str, Any]) -> dict[str, Any]:
    """A collect of 240 rollouts of 60 tasks."""
    return {"tasks": str(tasks(60)), "output": tmp_path / "run", **served, "num_rollouts": 4, "concurrency": 32}


@pytest.fixture
def slow(up: Start) -> Callable[[], ServerProcess]:
    """Starts servers that take long enough for something to happen meanwhile."""
    return lambda: up("--latency", "0.1", "--slots", "2")


def sampled(urls: Sequence[str], work: Work, retries: int = 0) -> Any:
    """What ``work`` makes of servers that were started."""

    async def main() -> Any:
        members = [ServerSampler(url, "fake", max_retries=retries, pause_s=0.01, alone=False) for url in urls]
        servers = Servers(members)
        await servers.start()
        try:
            return await work(servers)
        finally:
            await servers.close()

    return asyncio.run(main())


def request(rollout: str, turn: int, group: str = "", n: int = 1) -> SampleRequest:
    return SampleRequest(f"{rollout}-{turn}", [1, 2, 3], 4, 1, n, group=group)


async def firsts(servers: Servers, n: int) -> list[str | None]:
    """The servers that sampled the first turns of ``n`` rollouts."""
    answers = await asyncio.gather(*(servers.sample(request(f"r{k}", 0)) for k in range(n)))
    return [generation.server for (generation,) in answers]


def without_server(run: Path) -> list[dict[str, Any]]:
    rows = rows_of(run)
    for row in rows:
        for turn in row["turns"]:
            del turn["server"]
        del row["run_id"], row["group_id"], row["rollout_id"]
    return rows


def test_two_servers_share_the_work_and_every_turn_names_its_own(
    server: Serve, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The rows are those of one server but for who sampled them; the rollouts of a group have one; run.json has both."""
    a, b = server(Settings(latency=0.02)), server(Settings(latency=0.02))
    gymdata.collect(endpoint=[a, b], **settings)
    gymdata.collect(endpoint=a, **{**settings, "output": tmp_path / "one"})
    assert without_server(tmp_path / "run") == without_server(tmp_path / "one")
    by_task: dict[str, set[str]] = {}
    for row in rows_of(tmp_path / "run"):
        by_task.setdefault(row["task_id"], set()).update(turn["server"] for turn in row["turns"])
    servers = [next(iter(names)) for names in by_task.values() if len(names) == 1]
    assert len(servers) == 60
    assert min(servers.count(a), servers.count(b)) >= 15
    assert read_run_json(tmp_path / "run")["engine"]["servers"] == [a, b]
    assert gymdata.validate(tmp_path / "run", ignore=["B"]).exit_code == 0


def test_a_server_that_is_killed_and_restarted_twice_loses_nothing(
    slow: Start, settings: dict[str, Any], tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests go to the other, it is used again when it returns, and every rollout is there once, as without faults."""
    monkeypatch.setattr("gymdata.engines.servers.many.OUT_S", 0.2)
    a, b = slow(), slow()
    watch = Watcher((40, b.kill))
    for after in (b.kill, lambda: None):
        watch.on(f"{b.url} gets no requests for 0.2 s: {b.url} cannot be reached", b.start)
        watch.on(f"{b.url} answers again", after)
    settings["tasks"] = str(tasks(120))
    summary = gymdata.collect(endpoint=f"{a.url},{b.url}", progress=watch, **settings)
    assert watch.expected == []
    assert (summary.rollouts, summary.pending, summary.exit_code) == (480, 0, 0)
    assert failures_of(tmp_path / "run") == []
    gymdata.collect(endpoint=a.url, **{**settings, "output": tmp_path / "one"})
    assert without_server(tmp_path / "run") == without_server(tmp_path / "one")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Settings(name="other"), "serves other, not fake"),
        (Settings(mode="raw"), "logprobs_mode is processed_logprobs at "),
        (Settings(max_model_len=2048), "max_model_len is 4096 at "),
    ],
)
def test_a_server_of_another_policy_is_refused_by_name(
    server: Serve, settings: dict[str, Any], tmp_path: Path, other: Settings, named: str
) -> None:
    """Another model, kind of log-probabilities or context: it is named and nothing is collected."""
    a, b = server(Settings()), server(other)
    with pytest.raises(UsageError) as caught:
        gymdata.collect(endpoint=[a, b], **settings)
    assert named in caught.value.message
    assert b in caught.value.message
    assert not any((tmp_path / "run").glob("rollouts/part*"))


@pytest.mark.full
def test_servers_that_are_starting_are_retried_as_one_is(server: Serve, settings: dict[str, Any]) -> None:
    """Both answer 500 at first: the command begins when they answer."""
    urls = [server(Settings(mode="500", fail_first=2)) for _ in range(2)]
    assert gymdata.collect(endpoint=urls, **settings).rollouts == 240


@pytest.mark.full
def test_a_server_that_refuses_everybody_is_left_out_while_others_work(
    server: Serve, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A key that expired at one of two: its requests go to the other, and it is named; at all of them it ends the run."""
    behind = Settings(latency=0.02), Settings(mode="401", skip=20)
    urls, watch = [server(one) for one in behind], Watcher()
    summary = gymdata.collect(endpoint=urls, progress=watch, **settings)
    assert (summary.rollouts, summary.pending, summary.exit_code) == (240, 0, 0)
    assert failures_of(tmp_path / "run") == []
    assert any(text.startswith(f"{urls[1]} gets no requests for 30 s") and "401" in text for text in watch.said)
    for one in behind:
        one.mode, one.skip = "401", 20
    with pytest.raises(OutsideError, match=r"none of 2 servers can be reached.*401"):
        gymdata.collect(endpoint=urls, **{**settings, "output": tmp_path / "other"})


def test_a_server_that_is_away_at_the_start_is_left_out(
    server: Serve, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The run says so with the reason, and begins with the other."""
    watch, url = Watcher(), server(Settings())
    summary = gymdata.collect(endpoint=[AWAY, url], progress=watch, **settings)
    assert summary.rollouts == 240
    assert any(f"a server is left out: engine: {AWAY} cannot be reached" in text for text in watch.said)
    assert read_run_json(tmp_path / "run")["engine"]["servers"] == [url]


def test_a_dead_engine_behind_one_of_two_servers_costs_no_request(server: Serve) -> None:
    """Its API answers that the engine is dead: every request is answered by the other, and it is named."""
    messages: list[str] = []

    async def work(servers: Servers) -> list[str | None]:
        servers.wait_for_server(60.0, messages.append)
        return await firsts(servers, 40)

    a, b = server(Settings(mode="dead", skip=2, latency=0.02)), server(Settings(latency=0.02))
    assert sampled([a, b], work) == [b] * 40
    assert messages == [f"{a} gets no requests for 30 s: {a} cannot be reached: its engine died"]


def test_one_broken_connection_leaves_other_requests_alone(server: Serve) -> None:
    """What the server of a broken connection is sampling meanwhile is its own answer, and is not requested twice."""
    behind = [Settings(latency=2.0), Settings(latency=2.0)]

    async def work(servers: Servers) -> tuple[Any, Any]:
        waiting = asyncio.ensure_future(servers.sample(request("r0", 0, "g")))
        while not (first := [one for one in behind if one.requests and one.requests[-1].get("request_id") == "r0-0"]):
            await asyncio.wait([waiting], timeout=0.01)
        first[0].latency, first[0].mode, first[0].fail_first = 0.0, "disconnect", 1
        return await servers.sample(request("r1", 0, "g")), await waiting

    (broken,), (kept,) = sampled([server(one) for one in behind], work)
    assert broken.server != kept.server
    ids = [body.get("request_id") for one in behind for body in one.requests]
    assert (ids.count("r0-0"), ids.count("r1-0")) == (1, 2)


@pytest.mark.full
def test_no_server_at_all_is_an_outage(settings: dict[str, Any]) -> None:
    """Exit 3, as with one."""
    with pytest.raises(OutsideError, match=f"{AWAY} cannot be reached") as caught:
        gymdata.collect(endpoint=[AWAY, "http://127.0.0.1:10"], retries=0, **settings)
    assert caught.value.exit_code == 3


def test_all_servers_lost_are_waited_for_and_then_it_ends_safely(slow: Start, settings: dict[str, Any]) -> None:
    """Exit 3 when none came back in time; what is there stays, and the same command makes the rest."""
    a, b = slow(), slow()
    watch = Watcher((40, lambda: (a.kill(), b.kill())))
    with pytest.raises(OutsideError, match="none of 2 servers can be reached") as caught:
        gymdata.collect(endpoint=[a.url, b.url], progress=watch, wait_for_server=0.5, **settings)
    assert "are safe; rerun the same command to resume" in str(caught.value.hint)
    assert "no server can be reached, retrying for 0.5 s (wait_for_server=)" in watch.said
    (outage,) = read_run_json(settings["output"])["attempts"][-1]["outages"]
    assert outage["seconds"] is None
    a.start()
    b.start()
    assert gymdata.collect(endpoint=[b.url, a.url], **settings).rollouts == 240


def test_servers_that_all_come_back_go_on(slow: Start, settings: dict[str, Any], tmp_path: Path) -> None:
    """Nothing fails meanwhile, and run.json says for how long there was none."""
    a, b = slow(), slow()
    watch = Watcher((40, lambda: (a.kill(), b.kill())))
    watch.on("no server can be reached, retrying for 600 s", a.start)
    summary = gymdata.collect(endpoint=[a.url, b.url], progress=watch, **settings)
    assert (summary.rollouts, summary.pending, summary.failures, summary.exit_code) == (240, 0, 0, 0)
    assert f"{a.url} answers again" in watch.said
    (outage,) = read_run_json(tmp_path / "run")["attempts"][-1]["outages"]
    assert outage["seconds"] > 0


def test_endpoints_are_given_in_three_ways(tmp_path: Path) -> None:
    """Repeated, as a comma list, in a file with comments; a file without a URL, or that is not there, is named."""
    listed = tmp_path / "servers"
    listed.write_text("# two\nhttp://b:1, http://c:1\n\nhttp://d:1/v1 # again\n")
    config = CollectConfig.load(None, {"tasks": "t", "endpoint": ["http://a:1/v1,http://b:1", f"@{listed}"]})
    assert config.endpoint == ["http://a:1/v1", "http://b:1", "http://b:1", "http://c:1", "http://d:1/v1"]
    listed.write_bytes("\ufeffhttp://b:1\r\n".encode())
    assert CollectConfig.load(None, {"tasks": "t", "endpoint": f"@{listed}"}).endpoint == ["http://b:1"]
    listed.write_text("# none\n")
    assert main(["collect", "t.jsonl", "--endpoint", f"@{listed}", "-m", "x"]) != 0
    with pytest.raises(DataError, match="nowhere"):
        CollectConfig.load(None, {"tasks": "t", "endpoint": f"@{tmp_path / 'nowhere'}"})


def test_a_server_that_is_named_twice_is_one() -> None:
    """With and without /v1."""
    urls = ("http://a:1/v1", "http://b:1", "http://a:1")
    assert [member.base for member in Servers([ServerSampler(url) for url in urls]).members] == [
        "http://a:1",
        "http://b:1",
    ]


def test_turns_of_a_group_stay_with_their_server_and_the_rest_is_spread(server: Serve) -> None:
    """The prefix is in that server's cache; a group's later members and turns follow its first request."""

    async def work(servers: Servers) -> list[list[Generation]]:
        first = await asyncio.gather(*(servers.sample(request(f"r{k}", 0, f"g{k}", 2)) for k in range(40)))
        later = await asyncio.gather(*(servers.sample(request(f"r{k}", 1, f"g{k}")) for k in range(40)))
        members = await asyncio.gather(*(servers.sample(request(f"m{k}", 1, f"g{k}")) for k in range(40)))
        return [*first, *later, *members]

    a, b = server(Settings()), server(Settings())
    by = [generations[0].server for generations in sampled([a, b], work)]
    assert min(by[:40].count(a), by[:40].count(b)) >= 10
    assert by[40:80] == by[80:] == by[:40]


def test_requests_that_a_busy_server_refuses_are_answered_by_the_other(server: Serve) -> None:
    """429 says that it has enough: it stays in use, and no request is lost."""

    async def work(servers: Servers) -> list[str | None]:
        said: list[str] = []
        servers.wait_for_server(60.0, said.append)
        by = await firsts(servers, 200)
        assert said == []
        return by

    a, b = server(Settings(latency=0.01)), server(Settings(latency=0.01, mode="429", skip=2))
    assert sampled([a, b], work, retries=1) == [a] * 200


@pytest.mark.parametrize(("mode", "named"), [("too_many", "expected at most 4"), ("garbage", "not a JSON object")])
def test_an_answer_that_is_no_use_is_its_servers_fault(server: Serve, mode: str, named: str) -> None:
    """The request goes to the other server, and fails as the engine's fault where there is no other."""

    async def work(servers: Servers) -> list[str | None]:
        return await firsts(servers, 8)

    faulty = [server(Settings(mode=mode, skip=2)) for _ in range(3)]
    good = server(Settings())
    assert sampled([good, faulty[0]], work, retries=1) == [good] * 8
    with pytest.raises(OutsideError, match=named) as caught:
        sampled(faulty[1:], work, retries=1)
    assert (caught.value.system, caught.value.fatal) == ("engine", False)


def test_the_command_line_repeats_endpoint(
    server: Serve, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--endpoint A --endpoint B`` uses both, and the summary is as ever."""
    a, b = server(Settings()), server(Settings())
    words = ["collect", settings["tasks"], "--endpoint", a, "--endpoint", b, "-m", "fake", "--tokenizer",
             settings["tokenizer"], "-o", str(tmp_path / "run"), "-n", "5", "--max-tokens", "4", "--json"]  # fmt: skip
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["rollouts"] == 5
