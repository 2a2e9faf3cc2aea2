"""Chat messages: M401 to M404, and T208 where they name their turns out of order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gymdata.checks.violations import CHECKS, Check, Violation, code_pages
from gymdata.rollouts.turn_columns import ASSISTANT, SYSTEM, Evidence

_CODES = code_pages("""
M401 system not first (error): a system message comes after another message
Most chat templates render a system message at the front only, or refuse.

M402 adjacent assistants (warning): two assistant messages follow each other
Many templates merge or refuse them. Sometimes a tool result was lost between the two.

M403 tool result without a call (error): a tool message answers no earlier tool call
Its tool_call_id is in no earlier assistant message's tool_calls, or without an id, the message before the tool results
is not an assistant message with calls.

M404 no assistant (error): the rollout has no assistant message
The model wrote no message. Turns without any message are those of a source that has ids and no text.
""")


@CHECKS.register("messages")
class ChatMessages(Check):
    """The order of roles, tool results and turns."""

    codes = _CODES

    def find(self, e: Evidence) -> Iterator[Violation]:
        """M401–M404, and T208 where assistant messages name their turns out of order."""
        m = e.messages
        if m is None:
            return
        n = len(m.role)
        starts = m.offsets[:-1]
        owner = np.repeat(np.arange(e.n), np.diff(m.offsets))
        n_turns = np.diff(e.turns.offsets)
        leads = np.zeros(n + 1, np.bool_)
        leads[starts] = True
        follows = ~leads[:n]
        before = np.concatenate((m.role[:1], m.role[:-1]))

        def fault(i: int, code: str, **more: object) -> Violation:
            return self.at_rollout(e, int(owner[i]), code, detail=m.named(i, int(owner[i])), **more)

        for i in np.flatnonzero(follows & (m.role == SYSTEM) & (before != SYSTEM)):
            yield fault(i, "M401")
        for i in np.flatnonzero(follows & m.from_assistant & (before == ASSISTANT)):
            yield fault(i, "M402", turn=int(m.turn[i]) if m.turn[i] >= 0 else None)
        speaks = np.bincount(owner[m.from_assistant], minlength=e.n)
        # A limit can cut a rollout before its first token; that is T212, and no fault of the messages.
        cut_short = (n_turns > 0) & (e.turns.by_rollout(e.turns.generation).lengths == 0)
        has_no_text = (n_turns > 0) & (np.diff(m.offsets) == 0)
        for r in np.flatnonzero((speaks == 0) & ~cut_short & ~has_no_text):
            yield self.at_rollout(e, int(r), "M404")
        for i, call_id in m.unanswered.items():
            more = {} if call_id is None else {"expected": "the call_id of an earlier call", "got": call_id}
            yield fault(i, "M403", **more)
        assistant = np.flatnonzero(m.from_assistant & (m.turn >= 0))
        if len(assistant):
            falls = np.zeros(len(assistant), np.bool_)
            falls[1:] = (owner[assistant[1:]] == owner[assistant[:-1]]) & (
                m.turn[assistant[1:]] < m.turn[assistant[:-1]]
            )
            beyond = m.turn[assistant] >= n_turns[owner[assistant]]
            for i in assistant[falls | beyond]:
                yield fault(i, "T208", turn=int(m.turn[i]), got=f"turn {m.turn[i]}", expected="turns in rising order")
