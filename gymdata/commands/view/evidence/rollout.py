"""One rollout as its page shows it: messages as they were written, tokens from the recorded ids with everything known
about each.

Invariants: ids and log-probabilities are those on disk, digests checked; a stage's values of a token (advantage, loss
mask, another model's log-probability, entropy) are shown at the position that its file gives, and left out when the two
do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gymdata.checks.breaks import Reading, Relation, relations
from gymdata.commands.view.evidence.tables import Tables, facts_of
from gymdata.commands.view.text import Values
from gymdata.errors import printable
from gymdata.models.vocabulary import Vocabulary
from gymdata.rollouts.messages import RolloutRow, loads, object_of
from gymdata.rollouts.turns import Chain, chains, expand_prompts, kinds

Array = npt.NDArray[Any]
_DIGITS = 5
#: Tokens that a break page shows before and after what differs, and of one difference.
_AROUND, _MOST_SHOWN = 24, 400


def finite(value: float | None) -> float | None:
    """A number for JSON; None for what is not finite."""
    return float(value) if value is not None and np.isfinite(value) else None


class Tokens:
    """The tokens of one rollout. Raises DataError (T209, T210) for turns that were changed after collection."""

    def __init__(self, row: RolloutRow, tables: Tables | None = None) -> None:
        self.rollout_id, self.group_id = str(row["rollout_id"]), str(row["group_id"])
        #: ``Turn``s whose lists are arrays.
        self.turns: list[Any] = row["turns"]
        for turn in self.turns:
            for name, kind in (("prompt_delta_ids", np.int32), ("generation_token_ids", np.int32)):
                turn[name] = np.asarray(turn[name], kind)
            turn["generation_log_probs"] = np.asarray(turn["generation_log_probs"], np.float32)
        self.prompts = expand_prompts(self.turns, rollout=self.rollout_id)
        self.kinds = kinds(self.turns, self.prompts)
        self.notes: list[str] = []
        self._unread: list[int] = object_of(loads(row.get("extra"))).get("unread_turns") or []
        #: Per turn, one number for each sampled token; None where it is not known.
        unknown: list[Array | None] = [None] * len(self.turns)
        self.reference, self.entropy, self.advantages, self.mask = (list(unknown) for _ in range(4))
        self.experience: str | None = None
        #: Why the file of experiences has nothing of this rollout.
        self.left_out: str | None = None
        self.audit: str | None = None
        #: The name of the audit's model.
        self.audited: str | None = None
        if tables is not None:
            self._read_audit(tables)
            self._read_experiences(tables)

    def _by_turn(self, values: Array) -> list[Array | None]:
        sizes = [len(turn["generation_token_ids"]) for turn in self.turns]
        return list(np.split(values, np.cumsum(sizes)[:-1])) if sizes else []

    def _read_audit(self, tables: Tables) -> None:
        rows = tables.rows("audit")
        audits = rows.where("rollout_id", self.rollout_id)
        if len(audits) > 1:
            self.notes.append(
                f"{len(audits)} audits have it: {', '.join(str(rows.file(n)) for n in audits)}; shown: the last"
            )
        for number in audits[-1:]:
            (row,) = rows.read([number]).to_pylist()
            sampled = sum(len(turn["generation_token_ids"]) for turn in self.turns)
            if len(row["ref_logprobs"]) != sampled:
                self.notes.append(f"{rows.file(number)} has {len(row['ref_logprobs'])} tokens, the rollout {sampled}")
                return
            self.audit = str(rows.file(number))
            self.audited = str((facts_of(rows.file(number)).get("model") or {}).get("path") or "the audited model")
            self.reference = self._by_turn(np.array(row["ref_logprobs"], np.float32))
            if row["entropy"]:
                self.entropy = self._by_turn(np.array(row["entropy"], np.float32))

    def _read_experiences(self, tables: Tables) -> None:
        rows = tables.rows("experiences")
        numbers = rows.where("rollout_id", self.rollout_id)
        if not numbers:
            for path in (file.source.path for file in rows.files):
                for reason, groups in (facts_of(path).get("dropped_groups") or {}).items():
                    if self.group_id in groups:
                        self.experience, self.left_out = str(path), reason.replace("_", " ")
            return
        # The first file with experiences of the rollout.
        file = rows.file(numbers[0])
        of_rollout = rows.read([number for number in numbers if rows.file(number) == file]).to_pylist()
        saved = [np.array(row["input_ids"], np.int32).tobytes() for row in of_rollout]
        sequences = chains(self.turns, self.prompts, "drop", self._unread)
        if sorted(map(self._ids, sequences)) != sorted(saved):
            sequences = chains(self.turns, self.prompts, "keep", self._unread)
        # A retry may have sampled the same tokens: each row is of the next of the sequences with its ids.
        by_ids: dict[bytes, list[Chain]] = {}
        for sequence in sequences:
            by_ids.setdefault(self._ids(sequence), []).append(sequence)
        for ids, row in sorted(zip(saved, of_rollout, strict=True), key=lambda pair: pair[1]["sequence_index"]):
            if not by_ids.get(ids):
                self.notes.append(f"{file}: sequence {row['sequence_index']} is not one of this rollout's")
                continue
            mask, advantages = np.array(row["loss_mask"], np.int8), np.array(row["advantages"], np.float32)
            for t in by_ids[ids].pop(0).trained_turns:
                sampled = slice(len(self.prompts[t]), len(self.prompts[t]) + len(self.turns[t]["generation_token_ids"]))
                self.mask[t], self.advantages[t] = mask[sampled], advantages[sampled]
        self.experience = str(file)

    def _ids(self, sequence: Chain) -> bytes:
        """The token ids of a sequence: the prompt of its last turn, and what that sampled."""
        last = sequence.turns[-1]
        ids: Array = np.concatenate((self.prompts[last], self.turns[last]["generation_token_ids"]))
        return ids.tobytes()

    def relations(self, vocabulary: Vocabulary | None) -> list[Relation]:
        """Breaks with their causes, branches and retries."""
        reading = Reading(vocabulary.decode, vocabulary.special) if vocabulary is not None else None
        return relations(self.turns, lambda: reading)

    def data(self, vocabulary: Vocabulary | None) -> Values:
        """The data of the page's token view: turns, and the text of each id that occurs."""
        turns, used = [], set[int]()
        for number, turn in enumerate(self.turns):
            context, sampled = turn["prompt_delta_ids"].tolist(), turn["generation_token_ids"].tolist()
            used |= {*context, *sampled}
            turns.append(
                {
                    "kind": self.kinds[number],
                    "parent": int(turn["parent"]),
                    "prefix": int(turn["prefix_length"]),
                    "prompt": len(self.prompts[number]),
                    "finish": printable(str(turn.get("finish_reason") or "")),
                    "agent": printable(str(turn.get("agent") or "")),
                    "rendered": bool(turn.get("rendered")),
                    "reward": finite(turn.get("reward")),
                    "context": context,
                    "ids": sampled,
                    "logprob": _numbers(turn["generation_log_probs"]),
                    "entropy": _numbers(self.entropy[number]),
                    "advantage": _numbers(self.advantages[number]),
                    "mask": self._mask(number),
                    "ratio": _numbers(self.ratio(number)),
                    "rank": ranks(turn),
                    "top": max(map(len, turn.get("top_log_probs") or []), default=0),
                }
            )
        return {
            "rollout_id": self.rollout_id,
            "turns": turns,
            "text": {str(i): printable(vocabulary.text(i)) for i in used} if vocabulary is not None else {},
            "special": sorted(vocabulary.special & used) if vocabulary is not None else [],
        }

    def colors(self) -> dict[str, bool]:
        """What tokens can be colored by → whether the data for it is there."""
        return {
            "logprob": any(len(turn["generation_token_ids"]) for turn in self.turns),
            "entropy": any(values is not None for values in self.entropy),
            "advantage": any(values is not None for values in self.advantages),
            "mask": True,
            "ratio": any(values is not None for values in self.reference),
            "turn": True,
        }

    def _mask(self, turn: int) -> list[int] | None:
        """The loss mask of a turn's sampled tokens; None without experiences."""
        mask = self.mask[turn]
        if mask is None and self.experience is not None:
            return [0] * len(self.turns[turn]["generation_token_ids"])
        return None if mask is None else mask.tolist()

    def ratio(self, turn: int) -> Array | None:
        """exp(another model's log-probability − the recorded one) of a turn's sampled tokens."""
        reference = self.reference[turn]
        if reference is None:
            return None
        with np.errstate(over="ignore"):
            ratio: Array = np.exp(reference.astype(np.float64) - self.turns[turn]["generation_log_probs"])
        return ratio

    def alternatives(self, turn: int, k: int) -> list[Values]:
        """The alternatives of a sampled token, the likeliest first."""
        listed = (self.turns[turn].get("top_log_probs") or [])[k : k + 1]
        return sorted(listed[0], key=lambda top: -top["log_prob"]) if listed else []


def ranks(turn: Values) -> list[int] | None:
    """The place of each sampled token among the recorded alternatives, 1 for the likeliest, one more than their number
    for a token that is not among them; None without recorded alternatives."""
    listed: Sequence[Sequence[Values]] | None = turn.get("top_log_probs")
    if not listed:
        return None
    sampled = zip(turn["generation_log_probs"].tolist(), turn["generation_token_ids"].tolist(), listed, strict=False)
    return [1 + sum(o["log_prob"] > lp and o["id"] != token for o in top) for lp, token, top in sampled]


def _numbers(values: Array | None) -> list[float | None] | None:
    """Numbers for JSON: five digits, None for what is not finite."""
    if values is None:
        return None
    return [round(v, _DIGITS) if v == v and abs(v) != float("inf") else None for v in values.tolist()]


def text_of(vocabulary: Vocabulary | None, token: int) -> str:
    """A token's text; its id without a vocabulary."""
    return printable(vocabulary.text(token)) if vocabulary is not None else str(token)


def shown_token(vocabulary: Vocabulary | None, position: int, token: int, *, differs: bool, sampled: bool) -> Values:
    """A token of one of two sides. Ids have a blank between them."""
    text = text_of(vocabulary, token).replace("\n", "⏎\n") + " " * (vocabulary is None)
    special = vocabulary is not None and token in vocabulary.special
    return {"at": position, "id": token, "text": text, "differs": differs, "special": special, "sampled": sampled}


def both_sides(tokens: Tokens, relation: Relation, vocabulary: Vocabulary | None) -> Values:
    """The values of the page of a break: what was there, the prompt that came instead, and where they differ."""
    turn = tokens.turns[relation.turn]
    parent = int(turn["parent"])
    before = np.concatenate((tokens.prompts[parent], tokens.turns[parent]["generation_token_ids"]))
    prompt = tokens.prompts[relation.turn]
    spans = (relation.evidence or {}).get("spans", [])
    texts = [[span[side]["text"] for side in ("before", "prompt")] for span in spans[:20]]
    return {
        "relation": relation,
        "turn": relation.turn,
        "parent": parent,
        "explanation": (relation.evidence or {}).get("explanation", relation.detail),
        "before": _side(before, [s["before"] for s in spans], vocabulary, len(tokens.prompts[parent])),
        "prompt": _side(prompt, [s["prompt"] for s in spans], vocabulary, len(prompt)),
        "texts": [[None if text is None else printable(text) for text in pair] for pair in texts],
        "n_spans": len(spans),
        "cut": tokens.turns[parent].get("finish_reason") in ("length", "repetition"),
        "kept": int(turn["prefix_length"]),
        "before_length": len(before),
        "prompt_length": len(prompt),
    }


def _side(
    ids: Array, spans: Sequence[Mapping[str, int]], vocabulary: Vocabulary | None, sampled_from: int
) -> list[Values]:
    """Tokens of one side of a break around its differing spans; long agreement between two spans is left out. Those from
    ``sampled_from`` on were sampled."""
    marked, shown = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    for span in spans:
        marked[span["start"] : span["end"]] = True
        shown[max(0, span["start"] - _AROUND) : span["end"] + _AROUND] = True
        shown[span["start"] + _MOST_SHOWN : span["end"]] = False
    out: list[Values] = []
    # Not more than a page can hold; what is left out is counted at its place.
    listed, end = np.flatnonzero(shown)[: 4 * _MOST_SHOWN].tolist(), 0
    for position in listed:
        if position > end:
            out.append({"gap": position - end})
        end, differs, sampled = position + 1, bool(marked[position]), position >= sampled_from
        out.append(shown_token(vocabulary, position, int(ids[position]), differs=differs, sampled=sampled))
    return [*out, {"gap": len(ids) - end}] if end < len(ids) else out
