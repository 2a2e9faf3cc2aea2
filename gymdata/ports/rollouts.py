"""Where rollouts come from: samplers and their chat, environments, workflows, rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from gymdata.errors import OutsideError

#: A chat message as a plain dict: role, content, and optionally reasoning, tool_calls, tool_call_id, name.
#: ``tool_calls`` is a list of ``{"id": str, "type": "function", "function": {"name": str, "arguments": dict}}``.
Message = dict[str, Any]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The same prompt as a server is told it that hears messages only. ``held``: the ids that were read and sampled so
    far, which the prompt should begin with; empty before the first model call."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    held: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt to continue. ``n`` > 1 asks for that many independent continuations, seeded ``seed + i``."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    seed: int | None = None
    n: int = 1
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One continuation, exactly as the engine sampled it.

    ``token_ids`` keeps the stop token when one was sampled; ``log_probs`` has one entry a token;
    ``prompt_token_ids`` is what the engine reports that it read, which may differ from what was sent;
    ``top_log_probs`` has, a token, the (id, log-prob) alternatives when they were asked for.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    top_log_probs: Sequence[Sequence[tuple[int, float]]] | None = None


class Sampler(Protocol):
    """An engine, in this process or behind HTTP: ids in, ids and log-probabilities out."""

    #: Rollouts to keep in flight unless the user says otherwise.
    default_concurrency: int
    #: True when n > 1 in one request is cheaper than n requests (HTTP).
    prefers_groups: bool

    async def start(self) -> Mapping[str, Any]:
        """Bring the engine up; returns facts for run.json (engine, version, dtype, served model, limits …)."""
        ...

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """``request.n`` generations. Raises OutsideError("engine", …)."""
        ...

    async def close(self) -> None:
        """Release the engine and every process that it started."""
        ...


class Chat(Protocol):
    """A tokenizer with its chat template: messages to ids, ids to messages, and the bridge between turns."""

    #: Tokens that close an assistant turn in this template, the one to insert first.
    end_of_turn_ids: tuple[int, ...]
    vocab_size: int

    def facts(self) -> Mapping[str, Any]:
        """Hashes for run.json: tokenizer_hash, chat_template_hash, end_of_turn_ids, tool parser."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Ids of the conversation with the generation prompt."""
        ...

    def fewest_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """A number of ids that ``render`` certainly gives at least, told quickly; 0 when nothing is certain."""
        ...

    def bridge(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Ids from just after the end-of-turn token of the last assistant message in ``messages`` through ``new`` and
        the generation prompt. Raises RefusedError when the template rewrites the past."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None) -> Message:
        """The assistant message that these generated ids spell: content, reasoning, tool_calls. Never raises on what a
        model wrote: text that does not parse is content."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the task file. ``row`` is the whole source row, kept for rewards and environments."""

    task_id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    row: dict[str, Any]
    content_hash: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to an assistant message: messages to go on with, or none when the episode is over."""

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    reward: float | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an environment says of a whole rollout. ``reward`` None: it would not score it; ``extra``: all else it says."""

    reward: float | None
    extra: Mapping[str, Any] = field(default_factory=dict)


class Episode(Protocol):
    """One rollout's life inside an environment."""

    tools: list[dict[str, Any]] | None
    messages: list[Message]

    async def step(self, message: Message) -> StepResult:
        """Raises OutsideError("environment", …) when the environment, not the policy, is at fault."""
        ...

    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> Verdict | None:
        """Asked once about a rollout that ended, whole or truncated (``stop_reason``: the limit); None: says nothing.

        ``messages``: the whole conversation. Raises OutsideError("environment", …): then the rollout failed."""
        ...

    async def close(self) -> None: ...


class Environment(Protocol):
    """Where rollouts happen. ``identity`` goes to run.json; a change of it is another run."""

    identity: Mapping[str, Any]

    async def start(self, task: Task, rollout_index: int) -> Episode: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteRollout:
    """A rollout that was made elsewhere. ``generations``: for each message the model call that it is, where token ids
    were given; None for all other messages."""

    messages: list[Message]
    generations: list[Generation | None]
    tools: list[dict[str, Any]] | None = None
    truncated: bool = False
    stop_reason: str | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """What is asked of a workflow: one rollout of a task. ``sampling``: temperature and the like, limits included."""

    rollout_id: str
    task: Task
    rollout_index: int
    seed: int
    sampling: Mapping[str, Any]


class Workflow(Protocol):
    """Makes whole rollouts elsewhere. ``identity`` goes to run.json; a change of it is another run."""

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def default_concurrency(self) -> int: ...

    async def start(self) -> Mapping[str, Any]:
        """Open connections; returns facts for run.json."""
        ...

    async def run(self, request: RemoteRequest) -> RemoteRollout:
        """Raises OutsideError("environment", …)."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One named part of a reward. ``value`` None means not scored, and ``detail`` says why."""

    name: str
    value: float | None
    weight: float = 1.0
    detail: str | None = None


@runtime_checkable
class RewardFunction(Protocol):
    """Scores finished rollouts in batches. A function that fails raises RewardError; a fatal one fails on all.

    One that fails on some of them only puts an OutsideError in the place of each of those.
    """

    name: str
    source: str

    def __call__(self, rollouts: Sequence[Mapping[str, Any]]) -> Sequence[float | OutsideError | None]:
        """``rollouts``: dicts with messages (list), task (dict), completion text and token ids. One value each."""
        ...


class Progress(Protocol):
    """What a stage tells whoever watches. Never raises."""

    def update(self, **counts: float) -> None: ...

    def message(self, text: str) -> None: ...
