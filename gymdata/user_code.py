"""User code that a ``path.py:name`` setting names: how it is loaded, and where it runs.

Invariants: a file that cannot be imported is a UsageError naming it; its source, a part of a run's identity, covers the
modules of its folder that it imports when it is loaded, and they are imported anew each time; user code runs in daemon
threads, so what hangs there can be left behind and never keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gymdata.errors import UsageError, nearest_beside, raised

#: User files and those of the modules that they imported; the names of these modules; and the folders of user files on the
#: import path, the latest first.
_files: set[Path] = set()
_helpers: set[str] = set()
_folders: list[str] = []
#: What the path of an installed module begins with, or has in it.
_STANDARD, _INSTALLED = sysconfig.get_path("stdlib"), f"{os.sep}site-packages{os.sep}"


def load_symbol(spec: str, flag: str) -> tuple[Any, str]:
    """The object that ``path.py:name`` names, and its source: ``file.py:name@hash``, with ``+helper.py@hash`` for each
    module of its folder, or of a folder in it, that it imports when it is loaded. Raises UsageError.

    The file's folder is appended to the import path, so that it can import its neighbours.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier() or not path.endswith(".py"):
        raise UsageError.bad_value(flag, spec, "path.py:name")
    if not (file := Path(path)).is_file():
        raise UsageError(f"{flag} {spec}: {file}: no such file", hint=nearest_beside(file))
    module, helpers = _module(file, flag)
    if not hasattr(module, name):
        named = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__
        ]
        public = [n for n in named if not n.startswith("_")]
        raise UsageError.unknown_choice(f"{flag}: name in {file}", name, public or ["(nothing)"])
    hashes = "".join(f"+{path.relative_to(file.resolve().parent)}@{_hash(path, 8)}" for path in helpers)
    return getattr(module, name), f"{file.name}:{name}@{_hash(file, 16)}{hashes}"


def _module(file: Path, flag: str) -> tuple[ModuleType, list[Path]]:
    """The module of a user's file, and the files of the modules of its folder that it imported."""
    path = file.resolve()
    name = "gymdata_user_" + hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - one thing: the file can be loaded
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder in _folders or folder not in sys.path:
        others = [other for other in sys.path if other not in _folders]
        _folders[:] = [folder, *(other for other in _folders if other != folder)]
        sys.path[:] = [*others, *_folders]
    # Helpers are imported again: they may have changed, or be another folder's of the same name. Those that the caller had
    # imported are the caller's again afterwards.
    _files.add(path)
    before = {helper: sys.modules.pop(helper) for helper in _beside({file.parent for file in _files})}
    callers = {helper: module for helper, module in before.items() if helper not in _helpers}
    importlib.invalidate_caches()
    sys.modules[name] = module  # dataclasses and pickling look their module up
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # an edit within the same second would be missed
    try:
        spec.loader.exec_module(module)
        helpers = _beside({path.parent})
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        location = place_in(error, module.__file__)
        where = f" ({location.partition(',')[0]})" if location else ""
        raise UsageError(f"{flag}: {file} cannot be imported: {raised(error)}{where}") from error
    finally:
        sys.dont_write_bytecode = writes
        sys.modules.update(callers)
    _helpers.update(helpers.keys() - callers.keys())
    _files.update(helpers.values())
    return module, sorted({*helpers.values()} - {path})


def _beside(folders: set[Path]) -> dict[str, Path]:
    """The imported modules whose files are in the folders or below them and not installed, by their names."""
    found = {}
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__dict__", {}).get("__file__")  # some modules import what they are asked for
        ours = name == "__main__" or name.startswith(("gymdata.", "gymdata_user_"))
        # Told by its text: there may be ten thousand modules, and to resolve a path takes many calls of the system.
        if isinstance(file, str) and not (ours or file.startswith(_STANDARD) or _INSTALLED in file):
            path = Path(file).resolve()
            if path.suffix == ".py" and any(map(path.is_relative_to, folders)):
                found[name] = path
    return found


def _hash(file: Path, size: int) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=size).hexdigest()


def in_memory(value: Any) -> tuple[str, str]:
    """The name of a function, class or instance that was given as an object, and ``in memory:name@hash``.

    The hash is over its source (its name without source) and over the plain values that it holds: an instance's
    attributes, a closure's variables, a partial's arguments. Values that JSON cannot hold count by their type.
    """
    named = value if hasattr(value, "__name__") else type(value)
    name = str(named.__name__).strip("<>")  # of a lambda
    digest = hashlib.blake2b(_code_of(named), digest_size=16)
    digest.update(json.dumps(_values_of(value), sort_keys=True, default=lambda v: type(v).__qualname__).encode())
    return name, f"in memory:{name}@{digest.hexdigest()}"


def _code_of(value: Any) -> bytes:
    if getattr(value, "__name__", "") == "<lambda>":  # its source is a whole line
        return repr(_compiled(value.__code__)).encode()
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(value).encode()
    return repr(getattr(value, "__qualname__", value)).encode()


def _compiled(code: CodeType) -> tuple[object, ...]:
    constants = [_compiled(value) if isinstance(value, CodeType) else value for value in code.co_consts]
    return code.co_code, code.co_names, constants


def _values_of(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return [in_memory(value.func)[1], list(value.args), {str(k): v for k, v in value.keywords.items()}]
    cells = getattr(value, "__closure__", None) or ()
    values: dict[str, object] = {}
    for name, cell in zip(getattr(getattr(value, "__code__", None), "co_freevars", ()), cells, strict=False):
        with contextlib.suppress(ValueError):  # not filled yet
            values[name] = cell.cell_contents
    return values if inspect.isroutine(value) or inspect.isclass(value) else {str(k): v for k, v in vars(value).items()}


def place_in(error: BaseException, *files: str | None) -> str | None:
    """``file.py:12, in name``: the last line of ``files`` that an exception passed through, if any; as ``from_here``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{from_here(frames[-1].filename)}:{frames[-1].lineno}, in {frames[-1].name}" if frames else None


def place_of(function: Any) -> str:
    """``file.py:12``: where a function, or the class of an instance that is called as one, is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{from_here(code.co_filename)}:{code.co_firstlineno}" if code is not None else "no Python source"


def raised_in_user_code(error: BaseException) -> str | None:
    """``file.py:12, in name``: where in a file that was loaded here an exception came from; None for any other."""
    return place_in(error, *map(str, _files))


def raised_at(error: BaseException, function: Any, otherwise: str | None = None) -> str:
    """``file.py:12, in name``: where in the file of ``function``, or of its class, an exception came from."""
    while isinstance(function, functools.partial):
        function = function.func
    return place_in(error, getattr(inspect.getmodule(function), "__file__", None)) or otherwise or place_of(function)


def from_here(file: str) -> str:
    """``file`` relative to the current folder, if it is below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` of user code: async functions run in the loop, others in a thread. ``sys.exit`` and a
    cancellation of the code's own are errors like any other: the loop would take them for the end of the command."""
    if not inspect.iscoroutinefunction(function):
        return await in_thread(function, *arguments)
    try:
        return await function(*arguments)
    except (SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(raised(error)).with_traceback(error.__traceback__) from error


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in a thread of its own; raises what it raises. Cancelling leaves the thread behind."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(how: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            how(value)

    def work() -> None:
        try:
            settled: tuple[Callable[..., None], Any] = future.set_result, function(*arguments)
        except (KeyboardInterrupt, SystemExit, StopIteration, asyncio.CancelledError) as error:
            # A future cannot hold StopIteration, and the loop would take the others for the end of the command.
            settled = future.set_exception, RuntimeError(raised(error)).with_traceback(error.__traceback__)
        except BaseException as error:  # noqa: BLE001 - handed to the waiting coroutine, whatever it is
            settled = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile: there is no one to notify
            loop.call_soon_threadsafe(settle, *settled)

    threading.Thread(target=work, name="gymdata-user-code", daemon=True).start()
    return await future
