"""A grid of voxels in the world: shape and affine, and what can be derived from them.

World coordinates are RAS+ millimetres (nibabel's convention): `world = affine @ (i, j, k, 1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from nibabel import orientations
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Grid:
    """`shape` (I, J, K) and `affine` (4, 4) float64, voxel index to world mm.

    >>> Grid((10, 10, 5), np.diag([1.0, 1.0, 3.0, 1.0])).spacing
    array([1., 1., 3.])
    """

    shape: tuple[int, int, int]
    affine: Matrix

    @property
    def spacing(self) -> Matrix:
        """Voxel size in mm on each axis: the length of each column of the affine."""
        return np.asarray(np.linalg.norm(self.affine[:3, :3], axis=0))

    @property
    def centre(self) -> Matrix:
        """World point (3,) in mm at the middle of the extent, voxel (N - 1) / 2."""
        return np.asarray(self.affine[:3, :3] @ ((np.array(self.shape) - 1) / 2) + self.affine[:3, 3])

    @property
    def directions(self) -> Matrix:
        """Unit world direction of each voxel axis, as columns (3, 3)."""
        return self.affine[:3, :3] / self.spacing

    @property
    def axcodes(self) -> str:
        """Nearest anatomical direction of each axis, such as "RAS"."""
        return "".join(str(code) for code in orientations.aff2axcodes(self.affine))


def check_affine(affine: ArrayLike, where: str) -> Matrix:
    """The affine as float64 (4, 4), or a ValueError that says what is wrong with it; `where` begins the message."""
    matrix = np.array(affine, dtype=np.float64)
    if matrix.shape != (4, 4) or not np.isfinite(matrix).all() or not np.allclose(matrix[3], [0, 0, 0, 1]):
        raise ValueError(
            f"{where}: the affine must be a finite 4x4 matrix with last row 0 0 0 1, got {matrix.tolist()}"
        )
    lengths = np.linalg.norm(matrix[:3, :3], axis=0)
    if (lengths == 0).any() or abs(np.linalg.det(matrix[:3, :3] / lengths)) < 1e-6:
        raise ValueError(
            f"{where}: the affine cannot be inverted (an axis of length zero or parallel axes): "
            f"{matrix.tolist()}; repair the file's header, or pass affine="
        )
    return matrix


def crop_affine(affine: Matrix, start: ArrayLike) -> Matrix:
    """The affine of a crop that begins at voxel `start` (3,)."""
    moved = affine.copy()
    moved[:3, 3] += affine[:3, :3] @ np.asarray(start, np.float64)
    return moved


def corner_difference(a: Grid, b: Grid) -> float:
    """Largest distance, in voxels of `a`, between where the two affines put a corner of `a`'s extent."""
    corners = np.array([[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)]) * (np.array(a.shape) - 1)
    homogeneous = np.c_[corners, np.ones(8)]
    there = np.linalg.solve(a.affine, b.affine @ homogeneous.T)[:3].T
    return float(np.abs(there - corners).max())


def reoriented(grid: Grid, axcodes: str) -> Grid:
    """Axes permuted and flipped to the nearest codes of `axcodes`, such as "RAS"; directions are kept.

    >>> reoriented(Grid((4, 5, 6), np.diag([-1.0, -1.0, 2.0, 1.0])), "RAS").affine[:3, 3]
    array([-3., -4.,  0.])
    """
    start = orientations.io_orientation(grid.affine)
    transform = orientations.ornt_transform(start, orientations.axcodes2ornt(tuple(axcodes.upper())))
    affine = grid.affine @ orientations.inv_ornt_aff(transform, grid.shape)
    shape = [0, 0, 0]
    for axis, (new_axis, _) in enumerate(transform):
        shape[int(new_axis)] = grid.shape[axis]
    return Grid((shape[0], shape[1], shape[2]), affine)


def respaced(grid: Grid, spacing: Sequence[float]) -> Grid:
    """The grid with voxels of `spacing` mm: max(1, round(N s / s')) of them on each axis, same centre of extent."""
    wanted = np.asarray(spacing, np.float64)
    size = np.maximum(1, np.floor(np.array(grid.shape) * grid.spacing / wanted + 0.5)).astype(int)
    affine = np.eye(4)
    affine[:3, :3] = grid.directions * wanted
    affine[:3, 3] = grid.centre - affine[:3, :3] @ ((size - 1) / 2)
    return Grid((int(size[0]), int(size[1]), int(size[2])), affine)
