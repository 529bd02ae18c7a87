"""What is worked out once per load, in the worker where there is one: every check and statistic of one volume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuqueue.errors import VolumeError
from gpuqueue.patches.gather.contract import Size
from gpuqueue.patches.samplers import Sampler, own_count
from gpuqueue.patches.transforms import RandomElasticDeformation
from gpuqueue.volumes.grid import Grid, reoriented, respaced
from gpuqueue.volumes.storage import handle_nonfinite
from gpuqueue.volumes.volume import Volume

Pad = float | str  # a number, "minimum" or "mean"


@dataclass(frozen=True, eq=False)
class Prepared:
    """`reference` is the grid patches are cut from; `pads` {key: (C,)} values; `sampler` the sampler's own arrays."""

    reference: Grid
    pads: dict[str, NDArray[np.float64]]
    sampler: dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Preparation:
    """`prepare(volume) -> (volume, Prepared)`; plain settings, so that it can be sent to workers."""

    patch_size: Size | None
    sampler: Sampler
    elastic: RandomElasticDeformation | None = None
    orientation: str | None = None
    spacing: tuple[float, float, float] | None = None
    pad: Mapping[str, Pad] | None = None
    on_small: str = "pad"
    on_nonfinite: str = "raise"

    def __call__(self, volume: Volume) -> tuple[Volume, Prepared]:
        """Raises VolumeError with the volume's id where its size, values or grid do not suit."""
        volume = self._finite(volume)
        reference = self.reference_grid(volume.grid())
        self.check_grid(reference, volume.id)
        pads = {key: _pad_values(volume, key, self._pad_of(key, volume.roles[key])) for key in volume.arrays}
        return volume, Prepared(reference, pads, dict(self.sampler.prepare(volume)))

    @property
    def needs_grid(self) -> bool:
        """Whether `check_grid` can find anything."""
        return self.on_small == "raise" or self.elastic is not None

    def reference_grid(self, grid: Grid) -> Grid:
        """The grid that `orientation=` and `spacing=` make of the reference key's."""
        if self.orientation is not None:
            grid = reoriented(grid, self.orientation)
        return grid if self.spacing is None else respaced(grid, self.spacing)

    def own_count(self, grid: Grid) -> int:
        """The sampler's own number of patches of a volume with this reference key; ValueError where it has none."""
        reference = self.reference_grid(grid)
        return own_count(self.sampler, reference, self.patch_size or reference.shape)

    def check_grid(self, reference: Grid, volume_id: str) -> None:
        """What a header alone can tell: a patch larger than the volume, an elastic displacement that folds."""
        size = reference.shape if self.patch_size is None else self.patch_size
        if self.on_small == "raise" and any(p > n for p, n in zip(size, reference.shape)):
            raise VolumeError(
                f"volume {volume_id!r} has shape {reference.shape}, smaller than the patch {size}; "
                "take a smaller patch_size, or on_small='pad'"
            )
        if self.elastic is not None:
            self.elastic.limits(reference, volume_id)

    def _pad_of(self, key: str, role: str) -> Pad:
        pad = self.pad or {}
        return pad.get(key, pad.get(role, "minimum" if role == "image" else 0))

    def _finite(self, volume: Volume) -> Volume:
        cleaned = {
            key: fixed
            for key, data in volume.arrays.items()
            if (fixed := handle_nonfinite(data, self.on_nonfinite, volume.where(key))) is not data
        }
        if not cleaned:
            return volume
        return Volume(
            volume.id,
            volume.arrays | cleaned,
            volume.affines,
            volume.roles,
            volume.same_grid,
            scale=volume.scale,
            sources=volume.sources,
        )


def _pad_values(volume: Volume, key: str, pad: Pad) -> NDArray[np.float64]:
    """The pad value of each channel (C,), as a true value."""
    data, scale = volume.arrays[key], volume.scale[key]
    if not isinstance(pad, str):
        return np.full(len(data), float(pad))
    if volume.roles[key] == "label":
        raise VolumeError(f"{volume.where(key)}: a label's pad must be a number (a class), got {pad!r}")
    stored = np.empty(len(data))
    for channel, array in enumerate(data):
        values = (array.float() if array.dtype == torch.bfloat16 else array).numpy()  # NumPy has no bfloat16
        stored[channel] = _statistic(values, pad, scale[channel, 0] >= 0)
        if not np.isfinite(stored[channel]):  # NaN spreads; looking for it beforehand would take another pass
            finite = values[np.isfinite(values)]
            stored[channel] = _statistic(finite, pad, scale[channel, 0] >= 0) if finite.size else 0.0
    return np.asarray(scale[:, 0] * stored + scale[:, 1])


def _statistic(values: NDArray[Any], pad: str, rising: bool) -> float:
    """The mean, or what becomes the smallest true value where slopes are positive (`rising`) or negative."""
    with np.errstate(invalid="ignore"):
        return float(values.mean(dtype=np.float64) if pad == "mean" else values.min() if rising else values.max())


def check_pad(pad: Mapping[str, Pad] | None) -> dict[str, Pad]:
    """The pad settings, or a ValueError for a value that is none."""
    for key, value in (pad or {}).items():
        if not (value in ("minimum", "mean") if isinstance(value, str) else np.isfinite(value)):
            raise ValueError(f"pad={{{key!r}: {value!r}}}: give a number, 'minimum' or 'mean'")
    return dict(pad or {})
