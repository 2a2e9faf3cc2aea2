"""The public functions, each loaded when it is first used.

This package is the one place that joins configuration to adapters. What a command can do, a function here can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymdata.store import foreign

#: Public name → the module of this package that defines it.
_HOME: dict[str, str] = {
    "load_rollouts": "data",
    "expand_turns": "data",
    "reading": "data",
    "validate": "validation",
    "fix": "validation",
    "import_rollouts": "converting",
    "export_rollouts": "converting",
    "check": "checking",
    "check_endpoint": "checking",
    "collect": "collecting",
    "score": "scoring",
    "judge": "judging",
    "serve_genrm": "serving",
    "build_pairs": "pairing",
    "build_experiences": "crediting",
    "filter_rollouts": "filtering",
    "audit": "auditing",
    "load_experiences": "loading",
    "Experience": "loading",
    "Samples": "loading",
    "train_dpo": "training",
    "train_kto": "training",
    "train_reward": "training",
    "train_rl": "training",
    "train_sft": "training",
    "finetune": "finetuning",
    "query": "querying",
    "demo": "demo",
    "compare_trainers": "comparing",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(f"gymdata.api.{_HOME[name]}"), name)
    raise AttributeError(f"module 'gymdata.api' has no attribute {name!r}")


def _is_nemo_gym(line: bytes) -> bool:
    from gymdata.adapters.formats import nemo_gym

    return nemo_gym.recognise(line)


def _nemo_gym_rows(source: Any) -> Iterator[Any]:
    from gymdata.adapters.formats import nemo_import

    return nemo_import.table_rows([source])


# Wherever a path to rollouts is taken, other projects' files are read as well.
foreign.register(foreign.Foreign("nemo-gym", _is_nemo_gym, _nemo_gym_rows))
