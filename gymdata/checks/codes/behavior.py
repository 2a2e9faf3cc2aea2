"""Checks of a policy's behavior: loops, empty turns, series of tool errors, uninformative rewards.

Invariants: these are never errors, because a policy may behave so; a file that is too small gives no finding; no Python
loop over tokens or over turns that are fine; of a whole path a few numbers per rollout are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gymdata.checks.violations import CHECKS, Check, CheckSettings, Violation, code_pages
from gymdata.errors import counted
from gymdata.rollouts.ragged import Ints, Ragged

if TYPE_CHECKING:
    from gymdata.rollouts.turn_columns import Evidence, Messages

Floats = npt.NDArray[np.float64]

#: B801: largest period in tokens, fewest repetitions, and fewest tokens of a loop.
LOOP_PERIOD, LOOP_TIMES, LOOP_TOKENS = 64, 4, 80
#: Every how many tokens a loop is looked for, and by how many tokens: see ``_suspects``.
_STRIDE, _COMPARED = 48, 8
#: B802: share of model calls that were cut by a limit, and fewest calls.
CUT_SHARE, CUT_OF = 0.1, 20
#: B804: fewest errors among a rollout's tool results, and their share.
STORM, STORM_SHARE = 4, 0.5
#: B805: fewest messages with an unparsed tool call in their text.
UNPARSED = 2
#: B806, B807: fewest scored rollouts.
ENOUGH = 8
#: B807: correlation with the reward of the part that dominates, and of another that varies and does not.
DOMINATES, DOMINATED = 0.99, 0.9
#: B808: ratio of the last quarter's median length to the first's, fewest rollouts, and how many standard errors of the
#: mean logarithm apart.
DRIFT, DRIFT_OF, DRIFT_ERRORS = 1.5, 200, 4.0


_CODES = code_pages("""
B801 repetition loop (warning): a piece of the generation repeats over and over
At most 64 tokens, repeated at least 4 times and over at least 80 tokens, anywhere in the generation; `position` is
where it begins there, and of several the longest is reported. A policy that collapses does this, and so does a model
far from its temperature. Such rollouts train the loop unless their reward is low: look at one with `gymdata show RUN
ROLLOUT_ID --tokens`.

B802 runaway generations (warning): many model calls do not end by themselves
At least 10 % of the model calls (of 20 or more) were cut at a token limit, so their answers are incomplete and their
rewards are mostly about the limit. Raise --max-tokens or the context, or look at whether the policy's end token is the
one that the engine stops at. One finding per path.

B803 empty turn (warning): the model's turn has neither text nor a tool call
Tokens were sampled, but the message is empty: usually the end token came first, or a tool call was taken out of the
text by a parser that then refused it. A turn without a single token is T212.

B804 storm of tool errors (warning): most tool results of the rollout are errors
At least 4 tool results, and half of all in the rollout, are error messages (they begin with error, a traceback, or are
an object with the key error). Either the policy does not know the tools, or they do not work: `gymdata show RUN
ROLLOUT_ID` shows what was called.

B805 tool calls never parse (warning): texts contain tool calls, and none was parsed
The rollouts were given tools, several assistant messages hold the markup of a call in their text, and no message has a
parsed call. No tool was run, so rewards say nothing about the policy. Where the calls are complete, the tool parser is
not the model's: collect again with the right --tool-parser (`gymdata check MODEL` shows which one fits). Where a tag is
not closed or its text is no JSON, the model wrote them so, or a token limit cut them. One finding per path.

B806 all rewards equal (warning): every scored rollout of the path has the same reward
With 8 or more scored rollouts. Nothing can be learned from them by comparison: no pair and no advantage. Usual causes:
a reward that reads another field than the tasks have, a wrong tool parser, or tasks that are far too easy or too hard.
One finding per path.

B807 one reward part dominates (info): the reward follows one of its parts, and another makes no difference
Over 8 or more rollouts the reward and one part are correlated by at least 0.99, while another part varies and is
correlated by less than 0.9. That can be meant; else change the weights. One finding per path.

B808 length drift (info): rollouts that began late have another length than those that began early
The median number of sampled tokens of the last quarter, by the time they began, is 1.5 times that of the first or less
than two thirds of it (200 rollouts or more, difference beyond four standard errors). In one run of one policy the tasks
are ordered by difficulty, or the server changed while it was sampled from. One finding per path.

B809 failures depend on the rollout (warning): attempts that called a tool fail more often, or less often
The shares of failed attempts (rollouts and lines of failures.jsonl) with and without a tool call have 95 % Wilson
intervals that do not overlap. Failures are no rollouts, so what fails more often is missing from the data, and its
rewards look better or worse than they are. failures.jsonl says why; mend it and resume the run. One finding per run.
""")


@CHECKS.register("behavior")
class Behavior(Check):
    """The findings of family B over all rows of a path: those of single rollouts from ``find``, the others from
    ``finish``."""

    codes = _CODES

    def __init__(self, settings: CheckSettings) -> None:
        super().__init__(settings)
        #: Model calls whose end is known, and those that were cut; messages that spell a call; batches in which a call was
        #: parsed, and in which tools were offered.
        self._counts = Counter[str]()
        #: By code, the first place of what is found over all rows.
        self._first: dict[str, Violation] = {}
        #: Of each batch: rewards and their parts; of its rollouts whose beginning is known, when that was and their tokens.
        self._rewards: list[tuple[Floats, dict[str, Floats]]] = []
        self._started: list[tuple[Ints, Ints]] = []

    def find(self, e: Evidence) -> Iterator[Violation]:
        """B801, B803 and B804 of a batch; the rest of it is remembered for ``finish``."""
        turns = e.turns
        sizes = turns.generation.lengths
        for k, period, start, end in loops(turns.generation):
            detail = f"{counted(period, 'token')} repeated {(end - start) // period} times"
            # One more token may end the turn.
            detail += f", then {sizes[k] - end:,} tokens more" if sizes[k] - end > 1 else ""
            yield self.at_turn(e, k, "B801", position=start, detail=detail)
        if e.cut is not None:
            self._counts.update(
                calls=len(turns) if e.tells_cut is None else int(e.tells_cut.sum()), cut=int(e.cut.sum())
            )
            for k in np.flatnonzero(e.cut)[:1]:
                self._first.setdefault("B802", self.at_turn(e, k, "B802"))
        if e.messages is not None:
            yield from self._of_messages(e, e.messages)
        if e.n and e.reward is not None and e.reward_null is not None:
            self._first.setdefault("B806", self.at_rollout(e, 0, "B806"))
            self._rewards.append((np.where(e.reward_null, np.nan, e.reward), e.parts))
        if e.started is not None:
            dated = ~np.isnat(e.started.view("datetime64[us]"))
            self._started.append((e.started[dated], turns.by_rollout(turns.generation).lengths[dated]))

    def _of_messages(self, e: Evidence, m: Messages) -> Iterator[Violation]:
        owner = np.repeat(np.arange(e.n), np.diff(m.offsets))
        assistant = m.from_assistant
        generated, offsets = e.turns.generation.lengths, e.turns.offsets
        for i in np.flatnonzero(assistant & ~m.calls & ~m.says).tolist():
            r, turn = int(owner[i]), int(m.turn[i])
            k = int(offsets[r]) + turn
            # A call without a token is T212.
            if 0 <= turn < offsets[r + 1] - offsets[r] and generated[k]:
                detail = f"{m.named(i, r)}; {counted(int(generated[k]), 'token')} generated"
                yield self.at_rollout(e, r, "B803", turn=turn, detail=detail)
        results = m.tool_results
        bad = np.bincount(owner[results & m.fails], minlength=e.n)
        total = np.bincount(owner[results], minlength=e.n)
        for r in np.flatnonzero((bad >= STORM) & (bad >= STORM_SHARE * total)).tolist():
            yield self.at_rollout(e, r, "B804", detail=f"{bad[r]:,} of {total[r]:,} tool results are errors")
        self._counts.update(parsed=bool((assistant & m.calls).any()), offered=e.offers_tools)
        # Texts are searched for calls only until a call was parsed.
        spelled = [] if self._counts["parsed"] else m.spelled_calls()
        self._counts["spelled"] += len(spelled)
        for i in spelled[:1]:
            named_turn = int(m.turn[i]) if m.turn[i] >= 0 else None
            self._first.setdefault("B805", self.at_rollout(e, int(owner[i]), "B805", turn=named_turn))

    def finish(self) -> Iterator[Violation]:
        """B802, B805, B806, B807 and B808, at most one each: they are about the path as a whole."""
        n, first = self._counts, self._first
        if n["cut"] and n["calls"] >= CUT_OF and n["cut"] >= CUT_SHARE * n["calls"]:
            share = (
                f"{n['cut']:,} of {n['calls']:,} model calls were cut at a token limit ({n['cut'] / n['calls']:.0%})"
            )
            yield first["B802"]._replace(detail=share)
        if n["spelled"] >= UNPARSED and n["offered"] and not n["parsed"]:
            yield first["B805"]._replace(detail=f"{n['spelled']:,} messages spell a tool call, and none was parsed")
        if not self._rewards:
            return
        reward = np.concatenate([rewards for rewards, _ in self._rewards])
        names = {name for _, parts in self._rewards for name in parts} - self.settings.unweighted
        parts = {
            name: np.concatenate([parts.get(name, np.full(len(of), np.nan)) for of, parts in self._rewards])
            for name in sorted(names)
        }
        texts = {"B806": equal_rewards(reward), "B807": dominating_part(reward, parts)}
        if self._started:
            texts["B808"] = length_drift(*map(np.concatenate, zip(*self._started, strict=True)))
        yield from (first["B806"]._replace(code=code, detail=text) for code, text in texts.items() if text is not None)


def loops(generations: Ragged) -> list[tuple[int, int, int, int]]:
    """(generation, period, start, end) of the longest piece of each generation that repeats over and over, wherever it is.
    ``start`` and ``end`` count in the generation; ids may be of any integer type."""
    longest_of: dict[int, tuple[int, int, int, int]] = {}
    for k, period, position in _suspects(generations):
        first = int(generations.offsets[k])
        if k in longest_of and longest_of[k][2] <= position - first < longest_of[k][3]:
            continue
        part = generations.values[first : int(generations.offsets[k + 1])]
        edges = np.flatnonzero(np.diff(part[period:] == part[:-period], prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2] + period
        longest = int(np.argmax(ends - starts))
        start, end = int(starts[longest]), int(ends[longest])
        before = longest_of.get(k)
        enough = end - start >= max(LOOP_TOKENS, LOOP_TIMES * period)
        if enough and (before is None or end - start > before[3] - before[2]):
            longest_of[k] = (k, period, start, end)
    return sorted(longest_of.values())


def _suspects(generations: Ragged) -> list[tuple[int, int, int]]:
    """(generation, period, place in all ids) where some tokens stand as they stood a period before; the shortest periods
    first.

    Every piece that is long enough holds one of the places that are looked at, with all tokens of the comparison: of 80
    tokens with period 20, 53 places would do.
    """
    ids, offsets = generations.values, generations.offsets
    width = LOOP_PERIOD + _COMPARED
    if len(ids) < width:
        # Too short for a window, though not for a loop.
        ids = np.concatenate([ids, np.full(width - len(ids), -1, ids.dtype)])
    windows = np.lib.stride_tricks.sliding_window_view(ids, width)[::_STRIDE]
    same = windows[:, :LOOP_PERIOD] == windows[:, LOOP_PERIOD, None]
    for later in (1, _COMPARED - 1):
        same &= windows[:, later : later + LOOP_PERIOD] == windows[:, LOOP_PERIOD + later, None]
    rows, columns = np.nonzero(same)
    position, period = rows * _STRIDE + LOOP_PERIOD, LOOP_PERIOD - columns
    owner = np.searchsorted(offsets, position, side="right") - 1
    inside = owner < len(offsets) - 1
    position, period, owner = position[inside], period[inside], owner[inside]
    inside = (position - period >= offsets[owner]) & (position + _COMPARED <= offsets[owner + 1])
    position, period, owner = position[inside], period[inside], owner[inside]
    compared = position[:, None] + np.arange(_COMPARED)
    equal = (ids[compared] == ids[compared - period[:, None]]).all(axis=1)
    position, period, owner = position[equal], period[equal], owner[equal]
    order = np.lexsort((position, period, owner))
    return list(zip(owner[order].tolist(), period[order].tolist(), position[order].tolist(), strict=True))


def equal_rewards(reward: Floats) -> str | None:
    """B806's text when all scored rollouts have the same reward."""
    scored = reward[np.isfinite(reward)]
    if len(scored) < ENOUGH or (scored != scored[0]).any():
        return None
    return f"reward {scored[0]:g} for all {len(scored):,} scored rollouts"


def dominating_part(reward: Floats, parts: dict[str, Floats]) -> str | None:
    """B807's text when the reward follows one part, and another part that varies makes no difference."""
    moves = {}
    for name, values in parts.items():
        usable = np.isfinite(values) & np.isfinite(reward)
        x, y = values[usable], reward[usable]
        if usable.sum() >= ENOUGH and np.ptp(x) > 0 and np.ptp(y) > 0:
            with np.errstate(all="ignore"):
                moves[name] = float(np.corrcoef(x, y)[0, 1])
    first = max(moves, key=lambda name: moves[name], default=None)
    if first is None or not moves[first] >= DOMINATES:
        return None
    without_effect = sorted(name for name, r in moves.items() if name != first and abs(r) < DOMINATED)
    if not without_effect:
        return None
    beside = ", ".join(f"{name!r} ({moves[name]:.2f})" for name in without_effect)
    return f"the reward follows part {first!r} (correlation {moves[first]:.3f}), whatever {beside} says"


def length_drift(started: Ints, sizes: Ints) -> str | None:
    """B808's text when rollouts that began late are longer, or shorter, than those that began early.

    ``started``: microseconds; ``sizes``: sampled tokens. The order of rows would not do: short rollouts end first.
    """
    n = len(started)
    if n < DRIFT_OF or len(np.unique(started)) < n // 4:
        return None
    ordered = sizes[np.argsort(started, kind="stable")]
    quarters = [ordered[: n // 4], ordered[n - n // 4 :]]
    early, late = (float(np.median(quarter)) for quarter in quarters)
    if not max(early, late) >= DRIFT * max(min(early, late), 1.0):
        return None
    logs = [np.log1p(quarter.astype(np.float64)) for quarter in quarters]
    error = math.sqrt(sum(float(part.var()) / len(part) for part in logs))
    if abs(float(logs[1].mean() - logs[0].mean())) < DRIFT_ERRORS * error:
        return None
    return f"median of {early:,.0f} sampled tokens in the first quarter of the run, {late:,.0f} in the last"
