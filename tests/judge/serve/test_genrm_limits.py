"""What the compare server refuses, and how it stops: every answer is JSON and says what to do."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.urls import host_name
from gymdata.workers.serving import shape
from tests.forks import Forks
from tests.judge.serve.conftest import (
    QUESTION,
    Server,
    compare,
    members_waiting,
    one_server,
    post_all,
    response,
    until,
    verify_all,
    verify_body,
)
from tests.judge_server import Behaviour

JSON = {"Content-Type": "application/json"}


def send(server: Server, path: str, body: bytes, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    """(status, JSON), of a body as it is."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def nested(levels: int) -> bytes:
    """A request of that many levels: the body, a list, an object, and lists in it."""
    inside = levels - 3
    return b'{"conversation_history": [{"content": ' + b"[" * inside + b"]" * inside + b'}], "response_objs": []}'


@pytest.fixture(scope="module")
def limited(processes: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with low limits."""
    flags = ["--max-body-bytes", "2000", "--max-responses", "3", "--max-depth", "9"]
    flags += ["--allow-host", "Judge.example", "--allow-host", "judge2"]
    with one_server(processes, tmp_path_factory.mktemp("limited"), *flags) as (_, server):
        yield server


# --- limits -------------------------------------------------------------------------------------------------------


def test_each_limit_is_an_answer_that_names_itself(limited: Server):
    """Over a limit: a 4xx with what was got, the limit, and the flag that raises it; at the limit: an answer."""
    assert compare(limited, "a", "b", "c")[0] == 200
    assert send(limited, "/compare", nested(9))[0] == 200
    for path in ("/compare", "/verify"):
        for body, status, kind, got, limit, flag in (
            (b" " * 2001, 413, "body", 2001, 2000, "--max-body-bytes"),
            (nested(10), 422, "depth", 10, 9, "--max-depth"),
        ):
            answered, said = send(limited, path, body)
            assert (answered, said["kind"], said["got"], said["limit"]) == (status, kind, got, limit)
            assert f"{got:,}" in said["detail"]
            assert flag in said["detail"]
    status, said = compare(limited, "a", "b", "c", "d")
    assert (status, said["kind"], said["got"], said["limit"]) == (422, "responses", 4, 3)
    assert "--max-responses" in said["detail"]


def test_a_length_that_is_far_too_long_is_refused_before_the_body_comes(limited: Server):
    """Ten gigabytes that are only announced get their answer at once; bytes without a length are counted."""
    for announced in (True, False):
        connection = http.client.HTTPConnection(limited.url.removeprefix("http://"), timeout=60)
        if announced:
            connection.putrequest("POST", "/verify")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(10**10))
            connection.endheaders()
        else:
            connection.request("POST", "/verify", iter([b" " * 1200] * 3), JSON, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413
        assert not announced or json.loads(answer.read())["got"] == 10**10
        connection.close()


@pytest.mark.full
def test_a_million_responses_do_not_stop_health(serve):
    """The request is refused, and /health is answered while it is under way."""
    server = serve()
    body = json.dumps({"conversation_history": QUESTION, "response_objs": [{"output": []}] * 10**6}).encode()
    assert len(body) > 10**7
    answers: list[tuple[int, Any]] = []
    sender = threading.Thread(target=lambda: answers.append(send(server, "/compare", body)))
    sender.start()
    healthy = 0
    while sender.is_alive():
        assert json.loads(server.get("/health"))["status"] == "ok"
        healthy += 1
    assert healthy >= 1
    status, said = answers[0]
    assert (status, said["kind"], said["got"]) == (422, "responses", 2_000_004)
    assert "--max-responses" in said["detail"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        ("{}".encode("utf-16"), "not JSON"),
        (b"[]", "dict"),
        (b"{}", "Field required"),
    ],
)
def test_a_body_that_is_no_request_is_refused_with_the_reason(limited: Server, body: bytes, said: str):
    """Bytes that are no JSON, another kind of JSON, and missing fields are 422."""
    for path in ("/compare", "/verify"):
        status, answer = send(limited, path, body)
        assert status == 422
        assert said in str(answer["detail"])


def test_what_pythons_clients_write_is_read_and_repeated(judge, serve):
    """NaN, whole numbers of any size and lone surrogates pass, and come back as they were; so does a key called reward."""
    server = serve("--num-rollouts-per-prompt", "2")
    bodies = [
        verify_body("q=1", log_probs=[float("nan"), -1.5], seed=2**80, odd="\ud800"),
        verify_body("q=5", reward="mine", deep={"reward": 1}),
    ]
    (_, first), (_, second) = verify_all(server, bodies)
    assert (first["reward"], first["seed"], first["odd"]) == (1.0, 2**80, "\ud800")
    assert first["log_probs"][0] != first["log_probs"][0]
    assert (second["reward"], second["deep"]) == (5.0, {"reward": 1})


def test_only_json_is_taken(limited: Server):
    """A web page may send text to any address without asking; that is refused."""
    body = json.dumps({"conversation_history": "q", "response_objs": [response("a")]}).encode()
    for kind in ("text/plain", ""):
        status, said = send(limited, "/compare", body, {"Content-Type": kind})
        assert (status, said["kind"]) == (415, "content_type")
    assert send(limited, "/compare", body, {"Content-Type": "application/json; charset=utf-8"})[0] == 200


# --- Host ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:99", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("judge.example:8000", 200),
        ("judge2", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.2", 403),
        ("", 403),
    ],
)
def test_only_requests_to_this_host_are_answered(limited: Server, host: str, status: int):
    """Loopback names, the address served on and --allow-host; another name is refused and the flag is named."""
    connection = http.client.HTTPConnection(limited.url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/health", headers={"Host": host})
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert answer.status == status
    if status == 403:
        assert f"--allow-host {host}".rstrip() in body["detail"]


def test_a_hosts_name_without_its_port():
    """Ports, brackets, case and a final dot are no part of the name."""
    for header, name in (("A.b.:80", "a.b"), ("[::1]", "::1"), ("[::1]:80", "::1"), ("h:", "h"), ("", "")):
        assert host_name(header) == name


# --- the shape of a body ------------------------------------------------------------------------------------------

TREE = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\[]{}\n é'),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(alphabet='a"\\[{'), inside, max_size=4),
    max_leaves=30,
)


def told(tree: Any) -> tuple[int, int]:
    inside = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    if inside is None:
        return 0, 0
    below = [told(one) for one in inside]
    return 1 + max((depth for depth, _ in below), default=0), 1 + sum(n for _, n in below)


@given(TREE, st.booleans())
def test_the_shape_told_from_brackets_is_that_of_the_value(tree: Any, ascii_only: bool):
    """Depth and number of lists and objects, whatever the strings hold."""
    assert shape(json.dumps(tree, ensure_ascii=ascii_only).encode()) == told(tree)


# --- stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_stops_answers_those_who_wait(judge: tuple[Behaviour, str], serve, number: signal.Signals):
    """A member that waits for others, one that is being judged and a comparison get 503 and the reason; it ends with 130."""
    behaviour, _ = judge
    behaviour.gate = threading.Event()
    server = serve("--num-rollouts-per-prompt", "2", "--set", "retries=0")

    async def play() -> list[tuple[int, Any]]:
        waits = [verify_body("q=1", prompt="alone")]
        judged = [verify_body(f"q={q}", prompt="both") for q in (1, 5)]
        compared = [{"conversation_history": QUESTION, "response_objs": [response("q=1 c"), response("q=5 c")]}]
        tasks = [
            asyncio.ensure_future(post_all(server.url + path, bodies))
            for path, bodies in (("/verify", waits), ("/verify", judged), ("/compare", compared))
        ]
        await until(lambda: len(behaviour.requests) >= 4 and members_waiting(server) > 0)
        server.process.send_signal(number)
        return [answer for answers in await asyncio.gather(*tasks) for answer in answers]

    answers = asyncio.run(play())
    behaviour.gate.set()
    assert [(status, body["kind"]) for status, body in answers] == [(503, "stopping")] * 4
    assert answers[0][1]["detail"] == "the server is stopping: 1 of 2 members had arrived"
    assert server.process.wait() == 130


def test_what_is_nearly_judged_is_answered_before_the_end(judge: tuple[Behaviour, str], serve):
    """A cohort whose verdicts come within a second of the signal gets its rewards."""
    behaviour, _ = judge
    behaviour.gate = threading.Event()
    server = serve("--num-rollouts-per-prompt", "2")

    async def play() -> list[tuple[int, Any]]:
        judged = asyncio.ensure_future(post_all(server.url + "/verify", [verify_body(f"q={q}") for q in (1, 5)]))
        await until(lambda: len(behaviour.requests) >= 2)
        server.process.send_signal(signal.SIGTERM)
        assert behaviour.gate is not None
        behaviour.gate.set()
        return await judged

    assert [(status, body["reward"]) for status, body in asyncio.run(play())] == [(200, 1.0), (200, 5.0)]
