"""gymdata: LLM rollouts to training data, once, on disk, and training from those files.

The tokens that are trained are the tokens that were sampled, every number knows where it came from, and nothing is lost.

Make rollouts: collect, Step (what environments return), serve, import_rollouts, load_rollouts, open, expand_turns.
Check them: check_rollouts, validate, fix, audit, reading; and what makes them: check, check_endpoint, check_environment.
Look at them, and measure a model: query, view, report, ls, eval.
Score and choose: score, judge, serve_genrm, filter.
Make training data: pairs, experience, load_experiences, export.
Train: train_sft, train_dpo, train_kto, train_reward, train_value, train_rl, merge_adapter, finetune,
sweep, demo.
This install: doctor, tour.
Maths: credit, genrm, curriculum, losses, tokens.

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

#: Commands whose function is in commands/NAME/run.py, and those whose settings class is in commands/NAME/settings.py.
_COMMANDS = (
    "audit check collect demo doctor experience filter finetune judge ls pairs query record report score serve sweep tour "
    "validate view"
)
_WITH_SETTINGS = "audit collect eval experience filter finetune judge pairs record report score sweep view"
_TRAININGS = "dpo kto reward rl sft value"

#: Public name → where it is defined: ``module`` or ``module:name``, below this package. Loaded when first used, so that
#: ``import gymdata`` costs nothing and the command line answers at once. The build writes their types into __init__.pyi.
_HOME = {
    **{name: f"commands.{name}.run" for name in _COMMANDS.split()},
    **{f"{name.title()}Config": f"commands.{name}.settings" for name in _WITH_SETTINGS.split()},
    **{f"train_{kind}": "commands.train.functions" for kind in _TRAININGS.split()},
    **{f"Train{kind.title()}Config": "commands.train.settings" for kind in _TRAININGS.split()},
    "Experience": "commands.experience.loading",
    "Samples": "commands.experience.loading",
    "ServerConfig": "commands.serve.settings",
    "ServeConfig": "commands.judge.settings",
    "Step": "environments.step",
    "check_endpoint": "commands.check.run",
    "check_environment": "commands.check.environment",
    "check_rollouts": "commands.check.rollouts",
    "eval": "commands.eval.run:evaluate",
    "expand_turns": "commands.query.opened",
    "export": "commands.import_export.run",
    "fix": "commands.validate.fix",
    "import_rollouts": "commands.import_export.run",
    "load_experiences": "commands.experience.loading",
    "load_rollouts": "commands.query.opened",
    "merge_adapter": "commands.train.adapter",
    "open": "commands.query.opened:open_run",
    "reading": "store.reading",
    "serve_genrm": "commands.judge.serve.run",
}

#: Folders and files that are public as they are: the maths.
_MODULES = ("credit", "curriculum", "genrm", "losses", "tokens")

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
