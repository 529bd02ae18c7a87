"""Where patches start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuqueue.patches.gather.contract import Size
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.volume import Volume


class Sampler(Protocol):
    """What the queue asks of a patch sampler; any object with these two methods is one."""

    def prepare(self, volume: Volume) -> Mapping[str, NDArray[np.generic]]:
        """Small named arrays made once per load, in the worker where there is one."""
        ...

    def draw(
        self, prepared: Mapping[str, NDArray[np.generic]], grid: Grid, patch_size: Size, random: Random
    ) -> ArrayLike:
        """The first voxel (3,) of a patch in the reference `grid`; every draw comes from `random`."""
        ...


class UniformSampler:
    """Every start from 0 to N - p inclusive is equally likely, on each axis.

    >>> grid = Grid((10, 8, 8), np.eye(4))
    >>> starts = {int(UniformSampler().draw({}, grid, (8, 8, 8), Random(n))[0]) for n in range(50)}
    >>> sorted(starts)
    [0, 1, 2]
    """

    def prepare(self, volume: Volume) -> Mapping[str, NDArray[np.generic]]:
        """Nothing to prepare."""
        return {}

    def draw(
        self, prepared: Mapping[str, NDArray[np.generic]], grid: Grid, patch_size: Size, random: Random
    ) -> NDArray[np.int64]:
        """The first voxel (3,)."""
        last = np.maximum(np.array(grid.shape) - patch_size, 0)
        return random.integers(np.zeros(3, np.int64), last + 1)


def clamped_start(start: ArrayLike, grid: Grid, patch_size: Size) -> NDArray[np.int64]:
    """The start moved into [0, N - p]; where the patch is larger than the volume, -((p - N) // 2), which centres it.

    >>> clamped_start((7, 0, -2), Grid((10, 4, 10), np.eye(4)), (4, 6, 4))
    array([ 6, -1,  0])
    """
    spare = np.array(grid.shape) - patch_size
    inside = np.clip(np.asarray(start, np.int64), 0, np.maximum(spare, 0))
    return np.where(spare < 0, -(-spare // 2), inside)


def as_size(value: int | Sequence[int], name: str) -> Size:
    """A patch size as three positive whole numbers; ValueError otherwise."""
    sizes = [value] * 3 if isinstance(value, (int, np.integer)) else list(value)
    if len(sizes) != 3 or not all(isinstance(s, (int, np.integer)) and s > 0 for s in sizes):
        raise ValueError(f"{name}={value!r}: give a positive whole number, or three")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])
