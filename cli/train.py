"""``gymdata train-dpo``, ``train-kto`` and the others: one command made from each trainer's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from gymdata.commands.train.job import is_first
from gymdata.commands.train.settings import TRAINERS, TrainConfig
from gymdata.public import Figures

from .console import Watch, command_words, finish, note, say
from .flags import DryRun, Json, Overwrite, with_flags

_SOURCES = {
    "pairs": ("PAIRS", "Pairs: file, output folder of `gymdata pairs`, or glob; or a file of preferences as text."),
    "experiences": ("EXPERIENCES", "Experiences: file, output folder of `gymdata experience`, or glob."),
    "rollouts": ("RUN", "Rollouts: run folder, file or glob; or a file of answers as text."),
}
#: What a trained model is for, other than collecting with it.
_NEXT = {"reward": "score RUN --reward-model {}", "value": "experience RUN --estimator gae --critic {} -o OUT"}
_Lora = Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter (--set lora_r=16 …).")]
_Seed = Annotated[int | None, typer.Option("--seed", help="Random seed.")]


def _command(kind: type[TrainConfig]) -> Callable[..., int]:
    """The command of a trainer."""

    def run(
        source: str,
        settings: TrainConfig,
        lora: _Lora = False,
        seed: _Seed = None,
        overwrite: Overwrite = False,
        dry_run: DryRun = False,
        json: Json = False,
    ) -> int:
        from gymdata.commands.eval.settings import evaluation_of
        from gymdata.commands.pairs.run import pairs_of_run
        from gymdata.commands.train.run import train
        from gymdata.store.fetch import fetched

        if not is_first():
            train(source, settings)
            return 0
        source = str(fetched(source))
        pair_files = pairs_of_run(source, command_words()) if kind.table.name == "pairs" else None
        if pair_files is not None:
            note(f"pairs: {', '.join(map(str, pair_files))}")
        with Watch("training") as watch:
            report = train(
                source, settings, overwrite=overwrite, dry_run=dry_run, progress=watch, command=command_words()
            )
        code = finish(report, f"train-{kind.algorithm}" + (" (dry run)" if dry_run else ""), json=json)
        if not (code or json or dry_run):
            then = _NEXT.get(kind.algorithm)
            if getattr(settings, "test_share", None):
                source = str(settings.output / "data" / "split" / "test.parquet")
            say(f"next: gymdata {then.format(settings.output) if then else evaluation_of(settings.output, source)}")
        return code

    metavar, text = _SOURCES[kind.table.name]
    run.__annotations__["source"] = Annotated[str, typer.Argument(metavar=metavar, help=text)]
    run.__doc__ = (
        f"Every setting of {kind.library} and TRL's ModelConfig is a key of --config and --set, as "
        "--set learning_rate=1e-5."
    )
    command = with_flags(kind, keys={"lora": "use_peft", "seed": "seed"})(run)
    load = command.load  # type: ignore[attr-defined]  # of with_flags

    def load_and_check(args: Figures) -> TrainConfig:
        from gymdata.commands.train.trainer_settings import check_settings

        settings: TrainConfig = load(args)
        check_settings(settings.algorithm, settings.trainer, kind.model_fields, settings.called, settings.model)
        return settings

    command.load = load_and_check  # type: ignore[attr-defined]  # what a sweep checks
    return command


train_sft = _command(TRAINERS["sft"])
train_dpo = _command(TRAINERS["dpo"])
train_kto = _command(TRAINERS["kto"])
train_reward = _command(TRAINERS["reward"])
train_value = _command(TRAINERS["value"])
train_rl = _command(TRAINERS["rl"])
