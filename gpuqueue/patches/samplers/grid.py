"""Patches side by side, that together cover the volume."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuqueue.patches.gather.contract import Size
from gpuqueue.patches.samplers.protocol import Prepared
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.volume import Volume

Overlap = float | Sequence[float]  # an int counts voxels, a float is a share of the patch


class GridSampler:
    """The k-th patch of a volume is the k-th of the patches that cover its reference grid, in the order of the axes.

    Its own count covers the volume once (`patches_per_volume=None`); further patches begin again.

    Args:
        overlap: What neighbours share: voxels as int, a share of the patch as float below 1; one or three.

    >>> GridSampler(0.5).count(Grid((12, 8, 8), np.eye(4)), (8, 8, 8))
    2
    """

    def __init__(self, overlap: Overlap = 0) -> None:
        overlap_voxels(overlap, None)
        self.overlap = overlap

    def prepare(self, volume: Volume) -> Prepared:
        """Nothing to prepare."""
        return {}

    def count(self, grid: Grid, patch_size: Size) -> int:
        """How many patches cover the grid."""
        return math.prod(map(len, _axes(grid.shape, patch_size, self.overlap)))

    def draw(self, prepared: Prepared, grid: Grid, patch_size: Size, random: Random) -> NDArray[np.int64]:
        """The first voxel (3,) of patch number `random.index`."""
        axes = _axes(grid.shape, patch_size, self.overlap)
        lengths = tuple(map(len, axes))
        places = np.unravel_index(getattr(random, "index", 0) % math.prod(lengths), lengths)
        return np.array([starts[place] for starts, place in zip(axes, places)], np.int64)


def grid_starts(shape: Size, patch_size: Size, overlap: Overlap) -> NDArray[np.int64]:
    """Starts (n, 3) of patches that cover `shape`, k fastest.

    >>> grid_starts((12, 8, 8), (8, 8, 8), 4)[:, 0]
    array([0, 4])
    """
    return np.array(list(itertools.product(*_axes(shape, patch_size, overlap))), np.int64)


def _axes(shape: Size, patch_size: Size, overlap: Overlap) -> list[list[int]]:
    return list(map(axis_starts, shape, patch_size, overlap_voxels(overlap, patch_size)))


def axis_starts(length: int, patch: int, overlap: int) -> list[int]:
    """Starts on one axis: 0, patch - overlap, ... and the last one length - patch, moved back so that it ends inside.

    A patch longer than the axis starts at -((patch - length) // 2), which centres it.

    >>> axis_starts(20, 8, 0), axis_starts(3, 8, 0)
    ([0, 8, 12], [-2])
    """
    last = length - patch
    return [-(-last // 2)] if last <= 0 else [*range(0, last, patch - overlap), last]


def overlap_voxels(overlap: Overlap, patch_size: Size | None) -> Size:
    """The overlap in voxels for each axis; a share leaves a step of max(1, floor(size x (1 - share))).

    Raises ValueError for shares outside [0, 1), and voxels below 0 or not below the patch's size (where that is given).
    """
    given = [overlap] * 3 if isinstance(overlap, (int, float, np.number)) else list(overlap)
    if len(given) != 3:
        raise ValueError(f"overlap={overlap!r}: one number, or three")
    sizes = (None, None, None) if patch_size is None else patch_size
    i, j, k = (_overlap(value, size) for value, size in zip(given, sizes))
    return i, j, k


def _overlap(value: float, size: int | None) -> int:
    if isinstance(value, (int, np.integer)):
        if value < 0 or (size is not None and value >= size):
            raise ValueError(f"overlap={value!r} voxels: 0 or more, and below the patch's size"
                             + (f" of {size}" if size else ""))  # fmt: skip
        return int(value)
    if not 0 <= value < 1:
        raise ValueError(f"overlap={value!r}: a share from 0 to below 1, or voxels as a whole number")
    return 0 if size is None else size - max(1, int(size * (1 - value) + 1e-9))
