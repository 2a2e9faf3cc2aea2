"""What an audit needs besides numbers: the policy that the files name, other renderings of prompts, and the text of
ids.

Invariants: nothing here is needed for the figures; what is not known is reported as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.audit.causes import RunMetadata
from gymdata.audit.compare import LogprobComparison, worst
from gymdata.errors import DataError, GymdataError, UsageError, counted
from gymdata.rollouts.logprobs import temperature_biases, truncations
from gymdata.rollouts.messages import split_messages
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import Turn, expand_prompts
from gymdata.store import scan_batches

#: Tokens of the same sequence that are shown before one of the worst.
_BEFORE = 12
_HASH = re.compile(r"(sampled:)?[0-9a-f]{32}")
Sources = Sequence[str | Path]
Runs = Sequence[Mapping[str, Any]]


def logprob_settings(
    policies: pa.ChunkedArray, temperatures: pa.ChunkedArray, runs: Runs, model: dict[str, Any]
) -> list[str]:
    """Differences of policy, tokenizer, template and sampling that need no forward pass to be seen."""
    findings = []
    named = sorted({p for p in pc.unique(policies).to_pylist() if p} - {model["policy_hash"]})
    if named:
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        findings.append(f"policy: rollouts name {named[0]}{more}, {model['path']} is {model['policy_hash']}")
    identities = _identities(runs)
    for key, what in (("tokenizer_hash", "tokenizer"), ("chat_template_hash", "chat template")):
        other = sorted({str(i[key]) for i in identities if i.get(key)} - {model[key]})
        if model[key] is None:
            findings.append(f"{what}: {model['path']} has none to compare")
        elif other:
            findings.append(f"{what}: the run used {other[0]}, {model['path']} has {model[key]}")
    if not identities:
        findings.append("no run.json says how these rollouts were sampled")
    findings += [f"sampling: {cut}: log-probabilities are not of the whole distribution (L304)" for cut in _cuts(runs)]
    used = [t for t in pc.unique(temperatures).to_pylist() if t != 0.0]
    findings += [f"sampling: {why} (L304)" for why in temperature_biases({"logprobs_mode": _logprobs_mode(runs)}, used)]
    return findings


def run_metadata(policies: pa.Array, runs: Runs, model_hash: str) -> RunMetadata:
    """Metadata of the rollouts that disagree; ``policies``: their policy hashes."""
    hashes = set(policies.to_pylist())
    # The weights of served models, and of most imported files, are not known.
    comparable = all(_HASH.fullmatch(h or "") for h in hashes)
    same = hashes == {model_hash} if comparable and (len(hashes) == 1 or model_hash not in hashes) else None
    return RunMetadata(same, _logprobs_mode(runs), _cuts(runs))


def _identities(runs: Runs) -> list[Mapping[str, Any]]:
    return [identity for run in runs if (identity := run.get("identity")) and run.get("stage") in (None, "collect")]


def _cuts(runs: Runs) -> list[str]:
    return sorted({reason for identity in _identities(runs) for reason in truncations(identity)})


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
        column = rollouts[name]
        bad, good = (set(column.take(pa.array(rows)).to_pylist()) for rows in (off, agree))
        if not bad & good:
            values = ", ".join(sorted(map(str, bad))[:4])
            notes.append(f"those that do not are exactly the ones with {name} {values}")
    return notes


class Renderings:
    """The first prompts of rollouts as the model's own chat template writes them, from their messages."""

    def __init__(self, sources: Sources, model: str) -> None:
        self._sources, self._model = sources, model

    def __call__(self, rollout_ids: Sequence[str]) -> Mapping[str, Sequence[Sequence[int] | None]]:
        from gymdata.chat.template import TransformersChat

        try:
            chat = TransformersChat.load(self._model, tool_parser="none", keep_reasoning=False)
        except GymdataError:
            return {}  # a model without a tokenizer or template renders nothing
        openings = self._openings(rollout_ids)
        with_tools = [self._render(chat, openings.get(i), tools=True) for i in rollout_ids]
        named = {"the model's chat template": with_tools}
        if any(tools for _, tools in openings.values()):
            named["the model's chat template without tools"] = [
                self._render(chat, openings.get(i), tools=False) for i in rollout_ids
            ]
        return named

    @staticmethod
    def _render(chat: Any, opening: tuple[list[Any], list[Any]] | None, *, tools: bool) -> Sequence[int] | None:
        if opening is None:
            return None
        try:
            return list(chat.render(opening[0], opening[1] if tools else None))
        except GymdataError:
            return None  # the template refuses these messages, so nothing was sampled under it

    def _openings(self, rollout_ids: Sequence[str]) -> dict[str, tuple[list[Any], list[Any]]]:
        """Messages before the model's first, and tools, of each rollout."""
        wanted = pa.array(sorted(set(rollout_ids)))
        found: dict[str, tuple[list[Any], list[Any]]] = {}
        for source in self._sources:
            for batch in scan_batches(source, ROLLOUTS, ("rollout_id", "n_turns", "messages", "tools"), 4_096):
                batch = batch.filter(pc.is_in(batch.column("rollout_id"), value_set=wanted))
                if not batch.num_rows:
                    continue
                opening, _ = split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())
                columns = (batch.column("rollout_id"), opening, batch.column("tools"))
                for name, messages, tools in zip(*(c.to_pylist() for c in columns), strict=True):
                    where = f"rollout {name}"
                    opened = [_chat_message(m, f"{where}, message {n}") for n, m in enumerate(messages)]
                    found[name] = opened, _from_json(tools or "[]", f"{where}, field 'tools'") or []
        return found


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError.bad_json(where, text, "a list") from error


def _chat_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    chat = {k: v for k, v in message.items() if v is not None and k not in ("turn", "extra", "tool_calls")}
    if message.get("tool_calls"):
        chat["tool_calls"] = _from_json(message["tool_calls"], f"{where}, field 'tool_calls'")
    return {"content": None, **chat}


def worst_tokens(compared: LogprobComparison, sources: Sources, tokenizer: str | None, n: int) -> list[dict[str, Any]]:
    """The ``n`` tokens that are furthest apart, with their ids, and their texts where a tokenizer is known."""
    tokens = worst(compared, n).tolist()
    places = [compared.where(token) for token in tokens]
    turns = _turns_of(sources, {compared.rollout_ids[rollout] for rollout, *_ in places})
    text = _text_of(tokenizer)
    rows = []
    for token, (rollout, turn, position) in zip(tokens, places, strict=True):
        name = compared.rollout_ids[rollout]
        calls = turns[name]
        generation = np.asarray(calls[turn]["generation_token_ids"], np.int32)
        before = np.concatenate((expand_prompts(calls, check_digests=False)[turn], generation[:position]))[-_BEFORE:]
        row = {
            "rollout_id": name, "turn": turn, "position": position, "token_id": int(generation[position]),
            "saved": float(compared.saved[token]), "recomputed": float(compared.found[token]),
            "difference": float(compared.apart[token]),
        }  # fmt: skip
        if text is not None:
            row |= {"token": text([row["token_id"]]), "before": text(before.tolist())}
        rows.append(row)
    return rows


def _turns_of(sources: Sources, names: set[str]) -> dict[str, list[Turn]]:
    wanted = pa.array(sorted(names), pa.string())
    found: dict[str, list[Turn]] = {}
    for source in sources:
        for batch in scan_batches(source, ROLLOUTS, ("rollout_id", "turns"), 4_096):
            some = batch.filter(pc.is_in(batch.column("rollout_id"), value_set=wanted))
            found.update(zip(some.column("rollout_id").to_pylist(), some.column("turns").to_pylist(), strict=True))
    return found


def _text_of(folder: str | None) -> Any:
    from gymdata.models._transformers import load_reader

    if folder is None:
        return None
    try:
        return load_reader(folder).decode
    except UsageError:
        return None  # the figures stand without their texts
