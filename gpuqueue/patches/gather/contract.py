"""The one hot operation: patches of mixed volumes, read through coordinate maps into fresh tensors.

B patches, C channels, (I, J, K) the axes of a patch. Everything on the host is plain data; backends share nothing but
this file.

One patch of one key is a `Read`: which array (`Source`) through which map (`PullBack`). For patch voxel p, counted
from the patch's centre voxel as q = p - size // 2, the source voxel is

    x(p) = base + rest + matrix @ q + displacement(p)
    displacement(p) = sum_abc Wi[pi,a] Wj[pj,b] Wk[pk,c] T[:,a,b,c]

with T the spline's coefficients in source voxels and W the cubic B-spline weights of `spline_weights`. `base` is whole
(int64) and added after the floor, so float32 is enough for everything else whatever the size of the volume.

Reading. `linear`: trilinear; a neighbour outside the array is the pad value (SciPy `grid-constant`). `nearest`: index
floor(x + 1/2 + 1e-3) per axis; outside the array the pad value. `vote`: of the labels of the eight neighbours, pad
outside the array, the one with the greatest summed trilinear weight, the fractions rounded to 1/128 before, so that
sums are exact; the smaller of equals. Values are `slope * stored + intercept`, per channel; pad is already a value.
Linear keys come out as float32, nearest and vote keys as int64. Points that are not finite read pad.

A pull-back whose `permutation` is set moves whole voxels only: every backend copies, bit for bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Size = tuple[int, int, int]
Mode = Literal["linear", "nearest", "vote"]
BACKENDS = ("auto", "torch", "numba", "triton")
NEAREST_SHIFT = 0.5 + 1e-3  # ties, which oblique grids make common, go up in every backend and in the reference


@dataclass(frozen=True, eq=False)
class Source:
    """A resident array: `data` (C, I, J, K) of a stored dtype, any strides; `scale` (C, 2) and `pad` (C,) float64."""

    data: Tensor
    scale: NDArray[np.float64]
    pad: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Spline:
    """Control points over a reference extent of `extent` voxels; patch voxel p is reference voxel `start` + p.

    `coefficients` (3, gi, gj, gk) float64 displace the source point, in source voxels.
    """

    coefficients: NDArray[np.float64]
    start: Size
    extent: Size


@dataclass(frozen=True, eq=False)
class PullBack:
    """Patch voxel to source voxel, about the patch's centre voxel (see the module's formula).

    `matrix` (3, 3), `base` (3,) int64, `rest` (3,) in [0, 1), all float64 but `base`. `permutation`: for each source
    axis the (patch axis, +1 or -1) that runs along it, when the map is a signed permutation with whole offsets.
    """

    matrix: NDArray[np.float64]
    base: NDArray[np.int64]
    rest: NDArray[np.float64]
    spline: Spline | None = None
    permutation: tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None = None


@dataclass(frozen=True, eq=False)
class Read:
    """One key of one patch. Keys on one grid hold the same `PullBack` object: backends may share its coordinates."""

    source: Source
    pull_back: PullBack


Reads = Mapping[str, Sequence[Read]]
Backend = Callable[[Reads, Mapping[str, Mode], Size, dict[str, Tensor]], None]


def gather(reads: Reads, modes: Mapping[str, Mode], size: Size, out: dict[str, Tensor], backend: str = "auto") -> None:
    """Fills `out[key]` (B, C, *size), contiguous, with the B patches of `reads[key]`.

    `backend`: "torch", "numba", "triton", or "auto": numba on the CPU, triton on CUDA, torch elsewhere. Raises
    ValueError for an unknown one, and for one that cannot gather where `out` lies.
    """
    for key, tensor in out.items():
        assert tensor.is_contiguous(), key
        assert tensor.dtype == (torch.float32 if modes[key] == "linear" else torch.int64), key
    find_backend(backend, next(iter(out.values())).device)(reads, modes, size, out)


def warm_up(pairs: Iterable[tuple[Mode, torch.dtype]], device: torch.device, backend: str = "auto") -> None:
    """Compiles what `gather` will need for these modes and stored dtypes, so that the first batch need not wait."""
    if backend == "numba" or (backend == "auto" and device.type == "cpu"):
        from gpuqueue.patches.gather import numba_cpu

        numba_cpu.warm_up(pairs)


def find_backend(name: str, device: torch.device) -> Backend:
    """The backend's function; imported only when asked for."""
    if name == "auto" and device.type == "cuda":
        name = "triton" if importlib.util.find_spec("triton") else "torch"
    elif name == "auto":
        name = "numba" if device.type == "cpu" else "torch"
    if name == "torch":
        from gpuqueue.patches.gather import reference

        return reference.gather
    if name == "numba":
        if device.type != "cpu":
            raise ValueError(f"backend='numba' gathers on the CPU, not on {device}; write backend='auto'")
        from gpuqueue.patches.gather import numba_cpu

        return numba_cpu.gather
    if name == "triton":
        from gpuqueue.patches.gather import triton_cuda

        return triton_cuda.gather
    raise ValueError(f"backend={name!r} is unknown; take one of {', '.join(BACKENDS)}")


def spline_weights(start: int, count: int, extent: int, num_control_points: int) -> NDArray[np.float64]:
    """Uniform cubic B-spline weights (count, num_control_points) of reference voxels start .. start + count - 1.

    Voxel o lies at t = (o + 1/2)(g - 3)/N clamped to [0, g - 3], in cell m = min(floor(t), g - 4), and weighs control
    points m .. m + 3 (de Boor, A Practical Guide to Splines; blending functions as in Rueckert et al. 1999).
    """
    cells = num_control_points - 3
    t = np.clip((np.arange(start, start + count) + 0.5) * cells / extent, 0, cells)
    m = np.minimum(np.floor(t).astype(np.int64), cells - 1)
    f = t - m
    taps = np.stack([(1 - f) ** 3, 3 * f**3 - 6 * f**2 + 4, -3 * f**3 + 3 * f**2 + 3 * f + 1, f**3], axis=1) / 6
    weights = np.zeros((count, num_control_points))
    np.put_along_axis(weights, m[:, None] + np.arange(4), taps, axis=1)
    return weights
