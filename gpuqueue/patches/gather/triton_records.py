"""What the Triton kernels are told about each patch: records of int64 and float32, as `triton_kernels` reads them.

Host numbers are float64; they are narrowed to float32 here, where they are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuqueue.patches.gather.contract import Mode, PullBack, Size, Source, Spline
from gpuqueue.patches.gather.copies import check_whole

MODES: dict[Mode, int] = {"linear": 0, "nearest": 1, "vote": 2}
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float32,
)  # fmt: skip

Key = tuple[Source, Mode, Tensor]


@dataclass(frozen=True)
class Group:
    """The keys of one patch that share a map and a shape."""

    pull_back: PullBack
    keys: list[Key]

    def kind(self) -> tuple[Any, ...]:
        """What a launch has in common: per key mode, dtype, way to pad and channels; and whether there is a spline."""
        codes = tuple((key_code(source, mode), source.data.shape[0]) for source, mode, _ in self.keys)
        return codes, self.pull_back.spline is not None


def key_code(source: Source, mode: Mode) -> int:
    """Mode, dtype, and whether pad can be loaded like a stored value, in the bits that `kernels.read_keys` takes."""
    pads = stored_pad(source) if mode == "linear" else source.pad
    direct = all(is_stored_value(pad, source.data.dtype) for pad in pads.tolist())
    if mode != "linear":
        direct = direct and not source.data.dtype.is_floating_point and bool((source.scale == [1, 0]).all())
    return MODES[mode] | DTYPES.index(source.data.dtype) << 2 | int(direct) << 5


def stored_pad(source: Source) -> NDArray[np.float64]:
    """Pad (C,) in stored units."""
    slope, intercept = source.scale.T
    return np.asarray((source.pad - intercept) / np.where(slope == 0, 1, slope))


def is_stored_value(value: float, dtype: torch.dtype) -> bool:
    """Whether a dtype holds `value`; float32 up to its rounding."""
    if dtype == torch.float32:
        return True
    if dtype.is_floating_point:
        return torch.tensor(value, dtype=dtype).to(torch.float64).item() == value
    return value.is_integer() and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


@dataclass(frozen=True)
class Axis:
    """One axis of a spline as a patch sees it: control points first .. first + count - 1.

    Patch voxel p lies at cell coordinate `fraction + p * step`, counted from `first` and clamped to least .. greatest.
    """

    first: int
    count: int
    fraction: float
    step: float
    least: float
    greatest: float


def see_axis(start: int, size: int, extent: int, points: int) -> Axis:
    """The part of an axis of `points` control points that `size` voxels see, and one more, for rounding."""
    step = (points - 3) / extent
    begin = (start + 0.5) * step
    ends = np.clip([begin, begin + (size - 1) * step], 0, points - 3)
    first, last = (min(int(end), points - 4) for end in ends)
    count = min(last + 5, points) - first
    return Axis(first, count, begin - first, step, -first, points - 3 - first)


@dataclass(frozen=True)
class SeenSpline:
    """A spline as a patch sees it; its contracted table has `table_size` numbers."""

    axes: tuple[Axis, ...]
    coefficients: NDArray[np.float32]
    table_size: int


def describe_spline(spline: Spline, size: Size) -> SeenSpline:
    """The control points (3, a, b, c) that a patch of `size` voxels sees, and where its voxels lie among them."""
    points = spline.coefficients.shape[1:]
    axes = tuple(see_axis(*each) for each in zip(spline.start, size, spline.extent, points))
    window = tuple(slice(axis.first, axis.first + axis.count) for axis in axes)
    with np.errstate(over="ignore"):
        seen = np.ascontiguousarray(spline.coefficients[(slice(None), *window)], np.float32)
    return SeenSpline(axes, seen, size[0] * size[1] * 3 * axes[2].count)


def pack(groups: list[Group], splines: list[SeenSpline]) -> tuple[list[Any], list[Any]]:
    """Records of all patches as `kernels.gather_kernel` reads them: int64 and float32, one list of lists each."""
    ints: list[Any] = []
    floats: list[Any] = []
    table = 0
    for n, group in enumerate(groups):
        pull_back, seen = group.pull_back, splines[n] if splines else None
        ints += np.clip(pull_back.base, -(2**30), 2**30).tolist()
        ints += [*group.keys[0][0].data.shape[1:], table, seen.axes[2].count if seen else 0]
        floats += [*pull_back.matrix.ravel().tolist(), *pull_back.rest.tolist()]
        floats += [0.0] * 7 if seen is None else displacement_record(seen)
        table += seen.table_size if seen else 0
        for source, mode, out in group.keys:
            key_ints, key_floats = key_record(source, mode, out)
            ints += key_ints
            floats += key_floats
    return ints, floats


def displacement_record(seen: SeenSpline) -> list[float]:
    """Largest displacement of each source axis, and the cell coordinate along k."""
    most = np.abs(seen.coefficients).reshape(3, -1).max(axis=1)
    k = seen.axes[2]
    return [*np.where(np.isnan(most), np.inf, most).tolist(), k.fraction, k.step, k.least, k.greatest]


def key_record(source: Source, mode: Mode, out: Tensor) -> tuple[list[int], list[float]]:
    """One key's part of a patch's record; a label's numbers are whole, an image's are real."""
    ints = [source.data.data_ptr(), out.data_ptr(), *source.data.stride()]
    if mode == "linear":
        values = np.stack([*source.scale.T, stored_pad(source)], axis=1).ravel().tolist()
        return ints + [0] * len(values), values
    check_whole(source)
    labels = np.stack([*source.scale.T, source.pad], axis=1).astype(np.int64).ravel().tolist()
    return ints + labels, [0.0] * len(labels)


def spline_records(splines: list[SeenSpline]) -> tuple[list[int], list[float]]:
    """Records of all patches as `kernels.contract_kernel` reads them."""
    ints: list[int] = []
    floats: list[float] = []
    coefficients, table = 1, 0  # the first number is a stand-in, so that no array is empty
    for seen in splines:
        ints += [coefficients, table, *(axis.count for axis in seen.axes)]
        for axis in seen.axes[:2]:
            floats += [axis.fraction, axis.step, axis.least, axis.greatest]
        coefficients += seen.coefficients.size
        table += seen.table_size
    return ints, floats


def float32(values: list[Any]) -> NDArray[np.float32]:
    """Host numbers narrowed; too large becomes infinite, which reads pad."""
    with np.errstate(over="ignore"):
        return np.array(values, np.float64).astype(np.float32)


def upload(ints: list[NDArray[np.int64]], floats: list[NDArray[np.float32]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, one after another in one buffer and one copy; the host does not wait for it."""
    whole = np.concatenate(ints)
    real = np.concatenate([*floats, np.zeros(sum(map(len, floats)) % 2, np.float32)])
    buffer = torch.from_numpy(np.concatenate([whole, real.view(np.int64)]))
    if device.type == "cuda":
        buffer = buffer.pin_memory().to(device, non_blocking=True)
    parts = list(buffer[: len(whole)].split([len(part) for part in ints]))
    return parts + list(buffer[len(whole) :].view(torch.float32)[: sum(map(len, floats))].split([*map(len, floats)]))
