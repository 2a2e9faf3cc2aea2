"""gymdata: LLM rollouts to training data, once, on disk, and training from those files.

The tokens that are trained are the tokens that were sampled, every number knows where it came from, and nothing is lost.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "gymdata runs on Linux and macOS: it relies on POSIX locks and process groups. On Windows, use WSL."
    )
if TYPE_CHECKING:
    from gymdata.api import *  # noqa: F403 - for type checkers, of the names that __getattr__ loads

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy, so that `import gymdata` costs nothing and the command line answers at once.
    import importlib

    if name in ("core", "api", "store", "errors", "ports", "config"):
        return importlib.import_module(f"gymdata.{name}")
    api = importlib.import_module("gymdata.api")
    if name in api.__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'gymdata' has no attribute {name!r}")


def __dir__() -> list[str]:
    import importlib

    return sorted([*globals(), *importlib.import_module("gymdata.api").__all__])
