"""The Hugging Face Hub, as a store of objects that are only read: ``hf://datasets/ORG/REPO[@REVISION]/PATH``.

``hf://ORG/REPO`` is a model's repository, ``hf://spaces/…`` a space's, as in huggingface_hub. Invariant: within a
process every file of a repository is that of one commit, the one that was found first, so that nothing changes while it
is read. The token is the one that `hf auth login` keeps, or ``HF_TOKEN``; ``HF_ENDPOINT`` names another server.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from gymdata.errors import GymdataError, OutsideError, UsageError, needs, redacted
from gymdata.remote.places import Place, endpoint

_TYPES = {"datasets": "dataset", "spaces": "space", "models": "model"}


class Commit(NamedTuple):
    """A repository as it was at one time. ``changed``: ISO 8601, UTC, when it was made."""

    repo: str
    type: str
    sha: str
    changed: str


def files(location: Place) -> list[tuple[str, int, str, str]]:
    """Key, size in bytes, tag and time of each file below a location."""
    from huggingface_hub.errors import EntryNotFoundError

    with attributed(location):
        repo, inside = _repository(location)
        options = {"repo_type": repo.type, "revision": repo.sha, "recursive": True}
        try:
            entries = list(api().list_repo_tree(repo.repo, inside or None, **options))
        except EntryNotFoundError:
            return []
        return sorted(_listed(location, inside, repo, file) for file in entries if hasattr(file, "blob_id"))


def file(location: Place) -> tuple[str, int, str, str] | None:
    """One file, as ``files`` lists it; None when it does not exist."""
    with attributed(location):
        repo, inside = _repository(location)
        if not inside:
            return None
        entries = api().get_paths_info(repo.repo, inside, repo_type=repo.type, revision=repo.sha)
        return next((_listed(location, inside, repo, file) for file in entries if hasattr(file, "blob_id")), None)


def piece(location: Place, start: int, end: int) -> bytes:
    """The bytes from ``start`` to ``end`` of a file."""
    from huggingface_hub import hf_hub_url, utils

    # Exported by a lazy module, which mypy does not see through.
    lazy: Any = utils

    with attributed(location):
        if start == end:
            return b""
        repo, inside = _repository(location)
        url = hf_hub_url(repo.repo, inside, repo_type=repo.type, revision=repo.sha, endpoint=endpoint("hf"))
        headers = {**lazy.build_hf_headers(), "range": f"bytes={start}-{end - 1}"}
        answer = lazy.http_backoff("GET", url, headers=headers, timeout=120)
        lazy.hf_raise_for_status(answer)
        # A server without range requests sends the whole file.
        return bytes(answer.content[start:end] if answer.status_code == 200 else answer.content)


def _listed(location: Place, inside: str, repo: Commit, file: Any) -> tuple[str, int, str, str]:
    top = location.key.removesuffix(inside)
    top = f"{top}/" if top and not top.endswith("/") else top
    return f"{top}{file.path}", int(file.size), file.lfs.sha256 if file.lfs is not None else file.blob_id, repo.changed


def _repository(location: Place) -> tuple[Commit, str]:
    """The repository of a location, and the path inside it."""
    words = [location.bucket, *location.key.split("/")] if location.key else [location.bucket]
    kind = _TYPES[words.pop(0)] if words[0] in _TYPES else "model"
    if len(words) < 2 or not words[1]:
        raise UsageError.bad_value("path", str(location), "hf://datasets/ORG/REPO[@REVISION]/PATH, or hf://ORG/REPO/…")
    name, _, revision = words[1].partition("@")
    # A branch such as refs/convert/parquet is written with %2F.
    revision = revision.replace("%2F", "/")
    return _commit(f"{words[0]}/{name}", kind, revision or None, endpoint("hf"), os.getpid()), "/".join(words[2:])


@cache
def _commit(repo: str, kind: str, revision: str | None, _address: str | None, _pid: int) -> Commit:
    info: Any = api().repo_info(repo, repo_type=kind, revision=revision, timeout=60)
    changed = (info.last_modified or dt.datetime.fromtimestamp(0, dt.UTC)).astimezone(dt.UTC)
    return Commit(repo, kind, str(info.sha), changed.isoformat(timespec="seconds"))


def api() -> Any:
    """The Hub's client. Raises MissingExtraError without huggingface_hub."""
    with needs("hub"):
        from huggingface_hub import HfApi, utils
    # Exported by a lazy module, which mypy does not see through; a command has a bar of its own.
    lazy: Any = utils
    lazy.disable_progress_bars()
    return HfApi(endpoint=endpoint("hf"))


@contextlib.contextmanager
def attributed(location: Place) -> Iterator[None]:
    """What the Hub's client raises becomes OutsideError("object store"), or UsageError for a name that none can have."""
    from huggingface_hub import errors as hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # The timeout error of the HTTP library, which differs between versions of huggingface_hub.
    transport: Any = vars(hub)["HTTPError"]
    try:
        yield
    except GymdataError:
        raise
    except hub.OfflineModeIsEnabled as error:
        hint = "unset HF_HUB_OFFLINE, or download the repository and give its folder"
        raise OutsideError("object store", f"{location}: HF_HUB_OFFLINE is set", hint=hint, final=True) from error
    except HFValidationError as error:
        raise UsageError.bad_value("path", str(location), "the name of a repository on the Hub") from error
    except hub.RevisionNotFoundError as error:
        raise OutsideError("object store", f"{location}: there is no such revision", final=True) from error
    except (GatedRepoError, RepositoryNotFoundError) as error:
        reason = "the repository is gated" if isinstance(error, GatedRepoError) else "there is no such repository"
        hint = "is the name right? A private or gated repository needs a token: HF_TOKEN, or `hf auth login`"
        raise OutsideError("object store", f"{location}: {reason}", hint=hint, final=True) from error
    except (transport, OSError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403):
            hint = "give a token that may do this: HF_TOKEN, or `hf auth login`"
            raise OutsideError(
                "object store", f"{location}: the server answered {status}", hint=hint, final=True
            ) from error
        text = f"the server answered {status}" if status else str(error).strip().partition("\n")[0][:300]
        hint = (
            f"is {redacted(endpoint('hf') or 'the Hub')} reachable? The same command again fetches only what is missing"
        )
        raise OutsideError("object store", f"{location}: {text}", hint=hint, retryable=True) from error
