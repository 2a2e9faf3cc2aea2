"""Where tokens come from: the protocols of samplers and chats.

Invariant: a Sampler gets token ids and returns token ids, so nothing between engine and disk re-tokenizes; an outside
fault is raised as ``OutsideError`` naming its system, and never comes back as a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gymdata.rollouts.messages import Message, Tools
from gymdata.store.paths import Facts

#: ``repetition``: the engine ended a generation that only repeats itself.
FinishReason = Literal["stop", "length", "repetition", "abort"]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt to continue. ``n`` > 1 requests that many independent continuations, seeded ``seed + i``. ``group``:
    requests with the same one begin alike, so the server that had the last of them has their beginning in its cache.
    ``sampling``: what a client chooses, by vLLM's names, in place of the sampler's settings of these names."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    seed: int | None = None
    n: int = 1
    group: str = ""
    sampling: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One continuation, exactly as the engine sampled it.

    ``token_ids`` keeps the stop token when one was sampled, and ends with the one that completes a stop string (``n_cut``:
    how many ids the engine gave behind it, see ``cut_at_stop``); ``log_probs`` has one entry per token; ``prompt_token_ids``
    is what the engine reports that it read, which may differ from what was sent; ``top_log_probs`` has the (id,
    log-prob) alternatives per token, when they were requested. ``server``: which of several servers sampled it.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    top_log_probs: Sequence[Sequence[tuple[int, float]]] | None = None
    server: str | None = None
    #: (version, start, end) of the tokens that each version of the weights sampled, where the engine names them.
    weight_versions: Sequence[tuple[str, int, int]] | None = None
    n_cut: int = 0


class Sampler(Protocol):
    """An engine, in this process or behind HTTP: ids in, ids and log-probabilities out."""

    #: Rollouts to keep in flight unless the user says otherwise.
    default_concurrency: int
    #: True when n > 1 in one request is cheaper than n requests (HTTP).
    prefers_groups: bool

    async def start(self) -> Facts:
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

    def facts(self) -> Facts:
        """Hashes for run.json: tokenizer_hash, chat_template_hash, end_of_turn_ids, tool parser."""
        ...

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the conversation with the generation prompt."""
        ...

    def fewest_tokens(self, messages: Sequence[Message], tools: Tools) -> int:
        """A number of ids that ``render`` certainly gives at least, found quickly; 0 when nothing is certain."""
        ...

    def bridge(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> list[int]:
        """Ids from just after the end-of-turn token of the last assistant message in ``messages`` through ``new`` and
        the generation prompt. Raises RefusedError when the template rewrites the past."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Tools, *, calls: bool = True) -> Message:
        """The assistant message in these generated ids: content, reasoning, tool_calls. Never raises on what a model
        wrote: text that does not parse is content, and without ``calls`` calls are."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands, without a conversation around it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens."""
        ...
