"""A loss: REINFORCE with a scale."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gymdata.commands.train.losses import Result, Tokens, loss


@loss("−scale·A·ℓ", "this example", "token")
def advantage_only(
    batch: Tokens, *, scale: Annotated[float, Field(gt=0, description="Factor of the advantages.")] = 1.0
) -> Result:
    return -scale * batch.advantages * batch.logprobs, batch.unlimited
