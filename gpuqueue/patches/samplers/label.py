"""Classes in the shares that were asked for, however many voxels each has."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gpuqueue.patches.gather.contract import Size
from gpuqueue.patches.samplers.positions import find_voxels, index_classes
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
from gpuqueue.volumes.volume import Volume


class LabelSampler:
    """Draws a class by its weight, then one of its voxels, each equally likely: the patch is placed by that voxel.

    Every voxel of the volume counts: a patch that would leave the volume is moved inside. The voxel is followed through
    affine and elastic transforms. Whether other classes occur in the patch is left to chance; there is no rule that
    keeps foreground out of a patch.

    Args:
        label: The key of the label map, of one channel.
        weights: `{class: weight}`; a class's share is its weight over their sum, however many voxels it has. Classes
            that a volume lacks drop out there, and the others take their part. None: every class but 0 alike.
        foreground: Only this share of patches is placed by a voxel; the others start anywhere. With 0.33 and no weights
            it is nnU-Net's rule, held for any batch size.
        mode: "centre" puts the voxel at start + size // 2; "inside" anywhere in the patch.
        on_empty: A volume that has none of the classes: "uniform" starts anywhere, with one warning, or "raise".

    Raises:
        ValueError: Numbers that are no shares. Later, when a volume is loaded: VolumeError.

    >>> label = np.zeros((8, 8, 8), np.uint8)
    >>> label[2, 3, 4] = 1
    >>> sampler = LabelSampler("label", weights={0: 1, 1: 1})
    >>> prepared = sampler.prepare(Volume("case1", {"label": label}))
    >>> voxels, labels = sampler.voxels(prepared, Random(range(1000)))
    >>> voxels[labels == 1][0], round(float((labels == 1).mean()), 1)
    (array([2, 3, 4]), 0.5)
    """

    def __init__(
        self,
        label: str = "label",
        weights: Mapping[int, float] | None = None,
        foreground: float | None = None,
        mode: str = "centre",
        on_empty: str = "uniform",
    ) -> None:
        self.label = label
        self.weights = None if weights is None else _checked(weights)
        if foreground is not None and not 0 < foreground <= 1:
            raise ValueError(f"foreground={foreground!r}: a share above 0, up to 1")
        if foreground is not None and 0 in (self.weights or {}):
            raise ValueError("foreground= is a share of classes other than 0; leave 0 out of weights")
        self.foreground = 1.0 if foreground is None else float(foreground)
        self.mode = check_choice("mode", mode, MODES)
        self.on_empty = check_choice("on_empty", on_empty, EMPTY)

    def prepare(self, volume: Volume) -> Prepared:
        """Where the voxels of each class are, at most 1 byte a voxel. VolumeError for a key that is no label, and,
        with on_empty="raise", for a volume without these classes."""
        one_channel(volume, self.label, "label", "LabelSampler")
        wanted = None if self.weights is None else list(self.weights)
        prepared = index_classes(volume.arrays[self.label][0].numpy(), wanted)
        present = prepared["classes"].tolist()
        weights = dict.fromkeys(present, 1.0) if self.weights is None else self.weights
        total = sum(weights.values())
        prepared["shares"] = np.array([weights[number] for number in present], np.float64)
        absent = [(number, weight / total) for number, weight in weights.items() if number not in present]
        if not present:
            what = "class but 0" if self.weights is None else f"of the classes {sorted(weights)}"
            prepared |= when_empty(self.on_empty, f"{volume.where(self.label)} has no voxel of any {what}")
            absent = absent or [(np.nan, 1.0)]
        return prepared | {"missing": np.array(absent).reshape(-1, 2) * (1, self.foreground)}

    def draw(self, prepared: Prepared, grid: Grid, patch_size: Size, random: Random) -> NDArray[np.int64] | DrawnVoxel:
        """A voxel of the label map, or a start."""
        unit = random.uniform(6)
        if unit[0] >= self.foreground or not len(prepared["classes"]):
            return uniform_start(unit[3:], grid, patch_size)
        return self._voxel(prepared, int(_choose(prepared, unit[1])), unit[2:])

    def voxels(self, prepared: Prepared, random: Random) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Voxels (n, 3) and their classes (n,): one draw for each of the n keys of `random`, all at once."""
        unit = random.uniform(2)
        which = _choose(prepared, unit[:, 0])
        return find_voxels(prepared, which, _rank(prepared, which, unit[:, 1])), prepared["classes"][which]

    def _voxel(self, prepared: Prepared, which: int, unit: NDArray[np.float64]) -> DrawnVoxel:
        """The voxel of one class that `unit` (4,) chooses."""
        places = np.array([which])
        (voxel,) = find_voxels(prepared, places, _rank(prepared, places, unit[:1]))
        return DrawnVoxel(
            self.label,
            voxel,
            int(prepared["classes"][which]),
            unit[1:4] if self.mode == "inside" else None,
            functools.partial(self._again, prepared, which),
        )

    def _again(self, prepared: Prepared, which: int, random: Random) -> DrawnVoxel:
        return self._voxel(prepared, which, random.uniform(4))


def _choose(prepared: Prepared, unit: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places of classes, by their shares."""
    ends = np.cumsum(prepared["shares"])
    return np.asarray(np.minimum(np.searchsorted(ends, unit * ends[-1], side="right"), len(ends) - 1))


def _rank(prepared: Prepared, which: NDArray[np.int64], unit: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which of a class's voxels, all equally likely."""
    counts = prepared["counts"][which]
    return np.asarray(np.minimum(np.floor(unit * counts).astype(np.int64), counts - 1))


def _checked(weights: Mapping[int, float]) -> dict[int, float]:
    """Classes of positive weight, ascending; ValueError for what is no weight."""
    for number, weight in weights.items():
        if int(number) != number or not (np.isfinite(weight) and weight >= 0):
            raise ValueError(f"weights={{{number!r}: {weight!r}}}: whole classes, and finite weights of 0 or more")
    positive = {int(number): float(weights[number]) for number in sorted(weights) if weights[number] > 0}
    if not positive:
        raise ValueError(f"weights={dict(weights)!r}: at least one class needs a weight above 0")
    return positive
