"""Users' code runs apart, and what it raises stays its own."""

from __future__ import annotations

import asyncio

import pytest

from gymdata.user_code import in_thread


@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt, StopIteration])
def test_code_that_would_end_the_process_is_only_an_error(fault: type[BaseException]):
    """Exceptions that mean "stop" to Python come back as errors of the code that raised them."""

    def leave() -> None:
        raise fault

    with pytest.raises(RuntimeError, match=fault.__name__):
        asyncio.run(in_thread(leave))
