"""The build: setuptools, and the stub of the public functions that ships with the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the hooks that stay as they are

sys.path.insert(0, str(Path(__file__).parent))
import public_stub


def _write_stub() -> None:
    (public_stub.ROOT / "gymdata" / "__init__.pyi").write_text(public_stub.stub(), encoding="utf-8")


def build_wheel(*arguments: Any, **keywords: Any) -> str:
    _write_stub()
    return build_meta.build_wheel(*arguments, **keywords)


def build_editable(*arguments: Any, **keywords: Any) -> str:
    _write_stub()
    return build_meta.build_editable(*arguments, **keywords)


def build_sdist(*arguments: Any, **keywords: Any) -> str:
    _write_stub()
    return build_meta.build_sdist(*arguments, **keywords)
