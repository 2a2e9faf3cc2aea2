"""Streamed answers are written when they are whole, and the turn that is stored is the one that it would be without."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gymdata.commands.record.dialects import DIALECTS
from gymdata.commands.record.request import AgentCompletion
from gymdata.commands.record.server import Service
from gymdata.errors import OutsideError
from tests.collect.fake_parts import END
from tests.kills import full_disk
from tests.record.scripted_engine import recording
from tests.record.streaming import WAITING, asked, streamed

MESSAGES = DIALECTS["messages"].object()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


#: What each dialect's last event has.
ENDS = {"chat": "[DONE]", "messages": "event: message_stop", "responses": "response.completed"}


@pytest.mark.parametrize("dialect", ENDS)
def test_a_stream_shows_that_it_lives_until_the_answer_is_there(dialect: str, tmp_path: Path) -> None:
    """The engine goes on only when the client was told so; then all of the answer follows, as it is stored."""
    with recording(tmp_path / "run", "Hello| world") as r:

        async def drive() -> tuple[int, str]:
            told = asyncio.Event()
            r.sampler.pause = told.wait
            return await streamed(r, *asked(dialect), lambda text: text.startswith(WAITING) and told.set() is not None)

        status, text = asyncio.run(drive())
        assert (status, ENDS[dialect] in text.removesuffix("\n\n").rpartition("\n\n")[2]) == (200, True)
        comments = text.count(WAITING)
        assert text.startswith(WAITING * comments)
        assert "Hello| world" in text
        r.finish(reward=1.0)
    row = r.row()
    assert row["turns"][0]["generation_token_ids"] == [*b"Hello| world", END]
    assert row["turns"][0]["generation_log_probs"] == [-0.25] * 13
    assert row["messages"][-1]["content"] == "Hello| world"
    assert "unread_turns" not in row["extra"]


def test_a_streamed_call_is_the_call_that_is_stored(tmp_path: Path) -> None:
    """The stored message is the same as without a stream."""
    call = 'CALL add {"a": 1}'
    with recording(tmp_path / "run", call, call) as r:
        _, text = asyncio.run(streamed(r, *asked("chat", tools=TOOLS)))
        plain = r.said("x", tools=TOOLS, key="other")
        r.finish(reward=1.0)
        r.finish("other", reward=1.0)
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.splitlines() if line.startswith("data: {")]
    assert [name for delta in deltas for name in delta] == ["role", "content", "tool_calls"]
    assert deltas[0]["content"] == ""
    assert deltas[1]["tool_calls"][0]["function"] == plain["tool_calls"][0]["function"]
    calls = [json.loads(row["messages"][-1]["tool_calls"])[0] for row in r.rows()]
    assert calls[0]["function"] == calls[1]["function"]


def test_arguments_with_a_number_that_no_row_holds_are_streamed_as_the_model_wrote_them() -> None:
    """They stay text in the row, and are an object for a client of Messages."""
    text_of_call = '{"a":99999999999999999999999}'
    request = MESSAGES.read({"messages": [{"role": "user", "content": "x"}]}, {})
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": text_of_call}}
    body = MESSAGES.write(request, AgentCompletion("id", 0, "", None, [call], "tool_calls", [1], [2]))
    assert body["content"][0]["input"] == {"a": 99999999999999999999999}
    assert b"99999999999999999999999" in MESSAGES.frames(request, body)


def test_a_stop_text_never_goes_out(tmp_path: Path) -> None:
    """The stream ends before it."""
    with recording(tmp_path / "run", "ab|-c") as r:
        r.sampler.finish = ("stop", "|-")
        _, text = asyncio.run(streamed(r, *asked("messages", stop_sequences=["|-"])))
    assert '"text":"ab"' in text
    assert "|-" not in text.replace('"stop_sequence":"|-"', "")


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_turn_whose_client_went_away_is_sampled_to_its_end_and_marked(dialect: str, tmp_path: Path) -> None:
    """Nothing is cut silently: the whole turn is recorded, and the rollout says that no client has read it."""
    with recording(tmp_path / "run", "Hello| world", "again") as r:

        async def drive() -> None:
            left = asyncio.Event()
            r.sampler.pause = left.wait
            await streamed(r, *asked(dialect), WAITING.__eq__)
            assert r.recorder.sessions["k"].in_flight == 1
            left.set()
            await r.recorder.answered(r.recorder.sessions["k"])

        asyncio.run(drive())
        r.sampler.pause = None
        r.said("x", key="k")
        r.finish(reward=1.0)
    row = r.row()
    assert [bytes(turn["generation_token_ids"][:-1]) for turn in row["turns"]] == [b"Hello| world", b"again"]
    assert json.loads(row["extra"])["unread_turns"] == [0]


def test_an_engine_that_fails_in_a_stream_is_an_error_in_it_and_a_failure(tmp_path: Path) -> None:
    """What went out is no turn: the client gets the dialect's error, and the run the failure."""
    with recording(tmp_path / "run", "Hello|", "whole") as r:

        async def drive() -> tuple[int, str]:
            read = asyncio.Event()

            async def broken() -> None:
                await read.wait()
                raise OutsideError("engine", "it broke")

            r.sampler.pause = broken
            return await streamed(r, *asked("chat"), lambda text: text.startswith(WAITING) and read.set() is not None)

        status, text = asyncio.run(drive())
        assert status == 200
        assert json.loads(text.splitlines()[-4].removeprefix("data: "))["error"]["message"] == "engine: it broke"
        assert text.endswith("data: [DONE]\n\n")
        assert "k" not in r.recorder.sessions
        r.sampler.pause = None
        r.said("x")
        r.finish(reward=1.0)
    assert r.row()["n_turns"] == 1
    assert "it broke" in (tmp_path / "run" / "failures.jsonl").read_text()


#: What the last events of a stream have that ends with an error of the recorder, and with one of a server that stops.
INTERNAL = {
    "chat": ['"type":"server_error"', "data: [DONE]"],
    "messages": ["event: error", '"type":"api_error"'],
    "responses": ['"type":"error","code":"server_error"', '"type":"response.failed"'],
}
STOPPING = {
    "chat": ['"type":"rate_limit_error"', "data: [DONE]"],
    "messages": ["event: error", '"type":"overloaded_error"'],
    "responses": ['"type":"error","code":"rate_limit_exceeded"', '"type":"response.failed"'],
}


@pytest.mark.parametrize("dialect", list(INTERNAL))
def test_a_full_disk_ends_a_stream_with_the_dialects_error(dialect: str, tmp_path: Path) -> None:
    """What went out is no turn."""
    with recording(tmp_path / "run", "Hello| world", "again") as r:

        async def drive() -> tuple[int, str]:
            read = asyncio.Event()
            r.sampler.pause = read.wait
            return await streamed(r, *asked(dialect), lambda text: text.startswith(WAITING) and read.set() is not None)

        with full_disk(100):
            status, text = asyncio.run(drive())
        assert (status, [part in text for part in INTERNAL[dialect]]) == (200, [True, True])
        assert r.recorder.sessions == {}
        r.sampler.pause = None
        r.said("x")
        r.finish()
    row = r.row()
    assert [bytes(turn["generation_token_ids"][:-1]) for turn in row["turns"]] == [b"again"]


@pytest.mark.parametrize("dialect", list(STOPPING))
def test_a_stream_that_the_stopping_server_cuts_ends_with_the_dialects_error(dialect: str, tmp_path: Path) -> None:
    """After the time that requests in flight have; nothing of it is a turn."""
    with recording(tmp_path / "run", "Hello| world") as r:

        async def drive() -> tuple[int, str]:
            r.sampler.pause = asyncio.Event().wait
            service, stopping = Service(r.recorder.config, r.recorder), list[asyncio.Future[None]]()
            service.grace_s, service.alive_s = 0.0, 0.01

            def seen(text: str) -> bool:
                if text and not stopping:
                    stopping.append(asyncio.ensure_future(service.stop()))
                return False

            answer = await streamed(r, *asked(dialect), seen, service)
            await stopping[0]
            return answer

        status, text = asyncio.run(drive())
        assert (status, [part in text for part in STOPPING[dialect]]) == (200, [True, True])
        assert "the recorder is stopping" in text
        assert r.recorder.sessions == {}


def test_a_request_that_the_stopping_server_cuts_is_answered(tmp_path: Path) -> None:
    """With 503 and when to come again."""
    with recording(tmp_path / "run", "Hello| world") as r:

        async def drive() -> tuple[int, str]:
            r.sampler.pause = asyncio.Event().wait
            service = Service(r.recorder.config, r.recorder)
            service.grace_s = 0.0
            async with r.http(service) as client:
                path, body = asked("chat")
                posting = asyncio.ensure_future(client.post(path, json=body))
                while not r.sampler.requests:
                    await asyncio.sleep(0)
                await service.stop()
                answer = await posting
                return answer.status_code, answer.headers["retry-after"]

        assert asyncio.run(drive()) == (503, "5")


def test_an_engine_that_fails_before_it_samples_is_a_status(tmp_path: Path) -> None:
    """A stream that has not begun can still be refused, so that clients try again."""
    busy = OutsideError("engine", "too many requests", status=429)
    with recording(tmp_path / "run", busy) as r:
        service = Service(r.recorder.config, r.recorder)
        assert asyncio.run(streamed(r, *asked("chat"), service=service))[0] == 429
