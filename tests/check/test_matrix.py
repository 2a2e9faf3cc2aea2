"""Every chat template that TRL ships, on three kinds of tokenizer: nothing breaks, and nothing differs in silence."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from gymdata.engines.chat.template import TransformersChat
from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.continuity.prompt_extension import SpliceRefusedError, splice
from gymdata.rollouts.turns import Call, encode_turns, expand_prompts, kinds, next_prompt
from tests.check import families
from tests.check.conversations import SCENARIOS, Step, play

pytestmark = pytest.mark.skipif(not families.template_names(), reason="TRL is not installed")

NAMES = families.template_names()
#: One of each kind of template: what closes a turn, where reasoning goes, who may speak.
SAMPLE = ["deepseekv3", "gemma", "gemma4_v5", "glm4moe", "gptoss", "idefics3", "llama3_1", "lfm2_v2",
          "nemotron_3_nano", "phi3", "qwen2_5", "qwen3", "qwen3_5_nothink"]  # fmt: skip


def matrix(names: list[str]) -> list[pytest.param]:
    return [pytest.param(name, family, id=f"{name}-{family}") for family in families.FAMILIES for name in names]


def skip_unknown(family: str) -> None:
    if not families.has_family(family):
        pytest.skip("mistral_common, whose vocabulary this uses, is not installed")


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
    chat = families.chat(name, family)
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


@pytest.mark.parametrize(("name", "family"), matrix(SAMPLE))
def test_sampled_templates_hold_ids_and_splice_exactly_or_refuse(name: str, family: str):
    """Held ids and bridges never break, and a splice is the held conversation or a refusal."""
    skip_unknown(family)
    check_cell(name, family, seeds=1)


@pytest.mark.full
@pytest.mark.parametrize(("name", "family"), matrix(NAMES))
def test_every_template_holds_ids_and_splices_exactly_or_refuses(name: str, family: str):
    """As above, for every template and more conversations."""
    skip_unknown(family)
    check_cell(name, family, seeds=5)


@pytest.mark.full
def test_most_splices_are_exact():
    """A splice that refused everything would be safe and useless: at least four in five are made."""
    counts = sum((check_cell(name, "bytes", seeds=1) for name in NAMES), Counter[str]())
    assert counts["exact"] > 0.8 * counts["steps"], counts


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_bridge_after_canonical_ids_is_the_rendered_conversation(family: str):
    """Where the template changes nothing and the model wrote the very ids that the template would, bridge and rendering
    agree token for token."""
    skip_unknown(family)
    agreed = 0
    for name in NAMES:
        chat = families.chat(name, family)
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
    from tests.check import table

    if table.trl_of_file() != table.version("trl"):
        pytest.skip("the table was made with another version of TRL")
    assert table.FILE.read_text(encoding="utf-8") == table.table(), "run: python -m tests.check.table"
