"""Pages that show rollouts side by side: a group, a preference pair, and a judge's comparisons."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata import genrm
from gymdata.genrm.bias import against_rewards
from gymdata.genrm.matches import position_inconsistency, winners
from gymdata.judge.groups import MATCH_COLUMNS, final_answer, matches_in
from gymdata.models.vocabulary import Vocabulary
from gymdata.rollouts.messages import Message, PairRow, RolloutRow
from gymdata.rollouts.next_prompt import common_length
from gymdata.scores.chosen import scores_of_pairs
from gymdata.show.rollout import messages_of
from gymdata.view.evidence.rollout import shown_token
from gymdata.view.evidence.selection import page_slice
from gymdata.view.evidence.tables import Rows, Snapshot, facts_of
from gymdata.view.text import Values

PAGE = 50
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
    ids = {side: row[f"{side}_ids"] for side in ("chosen", "rejected")}
    sides: Values = {"tokens": None, "fork": None, "shared": None, "as_text": vocabulary is not None}
    if ids["chosen"] and ids["rejected"]:
        a, b = ids["chosen"], ids["rejected"]
        fork = common_length(a, b)
        sides["fork"], sides["shared"] = len(row["prompt_ids"]) + fork, fork
        # Which tokens of each side the other lacks.
        differs = {side: [False] * fork + [True] * (len(ids[side]) - fork) for side in ids}
        if max(len(a), len(b)) - fork <= _MOST_COMPARED:
            for block in difflib.SequenceMatcher(None, a[fork:], b[fork:], autojunk=False).get_matching_blocks():
                for side, start in (("chosen", fork + block.a), ("rejected", fork + block.b)):
                    differs[side][start : start + block.size] = [False] * block.size
        sides["tokens"] = {
            side: [
                shown_token(vocabulary, position, token, differs=other, sampled=bool(trained))
                for position, (token, trained, other) in enumerate(
                    zip(ids[side], row[f"{side}_mask"], differs[side], strict=True)
                )
            ]
            for side in ids
        }
    return {
        "pair": row,
        "prompt": messages_of(row["prompt"], ()),
        "chosen": messages_of(row["chosen"], ()),
        "rejected": messages_of(row["rejected"], ()),
        "lengths": {side: (len(ids[side]), int(sum(row[f"{side}_mask"]))) for side in ids},
        "logps": {
            side: sum(lp for lp, m in zip(row[f"{side}_logprobs"], row[f"{side}_mask"], strict=False) if m)
            for side in ids
        },
        **sides,
    }


# -- comparisons -----------------------------------------------------------------------------------------------------


class Verdicts:
    """All comparisons with what they decided. Arrays have one entry per comparison."""

    def __init__(self, rows: Rows, snapshot: Snapshot) -> None:
        self.rows, self.snapshot, keys = rows, snapshot, rows.table
        ids = snapshot.table["rollout_id"].combine_chunks()
        first, second = (pc.index_in(keys[name].combine_chunks(), value_set=ids) for name in ("rollout_i", "rollout_j"))
        rewards = pc.fill_null(snapshot.table["reward"], math.nan).to_numpy()
        indices = snapshot.table["rollout_index"].to_numpy().astype(float)
        self.rewards, self.indices = ([_taken(v, side) for side in (first, second)] for v in (rewards, indices))
        number = {rollout: n for n, rollout in enumerate(ids.to_pylist())}
        self.order = pc.sort_indices(keys["comparison_id"]).to_numpy()
        complete = np.isfinite(self.indices[0]) & np.isfinite(self.indices[1])
        #: Comparisons of which both rollouts are here, in the order of their ids: those of ``matches``.
        self.places = self.order[complete[self.order]]
        #: The file of each comparison. Two judges of one run use the same ids: what one of them says is no second opinion of
        #: the other, so the rollouts of each file have numbers of their own.
        self.files = np.searchsorted(rows.starts, np.arange(len(rows)), side="right") - 1
        matches = matches_in(keys.select(list(MATCH_COLUMNS)), number)
        apart = self.files[self.places] * len(rewards)
        self.matches = replace(matches, first=matches.first + apart, second=matches.second + apart)
        self.won = np.full(len(rows), np.nan)
        self.won[self.places] = winners(self.matches)
        a, b, flipped = position_inconsistency(self.matches)
        self.flips = np.zeros(len(rows), np.bool_)
        self.flips[self.places[a[flipped]]] = self.flips[self.places[b[flipped]]] = True
        self.swapped = np.full(len(rows), -1)
        self.swapped[self.places[a]], self.swapped[self.places[b]] = self.places[b], self.places[a]
        one_tie = (self.won[self.places[a]] == 0) != (self.won[self.places[b]] == 0)
        self.half_ties = np.zeros(len(rows), np.bool_)
        self.half_ties[self.places[a[one_tie]]] = self.half_ties[self.places[b[one_tie]]] = True
        better = np.sign(self.rewards[0] - self.rewards[1])
        comparable = np.isfinite(better) & np.isfinite(self.won)
        #: Verdicts against the rewards: the worse one won, a tie of unequal rewards, a winner among equal rewards.
        self.reversed = comparable & (better != 0) & (self.won == -better)
        self.tied = comparable & (better != 0) & (self.won == 0)
        self.unequal = comparable & (better == 0) & (self.won != 0)
        self.unlike, self.alike = comparable & (better != 0), comparable & (better == 0)
        self.all_rewards = np.tile(rewards, max(1, len(rows.files)))
        self.pairs = a, b, flipped, one_tie

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
        """The comparisons of each tab but the one of all."""
        failed = pc.not_equal(self.rows.table["status"], "judged").to_numpy(zero_copy_only=False)
        tabs = {"flips": self.flips, "half": self.half_ties, "reversed": self.reversed}
        return tabs | {"tied": self.tied, "unequal": self.unequal, "failed": failed}

    def outcomes(self) -> dict[str, int]:
        """How many verdicts agree with the rewards and how many do not, and what happened to pairs when their positions
        were swapped."""
        a, _, flipped, one_tie = self.pairs
        won = self.won[self.places[a]]
        return {
            "unlike": int(self.unlike.sum()),
            "agree": int((self.unlike & ~self.reversed & ~self.tied).sum()),
            "tied": int(self.tied.sum()),
            "reversed": int(self.reversed.sum()),
            "alike": int(self.alike.sum()),
            "called_equal": int((self.alike & ~self.unequal).sum()),
            "unequal": int(self.unequal.sum()),
            "pairs": len(a),
            "same_winner": int((~flipped & ~one_tie & (won != 0)).sum()),
            "both_ties": int((~one_tie & (won == 0)).sum()),
            "half_ties": int(one_tie.sum()),
            "flips": int(flipped.sum()),
        }

    def select(self, show: str, task: str) -> np.ndarray:
        """The comparisons of a tab, in the order of the file."""
        passing = self.tabs().get(show, np.ones(len(self.rows), np.bool_)).copy()
        if task:
            passing &= pc.match_substring(self.rows.table["task_id"], task).to_numpy(zero_copy_only=False)
        return np.flatnonzero(passing)

    def listed(self, numbers: Sequence[int]) -> list[Values]:
        """Comparisons for a table."""
        rows = self.rows.table.take(pa.array(numbers, pa.int64())).to_pylist()
        against = (("reversed", self.reversed), ("tied", self.tied), ("unequal", self.unequal))
        for row, n in zip(rows, numbers, strict=True):
            won = self.won[n]
            row |= {
                "file": int(self.files[n]),
                "winner": None if np.isnan(won) else int(won),
                "flip": bool(self.flips[n]),
                "half": bool(self.half_ties[n]),
                "against": next((word for word, mask in against if mask[n]), ""),
                "rewards": [None if np.isnan(r[n]) else float(r[n]) for r in self.rewards],
                "indices": [None if np.isnan(i[n]) else int(i[n]) for i in self.indices],
            }
        return rows  # type: ignore[no-any-return]  # pyarrow has no types


def _taken(values: np.ndarray, indices: pa.Array) -> np.ndarray:
    """The values at some places, NaN where there is no place."""
    numbers: np.ndarray = pc.fill_null(pa.array(values).take(indices), math.nan).to_numpy(zero_copy_only=False)
    return numbers
