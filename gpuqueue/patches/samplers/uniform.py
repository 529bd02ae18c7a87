"""Every start is equally likely."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuqueue.patches.gather.contract import Size
from gpuqueue.patches.samplers.protocol import Prepared
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.volume import Volume


class UniformSampler:
    """Every start from 0 to N - p inclusive is equally likely, on each axis.

    >>> grid = Grid((10, 8, 8), np.eye(4))
    >>> starts = {int(UniformSampler().draw({}, grid, (8, 8, 8), Random(n))[0]) for n in range(50)}
    >>> sorted(starts)
    [0, 1, 2]
    """

    def prepare(self, volume: Volume) -> Prepared:
        """Nothing to prepare."""
        return {}

    def draw(self, prepared: Prepared, grid: Grid, patch_size: Size, random: Random) -> NDArray[np.int64]:
        """The first voxel (3,)."""
        last = np.maximum(np.array(grid.shape) - patch_size, 0)
        return random.integers(np.zeros(3, np.int64), last + 1)
