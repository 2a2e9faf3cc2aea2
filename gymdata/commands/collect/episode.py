"""One rollout, turn by turn: sample, parse, step the environment, bridge, sample again.

Invariants: the first prompt is the rendered conversation; every later prompt is the ids that the engine reports to have
read, the ids that it sampled, and the bridge to the environment's new messages, so nothing sampled is ever re-rendered
here. Environments get and give copies: what they change later is not what is saved. Prompts are kept as the engine reported
them, and before a rollout is handed on, its encoded turns are expanded again and compared with them.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np

from gymdata.commands.collect import outcome as ends
from gymdata.commands.collect.outcome import Failure, Limits, Outcome
from gymdata.commands.collect.resume import RunKey, request_seed
from gymdata.engines.port import Chat, Generation, Sampler, SampleRequest
from gymdata.engines.sampling import cut_at_stop
from gymdata.environments.port import Environment, Episode, Verdict
from gymdata.environments.step import reward_of
from gymdata.errors import DataError, GymdataError, OutsideError, RefusedError
from gymdata.rollouts.messages import Message, RolloutRow, Task, ToolDefinition
from gymdata.rollouts.next_prompt import next_prompt
from gymdata.rollouts.turns import Call, Turn, TurnEncoder, expand_prompts


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """Settings and parts that all rollouts of a run share. ``environment`` is None when there are ``agents``."""

    sampler: Sampler
    chat: Chat
    environment: Environment | None
    key: RunKey
    limits: Limits
    seed: int
    temperature: float
    #: Plays and writes the rollouts of agents, which call the model by themselves.
    agents: Agents | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: First prompts of the tasks being played, by task_id: a group's members mostly share theirs. Bounded.
    first_prompts: dict[str, tuple[object, object, list[int]]] = field(default_factory=dict)

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """Raises OutsideError("engine")."""
        generations = await self.sampler.sample(request)
        min_tokens = int(self.sampling.get("min_tokens") or 0)
        return [cut_at_stop(generation, self.chat.decode, min_tokens) for generation in generations]

    def first_prompt(self, task: Task, messages: list[Message], tools: list[ToolDefinition] | None) -> list[int]:
        """Ids of an opening conversation; rendered once for members whose environment leaves it alone."""
        *rendered, prompt = self.first_prompts.get(task.task_id, (None, None, []))
        if rendered == [messages, tools]:
            return prompt
        prompt = list(self.chat.render(messages, tools))
        self.first_prompts[task.task_id] = (list(messages), tools, prompt)
        if len(self.first_prompts) > _KEPT_PROMPTS:
            del self.first_prompts[next(iter(self.first_prompts))]
        return prompt

    def prompt_after(
        self, context: Sequence[int], completions: Sequence[Message], new: Sequence[Message], tools: Any
    ) -> list[int]:
        """Ids of the next prompt. Raises RefusedError when the template rewrites what came before."""
        return next_prompt(context, self.chat.bridge(completions, new, tools), self.chat.end_of_turn_ids)


_KEPT_PROMPTS = 64


@dataclass(slots=True)
class Rollout:
    """One attempt. After ``play`` exactly one of ``outcome`` and ``failure`` is set."""

    setting: EpisodeConfig
    task: Task
    index: int
    outcome: Outcome | None = None
    failure: Failure | None = None
    messages: list[Message] = field(default_factory=list)
    #: For each message the model call that produced it, None for the others.
    produced_by: list[int | None] = field(default_factory=list)
    tools: list[ToolDefinition] | None = None
    finish_reason: str | None = None
    #: The environment's verdict on the rollout.
    verdict: Verdict | None = None
    encoder: TurnEncoder = field(default_factory=TurnEncoder)
    #: The prompt of the next model call, and the ids read and sampled so far, which it should begin with.
    prompt: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    #: Turns whose engine gave ids behind the stop string, and how many were cut.
    cut: list[dict[str, int]] = field(default_factory=list)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    duration_s: float = 0.0
    _began: float = field(init=False)
    _episode: Episode | None = None
    _prompts: list[np.ndarray] = field(default_factory=list)
    _place: str = "environment start"
    rollout_id: str = field(init=False)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self.rollout_id = self.setting.key.rollout_id(self.task, self.index)

    @property
    def reward_of_steps(self) -> float | None:
        """The sum of the turns' rewards; without any 0 where the environment says that its steps have some, else None."""
        rewards = [turn["reward"] for turn in self.encoder.turns if turn["reward"] is not None]
        return sum(rewards) if rewards or getattr(self._episode, "rewards_steps", False) else None

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.failure is not None

    async def begin(self) -> None:
        """Start the environment and render the first prompt."""
        await self._guarded(self._begin())

    async def play(self, first: Generation | OutsideError | None = None) -> None:
        """Run to the end; ``first`` is the first generation (or its error) when it was sampled with the group."""
        if not self.over:
            await self._guarded(self._turns(first))
        if self.outcome is not None and self._episode is not None:
            await self._judged(self._episode, self.outcome)
        self.duration_s = time.monotonic() - self._began
        if self._episode is not None:
            # Closing belongs to the rollout's clean-up: its fault must not undo a finished rollout.
            try:
                await self._episode.close()
            except OutsideError as error:
                if not self.over:
                    self.failure = ends.failure(error, "environment close")
        if self.outcome is None:
            return
        # expand(encode(x)) == x, or nothing is written.
        for turn, (expansion, prompt) in enumerate(zip(expand_prompts(self.encoder.turns), self._prompts, strict=True)):
            if not np.array_equal(expansion, prompt):
                raise GymdataError(
                    f"rollout {self.rollout_id}, turn {turn}: the encoded prompt does not expand to what the engine read",
                    hint="this is a defect in gymdata: nothing of this rollout was written",
                )

    def request(self, n: int = 1) -> SampleRequest:
        """The next model call of this rollout (and of the n − 1 members after it)."""
        turn = len(self.encoder.turns)
        return SampleRequest(
            request_id=f"{self.rollout_id}-{turn}",
            prompt_token_ids=self.prompt,
            max_tokens=self.setting.limits.room(len(self.prompt)),
            seed=request_seed(self.setting.seed, self.task, turn, self.index),
            n=n,
            group=self.task.task_id,
        )

    def remaining_s(self) -> float | None:
        """Seconds until the time limit; None without one."""
        limit = self.setting.limits.time_limit
        return None if limit is None else max(0.0, self._began + limit - time.monotonic())

    def out_of_time(self) -> None:
        """End this rollout at its time limit, with what it has."""
        if not self.prompt:
            self.failure = ends.start_took_too_long(self.setting.limits)
            return
        if getattr(self.setting.sampler, "unreachable", False):  # of servers only
            self.failure = ends.server_was_gone(self.setting.limits, f"turn {len(self.encoder.turns)}")
            return
        self.outcome = ends.TIME_LIMIT
        if not self.encoder.turns:
            # The request got an empty generation; the call is kept, so that the row has its prompt.
            self._encode(Generation(list(self.prompt), [], [], "abort"))

    async def _begin(self) -> None:
        setting = self.setting
        assert setting.environment is not None
        self._episode = await setting.environment.start(copy.deepcopy(self.task), self.index)
        self.tools = copy.deepcopy(self._episode.tools)
        self.messages = copy.deepcopy(list(self._episode.messages))
        self.produced_by = [None] * len(self.messages)
        if (n := setting.chat.fewest_tokens(self.messages, self.tools)) > (setting.limits.max_context or n):
            self.failure = ends.no_room_at_start(f"at least {n:,}", setting.limits)
            return
        self.prompt = setting.first_prompt(self.task, self.messages, self.tools)
        if setting.limits.room(len(self.prompt)) < 1:
            self.failure = ends.no_room_at_start(f"{len(self.prompt):,}", setting.limits)

    async def _turns(self, first: Generation | OutsideError | None) -> None:
        """Record one model call after the other, and continue with the next prompt, until the rollout ends."""
        setting, chat = self.setting, self.setting.chat
        assert chat is not None
        while self.outcome is None:
            self._place = f"turn {len(self.encoder.turns)}"
            if isinstance(first, OutsideError):
                raise first
            generation = first or (await setting.sample(self.request()))[0]
            first = None
            turn = self._encode(generation)
            message = chat.parse(generation.token_ids, self.tools)
            before = [*self.messages, message]
            self.messages = before
            self.produced_by.append(len(self.encoder.turns) - 1)
            self.finish_reason = generation.finish_reason
            self.outcome = ends.after_generation(generation.finish_reason, len(generation.token_ids), setting.limits)
            if self.outcome is not None:
                return
            assert self._episode is not None
            step = await self._episode.step(copy.deepcopy(message))
            _add_reward(turn, step.reward)
            self.messages = [*before, *copy.deepcopy(step.messages)]
            self.produced_by += [None] * len(step.messages)
            self.outcome = ends.after_step(step, len(self.encoder.turns), setting.limits)
            if self.outcome is not None:
                return
            self.context = [*generation.prompt_token_ids, *generation.token_ids]
            self.prompt = setting.prompt_after(self.context, before, self.messages[len(before) :], self.tools)
            if setting.limits.room(len(self.prompt)) < 1:
                self.outcome = ends.NO_ROOM

    def _encode(self, generation: Generation) -> Turn:
        # Own copies: in process, the reported prompt is the very list that was passed in.
        prompt = np.array(generation.prompt_token_ids, dtype=np.int32)
        self._prompts.append(prompt)
        if generation.n_cut:
            self.cut.append({"turn": len(self.encoder.turns), "ids": generation.n_cut})
        top, weights = generation.top_log_probs, generation.weight_versions
        return self.encoder.add(
            Call(
                prompt,
                np.array(generation.token_ids, dtype=np.int32),
                np.array(generation.log_probs, dtype=np.float32),
                generation.finish_reason,
                top_log_probs=None
                if top is None
                else [[{"id": int(i), "log_prob": float(p)} for i, p in position] for position in top],
                server=generation.server,
                weight_versions=None
                if weights is None
                else [{"version": v, "start": start, "end": end} for v, start, end in weights],
            )
        )

    async def _judged(self, episode: Episode, outcome: Outcome) -> None:
        """Request the environment's verdict on the rollout. It is not under the time limit, which covers the policy's
        turns."""
        try:
            stop_reason = outcome.stop_reason if outcome.status == ends.TRUNCATED else None
            verdict = await episode.verdict(copy.deepcopy(self.messages), stop_reason)
            if verdict is not None:
                reward_of(verdict.reward, "the environment")
            if verdict is not None and verdict.last_step is not None:
                _add_reward(self.encoder.turns[-1], verdict.last_step)
            else:
                self.verdict = verdict
        except OutsideError as error:
            self.outcome, self.failure = None, ends.failure(error, "verdict")

    async def _guarded(self, work: Any) -> None:
        """Run ``work`` under the time limit; outside faults, and a conversation that the chat template refuses, become this
        rollout's failure."""
        try:
            if (left := self.remaining_s()) is None:
                await work
            else:
                try:
                    async with asyncio.timeout(left) as limit:
                        await work
                except TimeoutError:
                    if not limit.expired():
                        raise
                    self.out_of_time()
        except OutsideError as error:
            self.outcome = None
            self.failure = ends.failure(error, self._place)
        except (DataError, RefusedError) as error:
            self.outcome = None
            self.failure = ends.unwritable(error, self._place if self.encoder.turns else None)


def _add_reward(turn: Turn, reward: float | None) -> None:
    if reward is not None:
        turn["reward"] = reward_of(float(reward) + (turn["reward"] or 0.0), "the environment")


def turns_as_json(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns with plain lists, for failures.jsonl."""
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in turn.items()} for turn in turns]


class Agents(Protocol):
    """Rollouts whose model calls an agent makes."""

    def rollout(self, setting: EpisodeConfig, task: Task, index: int) -> Rollout: ...

    async def finish(self, rollout: Rollout) -> tuple[RolloutRow, Mapping[str, str]]:
        """Score a rollout and write its row; returns it, and the reward functions that failed."""
        ...

    async def discard(self, rollout: Rollout) -> None:
        """Forget an attempt that failed."""
        ...
