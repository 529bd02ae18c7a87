"""Which source voxels a patch can read: a box that needs no coordinates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuqueue.patches.gather.contract import PullBack, Size, Spline, spline_weights


def patch_offsets(size: int) -> NDArray[np.float64]:
    """Voxels of a patch axis counted from its centre voxel: q = p - size // 2, shape (size,)."""
    return np.arange(size, dtype=np.float64) - size // 2


def visible_part(spline: Spline, size: Size) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """The control points (3, gi, gj, gk) that a patch of `size` voxels sees, and its weights (size, g) on each axis."""
    coefficients, weights = spline.coefficients, []
    for axis in range(3):
        all_weights = spline_weights(
            spline.start[axis], size[axis], spline.extent[axis], spline.coefficients.shape[axis + 1]
        )
        seen = np.flatnonzero(all_weights.any(axis=0))
        first, last = int(seen[0]), int(seen[-1])
        coefficients = np.take(coefficients, np.arange(first, last + 1), axis=axis + 1)
        weights.append(all_weights[:, first : last + 1])
    return coefficients, weights


def source_box(pull_back: PullBack, size: Size) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Least and greatest source coordinate per axis that the patch can read, relative to `base`: two (3,) arrays.

    Exact for an affine map; with a spline a bound, because the weights are positive and sum to 1. Not finite when the
    map is not.
    """
    ends = [patch_offsets(n)[[0, -1]] for n in size]
    with np.errstate(invalid="ignore"):  # a map that is not finite has a box that is not finite
        corners = [pull_back.matrix[:, axis, None] * ends[axis] for axis in range(3)]
    low = pull_back.rest + sum(corner.min(axis=1) for corner in corners)
    high = pull_back.rest + sum(corner.max(axis=1) for corner in corners)
    if pull_back.spline is not None:
        coefficients = visible_part(pull_back.spline, size)[0].reshape(3, -1)
        low, high = low + coefficients.min(axis=1), high + coefficients.max(axis=1)
    return low, high
