"""``gymdata experience``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import ConfigFile, JsonFlag, OverwriteFlag, SetFlag, Watch, emit_json, facts, warn_once

if TYPE_CHECKING:
    from gymdata.experience.build import ExperiencesReport

_Path = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folder, file or glob of scored rollouts.")]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Folder or .parquet/.jsonl file to write.")]
_Estimator = Annotated[
    str | None,
    typer.Option("--estimator", help="grpo (default), rloo, reinforce, reinforce-baseline, gae, cpgd or dr-grpo."),
]
_Rewards = Annotated[str | None, typer.Option("--rewards", help="outcome (default), steps or steps+outcome.")]
_Unit = Annotated[str | None, typer.Option("--discount-unit", help="γ between tokens (token) or turns (turn).")]
_Reward = Annotated[str | None, typer.Option("--reward", help="A named reward or a re-scoring, not the total.")]
_Gamma = Annotated[float | None, typer.Option("--gamma", help="Discount (default 1).")]
_Lambda = Annotated[float | None, typer.Option("--lambda", "--lam", help="λ of gae (default 1).")]
_KlCoef = Annotated[float | None, typer.Option("--kl-coef", help="KL to the reference, taken from the reward.")]
_KlKind = Annotated[str | None, typer.Option("--kl-estimator", help="k1 (default), k2 or k3.")]
_Norm = Annotated[str | None, typer.Option("--reward-norm", help="none (default), std or mean-std, after shaping.")]
_RewardClip = Annotated[str | None, typer.Option("--reward-clip", help="C for −C to C, or LOW,HIGH; after the norm.")]
_Buffer = Annotated[int | None, typer.Option("--overlong-buffer", help="Punish answers this close to the limit.")]
_Factor = Annotated[float | None, typer.Option("--overlong-factor", help="The largest punishment (default 1).")]
_MaxNew = Annotated[int | None, typer.Option("--max-new-tokens", help="The limit, when run.json does not say it.")]
_Weights = Annotated[
    bool, typer.Option("--clip-filter-weights", help="Weigh informative groups up by the share of the others.")
]
_Whiten = Annotated[bool, typer.Option("--whiten", help="Advantages to mean 0 and spread 1 over all tokens.")]
_CrossBatch = Annotated[bool, typer.Option("--normalize-cross-batch", help="The same with a floor under the variance.")]
_MeanOnly = Annotated[bool, typer.Option("--mean-only", help="Of that, only take the mean away.")]
_Clip = Annotated[float | None, typer.Option("--advantage-clip", help="Limit of advantages, last of all.")]
_Entropy = Annotated[float | None, typer.Option("--entropy-ratio", help="Train this share of a rollout's tokens.")]
_Zero = Annotated[str | None, typer.Option("--zero-variance", help="Groups without variance: drop or keep.")]
_Truncated = Annotated[str | None, typer.Option("--truncated", help="Truncated rollouts: keep (default) or drop.")]
_Abandoned = Annotated[str | None, typer.Option("--abandoned", help="Retries nothing continues: keep or drop.")]
_Columns = Annotated[Path | None, typer.Option("--token-columns", help="ref_logprobs, values, entropy by rollout.")]
_Reference = Annotated[str | None, typer.Option("--reference", help="Model for ref_logprobs, KL and entropy.")]
_Critic = Annotated[str | None, typer.Option("--critic", help="Model with a value head (one label) for gae.")]
_Device = Annotated[str | None, typer.Option("--device", help="For both: cpu, cuda or cuda:N.")]
_Dtype = Annotated[str | None, typer.Option("--dtype", help="For both: auto (default), float32, bfloat16, float16.")]
_Batch = Annotated[int | None, typer.Option("--batch-tokens", help="Tokens of their forward passes (16384).")]
_Agents = Annotated[str | None, typer.Option("--target-agents", help="Train the turns of these agents only: a,b.")]
_Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the traceback of an error.")]


def experience(
    path: _Path,
    output: _Output = None,
    estimator: _Estimator = None,
    rewards: _Rewards = None,
    reward: _Reward = None,
    discount_unit: _Unit = None,
    gamma: _Gamma = None,
    lam: _Lambda = None,
    kl_coef: _KlCoef = None,
    kl_estimator: _KlKind = None,
    reward_norm: _Norm = None,
    reward_clip: _RewardClip = None,
    overlong_buffer: _Buffer = None,
    overlong_factor: _Factor = None,
    max_new_tokens: _MaxNew = None,
    clip_filter_weights: _Weights = False,
    whiten: _Whiten = False,
    normalize_cross_batch: _CrossBatch = False,
    mean_only: _MeanOnly = False,
    advantage_clip: _Clip = None,
    entropy_ratio: _Entropy = None,
    zero_variance: _Zero = None,
    truncated: _Truncated = None,
    abandoned: _Abandoned = None,
    token_columns: _Columns = None,
    reference: _Reference = None,
    critic: _Critic = None,
    device: _Device = None,
    dtype: _Dtype = None,
    batch_tokens: _Batch = None,
    target_agents: _Agents = None,
    config: ConfigFile = None,
    sets: SetFlag = [],  # noqa: B006 - typer copies it
    overwrite: OverwriteFlag = False,
    json: JsonFlag = False,
    verbose: _Verbose = False,
) -> None:
    """Turn scored rollouts into experiences: training sequences with an advantage for every token."""
    given = locals()
    from gymdata.experience.run import build_experiences
    from gymdata.experience.settings import ExperienceConfig

    # A switch that is off was not given: a file may turn it on.
    flags = {
        name: None if given[name] is False else given[name] for name in ExperienceConfig.model_fields if name in given
    }
    settings = ExperienceConfig.load(config, flags, sets)
    with Watch("experiences") as watch:
        report = build_experiences(path, output, config=settings, overwrite=overwrite, command=sys.argv, progress=watch)
    warn_once(report.notes)
    if json:
        emit_json(report.to_dict())
    else:
        _show(report)


def _show(report: ExperiencesReport) -> None:
    counts = report.counts
    facts(
        f"experiences ({report.estimator}, {report.score})",
        [
            ("rollouts", counts["rollouts"]),
            *((f"  left out: {why.replace('_', ' ')}", n) for why, n in report.left_out.items()),
            ("groups", counts["groups"]),
            *((f"  dropped: {why.replace('_', ' ')}", len(ids)) for why, ids in report.dropped_groups.items()),
            ("sequences", counts["sequences"]),
            *([("  rollouts cut into several", counts["rollouts_cut"])] if counts["rollouts_cut"] else []),
            *([("  abandoned turns left out", counts["abandoned_turns"])] if counts["abandoned_turns"] else []),
            ("trained tokens", counts["trained_tokens"]),
            ("advantage, mean", report.advantage["mean"]),
            ("advantage, spread", report.advantage["std"]),
            ("written to", report.path),
        ],
    )  # fmt: skip
