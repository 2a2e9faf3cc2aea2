"""Training data in flat files of numbers, written part by part and mapped by every process of a training.

A part of the data (``TrainConfig.parts``) is in memory while it is checked, counted and appended; after that only numbers
per sequence are. ``prepared.json``, written last, says how the files make up the data again.

Invariants: a folder without ``prepared.json`` is not opened; the counts and checksums of trained tokens are those of the
part as it was made from the source's table, not of what was written.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.errors import StoreError
from gymdata.rollouts.ragged import Array, Ragged, content_codes, offsets_of
from gymdata.store.run_json import plain, replacing
from gymdata.train import pair_data, rollout_data, sequence_data
from gymdata.train.mapped import Texts, mapped
from gymdata.train.pair_data import NamedSequences, TrainingData

#: The folder's name beside a training's job file.
DATA = "data"
PREPARED = "prepared.json"


def prepare(folder: Path, parts: Iterable[TrainingData]) -> TrainingData:
    """The data of ``parts``, written to ``folder`` and opened from there.

    Raises StoreError when the disk refuses, and whatever ``parts`` does.
    """
    shutil.rmtree(folder, ignore_errors=True)
    tree: _Tree | None = None
    try:
        folder.mkdir(parents=True)
        for part in parts:
            tree = tree or _Tree(type(part).__name__)
            tree.add(part, folder)
        assert tree is not None  # a source without rows is one part without rows
        tree.finish(folder)
        with replacing(folder / PREPARED) as temporary:
            temporary.write_text(json.dumps(plain(tree.as_json())))
    except OSError as error:
        raise StoreError.from_os(folder, error) from error
    data: TrainingData = tree.opened(folder)
    return data


def opened(folder: Path) -> TrainingData:
    """The data that was written to ``folder``, its numbers in mapped files; without what a length limit cost, which only
    ``prepare`` returns. Raises StoreError when it is not complete."""
    try:
        facts = json.loads((folder / PREPARED).read_text())
    except FileNotFoundError as error:
        raise StoreError(
            f"{folder}: the prepared training data is not complete", hint="start the training again"
        ) from error
    data: TrainingData = _Tree.from_json(facts).opened(folder)
    return data


@dataclasses.dataclass
class _Tree:
    """A dataclass of rows: columns in files, others of its kind within it, and facts, which are summed over the parts.

    A part without rows may lack any column; a column that a part with rows lacks is in none.
    """

    kind: str
    path: str = ""
    rows: int = 0
    #: Name → (numbers, lists or texts; type of the numbers).
    columns: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    inner: dict[str, _Tree] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, part: Any, folder: Path) -> None:
        columns = _columns(part)
        for name, values in columns.items():
            if name in self.columns or not self.rows:
                self.columns[name] = _append(folder / f"{self.path}{name}", values)
        if len(part):
            self.columns = {name: column for name, column in self.columns.items() if name in columns}
        taken = {name.partition(".")[0] for name in columns}
        for name, value in ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part)):
            if name in taken or value is None or isinstance(value, tuple):
                continue
            if hasattr(value, "__len__") and dataclasses.is_dataclass(value):
                tree = self.inner.setdefault(name, _Tree(type(value).__name__, f"{self.path}{name}."))
                tree.add(value, folder)
            else:
                self.facts[name] = _sum(self.facts[name], value) if name in self.facts else value
        self.rows += len(part)

    def finish(self, folder: Path) -> None:
        """Number the prompts, which needs all parts."""
        for tree in self.inner.values():
            tree.finish(folder)
        if self.kind == NamedSequences.__name__:
            del self.columns["prompts"]
            prompts = folder / f"{self.path}prompts"
            siblings = content_codes(np.fromfile(prompts, "V16"))
            self.columns["siblings"] = _append(folder / f"{self.path}siblings", siblings)
            prompts.unlink()

    def as_json(self) -> dict[str, object]:
        inner = {name: tree.as_json() for name, tree in self.inner.items()}
        facts = {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in self.facts.items()
            if not dataclasses.is_dataclass(value)
        }
        return {"kind": self.kind, "path": self.path, "columns": self.columns, "inner": inner, "facts": facts}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> _Tree:
        inner = {name: cls.from_json(tree) for name, tree in facts["inner"].items()}
        known = {name: frozenset(v) if isinstance(v, list) else v for name, v in facts["facts"].items()}
        return cls(facts["kind"], facts["path"], columns=facts["columns"], inner=inner, facts=known)

    def opened(self, folder: Path) -> Any:
        values: dict[str, Any] = {
            name: _read(folder / f"{self.path}{name}", *column) for name, column in self.columns.items()
        }
        values |= self.facts | {name: tree.opened(folder) for name, tree in self.inner.items()}
        for name in [name for name in values if "." in name]:
            field, _, key = name.partition(".")
            values[field] = {**values.get(field, {}), key: values.pop(name)}
        (kind,) = {
            vars(home)[self.kind] for home in (pair_data, rollout_data, sequence_data) if self.kind in vars(home)
        }
        fields = dataclasses.fields(kind)
        absent = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        data = kind(**dict.fromkeys(absent) | {f.name: values[f.name] for f in fields if f.name in values})
        if isinstance(data, NamedSequences):
            # Cached properties that were computed while the part was in memory.
            cached = {name: values[name] for name in ("keys", "first_trained", "siblings")}
            by_sequence = values["counts"], values["checksums"]
            vars(data).update(cached, by_sequence=by_sequence, extent=values["extent"].reshape(-1, 3))
        return data


def _columns(part: Any) -> dict[str, Array | Ragged | Sequence[str]]:
    """Fields with one entry per row; the items of a dictionary as ``field.item``."""
    columns: dict[str, Any] = {}
    for name, value in ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part)):
        if isinstance(value, dict):
            columns |= {f"{name}.{key}": item for key, item in value.items() if isinstance(item, Ragged)}
        elif isinstance(value, (np.ndarray, Ragged, Sequence)) and not isinstance(value, (str, tuple)):
            columns[name] = value
    if isinstance(part, NamedSequences):
        counts, sums = part.by_sequence
        columns |= {
            "keys": part.keys,
            "counts": counts,
            "checksums": sums,
            "first_trained": part.first_trained,
            "extent": part.extent.ravel(),
            "prompts": part.prompts,
        }
    return columns


def _append(file: Path, values: Array | Ragged | Sequence[str]) -> tuple[str, str]:
    """Write the next values of a column; returns its form and the type of its numbers."""
    if isinstance(values, np.ndarray):
        with file.open("ab") as stream:
            stream.write(np.ascontiguousarray(values).view(np.uint8).data if len(values) else b"")
        return "numbers", values.dtype.str
    if not isinstance(values, Ragged):
        encoded = [text.encode("utf-8", "surrogatepass") for text in values]
        lists = Ragged(np.frombuffer(b"".join(encoded), np.uint8), offsets_of([len(text) for text in encoded]))
        return "texts", _append(file, lists)[1]
    before = file.stat().st_size // values.values.itemsize if file.exists() else None
    _append(file, values.values)
    offsets = values.offsets if before is None else values.offsets[1:] + before
    _append(file.with_name(f"{file.name}.offsets"), offsets.astype(np.int64, copy=False))
    return "lists", values.values.dtype.str


def _read(file: Path, form: str, dtype: str) -> Array | Ragged | Texts:
    if form == "numbers":
        return mapped(file, dtype)
    lists = Ragged(mapped(file, dtype), mapped(file.with_name(f"{file.name}.offsets"), "<i8"))
    return Texts(lists) if form == "texts" else lists


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, frozenset):
        return one | other
    if isinstance(one, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
    if dataclasses.is_dataclass(one):
        return one + other
    if one != other:
        raise ValueError(f"parts of one file differ: {one!r} and {other!r}")
    return one
