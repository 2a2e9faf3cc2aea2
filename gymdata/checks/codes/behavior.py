"""Checks of a policy's behavior: loops, empty turns, series of tool errors, uninformative rewards.

Invariants: these are never errors, because a policy may behave so; a file that is too small gives no finding; no Python
loop over tokens or over turns that are fine; of a whole path a few numbers per rollout are kept.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gymdata.checks.violations import CHECKS, Check, CheckSettings, Code, Violation
from gymdata.rollouts.ragged import Ints, Ragged
from gymdata.texts import brief

if TYPE_CHECKING:
    from gymdata.rollouts.turn_columns import Evidence, Messages

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


_CODES = (
    Code(
        "B801",
        "repetition loop",
        "warning",
        "a piece of the generation repeats over and over",
        "At most 64 tokens, repeated at least 4 times and over at least 80 tokens, anywhere in the generation; `position` "
        "is where it begins there, and of several the longest is reported. A policy that collapses does this, and so does "
        "a model far from its temperature. Such rollouts train the loop unless their reward is low: look at one with "
        "`gymdata show RUN ROLLOUT_ID --tokens`.",
    ),
    Code(
        "B802",
        "runaway generations",
        "warning",
        "many model calls do not end by themselves",
        "At least 10 % of the model calls (of 20 or more) were cut at a token limit, so their answers are incomplete and "
        "their rewards are mostly about the limit. Raise --max-tokens or the context, or look at whether the policy's end "
        "token is the one that the engine stops at. One finding per path.",
    ),
    Code(
        "B803",
        "empty turn",
        "warning",
        "the model's turn has neither text nor a tool call",
        "Tokens were sampled, but the message is empty: usually the end token came first, or a tool call was taken out of "
        "the text by a parser that then refused it. A turn without a single token is T212.",
    ),
    Code(
        "B804",
        "storm of tool errors",
        "warning",
        "most tool results of the rollout are errors",
        "At least 4 tool results, and half of all in the rollout, are error messages (they begin with error, a traceback, "
        "or are an object with the key error). Either the policy does not know the tools, or they do not work: "
        "`gymdata show RUN ROLLOUT_ID` shows what was called.",
    ),
    Code(
        "B805",
        "tool calls never parse",
        "warning",
        "texts contain tool calls, and none was parsed",
        "The rollouts were given tools, several assistant messages hold the markup of a call in their text, and no message "
        "has a parsed call. No tool was run, so rewards say nothing about the policy. Where the calls are complete, the "
        "tool parser is not the model's: collect again with the right --tool-parser (`gymdata check MODEL` shows which one "
        "fits). Where the finding says that they are malformed (a tag is not closed, or its text is no JSON), the model "
        "wrote them so, or a token limit cut them: no parser reads them. One finding per path.",
    ),
    Code(
        "B806",
        "all rewards equal",
        "warning",
        "every scored rollout of the path has the same reward",
        "With 8 or more scored rollouts. Nothing can be learned from them by comparison: no pair and no advantage. Usual "
        "causes: a reward that reads another field than the tasks have, a wrong tool parser, or tasks that are far too "
        "easy or too hard. One finding per path.",
    ),
    Code(
        "B807",
        "one reward part dominates",
        "info",
        "the reward follows one of its parts, and another makes no difference",
        "Over 8 or more rollouts the reward and one part are correlated by at least 0.99, while another part varies and is "
        "correlated by less than 0.9. That can be meant; else change the weights. One finding per path.",
    ),
    Code(
        "B808",
        "length drift",
        "info",
        "rollouts that began late have another length than those that began early",
        "The median number of sampled tokens of the last quarter, by the time they began, is 1.5 times that of the first or "
        "less than two thirds of it (200 rollouts or more, difference beyond four standard errors). In one run of one "
        "policy the tasks are ordered by difficulty, or the server changed while it was sampled from. One finding per path.",
    ),
    Code(
        "B809",
        "failures depend on the rollout",
        "warning",
        "attempts that called a tool fail more often than those that did not, or less often",
        "The shares of failed attempts (rollouts and lines of failures.jsonl) with and without a tool call have 95 % "
        "Wilson intervals that do not overlap. Failures are no rollouts, so what fails more often is missing from the data, "
        "and its rewards look better or worse than they are. failures.jsonl says why; mend "
        "it and resume the run. One finding per run.",
    ),
)


@CHECKS.register("behavior")
class Behavior(Check):
    """The findings of family B over all rows of a path: those of single rollouts from ``find``, the others from
    ``finish``."""

    codes = _CODES
    texts = True

    def __init__(self, settings: CheckSettings) -> None:
        super().__init__(settings)
        #: Model calls, and those that were cut; messages that spell a call, and a malformed one; batches in which a call was
        #: parsed, tools were offered, and rows are foreign.
        self._counts = Counter[str]()
        #: By code, the first place of what is found over all rows; and the first malformed call.
        self._first: dict[str, Violation] = {}
        self._malformed = ""
        self._reward: list[npt.NDArray[np.float64]] = []
        self._parts: dict[str, list[npt.NDArray[np.float64]]] = {}
        self._sizes: list[Ints] = []
        self._started: list[Ints] = []
        self._rows = 0

    def find(self, e: Evidence) -> list[Violation]:
        """B801, B803 and B804 of a batch; the rest of it is remembered for ``finish``."""
        turns, violations = e.turns, list[Violation]()
        if e.n:
            self._first.setdefault("B806", self.at_rollout(e, 0, "B806"))
        for k, period, start, end in loops(turns.generation):
            # One more token may end the turn.
            after = int(turns.generation.lengths[k]) - end
            detail = f"{_tokens(period)} repeated {(end - start) // period} times"
            detail += f", then {_tokens(after)} more" if after > 1 else ""
            violations.append(self.at_turn(e, k, "B801", position=start, detail=detail))
        if e.cut is not None:
            calls = len(turns) if e.tells_cut is None else int(e.tells_cut.sum())
            self._counts.update(calls=calls, cut=int(e.cut.sum()), foreign=e.foreign)
            if e.cut.any():
                self._first.setdefault("B802", self.at_turn(e, int(np.flatnonzero(e.cut)[0]), "B802"))
        if e.messages is not None:
            violations += self._of_messages(e, e.messages)
        self._remember(e)
        return violations

    def _of_messages(self, e: Evidence, m: Messages) -> Iterator[Violation]:
        owner = np.repeat(np.arange(e.n), np.diff(m.offsets))
        assistant = m.from_assistant
        # A call without a token is T212.
        generated, offsets = e.turns.generation.lengths, e.turns.offsets
        silent = np.flatnonzero(assistant & ~m.calls & ~m.says)
        for i in silent.tolist():
            r, turn = int(owner[i]), int(m.turn[i])
            k = int(offsets[r]) + turn
            if 0 <= turn < offsets[r + 1] - offsets[r] and generated[k]:
                where = "" if e.foreign else f"{m.named(i, r)}; "
                yield self.at_rollout(e, r, "B803", turn=turn, detail=f"{where}{_tokens(int(generated[k]))} generated")
        results = m.tool_results
        bad = np.bincount(owner[results & m.fails], minlength=e.n)
        total = np.bincount(owner[results], minlength=e.n)
        for r in np.flatnonzero((bad >= STORM) & (bad >= STORM_SHARE * total)).tolist():
            yield self.at_rollout(e, r, "B804", detail=f"{bad[r]:,} of {total[r]:,} tool results are errors")
        self._counts.update(parsed=bool((assistant & m.calls).any()), offered=e.offers_tools)
        # Texts are searched for calls only until a call was parsed.
        if not self._counts["parsed"]:
            spelled = m.spelled_calls()
            malformed = [text for _, text in spelled if not is_whole_call(text)]
            self._counts.update(spelled=len(spelled), malformed=len(malformed))
            self._malformed = self._malformed or next(iter(malformed), "")
            if spelled:
                i = spelled[0][0]
                r, turn = int(owner[i]), int(m.turn[i])
                self._first.setdefault("B805", self.at_rollout(e, r, "B805", turn=turn if turn >= 0 else None))

    def _remember(self, e: Evidence) -> None:
        if e.reward is None or e.reward_null is None:
            return
        missing = np.full(e.n, np.nan)
        self._reward.append(np.where(e.reward_null, np.nan, e.reward))
        for name in {*self._parts, *e.parts}:
            columns = self._parts.setdefault(name, [np.full(self._rows, np.nan)])
            columns.append(e.parts.get(name, missing))
        self._rows += e.n
        if e.started is not None:
            dated = ~np.isnat(e.started.view("datetime64[us]"))
            self._sizes.append(e.turns.by_rollout(e.turns.generation).lengths[dated])
            self._started.append(e.started[dated])

    def finish(self) -> list[Violation]:
        """B802, B805, B806, B807 and B808, at most one each: they are about the path as a whole."""
        violations, n, first = [], self._counts, self._first
        if "B802" in first and n["calls"] >= CUT_OF and n["cut"] >= CUT_SHARE * n["calls"]:
            noun = "rollouts end in a model call that was cut" if n["foreign"] else "model calls were cut"
            share = f"{n['cut']:,} of {n['calls']:,} {noun} at a token limit ({n['cut'] / n['calls']:.0%})"
            violations.append(first["B802"]._replace(detail=share))
        if n["spelled"] >= UNPARSED and n["offered"] and not n["parsed"]:
            spelled = f"{n['spelled']:,} messages spell a tool call, and none was parsed"
            if n["malformed"]:
                many = "all" if n["malformed"] == n["spelled"] else f"{n['malformed']:,}"
                spelled += f"; {many} of these calls are malformed, as {brief(self._malformed)}"
            violations.append(first["B805"]._replace(detail=spelled))
        if "B806" in first:
            reward = np.concatenate([np.empty(0), *self._reward])
            weighted = self._parts.keys() - self.settings.unweighted
            parts = {name: np.concatenate(self._parts[name]) for name in sorted(weighted)}
            drift = length_drift(np.concatenate(self._started), np.concatenate(self._sizes)) if self._started else None
            texts = (("B806", equal_rewards(reward)), ("B807", dominating_part(reward, parts)), ("B808", drift))
            violations += [first["B806"]._replace(code=code, detail=text) for code, text in texts if text is not None]
        return violations


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


def is_whole_call(text: str) -> bool:
    """Whether a call in a text (``SPELLED_CALL``) is one that the model's own parser would read: its tag is closed and has
    JSON, or tags of parameters, in it. Calls behind special tokens, which are not JSON of every model, are taken so."""
    inside = re.findall(r"(?s)<(?:tool|function)_call>(.*?)</(?:tool|function)_call>", text)
    if re.search("<(tool|function)_call>", text):
        return any("<arg_key>" in body or "</function>" in body or _decoded(body.strip()) for body in inside)
    if "<function=" in text:
        return "</function>" in text.partition("<function=")[2]
    mark, name_key = "[TOOL_CALLS]", re.search(r'"name"\s*:', text)
    if mark in text:
        return any(_decoded(text, k) for k in range(text.index(mark) + len(mark), len(text)) if text[k] in "{[")
    return name_key is None or ((begin := text.rfind("{", 0, name_key.start())) >= 0 and _decoded(text, begin))


def _decoded(text: str, begin: int = 0) -> bool:
    """Whether an object or a list of JSON begins there."""
    try:
        return isinstance(json.JSONDecoder().raw_decode(text, begin)[0], (dict, list))
    except (ValueError, RecursionError):
        return False


def equal_rewards(reward: npt.NDArray[np.float64]) -> str | None:
    """B806's text when all scored rollouts have the same reward."""
    scored = reward[np.isfinite(reward)]
    if len(scored) < ENOUGH or (scored != scored[0]).any():
        return None
    return f"reward {scored[0]:g} for all {len(scored):,} scored rollouts"


def dominating_part(reward: npt.NDArray[np.float64], parts: dict[str, npt.NDArray[np.float64]]) -> str | None:
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


def _tokens(n: int) -> str:
    return f"{n:,} token" + ("" if n == 1 else "s")
