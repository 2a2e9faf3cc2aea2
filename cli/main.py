"""The ``gymdata`` command: finds the command, loads only that one, and turns errors into a message and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import itertools
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import gymdata
from gymdata.errors import (
    COMMAND_LINE,
    EXIT_FAULTS,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OUTSIDE,
    EXIT_USAGE,
    DataError,
    GymdataError,
    UsageError,
    printable,
)
from gymdata.progress import LEVELS, printed, start_logging, stop_logging
from gymdata.store.paths import EXPERIMENT, TAGS
from gymdata.store.reading import reading

from .console import answered, command_words, emit_json, folded, note, remember_command
from .examples import EXAMPLES
from .flags import with_common

_LOG = logging.getLogger("gymdata")
#: Set by the script that a shell completes with.
_COMPLETION = "_GYMDATA_COMPLETE"

#: Group → command → (module of this package, function, what it does: at most 60 characters, or the list of commands cuts
#: it), in the order of the path from tasks to a checkpoint.
GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "Collect": {
        "collect": ("collect", "collect", "Sample rollouts with a policy, with token IDs and logprobs."),
        "record": ("record", "record", "Record agents that call OpenAI's or Anthropic's API."),
        "serve": ("serve", "serve", "Serve a model with vLLM, set up for collecting."),
        "check": ("check", "check", "Probe a template, a server or an environment, before use."),
    },
    "Check": {
        "validate": ("validate", "validate", "Check rollouts or pairs by token, and report every fault."),
        "audit": ("audit", "audit", "Check saved logprobs against a model, and find causes."),
        "score": ("score", "score", "Score saved rollouts again without sampling."),
        "judge": ("judge", "judge", "Compare rollouts pairwise with a judge, for rewards."),
        "serve-genrm": ("serve_genrm", "serve_genrm", "Serve pairwise judging over HTTP to online trainers."),
        "eval": ("eval_", "eval_", "Measure a model on tasks: pass@k, by field, what regressed."),
    },
    "Build": {
        "filter": ("filter", "filter_", "Keep rollouts that pass conditions; report drops by reason."),
        "pairs": ("pairs", "pairs", "Build preference pairs from scored rollouts."),
        "experience": ("experience", "experience", "Turn scored rollouts into sequences with advantages."),
    },
    "Train": {
        "train-sft": ("train", "train_sft", "Train on the exact tokens of the best rollouts."),
        "train-dpo": ("train", "train_dpo", "Train with DPO on the exact tokens of saved pairs."),
        "train-kto": ("train", "train_kto", "Train with KTO on the tokens of good and bad rollouts."),
        "train-reward": ("train", "train_reward", "Train a reward model on saved pairs, and measure it."),
        "train-value": ("train", "train_value", "Train a critic on the returns of saved experiences."),
        "train-rl": ("train", "train_rl", "Train with batch RL on saved experiences, ratios checked."),
        "finetune": ("finetune", "finetune", "Run epochs of collect, train and validate from one file."),
        "sweep": ("sweep", "sweep", "Run a grid of settings and seeds, and compare the results."),
    },
    "Look": {
        "show": ("show", "show", "Show rollouts or pairs as people read them."),
        "view": ("view", "view", "Look at rollouts, tokens and training in the browser."),
        "report": ("report", "report", "Summarize a run, or compare two, as one HTML page."),
        "query": ("query", "query", "Run DuckDB SQL over rollouts and all other tables."),
        "ls": ("ls", "ls", "List the runs below a folder, and how far open ones are."),
    },
    "Exchange": {
        "import": ("import_", "import_", "Import rollouts or preference pairs of other projects."),
        "export": ("export", "export", "Write rollouts in another project's format."),
    },
    "Set up": {
        "docs": ("docs", "docs", "Read the documentation, topic by topic."),
        "tour": ("tour", "tour", "Look at real rollouts: six questions, then the viewer."),
        "demo": ("demo", "demo", "Run the whole path on the shipped policy and tasks."),
        "doctor": ("doctor", "doctor", "Check this install, this machine and a folder."),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}

#: Commands that read sealed files: they take ``--allow-changed``. ``validate`` reports changed files and checks them.
_READ = "audit score judge pairs experience filter finetune export report show query view"
READERS = frozenset([*_READ.split(), *(name for name in COMMANDS if name.startswith("train-"))])
#: Commands whose output a run.json describes: they take ``--experiment`` and ``--tag``.
_WRITE = "collect record audit score judge eval filter pairs experience import export finetune sweep"
WRITERS = frozenset([*_WRITE.split(), *(name for name in COMMANDS if name.startswith("train-"))])


class Groups(TyperGroup):
    """The list of commands by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), summary) for name, (_, _, summary) in commands.items()])


class OneCommand(TyperCommand):
    """A command whose help has its arguments, its options by section, and examples."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.name == "finetune":
            from .finetune import joined_overrides

            args = joined_overrides(args)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(_name(p) if p.required else f"[{_name(p)}]" for p in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params: list[Any] = self.get_params(ctx)
        if arguments := [(_name(p), p.help) for p in params if p.param_type_name == "argument"]:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        options = [param for param in params if param.param_type_name == "option"]
        # The options of every command come last, under the title that they have where there are no sections.
        for title in dict.fromkeys([*filter(None, (param.rich_help_panel for param in options)), None]):
            with formatter.section(title or "Options"):
                formatter.write_dl([param.get_help_record(ctx) for param in options if param.rich_help_panel == title])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for line in "\n".join(EXAMPLES[self.name or ""]).splitlines():
                # As it is: a folded line could not be copied.
                formatter.write(f"  {line}\n")


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def build(command: str | None) -> Any:
    """The parser with ``command`` in full and alone; for anything else all commands are listed, and none of their modules is
    loaded."""
    app = typer.Typer(
        cls=Groups,
        no_args_is_help=True,
        # Plain help: the boxes of the rich one cut long option names on narrow terminals.
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 160},
        help="Turn LLM rollouts into training data, once, on disk, and train from those files.",
        epilog="gymdata help COMMAND shows the options of a command, and examples.",
    )

    def root(version: Annotated[bool, typer.Option("-V", "--version", help="Print the version.")] = False) -> None:
        if version:
            typer.echo(f"gymdata {gymdata.__version__}")
            raise typer.Exit

    def named_only() -> None:
        """A placeholder of a command in the list of commands."""

    app.callback(invoke_without_command=True)(root)
    if command in COMMANDS:
        body, summary = body_of(command), COMMANDS[command][2]
        text = "\n\n".join(filter(None, [summary, inspect.getdoc(body)]))
        full = with_common(body, reads=command in READERS, writes=command in WRITERS)
        app.command(command, cls=OneCommand, help=text)(full)
    else:
        for name, (_, _, summary) in COMMANDS.items():
            app.command(name, help=summary)(named_only)
    return typer.main.get_command(app)


def body_of(command: str) -> Any:
    """The function of a command."""
    module, function, _ = COMMANDS[command]
    return getattr(importlib.import_module(f"gymdata.cli.{module}"), function)


def parsed(command: str, words: Sequence[str]) -> dict[str, Any]:
    """The parameters of a command in the words after its name, as the parser has them."""
    return dict(build(command).commands[command].make_context(command, list(words)).params)


def check_words(words: list[str]) -> None:
    """Raises UsageError for words after ``gymdata`` whose command, options or settings are refused before anything is read
    or done."""
    command = words[0] if words else ""
    if command not in COMMANDS:
        raise UsageError.unknown_choice("command", command, COMMANDS)
    try:
        args = parsed(command, words[1:])
    except typer.TyperException as refused:
        raise _of_parser(refused, command) from refused
    if (load := getattr(body_of(command), "load", None)) is not None:
        load(args)


def run() -> None:
    """Run the command of this process, and end it with the documented exit code."""
    # Opens streams that the caller closed (``>&-``) on the null device: else a data file would get their number, and
    # the printed output.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest number that is free.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    if _COMPLETION in os.environ:
        # A shell wants to complete a command line, whose words are in the environment.
        words = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
        build(_command_in(words))(prog_name="gymdata")
    code = main(sys.argv[1:])
    if "RANK" in os.environ:
        # One of the processes of a training, whose groups would wait in the clean-up of the interpreter, at times for
        # ever, for processes that have ended.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # Code that hangs was left behind in its thread, and may still print.
    sys.stdout = sys.stderr
    sys.exit(code)


def main(argv: list[str]) -> int:
    """Run one command; returns its exit code. A traceback is shown only with ``-v``.

    What readers had to leave out is reported on stderr, and changes an exit code of 0 to 1.
    """
    remember_command(argv)
    # Logging starts before the parser, which then refuses an unknown level.
    words = [part for word in argv for part in word.split("=", 1)]
    levels = [after for word, after in itertools.pairwise(words) if word == "--log-level"]
    level = next((level for level in LEVELS if level in levels[-1:]), None)
    start_logging(level, verbose=_is_verbose(argv))
    try:
        _LOG.info("%s", shlex.join(command_words()), extra={"printed": True})
        with _environment(), reading(report=lambda line: note(f"warning: {line}")) as context:
            code = _main(argv)
        code = code or (EXIT_FAULTS if context.damage else EXIT_OK)
        _LOG.info("ended with exit code %d", code, extra={"printed": True})
        return code
    finally:
        stop_logging()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What a command tells its child processes: that messages name flags, and what its outputs are part of."""
    before = {name: os.environ.get(name) for name in (COMMAND_LINE, EXPERIMENT, TAGS)}
    os.environ[COMMAND_LINE] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)  # user code may have removed it
            if value is not None:
                os.environ[name] = value


def _is_verbose(argv: Sequence[str]) -> bool:
    return "-v" in argv or "--verbose" in argv


def _command_in(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def _main(argv: list[str]) -> int:
    words = argv if argv[:1] != ["help"] else [*argv[1:2], "--help"]
    command = _command_in(words)
    try:
        with (parser := build(command)).make_context("gymdata", list(words)) as context:
            result = parser.invoke(context)
        return result if isinstance(result, int) else EXIT_OK
    except typer.Exit as stop:
        return stop.exit_code
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is not a fault.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except typer.TyperException as refused:
        if not argv:
            # No command was given: the message is the help itself.
            sys.stderr.write(f"{refused.format_message()}\n")
            return EXIT_USAGE
        error: GymdataError = _of_parser(refused, command)
    except KeyboardInterrupt:
        error = GymdataError("interrupted", exit_code=EXIT_INTERRUPTED)
    except Exception as caught:  # noqa: BLE001 - the last resort: a defect becomes one line, and -v shows the traceback
        error = caught if isinstance(caught, GymdataError) else _of_python(caught)
        # The log gets the whole traceback of a defect; an error that a user can fix is one line.
        level = logging.DEBUG if isinstance(caught, GymdataError) else logging.ERROR
        _LOG.log(level, "%s", type(caught).__name__, exc_info=True, extra={"printed": not _is_verbose(argv)})
    if "--json" in argv and not answered():
        emit_json({"error": error.to_dict()})
    shown = "interrupted" if error.exit_code == EXIT_INTERRUPTED else f"error: {error}"
    sys.stderr.write(f"{folded(printable(shown), sys.stderr)}\n")
    printed(shown.removeprefix("error: "), logging.ERROR)
    return error.exit_code


def _of_parser(refused: Any, command: str | None) -> UsageError:
    """The parser's errors with gymdata's wording."""
    faults, param = getattr(refused.__cause__, "errors", None), getattr(refused, "param", None)
    where = " / ".join(param.opts) if param is not None else getattr(refused, "option_name", "the command line")
    hint = " ".join(["gymdata", *([command] if command in COMMANDS else []), "--help"])
    if faults is None or param is None:
        text = refused.format_message()
        if text.startswith("Missing argument") and command in COMMANDS:
            example = re.sub(r" \\\n *", " ", EXAMPLES[command][0])
            hint = f"{example}; options: {hint}"
        elif text.startswith("No such option") and command in COMMANDS and hasattr(body_of(command), "settings"):
            hint = f"a setting without an option is given as --set KEY=VALUE; options: {hint}"
        return UsageError(text, hint=hint).at(where)
    from gymdata.settings import expected_text

    fault = faults()[0]
    if param.type_descriptor.choices:
        return UsageError.unknown_choice(where, fault["input"], map(str, param.type_descriptor.choices))
    return UsageError.bad_value(where, fault["input"], expected_text(fault), hint=hint)


def _of_python(caught: Exception) -> GymdataError:
    """An exception of Python as an error: a full disk, no memory, a missing module, or a defect."""
    from gymdata.user_code import raised_in_user_code

    # Memory of Python, numpy, Arrow, or the system.
    if isinstance(caught, MemoryError) or (isinstance(caught, OSError) and caught.errno == errno.ENOMEM):
        return GymdataError(
            f"out of memory{f' ({caught})' if str(caught) else ''}",
            hint="what was written is whole: free memory, raise this process's limit, or give the command less at a time, "
            "and run it again",
            exit_code=EXIT_OUTSIDE,
        )
    if isinstance(caught, OSError):
        # A disk or folder that refuses, wherever it was met.
        where = f"{caught.filename}: " if caught.filename is not None else ""
        error = GymdataError(f"{where}{caught.strerror or caught}", exit_code=EXIT_OUTSIDE)
        return error.at(caught.filename or "the system")
    if isinstance(caught, ModuleNotFoundError) and (missing := UsageError.missing_module(caught)) is not None:
        return missing
    if (line := raised_in_user_code(caught)) is not None:
        text = f"{type(caught).__name__}: {caught} ({line})"
        return UsageError(text, hint="-v shows the traceback", exit_code=EXIT_FAULTS)
    if isinstance(caught, EOFError):
        words = shlex.join(command_words())
        return DataError(f"{words}: a file that it reads ends early ({caught})", hint="is one cut off? -v shows where")
    if isinstance(caught, RecursionError):
        return UsageError("a file or a setting holds lists or objects hundreds of levels deep", hint="flatten it")
    hint = "this is a defect; run again with -v to see where"
    return GymdataError(f"unexpected {type(caught).__name__}: {caught}", hint=hint, exit_code=EXIT_OUTSIDE)
