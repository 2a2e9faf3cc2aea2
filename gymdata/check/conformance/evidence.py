"""What a recorder says it recorded, against what the engine sampled: the first difference, and what it looks like.

Turns and draws in, a sentence out. A recorded turn is right when the engine read exactly its prompt and sampled exactly its
ids with exactly its numbers, and every draw is recorded once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gymdata.check.conformance.engine import Draw
from gymdata.errors import DataError
from gymdata.rollouts.turns import expand_prompts

Decode = Callable[[Sequence[int]], str]


class CaseFailure(Exception):  # noqa: N818 - a finding about a recorder, not an error of this program
    """A case does not hold; the message says what is wrong with the recorder."""


@dataclass(slots=True)
class RecordedTurn(Draw):
    """A turn with its complete prompt: a draw as the recorder has it."""

    agent: str | None


def recorded_turns(turns: Any) -> list[RecordedTurn]:
    """The ``turns`` of GET /rollouts/KEY?turns=true. Raises CaseFailure for what is not in the form of SPEC.md."""
    if not isinstance(turns, list):
        raise CaseFailure(f"GET /rollouts/KEY?turns=true: turns is {turns!r:.80}, expected a list")
    try:
        prompts = expand_prompts(turns)
        return [
            RecordedTurn(
                prompt.tolist(),
                list(turn["generation_token_ids"]),
                [float(value) for value in turn["generation_log_probs"]],
                str(turn["finish_reason"]),
                turn.get("agent"),
            )
            for prompt, turn in zip(prompts, turns, strict=True)
        ]
    except DataError as error:
        raise CaseFailure(str(error.message)) from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CaseFailure(f"a turn is not in the form of SPEC.md: {type(error).__name__} {error}") from error


def difference(
    turns: Sequence[RecordedTurn], draws: Sequence[Draw], failed: Sequence[list[int]], decode: Decode
) -> str | None:
    """The first difference between what was recorded and what was sampled; None where there is none."""
    left = list(draws)
    wrong = []
    for number, turn in enumerate(turns):
        draw = next((d for d in left if (d.prompt, d.ids) == (turn.prompt, turn.ids)), None)
        if draw is None:
            wrong.append((number, turn))
            continue
        left.remove(draw)
        if (problem := _numbers(turn.log_probs, draw.log_probs)) is not None:
            return f"turn {number}: {problem}"
        if turn.finish_reason != draw.finish_reason:
            return f"turn {number}: finish_reason is {turn.finish_reason!r}, the engine's was {draw.finish_reason!r}"
    if wrong:
        number, turn = wrong[0]
        return f"turn {number}: {_unlike(turn, draws, failed, decode)}"
    if left:
        return f"{len(left)} of {len(draws)} samples are not recorded, the first {decode(left[0].ids)!r:.80}"
    return None


def not_continued(draw: Draw, before: Sequence[int], decode: Decode) -> str | None:
    """How the prompt of ``draw`` leaves the ids ``before``, which it must begin with; None where it does not."""
    if draw.prompt[: len(before)] == list(before):
        return None
    index = _first_difference(draw.prompt, before)
    read, expected = (decode(ids[index : index + 8]) for ids in (draw.prompt, before))
    return (
        f"the prompt does not continue the ids that were read and sampled: from token {index} it is {read!r}, expected "
        f"{expected!r}; an earlier message was rendered again"
    )


def as_float32(value: float) -> bytes:
    """The bits of a log-probability on disk."""
    return struct.pack("<f", value)


def _numbers(recorded: Sequence[float], sampled: Sequence[float]) -> str | None:
    if len(recorded) != len(sampled):
        return f"{len(recorded)} log-probabilities for {len(sampled)} generated tokens"
    bits, expected = ([as_float32(value) for value in values] for values in (recorded, sampled))
    if bits == expected:
        return None
    index = next(k for k, (a, b) in enumerate(zip(bits, expected, strict=True)) if a != b)
    detail = f"at token {index} got {recorded[index]:.9g}, sampled {sampled[index]:.9g}"
    if len(recorded) > 1 and (bits[1:] == expected[:-1] or bits[:-1] == expected[1:]):
        return f"the log-probabilities are shifted by one token: {detail}"
    if max(abs(a - b) for a, b in zip(recorded, sampled, strict=True)) < 0.01:
        return f"the log-probabilities are rounded: {detail}"
    return f"the log-probabilities are not the engine's: {detail}"


def _unlike(turn: RecordedTurn, draws: Sequence[Draw], failed: Sequence[list[int]], decode: Decode) -> str:
    """What a turn that equals no draw looks like."""
    if any((d.prompt, d.ids) == (turn.prompt, turn.ids) for d in draws):
        return "another turn has the same sample: it is recorded twice"
    if turn.ids and not any(turn.ids):
        return "its generated ids are all 0"
    if turn.prompt in failed:
        return "the engine failed this request, and it is recorded as a turn"
    if (moved := next((d for d in draws if d.conversation == turn.conversation), None)) is not None:
        off = len(turn.prompt) - len(moved.prompt)
        counts = f"{len(turn.ids)} generated tokens, sampled {len(moved.ids)}"
        return f"the border between prompt and generation is shifted by {off}: {counts}"
    same_prompt = next((d for d in draws if d.prompt == turn.prompt), None)
    same_ids = next((d for d in draws if d.ids == turn.ids), None)
    if same_prompt is not None and turn.ids == same_prompt.ids[:-1]:
        return "the last generated token is missing: the stop token was dropped"
    if same_prompt is not None and same_ids is not None:
        return "its generation was sampled after another prompt: branches are swapped"
    if same_ids is not None:
        return f"its prompt is not the one that the engine read: {_where(turn.prompt, same_ids.prompt, decode)}"
    if same_prompt is not None and decode(same_prompt.ids) == decode(turn.ids):
        return f"its text was encoded again into other ids: {_where(turn.ids, same_prompt.ids, decode)}"
    if same_prompt is not None:
        return f"its ids are not those that were sampled after this prompt: {_where(turn.ids, same_prompt.ids, decode)}"
    return "the engine sampled neither its ids nor after its prompt"


def _where(recorded: Sequence[int], expected: Sequence[int], decode: Decode) -> str:
    index = _first_difference(recorded, expected)
    read, sampled = list(recorded[index : index + 8]), list(expected[index : index + 8])
    return f"from token {index} got {decode(read)!r} {read}, expected {decode(sampled)!r} {sampled}"


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
