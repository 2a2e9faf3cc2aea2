"""Every chat template that TRL ships, on three kinds of tokenizer: nothing breaks, and nothing differs in silence."""

from __future__ import annotations

from collections import Counter

import pytest

from gymdata.errors import DataError
from gymdata.rollouts.next_prompt import next_prompt
from tests.check import matrix
from tests.check.matrix import check_cell

pytestmark = [pytest.mark.torch, pytest.mark.skipif(not matrix.template_names(), reason="TRL is not installed")]

NAMES = matrix.template_names()
#: One of each kind of template: what closes a turn, where reasoning goes, who may speak.
SAMPLE = ["deepseekv3", "gemma", "gemma4_v5", "glm4moe", "gptoss", "idefics3", "llama3_1", "lfm2_v2",
          "nemotron_3_nano", "phi3", "qwen2_5", "qwen3", "qwen3_5_nothink"]  # fmt: skip


def cells(names: list[str]) -> list[pytest.param]:
    return [pytest.param(name, family, id=f"{name}-{family}") for family in matrix.FAMILIES for name in names]


def skip_unknown(family: str) -> None:
    if not matrix.has_family(family):
        pytest.skip("mistral_common, whose vocabulary this uses, is not installed")


@pytest.mark.parametrize(("name", "family"), cells(SAMPLE))
def test_sampled_templates_hold_ids_and_splice_exactly_or_refuse(name: str, family: str):
    """Held ids and bridges never break, and a splice is the held conversation or a refusal."""
    skip_unknown(family)
    check_cell(name, family, seeds=1)


@pytest.mark.full
@pytest.mark.parametrize(("name", "family"), cells(NAMES))
def test_every_template_holds_ids_and_splices_exactly_or_refuses(name: str, family: str):
    """As above, for every template and more conversations."""
    skip_unknown(family)
    check_cell(name, family, seeds=5)


@pytest.mark.full
def test_most_splices_are_exact():
    """A splice that refused everything would be safe and useless: at least four in five are made."""
    counts = sum((check_cell(name, "bytes", seeds=1) for name in NAMES), Counter[str]())
    assert counts["exact"] > 0.8 * counts["steps"], counts


@pytest.mark.parametrize("family", matrix.FAMILIES)
def test_a_bridge_after_canonical_ids_is_the_rendered_conversation(family: str):
    """Where the template changes nothing and the model wrote the very ids that the template would, bridge and rendering
    agree token for token."""
    skip_unknown(family)
    agreed = 0
    for name in NAMES:
        chat = matrix.family_chat(name, family)
        messages = [{"role": "user", "content": "What is 7+5?"}, {"role": "assistant", "content": "It is 12."}]
        new = [{"role": "user", "content": "And less two?"}]
        prompt = chat.render(messages[:1], None)
        try:
            whole = chat.render([*messages, *new], None)
        except DataError:
            continue
        closed = [i for i, token in enumerate(whole) if token in chat.end_of_turn_ids and i > len(prompt)]
        if whole[: len(prompt)] != prompt or not closed:
            continue
        held = whole[: closed[0] + 1]
        if "12." not in chat.decode(held) or "less" in chat.decode(held):
            continue
        assert next_prompt(held, chat.bridge(messages, new, None), chat.end_of_turn_ids) == whole, name
        agreed += 1
    assert agreed > 0.6 * len(NAMES)


@pytest.mark.full
def test_the_table_of_templates_is_fresh():
    """schemas/templates.md says what the installed templates do today."""
    if matrix.trl_of_file() != matrix.version("trl"):
        pytest.skip("the table was made with another version of TRL")
    assert matrix.FILE.read_text(encoding="utf-8") == matrix.table(), "run: python -m tests.check.matrix"
