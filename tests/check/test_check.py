"""A template is judged by what it renders, and a cure is used only when it cures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gymdata.sample_data
from gymdata.chat.template import known_template, training_twin
from gymdata.cli.main import main
from gymdata.commands.check import run as checking
from gymdata.commands.check.template import TemplateCheck, check_template
from tests.check import matrix

pytestmark = pytest.mark.torch

POLICY = str(Path(gymdata.sample_data.__file__).parent / "policy")
needs_trl = pytest.mark.skipif(not matrix.template_names(), reason="TRL is not installed")


def found(name: str, family: str = "bytes") -> TemplateCheck:
    return check_template(matrix.family_chat(name, family, keep_reasoning=False))


def test_the_sample_policy_holds_its_turns(capsys):
    """The shipped policy's template changes nothing, and the command says so with exit code 0."""
    assert main(["check", POLICY, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["prefix_preserving"]
    assert said["bridges"]
    assert said["end_of_turn"] == [{"id": 2, "text": "<|im_end|>"}]
    assert said["breaks"] == []


@needs_trl
def test_a_template_that_strips_reasoning_fails_with_the_place(capsys):
    """Qwen3's template is named, so is what it strips, where, and the twin that cures it; exit code 1."""
    folder = matrix.template_folder()
    assert main(["check", POLICY, "--chat-template", f"{folder}/qwen3.jinja", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["template"] == "qwen3"
    assert said["strips"] == ["reasoning"]
    assert said["cure"]["name"] == "qwen3_training"
    assert said["cure"]["ok"]
    assert said["generation_mask"] == "qwen3_training"
    first = said["breaks"][0]
    assert "<think>" in first["before"]
    assert "<think>" not in first["after"]
    assert main(["check", POLICY, "--chat-template", f"{folder}/qwen3.jinja"]) == 1
    assert "qwen3_training" in capsys.readouterr().out


@needs_trl
@pytest.mark.parametrize("family", matrix.FAMILIES)
def test_a_break_is_at_the_first_id_that_differs(family: str):
    """The windows of a break agree before its position and differ at it."""
    if not matrix.has_family(family):
        pytest.skip("its vocabulary is not installed")
    for b in found("qwen3", family).breaks:
        before = b.position - max(0, b.position - 6)
        assert b.before_ids[:before] == b.after_ids[:before]
        assert b.before_ids[before] != b.after_ids[before]


@needs_trl
def test_what_a_template_refuses_is_no_break():
    """Gemma knows no system message and no tools; its turns hold all the same."""
    check = found("gemma")
    assert check.ok
    assert {"system message", "tool call"} <= set(check.refused)
    assert "reasoning" in check.ignores


@needs_trl
def test_an_end_token_after_the_last_turn_is_no_break():
    """Phi-3 ends a whole conversation with one token more, which no model samples."""
    assert found("phi3").prefix_preserving


@needs_trl
def test_a_template_that_strips_reasoning_written_in_the_text_is_a_break():
    """Without a parser that takes it out the model's ``<think>`` is content: leaving it out of history is a break, though
    the template never reads a field of reasoning. Its known form keeps it."""
    check = found("deepseek_r1_distill")
    assert check.strips == ["reasoning in the text"]
    assert ("reasoning in the text", 0) in {(b.probe, b.turn) for b in check.breaks}
    assert not check.prefix_preserving
    assert "reasoning in the text" not in found("deepseek_r1_distill_training").strips


def test_a_prompt_that_opens_reasoning_which_history_drops_is_a_break():
    """DeepSeek's generation prompt is not in what it renders later; the sampled ids can still be held."""
    check = found("deepseekv3")
    assert check.breaks[0].where == "generation prompt"
    assert check.bridges


@needs_trl
def test_collect_uses_the_cure_only_when_it_cures():
    """Qwen3 is replaced by its twin, GLM's twin strips as well and is not used, and both are said."""
    chat, said = checking.patched_template(matrix.family_chat("qwen3", "bytes", keep_reasoning=False), "none")
    assert chat.tokenizer.chat_template == matrix.template_text("qwen3_training")
    assert chat.facts()["chat_template_replaced"]
    assert "qwen3_training" in said[0]
    chat, said = checking.patched_template(matrix.family_chat("glm4moe", "bytes", keep_reasoning=False), "none")
    assert chat.tokenizer.chat_template == matrix.template_text("glm4moe")
    assert "saved ids" in said[0]
    chat = matrix.family_chat("llama3_1", "bytes", keep_reasoning=False)
    assert checking.patched_template(chat, "none") == (chat, [])


@needs_trl
def test_templates_are_known_by_their_exact_text():
    """One changed character makes a template unknown; a twin has no twin."""
    text = matrix.template_text("qwen3")
    assert known_template(text) == "qwen3"
    assert known_template(text + " ") is None
    twin = training_twin(text)
    assert twin is not None
    assert training_twin(twin[1]) is None


def test_the_judgement_is_the_same_every_time():
    """Two checks of one model agree in every figure."""
    assert checking.check(POLICY).to_dict() == checking.check(POLICY).to_dict()
