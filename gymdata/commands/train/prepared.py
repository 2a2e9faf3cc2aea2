"""Training data in flat files of numbers, written part by part and mapped by every process of a training.

A part of the data (``TrainConfig.parts``) is in memory while it is checked, counted and appended; after that only numbers
per sequence are. ``prepared``, written last, is the data itself with the names of its files in place of its numbers.

Invariants: a folder without ``prepared`` is not opened; the counts and checksums of trained tokens are those of the part as
it was made from the source's table, not of what was written.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from gymdata.commands.train.mapped import Texts, mapped
from gymdata.commands.train.pair_data import NamedSequences, TrainingData
from gymdata.errors import StoreError
from gymdata.rollouts.ragged import Array, Ragged, offsets_of
from gymdata.store.run_json import replacing

#: The folder's name beside a training's job file.
DATA = "data"
PREPARED = "prepared"
#: What is computed of sequences while they are in memory and kept beside them.
_DERIVED = ("keys", "n_trained", "first_trained", "extent", "prompts")


def prepare(folder: Path, parts: Iterable[TrainingData]) -> TrainingData:
    """The data of ``parts``, written to ``folder`` and opened from there.

    Raises StoreError when the disk refuses, and whatever ``parts`` does.
    """
    shutil.rmtree(folder, ignore_errors=True)
    data: TrainingData | None = None
    try:
        folder.mkdir(parents=True)
        for part in parts:
            data = _appended(data, part, folder, "")
        with replacing(folder / PREPARED) as temporary, temporary.open("wb") as stream:
            _Pickler(stream).dump(data)
    except OSError as error:
        raise StoreError.from_os(folder, error) from error
    return opened(folder)


def opened(folder: Path) -> TrainingData:
    """The data that was written to ``folder``, its numbers in mapped files. Raises StoreError when it is not complete."""
    try:
        with (folder / PREPARED).open("rb") as stream:
            data: TrainingData = _Unpickler(stream, folder).load()
    except (FileNotFoundError, EOFError) as error:
        raise StoreError(
            f"{folder}: the prepared training data is not complete", hint="start the training again"
        ) from error
    return data


@dataclasses.dataclass(frozen=True)
class _File:
    """``length`` entries of ``shape`` in a file of the folder."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    length: int

    def __len__(self) -> int:
        return self.length


class _Pickler(pickle.Pickler):
    """Names the files of arrays."""

    def persistent_id(self, value: Any) -> Any:
        return (value.name, value.dtype, value.shape) if isinstance(value, _File) else None


class _Unpickler(pickle.Unpickler):
    """Maps them, wherever the folder is now."""

    def __init__(self, stream: IO[bytes], folder: Path) -> None:
        super().__init__(stream)
        self.folder = folder

    def persistent_load(self, file: Any) -> Array:
        name, dtype, shape = file
        return mapped(self.folder / name, dtype, shape)


def _appended(before: Any, part: Any, folder: Path, name: str) -> Any:
    """``part`` behind ``before``, what this returned for the earlier parts (None: it is the first): columns, which have an
    entry per row, as files that are called ``name``, and facts summed."""
    if isinstance(part, np.ndarray):
        shape = part.shape[1:]
        with (folder / name).open("ab") as stream:
            stream.write(np.ascontiguousarray(part).view(np.uint8).data if len(part) else b"")
            return _File(name, part.dtype.str, shape, stream.tell() // (part.itemsize * math.prod(shape)))
    if isinstance(part, Ragged):
        offsets = part.offsets if before is None else part.offsets[1:] + len(before.values)
        files: Any = (part.values, offsets.astype(np.int64, copy=False))
        return Ragged(
            *(_appended(None, file, folder, name + end) for file, end in zip(files, ("", ".offsets"), strict=True))
        )
    if isinstance(part, list):
        encoded = [text.encode("utf-8", "surrogatepass") for text in part]
        lists = Ragged(np.frombuffer(b"".join(encoded), np.uint8), offsets_of([len(text) for text in encoded]))
        return Texts(_appended(getattr(before, "lists", None), lists, folder, name))
    if isinstance(part, tuple):
        return tuple(_appended(before and before[i], item, folder, f"{name}.{i}") for i, item in enumerate(part))
    if dataclasses.is_dataclass(part) and hasattr(part, "__len__"):
        return _rows_appended(before, part, folder, f"{name}." if name else "")
    if before is None:
        return part
    if isinstance(part, dict):
        return {key: before.get(key, 0) + part.get(key, 0) for key in {**before, **part}}
    if isinstance(part, frozenset):
        return before | part
    if dataclasses.is_dataclass(part):
        return before + part
    if before != part:
        raise ValueError(f"parts of one file differ: {before!r} and {part!r}")
    return part


def _rows_appended(before: Any, part: Any, folder: Path, prefix: str) -> Any:
    """``_appended`` of a dataclass of rows. A part without rows may lack any column; a column that a part with rows lacks
    is in none."""
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    if isinstance(part, NamedSequences):
        fields |= {name: getattr(part, name) for name in _DERIVED}
    has_rows = before is not None and len(before) > 0

    def joined(old: Any, new: Any, prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in {**old, **new}:
            first, more = old.get(name), new.get(name)
            if (first is None and has_rows) or (more is None and len(part)):
                continue
            if name in ("weights", "due"):
                values[name] = joined(first or {}, more, f"{prefix}{name}.")
            else:
                values[name] = first if more is None else _appended(first, more, folder, f"{prefix}{name}")
        return values

    data = copy.copy(part)
    vars(data).clear()
    vars(data).update(dict.fromkeys(fields) | joined({} if before is None else vars(before), fields, prefix))
    return data
