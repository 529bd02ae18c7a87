"""The compiled code of the CPU backend: one driver, and one reader for each mode and stored dtype.

The driver cuts a patch into tiles of TILE_J rows by TILE_K voxels and walks them along i, so that the source voxels of a
tile stay in the nearest cache. It computes a tile's source coordinates in float32, each row about a whole source voxel
of its own, notes which run of each row has all its neighbours inside the array, and hands the tile to the reader of
every key. A reader takes the runs without a test and the rest voxel by voxel. Scratch memory is one tile: no coordinate
grid exists.

Readers are reached through their addresses, so that n keys of m dtypes need n + m compilations, not n times m.
Whole numbers and floats never meet in one expression: that would be float64, and twice the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuqueue.patches.gather.contract import NEAREST_SHIFT
from gpuqueue.patches.gather.numba_cache import jit
from gpuqueue.patches.gather.numba_instructions import (
    address,
    call,
    float_at,
    floor,
    floor8,
    fused8,
    int64_at,
    load8,
    minus8,
    moved,
    plus8,
    prefetch,
    spread8,
    store8,
    stored_float,
    stored_whole,
    trilinear,
    trilinear_strided,
    whole8,
)

# int64 fields of a key, and float64 values of each of its channels
DATA, READER, OUT, CHANNELS, CHANNEL_STRIDE, STRIDE, FIELDS = 0, 1, 2, 3, 4, 5, 11
SLOPE, INTERCEPT, PAD, VALUES = range(4)
TILE_J, TILE_K = 32, 96
PSTEP2 = 8
PSTEP = 4
PD = 3.0
SHIFT = np.float32(NEAREST_SHIFT)
ZERO, ONE = np.float32(0), np.float32(1)
MARGIN = 1e-3  # voxels; keeps the rounding of float32 out of the test for the interior
FAR = 2.0**30  # beyond it, or not a number, a coordinate is simply outside


# Splines -------------------------------------------------------------------------------------------------------------


@jit
def cells_and_taps(start: int, count: int, extent: int, points: int) -> Any:
    """First control point (count,) and its four weights (count, 4): `contract.spline_weights`, sparse."""
    cells, taps = np.zeros(count, np.int64), np.zeros((count, 4))
    for p in range(count):
        t = min(max((start + p + 0.5) * (points - 3) / extent, 0.0), points - 3.0)
        cell = min(int(t), points - 4)
        f = t - cell
        cells[p] = cell
        taps[p, 0] = (1 - f) ** 3 / 6
        taps[p, 1] = (3 * f**3 - 6 * f**2 + 4) / 6
        taps[p, 2] = (-3 * f**3 + 3 * f**2 + 3 * f + 1) / 6
        taps[p, 3] = f**3 / 6
    return cells, taps


@jit
def padded_part(coefficients: Any, cells_i: Any, cells_j: Any, cells_k: Any) -> Any:
    """The control points that the patch sees, float32, those along k padded with zeros to whole vectors."""
    first_i, first_j, first_k = cells_i[0], cells_j[0], cells_k[0]
    num_i, num_j = cells_i[-1] + 4 - first_i, cells_j[-1] + 4 - first_j
    num_k = cells_k[-1] + 4 - first_k
    part = np.zeros((3, num_i, num_j, (num_k + 7) // 8 * 8), np.float32)
    for s in range(3):
        for a in range(num_i):
            for b in range(num_j):
                for c in range(num_k):
                    part[s, a, b, c] = coefficients[s, first_i + a, first_j + b, first_k + c]
    cells_i -= first_i
    cells_j -= first_j
    cells_k -= first_k
    return part


@jit
def dense_weights(cells: Any, taps: Any, points: int) -> Any:
    """Weights (control points, voxels rounded up to whole vectors) float32 along k."""
    weights = np.zeros((points, (len(cells) + 7) // 8 * 8), np.float32)
    for p in range(len(cells)):
        for tap in range(4):
            weights[cells[p] + tap, p] = taps[p, tap]
    return weights


@jit
def contract_plane(part: Any, cells_i: Any, taps_i: Any, i: int, j0: int, j1: int, plane: Any) -> None:
    """plane[s, b, c] = sum_a taps_i[i, a] part[s, a, b, c] for the rows b in j0 .. j1 - 1."""
    source, target = address(part), address(plane)
    _, num_a, num_b, num_c = part.shape
    for s in range(3):
        for b in range(j0, j1):
            for c in range(0, num_c, 8):
                total = spread8(ZERO)
                for a in range(4):
                    place = ((s * num_a + cells_i[i] + a) * num_b + b) * num_c + c
                    total = fused8(load8(source, place), spread8(np.float32(taps_i[i, a])), total)
                store8(target, (s * num_b + b) * num_c + c, total)


@jit
def contract_row(plane: Any, cells_j: Any, taps_j: Any, j: int, row: Any) -> None:
    """row[s, c] = sum_b taps_j[j, b] plane[s, b, c]."""
    source, target = address(plane), address(row)
    _, num_b, num_c = plane.shape
    for s in range(3):
        for c in range(0, num_c, 8):
            total = spread8(ZERO)
            for b in range(4):
                place = (s * num_b + cells_j[j] + b) * num_c + c
                total = fused8(load8(source, place), spread8(np.float32(taps_j[j, b])), total)
            store8(target, s * num_c + c, total)


# Coordinates ---------------------------------------------------------------------------------------------------------


@jit
def place_row(
    points: Any, ramp: Any, origin: Any, slopes: Any, k0: int, k1: int, row: Any, weights: Any, cells_k: Any
) -> None:
    """points[s, k - k0] = origin[s] + slopes[s] * ramp[k] + sum_c row[s, c] weights[c, k] for k in k0 .. k1 - 1."""
    a0, a1, a2 = (spread8(np.float32(origin[0])), spread8(np.float32(origin[1])), spread8(np.float32(origin[2])))
    m0, m1, m2 = (spread8(np.float32(slopes[0])), spread8(np.float32(slopes[1])), spread8(np.float32(slopes[2])))
    num_c, width, taps, values = weights.shape[0], weights.shape[1], address(weights), address(row)
    step = row.shape[1]
    for k in range(k0, k1, 8):
        u0, u1, u2 = spread8(ZERO), spread8(ZERO), spread8(ZERO)
        if num_c > 0:
            for c in range(cells_k[k], cells_k[min(k + 7, k1 - 1)] + 4):
                w = load8(taps, c * width + k)
                u0 = fused8(w, spread8(values[c]), u0)
                u1 = fused8(w, spread8(values[step + c]), u1)
                u2 = fused8(w, spread8(values[2 * step + c]), u2)
        q = load8(ramp, k)
        store8(points, k - k0, plus8(u0, fused8(m0, q, a0)))
        store8(points, TILE_K + k - k0, plus8(u1, fused8(m1, q, a1)))
        store8(points, 2 * TILE_K + k - k0, plus8(u2, fused8(m2, q, a2)))


@jit
def tile_is_inside(centre: Any, reach: Any, shape: Any) -> bool:
    """Whether all that lies within `reach` (3,) of source point `centre` has its eight neighbours in the array."""
    for s in range(3):
        if not (centre[s] - reach[s] > MARGIN and centre[s] + reach[s] < shape[s] - 1 - MARGIN):
            return False
    return True


@jit
def find_run(points: Any, whole: Any, shape: Any, count: int) -> Any:
    """The first run [first, last) of a row whose voxels all have their eight neighbours inside the array."""
    first = 0
    while first < count and not is_inside(points, first, whole, shape):
        first += 1
    last = first
    while last < count and is_inside(points, last, whole, shape):
        last += 1
    return first, last


@jit
def is_inside(points: Any, k: int, whole: Any, shape: Any) -> bool:
    """Whether all eight neighbours of voxel k of the row lie inside the array."""
    for s in range(3):
        x = points[s * TILE_K + k]
        if not (x >= np.float32(-whole[s]) and x < np.float32(shape[s] - 1 - whole[s])):
            return False
    return True


# Readers of one tile -------------------------------------------------------------------------------------------------
#
# data       address of the array's first voxel, typed by its stored dtype
# points     (rows, 3, TILE_K) float32 coordinates about `whole` (rows, 3), a voxel index; `shape` (3,) of the array
# runs       (rows, 2): the first voxel whose neighbours are all inside, and the one after the last
# key        its FIELDS; `values` (channels, VALUES)
# out        element of the output where the tile begins; its rows lie `out_row` apart, its channels `out_step`
# fractions, indices: scratch for a row


def read_linear(
    data: Any, points: Any, whole: Any, runs: Any, shape: Any, key: Any, values: Any, fractions: Any, indices: Any,
    out: int, out_row: int, out_step: int, rows: int, count: int,
) -> None:  # fmt: skip
    """Trilinear float32 values."""
    si, sj, sk = key[STRIDE], key[STRIDE + 1], key[STRIDE + 2]
    fi, fj, fk = fractions, moved(fractions, TILE_K), moved(fractions, 2 * TILE_K)
    for row in range(rows):
        x, corner, first, last = moved(points, row * 3 * TILE_K), moved(whole, row * 3), runs[2 * row], runs[2 * row + 1]
        split_row(x, key, first, last, fractions, indices)
        start = corner[0] * si + corner[1] * sj + corner[2] * sk
        far = start + key[8]*si+key[9]*sj+key[10]*sk
        for k in range(first, last, PSTEP):
            prefetch(data, far + np.int64(indices[k]))
        for channel in range(key[CHANNELS]):
            slope, intercept = np.float32(values[channel * VALUES]), np.float32(values[channel * VALUES + 1])
            target = moved(float_at(key[OUT]), out + row * out_row + channel * out_step)
            if sk == 1:
                for k in range(first, last):
                    value = trilinear(data, start + np.int64(indices[k]), si, sj, sk, fi[k], fj[k], fk[k])
                    target[k] = value * slope + intercept
            else:
                for k in range(first, last):
                    value = trilinear_strided(data, start + np.int64(indices[k]), si, sj, sk, fi[k], fj[k], fk[k])
                    target[k] = value * slope + intercept
            for k in range(first):
                target[k] = linear_at(data, x, k, corner, shape, key, channel, values)
            for k in range(last, count):
                target[k] = linear_at(data, x, k, corner, shape, key, channel, values)
            start += key[CHANNEL_STRIDE]


@jit
def split_row(points: Any, key: Any, first: int, last: int, fractions: Any, indices: Any) -> None:
    """Coordinates to fractions and to element offsets from the row's whole voxel."""
    si, sj, sk = spread8(np.int32(key[STRIDE])), spread8(np.int32(key[STRIDE + 1])), spread8(np.int32(key[STRIDE + 2]))
    for k in range(first // 8 * 8, last, 8):
        x, y, z = load8(points, k), load8(points, TILE_K + k), load8(points, 2 * TILE_K + k)
        i, j, h = floor8(x), floor8(y), floor8(z)
        store8(fractions, k, minus8(x, i))
        store8(fractions, TILE_K + k, minus8(y, j))
        store8(fractions, 2 * TILE_K + k, minus8(z, h))
        store8(indices, k, fused8(whole8(i), si, fused8(whole8(j), sj, fused8(whole8(h), sk, spread8(np.int32(0))))))


@jit
def linear_at(data: Any, points: Any, k: int, whole: Any, shape: Any, key: Any, channel: int, values: Any) -> Any:
    """One voxel near or beyond the border: neighbours outside the array are the pad value."""
    slope, intercept = np.float32(values[channel * VALUES]), np.float32(values[channel * VALUES + 1])
    pad = np.float32(values[channel * VALUES + 2])
    x, y, z = points[k], points[TILE_K + k], points[2 * TILE_K + k]
    if not (reaches(x, whole[0], shape[0]) and reaches(y, whole[1], shape[1]) and reaches(z, whole[2], shape[2])):
        return pad
    x0, y0, z0 = floor(x), floor(y), floor(z)
    fi, fj, fk = x - x0, y - y0, z - z0
    i0, j0, k0 = whole[0] + int(x0), whole[1] + int(y0), whole[2] + int(z0)
    stored, inside, outside = ZERO, ZERO, ZERO
    for di in range(2):
        for dj in range(2):
            for dk in range(2):
                weight = (fi if di else ONE - fi) * (fj if dj else ONE - fj) * (fk if dk else ONE - fk)
                if (0 <= i0 + di < shape[0]) and (0 <= j0 + dj < shape[1]) and (0 <= k0 + dk < shape[2]):
                    index = (i0 + di) * key[STRIDE] + (j0 + dj) * key[STRIDE + 1] + (k0 + dk) * key[STRIDE + 2]
                    stored += weight * stored_float(data, channel * key[CHANNEL_STRIDE] + index)
                    inside += weight
                else:
                    outside += weight
    return stored * slope + inside * intercept + outside * pad


@jit
def reaches(x: Any, whole: int, size: int) -> bool:
    """Whether a coordinate has a neighbour inside an axis of `size` voxels; not for one that is not a number."""
    return bool(x > np.float32(-1 - whole) and x < np.float32(size - whole))


def read_nearest(
    data: Any, points: Any, whole: Any, runs: Any, shape: Any, key: Any, values: Any, fractions: Any, indices: Any,
    out: int, out_row: int, out_step: int, rows: int, count: int,
) -> None:  # fmt: skip
    """Stored labels at floor(x + NEAREST_SHIFT), int64."""
    for row in range(rows):
        x, corner, first, last = moved(points, row * 3 * TILE_K), moved(whole, row * 3), runs[2 * row], runs[2 * row + 1]
        nearest_row(x, key, first, last, indices)
        start = corner[0] * key[STRIDE] + corner[1] * key[STRIDE + 1] + corner[2] * key[STRIDE + 2]
        far = start + key[8]*key[STRIDE]+key[9]*key[STRIDE+1]+key[10]*key[STRIDE+2]
        for k in range(first, last, PSTEP2):
            prefetch(data, far + np.int64(indices[k]))
        for channel in range(key[CHANNELS]):
            slope, intercept = int(values[channel * VALUES]), int(values[channel * VALUES + 1])
            target = moved(int64_at(key[OUT]), out + row * out_row + channel * out_step)
            for k in range(first, last):
                target[k] = stored_whole(data, start + np.int64(indices[k])) * slope + intercept
            for k in range(first):
                target[k] = nearest_at(data, x, k, corner, shape, key, channel, values)
            for k in range(last, count):
                target[k] = nearest_at(data, x, k, corner, shape, key, channel, values)
            start += key[CHANNEL_STRIDE]


@jit
def nearest_row(points: Any, key: Any, first: int, last: int, indices: Any) -> None:
    """Coordinates to the nearest voxel's element offset from the row's whole voxel."""
    si, sj, sk = spread8(np.int32(key[STRIDE])), spread8(np.int32(key[STRIDE + 1])), spread8(np.int32(key[STRIDE + 2]))
    half = spread8(SHIFT)
    for k in range(first // 8 * 8, last, 8):
        i, j = floor8(plus8(load8(points, k), half)), floor8(plus8(load8(points, TILE_K + k), half))
        h = floor8(plus8(load8(points, 2 * TILE_K + k), half))
        store8(indices, k, fused8(whole8(i), si, fused8(whole8(j), sj, fused8(whole8(h), sk, spread8(np.int32(0))))))


@jit
def nearest_at(data: Any, points: Any, k: int, whole: Any, shape: Any, key: Any, channel: int, values: Any) -> Any:
    """One voxel near or beyond the border."""
    index = channel * key[CHANNEL_STRIDE]
    for s in range(3):
        x = points[s * TILE_K + k]
        if not reaches(x, whole[s], shape[s]):
            return int(values[channel * VALUES + 2])
        place = whole[s] + int(floor(x + SHIFT))
        if place < 0 or place >= shape[s]:
            return int(values[channel * VALUES + 2])
        index += place * key[STRIDE + s]
    return stored_whole(data, index) * int(values[channel * VALUES]) + int(values[channel * VALUES + 1])


# The driver ----------------------------------------------------------------------------------------------------------


@jit
def fill(
    planes: Any, size: Any, matrix: Any, centre: Any, base: Any, coefficients: Any, start: Any, extent: Any,
    shape: Any, keys: Any, values: Any, scratch: Any, indices: Any,
) -> None:  # fmt: skip
    """Reads planes planes[0] .. planes[1] - 1 of one patch for the keys that share its map and the array's shape.

    `coefficients` (3, gi, gj, gk), empty without a spline. `keys` (n, FIELDS), `values` (n, channels, VALUES).
    `scratch` float32 and `indices` int32 are the caller's memory.
    """
    num_i, num_j, num_k = size
    if coefficients.size > 0:
        cells_i, taps_i = cells_and_taps(start[0], num_i, extent[0], coefficients.shape[1])
        cells_j, taps_j = cells_and_taps(start[1], num_j, extent[1], coefficients.shape[2])
        cells_k, taps_k = cells_and_taps(start[2], num_k, extent[2], coefficients.shape[3])
        part = padded_part(coefficients, cells_i, cells_j, cells_k)
        weights = dense_weights(cells_k, taps_k, part.shape[3])
    else:
        cells_i, taps_i = np.zeros(num_i, np.int64), np.zeros((num_i, 4))
        cells_j, taps_j = np.zeros(num_j, np.int64), np.zeros((num_j, 4))
        cells_k = np.zeros(num_k, np.int64)
        part, weights = np.zeros((3, 0, 0, 0), np.float32), np.zeros((0, 0), np.float32)
    plane, row = np.zeros((3, part.shape[2], part.shape[3]), np.float32), np.zeros((3, part.shape[3]), np.float32)
    whole, runs = np.zeros((TILE_J, 3), np.int64), np.zeros((TILE_J, 2), np.int64)
    displaced = part.size > 0
    most = np.zeros(3)
    for s in range(3):
        for v in part[s].flat:
            most[s] = max(most[s], abs(v)) if v == v else np.inf
    slopes = matrix[:, 2].copy()
    for n in range(keys.shape[0]):
        for s in range(3):
            keys[n,8+s]=int(np.round(matrix[s,0]*PD))+(s==0)
    origin, middle, reach = np.zeros(3), np.zeros(3), np.zeros(3)
    fractions, ramp = address(scratch), moved(address(scratch), 3 * TILE_K)
    points = moved(ramp, (num_k + 7) // 8 * 8)
    for k in range((num_k + 7) // 8 * 8):
        ramp[k] = np.float32(k - num_k // 2)
    for k0 in range(0, num_k, TILE_K):
        k1 = min(k0 + TILE_K, num_k)
        for j0 in range(0, num_j, TILE_J):
            j1 = min(j0 + TILE_J, num_j)
            for s in range(3):
                reach[s] = abs(matrix[s, 1]) * (j1 - j0) / 2 + abs(slopes[s]) * (k1 - k0) / 2 + most[s]
            for i in range(planes[0], planes[1]):
                if displaced:
                    contract_plane(part, cells_i, taps_i, i, cells_j[j0], cells_j[j1 - 1] + 4, plane)
                for s in range(3):
                    middle[s] = base[s] + centre[s] + matrix[s, 0] * (i - num_i // 2) + matrix[s, 1] * ((j0 + j1 - 1) / 2 - num_j // 2) + slopes[s] * ((k0 + k1 - 1) / 2 - num_k // 2)
                inside = tile_is_inside(middle, reach, shape)
                for j in range(j0, j1):
                    tile_row = moved(points, (j - j0) * 3 * TILE_K)
                    for s in range(3):
                        x = centre[s] + matrix[s, 0] * (i - num_i // 2) + matrix[s, 1] * (j - num_j // 2)
                        near = int(np.floor(x)) if abs(x) < FAR else 0
                        origin[s], whole[j - j0, s] = x - near, base[s] + near
                    if displaced:
                        contract_row(plane, cells_j, taps_j, j, row)
                    place_row(tile_row, ramp, origin, slopes, k0, k1, row, weights, cells_k)
                    runs[j - j0, 0], runs[j - j0, 1] = 0, k1 - k0
                    if not inside:
                        runs[j - j0, 0], runs[j - j0, 1] = find_run(tile_row, moved(address(whole), 3 * (j - j0)), shape, k1 - k0)
                for n in range(keys.shape[0]):
                    call(
                        keys[n, READER], keys[n, DATA], (points, address(whole), address(runs),
                        address(shape), moved(address(keys), n * FIELDS), moved(address(values), n * values.shape[1] * VALUES), fractions, address(indices), (i * num_j + j0) * num_k + k0, num_k,
                        num_i * num_j * num_k, j1 - j0, k1 - k0),
                    )  # fmt: skip
