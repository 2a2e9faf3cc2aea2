"""Settings of ``gymdata sweep``, and the cells that they make."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pydantic

from gymdata.errors import UsageError
from gymdata.settings import Config

#: A value of a grid, as a command line has it.
Value = str | int | float | bool
_SEED, _OUTPUT = "seed", "output"
#: What a folder is not called by.
_ODD = re.compile(r"[^\w.+-]+")


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid with one seed. ``commands``: their words after ``gymdata``; ``result``: the evaluation's run."""

    values: dict[str, Value]
    seed: int | None
    folder: Path
    commands: list[list[str]]
    result: Path

    @property
    def name(self) -> str:
        return self.folder.name


class SweepConfig(Config):
    """``gymdata sweep``: keys of its file."""

    given_as: ClassVar[Mapping[str, str]] = {"steps": "the list of commands in the file"}

    output: Path | None = pydantic.Field(None, description="Folder of the sweep (default: runs/NAME-OF-THE-FILE).")
    steps: list[str] = pydantic.Field(
        min_length=1,
        description="Commands in order; {NAME} is a value of the grid, {seed} and {output} are the cell's.",
    )
    grid: dict[str, list[Value]] = pydantic.Field(
        default_factory=dict, description="Name → values; every combination is a cell."
    )
    seeds: list[int] = pydantic.Field(default_factory=list, description="Seeds; every combination runs with each.")
    result: str = pydantic.Field(
        "{output}/eval", description="Run whose rewards are compared, such as that of an eval."
    )
    baseline: dict[str, Value] = pydantic.Field(
        default_factory=dict,
        description="Combination that the others are compared with, as {loss: ipo} (default: the first).",
    )

    @pydantic.field_validator("seeds", mode="before")
    @classmethod
    def _reject_count(cls, value: object) -> object:
        if isinstance(value, int):
            raise ValueError("a list with each seed, such as [1, 2, 3]")
        return value

    def cells(self, output: Path) -> list[Cell]:
        """Every combination with every seed, in the file's order. Raises UsageError for a name that no step has, values
        that are none of the grid's, and two cells with one folder."""
        for name in (*self.grid, *((_SEED,) if self.seeds else ())):
            if name == _OUTPUT or (name == _SEED and name in self.grid):
                raise UsageError(f"grid: {name!r} is a name of its own", hint="give the values another name")
            if not any(f"{{{name}}}" in step for step in self.steps):
                raise UsageError(f"no step has {{{name}}}: all its cells would be the same", hint="add it to a step")
        if not any(f"{{{_OUTPUT}}}" in step for step in self.steps):
            raise UsageError(
                "no step has {output}: all cells would write to the same place", hint="write -o {output}/NAME"
            )
        for name, value in self.baseline.items():
            if value not in self.grid.get(name, ()):
                raise UsageError.bad_value(f"baseline: {name}", value, f"one of {self.grid.get(name, [])}")
        cells: dict[Path, Cell] = {}
        for point in itertools.product(*self.grid.values()):
            for seed in self.seeds or (None,):
                cell = self._cell(dict(zip(self.grid, point, strict=True)), seed, output)
                if cell.folder in cells:
                    raise UsageError(f"grid: two cells are called {cell.name}", hint="give each value once")
                cells[cell.folder] = cell
        return list(cells.values())

    def _cell(self, values: dict[str, Value], seed: int | None, output: Path) -> Cell:
        named = values if seed is None else {**values, _SEED: seed}
        parts = [f"{name}-{_ODD.sub('-', str(value)).strip('-')}" for name, value in named.items()]
        folder = output / ("_".join(parts) or "cell")
        texts = {f"{{{name}}}": str(value) for name, value in named.items()} | {f"{{{_OUTPUT}}}": str(folder)}

        def filled(text: str) -> str:
            for placeholder, value in texts.items():
                text = text.replace(placeholder, value)
            return text

        # Split first: a value with a space stays one word.
        commands = [[filled(word) for word in shlex.split(step)] for step in self.steps]
        return Cell(
            values, seed, folder, [c[1:] if c[0] == "gymdata" else c for c in commands], Path(filled(self.result))
        )
