"""User code that a ``path.py:name`` setting names: how it is loaded, and where it runs.

Invariants: a file that cannot be imported is a UsageError naming it; user code runs in daemon threads, so what
hangs there can be left behind and never keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gymdata.errors import UsageError, nearest_beside


def load_symbol(spec: str, flag: str) -> tuple[Any, str]:
    """The object that ``path.py:name`` names, and ``file.py:name@hash`` of the file's bytes. Raises UsageError.

    The file's folder is appended to the import path, so that it can import its neighbours.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier() or not path.endswith(".py"):
        raise UsageError.bad_value(flag, spec, "path.py:name")
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{flag} {spec}: {file}: no such file", hint=nearest_beside(file))
    module = _module(file, flag)
    if not hasattr(module, name):
        defined = {n: v for n, v in vars(module).items() if not n.startswith("_") and callable(v)}
        # Names that the file imports are not suggested.
        known = [n for n, v in defined.items() if getattr(v, "__module__", None) == module.__name__]
        raise UsageError.unknown_choice(f"{flag}: name in {file}", name, known or ["(nothing)"])
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    return getattr(module, name), f"{file.name}:{name}@{digest}"


def in_memory(value: Any) -> tuple[str, str]:
    """The name of a function, class or instance that was given as an object, and ``in memory:name@hash``.

    The hash is over its source (its bytecode without source) and over the plain values that it holds: an instance's
    attributes, a closure's variables, a partial's arguments. Values that JSON cannot hold count by their type.
    """
    named = value if hasattr(value, "__name__") else type(value)
    name = str(named.__name__)
    digest = hashlib.blake2b(_code_of(named), digest_size=16)
    digest.update(json.dumps(_held_by(value), sort_keys=True, default=lambda v: type(v).__qualname__).encode())
    return name, f"in memory:{name}@{digest.hexdigest()}"


def _code_of(value: Any) -> bytes:
    try:
        return inspect.getsource(value).encode()
    except (OSError, TypeError):
        pass
    if inspect.isclass(value):
        functions = [f for _, f in sorted(vars(value).items()) if inspect.isfunction(f)]
        return b"".join([value.__qualname__.encode(), *map(_code_of, functions)])
    code = getattr(value, "__code__", None)
    return _bytecode(code) if code is not None else repr(getattr(value, "__qualname__", value)).encode()


def _bytecode(code: Any) -> bytes:
    held = [_bytecode(one) if inspect.iscode(one) else repr(one).encode() for one in code.co_consts]
    return b"\0".join([code.co_code, *(name.encode() for name in code.co_names), *held])


def _held_by(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return [in_memory(value.func)[1], list(value.args), {str(k): v for k, v in value.keywords.items()}]
    cells = getattr(value, "__closure__", None) or ()
    held: dict[str, Any] = {}
    for name, cell in zip(getattr(getattr(value, "__code__", None), "co_freevars", ()), cells, strict=False):
        with contextlib.suppress(ValueError):  # not filled yet
            held[name] = cell.cell_contents
    return held if inspect.isroutine(value) or inspect.isclass(value) else {str(k): v for k, v in vars(value).items()}


def place_in(error: BaseException, file: str | None) -> str | None:
    """``file.py:12, in name``: the last line of ``file`` that an exception passed through, or None. The file's path is
    relative to the current folder, if it is below it.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{from_here(frames[-1].filename)}:{frames[-1].lineno}, in {frames[-1].name}" if frames else None


def place_of(function: Any) -> str:
    """``file.py:12``: where a function, or the class of an instance that is called as one, is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{from_here(code.co_filename)}:{code.co_firstlineno}" if code is not None else "no Python source"


def from_here(file: str) -> str:
    """``file`` relative to the current folder, if it is below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in a thread of its own; raises what it raises. Cancelling leaves the thread behind."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        fault: BaseException | None = None
        try:
            result = function(*arguments)
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:
            # A future cannot hold StopIteration, and the loop would take the others for the end of the command.
            fault = RuntimeError(f"{type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001 - handed to the waiting coroutine, whatever it is
            fault = error
        try:
            loop.call_soon_threadsafe(settle, result, fault)
        except RuntimeError:
            return  # the loop ended meanwhile: there is no one to notify

    threading.Thread(target=work, name="gymdata-user-code", daemon=True).start()
    return await future


def _module(file: Path, flag: str) -> Any:
    name = "gymdata_user_" + hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        at = place_in(error, module.__file__)
        where = f" ({at.partition(',')[0]})" if at else ""
        raise UsageError(f"{flag}: {file} cannot be imported: {type(error).__name__}: {error}{where}") from error
    return module
