"""A session that ended as a row of the rollouts table: who made each call, and the conversations side by side.

``main`` is the first conversation that has tools, or without any the one with the most turns, from its first version on.
Its later versions, begun when the client rewrote or compacted history, are ``main.2``, ``main.3``; another conversation is
called what the client calls it, else ``side-`` and the fingerprint of its system prompt and tools, with a number where
several share it. No two conversations have one label, so one that is not the other's continuation is a branch, and no break.

A conversation that repeats nothing of an earlier one (``if_left``) is decided here, where the whole session is known: it is
a sub-agent's where the earlier one was continued after it began, and stays undecided where another system prompt begins
while the earlier one waits for the result of a call.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from gymdata.commands.collect.resume import RunKey
from gymdata.commands.collect.rows import table_message, to_json
from gymdata.commands.record.ending import Ending
from gymdata.commands.record.request import RequestError
from gymdata.commands.record.sessions import Session
from gymdata.rewards.port import RewardPart
from gymdata.rollouts.messages import RolloutRow, Task, TaskRow
from gymdata.rollouts.turns import MAIN, chains, expand_prompts, kinds

_NAME = re.compile(r"[^\w.-]+")


class Version(NamedTuple):
    """Which version of which conversation (``origin``) a conversation is, with the cause of a later one, or what could not
    be decided."""

    origin: int
    cause: str | None


@dataclass(frozen=True, slots=True)
class Outline:
    """A session's conversations side by side: the label and the version of each, which one is main's first version, the
    turns that nobody read, and the last turn of the conversation that the row shows."""

    labels: Sequence[str]
    versions: Sequence[Version]
    main: int
    unread: Sequence[int]
    leaf: int


def outline_of(session: Session) -> Outline:
    """The outline of a session, whose turns get their agents. Side conversations have later versions only where those
    repeat something of them."""
    threads, turns = session.threads, Counter(step.thread for step in session.steps)
    with_tools = [k for k, thread in enumerate(threads) if thread.tools]
    most = max(range(len(threads)), key=lambda k: (turns[k], -k))
    main = _versions(session)[with_tools[0] if with_tools else most].origin
    versions = _versions(session, main)
    labels = _labels(session, main, versions)
    _label_turns(session, labels)
    encoded = session.encoder.turns
    gone = [turn for turn, step in enumerate(session.steps) if step.unread]
    # Retries that nothing continues, and those whose client was gone.
    cut = chains(encoded, expand_prompts(encoded, check_digests=False), "keep", gone)
    unread = sorted(chain.turns[-1] for chain in cut if chain.abandoned)
    # An unread one is shown only where nothing of main was read.
    ours = [k for k, step in enumerate(session.steps) if f"{labels[step.thread]}.".startswith(f"{MAIN}.")]
    leaf = max([turn for turn in ours if turn not in unread] or ours)
    return Outline(labels, versions, main, unread, leaf)


def _versions(session: Session, main: int | None = None) -> list[Version]:
    """What each conversation is. ``main``: the only one of which those that repeat nothing are versions (None: any)."""
    last = {step.thread: turn for turn, step in enumerate(session.steps)}
    versions: list[Version] = []
    for k, thread in enumerate(session.threads):
        before, cause = thread.edits, thread.cause
        if before is not None and thread.if_left:
            waits = bool(session.steps[last[before]].message.get("tool_calls"))
            if last[before] > thread.first_turn or main not in (None, versions[before].origin):
                before = cause = None
            elif waits and session.threads[before].fingerprint != thread.fingerprint:
                cause = f"undecided: a later version of conversation {before}, which waits for a call, or a sub-agent's"
                before = None
        versions.append(Version(k if before is None else versions[before].origin, cause))
    return versions


def _labels(session: Session, main: int, versions: Sequence[Version]) -> list[str]:
    """The label of each conversation."""
    labels: list[str] = []
    used: Counter[str] = Counter()
    for k, (thread, version) in enumerate(zip(session.threads, versions, strict=True)):
        if k == main:
            label = MAIN
        elif version.origin != k:
            base = labels[version.origin]
            used[base] += 1
            label = f"{base}.{used[base] + 1}"
        else:
            base = _NAME.sub("-", thread.hint)[:60] if thread.hint else f"side-{thread.fingerprint}"
            base = f"side-{base}" if base.startswith(MAIN) else base
            used[base] += 1
            label = base if used[base] == 1 else f"{base}-{used[base]}"
        labels.append(label)
    return labels


def _label_turns(session: Session, labels: Sequence[str]) -> None:
    """Give every turn its agent. A branch within a conversation whose new messages happen to repeat what was sampled after
    the fork has a label of its own, too."""
    turns = session.encoder.turns
    for turn, step in zip(turns, session.steps, strict=True):
        turn["agent"] = labels[step.thread]
    for _ in turns:
        broken = next((k for k, kind in enumerate(kinds(turns)) if kind == "break"), None)
        if broken is None:
            break
        label, below = f"{turns[broken]['agent']}.fork-{broken}", {broken}
        for k in range(broken, len(turns)):
            if k in below or session.steps[k].parent in below:
                below.add(k)
                turns[k]["agent"] = label


class Member(NamedTuple):
    """Which member of which group a session that ends is, and the row of the task."""

    task_id: str
    rollout_index: int
    group_id: str
    task: TaskRow


class Groups:
    """The tasks of one run: rollouts of one task id are a group, whose members are numbered in the order of their rows. A
    group is what its rows say, so a session that could not be ended leaves nothing in it. ``rows``: of its rollouts."""

    def __init__(self, key: RunKey, rows: Iterable[RolloutRow]) -> None:
        self._key = key
        self._group_of: dict[str, str] = {}
        self._next_index: Counter[str] = Counter()
        for row in rows:
            self.add(row)

    def add(self, row: RolloutRow) -> None:
        """A rollout that is written."""
        task_id = row["task_id"]
        self._group_of.setdefault(task_id, row["group_id"])
        self._next_index[task_id] = max(self._next_index[task_id], row["rollout_index"] + 1)

    def member(self, session: Session, ending: Ending, labels: Sequence[str]) -> Member:
        """The member that a session would be if its row were the next. Raises RequestError for another task under an id that
        has one."""
        # Conversations that begin with the same prompt are attempts at one task, whatever a later version begins with.
        main = session.threads[labels.index(MAIN)]
        begun = session.steps[main.first_turn].new
        opening = list(itertools.takewhile(lambda m: m["role"] != "assistant", begun))
        first = next((m.get("content") for m in begun if m["role"] == "user"), None)
        digest = hashlib.blake2b(to_json([opening, main.tools]).encode(), digest_size=8).hexdigest()
        unnamed = session.key if session.named else f"prompt-{digest}"
        inside = (ending.task or {}).get("task_id")
        task_id = ending.task_id or (unnamed if inside in (None, "") else str(inside))
        row: TaskRow = {"task_id": task_id, **({"prompt": first} if ending.task is None else ending.task)}
        content = hashlib.blake2b(to_json(row).encode(), digest_size=16).hexdigest()
        group_id = self._key.group_id(Task(task_id, [], None, {}, content))
        group = self._group_of.get(task_id, group_id)
        if group != group_id and ending.task is not None:
            text = f"task {task_id} was another one in an earlier rollout of this run"
            raise RequestError("invalid", f"{text}: give this one a task_id of its own", where="task", status=409)
        return Member(task_id, self._next_index[task_id], group, row)


@dataclass(frozen=True, slots=True)
class Score:
    """How a session ended: ``faults``: reward functions that failed, by name."""

    status: str
    stop_reason: str | None
    reward: float | None
    parts: Sequence[RewardPart]
    faults: Mapping[str, str]


def session_row(
    session: Session, outline: Outline, key: RunKey, member: Member, ending: Ending, score: Score
) -> RolloutRow:
    """The table's row."""
    leaf, steps = outline.leaf, session.steps
    shown = session.numbered(leaf)
    return {
        "rollout_id": session.rollout_id,
        "run_id": key.run_id,
        "task_id": member.task_id,
        "group_id": member.group_id,
        "rollout_index": member.rollout_index,
        "policy": key.policy,
        "policy_hash": key.policy_hash,
        "policy_version": key.policy_version,
        "status": score.status,
        "stop_reason": score.stop_reason,
        "finish_reason": session.encoder.turns[leaf]["finish_reason"],
        "reward": score.reward,
        "rewards": [{"name": part.name, "value": part.value} for part in score.parts],
        "temperature": steps[leaf].temperature,
        **session.encoder.columns(),
        "messages": [table_message(message, turn) for message, turn in shown],
        "tools": to_json(list(session.threads[steps[leaf].thread].tools or ())),
        "task": to_json(dict(member.task)),
        "extra": to_json(_extra(session, outline, ending, score)),
        "started_at": datetime.fromtimestamp(session.started_at, UTC),
        "duration_s": session.last_at - session.started_at,
    }


def _extra(session: Session, outline: Outline, ending: Ending, score: Score) -> dict[str, object]:
    """What has no column."""
    labels, versions = outline.labels, outline.versions
    shown_turns = {turn for _, turn in session.numbered(outline.leaf) if turn is not None}
    began = [
        {"agent": label, "turn": thread.first_turn, "fingerprint": thread.fingerprint}
        | ({"cause": version.cause} if version.cause else {})
        for label, thread, version in zip(labels, session.threads, versions, strict=True)
    ]
    extra: dict[str, object] = {"session": session.key, "conversations": began}
    ours = [k for k, version in enumerate(versions) if version.origin == outline.main]
    if len(ours) > 1:
        extra["main"] = {
            "versions": len(ours),
            "turns": sum(step.thread in ours for step in session.steps),
            "turns_shown": len(shown_turns),
            "causes": [versions[k].cause for k in ours[1:]],
        }
    other_messages = [
        {
            "agent": labels[session.steps[leaf].thread],
            "messages": [table_message(message, turn) for message, turn in session.numbered(leaf)],
        }
        for leaf in session.last_turns()
        if leaf not in shown_turns
    ]
    steps = list(enumerate(session.steps))
    optional: dict[str, object] = {
        "other_messages": other_messages,
        "environment": dict(ending.left),
        **ending.masked,
        "reward_faults": dict(score.faults),
        "sampling": [{"turn": turn, **step.sampling} for turn, step in steps if step.sampling],
        "clamped": [{"turn": turn, **step.clamped} for turn, step in steps if step.clamped],
        "ids_behind_stop": [{"turn": turn, "ids": step.cut} for turn, step in steps if step.cut],
        "unread_turns": list(outline.unread),
    }
    return extra | {name: value for name, value in optional.items() if value or name in ending.masked}
