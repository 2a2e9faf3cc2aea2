"""Reading from an object store: what a path argument needs is fetched into the spool, and read there like any file.

Of Parquet files a stand-in is created: a sparse file of the object's size without content, for which ``streams`` reads
the object itself. Invariants: an object is fetched once, as long as its tag, its size and the local copy stay the same;
what a command reads is one consistent state of the store (a run.json, and every file that it names); nothing local that
was never sent is replaced or removed; a stand-in is known by its date, in 1970, and never taken for the object.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymdata.errors import DataError, GymdataError, OutsideError, StoreError, counted
from gymdata.store.lock import is_held
from gymdata.store.objects import client
from gymdata.store.objects.client import Object
from gymdata.store.objects.places import SPOOL, Place, is_odd, is_url, mirrored, place_of

RUN_JSON = "run.json"
ROLLOUTS_FOLDER = "rollouts"
#: The object that a writer of an output holds while it replaces it.
MARKER = f".{RUN_JSON}.writing"
#: Files of gymdata's tables, and what describes them; models, checkpoints and pages are not fetched with a run.
_WANTED = re.compile(r"(.+\.)?run\.json|.+\.(parquet|pq|journal|csv|tsv|arrow|(json|jsonl|ndjson)(\.gz|\.zst)?)")
#: Suffixes of objects that are read in place.
_STREAMED = (".parquet", ".pq")
#: Stand-ins are dated before this, in the first year after 1970.
_STAND_INS_NS = 365 * 86_400 * 1_000_000_000
#: How often a state that changed meanwhile is read again.
_LOOKS = 5
_AT_ONCE = 8


def located(path: str | Path) -> Path:
    """A path argument as a local path: for a URL the place in the spool that it was fetched to, else the path itself.
    For a folder the tables and run.jsons below it are fetched, for a file those that describe it. Raises UsageError for
    a URL that is not supported, DataError when nothing is there or it is half written, OutsideError("object store"),
    StoreError when the spool holds rows of it that were never sent and the store has other ones.
    """
    if not is_url(path):
        return Path(path)
    place = place_of(path)
    bring(place)
    return place.local


def bring(place: Place, *, writing: bool = False) -> None:
    """Fetch the objects that ``place`` means. ``writing``: for an output, which may be missing or half written."""
    client.check_installed(place)
    for _ in range(_LOOKS):
        if _bring(place, writing):
            return
    raise OutsideError(
        "object store", f"{place}: changes faster than it can be fetched", hint="try again", retryable=True
    )


def _bring(place: Place, writing: bool) -> bool:
    """False when it changed meanwhile."""
    there = _objects(place)
    if not there and not writing:
        raise DataError.missing_path(str(place))
    if writing:
        # The run.jsons of enclosing folders decide whether an output may be there.
        known = {one.key for one in there}
        names = (key for key in _describing_file(place.key) if key not in known)
        there += [one for one in (client.head(place.at(key)) for key in names) if one is not None]
    described = [one for one in there if is_marker(one.key)]
    if not writing:
        _refuse_half(place, described)
    half = set() if writing else {folder_of(one.key) for one in described if one.key.endswith(f"/{MARKER}")}
    wanted = [
        one
        for one in there
        if (_WANTED.fullmatch(one.key.rpartition("/")[2]) or one.key == place.key)
        and not is_odd(one.key)
        and folder_of(one.key) not in half
    ]
    forget_gone(place, wanted)
    return fetch_all(place, wanted, writing=writing) and _is_whole(place, wanted)


def fetch_all(place: Place, wanted: Sequence[Object], *, writing: bool = False) -> bool:
    """Make the mirror hold these objects; false when one of them changed meanwhile."""
    from concurrent.futures import ThreadPoolExecutor

    missing = [one for one in wanted if not is_current(place.at(one.key), one) and not _is_same(place.at(one.key), one)]
    if not writing:
        # Files that a process of this machine writes are in the spool before they are on the store.
        missing = [one for one in missing if not is_held(top_of(place, one.key).local)]
    refuse_diverged(place, missing)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        whole = all(list(pool.map(lambda one: _fetch(place.at(one.key), one), missing)))
    for one in wanted:
        # Left by a process that was stopped after sending it.
        if is_table(one.key) and not is_held(top_of(place, one.key).local):
            stand_in(place.at(one.key))
    return whole


def _is_same(place: Place, known: Object) -> bool:
    """Whether the store has the same content as a local file that counts as unsent: its process may have been stopped
    just after sending it."""
    if not place.local.is_file() or is_sent(place):
        return False
    if (sent := place.state.with_suffix(".sent")).is_file() and sent.stat().st_size == known.size:
        # A run.json that was sent, and has changed here since.
        found = client.read(place)
        if found is not None and found == (sent.read_bytes(), known.tag):
            remember(place, known.tag, sent.stat())
            return True
    if place.local.stat().st_size != known.size:
        return False
    import filecmp

    other = place.state.with_suffix(".other")
    try:
        same = client.fetch(place, known, other) and filecmp.cmp(place.local, other, shallow=False)
    finally:
        other.unlink(missing_ok=True)
    if same:
        remember(place, known.tag)
    return same


def _fetch(place: Place, known: Object) -> bool:
    if is_table(known.key):
        _stand_in(place, known.tag, known.size)
        return True
    if not client.fetch(place, known, place.local):
        return False
    remember(place, known.tag)
    return True


def _objects(place: Place) -> list[Object]:
    """The objects that a path argument means, with the run.jsons and markers that describe them."""
    words = place.key.split("/")
    magic = next((n for n, word in enumerate(words) if glob.has_magic(word)), None)
    literal = place.key if magic is None else "/".join(words[:magic])
    known = {one.key: one for one in client.listed(place.at(literal))}
    chosen = known if magic is None else {key: one for key, one in known.items() if _matches(key.split("/"), words)}
    single = None if chosen or magic is not None or not place.key else client.head(place)
    if single is not None:
        chosen = {single.key: single}
    wanted = set(_describing_folder(place.key)) if magic is None and single is None and chosen else set()
    if magic is not None or single is not None:
        wanted = {name for key in chosen for name in _describing_file(key)}

    def look(key: str) -> Object | None:
        listed = not literal or key.startswith(f"{literal}/")
        return known.get(key) if listed else client.head(place.at(key))

    described = [one for key in sorted(wanted - chosen.keys()) if (one := look(key)) is not None]
    return [*chosen.values(), *described]


def _describing_folder(folder: str) -> Iterator[str]:
    """Keys of what describes a folder from outside it."""
    above, _, name = folder.rpartition("/")
    if name == ROLLOUTS_FOLDER:
        yield from (_inside(above, RUN_JSON), _inside(above, MARKER))


def _describing_file(key: str) -> Iterator[str]:
    folder = folder_of(key)
    yield from (f"{key}.{RUN_JSON}", marker_of(key), _inside(folder, RUN_JSON), _inside(folder, MARKER))
    yield from _describing_folder(folder)


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _matches(words: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a key, or a folder of it, matches the pattern."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(words[n:], pattern[1:]) for n in range(len(words) + 1))
    hidden = words and words[0].startswith(".") and not pattern[0].startswith(".")
    return bool(words) and not hidden and fnmatch.fnmatchcase(words[0], pattern[0]) and _matches(words[1:], pattern[1:])


def folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def marker_of(key: str) -> str:
    """The marker of an output that is a single file."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}.{name}{MARKER}"


def is_marker(key: str) -> bool:
    return key.rpartition("/")[2].startswith(".") and key.endswith(MARKER)


def _refuse_half(place: Place, markers: Sequence[Object]) -> None:
    """Raises DataError when what the path names is being written, or its writer was stopped in the middle."""
    for one in markers:
        of_folder = one.key == (f"{place.key}/{MARKER}" if place.key else MARKER)
        if of_folder or one.key in (marker_of(place.key), f"{folder_of(place.key)}/{MARKER}"):
            error = DataError(
                f"{place}: is unfinished: since {one.changed} a writer has been replacing it",
                hint="wait for it, or run the command that writes it again: it finishes this first",
            )
            error.exit_code = 1
            raise error


def _is_whole(place: Place, wanted: Sequence[Object]) -> bool:
    """Whether every file that a fetched run.json names is there, where its folder was fetched: a run.json that is newer than
    the list names more."""
    keys = {one.key for one in wanted}
    for one in wanted:
        if one.key.rpartition("/")[2] != RUN_JSON or not (folder_of(one.key) + "/").startswith(f"{place.key}/"):
            continue
        try:
            named = json.loads(place.at(one.key).local.read_bytes()).get("files") or []
            paths = [f"{folder_of(one.key)}/{entry['path']}".lstrip("/") for entry in named]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the reader reports it
        late = [
            key for key in paths if key not in keys and _WANTED.fullmatch(key.rpartition("/")[2]) and not is_odd(key)
        ]
        if any(client.head(place.at(key)) is not None for key in late):
            return False
    return True


# The spool's record of an object: the tag, and the size and time of the local copy that is the same.


def remember(place: Place, tag: str, stat: os.stat_result | None = None) -> None:
    """The local copy, as it is now or was at ``stat``, is the object with this tag."""
    stat = stat or place.local.stat()
    _write_state(place, {"tag": tag, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns})


def _write_state(place: Place, state: Mapping[str, Any]) -> None:
    place.state.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.state.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_text(json.dumps(state))
    temporary.replace(place.state)


def known_tag(place: Place) -> str | None:
    """The tag of the object when it was last fetched or sent; None when it never was."""
    try:
        return str(json.loads(place.state.read_bytes())["tag"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_sent(place: Place) -> bool:
    """Whether the local copy is as it was fetched or sent."""
    try:
        held, stat = json.loads(place.state.read_bytes()), place.local.stat()
    except (OSError, ValueError):
        return False
    # A stand-in never holds what was not sent, even while it is being replaced by another one.
    return _is_stand_in(stat) or (held.get("size"), held.get("mtime_ns")) == (stat.st_size, stat.st_mtime_ns)


def is_table(key: str) -> bool:
    """Whether an object is read where it is."""
    return key.endswith(_STREAMED)


def stand_in(place: Place) -> None:
    """Remove the content of a local copy that the store has as it is here, and nothing else."""
    if not (is_table(place.key) and place.local.is_file() and is_sent(place)) or (tag := known_tag(place)) is None:
        return
    stat = place.local.stat()
    if not _is_stand_in(stat):
        _stand_in(place, tag, stat.st_size)


def _stand_in(place: Place, tag: str, size: int) -> None:
    place.local.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.local.with_name(f".{place.local.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.truncate(size)
        # Another time for another object: what is made from a file is known by its size and time.
        date = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest()) % _STAND_INS_NS
        os.utime(temporary, ns=(date, date))
        remember(place, tag, temporary.stat())
        temporary.replace(place.local)
    except OSError as error:
        raise StoreError.from_os(place.local, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def stood_for(path: str | Path) -> tuple[Place, Object] | None:
    """The object of a stand-in file; None for any other file."""
    try:
        if not _is_stand_in(os.stat(path)):  # noqa: PTH116 - for every file that is opened
            return None
        place = mirrored(Path(path).resolve())
        held = json.loads(place.state.read_bytes()) if place is not None else {}
        return (place, Object(place.key, held["size"], held["tag"], "")) if place is not None else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_stand_in(stat: os.stat_result) -> bool:
    return 0 <= stat.st_mtime_ns < _STAND_INS_NS


def known_hash(place: Place, tag: str) -> str | None:
    """The hash of the object with this tag, where it was read before."""
    try:
        held = json.loads(place.state.read_bytes())
        return str(held["xxh3"]) if held["tag"] == tag else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember_hash(place: Place, tag: str, xxh3: str) -> None:
    """Keep it for the next process."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        held = json.loads(place.state.read_bytes())
        if held["tag"] == tag:
            _write_state(place, held | {"xxh3": xxh3})


def forget(place: Place) -> None:
    place.state.unlink(missing_ok=True)


def is_current(place: Place, known: Object) -> bool:
    """Whether the mirror has this object, or what was made of it here and is not sent yet."""
    if not place.local.is_file():
        return False
    return known_tag(place) == known.tag


def unsent(place: Place) -> list[Path]:
    """Files in the spool below a place that the store was never sent as they are."""
    if not place.local.is_dir():
        files = [place.local] if place.local.is_file() else []
    else:
        files = [file for file in place.local.rglob("*") if file.is_file()]
    return [file for file in files if _counts(file) and not is_sent(place.at(_key(place, file)))]


def _counts(file: Path) -> bool:
    return bool(_WANTED.fullmatch(file.name)) and not file.name.startswith(".") and file.stat().st_size > 0


def _key(place: Place, file: Path) -> str:
    below = file.relative_to(place.local) if file != place.local else Path()
    return "/".join(part for part in (place.key, *below.parts) if part)


def refuse_diverged(place: Place, missing: Sequence[Object]) -> None:
    """Raises StoreError when one of these objects was written elsewhere while the spool holds what was never sent of the
    same output."""
    for top in {top_of(place, one.key) for one in missing}:
        kept = [file for file in unsent(top) if file.parent in (top.local, top.local / ROLLOUTS_FOLDER)]
        if top.key and kept:
            raise StoreError(
                f"{top}: another machine has written here, and "
                f"{counted(len(kept), 'file of this one was', 'files of this one were')} never sent "
                f"(first: {kept[0].name})",
                hint=f"they stay in the spool, {place.spool}; set {SPOOL} to another folder to continue from what was sent",
            )


def top_of(place: Place, key: str) -> Place:
    """The output folder that an object belongs to."""
    folder = folder_of(key)
    return place.at(folder_of(folder) if folder.rpartition("/")[2] == ROLLOUTS_FOLDER else folder)


def forget_gone(place: Place, wanted: Sequence[Object]) -> None:
    """Remove copies of objects that are no longer there."""
    keys = {one.key for one in wanted}
    if not place.local.is_dir():
        return
    for file in place.local.rglob("*"):
        one = place.at(_key(place, file))
        if file.is_file() and one.key not in keys and is_sent(one):
            file.unlink()
            forget(one)


def described(url: str) -> Path | None:
    """The local path of a URL's run.json, as readers of run.jsons take it; None when it is gone, or the store cannot be
    reached: lineage ends there."""
    try:
        place = place_of(url)
        names = [_inside(place.key, RUN_JSON), *(key for key in _describing_file(place.key) if key.endswith(RUN_JSON))]
        for one in filter(None, (client.head(place.at(key)) for key in dict.fromkeys(names))):
            if fetch_all(place, [one]):
                return place.local
    except GymdataError:
        pass
    return None
