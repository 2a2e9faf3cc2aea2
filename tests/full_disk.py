"""A disk that is full."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(at: int = 0) -> Iterator[None]:
    """No file of this process grows beyond ``at`` bytes: the system refuses it as a full disk does (EFBIG)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
