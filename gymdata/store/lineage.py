"""Shared by commands that start from rollouts: which score is meant, which run a path belongs to, and its parents.

Invariant: duplicate rollouts are refused; a re-scoring has precedence over the reward of the same name that was stored
by ``collect``.
"""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import GymdataError, RefusedError, StoreError, UsageError, counted
from gymdata.public import Paths as Paths
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.settings import Config
from gymdata.stats import known_rewards
from gymdata.store import hash_file, read_run_json, read_table
from gymdata.store.objects.fetching import described
from gymdata.store.objects.places import is_url
from gymdata.store.paths import find_run_json, read_facts, resolve
from gymdata.store.reading import changed_files
from gymdata.store.run_json import differences


def lineage(path: str | Path) -> Iterator[dict[str, Any]]:
    """The run.json facts of a path argument and of all its ancestors, nearest first, each once.

    A parent that has been moved or deleted is skipped.
    """

    def above(found: Path, facts: Mapping[str, Any]) -> Iterator[Path]:
        for text in parent_paths(facts):
            if is_url(text):
                yield from (one for one in (described(text),) if one is not None)
                continue
            named = Path(text)
            yield named if named.is_absolute() or named.exists() else found.parent / named

    for _, facts in ancestry(path, above):
        yield facts


def ancestry(
    path: str | Path, above: Callable[[Path, Mapping[str, Any]], Iterable[Path]]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The run.json of a path argument and of its ancestors (path and facts), nearest first, each once. ``above``
    returns the parents of a run.json."""
    waiting, seen = [Path(path)], set()
    while waiting:
        found = find_run_json(waiting.pop(0))
        if found is None or found.resolve() in seen:
            continue
        seen.add(found.resolve())
        facts = read_run_json(found)
        yield found, facts
        waiting += above(found, facts)


def parent_paths(facts: Mapping[str, Any]) -> list[str]:
    """The paths of the parents in run.json's facts; "" for a parent without one."""
    return [str(parent.get("path") or "") for parent in facts.get("parents") or []]


def vocabulary(path: str | Path) -> int | None:
    """One above the largest id of the model behind a run folder or a file in it; None when it is not known."""
    found = find_run_json(path)
    engine = read_facts(found).get("engine") if found is not None else None
    size = engine.get("vocab_size") if isinstance(engine, dict) else None
    return size if isinstance(size, int) and size > 0 else None


#: Stage folders that hold scores: of functions, and of judges.
_KINDS = ("scores", "judge")


def concat(tables: list[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def changed_rollouts(sources: Sequence[str | Path]) -> list[str]:
    """A warning for each file of rollouts under ``sources`` that differs from what its run recorded, when changed files
    are allowed.

    Raises DataError when they are not, and as ``resolve`` does.
    """
    return [line for source in sources for line in changed_files(resolve(source, ROLLOUTS), ROLLOUTS)]


def refuse_duplicates(rollouts: pa.Table, sources: Sequence[str | Path]) -> None:
    """Raises RefusedError (D701) for a rollout ID that occurs more than once. ``sources``: the paths that ``rollouts``
    were read from, for the message."""
    refuse_repeats(keys_of(rollouts["rollout_id"]), rollouts["rollout_id"].chunks, sources)


def keys_of(ids: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each id, (n,), in a tenth of their memory. Equal ids have equal hashes within one process."""
    import polars as pl

    chunks = getattr(ids, "chunks", [ids])
    # By chunk, because Polars allocates a view of 16 bytes per text.
    found = [pl.Series(pl.from_arrow(chunk)).hash().to_numpy() for chunk in chunks]
    return np.concatenate(found) if found else np.empty(0, np.uint64)


def refuse_repeats(keys: npt.NDArray[np.uint64], ids: Iterable[pa.Array], sources: Sequence[str | Path]) -> None:
    """``refuse_duplicates`` for rollouts with the hashes ``keys`` (see ``keys_of``). ``ids``, in chunks, are read only
    when hashes are equal, because different ids may share one."""
    ordered = np.sort(keys)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(twice):
        return
    row, alike = 0, []
    for chunk in ids:
        # A run that is being collected may have grown since the hashes were made.
        some = chunk.slice(0, len(keys) - row)
        alike.append(some.filter(pa.array(np.isin(keys[row : row + len(some)], twice))))
        row += len(some)
    named = pa.chunked_array(alike, pa.string())
    extra = len(named) - pc.count_distinct(named).as_py()
    if extra:
        raise RefusedError(
            f"{counted(extra, 'rollout is', 'rollouts are')} there more than once",
            code="D701",
            hint=_how_to_see_repeats(sources),
        )


def _how_to_see_repeats(sources: Sequence[str | Path]) -> str:
    """The command that lists the duplicate rollouts under ``sources``."""
    files = [found.path.resolve() for source in sources for found in resolve(source, ROLLOUTS)]
    if twice := next((file for file in files if files.count(file) > 1), None):
        return f"{twice} is given twice: give each file once"
    given = " ".join(shlex.quote(str(source)) for source in sources)
    if len(sources) == 1:
        return f"`gymdata validate {given} --select D701` lists them"
    sql = "SELECT rollout_id, count(*) AS n FROM rollouts GROUP BY 1 HAVING n > 1"
    return f"`gymdata query {shlex.quote(sql)} {given}` lists them; give each rollout once"


def rows_of(some: pa.Array, ids: pa.ChunkedArray, at: int) -> np.ndarray:
    """The row in ``ids`` of each of ``some``, -1 for those that are not there.

    Both were read from the same files, and ``some`` begins at row ``at``. They are looked up only when the rows differ,
    because a run that is being collected grew, or its rows were sealed.
    """
    if ids.slice(at, len(some)).equals(pa.chunked_array([some])):
        return np.arange(at, at + len(some))
    found: np.ndarray = pc.fill_null(pc.index_in(some, value_set=ids.combine_chunks()), -1).to_numpy()
    return found


def scores_of(
    sources: Sequence[str | Path], rollouts: pa.Table, name: str | None
) -> tuple[str, pa.ChunkedArray, list[Path]]:
    """The score's name, one score per rollout (null for none, see ``known_rewards``), and the folders of the
    re-scorings that it came from.

    A re-scoring has precedence over the reward of the same name that was stored by ``collect``.
    """
    if name is None:
        return "reward", _known(rollouts["reward"]), []
    found = [table for source in sources if (table := _rescored(source, name)) is not None]
    if found:
        rows = pa.concat_tables([table for _, table in found])
        return name, _known(_last_values(rollouts, rows)), [folder for folder, _ in found]
    parts = rollouts["rewards"].combine_chunks()
    flat = parts.flatten()
    names = flat.field("name")
    if name not in pc.unique(names).to_pylist():
        have = named_scores(sources, rollouts)
        there = f"there are: {', '.join(have)}" if have else "there are no named rewards: `gymdata score` makes them"
        raise UsageError(f"--reward: got {name!r}, which is no score of these rollouts", hint=there)
    owner = np.repeat(np.arange(len(parts)), np.diff(parts.offsets.to_numpy()))
    is_it = pc.equal(names, name).to_numpy(zero_copy_only=False)
    values_of = np.full(len(parts), np.nan)
    values_of[owner[is_it]] = pc.fill_null(flat.field("value").filter(pa.array(is_it)), np.nan).to_numpy()
    return name, _known(pa.chunked_array([pa.array(values_of)])), []


def _known(scores: pa.ChunkedArray) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(known_rewards(scores), from_pandas=True)])


def _last_values(rollouts: pa.Table, scores: pa.Table) -> pa.ChunkedArray:
    """The value of each rollout, null for none. Re-scoring adds rows: the last row of a rollout counts."""
    import polars as pl

    ids = pl.LazyFrame({"rollout_id": pl.from_arrow(rollouts["rollout_id"])})
    given = pl.DataFrame(pl.from_arrow(scores.select(["rollout_id", "value"]))).lazy()
    last = given.unique("rollout_id", keep="last")
    mine = ids.join(last, on="rollout_id", how="left", maintain_order="left").collect()["value"]
    return pa.chunked_array([mine.to_arrow()])


def named_scores(sources: Sequence[str | Path], rollouts: pa.Table) -> list[str]:
    """The names that ``scores_of`` accepts: rewards that ``collect`` stored, and re-scorings."""
    parts = rollouts["rewards"].combine_chunks().flatten().field("name")
    return list(
        dict.fromkeys([*sorted(set(pc.unique(parts).to_pylist())), *(n for s in sources for n in _rescorings(s))])
    )


def unscored_hint(sources: Sequence[str | Path], refused: str | None = None) -> str:
    """What to do about rollouts without a reward: the scores that were made of them and have values are named, and those
    that have none. ``refused``: the requested score, which has no values; the most common reason is named."""
    made = list(dict.fromkeys(name for source in sources for name in _rescorings(source)))
    reasons = {name: _why_without(sources, name) for name in made}
    good = [name for name in made if reasons[name] is None and name != refused]
    bad = [name for name in made if reasons[name] is not None]
    if refused in bad:
        why = f"; {refused} has no value for any rollout, most often: {reasons[refused]}"
    else:
        why = f"; {counted(len(bad), 'score has', 'scores have')} no value: {', '.join(bad)}" if bad else ""
    if good:
        return f"choose a score that was made since: --reward {' or '.join(good)}{why}"
    run = sources[0] if len(sources) == 1 else "RUN"
    return f"score them with `gymdata score {run} --reward …`, then choose that score: --reward NAME{why}"


def _why_without(sources: Sequence[str | Path], name: str) -> str | None:
    """The most common reason for which the re-scoring ``name`` gave no value to any rollout; None when it has values."""
    reasons: Counter[str] = Counter()
    for source in sources:
        try:
            found = _rescored(source, name)
        except GymdataError as error:  # This is for the hint of another error.
            reasons[error.message] += 1
            continue
        if found is None:
            continue
        if pc.any(pc.is_finite(found[1]["value"])).as_py():
            return None
        for entry in found[1]["detail"].value_counts().to_pylist():
            reasons[entry["values"] or "no reason is stored"] += entry["counts"]
    [(why, _)] = reasons.most_common(1) or [("it has no rows", 0)]
    return textwrap.shorten(why, 200, placeholder=" …")


def refuse_other_settings(target: Path, config: Config, what: str, overwrite: bool) -> None:
    """Raises StoreError when ``target`` holds ``what`` with another ``config``."""
    if overwrite or not target.exists():
        return
    other = differences(read_run_json(target).get("config", {}), config.model_dump(mode="json"))
    if other:
        raise StoreError.other_settings(target, what, other)


def run_folder(source: str | Path) -> Path | None:
    found = find_run_json(source)
    return found.parent if found is not None and found.name == "run.json" else None


def _rescorings(source: str | Path) -> list[str]:
    run = run_folder(source)
    return (
        sorted(p.name.partition("-")[2] for kind in _KINDS for p in run.glob(f"{kind}-*") if p.is_dir()) if run else []
    )


def _rescored(source: str | Path, name: str) -> tuple[Path, pa.Table] | None:
    run = run_folder(source)
    made = [folder for kind in _KINDS if run is not None and (folder := run / f"{kind}-{name}").is_dir()]
    if not made:
        return None
    folder = made[0]
    table = read_table(folder, SCORES)
    inside = pc.unique(table["name"]).to_pylist()
    wanted = name if name in inside or len(inside) != 1 else inside[0]
    rows = table.filter(pc.equal(table["name"], wanted))
    if not rows.num_rows:
        raise UsageError.unknown_choice(f"{folder}: score", name, inside)
    return folder, rows


def judge_folders(sources: Sequence[str | Path], name: str | None) -> list[Path]:
    """RUN/judge-NAME of each source; without a name, that of the only judge. Raises UsageError when there are several,
    or none."""
    runs = [run for source in sources if (run := run_folder(source)) is not None]
    made = [p.parent for run in runs for p in sorted(run.glob("judge-*/comparisons.parquet"))]
    names = sorted({p.name.removeprefix("judge-") for p in made})
    if not names:
        raise UsageError("these rollouts have no comparisons", hint="`gymdata judge RUN --genrm MODEL` makes them")
    if name is None and len(names) > 1:
        raise UsageError(
            f"there are comparisons of {len(names)} judges: {', '.join(names)}", hint="name one with --judge"
        )
    if name is not None and name not in names:
        raise UsageError.unknown_choice("--judge", name, names)
    return [p for p in made if p.name == f"judge-{name or names[0]}"]


def parent_of(path: str | Path) -> dict[str, Any]:
    found = find_run_json(path)
    if found is None:
        return {"path": str(Path(path).resolve()), "run_id": None, "run_json_xxh3": None}
    facts = read_run_json(found)
    return {"path": str(Path(path).resolve()), "run_id": facts.get("run_id"), "run_json_xxh3": hash_file(found)}


def common_identity(sources: Sequence[str | Path]) -> dict[str, Any]:
    """The identity settings that all the runs share, for the run.json of a file that is made from several runs."""
    folders = [run_folder(source) for source in sources]
    found = [read_run_json(folder).get("identity", {}) if folder is not None else {} for folder in folders]
    return {key: value for key, value in found[0].items() if all(one.get(key) == value for one in found)}
