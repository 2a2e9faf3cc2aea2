"""Every command that writes an output, killed before each of its file operations: the same command then finishes it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.interop.formats import FORMATS, OF_PAIRS, SUFFIXES
from tests.judge_server import Behaviour, judge_server
from tests.rollout_files import rollout, write_run

SAMPLE = Path(__file__).parents[2] / "sample_data"
#: What each process has loaded when it is forked.
_LOADED = [
    "gymdata.cli.main", "gymdata.audit.run", "gymdata.interop.run", "gymdata.experience.run",
    "gymdata.filter.run", "gymdata.judge.run", "gymdata.pairs.run", "gymdata.query.run", "gymdata.score.run",
    "gymdata.validate.run", "gymdata.validate.fix", "gymdata.http", "duckdb", "pyarrow.dataset", "aiohttp",
    "typer", "rich.table",
]  # fmt: skip
#: Audit events of what changes files. pyarrow's own writing has none, but what it writes to was made by ours before.
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Of what a command's words may name: {run}, {nemo}, {dpo}, {pairs}: inputs; {judge}: an address; {out}: its output.
COMMANDS = {
    "pairs": "pairs {run} -o {out} --split 0.5 --seed 1",
    "pairs, files": "pairs {run} -o {out}/p.jsonl --split 0.5 --seed 1",
    "experience": "experience {run} -o {out} --estimator rloo",
    "score": "score {run} -o {out} --reward regex:4",
    "score, a file": "score {run} -o {out}/s.parquet --reward regex:4",
    "judge": "judge {run} -o {out} --endpoint {judge} -m judge",
    "filter": "filter {run} -o {out} --where reward>0.4",
    "filter, files": "filter {run} -o {out}/f.parquet --split-by task --test-share 0.5",
    "import": "import {nemo} -o {out} --run-id imported",
    "import of pairs": "import {dpo} -o {out} --run-id imported",
    "validate --fix": "validate {run} --fix drop -o {out}/fixed.parquet",
    "validate --fix, NeMo Gym": "validate {nemo} --fix drop -o {out}/fixed.jsonl",
    "query": "query select(1) {run} -o {out}/q.parquet",
}
for name in FORMATS:
    source, suffix = "{pairs}" if name in OF_PAIRS else "{run}", SUFFIXES.get(name, (".jsonl",))[0]
    COMMANDS[f"export {name}"] = f"export {source} -o {{out}}/x{suffix} --format {name}"


#: Each process of these loads torch for seconds.
SLOW = {"audit": "audit {clean} -m {policy} -o {out} -n 2 --write-as ref_logprobs"}


@dataclass
class DiedError(Exception):
    code: int


def _run(words: list[str], root: str, at: int | None, count: str) -> None:
    """Run a command, and SIGKILL this process before its file operation number ``at`` below ``root``; else count them."""
    done = 0

    def operation() -> None:
        nonlocal done
        if done == at:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        inside = bool(arguments) and isinstance(arguments[0], (str, os.PathLike)) and str(arguments[0]).startswith(root)
        if inside and (event in _CHANGES or (event == "open" and arguments[2] & _WRITES)):
            operation()

    def counted(call: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            operation()
            return call(*arguments)

        return wrapped

    null = os.open(os.devnull, os.O_WRONLY)
    err = os.open(count + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(null, 1)
    os.dup2(err, 2)
    sys.addaudithook(heard)
    os.fsync = counted(os.fsync)
    code = main(words)
    sys.stderr.flush()
    total, at = done, None
    Path(count).write_text(str(total))
    os._exit(code)


def run(words: list[str], root: Path, at: int | None = None) -> int:
    """A command in a process of its own, killed at an operation; returns how many there were. Raises DiedError."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    count = root.with_name("operations")
    process = context.Process(target=_run, args=(words, str(root), at, str(count)))
    process.start()
    process.join()
    if process.exitcode:
        raise DiedError(process.exitcode or 0)
    return int(count.read_text())


def held(folder: Path) -> dict[str, Any]:
    """Every file of an output with its bytes; of a run.json what it says of files and counts."""
    found: dict[str, Any] = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, data = str(file.relative_to(folder)), file.read_bytes()
        if name.endswith("run.json"):
            facts = json.loads(data)
            found[name] = {
                key: facts.get(key) for key in ("stage", "files", "counts", "config", "identity", "finished")
            }
        elif not name.endswith((".journal", "lock")):
            found[name] = data
    return found


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
    for name, form in words.items():
        given = folder / "pairs" if form in OF_PAIRS else run_folder
        assert main(["export", str(given), "-o", str(folder / f"{name}.jsonl"), "--format", form]) == 0
    with judge_server(Behaviour()) as url:
        files = {name: str(folder / f"{name}.jsonl") for name in words}
        files |= {"clean": str(SAMPLE / "rollouts" / "clean.jsonl"), "policy": str(SAMPLE / "policy")}
        yield {"run": str(run_folder), "pairs": str(folder / "pairs"), "judge": url, **files}


@pytest.mark.parametrize(
    "name", [*COMMANDS, *(pytest.param(name, marks=[pytest.mark.full, pytest.mark.timeout(3600)]) for name in SLOW)]
)
def test_a_command_that_was_killed_anywhere_finishes(name: str, made: dict[str, str], tmp_path: Path) -> None:
    """Killed before every file operation in turn: the same command ends with exit code 0 and the output of one that nobody
    killed, with nothing refused, doubled, lost or left over; and repeated, it changes nothing."""
    root = tmp_path / "work"
    out = root / "out"
    words = (COMMANDS | SLOW)[name].format(**made, out=out).split()
    root.mkdir()
    operations = run(words, root)
    expected = held(out)
    assert operations > 3
    assert expected
    run(words, root)
    assert held(out) == expected
    for at in range(operations):
        shutil.rmtree(root)
        root.mkdir()
        with pytest.raises(DiedError, match=str(-signal.SIGKILL)) as killed:
            run(words, root, at)
        assert killed.value.code == -signal.SIGKILL
        try:
            run(words, root)
        except DiedError as died:
            told = root.with_name("operations.err").read_text()
            pytest.fail(f"killed at {at} of {operations}, it was refused with {died.code}: {told}")
        assert held(out) == expected, f"killed at operation {at} of {operations}"
