"""The policy loss of a training: one of ``train.losses`` or a user's function, its settings and its mean."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch

from gymdata.commands.train.losses import DEFAULT, LOSSES, Aggregation
from gymdata.commands.train.settings import TrainRlConfig
from gymdata.errors import UsageError, counted, raised
from gymdata.user_code import load_symbol, place_in

Tensor = torch.Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """A loss with its settings. ``sequence_mask``: leave far sequences out (``far_sequences``), None for no mask.
    ``constant``: what each sequence's sum is divided by where ``aggregation`` is constant."""

    function: Any = LOSSES[DEFAULT].function
    settings: Mapping[str, object] = field(default_factory=lambda: LOSSES[DEFAULT].settings)
    aggregation: Aggregation = LOSSES[DEFAULT].aggregation
    sequence_mask: float | None = None
    needs_reference: bool = False
    constant: float = 1.0
    #: f of the score-centering term, where it is added.
    weight: Callable[[Tensor], Tensor] | None = None
    #: It compares the tokens of its batch.
    over_batch: bool = False

    @classmethod
    def of(cls, config: TrainRlConfig, longest: int) -> PolicyLoss:
        """The loss that the settings name; ``longest``: trained tokens of the longest sequence of the file. Raises
        UsageError for a file of the user's that cannot be loaded."""
        constant = config.loss_constant or float(max(longest, 1))
        if config.loss in LOSSES:
            loss = LOSSES[config.loss]
            mean = config.loss_aggregation or loss.aggregation
            needs = loss.needs == "reference"
            weight = None
            if config.score_centering:
                assert loss.weight is not None  # the settings say so
                weight = functools.partial(loss.weight, **config.loss_settings)
            return cls(
                loss.function,
                config.loss_settings,
                mean,
                config.sequence_mask,
                needs,
                constant,
                weight,
                loss.over_batch,
            )
        function, _ = load_symbol(config.loss, "--loss")
        named = str(getattr(function, "aggregation", "token"))
        if named not in get_args(Aggregation):
            raise UsageError.unknown_choice(f"--loss {config.loss}: its aggregation", named, get_args(Aggregation))
        mean = config.loss_aggregation or cast("Aggregation", named)
        return cls(users(function, config.loss), {}, mean, config.sequence_mask, constant=constant)

    def __call__(
        self,
        logprobs: Tensor,
        saved: Tensor,
        advantages: Tensor,
        mask: Tensor,
        reference: Tensor | None = None,
        centering: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss of each token, (B, T), such that its sum over the global batch divided by that of ``counts`` is the mean
        that ``aggregation`` names; and which tokens are limited. ``centering``: C of each token, which is added A times."""
        loss, limited = self.function(logprobs, saved, advantages, mask, reference, **self.settings)
        if centering is not None:
            loss = loss + (advantages * centering).masked_fill(~mask, 0.0)
        if self.aggregation == "sequence-mean":
            loss = loss / mask.sum(dim=1, keepdim=True).clamp(min=1)
        elif self.aggregation == "constant":
            loss = loss / self.constant
        if self.sequence_mask is None:
            return loss, limited
        far = far_sequences(logprobs, saved, advantages, mask, self.sequence_mask)
        return loss.masked_fill(far, 0.0), limited | far

    def count(self, mask: Tensor) -> Tensor:
        """Tokens, or sequences with one, of a part of the global batch."""
        return (mask if self.aggregation == "token" else mask.any(dim=1)).sum()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(−d) − 1 + d, d = ℓ − ℓ_ref: an estimate of the KL to the reference of each token (Schulman 2020)."""
    apart = logprobs - reference
    return torch.expm1(-apart) + apart


def far_sequences(logprobs: Tensor, saved: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Tokens with A < 0 of sequences whose mean of ℓ_saved − ℓ exceeds ``delta``, bool (B, T): the off-policy sequence mask
    of DeepSeek-V3.2 (arXiv 2512.02556)."""
    apart = torch.where(mask, saved - logprobs, 0.0).detach()
    mean = apart.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (advantages < 0) & (mean > delta) & mask


def users(function: Any, name: str) -> Any:
    """A user's function as a loss: it may leave out which tokens it limits. Raises UsageError when it fails, or returns
    something else than a finite loss for each token."""

    def checked(*tensors: Any) -> tuple[Tensor, Tensor]:
        logprobs, mask = tensors[0], tensors[3]
        try:
            output = function(*tensors)
        except Exception as error:
            where = f" ({line})" if (line := place_in(error, inspect.getsourcefile(function))) else ""
            raise UsageError(f"--loss {name} raised {raised(error)}{where}") from error
        loss, limited = output if isinstance(output, tuple) and len(output) == 2 else (output, mask & False)
        for what, tensor in (("a loss", loss), ("limited tokens", limited)):
            if not isinstance(tensor, torch.Tensor) or tensor.shape != logprobs.shape:
                got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise UsageError(
                    f"--loss {name}: got {what} of shape {got}, expected {tuple(logprobs.shape)}, one number per token",
                    hint="return the loss of each token, not their mean",
                )
        loss = torch.where(mask, loss, 0.0)
        bad = ~torch.isfinite(loss)
        if bool(bad.any()):
            row, token = (int(i) for i in bad.nonzero()[0])
            raise UsageError(
                f"--loss {name}: got {float(loss[row, token].detach())} for token {token} of sequence {row} of a batch "
                f"({counted(int(bad.sum()), 'such token')}), expected a finite loss"
            )
        return loss, limited.bool() & mask

    return checked
