"""Experiences as tensors, for people with their own training loop: ``Experience``, ``Samples``, and what fills them.

Invariants: a batch holds its rows' tokens as they are in the file; padding is on the left and masked everywhere; no
token is added, so a truncated response has no end token that was not sampled; a field whose column the file lacks is
None. Fields, their order and shapes are those that LightRFT publishes; gymdata's additions come after them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from gymdata.experience.texts import RolloutTexts
from gymdata.store.partial_reads import RowGroup

#: Field of Experience → column of the table.
COLUMNS = {
    "action_log_probs": "logprobs",
    "base_action_log_probs": "ref_logprobs",
    "values": "values",
    "returns": "returns",
    "advantages": "advantages",
    "kl": "kl",
    "action_entropy": "entropy",
}
#: Columns that have no published field: in ``info`` under their own name.
BESIDE = ("rl_weight", "ce_weight", "ref_kl_weight", "teacher_logprobs")
_FLOATS = COLUMNS | {name: name for name in BESIDE}
_Nested = TypeVar("_Nested", bound="torch.Tensor | list[Any] | None")
_Batch = TypeVar("_Batch", "Experience", "Samples")
_SCALARS = {"reward": np.float64, "weight": np.float64, "temperature": np.float32}
_NAMES = ("rollout_id", "sequence_index")


@dataclass
class Experience:
    """A batch of B sequences: S the longest of them, A the longest response (from a row's first trained token to its end).

    sequences, attention_mask: (B, S) int64, padded on the left. action_mask (bool) and action_log_probs,
    base_action_log_probs, values, returns, advantages, kl, action_entropy (float32): (B, A), for the last A places of
    ``sequences``; 0 where action_mask is False. Packed: (1, total_length) all of them, attention_mask holding the number of
    the sequence from 1, and packed_seq_lens (B,).

    info: reward, weight, temperature, response_length, total_length, num_actions, each (B,), and the lists rollout_id and
    sequence_index; where the file has them, rl_weight, ce_weight, ref_kl_weight and teacher_logprobs in the shape of
    advantages. prompts, labels, references: texts per row (see ``gymdata.experience.texts``); None where no row has one.
    pad_len: padding of a packed batch, 0, as none is needed. A row that only fills up the last batch of a rank has weight 0
    and an empty action_mask.
    """

    sequences: torch.Tensor
    action_log_probs: torch.Tensor | None = None
    base_action_log_probs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    action_mask: torch.Tensor | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    kl: torch.Tensor | None = None
    action_entropy: torch.Tensor | None = None
    labels: list[str | None] | None = None
    references: list[str | None] | None = None
    packed_seq_lens: torch.Tensor | None = None
    prompts: list[str | None] | None = None
    pad_len: int | None = None

    def to_device(self, device: torch.device | str, non_blocking: bool = False) -> Experience:
        """The batch with every tensor on ``device``, in place; None stays None."""
        return _each(self, lambda t: t.to(device, non_blocking=non_blocking))

    to = to_device

    def pin_memory(self) -> Experience:
        """The batch with every tensor in pinned memory, in place. Without an accelerator there is nothing to pin for."""
        return _each(self, lambda t: t.pin_memory()) if torch.cuda.is_available() else self

    def samples(self) -> Samples:
        """Its tokens without the credit."""
        actions = None if self.action_mask is None else self.action_mask.shape[-1]
        return Samples(
            sequences=self.sequences,
            attention_mask=self.attention_mask,
            action_mask=self.action_mask,
            num_actions=actions if self.packed_seq_lens is None else self.info["num_actions"],
            packed_seq_lens=self.packed_seq_lens,
            response_length=self.info["response_length"],
            total_length=self.info["total_length"],
            prompts=self.prompts,
            labels=self.labels,
            references=self.references,
            pad_len=self.pad_len,
        )


@dataclass
class Samples:
    """Tokens of a batch, padded or packed, in the shapes of ``Experience``.

    num_actions: A, or packed the responses' lengths (B,); response_length: trained tokens per row, (B,); total_length: (B,).
    """

    sequences: torch.Tensor
    attention_mask: torch.Tensor | None = None
    action_mask: torch.Tensor | None = None
    num_actions: int | torch.Tensor | None = None
    packed_seq_lens: torch.Tensor | None = None
    response_length: torch.Tensor | None = None
    total_length: torch.Tensor | None = None
    prompts: list[str | None] | None = None
    labels: list[str | None] | None = None
    references: list[str | None] | None = None
    pad_len: int | None = None

    def to_device(self, device: torch.device | str, non_blocking: bool = False) -> Samples:
        """The tensors on ``device``, in place; None stays None."""
        return _each(self, lambda t: t.to(device, non_blocking=non_blocking))

    to = to_device

    def pin_memory(self) -> Samples:
        """The tensors in pinned memory, in place. Without an accelerator there is nothing to pin for."""
        return _each(self, lambda t: t.pin_memory()) if torch.cuda.is_available() else self


def to(tensor: _Nested, device: torch.device | str) -> _Nested:
    """A tensor, or a list of tensors, on ``device``; what is None stays None."""
    moved: _Nested = _nested(tensor, lambda t: t.to(device))
    return moved


def pin_memory(tensor: _Nested) -> _Nested:
    """A tensor, or a list of tensors, in pinned memory; what is None stays None. Without an accelerator as it is."""
    pinned: _Nested = _nested(tensor, lambda t: t.pin_memory()) if torch.cuda.is_available() else tensor
    return pinned


def _nested(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_nested(one, change) for one in value]
    return change(value) if isinstance(value, torch.Tensor) else value


def _each(batch: _Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> _Batch:
    for f in dataclasses.fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, torch.Tensor):
            setattr(batch, f.name, change(value))
        elif isinstance(value, dict):
            value |= {k: change(v) for k, v in value.items() if isinstance(v, torch.Tensor)}
    return batch


class ExperienceBatches(Iterator[Experience]):
    """The batches of one pass over a file. ``len`` is the number of steps that are left; every rank has equally many.

    Step s of rank r has the rows order[s·n : (s + 1)·n][r::world_size] with n = batch_size · world_size.
    """

    def __init__(
        self, groups: Sequence[RowGroup], order: np.ndarray | None, batch_size: int, rank: int, world_size: int,
        start_step: int, packed: bool, texts: RolloutTexts,
    ) -> None:  # fmt: skip
        self._rows = _Rows(groups, keep=order is not None)
        self._order = np.arange(self._rows.count) if order is None else order
        self._size, self._rank, self._world = batch_size * world_size, rank, world_size
        self._packed = packed
        self._texts = texts
        self.steps = -(-len(self._order) // self._size)
        self.step = min(start_step, self.steps)

    def __len__(self) -> int:
        return self.steps - self.step

    def __next__(self) -> Experience:
        if self.step >= self.steps:
            raise StopIteration
        together = self._order[self.step * self._size : (self.step + 1) * self._size]
        self.step += 1
        mine = together[self._rank :: self._world]
        filler = not len(mine)
        rows = [self._rows.fetch(int(row)) for row in (together[:1] if filler else mine)]
        batch = _packed(rows) if self._packed else _padded(rows)
        for name, texts in self._texts.of(batch.info["rollout_id"]).items():
            setattr(batch, name, texts)
        if filler:
            if batch.action_mask is not None:
                batch.action_mask.zero_()
            batch.info["weight"].zero_()
        return batch


@dataclass(slots=True)
class _Row:
    """One row: views of the lists, and the scalars."""

    lists: dict[str, np.ndarray]
    scalars: dict[str, Any]
    response: int

    @property
    def length(self) -> int:
        return len(self.lists["input_ids"])


class _Rows:
    """Rows by number. Without ``keep`` groups that were passed are let go: numbers must then rise."""

    def __init__(self, groups: Sequence[RowGroup], keep: bool) -> None:
        self._groups, self._keep = groups, keep
        self._starts = np.concatenate(([0], np.cumsum([group.rows for group in groups], dtype=np.int64)))
        self._held: dict[int, Mapping[str, Any]] = {}
        self._recent: deque[int] = deque()
        self.count = int(self._starts[-1])

    def fetch(self, row: int) -> _Row:
        index = int(np.searchsorted(self._starts, row, side="right")) - 1
        if index not in self._held:
            self._held[index] = _opened(self._groups[index].load())
            self._recent.append(index)
            # Two row groups, because a batch may cross their border.
            while not self._keep and len(self._recent) > 2:
                del self._held[self._recent.popleft()]
        group, at = self._held[index], row - int(self._starts[index])
        lists = {name: values[bounds[at] : bounds[at + 1]] for name, (bounds, values) in group["lists"].items()}
        trained = lists["loss_mask"] != 0
        first = int(trained.argmax()) if trained.any() else len(trained)
        return _Row(lists, {name: column[at] for name, column in group["scalars"].items()}, len(trained) - first)


def _opened(table: pa.Table) -> dict[str, Any]:
    """Numpy views of a group's buffers."""
    lists, scalars = {}, {}
    for name in table.column_names:
        column = table[name].chunk(0) if table[name].num_chunks else table[name].combine_chunks()
        if pa.types.is_list(column.type):
            offsets = column.offsets.to_numpy()
            lists[name] = offsets - offsets[0], column.flatten().to_numpy(zero_copy_only=False)
        elif name in _SCALARS:
            scalars[name] = column.to_numpy(zero_copy_only=False).astype(_SCALARS[name])
        else:
            scalars[name] = column.to_pylist() if name in _NAMES else column
    return {"lists": lists, "scalars": scalars}


def _padded(rows: Sequence[_Row]) -> Experience:
    width, actions = max(row.length for row in rows), max(1, *(row.response for row in rows))
    n = len(rows)
    ids, attention = np.zeros((n, width), np.int64), np.zeros((n, width), np.int64)
    mask = np.zeros((n, actions), np.bool_)
    fields = [(f, c) for f, c in _FLOATS.items() if c in rows[0].lists]
    floats = {f: np.zeros((n, actions), np.float32) for f, _ in fields}
    for line, row in enumerate(rows):
        ids[line, width - row.length :] = row.lists["input_ids"]
        attention[line, width - row.length :] = 1
        span = min(actions, row.length)
        mask[line, actions - span :] = row.lists["loss_mask"][row.length - span :]
        for f, column in fields:
            floats[f][line, actions - span :] = row.lists[column][row.length - span :]
    for values in floats.values():
        values[~mask] = 0
    made: dict[str, Any] = {f: torch.from_numpy(values) for f, values in floats.items()}
    beside = {name: made.pop(name) for name in BESIDE if name in made}
    return Experience(
        torch.from_numpy(ids),
        attention_mask=torch.from_numpy(attention),
        action_mask=torch.from_numpy(mask),
        **made,
        info=_info(rows) | beside,
    )


def _packed(rows: Sequence[_Row]) -> Experience:
    lengths = np.array([row.length for row in rows])
    mask = np.concatenate([row.lists["loss_mask"] for row in rows]) != 0
    made: dict[str, Any] = {}
    for f, column in _FLOATS.items():
        if column in rows[0].lists:
            values = np.concatenate([row.lists[column] for row in rows]).astype(np.float32, copy=False)
            made[f] = torch.from_numpy(np.where(mask, values, np.float32(0))[None])
    beside = {name: made.pop(name) for name in BESIDE if name in made}
    return Experience(
        torch.from_numpy(np.concatenate([row.lists["input_ids"] for row in rows]).astype(np.int64)[None]),
        attention_mask=torch.from_numpy(np.repeat(np.arange(1, len(rows) + 1), lengths)[None]),
        action_mask=torch.from_numpy(mask[None]),
        **made,
        packed_seq_lens=torch.from_numpy(lengths),
        pad_len=0,
        info=_info(rows) | beside,
    )


def _info(rows: Sequence[_Row]) -> dict[str, Any]:
    info: dict[str, Any] = {}
    for name, kind in _SCALARS.items():
        if name in rows[0].scalars:
            info[name] = torch.from_numpy(np.array([row.scalars[name] for row in rows], kind))
    info["response_length"] = torch.tensor([int((row.lists["loss_mask"] != 0).sum()) for row in rows])
    info["total_length"] = torch.tensor([row.length for row in rows])
    info["num_actions"] = torch.tensor([row.response for row in rows])
    info |= {name: [row.scalars[name] for row in rows] for name in _NAMES if name in rows[0].scalars}
    return info
