"""The tables and their versions.

Invariants: Parquet and JSONL hold the same columns; a file says which table and version it is; a newer version is
refused; a column is nullable exactly when its meaning allows "not known".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from gymdata.errors import DataError

SCHEMA_KEY = b"gymdata.schema"
VERSION_KEY = b"gymdata.version"

#: Marks a field until its table is made.
_CODED = b"coded"
_ids = pa.list_(pa.int32())
_floats = pa.list_(pa.float32())
_mask = pa.list_(pa.int8())


def _f(name: str, kind: pa.DataType, null: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=null)


def _coded(name: str, kind: pa.DataType, null: bool = False) -> pa.Field:
    """A column of few different values, which Parquet writes as a dictionary of them."""
    return _f(name, kind, null).with_metadata({_CODED: b""})


TOP_LOG_PROBS = pa.list_(pa.list_(pa.struct([_f("id", pa.int32()), _f("log_prob", pa.float32())])))

WEIGHT_VERSIONS = pa.list_(pa.struct([_f("version", pa.string()), _f("start", pa.int32()), _f("end", pa.int32())]))

#: One model call. Prompts are stored as deltas: see gymdata.rollouts.turns.
TURN = pa.struct(
    [
        _f("parent", pa.int32()),
        _f("prefix_length", pa.int32()),
        _f("prompt_delta_ids", _ids),
        _f("generation_token_ids", _ids),
        _f("generation_log_probs", _floats),
        _f("finish_reason", pa.string()),
        _f("agent", pa.string(), null=True),
        _f("reward", pa.float64(), null=True),
        _f("top_log_probs", TOP_LOG_PROBS, null=True),
        _f("rendered", pa.bool_(), null=True),
        _f("server", pa.string(), null=True),
        _f("weight_versions", WEIGHT_VERSIONS, null=True),
        _f("digest", pa.int64()),
    ]
)

#: One chat message. ``tool_calls`` and ``extra`` hold JSON text; ``turn`` is the model call that produced the message.
MESSAGE = pa.struct(
    [
        _f("role", pa.string()),
        _f("content", pa.string(), null=True),
        _f("reasoning", pa.string(), null=True),
        _f("tool_calls", pa.string(), null=True),
        _f("tool_call_id", pa.string(), null=True),
        _f("name", pa.string(), null=True),
        _f("turn", pa.int32(), null=True),
        _f("extra", pa.string(), null=True),
    ]
)

#: A named part of a reward. JSONL writes the list as an object.
NAMED_VALUE = pa.struct([_f("name", pa.string()), _f("value", pa.float64(), null=True)])

#: Columns of rollouts by which equal ones are found without their tokens; computed where a row of JSON lacks them.
HASHES = ("prompt_hash", "generation_hash")

#: Columns of experiences with the sampler's head: the most likely tokens at each trained one, and their log-probs.
HEAD = ("top_ids", "top_log_probs")

_LEAF = ".list.element"
_TURNS = "turns.list.element."


@dataclass(frozen=True)
class Table:
    """A table's name, version, Arrow schema, and which Parquet leaves are written how.

    ``dictionary`` and ``split`` are Parquet column paths. A path in both would silently get the dictionary and no
    BYTE_STREAM_SPLIT, so they never overlap. Ids are in neither: plain + zstd beats both on real token ids.
    ``optional`` columns may be absent from a file; all others must be there. ``id_level``: zstd level of token ids; 5 buys
    6 % of a file at four times the writing, which is for what is kept, not for what can be made of it again.
    ``float_level``: that of float32 leaves; -1 saves a quarter of their writing and costs 2 to 6 % of their bytes.
    ``page_bytes``: ids repeat over long distances, so that a file of large pages is smaller, by 0.2 to 0.9 % at 8 MB against
    2 MB; but they are larger than the processor's caches, which costs a tenth of the writing.
    """

    name: str
    version: int
    schema: pa.Schema
    dictionary: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    optional: frozenset[str] = field(default_factory=frozenset)
    id_level: int = 1
    float_level: int = 1
    page_bytes: int = 8 << 20

    @cached_property
    def metadata(self) -> dict[bytes, bytes]:
        return {SCHEMA_KEY: self.name.encode(), VERSION_KEY: str(self.version).encode()}

    @cached_property
    def arrow(self) -> pa.Schema:
        """The schema with the table's name and version in its metadata."""
        return self.schema.with_metadata(self.metadata)

    def required(self) -> list[str]:
        return [name for name in self.schema.names if name not in self.optional]

    def without(self, *fields: str) -> Table:
        """The table without some columns, and fields of its lists of objects; ``fields``: as "task", "turns.agent"."""
        narrowed = [
            f.with_type(pa.list_(pa.struct([g for g in f.type.value_type if f"{f.name}.{g.name}" not in fields])))
            if pa.types.is_list(f.type) and pa.types.is_struct(f.type.value_type)
            else f
            for f in self.schema
            if f.name not in fields
        ]
        return replace(self, schema=pa.schema(narrowed))


def _table(name: str, version: int, fields: list[pa.Field], *, nested: tuple[str, ...] = (), **how: Any) -> Table:
    """``nested``: leaves within lists that have a dictionary; ``how``: the other attributes of the table."""
    coded = tuple(f.name for f in fields if f.metadata)
    return Table(name, version, pa.schema([f.remove_metadata() for f in fields]), (*coded, *nested), **how)


ROLLOUTS = _table(
    "rollouts",
    1,
    [
        _f("rollout_id", pa.string()),
        _coded("run_id", pa.string()),
        _coded("task_id", pa.string()),
        _coded("group_id", pa.string()),
        _coded("rollout_index", pa.int32()),
        _coded("policy", pa.string()),
        _coded("policy_hash", pa.string()),
        _coded("policy_version", pa.int32()),
        _coded("status", pa.string()),
        _coded("stop_reason", pa.string(), null=True),
        _coded("finish_reason", pa.string(), null=True),
        _f("reward", pa.float64(), null=True),
        _f("rewards", pa.list_(NAMED_VALUE)),
        _coded("temperature", pa.float32()),
        _coded("n_turns", pa.int32()),
        _coded("n_breaks", pa.int32()),
        _f("n_context_tokens", pa.int64()),
        _f("n_generated_tokens", pa.int64()),
        _f("prompt_hash", pa.int64(), null=True),
        _f("generation_hash", pa.int64(), null=True),
        _f("messages", pa.list_(MESSAGE)),
        _coded("tools", pa.string()),
        _f("task", pa.string()),
        _f("extra", pa.string()),
        _f("turns", pa.list_(TURN)),
        _f("started_at", pa.timestamp("us", tz="UTC")),
        _f("duration_s", pa.float64()),
    ],
    nested=(
        "rewards.list.element.name",
        "messages.list.element.role",
        "messages.list.element.name",
        "messages.list.element.turn",
        _TURNS + "parent",
        _TURNS + "finish_reason",
        _TURNS + "agent",
        _TURNS + "server",
        _TURNS + "weight_versions.list.element.version",
    ),
    split=(_TURNS + "generation_log_probs" + _LEAF, _TURNS + "top_log_probs.list.element.list.element.log_prob"),
    id_level=5,
)

#: ROLLOUTS with the agent alone of each model call: token lists need not be read for it.
AGENTS = ROLLOUTS.without(*(f"turns.{f.name}" for f in TURN if f.name != "agent"))

#: ROLLOUTS with the sampled ids and heads alone of each model call.
_HEADED = ("generation_token_ids", "top_log_probs", "rendered")
HEADS = ROLLOUTS.without(*(f"turns.{f.name}" for f in TURN if f.name not in _HEADED))
#: Rows of it in a batch: heads are many times as large as the tokens.
HEADED_ROWS = 256

SCORES = _table(
    "scores",
    1,
    [
        _f("rollout_id", pa.string()),
        _coded("name", pa.string()),
        _f("value", pa.float64(), null=True),
        _coded("status", pa.string()),
        _coded("source", pa.string()),
        _coded("run_id", pa.string()),
        _f("detail", pa.string(), null=True),
    ],
)

COMPARISONS = _table(
    "comparisons",
    1,
    [
        _f("comparison_id", pa.string()),
        _coded("group_id", pa.string()),
        _coded("task_id", pa.string()),
        _coded("rollout_i", pa.string()),
        _coded("rollout_j", pa.string()),
        _coded("response_i", pa.int32()),
        _coded("response_j", pa.int32()),
        _coded("judge_idx", pa.int32()),
        _coded("score_1", pa.float64(), null=True),
        _coded("score_2", pa.float64(), null=True),
        _coded("ranking", pa.float64(), null=True),
        _coded("status", pa.string()),
        _f("raw", pa.string(), null=True),
        _coded("principle", pa.string(), null=True),
        _coded("judge", pa.string()),
        _f("usage", pa.string(), null=True),
        _coded("run_id", pa.string()),
    ],
)

PAIRS = _table(
    "pairs",
    1,
    [
        _f("pair_id", pa.string()),
        _coded("run_id", pa.string()),
        _coded("task_id", pa.string()),
        _coded("tools", pa.string(), null=True),
        _f("prompt", pa.list_(MESSAGE)),
        _f("chosen", pa.list_(MESSAGE)),
        _f("rejected", pa.list_(MESSAGE)),
        _f("chosen_rollout_id", pa.string()),
        _f("rejected_rollout_id", pa.string()),
        _f("margin", pa.float64()),
        _f("weight", pa.float64()),
        _coded("source", pa.string()),
        _coded("policy_hash", pa.string()),
        _coded("policy_version", pa.int32()),
        _coded("temperature", pa.float32()),
        _f("prompt_ids", _ids),
        _f("chosen_ids", _ids),
        _f("rejected_ids", _ids),
        _f("chosen_mask", _mask),
        _f("rejected_mask", _mask),
        _f("chosen_logprobs", _floats),
        _f("rejected_logprobs", _floats),
        _f("ref_chosen_logps", pa.float64(), null=True),
        _f("ref_rejected_logps", pa.float64(), null=True),
        _coded("ref_hash", pa.string(), null=True),
        _f("rendered", pa.bool_(), null=True),
        _coded("score", pa.string(), null=True),
    ],
    nested=(
        "prompt.list.element.role",
        "chosen.list.element.role",
        "rejected.list.element.role",
        "chosen_mask" + _LEAF,
        "rejected_mask" + _LEAF,
    ),
    split=("chosen_logprobs" + _LEAF, "rejected_logprobs" + _LEAF),
    optional=frozenset({"tools", "ref_chosen_logps", "ref_rejected_logps", "ref_hash", "rendered", "score"}),
)

EXPERIENCES = _table(
    "experiences",
    1,
    [
        _coded("run_id", pa.string()),
        _coded("task_id", pa.string()),
        _coded("group_id", pa.string()),
        _coded("rollout_id", pa.string()),
        _coded("sequence_index", pa.int32()),
        _f("input_ids", _ids),
        _f("loss_mask", _mask),
        _f("logprobs", _floats),
        _f("turn_starts", _ids),
        _f("reward", pa.float64(), null=True),
        _f("advantages", _floats),
        _f("returns", _floats),
        _f("weight", pa.float64()),
        _coded("temperature", pa.float32()),
        _coded("policy_hash", pa.string()),
        _coded("policy_version", pa.int32()),
        _f("ref_logprobs", _floats, null=True),
        _f("values", _floats, null=True),
        _f("entropy", _floats, null=True),
        _f("kl", _floats, null=True),
        _f("rl_weight", _floats, null=True),
        _f("ce_weight", _floats, null=True),
        _f("ref_kl_weight", _floats, null=True),
        _f("optimal_value", pa.float64(), null=True),
        _f("teacher_logprobs", _floats, null=True),
        _f("top_ids", pa.list_(_ids), null=True),
        _f("top_log_probs", pa.list_(_floats), null=True),
    ],
    split=(
        *(
            c + _LEAF
            for c in (
                "logprobs",
                "advantages",
                "returns",
                "ref_logprobs",
                "values",
                "entropy",
                "kl",
                "teacher_logprobs",
            )
        ),
        "top_log_probs" + _LEAF + _LEAF,
    ),
    optional=frozenset(("ref_logprobs", "values", "entropy", "kl", "optimal_value", "teacher_logprobs"))
    | {"rl_weight", "ce_weight", "ref_kl_weight", *HEAD},
    float_level=-1,
    page_bytes=2 << 20,
)

VIOLATIONS = _table(
    "violations",
    1,
    [
        _f("rollout_id", pa.string(), null=True),
        _f("row", pa.int64()),
        _f("turn", pa.int32(), null=True),
        _coded("code", pa.string()),
        _coded("severity", pa.string()),
        _f("position", pa.int64(), null=True),
        _f("expected", pa.string(), null=True),
        _f("got", pa.string(), null=True),
        _f("detail", pa.string(), null=True),
    ],
)

#: A model's numbers for sampled tokens: one per sampled token of the rollout, in turn order.
AUDIT = _table(
    "audit",
    1,
    [_f("rollout_id", pa.string()), _f("ref_logprobs", _floats), _f("entropy", _floats)],
    split=("ref_logprobs" + _LEAF, "entropy" + _LEAF),
)

TABLES: dict[str, Table] = {t.name: t for t in (ROLLOUTS, SCORES, COMPARISONS, PAIRS, EXPERIENCES, VIOLATIONS, AUDIT)}


def check_version(metadata: dict[bytes, bytes] | None, where: str, expected: Table | None = None) -> str | None:
    """The table name that ``metadata`` claims, or None when it claims none.

    Raises DataError when the version is newer than this one, or the table is not ``expected``.
    """
    name = (metadata or {}).get(SCHEMA_KEY, b"").decode()
    if not name:
        return None
    if expected is not None and name != expected.name:
        raise DataError.other_table(where, name, expected.name)
    raw: Any = (metadata or {}).get(VERSION_KEY, b"1")
    if not raw.isdigit():
        raise DataError(f"{where}: {VERSION_KEY.decode()} in its metadata: got {raw!r}, expected a whole number")
    refuse_newer(where, name, int(raw))
    return name


def refuse_newer(where: str, name: str, version: int) -> None:
    """Raises DataError (S104) for a table of a newer version than this one."""
    if name in TABLES and version > TABLES[name].version:
        text = f"{where}: {name} version {version} is newer than this gymdata understands ({TABLES[name].version})"
        raise DataError(text, hint="install a newer gymdata", code="S104")
