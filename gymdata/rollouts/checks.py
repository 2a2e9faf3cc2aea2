"""The checks of one batch of rollouts: arrays in, violations out.

Invariants: no Python loop over tokens; every fault is found at its exact row, turn and position; a batch is
checked alone, and what needs the whole file (duplicates, groups) is kept by ``AcrossRows`` as hashes and ids only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.rollouts.continuity import breaks
from gymdata.rollouts.continuity.breaks import Reader
from gymdata.rollouts.turn_columns import ASSISTANT, FUNCTION, SYSTEM, TOOL, Evidence, Ints, Messages, lengths
from gymdata.rollouts.turns import turn_digest
from gymdata.rollouts.violations import Violation

#: Rounding in a log-softmax can end this far above zero.
POSITIVE_TOLERANCE = 1e-6
INT32_MAX = 2**31 - 1


def check_batch(
    e: Evidence,
    *,
    vocab_size: int | None = None,
    reward_named: bool = False,
    digests: bool = True,
    reader: Reader | None = None,
) -> list[Violation]:
    """Every violation of a batch that needs no other batch, by row, then turn, then position.

    ``reader`` gives what decodes ids, and is asked only when a turn breaks.
    """
    found = [
        *structure(e),
        *storage(e, digests=digests, reader=reader),
        *tokens(e, vocab_size),
        *log_probs(e),
        *rewards(e, reward_named),
    ]
    if e.messages is not None:
        found += messages(e, e.messages)
    found.sort(key=lambda v: (v.row, -1 if v.turn is None else v.turn, v.code, v.position or 0))
    return found


class _Places:
    """Names rows and turns of a batch in violations."""

    def __init__(self, e: Evidence) -> None:
        self.e = e

    def rollout(self, r: int, code: str, **more: object) -> Violation:
        return Violation(code, int(self.e.rows[r]), self.e.rollout_id[r], **more)  # type: ignore[arg-type]  # fields by name

    def turn(self, k: int, code: str, **more: object) -> Violation:
        r = int(np.searchsorted(self.e.turn_offsets, k, side="right")) - 1
        return self.rollout(r, code, turn=int(k - self.e.turn_offsets[r]), **more)


def structure(e: Evidence) -> Iterator[Violation]:
    """S102 where a count column disagrees with what it counts; T205 for rollouts without turns."""
    at = _Places(e)
    per_rollout = np.diff(e.turn_offsets)
    real = {
        "n_turns": per_rollout,
        "n_context_tokens": np.diff(e.delta_offsets[e.turn_offsets]),
        "n_generated_tokens": np.diff(e.gen_offsets[e.turn_offsets]),
    }
    for name, said in e.counts.items():
        for r in np.flatnonzero(said != real[name]):
            yield at.rollout(
                int(r), "S102", expected=str(real[name][r]), got=str(said[r]), detail=f"{name} disagrees with turns"
            )
    for r in np.flatnonzero(per_rollout == 0):
        yield at.rollout(int(r), "T205", detail="the rollout has no turns")


def storage(e: Evidence, *, digests: bool = True, reader: Reader | None = None) -> Iterator[Violation]:
    """T209, T210, and how each turn relates to the turns before it: T200 to T204, T208, T211."""
    at = _Places(e)
    first = np.repeat(e.turn_offsets[:-1], np.diff(e.turn_offsets))
    own = np.arange(e.n_turns) - first
    bad_parent = (e.parent < -1) | (e.parent >= own)
    has_parent = (e.parent >= 0) & ~bad_parent
    above = np.where(has_parent, first + e.parent, 0)
    prompt_length = e.prefix.astype(np.int64) + lengths(e.delta_offsets)
    whole = prompt_length + lengths(e.gen_offsets)
    held = np.where(has_parent, whole[above] if e.n_turns else 0, 0)
    bad_prefix = ~bad_parent & ((e.prefix < 0) | (e.prefix > held))
    for k in np.flatnonzero(bad_parent):
        yield at.turn(k, "T210", expected=f"parent -1 to {own[k] - 1}", got=f"parent {e.parent[k]}")
    blind = _below_unusable(bad_parent | bad_prefix, above, has_parent)
    for k in np.flatnonzero(bad_prefix & ~blind):
        yield at.turn(k, "T210", expected=f"prefix_length 0 to {held[k]}", got=f"prefix_length {e.prefix[k]}")
    if digests:
        for k in _changed(e, above, has_parent):
            if not bad_parent[k]:
                yield at.turn(k, "T209", detail="content and digest disagree: one of them changed after collection")
    odd = np.flatnonzero(~bad_parent & ~bad_prefix & (e.parent >= 0) & (e.prefix < held))
    if len(odd):
        owners = np.searchsorted(e.turn_offsets, odd, side="right") - 1
        unusable = set(
            (np.searchsorted(e.turn_offsets, np.flatnonzero(bad_parent | bad_prefix), side="right") - 1).tolist()
        )
        for r in np.unique(owners):
            # The chain below an unusable turn cannot be rebuilt, so relations are not told apart there.
            if int(r) not in unusable:
                for found in breaks.relations(e.turn_structs(int(r)), reader):
                    yield at.rollout(int(r), found.code, **found.place())


def _changed(e: Evidence, above: Ints, has_parent: npt.NDArray[np.bool_]) -> Iterator[int]:
    """Turns whose content does not match their digest over their parent's stored one."""
    said = np.where(has_parent, e.digest[above] if e.n_turns else 0, 0)
    real = batch_digests(e, said)
    wrong = set(np.flatnonzero(real != e.digest).tolist())
    for k in sorted(wrong):
        if has_parent[k] and int(above[k]) in wrong:
            # Where only the parent's digest was changed, this turn fits the one that the parent should have.
            delta, gen, lp = e.arrays(k)
            if turn_digest(int(real[above[k]]), int(e.prefix[k]), delta, gen, lp) == e.digest[k]:
                continue
        yield k


def _below_unusable(
    bad: npt.NDArray[np.bool_], above: Ints, has_parent: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """(T,) turns below one that cannot be expanded: their own lengths cannot be judged."""
    blind = np.zeros(len(bad), np.bool_)
    if bad.any():
        # Parents stand before their children, so one pass in order reaches every descendant.
        for k in np.flatnonzero(has_parent).tolist():
            blind[k] = bad[above[k]] or blind[above[k]]
    return blind


def batch_digests(e: Evidence, parent_digest: Ints) -> Ints:
    """(T,) the digest of every turn over its parent's stored digest, as ``tokens.turn_digest`` defines it."""
    head = np.zeros(e.n_turns, np.dtype([("digest", "<i8"), ("prefix", "<i4")]))
    head["digest"], head["prefix"] = parent_digest, e.prefix
    digest = xxhash.xxh3_64_intdigest
    heads, delta, gen, lp = (byte_view(a) for a in (head, e.delta, e.gen, e.lp))
    result = np.empty(e.n_turns, np.uint64)
    bounds = zip((e.delta_offsets * 4).tolist(), (e.gen_offsets * 4).tolist(), (e.lp_offsets * 4).tolist(), strict=True)
    d0, g0, l0 = next(bounds)
    at = 0
    out = []
    for d1, g1, l1 in bounds:
        out.append(digest(lp[l0:l1], digest(gen[g0:g1], digest(delta[d0:d1], digest(heads[at : at + 12])))))
        d0, g0, l0 = d1, g1, l1
        at += 12
    result[:] = out
    return result.view(np.int64)


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """The array's memory as bytes, to be sliced without copying."""
    # An empty memoryview cannot be cast.
    return np.ascontiguousarray(array).view(np.uint8).data if len(array) else memoryview(b"")


def tokens(e: Evidence, vocab_size: int | None) -> Iterator[Violation]:
    """T205, T206, T212."""
    at = _Places(e)
    generated = lengths(e.gen_offsets)
    prompt = e.prefix + lengths(e.delta_offsets)
    for k in np.flatnonzero(prompt <= 0):
        what = "prompt and generation ids" if generated[k] == 0 else "prompt ids"
        yield at.turn(k, "T205", detail=f"no {what}")
    for k in np.flatnonzero((generated == 0) & (prompt > 0)):
        yield at.turn(k, "T212")
    limit = vocab_size if vocab_size is not None else INT32_MAX + 1
    for ids, offsets, what in ((e.delta, e.delta_offsets, "prompt"), (e.gen, e.gen_offsets, "generation")):
        for place in outside(ids, limit):
            k = int(np.searchsorted(offsets, place, side="right")) - 1
            position = int(place - offsets[k]) + (int(e.prefix[k]) if what == "prompt" else 0)
            yield at.turn(
                k, "T206", position=position, expected=f"0 to {limit - 1}", got=str(ids[place]), detail=f"in the {what}"
            )


def outside(ids: np.ndarray, limit: int) -> Ints:
    """Where ``ids`` are negative or not below ``limit``; two passes when all is well."""
    # A null among them makes them floats, and NaN is outside.
    if not len(ids) or (ids.min() >= 0 and ids.max() < limit):
        return np.empty(0, np.int64)
    return np.flatnonzero(~((ids >= 0) & (ids < limit)))


def log_probs(e: Evidence) -> Iterator[Violation]:
    """L301, L302, L303."""
    at = _Places(e)
    generated, given = lengths(e.gen_offsets), lengths(e.lp_offsets)
    for k in np.flatnonzero(generated != given):
        yield at.turn(
            k, "L301", expected=str(generated[k]), got=str(given[k]), detail="one log-probability a generated token"
        )
    for place, code in odd_log_probs(e.lp):
        k = int(np.searchsorted(e.lp_offsets, place, side="right")) - 1
        yield at.turn(
            k,
            code,
            position=int(place - e.lp_offsets[k]),
            expected="a finite number" if code == "L302" else "at most 0",
            got=str(e.lp[place]),
        )


def odd_log_probs(lp: np.ndarray) -> list[tuple[int, str]]:
    """(place, L302 or L303) of every log-probability that is not finite, or positive; two passes when all is well."""
    # The minimum is NaN when any is, and -inf when any is; the maximum shows the rest.
    if not len(lp) or (np.isfinite(lp.min()) and lp.max() <= POSITIVE_TOLERANCE):
        return []
    finite = np.isfinite(lp)
    found = [(int(i), "L302") for i in np.flatnonzero(~finite)]
    found += [(int(i), "L303") for i in np.flatnonzero(finite & (lp > POSITIVE_TOLERANCE))]
    return found


def rewards(e: Evidence, named: bool) -> Iterator[Violation]:
    """R501, R502."""
    at = _Places(e)
    if e.reward is not None and e.reward_null is not None:
        for r in np.flatnonzero(e.reward_null):
            yield at.rollout(int(r), "R501", severity="error" if named else None)
        for r in np.flatnonzero(~e.reward_null & ~np.isfinite(e.reward)):
            yield at.rollout(int(r), "R502", expected="a finite number", got=str(e.reward[r]))
    for r, name, value in e.bad_parts:
        yield at.rollout(r, "R502", expected="a finite number", got=str(value), detail=f"part {name!r}")


def messages(e: Evidence, m: Messages) -> Iterator[Violation]:
    """M401–M404, and T208 where assistant messages name their turns out of order."""
    at = _Places(e)
    n = len(m.role)
    starts = m.offsets[:-1]
    owner = np.repeat(np.arange(e.n), np.diff(m.offsets))
    leads = np.zeros(n + 1, np.bool_)
    leads[starts] = True
    follows = ~leads[:n]
    before = np.concatenate((m.role[:1], m.role[:-1]))

    def place(i: int, code: str, **more: object) -> Violation:
        return at.rollout(int(owner[i]), code, detail=f"message {i - m.offsets[owner[i]]}", **more)

    for i in np.flatnonzero(follows & (m.role == SYSTEM) & (before != SYSTEM)):
        yield place(i, "M401")
    for i in np.flatnonzero(follows & (m.role == ASSISTANT) & (before == ASSISTANT)):
        yield place(i, "M402", turn=int(m.turn[i]) if m.turn[i] >= 0 else None)
    speaks = np.bincount(owner[m.role == ASSISTANT], minlength=e.n)
    # A limit can cut a rollout before its first token; that it said nothing is T212 then, and no fault.
    cut_short = (np.diff(e.turn_offsets) > 0) & (np.diff(e.gen_offsets[e.turn_offsets]) == 0)
    for r in np.flatnonzero((speaks == 0) & ~cut_short):
        yield at.rollout(int(r), "M404")
    for i in _unanswered(m, owner):
        yield place(i, "M403")
    said = np.flatnonzero((m.role == ASSISTANT) & (m.turn >= 0))
    if len(said):
        falls = np.zeros(len(said), np.bool_)
        falls[1:] = (owner[said[1:]] == owner[said[:-1]]) & (m.turn[said[1:]] < m.turn[said[:-1]])
        beyond = m.turn[said] >= np.diff(e.turn_offsets)[owner[said]]
        for i in said[falls | beyond]:
            yield place(i, "T208", turn=int(m.turn[i]), got=f"turn {m.turn[i]}", expected="turns in rising order")


def _unanswered(m: Messages, owner: Ints) -> Iterator[int]:
    """Tool messages that answer no earlier call of their rollout."""
    tools = np.flatnonzero(((m.role == TOOL) | (m.role == FUNCTION)) & ~m.surely_answered)
    if not len(tools):
        return
    callers = np.flatnonzero(m.calls & (m.role == ASSISTANT))
    other = (m.role != TOOL) & (m.role != FUNCTION)
    last_other = np.maximum.accumulate(np.where(other, np.arange(len(m.role)), -1))
    for i in tools.tolist():
        low = int(m.offsets[owner[i]])
        if m.has_call_id[i]:
            earlier = callers[np.searchsorted(callers, low) : np.searchsorted(callers, i)]
            if not any(m.answers(int(a), i) for a in earlier[::-1]):
                yield i
        else:
            j = int(last_other[i])
            if j < low or m.role[j] != ASSISTANT or not m.calls[j]:
                yield i


class AcrossRows:
    """What is seen only over all rows of a path: D701, D702, R503. Keeps an id and a hash a rollout."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}
        self._generations: dict[tuple[str, int, int], str | None] = {}
        self._groups: dict[str, _Group] = {}

    def add(self, e: Evidence, file: str | None = None) -> list[Violation]:
        """The duplicates in this batch; its groups are remembered for ``finish``."""
        found = []
        at = _Places(e)
        ids = list(e.rollout_id)
        groups = list(e.group_id) if e.group_id is not None else [None] * e.n
        bounds = e.gen_offsets[e.turn_offsets].tolist()
        gen = byte_view(e.gen)
        for r in range(e.n):
            rollout_id, group = ids[r], groups[r]
            here = f"{file or ''} row {e.rows[r]}".strip()
            if rollout_id is not None:
                before = self._seen.setdefault(rollout_id, here)
                if before != here:
                    found.append(at.rollout(r, "D701", detail=f"first seen at {before}"))
                    continue
            if group is None:
                continue
            if bounds[r + 1] > bounds[r]:
                key = (
                    group,
                    xxhash.xxh3_64_intdigest(gen[bounds[r] * 4 : bounds[r + 1] * 4]),
                    bounds[r + 1] - bounds[r],
                )
                if key in self._generations:
                    found.append(at.rollout(r, "D702", detail=f"same tokens as {self._generations[key]}"))
                else:
                    self._generations[key] = rollout_id or here
            if e.reward is not None and e.reward_null is not None and not e.reward_null[r]:
                self.reward(group, float(e.reward[r]), int(e.rows[r]), rollout_id, file)
        return found

    def reward(self, group: str, reward: float, row: int, rollout_id: str | None, file: str | None) -> None:
        """Remember one reward of a group."""
        known = self._groups.get(group)
        if known is None:
            self._groups[group] = _Group(row, rollout_id, file, reward)
        else:
            known.n += 1
            known.varies = known.varies or reward != known.reward

    def finish(self) -> list[Violation]:
        """R503 for every group of two or more whose rewards are all equal, at its first rollout."""
        return [
            Violation(
                "R503", g.row, g.rollout_id, got=f"{g.reward:g} for all {g.n}", detail=f"group {name}", file=g.file
            )
            for name, g in self._groups.items()
            if g.n > 1 and not g.varies and np.isfinite(g.reward)
        ]


class _Group:
    __slots__ = ("file", "n", "reward", "rollout_id", "row", "varies")

    def __init__(self, row: int, rollout_id: str | None, file: str | None, reward: float) -> None:
        self.row, self.rollout_id, self.file, self.reward = row, rollout_id, file, reward
        self.n, self.varies = 1, False
