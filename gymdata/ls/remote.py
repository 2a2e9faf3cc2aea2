"""Runs and outputs below a URL: only the run.jsons are fetched; sizes and times are the store's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymdata.errors import DataError
from gymdata.ls.output import Output, row_counts
from gymdata.store.objects import client
from gymdata.store.objects.client import Object
from gymdata.store.objects.fetching import RUN_JSON, fetch_all, folder_of, is_marker
from gymdata.store.objects.places import Place, is_odd, place_of
from gymdata.store.paths import read_facts
from gymdata.store.run_json import is_written, state_left

_BESIDE = f".{RUN_JSON}"


def listed(url: str) -> tuple[str, tuple[Output, ...]]:
    """The URL as it is shown, and the outputs below it. Raises DataError when a folder has nothing, which
    an empty bucket may."""
    place = place_of(url)
    client.check_installed(place)
    found = {one.key: one for one in client.listed(place) if not is_odd(one.key)}
    if not found and place.key:
        raise DataError.missing_path(str(place), "a folder")
    described = [one for key, one in found.items() if key.endswith((f"/{RUN_JSON}", _BESIDE)) or key == RUN_JSON]
    fetch_all(place, described)
    owner = _owners(found, described)
    return str(place), tuple(_output(place, one, owner[one.key]) for one in described)


def _owners(found: Mapping[str, Object], described: Sequence[Object]) -> dict[str, list[Object]]:
    """Run.json → the objects that it describes: each is counted once, for the nearest one beside or above it."""
    folders = {folder_of(one.key): one.key for one in described if one.key.rpartition("/")[2] == RUN_JSON}
    files = {one.key.removesuffix(_BESIDE): one.key for one in described if one.key.rpartition("/")[2] != RUN_JSON}
    owned: dict[str, list[Object]] = {one.key: [] for one in described}
    for key, one in found.items():
        at = files.get(key.removesuffix(_BESIDE))
        above = folder_of(key)
        while at is None and above not in folders and above:
            above = folder_of(above)
        at = at or folders.get(above)
        if at is not None:
            owned[at].append(one)
    return owned


def _output(place: Place, run_json: Object, own: Sequence[Object]) -> Output:
    key = run_json.key
    of = folder_of(key) if key.rpartition("/")[2] == RUN_JSON else key.removesuffix(_BESIDE)
    facts: Mapping[str, Any] = {}
    damaged = False
    try:
        facts = read_facts(place.at(key).local)
    except DataError:
        damaged = True
    counts = row_counts(facts)
    claims = [place.at(one.key) for one in own if is_marker(one.key) or one.key == f"{of}/lock"]
    if any(is_written(place.at(key).local) or not _is_mine(claim) for claim in claims):
        state = "being written"
    else:
        state = "interrupted" if claims else state_left(facts)
    return Output(
        path=of.removeprefix(place.key).lstrip("/") or ".",
        kind=str(facts.get("stage", "unknown")),
        rows=sum(counts) if counts else None,
        bytes=sum(one.size for one in own if not is_marker(one.key)),
        changed=max((one.changed for one in own), default=run_json.changed),
        parents=tuple(str(parent["path"]) for parent in facts.get("parents") or [] if parent.get("path")),
        state="damaged" if damaged else state,
    )


def _is_mine(claim: Place) -> bool:
    """Whether a process of this machine, with this spool, made a lock or marker."""
    if not claim.state.is_file():
        return False
    found = client.read(claim)
    return found is not None and found[0] == claim.state.read_bytes()
