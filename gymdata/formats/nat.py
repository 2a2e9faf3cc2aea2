"""Trajectories of the NeMo Agent Toolkit: ``.json`` holds a ``TrajectoryCollection``, ``.jsonl`` a ``Trajectory`` a line.

An ``EpisodeItem`` is one message. An answer's ``logprobs`` have the OpenAI shape; its tokens are written as
``token_id:N``, as vLLM does with ``return_tokens_as_token_ids``, so they can be read back; the prompt's ids are in its
``metadata``, and the row is in the trajectory's.

Invariants: each of the seven roles has its role in the table; an answer becomes a turn when its tokens can be read as
ids and its prompt's ids are there (``Importing.check_ids``); trajectories are of one group when their ``metadata`` names one
example, else when they have one prompt: an inner list is not enough, for with one generation an example the toolkit puts all
of them into one. Reading what is written gives the row back; a rollout without reward is left out, because a trajectory has
one and 0 would be invented.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem, CallIds, Importing, has_content
from gymdata.formats.conversion.models import (
    Int32,
    Model,
    Number,
    OrEmpty,
    Several,
    log_probs_of,
    model_call,
    only,
    read,
    rest_of,
    shortest,
    take_own_row,
    with_own_row,
)
from gymdata.formats.conversion.nested import Nested
from gymdata.formats.conversion.rows import KINDS, foreign_row, message_of
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, json_text, loads
from gymdata.rollouts.turns import Call, TopLogProb, Turn, TurnEncoder, prompts_of

NO_REWARD = "rollouts without a reward (left out: a trajectory must have one)"
NO_LOG_PROBS = "that an answer has no log-probabilities (it must have some: an empty list)"
STEP_REWARDS = "step rewards of some turns only, as shaped_rewards (they are in metadata)"
NO_ITEM = "turns that no message names (they are in metadata)"
#: The id in vLLM's ``token_id:N``.
_TOKEN = re.compile(r"token_id:([0-9]{1,10})")


class Alternative(Model):
    token: str
    logprob: Number | None

    @property
    def known(self) -> list[TopLogProb]:
        """Its id and log-probability; empty where one of them is not known, such as for a token of text."""
        spelt = _TOKEN.fullmatch(self.token)
        if spelt is None or self.logprob is None or int(spelt[1]) >= 2**31:
            return []
        return [{"id": int(spelt[1]), "log_prob": self.logprob}]


class Token(Alternative):
    top_logprobs: Several[Alternative]


class LogProbs(Model):
    """Log-probabilities in the shape of OpenAI's; others have no place here."""

    content: Annotated[Several[Token], only(list)]


class ItemMetadata(Model):
    """The keys of an item's free object that are known."""

    tool_calls: Annotated[list[Any] | None, only(list)] = None
    tool_call_id: Annotated[str | None, only(str)] = None
    name: Annotated[str | None, only(str)] = None
    reasoning_content: Annotated[str | None, only(str)] = None
    prompt_token_ids: Several[Int32]


class EpisodeItem(Model):
    role: Literal["system", "user", "assistant", "tool", "function", "environment", "other"]
    content: str | None = None
    logprobs: Annotated[OrEmpty[LogProbs], only(dict)]
    metadata: OrEmpty[ItemMetadata]

    def table_message(self) -> Message:
        more = self.metadata
        calls = json_text(more.tool_calls) if more.tool_calls else None
        names = {"tool_call_id": more.tool_call_id, "name": more.name}
        return message_of(self.role, self.content, reasoning=more.reasoning_content, tool_calls=calls, **names)

    def check(self, where: str) -> tuple[bool | None, str]:
        """Whether it has all ids of a model call (None: it has none), and what is missing. Raises BadItem for ids that no
        model sampled, and for a token without a log-probability."""
        prompt, tokens = self.metadata.prompt_token_ids, self.logprobs.content
        texts = [n for n, token in enumerate(tokens) if _TOKEN.fullmatch(token.token) is None]
        if not prompt and len(texts) == len(tokens):
            return None, f"{where}.logprobs.content: has no token_id:N"
        if self.role != "assistant":
            raise BadItem("S102", f"{where}.role: got {self.role!r} with token ids, expected 'assistant'")
        if not prompt or not tokens:
            name = "metadata.prompt_token_ids" if tokens else "logprobs.content"
            return False, f"{where}.{name}: missing or empty"
        for n, token in enumerate(tokens):
            at = f"{where}.logprobs.content[{n}]"
            if token.logprob is None:
                raise BadItem("L301", f"{at}.logprob: got null, expected a number for each token")
            if not token.known:
                return False, f"{at}.token: got {token.token!r:.60}, expected token_id:N"
        return True, ""

    def call(self, where: str, reward: float | None) -> Call:
        """The model call of an item that has all of its ids. ``reward``: of its step. Raises BadItem where only some
        alternatives have ids."""
        known = [token.known[0] for token in self.logprobs.content]
        tops = [[entry for top in token.top_logprobs for entry in top.known] for token in self.logprobs.content]
        n_known, n_tops = sum(map(len, tops)), sum(len(token.top_logprobs) for token in self.logprobs.content)
        if n_known not in (0, n_tops):
            where += ".logprobs.content: top_logprobs"
            raise BadItem("S102", f"{where}: {n_known} have an id and a number, expected all or none")
        ids, log_probs = [token["id"] for token in known], [token["log_prob"] for token in known]
        more: dict[str, Any] = {"reward": reward, "top_log_probs": tops if n_known else None}
        return model_call(self.metadata.prompt_token_ids, ids, log_probs, where, **more)


class Trajectory(Model):
    episode: list[EpisodeItem] = Field(min_length=1)
    reward: Number
    shaped_rewards: list[float] | None = None
    metadata: OrEmpty[JsonObject]


@FORMATS.register("nat-trajectories")
class NatTrajectories(Nested):
    """Trajectories of the NeMo Agent Toolkit: a collection (``.json``), or a trajectory per line."""

    content = "trajectories of the NeMo Agent Toolkit"
    holds_ids = holds_logprobs = True
    holds_reward = True
    carries = KINDS["rollouts"]

    def row(self, item: Any, importing: Importing) -> RolloutRow:
        own = take_own_row(item, "metadata", "rollouts")
        if own is not None and own.is_whole:
            return own.row
        trajectory = read(Trajectory, item)
        episode, metadata = trajectory.episode, trajectory.metadata
        rewards: Sequence[float | None] = trajectory.shaped_rewards or [None] * len(episode)
        if len(rewards) != len(episode):
            expected = f"{len(episode)}, one per item of the episode"
            raise BadItem("S102", f"shaped_rewards: got {len(rewards)}, expected {expected}")
        places = [f"episode[{n}]" for n in range(len(episode))]
        checked = [said.check(place) for said, place in zip(episode, places, strict=True)]
        messages, encoder = [said.table_message() for said in episode], TurnEncoder()
        found = zip(checked, messages, strict=True)
        calls = [CallIds(*ids, has_content(message)) for ids, message in found if message["role"] == "assistant"]
        importing.check_ids(calls, "episode", is_own=own is not None)
        for n, (is_turn, _) in enumerate(checked):
            if is_turn:
                messages[n]["turn"] = len(encoder.turns)
                encoder.add(episode[n].call(places[n], rewards[n]))
        model, names = metadata.get("model"), (metadata.get("id"), metadata.get("example_id"))
        example = next((name for name in names if name not in (None, "")), None)
        row = foreign_row(
            item,
            messages,
            importing,
            turns=encoder,
            group=example if example is None or isinstance(example, str) else json_text(example),
            policy=model if isinstance(model, str) else "unknown",
            reward=trajectory.reward,
        )
        row |= {"extra": rest_of(item, "episode", "reward", "shaped_rewards")}
        return row if own is None else own.edited(row)

    def trajectory(self, row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
        if row["reward"] is None:
            lost[NO_REWARD] += 1
            return None
        turns = dict(enumerate(zip(row["turns"], prompts_of(row), strict=True)))
        episode: list[JsonObject] = []
        rewards: list[float | None] = []
        for message in row["messages"]:
            item: JsonObject = {"role": message["role"], "content": message["content"] or "", "logprobs": None}
            metadata = _metadata(message)
            if message["role"] != "assistant":
                rewards.append(0.0)
            elif (sampled := turns.pop(message.get("turn"), None)) is not None:
                turn, prompt = sampled
                item["logprobs"] = written_log_probs(turn)
                metadata["prompt_token_ids"] = prompt.tolist()
                rewards.append(turn.get("reward"))
            else:
                item["logprobs"] = _NONE
                rewards.append(None)
            episode.append(item | {"metadata": metadata or None})
        lost[NO_LOG_PROBS] += any(item["logprobs"] == _NONE for item in episode)
        lost[NO_ITEM] += bool(turns)
        # One number per item, 0 for messages of others: none unless every answer has one.
        has_rewards = any(turn.get("reward") is not None for turn in row["turns"])
        is_shaped = None not in rewards and any(message["role"] == "assistant" for message in row["messages"])
        lost[STEP_REWARDS] += has_rewards and not is_shaped
        trajectory = {
            "episode": episode,
            "reward": row["reward"],
            "shaped_rewards": rewards if has_rewards and is_shaped else None,
            "metadata": {"id": row["task_id"], "run_id": row["run_id"], "generation": row["rollout_index"]},
        }
        return with_own_row(trajectory, "metadata", row)


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


_NONE: JsonObject = {"content": [], "refusal": None}


def written_log_probs(turn: Turn) -> JsonObject:
    """A turn's generation in the shape of OpenAI's ``logprobs``."""
    ids = turn["generation_token_ids"]
    tops = turn.get("top_log_probs") or [[]] * len(ids)
    content = [
        _spelt(token, value) | {"top_logprobs": [_spelt(entry["id"], shortest(entry["log_prob"])) for entry in top]}
        for token, value, top in zip(ids, log_probs_of(turn), tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _spelt(token: Any, value: float) -> JsonObject:
    return {"token": f"token_id:{int(token)}", "bytes": None, "logprob": value}
