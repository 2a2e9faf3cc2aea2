"""One cell of the matrix of chat templates."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from gymdata.chat.template import TransformersChat
from gymdata.errors import RefusedError
from gymdata.rollouts.next_prompt import SpliceRefusedError, splice
from gymdata.rollouts.turns import Call, encode_turns, expand_prompts, kinds
from tests.check import families
from tests.check.conversations import SCENARIOS, Step, play


def steps_of(chat: TransformersChat, name: str, seeds: int) -> tuple[list[list[Step]], Counter[str]]:
    """Conversations as lists of steps, and how many were refused a bridge."""
    played, refused = [], Counter[str]()
    for scenario in SCENARIOS:
        for seed in range(seeds):
            steps: list[Step] = []
            try:
                for step in play(chat, scenario, random.Random(f"{name} {scenario} {seed}")):
                    steps.append(step)
            except RefusedError:
                refused[scenario] += 1
            played.append(steps)
    return played, refused


def check_cell(name: str, family: str, seeds: int) -> Counter[str]:
    """Assert what must hold for one template on one family; returns counts of steps, exact and refused splices."""
    chat = families.chat(name, family)
    played, refused = steps_of(chat, name, seeds)
    # A template that leaves tool calls out refuses tools; users it never refuses.
    assert not refused["users"]
    counts = Counter(no_bridge=sum(refused.values()))
    for steps in played:
        counts["steps"] += len(steps)
        ids_in_ids_out_never_breaks(chat, steps)
        for step in steps:
            counts[splice_is_exact_or_refuses(chat, step)] += 1
    assert counts["steps"]
    return counts


def ids_in_ids_out_never_breaks(chat: TransformersChat, steps: list[Step]) -> None:
    calls = [
        Call(
            np.array(s.prompt, np.int32), np.array(s.generation, np.int32), np.zeros(len(s.generation), np.float32), ""
        )
        for s in steps
    ]
    turns = encode_turns(calls)
    assert set(kinds(turns)[1:]) <= {"continues"}
    assert all(p.tolist() == s.prompt for p, s in zip(expand_prompts(turns), steps, strict=True))
    for step in steps:
        said = chat.decode(step.bridge)
        assert all(m["content"] in said for m in step.new)
        added = step.following[len(step.held) : len(step.following) - len(step.bridge)]
        assert len(added) == (step.held[-1] not in chat.end_of_turn_ids)


def splice_is_exact_or_refuses(chat: TransformersChat, step: Step) -> str:
    rendered = chat.encode(chat.text(step.messages, step.tools, generate=False))
    whole = chat.render([*step.messages, *step.new], step.tools)
    try:
        got = splice(step.held, rendered, whole, chat.end_of_turn_ids)
    except SpliceRefusedError:
        return "refused"
    # A turn cut by length is closed by whichever end the template writes there.
    added = len(got) - len(step.held) - len(step.bridge)
    assert added == (step.held[-1] not in chat.end_of_turn_ids)
    assert all(token in chat.end_of_turn_ids for token in got[len(step.held) : len(step.held) + added])
    assert got == [*step.held, *got[len(step.held) : len(step.held) + added], *step.bridge]
    return "exact"
