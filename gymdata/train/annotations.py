"""What a training computed for each sampled token, stored beside the rollouts: which turn a trained token is of, the
rows as they are written while it trains, and the folder ``RUN/annotations-NAME`` that they become.

Invariants: a row's lists are as long as the generation of its turn, token for token; a file never holds steps from both
sides of a checkpoint, so a training that resumes drops whole files and no step is there twice; at most ``max_tokens`` tokens
of a process are held in memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import RefusedError, StoreError
from gymdata.rollouts.ragged import Ints, Ragged, offsets_of
from gymdata.rollouts.schema import ANNOTATIONS, ROLLOUTS
from gymdata.rollouts.sequences import RolloutSequences, stitch
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.store import StageOutput, scan_batches
from gymdata.store.lineage import parent_of, rollouts_behind, run_folder
from gymdata.store.paths import RUN_JSON, read_facts, refuse_unwritable, resolve
from gymdata.store.stage_output import refuse_other_kind
from gymdata.store.tables import write_table
from gymdata.train.mapped import release
from gymdata.train.sequence_data import TrainingExperiences

#: Folder in a training's folder with the rows written so far, and the file that they become.
FOLDER = "annotations"
FILE = "annotations.parquet"
_PART = re.compile(r"(\d{10})-\d{4}-\d{6}\.parquet")
_BATCH_ROWS = 512
#: The values of a token that was not trained.
_NOTHING = {"logprobs": np.nan, "ratios": np.nan, "clipped": 0, "values": np.nan, "losses": 0.0}


def run_behind(source: str | Path) -> Path:
    """The run folder whose rollouts ``source`` holds or was made from. Raises RefusedError unless there is exactly one."""
    runs = dict[Path, None]()
    for path in rollouts_behind(source):
        if (run := run_folder(path)) is not None and resolve(run, ROLLOUTS):
            runs[run.resolve()] = None
    if len(runs) == 1:
        return next(iter(runs))
    there, hint = (
        "no run folder holds them",
        "`gymdata filter FILES --where 'n_turns > 0' -o RUN` makes a run folder of them",
    )
    if runs:
        there, hint = f"they are of {len(runs)} runs", "`gymdata filter RUNS -o RUN` makes one of them"
    raise RefusedError(f"{source}: --annotate writes beside the rollouts, and {there}", hint=hint)


def place_of(run: Path, output: Path) -> Path:
    """The folder for the annotations of the training in ``output``. Raises StoreError when another training's are
    there, or the folder cannot be written."""
    folder = run / f"annotations-{output.resolve().name}"
    refuse_other_kind(folder / RUN_JSON, FOLDER)
    refuse_unwritable(folder)
    training = read_facts(folder / RUN_JSON).get("training") if (folder / RUN_JSON).is_file() else None
    if training is not None and training != str(output.resolve()):
        raise StoreError(
            f"{folder}: holds what another training saw, {training}",
            hint="give -o a folder of another name, or remove this one",
        )
    return folder


@dataclass(frozen=True)
class TurnPlaces:
    """Turns in the sequences of a training, which are of the rollouts ``rollout_ids``: turn i, in sequence ``sequence[i]``,
    is turn ``turn[i]`` of its rollout, and its generation of ``length[i]`` tokens begins at token ``start[i]`` of all
    sequences, flat and rising; where a sequence was cut, it reaches beyond."""

    rollout_ids: Sequence[str]
    sequence: Ints
    turn: Ints
    start: Ints
    length: Ints

    def of(self, tokens: Ints) -> tuple[Ints, Ints]:
        """(turn, token of its generation) of flat token numbers."""
        turn = np.searchsorted(self.start, tokens, side="right") - 1
        return turn, tokens - self.start[turn]


def turn_places(data: TrainingExperiences, run: Path) -> TurnPlaces:
    """Where the turns of a run's rollouts are in ``data``, each in the sequence that trains it.

    Raises RefusedError for a sequence that the run's rollouts do not make, or that trains tokens that no turn sampled.
    """
    rows = defaultdict(list)
    for row, rollout in enumerate(data.rollout_ids):
        rows[rollout].append(row)
    rollout_ids = pa.array(list(rows), pa.string())
    segments_of: dict[int, tuple[Ints, Ints, Ints]] = {}
    for batch in scan_batches(run, ROLLOUTS, ["rollout_id", "turns"], _BATCH_ROWS):
        rollouts = batch.filter(pc.is_in(batch.column("rollout_id"), value_set=rollout_ids))
        if rollouts.num_rows:
            turns, ids = rollouts.column("turns"), rollouts.column("rollout_id")
            sequences = stitch(turns, ids, where=str(run), rendered=True)
            segments, names = _segments(sequences, TurnColumns.of(turns)), ids.to_pylist()
            for sequence, rollout in enumerate(sequences.rollout.tolist()):
                _match(data, rows[names[rollout]], sequences.token_ids[sequence], segments[sequence], segments_of)
            release()
    if missing := [row for row in range(len(data)) if row not in segments_of]:
        raise RefusedError(
            f"--annotate: {len(missing):,} of {len(data):,} sequences train tokens that no turn in {run} sampled (first: "
            f"{data.sequences.names[missing[0]]})",
            hint="annotations are of sampled tokens, by rollout and turn: train the files that gymdata made of this run",
        )
    offsets, order = data.sequences.token_ids.offsets, range(len(data))
    number, start, length = (np.concatenate([segments_of[row][part] for row in order]) for part in range(3))
    owner = np.repeat(np.arange(len(data)), [len(segments_of[row][0]) for row in order])
    return TurnPlaces(data.rollout_ids, owner, number, start + offsets[owner], length)


def _segments(sequences: RolloutSequences, flat: TurnColumns) -> list[tuple[Ints, Ints, Ints]]:
    """The turns that each sequence trains: their numbers, where their generations begin in it, and their lengths."""
    sampled = sequences.sampled
    source = np.arange(len(sampled.logprobs.values)) if sequences.source is None else sequences.source
    turn_of_token = np.repeat(np.arange(len(sampled.turn_sizes)), sampled.turn_sizes)[source]
    # A generation is trained whole, in one place.
    first = np.flatnonzero(np.diff(turn_of_token, prepend=-1))
    begin, turn = np.flatnonzero(sequences.is_trained)[first], turn_of_token[first]
    sequence = np.searchsorted(sequences.token_ids.offsets, begin, side="right") - 1
    parts = (flat.number[sampled.turn[turn]], begin - sequences.token_ids.offsets[sequence], sampled.turn_sizes[turn])
    bounds = np.searchsorted(sequence, np.arange(1, len(sequences)))
    return list(zip(*(np.split(part, bounds) for part in parts), strict=True))


def _match(
    data: TrainingExperiences,
    rows: Sequence[int],
    ids: np.ndarray,
    segments: tuple[Ints, Ints, Ints],
    segments_of: dict[int, tuple[Ints, Ints, Ints]],
) -> None:
    """Give ``segments`` to the row of ``data`` that is this sequence, or its beginning, and trains nothing else."""
    for row in rows:
        own, mask = data.sequences.token_ids[row], data.sequences.loss_mask[row]
        if row in segments_of or len(own) > len(ids) or not np.array_equal(ids[: len(own)], own):
            continue
        number, start, length = segments
        inside = start < len(own)
        sampled = np.zeros(len(own), np.bool_)
        for begin, size in zip(start[inside].tolist(), length[inside].tolist(), strict=True):
            sampled[begin : begin + size] = True
        if not mask[~sampled].any():
            segments_of[row] = (number[inside], start[inside], length[inside])
            return


@dataclass
class AnnotationWriter:
    """Collects rows of one process and writes them to files in ``folder``, once they have
    ``max_tokens`` tokens. ``training``: its name in them."""

    folder: Path
    places: TurnPlaces
    training: str
    rank: int = 0
    max_tokens: int = 1 << 20
    _rows: list[tuple[int, Ints]] = field(default_factory=list)
    _lists: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    _held: int = 0
    _files: int = 0

    def begin(self, step: int) -> None:
        """Continue after ``step`` steps: rows of later steps are removed."""
        self._forget()
        for file in parts(self.folder):
            if self.rank == 0 and int(file.name.partition("-")[0]) > step:
                file.unlink()

    def add(self, step: int, tokens: Ints, values: Mapping[str, np.ndarray]) -> None:
        """Record the values of ``tokens`` in ``step`` (flat token numbers of the training's sequences, those of a
        sequence together); ``values``: columns of ANNOTATIONS, a number per token each."""
        if not len(tokens):
            return
        turn, k = self.places.of(tokens)
        which, inverse = np.unique(turn, return_inverse=True)
        offsets = offsets_of(self.places.length[which])
        self._rows.append((step, which))
        for name, filler in _NOTHING.items():
            if name in values:
                column = np.full(offsets[-1], filler, np.int8 if name == "clipped" else np.float32)
                column[offsets[:-1][inverse] + k] = values[name]
                self._lists[name].append(column)
        self._held += int(offsets[-1])
        if self._held >= self.max_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if not self._rows:
            return
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"{self._rows[0][0]:010}-{self.rank:04}-{self._files:06}.parquet"
        write_table(self._table(), file, ANNOTATIONS)
        self._files += 1
        self._forget()

    def _forget(self) -> None:
        self._rows, self._lists, self._held = [], defaultdict(list), 0

    def _table(self) -> pa.Table:
        which = np.concatenate([turns for _, turns in self._rows])
        rollouts = [self.places.rollout_ids[row] for row in self.places.sequence[which].tolist()]
        step = np.concatenate([np.full(len(turns), step, np.int64) for step, turns in self._rows])
        offsets = offsets_of(self.places.length[which])
        lists = {name: Ragged(np.concatenate(values), offsets).to_arrow() for name, values in self._lists.items()}
        return pa.table(
            {
                "rollout_id": pa.array(rollouts, pa.string()),
                "turn": pa.array(self.places.turn[which].astype(np.int32)),
                "step": pa.array(step),
                "training": pa.array([self.training] * len(which), pa.string()),
                **{
                    name: lists.get(name, pa.nulls(len(which), ANNOTATIONS.schema.field(name).type))
                    for name in _NOTHING
                },
            }
        )


def parts(folder: Path) -> list[Path]:
    """The rows written so far, in the order of the steps."""
    return sorted(file for file in folder.iterdir() if _PART.fullmatch(file.name)) if folder.is_dir() else []


def publish(output: Path, run: Path, command: Sequence[str]) -> dict[str, Any]:
    """Make what the training in ``output`` wrote the folder beside the rollouts of ``run``; returns for run.json where it is
    and how many rows it has. Memory is that of a batch."""
    folder = place_of(run, output)
    facts = {
        "command": list(command),
        "training": str(output.resolve()),
        "parents": [parent_of(run), {"path": str(output.resolve()), "run_id": None, "run_json_xxh3": None}],
    }
    with StageOutput(folder / RUN_JSON, FOLDER, [FILE], overwrite=True) as out:
        files = parts(output / FOLDER)
        batches = (batch for file in files for batch in scan_batches(file, ANNOTATIONS, batch_size=4_096))
        part = out.batches(FILE, batches, ANNOTATIONS, ANNOTATIONS.schema)
        out.finish(facts)
    return {"file": str(folder / FILE), "rows": part.rows}
