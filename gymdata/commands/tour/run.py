"""``gymdata tour``: real rollouts in a folder of the user's, and six questions with the command that answers each.

Invariants: every answer is what the command printed, run as a process of its own on the copied files; a file of the tour
that is whole is not written again; nothing outside the output folder changes, and removing it undoes the tour.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tomllib
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from gymdata.errors import EXIT_FAULTS, EXIT_OK, StoreError
from gymdata.public import Figures, Report, Row
from gymdata.store.paths import RUN_JSON, local_output, read_facts
from gymdata.store.run_json import replacing, temporary_of
from gymdata.workers import python_module


@dataclass(frozen=True, slots=True)
class TourStep:
    """One question: its ``command``, what to ``look_at`` in the answer, the ``page`` of ``gymdata view`` that has the same,
    and, once it was run, ``answer`` (what it printed) and ``exit_code``."""

    question: str
    command: str
    look_at: str
    page: str
    answer: str = ""
    exit_code: int = EXIT_OK

    def run(self, **pipes: Any) -> TourStep:
        """The step with what its command prints, where that goes to a pipe."""
        done = subprocess.run([*python_module("gymdata.cli"), *shlex.split(self.command)[1:]], check=False, **pipes)
        return replace(self, answer=(done.stdout or "").rstrip("\n"), exit_code=done.returncode)


@dataclass(frozen=True, slots=True, repr=False)
class TourReport(Report):
    """Where the files are, how many rollouts there are, the command that shows them, and each step with its answer."""

    output: Path
    rollouts: int
    view: str
    steps: list[TourStep]

    @property
    def ok(self) -> bool:
        """Whether every command answered. Faults that it found are an answer."""
        return all(step.exit_code in (EXIT_OK, EXIT_FAULTS) for step in self.steps)

    def to_dict(self) -> Figures:
        return {**asdict(self), "output": str(self.output)}

    def rows(self) -> list[Row]:
        return [("rollouts", self.rollouts), ("questions", len(self.steps)), ("look at them", self.view)]


def tour(output: str | Path = "runs/tour") -> TourReport:
    """Copy the rollouts to ``output`` and run the command of each question. Raises StoreError for a folder of others."""
    prepared = prepare(output)
    return replace(prepared, steps=[s.run(stdout=subprocess.PIPE, encoding="utf-8") for s in prepared.steps])


def prepare(output: str | Path = "runs/tour") -> TourReport:
    """The files in ``output``, made whole, and the questions without their answers. Raises StoreError as ``tour`` does."""
    folder, samples = local_output(output), Path(str(files("gymdata.sample_data")))
    copies = {folder / path.relative_to(samples / "tour"): path for path in (samples / "tour").rglob("*.*")}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copies[folder / "tokenizer" / name] = samples / "policy" / name
    # A folder that has this one is the tour's, so it comes first.
    first = folder / "before" / RUN_JSON
    ours = first.is_file() and read_facts(first).get("run_id") == read_facts(copies[first])["run_id"]
    if not ours and any(path for path in folder.rglob("*") if not path.is_dir() and path != temporary_of(first)):
        raise StoreError(f"{folder}: is not empty and was not made by the tour", hint="give another output folder: -o")
    for path in (first, *copies):
        if not path.is_file() or path.read_bytes() != copies[path].read_bytes():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                shutil.copyfile(copies[path], temporary)
    out = shlex.quote(str(folder))
    steps = tomllib.loads(Path(__file__).with_name("steps.toml").read_text(encoding="utf-8"))["steps"]
    asked = [TourStep(**{**step, "command": step["command"].format(out=out)}) for step in steps]
    rollouts = sum(part["rows"] for run in ("before", "after") for part in read_facts(folder / run / RUN_JSON)["files"])
    return TourReport(folder, rollouts, f"gymdata view {out} --tokenizer {out}/tokenizer", asked)
