"""Several real servers behind one command: they share the work, prove that they serve the same, and may go and return."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.collect.settings import CollectConfig
from gymdata.engines.port import Generation, SampleRequest
from gymdata.engines.servers.fingerprint import Fingerprint
from gymdata.engines.servers.many import Endpoints, Servers
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import OutsideError, UsageError
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


def sampled(urls: Sequence[str], work: Work, sampler: type[ServerSampler] = ServerSampler, **options: Any) -> Any:
    """What ``work`` makes of servers that were compared, with samplers that try once."""

    async def main() -> Any:
        servers = Servers(Endpoints(urls), lambda url: sampler(url, "fake", max_retries=0), **options)
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
    """The rows are those of one server but for who sampled them; run.json counts each server's generations."""
    a, b = server(Settings(latency=0.02)), server(Settings(latency=0.02))
    gymdata.collect(endpoint=[a, b], **settings)
    gymdata.collect(endpoint=a, **{**settings, "output": tmp_path / "one"})
    assert without_server(tmp_path / "run") == without_server(tmp_path / "one")
    sampled_by = [turn["server"] for row in rows_of(tmp_path / "run") for turn in row["turns"]]
    counts = {s["url"]: s["generations"] for s in read_run_json(tmp_path / "run")["engine"]["servers"]}
    assert counts == {a: sampled_by.count(a), b: sampled_by.count(b)}
    assert min(counts.values()) >= 60
    assert gymdata.validate(tmp_path / "run", ignore=["B"]).exit_code == 0


def test_a_server_that_is_killed_and_restarted_twice_loses_nothing(
    slow: Start, settings: dict[str, Any], tasks: Any, tmp_path: Path
) -> None:
    """Its requests go to the other, it is used again when it returns, and every rollout is there once, as without faults."""
    a, b = slow(), slow()
    watch = Watcher((40, b.kill))
    for after in (b.kill, lambda: None):
        watch.on(f"{b.url} is not used until it answers again (1 of 2 left)", b.start)
        watch.on(f"{b.url} is used again after", after)
    settings["tasks"] = str(tasks(120))
    summary = gymdata.collect(endpoint=f"{a.url},{b.url}", progress=watch, **settings)
    assert watch.expected == []
    assert (summary.rollouts, summary.pending, summary.exit_code) == (480, 0, 0)
    assert len({row["rollout_id"] for row in rows_of(tmp_path / "run")}) == 480
    assert failures_of(tmp_path / "run") == []
    (of_b,) = (s for s in read_run_json(tmp_path / "run")["engine"]["servers"] if s["url"] == b.url)
    assert of_b["outages"] == 2


@pytest.mark.parametrize(
    ("other", "named"),
    [(Settings(weights=9), "weights: "), (Settings(name="other"), "other"), (Settings(mode="raw"), "logprobs: ")],
)
def test_a_server_of_another_policy_is_refused_by_name(
    server: Serve, settings: dict[str, Any], tmp_path: Path, other: Settings, named: str
) -> None:
    """Other weights, another model, another kind of log-probabilities: both servers are named and nothing is collected."""
    a, b = server(Settings()), server(other)
    with pytest.raises(UsageError) as caught:
        gymdata.collect(endpoint=[a, b], **settings)
    assert named in caught.value.message
    assert b in caught.value.message
    assert not any((tmp_path / "run").glob("rollouts/part*"))


@pytest.mark.full
def test_a_server_that_returns_with_other_weights_is_refused(
    slow: Start, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The run goes on with the first, says why, and nothing was sampled by the other since."""
    a, b = slow(), slow()

    def other() -> None:
        b.words = (*b.words, "--weights", "9")
        b.start()

    watch = Watcher((40, b.kill))
    watch.on(f"{b.url} is not used until it answers again (1 of 2 left)", other)
    summary = gymdata.collect(endpoint=[a.url, b.url], progress=watch, **settings)
    assert summary.rollouts == 240
    assert any(text.startswith(f"{b.url} is refused: ") and "weights" in text for text in watch.said)
    gymdata.collect(endpoint=a.url, **{**settings, "output": tmp_path / "one"})
    assert without_server(tmp_path / "run") == without_server(tmp_path / "one")


@pytest.mark.full
def test_a_server_that_returns_before_it_lists_the_model_is_tried_again(
    slow: Start, settings: dict[str, Any], tmp_path: Path
) -> None:
    """As behind a router, or where adapters are loaded later: it is named once, and used when it can serve the run."""
    a, b = slow(), slow()
    ready = b.words

    def with_words(*words: str) -> None:
        b.kill()
        b.words = words
        b.start()

    watch = Watcher((8, b.kill))
    watch.on(f"{b.url} is not used until it answers again", lambda: with_words(*ready, "--name", "other"))
    watch.on(f"{b.url} is refused until that changes: ", lambda: with_words(*ready))
    watch.on(f"{b.url} is used again after", lambda: None)
    summary = gymdata.collect(endpoint=[a.url, b.url], progress=watch, **settings)
    assert watch.expected == []
    assert (summary.rollouts, summary.pending) == (240, 0)
    assert sum("is refused" in text for text in watch.said) == 1
    assert [s["state"] for s in read_run_json(tmp_path / "run")["engine"]["servers"]] == ["up", "up"]


@pytest.mark.full
def test_servers_that_are_all_refused_are_not_waited_for(slow: Start, settings: dict[str, Any]) -> None:
    """Both return with other weights: nothing can come of waiting, and the error says what is wrong with them."""
    both = slow(), slow()

    def kill() -> None:
        for one in both:
            one.kill()

    def others() -> None:
        for one in both:
            one.words = ("--weights", "9")
            one.start()

    watch = Watcher((8, kill))
    watch.on("no server can be reached, retrying for 1 min", others)
    with pytest.raises(OutsideError, match=r"none of 2 servers can be used: .*weights: .* at http://.* at first"):
        gymdata.collect(endpoint=[one.url for one in both], progress=watch, wait_for_server=60, **settings)


@pytest.mark.full
def test_servers_that_are_starting_are_retried_as_one_is(server: Serve, settings: dict[str, Any]) -> None:
    """Both answer 500 at first: the command begins when one of them answers."""
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
    lost = f"{urls[1]} is not used until it answers again (1 of 2 left)"
    assert any(text.startswith(lost) and "(401)" in text for text in watch.said)
    for one in behind:
        one.mode, one.skip = "401", 20
    with pytest.raises(OutsideError, match=r"\(401\)"):
        gymdata.collect(endpoint=urls, **{**settings, "output": tmp_path / "other"})


@pytest.mark.full
def test_a_file_of_servers_is_read_again(server: Serve, settings: dict[str, Any], tmp_path: Path) -> None:
    """A line that is added while it runs is a server more; one that is removed gets no more requests."""
    a, b = (server(Settings(latency=0.1, slots=2)) for _ in range(2))
    listed = tmp_path / "servers.txt"
    listed.write_text(f"# node 1\n{a}/v1\n")
    watch = Watcher((8, lambda: listed.write_text(f"{b}\n")))
    summary = gymdata.collect(endpoint=f"@{listed}", progress=watch, **settings)
    account = read_run_json(tmp_path / "run")["engine"]["servers"]
    states = {one["url"]: (one["state"], one["generations"] > 0) for one in account}
    assert states == {a: ("removed", True), b: ("up", True)}
    assert summary.rollouts == 240
    assert f"{a} is no longer listed and gets no more requests" in watch.said


@pytest.mark.full
def test_a_server_that_never_answers_does_not_hold_up_the_others(
    server: Serve, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is away, and one that takes the connection and is silent, the run says so and begins with the other; who
    is away in the end is in the remarks with the reason."""
    monkeypatch.setattr(Servers, "late_s", 0.3)
    watch = Watcher()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        summary = gymdata.collect(endpoint=[url, server(Settings()), AWAY], progress=watch, **settings)
    assert summary.rollouts == 240
    for gone in (url, AWAY):
        assert any(f"{gone} is not used until it answers" in text for text in watch.said)
    assert any("servers are not used in the end: " in text and f"{AWAY} (" in text for text in watch.said)


def test_a_dead_engine_behind_one_of_two_servers_costs_no_request(server: Serve) -> None:
    """Its API answers that the engine is dead: every request is answered by the other, and it is named once."""
    messages: list[str] = []

    async def work(servers: Servers) -> list[str | None]:
        servers.wait_for_server(60.0, messages.append)
        return await firsts(servers, 40)

    a, b = server(Settings(mode="dead", skip=6, latency=0.02)), server(Settings(latency=0.02))
    assert sampled([a, b], work) == [b] * 40
    assert [text for text in messages if a in text] == [
        f"{a} is not used until it answers again (1 of 2 left): engine: {a} cannot be reached: its engine died"
    ]


@pytest.mark.full
def test_one_broken_connection_leaves_other_requests_alone(server: Serve) -> None:
    """The server is compared again and used; what it was sampling meanwhile is not requested twice."""
    behind = [Settings(), Settings()]

    async def work(servers: Servers) -> None:
        back = asyncio.Event()
        servers.wait_for_server(60.0, lambda text: back.set() if "is used again" in text else None)
        for one in behind:
            one.latency = 3.0
        waiting = [asyncio.ensure_future(servers.sample(request(f"r{k}", 0))) for k in (0, 1)]
        while not all(one.requests[-1].get("request_id") for one in behind):
            await asyncio.wait(waiting, timeout=0.01)
        behind[0].latency, behind[0].mode, behind[0].fail_first = 0.0, "disconnect", 1
        await servers.sample(request("r2", 0))
        await asyncio.wait_for(back.wait(), 30)
        await asyncio.gather(*waiting)

    sampled([server(one) for one in behind], work)
    ids = [body.get("request_id") for one in behind for body in one.requests]
    assert (ids.count("r0-0"), ids.count("r1-0"), ids.count("r2-0")) == (1, 1, 2)


@pytest.mark.full
def test_no_server_at_all_is_an_outage(settings: dict[str, Any]) -> None:
    """Exit 3, as with one."""
    with pytest.raises(OutsideError, match=f"none of 2 servers can be reached: {AWAY} cannot be reached"):
        gymdata.collect(endpoint=[AWAY, "http://127.0.0.1:10"], retries=0, **settings)


def test_all_servers_lost_are_waited_for_and_then_it_ends_safely(slow: Start, settings: dict[str, Any]) -> None:
    """Exit 3 when none came back in time; what is there stays, and the same command makes the rest."""
    a, b = slow(), slow()
    watch = Watcher((40, lambda: (a.kill(), b.kill())))
    with pytest.raises(OutsideError, match="none of 2 servers can be reached") as caught:
        gymdata.collect(endpoint=[a.url, b.url], progress=watch, wait_for_server=0.5, **settings)
    assert "are safe; rerun the same command to resume" in str(caught.value.hint)
    assert "no server can be reached, retrying for 0.5 s (--wait-for-server)" in watch.said
    a.start()
    b.start()
    assert gymdata.collect(endpoint=[b.url, a.url], **settings).rollouts == 240


@pytest.mark.full
def test_a_list_of_servers_that_are_not_there_is_an_outage(
    server: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file names others while it runs, they are waited for as lost ones are; what is wrong with the file is named
    once for as long as it is wrong."""
    monkeypatch.setattr("gymdata.engines.servers.many._READ_S", 0.0)
    messages: list[str] = []
    url, listed = server(Settings()), tmp_path / "servers.txt"
    listed.write_text(url)

    async def work(servers: Servers) -> None:
        unlisted, wrong = asyncio.Event(), asyncio.Event()

        def hear(text: str) -> None:
            messages.append(text)
            (wrong if "stays as it was" in text else unlisted).set()

        servers.wait_for_server(1.0, hear)
        for garbage in ("no url", "ftp://x"):
            listed.write_text(garbage)
            await asyncio.wait_for(wrong.wait(), 30)
            wrong.clear()
        await servers.sample(request("r", 0))
        listed.write_text(AWAY)
        await asyncio.wait_for(unlisted.wait(), 30)
        with pytest.raises(OutsideError, match=r"none of 2 servers can be reached.*127\.0\.0\.1:9"):
            await asyncio.wait_for(servers.sample(request("r", 1)), 30)

    sampled([f"@{listed}"], work)
    assert messages == [
        *(
            f"the list of servers stays as it was: {listed}: --endpoint: got {got!r}, expected a URL such as "
            "http://localhost:8000"
            for got in ("no", "ftp://x")
        ),
        f"{url} is no longer listed and gets no more requests",
        "no server can be reached, retrying for 1 s (--wait-for-server)",
    ]


@pytest.mark.full
def test_a_server_that_leaves_the_list_while_it_is_checked_is_not_used(
    server: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proof comes when it is no longer wanted."""
    monkeypatch.setattr("gymdata.engines.servers.many._READ_S", 0.0)
    a, b = server(Settings()), server(Settings())
    listed = tmp_path / "servers.txt"
    listed.write_text(a)
    checked, go, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(ServerSampler):
        async def fingerprint(self) -> Fingerprint:
            if self.base == b:
                checked.set()
                await go.wait()
            return await super().fingerprint()

    async def work(servers: Servers) -> list[dict[str, Any]]:
        servers.wait_for_server(1.0, lambda text: left.set() if "no longer listed" in text else None)
        listed.write_text(f"{a} {b}")
        await asyncio.wait_for(checked.wait(), 30)
        listed.write_text(a)
        await asyncio.wait_for(left.wait(), 30)
        go.set()
        await asyncio.wait_for(asyncio.gather(*(s.reviving for s in servers.servers if s.reviving)), 30)
        return servers.account()

    account = sampled([f"@{listed}"], work, Slow)
    assert [(one["url"], one["state"]) for one in account] == [(a, "up"), (b, "removed")]


def test_endpoints_are_given_in_three_ways(tmp_path: Path) -> None:
    """Repeated, as a comma list, in a file; each once, with or without /v1; a file without a URL is named."""
    listed = tmp_path / "servers"
    listed.write_text("# two\nhttp://b:1, http://c:1\n\nhttp://a:1/v1 # again\n")
    config = CollectConfig.load(None, {"tasks": "t", "endpoint": ["http://a:1/v1,http://b:1", f"@{listed}"]})
    assert list(Endpoints(config.endpoint).read()) == ["http://a:1", "http://b:1", "http://c:1"]
    listed.write_bytes("\ufeffhttp://b:1\r\n".encode())
    assert list(Endpoints([f"@{listed}"]).read()) == ["http://b:1"]
    listed.write_text("# none\n")
    assert main(["collect", "t.jsonl", "--endpoint", f"@{listed}", "-m", "x"]) != 0


def test_turns_of_a_rollout_stay_with_their_server_and_the_rest_is_spread(server: Serve) -> None:
    """The prefix is in that server's cache; a group's later members follow its first request."""

    async def work(servers: Servers) -> list[list[Generation]]:
        first = await asyncio.gather(*(servers.sample(request(f"r{k}", 0, f"g{k}", 2)) for k in range(8)))
        later = await asyncio.gather(*(servers.sample(request(f"r{k}", 1, f"g{k}")) for k in range(8)))
        members = await asyncio.gather(*(servers.sample(request(f"m{k}", 1, f"g{k}")) for k in range(8)))
        return [*first, *later, *members]

    a, b = server(Settings(latency=0.02)), server(Settings(latency=0.02))
    by = [generations[0].server for generations in sampled([a, b], work)]
    assert by[:8].count(a) == by[:8].count(b) == 4
    assert by[8:16] == by[16:] == by[:8]


@pytest.mark.full
def test_servers_without_a_request_take_turns(server: Serve) -> None:
    """One request at a time is no reason to use one server only: the one that has answered least is next."""

    async def work(servers: Servers) -> list[int]:
        for k in range(6):
            await servers.sample(request(f"r{k}", 0, f"g{k}", 2))
        return [one.generations for one in servers.servers]

    assert sampled([server(Settings()), server(Settings())], work) == [6, 6]


def test_requests_that_a_busy_server_refuses_are_answered_by_the_other(server: Serve) -> None:
    """429 says that it has enough: it stays in use, and no request is lost."""

    async def work(servers: Servers) -> list[tuple[int, bool]]:
        assert len(await firsts(servers, 200)) == 200
        return [(one.generations, one.up) for one in servers.servers]

    urls = [server(Settings(latency=0.01)), server(Settings(latency=0.01, mode="429", skip=6))]
    assert sampled(urls, work, pause_s=0.01) == [(200, True), (0, True)]


@pytest.mark.parametrize(("mode", "named"), [("too_many", "expected at most 4"), ("endless", "more than requested")])
def test_a_longer_answer_than_was_requested_is_its_servers_fault(server: Serve, mode: str, named: str) -> None:
    """Too many tokens or bytes: the request goes to the other server, and fails where there is no other."""

    async def work(servers: Servers) -> list[tuple[int, bool]]:
        await firsts(servers, 8)
        return [(one.generations, one.faults > 0) for one in servers.servers]

    faulty = [server(Settings(mode=mode, skip=6)) for _ in range(2)]
    assert sampled([server(Settings()), faulty[0]], work, retries=1, pause_s=0.01) == [(8, False), (0, True)]
    with pytest.raises(OutsideError, match=named):
        sampled(faulty[1:], work, retries=1, pause_s=0.01)


def test_the_command_line_repeats_endpoint(
    server: Serve, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--endpoint A --endpoint B`` uses both, and the summary is as ever."""
    a, b = server(Settings()), server(Settings())
    words = ["collect", settings["tasks"], "--endpoint", a, "--endpoint", b, "-m", "fake", "--tokenizer",
             settings["tokenizer"], "-o", str(tmp_path / "run"), "-n", "5", "--max-tokens", "4", "--json"]  # fmt: skip
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["rollouts"] == 5
    recorded = read_run_json(tmp_path / "run")["attempts"][0]["operation"]["endpoint"]
    assert recorded == [a, b]
