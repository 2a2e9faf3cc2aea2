"""The findings of validation: single violations, which of them count, and the report over all of them.

Invariants: the list of violations is complete and in the order of files and rows; counts are those of the list; nothing
here needs pyarrow except ``table``, so that a small file is validated without loading it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gymdata.errors import UsageError, printable
from gymdata.public import Report, Row

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Code:
    """One fault class. ``meaning`` is one line; ``explanation`` says why it matters and what to do."""

    code: str
    name: str
    severity: Severity
    meaning: str
    explanation: str

    def __str__(self) -> str:
        """The code for people."""
        meaning = self.meaning[0].upper() + self.meaning[1:]
        return f"{self.code} {self.name} ({self.severity})\n\n{meaning}.\n\n{self.explanation}"


def _registry(*codes: Code) -> dict[str, Code]:
    return {c.code: c for c in codes}


CODES: dict[str, Code] = _registry(
    # structure
    Code(
        "S101",
        "unreadable row",
        "error",
        "the row cannot be read",
        "The line is not JSON, not UTF-8, not an object, or torn; or a whole file is cut off or corrupt (then row is 0 and "
        "the detail names the file). Nothing of the row was checked. A torn last line usually means that the writer was "
        "killed: `gymdata collect` repairs its own journals when it resumes.",
    ),
    Code(
        "S102",
        "wrong type",
        "error",
        "a field holds a value of the wrong type",
        "For example ids that are floats or strings, nested id lists, a number beyond 64 bits, a list where an object must "
        "be, a key given twice, or a count column that disagrees with the turns that it counts.",
    ),
    Code(
        "S103",
        "missing column",
        "error",
        "a column or field that the table must have is absent",
        "The checks that need the column were not run. The tables and their columns are in schemas/.",
    ),
    Code(
        "S104",
        "newer schema",
        "error",
        "the file was written by a newer gymdata",
        "Its table version is above the one that this gymdata knows, so its meaning is not known. Upgrade gymdata.",
    ),
    # breaks and tokens
    Code(
        "T200",
        "break",
        "error",
        "the prompt does not extend what came before, cause not known",
        "A turn's prompt must begin with its parent's prompt ++ generation, token for token; from `position` on this one "
        "does not. Training on the rollout as one sequence would train tokens that were never sampled in that context. "
        "Repair with --fix split, truncate or drop, or collect with ids in and ids out.",
    ),
    Code(
        "T201",
        "re-tokenised",
        "error",
        "a break: the same text came back as other tokens",
        "The differing spans decode to the same text: the generation was decoded and encoded again. The model never sampled "
        "the new ids. Send token ids between turns, never text.",
    ),
    Code(
        "T202",
        "re-templated",
        "error",
        "a break: the assistant turn was rendered differently",
        "The differing spans are in one assistant turn and are equal after parsing: the template wrote the tool call or "
        "white space in its own way. `gymdata check MODEL` shows what the template changes.",
    ),
    Code(
        "T203",
        "history rewritten",
        "error",
        "a break: earlier messages were changed or removed",
        "A message border or a reasoning block is in the removed part, or a message that the model did not write changed. "
        "Templates that strip earlier reasoning do this; use the prefix-preserving form of the template.",
    ),
    Code(
        "T204",
        "context truncated",
        "error",
        "a break: the front of the history was dropped",
        "Tokens right after the system message, or from the very start, were removed, as a sliding context window does.",
    ),
    Code(
        "T205",
        "no token data",
        "error",
        "prompt or generation ids are missing, null or empty",
        "The turn cannot be trained on as it was sampled. When a whole file has no ids (text rollouts), this is a warning, "
        "one per turn; when only some turns lack them it is an error. `gymdata tokenize` renders ids from text (T213).",
    ),
    Code(
        "T206",
        "id out of vocabulary",
        "error",
        "a token id is negative or not below the vocabulary's size",
        "`position` counts from 0 in the turn's whole prompt or in its generation; the detail says which. Without a known "
        "vocabulary (run.json or --tokenizer) only ids outside 0 to 2³¹−1 are found.",
    ),
    Code(
        "T207",
        "generation is not its message",
        "error",
        "the generated ids do not decode to the message's text",
        "Checked where the tokenizer of the run is here: up to 2 million tokens, with --decode all. The message's content "
        "must occur in the decoded generation.",
    ),
    Code(
        "T208",
        "turns out of order",
        "error",
        "a turn comes after one that was sampled later",
        "Found when this turn's prompt ++ generation is the beginning of an earlier turn's prompt, so it was sampled "
        "before it; or when assistant messages name their turns in falling order or beyond the last turn.",
    ),
    Code(
        "T209",
        "digest mismatch",
        "error",
        "the content changed after it was collected",
        "The digest over the parent's stored digest, prefix length, ids and log-probabilities does not match the stored "
        "one. Exactly this turn was changed, or its digest was. Or a whole file is not the one that run.json describes, by "
        "its size or its bytes (then row is 0, there is no turn, and its rows may each be sound).",
    ),
    Code(
        "T210",
        "delta not expandable",
        "error",
        "the stored delta does not rebuild a prompt",
        "prefix_length is below 0, beyond the parent's prompt ++ generation, or not the longest common prefix; or the "
        "parent is not an earlier turn.",
    ),
    Code(
        "T211",
        "branch or retry",
        "info",
        "the turn forks from, or repeats, an earlier one",
        "A retry has its parent's very prompt; a branch leaves the chain inside tokens that the environment wrote, or is "
        "another agent's call. The rollout gives several sequences. Not a fault.",
    ),
    Code(
        "T212",
        "empty generation",
        "info",
        "the model call generated no token",
        "The turn trains nothing. Usual causes: an abort, or a context that was full.",
    ),
    Code(
        "T213",
        "rendered ids",
        "info",
        "ids rendered from text, not sampled",
        "`gymdata tokenize` made the turn's ids from its text, with a tokenizer and its chat template: the model may have "
        "sampled other ids for the same text, and no log-probability is known (NaN). Pairs, SFT, DPO, KTO and reward models "
        "take such rollouts with --allow-rendered; `experience` and `train-rl` take sampled ids only. Not a fault.",
    ),
    Code(
        "T214",
        "weight versions do not fit",
        "error",
        "spans of weight versions do not cover the generation",
        "A turn's `weight_versions` say which weights sampled which tokens: the first span starts at 0, each starts where "
        "the one before ends, and the last ends with the generation. Where they do not, they belong to other tokens. Usual "
        "causes: a generation that was cut after it was recorded, spans of another turn. Remove the field or collect again.",
    ),
    Code(
        "T215",
        "several weights",
        "warning",
        "the weights changed while the turn was sampled",
        "The engine got other weights in the middle of a generation, as asynchronous trainers do. Each log-probability is "
        "that of the weights that sampled its token, so ratios hold; policy_hash and policy_version name one of them only, "
        "and `audit` finds the tokens of the others (L305). Leave such turns out where one policy must have sampled all.",
    ),
    # log-probabilities
    Code(
        "L301",
        "length differs",
        "error",
        "log-probabilities and generated ids differ in number",
        "One logprob per generated token is needed; an off-by-one shifts every ratio of an off-policy loss.",
    ),
    Code(
        "L302",
        "not finite",
        "error",
        "a log-probability is NaN or infinite",
        "`position` is the token's place in the generation. The literals NaN and Infinity are read, and land here.",
    ),
    Code(
        "L303",
        "positive",
        "error",
        "a log-probability is above zero",
        "Probabilities above one do not exist (1e-6 is allowed for rounding). Often probabilities or negated values were "
        "stored.",
    ),
    Code(
        "L304",
        "biased by sampling",
        "warning",
        "the sampling settings make the log-probabilities biased",
        "Raw log-probabilities at a temperature other than 1, top_p below 1, top_k, min_p, penalties and greedy decoding "
        "all record something else than the distribution that was sampled from. One finding a file or run. Training that "
        "uses ratios refuses such files. Collect with processed log-probabilities, top_p 1, no top_k and no penalties.",
    ),
    Code(
        "L305",
        "disagree with the model",
        "error",
        "a forward pass gives other log-probabilities",
        "Found by `gymdata audit`: another checkpoint, temperature, template, or an off-by-one.",
    ),
    # messages
    Code(
        "M401",
        "system not first",
        "error",
        "a system message comes after another message",
        "Most chat templates render a system message at the front only, or refuse.",
    ),
    Code(
        "M402",
        "adjacent assistants",
        "warning",
        "two assistant messages follow each other",
        "Many templates merge or refuse them. Sometimes a tool result was lost between the two.",
    ),
    Code(
        "M403",
        "tool result without a call",
        "error",
        "a tool message answers no earlier tool call",
        "Its tool_call_id is in no earlier assistant message's tool_calls, or without an id, the message before the tool "
        "results is not an assistant message with calls.",
    ),
    Code(
        "M404",
        "no assistant",
        "error",
        "the rollout has no assistant message",
        "The model wrote no message.",
    ),
    # rewards
    Code(
        "R501",
        "no reward",
        "info",
        "the rollout has no reward",
        "Not scored. An error when the run's run.json names a reward, for then scoring failed; otherwise for information.",
    ),
    Code(
        "R502", "reward not finite", "error", "a reward is NaN or infinite", "Means and comparisons over it are lost."
    ),
    Code(
        "R503",
        "no variance",
        "warning",
        "all rewards of the group are equal",
        "A group of two or more rollouts that all got the same reward gives no pair and no advantage. Reported once a "
        "group, at its first rollout.",
    ),
    # pairs
    Code(
        "P601",
        "chosen is rejected",
        "error",
        "chosen and rejected are identical",
        "Their ids, or their texts, are equal.",
    ),
    Code(
        "P602",
        "prompts differ",
        "error",
        "chosen and rejected do not start from one prompt",
        "The rollouts that the pair names began with other prompt ids, or the pair has no prompt.",
    ),
    Code("P603", "tie", "warning", "the margin is zero or below", "There is no preference to learn."),
    Code(
        "P604",
        "contradictory pairs",
        "error",
        "another pair has the opposite preference",
        "Two pairs of one file prefer A over B and B over A. Reported at the later one.",
    ),
    Code(
        "P605",
        "task on both sides",
        "error",
        "the task is in more than one split",
        "Files of one path (train and test) share this task_id, so the test measures what was trained.",
    ),
    Code(
        "P606",
        "duplicate pair",
        "warning",
        "the same pair twice",
        "Prompt, chosen and rejected have the ids of an earlier pair of this path (the texts, where a pair has no ids), so "
        "it is trained more than once. `gymdata pairs` leaves such copies out unless --keep-duplicates is given; files of "
        "other versions or other projects may hold them.",
    ),
    # behavior
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
        "has a parsed call: the tool parser is not the model's. No tool was run, so rewards say nothing about the policy. "
        "Collect again with the right --tool-parser (`gymdata check MODEL` shows which one fits). One finding per path.",
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
    # duplicates
    Code(
        "D701",
        "duplicate rollout",
        "error",
        "the rollout occurs twice",
        "The same rollout_id (for foreign rows: the same row) was seen before; counting or training it twice skews both.",
    ),
    Code(
        "D702",
        "identical generations",
        "warning",
        "another rollout of the group generated the same tokens",
        "Expected at temperature 0 and on very short answers; otherwise a seed was probably used twice.",
    ),
)

#: Codes that are causes of one fault: the prompt does not extend what came before.
BREAKS = ("T200", "T201", "T202", "T203", "T204")


def expand_prefixes(prefixes: Iterable[str], flag: str) -> frozenset[str]:
    """The codes that begin with any of ``prefixes`` (``T2`` is every T2xx). Raises UsageError for one that matches none."""
    chosen: set[str] = set()
    for raw in [prefixes] if isinstance(prefixes, str) else prefixes:
        for prefix in raw.replace(",", " ").split():
            found = [code for code in CODES if code.startswith(prefix.upper())]
            if not found:
                raise UsageError.unknown_choice(flag, prefix, CODES)
            chosen.update(found)
    return frozenset(chosen)


def explain(code: str) -> Code:
    """The explanation of a code. Raises UsageError for an unknown code, naming similar ones."""
    entry = CODES.get(code.upper())
    if entry is None:
        family = [f"{known} {one.name}" for known, one in CODES.items() if code and known.startswith(code.upper())]
        if family:
            raise UsageError.bad_value("--explain", code, f"one code; these begin so: {', '.join(family)}")
        raise UsageError.unknown_choice("--explain", code, CODES)
    return entry


class Violation(NamedTuple):
    """One fault. ``row`` is 0-based in ``file``; ``turn`` and ``position`` are 0-based, None when they do not apply."""

    code: str
    row: int
    rollout_id: str | None = None
    turn: int | None = None
    position: int | None = None
    expected: str | None = None
    got: str | None = None
    detail: str | None = None
    severity: Severity | None = None
    file: str | None = None
    #: Evidence of a break: the differing spans with their ids and texts, the tokens around them, and a line that
    #: explains.
    evidence: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row of the violations table, with the file that ``row`` counts in; and of a break the evidence."""
        row = {
            "rollout_id": self.rollout_id,
            "row": self.row,
            "turn": self.turn,
            "code": self.code,
            "severity": self.severity or CODES[self.code].severity,
            "position": self.position,
            "expected": self.expected,
            "got": self.got,
            "detail": self.detail,
            "file": self.file,
        }
        return row if self.evidence is None else row | {"evidence": self.evidence}


def both_sides(evidence: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The first place of a break for people: (``before`` or ``prompt``, text to the left, what differs, text to the
    right), each cut to a part of a line and fit for a terminal; empty where no tokenizer gave texts."""
    if evidence["left"] is None:
        return []
    first, left = evidence["spans"][0], _cut(evidence["left"], 40, "end")
    return [
        (side, left, _cut(first[side]["text"], 80, "middle"), _cut(right, 40, "start"))
        for side, right in zip(("before", "prompt"), evidence["right"], strict=True)
    ]


def _cut(text: str, width: int, keep: str) -> str:
    """``text`` on one line, at most ``width`` characters of its start, its end, or both."""
    line = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    line = printable(line, lines=False)
    if len(line) <= width:
        return line
    if keep == "middle":
        return f"{line[: width // 2]} … {line[-width // 2 :]}"
    return line[:width] + "…" if keep == "start" else "…" + line[-width:]


def rows_with_errors(found: Iterable[Violation]) -> set[tuple[str | None, int]]:
    """(file, row) of every row with an error."""
    return {(v.file, v.row) for v in found if (v.severity or CODES[v.code].severity) == "error"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which codes count, and as what. ``reward_named``: run.json names a reward, so a missing one is an error."""

    select: frozenset[str] = frozenset(CODES)
    ignore: frozenset[str] = frozenset()
    strict: bool = False

    @classmethod
    def of(cls, select: Iterable[str] = (), ignore: Iterable[str] = (), strict: bool = False) -> Selection:
        """From prefixes as the command line gives them; no ``select`` means every code."""
        chosen = expand_prefixes(select, "--select") or frozenset(CODES)
        return cls(chosen, expand_prefixes(ignore, "--ignore"), strict)

    def wants(self, code: str) -> bool:
        return code in self.select and code not in self.ignore

    def apply(self, found: Iterable[Violation]) -> list[Violation]:
        """The violations in ``found`` that count, each with its severity filled in."""
        kept = []
        for violation in found:
            if self.wants(violation.code):
                severity = violation.severity or CODES[violation.code].severity
                if self.strict and severity == "warning":
                    severity = "error"
                kept.append(violation if violation.severity == severity else violation._replace(severity=severity))
        return kept


@dataclass(slots=True, repr=False)
class ValidationReport(Report):
    """The outcome of one validation. ``rollouts`` counts rows that could be read (pairs, for a pairs file), ``trainable``
    those of them that have token ids to train on and no error, whatever codes were selected. ``state``: of the run that was
    checked, as ``gymdata ls`` has it."""

    path: str = ""
    state: str = ""
    files: list[str] = field(default_factory=list)
    rollouts: int = 0
    trainable: int = 0
    turns: int = 0
    tokens: int = 0
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def errors(self) -> int:
        return sum(v.severity == "error" for v in self.violations)

    @property
    def warnings(self) -> int:
        return sum(v.severity == "warning" for v in self.violations)

    @property
    def infos(self) -> int:
        return sum(v.severity == "info" for v in self.violations)

    @property
    def by_code(self) -> dict[str, int]:
        return dict(sorted(Counter(v.code for v in self.violations).items()))

    @property
    def ok(self) -> bool:
        """There are rows, and no errors."""
        return self.rollouts > 0 and not any(v.severity == "error" for v in self.violations)

    def __repr__(self) -> str:
        return (
            f"ValidationReport(path={self.path!r}, rollouts={self.rollouts}, trainable={self.trainable}, "
            f"by_code={self.by_code})"
        )

    def has(self, *codes: str) -> bool:
        """Whether any of ``codes`` was found, whatever its severity."""
        return any(v.code in codes for v in self.violations)

    def rows(self) -> list[Row]:
        """The meaning and the count of each code that was found."""
        return [(f"{code}  {CODES[code].meaning}", count) for code, count in self.by_code.items()]

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints. Complete, never capped."""
        return {
            "rollouts": self.rollouts,
            "trainable": self.trainable,
            "turns": self.turns,
            "tokens": self.tokens,
            "errors": self.errors,
            "warnings": self.warnings,
            "infos": self.infos,
            "by_code": self.by_code,
            "files": self.files,
            "violations": [v.as_dict() for v in self.violations],
        }

    def table(self) -> Any:
        """The violations as an Arrow table of the violations schema."""
        import pyarrow as pa

        from gymdata.rollouts.schema import VIOLATIONS

        rows: list[Mapping[str, Any]] = [
            {k: v for k, v in one.as_dict().items() if k not in ("file", "evidence")} for one in self.violations
        ]
        return pa.Table.from_pylist(rows, schema=VIOLATIONS.arrow)
