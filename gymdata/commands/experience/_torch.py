"""Experiences as tensors, for people with their own training loop: ``Experience``, ``Samples``, and what fills them.

Invariants: a batch holds its rows' tokens as they are in the file; padding is on the left and masked everywhere; no
token is added, so a truncated response has no end token that was not sampled; a field whose column the file lacks is
None. Fields, their order and shapes are those that LightRFT publishes; gymdata's additions come after them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import torch

from gymdata.commands.experience.fields import BESIDE, COLUMNS
from gymdata.commands.experience.texts import RolloutTexts
from gymdata.rollouts.ragged import Ragged, list_parts, offsets_of
from gymdata.store.partial_reads import RowGroup

_FLOATS = COLUMNS | {name: name for name in BESIDE}
_Nested = TypeVar("_Nested", bound="torch.Tensor | list[Any] | None")
_SCALARS = {"reward": np.float64, "weight": np.float64, "temperature": np.float32}
_NAMES = ("rollout_id", "sequence_index")
#: Columns of heads → type, and what a place without an entry has.
_HEADS: dict[str, tuple[type[np.generic], float]] = {"top_ids": (np.int64, -1), "top_log_probs": (np.float32, -np.inf)}


class _Tensors:
    """A dataclass of tensors."""

    def to_device(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The batch with every tensor on ``device``, in place; None stays None."""
        return self._each(lambda t: t.to(device, non_blocking=non_blocking))

    to = to_device

    def pin_memory(self) -> Self:
        """The batch with every tensor in pinned memory, in place. Without an accelerator there is nothing to pin for."""
        return self._each(lambda t: t.pin_memory()) if torch.cuda.is_available() else self

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, change(value))
            elif isinstance(value, dict):
                value |= {k: change(v) for k, v in value.items() if isinstance(v, torch.Tensor)}
        return self


@dataclass
class Experience(_Tensors):
    """A batch of B sequences: S the longest of them, A the longest response (from a row's first trained token to its end).

    sequences, attention_mask: (B, S) int64, padded on the left. action_mask (bool) and action_log_probs,
    base_action_log_probs, values, returns, advantages, kl, action_entropy (float32): (B, A), for the last A places of
    ``sequences``; 0 where action_mask is False. Packed: (1, total_length) all of them, attention_mask holding the number of
    the sequence from 1, and packed_seq_lens (B,).

    info: reward, weight, temperature, response_length, total_length, num_actions, each (B,), and the lists rollout_id and
    sequence_index; where the file has them, rl_weight, ce_weight, ref_kl_weight and teacher_logprobs in the shape of
    advantages, and top_ids (int64) and top_log_probs (float32) with a last axis of K, the most ids of a token of the batch,
    −1 and −inf where there is none. prompts, labels, references: texts per row (see ``experience.texts``); None where no
    row has one.
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
class Samples(_Tensors):
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
        return [_nested(element, change) for element in value]
    return change(value) if isinstance(value, torch.Tensor) else value


class ExperienceBatches(Iterator[Experience]):
    """The batches of one pass over a file. ``len`` is the number of steps that are left; every rank has equally many.

    Step s of rank r has the rows order[s·n : (s + 1)·n][r::world_size] with n = batch_size · world_size.
    """

    def __init__(
        self,
        groups: Sequence[RowGroup],
        order: np.ndarray | None,
        batch_size: int,
        rank: int,
        world_size: int,
        start_step: int,
        packed: bool,
        texts: RolloutTexts,
    ) -> None:
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
        rank_rows = together[self._rank :: self._world]
        filler = not len(rank_rows)
        rows = [self._rows.fetch(int(row)) for row in (together[:1] if filler else rank_rows)]
        batch = _batch(rows, self._packed)
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


@dataclass(slots=True)
class _Group:
    """Lists and scalars of a row group."""

    lists: dict[str, Ragged]
    scalars: dict[str, Any]

    @classmethod
    def of(cls, table: pa.Table) -> _Group:
        lists, scalars = {}, {}
        for name in table.column_names:
            if name in _HEADS:
                lists[name] = _wide(table[name], _HEADS[name][1])
            elif pa.types.is_list(table[name].type):
                lists[name] = Ragged.of(table[name])
            else:
                scalars[name] = (
                    table[name].to_numpy().astype(_SCALARS[name]) if name in _SCALARS else table[name].to_pylist()
                )
        return cls(lists, scalars)


def _wide(heads: pa.ChunkedArray, filler: float) -> Ragged:
    """For each row its tokens' lists, as lines of one array."""
    rows = [list_parts(chunk) for chunk in heads.chunks]
    lists = Ragged.joined([Ragged.of(tokens) for _, tokens in rows])
    return Ragged(lists.padded(filler), offsets_of(np.concatenate([np.diff(offsets) for offsets, _ in rows])))


class _Rows:
    """Rows by number. Without ``keep`` groups that were passed are let go: numbers must then rise."""

    def __init__(self, groups: Sequence[RowGroup], keep: bool) -> None:
        self._groups, self._keep = groups, keep
        self._starts = np.concatenate(([0], np.cumsum([group.rows for group in groups], dtype=np.int64)))
        self._opened: dict[int, _Group] = {}
        self.count = int(self._starts[-1])

    def fetch(self, row: int) -> _Row:
        index = int(np.searchsorted(self._starts, row, side="right")) - 1
        if index not in self._opened:
            self._opened[index] = _Group.of(self._groups[index].load())
            # Two row groups, because a batch may cross their border.
            while not self._keep and len(self._opened) > 2:
                del self._opened[next(iter(self._opened))]
        group, offset = self._opened[index], row - int(self._starts[index])
        lists = {name: values[offset] for name, values in group.lists.items()}
        trained = lists["loss_mask"] != 0
        first = int(trained.argmax()) if trained.any() else len(trained)
        return _Row(lists, {name: column[offset] for name, column in group.scalars.items()}, len(trained) - first)


def _batch(rows: Sequence[_Row], packed: bool) -> Experience:
    lengths = np.array([len(row.lists["input_ids"]) for row in rows])
    responses = [row.response for row in rows]
    width, actions = int(lengths.max()), max(1, *responses)
    # The last places of each line of a padded batch are its row's.
    valid = np.arange(max(width, actions)) >= max(width, actions) - lengths[:, None]

    def tensor(column: str, kind: type[np.generic], last: int) -> torch.Tensor:
        """A token column of all rows, its ``last`` places where it is padded."""
        flat = np.concatenate([row.lists[column] for row in rows]).astype(kind, copy=False)
        if packed:
            return torch.from_numpy(flat[None])
        padded = np.zeros(valid.shape, kind)
        padded[valid] = flat
        return torch.from_numpy(np.ascontiguousarray(padded[:, padded.shape[1] - last :]))

    def heads(column: str, kind: type[np.generic], filler: float) -> torch.Tensor:
        """``top_ids`` or ``top_log_probs`` of all rows, with the places of ``tensor``."""
        wide = np.full((*valid.shape, max(row.lists[column].shape[1] for row in rows)), filler, kind)
        for line, row in enumerate(rows):
            of_row = row.lists[column]  # empty where the rollout has no heads
            wide[line, valid.shape[1] - len(of_row) :, : of_row.shape[1]] = of_row
        return torch.from_numpy(wide[valid][None] if packed else wide[:, valid.shape[1] - actions :].copy())

    mask = tensor("loss_mask", np.bool_, actions)
    floats: dict[str, Any] = {
        name: tensor(column, np.float32, actions).masked_fill_(~mask, 0)
        for name, column in _FLOATS.items()
        if column in rows[0].lists
    }
    info: dict[str, Any] = {
        name: torch.from_numpy(np.array([row.scalars[name] for row in rows], kind))
        for name, kind in _SCALARS.items()
        if name in rows[0].scalars
    }
    info["response_length"] = torch.tensor([int((row.lists["loss_mask"] != 0).sum()) for row in rows])
    info |= {"total_length": torch.from_numpy(lengths), "num_actions": torch.tensor(responses)}
    info |= {name: [row.scalars[name] for row in rows] for name in _NAMES if name in rows[0].scalars}
    info |= {name: floats.pop(name) for name in BESIDE if name in floats}
    info |= {name: heads(name, *of) for name, of in _HEADS.items() if name in rows[0].lists}
    attention = np.repeat(np.arange(1, len(rows) + 1), lengths)[None] if packed else valid[:, valid.shape[1] - width :]
    return Experience(
        tensor("input_ids", np.int64, width),
        attention_mask=torch.from_numpy(attention.astype(np.int64)),
        action_mask=mask,
        **floats,
        info=info,
        packed_seq_lens=torch.from_numpy(lengths) if packed else None,
        pad_len=0 if packed else None,
    )
