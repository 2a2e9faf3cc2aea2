"""The public functions, each loaded when it is first used.

This package is the one place that joins configuration to adapters. What a command can do, a function here can do.
"""

from __future__ import annotations

from typing import Any

#: Public name → the module of this package that defines it.
_HOME: dict[str, str] = {
    "load_rollouts": "data",
    "expand_turns": "data",
    "validate": "validation",
    "fix": "validation",
    "check": "checking",
    "check_endpoint": "checking",
    "collect": "collecting",
    "score": "scoring",
    "judge": "judging",
    "serve_genrm": "serving",
    "build_pairs": "pairing",
    "build_experiences": "crediting",
    "load_experiences": "loading",
    "Experience": "loading",
    "Samples": "loading",
    "train_dpo": "training",
    "query": "querying",
    "demo": "demo",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(f"gymdata.api.{_HOME[name]}"), name)
    raise AttributeError(f"module 'gymdata.api' has no attribute {name!r}")
