"""Rollouts without what ``scan`` finds: neither in their texts nor in their token ids.

Invariants: a token that holds a part of a finding gets one neutral id in every turn that shares it, so each turn continues
the one that it continued; a generation ends before its first such token, so nothing of a finding is trained (what was
sampled after it is context of later turns); a rollout that still has a finding, or more breaks, is left out by name.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gymdata.checks.breaks import Reading
from gymdata.rollouts.messages import RolloutRow, TableRow
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.rollouts.turns import Ids, Turn, TurnEncoder, call_of, expand_prompts
from gymdata.scan.files import rewritten, texts_in
from gymdata.scan.patterns import LITERAL, Find, Found, apart, without
from gymdata.store import scan_batches
from gymdata.store.columns import build, to_rows
from gymdata.store.lines import decode, encode

_BATCH_ROWS, _ROUNDS = 256, 4
_IDS = ("rollout_id", "run_id", "task_id", "group_id")
_WHY = "replaced tokens are not trained, nor the rest of their generation; log-probabilities are of the original text"
Mask = npt.NDArray[np.bool_]
#: Value → kind.
Values = Mapping[str, str]


class LeftOutError(Exception):
    """Why a rollout is not in the copy."""


@dataclass
class Redaction:
    """Makes the copy, and counts. ``left_out``: reason → rollouts; ``reading``: None where there is no tokenizer."""

    find: Find
    reading: Reading | None
    redacted: int = 0
    tokens_replaced: int = 0
    tokens_untrained: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def batches(self, source: str | Path) -> Iterator[pa.RecordBatch]:
        """The rollouts under ``source``, those without a finding as they are."""
        for batch in scan_batches(source, ROLLOUTS, None, _BATCH_ROWS):
            start = 0
            for i, row in enumerate(to_rows(batch)):
                replacement: list[RolloutRow] = []
                try:
                    if (changed := self._rollout(row)) is row:
                        continue
                    replacement = [decode(encode(changed))]
                except LeftOutError as reason:
                    self.left_out.setdefault(str(reason), []).append(self.clean(row["rollout_id"]))
                if i > start:
                    yield batch.slice(start, i - start)
                start = i + 1
                if replacement:
                    yield build(replacement, ROLLOUTS, ROLLOUTS.schema.names, "redacted rollouts", [1])
            if start < len(batch):
                yield batch.slice(start)

    def pair_batches(self, source: str | Path) -> Iterator[pa.RecordBatch]:
        """The pairs under ``source``, those without a finding as they are. Pairs with token ids are made of rollouts, which
        are what is to be redacted: one with a finding is left out."""
        for batch in scan_batches(source, PAIRS, None, _BATCH_ROWS):
            rows = list[TableRow]()
            for row in map(dict, to_rows(batch)):
                ids = [row[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
                texts = {key: value for key, value in row.items() if not isinstance(value, np.ndarray)}
                decoded = [self.reading.decode([*map(int, part)]) for part in ids] if self.reading is not None else []
                if not (values := self._values([texts, decoded])):
                    rows.append(row)
                    continue
                clean_row = {**row, **self.clean(texts, values)}
                if any(map(len, ids)) or any(clean_row[key] != row[key] for key in ("pair_id", "run_id", "task_id")):
                    why = "a finding in a pair with token IDs" if any(map(len, ids)) else "an ID holds a finding"
                    self.left_out.setdefault(why, []).append(self.clean(row["pair_id"]))
                    continue
                self.redacted += 1
                rows.append(clean_row)
            if rows:
                lines = [decode(encode(row)) for row in rows]
                yield build(lines, PAIRS, batch.schema.names, "redacted pairs", list(range(len(lines))))

    def clean(self, value: Any, values: Values | None = None) -> Any:
        """A JSON value without findings, nor any of ``values``."""
        return rewritten(value, lambda _, text: without(text, self._spans(text, values or {})))

    def _rollout(self, row: RolloutRow) -> RolloutRow:
        turns, texts = row["turns"], {key: value for key, value in row.items() if key != "turns"}
        last = max((n for n, message in enumerate(row["messages"]) if message["turn"] is not None), default=-1)
        in_tokens = self._values(row["messages"][: last + 1])
        values = self._values([texts, *([turn["agent"], turn["server"]] for turn in turns)])
        masks = self._masks(turns, values, in_tokens)
        if not values and not any(mask.any() for mask in masks):
            return row
        encoder = TurnEncoder()
        for turn, prompt, mask in zip(turns, expand_prompts(turns), masks, strict=True):
            hidden = mask[len(prompt) :]
            end = int(hidden.argmax()) if hidden.any() else len(hidden)
            named = {key: self.clean(turn[key], values) for key in ("agent", "server")}
            encoder.add(call_of({**turn, **named}, self._neutralized(prompt, mask[: len(prompt)]), end))
        clean_row = {**self.clean(texts, values), **encoder.columns(), "prompt_hash": None, "generation_hash": None}
        if any(clean_row[key] != row[key] for key in _IDS):
            raise LeftOutError("an ID holds a finding")
        if clean_row["n_breaks"] > row["n_breaks"]:
            raise LeftOutError("its turns would no longer continue each other")
        if self._values({key: value for key, value in clean_row.items() if key != "turns"}):
            raise LeftOutError("a finding is left in its texts")
        before, after = ([len(turn["generation_token_ids"]) for turn in side] for side in (turns, clean_row["turns"]))
        sizes = list(zip(before, after, strict=True))
        replaced = sum(int(mask[turn["prefix_length"] :].sum()) for mask, turn in zip(masks, turns, strict=True))
        untrained = sum(was - now for was, now in sizes)
        note = {
            "kinds": Counter(values.values()),
            "tokens_replaced": replaced,
            "tokens_untrained": untrained,
            "turns": [n for n, (was, now) in enumerate(sizes) if now < was],
            "why": _WHY,
        }
        self.redacted += 1
        self.tokens_replaced += replaced
        self.tokens_untrained += untrained
        return {**clean_row, "extra": json.dumps({**json.loads(clean_row["extra"] or "{}"), "redacted": note})}

    def _values(self, value: Any) -> dict[str, str]:
        return {text[span.start : span.end]: span.kind for _, text in texts_in(value) for span in self.find(text)}

    def _spans(self, text: str, values: Values) -> tuple[Found, ...]:
        forms = ((form, kind) for value, kind in values.items() if len(value) >= LITERAL for form in _forms(value))
        literals = [Found(*match.span(), kind) for form, kind in forms for match in re.finditer(re.escape(form), text)]
        return apart([*self.find(text), *literals])

    def _masks(self, turns: Sequence[Turn], values: Values, expected: Values) -> list[Mask]:
        """Which tokens of each turn's prompt and generation hold a part of a finding."""
        pairs = zip(expand_prompts(turns), turns, strict=True)
        sequences = [np.concatenate((prompt, turn["generation_token_ids"])).astype(np.int32) for prompt, turn in pairs]
        masks = [np.zeros(len(ids), np.bool_) for ids in sequences]
        if self.reading is None or not any(map(len, sequences)):
            if values and any(map(len, sequences)):
                raise LeftOutError("no tokenizer says which of its tokens hold the finding")
            return masks
        shared = [(n, turn["parent"], turn["prefix_length"]) for n, turn in enumerate(turns) if turn["parent"] >= 0]
        present: set[str] = set()
        # A turn that another continues is a part of that one.
        for n in set(range(len(turns))) - {parent for _, parent, size in shared if size == len(sequences[parent])}:
            masks[n] = self._mask(self.reading, sequences[n], values, present)
        if not expected.keys() <= present:
            # The tokenizer or the messages are others.
            raise LeftOutError("a finding of its messages is not among its decoded tokens")
        for n, parent, size in reversed(shared):
            masks[parent][:size] |= masks[n][:size]
        for n, parent, size in shared:
            masks[n][:size] |= masks[parent][:size]
        return masks

    def _mask(self, reading: Reading, ids: Ids, values: Values, present: set[str]) -> Mask:
        mask = np.zeros(len(ids), np.bool_)
        for _ in range(_ROUNDS):
            now = self._neutralized(ids, mask).tolist()
            text = reading.decode(now)
            present.update(value for value in values if any(form in text for form in _forms(value)))
            if not (spans := self._spans(text, values)):
                return mask
            size = cache(lambda k, now=now: len(reading.decode(now[:k])))
            for span in spans:
                first = bisect_right(range(len(ids) + 1), span.start, key=size) - 1
                mask[max(first, 0) : bisect_left(range(len(ids) + 1), span.end, key=size)] = True
        raise LeftOutError("a finding is left in its decoded tokens")

    def _neutralized(self, ids: Ids, mask: Mask) -> Ids:
        return np.where(mask, self.neutral, ids).astype(np.int32)

    @cached_property
    def neutral(self) -> int:
        """The id in the place of replaced tokens: of a sign that no finding has."""
        reading = self.reading
        signs = {} if reading is None else {reading.decode([i]): i for i in range(512) if i not in reading.special}
        return next((signs[sign] for sign in "*#~|?" if sign in signs), min(signs.values(), default=0))


def _forms(value: str) -> set[str]:
    """A value as text has it, and as JSON does, once or twice within a text."""
    forms = {value}
    for _ in range(2):
        forms |= {json.dumps(form, ensure_ascii=plain)[1:-1] for form in forms for plain in (True, False)}
    return forms
