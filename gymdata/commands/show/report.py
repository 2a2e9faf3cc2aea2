"""Rollouts and pairs on a terminal.

Invariants: what a rollout holds is data, so control characters in it never reach the terminal, and none of it is
markup; no line is wider than the terminal; without colors the same information is shown in words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from gymdata.checks.violations import CODES, both_sides
from gymdata.commands.show.conversations import conversations_of
from gymdata.commands.show.rollout import MessageView, messages_of
from gymdata.errors import counted, printable
from gymdata.rollouts.messages import RolloutRow, object_of

if TYPE_CHECKING:
    from gymdata.checks.breaks import Reading
    from gymdata.commands.show.run import Shown, ShownPair, ShownRollout

#: Longer lines are hard to read, however wide the terminal is.
_WIDEST = 110
_NO_TERMINAL = 80
_ROLES = {
    "system": "magenta",
    "user": "cyan",
    "assistant": "green",
    **dict.fromkeys(("tool", "function", "environment"), "yellow"),
}
_SEVERITIES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
#: Lowest probability, and how a token of at least that is shown. Black on these reads on dark and light terminals.
_COLORS = (
    (0.95, "black on #b7e4c7"),
    (0.5, "black on #d8f3a6"),
    (0.1, "black on #ffe08a"),
    (0.01, "black on #ffb37a"),
    (0.0, "black on #ff8f8f"),
)
_UNKNOWN = "reverse"
#: Longer values of a task are left to ``--json``.
_SHORT = 60
_FIELDS = 6


def console_for(file: IO[str] | None = None) -> Console:
    """A console on ``file`` (stdout): as wide as the terminal up to what reads well, 80 columns elsewhere."""
    console = Console(file=file, markup=False, highlight=False, emoji=False)
    console.width = min(console.width, _WIDEST) if console.is_terminal else _NO_TERMINAL
    return console


def render(shown: Shown, *, tokens: bool = False, console: Console | None = None) -> None:
    """Print rollouts or a pair. ``tokens``: also the sampled ids, colored by their logprob."""
    out = _Page(console or console_for(), shown.reading)
    if tokens:
        out.legend()
    if shown.pair is not None:
        _pair(out, shown.pair, tokens)
    for number, rollout in enumerate(shown.rollouts):
        if number:
            out.line()
        _rollout(out, rollout, tokens)


class _Page:
    """Prints blocks of text with a border in the color of their role."""

    def __init__(self, console: Console, reading: Reading | None) -> None:
        self.console, self.reading = console, reading
        self._pieces: dict[int, str] = {}

    def line(self, *parts: Any) -> None:
        self.console.print(Text.assemble(*parts) if parts else "", soft_wrap=True)

    def title(self, text: str, style: str = "bold", line: str = "dim") -> None:
        self.console.print(Rule(Text(printable(text, lines=False), style), align="left", style=line))

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        rows = list(rows)
        wide = max(len(name) for name, _ in rows) + 2
        for name, value in rows:
            lines = Text(printable(value)).wrap(self.console, self.console.width - wide)
            for number, line in enumerate(lines):
                line.rstrip()
                self.line((("" if number else name).ljust(wide), "dim"), line)

    def block(self, text: Text, style: str) -> None:
        """``text``, wrapped where it is wider than the console, behind a border."""
        room = self.console.width - 2
        short = text.cell_len <= room and "\n" not in text.plain and "\t" not in text.plain
        for line in [text] if short else text.wrap(self.console, room, tab_size=4):
            if not short:
                line.rstrip()
            self.line(("│ " if line else "│", style), line)

    def piece(self, token: int) -> str:
        """The display of a token: its text if known, on one line."""
        if token not in self._pieces:
            text = self.reading.decode([token]) if self.reading is not None else f" {token}"
            self._pieces[token] = printable(text, lines=False) or f"⟨{token}⟩"
        return self._pieces[token]

    def legend(self) -> None:
        parts: list[Any] = [("probability ", "dim")]
        for at_least, style in _COLORS:
            parts += [(f" ≥ {at_least:.0%} " if at_least else " less ", style), " "]
        if self.console.color_system is not None:
            self.line(*parts, ("context is gray", "dim"))

    def tokens(self, ids: Sequence[int], logprobs: Sequence[float | None], style: str, first: int = 0) -> None:
        """Ids with their logprobs (None: given, not sampled): colored, or without colors one per line."""
        if self.console.color_system is None:
            for position, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), first):
                if logprob is not None:
                    text = self.piece(token) if self.reading is not None else ""
                    shown = "–" if math.isnan(logprob) else f"{logprob:.4f}"
                    self.line((f"│ {position:>6} {token:>7} {shown:>9}  ", style), text)
            return
        # Lines end between tokens, and after a token that holds a line's end.
        line, room = Text(), self.console.width - 2
        for token, logprob in zip(ids, logprobs, strict=True):
            piece = self.piece(token)
            part = Text(piece, "dim" if logprob is None else _color(logprob))
            part.append("" if logprob is None else "▏", "dim not reverse")
            if line.cell_len and line.cell_len + part.cell_len > room:
                self.block(line, style)
                line = Text()
            line.append_text(part)
            if "\\n" in piece:
                self.block(line, style)
                line = Text()
        if line.cell_len:
            self.block(line, style)


def _color(logprob: float) -> str:
    if not math.isfinite(logprob) or logprob > 1e-6:
        return _UNKNOWN
    return next(style for at_least, style in _COLORS if math.exp(logprob) >= at_least)


def _rollout(out: _Page, shown: ShownRollout, tokens: bool) -> None:
    row = shown.row
    out.title(f"rollout {row['rollout_id']}")
    score = [] if shown.score is None else [(f"score {shown.score[0]}", _number(shown.score[1]))]
    # Faults that put the other numbers in doubt, each once.
    codes = dict.fromkeys(violation.code for violation in shown.violations if violation.severity == "error")
    listed = ", ".join(f"{code} {CODES[code].name}" for code in codes)
    out.facts([*_facts(row), *score, *([("faults", f"{listed} (explained below)")] if codes else [])])
    turns, shown_turns = row["turns"] or [], set()
    conversations = conversations_of(row)
    for conversation in conversations:
        if len(conversations) > 1:
            out.line()
            name = f"{'  ' * conversation.depth}{conversation.agent or 'conversation'}"
            out.title(f"{name}, {conversation.begins}" if conversation.begins else name)
        for message in conversation.messages:
            turn = message.turn
            out.line()
            if turn is None or not 0 <= turn < len(turns) or turn in shown_turns:
                _message(out, message, "")
                continue
            _message(out, message, _turn_facts(turns[turn]))
            shown_turns.add(turn)
            if tokens:
                _turn_tokens(out, turns[turn])
    for number, turn in enumerate(turns) if tokens else ():
        if number not in shown_turns:
            out.line()
            out.line((f"turn {number}, {_turn_facts(turn)}: no message", "dim"))
            _turn_tokens(out, turn)
    explained = set()
    for v in shown.violations:
        code = CODES[v.code]
        severity = v.severity or code.severity
        location = [f"turn {v.turn}"] * (v.turn is not None) + [f"position {v.position}"] * (v.position is not None)
        out.line()
        out.line((f"{v.code} {code.name}", _SEVERITIES[severity]), f"  {', '.join(location)}  ", (severity, "dim"))
        parts = [v.detail] + [f"{name} {value}" for name, value in (("expected", v.expected), ("got", v.got)) if value]
        details = "\n".join(str(part) for part in parts if part)
        if details:
            out.block(Text(printable(details)), "red")
        if v.evidence is not None:
            out.block(Text(printable(v.evidence["explanation"])), "red")
            for side, left, middle, right in both_sides(v.evidence):
                out.block(Text.assemble((f"{side}  ", "dim"), left, ("⟦" + middle + "⟧", "reverse"), right), "red")
        if v.code not in explained:
            explained.add(v.code)
            meaning = code.meaning[0].upper() + code.meaning[1:]
            out.block(Text(f"{meaning}. {code.explanation}", "dim"), "red")


def _facts(row: RolloutRow) -> Iterator[tuple[str, str]]:
    task = object_of(row["task"])
    fields = {k: v for k, v in task.items() if isinstance(v, (str, int, float)) and k not in ("task_id", "prompt")}
    details = [f"{k} {v}" for k, v in fields.items() if len(str(v)) <= _SHORT and "\n" not in str(v) and k[:1] != "_"]
    yield "task", "  ".join([row["task_id"], *details[:_FIELDS]])
    parts = "  ".join(f"{part['name']} {_number(part['value'])}" for part in row["rewards"] or [])
    why = ""
    if row["reward"] is None:
        faults = row["extra"].get("reward_faults") if isinstance(row["extra"], dict) else None
        failed = [f"{name} failed: {fault}" for name, fault in faults.items()] if isinstance(faults, dict) else []
        why = "; ".join(failed) or "not scored"
    yield "reward", "   ".join(filter(None, (_number(row["reward"]), parts, why)))
    reasons = dict.fromkeys(r for r in (row["stop_reason"], row["finish_reason"]) if r)
    yield "status", " · ".join([row["status"], *reasons])
    yield "policy", f"{row['policy']} (version {row['policy_version']}, temperature {row['temperature']:g})"
    breaks = f", {counted(row['n_breaks'], 'break')}" if row["n_breaks"] else ""
    kind = "rendered from text, not sampled" if any(turn.get("rendered") for turn in row["turns"] or []) else "sampled"
    size = f"{counted(row['n_turns'], 'turn')}, {counted(row['n_generated_tokens'], 'token')} {kind}"
    size += f", {row['n_context_tokens']:,} of context"
    yield "size", size + breaks
    # Imported rollouts may lack this.
    if row["started_at"].timestamp():
        yield "time", f"{row['started_at']:%Y-%m-%d %H:%M:%S} UTC, {row['duration_s']:.1f} s"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _turn_facts(turn: Mapping[str, Any]) -> str:
    logprobs = [p for p in turn["generation_log_probs"] if p is not None and not math.isnan(p)]
    n = len(turn["generation_token_ids"])
    mean = f", mean logprob {math.fsum(logprobs) / len(logprobs):.3f}" if logprobs else ""
    agent = f"{turn['agent']}, " if turn.get("agent") else ""
    rendered = ", rendered from text" if turn.get("rendered") else ""
    reward = f", reward {_number(turn['reward'])}" if turn.get("reward") is not None else ""
    return f"{agent}{counted(n, 'token')}{rendered}, {turn['finish_reason']}{mean}{reward}"


def _message(out: _Page, message: MessageView, of_turn: str) -> None:
    style = _ROLES.get(message.role, "white")
    name = f" {message.name}" if message.name else ""
    turn = f"  turn {message.turn}" if message.turn is not None else ""
    facts = f"{turn}{': ' if of_turn else ''}{of_turn}"
    out.line((printable(f"{message.role}{name}", lines=False), f"bold {style}"), (printable(facts, lines=False), "dim"))
    if message.reasoning:
        out.block(Text(message.reasoning, "italic dim"), style)
    if message.content or not (message.calls or message.reasoning):
        out.block(Text(message.content) if message.content else Text("(empty)", "dim"), style)
    for call in message.calls:
        arguments = call.text
        if call.name and isinstance(call.arguments, dict):
            arguments = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call.arguments.items())
        text = printable(f"({arguments if call.arguments else ''})") if call.name else arguments
        out.block(Text.assemble(("→ ", style), (call.name, "bold"), text), style)


def _turn_tokens(out: _Page, turn: Mapping[str, Any]) -> None:
    context, ids = turn["prompt_delta_ids"], turn["generation_token_ids"]
    logprobs = [*turn["generation_log_probs"], *([math.nan] * len(ids))][: len(ids)]
    out.tokens([*context, *ids], [None] * len(context) + logprobs, "dim", int(turn["prefix_length"]))


def _pair(out: _Page, shown: ShownPair, tokens: bool) -> None:
    row = shown.row
    out.title(f"pair {row['pair_id']}")
    sampled = {name: sum(row[f"{name}_mask"]) for name in _SIDES}
    kind = "rendered from text, not sampled" if row.get("rendered") else "sampled"
    sides = {name: f"{row[f'{name}_rollout_id']}, {n:,} tokens {kind}" for name, n in sampled.items()}
    made_by = row.get("score") or row["source"]
    out.facts([("task", row["task_id"]), ("margin", f"{_number(row['margin'])} ({made_by})"), *sides.items()])
    for message in messages_of([*row["prompt"], *row["chosen"][: shown.fork_message]], ()):
        out.line()
        _message(out, message, "")
    out.line()
    out.title(f"from here they differ: token {shown.fork_token:,} after the prompt", "bold", "dim")
    for name in _SIDES:
        _side(out, shown, name, tokens)


_SIDES = {"chosen": "bold green", "rejected": "bold red"}


def _side(out: _Page, shown: ShownPair, name: str, tokens: bool) -> None:
    row = shown.row
    out.title(name, _SIDES[name], _SIDES[name].split()[-1])
    for message in messages_of(row[name][shown.fork_message :] or [{"role": "assistant"}], ()):
        _message(out, message, "")
        out.line()
    if tokens:
        start = shown.fork_token
        ids, mask, logprobs = (row[f"{name}_{column}"][start:] for column in ("ids", "mask", "logprobs"))
        sampled = [p if m else None for p, m in zip(logprobs, mask, strict=True)]
        out.tokens(ids, sampled, "dim", start)
        out.line()
