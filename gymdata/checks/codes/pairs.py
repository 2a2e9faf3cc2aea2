"""Pairs: P601 to P606, and T206, L301 to L303 of their lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gymdata.checks.violations import CHECKS, Check, CheckSettings, Violation, code_pages
from gymdata.rollouts.ragged import Ints, Ragged, joined_keys, list_parts
from gymdata.rollouts.soundness import is_rendered, lists_of_pairs, token_faults

if TYPE_CHECKING:
    import pyarrow as pa

_SIDES = ("chosen", "rejected")
_TIE = 1e-9
#: The fields of a message that both sides are compared by.
_SAID = ("role", "content", "reasoning", "tool_calls")
#: The index of a row in its batch, a code, and fields of the violation.
Fault = tuple[int, str, dict[str, Any]]

_CODES = code_pages("""
P601 chosen is rejected (error): chosen and rejected are identical
Their ids, or their texts, are equal.

P602 prompts differ (error): chosen and rejected do not start from one prompt
The rollouts that the pair names began with other prompt ids, or the pair has no prompt.

P603 tie (warning): the margin is zero or below
There is no preference to learn.

P604 contradictory pairs (error): another pair has the opposite preference
Two pairs of one file prefer A over B and B over A. Reported at the later one.

P605 task on both sides (error): the task is in more than one split
Files of one path (train and test) share this task_id, so the test measures what was trained.

P606 duplicate pair (warning): the same pair twice
Prompt, chosen and rejected have the ids of an earlier pair of this path (the texts, where a pair has no ids), so it is
trained more than once. `gymdata pairs` leaves such copies out unless --keep-duplicates is given; files of other
versions or other projects may hold them.
""")


@CHECKS.register("pairs")
class PairCodes(Check):
    """Pairs, batch after batch; what later batches may contradict is remembered."""

    codes = _CODES

    def __init__(self, settings: CheckSettings) -> None:
        super().__init__(settings)
        self._preferred: dict[tuple[str, str], str] = {}
        #: Keys of each rollout's prompt, and of prompt and completion together. A pair may begin later, where two
        #: rollouts fork.
        self._prompts: dict[str, tuple[int, int]] = {}
        self._split_of: dict[str, str] = {}
        self._shared: set[tuple[str, str]] = set()
        #: Where each content was seen first, and the pair's id there.
        self._content: dict[bytes, tuple[str, int, str]] = {}

    def find_pairs(self, batch: pa.RecordBatch, rows: Ints, file: str) -> list[Violation]:
        """Violations of one batch of the pairs table; ``rows``: the number of each of its rows in ``file``."""
        names = batch.column("pair_id").to_pylist()
        faults = list(self._rows(batch, rows, file))
        # A pair that contradicts another is not a copy of it, whatever ids it holds.
        opposite = {index for index, code, _ in faults if code == "P604"}
        for index, key in enumerate(_content(batch)):
            was = self._content.setdefault(key, (file, int(rows[index]), names[index]))
            if was[:2] != (file, rows[index]) and index not in opposite:
                faults.append((index, "P606", {"detail": f"the same as {was[0]} row {was[1]} (pair {was[2]})"}))
        for ids, log_probs in lists_of_pairs(batch):
            for code, row, position, expected, got, name in token_faults(ids, log_probs, self.settings.vocab_size):
                more = {"position": position, "expected": expected, "got": got}
                if code == "L302" and position is None:  # unknown, and few losses of pairs read them
                    more["severity"] = "warning"
                faults.append((row, code, {**more, "detail": f"in {name}"}))
        return [Violation(code, int(rows[index]), names[index], file=file, **more) for index, code, more in faults]

    def _rows(self, batch: pa.RecordBatch, rows: Ints, file: str) -> Iterator[Fault]:
        import pyarrow.compute as pc

        lists = [Ragged.of(batch.column(f"{name}_ids")) for name in ("prompt", *_SIDES)]
        prompt, *hashes = (np.where(ids.lengths > 0, ids.hashes(), np.uint64(0)) for ids in lists)
        texts = [_texts(batch, side, *_SAID) for side in _SIDES]
        same_texts = pc.and_(pc.equal(*texts), pc.not_equal(texts[0], "")).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(same_texts | ((hashes[0] == hashes[1]) & (hashes[0] != 0))):
            yield row, "P601", {}
        for row in np.flatnonzero(is_rendered(batch)):
            yield int(row), "T213", {}
        for side, ids in zip(_SIDES, lists[1:], strict=True):
            lengths = Ragged.of(batch.column(f"{side}_mask")).lengths
            for row in np.flatnonzero(lengths != ids.lengths):
                sizes = {"expected": str(ids.lengths[row]), "got": str(lengths[row])}
                yield int(row), "S102", {**sizes, "detail": f"length of {side}_mask"}
        margin = batch.column("margin").to_numpy(zero_copy_only=False)
        # An imported pair of texts may have no margin.
        sampled = lists[1].lengths > 0
        for row in np.flatnonzero((margin <= _TIE) | (np.isnan(margin) & sampled)):
            yield row, "P603", {"expected": "a margin above 0", "got": f"{margin[row]:g}"}
        for row in np.flatnonzero(lists[0].lengths == 0):
            if len(batch.column("prompt")[int(row)]) == 0:
                yield row, "P602", {"detail": "the pair has no prompt"}
        # Wherever the border between prompt and completion is.
        sequences = [Ragged.interleaved([lists[0], side])[0].hashes().tolist() for side in lists[1:]]
        names = [batch.column(f"{side}_rollout_id").to_pylist() for side in _SIDES]
        prompts, tasks = prompt.tolist(), batch.column("task_id").to_pylist()
        for row, (better, worse, task) in enumerate(zip(*names, tasks, strict=True)):
            location = f"{file} row {rows[row]}"
            if better and worse:
                if (worse, better) in self._preferred:
                    yield row, "P604", {"detail": f"{self._preferred[worse, better]} prefers the other one"}
                self._preferred.setdefault((better, worse), location)
                for name, ids in ((better, sequences[0][row]), (worse, sequences[1][row])):
                    was = self._prompts.setdefault(name, (prompts[row], ids))
                    if was[0] != prompts[row] and was[1] != ids:
                        yield row, "P602", {"detail": f"rollout {name} began with other prompt ids in another pair"}
            if task is not None and self._split_of.setdefault(task, file) != file and (task, file) not in self._shared:
                self._shared.add((task, file))
                yield row, "P605", {"detail": f"task {task!r} is also in {self._split_of[task]}"}


def _content(batch: pa.RecordBatch) -> list[bytes]:
    """A key of what each pair holds: its ids, or its messages where neither side has ids."""
    import pyarrow as pa

    lists = [Ragged.of(batch.column(f"{name}_ids")) for name in ("prompt", *_SIDES)]
    keys = joined_keys([ids.keys() for ids in lists])
    rows = np.flatnonzero((lists[1].lengths == 0) & (lists[2].lengths == 0))
    bare = batch.select(["prompt", *_SIDES]).take(pa.array(rows))
    parts = [_texts(bare, name, *_SAID, "name").to_pylist() for name in ("prompt", *_SIDES)]
    for row, texts in zip(rows.tolist(), zip(*parts, strict=True), strict=True):
        keys[row] = xxhash.xxh3_128_digest("\x1d".join(texts).encode())
    return keys


def _texts(batch: pa.RecordBatch, side: str, *fields: str) -> pa.Array:
    """The messages of each pair's side as one text, empty where there is none; a null field is an empty one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    offsets, messages = list_parts(batch.column(side))
    joined = pc.binary_join_element_wise(
        *(pc.struct_field(messages, name) for name in fields), "\x1f", null_handling="replace"
    )
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), joined), "\x1e")
