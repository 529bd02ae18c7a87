"""Pull-backs that move whole voxels only: a strided copy, the same in every backend.

Crops, flips and reorientations are exact: no interpolation, so a NaN voxel stays where it is and labels never pass
through a float.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpuqueue.patches.gather.contract import Mode, PullBack, Read, Source

_SLAB = 1 << 18  # voxels copied at a time: the flipped temporary stays in the cache and far below the patch's bytes


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
    by_source = out.permute(0, *(1 + axis for axis in axes))  # the patch, its axes in the order of the source's
    lows = [_lowest(int(b), n, f) for b, n, f in zip(pull_back.base, by_source.shape[1:], flipped)]
    spans = [_overlap(low, n, size) for low, n, size in zip(lows, by_source.shape[1:], source.data.shape[1:])]
    if any(stop - start < n for (start, stop), n in zip(spans, by_source.shape[1:])):
        fill_pad(out, source)
    if any(stop <= start for start, stop in spans):
        return
    stored = source.data
    for axis, ((start, stop), low) in enumerate(zip(spans, lows)):
        stored = stored.narrow(axis + 1, low + start, stop - start)
        into = by_source.shape[axis + 1] - stop if flipped[axis] else start
        by_source = by_source.narrow(axis + 1, into, stop - start)
    for target, part in _slabs(by_source, stored, flipped):
        target.copy_(part)
        apply_scale(target, source, mode)


def fill_pad(out: Tensor, source: Source) -> None:
    """Sets every voxel of `out` (C, I, J, K) to its channel's pad value."""
    for channel, value in zip(out, source.pad.tolist()):
        channel.fill_(value if out.is_floating_point() else int(value))


def apply_scale(values: Tensor, source: Source, mode: Mode) -> None:
    """Stored values (C, ...) to real values, in place: times slope plus intercept per channel.

    Raises ValueError for labels (int64) whose slope or intercept is not whole: they would need rounding.
    """
    for channel, (slope, intercept) in zip(values, source.scale.tolist()):
        if slope == 1 and intercept == 0:
            continue
        if mode != "linear" and not (slope == int(slope) and intercept == int(intercept)):
            raise ValueError(
                f"a label with slope {slope} and intercept {intercept} has no whole values; "
                "read it as an image, or store it with slope 1 and intercept 0"
            )
        number = float if mode == "linear" else int
        channel.mul_(number(slope)).add_(number(intercept))


def _lowest(base: int, size: int, flipped: bool) -> int:
    """The smallest source index that a patch axis of `size` voxels about `base` reads."""
    return base + size // 2 - (size - 1) if flipped else base - size // 2


def _overlap(low: int, count: int, size: int) -> tuple[int, int]:
    """Of the indices low .. low + count - 1, the part inside an axis of `size` voxels, counted from `low`."""
    return max(0, -low), min(count, size - low)


def _slabs(target: Tensor, stored: Tensor, flipped: list[bool]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views that a plain copy joins; torch has no negative strides, so flips copy one slab at a time."""
    flips = [axis + 1 for axis, flip in enumerate(flipped) if flip]
    if not flips:
        yield target, stored
        return
    count = stored.shape[1]
    step = max(1, _SLAB * count // stored.numel())
    for start in range(0, count, step):
        stop = min(start + step, count)
        part = stored[:, count - stop : count - start] if flipped[0] else stored[:, start:stop]
        yield target[:, start:stop], _flip(part, flips)


def _flip(part: Tensor, axes: list[int]) -> Tensor:
    if part.dtype == torch.uint16:  # torch flips all stored dtypes but this one
        return torch.flip(part.view(torch.int16), axes).view(torch.uint16)
    return torch.flip(part, axes)
