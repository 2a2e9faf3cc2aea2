"""The matrix of chat templates: random conversations on each, and the table of what each template does to them.

``python -m tests.check.matrix`` writes schemas/templates.md.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gymdata.chat.template import TransformersChat, training_twin
from gymdata.commands.check.template import TemplateCheck, check_template
from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.messages import Message
from gymdata.rollouts.next_prompt import SpliceRefusedError, next_prompt, splice
from gymdata.rollouts.turns import Call, encode_turns, expand_prompts, kinds


def steps_of(chat: TransformersChat, name: str, seeds: int) -> tuple[list[list[Step]], Counter[str]]:
    """Conversations as lists of steps, and how many were refused a bridge."""
    played, refused = [], Counter[str]()
    for scenario in SCENARIOS:
        for seed in range(seeds):
            steps: list[Step] = []
            try:
                for step in play(chat, scenario, random.Random(f"{name} {scenario} {seed}")):
                    steps.append(step)
            except RefusedError:
                refused[scenario] += 1
            played.append(steps)
    return played, refused


def check_cell(name: str, family: str, seeds: int) -> Counter[str]:
    """Assert what must hold for one template on one family; returns counts of steps, exact and refused splices."""
    chat = family_chat(name, family)
    played, refused = steps_of(chat, name, seeds)
    # A template that leaves tool calls out refuses tools; users it never refuses.
    assert not refused["users"]
    counts = Counter(no_bridge=sum(refused.values()))
    for steps in played:
        counts["steps"] += len(steps)
        ids_in_ids_out_never_breaks(chat, steps)
        for step in steps:
            counts[splice_is_exact_or_refuses(chat, step)] += 1
    assert counts["steps"]
    return counts


def ids_in_ids_out_never_breaks(chat: TransformersChat, steps: list[Step]) -> None:
    calls = [
        Call(
            np.array(s.prompt, np.int32), np.array(s.generation, np.int32), np.zeros(len(s.generation), np.float32), ""
        )
        for s in steps
    ]
    turns = encode_turns(calls)
    assert set(kinds(turns)[1:]) <= {"continues"}
    assert all(p.tolist() == s.prompt for p, s in zip(expand_prompts(turns), steps, strict=True))
    for step in steps:
        said = chat.decode(step.bridge)
        assert all(m["content"] in said for m in step.new)
        added = step.following[len(step.held) : len(step.following) - len(step.bridge)]
        assert len(added) == (step.held[-1] not in chat.end_of_turn_ids)


def splice_is_exact_or_refuses(chat: TransformersChat, step: Step) -> str:
    rendered = chat.encode(chat.text(step.messages, step.tools, generate=False))
    whole = chat.render([*step.messages, *step.new], step.tools)
    try:
        got = splice(step.held, rendered, whole, chat.end_of_turn_ids)
    except SpliceRefusedError:
        return "refused"
    # A turn cut by length is closed by whichever end the template writes there.
    added = len(got) - len(step.held) - len(step.bridge)
    assert added == (step.held[-1] not in chat.end_of_turn_ids)
    assert all(token in chat.end_of_turn_ids for token in got[len(step.held) : len(step.held) + added])
    assert got == [*step.held, *got[len(step.held) : len(step.held) + added], *step.bridge]
    return "exact"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
#: What follows each model call; ``tools`` are given where a tool answers.
SCENARIOS: dict[str, list[str]] = {
    "users": ["user", "user", "user"],
    "tools": ["tool", "tool"],
    "both": ["tool", "user", "tool"],
    "parallel": ["two tools", "user"],
    "reasoning": ["user", "tool", "user"],
}


@dataclass(slots=True)
class Step:
    """One model call and what came after. ``prompt`` is what the call read, ``following`` what the next one reads."""

    prompt: list[int]
    generation: list[int]
    bridge: list[int]
    following: list[int]
    messages: list[Message]
    new: list[Message]
    tools: Any

    @property
    def held(self) -> list[int]:
        return [*self.prompt, *self.generation]


def play(chat: TransformersChat, scenario: str, draw: random.Random) -> Iterator[Step]:
    """Random generations, seven in ten of them ended by a stop token; ends when the template refuses what is next."""
    follows = SCENARIOS[scenario]
    tools = TOOLS if scenario != "users" else None
    messages: list[Message] = [{"role": "user", "content": "What is 7+5?"}]
    if draw.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    special = {*chat.tokenizer.all_special_ids, *chat.tokenizer.added_tokens_decoder}
    try:
        prompt = chat.render(messages, tools)
    except DataError:
        return
    for number, who in enumerate(follows):
        generation = _sample(chat, draw, special)
        message = chat.parse(generation, tools)
        if scenario == "reasoning":
            message = {**message, "reasoning": "because"}
        new = _new(who, number, draw)
        if calls := [m["tool_call_id"] for m in new if m["role"] == "tool"]:
            message = {**message, "tool_calls": [_call(i) for i in calls]}
        messages = [*messages, message]
        try:
            chat.render([*messages, *new], tools)
        except DataError:
            return
        bridge = chat.bridge(messages, new, tools)
        following = next_prompt([*prompt, *generation], bridge, chat.end_of_turn_ids)
        yield Step(prompt, generation, bridge, following, messages, new, tools)
        messages, prompt = [*messages, *new], following


def _sample(chat: TransformersChat, draw: random.Random, special: set[int]) -> list[int]:
    ids: list[int] = []
    while len(ids) < draw.randrange(1, 24):
        token = draw.randrange(chat.vocab_size)
        if token not in special:
            ids.append(token)
    if draw.random() < 0.1:
        # A model may write any token; what stops it is never inside a generation.
        ids.insert(draw.randrange(len(ids)), draw.choice(sorted(special - {*chat.stop_token_ids})))
    if draw.random() < 0.7:
        ids.append(draw.choice(chat.stop_token_ids))
    return ids


def _call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": {"a": 7, "b": 5}}}


def _new(who: str, number: int, draw: random.Random) -> list[Message]:
    if who == "user":
        return [{"role": "user", "content": f"And plus {draw.randrange(1000)}?"}]
    count = 2 if who == "two tools" else 1
    return [
        {"role": "tool", "name": "add", "tool_call_id": f"call{number}{k:04}", "content": str(draw.randrange(1000))}
        for k in range(count)
    ]


FILE = Path(__file__).parents[2] / "schemas" / "templates.md"
_INTRO = """# Chat templates and multi-turn tokens

What `gymdata check` says about each chat template that TRL {trl} ships, made by `python -m tests.check.matrix`.

- **rendered again**: whether messages rendered again, with what came after, begin with what the model read and wrote.
  Where they do not, the column says what changes; training on rendered messages would then train on other tokens.
- **cure**: the training form of the template that does not change anything; `gymdata collect` uses it by default.
  "also changes" names a training form that changes the same things.
- **ids in, ids out**: whether the environment's tokens are provably cut, so that `gymdata collect` holds the sampled ids
  and nothing of the above matters to its rollouts.
- **splice**: of random conversations that had to be rendered by a server, the share whose sampled ids could be put back
  with proof, on three tokenizers and with the cure where there is one; all others were refused, and none came out different.

| template | rendered again | cure | ids in, ids out | splice | ends a turn | does not write |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table() -> str:
    """The whole file."""
    rows = [_row(name) for name in template_names() if not name.endswith("_training")]
    return _INTRO.format(trl=version("trl")) + "".join(rows)


def trl_of_file() -> str:
    """The TRL version that the file was made with."""
    return FILE.read_text(encoding="utf-8").split("that TRL ")[1].split(" ships")[0]


def _row(name: str) -> str:
    chat = family_chat(name, "bytes", keep_reasoning=False)
    found = check_template(chat)
    twin = training_twin(template_text(name))
    cure = "–"
    if twin is not None and not found.ok:
        twin_name, text = twin
        again = check_template(chat.with_template(text))
        cure = f"`{twin_name}`" if again.ok else f"`{twin_name}` also changes"
    ends = " ".join(f"`{spelling}`" for _, spelling in found.end_of_turn)
    cells = [
        f"`{name}`",
        "the same" if found.prefix_preserving else _changes(found),
        cure,
        _holds(found),
        _splices(name),
        ends.replace("|", "\\|"),
        ", ".join([*found.ignores, *(_leaves_out(found))]) or "–",
    ]
    return "| " + " | ".join(cells) + " |\n"


def _changes(found: TemplateCheck) -> str:
    parts = []
    if found.strips:
        parts.append(f"takes {', '.join(found.strips)} away")
    if any(b.where == "generation prompt" for b in found.breaks):
        parts.append("drops the opened reasoning")
    return "; ".join(parts) or "changes earlier turns"


def _holds(found: TemplateCheck) -> str:
    if found.bridges:
        return "holds"
    return "refused" if len(found.no_bridge) + len(found.refused) == 7 else "refused in part"


def _leaves_out(found: TemplateCheck) -> list[str]:
    if "tool call" in found.refused:
        return ["tool calls"]
    return ["parallel tool calls"] if "parallel tool calls" in found.refused else []


def _splices(name: str) -> str:
    from tests.check.matrix import check_cell

    counts = [check_cell(name, family, seeds=1) for family in FAMILIES if has_family(family)]
    exact, steps = sum(c["exact"] for c in counts), sum(c["steps"] for c in counts)
    return f"{exact / steps:.0%}"


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


def family_chat(
    template: str, family: str, *, text: str | None = None, keep_reasoning: bool = True
) -> TransformersChat:
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


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
