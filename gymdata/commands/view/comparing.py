"""Pages that show rollouts side by side: a group, a preference pair, and a judge's comparisons."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata import genrm
from gymdata.commands.judge.groups import final_answer
from gymdata.commands.show.rollout import messages_of
from gymdata.commands.view.evidence.rollout import shown_token
from gymdata.commands.view.evidence.selection import page_slice
from gymdata.commands.view.evidence.tables import Rows, Snapshot, facts_of
from gymdata.commands.view.text import Values
from gymdata.genrm.bias import against_rewards
from gymdata.genrm.matches import Matches, position_inconsistency, winners
from gymdata.models.vocabulary import Vocabulary
from gymdata.rollouts.messages import Message, PairRow, RolloutRow
from gymdata.rollouts.next_prompt import common_length
from gymdata.scores.chosen import scores_of_pairs

PAGE = 50
_NUMBERS = ("score_1", "score_2", "ranking")
_MOST_CARDS = 64
#: Longer completions are compared by their common beginning and end only.
_MOST_COMPARED = 6_000
#: The meaning of each figure about a judge, and a fair judge's value.
FIGURES = {
    "position_bias": ("first position wins", "of decided comparisons; a fair judge is at 50 %", 0.5),
    "position_inconsistency": ("changes its mind", "of pairs: another one wins after swapping", 0.0),
    "longer_wins": ("longer answer wins", "of decided comparisons of unequal length", 0.5),
    "both_positions": ("agrees with the rewards", "of judged comparisons of unequal rewards", 1.0),
    "called_equal": ("calls equals equal", "of judged comparisons of equal rewards", 1.0),
    "ties": ("ties", "of judged comparisons", None),
    "judge_agreement": ("agrees with itself", "of repeated judgements of one comparison", 1.0),
    "failures": ("failures", "of all comparisons", 0.0),
}


def completion(messages: Sequence[Message]) -> int:
    """Where the policy's part of a conversation begins: its first message, or the end."""
    return next((n for n, m in enumerate(messages) if m["role"] == "assistant"), len(messages))


def group_cards(rows: Sequence[RolloutRow]) -> Values:
    """The rollouts of a group: their common prompt, their completions, and how often each final answer came."""
    rows = sorted(rows, key=lambda row: (row["rollout_index"], row["rollout_id"]))
    prompts = [row["messages"][: completion(row["messages"])] for row in rows]
    shared = prompts[0] if all(_bare(p) == _bare(prompts[0]) for p in prompts) else None
    cards = []
    for row, prompt in zip(rows[:_MOST_CARDS], prompts, strict=False):
        answer = final_answer(row["messages"])
        messages = row["messages"][len(prompt) :] if shared is not None else row["messages"]
        cards.append({**row, "messages": messages_of(messages, ()), "answer": answer.strip()})
    answers: dict[str, list[Any]] = {}
    for row in rows:
        answers.setdefault(final_answer(row["messages"]).strip(), []).append(row["reward"])
    tally = sorted(answers.items(), key=lambda item: -len(item[1]))
    return {
        "cards": cards,
        "left_out": len(rows) - len(cards),
        "prompt": messages_of(shared, ()) if shared else [],
        "answers": [
            (
                text,
                len(rewards),
                sum(scored) / len(scored) if (scored := [r for r in rewards if r is not None]) else None,
            )
            for text, rewards in tally[:8]
        ],
        "distinct": len(tally),
        "statuses": Counter(row["status"] for row in rows),
    }


def _bare(messages: Sequence[Message]) -> list[tuple[Any, Any]]:
    return [(m["role"], m["content"]) for m in messages]


# -- pairs -----------------------------------------------------------------------------------------------------------


def list_pairs(rows: Rows, number: int, page: int, sort: str) -> Values:
    """One page of a file's pairs, by margin or in the file's order; ``files``: the name, scores and size of each file."""
    tables = [rows.table.slice(span.start, len(span)) for span in map(rows.span, range(len(rows.files)))]
    pairs = tables[number] if tables else rows.table
    margins, order = pairs["margin"].to_numpy(), np.arange(len(pairs))
    if sort in ("margin", "-margin"):
        direction = "descending" if sort == "margin" else "ascending"
        order = pc.sort_indices(pairs, sort_keys=[("margin", direction, "at_end")]).to_numpy()
    page, pages, on_page = page_slice(page, len(pairs), PAGE)
    return {
        "rows": pairs.take(pa.array(order[on_page])).to_pylist(),
        "files": [
            ("/".join(file.source.path.parts[-3:]), ", ".join(scores_of_pairs(table)), len(table))
            for file, table in zip(rows.files, tables, strict=True)
        ],
        "number": number,
        "total": len(pairs),
        "tasks": int(pc.count_distinct(pairs["task_id"]).as_py()),
        "mean_margin": float(margins.mean()) if len(margins) else None,
        "page": page,
        "pages": pages,
    }


def pair_page(row: PairRow, vocabulary: Vocabulary | None) -> Values:
    """Both sides of a pair from where they part: tokens where there are ids, and their messages."""
    chosen, rejected = row["chosen_ids"], row["rejected_ids"]
    fork = common_length(chosen, rejected) if chosen and rejected else None
    # Which tokens of each side the other lacks.
    differs = {"chosen": [True] * len(chosen), "rejected": [True] * len(rejected)}
    if fork is not None and max(len(chosen), len(rejected)) - fork <= _MOST_COMPARED:
        for block in difflib.SequenceMatcher(
            None, chosen[fork:], rejected[fork:], autojunk=False
        ).get_matching_blocks():
            for side, start in (("chosen", fork + block.a), ("rejected", fork + block.b)):
                differs[side][start : start + block.size] = [False] * block.size
    sides: dict[str, Values] = {}
    for side, unlike in differs.items():
        ids, mask, logprobs = (row[f"{side}_{name}"] for name in ("ids", "mask", "logprobs"))
        unlike[:fork] = [False] * (fork or 0)
        tokens = [
            shown_token(vocabulary, position, token, differs=other, sampled=bool(trained))
            for position, (token, trained, other) in enumerate(zip(ids, mask, unlike, strict=True))
        ]
        sides[side] = {
            "messages": messages_of(row[side], ()),
            "tokens": tokens if fork is not None else None,
            "length": len(ids),
            "trained": int(sum(mask)),
            "logp": sum(lp for lp, trained in zip(logprobs, mask, strict=False) if trained),
        }
    return {
        "pair": row,
        "prompt": messages_of(row["prompt"], ()),
        "sides": sides,
        "shared": fork,
        "fork": None if fork is None else len(row["prompt_ids"]) + fork,
        "as_text": vocabulary is not None,
    }


# -- comparisons -----------------------------------------------------------------------------------------------------


class Verdicts:
    """All comparisons with what they decided. ``table``: their keys, with ``winner`` (1, −1, 0 for a tie), ``flip`` and
    ``half`` (another winner, or a tie, after swapping), ``against`` (the rewards: the worse one won, a tie of unequal
    rewards, a winner among equal ones), and the reward and index of each side. Arrays have one entry per comparison."""

    def __init__(self, rows: Rows, snapshot: Snapshot) -> None:
        self.rows, self.snapshot, keys = rows, snapshot, rows.table
        ids = snapshot.table["rollout_id"].combine_chunks()
        sides = [pc.index_in(keys[name].combine_chunks(), value_set=ids) for name in ("rollout_i", "rollout_j")]
        here = np.flatnonzero(pc.and_(*map(pc.is_valid, sides)).to_numpy(zero_copy_only=False))
        #: Two judges of one run use the same ids: what one of them says is no second opinion of the other, so the rollouts
        #: of each file have numbers of their own.
        files = np.searchsorted(rows.starts, np.arange(len(rows)), side="right") - 1
        first, second = (side.take(pa.array(here)).to_numpy() + files[here] * len(ids) for side in sides)
        self.judged = pc.equal(keys["status"], "judged").to_numpy(zero_copy_only=False)
        numbers = [np.where(self.judged, keys[name].to_numpy(), np.nan)[here] for name in _NUMBERS]
        self.matches = Matches(first, second, keys["judge_idx"].to_numpy()[here].astype(np.int64), *numbers)
        self.won = np.full(len(rows), np.nan)
        self.won[here] = winners(self.matches)
        a, b, self.flipped = position_inconsistency(self.matches)
        self.pairs = here[a], here[b]
        swapped, flip, half = np.full(len(rows), -1), np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
        for one, other in (self.pairs, self.pairs[::-1]):
            swapped[one], flip[one] = other, self.flipped
            half[one] = (self.won[one] == 0) != (self.won[other] == 0)
        rewards = pc.fill_null(snapshot.table["reward"], math.nan)
        reward_i, reward_j = (rewards.take(side).to_numpy() for side in sides)
        self.better = np.sign(reward_i - reward_j)
        known, equal = np.isfinite(self.better) & np.isfinite(self.won), self.better == 0
        self.unlike, self.alike = known & ~equal, known & equal
        wrong = (self.unlike & (self.won == -self.better), self.unlike & (self.won == 0), self.alike & (self.won != 0))
        self.all_rewards = np.tile(rewards.to_numpy(), max(1, len(rows.files)))
        index_i, index_j = (snapshot.table["rollout_index"].take(side) for side in sides)
        columns = {"file": files, "winner": self.won, "swapped": swapped, "flip": flip, "half": half}
        columns |= {"against": np.select(wrong, ("reversed", "tied", "unequal"), "")}
        columns |= {"reward_i": reward_i, "reward_j": reward_j, "index_i": index_i, "index_j": index_j}
        for name, values in columns.items():
            keys = keys.append_column(name, values if name[:5] == "index" else pa.array(values, from_pandas=True))
        self.table = keys

    def figures(self) -> list[Values]:
        """Rates of the judge with their intervals."""
        rates: Values = {**genrm.bias_report(self.matches), **against_rewards(self.matches, self.all_rewards)}
        written = [(facts_of(file.source.path).get("bias") or {}).get("longer_wins") for file in self.rows.files]
        if len(written) == 1 and isinstance(written[0], dict):
            # Lengths of answers depend on what the judge was shown, which its run knows.
            rates["longer_wins"] = written[0]
        return [
            {"name": title, "what": meaning, "fair": fair, **rates[key]}
            for key, (title, meaning, fair) in FIGURES.items()
            if key in rates and rates[key]["n"]
        ]

    def tabs(self) -> dict[str, np.ndarray]:
        """The comparisons of each tab."""
        against = self.table["against"].to_numpy()
        flips, half = (self.table[name].to_numpy() for name in ("flip", "half"))
        tabs = {"all": np.ones(len(self.rows), np.bool_), "flips": flips, "half": half, "failed": ~self.judged}
        return tabs | {word: against == word for word in ("reversed", "tied", "unequal")}

    def outcomes(self) -> dict[str, int]:
        """How many verdicts agree with the rewards, and what happened to pairs when their positions were swapped."""
        won, swapped = (self.won[side] for side in self.pairs)
        counted = {
            "unlike": self.unlike,
            "agree": self.unlike & (self.won == self.better),
            "alike": self.alike,
            "called_equal": self.alike & (self.won == 0),
            "pairs": np.ones(len(won), np.bool_),
            "same_winner": (won == -swapped) & (won != 0),
            "both_ties": (won == 0) & (swapped == 0),
            "half_ties": (won == 0) != (swapped == 0),
            "flipped": self.flipped,
        }
        return {name: int(mask.sum()) for name, mask in counted.items()}

    def select(self, show: str, task: str) -> np.ndarray:
        """The comparisons of a tab, in the order of the file."""
        tabs = self.tabs()
        found = pc.match_substring(self.table["task_id"], task).to_numpy(zero_copy_only=False)
        return np.flatnonzero(tabs.get(show, tabs["all"]) & found)

    def listed(self, numbers: Sequence[int]) -> list[Values]:
        """Comparisons for a table."""
        rows: list[Values] = self.table.take(pa.array(numbers, pa.int64())).to_pylist()
        for row in rows:
            row["rewards"], row["indices"] = ((row[f"{name}_i"], row[f"{name}_j"]) for name in ("reward", "index"))
        return rows
