"""Ids back to text, for people and for finding the cause of a break.

Invariants: special tokens are written out; an id that the tokenizer does not know is shown as ``<id N>`` and never
left out; ``tokenizers`` is loaded when the first text is asked for, and ``transformers`` only for folders without a
tokenizer.json.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gymdata.engines._transformers import load_tokenizer
from gymdata.errors import UsageError, needs
from gymdata.rollouts.continuity.breaks import Reader, Reading


def text_reader(folder: str | Path) -> Reader:
    """A reader that loads the tokenizer in ``folder`` when it is first asked. Raises UsageError or DataError then."""
    return functools.cache(lambda: load_reader(folder))


def load_reader(folder: str | Path) -> Reading:
    """What the tokenizer in ``folder`` (or the tokenizer.json itself, or a model's name) tells."""
    file = Path(folder, "tokenizer.json") if Path(folder).is_dir() else Path(folder)
    if not file.is_file():
        return _by_transformers(str(folder))
    with needs("collect"):
        from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises bare Exception for a file that it cannot read.
        raise UsageError.bad_value("--tokenizer", str(folder), f"a folder with a tokenizer ({error})") from error
    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return Reading(_careful(functools.partial(backend.decode, skip_special_tokens=False), _known(backend)), special)


def _by_transformers(name: str) -> Reading:
    loaded = load_tokenizer(name)

    def decode(ids: list[int]) -> str:
        return str(loaded.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return Reading(_careful(decode, range(len(loaded)).__contains__), frozenset(loaded.all_special_ids))


def _known(backend: Any) -> Callable[[int], bool]:
    size = backend.get_vocab_size(with_added_tokens=True)
    # Ids can have gaps; asking for each is slow, so only those beyond the size are asked for.
    return lambda i: 0 <= i < size or (0 <= i < 2**32 and backend.id_to_token(i) is not None)


def _careful(decode: Callable[[list[int]], str], known: Callable[[int], bool]) -> Callable[[Sequence[int]], str]:
    def text(ids: Sequence[int]) -> str:
        if all(map(known, ids)):
            return decode(list(ids))
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if known(i):
                run.append(i)
                continue
            parts += [decode(run), f"<id {i}>"]
            run = []
        return "".join([*parts, decode(run)])

    return text
