"""An engine whose process runs the caller's script again says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymdata.engines._vllm import refuse_second_start
from gymdata.errors import UsageError

TEXT = (
    "An attempt has been made to start a new process before the current process has finished its bootstrapping phase."
)


@pytest.mark.parametrize(("error", "log"), [("Engine core initialization failed", TEXT), (TEXT, "")])
def test_a_script_without_a_main_guard_is_named(error: str, log: str, tmp_path: Path) -> None:
    """By what multiprocessing wrote in the engine's log, or raised here; another failure is not."""
    file = tmp_path / "engine.log"
    file.write_text(log)
    with pytest.raises(UsageError) as refused:
        refuse_second_start(RuntimeError(error), file)
    assert 'if __name__ == "__main__":' in str(refused.value.hint)
    refuse_second_start(RuntimeError("out of memory"), None)
