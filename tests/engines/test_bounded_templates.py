"""A hostile template ends with a clear error, whatever it does; an ordinary one is rendered as transformers renders it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gymdata.check.template import probes
from gymdata.engines.chat import bounded_templates
from gymdata.engines.chat.bounded_templates import TemplateLimitError, chat_template
from gymdata.engines.chat.template import TransformersChat, shipped_templates
from gymdata.errors import DataError
from gymdata.judge.prompt import Prompt

pytestmark = pytest.mark.torch

LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"
NS = "{% set ns = namespace(s='ab', l=[1], n=3) %}"
HOSTILE = {
    "one huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": LOOP * 4 + "x" + END * 4,
    "nested loops that write nothing": LOOP * 3 + END * 3,
    "loops that filter all": LOOP + "{% for j in range(99999) if false %}{% endfor %}" + END,
    "doubling by +": NS + "{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "doubling by ~": NS + "{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by a block": NS
    + "{% for i in range(99) %}{% set b %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = b %}{% endfor %}",
    "doubling by join": NS + "{% for i in range(99) %}{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
    "doubling by a method": NS + "{% for i in range(99) %}{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}",
    "doubling by format": NS + "{% for i in range(99) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "doubling by replace": NS + "{% for i in range(99) %}{% set ns.s = ns.s|replace('a', ns.s) %}{% endfor %}",
    "doubling a list": NS + "{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "a tree of lists": NS + "{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "a tree of lists as JSON": NS
    + "{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l|tojson }}",
    "a product": "{{ 'x' * 10**12 }}",
    "a product of lists": "{{ ([1] * 10**10)|length }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "squares": NS + "{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a width": "{{ 'x'|center(10000000000) }}",
    "a width of a method": "{{ 'x'.ljust(10**11) }}",
    "a width in a format": "{{ '%100000000000d' % 1 }}",
    "a width in another": "{{ '{:100000000000}'.format(1) }}",
    "an indent": "{{ '\n\n\n'|indent(10**10) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10**9) }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that multiplies": "{% macro m(s) %}" + LOOP + "{{ s }}" + END + "{% endmacro %}{{ m(m('x' * 1000)) }}",
    "text without end": LOOP * 3 + "y" * 1000 + END * 3,
    "its own filler": "{{ lipsum(n=100000000) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is refused, long before it uses up time or memory."""
    monkeypatch.setattr(bounded_templates, "MAX_STEPS", 200_000)
    monkeypatch.setattr(bounded_templates.Budget, "steps", 200_000)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which kind says the next line
        chat_template(HOSTILE[name]).render(messages=[{"role": "user", "content": "q"}])
    assert isinstance(caught.value, bounded_templates.TemplateError)


def test_a_rendering_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the steps would still be enough, the clock is not."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(bounded_templates.time, "monotonic", lambda: next(ticks) * 0.001)
    with pytest.raises(TemplateLimitError, match="longer than 30 s"):
        chat_template(LOOP + LOOP + END + END).render()


def test_the_limits_are_of_one_rendering() -> None:
    """A template within the limits renders as often as one likes."""
    template = chat_template(LOOP + "x" + END)
    assert all(len(template.render()) == 99_999 for _ in range(3))


def test_a_chat_and_a_judge_prompt_name_the_template(policy: str, tmp_path: Path) -> None:
    """The error says which template it was and which limit."""
    chat = TransformersChat.load(policy)
    chat.tokenizer.chat_template = HOSTILE["doubling by +"]
    with pytest.raises(DataError, match=f"{policy}: its chat template .* more than 100,000,000 characters"):
        chat.render([{"role": "user", "content": "q"}], None)
    chat.tokenizer.chat_template = HOSTILE["one huge range"]
    with pytest.raises(DataError, match="Range too big"):
        chat.render([{"role": "user", "content": "q"}], None)
    file = tmp_path / "judge.jinja"
    file.write_text("{{ response_1 }}{{ response_2 }}" + HOSTILE["doubling by ~"])
    with pytest.raises(DataError, match=r"--judge-prompt .*judge.jinja: it makes a text of more than"):
        Prompt.load(file)


@pytest.mark.parametrize("name", sorted(shipped_templates()))
def test_known_templates_are_rendered_as_by_transformers(name: str) -> None:
    """Every shipped template gives the same text, or the same refusal, for every part of every probe conversation."""
    text = shipped_templates()[name]
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    for probe in probes():
        for end in range(1, len(probe.messages) + 1):
            for generate in (False, True):
                given: dict[str, Any] = {"tools": probe.tools, "add_generation_prompt": generate, **marks}
                found = []
                for render in (
                    _stock,
                    lambda text, m, **k: chat_template(text).render(messages=m, documents=None, **k),
                ):
                    try:
                        found.append(render(text, probe.messages[:end], **given))
                    except Exception as error:  # noqa: BLE001 - whatever the one raises, the other must
                        found.append((type(error).__name__, str(error)))
                assert found[0] == found[1]


def _stock(text: str, messages: list[Any], **given: Any) -> str:
    return render_jinja_template([messages], chat_template=text, **given)[0][0]
