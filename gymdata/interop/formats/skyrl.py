"""SkyRL's data sets that are tokenized already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS
from gymdata.interop.formats.input_ids import Tokenized

if TYPE_CHECKING:
    from gymdata.rollouts.ragged import Array


@FORMATS.register("skyrl-pretokenized")
class SkyRLPretokenized(Tokenized):
    """``input_ids`` and ``loss_mask``, 1 where a token was sampled, for SkyRL's ``pretokenized_dataset_paths``
    (``skyrl/train/dataset/pretokenized.py`` of NovaSky-AI/SkyRL)."""

    def fields(self, ids: Array, mask: Array) -> dict[str, Any]:
        return {"input_ids": ids, "loss_mask": mask}
