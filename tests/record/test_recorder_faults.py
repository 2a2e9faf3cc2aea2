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
        with full_disk(len(stored) - 50):
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
    with recording(run, "a", "b") as r:
        r.said("x", key="one")
        assert r.end("one", reward=1.0).status_code == 500
        full.undo()
        assert r.finish("one", reward=1.0)["status"] == "completed"
        assert r.chat("x", key="one").status_code == 409
        r.said("x", key="two")
    assert len(journals(run)) == 2
    with recording(run) as r:
        assert list(r.recorder.sessions) == ["two"]
        assert len(journals(run)) == 1
    assert r.row()["reward"] == 1.0


def test_a_number_of_which_something_was_put_aside_is_not_used_again(tmp_path: Path) -> None:
    """Neither by a later start nor after the session that it was of has ended."""
    run, folder = tmp_path / "run", tmp_path / "run" / "sessions"
    with recording(run, "a") as r:
        r.said("x", key="one")
    with (folder / "00000.journal").open("ab") as file:
        file.write(b'{"torn')
    with recording(run, "b") as r:
        torn = (folder / "00000.journal.torn").read_bytes()
        r.finish("one")
        r.said("x", key="two")
        assert set(journals(run)) == {"00000.journal.torn", "00001.journal"}
        r.finish("two")
    with recording(run, "c") as r:
        r.said("x", key="three")
        assert "00000.journal" not in journals(run)
        r.finish("three")
    assert journals(run) == {"00000.journal.torn": torn}


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_journal_with_a_damaged_line_is_set_aside_and_the_others_are_resumed(tmp_path: Path, damaged: int) -> None:
    """Its first line, by which it is known, or one that others continue; it is named once, and its key is free."""
    run, folder = tmp_path / "run", tmp_path / "run" / "sessions"
    with recording(run, "a", "b", "c", "d") as r:
        first = r.said("x", key="one")
        r.said("x", first, "y", key="one")
        r.said("x", key="two")
    lines = (folder / "00000.journal").read_bytes().splitlines(keepends=True)
    lines[damaged] = lines[damaged].replace(b"{", b"[", 1)
    content = b"".join(lines)
    (folder / "00000.journal").write_bytes(content)
    with recording(run, "e") as r:
        assert list(r.recorder.sessions) == ["two"]
        (repair,) = r.recorder.log.repairs
        assert f"{folder}/00000.journal.damaged" in repair
        r.said("x", key="one")
        r.finish("one")
    with recording(run) as r:
        assert r.recorder.log.repairs == []
        r.finish("two")
    assert (folder / "00000.journal.damaged").read_bytes() == content
    assert len(r.rows()) == 2


def test_what_is_no_journal_and_the_earlier_of_two_are_named_and_the_others_are_resumed(
    tmp_path: Path, full: pytest.MonkeyPatch
) -> None:
    """A folder stays where it is; a journal that could not be emptied when its session had ended is set aside."""
    run, folder = tmp_path / "run", tmp_path / "run" / "sessions"
    with recording(run, *"abc") as r:
        r.said("x")
        assert r.end(status="failed").status_code == 500
        full.undo()
        r.said("y")
        r.said("z", key="other")
    (folder / "00007.journal").mkdir()
    for left in (folder / "00007.journal", None):
        with recording(run) as r:
            assert [m["content"] for s in r.recorder.sessions.values() for m in s.messages_of(0)] == [*"yb", *"zc"]
            assert (f"{left}: expected a file" in " ".join(r.recorder.log.repairs)) == (left is not None)
            if left is not None:
                assert f"kept as {folder}/00000.journal.damaged" in " ".join(r.recorder.log.repairs)
                left.rmdir()
    with recording(run) as r:
        assert (r.recorder.log.repairs, len(r.finish()["agents"])) == ([], 1)


def test_a_journal_that_cannot_be_opened_stays_that_of_its_session(tmp_path: Path) -> None:
    """A resumed session whose journal fails once goes on in the same one."""
    run, folder = tmp_path / "run", tmp_path / "run" / "sessions"
    with recording(run, "a") as r:
        first = r.said("x")
    with recording(run, "b", "c") as r:
        (folder / "00000.journal").rename(folder / "away")
        (folder / "00000.journal").symlink_to("away")
        assert r.chat("x", first, "y").status_code == 500
        (folder / "away").replace(folder / "00000.journal")
        r.said("x", first, "y")
    assert list(journals(run)) == ["00000.journal"]
    with recording(run) as r:
        assert r.finish()["turns"] == 2


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
