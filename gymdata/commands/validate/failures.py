"""S101 and B809: damaged records of failed attempts, and whether attempts failed depending on what they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc

from gymdata.checks.violations import Violation
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.stats import wilson
from gymdata.store import read_table
from gymdata.store.journal import FAILURES, sound_failures


def faults_of_failures(folder: Path) -> Iterator[Violation]:
    """Each damaged line of its failures.jsonl, and a finding when the shares of failed attempts among those that called a
    tool and those that did not have Wilson intervals (95 %) that do not overlap. Attempts are the rollouts of ``folder``
    and the lines of its failures.jsonl with an answer of the model."""
    file = folder / FAILURES
    failed = Counter[bool]()
    records, damaged = sound_failures(file)
    for line, offset in damaged:
        detail = f"damaged line {line} at byte {offset}: its checksum does not match, or it is no JSON object"
        yield Violation("S101", line - 1, detail=detail, file=str(file))
    for row in records:
        answers = [message for message in row.get("messages") or () if message["role"] == "assistant"]
        # Without an answer it is not known what the attempt would have done; some failures are of no attempt by itself.
        if answers and row.get("counts", True) and row.get("kind") != "reward":
            failed[any(message.get("tool_calls") for message in answers)] += 1
    if not failed:
        return
    messages = read_table(folder, ROLLOUTS, ("messages",))["messages"].combine_chunks()
    calls = pc.list_flatten(messages).field("tool_calls")
    n_called = len(pc.unique(pc.filter(pc.list_parent_indices(messages), pc.is_valid(calls))))
    made = Counter({True: n_called, False: len(messages) - n_called}) + failed
    shares = {called: wilson(failed[called], made[called]) for called in made}
    if len(shares) == 2 and (shares[True][0] > shares[False][1] or shares[False][0] > shares[True][1]):
        texts = [
            f"{failed[called]:,} of {made[called]:,} attempts {what} a tool call failed "
            f"({failed[called] / made[called]:.0%}, 95 %: {100 * shares[called][0]:.0f} to {100 * shares[called][1]:.0f})"
            for called, what in ((True, "with"), (False, "without"))
        ]
        yield Violation("B809", 0, detail=", ".join(texts), file=str(file))
