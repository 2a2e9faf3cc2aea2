"""A trajectory builder whose engine says what (seed, prompt) decide: collecting, rows, rewards and files are the real ones.

Named in a configuration as ``deterministic.py:Builder``. The policy's weights play no part, so its rollouts are told apart
by version only, and their log-probabilities are drawn.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Mapping
from typing import Any

from gymdata.chat.template import TransformersChat
from gymdata.commands.collect.run import Parts, collect
from gymdata.commands.finetune.port import CollectOrder
from gymdata.engines.port import Generation, SampleRequest
from gymdata.environments import load_environment
from gymdata.progress import Progress
from gymdata.rewards import load_rewards
from gymdata.rewards.scheduler import Weighted


class Sampler:
    """Implements ports.Sampler: the sum, right in half of the answers. ``latency``: seconds an answer takes."""

    default_concurrency = 4
    prefers_groups = False

    def __init__(self, chat: TransformersChat, encode: Any, latency: float) -> None:
        self._chat, self._encode, self._latency = chat, encode, latency

    async def start(self) -> Mapping[str, Any]:
        return {"engine": "deterministic", "max_model_len": 256}

    async def sample(self, request: SampleRequest) -> list[Generation]:
        await asyncio.sleep(self._latency)
        return [self._one(request, index) for index in range(request.n)]

    async def close(self) -> None: ...

    def _one(self, request: SampleRequest, index: int) -> Generation:
        seed = (request.seed or 0) + index
        digest = hashlib.blake2b(repr((seed, list(request.prompt_token_ids))).encode()).digest()
        rng = random.Random(digest)
        found = re.search(r"(\d+)([+*-])(\d+)", self._chat.decode(request.prompt_token_ids))
        assert found is not None
        left, right = int(found[1]), int(found[3])
        answer = {"+": left + right, "-": left - right, "*": left * right}[found[2]] + rng.choice((0, 0, 1, 2))
        ids = [*self._encode(str(answer)), self._chat.end_of_turn_ids[0]]
        return Generation(request.prompt_token_ids, ids, [-rng.random() for _ in ids], "stop")


class Builder:
    """Implements ports.TrajectoryBuilder."""

    def __init__(self, num_generations: int = 4, latency: float = 0.0) -> None:
        self._n, self._latency = num_generations, latency

    def collect(self, order: CollectOrder, progress: Progress) -> None:
        assert order.model is not None
        chat = TransformersChat.load(order.model)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(order.model)
        parts = Parts(
            sampler=Sampler(chat, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], self._latency),
            chat=chat,
            environment=load_environment(None),
            rewards=[Weighted(function, weight) for function, weight in load_rewards(order.reward)],
            model={"policy": "deterministic", "policy_hash": f"deterministic-{order.policy_version}"},
        )
        limit = {k: v for k, v in order.settings.items() if k == "limit"}
        n = int(order.settings.get("num_generations", self._n))
        collect(parts=parts, tasks=order.tasks, output=order.output, num_rollouts=n, seed=order.seed,
                run_id=order.run_id, policy_version=order.policy_version, **limit)  # fmt: skip
