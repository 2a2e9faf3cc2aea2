"""Trajectories of the NeMo Agent Toolkit: ``.json`` holds a ``TrajectoryCollection``, ``.jsonl`` a ``Trajectory`` a line.

An ``EpisodeItem`` is one message. An answer's ``logprobs`` have the OpenAI shape; its tokens are written as
``token_id:N``, as vLLM does with ``return_tokens_as_token_ids``, so they can be read back; the prompt's ids are in its
``metadata``.

Invariants: each of the seven roles has its role in the table; an answer becomes a turn when its tokens can be read as
ids and its prompt's ids are there, and has no token data otherwise; trajectories are of one group when their
``metadata`` names one example, else when they have one prompt: an inner list is not enough, for with one generation an
example the toolkit puts all of them into one. Reading what is written gives the messages, turns and columns back; a
rollout without reward is left out, because a trajectory has one and 0 would be invented. A collection has a list for each
example, in the order in which examples first appear.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gymdata.formats.conversion.importing import Importing
from gymdata.formats.conversion.rows import foreign_row, message_of
from gymdata.formats.trajectories.own import (
    Columns,
    Conversation,
    Entry,
    Evidence,
    Free,
    Int32,
    Model,
    Number,
    list_of,
    log_probs_of,
    read,
    shortest,
)
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, json_text, loads
from gymdata.rollouts.turns import Call, TopLogProb, Turn, prompts_of

NO_REWARD = "rollouts without a reward (left out: a trajectory must have one)"
NO_LOG_PROBS = "that an answer has no log-probabilities (it must have some: an empty list)"
STEP_REWARDS = "step rewards of some turns only, as shaped_rewards (they are in metadata)"
#: The id in vLLM's ``token_id:N``.
_TOKEN = re.compile(r"token_id:([0-9]{1,10})")


def only(kind: Any) -> BeforeValidator:
    """What is not of ``kind`` in a free object has another meaning there."""
    return BeforeValidator(lambda value: value if isinstance(value, kind) else None)


class Alternative(Model):
    token: str
    bytes: Any = None
    logprob: Number | None

    def token_id(self) -> int | None:
        """The id of the token; None where it is text."""
        found = _TOKEN.fullmatch(self.token)
        return number if found and (number := int(found[1])) < 2**31 else None

    def known(self) -> TopLogProb | None:
        """The token by its id; None where that or the log-probability is not known."""
        number = self.token_id()
        return None if number is None or self.logprob is None else {"id": number, "log_prob": self.logprob}


class Token(Alternative):
    top_logprobs: list[Alternative] | None = None


class LogProbs(Model):
    content: list[Token]
    refusal: Any = None


class ItemMetadata(Free):
    """The keys of an item's free object that are known."""

    tool_calls: Annotated[list[Any] | None, only(list)] = None
    tool_call_id: Annotated[str | None, only(str)] = None
    name: Annotated[str | None, only(str)] = None
    reasoning_content: Annotated[str | None, only(str)] = None
    prompt_token_ids: Annotated[list[Int32] | None, only(list)] = None


def _with_tokens(value: Any) -> Any:
    """Log-probabilities in the shape of OpenAI's; others have no place here."""
    return value if isinstance(value, dict) and isinstance(value.get("content"), list) else None


class EpisodeItem(Entry):
    role: Literal["system", "user", "assistant", "tool", "function", "environment", "other"]
    content: str | None = None
    logprobs: Annotated[LogProbs | None, BeforeValidator(_with_tokens)] = None
    metadata: ItemMetadata | None = None

    def free(self) -> ItemMetadata | None:
        return self.metadata

    def plain_message(self) -> Message:
        more = self.metadata or ItemMetadata()
        return message_of(
            self.role,
            self.content,
            reasoning=more.reasoning_content,
            tool_calls=json_text(more.tool_calls) if more.tool_calls else None,
            tool_call_id=more.tool_call_id,
            name=more.name,
        )

    def call(self, reward: float | None) -> Call | None:
        """The model call; None where its prompt's ids or its own are not known. ``reward``: of its step."""
        prompt, known = (self.metadata or ItemMetadata()).prompt_token_ids, self.facts().evidence
        if not prompt or self.logprobs is None or not (self.logprobs.content or known):
            return None
        evidence, content = known or Evidence(), self.logprobs.content
        ids = [number for token in content if (number := token.token_id()) is not None]
        values = (math.nan if token.logprob is None and evidence.rendered else token.logprob for token in content)
        log_probs = [value for value in values if value is not None]
        if not len(ids) == len(log_probs) == len(content):
            return None
        call = evidence.call(prompt, ids, log_probs)
        tops = [[top.known() for top in token.top_logprobs or ()] for token in content]
        if any(tops) and not any(None in top for top in tops):
            call.top_log_probs = [[known for known in top if known is not None] for top in tops]
        call.reward = reward if call.reward is None else call.reward
        return call


class Metadata(Model):
    id: Any = None
    run_id: Any = None
    generation: Any = None
    example_id: Any = None
    model: Any = None
    gymdata: Columns | None = None


class Trajectory(Model):
    episode: list[EpisodeItem] = Field(min_length=1)
    reward: Number
    shaped_rewards: list[float] | None = None
    metadata: Metadata | None = None


def row_of(source: Any, importing: Importing) -> RolloutRow:
    """The rollouts row of a trajectory. Raises BadItem."""
    trajectory = read(Trajectory, source)
    episode, shaped = trajectory.episode, trajectory.shaped_rewards
    conversation = Conversation()
    for index, item in enumerate(episode):
        # Step rewards are one per item, or it is not known whose they are.
        call = item.call(shaped[index] if shaped is not None and len(shaped) == len(episode) else None)
        conversation.add(item, call)
    metadata = trajectory.metadata or Metadata()
    if metadata.gymdata is not None:
        return metadata.gymdata.row(trajectory.reward, conversation)
    example = next((name for name in (metadata.id, metadata.example_id) if name not in (None, "")), None)
    row = foreign_row(
        source,
        conversation.messages,
        importing,
        turns=conversation.turns(),
        group=example if example is None or isinstance(example, str) else json_text(example),
        policy=metadata.model if isinstance(metadata.model, str) else "unknown",
        reward=trajectory.reward,
    )
    about = {key: value for key, value in source.items() if key not in ("episode", "reward", "shaped_rewards")}
    return row | {"extra": json_text(about)}


def trajectory_of(row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
    """The ``Trajectory`` of a rollouts row (as ``store.columns.to_rows`` gives it); None when it has no place in the format.

    Raises DataError when the turns were changed after collection.
    """
    columns = Columns.of(row)
    if columns.reward is None:
        lost[NO_REWARD] += 1
        return None
    prompts, left = prompts_of(row), dict(enumerate(row["turns"]))
    episode: list[EpisodeItem] = []
    steps: list[float | None] = []
    without = False
    for message in row["messages"]:
        number, evidence = message.get("turn"), None
        answers = message["role"] == "assistant"
        item = EpisodeItem(role=message["role"], content=message["content"] or "", logprobs=None, metadata=None)
        item.metadata = _metadata(message)
        if answers and number in left:
            turn = left.pop(number)
            item.logprobs, item.metadata.prompt_token_ids = log_probs(turn), prompts[number].tolist()
            evidence = Evidence.of(turn, top_log_probs=None)
        elif answers:
            item.logprobs = LogProbs(content=[], refusal=None)
            without = True
        if (facts := item.beyond(message, evidence)) is not None:
            item.metadata.gymdata = facts
        if not item.metadata.model_fields_set:
            item.metadata = None
        steps.append((evidence.reward if evidence is not None else None) if answers else 0.0)
        episode.append(item)
    lost[NO_LOG_PROBS] += without
    return Trajectory(
        episode=episode,
        reward=columns.reward,
        shaped_rewards=_shaped(row, steps, lost),
        metadata=Metadata(id=row["task_id"], run_id=row["run_id"], generation=row["rollout_index"], gymdata=columns),
    ).written()


def _metadata(message: Message) -> ItemMetadata:
    """What a message says besides its text."""
    calls = loads(message.get("tool_calls"))
    return ItemMetadata.made(
        tool_calls=calls if isinstance(calls, list) and calls else None,
        tool_call_id=message.get("tool_call_id"),
        name=message.get("name"),
        reasoning_content=message.get("reasoning"),
    )


def log_probs(turn: Turn) -> LogProbs:
    """A turn's generation in the shape of OpenAI's ``logprobs``."""
    tops = turn.get("top_log_probs")
    content = []
    for k, (token, value) in enumerate(zip(list_of(turn["generation_token_ids"]), log_probs_of(turn), strict=True)):
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


#: The source of a written trajectory: its group, its run, itself.
Made = tuple[str, str, JsonObject]


def write(trajectories: Iterable[Made], path: Path, *, lines: bool) -> int:
    """Write trajectories, one per line or as a collection with a list for each group; returns how many."""
    groups: dict[str, list[bytes]] = {}
    runs: set[str] = set()
    count = 0
    with path.open("wb") as out:
        for group, run, trajectory in trajectories:
            count += 1
            text = json_text(trajectory).encode()
            if lines:
                out.write(text + b"\n")
            else:
                groups.setdefault(group, []).append(text)
                runs.add(run)
        if not lines:
            inner = b", ".join(b"[" + b", ".join(group) + b"]" for group in groups.values())
            out.write(
                b'{"trajectories": [' + inner + b'], "run_id": ' + json_text(", ".join(sorted(runs))).encode() + b"}"
            )
    return count
