"""Backend "torch": the gather in plain PyTorch, on any device; the one to read, and the one that others must equal.

Per patch the window of the source that the patch can read is copied out as float32, up to one voxel beyond the array,
where the pad value stands; `grid_sample` then reads it with coordinates counted in the window. The grid is built by
broadcasting in float32, never through a matrix product, so neither autocast nor TF32 can round it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuqueue.patches.gather.bounds import patch_offsets, source_box, visible_part
from gpuqueue.patches.gather.contract import NEAREST_SHIFT, Mode, PullBack, Reads, Size, Source
from gpuqueue.patches.gather.copies import apply_scale, copy_patch, fill_pad, is_copy

Box = tuple[NDArray[np.int64], NDArray[np.int64]]


@torch.no_grad()
def gather(reads: Reads, modes: Mapping[str, Mode], size: Size, out: dict[str, Tensor]) -> None:
    """Fills `out[key]` (B, C, *size); see `contract.gather`."""
    device = next(iter(out.values())).device
    with torch.autocast(device.type, enabled=False):
        for b in range(len(next(iter(reads.values())))):
            points: dict[int, Tensor] = {}  # keys that hold one PullBack share its coordinates
            for key, patches in reads.items():
                source, pull_back = patches[b].source, patches[b].pull_back
                if is_copy(pull_back):
                    copy_patch(patches[b], modes[key], out[key][b])
                    continue
                if id(pull_back) not in points:
                    points[id(pull_back)] = source_points(pull_back, size, device)
                here, target = points[id(pull_back)], out[key][b]
                if modes[key] == "linear":
                    read_linear(source, here, window_box(pull_back, size, source), pull_back.base, target)
                elif modes[key] == "nearest":
                    read_nearest(source, here, pull_back.base, target)
                else:
                    read_vote(source, here, pull_back.base, target)


def source_points(pull_back: PullBack, size: Size, device: torch.device) -> Tensor:
    """Source coordinate of every patch voxel relative to `base`: (3, I, J, K) float32.

    Points that are not finite become points far outside, which read the pad value.
    """
    points = torch.zeros((3, *size), dtype=torch.float32, device=device)
    if pull_back.spline is not None:
        add_displacement(points, *visible_part(pull_back.spline, size))
    for axis in range(3):
        with np.errstate(invalid="ignore"):
            ramp = pull_back.matrix[:, axis, None] * patch_offsets(size[axis])
        if axis == 2:
            ramp = ramp + pull_back.rest[:, None]
        shape = [3, 1, 1, 1]
        shape[axis + 1] = size[axis]
        points += _float32(ramp, device).reshape(shape)
    if not np.isfinite(source_box(pull_back, size)).all():
        points[:, ~points.isfinite().all(dim=0)] = -1e9
    return points


def add_displacement(points: Tensor, coefficients: NDArray[np.float64], weights: list[NDArray[np.float64]]) -> None:
    """Adds the spline's displacement to `points` (3, I, J, K): axes i and j on the host, k on the device.

    The last axis is a sum of outer products rather than a matrix product, which could run in TF32 or bfloat16.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        table = _float32(
            np.einsum("ia,jb,sabc->cijs", weights[0], weights[1], coefficients, optimize=True), points.device
        )
    for rows, weight in zip(table, _float32(weights[2].T, points.device)):
        points.addcmul_(rows.permute(2, 0, 1)[..., None], weight)


def window_box(pull_back: PullBack, size: Size, source: Source) -> Box:
    """First and last source index (3,), (3,) of the window: all that the patch reads, at most one voxel outside."""
    low, high = source_box(pull_back, size)
    last = np.array(source.data.shape[1:])
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return np.full(3, -1), last
    first_index = np.clip(np.floor(low) - 1 + pull_back.base, -1, last).astype(np.int64)
    last_index = np.clip(np.floor(high) + 2 + pull_back.base, -1, last).astype(np.int64)
    return first_index, last_index


def read_linear(source: Source, points: Tensor, box: Box, base: NDArray[np.int64], out: Tensor) -> None:
    """Trilinear values at `points` (3, I, J, K), relative to `base`, into `out` (C, I, J, K)."""
    window = _window(source, box)
    grid = torch.empty((1, *points.shape[1:], 3), dtype=torch.float32, device=out.device)
    for axis in range(3):
        count = window.shape[axis + 1]
        first = int(base[axis] - box[0][axis])
        # grid_sample's own coordinate of voxel x: (2 x + 1) / count - 1, axes in the order k, j, i
        torch.add((2 * first + 1) / count - 1, points[axis], alpha=2 / count, out=grid[0, ..., 2 - axis])
    values = torch.nn.functional.grid_sample(
        window[None], grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    out.copy_(values[0])


def read_nearest(source: Source, points: Tensor, base: NDArray[np.int64], out: Tensor) -> None:
    """Labels at index floor(x + NEAREST_SHIFT) of `points` (3, I, J, K) into `out` (C, I, J, K)."""
    out.copy_(labels_at(source, torch.floor(points + NEAREST_SHIFT), base))


def read_vote(source: Source, points: Tensor, base: NDArray[np.int64], out: Tensor) -> None:
    """Of the eight neighbours' labels the one with the greatest weight, into `out` (C, I, J, K); see `contract`."""
    lower = torch.floor(points)
    upper_weights = torch.floor((points - lower) * 128 + 0.5).to(torch.int64)
    neighbours = []
    for corner in itertools.product((0, 1), repeat=3):
        along = [upper if on else 128 - upper for on, upper in zip(corner, upper_weights)]
        labels = labels_at(source, lower + lower.new_tensor(corner).reshape(3, 1, 1, 1), base)
        neighbours.append((labels, along[0] * along[1] * along[2]))
    best, most = neighbours[0][0], torch.zeros_like(out)
    for labels, _ in neighbours:
        total = sum((weight * (other == labels) for other, weight in neighbours), torch.zeros_like(out))
        better = (total > most) | ((total == most) & (labels < best))
        best, most = torch.where(better, labels, best), torch.where(better, total, most)
    out.copy_(best)


def labels_at(source: Source, whole: Tensor, base: NDArray[np.int64]) -> Tensor:
    """Labels (C, I, J, K) int64 at index `base + whole`, `whole` (3, I, J, K) holding whole floats; pad outside."""
    outside = torch.zeros(whole.shape[1:], dtype=torch.bool, device=whole.device)
    indices = []
    for axis, (first, count) in enumerate(zip(base.tolist(), source.data.shape[1:])):
        index = whole[axis].clamp(-1 - first, count - first).to(torch.int64) + first
        outside |= (index < 0) | (index >= count)
        indices.append(index.clamp_(0, count - 1))
    labels = source.data[:, indices[0], indices[1], indices[2]].to(torch.int64)
    apply_scale(labels, source, "nearest")
    for channel, pad in zip(labels, source.pad.tolist()):
        channel.masked_fill_(outside, int(pad))
    return labels


def _window(source: Source, box: Box) -> Tensor:
    """Source indices box[0] .. box[1] as real values (C, I, J, K) float32, pad outside the array."""
    shape = (box[1] - box[0] + 1).tolist()
    window = torch.empty((source.data.shape[0], *shape), dtype=torch.float32, device=source.data.device)
    fill_pad(window, source)
    inner, stored = window, source.data
    for axis in range(3):
        start, stop = max(int(box[0][axis]), 0), min(int(box[1][axis]) + 1, stored.shape[axis + 1])
        count = max(stop - start, 0)
        inner = inner.narrow(axis + 1, start - int(box[0][axis]) if count else 0, count)
        stored = stored.narrow(axis + 1, start if count else 0, count)
    inner.copy_(stored)
    apply_scale(inner, source, "linear")
    return window


def _float32(values: NDArray[np.float64], device: torch.device) -> Tensor:
    """Host float64 as a float32 tensor on `device`; too large becomes infinite."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(device, non_blocking=True)
