"""Turns of many rollouts as flat numpy arrays, whole prompts for a column of them, and the columns that checks read.

Invariants: turn t of rollout r is number ``offsets[r] + t`` in every array of turns; arrays from Arrow share its memory;
prompts are those of ``gymdata.rollouts.turns.expand_prompts``. A column that the source lacks is None and the checks that
need it are skipped. The loops are over turns, never over tokens. Importing this needs no pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.errors import DataError, json_value
from gymdata.rollouts.failures import failures_in, short_reason
from gymdata.rollouts.messages import ROLES, SPELLED_CALL, TOOL_ERROR, loads
from gymdata.rollouts.ragged import Ints, Ragged, byte_view, list_parts, offsets_of
from gymdata.rollouts.turns import Turn, turn_digest

if TYPE_CHECKING:
    import pyarrow as pa

Texts = Sequence[str | None]

#: Positions in ROLES.
SYSTEM, USER, ASSISTANT, TOOL, FUNCTION = range(5)
#: How a rollout ends (a failed attempt is none), and a generation.
STATUS, FINISH_REASONS = ("completed", "truncated"), ("stop", "length", "repetition", "abort")
#: Columns that hold JSON text, of what.
_JSON = {"tools": list, "task": dict, "extra": dict, "tool_calls": list}
#: Offsets of an Arrow list are int32, so one chunk of prompts stays below this many tokens.
CHUNK_TOKENS = 1 << 30


@dataclass(frozen=True)
class WeightSpans:
    """Which weights sampled which tokens, one list per turn, empty if unknown; ``version`` has one entry per span."""

    start: Ragged
    end: Ragged
    version: Texts

    @classmethod
    def of(cls, column: Any) -> WeightSpans | None:
        """The column of turns, None where no turn has any."""
        if column is None or column.null_count == len(column):
            return None
        offsets, spans = list_parts(column)
        start, end = (Ragged(_numbers(spans.field(name)), offsets) for name in ("start", "end"))
        return cls(start, end, ArrowTexts(spans.field("version")))


@dataclass(frozen=True)
class TurnColumns:
    """The turns of n rollouts. ``offsets`` (n + 1,): rollout r has turns ``offsets[r]`` to ``offsets[r + 1]``; all else has
    one entry per turn, as the fields of ``Turn``; ``agent`` is None where no turn names one, ``reward`` NaN without one,
    ``rendered`` None where all ids were sampled, ``weights`` where no engine named them."""

    offsets: Ints
    parent: npt.NDArray[np.int32]
    prefix: npt.NDArray[np.int32]
    digest: npt.NDArray[np.int64]
    delta: Ragged
    generation: Ragged
    logprobs: Ragged
    agent: Texts | None = None
    reward: npt.NDArray[np.float64] | None = None
    rendered: npt.NDArray[np.bool_] | None = None
    weights: WeightSpans | None = None

    @classmethod
    def of(cls, turns: pa.ListArray) -> TurnColumns:
        """The turns column of a rollouts table, one chunk of it; fields that checks do without may be missing."""
        offsets, struct = list_parts(turns)
        parts = {f.name: struct.field(f.name) for f in struct.type}
        agent, reward, rendered = (parts.get(name) for name in ("agent", "reward", "rendered"))
        return cls(
            offsets=offsets,
            parent=_numbers(parts["parent"]),
            prefix=_numbers(parts["prefix_length"]),
            digest=_numbers(parts["digest"]),
            delta=Ragged.of(parts["prompt_delta_ids"]),
            generation=Ragged.of(parts["generation_token_ids"]),
            logprobs=Ragged.of(parts["generation_log_probs"]),
            agent=None if agent is None or agent.null_count == len(struct) else ArrowTexts(agent),
            reward=None if reward is None else reward.to_numpy(zero_copy_only=False),
            rendered=rendered.fill_null(False).to_numpy(zero_copy_only=False)
            if rendered and rendered.true_count
            else None,
            weights=WeightSpans.of(parts.get("weight_versions")),
        )

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def rollout(self) -> Ints:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @cached_property
    def number(self) -> Ints:
        """Each turn's number in its rollout."""
        return np.arange(len(self)) - self.offsets[self.rollout]

    @cached_property
    def above(self) -> Ints:
        """The parent turn of each turn; -1 for none, or for an invalid one."""
        good = (self.parent >= 0) & (self.parent < self.number)
        return np.where(good, self.parent + self.offsets[self.rollout], -1)

    @cached_property
    def max_prefix(self) -> Ints:
        """Tokens in the prompt ++ generation of each one's parent: what ``prefix`` can be at most."""
        lengths = np.append(self.prefix + self.delta.lengths + self.generation.lengths, 0)
        return np.asarray(lengths[self.above])

    def by_rollout(self, lists: Ragged) -> Ragged:
        """Lists of the turns joined to one list per rollout."""
        return lists.grouped(self.offsets)

    def count(self, turns: npt.NDArray[np.bool_]) -> Ints:
        """How many of a rollout's turns are true in ``turns``."""
        return np.bincount(self.rollout[turns], minlength=len(self.offsets) - 1)

    def one_chain(self) -> npt.NDArray[np.bool_]:
        """(n,) whether a rollout has turns, and each continues the one before, first prompt to last token."""
        before = offsets_of(self.delta.lengths + self.generation.lengths)[:-1]
        context = before - before[self.offsets[self.rollout]]
        good = (self.parent == self.number - 1) & (self.prefix == context)
        return np.asarray((self.count(~good) == 0) & (np.diff(self.offsets) > 0))

    def has_ids(self) -> npt.NDArray[np.bool_]:
        """(n,) whether a rollout has a turn with ids of its prompt and its generation."""
        return self.count((self.prefix + self.delta.lengths > 0) & (self.generation.lengths > 0)) > 0

    def has_rendered(self) -> npt.NDArray[np.bool_]:
        """(n,) whether a rollout has a turn whose ids were rendered from text."""
        return self.count(np.zeros(len(self), np.bool_) if self.rendered is None else self.rendered) > 0

    def digests(self) -> Ints:
        """The digest of every turn over its parent's stored digest, as ``gymdata.rollouts.turns.turn_digest`` defines it."""
        head = np.zeros(len(self), np.dtype([("digest", "<i8"), ("prefix", "<i4")]))
        head["digest"], head["prefix"] = np.append(self.digest, 0)[self.above], self.prefix
        digest = xxhash.xxh3_64_intdigest
        lists = (self.delta, self.generation, self.logprobs)
        heads, delta, gen, lp = (byte_view(a) for a in (head, *(part.values for part in lists)))
        bounds = zip(*((part.offsets * 4).tolist() for part in lists), strict=True)
        d0, g0, l0 = next(bounds)
        k = 0
        out = []
        for d1, g1, l1 in bounds:
            out.append(digest(lp[l0:l1], digest(gen[g0:g1], digest(delta[d0:d1], digest(heads[k : k + 12])))))
            d0, g0, l0 = d1, g1, l1
            k += 12
        return np.array(out, np.uint64).view(np.int64)

    def structs(self, rollout: int) -> list[Turn]:
        """The turns of one rollout; their lists are views of the batch."""
        return [
            {
                "parent": int(self.parent[k]),
                "prefix_length": int(self.prefix[k]),
                "prompt_delta_ids": self.delta[k].astype(np.int32, copy=False),
                "generation_token_ids": self.generation[k].astype(np.int32, copy=False),
                "generation_log_probs": self.logprobs[k],
                "digest": int(self.digest[k]),
                "agent": self.agent[k] if self.agent is not None else None,
            }
            for k in range(int(self.offsets[rollout]), int(self.offsets[rollout + 1]))
        ]

    def altered(self, digests: bool = True) -> Iterator[tuple[str, int, str, str]]:
        """(code, turn, expected, got) of every turn that cannot be expanded (T210), and then, with ``digests``, of every one
        whose content does not match its digest (T209)."""
        bad_parent = (self.parent < -1) | (self.parent >= self.number)
        bad_prefix = ~bad_parent & ((self.prefix < 0) | (self.prefix > self.max_prefix))
        for k in np.flatnonzero(bad_parent).tolist():
            yield "T210", k, f"parent -1 to {self.number[k] - 1}", f"parent {self.parent[k]}"
        # Lengths of turns below one that cannot be expanded cannot be judged.
        bad, blind = bad_parent | bad_prefix, np.zeros(len(self), np.bool_)
        if bad.any():
            # Parents precede their children, so one pass in order reaches every descendant.
            for k in np.flatnonzero(self.above >= 0).tolist():
                blind[k] = bad[self.above[k]] or blind[self.above[k]]
        for k in np.flatnonzero(bad_prefix & ~blind).tolist():
            yield "T210", k, f"prefix_length 0 to {self.max_prefix[k]}", f"prefix_length {self.prefix[k]}"
        real = self.digests() if digests else self.digest
        for k in np.flatnonzero((real != self.digest) & ~bad_parent).tolist():
            above, lists = int(self.above[k]), (self.delta[k], self.generation[k], self.logprobs[k])
            # Where only the parent's digest was changed, this turn fits the one that the parent should have.
            parent_changed = above >= 0 and real[above] != self.digest[above]
            if not parent_changed or turn_digest(int(real[above]), int(self.prefix[k]), *lists) != self.digest[k]:
                yield "T209", k, f"digest {real[k]}", f"digest {self.digest[k]}"

    def refuse_altered(self, rollout_ids: pa.Array | pa.ChunkedArray) -> None:
        """Raises DataError naming the rollout and the turn for the first of ``altered``."""
        for code, k, expected, got in self.altered():
            content = "its content does not match its digest"
            problem = content if code == "T209" else f"got {got}, expected {expected}"
            raise DataError.altered(code, self.name_of(k, rollout_ids), problem)

    def name_of(self, turn: int, rollout_ids: pa.Array | pa.ChunkedArray) -> str:
        """What messages call a turn."""
        return f"rollout {rollout_ids[int(self.rollout[turn])].as_py()}, turn {self.number[turn]}"

    def prompts(self) -> Ragged:
        """The whole prompt of each turn. Parents precede their children, so a parent's prompt can be copied."""
        lengths = self.prefix + self.delta.lengths
        offsets = offsets_of(lengths)
        out = np.empty(int(offsets[-1]), np.int32)
        delta_at, gen_at, begins, size = (
            a.tolist() for a in (self.delta.offsets, self.generation.offsets, offsets, lengths)
        )
        delta, generation = self.delta.values, self.generation.values
        for k, (parent, shared) in enumerate(zip(self.above.tolist(), self.prefix.tolist(), strict=True)):
            start = begins[k]
            if shared:
                parent_size = size[parent]
                n_shared = min(shared, parent_size)
                out[start : start + n_shared] = out[begins[parent] : begins[parent] + n_shared]
                if shared > parent_size:
                    begin = gen_at[parent]
                    out[start + parent_size : start + shared] = generation[begin : begin + shared - parent_size]
            out[start + shared : begins[k + 1]] = delta[delta_at[k] : delta_at[k + 1]]
        return Ragged(out, offsets)


def with_prompts(turns: pa.ChunkedArray, rollout_ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """The turns column with ``prompt_token_ids`` (list<int32>) as a last field of each turn.

    ``turns`` has the schema's type. Raises DataError naming the rollout and the turn when a delta cannot be expanded
    (T210) or a digest does not match (T209).
    """
    import pyarrow as pa

    kind = prompted(turns.type)
    chunks = []
    start = 0
    for chunk in turns.chunks:
        ids = rollout_ids.slice(start, len(chunk))
        start += len(chunk)
        batch, first = TurnColumns.of(chunk), 0
        before = offsets_of(batch.prefix.astype(np.int64) + batch.delta.lengths)[batch.offsets]
        while first < len(chunk):
            # Rows whose prompts fit one chunk.
            end = int(np.searchsorted(before, before[first] + CHUNK_TOKENS, side="right")) - 1
            end = min(max(end, first + 1), len(chunk))
            piece = chunk.slice(first, end - first)
            columns = TurnColumns.of(piece)
            columns.refuse_altered(ids.slice(first, end - first))
            first = end
            fields = [*list_parts(piece)[1].flatten(), columns.prompts().to_arrow()]
            struct = pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
            mask = piece.is_null() if piece.null_count else None
            chunks.append(pa.ListArray.from_arrays(pa.array(columns.offsets, pa.int32()), struct, type=kind, mask=mask))
    return pa.chunked_array(chunks, kind)


def prompted(kind: pa.ListType) -> pa.ListType:
    """The type of a turns column with prompts."""
    import pyarrow as pa

    fields = [*kind.value_type, pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False)]
    return pa.list_(pa.struct(fields))


@dataclass(slots=True)
class Messages:
    """Messages of a batch. ``role`` indexes ROLES (-1: another); ``turn`` is -1 where none is named; ``calls`` is True where
    the message has tool calls."""

    offsets: Ints
    role: npt.NDArray[np.int8]
    turn: npt.NDArray[np.int32]
    calls: npt.NDArray[np.bool_]
    #: True where there is text or reasoning, more than white space.
    says: npt.NDArray[np.bool_]
    #: True where a tool's result is an error message.
    fails: npt.NDArray[np.bool_]
    #: Finds the assistant's messages whose text contains a tool call; only called where that matters.
    spelled_calls: Callable[[], list[int]]
    #: Tool results that answer no earlier call of their rollout, each with its call's id, if it names one, for messages.
    unanswered: Mapping[int, str | None]
    #: Of messages that were made of items: the number of the first one, by which the message is named.
    items: Ints | None = None

    def named(self, i: int, rollout: int) -> str:
        """What message ``i``, of that rollout, is called."""
        return f"message {i - self.offsets[rollout]}" if self.items is None else f"item {self.items[i]}"

    @property
    def from_assistant(self) -> npt.NDArray[np.bool_]:
        return np.equal(self.role, ASSISTANT)

    @property
    def tool_results(self) -> npt.NDArray[np.bool_]:
        return np.isin(self.role, (TOOL, FUNCTION))


#: As a time, what numpy calls NaT.
UNKNOWN = -(2**63)


@dataclass(slots=True)
class Evidence:
    """The columns of a batch of n rollouts that checks read, each of shape (n,) but for turns and messages."""

    rows: Ints
    turns: TurnColumns
    rollout_id: Texts
    #: The name of the file that ``rows`` count in.
    file: str | None = None
    group_id: Texts | None = None
    messages: Messages | None = None
    reward: npt.NDArray[np.float64] | None = None
    reward_null: npt.NDArray[np.bool_] | None = None
    #: Named reward parts: (n,), NaN where a rollout has none.
    parts: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    #: (T,) whether a limit cut the generation, and where that is known; None: everywhere.
    cut: npt.NDArray[np.bool_] | None = None
    tells_cut: npt.NDArray[np.bool_] | None = None
    #: Why rows have no reward that measures something, by their index (``failures.short_reason``).
    failures: dict[int, str] = field(default_factory=dict)
    #: Rows of another project: turns have no digests, and what a turn lacks was lost.
    foreign: bool = False
    #: A key of the content of each row that has no id.
    row_keys: Sequence[bytes | None] | None = None
    #: The settings of sampling that each row names.
    settings: Sequence[Mapping[str, Any]] = ()
    #: (n,) when a rollout began, in microseconds; ``UNKNOWN`` where that is not known.
    started: Ints | None = None
    #: Whether any rollout of the batch was given tools.
    offers_tools: bool = False
    #: Index of the rollout and name of each named reward part that is not finite.
    bad_parts: list[tuple[int, str, float]] = field(default_factory=list)
    temperature: npt.NDArray[np.float32] | None = None
    #: (index of the row, field, expected, got) of texts that their column cannot hold.
    odd_texts: list[tuple[int, str, str, str | None]] = field(default_factory=list)
    #: (turn, its reward) where that is NaN or infinite.
    bad_steps: list[tuple[int, float]] = field(default_factory=list)
    #: Count columns that must agree with the turns: name → (n,).
    counts: dict[str, Ints] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.rows)

    @property
    def n_tokens(self) -> int:
        """Stored tokens: context deltas and generations."""
        return len(self.turns.delta.values) + len(self.turns.generation.values)


def from_arrow(batch: pa.RecordBatch, first_row: int) -> Evidence:
    """``batch`` has some columns of the rollouts table, types as in the schema; ``first_row`` is its first row's number."""
    import pyarrow.compute as pc

    names = set(batch.schema.names)

    def column(name: str) -> Any:
        return batch.column(batch.schema.get_field_index(name))

    evidence = Evidence(
        rows=np.arange(first_row, first_row + len(batch), dtype=np.int64),
        turns=TurnColumns.of(column("turns")),
        rollout_id=ArrowTexts(column("rollout_id")) if "rollout_id" in names else [None] * len(batch),
        group_id=ArrowTexts(column("group_id")) if "group_id" in names else None,
        messages=_messages(column("messages")) if "messages" in names else None,
    )
    if "reward" in names:
        reward = column("reward")
        evidence.reward_null = reward.is_null().to_numpy(zero_copy_only=False)
        evidence.reward = reward.to_numpy(zero_copy_only=False)
    if "extra" in names:
        evidence.failures = {row: short_reason(failure) for row, failure in failures_in(column("extra")).items()}
    if "rewards" in names:
        evidence.parts, evidence.bad_parts = _parts(column("rewards"))
    struct = list_parts(column("turns"))[1]
    if struct.type.get_field_index("finish_reason") >= 0:
        reasons = struct.field("finish_reason")
        evidence.cut = pc.fill_null(pc.equal(reasons, "length"), False).to_numpy(zero_copy_only=False)
        for k, name, expected, got in _not_one_of(reasons, "finish_reason", FINISH_REASONS):
            evidence.odd_texts.append((int(evidence.turns.rollout[k]), name, expected, got))
    if evidence.turns.reward is not None:
        given = struct.field("reward").is_valid().to_numpy(zero_copy_only=False)
        infinite = np.flatnonzero(given & ~np.isfinite(evidence.turns.reward))
        evidence.bad_steps = [(int(k), float(evidence.turns.reward[k])) for k in infinite]
    if "started_at" in names:
        evidence.started = pc.fill_null(column("started_at").cast("int64"), UNKNOWN).to_numpy()
    if "tools" in names:
        evidence.offers_tools = bool(pc.any(pc.greater(pc.binary_length(column("tools")), 2)).as_py())
    if "status" in names:
        evidence.odd_texts += _not_one_of(column("status"), "status", STATUS)
    evidence.odd_texts += _not_json_in(batch)
    if "temperature" in names:
        evidence.temperature = column("temperature").to_numpy(zero_copy_only=False)
    for name in ("n_turns", "n_breaks", "n_context_tokens", "n_generated_tokens"):
        if name in names and not column(name).null_count:
            evidence.counts[name] = column(name).to_numpy(zero_copy_only=False).astype(np.int64)
    return evidence


def _not_one_of(texts: Any, name: str, known: Sequence[str]) -> Iterator[tuple[int, str, str, str | None]]:
    """(index, name, expected, got) of each text that is not one of ``known``."""
    import pyarrow.compute as pc

    if not set(pc.unique(texts).to_pylist()) <= set(known):
        yield from ((i, name, " or ".join(known), got) for i, got in enumerate(texts.to_pylist()) if got not in known)


def _not_json_in(batch: pa.RecordBatch) -> Iterator[tuple[int, str, str, str | None]]:
    """The same of each text of ``_JSON`` that is not the JSON that it should be."""
    for name in _JSON.keys() & set(batch.schema.names):
        yield from _not_json(batch.column(name), name)
    if "messages" in batch.schema.names:
        offsets, messages = list_parts(batch.column("messages"))
        if (at := messages.type.get_field_index("tool_calls")) >= 0:
            calls = messages.field(at)
            called = np.flatnonzero(calls.is_valid().to_numpy(zero_copy_only=False))
            for k, name, expected, got in _not_json(calls.drop_null(), "tool_calls"):
                yield int(np.searchsorted(offsets, called[k], side="right")) - 1, name, expected, got


def _not_json(texts: Any, name: str) -> Iterator[tuple[int, str, str, str | None]]:
    """The same of each text of one column. Rollouts share most of these texts."""
    expected = f"the text of a JSON {'list' if _JSON[name] is list else 'object'}"
    coded = texts.dictionary_encode()
    odd = {i: text for i, text in enumerate(coded.dictionary.to_pylist()) if not isinstance(loads(text), _JSON[name])}
    if odd:
        yield from ((row, name, expected, odd[i]) for row, i in enumerate(coded.indices.to_pylist()) if i in odd)


class ArrowTexts(Sequence[Any]):
    """An Arrow text column read an item at a time, for the few rows that need one."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        return self.array[int(index)].as_py()

    def __iter__(self) -> Any:
        return iter(self.array.to_pylist())


def _numbers(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=array.null_count == 0)


def _parts(column: Any) -> tuple[dict[str, npt.NDArray[np.float64]], list[tuple[int, str, float]]]:
    """The named parts as columns, and those that are neither null nor finite: (rollout, name, value)."""
    offsets, parts = list_parts(column)
    values = parts.field("value")
    if not len(values):
        return {}, []
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    numbers = values.to_numpy(zero_copy_only=False)
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    coded = parts.field("name").dictionary_encode()
    names, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False)
    columns = {}
    for code, name in enumerate(names):
        columns[name] = np.full(len(offsets) - 1, np.nan)
        of_name = codes == code
        columns[name][owners[of_name]] = np.where(valid, numbers, np.nan)[of_name]
    bad = np.flatnonzero(valid & ~np.isfinite(numbers))
    return columns, [(int(owners[k]), names[int(codes[k])], float(numbers[k])) for k in bad.tolist()]


#: A character that is not white space.
_NO_SPACE = r"[^\s\v\x{1c}-\x{1f}\x{85}\p{Z}]"
#: The first call id in the JSON text of tool_calls, when the text is as gymdata writes it.
_FIRST_ID = r'^\[\{"id": ?"(?P<id>[^"\\]*)"'


def _messages(column: Any) -> Messages:
    import pyarrow as pa
    import pyarrow.compute as pc

    offsets, struct = list_parts(column)
    parts = {f.name: struct.field(f.name) for f in struct.type}
    role = pc.fill_null(pc.index_in(parts["role"], value_set=pa.array(ROLES)), -1).to_numpy().astype(np.int8)
    n = len(role)
    turn = np.full(n, -1, np.int32)
    if "turn" in parts:
        turn = pc.fill_null(parts["turn"], -1).to_numpy().astype(np.int32)
    tool_calls: Any = parts.get("tool_calls")
    calls = np.zeros(n, np.bool_)
    if tool_calls is not None and tool_calls.null_count < n:
        calls = pc.fill_null(pc.greater(pc.binary_length(tool_calls), 2), False).to_numpy(zero_copy_only=False)

    def matches(text: Any, pattern: str) -> npt.NDArray[np.bool_]:
        found = pc.fill_null(pc.match_substring_regex(text, pattern), False)
        return np.asarray(found.to_numpy(zero_copy_only=False))

    texts = [parts[name] for name in ("content", "reasoning") if name in parts]
    says = np.logical_or.reduce([matches(text, _NO_SPACE) for text in texts]) if texts else np.ones(n, np.bool_)
    fails, results = np.zeros(n, np.bool_), np.flatnonzero((role == TOOL) | (role == FUNCTION))
    content = parts.get("content", pa.nulls(n, pa.string()))
    fails[results] = matches(content.take(pa.array(results)), TOOL_ERROR)

    def spelled_calls() -> list[int]:
        rows = np.flatnonzero((role == ASSISTANT) & ~calls & says)
        return [int(row) for row in rows[matches(content.take(pa.array(rows)), SPELLED_CALL)]]

    unanswered = _unanswered(offsets, role, calls, tool_calls, parts.get("tool_call_id"))
    return Messages(offsets, role, turn, calls, says, fails, spelled_calls, unanswered)


def _unanswered(
    offsets: Ints, role: npt.NDArray[np.int8], calls: npt.NDArray[np.bool_], tool_calls: Any, call_ids: Any
) -> dict[int, str | None]:
    """The tool results that answer no earlier call of their rollout, with their call's id where they name one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_result = np.isin(role, (TOOL, FUNCTION))
    waiting = is_result.copy()
    if calls.any() and call_ids is not None:
        # Nearly all answer the first call of the message before.
        after_calls = np.flatnonzero(is_result[1:] & (role[:-1] == ASSISTANT) & calls[:-1]) + 1
        after_calls = after_calls[~np.isin(after_calls, offsets)]  # not of another rollout
        first = pc.struct_field(pc.extract_regex(tool_calls.take(pa.array(after_calls - 1)), pattern=_FIRST_ID), "id")
        same = pc.fill_null(pc.equal(first, call_ids.take(pa.array(after_calls))), False)
        waiting[after_calls[same.to_numpy(zero_copy_only=False)]] = False
    callers = np.flatnonzero(calls & (role == ASSISTANT))
    last_other = np.maximum.accumulate(np.where(is_result, -1, np.arange(len(role))))
    unanswered: dict[int, str | None] = {}
    for i in np.flatnonzero(waiting).tolist():
        begin = int(offsets[np.searchsorted(offsets, i, side="right") - 1])
        call_id = None if call_ids is None else call_ids[i].as_py()
        if call_id is None:
            # Without an id it answers the message before the results.
            other = int(last_other[i])
            if other < begin or role[other] != ASSISTANT or not calls[other]:
                unanswered[i] = None
        else:
            earlier = callers[np.searchsorted(callers, begin) : np.searchsorted(callers, i)].tolist()
            if not any(call_id in call_ids_of(tool_calls[caller].as_py()) for caller in reversed(earlier)):
                unanswered[i] = json_value(call_id)
    return unanswered


def call_ids_of(tool_calls: str | None) -> set[str]:
    """The call ids in the JSON text of a message's tool_calls; none when it does not parse."""
    import json

    try:
        calls = json.loads(tool_calls or "[]")
    except ValueError:
        return set()
    items = calls if isinstance(calls, list) else [calls]
    return {str(c["id"]) for c in items if isinstance(c, dict) and c.get("id") is not None}
