"""Environments behind HTTP, with the protocol of NeMo Gym's resource servers: ``--env http://host:port``.

| request | when | body | answer |
| --- | --- | --- | --- |
| ``POST /seed_session`` | a rollout begins | the row, and ``responses_create_params`` | any; its cookies are the session |
| ``POST /TOOL`` | the policy calls TOOL | the call's arguments, a JSON object | its text is the tool message |
| ``POST /verify`` | the rollout ended, or was cut | the row, and ``response`` with the items | ``reward``, and more |

Invariants: each rollout has its own cookies; only tools of the task are ever called, so the policy cannot reach
``/verify``. What the policy did wrong (an unknown tool, arguments that are no object, a status 4xx) is returned to it;
every other fault is the server's, and no reward comes of it. A tool call that the server may have carried out (it hung, or
the connection broke) is never sent again: the rollout fails, and another attempt gets a new session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from gymdata.environments.port import StepResult, Talk, Verdict
from gymdata.environments.responses import task_body, verify_body
from gymdata.environments.step import tool_message
from gymdata.environments.tool_error import as_text, tool_error_message
from gymdata.errors import OutsideError, brief
from gymdata.http import ORDINARY_BYTES, Advice, HttpClient, Reply, Request, is_finite
from gymdata.rollouts.failures import failure_of, masked_extra
from gymdata.rollouts.messages import JsonObject, Message, Task, ToolDefinition
from gymdata.store.paths import Identity
from gymdata.urls import address

#: The server's own endpoints, which are no tools whatever a task says.
RESERVED = frozenset({"seed_session", "close_session", "verify", "aggregate_metrics"})
_SEED, _VERIFY = "/seed_session", "/verify"
_ECHOED = frozenset({"responses_create_params", "response", "reward"})
_KEY = "set ENVIRONMENT_API_KEY to the server's key"
_ADVICE = Advice(
    unreachable="is the resource server up?",
    slow="raise --tool-timeout (--reward-timeout for /verify) if it needs longer",
    statuses={401: _KEY, 403: _KEY},
)


class ResourceServer:
    """An ``Environment`` behind ``url``. Where it runs is no part of its identity: a server may move.

    ``tool_timeout_s``: one try of a seed or a tool call; ``verify_timeout_s``: one try of /verify.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "policy",
        tool_timeout_s: float = 60.0,
        verify_timeout_s: float = 300.0,
        max_retries: int = 5,
        pause_s: float = 0.5,
    ) -> None:
        self.identity: Identity = {"name": "resource_server"}
        self.model = model
        self.verify_timeout_s = verify_timeout_s
        self.http = HttpClient(
            address(url, "--env", "http://localhost:8000"),
            "environment",
            timeout_s=tool_timeout_s,
            max_retries=max_retries,
            pause_s=pause_s,
            advice=_ADVICE,
        )

    async def start(self, task: Task, rollout_index: int) -> ServerEpisode:  # noqa: ARG002 - the port's signature
        """Seed a session. Raises OutsideError("environment"), fatal when the server cannot be reached or has no seeds."""
        await self.http.open()
        cookies: dict[str, str] = {}
        request = Request("POST", _SEED, task_body(task), is_answer=_is_seeded, cookies=cookies)
        await self.http.exchange(request, self._seeded)
        return ServerEpisode(self, task, cookies)

    async def close(self) -> None:
        """Close every connection."""
        await self.http.close()

    def _seeded(self, reply: Reply) -> None:
        """The content of the answer does not matter, only its cookies."""
        if reply.status == 404:
            raise OutsideError(
                "environment",
                f"{self.http.base} has no {_SEED}",
                hint="is this the base URL of a resource server?",
                fatal=True,
            )


class ServerEpisode:
    """One rollout's session."""

    #: The server scores the rollout.
    rewards_steps = False

    def __init__(self, server: ResourceServer, task: Task, cookies: dict[str, str]) -> None:
        self.user: Talk | None = None
        self.messages: list[Message] = task.messages
        self.tools: list[ToolDefinition] | None = task.tools
        self._server, self._task, self._cookies = server, task, cookies
        self._names = [str(tool["function"]["name"]) for tool in task.tools or []]

    async def step(self, message: Message) -> StepResult:
        """Make the message's tool calls, in order; without any, the user answers, and without a user the episode is
        over."""
        calls = message.get("tool_calls") or []
        if not calls:
            return StepResult(done=True) if self.user is None else await self.user.reply(message)
        answers: list[Message] = []
        for call in calls:
            function = call.get("function") or {}
            text = await self._call(str(function.get("name")), function.get("arguments"))
            answers.append(tool_message(call, text))
        return StepResult(answers)

    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> Verdict:
        """The verdict of /verify. Raises OutsideError("environment" or "judge") where it says that it failed."""
        body = verify_body(self._task, messages, stop_reason, self._server.model)
        http = self._server.http
        most = ORDINARY_BYTES + 4 * len(repr(body))  # the answer may repeat the whole request
        timeout_s = self._server.verify_timeout_s
        request = Request("POST", _VERIFY, body, timeout_s=timeout_s, cookies=self._cookies, most_bytes=most)
        answer = await http.ask(request, dict)
        return read_verdict(answer, body, f"{http.base}{_VERIFY}")

    async def close(self) -> None: ...

    async def _call(self, name: str, arguments: Any) -> str:
        """What the policy reads: the tool's answer, or what is wrong with the call."""
        if name not in self._names or name in RESERVED:
            return tool_error_message(f"there is no tool {name!r}; the tools are: {', '.join(self._names)}")
        if not isinstance(arguments, dict):
            return tool_error_message(f"the arguments of {name} must be a JSON object")
        path = f"/{quote(name, safe='')}"
        request = Request("POST", path, arguments, is_answer=_is_tool, repeatable=False, cookies=self._cookies)
        return await self._server.http.exchange(request, lambda reply: as_text(reply.text))


def _is_seeded(status: int) -> bool:
    return 200 <= status < 300 or status == 404


def _is_tool(status: int) -> bool:
    """The message for the policy: the tool's answer, or the fault of the call."""
    return 200 <= status < 300 or (400 <= status < 500 and status not in (401, 403, 408, 429))


def read_verdict(answer: JsonObject, sent: JsonObject, where: str) -> Verdict:
    """``reward``, and whatever the answer adds to what was sent. Raises OutsideError when the answer says that it failed, or
    has no finite reward."""
    new = {k: v for k, v in answer.items() if not (k in sent and sent[k] == v)}
    extra = {k: v for k, v in new.items() if k not in _ECHOED}
    if (failure := failure_of("nemo-gym", new)) is not None:
        if not failure.is_rollout:
            # Its reward is a default.
            text = f"{where}: {failure.reason}"
            raise OutsideError(failure.kind, text, retryable=not failure.final, final=failure.final)
        return Verdict(None, extra, masked=masked_extra(failure, {"reward": answer.get("reward")}))
    reward = answer.get("reward")
    if not is_finite(reward):
        got = brief(reward) if "reward" in answer else "no reward"
        raise OutsideError("environment", f"{where}: got {got}, expected a finite number as reward")
    return Verdict(float(reward), extra)
