"""User code that a ``path.py:name`` setting names: how it is loaded, and where it runs.

Invariants: a file that cannot be imported is a UsageError naming it; user code runs in daemon threads, so what
hangs there can be left behind and never keeps the process from ending.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from gymdata.errors import UsageError, nearest_beside, raised


def load_symbol(spec: str, flag: str) -> tuple[Any, str]:
    """The object that ``path.py:name`` names, and its source: ``file.py:name@hash``, with ``+helper.py@hash`` for each
    module that it imports and that is not installed. Raises UsageError.

    The file's folder is appended to the import path, so that it can import its neighbours.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier() or not path.endswith(".py"):
        raise UsageError.bad_value(flag, spec, "path.py:name")
    if not (file := Path(path)).is_file():
        raise UsageError(f"{flag} {spec}: {file}: no such file", hint=nearest_beside(file))
    module = _module(file, flag)
    if not hasattr(module, name):
        named = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__
        ]
        public = [n for n in named if not n.startswith("_")]
        raise UsageError.unknown_choice(f"{flag}: name in {file}", name, public or ["(nothing)"])
    helpers = sorted(path for path in {*_helpers(file).values(), *_loaded[file.resolve()].values()} if path.is_file())
    _contents.update((path, _hash(path, 8)) for path in helpers)
    hashes = "".join(f"+{os.path.relpath(path, file.resolve().parent)}@{_contents[path]}" for path in helpers)
    return getattr(module, name), f"{file.name}:{name}@{_hash(file, 16)}{hashes}"


def spec_and_hash(source: str) -> tuple[str, str]:
    """``file.py:name`` and the hashes behind it, of a source that ``load_symbol`` or ``in_memory`` returned."""
    return source.partition("@")[0], source.partition("@")[2]


def _hash(file: Path, size: int) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=size).hexdigest()


def _helpers(file: Path) -> dict[str, Path]:
    """The modules, not installed ones, that ``file`` and they import anywhere in their code, by their full name."""
    folder, helpers, unread = file.resolve().parent, dict[str, Path](), [("", file.resolve())]
    roots = [folder, *(root for root in map(Path, sys.path) if _is_users(root.resolve() / "_.py", folder))]
    while unread:
        package, path = unread.pop()
        for name in _imported(path, package):
            parts = name.split(".")
            for n, root in itertools.product(range(1, len(parts) + 1), roots):
                parent, base = ".".join(parts[:n]), root.resolve().joinpath(*parts[:n])
                choices = (parent, base / "__init__.py"), (parent.rpartition(".")[0], base.with_suffix(".py"))
                for inside, helper in choices:
                    if parts[0] != "gymdata" and parent not in helpers and helper != path and helper.is_file():
                        helpers[parent] = helper
                        unread.append((inside, helper))
    return helpers


def _imported(path: Path, package: str) -> Iterator[str]:
    """Names that the import statements of a file could mean as modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return  # importing it says why
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join(filter(None, [*above, node.module]))
            yield from (f"{base}.{alias.name}".removeprefix(".").removesuffix(".*") for alias in node.names)


def in_memory(value: Any) -> tuple[str, str]:
    """The name of a function, class or instance that was given as an object, and ``in memory:name@hash``.

    The hash is over its source (its bytecode without source) and over the plain values that it holds: an instance's
    attributes, a closure's variables, a partial's arguments. Values that JSON cannot hold count by their type.
    """
    named = value if hasattr(value, "__name__") else type(value)
    name = str(named.__name__).strip("<>")  # of a lambda
    digest = hashlib.blake2b(_code_of(named), digest_size=16)
    digest.update(json.dumps(_values_of(value), sort_keys=True, default=lambda v: type(v).__qualname__).encode())
    return name, f"in memory:{name}@{digest.hexdigest()}"


def _code_of(value: Any) -> bytes:
    if getattr(value, "__name__", None) == "<lambda>":
        return _lambda_source(value) or _bytecode(value.__code__)
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(value).encode()
    if inspect.isclass(value):
        functions = [f for _, f in sorted(vars(value).items()) if inspect.isfunction(f)]
        return b"".join([value.__qualname__.encode(), *map(_code_of, functions)])
    code = getattr(value, "__code__", None)
    return _bytecode(code) if code is not None else repr(getattr(value, "__qualname__", value)).encode()


def _lambda_source(function: Any) -> bytes | None:
    """A lambda alone, without the rest of its line; None without source."""
    code = function.__code__
    try:
        tree = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, TypeError, SyntaxError):
        return None
    starts = [(line, column) for line, _, column, end in code.co_positions() if line and column is not None and end]
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and (node.body.lineno, node.body.col_offset) == min(starts, default=None):
            return ast.unparse(node).encode()
    return None


def _bytecode(code: Any) -> bytes:
    consts = [_bytecode(const) if inspect.iscode(const) else repr(const).encode() for const in code.co_consts]
    return b"\0".join([code.co_code, *(name.encode() for name in code.co_names), *consts])


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
    return place_in(error, *map(str, (*_loaded, *_contents)))


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
    """``function(*arguments)`` of user code: async functions run in the loop, others in a thread. ``os._exit`` raises, and a
    cancellation of the code's own is an error like any other: the loop would take it for the end of the command."""
    if not inspect.iscoroutinefunction(function):
        return await in_thread(function, *arguments)
    try:
        with exit_raises():
            return await function(*arguments)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(raised(error)).with_traceback(error.__traceback__) from error


_calling: contextvars.ContextVar[int | None] = contextvars.ContextVar("gymdata_user_code", default=None)
_end_process = os._exit


@contextlib.contextmanager
def exit_raises() -> Iterator[None]:
    """``os._exit`` in a call of user code raises SystemExit, as ``sys.exit`` does. It would silently end the command with
    the code's exit code. Other threads, and processes that the code forks, end as they always do."""

    def raise_or_exit(status: int) -> NoReturn:
        if _calling.get() == os.getpid():
            raise SystemExit(status)
        _end_process(status)

    os._exit = raise_or_exit
    token = _calling.set(os.getpid())
    try:
        yield
    except SystemExit as error:
        # The loop would take it for the end of the command.
        raise RuntimeError(raised(error)).with_traceback(error.__traceback__) from error
    finally:
        end_forked()
        _calling.reset(token)


def end_forked() -> None:
    """End a process that user code forked and that came back from its call: it would run on as a second command."""
    if _calling.get() not in (None, os.getpid()):
        _end_process(0)


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in a thread of its own; raises what it raises. Cancelling leaves the thread behind."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(how: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            how(value)

    def work() -> None:
        try:
            with exit_raises():
                settled: tuple[Callable[..., None], Any] = future.set_result, function(*arguments)
        except (KeyboardInterrupt, StopIteration, asyncio.CancelledError) as error:
            # A future cannot hold StopIteration, and the loop would take the others for the end of the command.
            settled = future.set_exception, RuntimeError(raised(error)).with_traceback(error.__traceback__)
        except BaseException as error:  # noqa: BLE001 - handed to the waiting coroutine, whatever it is
            settled = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile: there is no one to notify
            loop.call_soon_threadsafe(settle, *settled)

    threading.Thread(target=work, name="gymdata-user-code", daemon=True).start()
    return await future


def _module(file: Path, flag: str) -> Any:
    name = "gymdata_user_" + hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - one thing: the file can be loaded
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    # Put ``folder`` on the import path: behind what was there, before the folders of other user files.
    folder = str(file.resolve().parent)
    if folder in _folders or folder not in sys.path:
        sys.path[:] = [other for other in sys.path if other != folder]
        sys.path.insert(next((n for n, other in enumerate(sys.path) if other in _folders), len(sys.path)), folder)
        _folders[:] = [folder, *(other for other in _folders if other != folder)]
    # Forget imported helpers that changed since, or that are another folder's: they are then imported again.
    importlib.invalidate_caches()
    helpers = {**_helpers(file), **_loaded.setdefault(file.resolve(), {})}
    contents = {path: _hash(path, 8) for path in helpers.values() if path.is_file()}
    changed = any(_contents.get(path, now) != now for path, now in contents.items())
    for name in {*helpers, *(name for names in _loaded.values() for name in names)}:
        path = Path(getattr(sys.modules.get(name), "__file__", None) or "").resolve()
        other = not path.is_relative_to(file.resolve().parent) and any(path.is_relative_to(f) for f in _folders)
        if path in _contents and (changed or other):
            del sys.modules[name]
    _contents.update(contents)
    _loading.add(file)
    before, writes = set(sys.modules), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # compiled files are compared by whole seconds: an edit within one would be missed
    try:
        with exit_raises():
            spec.loader.exec_module(module)
    except Exception as error:  # a user's file may fail in any way
        location = place_in(error, module.__file__)
        where = f" ({location.partition(',')[0]})" if location else ""
        raise UsageError(f"{flag}: {file} cannot be imported: {raised(error)}{where}") from error
    finally:
        sys.dont_write_bytecode = writes
        _loading.discard(file)
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in set(sys.modules) - before}
    modules = {name: Path(path).resolve() for name, path in files.items() if path}
    _loaded[file.resolve()] |= {name: path for name, path in modules.items() if _is_users(path, file.resolve().parent)}
    return module


#: Folders of user files on the import path, the latest first; the modules that each user file loaded; and the content
#: of helpers when they were imported.
_folders: list[str] = []
_loaded: dict[Path, dict[str, Path]] = {}
_contents: dict[Path, str] = {}
_loading: set[Path] = set()


def _is_users(path: Path, folder: Path) -> bool:
    """Whether a module, beside a user's file in ``folder``, is the user's own: neither installed nor Python's."""
    parts = path.relative_to(folder).parts if path.is_relative_to(folder) else path.parts
    other_folders = (*_NOT_USERS, *(e for e in editable() if not folder.is_relative_to(e)))
    installed = {"site-packages", "dist-packages"}.intersection(parts) or any(map(path.is_relative_to, other_folders))
    return path.suffix == ".py" and not installed


@functools.cache
def editable() -> dict[Path, list[str]]:
    """Folders that pip installed in place (``-e``), and the names of the packages in each."""
    folders = {}
    for dist in importlib.metadata.distributions():
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            folder = Path(unquote(urlsplit(origin["url"]).path)).resolve()
            folders[folder] = [file.parent.name for n in ("*", "src/*") for file in folder.glob(f"{n}/__init__.py")]
    return folders


_NOT_USERS = (Path(__file__).resolve().parent, Path(sysconfig.get_path("stdlib")).resolve())


class _LateImports:
    """Refuses, in a call of user code, what no source covers: it could change between two rollouts unnoticed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _target: Any = None) -> None:
        calling = _calling.get() == os.getpid() and not _loading and not name.startswith("gymdata.")
        spec = importlib.machinery.PathFinder.find_spec(name, path) if calling else None
        file = Path(spec.origin if spec and spec.has_location and spec.origin else os.devnull).resolve()
        near = any(file.is_relative_to(f) and _is_users(file, f) for f in (*(u.parent for u in _loaded), Path.cwd()))
        names = [names for e, names in (editable() if near else {}).items() if file.is_relative_to(e)]
        if _loaded and near and file not in _contents and name.partition(".")[0] not in itertools.chain(*names):
            raise ImportError(f"{name} is imported by a computed name; import it at the top of the file")


sys.meta_path.insert(0, _LateImports)
