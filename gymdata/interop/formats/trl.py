"""TRL's conversational data sets."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gymdata.interop.formats import FORMATS
from gymdata.interop.formats._text import TextFormat

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.interop.chat_text import Lines


@FORMATS.register("trl-messages")
class TrlMessages(TextFormat):
    """Conversational language modelling, for SFT: ``messages`` (and ``tools``)."""

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> Lines:
        from gymdata.interop.text_export import TRL, conversations

        return conversations(b'{"messages":[', TRL, batch, lost)


@FORMATS.register("trl-prompt-completion")
class TrlPromptCompletion(TextFormat):
    """``prompt`` up to the first assistant message, ``completion`` from it on (and ``tools``)."""

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> Lines:
        from gymdata.interop.text_export import TRL, conversations

        return conversations(b'{"prompt":[', TRL, batch, lost, split=True)


@FORMATS.register("trl-preference")
class TrlPreference(TextFormat):
    """``prompt``, ``chosen`` and ``rejected`` of a pair (and ``tools``), with its margin."""

    table = "pairs"
    columns = None

    def batch(self, batch: pa.RecordBatch, lost: Counter[str]) -> Lines:
        from gymdata.interop.text_export import trl_preference

        return trl_preference(batch, lost)
