"""``gymdata tour``: real rollouts in a folder of the user's, and six questions with the command that answers each.

Invariants: every answer is what the command printed, run as a process of its own on the copied files; a file of the tour
that is whole is not written again; nothing outside the output folder changes, and removing it undoes the tour.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path

from gymdata.errors import EXIT_FAULTS, EXIT_OK, StoreError
from gymdata.public import Figures, Report, Row
from gymdata.store.paths import RUN_JSON, local_output, read_facts
from gymdata.store.run_json import replacing, temporary_of
from gymdata.workers import python_module

#: Runs of the same 25 held-out tasks by the shipped policy, before and after a round of DPO, and their tokenizer.
RUNS = ("before", "after")
TOKENIZER = "tokenizer"
#: Rollouts of ``before``: one that a server rendered again between its turns, and a right one.
BROKEN, BEST = "33c3147b33330a6028d2a02f4404c426", "3a5ffb1e5bcf637ec9c2ba7a31397e4b"

#: Verdicts (a ranking below 3.5 is for the first) that contradict the rewards.
_JUDGED = (
    "SELECT c.task_id, a.reward AS reward_1, b.reward AS reward_2, raw FROM comparisons c "
    "JOIN rollouts a ON a.rollout_id = rollout_i JOIN rollouts b ON b.rollout_id = rollout_j "
    "WHERE sign(a.reward - b.reward) <> sign(3.5 - ranking) ORDER BY ALL"
)


@dataclass(frozen=True, slots=True)
class TourStep:
    """One question: ``command`` (its words), what to ``look_at`` in the answer, the ``page`` of ``gymdata view`` that has
    the same, and, once it was run, ``answer`` (what it printed) and ``exit_code``."""

    question: str
    command: list[str]
    look_at: str
    page: str
    answer: str = ""
    exit_code: int = EXIT_OK


@dataclass(frozen=True, slots=True, repr=False)
class TourReport(Report):
    """Where the files are, how many rollouts of which runs, and each step with its answer."""

    output: Path
    rollouts: int
    view: list[str]
    steps: list[TourStep]

    @property
    def ok(self) -> bool:
        """Whether every command answered. Faults that it found are an answer."""
        return all(step.exit_code in (EXIT_OK, EXIT_FAULTS) for step in self.steps)

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.ok else max(step.exit_code for step in self.steps)

    def to_dict(self) -> Figures:
        steps = [{**asdict(step), "command": shlex.join(step.command)} for step in self.steps]
        return {"output": str(self.output), "rollouts": self.rollouts, "view": shlex.join(self.view), "steps": steps}

    def rows(self) -> list[Row]:
        return [
            ("rollouts", self.rollouts),
            ("questions", len(self.steps)),
            ("look at them", shlex.join(self.view)),
            ("remove them", f"rm -r {shlex.quote(str(self.output))}"),
        ]


def tour(output: str | Path = "runs/tour") -> TourReport:
    """Copy the rollouts to ``output`` and run the command of each question. Raises StoreError for a folder that holds
    something else."""
    prepared = prepare(output)
    return replace(prepared, steps=[ask(step) for step in prepared.steps])


def prepare(output: str | Path = "runs/tour") -> TourReport:
    """The files in ``output``, made whole, and the questions without their answers. Raises StoreError as ``tour`` does."""
    folder = local_output(output)
    _refuse_foreign(folder)
    for name, source in _files().items():
        if _is_copy(target := folder / name, source):
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as temporary:
                temporary.write_bytes(source.read_bytes())
        except OSError as error:
            raise StoreError.from_os(target, error) from error
    rollouts = sum(file["rows"] for run in RUNS for file in read_facts(folder / run / RUN_JSON)["files"])
    view = ["gymdata", "view", str(folder), "--tokenizer", str(folder / TOKENIZER)]
    return TourReport(folder, rollouts, view, _steps(folder))


def ask(step: TourStep) -> TourStep:
    """The step with what its command prints."""
    done = subprocess.run(process(step.command), stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False)
    return replace(step, answer=done.stdout.rstrip("\n"), exit_code=done.returncode)


def process(command: Sequence[str]) -> list[str]:
    """The words that start ``command`` with this Python."""
    return [*python_module("gymdata.cli"), *command[1:]]


def _steps(folder: Path) -> list[TourStep]:
    before, after = (str(folder / run) for run in RUNS)
    tokenizer_flags = ["--tokenizer", str(folder / TOKENIZER)]
    return [
        TourStep(
            "Which tasks can still be learned from?",
            ["gymdata", "query", ":mixed-tasks", before],
            "A task whose rollouts are all right or all wrong teaches nothing: these are the mixed ones, with the mean "
            "reward of their six rollouts. `gymdata query --list` has more such statements, and any SELECT works.",
            "/?by=group&mixed=1",
        ),
        TourStep(
            "Why did this rollout break?",
            ["gymdata", "show", before, BROKEN[:8], *tokenizer_flags],
            "The program that made these rollouts sent chat messages, so its server wrote the first call out again and "
            "tokenised it differently: ⟦…⟧ marks the text whose ids changed. Trained as one sequence, it would hold tokens "
            "that were never sampled.",
            f"/rollout?id={BROKEN}",
        ),
        TourStep(
            "What did the judge get wrong?",
            ["gymdata", "query", _JUDGED, before],
            "Each row is a comparison whose verdict is not what the rewards say: ties between a right and a wrong answer. "
            "`raw` is all that the judge wrote.",
            "/comparisons",
        ),
        TourStep(
            "Which tokens would be trained?",
            ["gymdata", "show", before, BEST[:8], "--tokens", *tokenizer_flags],
            "Only what the policy sampled is trained: these tokens are colored by probability on a terminal, and listed "
            "with position, id and logprob in a pipe. The question and the tool's result are context.",
            f"/rollout?id={BEST}",
        ),
        TourStep(
            "Is the second run better than the first?",
            ["gymdata", "report", before, after, "-o", str(folder / "compare.html")],
            "The difference is paired by task, with its 95 % interval; one that excludes zero is no luck of the draw. "
            "compare.html has the tasks that went up and down.",
            "/",
        ),
        TourStep(
            "What can be trained from it?",
            [
                *("gymdata", "pairs", before, "--strategy", "all", "--max-pairs-per-task", "4", "--breaks", "drop"),
                *("-o", str(folder / "pairs"), "--overwrite"),
            ],
            "Candidates that were dropped are counted by reason. `gymdata train-dpo` takes the folder; `gymdata experience` "
            "makes sequences with advantages of the same rollouts, and train-sft and train-kto take the run itself.",
            "/pairs",
        ),
    ]


def _files() -> dict[Path, Path]:
    """The files to copy, by their path in the output folder."""
    source = Path(str(files("gymdata.sample_data")))
    paths = sorted(path for path in (source / "tour").rglob("*") if path.is_file())
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return {path.relative_to(source / "tour"): path for path in paths} | {
        Path(TOKENIZER, name): source / "policy" / name for name in names
    }


def _refuse_foreign(folder: Path) -> None:
    """A folder with anything in it that the tour did not make is left alone."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    tour = {folder / name: source for name, source in _files().items()}
    run_json = folder / RUNS[0] / RUN_JSON
    if not run_json.is_file():
        # A tour that was interrupted before that file was there: nothing but whole copies, and one that was begun.
        begun = set(map(temporary_of, tour))
        paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        if folder.is_dir() and all(path in begun or _is_copy(path, tour.get(path)) for path in paths):
            return
    elif read_facts(run_json).get("run_id") == json.loads(tour[run_json].read_bytes())["run_id"]:
        return
    raise StoreError(f"{folder}: is not empty and was not made by the tour", hint="give another output folder: -o")


def _is_copy(path: Path, source: Path | None) -> bool:
    plain = path.is_file() and not path.is_symlink()
    return plain and source is not None and path.read_bytes() == source.read_bytes()
