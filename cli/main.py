"""The ``gymdata`` command: finds the command, loads only that one, and turns errors into a message and an exit code."""

from __future__ import annotations

import copy
import errno
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from gymdata.errors import (
    EXIT_FAULTS,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OUTSIDE,
    EXIT_USAGE,
    GymdataError,
    UsageError,
    printable,
    redacted,
)
from gymdata.store.reading import current, reading

from .console import AllowChangedFlag, note, remember_command

#: Command → (module of this package, function, what the list of commands says: at most 60 characters, or it is cut), in
#: the order of the path from tasks to a checkpoint.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "check": ("check", "check", "Probe a chat template, or a server, before sampling."),
    "collect": ("collect", "collect", "Sample rollouts with a policy, with token IDs and logprobs."),
    "validate": ("validate", "validate", "Check rollouts or pairs by token, and report every fault."),
    "audit": ("audit", "audit", "Check saved logprobs against a model, and find causes."),
    "score": ("score", "score", "Score saved rollouts again without sampling."),
    "judge": ("judge", "judge", "Compare rollouts pairwise with a judge, for rewards."),
    "pairs": ("pairs", "pairs", "Build preference pairs from scored rollouts."),
    "experience": ("experience", "experience", "Turn scored rollouts into sequences with advantages."),
    "filter": ("filter", "filter_", "Keep rollouts that pass conditions; report drops by reason."),
    "train-sft": ("train", "train_sft", "Train on the exact tokens of the best rollouts."),
    "train-dpo": ("train", "train_dpo", "Train with DPO on the exact tokens of saved pairs."),
    "train-kto": ("train", "train_kto", "Train with KTO on the tokens of good and bad rollouts."),
    "train-reward": ("train", "train_reward", "Train a reward model on saved pairs, and measure it."),
    "train-rl": ("train", "train_rl", "Train with batch RL on saved experiences, ratios checked."),
    "finetune": ("finetune", "finetune", "Run epochs of collect, train and validate from one file."),
    "import": ("import_", "import_", "Import rollouts or preference pairs of other projects."),
    "export": ("export", "export", "Write rollouts in another project's format."),
    "query": ("query", "query", "Run DuckDB SQL over rollouts and all other tables."),
    "serve-genrm": ("serve_genrm", "serve_genrm", "Serve pairwise judging over HTTP to online trainers."),
    "docs": ("docs", "docs", "Read the documentation, topic by topic."),
    "demo": ("demo", "demo", "Run the whole path on the shipped policy and tasks."),
}

#: Commands that read sealed files: they take ``--allow-changed``. ``validate`` reports changed files and checks them.
READERS = frozenset(
    ["audit", "score", "judge", "pairs", "experience", "filter", "finetune", "export", "query"]
    + [name for name in COMMANDS if name.startswith("train-")]
)


class OnceCommand(TyperCommand):
    """A command whose options of one value are given once: the parser alone would take the last and drop the others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises UsageError for an option that is given twice, or both on and off."""
        every, options = self.make_parser(ctx), {}
        for param in self.get_params(ctx):
            if param.param_type_name == "option" and not param.multiple and not getattr(param, "count", False):
                options[param.name] = gathering = copy.copy(param)
                gathering.multiple = True
                gathering.add_to_parser(every, ctx)
        given, _, order = every.parse_args(args=list(args))
        if not any(param.is_eager for param in order):
            for name, option in options.items():
                _refuse_twice(option, given.get(name) or [])
        return super().parse_args(ctx, args)


def _refuse_twice(option: Any, values: list[Any]) -> None:
    if option.is_flag:
        # Said twice, a flag means what it means; on and off exclude each other.
        names = {True: option.opts[-1], False: (option.secondary_opts or option.opts)[-1]}
        values = [names[value] for value in dict.fromkeys(values)]
    if len(values) > 1:
        often = "twice" if len(values) == 2 else f"{len(values)} times"
        listed = f"{', '.join(map(str, values[:-1]))} and {values[-1]}"
        raise UsageError(f"{option.opts[-1]}: given {often}: {listed}", hint="it takes one value: give it once")


def build(command: str | None) -> typer.Typer:
    """The application with ``command`` in full; the others are only named, so that nothing they need is loaded."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Plain help: the boxes of the rich one cut long option names on narrow terminals.
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Turn LLM rollouts into training data, once, on disk, and train from those files.",
    )
    app.callback(invoke_without_command=True)(_root)
    for name, (module, function, summary) in COMMANDS.items():
        if name == command:
            body = getattr(importlib.import_module(f"gymdata.cli.{module}"), function)
            app.command(name, cls=OnceCommand)(with_allow_changed(body) if name in READERS else body)
        else:
            app.command(name, help=summary)(_named_only)
    return app


def with_allow_changed(body: Callable[..., Any]) -> Callable[..., Any]:
    """``body`` with the flag ``--allow-changed``, which means the same in every command that reads sealed files."""

    def run(*args: Any, allow_changed: bool, **given: Any) -> Any:
        if allow_changed:
            current().allow_changed = True
        return body(*args, **given)

    signature = inspect.signature(body, eval_str=True)
    flag = inspect.Parameter(
        "allow_changed", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AllowChangedFlag
    )
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), flag])  # type: ignore[attr-defined]  # inspect reads it
    run.__annotations__ = {p.name: p.annotation for p in (*signature.parameters.values(), flag)}
    run.__doc__ = body.__doc__
    return run


def rewritten(command: str | None, argv: list[str]) -> list[str]:
    """The words as the parser takes them: a command's module may have a ``rewrite`` for what it has no form for."""
    if command not in COMMANDS:
        return argv
    rewrite = getattr(importlib.import_module(f"gymdata.cli.{COMMANDS[command][0]}"), "rewrite", None)
    return list(rewrite(argv)) if rewrite is not None else argv


def _named_only() -> None:
    """Stands for a command in the list of commands."""


def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import gymdata

        typer.echo(f"gymdata {gymdata.__version__}")
        raise typer.Exit


def run() -> None:
    """Entry point of the ``gymdata`` script; ends the process with the documented exit code."""
    sys.exit(main(sys.argv[1:]))


def _log_tracebacks(verbose: bool) -> None:
    """What user code raised may be the fault of some rows alone and end no command: its traceback is logged."""
    import logging

    logger = logging.getLogger("gymdata")
    logger.handlers = [logging.StreamHandler()] if verbose else []
    logger.setLevel(logging.DEBUG if verbose else logging.NOTSET)


def main(argv: list[str]) -> int:
    """Run one command; returns its exit code. A traceback is shown only with ``-v``.

    What readers had to leave out is said on stderr when it is found, and makes an exit code of 0 into 1.
    """
    remember_command(argv)
    with reading(report=lambda line: note(f"warning: {line}")) as found:
        code = _main(argv)
    return code or (EXIT_FAULTS if found.damage else EXIT_OK)


def _refused_value(error: Exception) -> str | None:
    """The wording of a flag's value that pydantic refuses, which is that of a setting; None for any other error."""
    faults, names = getattr(error.__cause__, "errors", None), getattr(getattr(error, "param", None), "opts", None)
    if faults is None or not names:
        return None
    from gymdata.settings import wanted

    fault = faults()[0]
    return str(UsageError.bad_value(" / ".join(names), fault["input"], wanted(fault)))


def _main(argv: list[str]) -> int:
    verbose = "-v" in argv or "--verbose" in argv
    _log_tracebacks(verbose)
    try:
        command = next((word for word in argv if not word.startswith("-")), None)
        result: Any = build(command)(args=rewritten(command, argv), standalone_mode=False, prog_name="gymdata")
        if result == EXIT_INTERRUPTED:
            # Typer makes this, without a word, of a Ctrl-C that the command did not answer itself.
            sys.stderr.write("interrupted\n")
    except GymdataError as error:
        if verbose:
            import traceback

            sys.stderr.write(printable(redacted(traceback.format_exc())))
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return error.exit_code
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        text = printable(redacted(_refused_value(error) or error.format_message()))
        if not argv:
            # Nothing was asked: the message is the help itself.
            sys.stderr.write(f"{text}\n")
        elif text:
            known = f" {command}" if command in COMMANDS else ""
            sys.stderr.write(f"error: {text}\n  → gymdata{known} --help\n")
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is not a fault.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, OSError) as error:
        if verbose:
            raise
        if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
            # Python's, numpy's, Arrow's, or the system's.
            sys.stderr.write(
                f"error: out of memory{f' ({error})' if str(error) else ''}\n  → what was written is whole: free memory, "
                "raise this process's limit, or give the command less at a time, and run it again\n"
            )
            return EXIT_OUTSIDE
        # A disk or folder that refuses, wherever it was met.
        where = f"{error.filename}: " if error.filename is not None else ""
        sys.stderr.write(f"error: {printable(f'{where}{error.strerror or error}')}\n")
        return EXIT_OUTSIDE
    except Exception as error:  # the last resort: a defect of ours becomes one line, and -v shows it whole
        if verbose:
            raise
        if isinstance(error, ModuleNotFoundError) and (missing := UsageError.missing_module(error)) is not None:
            sys.stderr.write(f"error: {printable(str(missing))}\n")
            return missing.exit_code
        sys.stderr.write(
            f"error: unexpected {type(error).__name__}: {printable(redacted(str(error)))}\n"
            "  → this is a defect; run again with -v to see where\n"
        )
        return EXIT_OUTSIDE
    return result if isinstance(result, int) else 0
