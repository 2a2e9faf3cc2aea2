"""The matrix of chat templates: random conversations on each, and the table of what each template does to them.

``python -m tests.check.matrix`` writes schemas/templates.md.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.chat.template import ChatRendering, TransformersChat, training_twin
from gymdata.check.template import TemplateCheck, check_template
from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.messages import Message
from gymdata.rollouts.next_prompt import SpliceRefusedError, next_prompt, splice
from gymdata.rollouts.turns import Call, encode_turns, expand_prompts, kinds
from tests.check import families


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


FILE = Path(__file__).parents[2] / "schemas" / "templates.md"
_INTRO = """# Chat templates and multi-turn tokens

What `gymdata check` says about each chat template that TRL {trl} ships, made by `python -m tests.check.matrix`.

- **rendered again**: whether messages rendered again, with what came after, begin with what the model read and wrote.
  Where they do not, the column says what changes; training on rendered messages would then train on other tokens.
- **cure**: the training form of the template that does not change anything; `gymdata collect` uses it by default.
  "also changes" names a training form that changes the same things.
- **ids in, ids out**: whether the environment's tokens are provably cut, so that `gymdata collect` holds the sampled ids
  and nothing of the above matters to its rollouts.
- **splice**: of random conversations that had to be rendered by a server, the share whose sampled ids could be put back
  with proof, on three tokenizers and with the cure where there is one; all others were refused, and none came out different.

| template | rendered again | cure | ids in, ids out | splice | ends a turn | does not write |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table() -> str:
    """The whole file."""
    rows = [_row(name) for name in families.template_names() if not name.endswith("_training")]
    return _INTRO.format(trl=version("trl")) + "".join(rows)


def trl_of_file() -> str:
    """The TRL version that the file was made with."""
    return FILE.read_text(encoding="utf-8").split("that TRL ")[1].split(" ships")[0]


def _row(name: str) -> str:
    chat = families.chat(name, "bytes", keep_reasoning=False)
    found = check_template(ChatRendering(chat))
    twin = training_twin(families.template_text(name))
    cure = "–"
    if twin is not None and not found.ok:
        again = check_template(ChatRendering(chat.with_template(twin.text)))
        cure = f"`{twin.name}`" if again.ok else f"`{twin.name}` also changes"
    ends = " ".join(f"`{text}`" for _, text in found.end_of_turn)
    cells = [
        f"`{name}`",
        "the same" if found.prefix_preserving else _changes(found),
        cure,
        _holds(found),
        _splices(name),
        ends.replace("|", "\\|"),
        ", ".join([*found.ignores, *(_leaves_out(found))]) or "–",
    ]
    return "| " + " | ".join(cells) + " |\n"


def _changes(found: TemplateCheck) -> str:
    parts = []
    if found.strips:
        parts.append(f"takes {', '.join(found.strips)} away")
    if any(b.where == "generation prompt" for b in found.breaks):
        parts.append("drops the opened reasoning")
    return "; ".join(parts) or "changes earlier turns"


def _holds(found: TemplateCheck) -> str:
    if found.bridges:
        return "holds"
    return "refused" if len(found.no_bridge) + len(found.refused) == 7 else "refused in part"


def _leaves_out(found: TemplateCheck) -> list[str]:
    if "tool call" in found.refused:
        return ["tool calls"]
    return ["parallel tool calls"] if "parallel tool calls" in found.refused else []


def _splices(name: str) -> str:
    from tests.check.matrix import check_cell

    counts = [check_cell(name, family, seeds=1) for family in families.FAMILIES if families.has_family(family)]
    exact, steps = sum(c["exact"] for c in counts), sum(c["steps"] for c in counts)
    return f"{exact / steps:.0%}"


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
