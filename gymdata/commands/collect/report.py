"""The summary of a collect run, from the scalar columns of the rows on disk."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import EXIT_FAULTS, EXIT_INTERRUPTED, EXIT_OK, counted
from gymdata.public import Figures, Report, Row
from gymdata.rewards.scheduler import PartTally
from gymdata.rollouts.failures import failures_in, short_reason
from gymdata.settings import Settings
from gymdata.stats import known_rewards, mean_ci
from gymdata.store.paths import Identity

COLUMNS = (
    "group_id",
    "status",
    "stop_reason",
    "reward",
    "rewards",
    "extra",
    "n_turns",
    "n_breaks",
    "n_context_tokens",
    "n_generated_tokens",
)


@dataclass(frozen=True, slots=True, repr=False)
class CollectSummary(Report):
    """The whole run (``rollouts`` … ``reward_faults``) and what this call did (``new_rollouts`` … ``seconds``).

    ``reward``: mean over scored rollouts with a 95 % bootstrap interval over groups; None without any.
    ``reward_faults``: rollouts without a reward because a function failed on them; ``parts``: each function's account.
    ``behavior``: what the policy did that is odd, by code (family B of validate). ``agent_exits``: rollouts whose agent
    ended with an exit code other than 0. ``pending``: requested, not there, and to be tried again by the same command;
    ``exhausted``: out of attempts. ``away_s``: of ``seconds`` those in which no server could be reached; ``tokens_per_s``
    is without them. ``masked``: rollouts that the environment took out of
    training, by reason. ``tokens_read``: prompt tokens of this call's requests, and
    ``tokens_cached``: those that were in the prefix cache; None where the engine is in another process.
    """

    path: str
    run_id: str
    tasks: int
    groups: int
    rollouts: int
    completed: int
    truncated: int
    truncated_share: float | None
    turns: int
    tokens_generated: int
    tokens_context: int
    reward: Figures
    breaks: int
    parts: dict[str, PartTally]
    reward_faults: int
    new_rollouts: int
    failures: int
    empty_generations: int
    pending: int
    exhausted: int
    skipped_rows: int
    seconds: float
    tokens_per_s: float | None
    interrupted: bool
    gave_up: bool
    behavior: dict[str, str] = field(default_factory=dict)
    masked: dict[str, int] = field(default_factory=dict)
    agent_exits: int = 0
    away_s: float = 0.0
    tokens_read: int | None = None
    tokens_cached: int | None = None

    @property
    def exit_code(self) -> int:
        """130 interrupted; 1 while rollouts are missing (unless given up) or could not be scored, and where every agent
        failed; else 0."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        missing = self.pending + self.exhausted
        faults = (missing and not self.gave_up) or self.reward_faults or (self.agent_exits == self.rollouts > 0)
        return EXIT_FAULTS if faults else EXIT_OK

    def rows(self) -> list[Row]:
        mean, ci = self.reward["mean"], self.reward["ci95"]
        interval = f" (95 %: {ci[0]:.3f} to {ci[1]:.3f})" if ci else ""
        rows: list[Row] = [
            ("groups", self.groups),
            ("rollouts", f"{self.rollouts:,} ({self.new_rollouts:,} new)"),
            ("turns", self.turns),
            ("tokens generated", self.tokens_generated),
            ("reward", "not scored" if mean is None else f"{mean:.3f}{interval}"),
            ("truncated", "–" if self.truncated_share is None else f"{100 * self.truncated_share:.1f} %"),
            ("breaks", self.breaks),
        ]
        optional = [
            ("failed attempts", self.failures),
            ("empty generations", self.empty_generations),
            ("pending (rerun to resume)", self.pending),
            ("out of attempts", self.exhausted),
            ("bad task rows skipped", self.skipped_rows),
        ]
        rows += [(f"  without reward, {why}", n) for why, n in self.masked.items()]
        rows += self._scoring()
        rows += [(name, count) for name, count in optional if count]
        if self.interrupted:
            then = (
                f"{counted(self.pending, 'rollout is', 'rollouts are')} pending; rerun the same command to resume"
                if self.pending
                else f"nothing is pending; next: gymdata validate {self.path}"
            )
            rows.append(("interrupted", then))
        # The time includes the engine's start, the speed does not.
        speed = [("sampling", f"{self.tokens_per_s:,.0f} tokens/s")] if self.tokens_per_s else []
        if self.tokens_read:
            share = (self.tokens_cached or 0) / self.tokens_read
            speed.append(("prefix cache", f"{100 * share:.0f} % of {self.tokens_read:,} prompt tokens"))
        away = [("server away", f"{self.away_s:.0f} s, which the speed leaves out")] if self.away_s else []
        return [*rows, *speed, *away, ("time", f"{self.seconds:.1f} s"), ("written to", self.path)]

    def remarks(self) -> list[str]:
        """A line for each odd behavior of the policy, and for a reward of the first to end."""
        odd = []
        if self.pending and self.reward["n"]:
            ended = f"the reward is that of the {counted(self.reward['n'], 'rollout')} that ended"
            odd.append(f"{ended}, {self.pending:,} are pending: short answers end first, so it can change")
        if self.agent_exits:
            which = (
                "every agent"
                if self.agent_exits == self.rollouts
                else f"{self.agent_exits:,} of {self.rollouts:,} agents"
            )
            odd.append(
                f"{which} ended with an exit code other than 0: their rollouts are truncated (exit_N), and "
                "extra.environment.stderr of each says why (gymdata show)"
            )
        odd += [f"{code}: {text} (gymdata validate --explain {code})" for code, text in self.behavior.items()]
        if self.exhausted or (self.failures and self.pending):
            odd.append(f"`gymdata query :failures {self.path}` says why attempts failed")
        return odd

    def _scoring(self) -> list[Row]:
        rows = [line for part in self.parts.values() for line in part.lines()]
        if not self.reward_faults:
            return rows
        first = next((part.first_error for part in self.parts.values() if part.failed), None)
        if sum(part.failed > 0 for part in self.parts.values()) == 1:
            rows = [line for line in rows if not line[0].endswith(" failed")]
        hint = f"mend the function, then run `gymdata score {self.path} --reward …`"
        return [("reward faults", f"{self.reward_faults:,}; first: {first}"), ("  what to do", hint), *rows]


@dataclass(frozen=True, slots=True, repr=False)
class CollectPlan(Report):
    """The result of a dry run. ``prompt``: of the first task, as the policy would read it, where it is made here."""

    path: str
    tasks: int
    skipped_rows: int
    rollouts_wanted: int
    identity: Identity
    notes: list[str]
    config: Settings
    prompt: str | None = None

    def rows(self) -> list[Row]:
        rewards = [f"{r['name']} × {r['weight']:g}" for r in self.identity["rewards"]]
        player = "agent" if self.config.get("agent") else "environment"
        spec = self.config["agent" if player == "agent" else "env"]
        return [
            ("tasks", self.tasks),
            *([("bad task rows skipped", self.skipped_rows)] if self.skipped_rows else []),
            ("rollouts wanted", self.rollouts_wanted),
            ("model", self.config["model"]),
            ("engine", self.config["endpoint"] or self._own_engine()),
            *((player, one) for one in (spec if isinstance(spec, list) and spec else [spec or None])),
            ("rewards", ", ".join(rewards) or None),
            ("path", self.path),
            *([("first prompt", repr(self.prompt))] if self.prompt is not None else []),
            *(("note", text) for text in self.notes),
        ]

    def _own_engine(self) -> str:
        replicas = self.config.get("replicas")
        return (
            "vLLM in process"
            if replicas is None
            else f"vLLM, {replicas} replicas on Ray ({self.config['ray'] or 'local'})"
        )


def facts_of(rows: pa.Table) -> Figures:
    """The fields of a CollectSummary that follow from the rows. ``rows``: a table of ``COLUMNS``."""
    n = rows.num_rows
    truncated = _sum(pc.equal(rows["status"], "truncated"))
    scored = rows.filter(pa.array(np.isfinite(known_rewards(rows["reward"]))))
    mean, low, high = (
        mean_ci(scored["reward"].to_numpy(), scored["group_id"].combine_chunks().dictionary_encode().indices.to_numpy())
        if scored.num_rows
        else (math.nan, math.nan, math.nan)
    )
    return {
        "groups": pc.count_distinct(rows["group_id"]).as_py(),
        "rollouts": n,
        "completed": n - truncated,
        "truncated": truncated,
        "truncated_share": truncated / n if n else None,
        "turns": _sum(rows["n_turns"]),
        "tokens_generated": _sum(rows["n_generated_tokens"]),
        "tokens_context": _sum(rows["n_context_tokens"]),
        "breaks": _sum(rows["n_breaks"]),
        # An environment may name the reasons of its own.
        "agent_exits": _sum(pc.match_substring_regex(rows["stop_reason"].cast(pa.string()), "^exit_[0-9]+$")),
        "masked": dict(Counter(map(short_reason, failures_in(rows["extra"].combine_chunks()).values()))),
        **_parts_of(rows),
        "reward": {
            "n": scored.num_rows,
            "mean": None if math.isnan(mean) else mean,
            "ci95": None if math.isnan(low) else [low, high],
        },
    }


def _parts_of(rows: pa.Table) -> Figures:
    """``parts`` and ``reward_faults`` of a run. Faults are stored in ``extra``, so that they survive a resume."""
    parts: dict[str, PartTally] = {}
    lists = rows["rewards"].combine_chunks()
    flat = lists.flatten()
    counts = (
        pa.table({"name": flat.field("name"), "value": flat.field("value")})
        .group_by("name")
        .aggregate([("value", "count"), ([], "count_all")])
    )
    for name, scored, n in zip(*(counts[c].to_pylist() for c in ("name", "value_count", "count_all")), strict=True):
        parts[name] = PartTally(name, scored=scored, does_not_apply=n - scored)
    # Only rollouts with a fault are looked into, one by one.
    faulty = rows["extra"].filter(pc.fill_null(pc.match_substring(rows["extra"], '"reward_faults"'), False))
    # The text may also be in what the environment said.
    faults = [of_row for text in faulty.to_pylist() if (of_row := json.loads(text).get("reward_faults"))]
    for name, message in (pair for of_row in faults for pair in of_row.items()):
        part = parts.setdefault(name, PartTally(name, does_not_apply=1))
        part.does_not_apply -= 1
        part.add(None, message)
    return {"parts": parts, "reward_faults": len(faults)}


def _sum(column: Any) -> int:
    return int(pc.sum(column).as_py() or 0)
