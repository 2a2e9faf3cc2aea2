"""A batch of rollouts as flat numpy arrays: the one shape that every check works on.

Invariants: turn t of rollout r is at ``turn_offsets[r] + t`` in every turn array, and its ids are
``delta[delta_offsets[k]:delta_offsets[k + 1]]`` and so on; offsets start at 0; arrays from Arrow share its memory. A
column that the source lacks is None and the checks that need it are skipped. Importing this needs no pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

Ints = npt.NDArray[np.int64]
Texts = Sequence[str | None]

ROLES = ("system", "user", "assistant", "tool", "function", "environment", "other")
SYSTEM, USER, ASSISTANT, TOOL, FUNCTION = range(5)


@dataclass(slots=True)
class Messages:
    """Messages of a batch. ``role`` indexes ROLES (-1: another); ``turn`` is -1 where none is named.

    ``calls`` is True where the message has tool calls; ``answers`` gives, for (assistant message, tool message) index
    pairs, whether the first has a call with the second's id; it is only asked where that matters.
    """

    offsets: Ints
    role: npt.NDArray[np.int8]
    turn: npt.NDArray[np.int32]
    calls: npt.NDArray[np.bool_]
    has_call_id: npt.NDArray[np.bool_]
    answers: Callable[[int, int], bool]
    #: Where a tool message is known to answer the message that holds the calls before it; others are asked.
    surely_answered: npt.NDArray[np.bool_]
    #: True where there is text or reasoning, more than white space.
    says: npt.NDArray[np.bool_]
    #: True where a tool's result is an error message.
    fails: npt.NDArray[np.bool_]
    #: Gives where an assistant's text spells a tool call; only asked where that matters.
    spelled_calls: Callable[[], npt.NDArray[np.bool_]]


@dataclass(slots=True)
class Evidence:
    """The columns of a batch that checks read. Shapes: rollouts (n,), turns (T,), ids and log-probs flat."""

    rows: Ints
    turn_offsets: Ints
    parent: npt.NDArray[np.int32]
    prefix: npt.NDArray[np.int32]
    digest: npt.NDArray[np.int64]
    delta_offsets: Ints
    delta: npt.NDArray[np.int32]
    gen_offsets: Ints
    gen: npt.NDArray[np.int32]
    lp_offsets: Ints
    lp: npt.NDArray[np.float32]
    rollout_id: Texts
    group_id: Texts | None = None
    agent: Texts | None = None
    messages: Messages | None = None
    reward: npt.NDArray[np.float64] | None = None
    reward_null: npt.NDArray[np.bool_] | None = None
    #: Named reward parts: (n,), NaN where a rollout has none.
    parts: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    #: (T,) whether a limit cut the generation.
    cut: npt.NDArray[np.bool_] | None = None
    #: (n,) when a rollout began, in microseconds.
    started: Ints | None = None
    #: Whether any rollout of the batch was given tools.
    offers_tools: bool = False
    #: Index of the rollout and name of each named reward part that is not finite.
    bad_parts: list[tuple[int, str, float]] = field(default_factory=list)
    temperature: npt.NDArray[np.float32] | None = None
    #: Count columns that must agree with the turns: name → (n,).
    counts: dict[str, Ints] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.rows)

    @property
    def n_turns(self) -> int:
        return len(self.parent)

    @property
    def n_tokens(self) -> int:
        """Stored tokens: context deltas and generations."""
        return len(self.delta) + len(self.gen)

    def has_ids(self) -> npt.NDArray[np.bool_]:
        """(n,) whether a rollout has a turn with ids of its prompt and its generation."""
        whole = (self.prefix + lengths(self.delta_offsets) > 0) & (lengths(self.gen_offsets) > 0)
        return np.bincount(self.rollout_of_turn()[whole], minlength=self.n) > 0

    def rollout_of_turn(self) -> Ints:
        """(T,) the rollout that each turn belongs to."""
        return np.repeat(np.arange(self.n), np.diff(self.turn_offsets))

    def arrays(self, k: int) -> tuple[Any, Any, Any]:
        """Delta ids, generation ids and log-probabilities of turn ``k`` of the batch."""
        return (
            self.delta[self.delta_offsets[k] : self.delta_offsets[k + 1]],
            self.gen[self.gen_offsets[k] : self.gen_offsets[k + 1]],
            self.lp[self.lp_offsets[k] : self.lp_offsets[k + 1]],
        )

    def turn_structs(self, rollout: int) -> list[dict[str, Any]]:
        """The turns of one rollout as the dicts that ``gymdata.rollouts.turns`` takes."""
        first, end = int(self.turn_offsets[rollout]), int(self.turn_offsets[rollout + 1])
        result = []
        for k in range(first, end):
            delta, gen, lp = self.arrays(k)
            result.append(
                {
                    "parent": int(self.parent[k]),
                    "prefix_length": int(self.prefix[k]),
                    "prompt_delta_ids": delta,
                    "generation_token_ids": gen,
                    "generation_log_probs": lp,
                    "digest": int(self.digest[k]),
                    "agent": self.agent[k] if self.agent is not None else None,
                }
            )
        return result


def lengths(offsets: Ints) -> Ints:
    return offsets[1:] - offsets[:-1]


def from_arrow(batch: pa.RecordBatch, first_row: int) -> Evidence:
    """``batch`` has some columns of the rollouts table, types as in the schema; ``first_row`` is its first row's number."""
    import pyarrow.compute as pc

    names = set(batch.schema.names)

    def column(name: str) -> Any:
        return batch.column(batch.schema.get_field_index(name))

    turns = column("turns")
    turn_offsets, struct = list_parts(turns)
    parts = {f.name: struct.field(f.name) for f in struct.type}
    delta_offsets, delta = list_parts(parts["prompt_delta_ids"])
    gen_offsets, gen = list_parts(parts["generation_token_ids"])
    lp_offsets, lp = list_parts(parts["generation_log_probs"])
    evidence = Evidence(
        rows=np.arange(first_row, first_row + len(batch), dtype=np.int64),
        turn_offsets=turn_offsets,
        parent=_numbers(parts["parent"]),
        prefix=_numbers(parts["prefix_length"]),
        digest=_numbers(parts["digest"]),
        delta_offsets=delta_offsets,
        delta=_numbers(delta),
        gen_offsets=gen_offsets,
        gen=_numbers(gen),
        lp_offsets=lp_offsets,
        lp=_numbers(lp),
        rollout_id=_Texts(column("rollout_id")) if "rollout_id" in names else [None] * len(batch),
        group_id=_Texts(column("group_id")) if "group_id" in names else None,
        agent=_Texts(parts["agent"]) if "agent" in parts and parts["agent"].null_count < len(struct) else None,
        messages=_messages(column("messages")) if "messages" in names else None,
    )
    if "reward" in names:
        reward = column("reward")
        evidence.reward_null = reward.is_null().to_numpy(zero_copy_only=False)
        evidence.reward = reward.to_numpy(zero_copy_only=False)
    if "rewards" in names:
        evidence.parts, evidence.bad_parts = _parts(column("rewards"))
    if "finish_reason" in parts:
        cut = pc.fill_null(pc.equal(parts["finish_reason"], "length"), False)
        evidence.cut = cut.to_numpy(zero_copy_only=False)
    if "started_at" in names:
        evidence.started = pc.fill_null(column("started_at").cast("int64"), 0).to_numpy()
    if "tools" in names:
        evidence.offers_tools = bool(pc.any(pc.greater(pc.binary_length(column("tools")), 2)).as_py())
    if "temperature" in names:
        evidence.temperature = column("temperature").to_numpy(zero_copy_only=False)
    for name in ("n_turns", "n_context_tokens", "n_generated_tokens"):
        if name in names and not column(name).null_count:
            evidence.counts[name] = column(name).to_numpy(zero_copy_only=False).astype(np.int64)
    return evidence


class _Texts(Sequence[Any]):
    """An Arrow text column read an item at a time, for the few rows that need one."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return self._array[int(index)].as_py()

    def __iter__(self) -> Any:
        return iter(self._array.to_pylist())


def list_parts(array: Any) -> tuple[Ints, Any]:
    """Offsets from 0, and the flat values that they cut. A null list is an empty one."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if array.null_count:
        # Arrow allows bytes under a null list; they are nobody's.
        keep = array.is_valid().to_numpy(zero_copy_only=False)
        if (np.diff(offsets)[~keep] != 0).any():
            array = array.fill_null([])
            return list_parts(array)
    return offsets - offsets[0], values


def _numbers(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=array.null_count == 0)


def _parts(column: Any) -> tuple[dict[str, npt.NDArray[np.float64]], list[tuple[int, str, float]]]:
    """The named parts as columns, and those that are neither null nor finite: (rollout, name, value)."""
    offsets, parts = list_parts(column)
    values = parts.field("value")
    if not len(values):
        return {}, []
    known = values.is_valid().to_numpy(zero_copy_only=False)
    numbers = values.to_numpy(zero_copy_only=False)
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    coded = parts.field("name").dictionary_encode()
    names, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False)
    columns = {}
    for code, name in enumerate(names):
        columns[name] = np.full(len(offsets) - 1, np.nan)
        mine = codes == code
        columns[name][owners[mine]] = np.where(known, numbers, np.nan)[mine]
    bad = np.flatnonzero(known & ~np.isfinite(numbers))
    return columns, [(int(owners[k]), names[int(codes[k])], float(numbers[k])) for k in bad.tolist()]


#: How a tool's result begins when it is an error message.
TOOL_ERROR = r'(?i)^\s*(\{\s*"error"\s*:\s*[^nf\s]|error\b|traceback \(most recent call last\))'
#: What models write around or in a tool call.
SPELLED_CALL = (
    r"<tool_call>|<function_call>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call|<｜tool▁call|"
    r'"name"\s*:\s*"[^"]*"\s*,\s*"(arguments|parameters)"\s*:'
)
#: Texts up to this long may be white space alone.
_BLANK = 16


def _says(*texts: Any) -> npt.NDArray[np.bool_]:
    """Where any of some text columns has more than white space."""
    import pyarrow as pa
    import pyarrow.compute as pc

    result = np.zeros(len(texts[0]), np.bool_)
    for text in texts:
        size = pc.fill_null(pc.binary_length(text), 0).to_numpy()
        result |= size > _BLANK
        short = np.flatnonzero((size > 0) & ~result)
        trimmed = pc.binary_length(pc.utf8_trim_whitespace(text.take(pa.array(short))))
        result[short] |= trimmed.to_numpy() > 0
    return result


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
    call_ids: Any = parts.get("tool_call_id")
    calls = np.zeros(n, np.bool_)
    if tool_calls is not None and tool_calls.null_count < n:
        calls = pc.fill_null(pc.greater(pc.binary_length(tool_calls), 2), False).to_numpy(zero_copy_only=False)
    has_id = np.zeros(n, np.bool_)
    if call_ids is not None:
        has_id = call_ids.is_valid().to_numpy(zero_copy_only=False)
    sure = np.zeros(n, np.bool_)
    if calls.any() and has_id.any():
        askers = np.flatnonzero(has_id & (np.roll(role, 1) == ASSISTANT) & np.roll(calls, 1))
        askers = askers[askers > 0]
        first = pc.struct_field(pc.extract_regex(tool_calls.take(pa.array(askers - 1)), pattern=_FIRST_ID), "id")
        same = pc.fill_null(pc.equal(first, call_ids.take(pa.array(askers))), False)
        sure[askers[same.to_numpy(zero_copy_only=False)]] = True

    def answers(assistant: int, tool: int) -> bool:
        return call_ids[tool].as_py() in call_ids_of(tool_calls[assistant].as_py())

    texts = [parts[name] for name in ("content", "reasoning") if name in parts]
    says = _says(*texts) if texts else np.ones(n, np.bool_)
    fails = np.zeros(n, np.bool_)
    results = np.flatnonzero((role == TOOL) | (role == FUNCTION))

    def matches(rows: Ints, pattern: str) -> Ints:
        found = pc.match_substring_regex(parts["content"].take(pa.array(rows)), pattern)
        return rows[pc.fill_null(found, False).to_numpy(zero_copy_only=False)]

    if "content" in parts and len(results):
        fails[matches(results, TOOL_ERROR)] = True

    def spelled_calls() -> npt.NDArray[np.bool_]:
        spelled = np.zeros(n, np.bool_)
        if "content" in parts:
            spelled[matches(np.flatnonzero((role == ASSISTANT) & ~calls & says), SPELLED_CALL)] = True
        return spelled

    return Messages(offsets, role, turn, calls, has_id, answers, sure, says, fails, spelled_calls)


def call_ids_of(tool_calls: str | None) -> set[str]:
    """The call ids in the JSON text of a message's tool_calls; none when it does not parse."""
    import json

    try:
        calls = json.loads(tool_calls or "[]")
    except ValueError:
        return set()
    items = calls if isinstance(calls, list) else [calls]
    return {str(c["id"]) for c in items if isinstance(c, dict) and c.get("id") is not None}
