"""A lower bound of a prompt's tokens: certain where there is one, and none where nothing is certain."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from transformers import AddedToken, AutoTokenizer

from gymdata.chat.template import TransformersChat
from gymdata.chat.turn_tokens import most_characters

pytestmark = pytest.mark.torch

POLICY = str(Path(__file__).parents[2] / "sample_data" / "policy")


@pytest.fixture(scope="module")
def chat() -> TransformersChat:
    return TransformersChat.load(POLICY)


@pytest.fixture(scope="module")
def most(chat: TransformersChat) -> int:
    bound = most_characters(chat.tokenizer)
    assert bound is not None
    return bound


@given(st.text(max_size=200), st.sampled_from(["", "What is ", "<|im_end|>", " ", "é", "😀", "e\u0301"]))
def test_no_id_covers_more_characters(chat: TransformersChat, most: int, text: str, often: str) -> None:
    """Whatever the text, its ids times the bound cover it."""
    whole = text + often * 40
    assert len(chat.encode(whole)) * most >= len(whole)


def test_a_long_prompt_is_bounded_below(chat: TransformersChat) -> None:
    """Three megabytes have more ids than any context of this policy holds, and fewer than they really have."""
    messages = [{"role": "user", "content": "12+34 " * 50_000}]
    least = chat.fewest_tokens(messages, None)
    assert 5_000 < least <= len(chat.render(messages, None))
    assert chat.fewest_tokens([{"role": "user", "content": "12+34"}], None) == 0


def test_without_certainty_there_is_no_bound() -> None:
    """A token that swallows the white space beside it may cover any number of characters."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.add_tokens([AddedToken("<swallow>", rstrip=True)])
    assert most_characters(tokenizer) is None
