"""Rollouts to comparisons, and judged comparisons to rewards, tables and a report.

Invariants: the judge sees the conversation before the policy's first message, and of a rollout only its final answer or
its transcript; reasoning is never shown; neither the order of rollouts nor of comparisons changes anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata import genrm
from gymdata.commands.judge.pairwise import STATUSES, Candidate, Comparison, sizes_of
from gymdata.commands.judge.settings import GenrmConfig
from gymdata.errors import DataError
from gymdata.genrm.aggregate import Adjustments, Rewards
from gymdata.genrm.matches import Matches
from gymdata.rollouts.messages import JsonObject, Message, split_messages
from gymdata.rollouts.schema import SCORES

COLUMNS = ("rollout_id", "run_id", "task_id", "group_id", "rollout_index", "n_turns", "messages")
MATCH_COLUMNS = ("rollout_i", "rollout_j", "judge_idx", "score_1", "score_2", "ranking", "status", "comparison_id")


@dataclass(frozen=True, slots=True)
class JudgeGroups:
    """All rollouts as comparisons, one per group. ``alone``: groups of one, which have nothing to compare."""

    comparisons: list[Comparison]
    alone: int
    rollouts: int

    def numbered(self) -> tuple[list[Candidate], list[str], np.ndarray]:
        """Every candidate, its run, and the number of its group; in the order in which responses are numbered."""
        candidates = [e for c in self.comparisons for e in c.candidates]
        runs = [c.run_id for c in self.comparisons for _ in c.candidates]
        sizes = [len(c.candidates) for c in self.comparisons]
        return candidates, runs, np.repeat(np.arange(len(sizes)), sizes)


def group_comparisons(rollouts: pa.Table, show: str, principle: str | None, limit: int | None = None) -> JudgeGroups:
    """Comparisons by group, groups by id, members by index. ``limit`` takes the first N groups."""
    import polars as pl

    prompts, completions = split_messages(rollouts["messages"].combine_chunks(), rollouts["n_turns"].to_numpy())
    names = {name: rollouts[name].to_pylist() for name in COLUMNS if name != "messages"}
    keys = pl.DataFrame(pl.from_arrow(rollouts.select(["group_id", "rollout_index", "rollout_id"])))
    ordered = keys.lazy().with_row_index("row").sort("rollout_index", "rollout_id")
    groups = ordered.group_by("group_id").agg("row").sort("group_id").collect()[:limit]
    comparisons, alone = [], 0
    for group, rows in groups.iter_rows():
        if len(rows) < 2:
            alone += 1
            continue
        candidates = []
        for row in rows:
            messages = completions[row].as_py()
            reasoning = "\n".join(m["reasoning"] for m in messages if m.get("reasoning"))
            text = transcript(messages) if show == "transcript" else final_answer(messages)
            candidates.append(Candidate(names["rollout_id"][row], names["rollout_index"][row], text, reasoning))
        conversation = [{"role": m["role"], "content": m.get("content") or ""} for m in prompts[rows[0]].as_py()]
        comparisons.append(
            Comparison(names["run_id"][rows[0]], group, names["task_id"][rows[0]], conversation, candidates, principle)
        )
    return JudgeGroups(comparisons, alone, int(groups["row"].list.len().sum()))


def final_answer(messages: Sequence[Message]) -> str:
    """The text of the last message when the policy wrote it; else there is no answer."""
    last = messages[-1] if messages else None
    return (last.get("content") or "") if last is not None and last["role"] == "assistant" else ""


def transcript(messages: Sequence[Message]) -> str:
    """Messages, calls and results, one paragraph per message; without reasoning."""
    parts = []
    for message in messages:
        text = message.get("content") or ""
        if message["role"] != "assistant":
            name = f" {message['name']}" if message.get("name") else ""
            text = f"[{message['role']}{name}]\n{text}"
        calls = message.get("tool_calls")
        calls = _arguments(calls) if isinstance(calls, str) else calls  # text that is not JSON is no call
        for call in [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []:
            function = call["function"] if isinstance(call.get("function"), dict) else call
            text += f"\n[calls {function.get('name')} {json.dumps(function.get('arguments'), ensure_ascii=False)}]"
        parts.append(text.strip())
    return "\n\n".join(part for part in parts if part)


def response_transcript(response: JsonObject) -> str:
    """The transcript of a response in the Responses API's shape: the same text as a rollout's with the same content."""
    messages: list[Message] = []
    names: JsonObject = {}
    output = response.get("output")
    for item in output if isinstance(output, list) else []:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "message":
            messages.append({"role": "assistant", "content": genrm.plain_text(item.get("content")), "tool_calls": []})
        elif kind == "function_call":
            names[str(item.get("call_id"))] = item.get("name")
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            messages[-1]["tool_calls"].append(
                {"name": item.get("name"), "arguments": _arguments(item.get("arguments"))}
            )
        elif kind == "function_call_output":
            name = names.get(str(item.get("call_id")))
            messages.append({"role": "tool", "name": name, "content": genrm.plain_text(item.get("output"))})
    return transcript(messages)


def _arguments(arguments: Any) -> Any:
    """The Responses API sends arguments as JSON text."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How comparisons become rewards."""

    method: str
    adjust: Adjustments

    @property
    def source(self) -> str:
        changed = {k: v for k, v in asdict(self.adjust).items() if v != getattr(Adjustments(), k)}
        return self.method + "".join(f" {name}={value:g}" for name, value in changed.items())


def aggregation_of(config: GenrmConfig) -> Aggregation:
    """As the settings say."""
    return Aggregation(config.aggregator_method, config.adjustments())


def rewards_of(comparisons: pa.Table, field: JudgeGroups, how: Aggregation) -> tuple[Rewards, JsonObject, Matches]:
    """Rewards by candidate (as ``JudgeGroups.numbered``), the bias report, and the comparisons as columns.

    Comparisons of rollouts that are not among the candidates are left out.
    """
    candidates, _, groups = field.numbered()
    matches = matches_in(comparisons, {e.rollout_id: n for n, e in enumerate(candidates)})
    sizes = sizes_of(candidates)
    rewards = genrm.aggregate(matches, groups, how.method, adjust=how.adjust, sizes=sizes)
    report = {**genrm.bias_report(matches, sizes.answer), "metrics": rewards.metrics}
    triples, having = genrm.preferences(matches).cycles(groups)
    report["cycles"] = {"triples": triples, "groups": having}
    return rewards, report, matches


def matches_in(comparisons: pa.Table, number: Mapping[str, int]) -> Matches:
    """The comparisons (``MATCH_COLUMNS``) between rollouts that have a number, in the order of their ids."""
    rollout_ids = pa.array(list(number), pa.string())
    indices = [pc.index_in(comparisons[name], value_set=rollout_ids) for name in ("rollout_i", "rollout_j")]
    matches = comparisons.filter(pc.and_(*map(pc.is_valid, indices)))
    matches = matches.take(pc.sort_indices(matches["comparison_id"]))
    numbers = np.fromiter(number.values(), np.int64, len(number))
    first, second = (
        numbers[pc.index_in(matches[name], value_set=rollout_ids).to_numpy()] for name in ("rollout_i", "rollout_j")
    )
    judged = pc.equal(matches["status"], "judged").to_numpy()
    values = [np.where(judged, matches[name].to_numpy(), np.nan) for name in ("score_1", "score_2", "ranking")]
    return Matches(first, second, matches["judge_idx"].to_numpy().astype(np.int64), *values)


def refuse_odd_matches(comparisons: pa.Table, rollout_ids: pa.Array, groups: np.ndarray, where: str | Path) -> None:
    """Raises DataError, naming file and row, for comparisons (``MATCH_COLUMNS``) that gymdata never writes: an unknown
    status, a rollout with itself, or rollouts of two groups (``groups``: that of each id).
    """
    table = comparisons
    strange = pc.invert(pc.is_in(table["status"], value_set=pa.array(STATUSES)))
    if (row := _first(strange)) is not None:
        got = repr(table["status"][row].as_py())
        raise DataError.bad_row(where, row + 1, "status", got, f"one of {', '.join(STATUSES)}")
    if (row := _first(pc.equal(table["rollout_i"], table["rollout_j"]))) is not None:
        got = f"{table['rollout_i'][row].as_py()!r}, which is rollout_i as well"
        raise DataError.bad_row(where, row + 1, "rollout_j", got, "another rollout of its group")
    first, second = (
        pa.array(groups).take(pc.index_in(table[n], value_set=rollout_ids)) for n in ("rollout_i", "rollout_j")
    )
    # An unknown rollout has no group: its comparisons are left out.
    if (row := _first(pc.not_equal(first, second))) is not None:
        got = f"{table['rollout_j'][row].as_py()!r}, which is of another group than {table['rollout_i'][row].as_py()!r}"
        raise DataError.bad_row(where, row + 1, "rollout_j", got, "a rollout of the same group")


def _first(flags: pa.ChunkedArray | pa.Array) -> int | None:
    row = int(pc.index(flags, True).as_py())
    return row if row >= 0 else None


def score_table(rewards: Rewards, field: JudgeGroups, name: str, source: str) -> pa.Table:
    """Rewards as rows of the scores table; no valid comparison is a failed score without a value."""
    candidates, runs, _ = field.numbered()
    rows = []
    for n, (candidate, run) in enumerate(zip(candidates, runs, strict=True)):
        value, counted = float(rewards.reward[n]), f"{rewards.judged[n]} judged, {rewards.missing[n]} missing"
        error = f", standard error {rewards.error[n]:.4g}" if not math.isnan(rewards.error[n]) else ""
        rows.append(
            {
                "rollout_id": candidate.rollout_id,
                "name": name,
                "value": None if math.isnan(value) else value,
                "status": "failed" if math.isnan(value) else "scored",
                "source": source,
                "run_id": run,
                "detail": counted + error,
            }
        )
    return pa.Table.from_pylist(rows, schema=SCORES.schema)
