"""The requests that are sent to an object store, each bounded, retried and attributed.

Invariants: an object is written whole or not at all, and read whole or not at all; a refused conditional write has
succeeded after all when the object holds our bytes (the answer to an earlier try was lost); what the store refuses or a
network loses is an OutsideError("object store") that says what to do.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gymdata.errors import GymdataError, OutsideError, StoreError, redacted, require
from gymdata.store.objects import _hub
from gymdata.store.objects.places import Place, endpoint

#: Read with one request: what a lost connection costs.
_RANGE = 32 << 20
#: Larger files are sent in several requests, which no store makes conditional in one way.
WHOLE = 64 << 20
#: Time limits of one request, and of all its tries together.
_REQUEST_S, _TRIES_S = "GYMDATA_OBJECT_REQUEST_S", "GYMDATA_OBJECT_RETRY_S"
_RETRY_S = 180.0
#: Time limit of the check for a Google Cloud machine.
_METADATA_S = 3.0
#: After this long without a good answer, a message says that the request is retried.
LATE_S = 10.0
_LOG = logging.getLogger("gymdata")
_REQUEST = re.compile(r"^.* in [\d.]+[mµn]?s\b.*? - ")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


@dataclass(frozen=True, slots=True)
class Object:
    """An object as the store lists it. ``tag``: changes when its content does. ``changed``: ISO 8601, UTC."""

    key: str
    size: int
    tag: str
    changed: str


class TakenError(Exception):
    """A conditional write was refused: the object is not as the writer last knew it."""


def check_installed(place: Place) -> None:
    """Raise UsageError with the command that installs what a place needs, unless it is there."""
    extra, module = ("hub", "huggingface_hub") if place.scheme == "hf" else ("s3", "obstore")
    require(extra, module)


def listed(place: Place, tries: int = 4) -> list[Object]:
    """Every object below a place, by key."""
    if place.scheme == "hf":
        return [Object(*one) for one in _hub.files(place)]
    import obstore

    try:
        with _attributed(place):
            batches = obstore.list(_store(place), prefix=place.key or None)
            return sorted((_object(one) for batch in batches for one in batch), key=lambda one: one.key)
    except OutsideError as error:
        # The library makes requests again, but not a list whose answer broke off.
        if tries == 1 or "response body" not in error.reason:
            raise
        return listed(place, tries - 1)


def head(place: Place) -> Object | None:
    """One object; None when it does not exist."""
    if place.scheme == "hf":
        return Object(*found) if (found := _hub.file(place)) is not None else None
    import obstore

    with _attributed(place):
        try:
            return _object(obstore.head(_store(place), place.key))
        except FileNotFoundError:
            return None


def read(place: Place) -> tuple[bytes, str] | None:
    """The content and the tag of a small object; None when it does not exist."""
    if place.scheme == "hf":
        known = head(place)
        return (_hub.piece(place, 0, known.size), known.tag) if known is not None else None
    import obstore

    with _attributed(place):
        try:
            found = obstore.get(_store(place), place.key)
            return bytes(found.bytes()), _tag(found.meta)
        except FileNotFoundError:
            return None


def fetch(place: Place, known: Object, target: Path) -> bool:
    """Make ``target`` the object's content, whole; false when the object is no longer the ``known`` one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            while (start := file.tell()) < known.size:
                body = read_range(place, known, start, min(start + _RANGE, known.size))
                if body is None:
                    return False
                file.write(body)
        temporary.replace(target)
        return True
    except OSError as error:
        raise StoreError.from_os(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_range(place: Place, known: Object, start: int, end: int) -> Any:
    """The bytes from ``start`` to ``end`` of an object, as a buffer; None when the object is no longer the ``known`` one."""
    body = _hub.piece(place, start, end) if place.scheme == "hf" else _range(place, known, start, end)
    if body is None:
        return None
    if len(body) != end - start:
        raise OutsideError("object store", f"{place}: got {len(body):,} bytes of {end - start:,}", retryable=True)
    return body


def _range(place: Place, known: Object, start: int, end: int) -> Any:
    import obstore
    from obstore.exceptions import PreconditionError

    with _attributed(place):
        try:
            got = obstore.get(_store(place), place.key, options={"range": (start, end), "if_match": known.tag})
            return got.bytes()
        except (FileNotFoundError, PreconditionError):
            return None


def put(place: Place, body: bytes | Path, expected: str | Literal["any"] | None = "any") -> str:
    """Write an object whole; returns its tag. ``expected``: the tag that it must have now, None when there must be no such
    object, "any" when that does not matter. Raises TakenError when it is otherwise, and it does not hold ``body``."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    mode: Any = "overwrite" if expected == "any" else "create" if expected is None else _only(place, expected)
    size = len(body) if isinstance(body, bytes) else body.stat().st_size
    # Writes in several requests cannot be conditional.
    several: Any = {} if size <= WHOLE else {"use_multipart": True, "chunk_size": _RANGE, "max_concurrency": 4}
    whole: Any = {"mode": mode, "use_multipart": False}
    if several and expected is None and head(place) is not None:
        raise TakenError(str(place))
    with _attributed(place):
        try:
            done = obstore.put(_store(place), place.key, body, **(several or whole))
            tag = _tag(done)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
            if _NO_BUCKET.search(str(error)):
                raise
            found = read(place) if size <= WHOLE else None
            if found is None or found[0] != (body if isinstance(body, bytes) else body.read_bytes()):
                raise TakenError(str(place)) from error
            tag = found[1]
    kept = head(place)
    if kept is None or (kept.tag == tag and kept.size != size):
        got = "nothing" if kept is None else f"{kept.size:,} bytes"
        raise OutsideError("object store", f"{place}: was sent {size:,} bytes, and holds {got}", retryable=True)
    return tag


def delete(place: Place) -> None:
    """Remove an object; nothing happens when it does not exist."""
    import obstore

    with _attributed(place), contextlib.suppress(FileNotFoundError):
        obstore.delete(_store(place), place.key)


def _only(place: Place, expected: str) -> dict[str, str]:
    """The condition that an object has the tag ``expected``. Google compares generations, which its lists leave out."""
    import obstore

    if place.scheme != "gs":
        return {"e_tag": expected}
    with _attributed(place):
        try:
            found = obstore.head(_store(place), place.key)
        except FileNotFoundError:
            raise TakenError(str(place)) from None
    if _tag(found) != expected:
        raise TakenError(str(place))
    return {"version": str(found["version"])}


def _object(one: Any) -> Object:
    changed = one["last_modified"].astimezone(dt.UTC).isoformat(timespec="seconds")
    return Object(str(one["path"]), int(one["size"]), _tag(one), changed)


def _tag(one: Any) -> str:
    """The tag of an object, as a condition has it: Azure lists it without its quotes."""
    tag = str(one["e_tag"])
    return tag if tag.endswith('"') else f'"{tag}"'


def _store(place: Place) -> Any:
    check_installed(place)
    bounds = os.environ.get(_REQUEST_S), os.environ.get(_TRIES_S)
    return _made(place.scheme, place.bucket, endpoint(place.scheme), os.getpid(), *bounds)


@cache
def _made(scheme: str, bucket: str, address: str | None, _pid: int, request_s: str | None, tries_s: str | None) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    options: Any = {"timeout": f"{float(request_s or 120):g}s", "connect_timeout": "10s"}
    tries = dt.timedelta(seconds=float(tries_s or _RETRY_S))
    backoff: Any = {"init_backoff": dt.timedelta(milliseconds=100), "max_backoff": dt.timedelta(seconds=5), "base": 2}
    how: Any = {"retry_config": {"max_retries": 1000, "retry_timeout": tries, "backoff": backoff}}
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


@contextlib.contextmanager
def _attributed(place: Place) -> Iterator[None]:
    from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, PreconditionError
    from obstore.exceptions import UnauthenticatedError as Unknown

    late = threading.Timer(LATE_S, _say_late, (place,))
    late.daemon = True
    late.start()
    try:
        yield
    except (Unknown, PermissionDeniedError, PermissionError) as error:
        raise _refused(place, error) from error
    except (AlreadyExistsError, PreconditionError, GymdataError):
        raise
    except (BaseError, OSError, ValueError) as error:
        if _NO_BUCKET.search(str(error)):
            raise OutsideError("object store", f"{place.root}: there is no such bucket", final=True) from error
        if isinstance(error, FileNotFoundError):
            raise  # for single objects the caller handles it
        hint = f"is {_server(place)} reachable? The same command again sends or fetches only what is missing"
        text = _first(error)
        lost = any(
            word in str(error).lower() for word in ("169.254.169.254", "credential", "account must be specified")
        )
        if not lost and ("403 Forbidden" in text or "401 Unauthorized" in text):
            raise _refused(place, error) from error
        if lost:
            text = "found no credentials"
            hint = f"put them in the environment: {_KEYS[place.scheme]}"
        raise OutsideError("object store", f"{place}: {text}", hint=hint, retryable=True) from error
    finally:
        late.cancel()


def _say_late(place: Place) -> None:
    tries_s = float(os.environ.get(_TRIES_S) or _RETRY_S)
    text = "%s: no good answer from %s for %g s; retrying for up to %g min"
    _LOG.warning(text, place, _server(place), LATE_S, tries_s / 60)


def _server(place: Place) -> str:
    return redacted(endpoint(place.scheme) or f"the provider's server for {place.scheme}://")


def _refused(place: Place, error: BaseException) -> OutsideError:
    hint = f"is the key right, and may it read and write here? It is read from the environment: {_KEYS[place.scheme]}"
    return OutsideError("object store", f"{place}: {_first(error)}", hint=hint, final=True)


def _first(error: BaseException) -> str:
    """The library's message, without its structures, the request, and its retries."""
    text = str(error).strip().split("\n")[0].partition("<?xml")[0].partition("<Error>")[0].strip(" :")
    return _REQUEST.sub("", text)[:300] or type(error).__name__
