"""Task and environment files for the collect tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.collect.run import Parts, collect
from tests.collect.fake_parts import FakeSampler, parts
from tests.collect.saved_rows import rows_of
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
def play(tasks: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Any, list[dict[str, Any]]]]:
    """Collects from ``n`` tasks into ``tmp_path / "run"``, with the stand-ins or ``own_parts``: the summary and all rows."""

    def play(
        n: int = 1, sampler: FakeSampler | None = None, *, run: str = "run", env: Any = None, rewards: Any = (),
        own_parts: Parts | None = None, **settings: Any,
    ) -> tuple[Any, list[dict[str, Any]]]:  # fmt: skip
        playing = own_parts or parts(sampler, env=env, rewards=rewards)
        summary = collect(tasks=str(tasks(n)), output=tmp_path / run, parts=playing, **settings)
        return summary, rows_of(tmp_path / run)

    return play


@pytest.fixture
def adder(tmp_path: Path) -> str:
    """An --env spec with one tool, add(a, b)."""
    file = tmp_path / "adder.py"
    file.write_text(ADDER)
    return f"{file}:Adder"


@pytest.fixture
def served(policy: str) -> dict[str, Any]:
    """Settings of the model that such servers serve."""
    return {"model": "fake", "tokenizer": policy, "max_tokens": 8, "seed": 2}


@pytest.fixture
def server() -> Iterator[Callable[[Settings], str]]:
    """Starts servers on threads of their own, which misbehave as their settings say; gives their URL."""
    with contextlib.ExitStack() as started:
        yield lambda settings: started.enter_context(serving(build(settings)))
