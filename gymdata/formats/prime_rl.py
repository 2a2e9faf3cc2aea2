"""Sequences that prime-rl's trainer exports."""

from __future__ import annotations

from typing import Any, ClassVar

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import Importing, TableRow
from gymdata.formats.conversion.masked import Masked, group_of_ids, shared_value
from gymdata.formats.conversion.models import Int32, Model, Number, read
from gymdata.formats.text.rows import rollout_row

_ABOUT = ("step", "rank", "micro_step", "micro_sequence_idx", "export_sequence_idx", "advantage")
#: What no rollout here has a place for; null where the trainer had none.
_UNREAD = ("rl_weights", "ce_weights", "ref_kl_weights")


class Exported(Model):
    token_ids: list[Int32]
    loss_mask: list[bool]
    inference_logprobs: list[Number | None]
    advantages: list[Number | None]
    env_name: str | None = None


@FORMATS.register("prime-rl-tokens")
class PrimeRlTokens(Format):
    """``token_exports`` of prime-rl (``enable_token_export``): ``token_ids``, the spans of ``loss_mask``,
    ``inference_logprobs`` (null is NaN), the ids before the first span as the prompt and the group, ``env_name``. The file
    has no rewards, and an advantage that all tokens share is in ``extra``. There is no text; what the trainer computed again
    is not read, and the version of the weights and a limit that cut a rollout are not named."""

    content = "tokens that prime-rl exported"
    holds_ids = holds_logprobs = True
    keys: ClassVar[Any] = ({"token_ids", "loss_mask", "inference_logprobs", "export_sequence_idx"},)

    def row(self, item: Any, importing: Importing) -> TableRow:
        row = read(Exported, item)
        for name in _UNREAD:
            importing.unread[f"`{name}`"] += any(value is not None for value in item.get(name) or ())
        first = row.loss_mask.index(True) if True in row.loss_mask else len(row.token_ids)
        log_probs = [float("nan") if value is None else value for value in row.inference_logprobs]
        names = ("token_ids", "loss_mask", "inference_logprobs")
        masked = Masked([], row.token_ids, row.loss_mask, log_probs, names)
        about = item | {"advantage": shared_value(row.advantages, row.loss_mask)}
        return rollout_row(
            about,
            [],
            [],
            importing,
            reward=None,
            texts=tuple(item.keys() - {*_ABOUT, "env_name"}),
            about=_ABOUT,
            group="-".join(filter(None, (row.env_name, group_of_ids(row.token_ids[:first])))),
            turns=masked.turns(),
        )
