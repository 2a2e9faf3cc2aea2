"""The comparisons from which the sample judge learns: a question, two rollouts as a transcript shows them, a verdict.

What always holds: a response is right exactly when its last words are the value of what was asked; which of two stands
first is chance; the two are drawn apart from each other, so one says nothing about the other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gymdata.commands.judge.groups import transcript
from gymdata.commands.judge.settings import DEFAULT_PRINCIPLE
from gymdata.sample_data.calculator import Calculator
from gymdata.sample_data.make_tasks import OPERATORS, WORDINGS, Pair, draw_operands, value_of
from gymdata.sample_data.policy_tokenizer import END, START
from gymdata.sample_data.policy_traces import SLIPS, Trace, attempt

RIGHT_SHARE = 0.45
#: A policy that samples also miscopies, anywhere.
MISCOPIES = ("miscopied call", "miscopied answer")
#: Of comparisons that state a principle; the judge knows but one way to judge, whatever it says.
PRINCIPLE_SHARE = 0.1
PRINCIPLES = (DEFAULT_PRINCIPLE, "Prefer the right answer.")
#: What comes before a result in a transcript.
RESULT = "[tool]\n"
#: Left operand, operator, right operand.
Question = tuple[int, str, int]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """A rollout's messages after the question, and the ``text`` that the judge's template makes of their transcript.
    ``rights``: the texts of flawless rollouts."""

    messages: list[Message]
    text: str
    right: bool
    rights: tuple[str, ...]

    def right_so_far(self, characters: int) -> bool:
        """Whether the first so many characters could become a flawless rollout."""
        return any(text.startswith(self.text[:characters]) for text in self.rights)

    def is_result(self, place: int) -> bool:
        """Whether the character there is the tool's, which nothing before it tells."""
        begin = self.text.find(RESULT)
        return begin >= 0 and begin + len(RESULT) <= place < self.text.rindex("\n\n")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two responses to a question, in their seats."""

    question: str
    first: Response
    second: Response
    principle: str | None = None

    def swapped(self) -> Comparison:
        """The same with the seats exchanged."""
        return Comparison(self.question, self.second, self.first, self.principle)

    def parts(self) -> list[tuple[str, str]]:
        """(kind, text) in order, as the judge's template renders them; kinds: frame, response_1, response_2, verdict."""
        principle = f"{START}principle\n{self.principle}{END}\n" if self.principle else ""
        return [
            ("frame", f"{START}user\n{self.question}{END}\n{principle}{START}response_1\n"),
            ("response_1", self.first.text),
            ("frame", f"{END}\n{START}response_2\n"),
            ("response_2", self.second.text),
            ("frame", f"{END}\n{START}assistant\n"),
            ("verdict", verdict(self.first.right, self.second.right) + END),
        ]

    def messages(self) -> list[dict[str, str]]:
        """What the judge's template gets."""
        stated = [{"role": "principle", "content": self.principle}] if self.principle else []
        responses = (("response_1", self.first), ("response_2", self.second))
        shown = [{"role": role, "content": transcript(response.messages)} for role, response in responses]
        return [{"role": "user", "content": self.question}, *stated, *shown]


def verdict(first: bool, second: bool) -> str:
    """The judge's words about two responses that are right or not. Equally good ones are ranked in the middle."""
    ranking = 3.5 if first == second else 1 if first else 6
    return json.dumps({"score_1": 5 if first else 1, "score_2": 5 if second else 1, "ranking": ranking})


def draw_comparison(
    random_: random.Random, *, avoid: Collection[Pair] = (), tasks: Sequence[Question] = ()
) -> Comparison:
    """A comparison about one of ``tasks``, or else about new operands that are none of the pairs to ``avoid``."""
    while True:
        operator = random_.choice(OPERATORS)
        left, right = draw_operands(operator, random_)
        if (min(left, right), max(left, right)) not in avoid:
            break
    if tasks:
        left, operator, right = random_.choice(tasks)
    wording = random_.choice(WORDINGS)
    principle = random_.choice(PRINCIPLES) if random_.random() < PRINCIPLE_SHARE else None
    first, second = (draw_response(left, operator, right, wording, random_) for _ in range(2))
    return Comparison(wording.format(f"{left}{operator}{right}"), first, second, principle)


def draw_response(left: int, operator: str, right: int, wording: str, random_: random.Random) -> Response:
    """What a policy might do when asked this."""
    slip = None if random_.random() < RIGHT_SHARE else random_.choice(SLIPS + MISCOPIES)
    value = str(value_of(left, operator, right))
    if slip in MISCOPIES:
        messages = _miscopied(slip, left, operator, right, random_)
    else:
        messages = rollout(attempt(left, operator, right, wording, slip, random_))
    expressions = [f"{left}{operator}{right}"] + [f"{right}{operator}{left}"] * (operator != "-")
    rights = tuple(seen(_with_call(expression, value, value)) for expression in expressions)
    return Response(messages, seen(messages), messages[-1]["content"] == value, rights)


def seen(messages: list[Message]) -> str:
    """A rollout as the judge's template renders its transcript: there is one tool, so its name is left out."""
    return transcript(messages).replace("[tool calculate]", "[tool]")


def rollout(trace: Trace) -> list[Message]:
    """The messages of a trace, after its question."""
    if trace.call is None or trace.result is None:
        return [{"role": "assistant", "content": trace.answer, "turn": 0}]
    call = json.loads(trace.call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return _with_call(call["arguments"]["expression"], trace.result, trace.answer)


def _with_call(expression: str, result: str, answer: str) -> list[Message]:
    call = {"function": {"name": "calculate", "arguments": {"expression": expression}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": json.dumps([call]), "turn": 0},
        {"role": "tool", "name": "calculate", "content": result},
        {"role": "assistant", "content": answer, "turn": 1},
    ]


def _miscopied(slip: str, left: int, operator: str, right: int, random_: random.Random) -> list[Message]:
    value = str(value_of(left, operator, right))
    if slip == "miscopied answer":
        return _with_call(f"{left}{operator}{right}", value, _edited(value, random_))
    one, two = str(left), str(right)
    if random_.random() < 0.5:
        one = str(int(_edited(one, random_)))
    else:
        two = str(int(_edited(two, random_)))
    result = Calculator().calculate(f"{one}{operator}{two}")
    return _with_call(f"{one}{operator}{two}", result, result)


def _edited(number: str, random_: random.Random) -> str:
    """``number`` with one digit replaced, dropped, doubled or exchanged with the next."""
    digits = [i for i, character in enumerate(number) if character.isdigit()]
    at = random_.choice(digits)
    kind = random_.choice(("replace", "drop", "double", "exchange"))
    if kind == "drop" and len(digits) > 1:
        return number[:at] + number[at + 1 :]
    if kind == "double":
        return number[: at + 1] + number[at:]
    if kind == "exchange" and at + 1 < len(number):
        return number[:at] + number[at + 1] + number[at] + number[at + 2 :]
    return number[:at] + str((int(number[at]) + random_.randint(1, 9)) % 10) + number[at + 1 :]
