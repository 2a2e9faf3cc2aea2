"""The file of a batch that verl loads in place of its own, written without verl."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from gymdata.errors import needs
from gymdata.rollouts.messages import JsonObject

_MADE_BY = b"cverl.utils.tensordict_utils\nlist_of_dict_to_tensordict\n"
_KEY = b"X\x0a\x00\x00\x00tensordict"


class _Pickler(pickle.Pickler):
    """Pickles (facts, rows) as the facts with a further key ``tensordict``: what verl's ``list_of_dict_to_tensordict``
    makes of the rows when verl loads them."""

    def __init__(self, file: BinaryIO, protocol: int) -> None:
        self._file, self._part = file, io.BytesIO()
        super().__init__(self._part, protocol)

    def dump(self, value: Any) -> None:
        parts = []
        for part in value:
            self._part.seek(0)
            self._part.truncate()
            super().dump(part)
            parts.append(self._part.getvalue()[2:-1])  # without the protocol and the end
        # The rows may refer to what was pickled with the facts: one pickler remembers both.
        self._file.write(b"\x80\x02" + parts[0] + _KEY + _MADE_BY + parts[1] + b"\x85Rs.")


def save(path: Path, rows: Mapping[str, JsonObject]) -> None:
    """Write the columns of each key as verl's ``RolloutTqSkip.prepare_data`` does (``verl/utils/skip/rollout_skip.py``).
    The steps are 0: verl puts in the one that it loads them at."""
    with needs("train"):
        import torch
    tensors = [{k: torch.from_numpy(v) if hasattr(v, "dtype") else v for k, v in row.items()} for row in rows.values()]
    steps = {"status": "success", "global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
    sizes = [(len(row["prompts"]), len(row["responses"])) for row in rows.values()]
    tags = [{**steps, "prompt_len": p, "response_len": r, "seq_len": p + r} for p, r in sizes]
    facts = {"tags": tags, "keys": [*rows], "global_steps": 0}
    as_pickle = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
    torch.save((facts, tensors), path, pickle_module=as_pickle, pickle_protocol=2)
