"""A replica's sampler whose answers depend only on seed and prompt, and which dies when a file says so."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

from gymdata.engines.port import SampleRequest
from gymdata.engines.servers.fingerprint import PRINTS, Fingerprint
from tests.collect.fake_parts import FakeSampler, add_or_answer, engine_fault


class LetterReplica(FakeSampler):
    """``folder``: gets a file named as the process when it starts; with a file ``die`` the next request finds the engine
    dead; a file ``weights`` holds what it shows as its weights; while a file ``slow`` is there requests take 2 s."""

    def __init__(self, folder: Path) -> None:
        super().__init__(add_or_answer, before=partial(_before, folder))
        self.folder = folder

    async def start(self) -> dict[str, Any]:
        await super().start()
        (self.folder / f"{os.getpid()}.pid").touch()
        return self.facts()

    def facts(self) -> dict[str, Any]:
        return {"engine": "letters", "engine_version": "1", "max_model_len": None}

    async def fingerprint(self) -> Fingerprint:
        file = self.folder / "weights"
        weights = file.read_text() if file.is_file() else "letters"
        return Fingerprint("here", weights, "processed_logprobs", None, None, tuple({1: -0.5} for _ in PRINTS))


async def _before(folder: Path, request: SampleRequest) -> None:
    await asyncio.sleep(2 if (folder / "slow").exists() else 0.01)
    try:
        (folder / "die").unlink()
    except FileNotFoundError:
        return
    raise engine_fault("the engine is dead", fatal=True)
