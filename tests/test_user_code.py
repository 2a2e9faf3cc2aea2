"""Users' code runs apart, and what it raises stays its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gymdata.errors import DataError, UsageError
from gymdata.settings import read_yaml
from gymdata.user_code import in_thread, load_symbol


@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt, StopIteration])
def test_code_that_would_end_the_process_is_only_an_error(fault: type[BaseException]):
    """Exceptions that mean "stop" to Python come back as errors of the code that raised them."""

    def leave() -> None:
        raise fault

    with pytest.raises(RuntimeError, match=fault.__name__):
        asyncio.run(in_thread(leave))


def test_a_mistyped_file_is_answered_with_its_neighbour(tmp_path: Path):
    """A Python file or a configuration that is not there names the nearest file of its folder."""
    (tmp_path / "calculator.py").touch()
    (tmp_path / "dpo.yaml").touch()
    with pytest.raises(UsageError, match=r"no such file\n.*did you mean 'calculator\.py'\?"):
        load_symbol(f"{tmp_path}/calculater.py:Calculator", "--env")
    with pytest.raises(DataError, match=r"did you mean 'dpo\.yaml'\?"):
        read_yaml(tmp_path / "dpoo.yaml")
    with pytest.raises(DataError, match="no such file or folder"):
        read_yaml(tmp_path / "gone" / "dpo.yaml")
