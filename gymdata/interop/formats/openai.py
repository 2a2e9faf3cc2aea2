"""OpenAI's fine-tuning rows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gymdata.interop.formats import FORMATS
from gymdata.interop.formats._text import TextFormat

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.interop.chat_text import Lines


@FORMATS.register("openai")
class OpenAI(TextFormat):
    """OpenAI's fine-tuning rows: arguments of calls are text, without reasoning."""

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> Lines:
        from gymdata.interop.text_export import OPENAI, conversations

        return conversations(b'{"messages":[', OPENAI, batch, lost)
