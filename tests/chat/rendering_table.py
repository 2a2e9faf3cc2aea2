"""Tokenizers of four kinds, ten chat templates and eight conversations: what the rendering of text is tried on."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

#: Kinds of tokenizers by what they put before a text.
KINDS = ("prepend", "metaspace first", "bytes with a space", "bytes")

#: As published: ChatML (openai-python's chatml.md), Llama 2 (its reference code), Mistral 7B Instruct v0.1, Alpaca.
PUBLISHED = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
        "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}"
        "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}### Instruction:\n"
        "{{ m.content }}\n\n{% else %}### Response:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
}
PUBLISHED["alpaca with an end"] = PUBLISHED["alpaca"].replace("{% else %}### Response:\n{{ m.content }}\n\n", "{% else %}"
    "### Response:\n{{ m.content }}{{ eos_token }}\n\n")  # fmt: skip
OF_TRL = ("llama3", "qwen2_5", "qwen3", "deepseek_r1_distill", "phi3", "gemma")
#: The tokens that a policy of each template stops at, the tokenizer's end token first.
ENDS = {
    "llama3": ["<|eot_id|>"], "qwen2_5": ["<|im_end|>"], "qwen3": ["<|im_end|>"], "gemma": ["<end_of_turn>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>"], "phi3": ["<|endoftext|>", "<|end|>"], "chatml": ["<|im_end|>"],
}  # fmt: skip
_MARKS = r"<[|｜][^<>\s'\"{}]*?[|｜]>|<(?:start|end)_of_turn>"
_WORDS = ["How much is 2+3? The answer is 5.\n\n6\n{}\"':,[]_<>/#-", "Wie viel? Größe 🙂 日本語 é"]

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}},
    },
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(n: int) -> Message:
    return {"id": f"call0000{n}", "type": "function", "function": {"name": "add", "arguments": {"x": n, "y": 3}}}


def result(n: int) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{n}", "content": str(n + 3)}


ASKED = user("How much is 2+3?")
CONVERSATIONS: dict[str, list[Message]] = {
    "two turns": [ASKED, answer("The answer is 5."), user("And 3+3?"), answer("6")],
    "system": [{"role": "system", "content": "Be brief."}, ASKED, answer("5")],
    "Unicode": [user("Größe 🙂?"), answer("日本語 é 🙂")],
    "tools": [ASKED, answer("", tool_calls=[call(2)]), result(2), answer("5")],
    "reasoning": [ASKED, answer("5", reasoning="2 and 3")],
    "empty answer": [ASKED, answer("")],
    "text beside a call": [ASKED, answer("Adding.", tool_calls=[call(2)]), result(2), answer("5")],
    "parallel calls": [ASKED, answer("", tool_calls=[call(2), call(3)]), result(2), result(3), answer("5 and 6")],
}


def template_of(name: str) -> str:
    if name in PUBLISHED:
        return PUBLISHED[name]
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def tokenizer_of(kind: str, template: str) -> Any:
    """A tokenizer of this kind, with the marks of the template as special tokens."""
    from transformers import PreTrainedTokenizerFast

    text = template_of(template)
    ends = ENDS.get(template, ["</s>"])
    marks = list(dict.fromkeys(["<unk>", "<s>", *ends, *re.findall(_MARKS, text)]))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    alphabet = sorted(set("".join(_WORDS) + text + json.dumps(TOOL) + "▁" + "".join(map(chr, range(32, 127)))))
    if kind.startswith("bytes"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind != "bytes")
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁|\n"), "merged_with_next")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    if not kind.startswith("bytes"):
        parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 60, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_WORDS[0].split() * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=ends[0], unk_token="<unk>", pad_token="<unk>"
    )
    made.chat_template = text
    return made


@functools.cache
def chat_of(kind: str, template: str) -> Any:
    from gymdata.chat.template import TransformersChat

    tokenizer = tokenizer_of(kind, template)
    eos = [tokenizer.convert_tokens_to_ids(end) for end in ENDS.get(template, ["</s>"])]
    return TransformersChat(
        tokenizer, served_template=tokenizer.chat_template, eos_ids=eos, tool_parser="none", keep_reasoning=False
    )


@functools.cache
def renderer_of(kind: str, template: str) -> Any:
    from gymdata.chat.rendering import TextRenderer

    return TextRenderer.of(chat_of(kind, template))
