"""How turns relate to the turns before them, and whether they are as they were stored: T200 to T204, T208 to T211."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gymdata.checks import breaks
from gymdata.checks.violations import CHECKS, Check, Violation, code_pages
from gymdata.rollouts.turn_columns import Evidence
from gymdata.rollouts.turns import count_breaks

_CODES = code_pages("""
T200 break (error): the prompt does not extend what came before, cause not known
A turn's prompt must begin with its parent's prompt ++ generation, token for token; from `position` on this one does
not. Training on the rollout as one sequence would train tokens that were never sampled in that context. Repair with
--fix split, truncate or drop, or collect with ids in and ids out.

T201 re-tokenised (error): a break: the same text came back as other tokens
The differing spans decode to the same text: the generation was decoded and encoded again. The model never sampled the
new ids. Send token ids between turns, never text.

T202 re-templated (error): a break: the assistant turn was rendered differently
The differing spans are in one assistant turn and are equal after parsing: the template wrote the tool call or white
space in its own way. `gymdata check MODEL` shows what the template changes.

T203 history rewritten (error): a break: earlier messages were changed or removed
A message border or a reasoning block is in the removed part, or a message that the model did not write changed.
Templates that strip earlier reasoning do this; use the prefix-preserving form of the template.

T204 context truncated (error): a break: the front of the history was dropped
Tokens right after the system message, or from the very start, were removed, as a sliding context window does.

T208 turns out of order (error): a turn comes after one that was sampled later
Found when this turn's prompt ++ generation is the beginning of an earlier turn's prompt, so it was sampled before it;
or when assistant messages name their turns in falling order or beyond the last turn.

T209 digest mismatch (error): the content changed after it was collected
The digest over the parent's stored digest, prefix length, ids and log-probabilities does not match the stored one.
Exactly this turn was changed, or its digest was. Or a whole file is not the one that run.json describes, by its size or
its bytes (then row is 0, there is no turn, and its rows may each be sound).

T210 delta not expandable (error): the stored delta does not rebuild a prompt
prefix_length is below 0, beyond the parent's prompt ++ generation, or not the longest common prefix; or the parent is
not an earlier turn.

T211 branch or retry (info): the turn forks from, or repeats, an earlier one
A retry has its parent's very prompt; a branch leaves the chain inside tokens that the environment wrote, or is another
agent's call. The rollout gives several sequences. Not a fault.
""")


@CHECKS.register("storage")
class Storage(Check):
    """Breaks, branches, and stored turns that changed."""

    codes = _CODES

    def find(self, e: Evidence) -> Iterator[Violation]:
        """T209, T210, and how each turn relates to the turns before it: T200 to T204, T208, T211; S102 where n_breaks counts
        other breaks."""
        t, unusable = e.turns, set[int]()
        for code, k, expected, got in t.altered(not e.foreign):
            if code == "T210":
                unusable.add(int(t.rollout[k]))
                yield self.at_turn(e, k, code, expected=expected, got=got)
            else:
                detail = "content and digest disagree: one of them changed after collection"
                yield self.at_turn(e, k, code, detail=detail)
        departs = t.count((t.parent >= 0) & (t.prefix < t.max_prefix)) > 0
        recorded = e.counts.get("n_breaks")
        for r in np.flatnonzero(departs if recorded is None else departs | (recorded != 0)).tolist():
            if r in unusable:  # the chain below an unusable turn cannot be rebuilt
                continue
            turns = t.structs(r)
            relations = breaks.relations(turns, self.settings.reader)
            for relation in relations:
                yield self.at_rollout(e, r, **relation._asdict())
            if recorded is None or any(relation.code == "T210" for relation in relations):
                continue
            if (real := count_breaks(turns)) != recorded[r]:
                values = {"expected": str(real), "got": str(recorded[r]), "detail": "n_breaks disagrees with turns"}
                yield self.at_rollout(e, r, "S102", **values)
