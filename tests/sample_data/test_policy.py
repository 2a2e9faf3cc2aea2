"""The sample policy as a folder: what loads it, what its tokenizer and template promise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gymdata.sample_data.make_tasks import RETRIES
from gymdata.sample_data.policy_traces import call_text, draw_trace, segments, tools

pytestmark = pytest.mark.torch

POLICY = Path(__file__).parents[2] / "sample_data" / "policy"
STUDENT = POLICY.parent / "student"
CALL = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "417-58"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 417-58?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "359"},
    {"role": "assistant", "content": "359", "reasoning_content": "It said so."},
    {"role": "user", "content": [{"type": "text", "text": "Thanks."}]},
    {"role": "assistant", "content": "One more:", "tool_calls": [CALL, CALL]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(POLICY)


@pytest.mark.parametrize(("folder", "most"), [(POLICY, 3_000_000), (STUDENT, 1_500_000)], ids=["policy", "student"])
def test_the_folder_is_small_and_names_its_architecture(folder: Path, most: int) -> None:
    """At most 3 MB, and a configuration that transformers and vLLM know."""
    assert sum(file.stat().st_size for file in folder.iterdir()) <= most
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] >= 512


def test_the_vocabulary_has_merges_and_its_own_pad_token(tokenizer: Any) -> None:
    """At least 150 merges, and padding is not the end of a turn."""
    assert len(json.loads((POLICY / "tokenizer.json").read_text())["model"]["merges"]) >= 150
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text", ["", "What is 417-58?", "  two\n\nlines ", "naïve 漢字 🙂", "<tool_call>x</tool_call>"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    """Decoding what was encoded gives the text back, whatever it is."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("with_tools", [True, False])
def test_the_template_never_rewrites_the_past(tokenizer: Any, with_tools: bool) -> None:
    """A rendered conversation is a prefix of each of its continuations; the generation prompt opens the next turn."""
    given = tools() if with_tools else None

    def render(n: int, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            CONVERSATION[:n], tools=given, add_generation_prompt=prompt, tokenize=False
        )

    for n in range(1, len(CONVERSATION)):
        assert render(n + 1).startswith(render(n))
        if CONVERSATION[n]["role"] == "assistant":
            assert render(n + 1).startswith(render(n, prompt=True))
    assert ("calculate(expression: string)" in render(1)) == with_tools


def test_only_assistant_turns_are_marked_as_generated(tokenizer: Any) -> None:
    """The template's generation mask covers what the policy writes with its end of turn, and nothing else."""
    rendered = tokenizer.apply_chat_template(
        CONVERSATION[:5], tools=tools(), return_dict=True, return_assistant_tokens_mask=True
    )
    ids = [i for i, own in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(ids) == call_text("417-58") + "<|im_end|><think>It said so.</think>359<|im_end|>"


def test_generations_are_parsed_to_messages(tokenizer: Any) -> None:
    """A tool call and a plain answer are read back from ids by the tokenizer's own response template."""
    ids = tokenizer.encode(call_text("417-58") + "<|im_end|>")
    assert tokenizer.parse_response(ids, prefix="<|im_start|>assistant\n")["tool_calls"] == [CALL]
    plain = tokenizer.parse_response(tokenizer.encode("359<|im_end|>"), prefix="")
    assert plain == {"role": "assistant", "content": "359"}


def test_the_student_learned_second_tries(tokenizer: Any) -> None:
    """What it writes is marked, what the tutor and the tool say is not; a right answer has no second try."""
    transformers = pytest.importorskip("transformers")
    spelled = transformers.AutoTokenizer.from_pretrained(STUDENT)
    draw, seconds = random.Random(3), 0
    for _ in range(60):
        trace = draw_trace(draw, set(), tutored=True)
        parts = segments(trace, spelled)
        own = [text.removesuffix(spelled.eos_token) for text, mine in parts if mine]
        tries = [trace, *([trace.again] if trace.again else [])]
        assert own == [text for one in tries for text in (one.call, one.answer) if text is not None]
        seconds += trace.again is not None
        if trace.again is not None:
            assert trace.again.question in RETRIES
    assert 15 < seconds < 50
