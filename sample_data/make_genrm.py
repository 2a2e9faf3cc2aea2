"""Train the sample judge from nothing and write it as genrm/, a folder for transformers and vLLM.

It compares two rollouts of a question, shown as transcripts, and writes scores and a ranking as JSON. It cannot do sums: it
learns to see whether the call asks what was asked and whether the answer is the tool's. Always holds: no operand pair of
a held-out task is ever trained on; what is reported was measured on those, each comparison in both orders.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gymdata.sample_data.genrm_comparisons import (
    PRINCIPLES,
    Comparison,
    Question,
    draw_comparison,
    rollout,
    seen,
    verdict,
)
from gymdata.sample_data.make_tasks import HERE, WORDINGS, read_pairs
from gymdata.sample_data.policy_tokenizer import END, PAD, START
from gymdata.sample_data.policy_traces import attempt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

BATCH = 32
LEARNING_RATE = 2e-3
WARM_UP = 100
#: More than the texts have; the tokenizer takes what there is.
MOST_TOKENS = 1024
#: Of the losses beside that of the scores: what else is spelled, and the training-only head.
SPELLED_WEIGHT, SO_FAR_WEIGHT = 1.0, 1.0
N_MEASURED = 300
REPORT_EVERY = 100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Digits and operators are tokens of their own, so that numbers can be held against each other; what stands between
    them is nearly always the same, and one token."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[\d+*\-]"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MOST_TOKENS,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_frames() * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    template = Path(__file__).parent / "genrm_template.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8").rstrip()
    return tokenizer


def _frames() -> list[str]:
    """Everything that comparisons say, cut where the special tokens stand."""
    roles = ["user\n", "assistant\n", "principle\n", "response_1\n", "response_2\n"]
    draw = random.Random(0)
    traces = [attempt(34, "-", 12, WORDINGS[0], slip, draw) for slip in (None, "broken call")]
    texts = [seen(rollout(trace)) for trace in traces]
    texts += [verdict(a, b) for a in (True, False) for b in (True, False)]
    return [*roles, *(wording.format("1+1") for wording in WORDINGS), *texts, *PRINCIPLES]


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A random Qwen3 of about 0.7 M parameters, in many layers: see where one is, find the like, compare, sum up."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=224,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Rows:
    """Comparisons as ids (n, longest), with what is learned at each: the kind of token, and whether all is right so far."""

    #: Kinds of token: not learned, a number of the verdict, anything else that is spelled.
    OTHER, SCORE, SPELLED = 0, 1, 2

    def __init__(self, tokenizer: PreTrainedTokenizerFast, comparisons: list[Comparison]) -> None:
        import torch

        rows = [self._row(tokenizer, comparison) for comparison in comparisons]
        width = max(len(ids) for ids, _, _ in rows)
        self.ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        self.kinds = torch.zeros((len(rows), width), dtype=torch.int8)
        self.so_far = torch.full((len(rows), width), -1.0)
        for place, (ids, kinds, so_far) in enumerate(rows):
            self.ids[place, : len(ids)] = torch.tensor(ids)
            self.kinds[place, : len(ids)] = torch.tensor(kinds)
            self.so_far[place, : len(ids)] = torch.tensor(so_far)

    def _row(
        self, tokenizer: PreTrainedTokenizerFast, comparison: Comparison
    ) -> tuple[list[int], list[int], list[float]]:
        *shown, (_, said) = comparison.parts()
        # The prompt is one text when it is judged, so it is one here.
        prompt = tokenizer.backend_tokenizer.encode("".join(text for _, text in shown))
        kinds, so_far = [self.OTHER] * len(prompt.ids), [-1.0] * len(prompt.ids)
        responses, begin = {"response_1": comparison.first, "response_2": comparison.second}, 0
        for kind, text in shown:
            end = begin + len(text)
            if (response := responses.get(kind)) is not None:
                for at, (first, last) in enumerate(prompt.offsets):
                    if begin <= first and last <= end:
                        is_said = response.right and not response.is_result(first - begin)
                        kinds[at] = self.SPELLED if is_said else self.OTHER
                        so_far[at] = float(response.right_so_far(last - begin))
                    elif first == end:  # only its end tells a short answer
                        kinds[at] = self.SPELLED if response.right else self.OTHER
                        so_far[at] = float(response.right)
            begin = end
        answer = tokenizer.backend_tokenizer.encode(said)
        kinds += [self.SCORE if said[first - 1] == " " else self.SPELLED for first, _ in answer.offsets]
        return prompt.ids + answer.ids, kinds, so_far + [-1.0] * len(answer.ids)


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, seconds: float
) -> tuple[int, float]:
    """At most so many steps and seconds; returns the steps made and the last loss of the scores, in nats a token."""
    import torch
    from torch.nn import functional

    draw, avoid = random.Random(seed), read_pairs(HERE / "tasks" / "heldout.jsonl")
    measured = _measured(seed + 1, N_MEASURED)
    # Says at every token of a response whether it is right so far. It makes comparing quick to learn and is then dropped.
    head = torch.nn.Linear(model.config.hidden_size, 1)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    began, scored, step = time.monotonic(), torch.tensor(0.0), 0
    while step < steps:
        passed = max(step / steps, (time.monotonic() - began) / seconds)
        if passed >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP, 2 * (1 - passed))
        rows = Rows(tokenizer, [draw_comparison(draw, avoid=avoid) for _ in range(BATCH)])
        model.train()
        hidden = model.model(input_ids=rows.ids).last_hidden_state
        kinds = rows.kinds[:, 1:]
        wanted = kinds != Rows.OTHER
        each = functional.cross_entropy(
            model.lm_head(hidden[:, :-1][wanted]), rows.ids[:, 1:][wanted], reduction="none"
        )
        scored = each[kinds[wanted] == Rows.SCORE].mean()
        spelled = each[kinds[wanted] == Rows.SPELLED].mean()
        known = rows.so_far >= 0
        so_far = functional.binary_cross_entropy_with_logits(head(hidden[known])[:, 0], rows.so_far[known])
        loss = scored + SPELLED_WEIGHT * spelled + SO_FAR_WEIGHT * so_far
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % REPORT_EVERY == 0:
            losses = f"scores {scored.item():.3f}, spelled {spelled.item():.3f}, so far {so_far.item():.3f}"
            seat = {k: round(v["rate"], 3) for k, v in accuracy(model, tokenizer, measured[:100]).items()}
            _say(f"step {step}, {time.monotonic() - began:.0f} s, losses: {losses}; right on held-out operands: {seat}")
        step += 1
    return step, scored.item()


def _measured(seed: int, n: int) -> list[Comparison]:
    """Comparisons of a right with a wrong response about held-out tasks; the right one in the first seat."""
    lines = (HERE / "tasks" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    tasks: list[Question] = [(row["left"], row["operator"], row["right"]) for row in map(json.loads, lines)]
    draw, found = random.Random(seed), []
    while len(found) < n:
        comparison = draw_comparison(draw, tasks=tasks)
        if comparison.first.right and not comparison.second.right:
            found.append(comparison)
    return found


def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, comparisons: list[Comparison]
) -> dict[str, dict[str, Any]]:
    """How often the right response gets more than the wrong one, by the right one's seat, with Wilson intervals.

    Scores are the likelier of 1 and 5 where each stands in the verdict.
    """
    import torch

    from gymdata.stats import wilson

    good, bad = (tokenizer.backend_tokenizer.encode(digit).ids[0] for digit in "51")
    result = {}
    model.eval()
    for seat, shown_so in ((1, comparisons), (2, [c.swapped() for c in comparisons])):
        rows = Rows(tokenizer, shown_so)
        with torch.no_grad():
            hidden = model.model(input_ids=rows.ids).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[rows.kinds[:, 1:] == Rows.SCORE])
        # Each row has three numbers, the last being the ranking.
        likes = (logits[:, good] > logits[:, bad]).reshape(-1, 3)[:, :2]
        mine, other = likes[:, seat - 1], likes[:, 2 - seat]
        right = int((mine & ~other).sum())
        low, high = wilson(right, len(shown_so))
        result[f"right one in seat {seat}"] = {
            "n": len(shown_so), "rate": right / len(shown_so), "ci95": [round(low, 3), round(high, 3)],
        }  # fmt: skip
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    """Train and save the judge."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long, whatever the steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "genrm")
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed)
    steps, loss = train(model, tokenizer, arguments.seed, arguments.steps, arguments.seconds)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    facts = {
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "vocabulary": len(tokenizer),
        "steps": steps,
        "loss of the scores": round(loss, 4),
        "seconds": round(time.monotonic() - began),
        **accuracy(model, tokenizer, _measured(arguments.seed + 2, N_MEASURED)),
    }
    print(json.dumps(facts))  # noqa: T201


if __name__ == "__main__":
    main()
