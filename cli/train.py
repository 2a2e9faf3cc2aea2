"""``gymdata train-dpo``, ``train-kto`` and the others: one command made from each trainer's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from gymdata.train.settings import TRAINERS, TrainConfig

from .console import Watch, command_words, emit_json, facts, note
from .flags import DryRun, Json, Overwrite, with_flags

_SOURCES = {
    "pairs": ("PAIRS", "Pairs: file, output folder of `gymdata pairs`, or glob."),
    "experiences": ("EXPERIENCES", "Experiences: file, output folder of `gymdata experience`, or glob."),
    "rollouts": ("RUN", "Rollouts: run folder, file or glob."),
}
_Lora = Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter (--set lora_r=16 …).")]
_Seed = Annotated[int | None, typer.Option("--seed", help="Random seed.")]


def _command(kind: type[TrainConfig]) -> Callable[..., None]:
    """The command of a trainer."""

    def run(
        source: str,
        settings: TrainConfig,
        lora: _Lora = False,
        seed: _Seed = None,
        overwrite: Overwrite = False,
        dry_run: DryRun = False,
        json: Json = False,
    ) -> None:
        from gymdata.pairs.run import pairs_of_run
        from gymdata.train.run import train

        found = pairs_of_run(source) if kind.table.name == "pairs" else None
        if found is not None:
            note(f"pairs: {', '.join(map(str, found))}")
        with Watch("training") as watch:
            result = train(
                source, settings, overwrite=overwrite, dry_run=dry_run, progress=watch, command=command_words()
            )
        if json:
            emit_json(result)
        else:
            facts(f"train-{kind.algorithm}" + (" (dry run)" if dry_run else ""), _rows(result))

    metavar, what = _SOURCES[kind.table.name]
    run.__annotations__["source"] = Annotated[str, typer.Argument(metavar=metavar, help=what)]
    run.__doc__ = (
        f"Every setting of {kind.library} and TRL's ModelConfig is a key of --config and --set, as "
        "--set learning_rate=1e-5."
    )
    return with_flags(kind, keys={"lora": "use_peft", "seed": "seed"})(run)


def _rows(result: dict[str, Any]) -> list[tuple[str, object]]:
    """What a training ends with."""
    proof = result["trained_tokens"]
    rows: list[tuple[str, object]] = [
        (name.replace("_", " "), n) for name, n in result["counts"].items() if name != "trained_tokens"
    ]
    rows += [("tokens per epoch", proof["file"]["count"]), ("token checksum", _equal(proof))]
    if heldout := result.get("heldout"):
        low, high = heldout["ci95"]
        rows.append(("held-out preference accuracy", f"{heldout['accuracy']:.1%} (95 % {low:.1%} to {high:.1%})"))
    if ratio := result.get("ratio"):
        rows.append(("ratio before training, mean", ratio["mean"]))
        rows.append(("  effective sample size", f"{ratio['effective_sample_size']:.1%}"))
    return [*rows, ("steps", result.get("steps")), ("output", result["config"]["output"])]


def _equal(proof: dict[str, Any]) -> object:
    """A training that stopped inside its first epoch could not feed the whole file; what it fed was held against it."""
    fed = (proof.get("epochs") or [{}])[-1]
    if proof["equal"] or not fed.get("equal"):
        return {True: "match", False: "MISMATCH"}.get(proof["equal"])
    return f"match as far as they went: {fed['count']:,} of {proof['file']['count']:,} tokens"


train_sft = _command(TRAINERS["sft"])
train_dpo = _command(TRAINERS["dpo"])
train_kto = _command(TRAINERS["kto"])
train_reward = _command(TRAINERS["reward"])
train_rl = _command(TRAINERS["rl"])
