"""Experiences and rollouts as trainers get them: flat arrays of ids, masks and what each algorithm needs besides.

Invariants: what is trained has a finite advantage and a finite saved log-prob; a trained token is never the first of
its sequence (nothing predicts it); whatever a length limit costs is counted. For SFT a rollout without a known reward
is never chosen for its reward; a rollout that breaks or branches gives several sequences, each sampled token trained
once. For KTO a rollout without a known reward, or whose reward equals the bound that it is compared with, has no label
and is not trained; they are counted. Neither choice depends on the order of the rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import DataError, RefusedError, UsageError, counted
from gymdata.rollouts.checks import Lists, is_rendered, refuse_unsound, unless_rendered
from gymdata.rollouts.ragged import Ragged, offsets_of, places
from gymdata.rollouts.sequences import RolloutSequences, alternatives, require_agents, stitch
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.scores.chosen import unscored_hint
from gymdata.stats import unit_of
from gymdata.train.pair_data import NamedSequences, check_numbers, numbers, refuse_too_long

#: Weights of the parts of a loss, a number per token each.
WEIGHTS = ("rl_weight", "ce_weight", "ref_kl_weight")
#: Columns of an experiences file that training reads; those from ``ref_logprobs`` on only where there are any.
EXPERIENCE_COLUMNS: tuple[str, ...] = (
    "rollout_id", "sequence_index", "input_ids", "loss_mask", "logprobs", "advantages", "weight", "temperature",
    "policy_hash", "reward", "ref_logprobs", *WEIGHTS, "optimal_value",
)  # fmt: skip


@dataclass(frozen=True)
class LengthCost:
    """What was cut or left out because of the length limit."""

    max_length: int | None
    sequences: int
    longest: int
    sequences_cut: int = 0
    trained_tokens_lost: int = 0
    nothing_trained: tuple[str, ...] = ()

    def __add__(self, other: LengthCost) -> LengthCost:
        """The sum of two parts of a file."""
        return LengthCost(
            self.max_length,
            self.sequences + other.sequences,
            max(self.longest, other.longest),
            self.sequences_cut + other.sequences_cut,
            self.trained_tokens_lost + other.trained_tokens_lost,
            self.nothing_trained + other.nothing_trained,
        )

    def refuse(self, where: str, model: str, limit: int | None) -> None:
        if self.sequences == 0:
            raise DataError.empty(where, "sequences to train on")
        if len(self.nothing_trained) == self.sequences:
            why = f"with --max-length {self.max_length} " if self.max_length else ""
            raise RefusedError(
                f"{where}: {why}none of {counted(self.sequences, 'sequence')} has a trained token left",
                code="T205",
                hint="give a --max-length that reaches beyond the prompts" if self.max_length else None,
            )
        refuse_too_long(where, self.longest, self.max_length, model, limit)

    def text(self) -> str | None:
        if not (self.sequences_cut or self.nothing_trained):
            return None
        return (
            f"{self.sequences_cut:,} of {counted(self.sequences, 'sequence')} cut, "
            f"{len(self.nothing_trained):,} left out "
            f"because no trained token remains; {self.trained_tokens_lost:,} trained tokens lost in all"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "max_length": self.max_length, "sequences": self.sequences, "longest": self.longest,
            "sequences_cut": self.sequences_cut, "trained_tokens_lost": self.trained_tokens_lost,
            "left_out_nothing_trained": list(self.nothing_trained),
        }  # fmt: skip


@dataclass(frozen=True)
class TrainingExperiences:
    """n sequences; ``advantages``, ``ref_logprobs`` (None: not in the file) and each of ``weights`` (those of ``WEIGHTS``
    that the file has) have a number per token of them; ``weight`` and ``temperature`` have one entry per sequence, as have
    ``rollout_ids``. ``chosen``: how many rollouts they were chosen from, and so on, where they were chosen."""

    sequences: NamedSequences
    rollout_ids: Sequence[str]
    advantages: Ragged
    ref_logprobs: Ragged | None
    weight: np.ndarray
    temperature: np.ndarray
    policy_hashes: frozenset[str]
    cost: LengthCost
    chosen: dict[str, int] = field(default_factory=dict)
    weights: dict[str, Ragged] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def counts(self) -> dict[str, int]:
        return {**self.chosen, "sequences": len(self)}

    @property
    def per_token(self) -> dict[str, Ragged]:
        """What a loss needs besides ids and masks: name → a number per token."""
        return {"saved": self.sequences.logprobs, "advantages": self.advantages, **self.weights}

    def of_policy(self, rows: np.ndarray) -> np.ndarray:
        """Which tokens of the sequences ``rows`` the policy sampled and is trained for, bool, flat: trained ones whose
        ``rl_weight`` is not 0."""
        trained = np.asarray(self.sequences.loss_mask.take(rows).values != 0)
        return trained & (self.weights["rl_weight"].take(rows).values != 0) if "rl_weight" in self.weights else trained

    def rollouts_of(self, rows: np.ndarray) -> list[str]:
        return list(dict.fromkeys(self.rollout_ids[row] for row in rows))

    def take(self, rows: np.ndarray) -> Self:
        """The sequences at ``rows`` (int array), in that order, with all that belongs to them."""
        return replace(
            self,
            sequences=self.sequences.take(rows),
            rollout_ids=[self.rollout_ids[row] for row in rows],
            advantages=self.advantages.take(rows),
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs.take(rows),
            weight=self.weight[rows],
            temperature=self.temperature[rows],
            weights={name: ragged.take(rows) for name, ragged in self.weights.items()},
        )


def sequence_names(table: pa.Table) -> list[str]:
    """The name of each row of experiences."""
    numbers = table["sequence_index"].to_pylist()
    return [f"{rollout}/{index}" for rollout, index in zip(table["rollout_id"].to_pylist(), numbers, strict=True)]


def twice(where: str) -> DataError:
    """The error for a sequence that occurs more than once."""
    return DataError(f"{where}: holds a sequence more than once", hint="are the same experiences given twice?")


def lacking_weights(where: str, name: str, lacking: int, rows: int) -> DataError:
    """The error for a weight that only some rows have."""
    return DataError(
        f"{where}: {name} is missing in {lacking:,} of {counted(rows, 'row')}",
        hint="give it in every row, or drop the column",
    )


def training_experiences(
    table: pa.Table, max_length: int | None = None, where: str = "experiences", first_row: int = 0
) -> TrainingExperiences:
    """The rows of a table (``EXPERIENCE_COLUMNS``), cut to ``max_length`` tokens when given; the first is row ``first_row``
    of ``where``.

    A sequence without a trained token (after the cut) is left out and named in ``cost``. Raises DataError for rows that
    contradict themselves and RefusedError (T205, T206, L301 to L303) for rows that must not be trained on.
    """
    names = sequence_names(table)
    if len(set(names)) != len(names):
        raise twice(where)
    ids = Ragged.of(table["input_ids"], np.int32)
    mask, logprobs, advantages = (
        _beside(table, name, kind, ids, names, where, first_row)
        for name, kind in (("loss_mask", np.int8), ("logprobs", np.float32), ("advantages", np.float32))
    )
    reference = None
    if "ref_logprobs" in table.column_names and table["ref_logprobs"].null_count == 0:
        reference = _beside(table, "ref_logprobs", np.float32, ids, names, where, first_row)
    odd = np.flatnonzero((mask.values != 0) & (mask.values != 1))
    if len(odd):
        name = names[mask.locate(odd[0])[0]]
        raise DataError(f"{where}: mask of {name} holds {mask.values[odd[0]]}, expected 0 or 1")
    mask = mask.like(mask.values.copy())
    mask.values[ids.offsets[:-1][ids.lengths > 0]] = 0
    whole = NamedSequences(ids, mask, logprobs, names)
    given = logprobs.like(np.where(whole.is_trained, logprobs.values, 0))
    trained = Lists("trained token", unless_rendered(given, is_rendered(table)))
    refuse_unsound((Lists("input_ids", ids),), trained, lambda k: f"sequence {names[k]}", where)
    if reference is not None:
        checked = reference.like(np.where(whole.is_trained, reference.values, 0))
        refuse_unsound(
            (Lists("input_ids", ids),), Lists("ref_logprobs", checked), lambda k: f"sequence {names[k]}", where
        )
    _refuse_not_finite("advantages", advantages, whole, where)
    check_numbers(table, {"weight": 0.0, "temperature": 0.0}, lambda row: f"sequence {names[row]}", where, first_row)
    weights = _weights(table, whole, where, first_row)
    return _cut(whole, advantages, reference, weights, table, max_length)


def _weights(table: pa.Table, sequences: NamedSequences, where: str, first_row: int) -> dict[str, Ragged]:
    """The columns of weights that are there. Raises RefusedError for a weight that is not finite, is below 0, or is at
    a token that is not trained."""
    found = {}
    for name in WEIGHTS:
        if name not in table.column_names or table[name].null_count == len(table):
            continue
        if table[name].null_count:
            raise lacking_weights(where, name, table[name].null_count, len(table))
        ids, names = sequences.token_ids, sequences.names
        found[name] = weights = _beside(table, name, np.float32, ids, names, where, first_row)
        values = weights.values.copy()
        values[weights.offsets[:-1][weights.lengths > 0]] = 0
        for bad, why in (
            (~(np.isfinite(values) & (values >= 0)), "expected a finite weight of at least 0"),
            ((values != 0) & ~sequences.is_trained, "but its loss_mask is 0: set that to 1 to train it"),
        ):
            if at := np.flatnonzero(bad).tolist():
                row, token = weights.locate(at[0])
                raise RefusedError(
                    f"{where}: {name} of token {token} of {sequences.names[row]} is {values[at[0]]:g}, {why} "
                    f"({counted(len(at), 'such token')})"
                )
    return found


def with_optimal_advantages(table: pa.Table, loss: str, where: str) -> pa.Table:
    """The table with reward − optimal_value as the advantage of every token. Raises UsageError when there is no such
    column."""
    if "optimal_value" not in table.column_names or table["optimal_value"].null_count:
        raise UsageError(
            f"--loss {loss} needs the column optimal_value, which {where} does not have in every row",
            hint="`gymdata experience RUN --optimal-value-beta 0.5 -o OUT` writes it",
        )
    advantage = pc.subtract(pc.fill_null(table["reward"], np.nan), table["optimal_value"]).to_numpy()
    ids = Ragged.of(table["input_ids"], np.int32)
    column = ids.like(ids.spread(advantage).astype(np.float32)).to_arrow()
    return table.set_column(table.column_names.index("advantages"), "advantages", column)


def _cut(
    whole: NamedSequences,
    advantages: Ragged,
    reference: Ragged | None,
    weights: dict[str, Ragged],
    table: pa.Table,
    max_length: int | None,
) -> TrainingExperiences:
    rollouts = table["rollout_id"].to_pylist()
    longest = int(whole.lengths.max(initial=0))
    lengths = np.minimum(whole.lengths, longest if max_length is None else max_length)
    short = whole if (lengths == whole.lengths).all() else whole.cut(int(lengths.max()))
    trained = short.loss_mask.sums(short.is_trained)
    rows = np.flatnonzero(trained > 0)
    cost = LengthCost(
        max_length=max_length,
        sequences=len(whole),
        longest=longest,
        sequences_cut=int((lengths < whole.lengths).sum()),
        trained_tokens_lost=int(whole.is_trained.sum() - trained[rows].sum()),
        nothing_trained=tuple(whole.names[i] for i in np.flatnonzero(trained == 0)),
    )
    return TrainingExperiences(
        sequences=short.take(rows),
        rollout_ids=[rollouts[i] for i in rows],
        advantages=advantages.first(lengths).take(rows),
        ref_logprobs=None if reference is None else reference.first(lengths).take(rows),
        weight=numbers(table, "weight")[rows],
        temperature=numbers(table, "temperature")[rows],
        policy_hashes=frozenset(table["policy_hash"].unique().to_pylist()),
        cost=cost,
        weights={name: ragged.first(lengths).take(rows) for name, ragged in weights.items()},
    )


def _refuse_not_finite(what: str, numbers: Ragged, sequences: NamedSequences, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(numbers.values) & sequences.is_trained)
    if len(bad):
        raise RefusedError(
            f"{where}: {what} of {sequences.names[numbers.locate(bad[0])[0]]} is {numbers.values[bad[0]]} on a trained "
            f"token ({counted(len(bad), 'such token')})",
            code="R502",
        )


def _beside(
    table: pa.Table, name: str, kind: type, ids: Ragged, names: Sequence[str], where: str, first_row: int = 0
) -> Ragged:
    lists = Ragged.of(table[name], kind)
    wrong = np.flatnonzero(lists.lengths != ids.lengths)
    if len(wrong):
        row = int(wrong[0])
        raise RefusedError(
            f"{where}: row {first_row + row} ({names[row]}): {name} has {lists.lengths[row]} entries, input_ids has "
            f"{ids.lengths[row]} ({counted(len(wrong), 'such row')})",
            code="L301" if name == "logprobs" else None,
        )
    return lists


#: Columns of an experiences file that a critic's training reads; ``values`` only where there are any.
VALUE_COLUMNS: tuple[str, ...] = (*EXPERIENCE_COLUMNS[:-1], "task_id", "returns", "values")


@dataclass(frozen=True)
class TrainingReturns(TrainingExperiences):
    """Sequences with the return of every token, and the ``values`` that a critic gave them before, where the file has any;
    ``heldout``: those of the tasks ``heldout_tasks`` (one entry per sequence), to measure on."""

    returns: Ragged = None  # type: ignore[assignment]  # always given; the fields before have defaults
    values: Ragged | None = None
    heldout: TrainingReturns | None = None
    heldout_tasks: Sequence[str] = ()

    @property
    def per_token(self) -> dict[str, Ragged]:
        return {"returns": self.returns} | ({} if self.values is None else {"values": self.values})

    @property
    def counts(self) -> dict[str, int]:
        held = 0 if self.heldout is None else len(self.heldout)
        return {**super().counts, "heldout_sequences": held, "heldout_tasks": len(set(self.heldout_tasks))}


def returns_apart(table: pa.Table, held: Collection[str], max_length: int | None, where: str) -> TrainingReturns:
    """The rows of a table (``VALUE_COLUMNS``), those of the tasks ``held`` held out. Raises as ``training_experiences``, and
    RefusedError (R502) for a return or value that is not finite."""
    tasks = table["task_id"].to_pylist()
    out = pa.array([task in held for task in tasks], pa.bool_())
    train = _with_returns(table.filter(pc.invert(out)), max_length, where)
    if not held:
        return train
    heldout = _with_returns(table.filter(out), max_length, where)
    task_of = dict(zip(table["rollout_id"].to_pylist(), tasks, strict=True))
    return replace(train, heldout=heldout, heldout_tasks=[task_of[rollout] for rollout in heldout.rollout_ids])


def _with_returns(table: pa.Table, max_length: int | None, where: str) -> TrainingReturns:
    data = training_experiences(table, max_length, where)
    row_of = {name: row for row, name in enumerate(sequence_names(table))}
    mine = table.take(pa.array([row_of[name] for name in data.sequences.names], pa.int64()))
    whole = Ragged.of(mine["input_ids"], np.int32)

    def numbers(name: str) -> Ragged:
        found = _beside(mine, name, np.float32, whole, data.sequences.names, where).first(data.sequences.lengths)
        _refuse_not_finite(name, found, data.sequences, where)
        return found

    known = "values" in table.column_names and mine["values"].null_count == 0
    return TrainingReturns(**vars(data), returns=numbers("returns"), values=numbers("values") if known else None)


#: Columns of rollouts that supervised training reads.
SFT_COLUMNS: tuple[str, ...] = (
    "rollout_id",
    "group_id",
    "rollout_index",
    "reward",
    "policy",
    "policy_hash",
    "temperature",
    "turns",
)
Select = Literal["best", "above", "all"]
_BATCH_ROWS = 4_096


def chosen_rollouts(table: pa.Table, select: Select, min_reward: float | None) -> np.ndarray:
    """Row numbers, rising. ``best``: the highest reward of each group (ties: the first rollout_index); ``above``: all;
    ``all``: also those without a reward. ``min_reward`` is a floor in every case where it is given."""
    reward = pc.fill_null(table["reward"], np.nan).to_numpy()
    good = np.isfinite(reward) if select != "all" or min_reward is not None else np.ones(len(reward), np.bool_)
    if min_reward is not None:
        good &= np.where(np.isfinite(reward), reward, -np.inf) >= min_reward
    rows = np.flatnonzero(good)
    if select != "best":
        return rows
    groups = table["group_id"].combine_chunks().dictionary_encode().indices.to_numpy()[rows]
    order = np.lexsort((table["rollout_index"].to_numpy()[rows], -reward[rows], groups))
    first = np.ones(len(order), np.bool_)
    first[1:] = groups[order][1:] != groups[order][:-1]
    return np.sort(rows[order[first]])


def rollouts_to_train(
    table: pa.Table, select: Select, min_reward: float | None, where: str, model: str | None
) -> np.ndarray:
    """Row numbers, rising, of the rollouts that are trained by likelihood, among those of the policy ``model``; the table
    needs no turns. Raises DataError for an empty table, and RefusedError when no rollout is chosen (R501)."""
    if not table.num_rows:
        raise DataError.empty(where, "rollouts")
    rows = of_model(table, model, where)
    chosen = chosen_rollouts(table.take(pa.array(rows)), select, min_reward)
    if not len(chosen):
        floor = "" if min_reward is None else f" with a reward of at least {min_reward:g}"
        raise RefusedError(
            f"{where}: none of {counted(len(rows), 'rollout')} has a reward to be chosen by{floor}",
            code="R501",
            hint=f"{unscored_hint([where])}; or lower --min-reward, or --select all",
        )
    return np.asarray(rows[chosen])


def rollout_part(
    made: pa.Table, total: int, max_length: int | None, where: str, seen: set[bytes] | None
) -> TrainingExperiences:
    """The sequences ``made`` of some of the chosen rollouts, weight 1, scored at temperature 1. Of sequences with the same
    ids and mask (after the cut) the first is trained: ``seen``: keys of those before; None keeps all. ``total``: rollouts
    that these were chosen from. Raises RefusedError when the tokens must not be trained on (T205, T206, T213, L301 to L303).
    """
    return _once(training_experiences(made, max_length, where), total, seen)


def distilled_rollouts(
    chosen: pa.Table,
    total: int,
    max_length: int | None,
    where: str,
    agents: Collection[str],
    seen: set[bytes] | None,
    *,
    rendered: bool,
) -> TrainingExperiences:
    """As ``rollout_part`` of all chosen rollouts (``SFT_COLUMNS``), with the distributions that were saved with them, at the
    rollouts' temperatures. Raises RefusedError for rollouts without those, too."""
    k = _alternatives_per_token(chosen, where)
    require_agents(chosen["turns"].chunks, agents, where)
    made = made_sequences(chosen, where, agents, rendered=rendered, alternatives_per_token=k)
    return _once(TeacherDistributions.beside(training_experiences(made, max_length, where), made, k), total, seen)


def _once(data: TrainingExperiences, total: int, seen: set[bytes] | None) -> TrainingExperiences:
    once = data if seen is None else data.take(data.sequences.first_of_equal(seen=seen))
    chosen = {
        "rollouts": total,
        "rollouts_chosen": len(set(data.rollout_ids)),
        "left_out_duplicate": len(data) - len(once),
    }
    return replace(once, chosen=chosen)


@dataclass(frozen=True)
class TeacherDistributions(TrainingExperiences):
    """Sequences with the ``k`` most likely tokens that the sampler saw at each trained token: a list per sequence of k
    ids (int32, −1: none) and k log-probs (float32, −inf: none) per trained token, at ``temperature``."""

    top_ids: Ragged = None  # type: ignore[assignment]  # always given; the fields before have defaults
    top_logprobs: Ragged = None  # type: ignore[assignment]  # as above
    k: int = 0

    @classmethod
    def beside(cls, data: TrainingExperiences, made: pa.Table, k: int) -> TeacherDistributions:
        """``data``, with the columns of the table that it was made of (see ``made_sequences``)."""
        names = zip(made["rollout_id"].to_pylist(), made["sequence_index"].to_pylist(), strict=True)
        row_of = {f"{rollout}/{index}": row for row, (rollout, index) in enumerate(names)}
        rows = np.array([row_of[name] for name in data.sequences.names], np.int64)
        mask = Ragged.of(made["loss_mask"])
        # A sequence's first token is never trained, but has alternatives where it was sampled.
        first = mask.values[mask.offsets[:-1]][rows] != 0
        kept = k * data.sequences.loss_mask.sums(data.sequences.is_trained)
        ids, logprobs = (Ragged.of(made[name]) for name in ("top_ids", "top_logprobs"))
        at, offsets = places(ids.offsets[:-1][rows] + k * first, kept)
        return cls(
            **vars(data),
            top_ids=Ragged(ids.values[at], offsets),
            top_logprobs=Ragged(logprobs.values[at], offsets),
            k=k,
        )

    def take(self, rows: np.ndarray) -> Self:
        taken = super().take(rows)
        return replace(taken, top_ids=self.top_ids.take(rows), top_logprobs=self.top_logprobs.take(rows))


def _alternatives_per_token(rollouts: pa.Table, where: str) -> int:
    """The most alternatives that a sampled token has. Raises RefusedError unless every one of these rollouts has some."""
    column = rollouts["turns"].combine_chunks()
    turns = column.flatten()
    tops = turns.field("top_log_probs")
    generated = pc.list_value_length(turns.field("generation_token_ids"))
    counts = pc.list_value_length(tops.flatten())
    has = pc.and_(pc.equal(pc.fill_null(pc.list_value_length(tops), 0), generated), pc.greater(generated, 0))
    bare = pc.and_(pc.greater(generated, 0), pc.invert(has)).to_numpy(zero_copy_only=False)
    if bare.any() or not len(counts) or pc.min(counts).as_py() == 0:
        owner = np.repeat(np.arange(len(column)), np.diff(column.offsets.to_numpy()))
        first = int(owner[bare][0]) if bare.any() else 0
        n = len(np.unique(owner[bare])) if bare.any() else len(column)
        raise RefusedError(
            f"{where}: {n:,} of {counted(len(column), 'rollout')} have no top_log_probs to distill (first: "
            f"{rollouts['rollout_id'][first].as_py()})",
            hint="collect the teacher's rollouts with --top-logprobs K; without --distill their sampled tokens are trained",
        )
    return int(pc.max(counts).as_py())


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Sequences put together into rows of at most ``capacity`` tokens: the sequence numbers of each row.

    Best fit, longest first; the same lengths always give the same rows. A sequence longer than ``capacity`` has a row of
    its own.
    """
    free: list[tuple[int, int]] = []  # (room left, row), rising
    rows: list[list[int]] = []
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sequence])
        at = bisect_left(free, (length, -1))
        if at < len(free):
            room, row = free.pop(at)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(sequence)
        insort(free, (room - length, row))
    return [np.array(row, np.int64) for row in rows]


def made_sequences(
    rollouts: pa.Table,
    where: str,
    agents: Collection[str] = (),
    *,
    rendered: bool = False,
    alternatives_per_token: int = 0,
) -> pa.Table:
    """The sequences of rollouts as ``training_experiences`` takes them: advantage 0, weight 1, temperature 1.

    ``agents``: only the turns of these are trained, when any are given; ``rendered``: ids rendered from text are taken,
    too (a column ``rendered`` says which); ``alternatives_per_token``: with columns ``top_ids`` and ``top_logprobs`` of
    ``k`` numbers per trained token, and the rollouts' temperatures. Raises RefusedError for log-probs or ids that are
    unusable (T206, T213, L301 to L303).
    """
    batches = rollouts.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)
    parts = [_sequences(batch, agents, where, rendered, alternatives_per_token) for batch in batches]
    return pa.concat_tables(parts)


def no_token_ids(where: str) -> RefusedError:
    """The error for rollouts without token ids."""
    hint = "`gymdata tokenize` renders ids from the text, as second class: training takes them with --allow-rendered"
    return RefusedError(f"{where}: the chosen rollouts have no token ids", code="T205", hint=hint)


def of_model(rollouts: pa.Table, model: str | None, where: str) -> np.ndarray:
    """Row numbers of the rollouts that the policy of that name sampled; all when ``model`` is None. Raises RefusedError
    when there are none."""
    if model is None:
        return np.arange(rollouts.num_rows)
    mine = np.flatnonzero(pc.fill_null(pc.equal(rollouts["policy"], model), False).to_numpy())
    if not len(mine):
        there = ", ".join(sorted(rollouts["policy"].unique().to_pylist()))
        raise RefusedError(f"{where}: no rollout is of model {model}", hint=f"models there: {there}")
    return mine


def _sequences(batch: pa.RecordBatch, agents: Collection[str], where: str, rendered: bool, k: int) -> pa.Table:
    turns = batch.column("turns")
    found = stitch(turns, batch.column("rollout_id"), where=where, rendered=rendered)
    if agents:
        found = found.restricted(found.sampled.of_agents(agents))
    of, n = pa.array(found.rollout), len(found)
    advantages = found.token_ids.like(np.zeros(len(found.token_ids.values), np.float32))
    lists = {"input_ids": found.token_ids, "loss_mask": found.loss_mask, "logprobs": found.logprobs,
             "advantages": advantages}  # fmt: skip
    temperature = pa.array(np.ones(n, np.float32))
    if k:
        lists |= _top_lists(turns, found, k)
        temperature = batch.column("temperature").take(of)
    return pa.table(
        {
            "rollout_id": batch.column("rollout_id").take(of),
            "sequence_index": pa.array(found.index),
            **{name: ragged.to_arrow() for name, ragged in lists.items()},
            "weight": pa.array(np.ones(n)),
            "temperature": temperature,
            "policy_hash": batch.column("policy_hash").take(of),
            "rendered": pa.array(TurnColumns.of(turns).has_rendered()).take(of),
        }
    )


def _top_lists(turns: pa.ListArray, found: RolloutSequences, k: int) -> dict[str, Ragged]:
    """The alternatives of the trained tokens, ``k`` a token, those that are not there as −1 and −inf."""
    ids, logprobs = alternatives(turns, found.sampled)
    row, place = ids.owner, np.arange(len(ids.values)) - ids.offsets[:-1][ids.owner]
    offsets = k * offsets_of(found.loss_mask.sums(found.is_trained))
    made = {}
    for name, flat, filler in (("top_ids", ids.values, -1), ("top_logprobs", logprobs.values, -np.inf)):
        table = np.full((len(ids), k), filler, flat.dtype)
        table[row, place] = flat
        made[name] = Ragged((table if found.source is None else table[found.source]).ravel(), offsets)
    return made


#: Columns of rollouts that labelled training reads.
KTO_COLUMNS: tuple[str, ...] = (*SFT_COLUMNS, "task_id")
#: Rewards closer to the bound than this, relative to the larger of the two, are ties.
_TIE = 1e-9


@dataclass(frozen=True)
class TrainingLabels(TrainingExperiences):
    """Sequences with one ``label`` each: True for a desirable one. ``first``: where their completion begins."""

    label: np.ndarray = None  # type: ignore[assignment]  # always given; the fields before have defaults

    def take(self, rows: np.ndarray) -> Self:
        return replace(super().take(rows), label=self.label[rows])

    @property
    def first(self) -> np.ndarray:
        """int64 (n,): index in its sequence of each one's first trained token."""
        return self.sequences.first_trained


def labels(table: pa.Table, threshold: float | None) -> tuple[np.ndarray, np.ndarray]:
    """(row numbers, desirable or not) of the rollouts that have a label, rising.

    Desirable: a reward above ``threshold``, or without one above the mean of the task's known rewards; undesirable:
    below. A rollout whose reward equals that bound has no label.
    """
    reward = pc.fill_null(table["reward"], np.nan).to_numpy().astype(np.float64)
    known = np.isfinite(reward)
    if threshold is not None:
        bar = np.full(len(reward), threshold)
    else:
        codes = table["task_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        tasks = int(codes.max(initial=-1)) + 1
        # Sorted, so that the sums do not depend on the order of the rows.
        order = np.lexsort((reward, codes))
        order = order[known[order]]
        unit = float(unit_of(np.abs(reward[known]).max(initial=0.0)))
        total = np.bincount(codes[order], weights=reward[order] / unit, minlength=tasks)
        count = np.bincount(codes[order], minlength=tasks)
        bar = (total / np.maximum(count, 1))[codes] * unit
    with np.errstate(over="ignore"):  # a difference beyond float64 is still above or below
        apart = np.where(known, reward - bar, 0.0)
    scale = np.maximum(np.abs(np.where(known, reward, 0.0)), np.abs(bar))
    rows = np.flatnonzero(known & (np.abs(apart) > _TIE * scale))
    return rows, apart[rows] > 0


def rollouts_to_label(
    table: pa.Table, threshold: float | None, where: str, model: str | None
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """(row numbers, desirable or not, counts) of the rollouts that have a label, rising; the table needs no turns. Raises
    DataError for an empty table, and RefusedError when no rollout has a label (R501: no reward at all, R503: no two rewards
    differ)."""
    if not table.num_rows:
        raise DataError.empty(where, "rollouts")
    of = of_model(table, model, where)
    table = table.take(pa.array(of))
    rows, desirable = labels(table, threshold)
    known = int(pc.sum(pc.is_finite(pc.fill_null(table["reward"], np.nan))).as_py() or 0)
    if not known:
        raise RefusedError(
            f"{where}: none of {counted(table.num_rows, 'rollout')} has a reward",
            code="R501",
            hint=unscored_hint([where]),
        )
    if not len(rows):
        bar = "their task's mean" if threshold is None else f"the threshold {threshold:g}"
        raise RefusedError(
            f"{where}: each of {counted(known, 'reward')} equals {bar}: none is desirable or undesirable",
            code="R503",
            hint="--threshold sets the reward above which a rollout is desirable",
        )
    counts = {
        "rollouts": table.num_rows,
        "desirable": int(desirable.sum()),
        "undesirable": int((~desirable).sum()),
        "left_out_tie": known - len(rows),
        "left_out_no_reward": table.num_rows - known,
    }
    return np.asarray(of[rows]), desirable, counts


def label_part(
    made: pa.Table,
    label: Mapping[str, bool],
    counts: Mapping[str, int],
    max_length: int | None,
    where: str,
    seen: set[bytes] | None,
) -> TrainingLabels:
    """The sequences ``made`` of some rollouts, all of a rollout with its ``label``. Of sequences with the same ids, mask and
    label the first is trained; ``seen`` and errors as in ``rollout_part``."""
    data = training_experiences(made, max_length, where)
    mine = np.array([label[rollout] for rollout in data.rollout_ids], np.bool_)
    whole = TrainingLabels(**{**vars(data), "label": mine})
    once = whole if seen is None else whole.take(whole.sequences.first_of_equal(mine, seen=seen))
    return replace(once, chosen={**counts, "left_out_duplicate": len(whole) - len(once)})
