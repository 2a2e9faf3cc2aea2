"""Samples that slime and miles dump of a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.conversion.masked import Masked, listed
from gymdata.formats.conversion.models import Int32, Model, Number, OrEmpty, read
from gymdata.formats.text.rows import conversation, exchange, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.truth import is_number
from gymdata.rollouts.turns import TopLogProb

#: Per token: columns of a sample that no rollout here has a place for.
_UNREAD = (
    *("rollout_top_p_token_ids", "rollout_routed_experts", "rollout_indexer_topk"),
    *("teacher_log_probs", "opd_reverse_kl"),
)
_OF_RESPONSE = ("tokens", "loss_mask", "rollout_log_probs")
#: A list per token of the response, filled up with −1 and −inf.
_HEADS = ("rollout_topk_token_ids", "rollout_topk_log_probs")
_TEXTS = (*_OF_RESPONSE, *_HEADS, "response_length", "response", "label", "reward", "group_index")
_ABOUT = ("step", "row", "index", "rollout_id", "status", "remove_sample", "weight_versions", "metadata", "texts")


class Sample(Model):
    tokens: list[Int32]
    response_length: int
    loss_mask: list[Any] | None = None
    rollout_log_probs: list[Number] | None = None
    rollout_topk_token_ids: list[list[Int32]] | None = None
    rollout_topk_log_probs: list[list[Number]] | None = None
    prompt: str | list[JsonObject] = ""
    response: str = ""
    label: Any = None
    reward: Any = None
    group_index: int | None = None
    status: str | None = None
    weight_versions: list[Any] | None = None
    metadata: OrEmpty[JsonObject]

    def heads(self) -> list[list[TopLogProb]] | None:
        """The sampler's head of each token of the response, as miles keeps it. Raises BadItem for lists that do not fit."""
        ids, log_probs = self.rollout_topk_token_ids, self.rollout_topk_log_probs
        if ids is None and log_probs is None:
            return None
        shape, n = [len(row) for row in ids or ()], self.response_length
        if len(shape) != n or shape != [len(row) for row in log_probs or ()]:
            expected = f"{n} lists each, one per token of the response, with a log-probability per id"
            raise BadItem("L301", f"{_HEADS[0]}, {_HEADS[1]}: expected {expected}")
        pairs = (zip(*head, strict=True) for head in zip(ids or (), log_probs or (), strict=True))
        return [[{"id": i, "log_prob": log_prob} for i, log_prob in head if i >= 0] for head in pairs]

    def refuse_unknown_mask(self) -> None:
        """Raises BadItem where a mask that is null may hide what a tool answered: slime trains every token then, gives those
        that it did not sample the log-probability 0, and has a version of the weights for each call."""
        zero = next((i for i, number in enumerate(self.rollout_log_probs or ()) if number == 0), None)
        if self.loss_mask is None and zero is not None and len(self.weight_versions or ()) != 1:
            got = f"got null, and rollout_log_probs[{zero}] is 0, as where no token was sampled"
            raise BadItem("S103", f"loss_mask: {got}; expected 1 for each sampled token and 0 for others")


@FORMATS.register("slime")
class Slime(Format):
    """``--save-debug-rollout-data`` of slime and miles (``.pt``): ``tokens`` parted by ``response_length``, the spans of
    ``loss_mask`` (null: all was sampled), ``rollout_log_probs``, miles' heads (``rollout_topk_token_ids``,
    ``rollout_topk_log_probs``), ``reward`` (of several the numbers are named rewards, and the total is not known),
    ``group_index``, ``label``, ``weight_versions`` where it has one for all spans or for each, and ``status``. Messages
    are those of a plain prompt with one span; other texts are kept in ``extra``."""

    content = "rollouts that slime or miles dumped"
    several = "samples"
    holds_ids = holds_logprobs = holds_reward = True

    def recognise(self, value: Any) -> bool:
        return "tokens" in value["samples"][0] and "response_length" in value["samples"][0]

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        for n, sample in enumerate(value["samples"]):
            yield f"samples[{n}]: ", sample | {"step": value.get("rollout_id"), "row": n}

    def row(self, item: Any, importing: Importing) -> TableRow:
        if item.get("multimodal_inputs") or item.get("multimodal_train_inputs"):
            raise BadItem("S102", "multimodal_inputs: images, audio and video are not trained")
        for name in _UNREAD:
            importing.unread[f"`{name}`"] += item.get(name) is not None
        read_of = (*_TEXTS, "prompt", *_ABOUT)
        item = listed({name: item[name] for name in read_of if item.get(name) is not None})
        sample = read(Sample, item)
        first = len(sample.tokens) - sample.response_length
        if not 0 <= first <= len(sample.tokens):
            raise BadItem.value(
                "response_length", sample.response_length, f"0 to {len(sample.tokens)}, as many as tokens"
            )
        sample.refuse_unknown_mask()
        ids = sample.tokens[:first], sample.tokens[first:]
        names = ("the response", *_OF_RESPONSE[1:])
        masked = Masked(*ids, sample.loss_mask, sample.rollout_log_probs, names, heads=sample.heads())
        truncated = sample.status == "truncated"
        turns = masked.turns(truncated=truncated, versions=[str(version) for version in sample.weight_versions or ()])
        given, written = _messages(sample)
        if written and len(turns.turns) == 1:
            written[0]["turn"] = 0
        else:
            written, item["texts"] = [], {"prompt": sample.prompt, "response": sample.response}
        several = sample.reward if isinstance(sample.reward, dict) else {}
        return rollout_row(
            item if sample.label is None else item | {"ground_truth": sample.label},
            given,
            written,
            importing,
            reward=None if several else score(sample.reward, "reward"),
            rewards=named_scores({name: value for name, value in several.items() if is_number(value)}),
            texts=_TEXTS,
            about=_ABOUT,
            group=masked.group if sample.group_index is None else f"group-{sample.group_index}-{masked.group[7:]}",
            truncated=truncated,
            turns=turns,
        )


def _messages(sample: Sample) -> tuple[list[Any], list[Any]]:
    """The messages of a prompt and its response; none where they are the text of a chat template."""
    try:
        if isinstance(sample.prompt, str):
            return exchange(sample.prompt, sample.response, "prompt")
        given = conversation(sample.prompt, "prompt")
        return given, exchange("", sample.response, "response")[1]
    except BadItem:
        return [], []
