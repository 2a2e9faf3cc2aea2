"""Formats that are only paths: where a row has its prompt, its answers, and what says which answer is better.

A format here is a row of this table: its name, the sentence of its help, and its paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import ODD, BadItem, Importing, TableRow
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
    refuse_empty,
    rollout_row,
)
from gymdata.formats.text.words import finite, named_scores, score
from gymdata.formats.trl import prompt_and_sides
from gymdata.rollouts.column_names import CONVERSATIONS
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.truth import truth


def at(value: Any, path: str) -> Any:
    """What is at a dotted path of keys and indices. Raises LookupError or TypeError."""
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@dataclass(frozen=True)
class Compared:
    """The paths of a row with two answers to one prompt, of which one is preferred. Its columns identify the format.

    The column ``preference`` has a key of ``choices``, whose value is the number of the better answer (None: a tie), or a
    number between two: nearer to the first, the first answer is the better one. Without such a column the ``scores`` of the
    answers decide, and without those the first is the better one. ``margin``: whether that number is the margin; the
    difference of scores is in any case.
    """

    prompt: str
    answers: tuple[str, str]
    preference: str = ""
    choices: Mapping[Any, int | None] | None = None
    between: tuple[float, float] = (-math.inf, math.inf)
    margin: bool = False
    scores: tuple[str, str] | None = None

    @property
    def columns(self) -> set[str]:
        paths = self.prompt, *self.answers, *([self.preference] if self.preference else self.scores or ())
        return {path.partition(".")[0] for path in paths if path}

    def better(self, row: JsonObject) -> tuple[int, float]:
        """(number of the better answer, margin). Raises BadItem for a tie, and for what says neither."""
        name, margin, better = self.preference, math.nan, None if self.preference or self.scores else 0
        if self.choices is not None:
            value = row[name]
            if not isinstance(value, (int, float, str)) or value not in self.choices:
                expected = " or ".join(str(choice) for choice, number in self.choices.items() if number is not None)
                raise BadItem.value(name, value, expected)
            better = self.choices[value]
        elif name:
            number, (least, most) = finite(row, name), self.between
            if not least <= number <= most:
                raise BadItem("S102", f"{name}: got {number}, expected a number from {least} to {most}")
            distance = number - (least + most) / 2
            better = None if distance == 0 else int(distance > 0)
            margin = abs(distance) if self.margin else math.nan
        if self.scores is not None:
            first, second = (finite(row, score_name) for score_name in self.scores)
            if not name:
                better = None if first == second else int(second > first)
            margin = first - second if better == 0 else second - first
        if better is None:
            raise BadItem("S103", "a tie: neither answer is preferred")
        return better, margin


class Comparison(Format):
    """A format of which each row is two answers and a preference. A tie is no pair: the row is left out, by name."""

    table = "pairs"
    holds_text = True
    #: The shapes that its rows have.
    shapes: ClassVar[Sequence[Compared]] = ()

    def recognise_row(self, row: JsonObject) -> bool:
        return any(shape.columns <= row.keys() for shape in self.shapes)

    def texts(self, row: JsonObject, shape: Compared) -> JsonObject:
        """The prompt and both answers, each as text or messages, by their paths."""
        return {path: at(row, path) for path in (shape.prompt, *shape.answers)}

    def row(self, item: Any, importing: Importing) -> TableRow:
        shape = next((shape for shape in self.shapes if shape.columns <= item.keys()), self.shapes[0])
        better, margin = shape.better(item)
        texts = self.texts(item, shape)
        paths = [shape.answers[number] for number in (better, 1 - better)]
        if not shape.prompt:
            prompt, *sides = prompt_and_sides(dict(zip(("chosen", "rejected"), map(texts.get, paths), strict=True)))
        else:
            prompt = conversation(texts[shape.prompt], shape.prompt)
            sides = [answer(texts[path], path) for path in paths]
        return pair_row(item, prompt, (sides[0], sides[1]), importing, margin)


@FORMATS.register("alpaca-farm")
class AlpacaFarm(Comparison):
    """AlpacaFarm's preferences and AlpacaEval's annotations: ``instruction`` (with ``input`` below it), ``output_1``,
    ``output_2``, and ``preference``: below 1.5 the first is the better one, above it the second."""

    content = "preferences of AlpacaFarm"
    shapes = (Compared("instruction", ("output_1", "output_2"), "preference", between=(1, 2)),)

    def texts(self, row: JsonObject, shape: Compared) -> JsonObject:
        return super().texts(row, shape) | {"instruction": instruction(row)}


@FORMATS.register("arena")
class Arena(Comparison):
    """Battles of Chatbot Arena (also of MT-Bench): ``conversation_a``, ``conversation_b`` and ``winner``, or ``prompt``,
    ``response_a``, ``response_b`` as JSON text with ``winner_model_a``. What both conversations share before an answer is
    the prompt. A tie is left out, by name; which models they were is not read."""

    content = "battles of Chatbot Arena"
    winners: ClassVar[Mapping[Any, int | None]] = {"model_a": 0, "model_b": 1, "tie": None, "tie (bothbad)": None}
    flags = ("winner_model_a", "winner_model_b", "winner_tie")
    shapes = (Compared("", ("conversation_a", "conversation_b"), "winner", choices=winners),)

    def recognise_row(self, row: JsonObject) -> bool:
        return super().recognise_row(row) or row.keys() >= {"prompt", "response_a", "response_b", *self.flags[:2]}

    def row(self, item: Any, importing: Importing) -> TableRow:
        if "winner" not in item:
            flags = [name for name in self.flags if truth(item.get(name))]
            item = item | {"winner": flags[0].removeprefix("winner_") if len(flags) == 1 else flags}
        return super().row(item, importing)

    def texts(self, row: JsonObject, shape: Compared) -> JsonObject:
        return {path: self.side(row, path[-1]) for path in shape.answers}

    def side(self, row: JsonObject, side: str) -> Any:
        """The messages of a side."""
        if f"conversation_{side}" in row:
            return _parsed(row[f"conversation_{side}"])
        prompts, answers = _parsed(row["prompt"]), _parsed(row[f"response_{side}"])
        if not isinstance(prompts, list) or not isinstance(answers, list) or len(prompts) != len(answers):
            raise BadItem("S102", f"response_{side}: expected one text for each of the prompts")
        return [
            {"role": role, "content": text}
            for exchange in zip(prompts, answers, strict=True)
            for role, text in zip(("user", "assistant"), exchange, strict=True)
        ]


def _parsed(value: Any) -> Any:
    """A value that may be JSON text."""
    return json.loads(value) if isinstance(value, str) else value


@FORMATS.register("helpsteer-preference")
class HelpSteerPreference(Comparison):
    """HelpSteer2's preferences (``prompt``, ``response_1``, ``response_2``, ``preference_strength``) and HelpSteer3's
    (``context``, ``response1``, ``response2``, ``overall_preference``): the number is the margin. Reasons and the
    preferences of each annotator are not read. HelpSteer's ratings of one answer are ``trl-prompt-completion``."""

    content = "preferences of HelpSteer"
    shapes = (
        Compared("prompt", ("response_1", "response_2"), "preference_strength", between=(-3, 3), margin=True),
        Compared("context", ("response1", "response2"), "overall_preference", between=(-3, 3), margin=True),
    )


@FORMATS.register("judge-bench")
class JudgeBench(Comparison):
    """JudgeBench: ``question``, ``response_A``, ``response_B``, and ``label``, which says ``A>B`` or ``B>A``; ``A=B`` is a
    tie. Which model answered, and its source, are not read."""

    content = "comparisons of JudgeBench"
    shapes = (Compared("question", ("response_A", "response_B"), "label", choices={"A>B": 0, "B>A": 1, "A=B": None}),)


@FORMATS.register("nectar")
class Nectar(Comparison):
    """Nectar: ``prompt`` as HH-RLHF writes it, and ``answers`` with a ``rank``: a pair of the best answer and each worse
    one. A rank is no margin; what is known of two worse answers, and which models they are of, is lost."""

    content = "ranked answers of Nectar"
    shapes = (Compared("prompt", ("chosen", "rejected")),)

    def recognise_row(self, row: JsonObject) -> bool:
        return isinstance(row.get("prompt"), str) and {"answer", "rank"} <= first_row(row.get("answers")).keys()

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        for place, row in super().items(value):
            try:
                pairs: list[Any] = self.pairs(row) if isinstance(row, dict) else [row]
            except (BadItem, *ODD) as error:
                pairs = [BadItem.of(error)]
            yield from ((place, pair) for pair in pairs)

    def pairs(self, row: JsonObject) -> list[JsonObject]:
        """The best answer with each worse one. Raises BadItem where there is none."""
        ranked = [(finite(answered, "rank"), answered["answer"]) for answered in row["answers"]]
        best = min((rank for rank, _ in ranked), default=0.0)
        pairs = [
            {"prompt": row["prompt"], "chosen": better, "rejected": worse}
            for rank, better in ranked
            for lower, worse in ranked
            if lower > rank == best
        ]
        if not pairs:
            raise BadItem("S103", "no two answers of different rank, so none is preferred")
        return pairs


@FORMATS.register("openai-preference")
class OpenAIPreference(Comparison):
    """OpenAI's rows for DPO: ``input`` with messages and tools, ``preferred_output``, ``non_preferred_output``."""

    content = "preference rows of OpenAI"
    shapes = (Compared("input.messages", ("preferred_output", "non_preferred_output")),)

    def row(self, item: Any, importing: Importing) -> TableRow:
        return super().row(item | {"tools": at(item, "input").get("tools")}, importing)


@FORMATS.register("safe-rlhf")
class SafeRlhf(Comparison):
    """PKU-SafeRLHF: ``prompt``, ``response_0``, ``response_1``, and ``better_response_id``, which says what is more helpful.
    Which answer is safer, and its labels of harm, are not read."""

    content = "preferences of PKU-SafeRLHF"
    shapes = (Compared("prompt", ("response_0", "response_1"), "better_response_id", choices={0: 0, 1: 1}),)


@FORMATS.register("shp")
class Shp(Comparison):
    """SHP: ``history``, ``human_ref_A``, ``human_ref_B``, and ``labels``, 1 where A is preferred. The margin is the
    difference of the scores, which Reddit's voters gave."""

    content = "preferences of SHP"
    shapes = (
        Compared(
            *("history", ("human_ref_A", "human_ref_B"), "labels"), choices={1: 0, 0: 1}, scores=("score_A", "score_B")
        ),
    )


@FORMATS.register("summarize-from-feedback")
class SummarizeFromFeedback(Comparison):
    """The comparisons of summarize_from_feedback: ``info`` with a ``post`` or an ``article``, two ``summaries``, and
    ``choice``, the index of the better one. The prompt is the paper's, ``SUBREDDIT``, ``TITLE`` and ``POST`` before
    ``TL;DR:``, as in TRL's ``tldr_preference.py``. Confidence and notes are not read, and neither are the ratings (``axis``)
    of the same data set."""

    content = "comparisons of summaries"
    shapes = (Compared("info", ("summaries.0.text", "summaries.1.text"), "choice", choices={0: 0, 1: 1}),)

    def texts(self, row: JsonObject, shape: Compared) -> JsonObject:
        info, *summaries = super().texts(row, shape).values()
        if info.get("post"):
            prompt = f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}\n\nPOST: {info['post']}\n\nTL;DR:"
        else:
            prompt = f"Article:\n{info['article']}\n\nTL;DR:"
        return dict(zip((shape.prompt, *shape.answers), (prompt, *map(str.strip, summaries)), strict=True))


@FORMATS.register("webgpt")
class WebGpt(Comparison):
    """webgpt_comparisons: the ``full_text`` of ``question``, ``answer_0``, ``answer_1``, and ``score_0``, ``score_1``, whose
    difference is the margin; equal scores are a tie. The quotes that answers refer to by number are not read."""

    content = "preferences of WebGPT"
    shapes = (Compared("question.full_text", ("answer_0", "answer_1"), scores=("score_0", "score_1")),)


@FORMATS.register("ultrafeedback")
class UltraFeedback(Format):
    """UltraFeedback (openbmb): a rollout per answer of ``completions``, of the group of its ``instruction``;
    ``overall_score`` is the reward, ratings of ``annotations`` are named rewards. `gymdata pairs` makes pairs of the groups.
    Critiques, and the system prompts that the answers were made with, are not read."""

    content = "rated answers of UltraFeedback"
    several = "completions"
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        rated = first_row(row.get("completions"))
        return {"response", "annotations"} <= rated.keys() and isinstance(row.get("instruction"), str)

    def item_of(self, part: Any, document: JsonObject) -> Any:
        return {k: v for k, v in document.items() if k not in ("completions", "models")} | {"answer": part}

    def row(self, item: Any, importing: Importing) -> TableRow:
        rated = item["answer"]
        # "N/A": a rating that does not apply.
        ratings = {name: a.get("Rating") for name, a in (rated.get("annotations") or {}).items() if isinstance(a, dict)}
        written = answer(rated["response"], "response")
        refuse_empty(written, "response")
        return rollout_row(
            item,
            conversation(item["instruction"], "instruction"),
            written,
            importing,
            reward=score(rated.get("overall_score"), "overall_score"),
            rewards=named_scores({name: rating for name, rating in ratings.items() if rating != "N/A"}),
            texts=("instruction", "answer"),
            policy=rated.get("model"),
        )


@FORMATS.register("alpaca")
class Alpaca(Format):
    """``instruction`` (with ``input`` below it), ``output``; LLaMA-Factory's ``system`` and ``history``; Dolly's ``context``
    and ``response``."""

    content = "Alpaca rows"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        answers = any(isinstance(as_text(row.get(name)), str) for name in ("output", "response"))
        chat_columns = {"rejected", "messages", "conversations"}  # of which the instruction is only a part
        return answers and isinstance(row.get("instruction"), str) and chat_columns.isdisjoint(row)

    def row(self, item: Any, importing: Importing) -> TableRow:
        return answered_row(item, ("instruction",), ("output", "response"), importing)


@FORMATS.register("sharegpt")
class ShareGpt(Format):
    """``conversations`` with ``from`` (human, gpt, system, function_call, observation) and ``value``, or with ``role`` and
    ``content``; ``system`` and ``tools`` beside it."""

    content = "ShareGPT conversations"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        return any(ends_with_answer(row.get(name)) for name in CONVERSATIONS) and "chosen" not in row

    def row(self, item: Any, importing: Importing) -> TableRow:
        name = column(item, *CONVERSATIONS)
        written = in_context(item, conversation(item[name], name))
        return rollout_row(item, [], written, importing, texts=(name, *BESIDE))
