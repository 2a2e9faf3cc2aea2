"""What a failing disk, a damaged file or a request at the wrong time leaves: each rollout once, and all other sessions."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gymdata.commands.record.ending import Ending
from gymdata.commands.record.server import Service
from gymdata.commands.record.sessions import Session
from gymdata.engines.port import Generation, SampleRequest
from gymdata.errors import OutsideError
from gymdata.rewards.loading import given_reward
from gymdata.rewards.scheduler import RewardScheduler, Weighted
from tests.kills import full_disk
from tests.record.scripted_engine import Recording, recording

CHAT, BODY = "/s/k/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def journals(run: Path) -> dict[str, bytes]:
    """What is in the folder of sessions, by name, without empty journals."""
    return {path.name: path.read_bytes() for path in (run / "sessions").iterdir() if path.stat().st_size}


def test_a_call_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    """A disk that has room for a part of it keeps none, and no session."""
    run = tmp_path / "run"
    with recording(run, *"ab") as r:
        assert r.chat("x", key="one").status_code == 200
        (stored,) = journals(run).values()
        with full_disk(len(stored) + 50):
            assert r.chat("x", key="two").status_code == 500
        assert list(r.recorder.sessions) == ["one"]
        assert list(journals(run).values()) == [stored]


def test_a_call_that_no_row_could_hold_is_an_error_and_no_turn(tmp_path: Path) -> None:
    """A parser that lets it pass has a defect: it ends one request, and nothing of it is in the session or on the disk."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with recording(tmp_path / "run", "a", 'CALL add {"a": 99999999999999999999999}', "b") as r:
        first = r.said("x", tools=tools)
        answer = r.chat("x", first, "y", tools=tools)
        assert (answer.status_code, "64-bit" in answer.json()["error"]["message"]) == (500, True)
        r.said("x", first, "y", tools=tools)
    with recording(tmp_path / "run") as r:
        assert (r.finish()["turns"], r.recorder.log.repairs) == (2, [])
    assert r.row()["n_turns"] == 2


@pytest.fixture
def full() -> Iterator[pytest.MonkeyPatch]:
    """A disk on which no file can be emptied, until it is undone."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "ftruncate", broken)
        yield patch


def test_a_journal_that_cannot_be_emptied_leaves_one_row(tmp_path: Path, full: pytest.MonkeyPatch) -> None:
    """The session has ended: its second finish is answered from the row, and the next start drops the journal."""
    run = tmp_path / "run"
    full.setattr("gymdata.commands.record.log.LEAVE_S", 0.0)
    with recording(run, "a", "b") as r:
        r.said("x", key="one")
        assert r.end("one", reward=1.0).status_code == 500
        full.undo()
        assert r.finish("one", reward=1.0)["status"] == "completed"
        assert r.chat("x", key="one").status_code == 409
        r.said("x", key="two")
    for _ in range(2):
        with recording(run) as r:
            assert list(r.recorder.sessions) == ["two"]
    assert r.row()["reward"] == 1.0


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_session_with_a_damaged_line_is_not_resumed_and_the_others_are(tmp_path: Path, damaged: int) -> None:
    """Its first line, by which it is known, or one that others continue; it is named once, and its key is free."""
    run, folder = tmp_path / "run", tmp_path / "run" / "sessions"
    with recording(run, *"abcd") as r:
        said = ["x", r.said("x", key="one"), "y"]
        r.said("x", key="two")
        said += [r.said(*said, key="one"), "z"]
        r.said(*said, key="one")
    lines = (folder / "open.journal").read_bytes().splitlines(keepends=True)
    lines[2 * damaged] = lines[2 * damaged].replace(b"{", b"[", 1)
    content = b"".join(lines)
    (folder / "open.journal").write_bytes(content)
    with recording(run, "e") as r:
        assert list(r.recorder.sessions) == ["two"]
        copy = folder / "open.journal.damaged-0"
        assert ["open.journal: broken line" in r.recorder.log.repairs[0], str(copy) in r.recorder.log.repairs[1]] == [
            True, True,
        ]  # fmt: skip
        assert "session one" in r.recorder.log.repairs[1]
        r.said("x", key="one")
        r.finish("one")
    with recording(run) as r:
        assert r.recorder.log.repairs == []
        r.finish("two")
    assert copy.read_bytes() == content
    assert len(r.rows()) == 2


def test_a_session_whose_last_line_is_damaged_is_resumed_before_it(tmp_path: Path) -> None:
    """The line is reported once and kept; so is a torn one."""
    run, folder = tmp_path / "run", tmp_path / "run" / "sessions"
    with recording(run, "a", "b", "c") as r:
        first = r.said("x", key="one")
        r.said("x", first, "y", key="one")
        r.said("x", key="two")
    lines = (folder / "open.journal").read_bytes().splitlines(keepends=True)
    (folder / "open.journal").write_bytes(lines[0] + lines[1].replace(b"{", b"[", 1) + lines[2] + b'{"torn')
    for repairs in (2, 0):
        with recording(run, "d") as r:
            assert [len(session.steps) for session in r.recorder.sessions.values()] == [1, 1]
            assert len(r.recorder.log.repairs) == repairs
    torn = (folder / "open.journal.torn").read_text()
    assert (torn.count("\n"), "torn" in torn) == (2, True)


def test_a_key_that_failed_begins_another_session(tmp_path: Path, full: pytest.MonkeyPatch) -> None:
    """Also where the disk did not take that the first one ended."""
    run = tmp_path / "run"
    with recording(run, *"abc") as r:
        r.said("x")
        assert r.end(status="failed").status_code == 500
        full.undo()
        r.said("y")
        r.said("z", key="other")
    with recording(run) as r:
        assert [m["content"] for s in r.recorder.sessions.values() for m in s.messages_of(0)] == [*"yb", *"zc"]
        assert (r.recorder.log.repairs, len(r.finish()["agents"])) == ([], 1)


def test_a_journal_that_grows_keeps_the_open_sessions_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that ended are taken out of it while others are open."""
    run = tmp_path / "run"
    monkeypatch.setattr("gymdata.commands.record.log.COMPACT_BYTES", 2_000)
    with recording(run, *"abcdefghij") as r:
        first = r.said("x", key="open")
        for key in "12345678":
            r.said("y", key=key)
            r.finish(key)
        r.said("x", first, "z", key="open")
        assert (run / "sessions" / "open.journal").stat().st_size < 4_000
    with recording(run) as r:
        assert {key: len(session.steps) for key, session in r.recorder.sessions.items()} == {"open": 2}
        r.finish("open")
    assert len(r.rows()) == 9


class Scoring:
    """A reward that takes until ``scored`` is set; ``begun`` is set when it is asked."""

    def __init__(self, r: Recording) -> None:
        self.begun, self.scored = threading.Event(), threading.Event()

        def right(completion: str) -> float:
            self.begun.set()
            self.scored.wait(60)
            return float(completion == "a")

        r.recorder.scheduler = RewardScheduler([Weighted(given_reward(right), 1.0)], timeout_s=60)


def test_a_call_while_its_session_is_scored_is_refused(tmp_path: Path) -> None:
    """With 409, as after it; the row has the calls that came before."""
    with recording(tmp_path / "run", "a", "b") as r:
        r.said("x")
        scoring = Scoring(r)

        async def call_meanwhile() -> list[int]:
            async with r.http() as client:
                ending = asyncio.ensure_future(r.recorder.finish("k", Ending()))
                await asyncio.to_thread(scoring.begun.wait, 60)
                during = await client.post(CHAT, json=BODY)
                scoring.scored.set()
                await ending
                return [during.status_code, (await client.post(CHAT, json=BODY)).status_code]

        assert asyncio.run(call_meanwhile()) == [409, 409]
    assert (r.row()["n_turns"], r.row()["reward"]) == (1, 1.0)


@pytest.mark.parametrize(("grace_s", "status"), [(0.0, 503), (60.0, 200)])
def test_a_finish_that_is_scored_while_the_server_stops_is_answered(
    tmp_path: Path, grace_s: float, status: int
) -> None:
    """It has the time of requests in flight to end; what is cut is to be sent again, and nothing of it is lost."""
    with recording(tmp_path / "run", "a") as r:
        r.said("x")
        scoring = Scoring(r)

        async def stop_meanwhile() -> httpx.Response:
            service = Service(r.recorder.config, r.recorder)
            service.grace_s = grace_s
            async with r.http(service) as client:
                ending = asyncio.ensure_future(client.post("/rollouts/k/finish", json={"task_id": "t"}))
                await asyncio.to_thread(scoring.begun.wait, 60)
                stopping = asyncio.ensure_future(service.stop())
                await asyncio.sleep(0)
                late = await client.post("/rollouts/k/finish")
                assert (late.status_code, late.headers["retry-after"]) == (503, "5")
                if grace_s:
                    scoring.scored.set()
                answer = await ending
                scoring.scored.set()
                await stopping
                return answer

        answer = asyncio.run(stop_meanwhile())
        assert answer.status_code == status
        if status == 503:
            assert (answer.headers["retry-after"], "send it again" in answer.text) == ("5", True)
            r.recorder.scheduler = RewardScheduler([])
        assert r.finish(task_id="t")["rollout_index"] == 0
    assert r.row()["task_id"] == "t"


def test_a_finish_that_fails_leaves_nothing_of_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect is an error with its words; the same id may then be another task, whose first rollout has the index 0."""

    def broken(_: object) -> None:
        raise ArithmeticError("it broke")

    with recording(tmp_path / "run", "a") as r:
        r.said("x")
        monkeypatch.setattr("gymdata.commands.record.recorder.expand_prompts", broken)
        answer = r.end(task={"task_id": "t", "answer": "1"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "ArithmeticError: it broke")
        monkeypatch.undo()
        assert r.finish(task={"task_id": "t", "answer": "2"})["rollout_index"] == 0


def test_a_session_that_cannot_be_ended_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when it is idle, which is tried once, nor with its agent; the defect is said, and it stays open."""
    with recording(tmp_path / "run", *"abc", idle_timeout=1e-9) as r:
        for key in ("one", "two", "three"):
            r.said("x", key=key)
        write = r.recorder.write

        async def broken(session: Session, ending: Ending) -> object:
            if session.key == "one":
                raise ArithmeticError("it broke")
            return await write(session, ending)

        monkeypatch.setattr(r.recorder, "write", broken)
        three = r.recorder.sessions.pop("three")
        for _ in range(2):
            asyncio.run(r.recorder.end_idle())
            assert list(r.recorder.sessions) == ["one"]
            assert r.notes == ["session one could not be ended, and stays open: ArithmeticError: it broke"]
        r.recorder.sessions["three"] = three
        with pytest.raises(ArithmeticError):
            asyncio.run(r.recorder.end_all(Ending()))
        assert list(r.recorder.sessions) == ["one"]
    assert len(r.rows()) == 2


def test_a_finish_waits_for_the_retry_of_a_call_that_failed(tmp_path: Path) -> None:
    """The first call of a session fails while its finish waits for it: the retry begins the session that is ended."""
    with recording(tmp_path / "run", "a") as r:
        failing = asyncio.Event()
        sample = r.sampler.sample

        async def fails_first(request: SampleRequest) -> list[Generation]:
            if not failing.is_set():
                await failing.wait()
                raise OutsideError("engine", "down", status=503)
            return await sample(request)

        r.sampler.sample = fails_first  # type: ignore[method-assign]  # the engine of this test

        async def both() -> list[int]:
            async with r.http() as client:
                call = asyncio.ensure_future(client.post(CHAT, json=BODY))
                while not r.recorder.sessions:
                    await asyncio.sleep(0)
                session = r.recorder.sessions["k"]
                ending = asyncio.ensure_future(client.post("/rollouts/k/finish", json={"reward": 1.0}))
                while not session.lock.locked():
                    await asyncio.sleep(0)
                failing.set()
                failed = await call
                again = await client.post(CHAT, json=BODY)
                return [failed.status_code, again.status_code, (await ending).status_code]

        assert asyncio.run(both()) == [503, 200, 200]
    assert (r.row()["n_turns"], r.row()["reward"]) == (1, 1.0)


def test_a_call_after_one_that_failed_has_the_seed_of_no_other(tmp_path: Path) -> None:
    """Of three calls in flight the second fails: its retry has its seed, and the next call, also after a restart, a new
    one."""
    with recording(tmp_path / "run") as r:
        session = Session("k", "id")
        assert [session.begin() for _ in range(3)] == [0, 1, 2]
        session.numbers.discard(1)
        assert session.begin() == 1
        r.sampler.script[:] = ["a", OutsideError("engine", "down"), "b", "c"]
        for status in (200, 502, 200):
            assert r.chat("x").status_code == status
    with recording(tmp_path / "run", "d") as again:
        again.said("x")
        seeds = [request.seed for request in (*r.sampler.requests, *again.sampler.requests)]
    assert (len(set(seeds)), seeds[1] == seeds[2]) == (3, True)


def test_an_ended_key_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Where its rollout is, and that another attempt needs another key."""
    run = tmp_path / "run"
    with recording(run, "a") as r:
        r.said("x")
        ended = r.finish()
        answer = r.chat("x")
    assert answer.status_code == 409
    for part in (ended["rollout_id"], str(run), "use another key", "task_id"):
        assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["k", "gymdata-k"])
def test_an_unknown_key_is_answered_with_how_a_request_names_its_session(tmp_path: Path, key: str) -> None:
    """An API key without the prefix names none."""
    with recording(tmp_path / "run", "a") as r:
        r.headers["authorization"] = f"Bearer {key.removeprefix('gymdata-')}"
        r.said("x", key="")
        for answer in (r.client.get(f"/rollouts/{key}"), r.client.get(f"/rollouts/{key}?turns=true"), r.end(key)):
            assert answer.status_code == 404
            message = answer.json()["error"]["message"]
            assert ("the API key gymdata-k," in message, "/s/k/v1" in message) == (True, True)
