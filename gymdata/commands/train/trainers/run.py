"""The training process: ``python -m gymdata.commands.train.trainers.run OUT/job/job.json``.

It is started by ``launch`` and is the only place that loads TRL and a model for training, so that an engine and a trainer
never hold a device together. With several processes the first one becomes their launcher, which starts it again.

A trainer is a class of ``train.settings`` and the module of this package that has its algorithm's name, with CONFIG,
the class of its arguments, and ``build(config, data, job, **trainer arguments)``.

Invariants: it dies with its parent; every way to fail is reported to the parent as an event; the model is saved only
after the proof of every epoch held.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from gymdata.commands.train.launch import Job
from gymdata.commands.train.prepared import DATA, opened
from gymdata.commands.train.settings import TRAINERS
from gymdata.commands.train.token_checksum import TrainedTokens
from gymdata.commands.train.trainer_settings import fields_of, sort_settings
from gymdata.commands.train.trainers.metrics import (
    METRICS,
    Recorder,
    StopOnSignal,
    event,
    summary,
)
from gymdata.errors import EXIT_INTERRUPTED, GymdataError, OutsideError, UsageError
from gymdata.models._saving import copy_companions, round_weights, share_weights
from gymdata.models._torch import multiplies
from gymdata.models._transformers import load_tokenizer, local_folder, with_adapter
from gymdata.models.model_identity import base_of, stored_dtype, tokenizer_folder
from gymdata.store.lines import read_metrics
from gymdata.store.paths import RUN_JSON

#: Trained tokens of a process that are compared with the file before the first step.
REHEARSED_TOKENS = 1 << 25
_THIS = "gymdata.commands.train.trainers.run"
#: Set for the launcher, which a process within it must not become again.
_LAUNCHED = "GYMDATA_LAUNCHED"


def main(argv: list[str]) -> int:
    """Run one job file; returns the exit code."""
    if sys.platform == "linux":  # elsewhere the parent's clean-up must end this process
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
    job = json.loads(Path(argv[0]).read_text())
    if not {"RANK", _LAUNCHED} & os.environ.keys() and (words := launcher(job)):
        os.environ[_LAUNCHED] = "1"
        os.execv(sys.executable, [sys.executable, "-m", *words, "-m", _THIS, argv[0]])
    try:
        return train(job)
    except GymdataError as error:
        event("error", pickled=pickle.dumps(error).hex())
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001  whatever a library raises is the trainer's failure, reported with its text
        traceback.print_exc()
        failure = OutsideError("trainer", f"{type(error).__name__}: {error}")
        event("error", pickled=pickle.dumps(failure).hex())
        return failure.exit_code


def train(job: Job) -> int:
    """Train one job to its end; writes the model, metrics and ``result.json`` under the job's output folder."""
    out = Path(job["output"])
    trainer, token_checksum, stopper = assemble(job)
    signal.signal(signal.SIGINT, stopper.note)
    if job.get("helps") and trainer.is_world_process_zero():
        raise UsageError(
            "the first of all processes runs on a machine whose rank is not 0",
            hint="let the launcher keep the machines' ranks (PET_RDZV_BACKEND=static)",
        )
    # Every batch is compared when it is trained, too; a dry run has no other proof than this.
    seen = token_checksum.dry_run_batches(trainer, math.inf if job["dry_run"] else REHEARSED_TOKENS)
    if trainer.is_world_process_zero():
        event("proof", file=token_checksum.expected.as_json(), batches=seen.as_json(), equal=True)
    if job["dry_run"]:
        *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
        trainer.run_deferred(steps)
        if trainer.is_world_process_zero():
            event("plan", steps=steps)
        trainer.end()
        return 0
    checkpoint = last_checkpoint(Path(trainer.args.output_dir), trainer.note)
    if checkpoint is not None:
        token_checksum.restore(checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stopper.stopped:
        trainer.end()
        return EXIT_INTERRUPTED
    trainer.report_skipped()
    measured = trainer.measure()
    save_model(trainer, job, out)
    if trainer.is_world_process_zero():
        metrics = read_metrics(out / METRICS)
        result = {
            **measured,
            "dtype": stored_dtype(str(out)),
            "training": summary(metrics),
            "trained_tokens": token_checksum.as_json(),
            "steps": trainer.state.global_step,
            "epochs": trainer.state.epoch,
            "resumed_from": checkpoint.name if checkpoint else None,
            "settings": _resolved(trainer.args),
            "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate", "peft")},
        }
        (out / "job" / "result.json").write_text(json.dumps(result, default=str))
    trainer.end()
    return 0


def assemble(job: Job) -> tuple[Any, Any, StopOnSignal]:
    """(trainer, its token checksum, what stops it after a Ctrl-C), everything loaded and nothing trained yet."""
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback

    from gymdata.commands.train.trainers.token_check_callback import TokenChecksumCallback

    module = importlib.import_module(f"gymdata.commands.train.trainers.{job['trainer']}")
    out = Path(job["output"])
    args, peft = _arguments(job, module.CONFIG, out)
    config = TRAINERS[job["trainer"]].of_job(job)
    set_seed(args.seed)  # also what the trainers add to a model, an adapter or a head, is drawn from it
    data: Any = opened(out / "job" / DATA)
    stopper = StopOnSignal()
    sharing = config.prefix_sharing
    own_order = args.train_sampling_strategy != _default(args, "train_sampling_strategy")
    if sharing == "auto" and (own_order or not args.use_cpu):
        # On CUDA it pays from prompts of about 2,000 tokens, by the model's size (RESULTS.md); and the order may be chosen.
        sharing = "off"
    token_checksum = TokenChecksumCallback(data.sequences, config.sides, TrainedTokens.from_json(job["trained_tokens"]))
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
        callbacks=[Recorder(out, token_checksum), stopper],
    )
    trainer.remove_callback(PrinterCallback)  # metrics.jsonl has what it prints
    return trainer, token_checksum, stopper


def last_checkpoint(folder: Path, note: Callable[[str], None] = lambda _: None) -> Path | None:
    """The newest checkpoint that was saved completely and whose files still have the content that was saved, or None: with
    any other file a training would silently continue to other weights."""
    from gymdata.commands.train.trainers.token_check_callback import MARKER, damaged_file

    saved = [marker.parent for marker in folder.glob(f"checkpoint-*/{MARKER}")]
    for checkpoint in sorted(saved, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        damaged = damaged_file(checkpoint)
        if damaged is None:
            return checkpoint
        note(f"warning: {checkpoint}: {damaged} is not as it was saved; this checkpoint is skipped for the one before")
    return None


def _arguments(job: Job, config: Any, out: Path) -> tuple[Any, Any]:
    """(the trainer's arguments, LoRA configuration or None) from our defaults and the user's settings."""
    import torch
    from trl.trainer.model_config import ModelConfig
    from trl.trainer.utils import get_peft_config

    classes = {"trainer": fields_of(config), "model": fields_of(ModelConfig)}
    arguments = sort_settings(job["settings"], classes, own=job["own_keys"])
    gpu = torch.cuda.is_available() and not arguments["trainer"].get("use_cpu")
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
        "precompute_ref_log_probs": not arguments["trainer"].get("sync_ref_model", False),
        "dataloader_pin_memory": gpu,
    }
    if not arguments["trainer"].get("fp16"):
        defaults["bf16"] = gpu
    if arguments["trainer"].get("bf16") == "auto":
        arguments["trainer"]["bf16"] = gpu or multiplies("bfloat16")
    if not gpu and job["num_processes"] > 1:
        defaults["ddp_backend"] = "gloo"
    fields = {f.name for f in dataclasses.fields(config)}
    fixed = {
        "output_dir": str(out / "checkpoints"),
        "max_length": None,
        "disable_tqdm": True,
        "remove_unused_columns": True,
    }
    try:
        args = config(**{k: v for k, v in defaults.items() if k in fields} | arguments["trainer"] | fixed)
        model = ModelConfig(**arguments["model"])
    except (ValueError, TypeError) as error:
        raise UsageError(f"settings: {error}") from error
    args.model_init_kwargs = {
        **(args.model_init_kwargs or {}),
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    if job.get("shard_model"):
        args.model_init_kwargs["distributed_config"] = {"fsdp_size": args.world_size}
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

    options = {
        name: args.model_init_kwargs[name] for name in ("dtype", "distributed_config") if name in args.model_init_kwargs
    }
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
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


def launcher(job: Job) -> list[str]:
    """The module that starts the processes of a job and its arguments; nothing for a single process."""
    processes, rank, file = job["num_processes"], job.get("machine_rank"), job.get("accelerate_config")
    if job.get("launcher") == "torchrun":
        words = ["torch.distributed.run"]
        if processes > 1 or "PET_NPROC_PER_NODE" not in os.environ:
            words += ["--nproc_per_node", str(processes)]
        if not any(name in os.environ for name in ("PET_NNODES", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")):
            words += ["--standalone"]  # a free port, since no other machine has to know it
        return words + ([] if rank is None else ["--node_rank", str(rank)])
    words = ["accelerate.commands.accelerate_cli", "launch"]
    if file is not None:
        words += ["--config_file", file]
        words += [] if processes == 1 else ["--num_processes", str(processes)]
        return words + ([] if rank is None else ["--machine_rank", str(rank)])
    if processes == 1:
        return []
    # --multi_gpu is accelerate's name for several processes; the job's use_cpu makes it gloo on the CPU.
    words += ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    return [*words, "--dynamo_backend", "no", "--main_process_port", "0"]


def leave(code: int) -> NoReturn:
    """End this process. One of several ends without the clean-up of an interpreter, within which torch's groups of
    processes wait, at times for ever, for processes that have ended."""
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
