"""``gymdata finetune``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymdata.commands.finetune.settings import FinetuneFlags
from gymdata.errors import UsageError
from gymdata.public import rate_text

from .console import Watch, command_words, finish, note, show
from .flags import Json, Overwrite, with_flags

if TYPE_CHECKING:
    from gymdata.commands.finetune.port import EpochRow

_CONFIG = "Configuration"  # title in --help
_Config = Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="Configuration file.")]
_ConfigFile = Annotated[
    Path | None, typer.Option("--config_file", "--config-file", help="The same as an option.", rich_help_panel=_CONFIG)
]
_Override = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--override",
        metavar="KEY VALUE",
        rich_help_panel=_CONFIG,
        help="Set a dotted key; repeatable. A key without a section belongs to finetuning.",
    ),
]
#: Published with underscores.
_NAMES = {
    "validation_dataset": ["--validation-dataset", "--validation_dataset"],
    "validation_interval": ["--validation-interval", "--validation_interval"],
    "validation_config": ["--validation-config", "--validation-config-file", "--validation_config_file"],
    "endpoint_timeout": ["--endpoint-timeout", "--endpoint_timeout"],
    "result_json_path": ["--result-json-path", "--result_json_path"],
    "result_file": ["--result-file"],
    "output": ["--output"],
}


@with_flags(FinetuneFlags, _NAMES, file=False)
def finetune(
    config: _Config = None,
    config_file: _ConfigFile = None,
    override: _Override = None,
    *,
    settings: FinetuneFlags,
    overwrite: Overwrite = False,
    json: Json = False,
) -> int:
    """The same command again resumes."""
    from gymdata.commands.finetune.run import finetune as run

    overrides = [pair(text) for text in override or []]
    if (config is None) == (config_file is None):
        for key, value in overrides if config is None else ():
            if "." not in key and Path(value).suffix in (".yaml", ".yml"):
                pair(key)  # -o FOLDER CONFIG.yaml: the configuration was taken for the value
        fault = "given twice" if config is not None and config_file is not None else "no configuration given"
        raise UsageError(fault, hint="gymdata finetune CONFIG.yaml; sample_data/finetune.yaml is an example")
    with EpochLines() as lines:
        report = run(
            config or config_file or "",
            overrides,
            **dict(settings),
            overwrite=overwrite,
            watch=lines,
            command=command_words(),
        )
    return finish(report, "finetune", json=json)


def joined_overrides(words: Sequence[str]) -> list[str]:
    """``-o KEY VALUE`` as ``-o KEY=VALUE``: the parser has no repeatable option with two values."""
    remaining, args = list(words), []
    while remaining:
        word = remaining.pop(0)
        args.append(word)
        if word in ("-o", "--override") and remaining and "=" not in remaining[0]:
            # Another option begins with a hyphen, as values such as -1 do.
            key = remaining.pop(0)
            args.append(f"{key}={remaining.pop(0)}" if remaining and not re.match(r"-[^\d.]", remaining[0]) else key)
    return args


def pair(text: str) -> tuple[str, str]:
    """(key, value). Raises UsageError when there is no value, or a path in the place of the key."""
    key, equals, value = text.partition("=")
    is_path = "/" in key or key.startswith((".", "~")) or key.endswith((".yaml", ".yml"))
    if is_path or not equals:
        raise UsageError.bad_value(
            "-o", key, "a key and a value, as in -o num_epochs 8", hint="-o is KEY VALUE here; the folder is --output"
        )
    return key, value


class EpochLines(ExitStack):
    """Displays the loop: the progress of each stage as of a command, and a line for each epoch."""

    _watch: Watch | None = None

    def stage(self, epoch: int, name: str) -> None:
        self.close()
        label = f"epoch {epoch}: {name}"
        self._watch = self.enter_context(Watch(label))
        if not self._watch.has_bar:
            note(label)

    def update(self, **counts: float) -> None:
        if self._watch is not None:
            self._watch.update(**counts)

    def message(self, text: str) -> None:
        (self._watch.message if self._watch is not None else note)(text)

    def epoch(self, row: EpochRow) -> None:
        self.close()
        self._watch = None
        note(line(row))


def line(row: EpochRow) -> str:
    """An epoch in one line."""
    bounds, held_out = row["reward_ci95"], row.get("validation")
    cells = {
        "epoch": str(row["epoch"]),
        "reward": row["reward_mean"],
        "95 %": f"{bounds[0]:.3f}–{bounds[1]:.3f}" if bounds else None,
        "groups": row["groups"],
        "trained on": row["groups_selected"] if not row.get("skipped") else "skipped",
        "share": row["curriculum"].get("current_percentile"),
        "tokens": row.get("trained_tokens"),
        "loss": row.get("training_loss"),
        "KL": row.get("kl_to_start"),
        "held-out": rate_text(held_out) if held_out else None,
    }
    return "  ".join(f"{name} {show(value)}" for name, value in cells.items() if value is not None)
