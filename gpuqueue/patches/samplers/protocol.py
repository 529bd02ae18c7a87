"""What a patch sampler is, and what it may draw: a start, or a source voxel that the patch is to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuqueue.errors import VolumeError
from gpuqueue.patches.gather.contract import Size
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.volume import Volume

Prepared = Mapping[str, NDArray[Any]]
MODES = ("centre", "inside")
EMPTY = ("uniform", "raise")


@dataclass(frozen=True, eq=False)
class DrawnVoxel:
    """A voxel of the source; the patch is placed where it lands after augmentation.

    `voxel` (3,) counts in the array of `key`, whose class there is `label` (None: not drawn by class). `inside` None
    puts it at the patch's centre voxel, start + size // 2; three numbers in [0, 1) choose among all starts whose patch
    holds it. Where it lands outside the reference grid, `again(random)` draws another in its stead from the next
    numbers of the same stream; without `again` the sampler's own `draw` does.
    """

    key: str
    voxel: NDArray[np.int64]
    label: int | None = None
    inside: NDArray[np.float64] | None = None
    again: Callable[[Random], DrawnVoxel] | None = None


class Sampler(Protocol):
    """What the queue asks of a patch sampler; any object with these two methods is one.

    A method `count(grid, patch_size) -> int` besides gives the patches of a volume for `patches_per_volume=None`.
    """

    def prepare(self, volume: Volume) -> Prepared:
        """Small named arrays made once per load, in the worker where there is one.

        Two names mean something to the queue: "missing" (n, 2), classes that the volume lacks (NaN: any foreground) and
        the share of draws that each would have had, is summed into `stats()`; "warning", a text, is given once.
        """
        ...

    def draw(self, prepared: Prepared, grid: Grid, patch_size: Size, random: Random) -> ArrayLike | DrawnVoxel:
        """The first voxel (3,) of a patch in the reference `grid`, or a voxel of the source to place it by.

        Every draw comes from `random`; `random.index` is the patch's number k.
        """
        ...


class PatchRandom(Random):
    """The random numbers of one patch; `index` is its number k among its volume's patches.

    `words` are the stream's first ones, made for many patches at once.

    >>> from gpuqueue.rng import philox
    >>> words = philox(np.array([7], np.uint64), 0, 2).reshape(-1)
    >>> bool((PatchRandom(7, 0, words).uniform(9) == Random(7).uniform(9)).all())
    True
    """

    def __init__(self, key: int, index: int, words: NDArray[np.uint32]) -> None:
        super().__init__(key)
        self.index, self._ready = index, words

    def _words(self, count: int) -> NDArray[np.uint32]:
        first, blocks = 4 * self._block, -(-count // 4)
        if first + 4 * blocks > len(self._ready):
            return super()._words(count)
        self._block += blocks
        return self._ready[first : first + count]


def clamped_start(start: ArrayLike, grid: Grid, patch_size: Size) -> NDArray[np.int64]:
    """The start moved into [0, N - p]; where the patch is larger than the volume, -((p - N) // 2), which centres it.

    >>> clamped_start((7, 0, -2), Grid((10, 4, 10), np.eye(4)), (4, 6, 4))
    array([ 6, -1,  0])
    """
    spare = np.array(grid.shape) - patch_size
    inside = np.clip(np.asarray(start, np.int64), 0, np.maximum(spare, 0))
    return np.where(spare < 0, -(-spare // 2), inside)


def uniform_start(unit: NDArray[np.float64], grid: Grid, patch_size: Size) -> NDArray[np.int64]:
    """The start (3,) from 0 to N - p inclusive that three numbers in [0, 1) choose."""
    last = np.maximum(np.array(grid.shape) - patch_size, 0)
    return np.asarray(np.minimum(np.floor(unit * (last + 1)).astype(np.int64), last))


def as_size(value: int | Sequence[int], name: str) -> Size:
    """A patch size as three positive whole numbers; ValueError otherwise."""
    sizes = [value] * 3 if isinstance(value, (int, np.integer)) else list(value)
    if len(sizes) != 3 or not all(isinstance(s, (int, np.integer)) and s > 0 for s in sizes):
        raise ValueError(f"{name}={value!r}: give a positive whole number, or three")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def own_count(sampler: Sampler, grid: Grid, patch_size: Size) -> int:
    """The sampler's own number of patches of a volume; ValueError where it has none."""
    count = getattr(sampler, "count", None)
    if count is None:
        raise ValueError(
            f"patches_per_volume=None: {type(sampler).__name__} has no number of patches of its own, as GridSampler "
            "has; say how many"
        )
    return int(count(grid, patch_size))


def check_choice(name: str, value: str, allowed: Sequence[str]) -> str:
    """The value, or a ValueError that lists what is allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: take {' or '.join(map(repr, allowed))}")
    return value


def one_channel(volume: Volume, key: str, role: str, sampler: str) -> None:
    """VolumeError unless the volume has `key`, of this role and one channel."""
    if key not in volume.arrays:
        raise VolumeError(f"volume {volume.id!r} has no key {key!r} for {sampler}; its keys are {list(volume.arrays)}")
    if role == "label" and volume.roles[key] != "label":
        raise VolumeError(f"{volume.where(key)}: {sampler} needs a label, and this is a {volume.roles[key]}")
    if (channels := len(volume.arrays[key])) != 1:
        raise VolumeError(f"{volume.where(key)}: {sampler} needs one channel, and this has {channels}")


def when_empty(policy: str, what: str) -> dict[str, NDArray[Any]]:
    """For a volume with nothing to draw: VolumeError for "raise", else the warning to be given once."""
    if policy == "raise":
        raise VolumeError(f"{what}; leave the volume out, or take on_empty='uniform'")
    return {"warning": np.array(f"{what}; its patches are drawn uniformly (on_empty='uniform')")}
