"""Text becomes ids in one way: rendered once, encoded once, and proven turn by turn, or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

from tokenizers import processors

from gymdata.chat.rendering import TextRenderer, UnprovenError
from gymdata.chat.template import TransformersChat
from gymdata.errors import DataError, UsageError
from tests.chat.rendering_table import (
    ASKED,
    CONVERSATIONS,
    ENDS,
    KINDS,
    OF_TRL,
    PUBLISHED,
    TOOL,
    Message,
    answer,
    call,
    chat_of,
    renderer_of,
    result,
    template_of,
    tokenizer_of,
    user,
)

pytestmark = [pytest.mark.torch, pytest.mark.tokenizer]

CALLS, REASONING = "the chat template leaves out tool calls", "the chat template leaves out reasoning"
ALTERNATE = "Conversation roles must alternate"
NO_END = "no end-of-turn token after an answer"
#: Conversation → why it is refused, of each template; all others are accepted.
_NO_TOOLS = dict.fromkeys(("tools", "text beside a call", "parallel calls"), CALLS) | {"reasoning": REASONING}
_ALTERNATING = dict.fromkeys(("tools", "text beside a call", "parallel calls"), ALTERNATE) | {"reasoning": REASONING}
REFUSED: dict[str, dict[str, str]] = {
    "llama3": _NO_TOOLS, "qwen2_5": {"reasoning": REASONING}, "qwen3": {}, "deepseek_r1_distill": _NO_TOOLS,
    "phi3": _NO_TOOLS, "gemma": _ALTERNATING | {"system": "System role not supported"}, "chatml": _NO_TOOLS,
    "llama2": _ALTERNATING, "mistral": _ALTERNATING, "alpaca": dict.fromkeys(CONVERSATIONS, NO_END),
    "alpaca with an end": _NO_TOOLS,
}  # fmt: skip


def trained_of(messages: list[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def tools_of(messages: list[Message]) -> list[Any] | None:
    return [TOOL] if any("tool_calls" in message for message in messages) else None


def spoken(renderer: TextRenderer, tokenizer: Any, messages: list[Message], **more: Any) -> list[str]:
    """The text of each trained turn."""
    rendered = renderer.conversation(messages, trained_of(messages), tools_of(messages), **more)
    return [tokenizer.decode(rendered.token_ids[start:end]) for start, end in rendered.spans]


def test_every_template_is_in_the_table() -> None:
    assert REFUSED.keys() == {*OF_TRL, *PUBLISHED}
    templates = [name for name in REFUSED if name != "alpaca"]
    accepted = ("two turns", "system", "Unicode")
    assert [(name, c) for name in templates for c in accepted if c in REFUSED[name]] == [("gemma", "system")]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", REFUSED)
def test_a_conversation_is_rendered_as_a_whole_or_refused(template: str, conversation: str) -> None:
    """For each kind of tokenizer: the ids are those of the whole conversation, the prompt of each answer is what inference
    reads, and the answer reads back; else the reason is the one in the table."""
    messages = CONVERSATIONS[conversation]
    tools = tools_of(messages)
    theirs = [{**m, "reasoning_content": m.get("reasoning", "")} for m in messages]
    for kind in KINDS:
        renderer, tokenizer = renderer_of(kind, template), tokenizer_of(kind, template)
        if reason := REFUSED[template].get(conversation):
            with pytest.raises(DataError, match=reason):
                renderer.conversation(messages, trained_of(messages), tools)
            continue
        rendered = renderer.conversation(messages, trained_of(messages), tools)
        whole = tokenizer.apply_chat_template(theirs, tools=tools, return_dict=True)["input_ids"]
        assert rendered.token_ids == whole[: len(rendered.token_ids)], kind
        assert len(rendered.spans) == len(trained_of(messages))
        for index, (start, end) in zip(trained_of(messages), rendered.spans, strict=True):
            prompt = tokenizer.apply_chat_template(
                theirs[:index], tools=tools, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            assert rendered.token_ids[:start] == prompt[:start], kind
            # DeepSeek's generation prompt opens the reasoning, which these answers do not have.
            assert tokenizer.decode(prompt[start:]).strip() in ("", "<think>")
            assert rendered.token_ids[end - 1] in {
                tokenizer.convert_tokens_to_ids(e) for e in ENDS.get(template, ["</s>"])
            }
            said = tokenizer.decode(rendered.token_ids[start : end - 1])
            assert messages[index]["content"] in said
            assert said.count('"name": "add"') == len(messages[index].get("tool_calls", ()))
        assert renderer.counts.twins == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_leaves_reasoning_out_is_replaced_by_its_training_form(kind: str) -> None:
    """Of reasoning in the text, and of reasoning that a later question takes away; the form is counted by name."""
    thought = [ASKED, answer("<think>\n2 and 3\n</think>\n\n5")]
    later = [ASKED, answer("5", reasoning="2 and 3"), user("And 3+3?"), answer("6", reasoning="3 and 3")]
    for template, messages, opening in (("deepseek_r1_distill", thought, ""), ("qwen3", later, "<think>\n")):
        renderer = TextRenderer.of(chat_of(kind, template))
        said = spoken(renderer, tokenizer_of(kind, template), messages)
        assert said[0].startswith(f"{opening}2 and 3\n</think>\n\n5")
        assert renderer.counts.twins == {f"{template}_training": 1}


def custom(template: str, kind: str = "bytes") -> tuple[TextRenderer, Any]:
    """A tokenizer of ChatML with another template."""
    chat: TransformersChat = chat_of(kind, "chatml").with_template(template)
    return TextRenderer.of(chat), chat.tokenizer


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MARKED = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + GENERATE
)


def test_spans_are_those_of_the_templates_own_marks() -> None:
    """Marks around the answer and its end are the spans; marks without the end token, or around a part, are refused."""
    renderer, tokenizer = custom(MARKED)
    messages = CONVERSATIONS["two turns"]
    rendered = renderer.conversation(messages, [1, 3], None)
    marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    spans = [n for start, end in rendered.spans for n in range(start, end)]
    assert spans == [n for n, mark in enumerate(marked["assistant_masks"]) if mark]
    for marks in (
        "{{ m.content }}{% endgeneration %}<|im_end|>",
        "{{ m.content[:2] }}{% endgeneration %}{{ m.content[2:] }}<|im_end|>",
    ):
        renderer, _ = custom(MARKED.replace("{{ m.content }}<|im_end|>{% endgeneration %}", marks, 1))
        with pytest.raises(UnprovenError, match="generation marks are not those of the whole answer"):
            renderer.conversation(messages, [1, 3], None)


def test_a_prompt_that_inference_does_not_read_is_refused_with_its_position() -> None:
    """A template that writes the last answer's question in another way than the generation prompt's."""
    template = HEAD + "{{ m.content }}{% if not loop.last %} (earlier){% endif %}<|im_end|>\n{% endfor %}" + GENERATE
    renderer, _ = custom(template)
    with pytest.raises(UnprovenError, match=r"not those that inference reads: message 1, from token \d+: ' \(earl"):
        renderer.conversation(CONVERSATIONS["Unicode"], [1], None)


def merging(rstrip: bool) -> tuple[TextRenderer, Any]:
    """A tokenizer with a token across the end of Mistral's prompt: of ``[/INST]`` and an answer, or with the space alone."""
    import copy

    from tokenizers import AddedToken

    tokenizer = copy.deepcopy(tokenizer_of("bytes", "mistral"))
    across = (
        AddedToken("[/INST]", rstrip=True, normalized=False) if rstrip else AddedToken("[/INST] The", normalized=False)
    )
    tokenizer.add_tokens([across])
    chat = TransformersChat(
        tokenizer, served_template=None, eos_ids=[tokenizer.eos_token_id], tool_parser="none", keep_reasoning=False
    )  # fmt: skip
    return TextRenderer.of(chat), tokenizer


def test_a_token_across_the_border_is_refused_but_for_white_space_of_the_template() -> None:
    """White space that the template writes before each answer belongs to the prompt's last token; an answer does not."""
    renderer, _ = merging(rstrip=False)
    with pytest.raises(UnprovenError, match="a token crosses the border between prompt and answer: message 1"):
        renderer.conversation(CONVERSATIONS["two turns"], [1, 3], None)
    renderer, tokenizer = merging(rstrip=True)
    assert spoken(renderer, tokenizer, CONVERSATIONS["two turns"]) == ["The answer is 5.</s>", "6</s>"]


def test_text_that_the_tokenizer_does_not_keep_is_refused() -> None:
    renderer = renderer_of("prepend", "chatml")
    with pytest.raises(UnprovenError, match="the tokenizer does not keep the text: message 1"):
        renderer.conversation([ASKED, answer("∮ of nothing known")], [1], None)


def test_only_the_turn_ends_the_span(  # a template may write its end token behind the whole conversation
) -> None:
    """What follows the end of turn is not trained: a line break, or a further end of text."""
    template = (
        HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}" + GENERATE.replace("{% endif %}", "{% else %}</s>{% endif %}")
    )
    renderer, tokenizer = custom(template)
    assert spoken(renderer, tokenizer, CONVERSATIONS["two turns"]) == ["The answer is 5.<|im_end|>", "6<|im_end|>"]


@pytest.mark.parametrize("system", ["", "{% if loop.first %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"])
def test_a_token_that_opens_the_next_message_ends_no_answer(system: str) -> None:
    """A template that writes its end token behind an answer only where it is the last one."""
    body = "{{ m.content }}{% if loop.last or m.role != 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
    renderer, tokenizer = custom(HEAD.replace("%}<", f"%}}{system}<", 1) + body + GENERATE)
    assert renderer.facts["end_of_turn_ids"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert spoken(renderer, tokenizer, CONVERSATIONS["two turns"][:2]) == ["The answer is 5.<|im_end|>"]
    with pytest.raises(UnprovenError, match="no end-of-turn token after an answer: message 1"):
        renderer.conversation(CONVERSATIONS["two turns"], [1, 3], None)


def test_an_answer_that_was_cut_has_no_end_token() -> None:
    renderer, tokenizer = renderer_of("bytes", "chatml"), tokenizer_of("bytes", "chatml")
    assert spoken(renderer, tokenizer, CONVERSATIONS["two turns"], cut=True) == ["The answer is 5.<|im_end|>", "6"]


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    """Empty text and null say that a call has none."""
    renderer, tokenizer = renderer_of("bytes", "qwen2_5"), tokenizer_of("bytes", "qwen2_5")
    made = {**call(2), "function": {"name": "add", "arguments": arguments}}
    said = spoken(renderer, tokenizer, [ASKED, answer("", tool_calls=[made]), result(2), answer("5")])
    assert said[0] == '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    "arguments", ['{"x": 2, "y"', "[2, 3]", [2, 3], '"{}"', 5, "none", '{"x": NaN}', '{"x": [-Infinity]}']
)
def test_arguments_that_are_no_object_refuse_the_row(arguments: Any) -> None:
    """A call whose arguments are no JSON, be it for a NaN in them, refuses its row by name."""
    made = {**call(2), "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(DataError, match="the arguments of a call are not a JSON object: add: got") as refused:
        renderer_of("bytes", "qwen2_5").conversation([ASKED, answer("", tool_calls=[made])], [1], [TOOL])
    assert refused.value.reason == "the arguments of a call are not a JSON object"


def test_a_plain_prompt_that_begins_with_the_first_token_has_it_once(tmp_path: Path) -> None:
    """Whether a prompt's text has the beginning-of-sequence token or the tokenizer puts it before, it is there once."""
    tokenizer = copy.deepcopy(tokenizer_of("bytes", "alpaca"))
    tokenizer.chat_template = None
    first = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", first)]
    )
    tokenizer.save_pretrained(tmp_path)
    renderer = TextRenderer.load(str(tmp_path))
    with_it, without = (renderer.conversation([user(t), answer(" 5")], [1], None) for t in ("<s>2+3?", "2+3?"))
    assert with_it == without
    assert without.token_ids.count(first) == 1
    assert without.token_ids[0] == first


def test_a_tokenizer_that_is_not_fast_is_refused() -> None:
    """Where a token is in the text is not known without offsets."""

    with pytest.raises(UsageError, match="does not say where each token is in the text"):
        TextRenderer(object(), chat_of("bytes", "chatml"), {}, plain=False, name="slow")


def test_templates_are_as_they_are_published() -> None:
    """TRL's are those of the installed version, so that a change of theirs shows here."""
    assert "System role not supported" in template_of("gemma")
    assert "<think>" in template_of("deepseek_r1_distill")
