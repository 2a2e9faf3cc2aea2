"""Rollouts as trajectories of the NeMo Agent Toolkit: ``Trajectory`` with ``EpisodeItem``s.

An item is one message. An answer's ``logprobs`` have the OpenAI shape; its tokens are spelt ``token_id:N``, as vLLM does
when it is asked for ids, so they can be read back; the prompt's ids are in its ``metadata``.

Invariants: reading what is written gives the messages, turns and columns back; a rollout without reward is left
out, because a trajectory has one and 0 would be invented.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymdata.interop.trajectories.own import (
    OWN,
    SPELLINGS,
    facts_beyond,
    kept_of,
    list_of,
    own_columns,
    shortest,
    turn_facts,
)
from gymdata.rollouts.messages import loads
from gymdata.rollouts.turns import Turn, prompts_of

NAME = "nat"
PROMPT_IDS = "prompt_token_ids"
NO_REWARD = "rollouts without a reward (left out: a trajectory must have one)"
NO_MESSAGE = "turns that no message names"
NO_LOG_PROBS = "that an answer has no log-probabilities (it must have some: an empty list)"
STEP_REWARDS = "step rewards of some turns only, as shaped_rewards (they are in metadata)"


def trajectory_of(row: Mapping[str, Any], lost: Counter[str]) -> dict[str, Any] | None:
    """The ``Trajectory`` of a rollouts row (as the store spreads it); None when it has no place in the format.

    Raises DataError when the turns were changed after collection.
    """
    if row["reward"] is None:
        lost[NO_REWARD] += 1
        return None
    prompts = prompts_of(row)
    kept = kept_of(row, NAME)
    if kept is not None:
        return _restored(row, prompts, kept)
    return made_trajectory(row, prompts, lost)


def made_trajectory(row: Mapping[str, Any], prompts: Sequence[Any], lost: Counter[str]) -> dict[str, Any]:
    """The trajectory that the columns give."""
    from gymdata.interop.trajectories.nat_read import read_item

    episode: list[dict[str, Any]] = []
    placed: set[int] = set()
    without = False
    for message in row["messages"]:
        item = _item(message)
        turn = message.get("turn")
        answers = message["role"] == "assistant"
        mine: dict[str, Any] = {}
        if answers and turn is not None and 0 <= turn < len(prompts) and turn not in placed:
            placed.add(turn)
            item["logprobs"] = log_probs(row["turns"][turn])
            item["metadata"][PROMPT_IDS] = prompts[turn].tolist()
            mine["evidence"] = turn_facts(row["turns"][turn])
            mine["evidence"].pop("top_log_probs", None)
        elif answers:
            without = True
            item["logprobs"] = {"content": [], "refusal": None}
        mine |= facts_beyond(message, read_item(item))
        if mine:
            item["metadata"][OWN] = mine
        item["metadata"] = item["metadata"] or None
        episode.append(item)
    lost[NO_MESSAGE] += len(placed) < len(prompts)
    lost[NO_LOG_PROBS] += without
    metadata = {"id": row["task_id"], "run_id": row["run_id"], "generation": row["rollout_index"]}
    return {
        "episode": episode,
        "reward": float(row["reward"]),
        "shaped_rewards": _shaped(row, episode, lost),
        "metadata": metadata | {OWN: own_columns(row)},
    }


def log_probs(turn: Turn, spell: Callable[[Any], float] = shortest) -> dict[str, Any]:
    """A turn's generation in the shape of OpenAI's ``logprobs``. ``spell``: how a float32 is written."""
    ids, values = list_of(turn["generation_token_ids"]), list_of(turn["generation_log_probs"])
    tops = turn.get("top_log_probs")
    content = []
    for k, (token, value) in enumerate(zip(ids, values, strict=True)):
        top = [_spelt(one["id"], spell(one["log_prob"])) for one in tops[k]] if tops is not None else []
        content.append(_spelt(token, spell(value)) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _spelt(token: Any, value: float) -> dict[str, Any]:
    return {"token": f"token_id:{int(token)}", "bytes": None, "logprob": value}


def _item(message: Mapping[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    calls = loads(message.get("tool_calls"))
    if isinstance(calls, list) and calls:
        metadata["tool_calls"] = calls
    metadata |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
    if message.get("reasoning") is not None:
        metadata["reasoning_content"] = message["reasoning"]
    return {"role": message["role"], "content": message["content"] or "", "logprobs": None, "metadata": metadata}


def _shaped(row: Mapping[str, Any], episode: Sequence[Mapping[str, Any]], lost: Counter[str]) -> list[float] | None:
    """One number an item: an answer's step reward, 0 for what others said. None unless every answer has one."""
    given: list[Any] = [
        item["metadata"][OWN]["evidence"].get("reward") if _has_evidence(item) else None for item in episode
    ]
    answers = [reward for item, reward in zip(episode, given, strict=True) if item["role"] == "assistant"]
    if not any(turn.get("reward") is not None for turn in row["turns"]):
        return None
    if None in answers or not answers:
        lost[STEP_REWARDS] += 1
        return None
    return [0.0 if reward is None else float(reward) for reward in given]


def _has_evidence(item: Mapping[str, Any]) -> bool:
    metadata = item["metadata"]
    return bool(metadata) and "evidence" in metadata.get(OWN, {})


def _restored(row: Mapping[str, Any], prompts: Sequence[Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = kept["source"]
    for turn, prompt, (index, taken) in zip(row["turns"], prompts, kept["turns"], strict=True):
        item = source["episode"][index]
        if "p" in taken:
            item["metadata"][PROMPT_IDS] = prompt.tolist()
        for letter in SPELLINGS.keys() & set(taken):
            item["logprobs"]["content"] = log_probs(turn, SPELLINGS[letter])["content"]
    given: Any = source.get("reward")
    if type(given) not in (int, float) or float(given) != row["reward"]:
        # Rewards that are text are numbers to the toolkit too.
        source["reward"] = given if isinstance(given, str) and float(given) == row["reward"] else float(row["reward"])
    return source
