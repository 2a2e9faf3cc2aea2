"""Task and environment files for the collect tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faulty_server import Settings, build
from tests.servers import FAULTY, ServerProcess, server_processes, serving

ADDER = '''
class Adder:
    def reset(self, **task):
        self.task = task

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number
            b: the other
        """
        return a + b
'''


@pytest.fixture
def up() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers in processes of their own; at the end all are gone."""
    with server_processes(FAULTY) as start:
        yield start


@pytest.fixture
def tasks(tmp_path: Path) -> Callable[..., Path]:
    """Writes n tasks "q0"…, whose answer is their number modulo 4."""

    def write(n: int = 5, name: str = "tasks.jsonl") -> Path:
        path = tmp_path / name
        rows = [{"task_id": f"t{i}", "prompt": f"q{i}", "answer": str(i % 4), "level": i} for i in range(n)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def adder(tmp_path: Path) -> str:
    """An --env spec with one tool, add(a, b)."""
    file = tmp_path / "adder.py"
    file.write_text(ADDER)
    return f"{file}:Adder"


@pytest.fixture
def server() -> Iterator[Callable[[Settings], str]]:
    """Starts servers on threads of their own; gives their URL."""
    with contextlib.ExitStack() as started:
        yield lambda settings: started.enter_context(serving(build(settings))) + "/v1"
