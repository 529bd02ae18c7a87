"""Voxels in proportion to a map of weights."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuqueue.errors import VolumeError
from gpuqueue.patches.gather.contract import Size
from gpuqueue.patches.samplers.protocol import (
    EMPTY,
    MODES,
    DrawnVoxel,
    Prepared,
    check_choice,
    one_channel,
    uniform_start,
    when_empty,
)
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.storage import contiguous_along_k
from gpuqueue.volumes.volume import Volume

_BLOCK = 512  # voxels that one draw looks at


class WeightedSampler:
    """Draws voxels in proportion to their weight in a map; the patch is placed by that voxel.

    Every voxel of the volume counts: a patch that would leave the volume is moved inside. The voxel is followed through
    affine and elastic transforms. Sums are float64, whatever the size of the map.

    Args:
        map: The key of the weights, of one channel: finite numbers of 0 or more.
        mode: "centre" puts the voxel at start + size // 2; "inside" anywhere in the patch.
        on_empty: A volume whose weights are all 0: "uniform" starts anywhere, with one warning, or "raise".

    >>> weights = np.zeros((4, 5, 6))
    >>> weights[3, 2, 1] = 0.5
    >>> sampler = WeightedSampler("map")
    >>> prepared = sampler.prepare(Volume("case1", {"map": weights}))
    >>> sampler.draw(prepared, Grid((4, 5, 6), np.eye(4)), (2, 2, 2), Random(1)).voxel
    array([3, 2, 1])
    """

    def __init__(self, map: str = "map", mode: str = "centre", on_empty: str = "uniform") -> None:
        self.map = map
        self.mode = check_choice("mode", mode, MODES)
        self.on_empty = check_choice("on_empty", on_empty, EMPTY)

    def prepare(self, volume: Volume) -> Prepared:
        """The weights as stored, in blocks, without those that are all 0. VolumeError for what are no weights."""
        one_channel(volume, self.map, "map", "WeightedSampler")
        flat = _weights(volume, self.map)
        if not (np.isfinite(flat.min()) and np.isfinite(flat.max())) or flat.min() < 0:
            raise VolumeError(f"{volume.where(self.map)}: weights must be finite and 0 or more, but run from "
                              f"{flat.min()} to {flat.max()}")  # fmt: skip
        blocks = np.pad(flat, (0, -flat.size % _BLOCK)).reshape(-1, _BLOCK)
        sums = blocks.sum(axis=1, dtype=np.float64)
        kept = np.flatnonzero(sums)
        prepared: dict[str, NDArray[Any]] = {
            "blocks": kept,
            "weights": blocks[kept],
            "ends": np.cumsum(sums[kept]),
            "shape": np.array(volume.arrays[self.map].shape[1:]),
        }
        if len(kept):
            return prepared
        return prepared | when_empty(self.on_empty, f"{volume.where(self.map)} has no weight above 0")

    def draw(self, prepared: Prepared, grid: Grid, patch_size: Size, random: Random) -> NDArray[np.int64] | DrawnVoxel:
        """A voxel of the map, or a start where all weights are 0."""
        if not len(prepared["blocks"]):
            return uniform_start(random.uniform(4)[1:], grid, patch_size)
        return self._voxel(prepared, random)

    def _voxel(self, prepared: Prepared, random: Random) -> DrawnVoxel:
        unit = random.uniform(4)
        ends = prepared["ends"]
        aim = unit[0] * ends[-1]
        place = min(int(np.searchsorted(ends, aim, side="right")), len(ends) - 1)
        weights = prepared["weights"][place].astype(np.float64)
        positive = np.flatnonzero(weights)
        within = np.cumsum(weights[positive])
        rest = aim - (ends[place - 1] if place else 0.0)
        voxel = positive[min(int(np.searchsorted(within, rest, side="right")), len(positive) - 1)]
        flat = int(prepared["blocks"][place]) * _BLOCK + int(voxel)
        return DrawnVoxel(
            self.map,
            np.array(np.unravel_index(flat, tuple(prepared["shape"]))),
            None,
            unit[1:] if self.mode == "inside" else None,
            functools.partial(self._voxel, prepared),
        )


def _weights(volume: Volume, key: str) -> NDArray[Any]:
    """The weights (I * J * K,), k fastest, up to one factor."""
    data, (slope, intercept) = volume.arrays[key], volume.scale[key][0]
    if slope <= 0 or intercept != 0 or data.dtype == torch.bfloat16:
        data = volume[key].float()
    return np.asarray(contiguous_along_k(data)[0].numpy().reshape(-1))
