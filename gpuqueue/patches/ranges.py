"""TorchIO's grammar of ranges: how a transform's argument becomes limits per axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Range = float | Sequence[float] | Sequence[Sequence[float]]


def axis_limits(value: Range, name: str, around: float = 0.0) -> NDArray[np.float64]:
    """Limits (3, 2) of a range, one row per axis.

    A number x is around - x to around + x; a pair holds for all axes; three numbers are x per axis; six numbers, or
    three pairs, are limits per axis. Raises ValueError for anything else.

    >>> axis_limits((10, 0, 5), "degrees").tolist()
    [[-10.0, 10.0], [0.0, 0.0], [-5.0, 5.0]]
    >>> axis_limits(0.1, "scales", around=1.0)[0].tolist()
    [0.9, 1.1]
    """
    try:
        numbers = np.asarray([] if isinstance(value, str) else value, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.shape in ((), (3,)):
        half = np.broadcast_to(np.abs(numbers), 3)
        limits = np.stack([around - half, around + half], axis=1)
    elif numbers.shape == (2,):
        limits = np.tile(numbers, (3, 1))
    elif numbers.shape in ((6,), (3, 2)):
        limits = numbers.reshape(3, 2)
    else:
        raise ValueError(
            f"{name}={value!r}: give a number x ({around:g} - x to {around:g} + x), a pair (for all axes), three "
            "numbers (x per axis), or six numbers or three pairs (limits per axis)"
        )
    if not np.isfinite(limits).all() or (limits[:, 0] > limits[:, 1]).any():
        raise ValueError(f"{name}={value!r}: limits must be finite, the lower one first, got {limits.tolist()}")
    return limits


def probability(value: float, name: str) -> float:
    """The value, if it is a probability; ValueError otherwise."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must lie between 0 and 1")
    return float(value)
