"""Experiences as trainers get them: flat arrays of ids, masks and what each algorithm needs besides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.train.pair_data import LengthCost, NamedSequences, TrainingData, check_numbers, numbers
from gymdata.errors import DataError, RefusedError, UsageError, counted
from gymdata.rollouts.logprobs import POSITIVE_TOLERANCE, sampled_at
from gymdata.rollouts.ragged import Ragged, list_parts, offsets_of
from gymdata.rollouts.schema import HEAD
from gymdata.rollouts.soundness import Lists, is_rendered, refuse_unsound

#: Weights of the parts of a loss, a number per token each.
WEIGHTS = ("rl_weight", "ce_weight", "ref_kl_weight")
#: What rounding leaves of a sum of probabilities above 1.
_ROUNDED_SUM = 1e-3
#: Columns of an experiences file that training reads; those from ``ref_logprobs`` on only where there are any.
EXPERIENCE_COLUMNS: tuple[str, ...] = (
    "rollout_id",
    "sequence_index",
    "input_ids",
    "loss_mask",
    "logprobs",
    "turn_starts",
    "advantages",
    "weight",
    "temperature",
    "policy_hash",
    "policy_version",
    "reward",
    "ref_logprobs",
    *WEIGHTS,
    "optimal_value",
)


@dataclass(frozen=True, kw_only=True)
class TrainingExperiences(TrainingData):
    """n sequences; ``advantages``, ``ref_logprobs`` (None: not in the file) and each of ``weights`` (those of ``WEIGHTS``
    that the file has) have a number per token of them; ``weight`` and ``temperature`` have one entry per sequence, as have
    ``rollout_ids``. ``policy_versions``, where they are known: that of each sequence. ``top_ids`` and ``top_log_probs``,
    where they were read: a list per sequence, with k ids (int32, −1: none) and k log-probs (float32, −∞: none) of the
    sampler's head for each trained token. ``chosen``: how many rollouts they were chosen from, and so on, where they were
    chosen."""

    rollout_ids: Sequence[str]
    advantages: Ragged
    ref_logprobs: Ragged | None
    weight: np.ndarray
    temperature: np.ndarray
    policy_hashes: frozenset[str]
    chosen: dict[str, int] = field(default_factory=dict)
    weights: dict[str, Ragged] = field(default_factory=dict)
    policy_versions: np.ndarray | None = None
    top_ids: Ragged | None = None
    top_log_probs: Ragged | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def heads(self) -> dict[str, Ragged]:
        """What a loss reads of heads, where these were read: name → k numbers per trained token."""
        if self.top_ids is None or self.top_log_probs is None:
            return {}
        return {"top_ids": self.top_ids, "top_log_probs": self.top_log_probs}

    @property
    def k(self) -> int:
        """The ids of a head; 0 without heads."""
        return 0 if self.top_ids is None else int(self.top_ids[0].shape[1])

    @property
    def counts(self) -> dict[str, int]:
        return {**self.chosen, "sequences": len(self)}

    @property
    def per_token(self) -> dict[str, Ragged]:
        """What a loss needs besides ids and masks: name → a number per token."""
        reference = {} if self.ref_logprobs is None else {"ref_logprobs": self.ref_logprobs}
        return {"logprobs": self.sequences.logprobs, "advantages": self.advantages, **self.weights, **reference}

    @property
    def per_row(self) -> dict[str, np.ndarray]:
        """The same: name → a number per sequence."""
        return {"weight": self.weight, "temperature": sampled_at(self.temperature)}

    def of_policy(self, rows: np.ndarray) -> np.ndarray:
        """Which tokens of the sequences ``rows`` the policy sampled and is trained for, bool, flat: trained ones whose
        ``rl_weight`` is not 0."""
        trained = np.asarray(self.sequences.loss_mask.take(rows).values != 0)
        return trained & (self.weights["rl_weight"].take(rows).values != 0) if "rl_weight" in self.weights else trained

    def rollouts_of(self, rows: np.ndarray) -> list[str]:
        return list(dict.fromkeys(self.rollout_ids[row] for row in rows))

    def take(self, rows: np.ndarray) -> Self:
        """The sequences at ``rows`` (int array), in that order, with all that belongs to them."""
        columns: dict[str, Any] = {"rollout_ids": [self.rollout_ids[row] for row in rows]}
        for name, value in vars(self).items():
            if isinstance(value, (NamedSequences, Ragged)):
                columns[name] = value.take(rows)
            elif isinstance(value, np.ndarray):
                columns[name] = value[rows]
        weights = {name: weight.take(rows) for name, weight in self.weights.items()}
        return replace(self, **columns, weights=weights)


def sequence_names(table: pa.Table) -> list[str]:
    """The name of each row of experiences."""
    numbers = table["sequence_index"].to_pylist()
    return [f"{rollout}/{index}" for rollout, index in zip(table["rollout_id"].to_pylist(), numbers, strict=True)]


def training_experiences(
    table: pa.Table,
    max_length: int | None = None,
    where: str = "experiences",
    first_row: int = 0,
    k: int = 0,
    *,
    ratios: bool = True,
) -> TrainingExperiences:
    """The data of ``trained_rows``."""
    return trained_rows(table, max_length, where, first_row, k, ratios=ratios)[0]


def trained_rows(
    table: pa.Table, max_length: int | None, where: str, first_row: int = 0, k: int = 0, *, ratios: bool = True
) -> tuple[TrainingExperiences, np.ndarray]:
    """The rows of a table (``EXPERIENCE_COLUMNS``), cut to ``max_length`` tokens when given, and which of them they are; the
    first is row ``first_row`` of ``where``. ``k``: with heads of at most so many ids. ``ratios``: whether log-probs are
    needed, else a row may have none that are known.

    A sequence without a trained token (after the cut) is left out and named in ``cost``. Raises DataError for rows that
    contradict themselves and RefusedError (T205, T206, L301 to L303) for rows that must not be trained on.
    """
    names = sequence_names(table)
    ids = Ragged.of(table["input_ids"], np.int32)
    mask, logprobs, advantages = (
        _beside(table, name, kind, ids, names, where, first_row)
        for name, kind in (("loss_mask", np.int8), ("logprobs", np.float32), ("advantages", np.float32))
    )
    reference = None
    if "ref_logprobs" in table.column_names and table["ref_logprobs"].null_count == 0:
        reference = _beside(table, "ref_logprobs", np.float32, ids, names, where, first_row)
    if "turn_starts" in table.column_names:  # those that are made of rollouts have none
        starts = Ragged.of(table["turn_starts"])
        odd = np.flatnonzero((starts.values < 0) | (starts.values > starts.spread(ids.lengths)))
        for row, _ in map(starts.locate, odd[:1]):
            raise DataError(
                f"{where}, row {first_row + row}, sequence {names[row]}: turn_starts: got {starts.values[odd[0]]}, expected "
                f"a place among its {counted(ids.lengths[row], 'token')}",
                hint="correct these rows, or leave them out",
            )
    NamedSequences(ids, mask, logprobs, names).refuse_odd_mask(where)
    mask = mask.like(mask.values.copy())
    mask.values[ids.offsets[:-1][ids.lengths > 0]] = 0
    full = NamedSequences(ids, mask, logprobs, names)
    full.refuse_unsound("input_ids", "sequence", where, is_rendered(table), ratios=ratios)
    if reference is not None:
        checked = reference.like(np.where(full.is_trained, reference.values, 0))
        refuse_unsound(
            (Lists("input_ids", ids),), Lists("ref_logprobs", checked), lambda k: f"sequence {names[k]}", where
        )
    _refuse_not_finite("advantages", advantages, full, where)
    check_numbers(table, {"weight": 0.0, "temperature": 0.0}, "sequence", names, where, first_row)
    weights = _weights(table, full, where, first_row)
    longest = int(full.lengths.max(initial=0))
    lengths = np.minimum(full.lengths, longest if max_length is None else max_length)
    short = full if (lengths == full.lengths).all() else full.cut(int(lengths.max()))
    trained = short.loss_mask.sums(short.is_trained)
    rows = np.flatnonzero(trained > 0)
    cost = LengthCost(
        "sequence",
        max_length,
        len(full),
        longest,
        rows_cut=int((lengths < full.lengths).sum()),
        trained_tokens_lost=int(full.is_trained.sum() - trained[rows].sum()),
        nothing_trained=tuple(names[i] for i in np.flatnonzero(trained == 0)),
    )
    data = TrainingExperiences(
        sequences=short,
        rollout_ids=table["rollout_id"].to_pylist(),
        advantages=advantages.first(lengths),
        ref_logprobs=None if reference is None else reference.first(lengths),
        weight=numbers(table, "weight"),
        temperature=numbers(table, "temperature"),
        policy_hashes=frozenset(table["policy_hash"].unique().to_pylist()),
        cost=cost,
        weights={name: weight.first(lengths) for name, weight in weights.items()},
        policy_versions=table["policy_version"].to_numpy() if "policy_version" in table.column_names else None,
    )
    if k:
        trained = full.is_trained & full.token_ids.is_head(lengths)
        top_ids, top_log_probs = _heads(table, full, trained, k, where, first_row)
        offsets = offsets_of(short.n_trained)
        data = replace(data, top_ids=Ragged(top_ids, offsets), top_log_probs=Ragged(top_log_probs, offsets))
    return data.take(rows), rows


def _heads(
    table: pa.Table, sequences: NamedSequences, trained: np.ndarray, k: int, where: str, first_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """The columns ``HEAD`` of the tokens that are true in ``trained``, (n, k) each, −1 and −∞ where there is none. Raises
    RefusedError for lists that do not fit, an id that is twice in a head, and log-probs of no distribution."""
    lists, names = {}, sequences.names
    for name in HEAD:
        rows = [list_parts(chunk) for chunk in table[name].chunks]
        flat = Ragged.joined(
            [Ragged.of(of_rows) for _, of_rows in rows] or [Ragged(np.empty(0), np.zeros(1, np.int64))]
        )
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(offsets) for offsets, _ in rows)])
        wrong = np.flatnonzero((lengths != sequences.lengths) & (lengths > 0))
        if len(wrong):
            row = int(wrong[0])
            raise RefusedError(
                f"{where}: row {first_row + row} ({names[row]}): {name} has {lengths[row]} lists, input_ids has "
                f"{sequences.lengths[row]} tokens ({counted(len(wrong), 'such row')})"
            )
        # The tokens of a row without heads take the list of no token, at the end.
        places = np.full(len(trained), len(flat), np.int64)
        places[sequences.token_ids.spread(lengths > 0)] = np.arange(len(flat))
        lists[name] = Ragged(flat.values, np.append(flat.offsets, flat.offsets[-1])).take(places[trained])
    ids, logprobs = (lists[name] for name in HEAD)
    places = np.flatnonzero(trained)
    _refuse_odd_heads(ids, logprobs, lambda token: sequences.token_ids.locate(int(places[token])), names, where)
    return _wide(ids, k, -1), _wide(logprobs, k, -np.inf)


def _wide(lists: Ragged, k: int, filler: float) -> np.ndarray:
    padded = lists.padded(filler)
    return np.pad(padded, ((0, 0), (0, k - padded.shape[1])), constant_values=filler)


def _refuse_odd_heads(
    ids: Ragged, logprobs: Ragged, place: Callable[[int], tuple[int, int]], names: Sequence[str], where: str
) -> None:
    """Raises RefusedError for the first head that no distribution has; ``place``: row and position of a token."""
    unequal = np.flatnonzero(ids.lengths != logprobs.lengths)
    values, owner = logprobs.values.astype(np.float64), logprobs.owner
    order = np.lexsort((ids.values, ids.owner))
    twice = (np.diff(ids.values[order]) == 0) & (np.diff(ids.owner[order]) == 0)
    too_much = np.bincount(owner, weights=np.exp(np.minimum(values, 1)), minlength=len(logprobs)) > 1 + _ROUNDED_SUM
    for tokens, code, what in (
        (unequal, "L301", "top_ids and top_log_probs differ in number"),
        (owner[~np.isfinite(values)], "L302", "a log-probability of top_log_probs is not finite"),
        (owner[values > POSITIVE_TOLERANCE], "L303", "a log-probability of top_log_probs is above 0"),
        (ids.owner[order][1:][twice], None, "an id is twice in top_ids"),
        (np.flatnonzero(too_much), None, "the probabilities of top_log_probs sum to more than 1"),
    ):
        if len(tokens):
            row, position = place(int(tokens.min()))
            raise RefusedError(f"{where}: token {position} of {names[row]}: {what}", code=code)


def _weights(table: pa.Table, sequences: NamedSequences, where: str, first_row: int) -> dict[str, Ragged]:
    """The columns of weights that are there. Raises RefusedError for a weight that is not finite, is below 0, or is at
    a token that is not trained."""
    weights_of = {}
    for name in WEIGHTS:
        if name not in table.column_names or table[name].null_count == len(table):
            continue
        ids, names = sequences.token_ids, sequences.names
        weights_of[name] = weights = _beside(table, name, np.float32, ids, names, where, first_row)
        values = weights.values.copy()
        values[weights.offsets[:-1][weights.lengths > 0]] = 0
        for bad, why in (
            (~(np.isfinite(values) & (values >= 0)), "expected a finite weight of at least 0"),
            ((values != 0) & ~sequences.is_trained, "but its loss_mask is 0: set that to 1 to train it"),
        ):
            if tokens := np.flatnonzero(bad).tolist():
                row, token = weights.locate(tokens[0])
                raise RefusedError(
                    f"{where}: {name} of token {token} of {sequences.names[row]} is {values[tokens[0]]:g}, {why} "
                    f"({counted(len(tokens), 'such token')})"
                )
    return weights_of


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


@dataclass(frozen=True, kw_only=True)
class TrainingReturns(TrainingExperiences):
    """Sequences with the return of every token, and the ``values`` that a critic gave them before, where the file has any;
    ``heldout``: those of other tasks, to measure on."""

    returns: Ragged
    values: Ragged | None = None
    heldout: TrainingReturns | None = None

    @property
    def per_token(self) -> dict[str, Ragged]:
        return {"returns": self.returns} | ({} if self.values is None else {"values": self.values})

    @property
    def counts(self) -> dict[str, int]:
        sequences, tasks = (0, 0) if self.heldout is None else (len(self.heldout), len(set(self.heldout.tasks)))
        return {**super().counts, "heldout_sequences": sequences, "heldout_tasks": tasks}


def returns_apart(table: pa.Table, tasks: Collection[str], max_length: int | None, where: str) -> TrainingReturns:
    """The rows of a table (``VALUE_COLUMNS``), those of ``tasks`` held out. Raises as ``training_experiences``, and
    RefusedError (R502) for a return or value that is not finite."""
    heldout = pc.is_in(table["task_id"], value_set=pa.array(sorted(tasks), table["task_id"].type))
    train = _with_returns(table.filter(pc.invert(heldout)), max_length, where)
    if not tasks:
        return train
    measured = _with_returns(table.filter(heldout), max_length, where)
    task_of = dict(zip(table["rollout_id"].to_pylist(), table["task_id"].to_pylist(), strict=True))
    return replace(train, heldout=replace(measured, tasks=[task_of[rollout] for rollout in measured.rollout_ids]))


def _with_returns(table: pa.Table, max_length: int | None, where: str) -> TrainingReturns:
    data, rows = trained_rows(table, max_length, where)
    table = table.take(pa.array(rows))
    ids = Ragged.of(table["input_ids"], np.int32)

    def numbers(name: str) -> Ragged:
        column = _beside(table, name, np.float32, ids, data.sequences.names, where).first(data.sequences.lengths)
        _refuse_not_finite(name, column, data.sequences, where)
        return column

    has_values = "values" in table.column_names and table["values"].null_count == 0
    return TrainingReturns(**vars(data), returns=numbers("returns"), values=numbers("values") if has_values else None)
