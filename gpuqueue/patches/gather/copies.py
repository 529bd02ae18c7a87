"""Pull-backs that move whole voxels only: a strided copy, the same in every backend.

Crops, flips and reorientations are exact: no interpolation, so a NaN voxel stays where it is and labels never pass
through a float.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuqueue.patches.gather.contract import Mode, PullBack, Read, Source


def is_copy(pull_back: PullBack) -> bool:
    """Whether the map only permutes and flips axes by whole voxels."""
    return pull_back.permutation is not None and pull_back.spline is None


def copy_patch(read: Read, mode: Mode, out: Tensor) -> None:
    """Fills `out` (C, I, J, K) with the voxels of `read`, whose pull-back is a signed permutation.

    Linear: float32(stored) * float32(slope) + float32(intercept), where they are not 1 and 0. Outside the array: pad.
    """
    source, pull_back = read.source, read.pull_back
    assert pull_back.permutation is not None
    axes = [axis for axis, _ in pull_back.permutation]
    flipped = [sign < 0 for _, sign in pull_back.permutation]
    target = out.permute(0, *(1 + axis for axis in axes))  # the patch, its axes in the order of the source's
    lows = [_lowest(int(b), n, flip) for b, n, flip in zip(pull_back.base, target.shape[1:], flipped)]
    spans = [_overlap(low, n, size) for low, n, size in zip(lows, target.shape[1:], source.data.shape[1:])]
    if any(stop - start < n for (start, stop), n in zip(spans, target.shape[1:])):
        fill_pad(out, source)
    if any(stop <= start for start, stop in spans):
        return
    stored = source.data
    for axis, ((start, stop), low) in enumerate(zip(spans, lows)):
        stored = stored.narrow(axis + 1, low + start, stop - start)
        into = target.shape[axis + 1] - stop if flipped[axis] else start
        target = target.narrow(axis + 1, into, stop - start)
    _copy(target, stored, [axis + 1 for axis, flip in enumerate(flipped) if flip])
    apply_scale(target.numpy() if target.device.type == "cpu" else target, source, mode)


def fill_pad(out: Tensor, source: Source) -> None:
    """Sets every voxel of `out` (C, I, J, K) to its channel's pad value."""
    for channel, value in zip(out, source.pad.tolist()):
        channel.fill_(value if out.is_floating_point() else int(value))


def apply_scale(values: Tensor | NDArray[Any], source: Source, mode: Mode) -> None:
    """Stored values (C, ...) to real values, in place: times slope plus intercept per channel."""
    for channel, (slope, intercept) in zip(values, source.scale.tolist()):
        if slope == 1 and intercept == 0:
            continue
        if mode == "linear":
            channel *= slope
            channel += intercept
            continue
        check_whole(source)
        channel *= int(slope)
        channel += int(intercept)


def check_whole(label: Source) -> None:
    """Raises ValueError for a label whose slope or intercept is not whole: its values would need rounding."""
    if (label.scale % 1 != 0).any():
        raise ValueError(
            f"a label with slope and intercept {label.scale.tolist()} has no whole values; "
            "read it as an image, or store it with slope 1 and intercept 0"
        )


def _lowest(base: int, size: int, flipped: bool) -> int:
    """The smallest source index that a patch axis of `size` voxels about `base` reads."""
    return base + size // 2 - (size - 1) if flipped else base - size // 2


def _overlap(low: int, count: int, size: int) -> tuple[int, int]:
    """Of the indices low .. low + count - 1, the part inside an axis of `size` voxels, counted from `low`."""
    return max(0, -low), min(count, size - low)


def _copy(target: Tensor, stored: Tensor, flips: list[int]) -> None:
    """Copies and casts, with the axes of `flips` reversed.

    On the CPU through NumPy, which knows negative strides, so needs no memory, and starts no threads: those of PyTorch
    wait for each other, for a tenth of a second where other processes use their cores.
    """
    if target.device.type == "cpu" and stored.dtype != torch.bfloat16:
        view = stored.numpy()[tuple(slice(None, None, -1 if axis in flips else 1) for axis in range(4))]
        np.copyto(target.numpy(), view, casting="unsafe")
    elif stored.dtype == torch.uint16:  # PyTorch flips all stored dtypes but this one
        target.copy_(torch.flip(stored.view(torch.int16), flips).view(torch.uint16))
    else:
        target.copy_(torch.flip(stored, flips) if flips else stored)
