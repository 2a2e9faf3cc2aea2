"""OpenAI's fine-tuning files: conversations and preferences."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import Importing, JsonObject, TableRow
from gymdata.formats.text.rows import answer, conversation, pair_row
from gymdata.formats.trl import TrlMessages


@FORMATS.register("openai")
class OpenAI(TrlMessages):
    """OpenAI's fine-tuning rows: arguments of calls are text, no reasoning; a message of ``weight`` 0 is not trained."""

    for_openai = True

    def recognise(self, value: Any) -> bool:  # noqa: ARG002 - its rows look like TRL's
        """Rows of chat messages are ``trl-messages``, which are read in the same way."""
        return False


@FORMATS.register("openai-preference")
class OpenAIPreference(Format):
    """OpenAI's rows for DPO: ``input`` with messages and tools, ``preferred_output``, ``non_preferred_output``."""

    table = "pairs"
    content = "preference rows of OpenAI"
    item = "a preference pair"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        return isinstance(row.get("input"), dict) and "preferred_output" in row and "non_preferred_output" in row

    def row(self, item: Any, importing: Importing) -> TableRow:
        sides = [answer(item[name], name) for name in ("preferred_output", "non_preferred_output")]
        prompt = conversation(item["input"]["messages"], "input.messages")
        return pair_row(item | item["input"], prompt, (sides[0], sides[1]), importing)
