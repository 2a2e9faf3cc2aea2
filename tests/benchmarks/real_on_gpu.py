"""What each trainer learns on a CUDA device from the saved rollouts of `gymdata demo --real`:

    python -m tests.benchmarks.real_on_gpu DEMO MODEL OUT --seed 1 --seed 2 --seed 3

DEMO has the folders rollouts, pairs and experiences of a demo, MODEL its model. The trainings are commands, with the demo's
recipes in bfloat16; the held-out tasks are answered by transformers, greedily, in one batch. Writes OUT/summary.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gymdata.commands.demo.real import SOURCES
from gymdata.commands.demo.steps import sample_data
from gymdata.sample_data.sentences import right_values
from gymdata.stats import paired_difference_ci, wilson

#: In place of what the recipes say for a CPU.
ON_GPU = ["--set", "bf16=true"]


def answered(model: Path, tasks: list[dict[str, Any]]) -> list[float]:
    """1 for each task whose answer is right, else 0; a LoRA folder is read over its base model."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind = AutoPeftModelForCausalLM if (model / "adapter_config.json").is_file() else AutoModelForCausalLM
    policy = kind.from_pretrained(model, dtype=torch.bfloat16).to("cuda").eval()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chats = [[{"role": "user", "content": task["prompt"]}] for task in tasks]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to("cuda")
    with torch.no_grad():
        ids = policy.generate(**batch, max_new_tokens=48, do_sample=False)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [float(right_values(text, task["answer"]) == 1.0) for text, task in zip(texts, tasks, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("demo", "model", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seed", type=int, action="append")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = sample_data() / "tasks" / "sentences-heldout.jsonl"
    tasks = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    before = answered(arguments.model, tasks)
    rows = [{"policy": "before", "rate": sum(before) / len(before), "ci95": wilson(int(sum(before)), len(before))}]
    for name, source in SOURCES.items():
        recipe = sample_data() / "recipes" / f"{name}-135m.yaml"
        for seed in arguments.seed or [1]:
            trained = arguments.out / f"{name}-{seed}"
            words = [f"train-{name}", arguments.demo / source, "-m", arguments.model, "-o", trained, "--config", recipe]
            command = [sys.executable, "-m", "gymdata.cli", *map(str, words), "--set", f"seed={seed}", *ON_GPU]
            began = time.monotonic()
            subprocess.run(command, check=True)
            seconds = round(time.monotonic() - began, 1)
            after = answered(trained, tasks)
            interval, points = wilson(int(sum(after)), len(after)), paired_difference_ci(before, after)
            rows.append({"policy": name, "seed": seed, "seconds": seconds, "rate": sum(after) / len(after),
                         "ci95": interval, "improvement": points})  # fmt: skip
            sys.stderr.write(f"{rows[-1]}\n")
    (arguments.out / "summary.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
