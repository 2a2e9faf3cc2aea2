"""What the tests send to a compare server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.judge.serve.conftest import Server

QUESTION = [{"role": "user", "content": "How much is 1+1?"}]


def response(text: str, reasoning: str = "") -> dict[str, Any]:
    thought = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]}] if reasoning else []
    return {"output": [*thought, {"type": "message", "content": [{"type": "output_text", "text": text}]}]}


def compare(server: Server, *texts: str, **more: Any) -> tuple[int, Any]:
    body = {"conversation_history": QUESTION, "response_objs": [response(t) for t in texts], **more}
    return server.post("/compare", body)


def say(one: float, two: float, ranking: float) -> str:
    return json.dumps({"score_1": one, "score_2": two, "ranking": ranking})


def verify_body(text: str, prompt: str = "q", **ids: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
        "response": response(text),
        **ids,
    }


async def post_all(url: str, bodies: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def one(body: dict[str, Any]) -> tuple[int, Any]:
            async with session.post(url, json=body) as answer:
                return answer.status, await answer.json()

        return list(await asyncio.gather(*(one(body) for body in bodies)))


def verify_all(server: Server, bodies: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    """Send all at once, each on its own connection."""
    return asyncio.run(post_all(server.url + "/verify", bodies))


async def until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the server is there. Raises TimeoutError if it never is: a lost request fails the test, and hangs none."""
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(reached):
            await asyncio.sleep(0.01)


def members_waiting(server: Server) -> int:
    count: int = json.loads(server.get("/health"))["members_waiting"]
    return count
