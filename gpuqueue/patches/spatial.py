"""From random parameters to the pull-back of one patch and key.

For output voxel o of the reference grid, `source_k(o) = A_k^-1 F^-1 (A_ref o + u(o))`, with F the forward map of
content (world to world) and u the elastic displacement (mm). Host maths is float64; the map is written about the
patch's centre voxel, so precision does not depend on the volume's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuqueue.patches.gather.contract import PullBack, Size, Spline
from gpuqueue.volumes.grid import Grid

Matrix = NDArray[np.float64]
_SNAP = 1e-6
_FAR = 1e9  # voxels; a map that points further reads the pad value anyway


def pull_back(
    reference: Grid,
    key_affine: Matrix,
    forward: Matrix,
    control_points: Matrix | None,
    start: Sequence[int],
    size: Size,
) -> PullBack:
    """The map from a patch's voxels to those of the array with `key_affine` (4, 4).

    Args:
        reference: The grid that `start` (3,) counts in.
        forward: F (4, 4), world to world.
        control_points: (3, gi, gj, gk) mm along world x, y, z, or None.

    Raises:
        ValueError: The map is not finite.

    >>> grid = Grid((8, 8, 8), np.eye(4))
    >>> pull_back(grid, grid.affine, np.eye(4), None, (1, 2, 3), (4, 4, 4)).base
    array([3, 4, 5])
    """
    to_source = np.linalg.solve(key_affine, np.linalg.solve(forward, np.eye(4)))
    matrix = to_source @ reference.affine
    centre = np.asarray(start, np.float64) + np.array(size) // 2
    point = np.clip(matrix[:3, :3] @ centre + matrix[:3, 3], -_FAR, _FAR)
    if not np.isfinite(matrix).all() or (control_points is not None and not np.isfinite(control_points).all()):
        raise ValueError("the spatial transform is not finite: check the parameters of the affine or elastic transform")
    linear, point = _snap(matrix[:3, :3], point)
    base = np.floor(point)
    spline = None
    if control_points is not None and control_points.any():
        spline = Spline(_folded(reference, linear, control_points), _triple(start), reference.shape)
    exact = spline is None and (point == base).all()
    return PullBack(linear, base.astype(np.int64), point - base, spline, _permutation(linear) if exact else None)


def _snap(linear: Matrix, point: Matrix) -> tuple[Matrix, Matrix]:
    """A matrix within 1e-6 of a signed permutation becomes one, and offsets within 1e-6 of whole numbers whole."""
    nearest = np.round(linear)
    if np.abs(linear - nearest).max() < _SNAP and _permutation(nearest) is not None:
        whole = np.round(point)
        return nearest, np.where(np.abs(point - whole) < _SNAP, whole, point)
    return linear, point


def _permutation(linear: Matrix) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None:
    if not (
        (np.abs(linear).sum(axis=0) == 1).all()
        and (np.abs(linear).sum(axis=1) == 1).all()
        and np.isin(linear, (-1, 0, 1)).all()
    ):
        return None
    axes = np.abs(linear).argmax(axis=1)
    (a, b, c), (x, y, z) = axes.tolist(), [int(linear[row, axis]) for row, axis in enumerate(axes)]
    return (a, x), (b, y), (c, z)


def _folded(reference: Grid, linear: Matrix, control_points: Matrix) -> Matrix:
    """Control points in source voxels: the matrix acts on v = A_ref^-1 u; v has no part along axes of one voxel."""
    voxels = np.einsum("ab,bijk->aijk", np.linalg.inv(reference.affine[:3, :3]), control_points)
    voxels[np.array(reference.shape) == 1] = 0
    return np.asarray(np.einsum("ab,bijk->aijk", linear, voxels))


def _triple(values: Sequence[int]) -> Size:
    i, j, k = (int(value) for value in values)
    return i, j, k
