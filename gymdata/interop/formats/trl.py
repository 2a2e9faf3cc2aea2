"""TRL's data sets, conversational and of plain text: language modelling, prompt and completion, preferences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS
from gymdata.interop.formats._text import TextFormat

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.interop.chat_text import Lines
    from gymdata.interop.importing import Columns, Importing
    from gymdata.interop.rows import Message

#: Columns of a number for the answer of a row, which are named rewards; the first that is there is the reward, too.
_SCORES = ("reward", "score", "label")
_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
_ANSWERS = ("completion", "response")
#: How texts of HH-RLHF mark who speaks.
_SPEAKERS = {"\n\nHuman:": "user", "\n\nAssistant:": "assistant"}


@FORMATS.register("trl-messages")
class TrlMessages(TextFormat):
    """Conversational language modelling, for SFT: ``messages`` (and ``tools``)."""

    content = "chat messages with answers"
    item = "a conversation"
    marks = (b'"messages"',)
    holds_text = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import ends_with_answer, first_row

        row = first_row(value)
        return ends_with_answer(row.get("messages")) and "chosen" not in row

    def row(self, item: Any, importing: Importing) -> Columns:
        from gymdata.interop.text_rows import conversation, rollout_row

        return rollout_row(item, [], conversation(item["messages"], "messages"), importing)

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> Lines:
        from gymdata.interop.text_export import TRL, conversations

        return conversations(b'{"messages":[', TRL, batch, lost)


@FORMATS.register("trl-prompt-completion")
class TrlPromptCompletion(TextFormat):
    """``prompt`` up to the first assistant message, ``completion`` (or ``response``) from it on (and ``tools``). A
    ``reward``, ``score`` or ``label`` of the answer is its reward, HelpSteer's attributes are named rewards."""

    content = "prompts with completions"
    item = "a row with a completion"
    marks = (b'"completion"', b'"response"')
    holds_text = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        answers = [row[name] for name in _ANSWERS if name in row]
        return isinstance(row.get("prompt"), (str, list)) and any(isinstance(a, (str, list)) for a in answers)

    def row(self, item: Any, importing: Importing) -> Columns:
        from gymdata.interop.text_rows import answer, conversation, number_of, rollout_row, with_system

        name = next(name for name in _ANSWERS if name in item)
        prompt = with_system(item.get("system"), conversation(item["prompt"], "prompt"))
        numbers = {column: number_of(item, column) for column in (*_SCORES, *_ATTRIBUTES)}
        rewards = {column: value for column, value in numbers.items() if value is not None}
        reward = number_of(item, *_SCORES)
        return rollout_row(
            item, prompt, answer(item[name], name), importing, reward=reward, rewards=rewards, texts=(name, "system")
        )

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> Lines:
        from gymdata.interop.text_export import TRL, conversations

        return conversations(b'{"prompt":[', TRL, batch, lost, split=True)


@FORMATS.register("trl-preference")
class TrlPreference(TextFormat):
    """``prompt``, ``chosen`` and ``rejected`` of a pair (and ``tools``), with its margin. Also read: both sides with the
    prompt in them, HH-RLHF's texts, UltraFeedback's scores, and preferences of LLaMA-Factory."""

    table = "pairs"
    columns = None
    content = "preference pairs"
    item = "a preference pair"
    marks = (b'"rejected"',)
    holds_text = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        sides = [row.get("chosen"), row.get("rejected")]
        return all(isinstance(side, (str, list, dict)) for side in sides) and "chosen_ids" not in row

    def row(self, item: Any, importing: Importing) -> Columns:
        from gymdata.interop.text_rows import number_of, pair_row

        prompt, *sides = _prompt_and_sides(item)
        scores = [number_of(item, f"score_{side}", f"{side}_score") for side in ("chosen", "rejected")]
        margin = number_of(item, "margin")
        if margin is None:
            margin = math.nan if None in scores else scores[0] - scores[1]  # type: ignore[operator]  # none is None
        return pair_row(item, prompt, (sides[0], sides[1]), importing, margin)

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> Lines:
        from gymdata.interop.text_export import trl_preference

        return trl_preference(batch, lost)


def _prompt_and_sides(item: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """The messages of the prompt and of the two answers. Where both sides are conversations that begin alike, what they
    share before an answer is the prompt, as in TRL's ``extract_prompt``."""
    from gymdata.interop.formats.alpaca import instruction
    from gymdata.interop.importing import BadItem
    from gymdata.interop.text_rows import answer, conversation, with_system

    chosen, rejected = item["chosen"], item["rejected"]
    spoken = [_speakers(side) for side in (chosen, rejected)]
    if all(spoken):
        chosen, rejected = spoken
    given = next((item[name] for name in ("prompt", "conversations", "messages") if item.get(name)), None)
    sides = [side for side in (chosen, rejected) if isinstance(side, list) and side and isinstance(side[0], dict)]
    begins = [side[0].get("role", side[0].get("from")) for side in sides]
    if len(begins) == 2 and not {"assistant", "gpt"} & set(begins):
        whole = [conversation(side, name) for side, name in ((chosen, "chosen"), (rejected, "rejected"))]
        n = next((k for k, (a, b) in enumerate(zip(*whole, strict=False)) if a != b), min(map(len, whole)))
        while n and (n == min(map(len, whole)) or whole[0][n]["role"] != "assistant"):
            n -= 1
        if not n or whole[1][n]["role"] != "assistant":
            raise BadItem("S102", "chosen and rejected: got two conversations that differ before an answer")
        return whole[0][:n], whole[0][n:], whole[1][n:]
    if given is None and "instruction" in item:
        given = instruction(item)
    if given is None:
        raise BadItem("S103", "prompt: is missing, and chosen and rejected are no conversations that begin with it")
    prompt = with_system(item.get("system"), conversation(given, "prompt"))
    return prompt, answer(chosen, "chosen"), answer(rejected, "rejected")


def _speakers(text: Any) -> list[dict[str, str]]:
    """The messages of a text of HH-RLHF; none when it is not one."""
    import re

    if not isinstance(text, str) or not text.startswith(tuple(_SPEAKERS)):
        return []
    _, *parts = re.split("(" + "|".join(_SPEAKERS) + ")", text)
    return [
        {"role": _SPEAKERS[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]
