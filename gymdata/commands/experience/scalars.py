"""The scalars of all rollouts, kept in memory while tokens are read batch by batch: a few numbers each, and no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, counted
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.stats import known_rewards
from gymdata.store import scan_batches
from gymdata.store.lineage import keys_of, lineage, masked_rollouts, refuse_repeats

_COLUMNS = ("rollout_id", "group_id", "status", "reward", "temperature", "n_generated_tokens")
_NAMED = ("rollout_id", "reward", "rewards")


@dataclass(slots=True)
class Scalars:
    """One entry per rollout. ``keys``: hashes of the ids (see ``keys_of``); ``groups``: indices into ``group_ids``;
    ``reward``: NaN for none; ``generated``: number of sampled tokens; ``named``: ids and rewards by name, if
    requested; ``masked``: why the rollouts at these places are in no baseline (see ``masked_rollouts``)."""

    keys: npt.NDArray[np.uint64]
    groups: npt.NDArray[np.int32]
    group_ids: pa.Array
    reward: npt.NDArray[np.float64]
    truncated: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    generated: npt.NDArray[np.int32]
    masked: dict[int, str]
    named: pa.Table | None = None

    @classmethod
    def read(cls, sources: Sequence[str | Path], *, named: bool = False) -> Scalars:
        """The scalars of all rollouts under ``sources``. Raises DataError when there are none, RefusedError (D701) for
        a duplicate."""
        names, numbers = [], []
        for source in sources:
            for batch in scan_batches(source, ROLLOUTS, [*_COLUMNS, "rewards"] if named else _COLUMNS):
                columns = {
                    "keys": keys_of(batch.column("rollout_id")),
                    "groups": batch.column("group_id").dictionary_encode(),
                    "reward": known_rewards(batch.column("reward")),
                    "truncated": pc.equal(batch.column("status"), "truncated"),
                    "temperature": batch.column("temperature"),
                    "generated": batch.column("n_generated_tokens").cast(pa.int32()),
                }
                numbers.append(pa.table(columns))
                if named:
                    names.append(batch.select(_NAMED))
        if not sum(map(len, numbers)):
            raise DataError.empty(sources[0], "scored rollouts")
        table = pa.concat_tables(numbers).unify_dictionaries().combine_chunks()
        numbers.clear()
        groups = table["groups"].chunk(0)
        columns = {name: table[name].to_numpy() for name in table.column_names if name != "groups"}
        ids = (b.column(0) for s in sources for b in scan_batches(s, ROLLOUTS, ("rollout_id",)))
        refuse_repeats(columns["keys"], ids, sources)
        masked = masked_rollouts(sources)
        why = dict(zip(keys_of(pa.array(masked, pa.string())).tolist(), masked.values(), strict=True))
        rows = np.flatnonzero(np.isin(columns["keys"], list(why))).tolist()
        return cls(
            masked={row: why[int(columns["keys"][row])] for row in rows},
            groups=groups.indices.to_numpy(),
            group_ids=groups.dictionary,
            named=pa.Table.from_batches(names) if names else None,
            **columns,
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def reward_names(self) -> set[str]:
        """The names of stored rewards, where ``named`` was read."""
        if self.named is None:
            return set()
        return set(pc.unique(self.named["rewards"].combine_chunks().flatten().field("name")).to_pylist())


def mixed_tasks(sources: Sequence[str | Path]) -> list[str]:
    """A note on recorded tasks whose rollouts have different prompts: an agent chooses the task_id of its rollout."""
    prompts: dict[str, set[str]] = {}
    for source in sources:
        if any(facts.get("stage") == "record" for facts in lineage(source)):
            for batch in scan_batches(source, ROLLOUTS, ("task_id", "task")):
                for task_id, task in zip(batch["task_id"].to_pylist(), batch["task"].to_pylist(), strict=True):
                    if (prompt := orjson.loads(task).get("prompt")) is not None:
                        prompts.setdefault(task_id, set()).add(str(prompt))
    mixed = [task_id for task_id, texts in prompts.items() if len(texts) > 1]
    if not mixed:
        return []
    named = ", ".join(mixed[:3]) + ", …" * (len(mixed) > 3)
    text = f"{counted(len(mixed), 'recorded task')} ({named}): rollouts began with different prompts and are compared"
    return [f"{text}; end sessions with a task_id per prompt (or with the task, where only a date or folder differs)"]
