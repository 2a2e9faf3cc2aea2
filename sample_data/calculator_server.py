"""The sample environment behind HTTP, and a workflow: ``python sample_data/calculator_server.py --port 8100``.

| POST | what | for |
| --- | --- | --- |
| ``/seed_session`` | begins a session: a calculator of its own, kept by a cookie | ``gymdata collect --env http://…`` |
| ``/calculate`` | the tool of ``calculator.py``; its answer, or 400 and what was wrong | the same |
| ``/verify`` | reward 1 when the last number that was said is the task's ``answer``; the number of calls | the same |
| ``/workflow`` | plays a whole rollout with the model at the ``base_url`` that it is sent | ``served_workflow.py`` |

The first line that it prints is the port. It shows the whole protocol in one file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import re
import secrets
from typing import Any

from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler

try:
    from gymdata.sample_data.calculator import Calculator
except ModuleNotFoundError:  # gymdata is not installed here: the file beside this one
    from calculator import Calculator  # type: ignore[no-redef]

SESSIONS = web.AppKey("sessions", dict)
_NUMBER = re.compile(r"-?\d+")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Whole numbers joined by +, - or *, for example 12*34.",
                }
            },
            "required": ["expression"],
        },
    },
}
_MOST_SESSIONS = 10_000


class Session:
    """One rollout's calculator."""

    def __init__(self) -> None:
        self.calculator = Calculator()
        self.calls = 0


def application() -> web.Application:
    """The server, with no sessions yet."""
    app = web.Application(client_max_size=64 << 20, middlewares=[name_session])
    app[SESSIONS] = {}
    app.router.add_post("/seed_session", seed_session)
    app.router.add_post("/calculate", calculate)
    app.router.add_post("/verify", verify)
    app.router.add_post("/workflow", workflow)
    return app


@web.middleware
async def name_session(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer names its session: NeMo Gym's agents go on with the cookies of the last one."""
    response = await handler(request)
    name = request.cookies.get("session")
    if name in request.app[SESSIONS] and "session" not in response.cookies:
        response.set_cookie("session", str(name))
    return response


async def seed_session(request: web.Request) -> web.Response:
    """A new session, whatever cookie came with the request."""
    await request.json()
    sessions, name = request.app[SESSIONS], secrets.token_hex(16)
    sessions[name] = Session()
    if len(sessions) > _MOST_SESSIONS:  # rollouts that were given up never say good-bye
        del sessions[next(iter(sessions))]
    response = web.json_response({})
    response.set_cookie("session", name)
    return response


async def calculate(request: web.Request) -> web.Response:
    """One tool call. What the policy did wrong is a 400 that says so."""
    session = _session(request)
    session.calls += 1
    try:
        answer = run_tool(session.calculator, await request.json())
    except ValueError as error:
        return web.Response(status=400, text=json.dumps({"error": str(error)}), content_type="application/json")
    return web.Response(text=answer)


def run_tool(calculator: Calculator, arguments: dict[str, Any]) -> str:
    """Raises ValueError for arguments that the tool does not take, and for what it cannot work out."""
    try:
        inspect.signature(calculator.calculate).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"calculate: {error}") from error
    return calculator.calculate(**arguments)


async def verify(request: web.Request) -> web.Response:
    """The reward, with what was sent and how often the tool was called, as NeMo Gym's servers answer."""
    session, body = _session(request), await request.json()
    last = (body["response"]["output"] or [{}])[-1]
    reward = score(_text(last) if last.get("role") == "assistant" else "", str(body["answer"]))
    return web.json_response({**body, "reward": reward, "tool_calls": session.calls})


def score(said: str, answer: str) -> float:
    """1 when the last number that was said is the answer."""
    numbers = _NUMBER.findall(said)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


async def workflow(request: web.Request) -> web.Response:
    """A whole rollout of the model at ``base_url``, which may ask the calculator until it answers without it."""
    task = await request.json()
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    headers, calculator, calls = {"Authorization": f"Bearer {task['api_key']}"}, Calculator(), 0
    async with ClientSession(headers=headers, raise_for_status=True) as client:
        while True:
            body = {"model": task["model"], "messages": messages, "tools": [TOOL]}
            async with client.post(f"{task['base_url']}/chat/completions", json=body) as response:
                said = (await response.json())["choices"][0]["message"]
            messages.append(said)
            for call in said.get("tool_calls") or []:
                calls += 1
                try:
                    answer = run_tool(calculator, json.loads(call["function"]["arguments"]))
                except ValueError as error:
                    answer = json.dumps({"error": str(error)})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
            if not said.get("tool_calls"):
                text = said["content"] or ""
                return web.json_response({"reward": score(text, str(task["answer"])), "calls": calls, "value": text})


def _session(request: web.Request) -> Session:
    session = request.app[SESSIONS].get(request.cookies.get("session"))
    if session is None:
        raise web.HTTPConflict(text="no session: POST /seed_session first, and send its cookie")
    assert isinstance(session, Session)
    return session


def _text(item: dict[str, Any]) -> str:
    content = item.get("content")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])


async def main(host: str, port: int) -> None:
    """Serve until interrupted."""
    runner = web.AppRunner(application(), shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(runner.addresses[0][1], flush=True)  # noqa: T201
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free one")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(given.host, given.port))
