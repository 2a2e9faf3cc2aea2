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
which ``config=`` takes as an object too, and whose texts `gymdata docs settings` has. What they return has ``to_dict()``.
"""

from __future__ import annotations

import importlib
import sys
from types import FunctionType
from typing import Any

if sys.platform == "win32":
    raise ImportError(
        "gymdata runs on Linux and macOS: it relies on POSIX locks and process groups. On Windows, use WSL."
    )

__version__ = "0.1.0"

#: Public name → where it is defined: ``module`` or ``module:name``, below this package. Loaded when first used, so that
#: ``import gymdata`` costs nothing and the command line answers at once. The build writes their types into __init__.pyi.
_HOME = {
    "AuditConfig": "commands.audit.settings",
    "CollectConfig": "commands.collect.settings",
    "Experience": "commands.experience.loading",
    "EvalConfig": "commands.eval.settings",
    "ExperienceConfig": "commands.experience.settings",
    "FilterConfig": "commands.filter.settings",
    "FinetuneConfig": "commands.finetune.settings",
    "JudgeConfig": "commands.judge.settings",
    "PairsConfig": "commands.pairs.settings",
    "RecordConfig": "commands.record.settings",
    "ReportConfig": "commands.report.settings",
    "Samples": "commands.experience.loading",
    "ScoreConfig": "commands.score.settings",
    "ServerConfig": "commands.serve.settings",
    "ServeConfig": "commands.judge.settings",
    "Step": "environments.step",
    "SweepConfig": "commands.sweep.settings",
    "TrainDpoConfig": "commands.train.settings",
    "TrainKtoConfig": "commands.train.settings",
    "TrainRewardConfig": "commands.train.settings",
    "TrainRlConfig": "commands.train.settings",
    "TrainSftConfig": "commands.train.settings",
    "TrainValueConfig": "commands.train.settings",
    "ViewConfig": "commands.view.settings",
    "audit": "commands.audit.run",
    "check": "commands.check.run",
    "check_endpoint": "commands.check.run",
    "check_environment": "commands.check.environment",
    "collect": "commands.collect.run",
    "demo": "commands.demo.run",
    "doctor": "commands.doctor.run",
    "eval": "commands.eval.run:evaluate",
    "expand_turns": "commands.query.opened",
    "experience": "commands.experience.run",
    "export": "commands.import_export.run",
    "filter": "commands.filter.run",
    "finetune": "commands.finetune.run",
    "fix": "commands.validate.fix",
    "import_rollouts": "commands.import_export.run",
    "judge": "commands.judge.run",
    "load_experiences": "commands.experience.loading",
    "load_rollouts": "commands.query.opened",
    "ls": "commands.ls.run",
    "merge_adapter": "commands.train.adapter",
    "open": "commands.query.opened:open_run",
    "pairs": "commands.pairs.run",
    "query": "commands.query.run",
    "reading": "store.reading",
    "record": "commands.record.run",
    "report": "commands.report.run",
    "score": "commands.score.run",
    "serve": "commands.serve.run",
    "serve_genrm": "commands.judge.serve.run",
    "sweep": "commands.sweep.run",
    "tour": "commands.tour.run",
    "train_dpo": "commands.train.functions",
    "train_kto": "commands.train.functions",
    "train_reward": "commands.train.functions",
    "train_rl": "commands.train.functions",
    "train_sft": "commands.train.functions",
    "train_value": "commands.train.functions",
    "validate": "commands.validate.run",
    "view": "commands.view.run",
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
        from gymdata.public import checked_flags

        value = checked_flags(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
