"""A user that a model plays behind an OpenAI-compatible chat endpoint: ``--user-model URL``.

For that model the roles are swapped: the policy's messages are the user's, and the user's messages so far are its own.
Tool calls, tool results, reasoning and the policy's system message are the policy's affair and are not shown.

Invariants: a request that fails in passing is tried again with growing pauses, no earlier than the server asks, and is then
the environment's fault; what is no answer, or an empty one, is such a fault and never ends a conversation or scores it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from gymdata.environments.port import StepResult, Talk
from gymdata.http import Advice, HttpClient
from gymdata.rollouts.messages import JsonObject, Message, Task, TaskRow
from gymdata.settings import Settings
from gymdata.store.paths import Identity
from gymdata.urls import USER_KEYS, address

_CHAT = "/v1/chat/completions"
_KEY = "set USER_MODEL_API_KEY to the endpoint's key"
_ADVICE = Advice(
    unreachable="is the user's model up?",
    slow="raise the request timeout (--set request_timeout=SECONDS), or lower -c/--concurrency",
    statuses={401: _KEY, 403: _KEY, 404: "is this the base URL (with or without /v1) and the served model's name?"},
)
#: Why a rollout stopped that the user ended.
USER_STOP = "user_stop"
#: Requests until a reply has text.
_TRIES = 3
_SHOWN = {"assistant": "user", "user": "assistant"}


class ModelUser:
    """A ``User`` on ``endpoint`` (base URL, with or without /v1). Where it runs is no part of its identity.

    ``prompt``: the system message, made of a task's row; ``prompt_text``: what it is made from; ``stop``: text whose
    presence in a reply ends the conversation after it; ``sampling``: further fields of the request; ``seed``: each request
    gets one of its own made from it, None: none. An API key is taken from USER_MODEL_API_KEY, VLLM_API_KEY or
    OPENAI_API_KEY.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        prompt: Callable[[TaskRow], str],
        prompt_text: str,
        stop: str,
        sampling: Settings | None = None,
        seed: int | None = None,
        timeout_s: float = 300.0,
        max_retries: int = 5,
        pause_s: float = 0.5,
    ) -> None:
        self.rewards_steps = False
        self.model, self.prompt, self.stop, self.seed = model, prompt, stop, seed
        self.sampling = dict(sampling or {})
        self.identity: Identity = {
            "name": "model",
            "model": model,
            "prompt_hash": hashlib.blake2b(prompt_text.encode(), digest_size=16).hexdigest(),
            "stop": stop,
            "sampling": self.sampling,
        }
        self.http = HttpClient(
            address(endpoint, "--user-model", "http://localhost:8000", USER_KEYS).without("/v1"),
            "environment",
            timeout_s=timeout_s,
            max_retries=max_retries,
            pause_s=pause_s,
            key_names=USER_KEYS,
            advice=_ADVICE,
        )

    async def start(self, task: Task, rollout_index: int, messages: Sequence[Message]) -> Talk:
        """Open connections; nothing is requested yet."""
        await self.http.open()
        return _ModelTalk(self, task, rollout_index, messages)

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        await self.http.close()


class _ModelTalk:
    def __init__(self, user: ModelUser, task: Task, rollout_index: int, messages: Sequence[Message]) -> None:
        self._user, self._task, self._index, self._messages = user, task, rollout_index, messages
        self._system = user.prompt(task.row)

    async def reply(self, message: Message) -> StepResult:  # noqa: ARG002 - it is the last of the messages
        user = self._user
        body: JsonObject = {
            **user.sampling,
            "model": user.model,
            "messages": [{"role": "system", "content": self._system}, *as_the_user_sees(self._messages)],
        }
        text = ""
        for attempt in range(_TRIES):
            # With the same seed a model would return the same answer again.
            if user.seed is not None:
                key = f"{user.seed} {self._task.task_id} {self._index} {len(self._messages)} {attempt}"
                digest = hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=4).digest()
                body["seed"] = int.from_bytes(digest) >> 1
            text = await user.http.ask("POST", _CHAT, body, self._read)
            if text.strip():
                break
        else:
            raise user.http.garbage("text", text)
        ends = user.stop in text
        reply: Message = {"role": "user", "content": text}
        return StepResult([reply], done=ends, stop_reason=USER_STOP if ends else None)

    async def close(self) -> None: ...

    def _read(self, answer: JsonObject) -> str:
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(content, (str, type(None))):
            raise self._user.http.garbage("a chat completion", answer)
        content = content or ""
        return content.encode("utf-8", "replace").decode()


def as_the_user_sees(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the roles swapped. Consecutive messages of one role are merged, as chat templates
    require."""
    turns: list[Message] = []
    for message in messages:
        role, content = _SHOWN.get(str(message.get("role"))), message.get("content")
        if role is None or not isinstance(content, str) or not content.strip():
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1] = {"role": role, "content": f"{turns[-1]['content']}\n{content}"}
        else:
            turns.append({"role": role, "content": content})
    return turns
