"""Chats of the sample tokenizer with known templates, and a conversation with a call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AddedToken, AutoTokenizer

from gymdata.chat.template import TransformersChat

POLICY = str(Path(__file__).parents[2] / "sample_data" / "policy")
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "d",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "What is 4+5?"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "calc", "arguments": {"expression": "4+5"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "name": "calc", "tool_call_id": "call00001", "content": "9"}


def known_templates() -> list[Path]:
    trl = pytest.importorskip("trl")
    return sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


def with_template(text: str, eos: list[str]) -> TransformersChat:
    """The sample tokenizer with a template's marks added as special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.response_template = None
    marks = re.findall(r"<[|｜][^<>\s'\"{}]*?[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_turn>|<sop>|\[gMASK\]", text)
    vocabulary = tokenizer.get_vocab()
    fresh = [AddedToken(m, special=True, normalized=False) for m in dict.fromkeys(marks) if m not in vocabulary]
    tokenizer.add_special_tokens({"additional_special_tokens": fresh})
    tokenizer.chat_template = text
    if "bos_token" in text:
        tokenizer.bos_token = tokenizer.eos_token
    ids = [tokenizer.convert_tokens_to_ids(e) for e in eos if e in tokenizer.get_vocab()]
    return TransformersChat(
        tokenizer, served_template=text, eos_ids=ids or [tokenizer.eos_token_id], tool_parser="auto"
    )


#: The end tokens that each family's generation_config names.
EOS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "lfm": ["<|im_end|>"],
    "llama": ["<|eot_id|>", "<|eom_id|>"],
    "phi": ["<|end|>", "<|endoftext|>"],
    "qwen": ["<|im_end|>", "<|endoftext|>"],
}


def eos_of(name: str) -> list[str]:
    return next((tokens for family, tokens in EOS.items() if name.startswith(family)), [])


def known_chat(name: str) -> TransformersChat:
    """Of the template that TRL ships under this name."""
    (path,) = [path for path in known_templates() if path.stem == name]
    return with_template(path.read_text(), eos_of(name))
