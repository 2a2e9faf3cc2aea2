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
    root = place_of(url)
    client.check_installed(root)
    objects = {o.key: o for o in client.listed(root) if not is_odd(o.key)}
    if not objects and root.key:
        raise DataError.missing_path(str(root), "a folder")
    described = [o for key, o in objects.items() if key.endswith((f"/{RUN_JSON}", _BESIDE)) or key == RUN_JSON]
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda o: client.read(root.at(o.key)), described))
    # Run.json → the objects that it describes: each is counted once, for the nearest one beside or above it.
    folders = {o.key.rpartition("/")[0]: o.key for o in described if o.key.rpartition("/")[2] == RUN_JSON}
    files = {o.key.removesuffix(_BESIDE): o.key for o in described if o.key.rpartition("/")[2] != RUN_JSON}
    owned: dict[str, list[Object]] = {o.key: [] for o in described}
    for key, item in objects.items():
        run_json, above = files.get(key.removesuffix(_BESIDE)), key.rpartition("/")[0]
        while run_json is None and above not in folders and above:
            above = above.rpartition("/")[0]
        if (run_json := run_json or folders.get(above)) is not None:
            owned[run_json].append(item)
    outputs = []
    for described_by, body in zip(described, bodies, strict=True):
        if body is None:
            continue
        contents, location = owned[described_by.key], root.at(described_by.key)
        folder, _, name = described_by.key.rpartition("/")
        of = folder if name == RUN_JSON else described_by.key.removesuffix(_BESIDE)
        facts: RunFacts = {}
        state = "damaged"
        with contextlib.suppress(DataError):
            facts = parsed_facts(body[0], str(location))
            state = state_left(facts)
        counts = row_counts(facts)
        if is_open(facts):
            ours = is_of_this_machine(location, body[0])
            state = "interrupted" if ours and not is_written(location.staged()) else "being written"
        outputs.append(
            Output(
                path=of.removeprefix(root.key).lstrip("/") or ".",
                kind=str(facts.get("stage", "unknown")),
                rows=sum(counts) if counts else None,
                bytes=sum(o.size for o in contents),
                changed=max((o.changed for o in contents), default=described_by.changed),
                parents=tuple(str(parent["path"]) for parent in facts.get("parents") or [] if parent.get("path")),
                state=state,
                experiment=facts.get("experiment"),
                tags=tuple(facts.get("tags") or ()),
            )
        )
    return str(root), tuple(outputs)
