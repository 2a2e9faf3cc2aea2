"""What a command of a sweep reads: the content of the files and folders that its words and its configurations name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash
import yaml

from gymdata.errors import GymdataError
from gymdata.models.model_identity import policy_hash
from gymdata.store import hash_file
from gymdata.store.lock import LOCK
from gymdata.store.paths import RUN_JSON, matches

_CONFIGS = (".yaml", ".yml", ".json")
#: What a folder holds besides what is read of it: who writes, when, and pages of it.
_BESIDE = (".log", ".html")


def inputs(words: Sequence[str], output: Path) -> dict[str, str]:
    """Path → hash of its content, of each path outside of ``output`` that ``words`` name, but for what they write."""
    named = [word for before, word in zip(["", *words], words, strict=False) if before not in ("-o", "--output")]
    hashes: dict[str, str] = {}
    for path in _paths(word for word in named if not word.startswith("--output=")):
        if str(path) not in hashes and output.absolute() not in (path.absolute(), *path.absolute().parents):
            hashes[str(path)] = _content(path, output.parent.absolute())
            if path.suffix in _CONFIGS and path.is_file():
                more = [str(file) for file in _paths(_texts(path)) if str(file) not in hashes]
                hashes |= inputs(more, output)
    return hashes


def _paths(words: Iterator[str] | Sequence[str]) -> Iterator[Path]:
    """The paths in words such as FILE, KEY=FILE, FILE.py:function=0.5 and a glob."""
    for word in words:
        for text in (word, word.partition("=")[2], word.rpartition("=")[0], word.partition(".py:")[0] + ".py"):
            with contextlib.suppress(GymdataError, OSError, ValueError):
                yield from (path for path in matches(text) if text and path.exists())


def _texts(config: Path) -> Iterator[str]:
    """The texts in a configuration; none in a file that is no such."""
    waiting: list[object] = []
    with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
        waiting.append(yaml.safe_load(config.read_text(encoding="utf-8")))
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str):
            yield value


def _content(path: Path, outside: Path) -> str:
    """Of a folder by the names and content of its files, without those of the folder ``outside``; of weights as
    ``policy_hash`` does."""
    if path.is_file():
        return hash_file(path)
    digest = xxhash.xxh3_64()
    for folder, folders, files in os.walk(path):
        names = (name for name in folders if not name.startswith(".") and name != "logs")
        folders[:] = sorted(name for name in names if Path(folder, name).absolute() != outside)
        with contextlib.suppress(GymdataError):
            digest.update(policy_hash(Path(folder)).encode())
        for name in sorted(files):
            file = Path(folder, name)
            if name not in (LOCK, RUN_JSON) and file.suffix not in (*_BESIDE, ".safetensors"):
                digest.update(f"\0{file.relative_to(path)}\0{hash_file(file)}".encode())
    return digest.hexdigest()
