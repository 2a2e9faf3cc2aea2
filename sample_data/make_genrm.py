"""Train the sample judge from nothing and write it as genrm/, a folder for transformers and vLLM.

It compares two answers to a question of the sample tasks and writes scores and a ranking as JSON. Always holds: no operand
pair of a held-out task is ever trained on; every comparison is as often seen with its seats exchanged.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymdata_sample_data.make_policy import build_model
from gymdata_sample_data.make_tasks import HERE, OPERATORS, WORDINGS, draw_operands, read_pairs, value_of
from gymdata_sample_data.policy_tokenizer import END, PAD, START
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

BATCH = 96
LEARNING_RATE = 3e-3
WARM_UP = 30
N_MERGES = 48
#: Share of answers that are right.
RIGHT_SHARE = 0.45
SLIPS = ("swapped", "wrong operator", "short answer", "wrong digit", "from memory", "nothing")
#: Of one token that says how good an answer is, against one that only spells the rest of the verdict or of an answer.
VERDICT_WEIGHT, OTHER_WEIGHT = 1.0, 0.1


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every digit is a token of its own, so that place values can be learned; words and JSON are merged."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=3 + len(alphabet) + N_MERGES,
        special_tokens=[PAD, START, END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    words = ["user\n", "assistant\n", "principle\n", "response_1\n", "response_2\n", "None", verdict(True, False)]
    backend.train_from_iterator([*words, *(w.format("") for w in WORDINGS)] * 50, trainer)
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


def verdict(first: bool, second: bool) -> str:
    """The judge's answer when so many of the two answers are right."""
    ranking = 3.5 if first == second else 1 if first else 6
    return json.dumps({"score_1": 5 if first else 1, "score_2": 5 if second else 1, "ranking": ranking})


def draw_answer(left: int, operator: str, right: int, random_: random.Random) -> tuple[str, bool]:
    """An answer that a policy may give, and whether it is right."""
    value = value_of(left, operator, right)
    if random_.random() < RIGHT_SHARE:
        return str(value), True
    slip = random_.choice(SLIPS)
    if slip == "nothing":
        return "None", False
    text = str(value)
    if slip == "swapped":
        text = str(value_of(right, operator, left))
    elif slip == "wrong operator":
        text = str(value_of(left, "+" if operator == "-" else "-", right))
    elif slip == "short answer":
        text = text[:-1] or "0"
    elif slip == "wrong digit":
        text = str(value_of(_other_digit(left, random_), operator, right))
    elif slip == "from memory":
        text = str(_other_digit(abs(value), random_))
    return text, text == str(value)


def _other_digit(number: int, random_: random.Random) -> int:
    return number - number % 10 + (number + random_.randint(1, 9)) % 10


class Batches:
    """Endless batches of (input_ids, weights), each of shape (BATCH, longest): a question, two answers, a verdict."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._held_out = read_pairs(HERE / "tasks" / "heldout.jsonl")

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch: every comparison in both seats."""
        import torch

        rows = [row for _ in range(BATCH // 2) for row in self._both_seats()]
        width = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((BATCH, width), self._tokenizer.pad_token_id)
        weights = torch.zeros((BATCH, width))
        for place, (ids, weight) in enumerate(rows):
            input_ids[place, : len(ids)] = torch.tensor(ids)
            weights[place, : len(ids)] = torch.tensor(weight)
        return input_ids, weights

    def _both_seats(self) -> list[tuple[list[int], list[float]]]:
        draw = self._random
        operator = draw.choice(OPERATORS)
        while True:
            left, right = draw_operands(operator, draw)
            if (min(left, right), max(left, right)) not in self._held_out:
                break
        question = draw.choice(WORDINGS).format(f"{left}{operator}{right}")
        one, two = (draw_answer(left, operator, right, draw) for _ in range(2))
        return [self._row(question, one, two), self._row(question, two, one)]

    def _row(self, question: str, one: tuple[str, bool], two: tuple[str, bool]) -> tuple[list[int], list[float]]:
        def head(role: str) -> tuple[str, float]:
            return f"{START}{role}\n", 0.0

        # Predicting right answers teaches the arithmetic that tells right from wrong.
        parts = [head("user"), (f"{question}{END}\n", 0.0)]
        for number, (text, right) in enumerate((one, two), 1):
            parts += [head(f"response_{number}"), (text, OTHER_WEIGHT if right else 0.0), (f"{END}\n", 0.0)]
        parts += [head("assistant"), (verdict(one[1], two[1]) + END, VERDICT_WEIGHT)]
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in parts:
            piece = self._tokenizer.backend_tokenizer.encode(text).ids
            ids += piece
            weights += [weight] * len(piece)
        return ids, weights


def train(model: Qwen3ForCausalLM, batches: Batches, steps: int, seconds: float) -> tuple[int, float]:
    """At most so many steps and seconds; returns the steps made and the last loss in nats a token."""
    import torch
    from torch.nn import functional

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    began, loss, step = time.monotonic(), torch.tensor(0.0), 0
    while step < steps:
        passed = max(step / steps, (time.monotonic() - began) / seconds)
        if passed >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP, 2.5 * (1 - passed))
        input_ids, weights = batches.draw()
        hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
        wanted = weights[:, 1:] > 0
        each = functional.cross_entropy(model.lm_head(hidden[wanted]), input_ids[:, 1:][wanted], reduction="none")
        weight = weights[:, 1:][wanted]
        loss = (each * weight).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    return step, loss.item()


def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, n: int = 400) -> dict[str, Any]:
    """Share of comparisons of a right with a wrong answer that the judge decides rightly, by the right one's seat."""
    import torch

    random_, prompts, seats = random.Random(seed), [], []
    while len(prompts) < n:
        operator = random_.choice(OPERATORS)
        left, right = draw_operands(operator, random_)
        one, two = (draw_answer(left, operator, right, random_) for _ in range(2))
        if one[1] == two[1]:
            continue
        question = random_.choice(WORDINGS).format(f"{left}{operator}{right}")
        turns = (("user", question), ("response_1", one[0]), ("response_2", two[0]))
        messages = [{"role": role, "content": text} for role, text in turns]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.backend_tokenizer.encode(text + '{"score_1": ').ids)
        seats.append(1 if one[1] else 2)
    good, bad = (tokenizer.backend_tokenizer.encode(d).ids[0] for d in "51")
    right_by_seat: dict[int, list[bool]] = {1: [], 2: []}
    model.eval()
    with torch.no_grad():
        for ids, seat in zip(prompts, seats, strict=True):
            scores = model(input_ids=torch.tensor([ids])).logits[0, -1]
            right_by_seat[seat].append(bool((scores[good] > scores[bad]) == (seat == 1)))
    return {f"right answer in seat {seat}": round(sum(v) / len(v), 3) for seat, v in right_by_seat.items()}


def main() -> None:
    """Train and save the judge."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long, whatever the steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "genrm")
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed)
    steps, loss = train(model, Batches(tokenizer, arguments.seed), arguments.steps, arguments.seconds)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    facts = {
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "vocabulary": len(tokenizer),
        "steps": steps,
        "loss": round(loss, 4),
        "seconds": round(time.monotonic() - began),
        **accuracy(model, tokenizer, arguments.seed + 1),
    }
    print(json.dumps(facts))  # noqa: T201


if __name__ == "__main__":
    main()
