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
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

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


def versions(session: Session) -> tuple[int, list[Version]]:
    """The first version of main, and what each conversation is. Side conversations have later versions only where those
    repeat something of them."""
    threads, found = session.threads, _versions(session)
    turns = Counter(step.thread for step in session.steps)
    with_tools = [k for k, thread in enumerate(threads) if thread.tools]
    most = max(range(len(threads)), key=lambda k: (turns[k], -k))
    main = found[with_tools[0] if with_tools else most].origin
    return main, _versions(session, main)


def _versions(session: Session, main: int | None = None) -> list[Version]:
    """What each conversation is. ``main``: the only one of which those that repeat nothing are versions (None: any)."""
    last = {step.thread: turn for turn, step in enumerate(session.steps)}
    found: list[Version] = []
    for k, thread in enumerate(session.threads):
        before, cause = thread.edits, thread.cause
        if before is not None and thread.if_left:
            waits = bool(session.steps[last[before]].message.get("tool_calls"))
            if last[before] > thread.first_turn or main not in (None, found[before].origin):
                before = cause = None
            elif waits and session.threads[before].fingerprint != thread.fingerprint:
                cause = f"undecided: a later version of conversation {before}, which waits for a call, or a sub-agent's"
                before = None
        found.append(Version(k if before is None else found[before].origin, cause))
    return found


def agents(session: Session) -> list[str]:
    """The label of each conversation."""
    main, found = versions(session)
    labels: list[str] = []
    used: Counter[str] = Counter()
    for k, (thread, version) in enumerate(zip(session.threads, found, strict=True)):
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


def label_turns(session: Session) -> list[str]:
    """Give every turn its agent; returns the label of each conversation. A branch within a conversation whose new messages
    happen to repeat what was sampled after the fork has a label of its own, too."""
    labels, turns = agents(session), session.encoder.turns
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
    return labels


def unread_turns(session: Session) -> list[int]:
    """The unread turns of labelled ones: retries that nothing continues, and those whose client was gone."""
    turns = session.encoder.turns
    cut = chains(turns, expand_prompts(turns, check_digests=False), "keep", session.unread)
    return sorted(chain.turns[-1] for chain in cut if chain.abandoned)


def main_leaf(session: Session, labels: Sequence[str], unread: Collection[int]) -> int:
    """The last turn of the conversation that the row shows and rewards read: of ``main``, or its latest version. An
    unread one only where nothing of them was read."""
    ours = [k for k, step in enumerate(session.steps) if f"{labels[step.thread]}.".startswith(f"{MAIN}.")]
    return max([turn for turn in ours if turn not in unread] or ours)


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


def session_row(
    session: Session,
    *,
    key: RunKey,
    member: Member,
    labels: Sequence[str],
    unread: Sequence[int],
    status: str,
    stop_reason: str | None,
    reward: float | None,
    parts: Sequence[RewardPart],
    faults: Mapping[str, str],
    duration_s: float,
    left: Mapping[str, Any],
    masked: Mapping[str, Any],
) -> RolloutRow:
    """The table's row. ``labels``: of ``label_turns``; ``unread``: of ``unread_turns``. ``faults``: reward functions that
    failed, by name. ``left``: what the agent's run left for rewards; ``masked``: why the rollout is not trained on."""
    last = main_leaf(session, labels, unread)
    shown = session.numbered(last)
    shown_turns = {turn for _, turn in shown}
    other_messages = [
        {
            "agent": labels[session.steps[leaf].thread],
            "messages": [table_message(message, turn) for message, turn in session.numbered(leaf)],
        }
        for leaf in session.last_turns()
        if leaf not in shown_turns
    ]
    main, found = versions(session)
    began = [
        {"agent": label, "turn": thread.first_turn, "fingerprint": thread.fingerprint}
        | ({"cause": version.cause} if version.cause else {})
        for label, thread, version in zip(labels, session.threads, found, strict=True)
    ]
    extra: dict[str, object] = {"session": session.key, "conversations": began}
    ours = [k for k, version in enumerate(found) if version.origin == main]
    if len(ours) > 1:
        extra["main"] = {
            "versions": len(ours),
            "turns": sum(step.thread in ours for step in session.steps),
            "turns_shown": len(shown_turns - {None}),
            "causes": [found[k].cause for k in ours[1:]],
        }
    if other_messages:
        extra["other_messages"] = other_messages
    extra |= {"environment": dict(left)} if left else {}
    extra |= masked
    extra |= {"reward_faults": dict(faults)} if faults else {}
    extra |= {"sampling": session.sampling} if session.sampling else {}
    extra |= {"clamped": session.clamped} if session.clamped else {}
    extra |= {"ids_behind_stop": session.cut} if session.cut else {}
    extra |= {"unread_turns": list(unread)} if unread else {}
    return {
        "rollout_id": session.rollout_id,
        "run_id": key.run_id,
        "task_id": member.task_id,
        "group_id": member.group_id,
        "rollout_index": member.rollout_index,
        "policy": key.policy,
        "policy_hash": key.policy_hash,
        "policy_version": key.policy_version,
        "status": status,
        "stop_reason": stop_reason,
        "finish_reason": session.encoder.turns[last]["finish_reason"],
        "reward": reward,
        "rewards": [{"name": part.name, "value": part.value} for part in parts],
        "temperature": session.temperatures[last],
        **session.encoder.columns(),
        "messages": [table_message(message, turn) for message, turn in shown],
        "tools": to_json(list(session.threads[session.steps[last].thread].tools or ())),
        "task": to_json(dict(member.task)),
        "extra": to_json(extra),
        "started_at": datetime.fromtimestamp(session.started_at, UTC),
        "duration_s": duration_s,
    }
