"""Trajectories of the NeMo Agent Toolkit: ``.json`` holds a ``TrajectoryCollection``, ``.jsonl`` a ``Trajectory`` a line.

An ``EpisodeItem`` is one message. An answer's ``logprobs`` have the OpenAI shape; its tokens are written as
``token_id:N``, as vLLM does with ``return_tokens_as_token_ids``, so they can be read back; the prompt's ids are in its
``metadata``, and the row is in the trajectory's.

Invariants: each of the seven roles has its role in the table; an answer becomes a turn when its tokens can be read as
ids and its prompt's ids are there; one with log-probabilities that is none makes its trajectory unusable where others are
turns, because its tokens would be context; trajectories are of one group when their
``metadata`` names one example, else when they have one prompt: an inner list is not enough, for with one generation an
example the toolkit puts all of them into one. Reading what is written gives the row back; a rollout without reward is left
out, because a trajectory has one and 0 would be invented.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gymdata.formats.conversion.importing import BadItem, Importing
from gymdata.formats.conversion.rows import foreign_row, message_of
from gymdata.formats.trajectories.own import (
    Int32,
    Model,
    Number,
    log_probs_of,
    model_call,
    only,
    read,
    rest_of,
    shortest,
    take_own_row,
    with_own_row,
)
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, json_text, loads
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import Call, TopLogProb, Turn, TurnEncoder, prompts_of

NO_REWARD = "rollouts without a reward (left out: a trajectory must have one)"
NO_LOG_PROBS = "that an answer has no log-probabilities (it must have some: an empty list)"
STEP_REWARDS = "step rewards of some turns only, as shaped_rewards (they are in metadata)"
NO_ITEM = "turns that no message names (they are in metadata)"
#: The id in vLLM's ``token_id:N``.
_TOKEN = re.compile(r"token_id:([0-9]{1,10})")


class Alternative(Model):
    token: str
    bytes: Any = None
    logprob: Number | None

    def token_id(self) -> int | None:
        """The id of the token; None where it is text."""
        found = _TOKEN.fullmatch(self.token)
        return number if found and (number := int(found[1])) < 2**31 else None


class Token(Alternative):
    top_logprobs: list[Alternative] | None = None


class LogProbs(Model):
    content: list[Token]
    refusal: Any = None


class ItemMetadata(Model):
    """The keys of an item's free object that are known."""

    tool_calls: Annotated[list[Any] | None, only(list)] = None
    tool_call_id: Annotated[str | None, only(str)] = None
    name: Annotated[str | None, only(str)] = None
    reasoning_content: Annotated[str | None, only(str)] = None
    prompt_token_ids: list[Int32] | None = None


def _with_tokens(value: Any) -> Any:
    """Log-probabilities in the shape of OpenAI's; others have no place here."""
    return value if isinstance(value, dict) and isinstance(value.get("content"), list) else None


class EpisodeItem(Model):
    role: Literal["system", "user", "assistant", "tool", "function", "environment", "other"]
    content: str | None = None
    logprobs: Annotated[LogProbs | None, BeforeValidator(_with_tokens)] = None
    metadata: ItemMetadata | None = None

    def table_message(self) -> Message:
        more = self.metadata or ItemMetadata()
        return message_of(
            self.role,
            self.content,
            reasoning=more.reasoning_content,
            tool_calls=json_text(more.tool_calls) if more.tool_calls else None,
            tool_call_id=more.tool_call_id,
            name=more.name,
        )

    @property
    def prompt(self) -> list[int]:
        return (self.metadata and self.metadata.prompt_token_ids) or []

    @property
    def tokens(self) -> list[Token]:
        return self.logprobs.content if self.logprobs is not None else []

    def missing_ids(self) -> str | None:
        """What an item that has a part of a model call lacks for a turn; None where it is whole, and where there is none."""
        if bool(self.prompt) != bool(self.tokens):
            name = "logprobs.content" if self.prompt else "metadata.prompt_token_ids"
            return f"{name}: missing or empty, and the other ids are there"
        texts = ((n, token.token) for n, token in enumerate(self.tokens) if token.token_id() is None)
        return next((f"logprobs.content[{n}].token: got {text!r:.60}, expected token_id:N" for n, text in texts), None)

    def call(self, where: str, reward: float | None) -> Call | None:
        """The model call; None where its prompt's ids or its own are not known. ``reward``: of its step. Raises BadItem for
        a token without a log-probability, and where only some alternatives have ids."""
        if not self.tokens or self.missing_ids() is not None:
            return None
        if self.role != "assistant":
            raise BadItem("S102", f"{where}.role: got {self.role!r} with token ids, expected 'assistant'")
        where = f"{where}.logprobs.content"
        for n, token in enumerate(self.tokens):
            if token.logprob is None:
                raise BadItem("L301", f"{where}[{n}].logprob: got null, expected a number for each token")
        tops = [_known(token.top_logprobs or ()) for token in self.tokens]
        if (n_known := sum(map(len, tops))) not in (0, sum(len(token.top_logprobs or ()) for token in self.tokens)):
            raise BadItem("S102", f"{where}: top_logprobs: {n_known} have an id and a number, expected all or none")
        return model_call(
            self.prompt,
            [token["id"] for token in _known(self.tokens)],
            [token["log_prob"] for token in _known(self.tokens)],
            where,
            reward=reward,
            top_log_probs=tops if n_known else None,
        )


def _known(tokens: Sequence[Alternative]) -> list[TopLogProb]:
    """The tokens whose id and log-probability are known."""
    return [
        {"id": number, "log_prob": token.logprob}
        for token in tokens
        if token.logprob is not None and (number := token.token_id()) is not None
    ]


class Trajectory(Model):
    episode: list[EpisodeItem] = Field(min_length=1)
    reward: Number
    shaped_rewards: list[float] | None = None
    metadata: JsonObject | None = None


def row_of(source: Any, importing: Importing) -> RolloutRow:
    """The rollouts row of a trajectory. Raises BadItem."""
    own = take_own_row(source, "metadata", ROLLOUTS)
    if own is not None and own.is_whole:
        return own.row
    trajectory = read(Trajectory, source)
    episode, shaped = trajectory.episode, trajectory.shaped_rewards
    rewards: Sequence[float | None] = shaped or [None] * len(episode)
    if len(rewards) != len(episode):
        raise BadItem(
            "S102", f"shaped_rewards: got {len(rewards)}, expected {len(episode)}, one per item of the episode"
        )
    calls = [item.call(f"episode[{n}]", rewards[n]) for n, item in enumerate(episode)]
    messages, encoder = list[Message](), TurnEncoder()
    for n, (item, call) in enumerate(zip(episode, calls, strict=True)):
        messages.append(item.table_message())
        if call is not None:
            messages[-1]["turn"] = len(encoder.turns)
            encoder.add(call)
        elif any(calls) and (missing := item.missing_ids()) is not None:
            raise BadItem("T205", f"episode[{n}].{missing}, as other answers have")
    metadata = trajectory.metadata or {}
    model, names = metadata.get("model"), (metadata.get("id"), metadata.get("example_id"))
    example = next((name for name in names if name not in (None, "")), None)
    row = foreign_row(
        source,
        messages,
        importing,
        turns=encoder,
        group=example if example is None or isinstance(example, str) else json_text(example),
        policy=model if isinstance(model, str) else "unknown",
        reward=trajectory.reward,
    )
    row |= {"extra": rest_of(source, "episode", "reward", "shaped_rewards")}
    return row if own is None else own.edited(row)


def trajectory_of(row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
    """The ``Trajectory`` of a rollouts row (as ``store.columns.to_rows`` gives it); None when it has no place in the format.

    Raises DataError when the turns were changed after collection.
    """
    if row["reward"] is None:
        lost[NO_REWARD] += 1
        return None
    turns = dict(enumerate(zip(row["turns"], prompts_of(row), strict=True)))
    episode: list[EpisodeItem] = []
    steps: list[float | None] = []
    for message in row["messages"]:
        item = EpisodeItem(role=message["role"], content=message["content"] or "", logprobs=None, metadata=None)
        metadata = _metadata(message)
        reward: float | None = None
        if message["role"] != "assistant":
            reward = 0.0
        elif (sampled := turns.pop(message.get("turn"), None)) is not None:
            turn, prompt = sampled
            item.logprobs, reward = log_probs(turn), turn.get("reward")
            metadata["prompt_token_ids"] = prompt.tolist()
        else:
            item.logprobs = LogProbs(content=[], refusal=None)
        item.metadata = ItemMetadata(**metadata) if metadata else None
        steps.append(reward)
        episode.append(item)
    lost[NO_LOG_PROBS] += any(item.logprobs is not None and not item.logprobs.content for item in episode)
    lost[NO_ITEM] += bool(turns)
    trajectory = Trajectory(
        episode=episode,
        reward=row["reward"],
        shaped_rewards=_shaped(row, steps, lost),
        metadata={"id": row["task_id"], "run_id": row["run_id"], "generation": row["rollout_index"]},
    )
    return with_own_row(trajectory.written(), "metadata", row)


def _metadata(message: Message) -> JsonObject:
    """What a message says besides its text."""
    calls = loads(message.get("tool_calls"))
    fields = {
        "tool_calls": calls if isinstance(calls, list) and calls else None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "reasoning_content": message.get("reasoning"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def log_probs(turn: Turn) -> LogProbs:
    """A turn's generation in the shape of OpenAI's ``logprobs``."""
    tops = turn.get("top_log_probs")
    content = []
    for k, (token, value) in enumerate(zip(turn["generation_token_ids"], log_probs_of(turn), strict=True)):
        top = [_spelt(entry["id"], shortest(entry["log_prob"])) for entry in tops[k]] if tops is not None else []
        content.append(_spelt(token, value) | {"top_logprobs": top})
    return LogProbs.model_validate({"content": content, "refusal": None})


def _spelt(token: Any, value: float) -> JsonObject:
    return {"token": f"token_id:{int(token)}", "bytes": None, "logprob": value}


def _shaped(row: RolloutRow, steps: list[float | None], lost: Counter[str]) -> list[float] | None:
    """One number per item: an answer's step reward, 0 for messages of others. None unless every answer has one."""
    if not any(turn.get("reward") is not None for turn in row["turns"]):
        return None
    known = [reward for reward in steps if reward is not None]
    if len(known) < len(steps) or not any(message["role"] == "assistant" for message in row["messages"]):
        lost[STEP_REWARDS] += 1
        return None
    return known
