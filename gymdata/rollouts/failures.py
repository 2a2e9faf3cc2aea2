"""Which field of another project's row says that its reward measures nothing: one table for every format.

A row that its writer masked or cancelled is a rollout without a reward, and ``extra.failure`` says why; with an error, an
exception or a failure class it is an attempt that failed, which belongs in failures.jsonl and is never a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gymdata.rollouts.messages import field_at, loads, object_of
from gymdata.rollouts.truth import truth

if TYPE_CHECKING:
    import pyarrow as pa

MASKED, CANCELLED = "masked", "cancelled"
#: The key of ``extra`` that holds a rollout's failure, and that of the numbers which its writer gave it.
FAILURE, UNSCORED = "failure", "unscored"
_NOTHING = frozenset({"", "false", "0", "0.0", "none", "null", "nan"})
#: What is at fault for a failed attempt, by a part of the word that its writer has for it.
_AT_FAULT = {"judge": "judge", "verifier": "judge", "grading": "judge", "model": "engine"}
_NAMES, _TEXTS = ("exception_type", "type", "error", "code"), ("message", "exception_message", "error_chain_repr")
_MOST = 300


class Failure(NamedTuple):
    """``kind``: ``masked`` or ``cancelled``, or for a failed attempt what is at fault: engine, environment or judge.
    ``reason``: the writer's word, and after a colon what else it says; ``final``: another attempt would fail, too."""

    kind: str
    reason: str
    field: str
    final: bool = False

    @property
    def is_rollout(self) -> bool:
        """Whether the row is a rollout all the same."""
        return self.kind in (MASKED, CANCELLED)


class Signal(NamedTuple):
    """``field``: where a row says it (keys joined by dots); ``words``: the values that mean it, by default any that
    ``says_nothing`` is not true of; ``but``: the values that do not; ``kind``: by default a failed attempt; ``more``: fields
    that say why; ``without``: a field that decides where it is there; ``flag``: a truth value, however it is written."""

    field: str
    words: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    kind: str = ""
    more: tuple[str, ...] = ()
    without: str = ""
    flag: bool = False

    def __str__(self) -> str:
        """For the documentation."""
        words = f" {', '.join(self.words)}" if self.words else f" other than {', '.join(self.but)}" if self.but else ""
        return f"`{self.field}`{words}" + (f" ({self.kind})" if self.kind else "")


_RLLM = ("env_done", "unknown", "max_turns_exceeded", "max_response_length_exceeded", "max_prompt_length_exceeded")
#: By format; the first that applies decides. NeMo Gym: ``nemo_gym/rollout_collection.py``, ``judge.py``,
#: ``token_id_capture/delivery.py``; rLLM: ``TerminationReason`` in ``rllm/types.py``; verifiers: ``legacy/types.py``,
#: ``v1/trace.py``; SkyRL: ``skyrl/train/utils/trainer_utils.py`` and its Harbor generator; slime and miles: ``Sample``
#: in ``slime/utils/types.py``; ART: ``src/art/trajectories.py`` (``exceptions`` of a group, one by one); Harbor:
#: ``TrialResult``.
SIGNALS: Mapping[str, tuple[Signal, ...]] = {
    "nemo-gym": (
        Signal("_ng_failure_class", more=("_ng_failure_judge_error", "error", "error_message")),
        Signal("_ng_no_persist", flag=True),
        Signal("judge_failed", more=("judge_failure",), flag=True),
        *map(Signal, ("error", "judge_error", "verifier_error", "response.error")),
        Signal("response.status", ("failed", "in_progress", "queued")),
        Signal("response.status", ("cancelled", "canceled"), kind=CANCELLED),
        Signal("mask_sample", kind=MASKED, more=("_ng_token_capture.error",), flag=True),
        Signal("instance_config.mask_sample", kind=MASKED, flag=True),
    ),
    "rllm": (
        Signal("episode.termination_reason", but=_RLLM, more=("episode.info.error", "episode.metadata.error")),
        Signal("termination_reason", but=_RLLM, more=("info.error", "metadata.error")),
        *map(Signal, ("episode.error", "error")),
    ),
    "skyrl-dump": (
        Signal("exception_type"),
        Signal("stop_reason", ("error", "agent_timeout")),
        Signal("stop_reason", ("abort", "aborted", "cancelled"), kind=CANCELLED),
    ),
    "slime": (
        Signal("status", ("failed",)),
        Signal("status", ("aborted", "pending"), kind=CANCELLED),
        Signal("remove_sample", kind=MASKED, flag=True),
    ),
    "verifiers": (Signal("error"), Signal("stop_condition", ("has_error",))),
    "verifiers-traces": (Signal("ok", ("false",), more=("errors",), flag=True), Signal("errors", without="ok")),
    "art": (Signal("exception"),),
    "atif": (Signal("exception_info"), Signal("extra.exception_info")),
    "harbor": (Signal("exception_info"),),
    "agentcore": (Signal("status", ("failed",)), Signal("status", ("aborted",), kind=CANCELLED)),
}


def failure_of(format: str, row: Any) -> Failure | None:
    """Why the reward of a row of ``format`` is not one, as its writer says; None for a row that says nothing of it."""
    if not isinstance(row, Mapping):
        return None
    for signal in SIGNALS.get(format, ()):
        if (value := field_at(row, signal.field)) is None:
            continue
        mark = truth(value) if signal.flag else None
        value = value if mark is None else mark
        word = str(value).lower().removeprefix("terminationreason.")
        if signal.without and not says_nothing(field_at(row, signal.without)):
            continue
        if (word in signal.words) if signal.words else not (word in signal.but or says_nothing(value)):
            name = signal.field if value is True else f"{signal.field} {word}" if signal.words else _text(value)
            details = (_text(detail) for field in signal.more if not says_nothing(detail := field_at(row, field)))
            reason = ": ".join(dict.fromkeys((name, *list(details)[:1])))[:_MOST]
            words = f"{signal.field} {reason.partition(':')[0]}".lower()
            at_fault = next((kind for part, kind in _AT_FAULT.items() if part in words), "environment")
            return Failure(signal.kind or at_fault, reason, signal.field, row.get("_ng_failure_terminal") is True)
    return None


def without_nan(format: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """``row`` with null in the fields of failures that are NaN, as a data frame writes a cell that is empty."""
    fields = {
        name for signal in SIGNALS.get(format, ()) for name in (signal.field, signal.without, *signal.more) if name
    }
    odd = {name for name in fields & row.keys() if isinstance(row[name], float) and math.isnan(row[name])}
    return {name: None if name in odd else value for name, value in row.items()} if odd else row


def says_nothing(value: Any) -> bool:
    """Whether a value is null, false, 0, NaN or empty, or a struct or list of nothing else."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, (Mapping, list)):
            left += value.values() if isinstance(value, Mapping) else value
        elif str(value).strip().lower() not in _NOTHING:
            return False
    return True


def masked_extra(failure: Failure, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``extra`` that say so; ``numbers``: what the writer gave in place of rewards."""
    facts: dict[str, object] = {"kind": failure.kind, "reason": failure.reason}
    facts |= {} if failure.is_rollout else {"field": failure.field, "final": failure.final}
    unscored = {name: value for name, value in numbers.items() if value not in (None, {})}
    return {FAILURE: facts, **({UNSCORED: unscored} if unscored else {})}


def failures_in(extra: pa.Array) -> dict[int, dict[str, Any]]:
    """The ``failure`` of each row of a column ``extra`` that has one."""
    import numpy as np
    import pyarrow.compute as pc

    may = np.flatnonzero(pc.fill_null(pc.match_substring(extra, f'"{FAILURE}"'), False).to_numpy(zero_copy_only=False))
    failures = ((int(row), object_of(loads(extra[row].as_py())).get(FAILURE)) for row in may)
    return {row: failure for row, failure in failures if isinstance(failure, dict)}


def is_rollout(extra: str) -> bool:
    """Whether a row with that ``extra`` is a rollout, masked or not, and no attempt that failed."""
    failure = object_of(loads(extra)).get(FAILURE) if f'"{FAILURE}"' in extra else None
    return not isinstance(failure, dict) or failure.get("kind") in (MASKED, CANCELLED)


def short_reason(failure: Mapping[str, Any]) -> str:
    """The kind and the writer's word, by which summaries count."""
    return f"{failure.get('kind')}: {str(failure.get('reason')).partition(': ')[0]}"


def _text(value: Any) -> str:
    """What an error says: its type and its message, of the last where there are several."""
    if isinstance(value, list):
        return _text(next((error for error in reversed(value) if not says_nothing(error)), ""))
    if not isinstance(value, Mapping):
        return str(value)
    parts = (next((str(value[key]) for key in keys if value.get(key)), "") for keys in (_NAMES, _TEXTS))
    return ": ".join(filter(None, parts)) or str(dict(value))
