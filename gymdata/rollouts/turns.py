"""Turns: the model calls of a rollout as they are stored, prompts as deltas; and how each relates to what came before.

Invariants: any turn's prompt is rebuilt exactly; a turn continues its parent exactly when its prompt begins with the
parent's prompt ++ generation, by the ids and never assumed; content that does not match its digest is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import xxhash

from gymdata.errors import DataError
from gymdata.rollouts.messages import RolloutRow

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Kind = Literal["first", "continues", "retry", "branch", "break"]

_NO_PARENT = -1
_INT64_WRAP = 1 << 64
_SEED, _xxh3 = struct.Struct("<qi").pack, xxhash.xxh3_64_intdigest


class TopLogProb(TypedDict):
    """One alternative for a token."""

    id: int
    log_prob: float


class WeightSpan(TypedDict):
    """Generated tokens from ``start`` to before ``end`` were sampled by the weights that the engine calls ``version``."""

    version: str
    start: int
    end: int


class Turn(TypedDict):
    """One model call of a rollout, as files have it (``gymdata.rollouts.schema.TURN``). A turn's H is its prompt ++
    generation."""

    #: The earlier turn whose H this prompt shares most with (ties: the latest); -1 for the first.
    parent: int
    #: How many tokens of the parent's H this prompt begins with: the longest such prefix.
    prefix_length: int
    #: The prompt's tokens after that prefix.
    prompt_delta_ids: Ids | list[int]
    #: Exactly as sampled, with the stop token where one was; of a rendered turn, what the template writes.
    generation_token_ids: Ids | list[int]
    #: One per generated token, in nats; NaN where the source has none.
    generation_log_probs: Floats | list[float]
    #: xxh3_64 over the parent's digest, prefix_length and the three lists: see ``turn_digest``.
    digest: int
    #: Who made the call, where several agents share a rollout.
    agent: str | None
    #: stop, length, repetition or abort. This and what follows is absent where only the tokens of a turn were read.
    finish_reason: NotRequired[str]
    #: A reward for this step alone.
    reward: NotRequired[float | None]
    #: The likeliest tokens at each position of the generation, if requested.
    top_log_probs: NotRequired[list[list[TopLogProb]] | None]
    #: True where the ids were rendered from text and not sampled; absent, null or False where they were sampled.
    rendered: NotRequired[bool | None]
    #: Which of several servers sampled it.
    server: NotRequired[str | None]
    #: Which weights sampled which tokens, where the engine says; the spans follow each other and cover the generation.
    weight_versions: NotRequired[list[WeightSpan] | None]


@dataclass(slots=True)
class Call:
    """One model call with its whole prompt. Ids are int32, log-probabilities float32, one per generated token."""

    prompt_token_ids: Ids
    generation_token_ids: Ids
    generation_log_probs: Floats
    finish_reason: str
    agent: str | None = None
    reward: float | None = None
    top_log_probs: list[list[TopLogProb]] | None = None
    rendered: bool | None = None
    server: str | None = None
    weight_versions: list[WeightSpan] | None = None


def call_of(turn: Turn | Mapping[str, Any], prompt: Ids) -> Call:
    """A stored turn as the call with another ``prompt``."""
    return Call(
        prompt,
        np.asarray(turn["generation_token_ids"], np.int32),
        np.asarray(turn["generation_log_probs"], np.float32),
        turn["finish_reason"],
        turn["agent"],
        turn["reward"],
        turn["top_log_probs"],
        turn.get("rendered"),
        turn.get("server"),
        turn.get("weight_versions"),
    )


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix of two id arrays."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


def turn_digest(parent_digest: int, prefix_length: int, delta: Ids, generation: Ids, log_probs: Floats) -> int:
    """Signed 64-bit xxh3 over a turn's content and its parent's digest (0 when it has none).

    Each part seeds the next, so that moving a token from one list to another changes the digest. Arrays must be
    C-contiguous little-endian int32, int32 and float32.
    """
    digest = _xxh3(_SEED(parent_digest, prefix_length))
    digest = _xxh3(log_probs.data, _xxh3(generation.data, _xxh3(delta.data, digest)))
    return digest - _INT64_WRAP if digest >= _INT64_WRAP // 2 else digest


class TurnTree:
    """Finds which turn of a rollout each prompt shares most with, in order.

    Keeps the tokens only of turns that no later turn continues: the prompt of a turn that was continued is a prefix of its
    child's, so the child shares at least as much with any later prompt.
    """

    def __init__(self) -> None:
        self._count = 0
        #: Turn → its prompt and its generation, in parts.
        self._open: dict[int, list[Ids]] = {}
        #: Tokens of the last turn's prompt and generation.
        self._size = 0

    def add(self, prompt: Ids, generation: Ids, *, continues: bool = False) -> tuple[int, int, Ids]:
        """The parent of the next turn (-1 for the first), how many tokens its prompt shares with it, and the others.
        ``continues``: the prompt is that and the generation of the turn before, and then ``prompt``."""
        last, self._count = self._count - 1, self._count + 1
        if continues and len(self._open) == 1:
            parts, shared = self._open.pop(last), self._size
            parts += prompt, generation
            self._open[last + 1] = parts
            self._size += len(prompt) + len(generation)
            return last, shared, prompt
        if continues:
            # An earlier turn may share more.
            prompt = np.concatenate((self._tokens(last), prompt))
        parent, shared = self._parent(prompt)
        if parent >= 0 and shared == len(self._tokens(parent)):
            del self._open[parent]
        self._open[last + 1] = [prompt, generation]
        self._size = len(prompt) + len(generation)
        return parent, shared, prompt[shared:]

    def _tokens(self, turn: int) -> Ids:
        parts = self._open[turn]
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0]

    def _parent(self, prompt: Ids) -> tuple[int, int]:
        """The turn that shares most with ``prompt`` (ties: the latest) and how many tokens; (-1, 0) for the first."""
        best, shared = _NO_PARENT, -1
        for index in sorted(self._open, reverse=True):
            sequence = self._tokens(index)
            # Sharing more than the best so far is only possible when the token there is the same.
            if shared >= 0 and (len(sequence) <= shared or len(prompt) <= shared or sequence[shared] != prompt[shared]):
                continue
            length = common_prefix(sequence, prompt)
            if length > shared:
                best, shared = index, length
        return best, max(shared, 0)


class TurnEncoder:
    """Encodes the calls of one rollout, in order, into turns."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.n_context_tokens = 0
        self.n_generated_tokens = 0
        self._tree = TurnTree()

    @property
    def n_breaks(self) -> int:
        """Turns whose prompt rewrites what came before; branches and retries are not breaks."""
        return count_breaks(self.turns)

    def columns(self) -> dict[str, object]:
        """The columns of a rollouts row that the turns determine."""
        return {
            "turns": self.turns,
            "n_turns": len(self.turns),
            "n_breaks": self.n_breaks,
            "n_context_tokens": self.n_context_tokens,
            "n_generated_tokens": self.n_generated_tokens,
        }

    def add(self, call: Call, *, continues: bool = False) -> Turn:
        """Append one call; returns its turn, with numpy arrays for the id and log-probability lists. ``continues``: as for
        ``TurnTree.add``."""
        prompt = np.ascontiguousarray(call.prompt_token_ids, dtype=np.int32)
        generation = np.ascontiguousarray(call.generation_token_ids, dtype=np.int32)
        parent, shared, delta = self._tree.add(prompt, generation, continues=continues)
        log_probs = np.array(call.generation_log_probs, dtype=np.float32)
        # All NaNs get one bit pattern, because payloads do not survive JSON and the digest covers these bytes.
        log_probs[np.isnan(log_probs)] = np.float32("nan")
        above = self.turns[parent]["digest"] if parent >= 0 else 0
        turn: Turn = {
            "parent": parent,
            "prefix_length": shared,
            "prompt_delta_ids": delta,
            "generation_token_ids": generation,
            "generation_log_probs": log_probs,
            "finish_reason": call.finish_reason,
            "agent": call.agent,
            "reward": call.reward,
            "top_log_probs": call.top_log_probs,
            "rendered": call.rendered,
            "server": call.server,
            "weight_versions": call.weight_versions,
            "digest": turn_digest(above, shared, delta, generation, log_probs),
        }
        self.turns.append(turn)
        self.n_context_tokens += len(delta)
        self.n_generated_tokens += len(generation)
        return turn


def encode_turns(calls: Sequence[Call]) -> list[Turn]:
    """All calls of one rollout, in order, as turns."""
    encoder = TurnEncoder()
    for call in calls:
        encoder.add(call)
    return encoder.turns


def expand_prompts(turns: Sequence[Turn], *, check_digests: bool = True, rollout: str | None = None) -> list[Ids]:
    """Each turn's whole prompt, exactly as the model read it.

    Raises DataError naming the turn, and ``rollout`` where it is given, when a delta cannot be expanded (T210) or a digest
    does not match (T209).
    """
    owner = "" if rollout is None else f"rollout {rollout}, "
    prompts: list[Ids] = []
    wholes: list[Ids] = []
    for index, turn in enumerate(turns):
        parent, shared = int(turn["parent"]), int(turn["prefix_length"])
        if not (_NO_PARENT <= parent < index):
            raise DataError.altered(
                "T210", f"{owner}turn {index}", f"got parent {parent}, expected an earlier turn or -1"
            )
        before = wholes[parent] if parent >= 0 else np.empty(0, np.int32)
        if not 0 <= shared <= len(before):
            raise DataError.altered(
                "T210", f"{owner}turn {index}", f"got prefix_length {shared}, expected 0 to {len(before)}"
            )
        delta = np.ascontiguousarray(turn["prompt_delta_ids"], dtype=np.int32)
        generation = np.ascontiguousarray(turn["generation_token_ids"], dtype=np.int32)
        if check_digests:
            log_probs = np.ascontiguousarray(turn["generation_log_probs"], dtype=np.float32)
            above = int(turns[parent]["digest"]) if parent >= 0 else 0
            if turn_digest(above, shared, delta, generation, log_probs) != int(turn["digest"]):
                raise DataError.altered("T209", f"{owner}turn {index}", "its content does not match its digest")
        prompts.append(np.concatenate((before[:shared], delta)))
        wholes.append(np.concatenate((prompts[-1], generation)))
    return prompts


def prompts_of(row: RolloutRow) -> list[Ids]:
    """``expand_prompts`` of a rollouts row; the error names the rollout as well as the turn."""
    return expand_prompts(row["turns"], rollout=str(row["rollout_id"]))


#: The label of the calls of an agent's main conversation; those of its later versions and forks go on after a dot.
MAIN = "main"


def main_turns(turns: Sequence[Turn], prompts: Sequence[Ids]) -> tuple[int, int]:
    """The first and the last turn of the conversation that a rollout's messages are: of an agent's rollout those of the
    latest version of its main one, where a side conversation may have had the last call. A version that keeps a turn of an
    earlier one begins with that."""
    labels = [turn.get("agent") or "" for turn in turns]
    last = max((k for k, label in enumerate(labels) if f"{label}.".startswith(f"{MAIN}.")), default=None)
    if last is None:
        return 0, len(turns) - 1
    first = labels.index(labels[last].partition(".fork-")[0])
    for k in range(first):
        whole = np.concatenate((prompts[k], np.asarray(turns[k]["generation_token_ids"], np.int32)))
        if f"{labels[k]}.".startswith(f"{MAIN}.") and np.array_equal(whole, prompts[last][: len(whole)]):
            return k, last
    return first, last


def kinds(turns: Sequence[Turn], prompts: Sequence[Ids] | None = None) -> list[Kind]:
    """How each turn relates to what came before.

    ``continues``: its prompt extends its parent's prompt ++ generation. ``retry``: its prompt is its parent's, again.
    ``branch``: it leaves the parent's chain inside tokens that the environment wrote, after at least one whole turn
    that it keeps, and no generation from beyond that point reappears after it, not even without its first or last
    tokens (a tokenizer may have merged them with their neighbours); or another agent made the call. Everything else
    rewrites sampled or given tokens and is a ``break``. In doubt the answer is ``break``.
    """
    result: list[Kind] = []
    expanded: Sequence[Ids] | None = prompts
    #: Tokens of all turns before this one.
    n_context = 0
    for index, turn in enumerate(turns):
        parent = int(turn["parent"])
        if parent < 0:
            result.append("first")
        else:
            # Without expanding: so far every turn continued the one before, and this one does.
            if expanded is None and not (parent == index - 1 and int(turn["prefix_length"]) == n_context):
                expanded = expand_prompts(turns, check_digests=False)
            result.append("continues" if expanded is None else _kind(turns, expanded, index))
        n_context += len(turn["prompt_delta_ids"]) + len(turn["generation_token_ids"])
    return result


def count_breaks(turns: Sequence[Turn]) -> int:
    """How many turns are breaks."""
    return sum(kind == "break" for kind in kinds(turns))


def _kind(turns: Sequence[Turn], prompts: Sequence[Ids], index: int) -> Kind:
    turn, prompt = turns[index], prompts[index]
    parent, shared = int(turn["parent"]), int(turn["prefix_length"])
    if shared == len(prompts[parent]) + len(turns[parent]["generation_token_ids"]):
        return "continues"
    if len(prompt) == shared == len(prompts[parent]):
        return "retry"
    if turn["agent"] != turns[parent]["agent"]:
        return "branch"
    base, chain = _kept_ancestor(turns, prompts, parent, shared)
    if base < 0 or shared >= len(prompts[chain[-1]]):
        return "break"
    tail = prompt[shared:]
    claimed = any(
        claims(tail, np.asarray(turns[t]["generation_token_ids"], dtype=np.int32), len(prompts[t]) - shared)
        for t in chain
    )
    return "break" if claimed else "branch"


def _kept_ancestor(turns: Sequence[Turn], prompts: Sequence[Ids], parent: int, shared: int) -> tuple[int, list[int]]:
    """The deepest turn on the continuing chain above (and with) ``parent`` whose H fits into ``shared`` tokens, or -1;
    and the turns from ``parent`` up to just below it."""
    chain: list[int] = []
    turn = parent
    while turn >= 0:
        if len(prompts[turn]) + len(turns[turn]["generation_token_ids"]) <= shared:
            return turn, chain
        chain.append(turn)
        above = int(turns[turn]["parent"])
        size = len(prompts[above]) + len(turns[above]["generation_token_ids"]) if above >= 0 else 0
        # A turn that did not continue its parent holds only what both share; what it shares can still be kept.
        turn = above if above >= 0 and int(turns[turn]["prefix_length"]) >= min(size, shared) else _NO_PARENT
    return _NO_PARENT, chain


#: A prompt that leaves the chain this close before a generation may have left it because that generation was rewritten.
_NEAR = 8
#: Tokens on each side of a border that one merge changes at most.
_MERGED = 2


def claims(tail: Ids, generation: Ids, before: int) -> bool:
    """Whether ``tail``, which follows the place where a prompt leaves a chain, holds ``generation`` or most of it.

    ``before``: how many tokens of the generation's own prompt come after that place. Three tokens or more that are more
    than half of it claim it anywhere in ``tail``; its end claims it only at the beginning of ``tail`` and close to the
    border, because a merge across the border or dropped reasoning leaves only that.
    """
    size = len(generation)
    if not size or not len(tail):
        return False
    # A piece of more than half holds the middle.
    middle, least = size // 2, min(max(size // 2 + 1, 3), size)
    for k in np.flatnonzero(tail == generation[middle]).tolist():
        back = common_prefix(tail[: k + 1][::-1], generation[: middle + 1][::-1])
        if back + common_prefix(tail[k + 1 :], generation[middle + 1 :]) >= least:
            return True
    if before > _NEAR:
        return False
    for k in np.flatnonzero(tail == generation[-1]).tolist():
        back = common_prefix(tail[: k + 1][::-1], generation[::-1])
        if k + 1 - back <= before + _MERGED and (back >= 2 or size - back <= _MERGED >= before):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Chain:
    """One way from a root of the turn tree to a leaf: a token sequence, with the prompt of its last turn and what that
    sampled. ``trained``: which of its ``turns`` no earlier chain trains; ``abandoned``: its last turn is unread."""

    turns: list[int]
    trained: list[bool]
    abandoned: bool

    @property
    def trained_turns(self) -> list[int]:
        return [turn for turn, is_trained in zip(self.turns, self.trained, strict=True) if is_trained]


def chains(
    turns: Sequence[Turn],
    prompts: Sequence[Ids],
    abandoned: Literal["keep", "drop"] = "keep",
    unread: Collection[int] = (),
) -> list[Chain]:
    """The root-to-leaf chains of a rollout's turn tree, in the order of their last turns: one for each of its sequences.

    A generation is trained in exactly one of them: the first one through it that was read. A break starts a chain; a branch
    or retry repeats the turns before it. Of an agent's turns that repeat a prompt the one that the conversation continued
    was read (the last, when none was continued); the others are abandoned, and so are turns in ``unread`` that nothing
    continues. ``prompts``: the whole prompt of each turn.
    """
    # The turn whose H each prompt extends in full, or -1: the tree that sequences are cut from.
    attached = []
    for index, kind in enumerate(kinds(turns, prompts)):
        parent, shared = int(turns[index]["parent"]), int(turns[index]["prefix_length"])
        if kind in ("retry", "branch"):
            parent = _kept_ancestor(turns, prompts, parent, shared)[0]
        attached.append(parent if kind in ("continues", "retry", "branch") else _NO_PARENT)
    continued = set(attached)
    by_prompt: dict[tuple[str, bytes], list[int]] = {}
    for index, prompt in enumerate(prompts):
        agent = (turns[index]["agent"] or "").partition(".fork-")[0]
        by_prompt.setdefault((agent, prompt.tobytes()), []).append(index)
    superseded: set[int] = set()
    for same in by_prompt.values():
        idle = [k for k in same if k not in continued]
        last_read = [k for k in idle if k not in unread][-1:] if len(idle) == len(same) else []
        superseded.update(k for k in idle if k not in last_read)
    kept = [k for k in range(len(turns)) if k not in superseded]
    kept_parents = {attached[k] for k in kept}
    leaves = [k for k in kept if k not in kept_parents] + (sorted(superseded) if abandoned == "keep" else [])
    owned: set[int] = set()
    result = []
    for leaf in leaves:
        chain = [leaf]
        while attached[chain[-1]] >= 0:
            chain.append(attached[chain[-1]])
        chain.reverse()
        result.append(Chain(chain, [turn not in owned for turn in chain], leaf in superseded))
        owned.update(chain)
    return sorted(result, key=lambda chain: chain.turns[-1])
