"""Figures that follow a training: running moments of rewards, and a KL coefficient that steers towards a target."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gymdata.errors import EXIT_FAULTS, DataError, UsageError, option


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers were seen, their mean, and the sum of their squared distances from it.

    Mean, ``var`` and ``std`` after any batches are those of ``RunningMoments`` in LightRFT (``lightrft/trainer/utils.py``,
    after ROLL): mean 0, variance 1 and deviation 1 before the first number, then over all numbers seen, whatever the
    batches. Where that one divides by zero (the deviation of a single number) it is 0 here.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def var(self) -> float:
        """Population variance; 1 before any number was seen."""
        return self.m2 / self.count if self.count else 1.0

    @property
    def std(self) -> float:
        """Standard deviation with n − 1 below; 0 for a single number, 1 before any number was seen."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else float(self.count == 0)

    def __add__(self, other: Moments) -> Moments:
        """Moments of both together (Chan, Golub, LeVeque 1979)."""
        n = self.count + other.count
        if not n:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / n
        return Moments(n, mean, self.m2 + other.m2 + apart * apart * self.count * other.count / n)


def running_moments(state: Moments | None, values: npt.ArrayLike) -> Moments:
    """``state`` (None: nothing seen yet) after the numbers in ``values``, of any shape; non-finite ones are left out.

    Raises DataError (R502) when the squares of the numbers are beyond float64.
    """
    numbers = np.asarray(values, dtype=np.float64).ravel()
    finite = np.isfinite(numbers)
    if not finite.all():
        numbers = numbers[finite]
    if not len(numbers):
        return state or Moments()
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(numbers.mean())
        apart = numbers - mean
        # Not the product with itself: that takes threads, and their number would decide on the last digits.
        result = (state or Moments()) + Moments(len(numbers), mean, float(np.square(apart, out=apart).sum()))
    if not math.isfinite(result.m2):
        raise too_large("rewards or advantages", float(np.abs(numbers).max()))
    return result


def too_large(quantity: str, largest: float) -> DataError:
    """Numbers whose squares are beyond float64: their spread would be infinite."""
    hint = f"score on a smaller scale, or `gymdata filter` them: {option('where', 'abs(reward) < 1e100')}"
    text = f"R502: {quantity} are too large to be compared (up to {largest:.3g})"
    return DataError(text, hint=hint, code="R502", exit_code=EXIT_FAULTS)


def adaptive_kl(value: float, kl: float, target: float, n: int, horizon: float) -> float:
    """The KL coefficient after ``n`` samples whose mean KL was ``kl``: value · (1 + clip(kl/target − 1, ±0.2) · n/horizon).

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", §2.2.
    """
    if not (target > 0 and horizon > 0):
        raise UsageError.bad_value("adaptive KL: (target, horizon)", (target, horizon), "two numbers above 0")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return value * (1.0 + error * n / horizon)
