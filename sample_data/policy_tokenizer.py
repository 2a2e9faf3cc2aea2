"""The sample policy's tokenizer: byte-level BPE over the words and numbers of its tasks, with a chat template.

Numbers are cut out first and merged by pairs of digits, so one number has several spellings in tokens and only one of
them is what the tokenizer would choose: sampled text does not always re-tokenise to what was sampled.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
#: Written by the model as plain text, so decoding must keep them: added tokens, but not special ones.
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
N_MERGES = 176
#: How often a place between two digits is cut where numbers are spelled loosely.
CUT_CHANCE = 0.3

#: How an assistant turn is read back into a message (transformers' response templates).
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": f"{START}assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text"},
    },
}


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges come from ``texts``, ready to be saved.

    The vocabulary is 256 bytes, 176 merges, 3 special tokens (pad, start and end of turn) and 4 markers.
    """
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=3 + len(alphabet) + N_MERGES,
        special_tokens=[PAD, START, END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(list(MARKERS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        response_template=RESPONSE_TEMPLATE,
    )
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8").rstrip()
    return tokenizer


def spell(tokenizer: PreTrainedTokenizerFast, text: str, random_: random.Random | None = None) -> list[int]:
    """The ids of ``text``; with ``random_``, numbers are cut at random places, so that they are other tokens than usual."""
    pieces = [text] if random_ is None else _split_numbers(text, random_)
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]


def _split_numbers(text: str, random_: random.Random) -> list[str]:
    pieces = [""]
    for before, character in zip(" " + text, text, strict=False):
        if before.isdigit() and character.isdigit() and random_.random() < CUT_CHANCE:
            pieces.append("")
        pieces[-1] += character
    return pieces
