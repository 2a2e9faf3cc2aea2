"""The conversations from which the sample policy learns.

A trace is question, tool call, tool result, answer; where there is a tutor, a wrong answer gets a second try. Many carry a
slip: which slip is likely depends on the operator and the wording, so the trained policy has habits, good in some kinds of
question and bad in others, and rewards can tell them apart. Operand pairs of held-out tasks are never drawn.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gymdata.sample_data.calculator import Calculator
from gymdata.sample_data.make_tasks import OPERATORS, RETRIES, WORDINGS, Pair, draw_operands, value_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: The slip that prevails in a kind of question; elsewhere the policy is mostly right.
PREVAILING = {
    ("-", WORDINGS[0]): "swapped",
    ("-", WORDINGS[1]): "swapped",
    ("+", WORDINGS[1]): "wrong operator",
    ("*", WORDINGS[1]): "short answer",
    ("*", WORDINGS[2]): "wrong operator",
}
SLIPS = ("swapped", "wrong operator", "from memory", "short answer", "wrong digit", "broken call")
PREVAILING_SHARE = 0.64
OTHER_SHARE = 0.2
#: Conversations without tools, so that the policy also ends its turn when it is given none.
TOOLLESS_SHARE = 0.03
#: Second tries that are wrong again.
AGAIN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Trace:
    """One conversation: ``call`` and ``result`` are None when the policy answered without calling the tool. ``again``: the
    second try, whose question is what the tutor says."""

    question: str
    with_tools: bool
    call: str | None
    result: str | None
    answer: str
    again: Trace | None = None


@lru_cache
def tools() -> list[dict[str, Any]]:
    """The schema of the calculator's one tool."""
    from transformers.utils import get_json_schema

    return [get_json_schema(Calculator().calculate)]


def call_text(expression: str) -> str:
    """A tool call as the chat template renders it."""
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def draw_trace(random_: random.Random, held_out: Collection[Pair], tutored: bool = False) -> Trace:
    """One conversation about operands that no held-out task has. ``tutored``: with a second try after a wrong answer."""
    operator = random_.choice(OPERATORS)
    while True:
        left, right = draw_operands(operator, random_)
        if (min(left, right), max(left, right)) not in held_out:
            break
    wording = random_.choice(WORDINGS)
    if random_.random() < TOOLLESS_SHARE:
        text = f"{left}{operator}{right}"
        return Trace(wording.format(text), False, None, None, str(value_of(left, operator, right)))

    habit = PREVAILING.get((operator, wording))
    slip = None
    if habit and random_.random() < PREVAILING_SHARE:
        slip = habit
    elif not habit and random_.random() < OTHER_SHARE:
        slip = random_.choice(SLIPS)
    trace = attempt(left, operator, right, wording, slip, random_)
    if not tutored or trace.answer == str(value_of(left, operator, right)):
        return trace
    slip = slip if random_.random() < AGAIN_SHARE else None
    return replace(trace, again=attempt(left, operator, right, random_.choice(RETRIES), slip, random_))


def attempt(left: int, operator: str, right: int, wording: str, slip: str | None, random_: random.Random) -> Trace:
    """One conversation about these operands, right but for the ``slip``."""
    expression = f"{left}{operator}{right}"
    value = str(value_of(left, operator, right))
    question = wording.format(expression)
    if slip == "from memory":
        return Trace(question, True, None, None, _wrong_digit(value, random_))
    if slip == "broken call":
        return Trace(question, True, None, None, call_text(expression).replace('"}}', '"}'))
    if slip == "swapped":
        expression, value = f"{right}{operator}{left}", str(value_of(right, operator, left))
    if slip == "wrong operator":
        operator = "-" if operator == "+" else "+"
        expression, value = f"{left}{operator}{right}", str(value_of(left, operator, right))
    if slip == "wrong digit":
        left = int(_wrong_digit(str(left), random_))
        expression, value = f"{left}{operator}{right}", str(value_of(left, operator, right))
    answer = value[:-1] if slip == "short answer" and len(value.lstrip("-")) > 1 else value
    return Trace(question, True, call_text(expression), value, answer)


def _wrong_digit(number: str, random_: random.Random) -> str:
    """``number`` with its last digit replaced by another."""
    return number[:-1] + str((int(number[-1]) + random_.randint(1, 9)) % 10)


def segments(trace: Trace, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, bool]]:
    """The conversation's text, cut where authorship changes: (text, written by the policy)."""
    messages: list[dict[str, Any]] = []
    parts = [("", False)]

    def render(prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, tools=tools() if trace.with_tools else None, add_generation_prompt=prompt, tokenize=False
        )

    done = 0
    for attempted in filter(None, (trace, trace.again)):
        messages.append({"role": "user", "content": attempted.question})
        for text, result in ((attempted.call, attempted.result), (attempted.answer, None)):
            if text is None:
                continue
            context = render(True)
            parts += [(context[done:], False), (text + tokenizer.eos_token, True)]
            done = len(context) + len(text) + len(tokenizer.eos_token)
            messages.append({"role": "assistant", "content": text})
            if result is not None:
                messages.append({"role": "tool", "content": result})
    return parts[1:]


def tokenizer_corpus(seed: int, tutored: bool = False) -> list[str]:
    """Texts from which the tokenizer's merges come: what the words of a conversation look like, without its numbers."""
    random_ = random.Random(seed)
    pieces = [
        "system\nTools: calculate(expression: string)",
        "user\n",
        "assistant\n",
        "tool\n",
        call_text("+-*"),
        "error",
    ]
    pieces += [wording.format("+") for wording in WORDINGS]
    pieces += RETRIES if tutored else ()
    numbers = [str(random_.randrange(10, 10 ** random_.randint(2, 5))) for _ in range(4000)]
    return pieces * 300 + numbers
