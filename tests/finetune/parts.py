"""Config files, and parts at the harness's ports whose every call can be counted and cut short.

gymdata's own commands stay real.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gymdata.cli.main import check_words, main
from gymdata.commands.finetune.plan import Judging, Plan, Validation
from gymdata.commands.finetune.port import CollectOrder, TrainingJob
from gymdata.commands.finetune.settings import EpochsTrainer, FinetuningSection
from gymdata.curriculum import CurriculumConfig
from gymdata.errors import GymdataError
from gymdata.progress import Progress
from tests.rollout_files import rollout, write_run


class Crash(BaseException):
    """Stands for the end of the process: nothing may catch it."""


@dataclass
class Calls:
    """Counts finished calls by name, and crashes before or after the call number ``at`` (from 0)."""

    at: int = -1
    after: bool = False
    begun: int = 0
    done: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def call(self, name: str) -> Any:
        mine, self.begun = self.begun, self.begun + 1
        if mine == self.at and not self.after:
            raise Crash
        yield
        self.done[name] += 1
        if mine == self.at:
            raise Crash


class Commands:
    """gymdata's commands, run in this process."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def run(self, words: Sequence[str], log: Path, progress: Progress) -> Mapping[str, Any]:
        folder = next(Path(word) for word in words[1:] if "epoch-" in word)
        epoch = next(part for part in folder.parts if part.startswith("epoch-"))
        with self.calls.call(f"{epoch} {words[0]}"):
            if words[0] == "audit":  # without a model
                check_words(words)
                return {"kl_k1": 0.25, "kl_k3": 0.5, "tokens": 10, "rollouts": 2, "exit_code": 1}
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as said:
                code = main([*words, "--json"])
            if code not in (0, 1) or not out.getvalue():
                raise GymdataError(f"{words[0]}: {said.getvalue()}")
            return {**json.loads(out.getvalue().splitlines()[-1]), "exit_code": code}


#: Scores of a task's four rollouts: which tasks have variance, and how hard they are.
SCORES = {
    "easy": (1.0, 1.0, 1.0, 0.0),
    "even": (1.0, 1.0, 0.0, 0.0),
    "hard": (1.0, 0.0, 0.0, 0.0),
    "solved": (1.0, 1.0, 1.0, 1.0),
    "void": (None, 1.0, 0.0, None),
}


class Builder:
    """Literal rollouts: task ``name`` has the scores of ``scores``; where a judge scores, only their texts tell."""

    def __init__(
        self, calls: Calls, scores: Mapping[str, Sequence[float | None]] = SCORES, *, judged: bool = False
    ) -> None:
        self.calls, self.scores, self.judged = calls, scores, judged
        self.orders: list[CollectOrder] = []

    def collect(self, order: CollectOrder, progress: Progress) -> None:
        with self.calls.call(f"{order.output.parent.name} {order.output.name}"):
            self.orders.append(order)
            version = order.policy_version
            rows = [
                rollout(
                    task, index, None if self.judged else score, [([1, 3 + number], [20 + index, 2])],
                    text=f"{task} {index} q={2 + (score or 0.0)}",
                    rollout_id=f"{order.run_id}-{task}-{index}", group_id=f"{order.run_id}-{task}", run_id=order.run_id,
                    policy_version=version,
                )
                for number, (task, scores) in enumerate(self.scores.items())
                for index, score in enumerate(scores)
            ]  # fmt: skip
            write_run(order.output, rows)


class Adapter:
    """Jobs that leave a model folder at once. ``failures``: what the next jobs raise instead."""

    def __init__(self, calls: Calls, kind: str = "pairs", failures: Sequence[Exception] = ()) -> None:
        self.calls, self.kind, self.failures = calls, kind, list(failures)
        self.jobs: list[TrainingJob] = []

    def data(self, algorithm: str) -> str:
        return self.kind

    def train(self, job: TrainingJob, progress: Progress) -> None:
        with self.calls.call(f"epoch-{job.epoch:03d} train"):
            self.jobs.append(job)
            if self.failures:
                raise self.failures.pop(0)
            job.output.mkdir(parents=True, exist_ok=True)
            (job.output / "config.json").write_text("{}")


class Watched:
    """Remembers what the loop says."""

    def __init__(self) -> None:
        self.counts: list[Mapping[str, float]] = []
        self.stages: list[tuple[int, str]] = []
        self.rows: list[Mapping[str, Any]] = []
        self.messages: list[str] = []

    def update(self, **counts: float) -> None:
        self.counts.append(counts)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def stage(self, epoch: int, name: str) -> None:
        self.stages.append((epoch, name))

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)


def plan(
    output: Path,
    calls: Calls,
    *,
    validation: Builder | None = None,
    curriculum: Mapping[str, Any] | None = None,
    judging: Judging | None = None,
    served: bool = False,
    kl: bool = False,
    identity: Mapping[str, Any] | None = None,
    **loop: Any,
) -> Plan:
    """A plan over parts of this module. ``loop``: keys of the finetuning section."""
    section = FinetuningSection.model_validate(
        {"reward_function": {"name": "numeric"}, "num_epochs": 2, "algorithm": "dpo", **loop}
    )

    return Plan(
        output=output, tasks="tasks.jsonl", start=output.parent / "start", served=served, reward=("numeric",),
        judging=judging, curriculum=CurriculumConfig(**({"enabled": False} if curriculum is None else curriculum)),
        loop=section, commands=Commands(calls),
        trainer=EpochsTrainer(pairs={"strategy": "all"}, measure_kl=512 if kl else 0),
        validation=Validation("heldout.jsonl", validation, {}, 2, 0.5, ("numeric",), judging) if validation else None,
        write_page=None, identity=identity or {"tasks": "hash"},
    )  # fmt: skip


ROOT = Path(__file__).parents[2]


MINIMAL: dict[str, Any] = {
    "llms": {"policy": {"_type": "vllm", "model_name": str(ROOT / "sample_data" / "policy")}},
    "eval": {"general": {"max_concurrency": 16, "dataset": {"_type": "jsonl", "file_path": "tasks.jsonl"}}},
    "trajectory_builders": {"builder": {"_type": "collect", "num_generations": 2}},
    "trainer_adapters": {"adapter": {"_type": "trl", "rl": {"learning_rate": "1e-6"}}},
    "trainers": {"trainer": {"_type": "epochs"}},
    "finetuning": {
        "enabled": True, "trainer": "trainer", "trajectory_builder": "builder", "trainer_adapter": "adapter",
        "reward_function": {"name": "numeric"}, "target_functions": ["<workflow>"], "target_model": "policy",
        "num_epochs": 10, "output_dir": "out",
        "curriculum_learning": {"enabled": True, "initial_percentile": 0.3, "increment_percentile": 0.2,
                                "expansion_interval": 5, "min_reward_diff": 0.1, "sort_ascending": False,
                                "random_subsample": None},
    },
}  # fmt: skip


def write(folder: Path, change: Any = None, **sections: Any) -> Path:
    values = json.loads(json.dumps(MINIMAL)) | sections
    if change is not None:
        change(values)
    (folder / "tasks.jsonl").write_text('{"task_id": "a", "prompt": "1+1?", "answer": "2"}\n')
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


BUILDER = f"{Path(__file__).parent / 'deterministic.py'}:Builder"


def by_rule(folder: Path, output: Path, adapter: Mapping[str, Any], **loop: Any) -> Path:
    """A configuration whose engine answers by rule and whose trainer is ``adapter``. ``loop``: keys of its section."""
    data = ROOT / "sample_data"
    sections = {
        "llms": {"policy": {"model_name": str(data / "policy")}},
        "eval": {
            "general": {"dataset": str(data / "tasks" / "train.jsonl")},
            "evaluators": {"right": {"_type": "reward", "rewards": ["numeric"]}},
        },
        "trajectory_builders": {"b": {"_type": BUILDER}},
        "trainer_adapters": {"t": dict(adapter)},
        "trainers": {"loop": {"_type": "epochs", "measure_kl": 0}},
        "finetuning": {"reward_function": {"name": "right"}, "output_dir": str(output), **loop},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def counting(*more: str) -> dict[str, Any]:
    """A trainer that copies the model and counts the lines that it was given."""
    words = " && ".join(["cp -r {model}/. {output}", "wc -l < {data} > {output}/lines", *more])
    return {"_type": "command", "format": "trl-preference", "command": ["sh", "-c", words]}
