"""The ``gymdata`` command: finds the command, loads only that one, and turns errors into a message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click
import typer
from typer.core import TyperGroup

from gymdata.errors import EXIT_INTERRUPTED, EXIT_OUTSIDE, GymdataError

#: Command → (module of this package, function), in the order of the path from tasks to a checkpoint.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "collect": ("collect", "collect", "Sample rollouts of tasks with a policy, token ids and log-probabilities kept."),
    "validate": ("validate", "validate", "Check rollouts or pairs, token for token, and name every fault."),
    "score": ("score", "score", "Score saved rollouts again without sampling."),
    "pairs": ("pairs", "pairs", "Build preference pairs from scored rollouts."),
    "train-dpo": ("train_dpo", "train_dpo", "Train with DPO on the exact tokens of saved pairs."),
    "query": ("query", "query", "Run DuckDB SQL over rollouts, turns, messages, pairs and failures."),
    "demo": ("demo", "demo", "Run the whole path on the shipped policy and tasks, and measure the rise."),
}


class LazyGroup(TyperGroup):
    """Loads a command's module only when that command is run, so that --help and light commands answer at once."""

    _running = False

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        self._running = True
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function, summary = COMMANDS[cmd_name]
        if not self._running:
            return click.Command(cmd_name, help=summary, short_help=summary)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        body = getattr(importlib.import_module(f"gymdata_cli.{module}"), function)
        single.command(cmd_name, **getattr(body, "command_settings", {}))(body)
        return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Turn LLM rollouts into training data, once, on disk, and train from those files.",
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
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
        result: Any = app(args=argv, standalone_mode=False, prog_name="gymdata")
    except GymdataError as error:
        if verbose:
            import traceback

            traceback.print_exc()
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is not a fault.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if verbose:
            raise
        sys.stderr.write(
            f"error: unexpected {type(error).__name__}: {error}\n  → this is a defect; run again with -v to see where\n"
        )
        return EXIT_OUTSIDE
    return result if isinstance(result, int) else 0
