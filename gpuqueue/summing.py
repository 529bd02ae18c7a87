"""Copying, adding and dividing windows on the CPU, compiled: imported only where sums lie there.

Each thread takes every n-th plane of the volume, for all windows of a batch, so that no voxel has two writers and every
voxel sums in the order of the windows. (torch's own loops would start a second team of threads beside the gather's.)
"""

from __future__ import annotations

from typing import Any

from gpuqueue.patches.gather.numba_cache import jit


@jit
def add_window(
    thread: int, of: int, total: Any, window: Any, low: Any, skipped: Any, wi: Any, wj: Any, wk: Any
) -> None:
    """total (C, I, J, K) += window (C, i, j, k) * wi wj wk, from voxel `low` of the volume and `skipped` of the window.

    All are contiguous and of one dtype; the weights say how many voxels are added on each axis.
    """
    i0, j0, k0 = skipped[0], skipped[1], skipped[2]
    for i in range((thread - low[0]) % of, len(wi), of):
        for c in range(total.shape[0]):
            for j in range(len(wj)):
                into = total[c, low[0] + i, low[1] + j, low[2] : low[2] + len(wk)]
                row = window[c, i0 + i, j0 + j, k0 : k0 + len(wk)]
                weight = wi[i] * wj[j]
                for k in range(len(wk)):
                    into[k] += row[k] * (weight * wk[k])


@jit
def copy_window(thread: int, of: int, total: Any, window: Any, low: Any, skipped: Any, count: Any) -> None:
    """total (C, I, J, K) = window (C, i, j, k) for `count` voxels of each axis, likewise."""
    i0, j0, k0 = skipped[0], skipped[1], skipped[2]
    for i in range((thread - low[0]) % of, count[0], of):
        for c in range(total.shape[0]):
            for j in range(count[1]):
                into = total[c, low[0] + i, low[1] + j, low[2] : low[2] + count[2]]
                row = window[c, i0 + i, j0 + j, k0 : k0 + count[2]]
                for k in range(count[2]):
                    into[k] = row[k]


@jit
def divide(thread: int, of: int, total: Any, wi: Any, wj: Any, wk: Any) -> None:
    """total (C, I, J, K) /= wi wj wk, in place; all of one dtype."""
    for i in range(thread, total.shape[1], of):
        for c in range(total.shape[0]):
            for j in range(total.shape[2]):
                row = total[c, i, j]
                weight = wi[i] * wj[j]
                for k in range(len(wk)):
                    row[k] /= weight * wk[k]
