"""Training batches that SkyRL dumps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.conversion.masked import Masked, listed, shared_value
from gymdata.formats.conversion.models import Int32, Model, Number, read
from gymdata.formats.text.rows import rollout_row
from gymdata.formats.text.words import score
from gymdata.rollouts.messages import JsonObject, object_of

if TYPE_CHECKING:
    from gymdata.store.paths import Source

#: Columns that no rollout here has a place for.
_UNREAD = ("action_log_probs", "base_action_log_probs", "values", "returns", "kl", "rollout_expert_indices")
_NAMES = ("the response", "loss_mask", "rollout_logprobs")
_IDS = ("prompt", "response", "loss_mask", "rollout_logprobs", "advantages", "rewards")


class Row(Model):
    prompt: list[Int32]
    response: list[Int32]
    loss_mask: list[Any]
    rollout_logprobs: list[Number] | None = None
    advantages: list[Number] | None = None
    rewards: list[Number] | None = None


@FORMATS.register("skyrl-batch")
class SkyRLBatch(Format):
    """``trainer.dump_data_batch`` of SkyRL (``global_step_N_training_input.pkl``): ``sequences`` parted by
    ``response_mask``, the spans of ``loss_mask``, ``rollout_logprobs``, and the prompts of ``policy_prompt_boundaries`` as
    groups. SkyRL takes the rewards out before it writes: a rollout has none, and an advantage that all its tokens share is
    in ``extra``. There is no text. Rows that pad the batch are no rollouts; a limit that cut one is not named."""

    content = "batches that SkyRL dumped"
    holds_ids = holds_logprobs = True

    def recognise(self, value: Any) -> bool:
        return {"sequences", "response_mask", "loss_mask"} <= value["batch"].keys() and "metadata" in value

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """The step of a batch is in its name alone."""
        for source, line, value, text in super().documents(sources):
            step = re.search(r"global_step_(\d+)", source.path.name)
            yield source, line, value | {"step": int(step[1])} if step and isinstance(value, dict) else value, text

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        batch, facts = value["batch"], object_of(value["metadata"])
        groups = {n: k for k, (a, b) in enumerate(facts.get("policy_prompt_boundaries") or ()) for n in range(a, b)}
        for n in range(len(batch["sequences"]) - facts.get("pad_size", 0)):
            row = {name: column[n] for name, column in batch.items()}
            yield f"row {n}: ", row | {"step": value.get("step"), "row": n, "group": groups.get(n)}

    def row(self, item: Any, importing: Importing) -> TableRow:
        if item.get("pixel_values") is not None:
            raise BadItem("S102", "pixel_values: images, audio and video are not trained")
        for name in _UNREAD:
            importing.unread[f"`{name}`"] += item.get(name) is not None
        given, first = _parted(item)
        sequence, columns = (
            item["sequences"][given],
            {name: item[name][first:] for name in _IDS[2:] if item.get(name) is not None},
        )
        n = len(item["response_mask"]) - first
        about = {name: item[name] for name in ("step", "row") if item[name] is not None}
        item = listed(
            {
                **about,
                "prompt": sequence[: len(sequence) - n],
                "response": sequence[len(sequence) - n :],
                **columns,
                "group": item["group"],
            }
        )
        row = read(Row, item)
        masked = Masked(row.prompt, row.response, row.loss_mask, row.rollout_logprobs, _NAMES, first)
        item["advantage"] = shared_value(row.advantages, row.loss_mask)
        return rollout_row(
            item,
            [],
            [],
            importing,
            reward=None if row.rewards is None else score(float(np.sum(row.rewards)), "rewards"),
            texts=(*_IDS, "group"),
            about=("step", "row", "advantage"),
            group=masked.group
            if item["group"] is None
            else f"step-{item.get('step', '')}-{item['group']}-{masked.group[7:]}",
            turns=masked.turns(),
        )


def _parted(row: JsonObject) -> tuple[slice, int]:
    """Where the tokens are that are no padding, which is before them, and where the response begins in the columns beside
    it. Raises BadItem for padding within them, and for what is said of tokens that are padding."""
    real, counted = np.flatnonzero(row["attention_mask"]), np.flatnonzero(row["response_mask"])
    first = len(row["response_mask"]) - len(counted)
    if (
        not 0 < len(counted) <= len(real)
        or counted[0] != first
        or (np.asarray(row["response_mask"])[first:] != 1).any()
    ):
        raise BadItem("S102", "response_mask: got no response that ends with the sequence")
    if len(row["attention_mask"]) != len(row["sequences"]):
        expected = f"{len(row['sequences'])}, one per token of sequences"
        raise BadItem("S102", f"attention_mask: got {len(row['attention_mask'])}, expected {expected}")
    if len(odd := np.flatnonzero(np.diff(real) != 1)):
        raise BadItem("S102", f"attention_mask[{real[odd[0]] + 1}]: got 0 between tokens that it counts")
    for name in ("loss_mask", "rollout_logprobs", "rewards"):
        if row.get(name) is not None and len(odd := np.flatnonzero(row[name][:first])):
            raise BadItem("S102", f"{name}[{odd[0]}]: got {row[name][odd[0]]} before the response, in its padding")
    return slice(int(real[0]), int(real[-1]) + 1), first
