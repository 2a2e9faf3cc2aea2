"""A vLLM plugin that ends an engine's processes when the process that started them is gone.

Invariants: it acts only on engines that gymdata itself started (``ENGINE_OF`` is in their environment), and only
in child processes. Without it a SIGKILLed command leaves the engine and its workers alive, holding their memory for ever.
vLLM loads it in each of its processes through the ``vllm.general_plugins`` entry point.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable

#: Set by gymdata before it starts an engine; inherited by every process of that engine.
ENGINE_OF = "GYMDATA_ENGINE_OF"

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. Does nothing in the command's own process.

    Linux only: elsewhere an orphaned engine must be ended by hand.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and ENGINE_OF in os.environ:
        dies_with(parent.pid)()


def dies_with(parent: int) -> Callable[[], None]:
    """What a process that ``parent`` starts runs first, so that the kernel kills it when ``parent`` is gone. Linux only."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        # SIGKILL, not SIGTERM: a handler that waits for a step on a wedged device would keep the memory.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request was in place
            os._exit(1)

    return ask
