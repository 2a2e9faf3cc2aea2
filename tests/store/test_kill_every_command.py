"""Every command that writes an output, killed in each state that its files pass through: the same command finishes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.formats import exported, format_named
from tests.forks import Forks, Spares, forks
from tests.judge_server import Behaviour, judge_server
from tests.kills import differences, tell
from tests.model_files import write_adapter
from tests.rollout_files import rollout, write_run

SAMPLE = Path(__file__).parents[2] / "sample_data"
CLEAN = SAMPLE / "rollouts" / "clean.jsonl"
TURNS = """
def steps(completion):
    return [float(len(m["content"] or "")) for m in completion if m["role"] == "assistant"]
"""
#: Audit events of what changes files. pyarrow's own writing has none, but what it writes to was made by ours before.
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Of what a command's words may name: {run}, {nemo}, {dpo}, {pairs},
#: {experiences}, {text}, {adapter}: inputs; {turns}: a reward function; {judge}:
#: an address; {out}: its output.
COMMANDS = {
    "pairs": "pairs {run} -o {out} --split 0.5 --seed 1",
    "experience": "experience {run} -o {out} --estimator rloo",
    "score": "score {run} -o {out} --reward regex:4",
    "score, per turn": "score {run} -o {out} --reward {turns}:steps",
    "judge": "judge {run} -o {out} --endpoint {judge} -m judge",
    "filter": "filter {run} -o {out} --where reward>0.4",
    "filter, split": "filter {run} -o {out} --split-by task --test-share 0.5",
    "filter, several inputs": "filter {run} {clean} -o {out}",
    "import": "import {nemo} -o {out} --run-id imported",
    "import of pairs": "import {dpo} -o {out} --run-id imported",
    "validate --fix": "validate {run} --fix drop -o {out}/fixed.parquet",
    "query": "query select(1) {run} -o {out}/q.parquet",
    "report": "report {run} -o {out}/r.html",
    "view --export": "view {run} --export {out}/v.html",
}
for name, form in exported().items():
    source, suffix = "{run}" if form.table == "rollouts" else f"{{{form.table}}}", form.suffixes[0]
    COMMANDS[f"export {name}"] = f"export {source} -o {{out}}/x{suffix} --format {name}"


#: Of each way to write, one: the folder of a command, single files, a run, and an export.
REPRESENTATIVES = {"pairs", "score", "import", "filter, split", "export nemo-gym"}
#: Each process of these runs a model, or draws.
SLOW = {
    "audit": "audit {clean} -m {policy} -o {out} -n 2 --write-as ref_logprobs",
    "merge_adapter": "merge_adapter {adapter} {out}",
    "tour": "tour -o {out} --no-view",
}


@dataclass
class DiedError(Exception):
    code: int


def command(words: list[str]) -> int:
    """A command, or the function that has none."""
    if words[0] == "merge_adapter":
        gymdata.merge_adapter(*words[1:])
        return 0
    return main(words)


def _run(words: list[str], root: str, at: int | None, told: str) -> int:
    """Run a command, and SIGKILL this process before its file operation number ``at`` below ``root``. A process that ends
    by itself writes to the file ``told`` which operations found files that no earlier one found, and what it imported."""
    done, imported = 0, set(sys.modules)
    # By names and sizes: a file's bytes differ between two processes, by their ids and by the time.
    states: dict[tuple[tuple[str, int], ...], int] = {}

    def operation() -> None:
        nonlocal done
        if at is None:
            states.setdefault(tuple(sorted((str(p), p.stat().st_size) for p in Path(root).rglob("*"))), done)
        elif done == at:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        inside = bool(arguments) and isinstance(arguments[0], (str, os.PathLike)) and str(arguments[0]).startswith(root)
        if inside and (event in _CHANGES or (event == "open" and arguments[2] & _WRITES)):
            operation()

    # The tour's questions are commands of their own.
    Spares([8 if words[0] == "tour" else 0], lambda _: None).install()
    null = os.open(os.devnull, os.O_WRONLY)
    err = os.open(told + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(null, 1)
    os.dup2(err, 2)
    sys.addaudithook(heard)
    # It marks where a file is whole. What a killed process wrote is there without it.
    os.fsync = lambda file: operation()
    code = command(words)
    sys.stderr.flush()
    Path(told).write_text(json.dumps([list(states.values()), [name for name in sys.modules if name not in imported]]))
    return code


@dataclass
class Processes:
    """Runs commands, each in a process of its own, which may be killed at a file operation below ``root``."""

    forks: Forks

    def run(self, words: list[str], root: Path, at: int | None = None) -> list[int]:
        """The file operations, by number, that found files (names, sizes) which no earlier one found. Raises DiedError
        when killed, before operation ``at``, and for an exit code other than 0."""
        told = root.with_name("told")
        if code := self.forks.start(_run, words, str(root), at, str(told)).wait():
            raise DiedError(code)
        operations, imported = json.loads(told.read_text())
        self.forks.load(imported)
        return list(operations)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with forks() as made:
        yield Processes(made)


def held(folder: Path) -> dict[str, Any]:
    """Every file of an output with its bytes, but for its log; of a run.json what it says of files and counts."""
    found: dict[str, Any] = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, data = str(file.relative_to(folder)), file.read_bytes()
        if name.endswith("run.json"):
            facts = json.loads(data)
            found[name] = {
                key: facts.get(key) for key in ("stage", "files", "counts", "config", "identity", "finished")
            }
        elif not name.endswith((".journal", "lock", "gymdata.log")):
            found[name] = data
    return found


def text_of(rollouts: Path, folder: Path) -> str:
    """The rollouts without their token ids."""
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    nothing = dict.fromkeys(("n_turns", "n_breaks", "n_context_tokens", "n_generated_tokens"), 0)
    for row in rows:
        row |= {**nothing, "turns": [], "messages": [{**message, "turn": None} for message in row["messages"]]}
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What commands read: a run, NeMo Gym rows, pairs and DPO rows of it, and a judge."""
    folder = tmp_path_factory.mktemp("made")
    rows = [
        rollout(f"t{task}", n, float(n), [([1, 5 + task], [40 + n, 2])], text=f"q={n + 1} t{task}r{n}")
        for task in range(4)
        for n in range(2)
    ]
    run_folder = write_run(folder / "run", rows)
    words = {"nemo": "nemo-gym", "dpo": "nat-dpo"}
    assert main(["pairs", str(run_folder), "-o", str(folder / "pairs")]) == 0
    experiences = folder / "experiences"
    assert main(["experience", str(run_folder), "-o", str(experiences), "--estimator", "rloo"]) == 0
    for name, form in words.items():
        given = folder / "pairs" if format_named(form).table == "pairs" else run_folder
        assert main(["export", str(given), "-o", str(folder / f"{name}.jsonl"), "--format", form]) == 0
    with judge_server(Behaviour()) as url:
        files = {name: str(folder / f"{name}.jsonl") for name in words}
        files |= {"clean": str(CLEAN), "policy": str(SAMPLE / "policy")}
        files["adapter"] = str(write_adapter(folder / "adapter"))
        files["text"], files["turns"] = text_of(CLEAN, folder), str(folder / "turns.py")
        Path(files["turns"]).write_text(TURNS)
        files |= {"run": str(run_folder), "pairs": str(folder / "pairs"), "experiences": str(experiences)}
        yield files | {"judge": url}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full, pytest.mark.timeout(3600)] if name not in REPRESENTATIVES else [])
        for name in [*COMMANDS, *SLOW]
    ],
)
def test_a_command_that_was_killed_anywhere_finishes(
    name: str, made: dict[str, str], processes: Processes, tmp_path: Path
) -> None:
    """Killed in each state that its files pass through: the same command ends with exit code 0 and the output of one that
    nobody killed, with nothing refused, doubled, lost or left over; and repeated, it changes nothing."""
    root = tmp_path / "work"
    out = root / "out"
    words = (COMMANDS | SLOW)[name].format(**made, out=out).split()
    root.mkdir()
    operations = processes.run(words, root)
    expected = held(out)
    assert len(operations) > 3
    assert expected
    processes.run(words, root)
    assert held(out) == expected
    wrong, refused = list[str](), 0
    for at in operations:
        shutil.rmtree(root)
        root.mkdir()
        with pytest.raises(DiedError, match=str(-signal.SIGKILL)) as killed:
            processes.run(words, root, at)
        assert killed.value.code == -signal.SIGKILL
        try:
            processes.run(words, root)
        except DiedError as died:
            refused += 1
            wrong.append(f"before operation {at}: refused with {died.code}: {root.with_name('told.err').read_text()}")
        else:
            if differing := differences(held(out), expected):
                wrong.append(f"before operation {at}: not as without the kill: {differing}")
    tell(name, len(operations), refused, len(wrong))
    assert wrong == []
