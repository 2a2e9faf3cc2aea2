"""``gymdata experience``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import ConfigFile, JsonFlag, OverwriteFlag, SetFlag, Watch, command_words, finish, warn_once

_Path = Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folder, file or glob of scored rollouts.")]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Folder or .parquet/.jsonl file to write.")]
_Estimator = Annotated[
    str | None,
    typer.Option(
        "--estimator", help="grpo, rloo, reinforce, reinforce-baseline, gae, cpgd or dr-grpo (default: grpo)."
    ),
]
_Rewards = Annotated[
    str | None, typer.Option("--rewards", help="Rewards to use: outcome, steps or steps+outcome (default: outcome).")
]
_Unit = Annotated[str | None, typer.Option("--discount-unit", help="Unit that γ discounts: token or turn.")]
_Reward = Annotated[
    str | None, typer.Option("--reward", help="Named reward or re-scoring to use (default: the total reward).")
]
_Gamma = Annotated[float | None, typer.Option("--gamma", help="Discount factor γ (default: 1).")]
_Lambda = Annotated[float | None, typer.Option("--lambda", "--lam", help="λ of GAE (default: 1).")]
_KlCoef = Annotated[
    float | None, typer.Option("--kl-coef", help="Coefficient of the KL penalty in the reward (default: 0).")
]
_KlKind = Annotated[str | None, typer.Option("--kl-estimator", help="KL estimator: k1, k2 or k3 (default: k1).")]
_Norm = Annotated[
    str | None,
    typer.Option("--reward-norm", help="Normalize rewards after shaping: none, std or mean-std (default: none)."),
]
_RewardClip = Annotated[
    str | None, typer.Option("--reward-clip", help="Clip normalized rewards to [−C, C] or [LOW, HIGH]: C or LOW,HIGH.")
]
_Buffer = Annotated[
    int | None, typer.Option("--overlong-buffer", help="Soft overlong penalty buffer, in tokens (DAPO).")
]
_Factor = Annotated[float | None, typer.Option("--overlong-factor", help="Maximum overlong penalty (default: 1).")]
_MaxNew = Annotated[
    int | None, typer.Option("--max-new-tokens", help="Maximum generation length, if run.json has none.")
]
_Weights = Annotated[bool, typer.Option("--clip-filter-weights", help="Upweight non-degenerate groups.")]
_Whiten = Annotated[bool, typer.Option("--whiten", help="Normalize advantages to mean 0, std 1 over all tokens.")]
_CrossBatch = Annotated[bool, typer.Option("--normalize-cross-batch", help="Whiten with a floor on the variance.")]
_MeanOnly = Annotated[bool, typer.Option("--mean-only", help="Center only (no variance scaling).")]
_Clip = Annotated[
    float | None, typer.Option("--advantage-clip", help="Clip advantages to this absolute value, as the last step.")
]
_Entropy = Annotated[
    float | None, typer.Option("--entropy-ratio", help="Train only this share of tokens per rollout, by entropy.")
]
_Zero = Annotated[str | None, typer.Option("--zero-variance", help="Groups without reward variance: drop or keep.")]
_Truncated = Annotated[
    str | None, typer.Option("--truncated", help="Truncated rollouts: keep or drop (default: keep).")
]
_Abandoned = Annotated[str | None, typer.Option("--abandoned", help="Keep or drop abandoned branches.")]
_Columns = Annotated[
    Path | None, typer.Option("--token-columns", help="Table of ref_logprobs, values or entropy per rollout.")
]
_Reference = Annotated[
    str | None, typer.Option("--reference", help="Reference model for ref_logprobs, KL and entropy.")
]
_Critic = Annotated[str | None, typer.Option("--critic", help="Value model (one label) for GAE.")]
_Device = Annotated[str | None, typer.Option("--device", help="Device for both models: cpu, cuda or cuda:N.")]
_Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="dtype for both models: auto, float32, bfloat16 or float16 (default: auto)."),
]
_Batch = Annotated[int | None, typer.Option("--batch-tokens", help="Tokens per forward pass (default: 16384).")]
_Agents = Annotated[str | None, typer.Option("--target-agents", help="Train only the turns of these agents: a,b.")]
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
) -> int:
    """Turn scored rollouts into experiences: training sequences with one advantage per token."""
    given = locals()
    from gymdata.experience.run import build_experiences
    from gymdata.experience.settings import ExperienceConfig

    # A switch that is off was not given: a file may turn it on.
    flags = {
        name: None if given[name] is False else given[name] for name in ExperienceConfig.model_fields if name in given
    }
    settings = ExperienceConfig.load(config, flags, sets)
    with Watch("experiences") as watch:
        report = build_experiences(
            path, output, config=settings, overwrite=overwrite, command=command_words(), progress=watch
        )
    warn_once(report.notes)
    return finish(report, f"experiences ({report.estimator}, {report.score})", json=json)
