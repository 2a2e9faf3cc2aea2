"""state.json: which stages of which epochs are done, and their results.

Invariants: a stage is done when the file says so, and it says so only after what the stage made is on disk; the file
is replaced whole; a stage that is done is never begun again, and one that was stopped is begun again as often as needed.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import orjson

from gymdata.errors import DataError, StoreError, redacted_all
from gymdata.progress import LOG_FILES, leave_log, log_to
from gymdata.public import Figures
from gymdata.settings import Settings
from gymdata.store.lock import Lock, made_folder
from gymdata.store.paths import Identity, RunFacts
from gymdata.store.run_json import differences, now, plain, write_json
from gymdata.store.stage_output import refuse_other_kind

STATE = "state.json"
_OURS = ("metrics.jsonl", "result.json", "report.html", "run.json", STATE)


class State:
    """The state of one output folder, held by one process at a time."""

    def __init__(self, folder: Path, lock: Lock, facts: RunFacts) -> None:
        self.folder, self._lock, self._facts = folder, lock, facts

    @classmethod
    def open(cls, folder: Path, identity: Identity, defaults: Settings, *, overwrite: bool = False) -> State:
        """Start or resume. Raises StoreError when the folder belongs to something else, is in use, or was begun with
        other settings."""
        refuse_other_kind(folder, "finetune")
        if folder.is_dir() and not (folder / STATE).is_file():
            inside = sorted(
                p.name
                for p in folder.iterdir()
                if p.name not in ("lock", *LOG_FILES) and not p.name.startswith(f".{STATE}")
            )
            if inside:
                text = f"{folder}: is not empty and not a finetuning run (it holds {', '.join(inside[:6])})"
                raise StoreError(text, hint="give another finetuning.output_dir")
        with made_folder(folder):
            lock = Lock(folder)
        try:
            if overwrite and (folder / STATE).is_file():
                # Epochs first and the state last, so that a crash leaves what can be cleared again.
                for path in sorted(folder.glob("epoch-[0-9][0-9][0-9]*")):
                    shutil.rmtree(path, ignore_errors=True)
                for name in _OURS:
                    (folder / name).unlink(missing_ok=True)
            if not (folder / STATE).is_file():
                facts = {"run_id": secrets.token_hex(8), "identity": plain(identity), "epochs": {}}
                new_state = cls(folder, lock, facts)
                new_state._write()
                log_to(folder)
                return new_state
            try:
                state = orjson.loads((folder / STATE).read_bytes())
            except orjson.JSONDecodeError as error:
                raise DataError.unreadable(folder / STATE, f"not JSON ({error})") from error
            if not isinstance(state, dict) or not {"epochs", "identity"} <= state.keys():
                raise DataError.unreadable(folder / STATE, "not the state of a finetuning run")
            changed = differences(state["identity"], identity, defaults)
            if changed:
                raise StoreError.other_identity(folder, changed)
            log_to(folder)
            return cls(folder, lock, state)
        except BaseException:
            lock.release()
            raise

    @property
    def run_id(self) -> str:
        return str(self._facts["run_id"])

    def done(self, epoch: int, stage: str) -> Figures | None:
        """The result of a finished stage; None when it is pending."""
        entry = self._facts["epochs"].get(str(epoch), {}).get(stage, {})
        return dict(entry.get("result", {})) if entry.get("state") == "completed" else None

    def begin(self, epoch: int, stage: str) -> None:
        entry = self._entry(epoch, stage)
        entry |= {"state": "running", "attempts": entry.get("attempts", 0) + 1, "began": now()}
        self._facts |= {"status": "running", "running": {"epoch": epoch, "stage": stage}}
        self._facts.pop("failure", None)
        self._write()

    def finish(self, epoch: int, stage: str, result: Figures) -> None:
        self._entry(epoch, stage).update(state="completed", ended=now(), result=plain(result))
        self._facts.pop("running", None)
        self._write()

    def running(self) -> str:
        """The stage that is running, for messages; empty between stages."""
        running = self._facts.get("running")
        return f" in epoch {running['epoch']} ({running['stage']})" if running else ""

    def end(self, status: str, failure: str | None = None) -> None:
        """How the loop ended: completed, failed or interrupted."""
        self._facts["status"] = status
        if failure is not None:
            self._facts["failure"] = failure
        running = self._facts.pop("running", None)
        if running is not None and status != "completed":
            self._entry(running["epoch"], running["stage"])["state"] = status
        self._write()

    def close(self) -> None:
        leave_log(self.folder)
        self._lock.release()

    def _entry(self, epoch: int, stage: str) -> Figures:
        entry: Figures = self._facts["epochs"].setdefault(str(epoch), {}).setdefault(stage, {})
        return entry

    def _write(self) -> None:
        write_json(self.folder / STATE, redacted_all(self._facts))
