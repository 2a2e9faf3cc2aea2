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
from gymdata.rollouts.messages import object_of

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
        real, n = item["sequences"][item["attention_mask"] != 0], int(item["response_mask"].sum())
        first = len(item["response_mask"]) - n
        columns = {name: item[name][first:] for name in _IDS[2:] if item.get(name) is not None}
        if not 0 < n <= len(real) or not item["response_mask"][first:].all() or item["loss_mask"][:first].any():
            raise BadItem("S102", "response_mask: got no response that ends with the sequence")
        about = {name: item[name] for name in ("step", "row") if item[name] is not None}
        item = listed(
            {
                **about,
                "prompt": real[: len(real) - n],
                "response": real[len(real) - n :],
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
