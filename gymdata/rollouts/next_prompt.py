"""The next prompt of a conversation, built from the ids that the model really sampled: from ids held and a bridge, or
by a splice where messages were rendered again.

A rendered conversation has the same text as the sampled one, but not the same ids: text is tokenised again, tool calls
are written out again, earlier reasoning is left out. A splice keeps the sampled ids and takes from the rendered
conversation only what follows the last assistant turn. What always holds for ``splice``: the result begins with the
sampled ids, no end-of-turn token is doubled, and when the place of the cut cannot be proved there is no result but a
refusal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from gymdata.errors import RefusedError, option

#: Ids on each side of a position that a refusal carries.
WINDOW = 8


class SpliceRefusedError(RefusedError):
    """No cut can be proved.

    ``position``: index of the first id in ``template`` that contradicts the cut. ``expected_ids`` and ``got_ids``:
    those around it in the conversation that should be there and in the one that is, for a caller that can decode them.
    """

    def __init__(self, message: str, position: int, expected: Sequence[int], got: Sequence[int]) -> None:
        self.position = position
        self.expected_ids = _window(expected, position)
        self.got_ids = _window(got, position)
        super().__init__(
            f"{message} (token {position}; expected around it {self.expected_ids}, got {self.got_ids})",
            hint="speak to the server in ids, or use a prefix-preserving template; `gymdata check MODEL` names one",
        )


def splice_published(
    model_prefix: Sequence[int], template_prefix: Sequence[int], template: Sequence[int], eos: int
) -> list[int]:
    """The splice as others publish it: cut after as many EOS as ``template_prefix`` has.

    ``model_prefix``: ids seen and sampled so far; ``template_prefix``: ids of the messages up to and with the last
    assistant turn, rendered again; ``template``: ids of all messages with the generation prompt. With EOS 2: ``[100,
    2]``, ``[9, 2, 9, 2]`` and ``[9, 2, 9, 2, 77, 88]`` give ``[100, 2, 77, 88]``. Raises SpliceRefusedError only when
    there is no such EOS; it cannot detect a misleading count.
    """
    if not model_prefix:
        return list(template)
    closings = _places(template, {eos})
    n = len(_places(template_prefix, {eos}))
    if n == 0:
        raise SpliceRefusedError("the rendered history has no EOS", len(template_prefix), template_prefix, template)
    if n > len(closings):
        message = f"the rendered history has {n} EOS, the whole conversation {len(closings)}"
        raise SpliceRefusedError(message, len(template), template_prefix, template)
    prefix = model_prefix[:-1] if model_prefix[-1] == eos else model_prefix
    return [*prefix, *template[closings[n - 1] :]]


def splice(
    model_prefix: Sequence[int], template_prefix: Sequence[int], template: Sequence[int], end_of_turn: Collection[int]
) -> list[int]:
    """``model_prefix``, closed once, and what follows the last assistant turn in ``template``.

    ``end_of_turn``: every token that may close an assistant's turn. The other arguments are those of
    ``splice_published``. A generation that was cut by length gets the closing token that the template writes there. An
    empty ``model_prefix`` gives ``template``. Raises SpliceRefusedError unless all of this holds:

    - the sampled and the rendered history have the same number of turns (no turn without ids, no turn unclosed);
    - the rendered history ends with a closed turn, and at most what also begins the next message after it;
    - the rendered history is there unchanged in ``template``; or, where the template rewrote it, the turn before the cut
      opens as the generation prompt does and no later one does, so that it is the last assistant turn, and it still ends
      with what was said last, nothing of which comes again after the cut.
    """
    if not model_prefix:
        return list(template)
    closings = _places(template_prefix, end_of_turn)
    _same_turns(model_prefix, template_prefix, len(closings), end_of_turn)
    closing = closings[-1]
    if list(template[: closing + 1]) != list(template_prefix[: closing + 1]):
        closing = _rewritten(template_prefix, closings, template, end_of_turn)
    _closed_at_the_end(template_prefix, closings[-1], template, closing, end_of_turn)
    closed = model_prefix[-1] in end_of_turn
    return [*model_prefix, *template[closing + closed :]]


def _same_turns(
    model_prefix: Sequence[int], template_prefix: Sequence[int], rendered: int, end_of_turn: Collection[int]
) -> None:
    if list(model_prefix[:1]) != list(template_prefix[:1]):
        raise SpliceRefusedError("the two histories begin differently", 0, model_prefix, template_prefix)
    sampled = len(_places(model_prefix, end_of_turn)) + (model_prefix[-1] not in end_of_turn)
    if sampled != rendered:
        message = f"{sampled} turns were closed in the sampled ids and {rendered} in the rendered history"
        position = common_length(model_prefix, template_prefix)
        raise SpliceRefusedError(message, position, model_prefix, template_prefix)


def _closed_at_the_end(
    template_prefix: Sequence[int], closed: int, template: Sequence[int], cut: int, end_of_turn: Collection[int]
) -> None:
    """Raises SpliceRefusedError unless the rendered history, after its last end of turn, has only what also begins the
    next message, such as a line feed."""
    tail = list(template_prefix[closed + 1 :])
    # Some templates end a whole conversation with one more token. The messages are in both renderings; this token is
    # not.
    while tail and tail[-1] not in template:
        tail.pop()
    following = list(template[cut + 1 :])
    if len(following) > len(tail) and following[: len(tail)] == tail:
        return
    # A line feed may have become one token with what comes next; more than one token is a turn that is still open.
    if len(tail) == 1 and following and tail[0] not in end_of_turn and len(following) > 1:
        return
    raise SpliceRefusedError(
        "the rendered history continues after its last end-of-turn token", closed + 1, template_prefix, template
    )


def _rewritten(
    template_prefix: Sequence[int], closings: Sequence[int], template: Sequence[int], end_of_turn: Collection[int]
) -> int:
    """Place of the last assistant turn's closing token in a conversation whose history was written differently."""
    n, ends = len(closings), _places(template, end_of_turn)

    def refused(reason: str) -> SpliceRefusedError:
        return SpliceRefusedError(reason, common_length(template_prefix, template), template_prefix, template)

    if len(ends) < n:
        raise refused(f"the template left out closed turns ({n} in the history, {len(ends)} in the whole)")
    starts = [0, *(end + 1 for end in ends)]
    prompt = template[starts[-1] :]
    begins = closings[-2] + 1 if n > 1 else 0
    header = list(prompt[: common_length(template_prefix[begins : closings[-1]], prompt)])
    opens = [list(template[start : start + len(header)]) == header for start in starts[:-1]]
    if not opens[n - 1] or any(opens[n:]):
        raise refused("the template rewrote the history, and its last assistant turn cannot be told from the others")
    cut = ends[n - 1]
    if not _sampled_before(template_prefix[begins : closings[-1]], template[starts[n - 1] : cut], template[cut + 1 :]):
        raise refused("the template left out, or moved, what the last assistant turn says at its end")
    return cut


def _sampled_before(sampled: Sequence[int], rendered: Sequence[int], rest: Sequence[int]) -> bool:
    """Whether what ``rendered`` leaves out of a turn was in front of its last words, and is not in the ``rest``."""
    if list(sampled) == list(rendered):
        return True
    head = common_length(sampled, rendered)
    end = common_length(sampled[head:][::-1], rendered[head:][::-1])
    gone = list(sampled[head : len(sampled) - end])
    # A single token may occur again by chance; then the refusal is unnecessary, but harmless.
    again = any(list(rest[i : i + len(gone)]) == gone for i in range(len(rest))) if gone else False
    return end > 0 and not again


def _places(ids: Sequence[int], tokens: Collection[int]) -> list[int]:
    return [i for i, token in enumerate(ids) if token in tokens]


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _window(ids: Sequence[int], position: int) -> list[int]:
    return [int(i) for i in ids[max(0, position - WINDOW) : position + WINDOW]]


def bridge_ids(before: Sequence[int], after: Sequence[int], end_of_turn: Collection[int]) -> list[int]:
    """The environment's tokens between two model calls.

    ``before``: ids of the conversation up to and with an assistant message; ``after``: ids of the same conversation with
    the new messages and the generation prompt. Returns what follows, in ``after``, the end-of-turn token that closes that
    assistant message. Raises RefusedError with the position when ``after`` does not begin with ``before`` up to there.
    """
    closing = next((i for i in range(len(before) - 1, -1, -1) if before[i] in end_of_turn), None)
    if closing is None:
        raise RefusedError(
            f"the template closes an assistant turn with none of its end-of-turn tokens {sorted(end_of_turn)}",
            hint="`gymdata check MODEL` shows what the template really writes",
        )
    head = closing + 1
    if list(after[:head]) != list(before[:head]):
        position = common_length(after, before[:head])
        raise RefusedError(
            f"the template rewrites earlier messages when new ones follow: token {position} changes from "
            f"{list(before[max(0, position - 4) : position + 4])} to {list(after[max(0, position - 4) : position + 4])}",
            hint=f"use a prefix-preserving template ({option('chat_template')}); `gymdata check MODEL` names one where "
            "known",
        )
    return list(after[head:])


def next_prompt(context: Sequence[int], bridge: Sequence[int], end_of_turn: Sequence[int]) -> list[int]:
    """The next call's prompt: the context so far, an end-of-turn token when none was sampled, and the bridge.

    With end-of-turn 2: context ``[7, 2]`` and bridge ``[9, 21]`` give ``[7, 2, 9, 21]``; so does context ``[7]``.
    """
    closed = bool(context) and context[-1] in end_of_turn
    return [*context, *(() if closed else end_of_turn[:1]), *bridge]
