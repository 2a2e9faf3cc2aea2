"""The trainers of TRL and transformers over a job: everything loaded, proven, trained and saved.

A trainer is a class of ``train.settings`` and the module of this package that has its algorithm's name, with CONFIG,
the class of its arguments, and ``build(config, data, job, **trainer arguments)``.

Invariant: the model is saved only after the proof of every epoch held.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import set_seed
from transformers.trainer_callback import PrinterCallback

from gymdata.commands.train.job import Job, processes
from gymdata.commands.train.prepared import DATA, opened
from gymdata.commands.train.settings import TRAINERS
from gymdata.commands.train.token_checksum import TrainedTokens
from gymdata.commands.train.trainer_settings import fields_of, sort_settings
from gymdata.commands.train.trainers.batches import pays_on_cuda
from gymdata.commands.train.trainers.metrics import METRICS, Recorder, StopOnSignal, summary
from gymdata.commands.train.trainers.token_check_callback import MARKER, TokenChecksumCallback, damaged_file
from gymdata.errors import UsageError
from gymdata.models._saving import copy_companions, round_weights, share_weights
from gymdata.models._torch import multiplies
from gymdata.models._transformers import load_tokenizer, local_folder, with_adapter
from gymdata.models.model_identity import base_of, stored_dtype, tokenizer_folder
from gymdata.progress import NullProgress, Progress
from gymdata.public import Figures
from gymdata.store.lines import read_metrics
from gymdata.store.paths import RUN_JSON
from gymdata.workers.signals import handling

#: Trained tokens of a process that are compared with the file before the first step.
REHEARSED_TOKENS = 1 << 25
#: The trainer's arguments, and the LoRA configuration or None.
Arguments = tuple[Any, Any]


def of_first(job: Job | None) -> Job | None:
    """The job of the first process, on each; waits for it up to the trainer's ddp_timeout."""
    if processes() == 1:
        return job
    from accelerate.utils import broadcast_object_list

    told: list[Job | None] = [job]
    broadcast_object_list(told)
    return told[0]


def train(job: Job, arguments: Arguments, progress: Progress) -> Figures:
    """Train one job to its end; writes the model and metrics under the job's output folder. Returns the figures for
    run.json, of which those of the training are the first process's."""
    out = Path(job["output"])
    trainer, token_checksum, stopper = assemble(job, arguments, progress)
    # Every batch is compared when it is trained, too; a dry run has no other proof than this.
    seen = token_checksum.dry_run_batches(trainer, math.inf if job["dry_run"] else REHEARSED_TOKENS)
    proof = {"file": token_checksum.expected.as_json(), "batches": seen.as_json(), "equal": True}
    trainer.note(proof_text(proof))
    if job["dry_run"]:
        *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
        trainer.run_deferred(steps)
        trainer.end()
        return {**trainer.before_training, "trained_tokens": proof, "proof": proof_facts(seen), "steps": steps}
    with handling(signal.SIGINT, stopper.note):
        checkpoint = last_checkpoint(Path(trainer.args.output_dir), trainer.note)
        if checkpoint is not None:
            token_checksum.restore(checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if stopper.stopped:
            trainer.end()
            raise KeyboardInterrupt
        trainer.report_skipped()
        measured = trainer.measure()
        save_model(trainer, job, out)
    trainer.end()
    if not trainer.is_world_process_zero():
        return {}
    return {
        **trainer.before_training,
        **measured,
        "dtype": stored_dtype(str(out)),
        "training": summary(read_metrics(out / METRICS)),
        "trained_tokens": token_checksum.as_json(),
        "proof": proof_facts(token_checksum.expected),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "resumed_from": checkpoint.name if checkpoint else None,
        "settings": _resolved(trainer.args),
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate", "peft")},
    }


def proof_facts(tokens: TrainedTokens) -> Figures:
    """For run.json: that every batch was equal, or this would not be reached, and what of its tokens was compared."""
    return {"equal": True, "columns": sorted(tokens.checksums)}


def proof_text(proof: Figures) -> str:
    """``trained tokens: … equal``."""
    file, batches = proof["file"], proof["batches"]
    same = "equal" if proof["equal"] else "NOT EQUAL"
    some = "the first " if file != batches and proof["equal"] else ""
    return (
        f"trained tokens: file {file['count']:,} checksum {file['checksum']}, {some}batches {batches['count']:,} "
        f"checksum {batches['checksum']}: {same}"
    )


def assemble(
    job: Job, given: Arguments | None = None, progress: Progress | None = None
) -> tuple[Any, Any, StopOnSignal]:
    """(trainer, its token checksum, what stops it after a Ctrl-C), everything loaded and nothing trained yet."""
    module = importlib.import_module(f"gymdata.commands.train.trainers.{job['trainer']}")
    out, progress = Path(job["output"]), progress or NullProgress()
    args, peft = given or arguments(job)
    if args.n_gpu > 1:
        progress.message(
            f"{args.n_gpu} GPUs are visible, and one process trains on the first: `accelerate launch -m gymdata "
            f"train-{job['trainer']} …` uses all"
        )
        # The trainer's own way is copies of the model in threads (torch's DataParallel).
        args._n_gpu = 1
    config = TRAINERS[job["trainer"]].of_job(job)
    set_seed(args.seed)  # also what the trainers add to a model, an adapter or a head, is drawn from it
    data = opened(out / "job" / DATA)
    stopper = StopOnSignal()
    sharing = config.prefix_sharing
    own_order = args.train_sampling_strategy != _default(args, "train_sampling_strategy")
    if sharing == "auto" and (own_order or not (args.use_cpu or pays_on_cuda(data, args))):
        sharing = "off"
    token_checksum = TokenChecksumCallback(data, TrainedTokens.from_json(job["trained_tokens"]))
    trainer = module.build(
        config,
        data,
        job,
        token_checksum=token_checksum,
        sharing=sharing,
        args=args,
        model=_model(job, args),
        peft_config=peft,
        processing_class=load_tokenizer(tokenizer_folder(str(local_folder(job["model"]))), extra="train"),
        callbacks=[Recorder(out, token_checksum, progress), stopper],
        progress=progress,
    )
    trainer.remove_callback(PrinterCallback)  # metrics.jsonl has what it prints
    return trainer, token_checksum, stopper


def last_checkpoint(folder: Path, note: Callable[[str], None] = lambda _: None) -> Path | None:
    """The newest checkpoint that was saved completely and whose files still have the content that was saved, or None: with
    any other file a training would silently continue to other weights."""
    saved = [marker.parent for marker in folder.glob(f"checkpoint-*/{MARKER}")]
    for checkpoint in sorted(saved, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        damaged = damaged_file(checkpoint)
        if damaged is None:
            return checkpoint
        note(f"warning: {checkpoint}: {damaged} is not as it was saved; this checkpoint is skipped for the one before")
    return None


def arguments(job: Job) -> Arguments:
    """From our defaults and the user's settings. Of several processes each joins the others here."""
    import torch
    from trl.trainer.model_config import ModelConfig
    from trl.trainer.utils import get_peft_config

    config: Any = importlib.import_module(f"gymdata.commands.train.trainers.{job['trainer']}").CONFIG
    classes = {"trainer": fields_of(config), "model": fields_of(ModelConfig)}
    values = sort_settings(job["settings"], classes, own=job["own_keys"])
    gpu = torch.cuda.is_available() and not values["trainer"].get("use_cpu")
    defaults: dict[str, object] = {
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu,
        "report_to": "none",
        "run_name": run_name(job),
        "project": "gymdata",
        "logging_steps": 1,
        "logging_first_step": True,
        "save_strategy": "steps",
        "save_steps": 0.2,
        "save_total_limit": 2,
        "precompute_ref_log_probs": not values["trainer"].get("sync_ref_model", False),
        "dataloader_pin_memory": gpu,
    }
    if not values["trainer"].get("fp16"):
        defaults["bf16"] = gpu
    if values["trainer"].get("bf16") == "auto":
        values["trainer"]["bf16"] = gpu or multiplies("bfloat16")
    if not gpu and processes() > 1:
        defaults["ddp_backend"] = "gloo"
    fields = {f.name for f in dataclasses.fields(config)}
    fixed = {
        "output_dir": str(Path(job["output"]) / "checkpoints"),
        "max_length": None,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    try:
        args = config(**{k: v for k, v in defaults.items() if k in fields} | values["trainer"] | fixed)
        model = ModelConfig(**values["model"])
    except (ValueError, TypeError) as error:
        raise UsageError(f"settings: {error}") from error
    args.model_init_kwargs = {
        **(args.model_init_kwargs or {}),
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    return args, get_peft_config(model)


def run_name(job: Job) -> str:
    """The name of a training in reports: the model, the stage and the data, as ``policy-train-dpo-x-pairs``."""
    data = Path(job["data"])
    folder = data.parent if data.stem == TRAINERS[job["trainer"]].table.name else data
    # A stage folder's name means little without that of its run.
    run = [folder.parent.name] if (folder.parent / RUN_JSON).is_file() else []
    return "-".join([Path(job["model"]).name, f"train-{job['trainer']}", *run, folder.name])


def _model(job: Job, args: Any) -> Any:
    """The model's folder, which TRL loads; of a LoRA folder the loaded base with its adapter ready to be trained on."""
    base, adapter = base_of(job["model"])
    folder = local_folder(base)
    if adapter is None:
        return str(folder)
    from transformers import AutoModelForCausalLM

    dtype = args.model_init_kwargs["dtype"]
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    return with_adapter(model, str(adapter), base, is_trainable=True)


def save_model(trainer: Any, job: Job, out: Path) -> None:
    """The model into ``out``, in the number format of the model that it came from or that was named, with its tokenizer,
    chat template and generation config."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")
    trainer.save_trained(out)
    if not trainer.is_world_process_zero():
        return
    copy_companions(job["model"], out)
    trainer.finish(out)
    # A pickle, of which run.json holds the settings; and the form of peft for a model card.
    for name in ("training_args.bin", "README.md"):
        (out / name).unlink(missing_ok=True)
    named = job.get("settings", {}).get("dtype")
    round_weights(out, stored_dtype(job["model"]) if named in (None, "auto") else str(named))
    share_weights(out)


def _resolved(args: Any) -> dict[str, object]:
    """Every setting that differs from its class's default or that people look for."""
    always = {"learning_rate", "num_train_epochs", "per_device_train_batch_size", "seed", "bf16", "beta", "loss_type"}
    resolved = {}
    for f in dataclasses.fields(args):
        if not f.init or f.name in ("output_dir", "logging_dir"):
            continue
        value = getattr(args, f.name)
        if f.name in always or value != _default(args, f.name):
            resolved[f.name] = value
    plain: dict[str, object] = json.loads(json.dumps(resolved, default=str))
    return plain


def _default(args: Any, name: str) -> Any:
    (field,) = (field for field in dataclasses.fields(args) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
