"""How overlapping windows become one volume again, on the grid it came from."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gpuqueue.arguments import one_of
from gpuqueue.patches.gather.contract import Mode, Read, Size, Source, gather
from gpuqueue.patches.samplers import as_size
from gpuqueue.patches.samplers.grid import Overlap, overlap_voxels
from gpuqueue.patches.spatial import pull_back
from gpuqueue.volumes.grid import Grid, crop_affine
from gpuqueue.volumes.workers import FORK_LOCK

MODES = ("average", "gaussian", "hann", "crop")
_SIGMA = 1 / 8  # of a window, as nnU-Net and MONAI have it


@dataclass(frozen=True, eq=False)
class _Span:
    """One window on one axis: the voxels low .. high - 1 of the volume that it gives, the first of them its voxel
    `skipped`, and their weights."""

    low: int
    high: int
    skipped: int
    weights: NDArray[np.float64]

    @property
    def inside(self) -> slice:
        """In the volume."""
        return slice(self.low, self.high)

    @property
    def own(self) -> slice:
        """In the window."""
        return slice(self.skipped, self.skipped + self.high - self.low)


class Aggregator:
    """Puts windows together: add what a model gives for each, then ask for the result.

    "average" weighs all voxels alike; "gaussian" (standard deviation 1/8 of the window) and "hann" prefer a window's
    middle, with weights that are symmetric and nowhere 0; "crop" cuts half of the overlap off every side that does not
    lie on the volume's border, and where windows still overlap the later one stands.

    Sums are float32, or float64 for float64 outputs; cropped whole numbers stay what they are. Weights need no memory
    of the volume's size: windows on a grid have weights that are products of those on the axes.

    Args:
        shape: The volume's voxels (I, J, K).
        overlap: What neighbouring windows share, in voxels or as a share of the window; only "crop" asks for it.
        device: Where sums are kept.

    Raises:
        ValueError: An unknown mode, outputs that do not fit their locations, or voxels that no window covered.

    >>> aggregator = Aggregator((4, 4, 6))
    >>> aggregator.add_batch(torch.ones(2, 5, 4, 4, 4), [[0, 0, 0, 4, 4, 4], [0, 0, 2, 4, 4, 6]])
    >>> aggregator.result().shape
    torch.Size([5, 4, 4, 6])
    """

    def __init__(
        self, shape: Sequence[int], overlap: Overlap = 0, mode: str = "average", device: str | torch.device = "cpu"
    ) -> None:
        one_of("mode", mode, MODES)
        overlap_voxels(overlap, None)
        self.shape, self.overlap, self.mode = as_size(shape, "shape"), overlap, mode
        self.device = torch.device(device)
        self._sum: Tensor | None = None
        self._added: Counter[tuple[int, ...]] = Counter()  # locations
        self._spans: dict[tuple[int, int, int], _Span] = {}

    @torch.no_grad()
    def add_batch(self, outputs: Tensor, locations: ArrayLike) -> None:
        """Adds outputs (B, C, *window) at `locations` (B, 6): first voxels i, j, k and ends i, j, k, exclusive.

        Windows may reach beyond the volume; that part is left out.
        """
        places = np.asarray(locations).reshape(-1, 6).tolist()
        if outputs.ndim != 5 or len(places) != len(outputs):
            raise ValueError(
                f"expected outputs (B, C, I, J, K) and locations (B, 6), got {tuple(outputs.shape)} and "
                f"{np.shape(locations)}"
            )
        windows = []
        for *start, i, j, k in places:
            size = i - start[0], j - start[1], k - start[2]
            if tuple(outputs.shape[2:]) != size:
                raise ValueError(
                    f"outputs of shape {tuple(outputs.shape[2:])} do not fit their location, {size} voxels; a model "
                    "must keep the shape of its windows"
                )
            windows.append([self._span(axis, start[axis], size) for axis in range(3)])
            self._added[(*start, *size)] += 1
        self._add(outputs, windows)

    @torch.no_grad()
    def result(self) -> Tensor:
        """The volume (C, I, J, K). To be asked once, after the last window: sums become values in place."""
        if self._sum is None:
            raise ValueError("no window was added")
        total = self._total()
        if not all(weights.all() for weights in total):
            raise ValueError(f"some voxels of the volume {self.shape} were covered by no window")
        if self.mode != "crop":
            _divide(self._sum, total)
        return self._sum

    def _add(self, outputs: Tensor, windows: Sequence[Sequence[_Span]]) -> None:
        if self._sum is None:
            keeps = self.mode == "crop" and not outputs.is_floating_point()
            dtype = outputs.dtype if keeps else torch.promote_types(outputs.dtype, torch.float32)
            self._sum = _zeros((outputs.shape[1], *self.shape), dtype, self.device)
        outputs = outputs.to(self._sum)
        if self.device.type == "cpu":
            _put_on_cpu(self._sum, outputs, windows, self.mode)
            return
        for output, (i, j, k) in zip(outputs, windows):
            part, target = output[:, i.own, j.own, k.own], self._sum[:, i.inside, j.inside, k.inside]
            if self.mode == "crop":
                target.copy_(part)
            else:
                wi, wj, wk = (torch.from_numpy(span.weights).to(self._sum) for span in (i, j, k))
                target.addcmul_(part, wi[:, None, None] * wj[:, None] * wk)

    def _span(self, axis: int, start: int, size: Sequence[int]) -> _Span:
        key = axis, start, size[axis]
        if key not in self._spans:
            i, j, k = size
            self._spans[key] = self._make_span(axis, start, (i, j, k))
        return self._spans[key]

    def _make_span(self, axis: int, start: int, size: Size) -> _Span:
        stop = start + size[axis]
        low, high = max(start, 0), min(stop, self.shape[axis])
        if self.mode == "crop":
            shared = overlap_voxels(self.overlap, size)[axis]
            low += shared // 2 if start > 0 else 0
            high -= shared - shared // 2 if stop < self.shape[axis] else 0
        high = max(low, high)
        return _Span(low, high, low - start, axis_weights(self.mode, size[axis])[low - start : high - start])

    def _total(self) -> list[NDArray[np.float64]]:
        """The sum of all weights: (I,), (J,), (K,), whose product it is; or (I, J, K) where windows lie on no grid."""
        axes = [Counter((location[axis], location[axis + 3]) for location in self._added) for axis in range(3)]
        if set(self._added.values()) == {1} and math.prod(map(len, axes)) == len(self._added):
            return [self._sum_of([self._spans[axis, *pair] for pair in pairs], axis) for axis, pairs in enumerate(axes)]
        total = np.zeros(self.shape)
        for location, number in self._added.items():
            i, j, k = (self._spans[axis, location[axis], location[axis + 3]] for axis in range(3))
            total[i.inside, j.inside, k.inside] += number * i.weights[:, None, None] * j.weights[:, None] * k.weights
        return [total]

    def _sum_of(self, spans: Sequence[_Span], axis: int) -> NDArray[np.float64]:
        total = np.zeros(self.shape[axis])
        for span in spans:
            total[span.inside] += span.weights
        return total


def back_to(own: Grid, values: Tensor, reference: Grid, backend: str = "auto") -> Tensor:
    """Values (C, I, J, K) on the `reference` grid, read on the `own` one: linearly, whole numbers from the nearest
    voxel. Beyond the outer voxels' centres the outermost value stands."""
    if own.shape == reference.shape and np.allclose(own.affine, reference.affine, rtol=0, atol=1e-9):
        return values
    linear = values.is_floating_point()
    wide = torch.nn.functional.pad(values.float()[None], (1,) * 6, mode="replicate")[0]
    stored = wide if linear else wide.to(torch.int32)
    source = Source(stored, np.tile([1.0, 0.0], (len(values), 1)), np.zeros(len(values)))
    pulled = pull_back(own, crop_affine(reference.affine, (-1, -1, -1)), np.eye(4), None, (0, 0, 0), own.shape)
    result = torch.empty((1, len(values), *own.shape), dtype=torch.float32 if linear else torch.int64,
                         device=values.device)  # fmt: skip
    mode: Mode = "linear" if linear else "nearest"
    gather({"x": [Read(source, pulled)]}, {"x": mode}, own.shape, {"x": result}, backend)
    return result[0]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU from NumPy, whose large arrays come in large pages and are not written before they are used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))


def _put_on_cpu(total: Tensor, outputs: Tensor, windows: Sequence[Sequence[_Span]], mode: str) -> None:
    """Copies or adds the windows, on the gather's threads."""
    from gpuqueue.patches.gather.numba_cpu import num_threads, run_all

    array, threads = total.numpy(), num_threads()
    kernel = _kernel("copy_window" if mode == "crop" else "add_window", array.dtype)
    jobs: list[tuple[Any, ...]] = []
    for window, spans in zip(outputs.contiguous().numpy(), windows):
        low, skipped, count = np.array([(span.low, span.skipped, span.high - span.low) for span in spans]).T
        weights = [span.weights.astype(array.dtype) for span in spans]
        jobs.append((window, *np.ascontiguousarray([low, skipped]), *([count.copy()] if mode == "crop" else weights)))

    def put(thread: int) -> None:
        for job in jobs:
            kernel(thread, threads, array, *job)

    run_all([functools.partial(put, thread) for thread in range(threads)])


@functools.cache
def _kernel(name: str, dtype: np.dtype[Any]) -> Callable[..., None]:
    """A compiled function of `summing`, compiled for this dtype while no process forks."""
    with FORK_LOCK:
        from gpuqueue import summing

        kernel: Callable[..., None] = getattr(summing, name)
        one, none, weight = np.zeros((1, 1, 1, 1), dtype), np.zeros(3, np.int64), np.ones(1, dtype)
        arguments = {
            "copy_window": (one, one, none, none, none),
            "add_window": (one, one, none, none, weight, weight, weight),
            "divide": (one, weight, weight, weight),
        }
        kernel(0, 1, *arguments[name])
    return kernel


def _divide(values: Tensor, total: Sequence[NDArray[np.float64]]) -> None:
    """Divides (C, I, J, K) in place by (I, J, K), or by the product of (I,), (J,) and (K,)."""
    if len(total) == 1:
        values.div_(torch.from_numpy(total[0]).to(values))
    elif values.device.type == "cpu":
        from gpuqueue.patches.gather.numba_cpu import num_threads, run_all

        array, threads = values.numpy(), num_threads()
        divide = _kernel("divide", array.dtype)
        i, j, k = (weights.astype(array.dtype) for weights in total)
        run_all([functools.partial(divide, thread, threads, array, i, j, k) for thread in range(threads)])
    else:
        for axis, weights in enumerate(total):
            values.div_(torch.from_numpy(weights).to(values)[(..., *[None] * (2 - axis))])


def axis_weights(mode: str, size: int) -> NDArray[np.float64]:
    """Weights (size,) of a window's voxels along one axis: symmetric, above 0.

    >>> axis_weights("hann", 3)
    array([0.5, 1. , 0.5])
    """
    if mode == "gaussian":
        return np.asarray(np.exp(-0.5 * ((np.arange(size) - (size - 1) / 2) / (size * _SIGMA)) ** 2))
    if mode == "hann":  # of size + 2, without its zeros at the ends
        half = np.sin(np.pi * (np.arange((size + 1) // 2) + 1) / (size + 1)) ** 2
        return np.concatenate([half, half[::-1][size % 2 :]])
    return np.ones(size)
