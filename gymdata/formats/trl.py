"""TRL's data sets, conversational and of plain text: language modelling, prompt and completion, preferences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gymdata.errors import DataError
from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.text.export import TextFormat, line, preference_parts, tools_field
from gymdata.formats.text.rows import (
    BESIDE,
    answer,
    answered_row,
    as_text,
    column,
    conversation,
    ends_with_answer,
    first_row,
    in_context,
    instruction,
    pair_row,
    rollout_row,
    spoken,
)
from gymdata.formats.text.words import LABELS, MARKS, SCORES, score
from gymdata.rollouts.column_names import ANSWERS, PROMPTS
from gymdata.rollouts.messages import JsonObject, Message
from gymdata.store.lines import name_non_finite

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export

UNLABELLED = "rollouts without a label (left out: no reward, or one of exactly 0.5)"
ABOVE_1 = "rewards above 1, labelled as all others by 0.5 (train-kto labels them by the mean of their task's)"
_PROMPTS = ("prompt", *PROMPTS)
_ANSWERS = ("completion", "response")
#: Columns of an answer that may be a task's reference: it is trained only where that is asked for.
_REFERENCES = ("answer", *(name for name in ANSWERS if name not in _ANSWERS))
#: Columns of text beside a question and its answer that are part of neither.
_APART = {
    *("id", "task_id", *BESIDE, *SCORES, *LABELS, *MARKS),
    *("level", "subject", "source", "category", "split", "tools"),
}
#: Columns of pairs that are not text alone, and of Step-DPO, whose sides continue what they begin with.
_OTHERS = frozenset({"chosen_ids", "initial_reason_steps"})
#: Columns of ms-swift for the rejected side of ``messages``: the answer alone, or a conversation.
_OF_SWIFT = ("rejected_response", "rejected_messages")
#: Columns for the number of a side.
_RATINGS = ("score_{}", "{}_score", "rating_{}", "{}_rating", "{}-rating", "{}_avg_rating", "reward_{}", "{}_reward")


def unclear(row: JsonObject, question: str, reply: str) -> list[str]:
    """The columns of text of a row of a question and its answer that may belong to either, as a context."""
    read = _APART | {question, reply} | ({"input"} if question == "instruction" else set())
    return [name for name, cell in row.items() if isinstance(cell, (str, list, dict)) and name not in read]


@FORMATS.register("trl-messages")
class TrlMessages(TextFormat):
    """Conversational language modelling, for SFT: ``messages`` (and ``tools``), or a list of messages alone."""

    content = "chat messages with answers"
    holds_text = general = True

    def recognise(self, value: Any) -> bool:
        if _is_conversation(value) or (isinstance(value, list) and value and _is_conversation(value[0])):
            return True
        row = first_row(value)
        return ends_with_answer(row.get("messages")) and {"chosen", *_OF_SWIFT}.isdisjoint(row)

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        for place, item in super().items([value] if _is_conversation(value) else value):
            yield place, {"messages": item} if _is_conversation(item) else item

    def row(self, item: Any, importing: Importing) -> TableRow:
        messages = in_context(item, conversation(item["messages"], "messages"))
        return rollout_row(item, [], messages, importing, texts=BESIDE)

    def fields(self, row: TableRow, prompt: list[JsonObject], completion: list[JsonObject]) -> JsonObject:  # noqa: ARG002 - what an override reads
        return {"messages": prompt + completion}


@FORMATS.register("openai")
class OpenAI(TrlMessages):
    """OpenAI's fine-tuning rows: arguments of calls are text, no reasoning; a message of ``weight`` 0 is not trained."""

    for_openai = True

    def recognise(self, value: Any) -> bool:  # noqa: ARG002 - its rows look like TRL's
        """Rows of chat messages are ``trl-messages``, which are read in the same way."""
        return False


@FORMATS.register("trl-prompt-completion")
class TrlPromptCompletion(TextFormat):
    """``prompt`` (or ``question``, ``problem``, ``query``, ``input``) up to the first assistant message, ``completion`` (or
    ``response``) from it on (and ``tools``). For `import` and training, ``answer``, ``solution``, ``target``, ``output`` and
    other names of task files are completions, too. HelpSteer's attributes are named rewards."""

    content = "prompts with completions"
    holds_text = holds_plain_text = general = True

    def recognise_row(self, row: JsonObject) -> bool:
        texts = [any(isinstance(as_text(row.get(n)), (str, list)) for n in names) for names in (_PROMPTS, _ANSWERS)]
        return all(texts) and "rejected" not in row

    def answers(self, row: JsonObject, file: str) -> bool:
        """Whether a row has a question and an answer, also of ``_REFERENCES``. Raises DataError for unclear columns."""
        cells = [next((n for n in names if row.get(n) not in (None, "")), "") for names in (_PROMPTS, _REFERENCES)]
        if not all(isinstance(as_text(row.get(name)), (str, list)) for name in cells):
            return False
        if ambiguous := unclear(row, *cells):
            raise DataError(
                f"{file}: {', '.join(ambiguous)}: may be part of the question ({cells[0]}) or its answer ({cells[1]})",
                hint=f"name both: --map prompt={cells[0]} --map answer={cells[1]}",
            )
        return True

    def row(self, item: Any, importing: Importing) -> TableRow:
        prompt_column, name = column(item, *_PROMPTS), column(item, *_ANSWERS, *_REFERENCES)
        if name in _REFERENCES and (ambiguous := unclear(item, prompt_column, name)):
            raise BadItem("S103", f"{', '.join(ambiguous)}: may be part of the question or its answer")
        return answered_row(item, (prompt_column,), (name,), importing)

    def fields(self, row: TableRow, prompt: list[JsonObject], completion: list[JsonObject]) -> JsonObject:  # noqa: ARG002 - what an override reads
        return {"prompt": prompt, "completion": completion}


@FORMATS.register("trl-kto")
class TrlKto(TrlPromptCompletion):
    """``prompt`` and ``completion``, with ``label`` true for a reward above 0.5 and false for one below (`train-kto
    --threshold 0.5`). The rows are the unpaired preferences of ``docs/source/dataset_formats.md`` in huggingface/trl; pairs
    are read by its KTOTrainer as ``trl-preference``."""

    holds_reward = True

    def recognise(self, value: Any) -> bool:  # noqa: ARG002 - its rows look like trl-prompt-completion
        """Rows with a label are ``trl-prompt-completion``, whose label becomes the reward 1 or 0."""
        return False

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[bytes]:
        yield from super().convert((_labelled(batch, export.lost) for batch in batches), export)

    def fields(self, row: TableRow, prompt: list[JsonObject], completion: list[JsonObject]) -> JsonObject:
        return super().fields(row, prompt, completion) | {"label": row["label"]}


def _labelled(batch: pa.RecordBatch, lost: Counter[str]) -> pa.RecordBatch:
    """The rows that have a label, with it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from gymdata.scores.chosen import DESIRABLE, labels

    rows, desirable = labels(pa.Table.from_batches([batch]), DESIRABLE)
    lost[UNLABELLED] += batch.num_rows - len(rows)
    lost[ABOVE_1] += pc.sum(pc.greater(batch["reward"], 1.0)).as_py() or 0
    return batch.take(pa.array(rows)).append_column("label", pa.array(desirable))


@FORMATS.register("trl-preference")
class TrlPreference(TextFormat):
    """``prompt``, ``chosen`` and ``rejected`` of a pair (and ``tools``), with its margin. Also read: both sides with the
    prompt in them, HH-RLHF's texts, UltraFeedback's scores, and preferences of LLaMA-Factory and ms-swift."""

    table = "pairs"
    columns = None
    content = "preference pairs"
    holds_text = holds_plain_text = True
    carries = ("margins",)

    def recognise_row(self, row: JsonObject) -> bool:
        if any(name in row for name in _OF_SWIFT):
            return ends_with_answer(row.get("messages"))
        sides = [row.get(name) for name in ("chosen", "rejected")]
        return all(isinstance(side, (str, list, dict)) for side in sides) and _OTHERS.isdisjoint(row)

    def row(self, item: Any, importing: Importing) -> TableRow:
        prompt, *sides = prompt_and_sides(item)
        better, worse = (_rating(item, side) for side in ("chosen", "rejected"))
        margin = score(item.get("margin"), "margin")
        scored = math.nan if better is None or worse is None else better - worse
        margin = scored if margin is None or scored < 0 else margin
        return pair_row(item, prompt, (sides[0], sides[1]), importing, margin)

    def write(self, row: TableRow, lost: Counter[str]) -> bytes:
        sides = dict(zip(("prompt", "chosen", "rejected"), preference_parts(row, lost), strict=True))
        # TRL expects a number, so an imported pair without a margin has no such key.
        margin = {} if math.isnan(row["margin"]) else {"margin": name_non_finite(row["margin"])}
        return line(sides | tools_field(row) | margin)


def _rating(item: JsonObject, side: str) -> float | None:
    """The number of a side. Raises BadItem for a column of one that says something else."""
    names = [name.format(side) for name in _RATINGS]
    return next((number for n in names if (number := score(item.get(n), n)) is not None), None)


def _is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages with roles, with one of the assistant."""
    messages = value if isinstance(value, list) else []
    roles = [message.get("role") for message in messages if isinstance(message, dict) and "content" in message]
    return "assistant" in roles and len(roles) == len(messages)


def _states(messages: Sequence[Message], prompt: str) -> bool:
    """Whether a prompt is a message, a part of one, or a conversation with the last one, white space aside."""
    asked, *texts = (" ".join(str(text or "").split()) for text in (prompt, *(m.get("content") for m in messages)))
    return any(asked in text for text in texts) or texts[-1] in asked


def prompt_and_sides(item: JsonObject) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """The messages of the prompt and of the two answers. Where both sides are conversations that begin alike, what they
    share before an answer is the prompt, as in TRL's ``extract_prompt``."""
    if name := next((name for name in _OF_SWIFT if item.get(name) is not None), None):
        rejected = item[name]
        if isinstance(rejected, (str, dict)) or ends_with_answer(rejected[:1]):
            messages = in_context(item, conversation(item["messages"], "messages"))
            return messages[:-1], messages[-1:], answer(rejected, name)
        item = item | {"chosen": item["messages"], "rejected": rejected}
    sides = {name: item[column(item, name)] for name in ("chosen", "rejected")}
    texts = [spoken(side) for side in sides.values()]
    chats = texts if all(texts) else [conversation(s, name) if isinstance(s, list) else [] for name, s in sides.items()]
    if all(side and side[0]["role"] != "assistant" for side in chats):
        n = next((k for k, (a, b) in enumerate(zip(*chats, strict=False)) if a != b), min(map(len, chats)))
        while n and (n == min(map(len, chats)) or chats[0][n]["role"] != "assistant"):
            n -= 1
        if not n or chats[1][n]["role"] != "assistant":
            raise BadItem("S102", "chosen and rejected: got two conversations that differ before an answer")
        raw_prompt = item.get("prompt")
        if isinstance(raw_prompt, list) and conversation(raw_prompt, "prompt") != chats[0][:n]:
            raise BadItem("S102", "prompt: got other messages than those with which chosen and rejected begin")
        if isinstance(raw_prompt, str) and not _states(chats[0][:n], raw_prompt):
            raise BadItem("S102", "prompt: got another text than the messages with which chosen and rejected begin")
        return in_context(item, chats[0][:n]), chats[0][n:], chats[1][n:]
    if "instruction" in item:
        prompt = conversation(instruction(item), "instruction")
    else:
        prompt_column = column(item, *_PROMPTS, "conversations", "messages")
        prompt = conversation(item[prompt_column], prompt_column)
    return in_context(item, prompt), answer(sides["chosen"], "chosen"), answer(sides["rejected"], "rejected")
