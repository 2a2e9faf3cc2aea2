"""What a chat template does to a conversation that continues, found out before anything is sampled.

Invariants: a template is judged by what it renders for the probe conversations and never by its name; a
conversation that it refuses to render is reported as refused and does not count as a break; the judgement is the same
every time, because everything that is drawn is drawn from a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.messages import Message, Tools

if TYPE_CHECKING:
    from gymdata.chat.template import TransformersChat

Where = Literal["generation prompt", "earlier messages"]

#: Ids shown on each side of a break.
WINDOW = 12
_ROUND_TRIPS, _ROUND_TRIP_LENGTH, _SEED = 200, 8, 20261
_SYSTEM: Message = {"role": "system", "content": "You are brief."}
_INLINE = "reasoning in the text"
_REASON, _REASON_2 = "seven and five make twelve", "twelve less two leaves ten"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("add", "subtract")
]


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation; every assistant turn in it is one place where a template may break. ``needs`` names what it has."""

    name: str
    messages: list[Message]
    tools: Tools = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TemplateBreak:
    """Rendering the conversation again gives other ids from ``position`` on. Windows are decoded around it."""

    probe: str
    turn: int
    where: Where
    position: int
    before: str
    after: str
    before_ids: list[int]
    after_ids: list[int]


@dataclass(slots=True)
class TemplateCheck:
    """What one template does. ``strips``: parts of earlier turns that it leaves out once the conversation continues;
    ``ignores``: parts that it never writes; ``refused``: probe → why; ``no_bridge``: probe → why."""

    end_of_turn: list[tuple[int, str]]
    breaks: list[TemplateBreak] = field(default_factory=list)
    strips: list[str] = field(default_factory=list)
    ignores: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    no_bridge: dict[str, str] = field(default_factory=dict)
    generation_mask: bool = False
    random_ids_stable: float = 0.0
    text_stable: bool = False

    @property
    def prefix_preserving(self) -> bool:
        return not self.breaks

    @property
    def bridges(self) -> bool:
        """Whether ids can be held from turn to turn: the environment's tokens are provably cut."""
        return not self.no_bridge

    @property
    def ok(self) -> bool:
        return self.prefix_preserving and self.bridges

    def as_dict(self) -> dict[str, Any]:
        return {
            "prefix_preserving": self.prefix_preserving,
            "bridges": self.bridges,
            **asdict(self),
            "end_of_turn": [{"id": i, "text": text} for i, text in self.end_of_turn],
        }


def probes() -> list[Probe]:
    """Conversations with a system message, tools, reasoning, calls alone and in parallel, tool results, and a user turn
    after a tool turn."""
    plain = [_user("What is 7+5?"), _assistant("It is 12.")]
    thought = [_user("What is 7+5?"), _assistant("It is 12.", _REASON)]
    called = [_user("What is 7+5?"), _called(("add", "a1"))]
    parallel = _called(("add", "a1"), ("subtract", "a2"))
    chain = [*called, _result("add", "a1", "12"), _called(("subtract", "a2")), _result("subtract", "a2", "2")]
    thinking = [
        _user("What is 7+5?"),
        {**_called(("add", "a1")), "reasoning": _REASON},
        _result("add", "a1", "12"),
        _assistant("It is 12.", _REASON_2),
        _user("And less two?"),
    ]
    again = [*thought, _user("And less two?"), _assistant("It is 10.", _REASON_2), _user("Sure?")]
    return [
        Probe("user turns", [*plain, _user("And less two?"), _assistant("It is 10."), _user("Sure?")]),
        Probe("system message", [_SYSTEM, *plain, _user("Sure?")], None, ("system",)),
        Probe("reasoning", again, None, ("reasoning",)),
        Probe(
            _INLINE, [_user("What is 7+5?"), _assistant(f"<think>\n{_REASON}\n</think>\n\nIt is 12."), _user("Sure?")]
        ),
        Probe("tool call", [*called, _result("add", "a1", "12")], _TOOLS, ("tools",)),
        Probe("tool calls in turn", chain, _TOOLS, ("tools",)),
        Probe(
            "parallel tool calls",
            [called[0], parallel, _result("add", "a1", "12"), _result("subtract", "a2", "2")],
            _TOOLS,
            ("tools", "parallel tool calls"),
        ),
        Probe("user after tool", thinking, _TOOLS, ("tools", "reasoning")),
    ]


def check_template(chat: TransformersChat) -> TemplateCheck:
    """Render every probe as a conversation that grows, and compare each rendering with the one before it."""
    ends = [(i, chat.decode([i])) for i in chat.end_of_turn_ids]
    report = TemplateCheck(ends, generation_mask=chat.marks_generations)
    written = dict.fromkeys(("system", "tools", "reasoning"), False)
    for probe in probes():
        try:
            turns = [i for i, m in enumerate(probe.messages) if m["role"] == "assistant"]
            steps = [
                _Step(
                    number,
                    probe.messages[start],
                    chat.text(probe.messages[:start], probe.tools, generate=False),
                    chat.text(probe.messages[:start], probe.tools, generate=True),
                    chat.text(probe.messages[: start + 1], probe.tools, generate=False),
                    chat.text(probe.messages[:end], probe.tools, generate=True),
                )
                for number, (start, end) in enumerate(pairwise([*turns, len(probe.messages)]))
            ]
        except DataError as error:
            report.refused[probe.name] = str(error.message)
            continue
        if "tools" in probe.needs and not all(
            call["function"]["name"] in step.closed[len(step.prompt) - 1 :]
            for step in steps
            for call in step.completion.get("tool_calls", ())
        ):
            report.refused[probe.name] = "the template leaves out tool calls"
            continue
        for step in steps:
            _compare(chat, report, probe, step)
        after = turns[-1] + 1
        try:
            chat.bridge(probe.messages[:after], probe.messages[after:], probe.tools)
        except (DataError, RefusedError) as error:
            report.no_bridge[probe.name] = str(error.message)
        _presence(probe, steps, written, report)
    report.ignores = [part for part, is_written in written.items() if not is_written and part not in report.strips]
    draw = random.Random(_SEED)
    plain = chat.plain_ids
    stable = 0
    for _ in range(_ROUND_TRIPS if plain else 0):
        ids = draw.choices(plain, k=_ROUND_TRIP_LENGTH)
        stable += chat.encode(chat.decode(ids)) == ids
    report.random_ids_stable = stable / _ROUND_TRIPS
    text = 'It is 12, less 2: 10.\n{"a": 12, "b": [2, null]}  two  spaces'
    ids = chat.encode(text)
    report.text_stable = chat.encode(chat.decode(ids)) == ids
    return report


@dataclass(frozen=True, slots=True)
class _Step:
    """Renderings around one assistant turn: what came before it, that with the generation prompt, the conversation closed
    after it, and the next prompt."""

    turn: int
    completion: Message
    before: str
    prompt: str
    closed: str
    following: str


def _compare(chat: TransformersChat, report: TemplateCheck, probe: Probe, step: _Step) -> None:
    pairs: list[tuple[Where, list[int], str]] = [("earlier messages", _sampled(chat, step.closed), step.following)]
    if _can_generate(step.prompt, step.completion):
        prefix_kept = step.closed.startswith(step.before.rstrip())
        where: Where = "generation prompt" if prefix_kept else "earlier messages"
        pairs.insert(0, (where, chat.encode(step.prompt), step.closed))
    if _thinks_aloud(step.completion) and _REASON not in step.closed:
        # It is left out at once, so no later rendering differs from an earlier one.
        sampled = chat.encode(step.prompt + str(step.completion["content"]))
        pairs.append(("earlier messages", sampled, step.closed))
    for where, was, after in pairs:
        now = chat.encode(after)
        index = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
        if index == len(was):
            continue
        around = slice(max(0, index - WINDOW // 2), index + WINDOW)
        old, new = was[around], now[around]
        report.breaks.append(
            TemplateBreak(probe.name, step.turn, where, index, chat.decode(old), chat.decode(new), old, new)
        )


def _sampled(chat: TransformersChat, closed: str) -> list[int]:
    """Ids of a closed conversation up to the first token that ends its last turn. What templates write after it, line
    feeds and for the last turn of all one more end token, is no part of what a model samples."""
    ids = chat.encode(closed.rstrip())
    ends = {*chat.end_of_turn_ids, *chat.stop_token_ids}
    end = len(ids)
    while end and (ids[end - 1] in ends or not chat.decode([ids[end - 1]]).strip()):
        end -= 1
    first = next((i for i in range(end, len(ids)) if ids[i] in ends), None)
    return ids if first is None else ids[: first + 1]


def _can_generate(prompt: str, completion: Message) -> bool:
    """Whether a model that was prompted so could have generated this: a prompt that opens a reasoning block is followed by
    reasoning, and one that closes it is not."""
    ending = prompt.rstrip()
    if ending.endswith("<think>"):
        return "reasoning" in completion
    return not (ending.endswith("</think>") and ("reasoning" in completion or _thinks_aloud(completion)))


def _thinks_aloud(completion: Message) -> bool:
    """Whether its reasoning is in its text, as where no parser takes it out."""
    return "</think>" in str(completion.get("content"))


def _presence(probe: Probe, steps: Sequence[_Step], written: dict[str, bool], report: TemplateCheck) -> None:
    for step in steps:
        if _thinks_aloud(step.completion):
            if _REASON not in step.following and not {"reasoning", _INLINE} & {*report.strips}:
                report.strips.append(_INLINE)
            continue
        parts = {
            "reasoning": step.completion.get("reasoning"),
            "answers": step.completion.get("content") or None,
            "tool calls": (step.completion.get("tool_calls") or [{"function": {"name": None}}])[-1]["function"]["name"],
        }
        for part, text in parts.items():
            if text and text in step.closed:
                if part in written:
                    written[part] = True
                if text not in step.following and part not in report.strips:
                    report.strips.append(part)
    written["system"] |= "system" in probe.needs and str(_SYSTEM["content"]) in steps[0].prompt
    written["tools"] |= "tools" in probe.needs and "subtract" in steps[0].prompt


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str, reasoning: str | None = None) -> Message:
    return {"role": "assistant", "content": content} | ({"reasoning": reasoning} if reasoning else {})


def _called(*calls: tuple[str, str]) -> Message:
    tool_calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": {"a": 7, "b": 5}}}
        for name, i in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _result(name: str, call: str, content: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{call}", "content": content}
