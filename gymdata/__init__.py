"""gymdata: LLM rollouts to training data, once, on disk, and training from those files.

The tokens that are trained are the tokens that were sampled, every number knows where it came from, and nothing is lost.

Make rollouts: collect, Step (what environments return), serve, import_rollouts, load_rollouts, open, expand_turns.
Check them: check, check_endpoint, check_environment, validate, fix, audit,
reading.
Look at them, and measure a model: query, view, report, ls, eval.
Score and choose: score, judge, serve_genrm, filter.
Make training data: pairs, experience, load_experiences, export.
Train: train_sft, train_dpo, train_kto, train_reward, train_value, train_rl, merge_adapter, finetune,
sweep, demo.
This install: doctor, tour.
Maths: credit, genrm, curriculum, tokens.

Functions take the path first and settings as keywords: those of the class named like the function (PairsConfig for pairs),
which ``config=`` takes as an object too. What they return has ``to_dict()``.
"""

from __future__ import annotations

import importlib
import sys
from types import FunctionType, ModuleType
from typing import Any

if sys.platform == "win32":
    raise ImportError(
        "gymdata runs on Linux and macOS: it relies on POSIX locks and process groups. On Windows, use WSL."
    )

__version__ = "0.1.0"

#: Public name → where it is defined: ``module`` or ``module:name``, below this package. Loaded when first used, so that
#: ``import gymdata`` costs nothing and the command line answers at once. The build writes their types into __init__.pyi.
_HOME = {
    "AuditConfig": "audit.settings",
    "CollectConfig": "collect.settings",
    "Experience": "experience.loading",
    "EvalConfig": "eval.settings",
    "ExperienceConfig": "experience.settings",
    "FilterConfig": "filter.settings",
    "FinetuneConfig": "finetune.settings",
    "JudgeConfig": "judge.settings",
    "PairsConfig": "pairs.settings",
    "RecordConfig": "record.settings",
    "ReportConfig": "report.settings",
    "Samples": "experience.loading",
    "ScoreConfig": "score.settings",
    "ServerConfig": "serve.settings",
    "ServeConfig": "judge.settings",
    "Step": "environments.step",
    "SweepConfig": "sweep.settings",
    "TrainDpoConfig": "train.settings",
    "TrainKtoConfig": "train.settings",
    "TrainRewardConfig": "train.settings",
    "TrainRlConfig": "train.settings",
    "TrainSftConfig": "train.settings",
    "TrainValueConfig": "train.settings",
    "ViewConfig": "view.settings",
    "audit": "audit.run",
    "check": "check.run",
    "check_endpoint": "check.run",
    "check_environment": "check.environment",
    "collect": "collect.run",
    "demo": "demo.run",
    "doctor": "doctor.run",
    "eval": "eval.run:evaluate",
    "expand_turns": "query.opened",
    "experience": "experience.run",
    "export": "interop.run",
    "filter": "filter.run",
    "finetune": "finetune.run",
    "fix": "validate.run",
    "import_rollouts": "interop.run",
    "judge": "judge.run",
    "load_experiences": "experience.loading",
    "load_rollouts": "query.opened",
    "ls": "ls.run",
    "merge_adapter": "train.adapter",
    "open": "query.opened:open_run",
    "pairs": "pairs.run",
    "query": "query.run",
    "reading": "store.reading",
    "record": "record.run",
    "report": "report.run",
    "score": "score.run",
    "serve": "serve.run",
    "serve_genrm": "judge.serve.run",
    "sweep": "sweep.run",
    "tour": "tour.run",
    "train_dpo": "train.run",
    "train_kto": "train.run",
    "train_reward": "train.run",
    "train_rl": "train.run",
    "train_sft": "train.run",
    "train_value": "train.run",
    "validate": "validate.run",
    "view": "view.run",
}

#: Folders and files that are public as they are: the maths.
_MODULES = ("credit", "curriculum", "genrm", "tokens")

__all__ = sorted((*_HOME, *_MODULES))


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
    if isinstance(value, FunctionType):
        from gymdata.public import checked_flags, with_keywords

        value = checked_flags(with_keywords(value))
        _share_modules(name, value)
    globals()[name] = value
    return value


def _share_modules(name: str, function: object) -> None:
    """``import gymdata.finetune.port`` finds the modules of a folder through the function that has its name."""
    folder = sys.modules.get(f"gymdata.{name}")
    if folder is None or not hasattr(folder, "__path__"):
        return

    class Folder(ModuleType):
        def __setattr__(self, key: str, value: object) -> None:
            super().__setattr__(key, value)
            if isinstance(value, ModuleType):
                setattr(function, key, value)

    folder.__class__ = Folder
    for key, value in list(vars(folder).items()):
        setattr(folder, key, value)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class _Package(ModuleType):
    """A command and its folder have the same name (``gymdata.pairs``): as an attribute it is always the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
