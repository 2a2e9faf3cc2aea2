"""Text as token ids in one way, with its proof: a conversation is rendered once and encoded once, and what cannot be proven
is refused by name.

Invariants, for each trained turn: the ids before it are those that inference reads of the messages before it; it ends with a
token that the policy stops at; and it reads back as the content, the reasoning and the calls that its message states, white
space at the ends aside. A row that fails is tried with the training form of its template that TRL ships. Rendered ids have
no log-probabilities (NaN).
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from gymdata.chat._parsers import choose_parser
from gymdata.chat.read_back import Stated, what_is_missing
from gymdata.chat.template import NoTemplateError, TransformersChat, training_twin
from gymdata.errors import DataError, UsageError
from gymdata.models._transformers import load_tokenizer
from gymdata.models.model_identity import tokenizer_facts, tokenizer_folder
from gymdata.rollouts.messages import Message, PairRow, RolloutRow, Tools, chat_message, loads, messages_of, object_of
from gymdata.rollouts.turns import Call, TurnEncoder
from gymdata.store.paths import Facts

#: A generation prompt that opens the reasoning for the model, or closes it for an answer without any.
_OPENED = re.compile(r"<think>\s*(</think>\s*)?$")
_NO_END = "no end-of-turn token after an answer"
_T = TypeVar("_T")


class UnprovenError(DataError):
    """Text whose ids cannot be proven. Rows are counted by ``reason``, which is without ``details``."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason}: {details}" if details else reason)
        self.reason = reason


@dataclass(slots=True)
class Rendered:
    """The ids of a conversation. ``spans``: (start, end) of each trained turn in them; ``cut``: a limit ended the last one;
    ``unopened``: trained turns without the reasoning that the generation prompt opens."""

    token_ids: list[int]
    spans: list[tuple[int, int]]
    cut: bool
    unopened: int = 0

    def calls(self) -> Iterator[Call]:
        """A model call per trained turn."""
        ids = np.array(self.token_ids, np.int32)
        for start, end in self.spans:
            unknown = np.full(end - start, np.nan, np.float32)
            reason = "length" if self.cut and end == self.spans[-1][1] else "stop"
            yield Call(ids[:start], ids[start:end], unknown, reason, rendered=True)


@dataclass(slots=True)
class RenderCounts:
    """What was rendered. ``refused``: rows by reason; ``twins``: rows by the training template that was taken in place of
    the model's; ``control_tokens``: rows by the control token that a text of theirs holds; ``unopened``: answers without the
    reasoning that the generation prompt opens."""

    rendered: int = 0
    unopened: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    twins: Counter[str] = field(default_factory=Counter)
    control_tokens: Counter[str] = field(default_factory=Counter)


class _Template(Protocol):
    """What renders messages: a ``TransformersChat``, or ``_Plain``. ``lead_ids`` come before every text."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def text(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> str: ...

    def generation_marks(self, messages: Sequence[Message], tools: Tools) -> list[tuple[int, int]] | None: ...


class _Plain:
    """A prompt with its completion and the end token: what a tokenizer without a chat template is trained on, as in TRL."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        if tokenizer.eos_token is None:
            raise UsageError(
                f"{name}: the tokenizer has no chat template and no end token",
                hint="give a template with --chat-template FILE",
            )
        self.end = str(tokenizer.eos_token)
        self.stop_token_ids = (int(tokenizer.eos_token_id),)

    def text(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> str:
        roles = [m["role"] for m in messages]
        more = tools or any(m.get("tool_calls") or m.get("reasoning") for m in messages)
        if more or roles != (["user"] if generate else ["user", "assistant"]):
            raise UnprovenError("without a chat template only a prompt with its completion can be rendered")
        text = "".join(m["content"] or "" for m in messages)
        return text if generate or text.endswith(self.end) else text + self.end

    def generation_marks(self, messages: Sequence[Message], tools: Tools) -> None:  # noqa: ARG002 - as a chat template
        return None


class TextRenderer:
    """Renders rows of text with the template of a model; ``counts`` has what came of them."""

    def __init__(self, tokenizer: Any, template: _Template, facts: Facts, *, plain: bool, name: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(
                f"{name}: its tokenizer does not say where each token is in the text",
                hint="text is rendered with a fast tokenizer (a folder with tokenizer.json)",
            )
        self._backend: Any = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template, self._tokenizer, self.facts, self.plain = template, tokenizer, facts, plain
        self._lead = self._ids_before_text() if plain else []
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._control = sorted(special | set(tokenizer.all_special_tokens))
        self.counts = RenderCounts()

    @classmethod
    def load(cls, model: str, chat_template: str | Path | None = None) -> TextRenderer:
        """With the tokenizer of a model folder or cached hub name, and its template or another (text or file). Without any a
        prompt is rendered with its completion alone. Raises DataError when there is no tokenizer, UsageError for one that is
        not fast, or that ends nothing."""
        try:
            template = None if chat_template is None else str(chat_template)
            chat = TransformersChat.load(model, chat_template=template, tool_parser="none", keep_reasoning=False)
        except NoTemplateError:
            tokenizer = load_tokenizer(tokenizer_folder(model))
            facts = tokenizer_facts(tokenizer, None)
            return cls(tokenizer, _Plain(tokenizer, model), facts, plain=True, name=model)
        return cls.of(chat)

    @classmethod
    def of(cls, chat: TransformersChat) -> TextRenderer:
        """With the template of ``chat`` as it is."""
        return cls(chat.tokenizer, chat, chat.facts(), plain=False, name=str(chat.tokenizer.name_or_path))

    def rollout(self, row: RolloutRow) -> RolloutRow:
        """A rollouts row without turns, with those of its text. Raises DataError saying why it cannot be rendered."""
        messages = [chat_message(m, f"message {n}") for n, m in enumerate(row["messages"])]
        trained = generated(row)
        if not trained:
            raise UnprovenError("no assistant message that the model wrote")
        cut = row["status"] == "truncated"
        (rendered,) = self._first_proven(lambda t: [self._proven(t, messages, trained, _tools(row), cut=cut)])
        encoder = TurnEncoder()
        for call in rendered.calls():
            encoder.add(call)
        number = {index: turn for turn, index in enumerate(trained)}
        self._count(messages, rendered)
        return {
            **row,
            **encoder.columns(),
            "finish_reason": row["finish_reason"] or encoder.turns[-1]["finish_reason"],
            "messages": [{**m, "turn": number.get(n)} for n, m in enumerate(row["messages"])],
        }

    def pair(self, row: PairRow) -> PairRow:
        """A pairs row without ids, with those of its prompt and both sides. Raises DataError saying why it cannot be
        rendered."""
        prompt = [chat_message(m, f"prompt, message {n}") for n, m in enumerate(row["prompt"])]
        sides: list[tuple[list[Message], list[int]]] = []
        for side in ("chosen", "rejected"):
            answers = [chat_message(m, f"{side}, message {n}") for n, m in enumerate(row[side])]
            trained = [len(prompt) + n for n, m in enumerate(answers) if m["role"] == "assistant"]
            if trained[:1] != [len(prompt)]:
                raise UnprovenError("a side does not begin with a message of the assistant", side)
            sides.append(([*prompt, *answers], trained))
        both = self._first_proven(lambda t: [self._proven(t, m, n, _tools(row), cut=False) for m, n in sides])
        columns: dict[str, Any] = {}
        prompts = []
        for side, rendered in zip(("chosen", "rejected"), both, strict=True):
            (start, _), (_, end) = rendered.spans[0], rendered.spans[-1]
            mask = np.zeros(len(rendered.token_ids), np.int8)
            for a, b in rendered.spans:
                mask[a:b] = 1
            prompts.append(rendered.token_ids[:start])
            columns[f"{side}_ids"] = np.array(rendered.token_ids[start:end], np.int32)
            columns[f"{side}_mask"] = mask[start:end]
            columns[f"{side}_logprobs"] = np.full(end - start, np.nan, np.float32)
        if prompts[0] != prompts[1]:
            raise UnprovenError("the chat template writes the prompt in two ways, depending on the answer")
        self._count([m for messages, _ in sides for m in messages], *both)
        return {**row, **columns, "prompt_ids": np.array(prompts[0], np.int32), "rendered": True}

    def conversation(
        self, messages: Sequence[Message], trained: Sequence[int], tools: Tools, *, cut: bool = False
    ) -> Rendered:
        """The ids of ``messages`` up to the last of ``trained`` (indices of assistant messages, rising), by the template or
        by its training form. ``cut``: a limit ended the last one, so it has no end token. Raises DataError for what the
        template refuses, UnprovenError for what cannot be proven."""
        (rendered,) = self._first_proven(lambda t: [self._proven(t, messages, trained, tools, cut=cut)])
        return rendered

    # --- the proof --------------------------------------------------------------------------------------------------

    def _first_proven(self, render: Callable[[_Template], list[_T]]) -> list[_T]:
        """``render`` with the template, else with its training form."""
        try:
            return render(self._template)
        except DataError as refused:
            if self._twin is None:
                raise
            name, twin = self._twin
            try:
                rendered = render(twin)
            except DataError:
                raise refused from None
            self.counts.twins[name] += 1
            return rendered

    @functools.cached_property
    def _twin(self) -> tuple[str, TransformersChat] | None:
        twin = None if self.plain else training_twin(self._tokenizer.chat_template)
        return None if twin is None else (twin[0], self._template.with_template(twin[1]))  # type: ignore[attr-defined]  # not plain

    @functools.cache  # noqa: B019 - lives as long as the command
    def _parser(self, template: Any) -> Any:
        """The parser of the template's answers, which takes a second to find."""
        return choose_parser(template, "auto")

    def _proven(
        self, template: _Template, messages: Sequence[Message], trained: Sequence[int], tools: Tools, *, cut: bool
    ) -> Rendered:
        messages = messages[: trained[-1] + 1]
        text = template.text(messages, tools, generate=False)
        marks = template.generation_marks(messages, tools)
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = self._led(encoding.ids)
        offsets = [(0, 0)] * (len(ids) - len(encoding.ids)) + list(encoding.offsets)
        rendered = Rendered(ids, [], cut)
        begins = [self._begin(template, messages, index, tools, text, offsets, rendered) for index in trained]
        for n, index in enumerate(trained):
            last = index == trained[-1]
            limit = len(ids) if last else begins[n + 1][0]
            start, prompt = begins[n]
            end = self._end(template, messages, index, tools, (ids, text, offsets), (start, limit), prompt)
            if end is not None:
                _refuse_unmarked(index, marks, text, len(prompt), offsets[end - 1][1])
            elif not (cut and last):
                names = ", ".join(self._backend.id_to_token(i) for i in template.stop_token_ids)
                raise UnprovenError(_NO_END, f"message {index}, expected one of {names}")
            rendered.spans.append((start, limit if end is None else end - (cut and last)))
        rendered.token_ids = ids[: rendered.spans[-1][1]]
        return rendered

    def _begin(
        self,
        template: _Template,
        messages: Sequence[Message],
        index: int,
        tools: Tools,
        text: str,
        offsets: Sequence[tuple[int, int]],
        rendered: Rendered,
    ) -> tuple[int, str]:
        """(first token of message ``index``, the text before it). Raises UnprovenError when the ids before are not those of
        the prompt that inference reads."""
        prompt = template.text(messages[:index], tools, generate=True)
        if not text.startswith(prompt):
            # An answer without reasoning, of a model whose prompt opens it.
            opened = _OPENED.search(prompt)
            if opened is None or not text.startswith(prompt[: opened.start()]):
                self._refuse_prompt(index, self._encode(prompt), rendered.token_ids)
            prompt = prompt[: opened.start()]
            rendered.unopened += 1
        border = len(prompt)
        start = max(bisect_left(offsets, (border,)), len(self._lead))
        crossing = max((end for _, end in offsets[max(0, start - 8) : start]), default=0)
        if crossing > border:
            after, content = text[border:], messages[index].get("content") or ""
            blank = after[: len(after) - len(after.lstrip())]
            own = content[: len(content) - len(content.lstrip())]
            written = len(blank) - (len(own) if blank.endswith(own) else 0)
            if crossing > border + written:
                window = text[max(0, border - 12) : border], text[border : border + 12]
                raise UnprovenError(
                    "a token crosses the border between prompt and answer",
                    f"message {index}, between {window[0]!r} and {window[1]!r}",
                )
        if (read := self._encode(prompt)) != rendered.token_ids[:start]:
            self._refuse_prompt(index, read, rendered.token_ids[:start])
        return start, prompt

    def _end(
        self,
        template: _Template,
        messages: Sequence[Message],
        index: int,
        tools: Tools,
        encoded: tuple[list[int], str, Sequence[tuple[int, int]]],
        region: tuple[int, int],
        prompt: str,
    ) -> int | None:
        """The end of a trained turn: behind the first end-of-turn token up to which it reads back; None when there is no
        such token. Raises UnprovenError when it does not read back."""
        (ids, text, offsets), (start, limit) = encoded, region
        stops = frozenset(template.stop_token_ids)
        message = messages[index]
        if isinstance(template, _Plain):
            message = {**message, "content": (message["content"] or "").removesuffix(template.end)}
        stated = Stated.of(message)
        opened = prompt.rstrip().endswith("<think>")
        normal = self._backend.normalizer.normalize_str if self._backend.normalizer is not None else str
        missing: str | None = None
        for end in (k for k in range(start, limit) if ids[k] in stops):
            span = self._backend.decode(ids[start:end], skip_special_tokens=False)
            fault = what_is_missing(stated, span, normal, opened=opened)
            if fault is not None and not self.plain and (stated.reasoning or stated.calls):
                read = Stated.of(self._parser(template).read(ids[start : end + 1], tools))  # type: ignore[arg-type]  # by identity
                fault = None if read.equals(stated, normal) else fault
            if fault is None:
                return end + 1
            if missing is None:
                lost = what_is_missing(stated, text[len(prompt) : offsets[end][0]], normal, opened=opened) is None
                missing = "the tokenizer does not keep the text" if lost else f"the chat template leaves out {fault}"
                if fault == "content" and stated.content and span.lstrip().startswith(stated.content):
                    missing = _NO_END  # it is all there, and the text of the next message behind it
        if missing is not None:
            raise UnprovenError(missing, f"message {index}")
        return None

    def _refuse_prompt(self, index: int, read: Sequence[int], ids: Sequence[int]) -> NoReturn:
        position = next(
            (n for n, (a, b) in enumerate(zip(read, ids, strict=False)) if a != b), min(len(read), len(ids))
        )
        was, now = (
            self._backend.decode(list(side[position : position + 6]), skip_special_tokens=False) for side in (read, ids)
        )
        raise UnprovenError(
            "the ids before an answer are not those that inference reads",
            f"message {index}, from token {position}: {now!r} instead of {was!r}",
        )

    def _encode(self, text: str) -> list[int]:
        return self._led(self._backend.encode(text, add_special_tokens=False).ids)

    def _led(self, ids: Sequence[int]) -> list[int]:
        """With the ids that come before every text, once: a text may begin with them itself."""
        return list(ids) if list(ids[: len(self._lead)]) == self._lead else [*self._lead, *ids]

    def _ids_before_text(self) -> list[int]:
        """The special tokens that the tokenizer puts before a plain text, as a server does with a prompt."""
        bare, full = (list(self._backend.encode("a", add_special_tokens=added).ids) for added in (False, True))
        return next((full[:n] for n in range(len(full)) if full[n : n + len(bare)] == bare), [])

    # --- counting ---------------------------------------------------------------------------------------------------

    def _count(self, messages: Sequence[Message], *rendered: Rendered) -> None:
        counts = self.counts
        counts.rendered += 1
        counts.unopened += sum(conversation.unopened for conversation in rendered)
        texts = [str(m.get(name)) for m in messages for name in ("content", "reasoning", "tool_calls") if m.get(name)]
        counts.control_tokens.update(token for token in self._control if any(token in text for text in texts))


def _refuse_unmarked(index: int, marks: Sequence[tuple[int, int]] | None, text: str, border: int, end: int) -> None:
    """Raises UnprovenError when the template marks other text as generated than the turn has, from ``border`` to ``end``."""
    if marks is None:
        return
    inside = [(a, b) for a, b in marks if a < end and b > border]
    if not inside or text[border : inside[0][0]].strip() or text[inside[-1][1] : end].strip():
        raise UnprovenError(
            "the template's generation marks are not those of the whole answer with its end-of-turn token",
            f"message {index}",
        )


def _tools(row: RolloutRow | PairRow) -> Tools:
    tools = loads(row.get("tools"))
    return tools if isinstance(tools, list) and tools else None


def generated(row: RolloutRow) -> list[int]:
    """Indices of the messages that the model wrote: the assistant's after the task's own messages, or all of them where the
    task has the answer, too. Never those that their file gives the weight 0."""
    messages = row["messages"]
    weights = [object_of(loads(m.get("extra"))).get("weight") if m.get("extra") else None for m in messages]
    written = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    task = object_of(loads(row["task"]))
    params = task.get("responses_create_params")
    if isinstance(params, dict):
        task_messages = list(messages_of(params.get("input"), (), {}))
    else:
        named: list[Any] = next((task[key] for key in ("messages", "prompt") if isinstance(task.get(key), list)), [])
        task_messages = [m for m in named if isinstance(m, dict)]
    start = 0
    while start < min(len(task_messages), len(messages)) and _says(task_messages[start]) == _says(messages[start]):
        start += 1
    return [n for n in [n for n in written if n >= start] or written if weights[n] != 0]


def _says(message: Message) -> tuple[Any, Any]:
    return message.get("role"), message.get("content") or ""
