"""The checks of one batch of rollouts: arrays in, violations out; and what no consumer of token data may take.

Invariants: no Python loop over tokens; every fault is found at its exact row, turn and position; a batch is checked
alone, and what needs the whole file (duplicates, groups) is kept by ``AcrossRows`` in arrays of hashes and ids only.
Ids outside the vocabulary (T206) and log-probabilities that are missing (L301), not finite (L302) or positive (L303)
are refused wherever token data is used, whatever its source; the first fault is named with its code, file, rollout and
turn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.errors import RefusedError
from gymdata.rollouts import breaks
from gymdata.rollouts.breaks import Reader
from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE
from gymdata.rollouts.ragged import Array, Ints, Ragged, first_like
from gymdata.rollouts.turn_columns import ASSISTANT, SYSTEM, Evidence, Messages, TurnColumns
from gymdata.rollouts.turns import turn_digest
from gymdata.rollouts.violations import Violation

if TYPE_CHECKING:
    import pyarrow as pa

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

    ``reader`` loads the tokenizer, and is called only when a turn breaks.
    """
    found = [
        *structure(e),
        *storage(e, digests=digests, reader=reader),
        *tokens(e, vocab_size),
        *log_probs(e),
        *weights(e),
        *rewards(e, reward_named),
    ]
    if e.messages is not None:
        found += messages(e, e.messages)
    found.sort(key=lambda v: (v.row, -1 if v.turn is None else v.turn, v.code, v.position or 0))
    return found


class _Places:
    """Identifies rows and turns of a batch in violations."""

    def __init__(self, e: Evidence) -> None:
        self.e = e

    def rollout(self, r: int, code: str, **more: object) -> Violation:
        return Violation(code, int(self.e.rows[r]), self.e.rollout_id[r], **more)  # type: ignore[arg-type]  # fields by name

    def turn(self, k: int, code: str, **more: object) -> Violation:
        return self.rollout(int(self.e.turns.rollout[k]), code, turn=int(self.e.turns.number[k]), **more)


def structure(e: Evidence) -> Iterator[Violation]:
    """S102 where a count column disagrees with what it counts; T205 for rollouts without turns."""
    at, turns = _Places(e), e.turns
    per_rollout = np.diff(turns.offsets)
    real = {
        "n_turns": per_rollout,
        "n_context_tokens": turns.by_rollout(turns.delta).lengths,
        "n_generated_tokens": turns.by_rollout(turns.generation).lengths,
    }
    for name, recorded in e.counts.items():
        for r in np.flatnonzero(recorded != real[name]):
            yield at.rollout(
                int(r), "S102", expected=str(real[name][r]), got=str(recorded[r]), detail=f"{name} disagrees with turns"
            )
    for r in np.flatnonzero(per_rollout == 0):
        yield at.rollout(int(r), "T205", detail="the rollout has no turns")


def storage(e: Evidence, *, digests: bool = True, reader: Reader | None = None) -> Iterator[Violation]:
    """T209, T210, and how each turn relates to the turns before it: T200 to T204, T208, T211."""
    at, t = _Places(e), e.turns
    bad_parent = (t.parent < -1) | (t.parent >= t.number)
    bad_prefix = ~bad_parent & ((t.prefix < 0) | (t.prefix > t.held))
    for k in np.flatnonzero(bad_parent):
        yield at.turn(k, "T210", expected=f"parent -1 to {t.number[k] - 1}", got=f"parent {t.parent[k]}")
    blind = _below_unusable(bad_parent | bad_prefix, t.above)
    for k in np.flatnonzero(bad_prefix & ~blind):
        yield at.turn(k, "T210", expected=f"prefix_length 0 to {t.held[k]}", got=f"prefix_length {t.prefix[k]}")
    if digests:
        for k in _changed(t):
            if not bad_parent[k]:
                yield at.turn(k, "T209", detail="content and digest disagree: one of them changed after collection")
    odd = ~bad_parent & ~bad_prefix & (t.parent >= 0) & (t.prefix < t.held)
    # The chain below an unusable turn cannot be rebuilt, so relations are not checked there.
    for r in np.flatnonzero((t.count(odd) > 0) & (t.count(bad_parent | bad_prefix) == 0)).tolist():
        for found in breaks.relations(t.structs(r), reader):
            yield at.rollout(r, found.code, **found.place())


def _changed(t: TurnColumns) -> Iterator[int]:
    """Turns whose content does not match their digest over their parent's stored one."""
    real = t.digests()
    wrong = np.flatnonzero(real != t.digest).tolist()
    for k in wrong:
        above = int(t.above[k])
        if above >= 0 and real[above] != t.digest[above]:
            # Where only the parent's digest was changed, this turn fits the one that the parent should have.
            lists = t.delta[k], t.generation[k], t.logprobs[k]
            if turn_digest(int(real[above]), int(t.prefix[k]), *lists) == t.digest[k]:
                continue
        yield k


def _below_unusable(bad: npt.NDArray[np.bool_], above: Ints) -> npt.NDArray[np.bool_]:
    """(turns,) below one that cannot be expanded: their own lengths cannot be judged."""
    blind = np.zeros(len(bad), np.bool_)
    if bad.any():
        # Parents precede their children, so one pass in order reaches every descendant.
        for k in np.flatnonzero(above >= 0).tolist():
            blind[k] = bad[above[k]] or blind[above[k]]
    return blind


def tokens(e: Evidence, vocab_size: int | None) -> Iterator[Violation]:
    """T205, T206, T212, T213."""
    at, t = _Places(e), e.turns
    generated = t.generation.lengths
    prompt = t.prefix + t.delta.lengths
    for k in np.flatnonzero(prompt <= 0):
        what = "prompt and generation ids" if generated[k] == 0 else "prompt ids"
        yield at.turn(k, "T205", detail=f"no {what}")
    for k in np.flatnonzero((generated == 0) & (prompt > 0)):
        yield at.turn(k, "T212")
    for k in np.flatnonzero(t.rendered) if t.rendered is not None else ():
        yield at.turn(k, "T213")
    limit = vocab_size if vocab_size is not None else INT32_MAX + 1
    for ids, before, what in ((t.delta, t.prefix, "prompt"), (t.generation, np.zeros(len(t), int), "generation")):
        for place in outside(ids.values, limit):
            k, position = ids.locate(place)
            more = {"expected": f"0 to {limit - 1}", "got": str(ids.values[place]), "detail": f"in the {what}"}
            yield at.turn(k, "T206", position=position + int(before[k]), **more)


def weights(e: Evidence) -> Iterator[Violation]:
    """T214 where spans of weight versions do not cover the generation, T215 where several weights sampled it."""
    at, t = _Places(e), e.turns
    if t.weights is None:
        return
    starts, ends = t.weights.start, t.weights.end
    for k in np.flatnonzero(starts.lengths > 0).tolist():
        begin, end, n = starts[k], ends[k], int(t.generation.lengths[k])
        expected = np.append(0, end[:-1])
        if end[-1] != n or (begin != expected).any() or (end < begin).any():
            got = ", ".join(f"{a}–{b}" for a, b in zip(begin.tolist(), end.tolist(), strict=True))
            yield at.turn(k, "T214", expected=f"spans that follow each other from 0 to {n}", got=got)
            continue
        first = int(starts.offsets[k])
        versions = [str(t.weights.version[place]) for place in range(first, first + len(begin))]
        if len(set(versions)) > 1:
            yield at.turn(k, "T215", position=int(begin[1]), got=", then ".join(versions))


def outside(ids: np.ndarray, limit: int) -> Ints:
    """Where ``ids`` are negative or not below ``limit``; one pass when all is well."""
    # With a null the ids are floats, and NaN is out of range; as unsigned numbers, negative ids exceed every limit.
    if not len(ids) or (ids.dtype == np.int32 and ids.view(np.uint32).max() < limit):
        return np.empty(0, np.int64)
    return np.flatnonzero(~((ids >= 0) & (ids < limit)))


def log_probs(e: Evidence) -> Iterator[Violation]:
    """L301, L302, L303."""
    at, t = _Places(e), e.turns
    generated, given = t.generation.lengths, t.logprobs.lengths
    for k in np.flatnonzero(generated != given):
        yield at.turn(
            k, "L301", expected=str(generated[k]), got=str(given[k]), detail="one logprob per generated token"
        )
    for place, code in odd_log_probs(unless_rendered(t.logprobs, t.rendered).values):
        k, position = t.logprobs.locate(place)
        wanted = "a finite number" if code == "L302" else "at most 0"
        yield at.turn(k, code, position=position, expected=wanted, got=str(t.logprobs.values[place]))


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
    n_turns = np.diff(e.turns.offsets)
    leads = np.zeros(n + 1, np.bool_)
    leads[starts] = True
    follows = ~leads[:n]
    before = np.concatenate((m.role[:1], m.role[:-1]))

    def place(i: int, code: str, **more: object) -> Violation:
        return at.rollout(int(owner[i]), code, detail=f"message {i - m.offsets[owner[i]]}", **more)

    for i in np.flatnonzero(follows & (m.role == SYSTEM) & (before != SYSTEM)):
        yield place(i, "M401")
    for i in np.flatnonzero(follows & m.from_assistant & (before == ASSISTANT)):
        yield place(i, "M402", turn=int(m.turn[i]) if m.turn[i] >= 0 else None)
    speaks = np.bincount(owner[m.from_assistant], minlength=e.n)
    # A limit can cut a rollout before its first token; that is T212, and no fault of the messages.
    cut_short = (n_turns > 0) & (e.turns.by_rollout(e.turns.generation).lengths == 0)
    for r in np.flatnonzero((speaks == 0) & ~cut_short):
        yield at.rollout(int(r), "M404")
    for i in _unanswered(m, owner):
        yield place(i, "M403")
    assistant = np.flatnonzero(m.from_assistant & (m.turn >= 0))
    if len(assistant):
        falls = np.zeros(len(assistant), np.bool_)
        falls[1:] = (owner[assistant[1:]] == owner[assistant[:-1]]) & (m.turn[assistant[1:]] < m.turn[assistant[:-1]])
        beyond = m.turn[assistant] >= n_turns[owner[assistant]]
        for i in assistant[falls | beyond]:
            yield place(i, "T208", turn=int(m.turn[i]), got=f"turn {m.turn[i]}", expected="turns in rising order")


def _unanswered(m: Messages, owner: Ints) -> Iterator[int]:
    """Tool messages that answer no earlier call of their rollout."""
    tools = np.flatnonzero(m.tool_results & ~m.surely_answered)
    if not len(tools):
        return
    callers = np.flatnonzero(m.calls & m.from_assistant)
    other = ~m.tool_results
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
    """Checks that need all rows of a path: D701, D702, R503. Keeps 150 bytes per rollout, in arrays, besides the
    ids."""

    def __init__(self) -> None:
        self._ids, self._groups = _Names(), _Names()
        self._files: list[str] = []
        #: Per batch: row, file, hash and length of the generations, reward, whether there is one.
        self._batches: list[tuple[Array, ...]] = []

    def add(self, e: Evidence, file: str | None = None) -> None:
        """Remember a batch for ``finish``."""
        file = file or ""
        if file not in self._files[-1:]:
            self._files.append(file)
        self._ids.add(e.rollout_id)
        self._groups.add(e.group_id if e.group_id is not None else [None] * e.n)
        generated = e.turns.by_rollout(e.turns.generation)
        known = np.zeros(e.n, np.bool_) if e.reward is None or e.reward_null is None else ~e.reward_null
        reward = np.zeros(e.n) if e.reward is None else np.array(e.reward, np.float64)
        of_file = np.full(e.n, len(self._files) - 1, np.int32)
        self._batches.append((np.array(e.rows), of_file, generated.hashes(), generated.lengths, reward, known))

    def append(self, other: AcrossRows) -> None:
        """Append the data of another, of the rows that follow."""
        if not other._batches:
            return
        first = len(self._files) - (other._files[0] in self._files[-1:])
        self._files[first:] = other._files
        self._ids.append(other._ids)
        self._groups.append(other._groups)
        self._batches += ((row, of_file + first, *rest) for row, of_file, *rest in other._batches)

    def finish(self) -> list[Violation]:
        """The duplicates, and R503 for every group of two or more whose rewards are all equal, at its first rollout."""
        if not self._batches:
            return []
        row, of_file, hashes, lengths, reward, known = map(np.concatenate, zip(*self._batches, strict=True))
        self._batches.clear()

        def at(r: int, code: str, **more: Any) -> Violation:
            return Violation(code, int(row[r]), self._ids[r], file=self._files[of_file[r]] or None, **more)

        def place(r: int) -> str:
            return f"{self._files[of_file[r]]} row {row[r]}".strip()

        first = np.where(self._ids.missing, np.arange(len(row)), first_like(*self._ids.keys))
        copies = np.flatnonzero(first != np.arange(len(row)))
        found = [at(r, "D701", detail=f"first seen at {place(int(first[r]))}") for r in copies.tolist()]
        counts = (first == np.arange(len(row))) & ~self._groups.missing
        rows = np.flatnonzero(counts & (lengths > 0))
        keys = [key[rows] for key in self._groups.keys]
        for r, twin in _later(rows, first_like(*keys, hashes[rows], lengths[rows])):
            found.append(at(r, "D702", detail=f"same tokens as {self._ids[twin] or place(twin)}"))
        rows = np.flatnonzero(counts & known)
        group, inverse = np.unique(first_like(*(key[rows] for key in self._groups.keys)), return_inverse=True)
        leads, n = rows[group], np.bincount(inverse)
        varies = np.bincount(inverse, weights=reward[rows] != reward[leads][inverse]) > 0
        for g in np.flatnonzero((n > 1) & ~varies & np.isfinite(reward[leads])).tolist():
            r = int(leads[g])
            found.append(at(r, "R503", got=f"{reward[r]:g} for all {n[g]}", detail=f"group {self._groups[r]}"))
        return found


def _later(rows: Ints, first: Ints) -> Iterator[tuple[int, int]]:
    """(row, the one before that it is like) for those of ``rows`` that are like an earlier one."""
    for k in np.flatnonzero(first != np.arange(len(rows))).tolist():
        yield int(rows[k]), int(rows[first[k]])


class _Names:
    """A text or None a row: its UTF-8 and 16 bytes that no other text has."""

    def __init__(self) -> None:
        self._texts: list[tuple[bytes, npt.NDArray[np.int32]]] = []
        self._keys: list[Array] = []
        self._begin = [0]

    def add(self, texts: Iterable[str | None]) -> None:
        """The names of the next rows."""
        encoded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
        lengths = np.fromiter((-1 if text is None else len(text) for text in encoded), np.int32, len(encoded))
        self._texts.append((b"".join(text or b"" for text in encoded), lengths))
        digests = b"".join(xxhash.xxh3_128_digest(text or b"") for text in encoded)
        self._keys.append(np.frombuffer(digests, np.uint64).reshape(-1, 2))
        self._begin.append(self._begin[-1] + len(encoded))

    def append(self, other: _Names) -> None:
        """The names of the rows that follow."""
        self._texts += other._texts
        self._keys += other._keys
        last = self._begin[-1]
        self._begin += (last + begin for begin in other._begin[1:])

    @property
    def keys(self) -> tuple[Array, Array]:
        """Two numbers per row, both equal for equal texts; meaningless for None."""
        whole = np.concatenate(self._keys)
        self._keys = [whole]
        return whole[:, 0], whole[:, 1]

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        return np.concatenate([lengths for _, lengths in self._texts]) < 0

    def __getitem__(self, row: int) -> str | None:
        part = bisect_right(self._begin, row) - 1
        text, lengths = self._texts[part]
        place = row - self._begin[part]
        if lengths[place] < 0:
            return None
        end = int(np.maximum(lengths[: place + 1], 0).sum(dtype=np.int64))
        return text[end - int(lengths[place]) : end].decode("utf-8", "surrogatepass")


_HINT = (
    "`gymdata validate` lists every such place, and `gymdata validate --fix drop -o OUT` leaves those rollouts out; "
    "collect again what should not be lost"
)


class Lists(NamedTuple):
    """``name``: what the lists are, for messages."""

    name: str
    lists: Ragged


def refuse_unsound_turns(
    turns: pa.ListArray | TurnColumns,
    rollout_ids: pa.Array,
    where: str = "",
    vocab_size: int | None = None,
    *,
    unknown: bool = False,
    rendered: bool = False,
) -> None:
    """``refuse_unsound`` for a batch of the rollouts column ``turns`` and its ``rollout_ids``; ``where``: its file.

    ``unknown``: turns all of whose log-probabilities are NaN pass; imports mark missing log-probabilities so.
    ``rendered``: turns whose ids were rendered from text pass, without log-probabilities; else they are refused (T213).
    """
    flat = turns if isinstance(turns, TurnColumns) else TurnColumns.of(turns)
    if flat.rendered is not None and not rendered:
        found = np.flatnonzero(flat.rendered)
        name = rollout_ids[int(flat.rollout[found[0]])].as_py()
        raise rendered_ids(where, f"rollout {name}, turn {flat.number[found[0]]}", f"{len(found):,} turns")

    logprobs = unless_rendered(flat.logprobs, flat.rendered)

    def named(turn: int) -> str:
        return f"rollout {rollout_ids[int(flat.rollout[turn])].as_py()}, turn {flat.number[turn]}"

    refuse_unsound(
        (Lists("the prompt", flat.delta), Lists("the generation", flat.generation)),
        Lists("generated token", _without_unknown(logprobs) if unknown else logprobs),
        named,
        where,
        vocab_size,
    )


def refuse_unsound_rows(batch: pa.RecordBatch, where: str = "", vocab_size: int | None = None) -> None:
    """The same for whole rows of the rollouts or the pairs table, but with unknown log-probabilities (NaN in a whole
    list) allowed."""
    if "turns" in batch.schema.names:
        ids = batch.column("rollout_id")
        refuse_unsound_turns(batch.column("turns"), ids, where, vocab_size, unknown=True, rendered=True)
        return
    prompt = Lists("prompt_ids", Ragged.of(batch.column("prompt_ids")))
    for side in ("chosen", "rejected"):
        ids, logprobs = (Ragged.of(batch.column(f"{side}_{what}")) for what in ("ids", "logprobs"))

        def named(row: int) -> str:
            return f"pair {batch.column('pair_id')[row].as_py()}"

        given = Lists(f"{side}_logprobs", _without_unknown(unless_rendered(logprobs, is_rendered(batch))))
        refuse_unsound((prompt, Lists(f"{side}_ids", ids)), given, named, where, vocab_size)


def rendered_ids(where: str, name: str, many: str) -> RefusedError:
    """T213, raised where rendered ids were not allowed: ``name`` has some, ``many`` in all."""
    return RefusedError(
        f"{where}{': ' if where else ''}{name}: ids rendered from text, not sampled ({many} in this part of the data)",
        code="T213",
        hint="`gymdata pairs`, train-sft, train-dpo, train-kto and train-reward take them with --allow-rendered; "
        "`gymdata experience` and train-rl take sampled ids only",
    )


def unless_rendered(logprobs: Ragged, rendered: npt.NDArray[np.bool_] | None) -> Ragged:
    """``logprobs``, 0 for NaN in the lists whose ids were ``rendered`` (None: none were): those have no log-probability."""
    if rendered is None or not rendered.any():
        return logprobs
    return logprobs.like(np.where(logprobs.spread(rendered) & np.isnan(logprobs.values), 0.0, logprobs.values))


def is_rendered(pairs: pa.RecordBatch | pa.Table) -> npt.NDArray[np.bool_]:
    """(n,) the pairs with ids rendered from text."""
    if "rendered" not in pairs.schema.names:
        return np.zeros(pairs.num_rows, np.bool_)
    return np.asarray(pairs.column("rendered").fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _without_unknown(lists: Ragged) -> Ragged:
    """0 in the lists that hold nothing but NaN."""
    # The minimum is NaN when any is.
    if not len(lists.values) or not np.isnan(lists.values.min()):
        return lists
    unknown = np.isnan(lists.values)
    return lists.like(np.where(lists.spread(lists.sums(unknown) == lists.lengths), 0.0, lists.values))


def refuse_unsound(
    ids: Sequence[Lists],
    log_probs: Lists,
    named: Callable[[int], str],
    where: str = "",
    vocab_size: int | None = None,
) -> None:
    """Raises RefusedError (T206, L301, L302, L303) for the first fault of each kind, in this order.

    ``ids`` must be from 0 to ``vocab_size`` − 1 (None: any int32); ``log_probs`` has as many values in each list as
    the last of ``ids``, all of them finite and at most 0 (``POSITIVE_TOLERANCE`` is for rounding). ``named(k)``: what
    to call list k.
    """
    limit = vocab_size if vocab_size is not None else INT32_MAX + 1
    for name, lists in ids:
        found = outside(lists.values, limit)
        if len(found):
            k, position = lists.locate(found[0])
            _refuse("T206", where, named(k), f"token id {lists.values[found[0]]} at position {position} of {name}, "
                    f"expected 0 to {limit - 1}", len(found))  # fmt: skip
    given, expected = log_probs.lists.lengths, ids[-1].lists.lengths
    uneven = np.flatnonzero(given != expected)
    if len(uneven):
        k = int(uneven[0])
        _refuse("L301", where, named(k), f"{given[k]:,} log-probabilities for {expected[k]:,} tokens, expected one for each "
                f"{log_probs.name}", len(uneven))  # fmt: skip
    odd = odd_log_probs(log_probs.lists.values)
    if odd:
        at, code = odd[0]
        k, position = log_probs.lists.locate(at)
        wanted = "a finite number" if code == "L302" else f"at most 0 (rounding: {POSITIVE_TOLERANCE:g})"
        _refuse(code, where, named(k), f"a log-probability of {log_probs.lists.values[at]} at position {position}, expected "
                f"{wanted}", sum(other == code for _, other in odd))  # fmt: skip


def _refuse(code: str, where: str, name: str, what: str, n: int) -> None:
    more = f" ({n:,} such places in this part of the data)" if n > 1 else ""
    raise RefusedError(f"{where}{': ' if where else ''}{name}: {what}{more}", code=code, hint=_HINT)
