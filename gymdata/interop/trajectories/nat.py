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

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.interop.importing import BadItem, Importing
from gymdata.interop.rows import foreign_row, message_of, number_or_none, refuse_other_name, refuse_surrogates
from gymdata.interop.trajectories.own import (
    OWN,
    call_of,
    facts_beyond,
    from_own,
    ids_of,
    list_of,
    own_columns,
    shortest,
    turn_facts,
    whole_row,
    with_facts,
)
from gymdata.interop.words import score
from gymdata.rollouts.messages import JsonObject, Message, RolloutRow, json_text, loads, object_of
from gymdata.rollouts.turns import Call, TopLogProb, Turn, TurnEncoder, prompts_of

_TOKEN = "token_id:"


def is_nested(value: Any) -> bool:
    """Whether a JSON value is a collection, a trajectory, or lists of them."""
    if isinstance(value, list):
        return any(map(is_nested, value[:20]))
    return isinstance(value, dict) and ("trajectories" in value or "episode" in value)


def holds_pairs(value: Any) -> bool:
    """Whether the first step of the first trajectory of a value is a ``DPOItem``."""
    for _, trajectory in trajectories_of(value):
        episode = trajectory.get("episode") if isinstance(trajectory, dict) else None
        if isinstance(episode, list) and episode:
            return isinstance(episode[0], dict) and "chosen_response" in episode[0]
    return False


def trajectories_of(value: Any) -> Iterator[tuple[tuple[int, int], Any]]:
    """((group, place in it), trajectory) of a document."""
    groups = value.get("trajectories") if isinstance(value, dict) else value
    if not isinstance(groups, list):
        named = isinstance(value, dict) and "trajectories" in value
        yield (0, 0), BadItem("S102", "trajectories: expected a list") if named else value
        return
    for g, group in enumerate(groups):
        for i, trajectory in enumerate(group if isinstance(group, list) else [group]):
            yield (g, i), trajectory


def row_of(source: Any, importing: Importing) -> RolloutRow:
    """The rollouts row of a trajectory. Raises BadItem."""
    if not isinstance(source, dict) or not isinstance(source.get("episode"), list):
        raise BadItem("S103", "no trajectory: it has no list `episode`")
    if not source["episode"]:
        raise BadItem("S103", "episode: got an empty list, expected at least one item")
    refuse_surrogates(source)
    messages, encoder = _episode(source["episode"], source.get("shaped_rewards"))
    metadata = object_of(source.get("metadata"))
    raw_reward = source.get("reward")
    try:
        if isinstance(raw_reward, bool) or not isinstance(raw_reward, (int, float, str)):
            raise ValueError
        reward = float(raw_reward)
    except (ValueError, OverflowError):
        raise BadItem("R502", f"reward: got {raw_reward!r}, expected a number") from None
    columns = from_own(metadata.get(OWN))
    if columns is not None:
        return whole_row(columns | {"reward": reward}, messages, encoder)
    example = next((metadata[key] for key in ("id", "example_id") if metadata.get(key) not in (None, "")), None)
    model = metadata.get("model")
    row = foreign_row(
        source,
        messages,
        importing,
        turns=encoder,
        group=example if example is None or isinstance(example, str) else json_text(example),
        policy=model if isinstance(model, str) else "unknown",
        reward=reward,
    )
    about = {key: value for key, value in source.items() if key not in ("episode", "reward", "shaped_rewards")}
    return row | {"extra": json_text(about)}


def _episode(episode: list[Any], shaped: Any) -> tuple[list[dict[str, Any]], TurnEncoder]:
    """Messages and turns. ``shaped``: step rewards, used where they are one per item."""
    steps = shaped if isinstance(shaped, list) and len(shaped) == len(episode) else [None] * len(episode)
    messages: list[Message] = []
    calls: list[tuple[int, Call]] = []
    for index, item in enumerate(episode):
        if not isinstance(item, dict) or "role" not in item:
            raise BadItem("S103", f"episode[{index}]: no item: it has no role")
        refuse_other_name(item["role"], f"episode[{index}]")
        metadata = object_of(item.get("metadata"))
        message = with_facts(read_item(item), metadata.get(OWN))
        call = _call(item, metadata, index)
        if call is not None:
            if call.reward is None:
                call.reward = score(steps[index], f"shaped_rewards[{index}]")
            if message["turn"] is None:
                message["turn"] = len(calls)
            calls.append((message["turn"], call))
        messages.append(message)
    encoder = TurnEncoder()
    # Turns are numbered in the order in which they were called, which need not be that of the messages.
    calls.sort(key=lambda call: call[0])
    renumbered = {was: now for now, (was, _) in enumerate(calls)}
    if len(renumbered) < len(calls):
        raise BadItem("T208", "two items are of one turn")
    for _, call in calls:
        encoder.add(call)
    for message in messages:
        if message["turn"] is not None:
            message["turn"] = renumbered.get(message["turn"])
    return messages, encoder


def read_item(item: JsonObject) -> Message:
    """The message of an ``EpisodeItem``, without ``metadata.gymdata``, in which gymdata's own files have more."""
    metadata = object_of(item.get("metadata"))
    content = item.get("content")
    calls = metadata.get("tool_calls")
    more: JsonObject = {"tool_calls": json_text(calls)} if isinstance(calls, list) and calls else {}
    more |= {key: metadata[key] for key in ("tool_call_id", "name") if isinstance(metadata.get(key), str)}
    if isinstance(metadata.get("reasoning_content"), str):
        more["reasoning"] = metadata["reasoning_content"]
    text = content if isinstance(content, str) or content is None else json_text(content)
    return message_of(item["role"] if isinstance(item["role"], str) else "other", text, **more)


def _call(item: JsonObject, metadata: JsonObject, index: int) -> Call | None:
    """The model call of an item; None where its prompt's ids or its own are not known."""
    prompt = ids_of(metadata.get(PROMPT_IDS), f"episode[{index}].metadata.{PROMPT_IDS}")
    content = object_of(item.get("logprobs")).get("content")
    evidence = object_of(metadata.get(OWN)).get("evidence")
    if prompt is None or not isinstance(content, list) or not (content or evidence):
        return None
    facts = object_of(evidence)
    rendered = facts.get("rendered") is True
    ids: list[int] = []
    values: list[float] = []
    for token in content:
        number = _token_id(token)
        value = number_or_none(token.get("logprob")) if isinstance(token, dict) else None
        value = math.nan if value is None and rendered else value
        if number is None or value is None:
            return None
        ids.append(number)
        values.append(value)
    with np.errstate(over="ignore"):
        numbers = np.array(values, np.float32)
    top = _alternatives(content, f"episode[{index}].logprobs.content")
    return call_of(facts, prompt, np.array(ids, np.int32), numbers, top)


def _token_id(token: Any) -> int | None:
    """The id in vLLM's ``token_id:N``."""
    text = token.get("token") if isinstance(token, dict) else None
    if not isinstance(text, str) or not text.startswith(_TOKEN):
        return None
    digits = text[len(_TOKEN) :]
    return int(digits) if digits.isascii() and digits.isdigit() and int(digits) < 2**31 else None


def _alternatives(content: list[Any], where: str) -> list[list[TopLogProb]] | None:
    tops: list[list[TopLogProb]] = []
    for position, token in enumerate(content):
        top: list[TopLogProb] = []
        top_logprobs = token.get("top_logprobs")
        if top_logprobs is not None and not isinstance(top_logprobs, list):
            raise BadItem("S102", f"{where}[{position}].top_logprobs: got {top_logprobs!r:.60}, expected a list")
        for entry in top_logprobs or ():
            number, value = _token_id(entry), number_or_none(entry.get("logprob")) if isinstance(entry, dict) else None
            if number is None or value is None:
                return None
            top.append({"id": number, "log_prob": value})
        tops.append(top)
    return tops if any(tops) else None


PROMPT_IDS = "prompt_token_ids"
NO_REWARD = "rollouts without a reward (left out: a trajectory must have one)"
NO_LOG_PROBS = "that an answer has no log-probabilities (it must have some: an empty list)"
STEP_REWARDS = "step rewards of some turns only, as shaped_rewards (they are in metadata)"


def trajectory_of(row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
    """The ``Trajectory`` of a rollouts row (as ``store.columns.to_rows`` gives it); None when it has no place in the format.

    Raises DataError when the turns were changed after collection.
    """
    if row["reward"] is None:
        lost[NO_REWARD] += 1
        return None
    return made_trajectory(row, prompts_of(row), lost)


def made_trajectory(row: RolloutRow, prompts: Sequence[Any], lost: Counter[str]) -> JsonObject:
    """The trajectory that the columns give."""
    episode: list[JsonObject] = []
    placed: set[int] = set()
    without = False
    for message in row["messages"]:
        metadata: JsonObject = {}
        calls = loads(message.get("tool_calls"))
        if isinstance(calls, list) and calls:
            metadata["tool_calls"] = calls
        metadata |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
        if message.get("reasoning") is not None:
            metadata["reasoning_content"] = message["reasoning"]
        content = message["content"] or ""
        item = {"role": message["role"], "content": content, "logprobs": None, "metadata": metadata}
        turn = message.get("turn")
        answers = message["role"] == "assistant"
        facts: JsonObject = {}
        if answers and turn is not None and 0 <= turn < len(prompts) and turn not in placed:
            placed.add(turn)
            item["logprobs"] = log_probs(row["turns"][turn])
            item["metadata"][PROMPT_IDS] = prompts[turn].tolist()
            facts["evidence"] = turn_facts(row["turns"][turn])
            facts["evidence"].pop("top_log_probs", None)
        elif answers:
            without = True
            item["logprobs"] = {"content": [], "refusal": None}
        facts |= facts_beyond(message, read_item(item))
        if facts:
            item["metadata"][OWN] = facts
        item["metadata"] = item["metadata"] or None
        episode.append(item)
    lost[NO_LOG_PROBS] += without
    metadata = {"id": row["task_id"], "run_id": row["run_id"], "generation": row["rollout_index"]}
    return {
        "episode": episode,
        "reward": float(row["reward"]),
        "shaped_rewards": _shaped(row, episode, lost),
        "metadata": metadata | {OWN: own_columns(row)},
    }


def log_probs(turn: Turn) -> JsonObject:
    """A turn's generation in the shape of OpenAI's ``logprobs``."""
    ids, values = list_of(turn["generation_token_ids"]), list_of(turn["generation_log_probs"])
    tops = turn.get("top_log_probs")
    content = []
    for k, (token, value) in enumerate(zip(ids, values, strict=True)):
        top = [_spelt(entry["id"], shortest(entry["log_prob"])) for entry in tops[k]] if tops is not None else []
        content.append(_spelt(token, shortest(value)) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _spelt(token: Any, value: float) -> JsonObject:
    return {"token": f"token_id:{int(token)}", "bytes": None, "logprob": value}


def _shaped(row: RolloutRow, episode: Sequence[JsonObject], lost: Counter[str]) -> list[float] | None:
    """One number per item: an answer's step reward, 0 for messages of others. None unless every answer has one."""
    rewards: list[Any] = [
        object_of(object_of(object_of(item["metadata"]).get(OWN)).get("evidence")).get("reward") for item in episode
    ]
    answers = [reward for item, reward in zip(episode, rewards, strict=True) if item["role"] == "assistant"]
    if not any(turn.get("reward") is not None for turn in row["turns"]):
        return None
    if None in answers or not answers:
        lost[STEP_REWARDS] += 1
        return None
    return [0.0 if reward is None else float(reward) for reward in rewards]


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
            text = json.dumps(trajectory, ensure_ascii=False).encode()
            if lines:
                out.write(text + b"\n")
            else:
                groups.setdefault(group, []).append(text)
                runs.add(run)
        if not lines:
            inner = b", ".join(b"[" + b", ".join(group) + b"]" for group in groups.values())
            name = json.dumps(", ".join(sorted(runs)), ensure_ascii=False).encode()
            out.write(b'{"trajectories": [' + inner + b'], "run_id": ' + name + b"}")
    return count
