"""Runs and outputs below a URL: only the run.jsons are fetched; sizes and times are the store's."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from gymdata.errors import DataError
from gymdata.ls.output import Output, row_counts
from gymdata.remote import client
from gymdata.remote.client import Object
from gymdata.remote.places import is_odd, place_of
from gymdata.remote.reading import RUN_JSON
from gymdata.remote.upload import is_of_this_machine, is_open
from gymdata.store.paths import RunFacts, parsed_facts
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
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda one: client.read(place.at(one.key)), described))
    # Run.json → the objects that it describes: each is counted once, for the nearest one beside or above it.
    folders = {one.key.rpartition("/")[0]: one.key for one in described if one.key.rpartition("/")[2] == RUN_JSON}
    files = {one.key.removesuffix(_BESIDE): one.key for one in described if one.key.rpartition("/")[2] != RUN_JSON}
    owned: dict[str, list[Object]] = {one.key: [] for one in described}
    for key, item in found.items():
        run_json, above = files.get(key.removesuffix(_BESIDE)), key.rpartition("/")[0]
        while run_json is None and above not in folders and above:
            above = above.rpartition("/")[0]
        if (run_json := run_json or folders.get(above)) is not None:
            owned[run_json].append(item)
    outputs = []
    for described_by, body in zip(described, bodies, strict=True):
        if body is None:
            continue
        own, at = owned[described_by.key], place.at(described_by.key)
        folder, _, name = described_by.key.rpartition("/")
        of = folder if name == RUN_JSON else described_by.key.removesuffix(_BESIDE)
        facts: RunFacts = {}
        state = "damaged"
        with contextlib.suppress(DataError):
            facts = parsed_facts(body[0], str(at))
            state = state_left(facts)
        counts = row_counts(facts)
        if is_open(facts):
            ours = is_of_this_machine(at, body[0])
            state = "interrupted" if ours and not is_written(at.staged()) else "being written"
        outputs.append(
            Output(
                path=of.removeprefix(place.key).lstrip("/") or ".",
                kind=str(facts.get("stage", "unknown")),
                rows=sum(counts) if counts else None,
                bytes=sum(one.size for one in own),
                changed=max((one.changed for one in own), default=described_by.changed),
                parents=tuple(str(parent["path"]) for parent in facts.get("parents") or [] if parent.get("path")),
                state=state,
                experiment=facts.get("experiment"),
                tags=tuple(facts.get("tags") or ()),
            )
        )
    return str(place), tuple(outputs)
