"""The blocks of the README and of the topics: what each is, how it is marked, and how it is run.

A block is marked by a comment on the line before it: ``<!-- no-run: REASON -->`` is not run, ``<!-- engine -->`` is run
with a real engine or torch, in one scenario over all pages, and ``<!-- exit: 0 1 -->`` gives the exit codes of the
commands. A block whose first line is ``# NAME.py`` or ``# NAME.yaml`` is a file. In shown output a line ``…`` stands for
any lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gymdata.cli.main import main
from tests.forks import Forks
from tests.forks import run as run_command

#: Runs a command line in a folder.
Start = Callable[[str, Path], subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parent.parent
TOPICS = ROOT / "gymdata" / "docs"
#: Languages of blocks that do something; ``text`` and ``json`` only show.
RUN = {"bash", "console", "python", "sql", "yaml"}
_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
#: What is measured anew in every run, and may not be compared.
_TIMED = re.compile(r"\([\d.,]+ s\)|[\d,.]+ tokens/s|\btime +[\d.]+ s")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, when it is one."""
        found = re.match(r"# ([\w.]+\.(?:py|yaml))\n", self.text)
        return found[1] if found else None

    @property
    def reason(self) -> str | None:
        """Why it is not run."""
        return self.mark.removeprefix("no-run: ") if self.mark.startswith("no-run") else None

    @property
    def exits(self) -> list[int]:
        return [int(code) for code in self.mark.removeprefix("exit: ").split()] if self.mark.startswith("exit") else []

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each shell command with the output shown for it; a bash block shows none."""
        if self.language == "bash":
            lines = re.sub(r"\\\n", " ", self.text).splitlines()
            return [(line, "") for line in lines if line.strip() and not line.startswith("#")]
        if self.language != "console":
            return []
        found = re.findall(
            r"""^\$ ((?:[^"'\\\n]|\\(?:.|\n)|"[^"]*"|'[^']*')*)\n?(.*?)(?=^\$ |\Z)""", self.text, re.M | re.S
        )
        return [(command.replace("\\\n", " "), shown) for command, shown in found]


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page.stem,
            text[: found.start("language")].count("\n") + 1,
            found["language"],
            found["mark"] or "",
            found["text"],
        )
        for found in _BLOCK.finditer(text)
    ]


PAGES = [ROOT / "README.md", *sorted(TOPICS.glob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks(page)]


def prepare(folder: Path) -> None:
    """A working folder with the sample data, as in a checkout."""
    shutil.copytree(ROOT / "sample_data", folder / "sample_data")


def stand_in(folder: Path) -> None:
    """``runs/x`` as a run of the shipped rollouts: what needs no engine runs on it."""
    for line in (
        "gymdata export sample_data/rollouts/clean.jsonl --format atif -o runs/clean.jsonl",
        "gymdata import runs/clean.jsonl -o runs/x",
    ):
        done = inside(line, folder)
        assert done.returncode == 0, done.stderr


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command line as a reader types it. A page that wraps its tables for the reader is wide."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=540,
    )  # fmt: skip


def inside(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A call of gymdata in this process, which spares the start of one; anything else in a shell."""
    if not line.startswith("gymdata ") or " | " in line:
        return shell(line, folder)
    words = shlex.split(line, comments=True)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words[1:])
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def forked(processes: Forks) -> Start:
    """A call of gymdata, and of its trainer, in forks that have loaded what training takes; with an engine, or anything
    else, in a shell."""

    def start(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line, comments=True)
        if words[0] != "gymdata" or words[1] in ("collect", "eval", "serve") or " | " in line:
            return shell(line, folder)
        with tempfile.NamedTemporaryFile() as said:
            code = processes.start(_in_a_fork, words[1:], folder, Path(said.name)).wait()
            return subprocess.CompletedProcess(words, code, said.read().decode(), "")

    return start


def _in_a_fork(words: list[str], folder: Path, said: Path) -> int:
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    return run_command(words, said)


def figures(text: str) -> list[str]:
    """The numbers of an output, without those that a clock made."""
    return re.findall(r"\d[\d,.]*\d|\d", _TIMED.sub(" ", text))


def run(block: Block, folder: Path, start: Start = inside) -> None:
    """Run a block in ``folder``, its commands by ``start``. AssertionError names the command that did not do what the page
    says."""
    if block.file is not None:
        (folder / block.file).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            compile(block.text, block.file, "exec")
    elif block.language == "python":
        script = folder / "block.py"
        script.write_text(block.text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, f"{block.name}\n{done.stderr}"
    for at, (command, shown) in enumerate(block.commands):
        done = start(command, folder)
        expected = block.exits[at] if at < len(block.exits) else 0
        assert done.returncode == expected, f"{block.name}: {command}\n{done.stdout}\n{done.stderr}"
        output = done.stdout + done.stderr
        missing = [number for number in figures(shown) if number not in figures(output)]
        # What an engine sampled hangs on the machine's rounding.
        assert block.mark == "engine" or not missing, f"{block.name}: {command}\nnot in the output: {missing}\n{output}"
