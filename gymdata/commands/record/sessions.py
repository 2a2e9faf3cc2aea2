"""The conversations of one session, and where a request continues them.

Invariants: a request whose messages extend what was recorded (by the rules of ``record.messages``) gets the ids that
were read and sampled, and the bridge to its new messages, so nothing sampled is rendered again; everything else is rendered
once, as a conversation of its own, with the cause where it is a later version of an earlier one. A session is the
list of its events: what is added to it while it runs is what a restart reads back, so both give the same turns.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gymdata.commands.record.messages import (
    Calls,
    digest_of,
    digests,
    fingerprint,
    same_assistant,
    tools_digest,
    with_recorded_ids,
)
from gymdata.commands.record.request import AgentRequest, RequestError
from gymdata.engines.port import Chat, Generation
from gymdata.errors import RefusedError
from gymdata.rollouts.messages import Message, Tools
from gymdata.rollouts.next_prompt import next_prompt
from gymdata.rollouts.turns import Call, Ids, TurnEncoder

#: One model call as the session's journal has it, or the budget that was used up.
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompt of a request. ``parent``: the turn that it continues, -1 where it was rendered; ``new``: the messages after
    that turn's; ``edits``: the conversation that it is another version of; ``cause``: why it does not continue;
    ``if_left``: see ``Thread``."""

    prompt: Sequence[int]
    parent: int
    new: list[Message]
    edits: int | None = None
    cause: str | None = None
    if_left: bool = False


@dataclass(frozen=True, slots=True)
class Thread:
    """One conversation: what was rendered once, or what was changed after a turn of another, and every turn that continues
    it. ``fingerprint``: of system prompt and tools; ``hint``: what the client calls it; ``edits``: the conversation that it
    is another version of; ``if_left``: it repeats nothing of that one, and is its version only if nothing continues that one
    after this one began."""

    first_turn: int
    fingerprint: str
    hint: str | None
    tools: Tools
    edits: int | None
    cause: str | None
    if_left: bool


@dataclass(slots=True)
class Step:
    """One recorded call: ``tail`` are the ids of its prompt after those of its parent, ``message`` what the client got."""

    parent: int
    thread: int
    new: list[Message]
    message: Message
    tail: Ids
    id: str
    temperature: float
    #: What the client chose, where it differs from the run's settings, and a length that was cut to the context.
    sampling: dict[str, Any] | None
    clamped: dict[str, int] | None
    #: How many ids behind the stop string the engine gave, which were cut.
    cut: int
    #: Whether its client went away before it had the answer.
    unread: bool
    #: Of the conversation up to and with ``message``.
    digest: bytes
    calls: Calls


@dataclass(slots=True)
class Session:
    """One rollout while it is recorded. Times are seconds since 1970."""

    key: str
    rollout_id: str
    #: Whether a client named it; else its requests are found by their conversation.
    named: bool = True
    started_at: float = field(default_factory=time.time)
    last_at: float = field(default_factory=time.time)
    encoder: TurnEncoder = field(default_factory=TurnEncoder)
    steps: list[Step] = field(default_factory=list)
    threads: list[Thread] = field(default_factory=list)
    in_flight: int = 0
    #: Of the turns that are recorded or in flight, the numbers by which they are seeded.
    numbers: set[int] = field(default_factory=set)
    #: The budget that ended it.
    spent: str | None = None
    #: Held while it is scored and written: it gets no more calls.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _ends: dict[bytes, list[int]] = field(default_factory=dict)
    _begins: dict[bytes, int] = field(default_factory=dict)
    #: By the digest of every beginning of a conversation, the first conversation that has it.
    _known: dict[bytes, int] = field(default_factory=dict)
    _turns: dict[bytes, int] = field(default_factory=dict)
    _openings: dict[bytes, int] = field(default_factory=dict)

    # --- a request --------------------------------------------------------------------------------------------------

    def plan(self, request: AgentRequest, chat: Chat) -> Plan:
        """The prompt that ``request`` continues. Raises RequestError for messages that the model's template refuses."""
        messages = self._with_previous(request)
        if not messages:
            raise RequestError("invalid", "there are no messages", where="messages")
        chain = list(digests(messages, tools_digest(request.tools)))
        refusal = None
        if match := self.continued(messages, chain):
            turn, n_before = match
            recorded = self.messages_of(turn)
            new = with_recorded_ids(messages[n_before:], messages[:n_before], recorded)
            if not new:
                raise RequestError(
                    "invalid", "the last message is the model's own: nothing follows it", where="messages"
                )
            try:
                bridge = chat.bridge(recorded, new, request.tools)
                return Plan(next_prompt(self.ids_of(turn).tolist(), bridge, chat.end_of_turn_ids), turn, new)
            except RefusedError as error:
                refusal = str(error.message)
        step = self.steps[same] if (same := self._begins.get(chain[-1])) is not None else None
        # The chain leaves reasoning out: with another it is another prompt.
        if refusal is None and step:
            recorded_prompt = [*self.numbered(step.parent), *((message, None) for message in step.new)]
            if _same_assistants(messages, recorded_prompt):
                return Plan([*self.ids_of(step.parent).tolist(), *step.tail.tolist()], step.parent, step.new)
        edits, cause, if_left = self._earlier_version(messages, request)
        return Plan(list(chat.render(messages, request.tools)), -1, messages, edits, refusal or cause, if_left)

    def continued(self, messages: Sequence[Message], chain: Sequence[bytes]) -> tuple[int, int] | None:
        """The turn after which these messages continue, and how many of them come before; the longest such."""
        for n_before in range(len(messages), 0, -1):
            if messages[n_before - 1]["role"] != "assistant":
                continue
            for turn in reversed(self._ends.get(chain[n_before - 1], ())):
                if _same_assistants(messages[:n_before], self.numbered(turn)):
                    return turn, n_before
        return None

    def ids_of(self, turn: int) -> Ids:
        """The ids that were read and sampled up to and with a turn; none up to -1."""
        parts = [np.empty(0, np.int32)]
        while turn >= 0:
            step = self.steps[turn]
            parts += [np.asarray(self.encoder.turns[turn]["generation_token_ids"], np.int32), step.tail]
            turn = step.parent
        return np.concatenate(parts[::-1])

    def messages_of(self, turn: int) -> list[Message]:
        """The conversation up to and with what the model said at a turn."""
        return [message for message, _ in self.numbered(turn)]

    def numbered(self, turn: int) -> list[tuple[Message, int | None]]:
        """The same, each message with the turn that sampled it."""
        parts: list[list[tuple[Message, int | None]]] = []
        while turn >= 0:
            step = self.steps[turn]
            parts.append([*((message, None) for message in step.new), (step.message, turn)])
            turn = step.parent
        return [pair for part in reversed(parts) for pair in part]

    def begin(self) -> int:
        """A number for the turn of a request: the lowest that no other has, so a retry has the seed of what failed."""
        number = next(k for k in itertools.count() if k not in self.numbers)
        self.numbers.add(number)
        return number

    # --- what was sampled -------------------------------------------------------------------------------------------

    def event(self, request: AgentRequest, plan: Plan, generation: Generation, message: Message, **facts: Any) -> Event:
        """The journal's record of one call. ``facts``: id, finish_reason, sampling and the like."""
        before = len(self.ids_of(plan.parent))
        top = generation.top_log_probs
        weights = generation.weight_versions
        return {
            "parent": plan.parent,
            "new": plan.new,
            "message": message,
            "tail": [int(i) for i in plan.prompt[before:]],
            "ids": [int(i) for i in generation.token_ids],
            "log_probs": [float(p) for p in generation.log_probs],
            "ended": generation.finish_reason,
            "cut": generation.n_cut,
            "top": None if top is None else [[{"id": int(i), "log_prob": float(p)} for i, p in row] for row in top],
            "server": generation.server,
            "weights": None if weights is None else [{"version": v, "start": a, "end": b} for v, a, b in weights],
            "tools": request.tools if plan.parent < 0 else None,
            "hint": request.conversation_hint,
            "edits": plan.edits,
            "cause": plan.cause,
            "if_left": plan.if_left,
            "at": time.time(),
            **facts,
        }

    def add(self, event: Event) -> None:
        """Take a call in."""
        if "spent" in event:
            self.spent = event["spent"]
            return
        parent, turn, tail = event["parent"], len(self.steps), np.array(event["tail"], np.int32)
        prompt = np.concatenate((self.ids_of(parent), tail))
        ids, log_probs = np.array(event["ids"], np.int32), np.array(event["log_probs"], np.float32)
        self.encoder.add(
            Call(
                prompt,
                ids,
                log_probs,
                event["ended"],
                top_log_probs=event["top"],
                server=event["server"],
                weight_versions=event["weights"],
            )
        )
        new, message = event["new"], event["message"]
        if parent < 0:
            same = next((k for k, t in enumerate(self.threads) if self._is_retry(t, event, prompt)), None)
            thread = len(self.threads) if same is None else same
            if same is None:
                facts = (event[name] for name in ("hint", "tools", "edits", "cause", "if_left"))
                self.threads.append(Thread(turn, fingerprint(new, event["tools"]), *facts))
        else:
            thread = self._thread_after(parent, turn, [*self.messages_of(parent), *new])
        call = {name: event[name] for name in ("id", "temperature", "sampling", "clamped", "cut", "unread")}
        start, calls = tools_digest(event["tools"]), Calls()
        if parent >= 0:
            start, calls = self.steps[parent].digest, self.steps[parent].calls.copy()
        chain = list(digests([*new, message], start, calls))
        self.steps.append(Step(parent, thread, new, message, tail, digest=chain[-1], calls=calls, **call))
        for digest in chain:
            self._known.setdefault(digest, thread)
        self._ends.setdefault(chain[-1], []).append(turn)
        self._begins[chain[-2]] = turn
        self._turns[digest_of(message)] = turn
        if parent < 0:
            self._openings[_opening(new)] = thread
        self.numbers.add(event["number"])
        self.last_at = event["at"]

    def last_turns(self) -> list[int]:
        """The turns that no other continues, in order."""
        continued = {step.parent for step in self.steps}
        return [turn for turn in range(len(self.steps)) if turn not in continued]

    # ----------------------------------------------------------------------------------------------------------------

    def _thread_after(self, parent: int, turn: int, messages: Sequence[Message]) -> int:
        """The conversation of messages that go on from a turn: that turn's, or one that begins there, where another
        continuation of the turn is known and one of the messages up to the model's last was changed."""
        thread = self.steps[parent].thread
        n_kept = len(self.numbered(parent))
        last = max((k for k, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if last < n_kept or all(step.parent != parent for step in self.steps):
            return thread
        chain = list(digests(messages, tools_digest(self.threads[thread].tools)))
        if chain[last] in self._known:
            return self._known[chain[last]]
        changed = next(k for k, digest in enumerate(chain) if digest not in self._known)
        cause = f"message {changed} ({messages[changed]['role']}) changed"
        self.threads.append(replace(self.threads[thread], first_turn=turn, edits=thread, cause=cause, if_left=False))
        return len(self.threads) - 1

    def _is_retry(self, thread: Thread, event: Event, prompt: Ids) -> bool:
        first = self.steps[thread.first_turn]
        return first.new == event["new"] and np.array_equal(first.tail, prompt) and thread.tools == event["tools"]

    def _with_previous(self, request: AgentRequest) -> list[Message]:
        messages = list(request.messages)
        if request.previous_id is None:
            return messages
        turn = next((k for k, step in enumerate(self.steps) if step.id == request.previous_id), None)
        if turn is None:
            raise RequestError(
                "not_found", f"no response {request.previous_id} in session {self.key}", where="previous_response_id"
            )
        # New instructions replace the old ones.
        system = [m for m in messages if m["role"] == "system"]
        before = self.messages_of(turn)
        if system:
            before = [m for m in before if m["role"] != "system"]
        return [*system, *before, *(m for m in messages if m["role"] != "system")]

    def _earlier_version(
        self, messages: Sequence[Message], request: AgentRequest
    ) -> tuple[int | None, str | None, bool]:
        """``edits``, ``cause`` and ``if_left`` of messages that continue nothing.

        They are another version of the conversation of which they repeat something that was sampled, or the beginning up to
        the model's first answer; with another system prompt and other tools they are another agent's. Messages that repeat
        nothing are one if the same agent sends them and that conversation is left."""
        numbers = [self._turns[d] for m in messages if m["role"] == "assistant" and (d := digest_of(m)) in self._turns]
        thread = self.steps[numbers[-1]].thread if numbers else None
        begun = self._openings.get(_opening(messages))
        if thread is None and begun is not None:
            answered = any(message["role"] == "assistant" for message in messages)
            same_agent = self.threads[begun].fingerprint == fingerprint(messages, request.tools)
            thread = begun if answered or same_agent else None
        if thread is None:
            return self._left(messages, request)
        before = self.threads[thread]
        other_tools = tools_digest(before.tools) != tools_digest(request.tools)
        first = self.messages_of(before.first_turn)
        other_system = fingerprint(messages, None) != fingerprint(first, None)
        if other_tools and other_system:  # another agent that reads this conversation
            return None, f"repeats conversation {thread}, with another system prompt and other tools", False
        if other_tools or other_system:
            return thread, "the tools changed" if other_tools else "the system prompt changed", False
        plain = [(index, m) for index, m in enumerate(messages) if m["role"] != "system"]
        known = {digest for turn in self.last_turns() for digest in _without_system(self.messages_of(turn))}
        position = next((k for k, digest in enumerate(_without_system(messages)) if digest not in known), None)
        with_other_reasoning = (
            k for k, (_, m) in enumerate(plain) if m["role"] == "assistant" and self._reasons_else(m)
        )
        position = min((k for k in (position, *with_other_reasoning) if k is not None), default=None)
        if position is None:
            return thread, "earlier messages changed", False
        return thread, f"message {plain[position][0]} ({plain[position][1]['role']}) changed", False

    def _reasons_else(self, message: Message) -> bool:
        """Whether an answer that was sampled comes back with other reasoning."""
        turn = self._turns.get(digest_of(message))
        return turn is not None and not same_assistant(message, self.steps[turn].message, turn)

    def _left(self, messages: Sequence[Message], request: AgentRequest) -> tuple[int | None, str | None, bool]:
        """The same for messages that repeat nothing, as after compaction. The same agent: with the same system prompt and
        tools, else with the tools of main. Calls without either are one agent's only once a conversation had two turns."""
        mark, own_tools = fingerprint(messages, request.tools), tools_digest(request.tools)
        named = bool(request.tools) or messages[0]["role"] == "system"
        turns = Counter(step.thread for step in self.steps)
        latest = list(dict.fromkeys(step.thread for step in reversed(self.steps)))
        ours = [k for k in latest if self.threads[k].hint == request.conversation_hint]
        for k in ours:
            if self.threads[k].fingerprint == mark and (named or turns[k] > 1):
                return k, _LEFT, True
        with_tools = [k for k, thread in enumerate(self.threads) if thread.tools]
        for k in ours if request.tools else ():
            if tools_digest(self.threads[k].tools) == own_tools and self.origin(k) == self.origin(with_tools[0]):
                return k, f"the system prompt changed, and {_LEFT}", True
        return None, None, False

    def origin(self, thread: int) -> int:
        """The conversation of which a conversation is the latest version, or one of them."""
        while (edits := self.threads[thread].edits) is not None:
            thread = edits
        return thread


_LEFT = "no earlier message is sent"


def _without_system(messages: Sequence[Message]) -> list[bytes]:
    """The digests of messages, whatever system prompt and tools come before them."""
    return list(digests([message for message in messages if message["role"] != "system"], b""))


def _opening(messages: Sequence[Message]) -> bytes:
    """A digest of a conversation's messages before the model's first, without the system prompt and names."""
    before = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
    plain = [{**message, "name": None} for message in before if message["role"] != "system"]
    return b"".join(list(digests(plain, b""))[-1:])


def _same_assistants(sent: Sequence[Message], recorded: Sequence[tuple[Message, int | None]]) -> bool:
    """Whether the model's messages are the recorded ones where digests leave something out."""
    pairs = zip(sent, recorded, strict=True)
    return all(same_assistant(one, *other) for one, other in pairs if one["role"] == "assistant")
