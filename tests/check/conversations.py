"""Conversations as ``collect`` makes them, with random ids in place of a model: prompt, generation, bridge, next prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gymdata.chat.template import TransformersChat
from gymdata.errors import DataError
from gymdata.rollouts.messages import Message
from gymdata.rollouts.next_prompt import next_prompt

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
#: What follows each model call; ``tools`` are given where a tool answers.
SCENARIOS: dict[str, list[str]] = {
    "users": ["user", "user", "user"],
    "tools": ["tool", "tool"],
    "both": ["tool", "user", "tool"],
    "parallel": ["two tools", "user"],
    "reasoning": ["user", "tool", "user"],
}


@dataclass(slots=True)
class Step:
    """One model call and what came after. ``prompt`` is what the call read, ``following`` what the next one reads."""

    prompt: list[int]
    generation: list[int]
    bridge: list[int]
    following: list[int]
    messages: list[Message]
    new: list[Message]
    tools: Any

    @property
    def held(self) -> list[int]:
        return [*self.prompt, *self.generation]


def play(chat: TransformersChat, scenario: str, draw: random.Random) -> Iterator[Step]:
    """Random generations, seven in ten of them ended by a stop token; ends when the template refuses what is next."""
    follows = SCENARIOS[scenario]
    tools = TOOLS if scenario != "users" else None
    messages: list[Message] = [{"role": "user", "content": "What is 7+5?"}]
    if draw.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    special = {*chat.tokenizer.all_special_ids, *chat.tokenizer.added_tokens_decoder}
    try:
        prompt = chat.render(messages, tools)
    except DataError:
        return
    for number, who in enumerate(follows):
        generation = _sample(chat, draw, special)
        message = chat.parse(generation, tools)
        if scenario == "reasoning":
            message = {**message, "reasoning": "because"}
        new = _new(who, number, draw)
        if calls := [m["tool_call_id"] for m in new if m["role"] == "tool"]:
            message = {**message, "tool_calls": [_call(i) for i in calls]}
        messages = [*messages, message]
        try:
            chat.render([*messages, *new], tools)
        except DataError:
            return
        bridge = chat.bridge(messages, new, tools)
        following = next_prompt([*prompt, *generation], bridge, chat.end_of_turn_ids)
        yield Step(prompt, generation, bridge, following, messages, new, tools)
        messages, prompt = [*messages, *new], following


def _sample(chat: TransformersChat, draw: random.Random, special: set[int]) -> list[int]:
    ids: list[int] = []
    while len(ids) < draw.randrange(1, 24):
        token = draw.randrange(chat.vocab_size)
        if token not in special:
            ids.append(token)
    if draw.random() < 0.1:
        # A model may write any token; what stops it is never inside a generation.
        ids.insert(draw.randrange(len(ids)), draw.choice(sorted(special - {*chat.stop_token_ids})))
    if draw.random() < 0.7:
        ids.append(draw.choice(chat.stop_token_ids))
    return ids


def _call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": {"a": 7, "b": 5}}}


def _new(who: str, number: int, draw: random.Random) -> list[Message]:
    if who == "user":
        return [{"role": "user", "content": f"And plus {draw.randrange(1000)}?"}]
    count = 2 if who == "two tools" else 1
    return [
        {"role": "tool", "name": "add", "tool_call_id": f"call{number}{k:04}", "content": str(draw.randrange(1000))}
        for k in range(count)
    ]
