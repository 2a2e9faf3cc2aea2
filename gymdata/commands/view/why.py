"""Why a sampled token is trained, and how: where its mask comes from, its group's arithmetic, its probabilities, and
its losses.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from gymdata import credit
from gymdata.commands.train.losses import LOSSES
from gymdata.commands.view.evidence.rollout import Tokens, finite
from gymdata.commands.view.evidence.tables import Snapshot, facts_of
from gymdata.commands.view.text import Values
from gymdata.credit.estimators import ALL
from gymdata.errors import GymdataError
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.messages import PairRow, RolloutRow
from gymdata.rollouts.next_prompt import common_length
from gymdata.rollouts.turns import chains


def why(tokens: Tokens, row: RolloutRow, turn: int, k: int, snapshot: Snapshot) -> Values:
    """Everything that determines the weight of sampled token ``k`` of ``turn`` in training."""
    reference = tokens.reference[turn]
    return {
        "turn": turn,
        "k": k,
        "of": len(tokens.turns[turn]["generation_token_ids"]),
        "id": int(tokens.turns[turn]["generation_token_ids"][k]),
        "mask": _mask(tokens, turn, k),
        "credit": _credit(tokens, row, turn, k, snapshot),
        "logprob": finite(tokens.turns[turn]["generation_log_probs"][k]),
        "reference": None if reference is None else finite(reference[k]),
        "audited": tokens.audited,
        "sequence": _sequence(tokens, turn),
        "losses": loss_panels(),
    }


def why_in_pair(pair: PairRow, side: str, k: int) -> Values:
    """Everything that determines how DPO trains token ``k`` of the completion of a pair's ``side``."""
    ids = {name: pair[f"{name}_ids"] for name in ("chosen", "rejected")}
    shared = common_length(ids["chosen"], ids["rejected"])
    # The log-ratios to the reference of the policy as it sampled: the start of a training from it.
    ratios: dict[str, float | None] = {}
    for name in ids:
        tokens = zip(pair[f"{name}_logprobs"], pair[f"{name}_mask"], strict=True)
        reference = pair.get(f"ref_{name}_logps")
        ratios[name] = None if reference is None else finite(sum(lp for lp, mask in tokens if mask) - reference)
    chosen, rejected = ratios["chosen"], ratios["rejected"]
    return {
        "side": side,
        "k": k,
        "of": len(ids[side]),
        "id": int(ids[side][k]),
        "mask": int(pair[f"{side}_mask"][k]),
        "shared": k < shared,
        "logprob": finite(pair[f"{side}_logprobs"][k]),
        "difference": None if chosen is None or rejected is None else chosen - rejected,
        "weight": pair["weight"],
        "margin": pair["margin"],
    }


def loss_panels() -> list[Values]:
    """The losses that say how they limit a ratio, each with a slider for its bounds, from its defaults on."""
    panels = []
    for loss in LOSSES.values():
        if loss.curve is not None:
            bounds = []
            for name, value in loss.settings.items():
                if name not in _BOUNDS:
                    continue
                key, label, side, reach = _BOUNDS[name]
                distance = value - 1 if name == "tis_cap" else value
                low, high = sorted((1.0, max(1 + side * reach * distance, 0.0)))
                numbers = {"min": low, "max": high, "step": distance / 20, "start": 1 + side * distance}
                bounds.append({"key": key, "label": label, **{name: round(x, 9) for name, x in numbers.items()}})
            panels.append(
                {"name": loss.curve.title, "limits": loss.curve.limits, "of": loss.curve.of, "bounds": bounds}
            )
    return panels


#: Setting of a loss → its bound of a ratio, the side that it is on, and how far the slider goes, in distances from 1.
_BOUNDS: Mapping[str, tuple[str, str, float, float]] = {
    "clip_low": ("low", "1 − clip_low", -1.0, 2.5),
    "clip_high": ("high", "1 + clip_high", 1.0, 5.0),
    "tis_cap": ("high", "tis_cap", 1.0, 5.0),
}


def _mask(tokens: Tokens, turn: int, k: int) -> Values:
    sampled = f"the policy sampled it in turn {turn}, so it is in exactly one training sequence"
    if tokens.turns[turn].get("rendered"):
        sampled = f"rendered from the text of turn {turn}, not sampled (T213): trained only with --allow-rendered"
    mask = tokens.mask[turn]
    if mask is not None:
        value = int(mask[k])
        why_not = "the file masks it out (--target-agents, or --entropy-ratio)"
        return {"value": value, "source": tokens.experience, "reason": sampled if value else why_not}
    if tokens.experience is not None:
        reason = (
            f"its group was left out ({tokens.left_out})" if tokens.left_out else "no sequence of the file has its turn"
        )
        return {"value": 0, "source": tokens.experience, "reason": reason}
    return {"value": 1, "source": None, "reason": sampled}


def _credit(tokens: Tokens, row: RolloutRow, turn: int, k: int, snapshot: Snapshot) -> Values:
    """The rewards of the group and the advantages that the estimator gives."""
    facts = facts_of(Path(tokens.experience)) if tokens.experience else {}
    config = facts.get("config") or {}
    estimator = str(config.get("estimator") or "grpo")
    used = ALL.get(estimator)
    mates = snapshot.where("group_id", str(row["group_id"]))
    group = snapshot.table.select(["rollout_id", "rollout_index", "reward"]).take(pa.array(mates)).to_pylist()
    group.sort(key=lambda member: (member["rollout_index"], member["rollout_id"]))
    rewards = np.array([math.nan if member["reward"] is None else member["reward"] for member in group])
    # NaN when the estimator reads more than these rewards, or other ones.
    shaped = np.full(len(rewards), np.nan)
    if len(rewards) and used is not None and not used.whitens and used.alone and not used.baseline:
        options = {name: config[name] for name in used.options if config.get(name) is not None}
        with contextlib.suppress(GymdataError):  # rewards that this estimator does not take: another score was used
            shaped = credit.shape_rewards(rewards, estimator, **options)
    scored = rewards[np.isfinite(rewards)]
    advantages = tokens.advantages[turn]
    for member, value in zip(group, shaped.tolist(), strict=True):
        member["advantage"] = finite(value)
        member["this"] = member["rollout_id"] == row["rollout_id"]
    score = facts.get("score") or TOTAL
    return {
        "estimator": estimator,
        "formula": f"A = {used.formula}" if used else estimator,
        "by_group": used is not None and used.standardizes,
        "file": tokens.experience,
        "score": score,
        "same_rewards": score == (snapshot.score or TOTAL),
        "settings": {k: config[k] for k in _SHAPING if config.get(k) not in (None, False, "none", "outcome", 1.0)},
        "group": group,
        "mean": float(scored.mean()) if len(scored) else None,
        "std": float(scored.std(ddof=used.ddof if used else 1)) if len(scored) > 1 else None,
        "flat": bool(len(scored) and scored.max() == scored.min()),
        "computed": next((member["advantage"] for member in group if member["this"]), None),
        "saved": None if advantages is None else finite(advantages[k]),
        "dropped": tokens.left_out,
    }


#: Settings of ``gymdata experience`` that change an advantage after the group's arithmetic.
_SHAPING = (
    *("rewards", "gamma", "lam", "kl_coef", "reward_norm", "reward_clip", "overlong_buffer", "clip_filter_weights"),
    *("whiten", "normalize_cross_batch", "mean_only", "advantage_clip", "entropy_ratio"),
)


def _sequence(tokens: Tokens, turn: int) -> Values | None:
    """The trained tokens of the sequence that trains this turn, and the mean of their log-ratios: what GSPO clips."""
    for number, sequence in enumerate(chains(tokens.turns, tokens.prompts)):
        turns = sequence.trained_turns
        if turn not in turns:
            continue
        size = sum(len(tokens.turns[t]["generation_token_ids"]) for t in turns)
        if any(tokens.reference[t] is None for t in turns) or not size:
            return {"number": number, "tokens": size, "mean_log_ratio": None}
        total = sum(
            float(np.sum(tokens.reference[t] - tokens.turns[t]["generation_log_probs"], dtype=float)) for t in turns
        )
        return {"number": number, "tokens": size, "mean_log_ratio": finite(total / size)}
    return None
