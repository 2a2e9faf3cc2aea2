"""A URL as an input: what it names is fetched whole into a cache folder and read there as a local path.

Invariants: a file gets its name in the cache when it is complete; a copy whose source has another size or tag (ETag), or
is gone, is fetched again or removed. People are shown the URL, without its secrets.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from gymdata.errors import DataError, GymdataError, OutsideError, StoreError, UsageError, require
from gymdata.texts import show_as

_CREDENTIALS = {
    "s3": "credentials come from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "credentials come from the environment: GOOGLE_APPLICATION_CREDENTIALS",
    "az": "credentials come from the environment: AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "a private or gated repository needs a token: HF_TOKEN, or `hf auth login`",
    "https": "download the file with its credentials, and give its local path",
    "http": "download the file with its credentials, and give its local path",
}
#: A Path has lost one of the two slashes. ``s3:NAME`` was meant to be a URL, ``hf:ORG/NAME`` is one.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+|(s3|gs|az|hf):", re.IGNORECASE)
_HUB = re.compile(r"datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")
#: Where another server than the provider's own stands; obstore reads them, and aborts on what is no URL.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}
_ODD = {"", ".", ".."}
_AT_ONCE = 8
#: Of a request to an object store.
_RETRIES: Any = {"max_retries": 8, "retry_timeout": dt.timedelta(minutes=1)}
_REQUEST: Any = {"connect_timeout": "10s", "allow_http": True}


def is_url(path: str | Path) -> bool:
    """Whether a path argument is a URL, of any scheme, or was meant to be one."""
    return _URL.match(str(path)) is not None


def url_of(path: str | Path) -> str:
    """A path argument that is a URL, as URLs are written: ``hf:ORG/NAME`` is ``hf://datasets/ORG/NAME``."""
    match = _URL.match(str(path))
    rest = str(path)[match.end() :] if match else ""
    if match is None or (match[1] is None and match[2].lower() != "hf"):
        return str(path)
    return f"{match[1].lower()}://{rest}" if match[1] else f"hf://datasets/{rest}"


def fetched(path: str | Path) -> Path:
    """A path argument as a local path: for a URL that of its copy, which is fetched first. Raises UsageError for a URL that
    is not supported, DataError when nothing is there, OutsideError when it cannot be fetched."""
    if not is_url(path):
        return Path(path)
    url = url_of(path)
    scheme, _, rest = url.partition("://")
    if scheme not in _CREDENTIALS:
        schemes = ", ".join(f"{known}://" for known in _CREDENTIALS)
        raise UsageError.bad_value("path", str(path), f"a local path, or a URL that begins with {schemes}")
    is_web = scheme in ("https", "http")
    if "@" in rest.partition("/")[0] or (re.search("[?#]", rest) and not is_web):
        raise UsageError(f"{url}: credentials and options do not belong in the path", hint=_CREDENTIALS[scheme])
    place = rest.partition("?")[0].rstrip("/")
    if _ODD & set(place.split("/")) or (is_web and "/" not in place):
        expected = "the address of a file" if is_web else "BUCKET/KEY, without empty or dotted parts"
        raise UsageError.bad_value("path", url, f"{scheme}://{expected}")
    with _attributed(url):
        local = (
            _from_web(url, place) if is_web else _from_hub(url, place) if scheme == "hf" else _from_store(scheme, place)
        )
    if not (local.exists() or glob.has_magic(url)):
        raise DataError.missing_path(url)
    return local


def copy_of(url: str | Path) -> Path:
    """Where the copy of a URL lies, if it was fetched."""
    scheme, _, rest = url_of(url).partition("://")
    return _cache() / scheme / rest.strip("/")


def is_copy(path: str | Path) -> bool:
    """Whether a local path is in the cache, where nothing else may be written."""
    return Path(path).absolute().is_relative_to(_cache())


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path raises without a home
    folder = Path(home, "gymdata", "fetched").absolute().resolve()
    for scheme in _CREDENTIALS:
        show_as(str(folder / scheme), f"{scheme}:/")
    return folder


def _describing(key: str) -> Iterator[str]:
    """Keys of the run.jsons that may describe a file, or a folder, from outside it."""
    folder = PurePosixPath(key).parent
    above = [folder / "run.json", *([folder.parent / "run.json"] if folder.name == "rollouts" else [])]
    yield from map(str, above)


def _from_store(scheme: str, place: str) -> Path:
    require("s3", "obstore")
    import obstore
    from obstore.store import AzureStore, GCSStore, S3Store

    for name in _ENDPOINTS[scheme]:
        if (server := os.environ.get(name)) and not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#@\s]*)?", server):
            raise UsageError.bad_value(name, server, "a URL such as http://127.0.0.1:9000, without a key")
    bucket, _, key = place.partition("/")
    open_bucket: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    store = open_bucket(bucket, client_options=_REQUEST, retry_config=_RETRIES)
    top = "/".join(takewhile(lambda word: not glob.has_magic(word), key.split("/")))
    objects: dict[str, Any] = {o["path"]: o for batch in obstore.list(store, prefix=top or None) for o in batch}
    # "*" has slashes here; of the copies, only what matches is read.
    patterns = [key.replace("**/", "*") + end for end in ("", "/*")]
    named = {name for name in objects if top == key or any(fnmatch.fnmatchcase(name, p) for p in patterns)} or {key}
    wanted = named | {outside for name in (key, *named) if name for outside in _describing(name)}
    for name in wanted - objects.keys():
        if top and not name.startswith(f"{top}/"):
            with contextlib.suppress(FileNotFoundError):
                objects[name] = obstore.head(store, name)
    copies = _cache() / scheme / bucket
    folders = {str(folder) for name in objects for folder in PurePosixPath(name).parents}
    files = [n for n in wanted & objects.keys() if n not in folders and not _ODD & set(n.split("/"))]
    from concurrent.futures import ThreadPoolExecutor  # Late: every command loads this module.

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda n: _from_object(store, objects[n], f"{scheme}://{bucket}/{n}", copies / n), files))
    for file in [*(copies / top).rglob("*"), *(copies / name for name in wanted)]:
        if file.is_file() and file.relative_to(copies).as_posix() not in objects:
            file.unlink(missing_ok=True)
    if not named & objects.keys():
        raise DataError.missing_path(f"{scheme}://{place}")
    return copies / key


def _from_object(store: Any, found: Any, url: str, copy: Path) -> None:
    import obstore

    tag = '"{}"'.format(found["e_tag"].strip('"'))  # Azure lists it without its quotes
    note = _note(copy)
    if copy.is_file() and copy.stat().st_size == found["size"] and note.is_file() and note.read_text() == tag:
        return
    with _attributed(url):
        answer = obstore.get(store, found["path"], options={"if_match": tag})
        _keep(copy, answer.stream(), tag, found["size"], url)


def _from_hub(url: str, place: str) -> Path:
    """Of one commit: copies of another lie elsewhere."""
    require("hub", "huggingface_hub")
    from huggingface_hub import HfApi, utils

    if (match := _HUB.fullmatch(place)) is None:
        raise UsageError.bad_value("path", url, "hf:ORG/NAME[@REVISION][/PATH], the repository of a dataset")
    repo, revision, inside = match.groups()
    # Exported by a lazy module, which mypy does not see through; a command has a bar of its own.
    lazy: Any = utils
    lazy.disable_progress_bars()
    hub: Any = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    # A branch such as refs/convert/parquet is written with %2F.
    named = revision and revision.replace("%2F", "/")
    sha = hub.repo_info(repo, repo_type="dataset", revision=named, timeout=60).sha
    folder = _cache() / "hf" / "datasets" / f"{repo}@{sha}"
    wanted = [inside, f"{inside}/*", *_describing(inside)] if inside else None
    hub.snapshot_download(repo, repo_type="dataset", revision=sha, local_dir=folder, allow_patterns=wanted)
    return folder / (inside or "")


def _from_web(url: str, place: str) -> Path:
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    import xxhash

    scheme, query = url.partition(":")[0], url.partition("#")[0].partition("?")[2]
    top = _cache() / (f"{scheme}~{xxhash.xxh64_hexdigest(query.encode())}" if query else scheme)
    show_as(str(top), f"{scheme}:/")
    local, note = top / place, _note(top / place)
    known = {"If-None-Match": note.read_text()} if local.is_file() and note.is_file() else {}
    try:
        with urlopen(Request(url, headers={"User-Agent": "gymdata", **known}), timeout=60) as answer:
            _keep(local, iter(lambda: answer.read(1 << 20), b""), answer.headers["ETag"], answer.length, url)
    except HTTPError as error:
        if error.code in (404, 410):
            raise DataError.missing_path(url) from error
        if error.code != 304:
            raise
    return local


def _note(copy: Path) -> Path:
    """Where the tag of a copy's source is written down."""
    return _cache() / "tags" / copy.relative_to(_cache())


def _keep(copy: Path, content: Iterable[Any], tag: str | None, size: int | None, url: str) -> None:
    """Make ``content`` the copy, once all of it is there. Without a tag it is fetched again the next time."""

    def blocks() -> Iterator[Any]:
        got = 0
        with _attributed(url):
            for block in content:
                got += len(block)
                yield block
            if size not in (None, got):
                raise EOFError(f"got {got:,} bytes of {size:,}")

    part, note = _cache() / "partial" / os.urandom(8).hex(), _note(copy)
    try:
        for folder in (part.parent, copy.parent, note.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.writelines(blocks())
            file.flush()
            os.fsync(file.fileno())
        note.unlink(missing_ok=True)
        part.replace(copy)
        if tag:
            note.write_text(tag)
    except OSError as error:
        raise StoreError.from_os(copy, error) from error
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _attributed(url: str) -> Iterator[None]:
    """What the libraries raise becomes an OutsideError of the system behind the URL."""
    scheme = url.partition(":")[0]
    system = {"hf": "hub", "https": "server", "http": "server"}.get(scheme, "object store")
    try:
        yield
    except (GymdataError, TypeError, LookupError, AttributeError):
        raise
    except Exception as error:
        text = " ".join(re.split(r"<\?xml|<[A-Z]|Debug source", str(error))[0].split())[:170] or type(error).__name__
        raise OutsideError(system, f"{url}: {text}", hint=_CREDENTIALS[scheme]) from error
