"""One request of an agent and its completion, in the form that every dialect is read to and written from.

Invariants: messages and tools are in the form that rollouts store (``gymdata.rollouts.messages.Message``: ``content`` is
text, reasoning is ``reasoning``, arguments of calls are objects), so no part behind a dialect knows which one a client
speaks; what the server cannot do is refused by the name that the client gave it, and never passed over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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
        self.kind, self.message, self.where, self.retry_after = kind, message, where, retry_after
        self.status = STATUS[kind] if status is None else status

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
    #: Chat Completions' ``stream_options.include_usage``.
    stream_usage: bool = False
    #: None: text. ``{"type": "json_object"}``, or ``{"type": "json_schema", "schema": SCHEMA}``.
    response_format: Mapping[str, Any] | None = None
    #: None: no log-probabilities; else how many alternatives per token.
    logprobs: int | None = None
    #: Whether the client wants ``prompt_token_ids`` and ``token_ids`` back (vLLM's ``return_token_ids``).
    return_token_ids: bool = False
    #: Whether tokens of log-probabilities are named ``token_id:ID``, and ids and log-probabilities are on the message, too
    #: (vLLM's ``return_tokens_as_token_ids``, which NeMo Gym asks for in training).
    tokens_as_ids: bool = False
    #: The session, where the body or a header that only this dialect has names one.
    session_key: str | None = None
    #: What the client calls the conversation within the session (a thread, a sub-agent).
    conversation_hint: str | None = None
    #: The completion that this request goes on from (Responses' ``previous_response_id``): its conversation comes before
    #: ``messages``.
    previous_id: str | None = None
    #: The parsed body, for what a response repeats of it.
    body: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token with its log-probability and the alternatives to it, most probable first."""

    token: str
    logprob: float
    top: Sequence[tuple[str, float]] = ()


#: ``tool_calls``: the model called tools. Each dialect has its own words for these.
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class AgentCompletion:
    """The completion of a request. ``text``: all that the model wrote, without the stop token; the other parts are read
    from it."""

    id: str
    created: int
    text: str
    content: str
    reasoning: str | None
    #: ``{"id": str, "type": "function", "function": {"name": str, "arguments": object}}``.
    tool_calls: Sequence[ToolCall]
    finish_reason: FinishReason
    n_prompt_tokens: int
    n_generated_tokens: int
    logprobs: Sequence[TokenLogprob] | None = None
    #: The text of ``stop`` that ended it.
    stop_sequence: str | None = None
    prompt_token_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """A part of a completion for a streamed answer: more content, more reasoning, or calls that are complete.
    ``end``: the completion as a whole, with the last part. A stream begins with a delta without any of these, as soon as
    the prompt was accepted."""

    id: str
    created: int
    n_prompt_tokens: int
    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    end: AgentCompletion | None = None


class Dialect(Protocol):
    """One API that clients speak: how its requests are read and its responses written."""

    name: str
    #: The paths of its requests, such as ``/v1/chat/completions``.
    paths: tuple[str, ...]
    #: Paths that only count the tokens of a request, such as ``/v1/messages/count_tokens``; ``counted`` answers them.
    count_paths: tuple[str, ...]

    def parse(self, body: JsonObject, headers: Mapping[str, str]) -> AgentRequest:
        """``headers``: with names in small letters. Raises RequestError for what is wrong or not supported."""
        ...

    def response(self, request: AgentRequest, completion: AgentCompletion) -> JsonObject:
        """The body of an answer that is not streamed."""
        ...

    def events(self, request: AgentRequest, deltas: AsyncIterator[CompletionDelta]) -> AsyncIterator[bytes]:
        """The frames of a streamed answer. A RequestError of ``deltas`` becomes the dialect's own error in a stream, and
        ends it."""
        ...

    def counted(self, request: AgentRequest, n_tokens: int) -> JsonObject:
        """The body of an answer that counts tokens."""
        ...

    def error(
        self, status: int, kind: ErrorKind, message: str, retry_after: float | None = None, where: str | None = None
    ) -> tuple[int, dict[str, str], JsonObject]:
        """Status, headers and body of an error."""
        ...
