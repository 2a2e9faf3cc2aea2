"""Traces of the AgentCore RL toolkit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from gymdata.formats import FORMATS
from gymdata.formats.conversion.calls import PerCall
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.conversion.masked import Masked
from gymdata.formats.conversion.models import Int32, Model, Number, OrEmpty, read
from gymdata.formats.text.rows import rollout_row
from gymdata.formats.text.words import score
from gymdata.rollouts.messages import JsonObject, object_of
from gymdata.rollouts.turns import TurnEncoder, call_of, expand_prompts

_OF_RESPONSE = ("token_ids", "loss_mask", "logprobs")


class Record(Model):
    token_ids: list[Int32]
    loss_mask: list[Any]
    logprobs: list[Number]
    rollout_id: str | int | None = None
    reward: Any = None
    metadata: OrEmpty[JsonObject]
    status: str | None = None

    def masked(self) -> Masked:
        """The mask and the log-probabilities are of the end of the ids."""
        start = len(self.token_ids) - len(self.loss_mask)
        if start < 0:
            raise BadItem("L301", f"loss_mask: got {len(self.loss_mask)}, expected at most {len(self.token_ids)}")
        return Masked(self.token_ids[:start], self.token_ids[start:], self.loss_mask, self.logprobs, _OF_RESPONSE)


class Rollout(Model):
    calls: list[Record] = Field(min_length=1)


@FORMATS.register("agentcore")
class AgentCore(PerCall):
    """``TraceRecord`` of the AgentCore RL toolkit's rollout gateway (``dataclasses.asdict``, ``status`` as its text): the
    branches of a session's tree, with the same ``rollout_id``, are one rollout; ``token_ids``, ``loss_mask``, ``logprobs``,
    ``reward``. An answer that a replay changed is context there. There is no text, and no task: rollouts with the same first
    prompt are a group."""

    content = "traces of the AgentCore RL toolkit"
    holds_reward = True
    session: ClassVar[str] = "rollout_id"
    keys = ({"token_ids", "loss_mask", "logprobs", "rollout_id", "response_length"},)

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The status of a rollout is that of the first of its records that is not completed."""
        for place, item in super().items(value):
            records = item["calls"] if isinstance(item, dict) else []
            states = [
                record["status"] for record in records if object_of(record).get("status") not in (None, "completed")
            ]
            yield place, item | {"status": states[0]} if states else item

    def row(self, item: Any, importing: Importing) -> TableRow:
        records = read(Rollout, item).calls
        first, encoder = records[0], TurnEncoder()
        sampled = set[tuple[bytes, bytes]]()
        for n, record in enumerate(records):
            try:
                turns = record.masked().turns(truncated=record.status == "truncated").turns
            except BadItem as error:
                raise BadItem(error.code, f"calls[{n}].{error.reason}") from error
            for turn, prompt in zip(turns, expand_prompts(turns), strict=True):
                key = prompt.tobytes(), np.asarray(turn["generation_token_ids"], np.int32).tobytes()
                if key not in sampled:
                    encoder.add(call_of(turn, prompt))
                sampled.add(key)
        return rollout_row(
            {"calls": item["calls"], "rollout_id": first.rollout_id, "metadata": first.metadata},
            [],
            [],
            importing,
            reward=score(first.reward, "reward"),
            rewards={},
            texts=("calls",),
            about=("rollout_id", "metadata"),
            group=first.masked().group,
            truncated=records[-1].status == "truncated",
            turns=encoder,
        )
