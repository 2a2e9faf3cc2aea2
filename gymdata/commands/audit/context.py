"""What an audit needs besides numbers: the policy that the files name, other renderings of prompts, and the text of ids."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.audit.causes import RunMetadata
from gymdata.commands.audit.compare import LogprobComparison, worst
from gymdata.errors import DataError, GymdataError, UsageError, counted
from gymdata.models.model_identity import identity_of
from gymdata.rollouts.logprobs import temperature_biases, truncations
from gymdata.rollouts.messages import JsonObject, chat_message, split_messages
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import Turn, expand_prompts
from gymdata.store import scan_batches
from gymdata.store.paths import Facts, RunFacts

#: Tokens of the same sequence that are shown before one of the worst.
_BEFORE = 12
_HASH = re.compile(r"(sampled:)?[0-9a-f]{32}")
Sources = Sequence[str | Path]
Runs = Sequence[RunFacts]


def logprob_settings(
    policies: pa.ChunkedArray, temperatures: pa.ChunkedArray, runs: Runs, model: Facts, *, kept_sets: bool = False
) -> list[str]:
    """Differences of policy, tokenizer, template and sampling that need no forward pass to be seen. ``kept_sets``: every
    saved head is all that could be sampled."""
    findings = []
    named = sorted({p for p in pc.unique(policies).to_pylist() if p} - {model["policy_hash"]})
    if named:
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        findings.append(f"policy: rollouts name {named[0]}{more}, {model['path']} is {model['policy_hash']}")
    identities = _identities(runs)
    for key, label in (("tokenizer_hash", "tokenizer"), ("chat_template_hash", "chat template")):
        other = sorted({str(i[key]) for i in identities if i.get(key)} - {model[key]})
        if model[key] is None:
            findings.append(f"{label}: {model['path']} has none to compare")
        elif other:
            findings.append(f"{label}: the run used {other[0]}, {model['path']} has {model[key]}")
    if not identities:
        findings.append("no run.json says how these rollouts were sampled")
    effect = "log-probabilities are not of the whole distribution (L304)"
    if kept_sets:
        effect = "the model is normalized over the kept set of each token, its saved head"
    findings += [f"sampling: {cut}: {effect}" for cut in cuts(runs)]
    used = [t for t in pc.unique(temperatures).to_pylist() if t != 0.0]
    findings += [f"sampling: {why} (L304)" for why in temperature_biases({"logprobs_mode": _logprobs_mode(runs)}, used)]
    return findings


def run_metadata(policies: pa.Array, runs: Runs, model_hash: str) -> RunMetadata:
    """Metadata of the rollouts that disagree; ``policies``: their policy hashes."""
    hashes = set(policies.to_pylist())
    # The weights of served models, and of most imported files, are not known.
    comparable = all(_HASH.fullmatch(h or "") for h in hashes)
    same = hashes == {model_hash} if comparable and (len(hashes) == 1 or model_hash not in hashes) else None
    return RunMetadata(same, _logprobs_mode(runs), cuts(runs))


def _identities(runs: Runs) -> list[RunFacts]:
    return [
        identity for run in runs if (identity := identity_of(run)) and run.get("stage") in (None, "collect", "record")
    ]


def cuts(runs: Runs, *, kept_sets: bool = False) -> list[str]:
    """The sampling settings under which log-probabilities are not those of the whole distribution, or, with ``kept_sets``,
    not those over kept sets either."""
    return sorted({reason for run in _identities(runs) for reason in truncations(run, kept_sets=kept_sets)})


def _logprobs_mode(runs: Runs) -> str | None:
    modes = {identity.get("logprobs_mode") for identity in _identities(runs)} - {None}
    return str(modes.pop()) if len(modes) == 1 else None


def disagreeing_runs(rollouts: pa.Table, compared: LogprobComparison, off: np.ndarray) -> list[str]:
    """Whether some rollouts agree, and what sets the others (row numbers ``off``) apart."""
    agree = np.setdiff1d(compared.rows, off)
    if not len(off) or not len(agree):
        return []
    notes = [f"{len(agree):,} of {counted(len(compared.rows), 'rollout')} agree with the model, {len(off):,} do not"]
    for name in ("policy_hash", "policy_version", "temperature", "run_id"):
        bad, good = (set(rollouts[name].take(pa.array(rows)).to_pylist()) for rows in (off, agree))
        if not bad & good:
            values = ", ".join(sorted(map(str, bad))[:4])
            notes.append(f"those that do not are exactly the ones with {name} {values}")
    return notes


def first_prompts(sources: Sources, model: str, rollout_ids: Sequence[str]) -> Mapping[str, Sequence[list[int] | None]]:
    """The first prompts of rollouts as the model's own chat template writes them, from their messages: by the name of the
    way, with tools and without; None where the template refuses the messages."""
    from gymdata.chat.template import TransformersChat

    try:
        chat = TransformersChat.load(model, tool_parser="none", keep_reasoning=False)
    except GymdataError:
        return {}  # a model without a tokenizer or template renders nothing
    openings: dict[str, tuple[list[JsonObject], list[JsonObject]]] = {}
    for batch in _rollouts(sources, rollout_ids, ("n_turns", "messages", "tools")):
        opening, _ = split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())
        columns = (batch.column("rollout_id"), opening, batch.column("tools"))
        for name, messages, tools in zip(*(c.to_pylist() for c in columns), strict=True):
            where = f"rollout {name}"
            opened = [chat_message(m, f"{where}, message {n}") for n, m in enumerate(messages)]
            try:
                openings[name] = opened, json.loads(tools or "[]") or []
            except ValueError as error:
                raise DataError.bad_json(f"{where}, field 'tools'", tools, "a list") from error

    def rendered(rollout_id: str, with_tools: bool) -> list[int] | None:
        if rollout_id not in openings:
            return None
        messages, tools = openings[rollout_id]
        try:
            return list(chat.render(messages, tools if with_tools else None))
        except GymdataError:
            return None  # nothing was sampled under it

    ways = {"the model's chat template": True}
    if any(tools for _, tools in openings.values()):
        ways["the model's chat template without tools"] = False
    return {name: [rendered(i, with_tools) for i in rollout_ids] for name, with_tools in ways.items()}


def _rollouts(sources: Sources, rollout_ids: Iterable[str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Ids and ``columns`` of some rollouts."""
    chosen = pa.array(sorted(set(rollout_ids)), pa.string())
    for source in sources:
        for batch in scan_batches(source, ROLLOUTS, ("rollout_id", *columns), 4_096):
            selected = batch.filter(pc.is_in(batch.column("rollout_id"), value_set=chosen))
            if selected.num_rows:
                yield selected


def worst_tokens(compared: LogprobComparison, sources: Sources, tokenizer: str | None, n: int) -> list[JsonObject]:
    """The ``n`` tokens that are furthest apart, with their ids, and their texts where a tokenizer is known."""
    tokens = worst(compared, n).tolist()
    locations = [compared.where(token) for token in tokens]
    turns: dict[str, list[Turn]] = {}
    for batch in _rollouts(sources, {compared.rollout_ids[rollout] for rollout, *_ in locations}, ("turns",)):
        turns.update(zip(batch.column("rollout_id").to_pylist(), batch.column("turns").to_pylist(), strict=True))
    decode = None
    if tokenizer is not None:
        from gymdata.models._transformers import load_reader

        with contextlib.suppress(UsageError):  # the figures stand without their texts
            decode = load_reader(tokenizer).decode
    rows = []
    for token, (rollout, turn, position) in zip(tokens, locations, strict=True):
        name = compared.rollout_ids[rollout]
        generation = np.asarray(turns[name][turn]["generation_token_ids"], np.int32)
        row: JsonObject = {
            "rollout_id": name,
            "turn": turn,
            "position": position,
            "token_id": int(generation[position]),
            "saved": float(compared.saved[token]),
            "recomputed": float(compared.recomputed[token]),
            "difference": float(compared.apart[token]),
        }
        if decode is not None:
            prompt = expand_prompts(turns[name], check_digests=False)[turn]
            before = np.concatenate((prompt, generation[:position]))[-_BEFORE:]
            row |= {"token": decode([row["token_id"]]), "before": decode(before.tolist())}
        rows.append(row)
    return rows
