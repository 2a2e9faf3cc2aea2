"""Training data in files that are written once and mapped by every process of a training.

A part of the data (``TrainConfig.parts``) is in memory while it is checked, counted and appended; after that only numbers
per sequence are. ``prepared.json``, written last, says how the files make up the data again, which settings and source they
were made of, and what they hold.

Invariants: a folder without ``prepared.json`` was cut short and is made again; the counts and checksums of trained tokens
are those of the part as it was made from the source's table, not of what was written; files that are used again are those
that were written, byte for byte.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gymdata.errors import StoreError
from gymdata.rollouts.ragged import Array, Ragged, content_codes, offsets_of
from gymdata.store import hash_file
from gymdata.store.run_json import plain, replacing
from gymdata.train import pair_data, sequence_data
from gymdata.train.mapped import TextPairs, Texts, mapped
from gymdata.train.pair_data import NamedSequences, TrainingData

#: The folder's name beside a training's job file.
DATA = "data"
PREPARED = "prepared.json"
#: Part of what the files are known by: raised when they change.
_FORMAT = 1
#: Keys of prompts, from which the numbers of siblings are made once all are there.
_PROMPTS, _KEY = "prompts", "V16"


def prepare(folder: Path, parts: Iterable[TrainingData], identity: Mapping[str, Any]) -> TrainingData:
    """The data of ``parts``, opened from ``folder``, where it is written unless that very data (``identity``) is there.

    Raises StoreError when the disk refuses, and whatever ``parts`` does.
    """
    wanted = plain({"format": _FORMAT, **identity})
    if not _holds(folder, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            _write(folder, parts, wanted)
        except OSError as error:
            raise StoreError.from_os(folder, error) from error
    return opened(folder)


def opened(folder: Path) -> TrainingData:
    """The data that was written to ``folder``, its numbers in mapped files. Raises StoreError when it is not whole."""
    facts = _facts(folder)
    if facts is None or not _sizes_are_right(folder, facts):
        raise StoreError(f"{folder}: what is trained is not there whole", hint="start the training again")
    data: TrainingData = _Opened(folder).object(facts["data"])
    return data


def _facts(folder: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / PREPARED).read_text())
    except FileNotFoundError:
        return None
    return found


def _holds(folder: Path, identity: Mapping[str, Any]) -> bool:
    facts = _facts(folder)
    if facts is None or facts["identity"] != identity or not _sizes_are_right(folder, facts):
        return False
    return all(hash_file(folder / name) == file["xxh3"] for name, file in facts["files"].items())


def _sizes_are_right(folder: Path, facts: Mapping[str, Any]) -> bool:
    return all(
        (path := folder / name).is_file() and path.stat().st_size == file["bytes"]
        for name, file in facts["files"].items()
    )


def _write(folder: Path, parts: Iterable[TrainingData], identity: Mapping[str, Any]) -> None:
    files = _Files(folder)
    try:
        whole: _Object | None = None
        for part in parts:
            whole = whole or _Object(type(part).__name__)
            whole.add(part, files)
        assert whole is not None  # a source without rows is one part without rows
        whole.finish(files)
    finally:
        files.close()
    facts = {"identity": identity, "data": whole.as_json(files), "files": files.described()}
    with replacing(folder / PREPARED) as temporary:
        temporary.write_text(json.dumps(plain(facts)))


class _Files:
    """Files that are appended to, each with its size and hash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._hashes: dict[str, xxhash.xxh3_64] = {}
        self._sizes: dict[str, int] = {}

    def append(self, name: str, numbers: Array) -> None:
        if name not in self._open:
            self._open[name] = (self.folder / name).open("wb")
            self._hashes[name], self._sizes[name] = xxhash.xxh3_64(), 0
        held = np.ascontiguousarray(numbers).view(np.uint8).data if len(numbers) else b""
        self._open[name].write(held)
        self._hashes[name].update(held)
        self._sizes[name] += len(held)

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def read(self, name: str, dtype: str) -> Array:
        """The data appended so far."""
        self._open[name].flush()
        return np.fromfile(self.folder / name, dtype)

    def drop(self, name: str) -> None:
        if name in self._open:
            self._open.pop(name).close()
            del self._hashes[name], self._sizes[name]
            (self.folder / name).unlink()

    def same(self, name: str) -> str:
        """The first file that holds the same; ``name`` goes when that is another one."""
        mine = self._sizes[name], self._hashes[name].digest()
        first = next(other for other in self._open if (self._sizes[other], self._hashes[other].digest()) == mine)
        if first != name:
            self.drop(name)
        return first

    def described(self) -> dict[str, Any]:
        return {name: {"bytes": self._sizes[name], "xxh3": self._hashes[name].hexdigest()} for name in self._open}


@dataclasses.dataclass
class _Numbers:
    """Numbers of each row, equally many."""

    name: str
    dtype: str = ""

    def add(self, numbers: Array, files: _Files) -> None:
        self.dtype = numbers.dtype.str
        files.append(self.name, numbers)

    def drop(self, files: _Files) -> None:
        files.drop(self.name)

    def as_json(self, _files: _Files) -> dict[str, Any]:
        return {"is": "numbers", "file": self.name, "dtype": self.dtype}


@dataclasses.dataclass
class _Lists:
    """Numbers of each row, one list after the other, and where the lists begin."""

    name: str
    dtype: str = ""
    end: int = 0

    def add(self, lists: Ragged, files: _Files) -> None:
        if not self.dtype:
            self.dtype = lists.values.dtype.str
            files.append(f"{self.name}.offsets", np.zeros(1, np.int64))
        files.append(self.name, lists.values)
        files.append(f"{self.name}.offsets", lists.offsets[1:] + self.end)
        self.end += len(lists.values)

    def drop(self, files: _Files) -> None:
        files.drop(self.name)
        files.drop(f"{self.name}.offsets")

    def as_json(self, files: _Files) -> dict[str, Any]:
        offsets = files.same(f"{self.name}.offsets")
        return {"is": "lists", "file": self.name, "dtype": self.dtype, "offsets": offsets}


@dataclasses.dataclass
class _Texts:
    """``width`` texts of each row."""

    name: str
    width: int = 1

    def __post_init__(self) -> None:
        self.lists = _Lists(self.name)

    def add(self, texts: Sequence[Any], files: _Files) -> None:
        if len(texts) and isinstance(texts[0], tuple):
            self.width, texts = len(texts[0]), [text for row in texts for text in row]
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        values = np.frombuffer(b"".join(encoded), np.uint8)
        self.lists.add(Ragged(values, offsets_of([len(text) for text in encoded])), files)

    def drop(self, files: _Files) -> None:
        self.lists.drop(files)

    def as_json(self, files: _Files) -> dict[str, Any]:
        return {**self.lists.as_json(files), "is": "texts", "width": self.width}


@dataclasses.dataclass
class _Fact:
    """Small facts, which are summed over the parts."""

    value: Any

    def add(self, other: Any) -> None:
        if isinstance(other, frozenset):
            self.value |= other
        elif isinstance(other, dict):
            self.value = {name: self.value.get(name, 0) + other.get(name, 0) for name in {**self.value, **other}}
        elif dataclasses.is_dataclass(other):
            self.value = self.value + other
        elif other != self.value:
            raise ValueError(f"parts of one file differ: {self.value!r} and {other!r}")

    def as_json(self, _files: _Files) -> dict[str, Any]:
        value = self.value
        if isinstance(value, frozenset):
            return {"is": "set", "value": sorted(value)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {"is": "fact", "class": type(value).__name__, "value": dataclasses.asdict(value)}
        return {"is": "value", "value": value}


class _Object:
    """A dataclass of rows: columns in files, others of its kind within it, and facts.

    A part without rows may lack any column; otherwise all parts have the same columns.
    """

    def __init__(self, kind: str, path: str = "") -> None:
        self.kind, self.path, self.rows = kind, path, 0
        self.columns: dict[str, _Numbers | _Lists | _Texts] = {}
        self.objects: dict[str, _Object] = {}
        self.facts: dict[str, _Fact] = {}

    def add(self, part: Any, files: _Files) -> None:
        columns = dict(_columns(part))
        for name, column in columns.items():
            if name in self.columns or not self.rows:
                self._column(name, column).add(column, files)
        if len(part):
            for name in self.columns.keys() - columns.keys():
                self.columns.pop(name).drop(files)
        for name, value in _others(part):
            if hasattr(value, "__len__") and dataclasses.is_dataclass(value):
                self.objects.setdefault(name, _Object(type(value).__name__, f"{self.path}{name}.")).add(value, files)
            elif name in self.facts:
                self.facts[name].add(value)
            else:
                self.facts[name] = _Fact(value)
        self.rows += len(part)

    def _column(self, name: str, value: Any) -> Any:
        kind = _Numbers if isinstance(value, np.ndarray) else _Lists if isinstance(value, Ragged) else _Texts
        return self.columns.setdefault(name, kind(f"{self.path}{name}"))

    def finish(self, files: _Files) -> None:
        """The facts that need all parts."""
        for inner in self.objects.values():
            inner.finish(files)
        if self.kind == NamedSequences.__name__:
            prompts = self.columns.pop(_PROMPTS)
            siblings = content_codes(files.read(prompts.name, _KEY))
            prompts.drop(files)
            self._column("siblings", siblings).add(siblings, files)

    def as_json(self, files: _Files) -> dict[str, Any]:
        parts = {**self.columns, **self.objects, **self.facts}
        return {
            "is": "object",
            "class": self.kind,
            "fields": {name: part.as_json(files) for name, part in parts.items()},
        }


def _columns(part: Any) -> Iterator[tuple[str, Any]]:
    """Fields with one entry per row; the items of a dictionary as ``field.item``."""
    for name, value in _fields(part):
        if isinstance(value, (np.ndarray, Ragged)) or (
            isinstance(value, Sequence) and not isinstance(value, (str, tuple))
        ):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items() if isinstance(item, Ragged))
    if isinstance(part, NamedSequences):
        counts, sums = part.by_sequence
        derived = {"keys": part.keys, "counts": counts, "checksums": sums, "first_trained": part.first_trained,
                   "extent": part.extent.ravel(), _PROMPTS: part.prompts}  # fmt: skip
        yield from derived.items()


def _others(part: Any) -> Iterator[tuple[str, Any]]:
    taken = {name.partition(".")[0] for name, _ in _columns(part)}
    return ((name, value) for name, value in _fields(part) if name not in taken and value is not None)


def _fields(part: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(part, field.name)) for field in dataclasses.fields(part)]


class _Opened:
    """Rebuilds the data that ``_Object.as_json`` described."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def value(self, spec: Mapping[str, Any]) -> Any:
        match spec["is"]:
            case "object":
                return self.object(spec)
            case "numbers":
                return mapped(self.folder / spec["file"], spec["dtype"])
            case "lists":
                return self.lists(spec)
            case "texts":
                texts = Texts(self.lists(spec))
                return TextPairs(texts) if spec["width"] == 2 else texts
            case "set":
                return frozenset(spec["value"])
            case "fact":
                kept = {name: tuple(v) if isinstance(v, list) else v for name, v in spec["value"].items()}
                return _class(spec["class"])(**kept)
        return spec["value"]

    def lists(self, spec: Mapping[str, Any]) -> Ragged:
        return Ragged(mapped(self.folder / spec["file"], spec["dtype"]), mapped(self.folder / spec["offsets"], "<i8"))

    def object(self, spec: Mapping[str, Any]) -> Any:
        values = {name: self.value(inner) for name, inner in spec["fields"].items()}
        for name in [name for name in values if "." in name]:
            field, _, key = name.partition(".")
            values[field] = {**values.get(field, {}), key: values.pop(name)}
        kind = _class(spec["class"])
        known = {field.name for field in dataclasses.fields(kind)}
        given = {name: value for name, value in values.items() if name in known}
        made = kind(**given, **dict.fromkeys(_absent(kind, values)))
        if isinstance(made, NamedSequences):
            # Cached properties that were computed while the part was in memory.
            kept = {name: values[name] for name in ("keys", "first_trained", "siblings")}
            by_sequence = values["counts"], values["checksums"]
            vars(made).update(kept, by_sequence=by_sequence, extent=values["extent"].reshape(-1, 3))
        return made


def _absent(kind: Any, values: Mapping[str, Any]) -> list[str]:
    """Fields without a default that the data has nothing for."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in values and field.default is missing and field.default_factory is missing
    ]


def _class(name: str) -> Any:
    return getattr(pair_data, name, None) or getattr(sequence_data, name)
