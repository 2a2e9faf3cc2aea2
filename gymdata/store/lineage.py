"""Shared by commands that start from rollouts: which run a path belongs to, its parents, and duplicate rollouts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, RefusedError, UsageError, counted, option
from gymdata.public import Paths as Paths
from gymdata.rollouts.failures import failures_in, short_reason
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import hash_file, read_run_json
from gymdata.store.fetch import copy_of, is_url
from gymdata.store.paths import (
    Identity,
    RunFacts,
    Source,
    find_run_json,
    local_output,
    matches,
    read_facts,
    resolve,
    run_jsons,
)
from gymdata.store.reading import SCORED, content_of
from gymdata.store.run_json import agreed
from gymdata.store.tables import files_of, scan_source

#: Stages whose output is made from rollouts in other folders.
_MADE = ("experiences", "pairs")
#: Rows whose tokens are in memory at a time.
_BATCH_ROWS = 4_096


def lineage(path: str | Path) -> Iterator[RunFacts]:
    """The run.json facts of a path argument and of all its ancestors, nearest first, each once.

    A parent that has been moved or deleted, or was fetched and left the cache, is skipped.
    """
    waiting, visited = run_jsons(path), set[Path]()
    while waiting:
        run_json = waiting.pop(0)
        if run_json.resolve() in visited:
            continue
        visited.add(run_json.resolve())
        facts = read_run_json(run_json)
        yield facts
        for text in parent_paths(facts):
            named = copy_of(text) if is_url(text) else Path(text)
            waiting += run_jsons(named if named.is_absolute() or named.exists() else run_json.parent / named)


def parent_paths(facts: RunFacts) -> list[str]:
    """The paths of the parents in run.json's facts; "" for a parent without one."""
    return [str(parent.get("path") or "") for parent in facts.get("parents") or []]


def rollouts_behind(source: str | Path) -> Iterator[str | Path]:
    """The paths that ``source`` and the pairs and experiences behind it were made from, each once; ``source``
    itself where it is neither. Besides rollouts these may be models, and tables of scores."""
    waiting: list[str | Path] = [source]
    visited: set[str | Path] = set()
    while waiting:
        path = waiting.pop(0)
        if path in visited:
            continue
        visited.add(path)
        described = run_jsons(path)
        if len(described) > 1:
            waiting += matches(path)
            continue
        run_json = next(iter(described), None)
        facts = {} if run_json is None else read_facts(run_json)
        if run_json is None or facts.get("stage") not in _MADE:
            yield path
            continue
        # A run that was moved whole still has its stages inside.
        outer = run_json.parent.parent
        parents = [copy_of(parent) if is_url(parent) else Path(parent) for parent in parent_paths(facts)]
        waiting += [parent if parent.exists() else outer for parent in parents]


def vocabulary(path: str | Path) -> int | None:
    """One above the largest id of the model behind a run folder or a file in it; None when it is not known."""
    run_json = find_run_json(path)
    engine = read_facts(run_json).get("engine") if run_json is not None else None
    size = engine.get("vocab_size") if isinstance(engine, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def refuse_duplicates(rollouts: pa.Table, sources: Sequence[str | Path]) -> None:
    """Raises RefusedError (D701) for a rollout ID that occurs more than once. ``sources``: the paths that ``rollouts``
    were read from, for the message."""
    refuse_repeats(keys_of(rollouts["rollout_id"]), rollouts["rollout_id"].chunks, sources)


def keys_of(ids: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each id, (n,), in a tenth of their memory. Equal ids have equal hashes within one process."""
    import polars as pl

    chunks = getattr(ids, "chunks", [ids])
    # By chunk, because Polars allocates a view of 16 bytes per text.
    hashes = [pl.Series(pl.from_arrow(chunk)).hash().to_numpy() for chunk in chunks]
    return np.concatenate(hashes) if hashes else np.empty(0, np.uint64)


def refuse_repeats(keys: npt.NDArray[np.uint64], ids: Iterable[pa.Array], sources: Sequence[str | Path]) -> None:
    """``refuse_duplicates`` for rollouts with the hashes ``keys`` (see ``keys_of``). ``ids``, in chunks, are read only
    when hashes are equal, because different ids may share one."""
    ordered = np.sort(keys)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(twice):
        return
    # A run that is being collected may have grown since the hashes were made.
    alike = pa.chunked_array(list(ids), pa.string())[: len(keys)].filter(pa.array(np.isin(keys, twice)))
    extra = len(alike) - pc.count_distinct(alike).as_py()
    if not extra:
        return
    # The command that lists them.
    paths = " ".join(shlex.quote(str(source)) for source in sources)
    sql = "SELECT rollout_id, count(*) AS n FROM rollouts GROUP BY 1 HAVING n > 1"
    hint = f"`gymdata query {shlex.quote(sql)} {paths}` lists them; give each rollout once"
    given = [file for source in sources for file in resolve(source, ROLLOUTS)]
    files = [file.path.resolve() for file in given]
    if repeated := next((file for file in files if files.count(file) > 1), None):
        hint = f"{repeated} is given twice: give each file once"
    counts = alike.value_counts()
    first = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")[0]
    raise RefusedError(
        f"{counted(extra, 'rollout is', 'rollouts are')} there more than once, such as {first}{_places_of(first, given)}",
        code="D701",
        hint=hint,
    )


def _places_of(rollout_id: pa.Scalar, files: Iterable[Source]) -> str:
    """Where a rollout is, for a message: " in FILE and FILE"."""
    holding = dict[str, None]()
    for file in files:
        for batch in scan_source(file, ROLLOUTS, ("rollout_id",)):
            if pc.index(batch.column(0), rollout_id).as_py() >= 0:
                holding[str(file.path)] = None
    return f" in {' and '.join(holding)}" if holding else ""


def chosen_rows(
    sources: Sequence[str | Path], ids: pa.ChunkedArray, chosen: npt.NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    """Batches of the rollouts of ``sources`` that are true in ``chosen``. ``ids``: those that were read before, in their
    order; what a run that is being collected got since, at the end of each of its files, is not among them. Raises DataError
    for other rollouts in their place."""
    row = 0
    for file in (file for source in sources for file in files_of(source, ROLLOUTS)):
        for batch in scan_source(file, ROLLOUTS, None, _BATCH_ROWS):
            known = ids.slice(row, batch.num_rows).combine_chunks()
            same = pc.equal(batch.column("rollout_id").slice(0, len(known)), known)
            n = pc.index(same, False).as_py()
            n = len(known) if n < 0 else n
            mask = pa.array(chosen[row : row + n])
            row += n
            if mask.true_count:
                yield batch.slice(0, n).filter(mask)
            if n < batch.num_rows:
                break
    if row < len(ids):
        raise DataError(f"{', '.join(map(str, sources))}: changed while it was read", hint="run the command again")


def stage_folder(sources: Sequence[str | Path], stage: str, name: str) -> Path:
    """The folder ``STAGE-NAME`` of the single run folder that ``sources`` are. Raises UsageError for anything else."""
    run = own_run(sources)
    if run is None:
        raise UsageError(f"{option('output')} is required unless the input is a single run folder")
    return local_output(run / (f"{stage}-" + re.sub(r"[^\w.+-]", "_", name)))


def own_run(sources: Sequence[str | Path]) -> Path | None:
    """The single run folder that ``sources`` are; None for anything else."""
    run = run_folder(sources[0])
    return run if len(sources) == 1 and run is not None and Path(sources[0]).is_dir() else None


def run_folder(source: str | Path) -> Path | None:
    run_json = find_run_json(source)
    return None if run_json is None else run_json.parent


def runs_of(sources: Iterable[str | Path]) -> list[Path]:
    """The run folders of path arguments, of a glob those of all that it matches, each once."""
    folders = (run_folder(path) for source in sources for path in matches(source))
    return [folder for folder in dict.fromkeys(folders) if folder is not None]


def masked_rollouts(sources: Iterable[str | Path]) -> dict[str, str]:
    """The rollouts whose writer masked or cancelled them, and why: they are in no baseline, no pair and no training, also
    when they were scored since. They have no stored reward, so ``extra`` is read only of files where one is missing."""
    masked: dict[str, str] = {}
    for path in sources:
        for source in files_of(path, ROLLOUTS):
            if any(batch.column(0).null_count for batch in scan_source(source, ROLLOUTS, ("reward",))):
                for batch in scan_source(source, ROLLOUTS, ("rollout_id", "extra")):
                    ids, failures = batch.column("rollout_id"), failures_in(batch.column("extra"))
                    masked |= {ids[row].as_py(): short_reason(failure) for row, failure in failures.items()}
    return masked


def parents_of(paths: Iterable[str | Path]) -> list[dict[str, object]]:
    """What run.json records of what an output was made from. A glob over several runs is what it matches, each with its
    own run."""
    return [parent_of(match) for path in paths for match in ([path] if find_run_json(path) else matches(path))]


def parent_of(path: str | Path) -> dict[str, object]:
    run_json = find_run_json(path)
    if run_json is None:
        return {"path": str(Path(path).resolve()), "run_id": None, "run_json_xxh3": None}
    facts = read_run_json(run_json)
    parent = {"path": str(Path(path).resolve()), "run_id": facts.get("run_id"), "run_json_xxh3": hash_file(run_json)}
    hashed = facts.get("run_id") is not None or facts.get("stage") in SCORED
    return {**parent, "files": content_of(facts)} if hashed else parent


def model_parents(model: str | None) -> list[dict[str, object]]:
    """What run.json records of the training that made ``model``; nothing where gymdata did not. Without the content of its
    files: a model may be moved, and stays what its hash says."""
    made = model and Path(model).exists() and find_run_json(model) is not None
    return [{key: v for key, v in parent_of(model).items() if key != "files"}] if model and made else []


def replaced_content(facts: RunFacts, parents: Mapping[str, RunFacts]) -> str | None:
    """What differs between the runs that ``facts``, a run.json's, says its output was made from and those runs now
    (``parents``: run ID → run.json): the first file with both hashes. None when each file is there as it was: a run may
    grow, its sealed files do not change."""
    for parent in facts.get("parents") or []:
        now = content_of(parents.get(str(parent.get("run_id")), {}))
        for name, recorded in (parent.get("files") or {}).items():
            if now and now.get(name) != recorded:
                present = f"is {now[name]} now" if name in now else "is gone"
                return f"{parent.get('path')}/{name} was {recorded}, and {present}"
    return None


def refuse_replaced(path: str | Path, sources: Sequence[str | Path] = ()) -> None:
    """Raises DataError when a run that ``path`` or one of its ancestors was made from holds other rollouts by now, under
    the same run ID: where it was, or among ``sources``."""
    chain = list(lineage(path))
    runs = [*chain, *(facts for source in sources for facts in lineage(source))]
    parents = {str(facts["run_id"]): facts for facts in runs if facts.get("run_id")}
    if changed := next(filter(None, (replaced_content(facts, parents) for facts in chain)), None):
        raise DataError(
            f"{path}: was made from rollouts that were overwritten: {changed}",
            hint="make it again from the present rollouts, or bring the earlier ones back",
        )


def common_identity(sources: Sequence[str | Path]) -> Identity:
    """The identity settings that all the runs share, for the run.json of a file that is made from several runs."""
    folders = [run_folder(path) for source in sources for path in matches(source)]
    return agreed([{} if folder is None else read_run_json(folder).get("identity", {}) for folder in folders])
