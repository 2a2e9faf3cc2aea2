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

from gymdata.errors import OutsideError, RewardError, option
from gymdata.http import Advice, HttpClient, Request, is_finite
from gymdata.rewards.port import View
from gymdata.rewards.user import conversation_ids
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
_Answers = list[float | OutsideError | None]


class _MiscountError(RewardError):
    """An answer with more or fewer rewards than texts."""


class RemoteReward:
    """A reward function behind a URL.

    ``batch_size``: rollouts per request; ``timeout_s``: for one try of one request; ``max_retries``: more tries after a
    passing fault. ``useless`` holds the fault as long as the server was never reached.
    """

    quick = False
    #: Its requests end by themselves, so no other time limit cuts them off.
    bounded = True
    needs: str | None = None

    def __init__(
        self,
        url: str,
        *,
        name: str = "remote",
        decode: Decode | None = None,
        batch_size: int = 16,
        timeout_s: float = 60.0,
        max_retries: int = 3,
        pause_s: float = 0.5,
    ) -> None:
        self.name = name
        self._address = address(url, option("reward_url"), "http://localhost:5000/get_reward")
        self.source = f"url:{self._address}"
        self.useless: OutsideError | None = None
        self._answered = False
        self._decode = decode
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._pause_s = pause_s

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
        client = HttpClient(
            self._address,
            "reward",
            timeout_s=self._timeout_s,
            max_retries=self._max_retries,
            pause_s=self._pause_s,
            advice=_ADVICE,
        )
        room = asyncio.Semaphore(_IN_FLIGHT)
        await client.open()
        try:
            starts = range(0, len(texts), self._batch_size)
            parts = await asyncio.gather(*(self._batch(client, room, texts[k : k + self._batch_size]) for k in starts))
        finally:
            await client.close()
        return [answer for part in parts for answer in part]

    async def _batch(self, client: HttpClient, room: asyncio.Semaphore, texts: Sequence[tuple[str, str]]) -> _Answers:
        async with room:
            # While the server is away, one request per batch shows whether it is back.
            answer = await self._ask(client, texts, retries=0 if self.useless else None)
        if not isinstance(answer, OutsideError):
            return answer
        if (
            len(texts) == 1
            or answer.fatal
            or isinstance(answer, _MiscountError)
            or isinstance(answer.__cause__, TimeoutError)
        ):
            return [answer] * len(texts)
        singles = []
        for text in texts:
            async with room:
                single = await self._ask(client, [text], retries=0)
            singles.append(single if isinstance(single, OutsideError) else single[0])
        return singles

    async def _ask(
        self, client: HttpClient, texts: Sequence[tuple[str, str]], retries: int | None
    ) -> _Answers | OutsideError:
        body = {"queries": [query for query, _ in texts], "prompts": [prompt for _, prompt in texts]}

        def read(answer: JsonObject) -> _Answers:
            rewards = answer.get("rewards")
            if not isinstance(rewards, list):
                raise client.garbage('an object with a list "rewards"', answer)
            if len(rewards) != len(texts):
                raise _MiscountError(f"the server gave {len(rewards)} rewards, expected {len(texts)}", retryable=True)
            return [
                float(reward)
                if is_finite(reward)
                else RewardError(f"the server gave {reward!r}, expected a finite number")
                for reward in rewards
            ]

        try:
            most = _ANSWER_BYTES + _REWARD_BYTES * len(texts)
            answers = await client.ask(Request("POST", "", body, retries=retries, most_bytes=most), read)
        except OutsideError as error:
            if error.fatal and not self._answered:
                self.useless = error
            return error
        self._answered, self.useless = True, None
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
