"""``gymdata finetune``."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymdata.errors import UsageError, printable
from gymdata.finetune.settings import FinetuneFlags
from gymdata.public import rate_text

from .console import Watch, command_words, finish, note, prints_apart, show
from .flags import Json, Overwrite, with_flags

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from gymdata.finetune.port import EpochRow, HeldOut

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
#: Columns of the live table that a narrow terminal does without, the first to go first.
_SPARED = ("share", "groups", "KL", "tokens", "95 %", "used", "loss")


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
    from gymdata.finetune.run import finetune as run

    overrides = [pair(text) for text in override or []]
    for key, values in Counter(key for key, _ in overrides).items():
        if values > 1:
            raise UsageError(f"-o {key}: given {values} times", hint="it takes one value: give it once")
    if (config is None) == (config_file is None):
        for key, value in overrides if config is None else ():
            if "." not in key and Path(value).suffix in (".yaml", ".yml"):
                pair(key)  # -o FOLDER CONFIG.yaml: the configuration was taken for the value
        fault = "given twice" if config is not None and config_file is not None else "no configuration given"
        raise UsageError(fault, hint="gymdata finetune CONFIG.yaml; sample_data/finetune.yaml is an example")
    with LiveTable() as board, prints_apart():
        report = run(
            config or config_file or "",
            overrides,
            **dict(settings),
            overwrite=overwrite,
            watch=board,
            command=command_words(),
        )
    return finish(report, "finetune", json=json)


def rewrite(words: list[str]) -> list[str]:
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


class LiveTable:
    """Displays the loop: on a terminal a live table of epochs, elsewhere a line per stage and epoch."""

    def __init__(self) -> None:
        self._rows: list[EpochRow] = []
        self._doing = ""
        self._live: Live | None = None
        self._stage = Watch("")

    def __enter__(self) -> LiveTable:
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.end()
        if self._live is not None:
            self._doing = ""
            self._refresh()
            self._live.transient = not self._rows  # a run that ended in its first epoch has only the error to show
            self._live.stop()

    def _start(self) -> None:
        """The table appears with the first stage: errors in the configuration are shown without it."""
        if self._live is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            self._live = Live(self._table(console), console=console, auto_refresh=False)
            self._live.start()

    def stage(self, epoch: int, name: str) -> None:
        self._start()
        self._doing = f"epoch {epoch}: {name}"
        self._refresh()
        if self._live is None:
            self._stage.end()
            note(self._doing)
            self._stage = Watch(self._doing)

    def update(self, **counts: float) -> None:
        if self._live is not None and (total := counts.get("total")):
            loss = f" · loss {counts['loss']:.4g}" if "loss" in counts else ""
            self._doing = self._doing.split(" · ")[0] + f" · {counts.get('done', 0):,.0f} of {total:,.0f}{loss}"
            self._refresh()
        elif self._live is None:
            self._stage.update(**counts)

    def message(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(printable(text), highlight=False)
        else:
            note(text)

    def epoch(self, row: EpochRow) -> None:
        self._start()
        self._rows.append(row)
        if self._live is None:
            note(line(row))
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(self._live.console), refresh=True)

    def _table(self, console: Console) -> Table:
        """As many columns as the terminal has room for."""
        from rich import box
        from rich.table import Table

        endless = console.options.update(max_width=1_000_000)
        for spared in range(len(_SPARED) + 1):
            table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
            names = [name for name in _COLUMNS if name not in _SPARED[:spared]]
            for name in names:
                table.add_column(name, justify="right", no_wrap=True)
            for row in self._rows:
                table.add_row(*(_COLUMNS[name](row) for name in names))
            if console.measure(table, options=endless).maximum <= console.width:
                break
        table.caption = self._doing or None
        return table


def _thousands(value: int | None) -> str:
    """84,123 as 84.1k, for the live table; the exact number is in metrics.jsonl."""
    if value is None or value < 10_000:
        return "–" if value is None else f"{value:,}"
    return f"{value / 1e3:,.1f}k" if value < 1e6 else f"{value / 1e6:,.1f}M"


def _held_out(held_out: HeldOut | None) -> str:
    if not held_out or held_out["rate"] is None:
        return "–"
    bounds = held_out["ci95"]
    interval = f" ({100 * bounds[0]:.0f}–{100 * bounds[1]:.0f})" if bounds else ""
    return f"{100 * held_out['rate']:.1f} %{interval}"


#: The live table's columns, shorter than those of a log's line.
_COLUMNS: dict[str, Callable[[EpochRow], str]] = {
    "epoch": lambda row: str(row["epoch"]),
    "reward": lambda row: show(row["reward_mean"], 3),
    "95 %": lambda row: "{:.2f}–{:.2f}".format(*row["reward_ci95"]) if row["reward_ci95"] else "–",
    "groups": lambda row: show(row["groups"]),
    "used": lambda row: "skipped" if row.get("skipped") else show(row["groups_selected"]),
    "share": lambda row: show(row["curriculum"].get("current_percentile"), 3),
    "tokens": lambda row: _thousands(row.get("trained_tokens")),
    "loss": lambda row: show(row.get("training_loss"), 3),
    "KL": lambda row: show(row.get("kl_to_start"), 3),
    "held-out": lambda row: _held_out(row.get("validation")),
}


def line(row: EpochRow) -> str:
    """An epoch in one line, for logs."""
    bounds, held_out = row["reward_ci95"], row.get("validation")
    cells = [
        ("epoch", str(row["epoch"])),
        ("reward", show(row["reward_mean"])),
        ("95 %", f"{bounds[0]:.3f}–{bounds[1]:.3f}" if bounds else "–"),
        ("groups", show(row["groups"])),
        ("trained on", show(row["groups_selected"]) if not row.get("skipped") else "skipped"),
        ("share", show(row["curriculum"].get("current_percentile"))),
        ("tokens", show(row.get("trained_tokens"))),
        ("loss", show(row.get("training_loss"))),
        ("KL", show(row.get("kl_to_start"))),
        ("held-out", rate_text(held_out) if held_out else "–"),
    ]
    return "  ".join(f"{name} {value}" for name, value in cells if value != "–")
