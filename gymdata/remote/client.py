"""The requests that are sent to an object store, each bounded, retried and attributed.

Invariants: an object is written whole or not at all; a refused conditional write has succeeded after all when the object
holds our bytes (the answer to an earlier try was lost).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from gymdata.errors import GymdataError, OutsideError, StoreError, UsageError, redacted, require
from gymdata.remote import hub
from gymdata.remote.places import Place, endpoint

#: Read with one request: what a lost connection costs.
_RANGE = 32 << 20
#: Larger files are sent in several requests, which no store makes conditional, where their name is of their content alone.
WHOLE = 64 << 20
#: The largest object that stores take in one request.
_LARGEST = 5_000_000_000
#: Time limits of one request, and of all its tries together.
_REQUEST_S, _TRIES_S = "GYMDATA_OBJECT_REQUEST_S", "GYMDATA_OBJECT_RETRY_S"
_RETRY_S = 180.0
#: After this long without a good answer, a message says that the request is retried.
LATE_S = 10.0
#: Time limit of the check for a Google Cloud machine.
_METADATA_S = 3.0
_LOG = logging.getLogger("gymdata")
_REQUEST = re.compile(r"^.* in [\d.]+[mµn]?s\b.*? - ")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Object:
    """An object as the store lists it. ``tag``: changes when its content does. ``changed``: ISO 8601, UTC."""

    key: str
    size: int
    tag: str
    changed: str


class TakenError(Exception):
    """A conditional write was refused: the object is not as the writer last knew it."""


def check_installed(location: Place) -> None:
    """Raise UsageError with the command that installs what a location needs, unless it is there."""
    extra, module = ("hub", "huggingface_hub") if location.scheme == "hf" else ("s3", "obstore")
    require(extra, module)


def listed(location: Place) -> list[Object]:
    """Every object below a location, by key."""
    if location.scheme == "hf":
        return [Object(*file) for file in hub.files(location)]
    import obstore

    def list_all(store: Any) -> list[Object]:
        batches = obstore.list(store, prefix=location.key or None)
        return sorted((_object(meta) for batch in batches for meta in batch), key=lambda o: o.key)

    return _request(location, list_all)


def head(location: Place) -> Object | None:
    """One object; None when it does not exist."""
    if location.scheme == "hf":
        return Object(*file) if (file := hub.file(location)) is not None else None
    import obstore

    with contextlib.suppress(FileNotFoundError):
        return _request(location, lambda store: _object(obstore.head(store, location.key)))
    return None


def read(location: Place) -> tuple[bytes, str] | None:
    """The content and the tag of a small object; None when it does not exist."""
    if location.scheme == "hf":
        file = head(location)
        return (hub.piece(location, 0, file.size), file.tag) if file is not None else None
    import obstore

    def get(store: Any) -> tuple[bytes, str]:
        answer = obstore.get(store, location.key)
        return bytes(answer.bytes()), _tag(answer.meta)

    with contextlib.suppress(FileNotFoundError):
        return _request(location, get)
    return None


def fetch(location: Place, expected: Object, target: Path) -> bool:
    """Make ``target`` the object's content, whole; false when the object is no longer the ``expected`` one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            while (start := file.tell()) < expected.size:
                body = read_range(location, expected, start, min(start + _RANGE, expected.size))
                if body is None:
                    return False
                file.write(body)
        temporary.replace(target)
        return True
    except OSError as error:
        raise StoreError.from_os(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_range(location: Place, expected: Object, start: int, end: int) -> Any:
    """The bytes from ``start`` to ``end`` of an object, as a buffer; None when it is no longer the ``expected`` one."""
    import obstore
    from obstore.exceptions import PreconditionError

    def get(store: Any) -> Any:
        options: Any = {"range": (start, end), "if_match": expected.tag}
        return obstore.get(store, location.key, options=options).bytes()

    try:
        body = hub.piece(location, start, end) if location.scheme == "hf" else _request(location, get)
    except (FileNotFoundError, PreconditionError):
        return None
    if len(body) != end - start:
        raise OutsideError("object store", f"{location}: got {len(body):,} bytes of {end - start:,}", retryable=True)
    return body


def put(location: Place, body: bytes | Path, expected: str | None = None, *, by_content: bool = False) -> str:
    """Write an object; returns its tag. ``expected``: the tag that it must have now, None when there must be no such object.
    ``by_content``: its name is of its content, so that whoever writes it, and however late, writes the same. Raises
    TakenError when it is otherwise, and does not hold ``body``."""
    size = len(body) if isinstance(body, bytes) else body.stat().st_size
    if by_content and (stored := head(location)) is not None and stored.size == size:
        return stored.tag
    in_parts = by_content and size > WHOLE
    if not in_parts and size > _LARGEST:
        raise UsageError(
            f"{location}: {size:,} bytes, and a store takes at most {_LARGEST:,} in one request",
            hint="give a folder as -o: its files are sent in several",
        )
    with contextlib.ExitStack() as stack:
        content: Any = body
        if isinstance(body, Path) and not in_parts:
            # Mapped, so that a large file takes no memory.
            file = stack.enter_context(body.open("rb"))
            content = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""
        tag = _put(location, content, expected, size, in_parts=in_parts)
    stored = head(location)
    if stored is None or (stored.tag == tag and stored.size != size):
        actual = "nothing" if stored is None else f"{stored.size:,} bytes"
        raise OutsideError("object store", f"{location}: was sent {size:,} bytes, and holds {actual}", retryable=True)
    return tag


def _put(location: Place, content: Any, expected: str | None, size: int, *, in_parts: bool) -> str:
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    def send(store: Any) -> str:
        how: dict[str, Any] = {"use_multipart": in_parts}
        if in_parts:
            how |= {"chunk_size": _RANGE, "max_concurrency": 4}
        elif expected is None:
            how["mode"] = "create"
        elif location.scheme != "gs":
            how["mode"] = {"e_tag": expected}
        else:
            # Google compares generations, which its lists leave out.
            meta: Any = obstore.head(store, location.key)
            if _tag(meta) != expected:
                raise TakenError(str(location))
            how["mode"] = {"version": str(meta["version"])}
        return _tag(obstore.put(store, location.key, content, **how))

    try:
        # A connection of 1 MB/s must do.
        return _request(location, send, 0.0 if in_parts else size / 1e6)
    except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
        if in_parts:
            raise
        stored = head(location)
        current = read(location) if stored is not None and stored.size == size else None
        if current is not None and current[0] == bytes(content):
            return current[1]
        raise TakenError(str(location)) from error


def delete(location: Place) -> None:
    """Remove an object; nothing happens when it does not exist."""
    import obstore

    with contextlib.suppress(FileNotFoundError):
        _request(location, lambda store: obstore.delete(store, location.key))


def _object(meta: Any) -> Object:
    changed = meta["last_modified"].astimezone(dt.UTC).isoformat(timespec="seconds")
    return Object(str(meta["path"]), int(meta["size"]), _tag(meta), changed)


def _tag(meta: Any) -> str:
    """The tag of an object, as a condition has it: Azure lists it without its quotes."""
    tag = str(meta["e_tag"])
    return tag if tag.endswith('"') else f'"{tag}"'


@cache
def _store(scheme: str, bucket: str, address: str | None, _pid: int, request_s: float, tries_s: float) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    options: Any = {"timeout": f"{request_s:g}s", "connect_timeout": "10s"}
    backoff: Any = {"init_backoff": dt.timedelta(milliseconds=100), "max_backoff": dt.timedelta(seconds=5), "base": 2}
    tries: Any = {"max_retries": 1000, "retry_timeout": dt.timedelta(seconds=tries_s), "backoff": backoff}
    how: Any = {"retry_config": tries}
    if address is not None and address.startswith("http://"):
        options["allow_http"] = True
    if address is not None:
        how["base_url" if scheme == "gs" else "endpoint"] = address
    if scheme == "gs":
        if address is None and not _has_google_credentials():
            hint = f"put them in the environment: {_KEYS['gs']}"
            raise OutsideError("object store", f"gs://{bucket}: found no credentials", hint=hint, final=True)
        return GCSStore(bucket, client_options=options, **how)
    if scheme == "az":
        return AzureStore(bucket, client_options=options, **how)
    if (provider := _shared_credentials()) is not None:
        how["credential_provider"] = provider
    return S3Store(bucket, client_options=options, **how)


def _has_google_credentials() -> bool:
    """Whether there are credentials: in the environment, of gcloud, or of a Google Cloud machine. The machine's
    metadata server gets only seconds to answer, as in google-auth (GCE_METADATA_HOST); the library would try it as long
    as any request."""
    home = Path(os.path.expanduser("~/.config/gcloud/application_default_credentials.json"))  # noqa: PTH111 - as below
    if any(name.startswith(("GOOGLE_", "SERVICE_ACCOUNT")) for name in os.environ) or home.is_file():
        return True
    from http.client import HTTPConnection, HTTPException

    server = HTTPConnection(os.environ.get("GCE_METADATA_HOST") or "169.254.169.254", timeout=_METADATA_S)
    with contextlib.suppress(OSError, HTTPException), contextlib.closing(server):
        server.request("GET", "/", headers={"Metadata-Flavor": "Google"})
        return server.getresponse().getheader("Metadata-Flavor") == "Google"
    return False


def _shared_credentials() -> Any:
    """The profile of ~/.aws where the environment has no key, and boto3, which knows how to read one, is there."""
    home = Path(os.path.expanduser("~/.aws"))  # noqa: PTH111 - Path raises without a home
    if "AWS_ACCESS_KEY_ID" in os.environ or not home.is_dir():
        return None
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = boto3.Session()
    return Boto3CredentialProvider(session) if session.get_credentials() is not None else None


def _request(location: Place, send: Callable[[Any], T], more_s: float = 0.0) -> T:
    """The answer of ``send``, which is given the store, tried again while errors are transient. ``more_s``: its time limit
    beyond that of any request. Raises OutsideError("object store"), and what ``send`` raises about the object itself."""
    limit_s = float(os.environ.get(_TRIES_S) or _RETRY_S)
    began, reported = time.monotonic(), False
    while True:
        try:
            with _attributed(location):
                check_installed(location)
                request_s = float(os.environ.get(_REQUEST_S) or 120) + more_s
                # Tries within the library; those of this loop are more.
                tries_s = min(LATE_S, limit_s)
                address = endpoint(location.scheme)
                return send(_store(location.scheme, location.bucket, address, os.getpid(), request_s, tries_s))
        except OutsideError as error:
            if error.final or time.monotonic() - began >= limit_s:
                raise
        if not reported and time.monotonic() - began >= min(LATE_S, limit_s / 2):
            text = "%s: no good answer from %s for %.0f s; retrying for up to %g min"
            _LOG.warning(text, location, _server(location), time.monotonic() - began, limit_s / 60)
            reported = True
        time.sleep(min(0.1, limit_s))


@contextlib.contextmanager
def _attributed(location: Place) -> Iterator[None]:
    from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, PreconditionError
    from obstore.exceptions import UnauthenticatedError as Unknown

    try:
        yield
    except (Unknown, PermissionDeniedError, PermissionError) as error:
        raise _refused(location, error) from error
    except (AlreadyExistsError, PreconditionError, GymdataError):
        raise
    except (BaseError, OSError, ValueError) as error:
        if _NO_BUCKET.search(str(error)):
            raise OutsideError("object store", f"{location.root}: there is no such bucket", final=True) from error
        if isinstance(error, FileNotFoundError):
            raise  # for single objects the caller handles it
        text = _first(error)
        lost = ("169.254.169.254", "credential", "account must be specified")
        if any(word in str(error).lower() for word in lost):
            hint = f"put them in the environment: {_KEYS[location.scheme]}"
            raise OutsideError("object store", f"{location}: found no credentials", hint=hint, final=True) from error
        if "403 Forbidden" in text or "401 Unauthorized" in text:
            raise _refused(location, error) from error
        hint = f"is {_server(location)} reachable? The same command again sends or fetches only what is missing"
        raise OutsideError("object store", f"{location}: {text}", hint=hint, retryable=True) from error


def _server(location: Place) -> str:
    return redacted(endpoint(location.scheme) or f"the provider's server for {location.scheme}://")


def _refused(location: Place, error: BaseException) -> OutsideError:
    hint = f"check the credentials and their permissions; they come from the environment: {_KEYS[location.scheme]}"
    return OutsideError("object store", f"{location}: {_first(error)}", hint=hint, final=True)


def _first(error: BaseException) -> str:
    """The library's message, without its structures, the request, and its retries."""
    text = str(error).strip().split("\n")[0].partition("<?xml")[0].partition("<Error>")[0].strip(" :")
    return _REQUEST.sub("", text)[:300] or type(error).__name__
