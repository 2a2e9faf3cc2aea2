"""A reward that a server gives: ``POST URL`` with ``{"queries": […], "prompts": […]}``, answered ``{"rewards": […]}``.

``queries`` are whole texts, prompt and answer; ``prompts`` their beginnings up to the first generated token. Where the
tokenizer is known they are the saved ids of the last turn (of an agent's rollout, the last of its main conversation),
decoded with special tokens; otherwise, and for rollouts without ids, the messages as lines of ``role: content``.

Invariants: every request ends within its time limit and is tried a bounded number of times; an answer of the wrong
length, or a reward that is no finite number, is a fault of those rollouts, with its reason, and never a score; a batch
that the server refuses is requested one by one, so that one rollout cannot take others with it, but not one that was
answered with the wrong number of rewards: by itself a rollout would get a reward that may be another's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial

from gymdata.errors import OutsideError, RewardError, brief, option
from gymdata.http import Advice, HttpClient, Request, is_finite
from gymdata.rewards.port import View
from gymdata.rewards.views import conversation_ids
from gymdata.rollouts.messages import JsonObject, Message
from gymdata.urls import address

_IN_FLIGHT = 8
#: Bytes of an answer: besides its rewards, and per reward, with other fields of a server.
_ANSWER_BYTES, _REWARD_BYTES = 1 << 20, 64 << 10
_ADVICE = Advice(
    unreachable="is the reward server up, and the URL right?",
    statuses={
        401: "put the server's key into GYMDATA_REWARD_API_KEY",
        403: "put the server's key into GYMDATA_REWARD_API_KEY",
        404: "the URL is used as it is: give the whole path",
        405: "the server takes no POST there: give the whole path",
    },
)

Decode = Callable[[Sequence[int]], str]
#: One per rollout of a request.
_Answers = list[float | OutsideError | None]


class RemoteReward:
    """A reward function behind a URL.

    ``batch_size``: rollouts per request; ``timeout_s``: for one try of one request; ``max_retries``: more tries after a
    passing fault. A fault is fatal while the server was never reached.
    """

    name = "remote"
    quick = False
    #: Its requests end by themselves, so no other time limit cuts them off.
    bounded = True
    needs: str | None = None

    def __init__(
        self,
        url: str,
        *,
        decode: Decode | None = None,
        batch_size: int = 16,
        timeout_s: float = 60.0,
        max_retries: int = 3,
        pause_s: float = 0.5,
    ) -> None:
        base = address(url, option("reward_url"), "http://localhost:5000/get_reward")
        self.source = f"url:{base}"
        self._decode = decode
        self._batch_size = batch_size
        #: Whether it ever answered, and whether it was asked and never reached.
        self._answered = self._away = False
        self._client = partial(
            HttpClient, base, "reward", timeout_s=timeout_s, max_retries=max_retries, pause_s=pause_s, advice=_ADVICE
        )

    def __call__(self, rollouts: Sequence[View]) -> _Answers:
        """One reward each, an OutsideError in place of each that the server did not give."""
        return asyncio.run(self._score([self.texts(rollout) for rollout in rollouts]))

    def texts(self, rollout: View) -> tuple[str, str]:
        """(whole text, prompt) of a rollout."""
        if self._decode is not None and rollout["turns"]:
            prompt, text = (self._decode(ids.tolist()) for ids in conversation_ids(rollout))
            return text, prompt
        return as_lines(rollout["messages"]), as_lines(rollout["prompt"])

    async def _score(self, texts: Sequence[tuple[str, str]]) -> _Answers:
        client, room = self._client(), asyncio.Semaphore(_IN_FLIGHT)

        async def batch(texts: Sequence[tuple[str, str]], retries: int | None) -> _Answers:
            async with room:
                # While the server is away, one request per batch shows whether it is back.
                answers = await self._ask(client, texts, 0 if self._away else retries)
            fault = answers[0]
            if len(texts) == 1 or not isinstance(fault, OutsideError) or fault.fatal:
                return answers
            # Its own fault is one of the rewards, or their number; a server that hangs would hang for each.
            if isinstance(fault, RewardError) or isinstance(fault.__cause__, TimeoutError):
                return answers
            return [answer for text in texts for answer in await batch([text], 0)]

        await client.open()
        try:
            starts = range(0, len(texts), self._batch_size)
            parts = await asyncio.gather(*(batch(texts[k : k + self._batch_size], None) for k in starts))
        finally:
            await client.close()
        answers = [answer for part in parts for answer in part]
        if self._answered:  # that it is gone since costs these rollouts their reward, and says nothing of others
            for fault in answers:
                if isinstance(fault, OutsideError):
                    fault.fatal = False
        return answers

    async def _ask(self, client: HttpClient, texts: Sequence[tuple[str, str]], retries: int | None) -> _Answers:
        """The rewards of one request, or its fault in every place."""
        body = {"queries": [query for query, _ in texts], "prompts": [prompt for _, prompt in texts]}

        def read(answer: JsonObject) -> _Answers:
            rewards = answer.get("rewards")
            if not isinstance(rewards, list):
                raise client.garbage('an object with a list "rewards"', answer)
            if len(rewards) != len(texts):
                raise RewardError(f"the server gave {len(rewards)} rewards, expected {len(texts)}", retryable=True)
            return [
                float(reward)
                if is_finite(reward)
                else RewardError(f"the server gave {brief(reward)}, expected a finite number")
                for reward in rewards
            ]

        try:
            most = _ANSWER_BYTES + _REWARD_BYTES * len(texts)
            answers = await client.ask(Request("POST", "", body, retries=retries, most_bytes=most), read)
        except OutsideError as error:
            self._away = error.fatal and not self._answered
            return [error] * len(texts)
        self._answered, self._away = True, False
        return answers


def as_lines(messages: Sequence[Message]) -> str:
    """Messages as text: ``role: content`` per message, tool calls as JSON, an empty line between."""
    lines = []
    for message in messages:
        content = message.get("content")
        texts = [content if isinstance(content, str) else "" if content is None else json.dumps(content)]
        texts += [json.dumps(call.get("function", call)) for call in message.get("tool_calls") or ()]
        lines.append(f"{message['role']}: " + "\n".join(part for part in texts if part))
    return "\n\n".join(lines)
