"""Three kinds of tokenizer that know every special token of every chat template that TRL ships.

Invariants: the same tokenizers on every machine (trained on a fixed text, or read from an installed package), and
every special token is one id.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gymdata.chat.template import TransformersChat

FAMILIES = ("bytes", "spaces", "tekken")

_SPECIAL = re.compile(
    r"<\|[^|<>{}'\"\s]+\|>|<｜[^｜<>]+｜>|<\|\w+>|<\w+\|>|</s>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|image|start_of_image)>|\[/?INST\]"
)
_ALWAYS = ["<s>", "<bos>", "<eos>", "<pad>", "<|endoftext|>", "<|end_of_text|>", "<think>", "</think>"]

#: Template name's beginning → the tokens that its real checkpoints stop at, and their first token.
_CHECKPOINTS: dict[str, tuple[list[str], str]] = {
    "cohere": (["<|END_OF_TURN_TOKEN|>"], "<bos>"),
    "deepseek": (["<｜end▁of▁sentence｜>"], "<s>"),
    "diffusion_gemma": (["<eos>", "<turn|>", "<|tool_response>"], "<bos>"),
    "gemma4": (["<eos>", "<turn|>", "<|tool_response>"], "<bos>"),
    "gemma": (["<eos>", "<end_of_turn>"], "<bos>"),
    "glm4moe": (["<|endoftext|>", "<|user|>", "<|observation|>"], "<s>"),
    "gptoss": (["<|return|>", "<|call|>", "<|endoftext|>"], "<s>"),
    "idefics3": (["<end_of_utterance>", "<|end_of_text|>"], "<|begin_of_text|>"),
    "smolvlm": (["<end_of_utterance>"], "<s>"),
    "llama3_1": (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|begin_of_text|>"),
    "llama3_2": (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|begin_of_text|>"),
    "llama3": (["<|end_of_text|>", "<|eot_id|>"], "<|begin_of_text|>"),
    "llava_next": (["</s>"], "<s>"),
    "muse_glimmer": (["<|eot|>", "<|eom|>"], "<s>"),
    "phi3": (["<|endoftext|>", "<|end|>"], "<s>"),
    "": (["<|im_end|>", "<|endoftext|>"], "<s>"),
}


def template_folder() -> Path | None:
    """Where the installed TRL keeps its chat templates."""
    found = find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(next(iter(found.submodule_search_locations))) / "chat_templates"
    return folder if folder.is_dir() else None


def template_names() -> list[str]:
    folder = template_folder()
    return sorted(p.stem for p in folder.glob("*.jinja")) if folder else []


def template_text(name: str) -> str:
    folder = template_folder()
    assert folder is not None
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def special_tokens() -> list[str]:
    found = {token for name in template_names() for token in _SPECIAL.findall(template_text(name))}
    return sorted({*found, *_ALWAYS, "<|begin_of_text|>", "<|eom_id|>"})


def has_family(name: str) -> bool:
    return name != "tekken" or _tekken_file() is not None


def chat(template: str, family: str, *, text: str | None = None, keep_reasoning: bool = True) -> TransformersChat:
    """The chat of a template (its name, or ``text`` in its place) on a tokenizer family, with its checkpoint's stops."""
    stops, first = next(v for k, v in _CHECKPOINTS.items() if template.startswith(k))
    tokenizer = copy.copy(_base(family))
    tokenizer._special_tokens_map = dict(tokenizer._special_tokens_map)
    tokenizer.eos_token, tokenizer.bos_token = stops[0], first
    tokenizer.chat_template = text if text is not None else template_text(template)
    eos = [tokenizer.convert_tokens_to_ids(token) for token in stops]
    return TransformersChat(
        tokenizer,
        served_template=tokenizer.chat_template,
        eos_ids=eos,
        tool_parser="none",
        keep_reasoning=keep_reasoning,
    )


def save_family(family: str, folder: Path) -> Path:
    """``folder``, with the family's tokenizer.json in it."""
    _base(family).backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def _base(family: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = {"bytes": _bytes, "spaces": _spaces, "tekken": _tekken}[family]()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special_tokens()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def _text() -> list[str]:
    """A text with words, numbers, JSON and other scripts, the same every time."""
    draw = random.Random(7)
    syllables = [a + b for a in "bcdfglmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "ing")]
    words = ["".join(draw.choices(syllables, k=draw.choice((1, 2, 2, 3)))) for _ in range(400)]
    lines = []
    for _ in range(600):
        line = " ".join(draw.choices(words, k=12)).capitalize()
        lines.append(f'{line}, {draw.randrange(10**5)}.\n{{"x": {draw.random():.3f}, "name": "{draw.choice(words)}"}}')
    return [*lines, "größe naïve café 東京 は 日本 の 首都 Привет мир 🙂🙃 \t\n\n   spaces    and\ttabs"] * 2


def _bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_text(), trainer)
    return tokenizer


def _spaces() -> Tokenizer:
    """As SentencePiece: a mark before each word, unknown characters as bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1800, special_tokens=pieces, show_progress=False, limit_alphabet=120)
    tokenizer.train_from_iterator(_text(), trainer)
    # Trained as special tokens so that they get ids; they are bytes of text, and are read back as such.
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] == "<unk>"]
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _tekken_file() -> Path | None:
    found = find_spec("mistral_common")
    if found is None or not found.submodule_search_locations:
        return None
    return next(iter(sorted(Path(next(iter(found.submodule_search_locations))).glob("data/tekken_*.json"))), None)


def _tekken() -> Tokenizer:
    """131,072 tokens of a real vocabulary, as a byte-level BPE."""
    file = _tekken_file()
    assert file is not None
    data = json.loads(file.read_text())
    size = data["config"]["default_vocab_size"] - data["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][:size]}
    spell = _byte_letters()
    merges = []
    for token, rank in ranks.items():
        cuts = [(token[:k], token[k:]) for k in range(1, len(token))]
        known = [(ranks[a], ranks[b], rank, a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += [(rank, x, y, a, b) for x, y, rank, a, b in known]
    merges.sort(key=lambda m: m[:3])
    tokenizer = Tokenizer(
        models.BPE(
            {spell(token): rank for token, rank in ranks.items()},
            [(spell(a), spell(b)) for *_, a, b in merges],
            ignore_merges=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(data["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> Any:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    return lambda token: "".join(letters[byte] for byte in token)


assert tokenizers.__version__
