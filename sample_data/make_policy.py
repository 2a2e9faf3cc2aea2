"""Train the sample policy from nothing and write it as policy/, a folder for transformers and vLLM; with ``--tutored`` a
smaller one that is given a second try, as student/.

Always holds: no operand pair of a held-out task is ever trained on, and training stops half-way, so that the policy is
right about half of the time and there is something to learn from its own rollouts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gymdata.sample_data.make_tasks import HERE, read_pairs
from gymdata.sample_data.policy_tokenizer import build_tokenizer, spell
from gymdata.sample_data.policy_traces import draw_trace, segments, tokenizer_corpus

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

BATCH = 64
LEARNING_RATE = 2e-3
WARM_UP = 40
#: Share of conversations whose generations are spelled with other tokens than the tokenizer would choose.
LOOSE_SHARE = 0.05


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, heads: int = 4) -> Qwen3ForCausalLM:
    """A random Qwen3: about 0.6 M parameters with 4 heads."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32 * heads,
            intermediate_size=80 * heads,
            num_hidden_layers=3,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Batches:
    """Endless batches of (input_ids, loss mask), each of shape (BATCH, longest), from freshly drawn traces."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, tutored: bool = False) -> None:
        self._tokenizer, self._tutored = tokenizer, tutored
        self._random = random.Random(seed)
        self._held_out = read_pairs(HERE / "tasks" / "heldout.jsonl")

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch."""
        import torch

        rows = [self._row() for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((BATCH, width), self._tokenizer.pad_token_id)
        mask = torch.zeros((BATCH, width), dtype=torch.bool)
        for row, (ids, own) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = torch.tensor(own)
        return input_ids, mask

    def _row(self) -> tuple[list[int], list[bool]]:
        loose = self._random if self._random.random() < LOOSE_SHARE else None
        ids: list[int] = []
        mask: list[bool] = []
        for text, own in segments(draw_trace(self._random, self._held_out, self._tutored), self._tokenizer):
            piece = spell(self._tokenizer, text, loose if own else None)
            ids += piece
            mask += [own] * len(piece)
        return ids, mask


def train(model: Qwen3ForCausalLM, batches: Batches, steps: int) -> float:
    """Next-token training on what the policy writes; returns the last step's loss in nats a token."""
    import torch
    from torch.nn import functional

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    loss = torch.tensor(0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP, 2 * (1 - step / steps))
        input_ids, mask = batches.draw()
        hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
        wanted = mask[:, 1:]
        loss = functional.cross_entropy(model.lm_head(hidden[wanted]), input_ids[:, 1:][wanted])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.3f}", file=sys.stderr, flush=True)  # noqa: T201
    return loss.item()


def main() -> None:
    """Train and save the policy."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=650)
    parser.add_argument("--tutored", action="store_true", help="with second tries; 3 heads in place of 4")
    parser.add_argument("-o", "--output", type=Path, help="default: policy, or student with --tutored")
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(1)  # sums are then always taken in the same order
    started = time.monotonic()
    tutored = arguments.tutored
    tokenizer = build_tokenizer(tokenizer_corpus(arguments.seed, tutored))
    model = build_model(tokenizer, arguments.seed, heads=3 if tutored else 4)
    loss = train(model, Batches(tokenizer, arguments.seed, tutored), arguments.steps)
    output = arguments.output or HERE / ("student" if tutored else "policy")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    facts = {
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "vocabulary": len(tokenizer),
        "loss": round(loss, 4),
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(facts))  # noqa: T201


if __name__ == "__main__":
    main()
