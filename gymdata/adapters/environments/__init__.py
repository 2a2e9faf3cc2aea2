"""Where rollouts happen: plain single-turn answers, and tools from a user's Python file."""

from __future__ import annotations

from gymdata.adapters.environments.python_tools import PythonTools
from gymdata.adapters.environments.single_turn import SingleTurn

__all__ = ["PythonTools", "SingleTurn", "load_environment"]


def load_environment(spec: str | None, *, tool_timeout_s: float = 60.0) -> SingleTurn | PythonTools:
    """``None``: one answer and done. ``path.py:Name``: see ``PythonTools``. Raises UsageError when it cannot be loaded."""
    return SingleTurn() if spec is None else PythonTools.load(spec, timeout_s=tool_timeout_s)
