"""The ``gymdata`` command: finds the command, loads only that one, and turns errors into a message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer

from gymdata.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, EXIT_USAGE, GymdataError, UsageError

#: Command → (module of this package, function, what the list of commands says: at most 60 characters, or it is cut), in
#: the order of the path from tasks to a checkpoint.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "check": ("check", "check", "Probe a chat template, or a server, before sampling."),
    "collect": ("collect", "collect", "Sample rollouts with a policy; token ids and log-probs kept."),
    "validate": ("validate", "validate", "Check rollouts or pairs by token, and name every fault."),
    "audit": ("audit", "audit", "Prove saved log-probs against a model, and name causes."),
    "score": ("score", "score", "Score saved rollouts again without sampling."),
    "judge": ("judge", "judge", "Compare rollouts pairwise with a judge, for rewards."),
    "pairs": ("pairs", "pairs", "Build preference pairs from scored rollouts."),
    "experience": ("experience", "experience", "Turn scored rollouts into sequences with advantages."),
    "filter": ("filter", "filter_", "Keep the rollouts that pass conditions; counts, and why."),
    "train-sft": ("train", "train_sft", "Train on the exact tokens of the best rollouts."),
    "train-dpo": ("train", "train_dpo", "Train with DPO on the exact tokens of saved pairs."),
    "train-kto": ("train", "train_kto", "Train with KTO on the tokens of good and bad rollouts."),
    "train-reward": ("train", "train_reward", "Train a reward model on saved pairs, and measure it."),
    "train-rl": ("train", "train_rl", "Train with batch RL on saved experiences, ratios checked."),
    "finetune": ("finetune", "finetune", "Run epochs of collect, train and validate from one file."),
    "import": ("import_", "import_", "Bring other projects' rollouts or pairs in."),
    "export": ("export", "export", "Write rollouts in another project's format."),
    "query": ("query", "query", "Run DuckDB SQL over rollouts and all other tables."),
    "serve-genrm": ("serve_genrm", "serve_genrm", "Serve pairwise judging over HTTP to online trainers."),
    "demo": ("demo", "demo", "Run the whole path on the shipped policy and tasks."),
}


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
            body = getattr(importlib.import_module(f"gymdata_cli.{module}"), function)
            app.command(name)(body)
        else:
            app.command(name, help=summary)(_named_only)
    return app


def rewritten(command: str | None, argv: list[str]) -> list[str]:
    """The words as the parser takes them: a command's module may have a ``rewrite`` for what it has no form for."""
    if command not in COMMANDS:
        return argv
    rewrite = getattr(importlib.import_module(f"gymdata_cli.{COMMANDS[command][0]}"), "rewrite", None)
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


def main(argv: list[str]) -> int:
    """Run one command; returns its exit code. A traceback is shown only with ``-v``."""
    verbose = "-v" in argv or "--verbose" in argv
    try:
        command = next((word for word in argv if not word.startswith("-")), None)
        result: Any = build(command)(args=rewritten(command, argv), standalone_mode=False, prog_name="gymdata")
        if result == EXIT_INTERRUPTED:
            # Typer makes this, without a word, of a Ctrl-C that the command did not answer itself.
            sys.stderr.write("interrupted\n")
    except GymdataError as error:
        if verbose:
            import traceback

            traceback.print_exc()
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        text = error.format_message()
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
    except OSError as error:
        # A disk or folder that refuses, wherever it was met.
        if verbose:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        sys.stderr.write(f"error: {where}{error.strerror or error}\n")
        return EXIT_OUTSIDE
    except Exception as error:  # the last resort: a defect of ours becomes one line, and -v shows it whole
        if verbose:
            raise
        if isinstance(error, ModuleNotFoundError) and (missing := UsageError.missing_module(error)) is not None:
            sys.stderr.write(f"error: {missing}\n")
            return missing.exit_code
        sys.stderr.write(
            f"error: unexpected {type(error).__name__}: {error}\n  → this is a defect; run again with -v to see where\n"
        )
        return EXIT_OUTSIDE
    return result if isinstance(result, int) else 0
