"""Whether a place on an object store can be worked in: a small object is written, replaced and removed there."""

from __future__ import annotations

import contextlib
import secrets
from typing import Literal

from gymdata.errors import GymdataError
from gymdata.remote import client
from gymdata.remote.client import TakenError
from gymdata.remote.places import Place


def tried(place: Place) -> tuple[Literal["ok", "note", "fault"], str, str | None]:
    """State, what was found, and advice. Nothing stays there: neither the object nor, where there was none, a folder."""
    try:
        client.check_installed(place)
        if place.scheme == "hf":
            client.listed(place)
            return "note", f"{place}: can be read", "the Hub is only read: write to a local folder, or to a bucket"
        fault = _write(place)
    except GymdataError as error:
        return "fault", f"{place}: {error.message.replace(f'{place}: ', '')}", error.hint
    if fault is not None:
        return (
            "fault",
            f"{place}: {fault}",
            "two writers could overwrite each other: use a store with conditional writes",
        )
    return "ok", f"{place}: an object was written, replaced on condition, and deleted", None


def _write(place: Place) -> str | None:
    """The store's fault, or None. Raises OutsideError("object store")."""
    name = f".gymdata-doctor-{secrets.token_hex(4)}"
    one = place.at(f"{place.key}/{name}" if place.key else name)
    try:
        first = client.put(one, b"first", None)
        client.put(one, b"second", first)
        with contextlib.suppress(TakenError):
            client.put(one, b"third", first)
            return "replaces an object whatever the condition of the request"
        found = client.read(one)
        if found is None or found[0] != b"second":
            return f"an object that was written holds {'nothing' if found is None else 'something else'}"
    except TakenError:
        return "refuses to replace an object that is as it was last written"
    finally:
        with contextlib.suppress(GymdataError):
            client.delete(one)
    client.delete(one)
    return "an object is still there after it was deleted" if client.head(one) is not None else None
