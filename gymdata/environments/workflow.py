"""Whole rollouts from elsewhere: ``--workflow-url URL`` is sent a task and answers with the resulting conversation.

The request, a POST for each rollout: the task's row and, in addition, ``responses_create_params``, ``task_id``,
``messages``, ``tools``, ``rollout_id``, ``rollout_index``, ``seed``, ``model`` and ``sampling`` (temperature,
max_tokens and the like). The answer is a JSON object with either

* ``messages``: the conversation as chat messages. One that begins with an assistant message follows on the task's own. An
  assistant message that is one model call may carry ``prompt_token_ids`` (the whole prompt of that call),
  ``generation_token_ids``, ``generation_log_probs`` and ``finish_reason``; ``status`` "truncated" and ``stop_reason`` say
  that a limit ended it; or
* ``response.output``: items of the Responses shape, as NeMo Gym's agents answer at ``/run``, token lists on the item that
  ends each model call;

and with ``reward`` where it has one; whatever else it says is kept with the row. ``--set result_json_path=$.value`` names
the place in the answer where that object is; a text there is the last assistant message, a rollout without ids.

Invariants: ids and log-probabilities are taken exactly as given, or the answer is refused; a rollout without ids has
no token data and is never trained as if it had; no fault of the endpoint becomes a rollout or a reward.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeGuard

from gymdata.engines.port import Generation
from gymdata.environments.port import RemoteRequest, RemoteRollout, Verdict
from gymdata.environments.resource_server import outage, read_verdict
from gymdata.environments.responses import conversation_of, task_body
from gymdata.errors import UsageError
from gymdata.http import Advice, HttpClient
from gymdata.rollouts.failures import Failure, failure_of, masked_extra
from gymdata.rollouts.messages import GENERATION, LOG_PROBS, PROMPT, TOKEN_KEYS, JsonObject, Message, Task
from gymdata.store.lines import NON_FINITE
from gymdata.store.paths import Facts, Identity
from gymdata.urls import WORKFLOW_KEYS, address

_KEY = "set WORKFLOW_API_KEY to the endpoint's key"
_ADVICE = Advice(
    unreachable="is the workflow endpoint up?",
    slow="raise the request timeout (--set request_timeout=SECONDS), or lower -c/--concurrency",
    statuses={401: _KEY, 403: _KEY, 404: "is this the whole URL of the endpoint, path included?"},
)
_ROLES = frozenset({"system", "user", "assistant", "tool", "function", "developer", "environment"})
_READ = frozenset({"messages", "response", "responses_create_params", "reward", "status", "stop_reason", "tools"})
_MAX_ID = 2**31
#: Bytes of an answer: its messages and other fields; an id or log-probability.
_BESIDE_IDS_BYTES, _ID_BYTES = 64 << 20, 32
_STEP = re.compile(r"""\.(\w+)|\[(-?\d+)\]|\[(["'])(.+?)\3\]""")


def json_path(text: str) -> tuple[str | int, ...]:
    """Keys and indexes of a JSON path that leads to one place: ``$``, ``$.value``, ``$['a b'][0]``. Raises UsageError."""
    steps = list(_STEP.finditer(text.removeprefix("$")))
    if not text.startswith("$") or "".join(match[0] for match in steps) != text[1:]:
        raise UsageError.bad_value("result_json_path", text, "a JSON path to one place, such as $.value or $['a'][0]")
    return tuple(match[1] or match[4] or int(match[2]) for match in steps)


def spelt(path: tuple[str | int, ...]) -> str:
    """A path as JSON path has it."""
    return "$" + "".join(f"[{step!r}]" for step in path)


class HttpWorkflow:
    """Makes whole rollouts elsewhere, behind ``url`` (the whole address). ``timeout_s`` is for one try of one rollout;
    ``identity`` goes to run.json, and a change of it is another run."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout_s: float = 300.0,
        max_retries: int = 5,
        pause_s: float = 0.5,
        concurrency: int = 64,
        result_json_path: str = "$",
    ) -> None:
        self.identity: Identity = {"name": "workflow"}
        self.default_concurrency = concurrency
        self._model = model
        self._path = json_path(result_json_path)
        self._http = HttpClient(
            address(url, "--workflow-url", "http://localhost:8000/run", WORKFLOW_KEYS),
            "environment",
            timeout_s=timeout_s,
            max_retries=max_retries,
            pause_s=pause_s,
            key_names=WORKFLOW_KEYS,
            advice=_ADVICE,
        )

    async def start(self) -> Facts:
        """Open connections; the first request is the first task's."""
        await self._http.open()
        return {"engine": "workflow", "transport": "http", "endpoint": self._http.base}

    async def run(self, request: RemoteRequest) -> RemoteRollout:
        """One rollout. Cancelling drops the connection. Raises OutsideError("environment", …)."""
        row, sampling = task_body(request.task), dict(request.sampling)
        row["responses_create_params"] = {
            **row["responses_create_params"],
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
            "max_output_tokens": sampling["max_tokens"],
        }
        body = {
            **row,
            "task_id": request.task.task_id,
            "messages": request.task.messages,
            "tools": request.task.tools,
            "rollout_id": request.rollout_id,
            "rollout_index": request.rollout_index,
            "seed": request.seed,
            "model": self._model,
            "sampling": sampling,
        }
        turns, tokens = int(sampling.get("max_turns") or 1), int(sampling["max_tokens"])
        # Every call may repeat the whole prompt, ids and log-probabilities are numbers in decimal.
        most = _BESIDE_IDS_BYTES + _ID_BYTES * tokens * turns * (turns + 2)
        rollout = await self._http.ask(
            "POST", "", body, lambda answer: self._read(answer, body, request.task), most_bytes=most
        )
        if isinstance(rollout, Failure):  # another attempt may do better, the same request in a moment does not
            raise outage(rollout, self._http.base)
        return rollout

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        await self._http.close()

    def _result(self, answer: JsonObject) -> JsonObject:
        """The value at ``result_json_path``."""
        value: Any = answer
        for step in self._path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError) as error:
                raise self._http.garbage(f"something at {spelt(self._path)} (result_json_path)", answer) from error
        if isinstance(value, str) and self._path:
            return {"messages": [{"role": "assistant", "content": value}]}
        if not isinstance(value, dict):
            raise self._http.garbage(f"an object or a text at {spelt(self._path)} (result_json_path)", answer)
        return value

    def _read(self, answer: JsonObject, sent: JsonObject, task: Task) -> RemoteRollout | Failure:
        result = self._result(answer)
        new = {k: v for k, v in result.items() if not (k in sent and sent[k] == v)}
        failure = failure_of("nemo-gym", new)
        if failure is not None and not failure.is_rollout:
            return failure
        messages, generations, limit_reason = self._conversation(result, task)
        if not any(message["role"] == "assistant" for message in messages):
            raise self._http.garbage("a conversation with an assistant message", result)
        extra = {k: v for k, v in new.items() if k not in _READ}
        verdict = Verdict(None, extra)
        if failure is not None:
            verdict = Verdict(None, extra, masked=masked_extra(failure, {"reward": result.get("reward")}))
        elif result.get("reward") is not None:
            verdict = read_verdict({**extra, "reward": result["reward"]}, {}, self._http.base)
        tools = result.get("tools")
        stop_reason = result.get("stop_reason")
        return RemoteRollout(
            messages=messages,
            generations=generations,
            tools=tools if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) else task.tools,
            truncated=result.get("status") == "truncated" or limit_reason is not None,
            stop_reason=limit_reason if stop_reason is None else str(stop_reason),
            verdict=verdict,
        )

    def _conversation(
        self, result: JsonObject, task: Task
    ) -> tuple[list[Message], list[Generation | None], str | None]:
        messages = result.get("messages")
        if messages is None and (conversation := conversation_of(result)) is not None:
            messages, items, limit_reason = conversation
            turns = [message.pop("turn", None) for message in messages]
            holders = [items.get(turn) if turn is not None else None for turn in turns]
        else:
            if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
                raise self._http.garbage("messages with role and content, nor response.output", result)
            holders = [message if message["role"] == "assistant" else None for message in messages]
            messages = [
                {k: v for k, v in message.items() if k not in (*TOKEN_KEYS, "finish_reason")} for message in messages
            ]
            limit_reason = None
        if messages and messages[0]["role"] == "assistant":
            messages = [*task.messages, *messages]
            holders = [*(None for _ in task.messages), *holders]
        return messages, [self._generation(holder) for holder in holders], limit_reason

    def _generation(self, holder: JsonObject | None) -> Generation | None:
        """The model call whose lists ``holder`` has; None without ids. Raises OutsideError for lists that do not fit."""
        if holder is None or not (holder.get(PROMPT) or holder.get(GENERATION)):
            return None
        prompt, generated, log_probs = (holder.get(key) for key in TOKEN_KEYS)
        if not _ids(prompt) or not prompt or not _ids(generated):
            raise self._http.garbage(f"ids in both {PROMPT} and {GENERATION}", {PROMPT: prompt, GENERATION: generated})
        if log_probs is None or log_probs == []:
            log_probs = [math.nan] * len(generated)
        # NaN and the infinities may be strings. ``validate`` reports them (L302).
        listed = log_probs if isinstance(log_probs, list) else [None]
        numbers: list[Any] = [NON_FINITE.get(v) if isinstance(v, str) else v for v in listed]
        # An integer beyond float64 is no logarithm of anything, and could not be stored.
        sound = all(type(v) is float or (type(v) is int and abs(v) < 1 << 1023) for v in numbers)
        if not sound or len(numbers) != len(generated):
            raise self._http.garbage(f"one number in {LOG_PROBS} for each generated id", log_probs)
        reason: Literal["stop", "length", "abort"] = "length" if holder.get("finish_reason") == "length" else "stop"
        return Generation(prompt, generated, numbers, reason)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        return False
    calls = value.get("tool_calls")
    sound = calls is None or (isinstance(calls, list) and all(isinstance(call, dict) for call in calls))
    return sound and (value.get("content") is None or isinstance(value["content"], str))


def _ids(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < _MAX_ID for v in values)
