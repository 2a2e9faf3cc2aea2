"""What a policy loss is, and how its function registers itself.

A loss is a function of ``Tokens`` and its settings that returns the loss of each token, (B, T), and which tokens it limits,
bool (B, T); a number of a whole sequence is given to each of its tokens. Registered, it takes ``logprobs`` (with gradient),
``saved``, ``advantages``, ``mask`` (bool) and ``reference`` (or None), all (B, T), and its settings by name.

Values at masked positions (NaN too) change nothing, and have loss 0 and no gradient; a sequence's loss depends on no other
sequence of the batch, but for losses that say so by ``over_batch``. Tensors are used by their methods only, so the table of
losses is read without torch.

In formulas: ℓ the log-prob of a token and L the sum over its sequence, r = exp(ℓ − ℓ_saved), R = exp(L − L_saved), s the
geometric mean of r over the sequence, A the advantage, sg without gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from gymdata.registry import Registry, Setting, settings_of

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any
Result = tuple[Tensor, Tensor]
LossFunction = Callable[..., Result]
#: What the mean over the global batch is of: all tokens; the sums of sequences; their means; the sums of sequences divided
#: by one constant.
Aggregation = Literal["token", "sequence-sum", "sequence-mean", "constant"]
#: The names that verl has for them.
AGGREGATIONS: Mapping[str, Aggregation] = {
    "token-mean": "token",
    "seq-mean-token-sum": "sequence-sum",
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum-norm": "constant",
}
#: Beyond, exp() of a sum of log-ratios is infinite in float32.
LARGEST = 80.0

ClipLow = Annotated[
    float, Field(description="Lower bound of what the loss limits: 1 − this for ratios.", ge=0.0, le=1.0)
]
ClipHigh = Annotated[float, Field(description="Upper bound of what the loss limits: 1 + this for ratios.", ge=0.0)]
Cap = Annotated[float, Field(description="Cap of the importance weight.", gt=0.0)]
Tau = Annotated[float, Field(description="Strength of the loss's regularization.", gt=0.0)]


class Tokens(NamedTuple):
    """What a loss is computed from, each of shape (B, T), values 0 where masked."""

    logprobs: Tensor
    saved: Tensor
    advantages: Tensor
    mask: Tensor
    reference: Tensor | None

    @property
    def ratio(self) -> Tensor:
        """r."""
        return (self.logprobs - self.saved).exp()

    @property
    def sequence_ratio(self) -> Tensor:
        """R, (B, 1)."""
        return (self.logprobs - self.saved).sum(dim=1, keepdim=True).clamp(max=LARGEST).exp()

    @property
    def unlimited(self) -> Tensor:
        """No token is limited."""
        return self.mask & False

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each sequence, (B, 1), of ``values`` that are 0 where masked."""
        return values.sum(dim=1, keepdim=True) / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class Curve:
    """How the viewer shows what a loss does with a ratio. ``clipped``: no gradient beyond the bounds on the side that the
    advantage pushes to; ``capped``: the weight is at most the upper bound; ``masked``: none outside of the bounds. The
    bounds are 1 − clip_low and 1 + clip_high, or tis_cap. ``of``: whose ratio."""

    title: str
    limits: Literal["clipped", "capped", "masked"]
    of: Literal["token", "sequence"] = "token"


@dataclass(frozen=True)
class Loss:
    """``aggregation``: the mean, as published. ``needs``: what it needs besides the saved log-probs and advantages.
    ``at_zero``: whether it trains where every advantage is 0. ``of_ratios``: whether it reads the saved log-probs.
    ``over_batch``: it compares its batch's tokens. ``weight``: f(r, settings) where the loss of a token is −sg(f(r))·A·ℓ.
    ``differs``: from the code that its authors, verl or TRL published."""

    name: str
    function: LossFunction
    formula: str
    source: str
    aggregation: Aggregation
    needs: Literal["reference", "optimal_value"] | None = None
    at_zero: bool = False
    of_ratios: bool = True
    over_batch: bool = False
    weight: Callable[..., Tensor] | None = None
    differs: str = ""
    curve: Curve | None = None
    options: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Setting → its default."""
        return {name: default for name, (_, default) in self.options.items()}


REGISTRY: Registry[Loss] = Registry("loss", "gymdata.commands.train.losses", "gymdata.losses")


def loss(formula: str, source: str, aggregation: Aggregation, **more: Any) -> Callable[[LossFunction], LossFunction]:
    """Register a function of ``Tokens`` as the loss of its name; ``more``: other fields of ``Loss``."""

    def register(function: LossFunction) -> LossFunction:
        @functools.wraps(function)
        def masked(
            logprobs: Tensor,
            saved: Tensor,
            advantages: Tensor,
            mask: Tensor,
            reference: Tensor | None = None,
            **settings: Any,
        ) -> Result:
            logprobs, saved, advantages = (each.masked_fill(~mask, 0.0) for each in (logprobs, saved, advantages))
            reference = None if reference is None else reference.masked_fill(~mask, 0.0)
            tokens, limited = function(Tokens(logprobs, saved, advantages, mask, reference), **settings)
            return tokens.masked_fill(~mask, 0.0), limited & mask

        name, options = function.__name__, settings_of(function)
        REGISTRY.register(name)(Loss(name, masked, formula, source, aggregation, options=options, **more))
        return masked

    return register
