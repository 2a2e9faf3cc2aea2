"""Stand-ins at the ports: an engine whose answers depend only on seed and prompt, and a chat format of plain letters.

The chat: each role is one id, a letter's id is its code, END closes a turn. A generated ``CALL name {json}`` is a tool call.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gymdata.commands.collect.run import Parts
from gymdata.engines.port import Generation, SampleRequest
from gymdata.environments import load_environment
from gymdata.errors import OutsideError
from gymdata.rewards import load_rewards
from gymdata.rewards.scheduler import Weighted
from gymdata.rollouts.messages import Message

END = 300
ROLE = {"system": 301, "user": 302, "assistant": 303, "tool": 304}


class LetterChat:
    """A ports.Chat over letters."""

    end_of_turn_ids = (END,)
    vocab_size = 400

    def facts(self) -> Mapping[str, Any]:
        return {"tokenizer_hash": "letters", "chat_template_hash": "letters", "tool_parser": "letters"}

    def render(self, messages: Sequence[Message], tools: Any) -> list[int]:
        ids = [i for m in messages for i in (ROLE[m["role"]], *(m.get("content") or "").encode(), END)]
        return [*ids, ROLE["assistant"]]

    def fewest_tokens(self, messages: Sequence[Message], tools: Any) -> int:
        return 0

    def bridge(self, messages: Sequence[Message], new: Sequence[Message], tools: Any) -> list[int]:
        return self.render(new, tools)

    def parse(self, token_ids: Sequence[int], tools: Any, *, calls: bool = True) -> Message:
        text = self.decode([i for i in token_ids if i < 256])
        word, _, rest = text.partition(" ")
        name, _, arguments = rest.partition(" ")
        if word == "CALL" and calls:
            try:
                call = {"name": name, "arguments": json.loads(arguments)}
            except json.JSONDecodeError:
                return {"role": "assistant", "content": text}
            return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
        return {"role": "assistant", "content": text}

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")


def add_or_answer(prompt: Sequence[int], rng: random.Random) -> str:
    """Call the tool until two answers were seen, then say a digit."""
    return (
        f'CALL add {{"a": {rng.randrange(9)}, "b": 1}}' if list(prompt).count(ROLE["tool"]) < 2 else rng.choice("0123")
    )


def one_digit(prompt: Sequence[int], rng: random.Random) -> str:
    """A digit, and done."""
    return rng.choice("0123")


class FakeSampler:
    """A ports.Sampler: what it says is ``policy(prompt, rng)`` with an rng made of seed and prompt.

    ``before`` is awaited with each request and may raise; ``peak`` is the largest number of requests in flight.
    """

    def __init__(
        self,
        policy: Callable[[Sequence[int], random.Random], str] = one_digit,
        *,
        groups: bool = False,
        before: Callable[[SampleRequest], Any] | None = None,
        max_model_len: int | None = None,
        concurrency: int = 8,
    ) -> None:
        self.policy = policy
        self.prefers_groups = groups
        self.default_concurrency = concurrency
        self.before = before
        self.max_model_len = max_model_len
        self.requests: list[SampleRequest] = []
        self.started = 0
        self.closed = 0
        self.in_flight = self.peak = 0

    async def start(self) -> Mapping[str, Any]:
        self.started += 1
        return {"engine": "fake", "max_model_len": self.max_model_len}

    async def sample(self, request: SampleRequest) -> list[Generation]:
        self.requests.append(request)
        self.in_flight += request.n
        self.peak = max(self.peak, self.in_flight)
        try:
            if self.before is not None:
                await self.before(request)
            await asyncio.sleep(0)
            return [self._one(request, i) for i in range(request.n)]
        finally:
            self.in_flight -= request.n

    async def close(self) -> None:
        self.closed += 1

    def _one(self, request: SampleRequest, index: int) -> Generation:
        seed = (request.seed or 0) + index
        digest = hashlib.blake2b(repr((seed, list(request.prompt_token_ids))).encode()).digest()
        rng = random.Random(digest)
        ids = [*self.policy(request.prompt_token_ids, rng).encode(), END]
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return Generation(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=ids,
            log_probs=[-rng.random() for _ in ids],
            finish_reason="length" if cut else "stop",
        )


def parts(
    sampler: FakeSampler | None = None,
    *,
    env: str | None = None,
    rewards: Sequence[str] = (),
    tool_timeout_s: float = 5.0,
) -> Parts:
    """A run's parts with the fakes in the engine's and the tokenizer's place."""
    return Parts(
        sampler=sampler or FakeSampler(),
        chat=LetterChat(),
        environment=load_environment(env, tool_timeout_s=tool_timeout_s),
        rewards=[Weighted(function, weight) for function, weight in load_rewards(rewards)],
        model={"policy": "fake", "policy_hash": "fake-0"},
    )


def engine_fault(text: str = "out of luck", *, fatal: bool = False) -> OutsideError:
    return OutsideError("engine", text, fatal=fatal)


class LetterReplica(FakeSampler):
    """``folder``: gets a file named as the process when it starts; with a file ``die`` the next request finds the engine
    dead."""

    def __init__(self, folder: Path) -> None:
        super().__init__(add_or_answer, before=partial(_before, folder))
        self.folder = folder

    async def start(self) -> dict[str, Any]:
        await super().start()
        (self.folder / f"{os.getpid()}.pid").touch()
        return self.facts()

    def facts(self) -> dict[str, Any]:
        return {"engine": "letters", "engine_version": "1", "max_model_len": None}


async def _before(folder: Path, request: SampleRequest) -> None:
    await asyncio.sleep(0.05)
    try:
        (folder / "die").unlink()
    except FileNotFoundError:
        return
    raise engine_fault("the engine is dead", fatal=True)
