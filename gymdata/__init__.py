"""gymdata: LLM rollouts to training data, once, on disk, and training from those files.

The tokens that are trained are the tokens that were sampled, every number knows where it came from, and nothing is lost.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "gymdata runs on Linux and macOS: it relies on POSIX locks and process groups. On Windows, use WSL."
    )
if TYPE_CHECKING:
    from gymdata.audit.run import audit as audit
    from gymdata.audit.settings import AuditConfig as AuditConfig
    from gymdata.check.run import check as check
    from gymdata.check.run import check_endpoint as check_endpoint
    from gymdata.collect.run import collect as collect
    from gymdata.collect.settings import CollectConfig as CollectConfig
    from gymdata.data import expand_turns as expand_turns
    from gymdata.data import load_rollouts as load_rollouts
    from gymdata.data import reading as reading
    from gymdata.demo import demo as demo
    from gymdata.experience.loading import Experience as Experience
    from gymdata.experience.loading import Samples as Samples
    from gymdata.experience.loading import load_experiences as load_experiences
    from gymdata.experience.run import build_experiences as experience
    from gymdata.experience.settings import ExperienceConfig as ExperienceConfig
    from gymdata.filter.run import filter_rollouts as filter
    from gymdata.filter.settings import FilterConfig as FilterConfig
    from gymdata.finetune.run import finetune as finetune
    from gymdata.finetune.settings import FinetuneConfig as FinetuneConfig
    from gymdata.interop.run import export_rollouts as export
    from gymdata.interop.run import import_rollouts as import_rollouts
    from gymdata.judge.run import judge as judge
    from gymdata.judge.serve.run import serve_genrm as serve_genrm
    from gymdata.judge.settings import JudgeConfig as JudgeConfig
    from gymdata.pairs.run import build_pairs as pairs
    from gymdata.pairs.settings import PairsConfig as PairsConfig
    from gymdata.query.opened import open_run as open
    from gymdata.query.run import query as query
    from gymdata.score.run import score as score
    from gymdata.score.settings import ScoreConfig as ScoreConfig
    from gymdata.train.run import train_dpo as train_dpo
    from gymdata.train.run import train_kto as train_kto
    from gymdata.train.run import train_reward as train_reward
    from gymdata.train.run import train_rl as train_rl
    from gymdata.train.run import train_sft as train_sft
    from gymdata.train.settings import TrainDpoConfig as TrainDpoConfig
    from gymdata.train.settings import TrainKtoConfig as TrainKtoConfig
    from gymdata.train.settings import TrainRewardConfig as TrainRewardConfig
    from gymdata.train.settings import TrainRlConfig as TrainRlConfig
    from gymdata.train.settings import TrainSftConfig as TrainSftConfig
    from gymdata.validate.run import fix as fix
    from gymdata.validate.run import validate as validate

__version__ = "0.1.0"

#: Public name → where it is defined: ``module`` or ``module:name``, below this package. Loaded when first used, so that
#: ``import gymdata`` costs nothing and the command line answers at once.
_HOME = {
    "AuditConfig": "audit.settings",
    "CollectConfig": "collect.settings",
    "Experience": "experience.loading",
    "ExperienceConfig": "experience.settings",
    "FilterConfig": "filter.settings",
    "FinetuneConfig": "finetune.settings",
    "JudgeConfig": "judge.settings",
    "PairsConfig": "pairs.settings",
    "Samples": "experience.loading",
    "ScoreConfig": "score.settings",
    "ServeConfig": "judge.settings",
    "TrainDpoConfig": "train.settings",
    "TrainKtoConfig": "train.settings",
    "TrainRewardConfig": "train.settings",
    "TrainRlConfig": "train.settings",
    "TrainSftConfig": "train.settings",
    "audit": "audit.run",
    "check": "check.run",
    "check_endpoint": "check.run",
    "collect": "collect.run",
    "demo": "demo",
    "expand_turns": "data",
    "experience": "experience.run:build_experiences",
    "export": "interop.run:export_rollouts",
    "filter": "filter.run:filter_rollouts",
    "finetune": "finetune.run",
    "fix": "validate.run",
    "import_rollouts": "interop.run",
    "judge": "judge.run",
    "load_experiences": "experience.loading",
    "load_rollouts": "data",
    "open": "query.opened:open_run",
    "pairs": "pairs.run:build_pairs",
    "query": "query.run",
    "reading": "data",
    "score": "score.run",
    "serve_genrm": "judge.serve.run",
    "train_dpo": "train.run",
    "train_kto": "train.run",
    "train_reward": "train.run",
    "train_rl": "train.run",
    "train_sft": "train.run",
    "validate": "validate.run",
}

#: Folders and files that are public as they are: the maths.
_MODULES = ("credit", "curriculum", "genrm", "tokens")

__all__ = [
    "AuditConfig",
    "CollectConfig",
    "Experience",
    "ExperienceConfig",
    "FilterConfig",
    "FinetuneConfig",
    "JudgeConfig",
    "PairsConfig",
    "Samples",
    "ScoreConfig",
    "ServeConfig",
    "TrainDpoConfig",
    "TrainKtoConfig",
    "TrainRewardConfig",
    "TrainRlConfig",
    "TrainSftConfig",
    "audit",
    "check",
    "check_endpoint",
    "collect",
    "credit",
    "curriculum",
    "demo",
    "expand_turns",
    "experience",
    "export",
    "filter",
    "finetune",
    "fix",
    "genrm",
    "import_rollouts",
    "judge",
    "load_experiences",
    "load_rollouts",
    "open",
    "pairs",
    "query",
    "reading",
    "score",
    "serve_genrm",
    "tokens",
    "train_dpo",
    "train_kto",
    "train_reward",
    "train_rl",
    "train_sft",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"gymdata.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'gymdata' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    try:
        value = getattr(importlib.import_module(f"gymdata.{module}"), attribute or name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "gymdata":
            raise
        # An AttributeError, so that `help(gymdata)` shows the rest where an extra is not installed.
        from gymdata.errors import UsageError

        missing = UsageError.missing_module(error)
        raise AttributeError(f"gymdata.{name}: {missing or error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class _Package(ModuleType):
    """A command and its folder have the same name (``gymdata.pairs``): as an attribute it is always the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
