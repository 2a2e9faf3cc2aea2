"""Token-wise parts of credit: KL estimates, placement of rewards, normalisation, clipping, the entropy mask.

A result is 0 where the mask is 0, and values there never enter a statistic.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gymdata.credit.adaptive import Moments, running_moments
from gymdata.errors import DataError, UsageError

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
KlKind = Literal["k1", "k2", "k3"]
#: A product this close below a whole number is that number.
_ROUNDING = 1e-9
KL_KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3")


def as_mask(mask: npt.ArrayLike, shape: tuple[int, ...]) -> Mask:
    """``mask`` as booleans of ``shape``; raises DataError for another shape."""
    array = np.asarray(mask)
    if array.shape != shape:
        raise DataError(f"mask: got shape {array.shape}, expected {shape}")
    return array if array.dtype == np.bool_ else array != 0


def as_floats(*arrays: npt.ArrayLike) -> tuple[list[Array], np.dtype[Any]]:
    """The arrays as floats, and the precision that results have: float32 when every one is float32, else float64."""
    inputs = [np.asarray(a) for a in arrays]
    floats = [a if a.dtype in (np.float32, np.float64) else a.astype(np.float64) for a in inputs]
    single = all(a.dtype == np.float32 for a in floats)
    return floats, np.dtype(np.float32 if single else np.float64)


def kl(logp: npt.ArrayLike, ref: npt.ArrayLike, kind: KlKind = "k1", mask: npt.ArrayLike | None = None) -> Array:
    """KL estimate per token, shape of ``logp``; 0 where ``mask`` is 0.

    With d = logp − ref: k1 = d; k2 = d²/2; k3 = exp(−d) − 1 + d. Source: Schulman 2020, "Approximating KL Divergence".
    """
    if kind not in KL_KINDS:
        raise UsageError.unknown_choice("KL estimator", kind, KL_KINDS)
    (a, b), dtype = as_floats(logp, ref)
    if a.shape != b.shape:
        raise DataError(f"kl: got shapes {a.shape} and {b.shape}, expected the same")
    d = np.subtract(a, b, dtype=np.float64)
    if mask is not None:
        d = np.where(as_mask(mask, a.shape), d, 0.0)
    if kind == "k2":
        d = np.square(d) / 2
    elif kind == "k3":
        # expm1 keeps the digits that exp(−d) − 1 loses near 0, where every on-policy token is.
        d = np.expm1(-d) + d
    return d.astype(dtype, copy=False)


def last_valid(mask: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Position of each row's last valid token, shape (B,); −1 for a row without one."""
    valid = np.asarray(mask) != 0
    width = valid.shape[-1]
    if width == 0:
        return np.full(valid.shape[:-1], -1, np.int64)
    last = width - 1 - valid[..., ::-1].argmax(axis=-1)
    return np.where(valid.any(axis=-1), last, -1).astype(np.int64)


def token_rewards(
    reward: npt.ArrayLike,
    kl: npt.ArrayLike | None,
    kl_coef: float,
    mask: npt.ArrayLike,
    clip: float | tuple[float, float] | None = None,
) -> Array:
    """Rewards per token, (B, A): −max(kl_coef, 0) · kl on valid tokens, plus the row's reward on its last valid one.

    ``reward``: (B,), clipped to ``clip`` (a number c means −c to c) before it is placed; ``kl``: (B, A), or None for none.
    A row without a valid token has no place for its reward: it is all 0.
    """
    valid = np.asarray(mask) != 0
    inputs = [reward] if kl is None else [reward, kl]
    floats, dtype = as_floats(*inputs)
    if floats[0].shape != valid.shape[:-1]:
        raise DataError(f"token rewards: got reward shape {floats[0].shape}, expected {valid.shape[:-1]}")
    result = np.zeros(valid.shape, np.float64)
    coefficient = max(float(kl_coef), 0.0)
    if kl is not None and coefficient:
        if floats[1].shape != valid.shape:
            raise DataError(f"token rewards: got kl shape {floats[1].shape}, expected {valid.shape}")
        np.multiply(floats[1], -coefficient, out=result, where=valid)
    scalar = clipped(floats[0].astype(np.float64), clip)
    rows, last = result.reshape(-1, valid.shape[-1]), last_valid(valid).reshape(-1)
    there = np.flatnonzero(last >= 0)
    rows[there, last[there]] += scalar.reshape(-1)[there]
    return result.astype(dtype, copy=False)


def clipped(values: Array, limit: float | tuple[float, float] | None) -> Array:
    """``values`` within ``limit``: (low, high), or c for −c to c, or None for no limit."""
    if limit is None:
        return values
    low, high = limit if isinstance(limit, (tuple, list)) else (-abs(limit), abs(limit))
    if not low <= high:
        raise UsageError.bad_value("clip", (low, high), "a lower and an upper bound in that order")
    return np.clip(values, low, high)


def clip(advantages: npt.ArrayLike, limit: float | None) -> Array:
    """Advantages within −limit to limit; unchanged when ``limit`` is None."""
    (values,), dtype = as_floats(advantages)
    return clipped(values, limit).astype(dtype, copy=False)


def masked_moments(values: npt.ArrayLike, mask: npt.ArrayLike) -> Moments:
    """Count, mean and spread of the valid positions of ``values`` (any shape)."""
    array = np.asarray(values)
    return running_moments(None, array[as_mask(mask, array.shape)])


def whiten(advantages: npt.ArrayLike, mask: npt.ArrayLike, moments: Moments | None = None) -> Array:
    """(A − mean) / (std + 1e-9) over all valid tokens, std with n − 1 below; 0 where the mask is 0.

    ``moments``: those of a larger whole that this is a part of.
    """
    (values,), dtype = as_floats(advantages)
    valid = as_mask(mask, values.shape)
    moments = moments or masked_moments(values, valid)
    return _scaled(values, valid, moments.mean, 1.0 / (moments.std + 1e-9)).astype(dtype, copy=False)


def normalize_cross_batch(
    advantages: npt.ArrayLike, mask: npt.ArrayLike, mean_only: bool = False, moments: Moments | None = None
) -> Array:
    """(A − mean) / sqrt(max(var, 1e-8)) over all valid tokens, population variance; ``mean_only``: A − mean.

    0 where the mask is 0. ``moments``: those of a larger whole that this is a part of.
    """
    (values,), dtype = as_floats(advantages)
    valid = as_mask(mask, values.shape)
    moments = moments or masked_moments(values, valid)
    factor = 1.0 if mean_only else 1.0 / float(np.sqrt(max(moments.var, 1e-8)))
    return _scaled(values, valid, moments.mean, factor).astype(dtype, copy=False)


def _scaled(values: Array, valid: Mask, mean: float, factor: float) -> Array:
    result = np.zeros(values.shape, np.float64)
    np.subtract(values, mean, out=result, where=valid)
    result *= factor
    return result


def high_entropy_mask(entropy: npt.ArrayLike, mask: npt.ArrayLike, ratio: float) -> Mask:
    """The max(1, ⌊n_valid · ratio⌋) valid tokens of highest entropy in each row, as booleans (B, A).

    Rounding in floats takes no token away: 0.29 of 100 tokens are 29. Of equal ones the earlier is taken; a row without
    valid tokens has none. Source: Wang et al. 2025, "Beyond the 80/20 Rule"; ``create_high_entropy_mask`` of LightRFT
    (``lightrft/models/utils.py``) cuts the product off in floats, where 0.29 · 100 is just below 29 and gives 28. Raises
    UsageError unless 0 < ratio ≤ 1.
    """
    values = np.asarray(entropy)
    valid = as_mask(mask, values.shape)
    width = values.shape[-1] if values.ndim else 0
    counts = valid.reshape(-1, width).sum(axis=1) if width else np.zeros(0, np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    result = np.zeros(values.shape, np.bool_)
    result[valid] = high_entropy_mask_ragged(values[valid], offsets, ratio)
    return result


def high_entropy_mask_ragged(entropy: npt.ArrayLike, offsets: npt.ArrayLike, ratio: float) -> Mask:
    """``high_entropy_mask`` of ragged rows: flat ``entropy``, all of it valid; returns booleans of its shape."""
    if not 0.0 < ratio <= 1.0:
        raise UsageError.bad_value("entropy ratio", ratio, "a share above 0, at most 1")
    values, bounds = np.asarray(entropy, dtype=np.float64), np.asarray(offsets, dtype=np.int64)
    lengths = np.diff(bounds)
    quota = np.maximum(1, np.floor(lengths * ratio + _ROUNDING).astype(np.int64))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((-values, owner))
    rank = np.arange(len(values)) - bounds[owner]
    result = np.zeros(len(values), np.bool_)
    result[order] = rank < quota[owner]
    return result
