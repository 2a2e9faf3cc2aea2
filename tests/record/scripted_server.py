"""A server of the shipped dialects whose model is a script, for clients of them; ``python -m tests.record.scripted_server``
prints its port first, and ``--save FOLDER`` keeps the requests that it gets."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from gymdata.record.dialects import DIALECTS
from gymdata.record.request import AgentCompletion, AgentRequest, CompletionDelta, Dialect, RequestError, TokenLogprob


@dataclass(frozen=True)
class Reply:
    """What the model writes: each call is the name of a tool and its arguments. ``error``: it fails after ``content``."""

    content: str = ""
    reasoning: str | None = None
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    cut: bool = False
    stop_sequence: str | None = None
    error: RequestError | None = None


Script = Callable[[AgentRequest], Reply]
#: Arguments for the tools of agents, by which each writes a file.
CALLS: dict[str, dict[str, Any]] = {
    "exec_command": {"cmd": "echo 42 > answer.txt && cat answer.txt"},
    "Bash": {"command": "echo 42 > answer.txt && cat answer.txt", "description": "Write the answer"},
    "bash": {"command": "echo 42 > answer.txt && cat answer.txt"},
    "run_shell_command": {"command": "echo 42 > answer.txt && cat answer.txt", "is_background": False},
    "add": {"a": 2, "b": 40},
}
#: The same for the tools that start another agent; used where the user asks for one.
SUB_AGENTS: dict[str, dict[str, Any]] = {
    "Agent": {"description": "Write", "prompt": "write 42 to answer.txt", "subagent_type": "general-purpose"},
    "spawn_agent": {"message": "write 42 to answer.txt"},
    "task": {"description": "Write", "prompt": "write 42 to answer.txt", "subagent_type": "general"},
}
#: By which mini-swe-agent ends.
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def calls_once(request: AgentRequest) -> Reply:
    """Calls the first tool of ``CALLS`` that the request has, and then says what it returned."""
    results = [message["content"] for message in request.messages if message["role"] == "tool"]
    if results and any(SUBMIT in message["content"] for message in request.messages):
        return Reply("Done.", calls=[("bash", {"command": f"echo {SUBMIT}"})])
    if results:
        return Reply(f"The tool returned: {results[-1]}", reasoning="The tool has answered.")
    names = [tool["function"]["name"] for tool in request.tools or ()]
    asked = [message["content"] for message in request.messages if message["role"] == "user"]
    calls = SUB_AGENTS if any("use a sub-agent" in text for text in asked) else CALLS
    name = next((name for name in calls if name in names), None)
    if name is None or request.tool_choice == "none":
        return Reply("Hello, world.")
    return Reply("I will call it.", "A tool is needed.", [(name, calls[name])])


def completion(request: AgentRequest, reply: Reply, index: int = 0) -> AgentCompletion:
    """The reply as completion ``index`` of the request, a token per word."""
    words = reply.content.split(" ")
    calls = [
        {"id": f"call{index}{n}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for n, (name, arguments) in enumerate(reply.calls)
    ]
    logprobs = [TokenLogprob(word, n, -0.5, [(word, n, -0.5), ("other", 99, -1.5)]) for n, word in enumerate(words)]
    return AgentCompletion(
        id="abc",
        created=1_700_000_000,
        text=reply.content,
        content=reply.content,
        reasoning=reply.reasoning,
        tool_calls=calls,
        finish_reason="length" if reply.cut else "tool_calls" if calls else "stop",
        n_prompt_tokens=12,
        n_generated_tokens=len(words),
        logprobs=None if request.logprobs is None else logprobs,
        stop_sequence=reply.stop_sequence,
        prompt_token_ids=[7, 8],
        token_ids=list(range(len(words))),
        index=index,
    )


async def deltas(request: AgentRequest, script: Script) -> AsyncIterator[CompletionDelta]:
    """The reply in parts: reasoning and content in two each, then the calls, then the end."""
    reply = script(request)
    for index in range(request.n):
        end = completion(request, reply, index)
        start = CompletionDelta(end.id, end.created, end.n_prompt_tokens, index)
        yield start
        for name in ("reasoning", "content"):
            text = getattr(end, name) or ""
            for part in filter(None, (text[: len(text) // 2], text[len(text) // 2 :])):
                yield replace(start, **{name: part})
        if reply.error is not None:
            raise reply.error
        yield replace(start, tool_calls=end.tool_calls, end=end)


@dataclass
class ScriptedServer:
    """``requests``: what was asked; ``script`` may be changed between requests."""

    script: Script = calls_once
    save: Path | None = None
    requests: list[AgentRequest] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        for entry in DIALECTS:
            dialect = entry.object()
            for path in dialect.paths:
                app.router.add_post(path, self._answering(dialect, counts=False))
            for path in dialect.count_paths:
                app.router.add_post(path, self._answering(dialect, counts=True))
        return app

    def _answering(self, dialect: Dialect, *, counts: bool) -> Callable[[web.Request], Any]:
        async def answer(http: web.Request) -> web.StreamResponse:
            body = await http.json()
            if self.save is not None:
                headers = {name.lower(): value for name, value in http.headers.items()}
                saved = {"path": http.path_qs, "headers": headers, "body": body}
                (self.save / f"{len(self.bodies):02}.json").write_text(json.dumps(saved, indent=1))
            self.bodies.append(body)
            try:
                request = dialect.parse(body, {name.lower(): value for name, value in http.headers.items()})
                self.requests.append(request)
                if counts:
                    return web.json_response(dialect.counted(request, 12))
                if not request.stream:
                    reply = self.script(request)
                    if reply.error is not None:
                        raise reply.error
                    completions = [completion(request, reply, index) for index in range(request.n)]
                    return web.json_response(dialect.response(request, completions))
            except RequestError as error:
                status, headers, answer = dialect.error(
                    error.status, error.kind, error.message, error.retry_after, error.where
                )
                print(f"{http.path}: {error.message}", file=sys.stderr)
                return web.json_response(answer, status=status, headers=headers)
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(http)
            async for frame in dialect.events(request, deltas(request, self.script)):
                await response.write(frame)
            await response.write_eof()
            return response

        return answer


async def serve(port: int, save: Path | None) -> None:
    runner = web.AppRunner(ScriptedServer(save=save).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.save))
