"""Calls that NeMo Gym captured for training."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gymdata.formats import FORMATS
from gymdata.formats.conversion.calls import PerCall
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.conversion.masked import group_of_ids
from gymdata.formats.conversion.models import Int32, Model, Number, Several, read
from gymdata.rollouts.messages import JsonObject


class Entry(Model):
    schema_version: int = Field(1, le=1)
    rollout_id: str
    model_call_id: str
    model: str = ""
    prompt_token_ids: list[Int32] = Field(min_length=1)
    generation_token_ids: Several[Int32]
    generation_log_probs: Several[Number]
    output_items: Several[JsonObject]
    token_item_index: int | None = None
    created_at: float = 0.0

    def items(self) -> list[JsonObject]:
        """The items of a response, of which one has the ids."""
        items = [dict(item) for item in self.output_items] or [{"type": "message", "role": "assistant", "content": []}]
        at = len(items) - 1 if self.token_item_index is None else self.token_item_index
        if not -len(items) <= at < len(items):
            raise BadItem.value(f"token_item_index of {self.model_call_id}", at, f"0 to {len(items) - 1}")
        names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        items[at] |= {name: getattr(self, name) for name in names}
        return items


class Capture(Model):
    calls: list[Entry] = Field(min_length=1)


@FORMATS.register("nemo-gym-tokens")
class NemoGymTokens(PerCall):
    """NeMo Gym's ``token_id_capture``, a ``TokenEntry`` per call in ``ROLLOUT.tokens.jsonl``: all calls, also those that the
    rebuilt response leaves out; text of the model alone, grouped by the first prompt's ids; no rewards."""

    content = "calls that NeMo Gym captured"
    session, call = "rollout_id", "model_call_id"
    keys = ({"rollout_id", "model_call_id", "prompt_token_ids", "generation_token_ids"},)

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.formats.nemo_gym.read import row_of_line
        from gymdata.store.lines import encode

        calls = sorted(read(Capture, item).calls, key=lambda call: (call.created_at, call.model_call_id))
        output = [part for call in calls for part in call.items()]
        row = {
            "rollout_id": calls[0].rollout_id,
            "group_id": group_of_ids(calls[0].prompt_token_ids),
            "responses_create_params": {"input": []},
            "response": {"model": calls[0].model, "created_at": calls[0].created_at, "output": output},
        }
        return row_of_line(encode(row), importing)
