"""The losses of batch RL as pure functions; what each is called, its source and its defaults: ``gymdata.train.losses``.

A function gets ``logprobs`` (with gradient), ``saved``, ``advantages``, ``mask`` (bool) and ``reference`` (or None), all of
shape (B, T), and its settings by name. It returns the loss of each token, (B, T), and which tokens it limits, bool (B, T).
A loss of whole sequences is given in equal shares to their tokens, so that a sum over the tokens is the sum over sequences.

Invariants: values at masked positions (NaN too) change nothing, and have loss 0 and no gradient; a sequence's loss
depends on no other sequence of the batch.

In formulas: ℓ the log-prob of a token and L the sum over its sequence, r = exp(ℓ − ℓ_saved), R = exp(L − L_saved), s the
geometric mean of r over the sequence, A the advantage, sg without gradient.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from gymdata.errors import UsageError, counted
from gymdata.train.losses import LOSSES, Aggregation
from gymdata.train.settings import TrainRlConfig
from gymdata.user_code import load_symbol, place_in

Tensor = torch.Tensor
Result = tuple[Tensor, Tensor]
LossFunction = Callable[..., Result]
#: Beyond, exp() of a sum of log-ratios is infinite in float32.
_LARGEST = 80.0


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
        return torch.exp(self.logprobs - self.saved)

    @property
    def sequence_ratio(self) -> Tensor:
        """R, (B, 1)."""
        return torch.exp((self.logprobs - self.saved).sum(dim=1, keepdim=True).clamp(max=_LARGEST))


def _over_mask(function: Callable[..., Result]) -> LossFunction:
    """A function of ``Tokens`` as a loss: values at masked positions are zeros, in inputs and outputs."""

    @functools.wraps(function)
    def masked(
        logprobs: Tensor, saved: Tensor, advantages: Tensor, mask: Tensor, reference: Tensor | None = None, **given: Any
    ) -> Result:
        logprobs, saved, advantages = (torch.where(mask, each, 0.0) for each in (logprobs, saved, advantages))
        known = None if reference is None else torch.where(mask, reference, 0.0)
        loss, limited = function(Tokens(logprobs, saved, advantages, mask, known), **given)
        return torch.where(mask, loss, 0.0), limited & mask

    return masked


def _lengths(mask: Tensor) -> Tensor:
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each sequence, (B, 1); ``values`` are 0 where masked."""
    return values.sum(dim=1, keepdim=True) / _lengths(mask)


def _shares(sequences: Tensor, mask: Tensor) -> Tensor:
    """A number of each sequence, (B, 1), in equal shares to its tokens."""
    return sequences / _lengths(mask) * mask


def _none(logprobs: Tensor) -> Tensor:
    return torch.zeros_like(logprobs, dtype=torch.bool)


@_over_mask
def ppo_clip(at: Tokens, *, clip_low: float, clip_high: float) -> Result:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A). Schulman et al. 2017, arXiv 1707.06347."""
    ratio = at.ratio
    limited = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * at.advantages, limited * at.advantages)
    return loss, _outside(ratio, at.advantages, clip_low, clip_high)


def _outside(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Where a minimum with the clipped ratio has no gradient."""
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


@_over_mask
def cispo(at: Tokens, *, clip_low: float, clip_high: float) -> Result:
    """−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·ℓ. MiniMax-M1, 2025, arXiv 2506.13585."""
    ratio = at.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * at.advantages * at.logprobs, ratio != weight


@_over_mask
def tis_reinforce(at: Tokens, *, tis_cap: float) -> Result:
    """−sg(min(r, tis_cap))·A·ℓ: truncated importance weights of tokens (as ScaleRL describes them, arXiv 2510.13786)."""
    ratio = at.ratio.detach()
    return -ratio.clamp(max=tis_cap) * at.advantages * at.logprobs, ratio > tis_cap


@_over_mask
def tis_sequence(at: Tokens, *, tis_cap: float) -> Result:
    """−sg(min(R, tis_cap))·A·ℓ: a truncated importance weight of the sequence (TIS in arXiv 2503.14286, section 2; verl's
    rollout correction applies it to the tokens in the same way)."""
    ratio = at.sequence_ratio.detach()
    return -ratio.clamp(max=tis_cap) * at.advantages * at.logprobs, (ratio > tis_cap) & at.mask


@_over_mask
def mis(at: Tokens, *, tis_cap: float, mis_level: str) -> Result:
    """−sg(w·[w ≤ tis_cap])·A·ℓ with w = r (``token``) or R (``sequence``): what ``tis_*`` truncates has no part at all.
    Sequence level: Qi et al. 2025, arXiv 2510.26788."""
    ratio = at.sequence_ratio if mis_level == "sequence" else at.ratio
    ratio = ratio.detach()
    beyond = (ratio > tis_cap) & at.mask
    return -ratio.masked_fill(ratio > tis_cap, 0.0) * at.advantages * at.logprobs, beyond


@_over_mask
def icepop(at: Tokens, *, clip_low: float, clip_high: float) -> Result:
    """−sg(M(r))·A·ℓ, M(r) = r inside [1 − clip_low, 1 + clip_high], else 0 (the source: α 0.5, β 5). Ling team 2025, arXiv
    2510.18855."""
    ratio = at.ratio.detach()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return -ratio.masked_fill(outside, 0.0) * at.advantages * at.logprobs, outside


@_over_mask
def gspo(at: Tokens, *, clip_low: float, clip_high: float) -> Result:
    """−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A), mean over sequences. Zheng et al. 2025, arXiv 2507.18071.

    In the form GSPO-token of the source: the gradient of s reaches each token through its own log-prob, so advantages may
    differ within a sequence; where they do not, loss and gradient are those of GSPO.
    """
    mean = _mean(at.logprobs - at.saved, at.mask).detach()
    ratio = torch.exp(mean + at.logprobs - at.logprobs.detach())
    limited = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * at.advantages, limited * at.advantages)
    return loss / _lengths(at.mask), _outside(ratio, at.advantages, clip_low, clip_high)


@_over_mask
def gmpo(at: Tokens, *, clip_low: float, clip_high: float) -> Result:
    """−exp(mean of log r')·mean of A, mean over sequences; log r' is log r, at most clip_high where A > 0 and at least
    −clip_low where A < 0. Zhao et al. 2025, arXiv 2507.20673 (ε 0.4)."""
    apart = at.logprobs - at.saved
    beyond = ((apart > clip_high) & (at.advantages > 0)) | ((apart < -clip_low) & (at.advantages < 0))
    kept = torch.where(beyond, apart.clamp(-clip_low, clip_high), apart)
    sequences = -torch.exp(_mean(kept, at.mask)) * _mean(at.advantages, at.mask)
    return _shares(sequences, at.mask), beyond


def _masked_by_divergence(at: Tokens, beyond: Tensor, tis_cap: float) -> Result:
    weight = at.ratio.detach().clamp(max=tis_cap)
    return -(weight * at.advantages).masked_fill(beyond, 0.0) * at.logprobs, beyond


@_over_mask
def dppo_tv(at: Tokens, *, clip_low: float, clip_high: float, tis_cap: float) -> Result:
    """−sg(min(r, tis_cap))·A·ℓ, 0 for a token whose update leads further away and whose probability has moved by more than
    clip_high (A > 0) or clip_low (A < 0): binary total variation. Qi et al. 2026, arXiv 2602.04879."""
    moved = (torch.exp(at.logprobs) - torch.exp(at.saved)).detach()
    beyond = ((at.advantages > 0) & (moved > clip_high)) | ((at.advantages < 0) & (-moved > clip_low))
    return _masked_by_divergence(at, beyond, tis_cap)


@_over_mask
def dppo_kl(at: Tokens, *, clip_low: float, clip_high: float, tis_cap: float) -> Result:
    """As ``dppo_tv`` with the binary KL(π_saved ‖ π) = p log(p/q) + (1 − p) log((1 − p)/(1 − q)), p and q the saved and the
    new probability of the token. Qi et al. 2026, arXiv 2602.04879."""
    with torch.no_grad():
        # 1 − exp(0) would be 0, whose logarithm is infinite.
        rest, rest_saved = (torch.log(-torch.expm1(each.clamp(max=-1e-7))) for each in (at.logprobs, at.saved))
        old = torch.exp(at.saved)
        kl = old * (at.saved - at.logprobs) + (1 - old) * (rest_saved - rest)
        up, down = (at.advantages > 0) & (at.logprobs > at.saved), (at.advantages < 0) & (at.logprobs < at.saved)
        beyond = (up & (kl > clip_high)) | (down & (kl > clip_low))
    return _masked_by_divergence(at, beyond, tis_cap)


@_over_mask
def sapo(at: Tokens, *, tau_positive: float, tau_negative: float) -> Result:
    """−σ(τ·(r − 1))·4/τ·A: a soft gate, whose gradient at r = 1 is that of REINFORCE. Gao et al. 2025, arXiv 2511.20347."""
    ratio = at.ratio
    tau = torch.where(at.advantages > 0, tau_positive, tau_negative)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * at.advantages, _none(at.logprobs)


@_over_mask
def topr(at: Tokens) -> Result:
    """−A·L where A ≥ 0, −sg(min(R, 1))·A·L where A < 0, mean over sequences. Le Roux et al. 2025, arXiv 2503.14286."""
    ratio = at.sequence_ratio.detach()
    weight = torch.where(at.advantages < 0, ratio.clamp(max=1.0), 1.0)
    return -weight * at.advantages * at.logprobs, (at.advantages < 0) & (ratio > 1) & at.mask


@_over_mask
def asymre(at: Tokens, *, baseline_shift: float) -> Result:
    """−(A − baseline_shift)·L, mean over sequences: REINFORCE without a ratio, its baseline moved (below the mean reward
    where baseline_shift < 0). Arnal et al. 2025, arXiv 2506.20520 (there δV)."""
    return -(at.advantages - baseline_shift) * at.logprobs, _none(at.logprobs)


@_over_mask
def opmd(at: Tokens, *, tau: float) -> Result:
    """−A·ℓ/(1 + tau), the simplified form of the source. Trinity-RFT 2025, arXiv 2505.17826."""
    return -at.advantages * at.logprobs / (1 + tau), _none(at.logprobs)


@_over_mask
def dro(at: Tokens, *, tau: float) -> Result:
    """−A·L + tau/2·(L − L_ref)², mean over sequences; A: reward − value. Richemond et al. 2024, arXiv 2405.19107."""
    assert at.reference is not None
    apart = (at.logprobs - at.reference).sum(dim=1, keepdim=True)
    return -at.advantages * at.logprobs + _shares(tau / 2 * apart**2, at.mask), _none(at.logprobs)


@_over_mask
def oapl(at: Tokens, *, tau: float) -> Result:
    """(tau·(L − L_saved) − A)², mean over sequences, A: reward − V*, V* = β·log mean exp(reward/β) over the group. arXiv
    2602.19362, after A*-PO (Brantley et al. 2025, arXiv 2505.20686).

    The policy that V* is an average over is the sampler, so the regression is to the sampler as well.
    """
    apart = (at.logprobs - at.saved).sum(dim=1, keepdim=True)
    return _shares((tau * apart - _mean(at.advantages, at.mask)) ** 2, at.mask), _none(at.logprobs)


@_over_mask
def awr(at: Tokens, *, tau: float, weight_max: float) -> Result:
    """−min(exp(A/tau), weight_max)·ℓ. Peng et al. 2019, arXiv 1910.00177 (there β)."""
    weight = torch.exp((at.advantages / tau).clamp(max=_LARGEST))
    return -weight.clamp(max=weight_max) * at.logprobs, weight > weight_max


@_over_mask
def filtered_bc(at: Tokens) -> Result:
    """−[A > 0]·ℓ: supervised training on what did better than its baseline. Wang et al. 2020 (CRR, binary), arXiv
    2006.15134."""
    return -at.logprobs * (at.advantages > 0), at.advantages <= 0


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(−d) − 1 + d, d = ℓ − ℓ_ref: an estimate of the KL to the reference of each token (Schulman 2020)."""
    apart = logprobs - reference
    return torch.expm1(-apart) + apart


def far_sequences(logprobs: Tensor, saved: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Tokens with A < 0 of sequences whose mean of ℓ_saved − ℓ exceeds ``delta``, bool (B, T): the off-policy sequence mask
    of DeepSeek-V3.2 (arXiv 2512.02556)."""
    apart = torch.where(mask, saved - logprobs, 0.0).detach()
    return (advantages < 0) & (_mean(apart, mask) > delta) & mask


FUNCTIONS: dict[str, LossFunction] = {
    function.__name__: function
    for function in (
        ppo_clip, cispo, tis_reinforce, tis_sequence, mis, icepop, gspo, gmpo, dppo_tv, dppo_kl, sapo, topr, asymre, opmd,
        dro, oapl, awr, filtered_bc,
    )
}  # fmt: skip


@dataclass(frozen=True)
class PolicyLoss:
    """A loss with its settings. ``sequence_mask``: leave far sequences out (``far_sequences``), None for no mask."""

    function: LossFunction = FUNCTIONS["ppo_clip"]
    settings: Mapping[str, Any] = field(default_factory=lambda: LOSSES["ppo_clip"].settings)
    aggregation: Aggregation = "token"
    sequence_mask: float | None = None
    needs_reference: bool = False

    @classmethod
    def of(cls, config: TrainRlConfig) -> PolicyLoss:
        """The loss that the settings name. Raises UsageError for a file of the user's that cannot be loaded."""
        if config.loss in LOSSES:
            loss = LOSSES[config.loss]
            return cls(
                FUNCTIONS[config.loss],
                config.loss_settings,
                loss.aggregation,
                config.sequence_mask,
                loss.needs == "reference",
            )
        function, _ = load_symbol(config.loss, "--loss")
        named: Any = getattr(function, "aggregation", "token")
        if named not in ("token", "sequence"):
            raise UsageError.unknown_choice(f"--loss {config.loss}: its aggregation", str(named), ["token", "sequence"])
        return cls(users(function, config.loss), {}, named, config.sequence_mask)

    def __call__(
        self, logprobs: Tensor, saved: Tensor, advantages: Tensor, mask: Tensor, reference: Tensor | None = None
    ) -> Result:
        loss, limited = self.function(logprobs, saved, advantages, mask, reference, **self.settings)
        if self.sequence_mask is None:
            return loss, limited
        far = far_sequences(logprobs, saved, advantages, mask, self.sequence_mask)
        return loss.masked_fill(far, 0.0), limited | far


def users(function: Any, name: str) -> LossFunction:
    """A user's function as a loss: it may leave out which tokens it limits. Raises UsageError when it fails, or returns
    something else than a finite loss for each token."""

    def checked(*given: Any) -> Result:
        logprobs, mask = given[0], given[3]
        try:
            found = function(*given)
        except Exception as error:
            at = place_in(error, inspect.getsourcefile(function))
            where = f" ({at})" if at else ""
            raise UsageError(f"--loss {name} raised {type(error).__name__}: {error}{where}") from error
        loss, limited = found if isinstance(found, tuple) and len(found) == 2 else (found, _none(logprobs))
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


def reward_distance(target: Tensor, scores: Tensor, kind: str) -> Tensor:
    """The distance of σ(scores) from σ(target), each (B,): ``fwd_kl`` KL(σ(scores) ‖ σ(target)), ``bwd_kl`` the other way,
    ``sq`` (scores − target)². Reward-aware preference optimization, Nemotron-4 340B, arXiv 2406.11704; which KL is called
    which follows NeMo-Aligner."""
    if kind == "sq":
        return (scores - target) ** 2
    ours, theirs = (F.logsigmoid(torch.stack([each, -each])) for each in (scores, target))
    first, second = (ours, theirs) if kind == "fwd_kl" else (theirs, ours)
    return (torch.exp(first) * (first - second)).sum(dim=0)
