"""A data set on the Hub: which one a name means, and making and reading its commits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gymdata.errors import OutsideError, RefusedError, StoreError, UsageError, option
from gymdata.publish.card import CARD, MARK
from gymdata.publish.preview import PREVIEW
from gymdata.remote import client
from gymdata.remote.hub import api, attributed
from gymdata.remote.places import Place, endpoint, is_url
from gymdata.store.paths import RUN_JSON, parsed_facts

#: Files that the Hub makes in a repository.
_THEIRS = {".gitattributes", CARD}
_AGAIN = "the same command again sends only what is missing"
_WANTED = "hf:ORG/NAME, hf:ORG/NAME@REVISION, or a local folder"


@dataclass(slots=True)
class Commit:
    """What was published. ``removed``: files of an earlier push; ``card_kept``: README.md was written by a person."""

    sha: str
    private: bool
    removed: list[str] = field(default_factory=list)
    card_kept: bool = False


def data_set(name: str | Path) -> tuple[str, str | None] | None:
    """(ORG/NAME, revision) of a data set on the Hub; None for a local path. Raises UsageError for another URL."""
    text = str(name)
    if not text.startswith("hf:"):
        if is_url(text):
            raise UsageError.bad_value("target", text, _WANTED)
        return None
    match = re.fullmatch(r"hf:(?://datasets/)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?", text)
    if match is None:
        raise UsageError.bad_value("target", text, _WANTED)
    return match[1], match[2]


def place_of(repo: str) -> Place:
    """What messages call a data set."""
    return Place("hf", "datasets", repo)


def publish(
    repo: str, revision: str | None, files: Mapping[str, Path | bytes], *, private: bool, overwrite: bool
) -> Commit:
    """Make one commit of ``files`` (name → a path, or its content) to a data set, which is made where it does not exist;
    files that it has are not sent again. What an earlier push left and this one has no longer is removed. Raises StoreError
    where the repository holds something else (without ``overwrite``) or has changed meanwhile."""
    with attributed(dataset := place_of(repo)):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        hub = api()
        hub.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        info = hub.repo_info(repo, repo_type="dataset", revision=revision, timeout=60)
        remote_files = set(hub.list_repo_files(repo, repo_type="dataset", revision=info.sha))
        if RUN_JSON not in remote_files and remote_files - _THEIRS and not overwrite:
            foreign = ", ".join(sorted(remote_files - _THEIRS)[:3])
            raise StoreError(
                f"{dataset}: holds what gymdata did not push: {foreign}",
                hint=f"give another name, or {option('overwrite', True)} to add to it",
            )

        def content(name: str) -> bytes:
            body = client.read(place_of(f"{repo}@{info.sha}").below(name)) if name in remote_files else None
            return body[0] if body is not None else b""

        earlier = set[str]()
        if run_json := content(RUN_JSON):
            named = parsed_facts(run_json, f"{dataset}/{RUN_JSON}").get("files") or []
            earlier = {str(entry["path"]) for entry in named} | {n for n in remote_files if n.startswith(f"{PREVIEW}/")}
        commit = Commit(str(info.sha), bool(info.private), sorted((earlier & remote_files) - set(files)))
        commit.card_kept = is_by_a_person(content(CARD).decode(errors="replace"))
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, file) for name, file in files.items() if not (commit.card_kept and name == CARD)
        ]
        operations += [CommitOperationDelete(name) for name in commit.removed]
        try:
            committed = hub.create_commit(
                repo,
                operations,
                repo_type="dataset",
                revision=revision,
                parent_commit=info.sha,
                commit_message="gymdata push",
            )
        except RuntimeError as error:
            # What the client raises for a file, of whatever cause.
            why = error.__cause__ or error
            raise OutsideError("object store", f"{dataset}: {why}", hint=_AGAIN, retryable=True) from error
        except HfHubHTTPError as error:
            if error.response.status_code not in (409, 412):
                raise
            raise StoreError(
                f"{dataset}: has changed since this push began", hint="run the same command again"
            ) from error
        commit.sha = str(committed.oid)
    return commit


def is_by_a_person(text: str) -> bool:
    """Whether a README.md has more than a header, and not the line of push."""
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL).strip()
    return bool(body) and MARK not in text


def fetch(repo: str, revision: str | None, folder: Path) -> str:
    """Download a data set that was pushed into ``folder``, where files that are complete stay. Returns the commit. Raises
    RefusedError for one without a run.json."""
    with attributed(dataset := place_of(repo)):
        from huggingface_hub import snapshot_download

        hub = api()
        info = hub.repo_info(repo, repo_type="dataset", revision=revision, timeout=60)
        remote_files = hub.list_repo_files(repo, repo_type="dataset", revision=info.sha)
        if RUN_JSON not in remote_files:
            raise RefusedError(
                f"{dataset}: has no {RUN_JSON}, so gymdata did not push it",
                hint=f"`gymdata import {dataset} -o RUN` reads data sets of known formats",
            )
        snapshot_download(
            repo, repo_type="dataset", revision=info.sha, local_dir=folder, endpoint=endpoint("hf"), max_workers=4
        )
    return str(info.sha)
