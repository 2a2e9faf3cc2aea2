"""One request of an agent and its completion, in the form that every dialect reads and writes.

Invariants: messages and tools are in the form that rollouts store (``gymdata.rollouts.messages.Message``: ``content`` is
text, reasoning is ``reasoning``, arguments of calls are objects), so no part behind a dialect knows which one a client
speaks; what the server cannot do is refused by the name that the client gave it, and never passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from gymdata.rollouts.messages import JsonObject, Message, ToolCall, Tools
from gymdata.texts import REFUSAL, short

#: ``invalid``: the request is wrong. ``unsupported``: a field that the server does not have. ``authentication``: no token of
#: this server. ``not_found``: a path, session or completion. ``too_large``: more than a limit of the server. ``budget``: the
#: session has used up its turns or tokens. ``busy``: too many sessions or requests; ``retry_after`` says when again.
#: ``context``: a prompt that the model's context has no room for. ``upstream``: the engine failed. ``internal``: a defect of
#: the server.
ErrorKind = Literal[
    "invalid",
    "unsupported",
    "authentication",
    "not_found",
    "too_large",
    "context",
    "budget",
    "busy",
    "upstream",
    "internal",
]
#: The status of an error, where the one who raises it does not know better.
STATUS: Mapping[ErrorKind, int] = {
    "invalid": 400, "unsupported": 400, "authentication": 401, "not_found": 404, "too_large": 413, "context": 400,
    "budget": 403, "busy": 429, "upstream": 502, "internal": 500,
}  # fmt: skip


class RequestError(Exception):
    """A request that is answered with an error. ``where``: the field of the body, as the client wrote it."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        where: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = short(message, REFUSAL)
        super().__init__(message)
        self.kind, self.message, self.where = kind, message, where
        self.status = STATUS[kind] if status is None else status
        #: When to come again, in whole seconds and none too early.
        self.headers = {} if retry_after is None else {"retry-after": str(math.ceil(retry_after))}

    @classmethod
    def field(cls, where: str, problem: str, kind: ErrorKind = "invalid", status: int | None = None) -> RequestError:
        """The error of a field, with which its message begins."""
        return cls(kind, f"{where}: {problem}", where=where, status=status)


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request for a completion. ``sampling``: temperature and the like by vLLM's names, only what the client sent."""

    model: str
    messages: Sequence[Message]
    #: As Chat Completions has them: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
    tools: Tools = None
    #: ``"auto"``, ``"none"``, ``"required"``, or the name of a tool as ``{"name": NAME}``.
    tool_choice: str | Mapping[str, str] = "auto"
    parallel_tool_calls: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: None: as many as the context has room for.
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stream: bool = False
    #: None: text. ``{"type": "json_object"}``, or ``{"type": "json_schema", "schema": SCHEMA}``.
    response_format: Mapping[str, Any] | None = None
    #: None: no log-probabilities; else how many alternatives per token.
    logprobs: int | None = None
    #: Whether tokens of log-probabilities are named ``token_id:ID`` (vLLM's ``return_tokens_as_token_ids``).
    tokens_as_ids: bool = False
    #: The session, where the body or a header that only this dialect has names one.
    session_key: str | None = None
    #: What the client calls the conversation within the session (a thread, a sub-agent).
    conversation_hint: str | None = None
    #: The completion that this request goes on from (Responses' ``previous_response_id``): its conversation comes before
    #: ``messages``.
    previous_id: str | None = None
    #: What the dialect's own answer needs of the body besides.
    echo: JsonObject = field(default_factory=dict)


class TokenLogprob(NamedTuple):
    """A generated token with its log-probability and the alternatives to it, most probable first."""

    token: str
    logprob: float
    top: Sequence[tuple[str, float]] = ()


#: ``tool_calls``: the model called tools. Each dialect has its own words for these.
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class AgentCompletion:
    """The completion of a request, which has ended."""

    id: str
    created: int
    content: str
    reasoning: str | None
    #: ``{"id": str, "type": "function", "function": {"name": str, "arguments": object}}``.
    tool_calls: Sequence[ToolCall]
    finish_reason: FinishReason
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None
    #: The text of ``stop`` that ended it.
    stop_sequence: str | None = None


@dataclass(slots=True)
class Client:
    """Who waits for an answer. ``gone``: it went away before it had one."""

    gone: bool = False


class Dialect(Protocol):
    """One API that clients speak: how its requests are read and its answers written."""

    name: str
    #: The paths of its requests, such as ``/v1/chat/completions``.
    paths: Sequence[str]
    #: Paths that only count the tokens of a request, such as ``/v1/messages/count_tokens``; ``counted`` answers them.
    count_paths: Sequence[str]

    def read(self, body: JsonObject, headers: Mapping[str, str]) -> AgentRequest:
        """``headers``: with names in small letters. Raises RequestError for what is wrong or not supported."""
        ...

    def write(self, request: AgentRequest, completion: AgentCompletion) -> JsonObject:
        """The body of an answer."""
        ...

    def frames(self, request: AgentRequest, body: JsonObject) -> bytes:
        """The same answer as a stream."""
        ...

    def counted(self, request: AgentRequest, n_tokens: int) -> JsonObject:
        """The body of an answer that counts tokens."""
        ...

    def error(self, error: RequestError) -> JsonObject:
        """The body of an error."""
        ...

    def failed(self, request: AgentRequest, error: RequestError) -> bytes:
        """The error as a stream that has begun, and says nothing else."""
        ...
