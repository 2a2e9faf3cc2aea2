"""Which paths are on an object store, and which local paths stand for them: those of a view, which readers take, and those
in the staging folder, which outputs are written to. People are shown the URL. Nothing here touches the network.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gymdata.errors import UsageError, redacted, show_as

#: Scheme → what an address of the server that it means here may stand in, the first one set wins.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"),
    "hf": ("HF_ENDPOINT",),
}
SPOOL = "GYMDATA_SPOOL"
#: A Path has lost one of the two slashes.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
#: What was meant to be a URL. ``hf:NAME`` is a data set.
_ALMOST = re.compile(r"(s3a?|gs|gcs|az|azure):(?!/)", re.IGNORECASE)
_ODD = {"", ".", ".."}
#: Spools that commands of this process named.
_spools: set[Path] = set()
_STAGING, _VIEWS = "staging", "views"


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket (of ``az``: a container) and a key in it, without slashes at its ends; an empty key is the whole bucket."""

    scheme: str
    bucket: str
    key: str

    @property
    def root(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def at(self, key: str) -> Place:
        """Another key of the same bucket."""
        return Place(self.scheme, self.bucket, key)

    def below(self, name: str) -> Place:
        """What has this name in the folder."""
        return self.at(f"{self.key}/{name}" if self.key else name)

    def staged(self, spool: Path | None = None) -> Path:
        """Where an output is written before it is uploaded."""
        return self.under((spool or default_spool()) / _STAGING)

    def under(self, base: Path) -> Path:
        """Its path in a staging folder or a view."""
        address = endpoint(self.scheme)
        # What distinguishes the mirrors of two servers.
        host = "" if address is None else address.partition("://")[2].rpartition("@")[2]
        server = "" if address is None else "@" + re.sub(r"[^A-Za-z0-9.-]+", "_", host)
        top = base / f"{self.scheme}{server}"
        show_as(str(top), f"{self.scheme}:/")
        return top / self.bucket / self.key


def default_spool() -> Path:
    """The local folder that holds what was fetched and what is on its way, where a command names no other."""
    if spool := os.environ.get(SPOOL):
        return Path(spool).absolute().resolve()
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 - Path raises without a home
    return Path(home, "gymdata", "objects").absolute().resolve()


def endpoint(scheme: str) -> str | None:
    """The address of the server where the environment gives another than the provider's own. Raises UsageError when it is
    no URL, or has a key in it."""
    for name in _ENDPOINTS[scheme]:
        if url := os.environ.get(name):
            if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#@\s]*)?", url):
                raise UsageError.bad_value(name, redacted(url), "a URL such as http://127.0.0.1:9000, without a key")
            return url
    return None


def is_url(path: str | Path) -> bool:
    """Whether a path argument is a URL, of any scheme, or was meant to be one; a drive letter is not a scheme."""
    return _SCHEME.match(str(path)) is not None or _ALMOST.match(str(path)) is not None


def url_of(path: str | Path) -> str:
    """A path argument that is a URL, with both of its slashes."""
    match = _SCHEME.match(str(path))
    return f"{match[1]}://{str(path)[match.end() :].lstrip('/')}" if match else str(path)


def place_of(path: str | Path) -> Place:
    """The location of a URL. Raises UsageError for a scheme that is not supported, a missing bucket, a key with empty
    or dotted parts, and for secrets in the URL."""
    url = url_of(path)
    if almost := _ALMOST.match(url):
        raise UsageError.bad_value(
            "path", url, f"{almost[1]}://BUCKET/KEY", f"for a local file or folder: {Path(url).absolute()}"
        )
    scheme, _, rest = url.partition("://")
    scheme = {"gcs": "gs", "s3a": "s3", "azure": "az"}.get(scheme.lower(), scheme.lower())
    if scheme not in _ENDPOINTS:
        schemes = ", ".join(f"{scheme}://" for scheme in _ENDPOINTS)
        raise UsageError.bad_value("path", url, f"a local path, or a URL that begins with {schemes}")
    bucket, _, key = rest.partition("/")
    if ("@" in bucket and scheme != "hf") or re.search(r"\?[^/#]*=", rest):
        raise UsageError(
            f"{url}: credentials and options do not belong in the path",
            hint="put them in the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL",
        )
    if odd := re.search(r"[?#]", rest):
        # The text after it may be a secret.
        before = url[: url.index(odd[0])]
        raise UsageError(
            f"{before}{odd[0]}…: {odd[0]!r} in a key is not supported: what follows it is no part of the path in a URL",
            hint=f"for any name, `*`; for one of several characters, `[...]`: {before}[0-9]",
        )
    key = key.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket) or (key and _ODD & set(key.split("/"))):
        raise UsageError.bad_value("path", url, f"{scheme}://BUCKET/KEY, without empty or dotted parts")
    return Place(scheme, bucket, key)


def staging(spool: Path | None) -> Path | None:
    """A staging folder that a command names, so that its paths are known as an object store's from now on."""
    if spool is None:
        return None
    _spools.add(resolved := spool.absolute().resolve())
    return resolved


def mirrored(path: str | Path) -> Place | None:
    """The location that a local path stands for, in a view or a staging folder; None for any other path."""
    local = Path(path).absolute()
    for spool in (default_spool(), *_spools):
        if not local.is_relative_to(spool):
            continue
        parts = local.relative_to(spool).parts
        depth = {_STAGING: 1, _VIEWS: 2}.get(parts[0] if parts else "", len(parts))
        if len(parts) > depth + 1:
            location = Place(parts[depth].partition("@")[0], parts[depth + 1], "/".join(parts[depth + 2 :]))
            location.under(Path(spool, *parts[:depth]))
            return location
    return None


def is_view(path: str | Path) -> bool:
    """Whether a local path is in a view, which is only read."""
    return Path(path).absolute().is_relative_to(default_spool() / _VIEWS)


@cache
def view_of(spool: Path, pid: int) -> Path:
    """A folder in the spool for what this process, ``pid``, reads. It is removed when the process ends; those of killed
    processes, now."""
    views = spool / _VIEWS
    views.mkdir(parents=True, exist_ok=True)
    host = os.uname().nodename
    for stale in views.glob(f"{glob.escape(host)}~*~*"):
        with contextlib.suppress(ValueError, PermissionError):
            try:
                os.kill(int(stale.name.split("~")[-2]), 0)
            except ProcessLookupError:
                shutil.rmtree(stale, ignore_errors=True)
    view = Path(tempfile.mkdtemp(prefix=f"{host}~{pid}~", dir=views))
    atexit.register(lambda: shutil.rmtree(view, ignore_errors=True) if os.getpid() == pid else None)
    return view


def is_spool(folder: Path) -> bool:
    """Whether a folder holds what is on object stores or on its way there."""
    tops = [folder / _STAGING, *(folder / _VIEWS).glob("*~*")]
    schemes = [store.name.partition("@")[0] for top in tops if top.is_dir() for store in top.iterdir()]
    return bool(schemes) and all(scheme in _ENDPOINTS for scheme in schemes)


def is_odd(key: str) -> bool:
    """Whether no file can have this key as its name."""
    return bool(_ODD & set(key.split("/"))) or "\0" in key
