"""A template or prompt file that does not end is refused by name, and an ordinary one is rendered by transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gymdata.chat.template import TransformersChat, shipped_templates
from gymdata.chat.template_proof import CONVERSATIONS, TemplateLimitError, refuse_endless
from gymdata.cli.main import main
from gymdata.errors import DataError

pytestmark = pytest.mark.torch

LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
SLOW = {
    "nested loops that write nothing": LOOP * 3 + END * 3,
    "a power": "{{ (10 ** (10 ** 8)) % 7 }}",
}
LARGE = {
    "text without end": LOOP * 3 + "y" * 9000 + END * 3,
    "doubling by +": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a product": "{{ 'x' * 10**12 }}",
}


@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_does_not_end_is_ended(name: str) -> None:
    """Also in the middle of one long operation of the interpreter."""
    with pytest.raises(TemplateLimitError, match="it does not end within 1 s"):
        refuse_endless(SLOW[name], CONVERSATIONS, cpu_s=1)


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_fills_the_memory_is_ended(name: str) -> None:
    """This process never holds what it makes."""
    with pytest.raises(TemplateLimitError, match=r"needs more than 2 GiB of memory|does not end within 1 s"):
        refuse_endless(LARGE[name], CONVERSATIONS, cpu_s=1)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no limit of memory")
def test_a_template_that_only_holds_much_is_ended() -> None:
    """Its text is short and it is soon done: nothing but the limit of memory ends it."""
    with pytest.raises(TemplateLimitError, match="needs more than 2 GiB of memory"):
        refuse_endless("{{ ('x' * 2500000000)|length }}", CONVERSATIONS)


def test_an_ordinary_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with it otherwise is not this check's: an undefined name, a refusal, a syntax error."""
    tried: list[str] = []
    start = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda words, **how: (tried.append(words[-1]), start(words, **how))[1])
    for template in ("{{ a.b.c }}{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% if %}", LOOP + "x" + END):
        for _ in range(3):
            refuse_endless(template, CONVERSATIONS)
    assert len(tried) == 4


@pytest.mark.matrix("gptoss", "qwen3_training")
@pytest.mark.parametrize("name", sorted(shipped_templates()))
def test_known_templates_pass(name: str) -> None:
    """Every shipped template ends with every conversation that is tried, so that they are used untried."""
    refuse_endless(shipped_templates()[name], CONVERSATIONS)


def test_each_file_of_a_template_is_named(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """check, collect and judge: exit 2, the flag or file, and what is wrong, where it took minutes."""
    file, tasks, run = tmp_path / "endless.jinja", tmp_path / "tasks.jsonl", "sample_data/rollouts/clean.jsonl"
    template = SLOW["nested loops that write nothing"]
    file.write_text(template)
    # A template is tried once: what came of it here, the commands report.
    with pytest.raises(TemplateLimitError):
        refuse_endless(template, CONVERSATIONS, cpu_s=1)
    tasks.write_text(json.dumps({"prompt": "q"}) + "\n")
    for words in (
        ["check", policy, "--chat-template", str(file)],
        ["collect", str(tasks), "-m", policy, "--prompt-template", str(file), "-o", str(tmp_path / "run")],
        ["judge", run, "--endpoint", "http://127.0.0.1:9", "-m", "j", "--judge-prompt", str(file)],
    ):
        assert main(words) == 2, words
        assert "it does not end within 1 s" in capsys.readouterr().err


def test_a_conversation_that_a_template_cannot_end_is_an_error_of_the_template(policy: str) -> None:
    """A recursion without end is Python's own limit, and the error names the conversation."""
    chat = TransformersChat.load(policy)
    chat.tokenizer.chat_template = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    with pytest.raises(DataError, match=r"the chat template refuses a conversation of \(user\)"):
        chat.render([{"role": "user", "content": "q"}], None)
