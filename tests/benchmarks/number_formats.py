"""What ``audit`` and ``train-rl`` say of a real model's rollouts, honest and falsified, by the number formats of both.

``python -m tests.benchmarks.number_formats WORK`` prints the table of tests/benchmarks/RESULTS.md. The model, WORK/model, is
SmolLM2-135M-Instruct where there is none; it, rollouts and another checkpoint are made where they are missing. With a pair,
as ``bfloat16/float32``, only its column is measured, into WORK/cells.jsonl; ``--table`` prints what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gymdata
from gymdata.models.forward import load_policy
from gymdata.models.scoring import ToScore
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.sequences import stitch
from gymdata.rollouts.turns import Call, encode_turns, expand_prompts
from gymdata.store import read_run_json, read_table, write_run_json
from tests import model_files
from tests.rollout_files import rollouts_table, write_run

#: Number formats of sampler and scorer.
PAIRS = ("bfloat16/bfloat16", "bfloat16/float32", "float32/float32")
#: Temperature of the rollouts, their tokens, and of how many tasks there are how many.
TEMPERATURE, TOKENS, TASKS, EACH = 0.8, 48, 8, 4
PEOPLE = ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry")
Rows = list[dict[str, Any]]
#: prompt, generation and log-probs of a rollout of one turn, and its number → the same, changed.
Change = Callable[[list[int], list[int], np.ndarray, int], tuple[Sequence[int], Sequence[int], np.ndarray]]


def tasks() -> Rows:
    return [
        {
            "task_id": f"person-{number}",
            "prompt": f"{name} is {20 + 7 * number} years old and lives in Rome. Write this as JSON with name, age, city.",
        }
        for number, name in enumerate(PEOPLE[:TASKS])
    ]


def prepare(work: Path) -> None:
    """Make the model that is missing, sample rollouts with vLLM, and train the other checkpoint."""
    if not (work / "model").exists():
        model_files.make_smollm2(work / "model")
    for sampler in ("bfloat16", "float32"):
        for name, sampling in (("rollouts", {}), ("top-p", {"top_p": 0.9})):
            if not (folder := work / f"{name}-{sampler}").exists():
                gymdata.collect(
                    tasks(), model=str(work / "model"), output=folder, num_rollouts=EACH, temperature=TEMPERATURE, seed=1,
                    max_tokens=TOKENS, engine={"dtype": sampler}, **sampling,
                )  # fmt: skip
    if not (work / "checkpoint").exists():
        steps = {"max_steps": 5, "learning_rate": 1e-4, "per_device_train_batch_size": 4, "save_strategy": "no"}
        trainer = {**steps, "warmup_steps": 0, "lr_scheduler_type": "constant"}
        gymdata.train_sft(work / "rollouts-bfloat16", str(work / "model"), work / "checkpoint", select="all", **trainer)


def unchanged(prompt: list[int], generation: list[int], saved: np.ndarray, number: int) -> Any:
    return prompt, generation, saved


def outlier(prompt: list[int], generation: list[int], saved: np.ndarray, number: int) -> Any:
    """One number, of all rollouts, is 3 nats off."""
    return prompt, generation, saved - 3.0 * (number == 3) * (np.arange(len(saved)) == 1)


def late(prompt: list[int], generation: list[int], saved: np.ndarray, number: int) -> Any:
    return prompt, generation, np.roll(saved, 1)


def headless(prompt: list[int], generation: list[int], saved: np.ndarray, number: int) -> Any:
    return prompt[1:], generation, saved


def every_fourth(prompt: list[int], generation: list[int], saved: np.ndarray, number: int) -> Any:
    return prompt, generation, saved[::-1] if number % 4 == 0 else saved


@dataclass(frozen=True)
class Situation:
    """``cause``: what ``audit`` should name, None where the log-probs are the model's. ``rows``: of the falsified file, made
    of the rollouts, the model's folder and the sampler's number format."""

    title: str
    cause: str | None
    rows: Callable[[Rows, Path, str], Rows]
    run: str = "rollouts"
    model: str = "model"


def by(change: Change, **columns: Any) -> Callable[[Rows, Path, str], Rows]:
    return lambda rows, _model, _sampler: [changed(row, change, number, **columns) for number, row in enumerate(rows)]


def changed(row: Mapping[str, Any], change: Change, number: int, **columns: Any) -> dict[str, Any]:
    """A rollout of one turn with another, and with other columns."""
    (turn,), (prompt,) = row["turns"], expand_prompts(row["turns"])
    saved = np.asarray(turn["generation_log_probs"], np.float32)
    p, g, logps = change(prompt.tolist(), list(turn["generation_token_ids"]), saved, number)
    call = Call(np.array(p, np.int32), np.array(g, np.int32), np.array(logps, np.float32), turn["finish_reason"])
    return {**row, "n_context_tokens": len(p), "turns": encode_turns([call]), **columns}


def raw(rows: Rows, model: Path, sampler: str) -> Rows:
    """With the log-probs of temperature 1, before the temperature was applied."""
    table = rollouts_table(rows)
    sequences = stitch(table["turns"].combine_chunks(), table["rollout_id"].combine_chunks())
    given = ToScore.of(sequences, table["temperature"].to_numpy())
    found = load_policy(str(model), sampler)[1].log_probs_at(given, [1.0])[0]
    at = np.split(sequences.in_turn_order(found), sequences.sampled.turn_ends[:-1])
    return [changed(row, lambda p, g, lp, n: (p, g, at[n]), number) for number, row in enumerate(rows)]


def under(system: str | None) -> Callable[[Rows, Path, str], Rows]:
    """Prompts of another template than the model read: with another system message, or none (None)."""

    def rows_of(rows: Rows, model: Path, _sampler: str) -> Rows:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)

        def change(prompt: list[int], generation: list[int], saved: np.ndarray, number: int) -> Any:
            said = next(m["content"] for m in rows[number]["messages"] if m["role"] == "user")
            messages = [{"role": "system", "content": system or "X"}, {"role": "user", "content": said}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            if system is None:
                text = text[text.index("<|im_start|>user") :]
            return tokenizer(text, add_special_tokens=False)["input_ids"], generation, saved

        return [changed(row, change, number) for number, row in enumerate(rows)]

    return rows_of


SITUATIONS = (
    Situation("the model's own", None, by(unchanged)),
    Situation("one number is 3 nats off", None, by(outlier)),
    Situation("a checkpoint five SFT steps on (1e-4)", "checkpoint", by(unchanged), model="checkpoint"),
    Situation("sampled at 0.8, the rows say 1", "temperature", by(unchanged, temperature=1.0)),
    Situation("sampled at 0.8, the rows say 0.88", "temperature", by(unchanged, temperature=0.88)),
    Situation("raw log-probs of tokens sampled at 0.8", "raw_logprobs", raw),
    Situation("the file has another system message", "template", under("Answer with JSON only.")),
    Situation("the file lacks the system message", "template", under(None)),
    Situation("the file's prompts lack the first token", "template", by(headless)),
    Situation("numbers one token late", "off_by_one", by(late)),
    Situation("top_p 0.9", "sampling", by(unchanged), run="top-p"),
    Situation("every fourth rollout has its numbers backwards", "template", by(every_fourth)),
)


def cells(work: Path, pair: str) -> None:
    """Audit every situation in a pair of number formats; each is appended to WORK/cells.jsonl."""
    sampler, scorer = pair.split("/")
    for situation in SITUATIONS:
        source = work / f"{situation.run}-{sampler}"
        rows = (
            read_table(source, ROLLOUTS).sort_by([("task_id", "ascending"), ("rollout_index", "ascending")]).to_pylist()
        )
        rows = situation.rows(rows[: TASKS * EACH], work / "model", sampler)
        run = write_run(work / "falsified" / f"{pair.replace('/', '-')}-{SITUATIONS.index(situation)}", rows)
        facts = read_run_json(source)
        kept = {name: facts.get(name) for name in ("stage", "engine", "identity", "policy", "chat", "config")}
        write_run_json(run, {**read_run_json(run), **kept})
        report = gymdata.audit(run, str(work / situation.model), dtype=scorer, device="cpu", overwrite=True)
        cell = {
            "situation": situation.title, "pair": pair, "expected": situation.cause, "ok": report.ok,
            "cause": report.explanation and report.explanation.cause, "text": report.explanation and report.explanation.text,
            "train_rl": report.summary["departures"], "tokens": report.summary["tokens"],
            "mean": report.summary["mean_abs_difference"], "ratio": report.summary["ratio"]["mean"],
            "effective": report.summary["effective_sample_size"], "outside": report.summary["share_outside"],
        }  # fmt: skip
        with (work / "cells.jsonl").open("a") as file:
            file.write(json.dumps(cell) + "\n")


def table(work: Path) -> str:
    """The cells as Markdown; the last of each counts."""
    found = {(c["situation"], c["pair"]): c for c in map(json.loads, (work / "cells.jsonl").read_text().splitlines())}
    lines = ["| situation | " + " | ".join(PAIRS) + " |", "| --- |" + " --- |" * len(PAIRS)]
    false = missed = other = 0
    for situation in SITUATIONS:
        line = [situation.title]
        for pair in PAIRS:
            if (cell := found.get((situation.title, pair))) is None:
                line.append("not measured")
                continue
            verdict = "the model's" if cell["ok"] else f"L305, {cell['cause']}"
            verdict += "; train-rl refuses" if cell["train_rl"] else "; train-rl trains"
            figures = f"mean \\|Δ\\| {cell['mean']:.2g}, outside {cell['outside']:.1%}, ratio {cell['ratio']:.3f}, ESS "
            line.append(f"{verdict} ({figures}{cell['effective']:.1%})")
            false += situation.cause is None and (not cell["ok"] or bool(cell["train_rl"]))
            missed += situation.cause is not None and cell["ok"]
            other += situation.cause != cell["cause"]
        lines.append("| " + " | ".join(line) + " |")
    tokens = sorted({cell["tokens"] for cell in found.values()})
    ends = f"{tokens[0]:,} to {tokens[-1]:,} tokens per cell; {false} false refusals, {missed} misses, {other} other causes."
    return "\n".join([*lines, "", ends])


def main(work: str, *pairs: str) -> None:
    folder = Path(work)
    if pairs != ("--table",):
        prepare(folder)
        for pair in pairs or PAIRS:
            cells(folder, pair)
    if not pairs or pairs == ("--table",):
        print(table(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
