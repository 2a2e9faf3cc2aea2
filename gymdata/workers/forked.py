"""Work that a forked child of this process does at the same time."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from collections.abc import Iterator
from typing import IO, NoReturn, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def in_child(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """``items``, which a child makes while the block runs, a little ahead. What making them raises is raised in its place;
    a block that ends earlier waits for the item that is being made, and no more."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of other threads, whose locks the child may need: those of numpy wait for work and hold none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reader)  # else writing would not fail when the parent is gone
        _send(items, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            yield _received(pipe)
    finally:
        os.waitpid(child, 0)


def _send(items: Iterator[T], writer: int) -> NoReturn:
    """Write the items, and None after the last one or the error, and end this process as it is."""
    try:
        with os.fdopen(writer, "wb") as pipe:
            try:
                for item in items:
                    pickle.dump(item, pipe, pickle.HIGHEST_PROTOCOL)
                    pipe.flush()
                pickle.dump(None, pipe)
            except BaseException as error:  # noqa: BLE001 - the parent raises it
                pickle.dump(error, pipe)
    finally:
        os._exit(0)


def _received(pipe: IO[bytes]) -> Iterator[T]:
    try:
        while (item := pickle.load(pipe)) is not None:  # noqa: S301 - our own child's
            if isinstance(item, BaseException):
                raise item
            yield item
    except EOFError as error:
        raise RuntimeError("a child process was killed before its work was done (out of memory?)") from error
