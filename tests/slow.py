"""The slow truth: patches computed in float64 with SciPy, from the design's formulas and nothing of gpuqueue's own."""

from __future__ import annotations

import numpy as np
from scipy.interpolate import BSpline
from scipy.ndimage import map_coordinates


def displacement(control_points, shape):
    """u (3, I, J, K) in mm over a reference grid, from control points (3, gi, gj, gk)."""
    if control_points is None:
        return np.zeros((3, *shape))
    dense = control_points
    for axis, (n, g) in enumerate(zip(shape, control_points.shape[1:])):
        t = np.clip((np.arange(n) + 0.5) * (g - 3) / n, 0, g - 3)
        weights = BSpline.design_matrix(np.minimum(t, g - 3 - 1e-12), np.arange(g + 4) - 3.0, 3).toarray()
        dense = np.moveaxis(np.tensordot(weights, dense, (1, axis + 1)), 0, axis + 1)
    return dense


def source_points(reference_affine, shape, key_affine, forward, control_points):
    """Source voxels (3, I, J, K) that the voxels of a whole reference grid read."""
    o = np.stack(np.meshgrid(*[np.arange(n) for n in shape], indexing="ij")).astype(float)
    u = displacement(control_points, shape)
    u = u.reshape(3, -1)
    if 1 in shape:  # axes of one voxel take no part
        v = np.linalg.inv(reference_affine[:3, :3]) @ u
        v[np.array(shape) == 1] = 0
        u = reference_affine[:3, :3] @ v
    world = reference_affine[:3, :3] @ o.reshape(3, -1) + reference_affine[:3, 3:] + u
    back = np.linalg.inv(key_affine) @ np.linalg.inv(forward)
    return (back[:3, :3] @ world + back[:3, 3:]).reshape(3, *shape)


def linear(values, points, pad):
    """Channels (C, ...) of `values` at source points, blending with the pad value at the border."""
    return np.stack(
        [
            map_coordinates(channel.astype(np.float64), points, order=1, mode="grid-constant", cval=pad[c])
            for c, channel in enumerate(values)
        ]
    )


def nearest(values, points, pad):
    """Channels (C, ...) at source points by floor(x + 1/2 + 1e-3), the pad value outside."""
    index = np.floor(points + 0.5 + 1e-3).astype(np.int64)
    size = np.array(values.shape[1:]).reshape(3, *[1] * (index.ndim - 1))
    inside = ((index >= 0) & (index < size)).all(axis=0)
    i, j, k = np.where(inside, index, 0)
    return np.stack([np.where(inside, channel[i, j, k], pad[c]) for c, channel in enumerate(values)])


def crop(array, start, size, outside):
    """A crop that may leave the array; `outside` is broadcast where it does."""
    start, size, n = np.array(start), np.array(size), np.array(array.shape[1:])
    out = np.empty((len(array), *size), array.dtype)
    out[:] = np.asarray(outside).reshape(-1, 1, 1, 1)
    a, b = np.maximum(start, 0), np.minimum(start + size, n)
    to, source = tuple(slice(*p) for p in zip(a - start, b - start)), tuple(slice(*p) for p in zip(a, b))
    out[(slice(None), *to)] = array[(slice(None), *source)]
    return out
