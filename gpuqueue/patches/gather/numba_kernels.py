"""The compiled code of the CPU backend: one driver, and one row reader for each mode and stored dtype.

The driver walks the rows (i, j) of a patch. It computes a row's source coordinates in float32 about a whole source
voxel of that row, finds the run of voxels whose neighbours all lie inside the array, and hands the row to the reader
of every key. A reader takes the run without a test and the rest voxel by voxel. Scratch memory is a few rows: no
coordinate grid exists.

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
    int64_at,
    moved,
    plus,
    step,
    stored_float,
    stored_whole,
    trilinear,
    trilinear_strided,
)

# int64 fields of a key, and float64 values of each of its channels
DATA, READER, OUT, CHANNELS, CHANNEL_STRIDE, STRIDE, FIELDS = 0, 1, 2, 3, 4, 5, 8
SLOPE, INTERCEPT, PAD, VALUES = range(4)
BLOCK = 16  # rows j of one plane that are read before the next plane, so that their source stays in the cache
SHIFT = np.float32(NEAREST_SHIFT)
ZERO, ONE = np.float32(0), np.float32(1)
MARGIN = 1e-3  # voxels; keeps the rounding of float32 out of the test for the interior
FAR = 2.0**30  # beyond it, or not a number, a coordinate is simply outside


# Coordinates of a row ------------------------------------------------------------------------------------------------


@jit
def cells_and_taps(start: int, count: int, extent: int, points: int, cells: Any, taps: Any) -> None:
    """First control point (count,) and its four weights (count, 4): `contract.spline_weights`, sparse."""
    for p in range(count):
        t = min(max((start + p + 0.5) * (points - 3) / extent, 0.0), points - 3.0)
        cell = min(int(t), points - 4)
        f = t - cell
        cells[p] = cell
        taps[p, 0] = (1 - f) ** 3 / 6
        taps[p, 1] = (3 * f**3 - 6 * f**2 + 4) / 6
        taps[p, 2] = (-3 * f**3 + 3 * f**2 + 3 * f + 1) / 6
        taps[p, 3] = f**3 / 6


@jit
def contract_plane(
    coefficients: Any, cells: Any, taps: Any, i: int, b0: int, b1: int, c0: int, num_c: int, plane: Any
) -> None:
    """Sums axis i of the control points: plane[s, b, c] for b in b0 .. b1 - 1 and the row's control points."""
    for s in range(3):
        for b in range(b0, b1):
            for c in range(num_c):
                total = 0.0
                for a in range(4):
                    total += taps[i, a] * coefficients[s, cells[i] + a, b, c0 + c]
                plane[s, b, c] = total


@jit
def contract_row(
    plane: Any, cells: Any, taps: Any, j: int, num_c: int, row: Any, least: Any, most: Any
) -> None:
    """Sums axis j: row[s, c] float32, and the least and the most of each s, which bound the displacement."""
    for s in range(3):
        least[s], most[s] = np.inf, -np.inf
        for c in range(num_c):
            total = 0.0
            for b in range(4):
                total += taps[j, b] * plane[s, cells[j] + b, c]
            row[s, c] = np.float32(total)
            least[s], most[s] = min(least[s], total), max(most[s], total)


@jit
def displace_row(points: Any, weights: Any, row: Any, num_c: int, width: int) -> None:
    """points[s, k] = sum_c row[s, c] weights[c, k], four control points a sweep."""
    for s in range(3):
        target = moved(points, s * width)
        for c in range(0, num_c, 4):
            w0, w1 = moved(weights, c * width), moved(weights, (c + 1) * width)
            w2, w3 = moved(weights, (c + 2) * width), moved(weights, (c + 3) * width)
            t0, t1, t2, t3 = row[s, c], row[s, c + 1], row[s, c + 2], row[s, c + 3]
            if c == 0:
                for k in range(width):
                    target[k] = (t0 * w0[k] + t1 * w1[k]) + (t2 * w2[k] + t3 * w3[k])
            else:
                for k in range(width):
                    target[k] += (t0 * w0[k] + t1 * w1[k]) + (t2 * w2[k] + t3 * w3[k])


@jit
def ramp_row(points: Any, offsets: Any, origin: Any, slopes: Any, width: int, displaced: bool) -> None:
    """Adds origin[s] + slopes[s] * q to points[s, k], or, without a displacement, sets it."""
    for s in range(3):
        target, a, m = moved(points, s * width), np.float32(origin[s]), np.float32(slopes[s])
        if displaced:
            for k in range(width):
                target[k] += a + m * offsets[k]
        else:
            for k in range(width):
                target[k] = a + m * offsets[k]


@jit
def find_interior(
    origin: Any, slopes: Any, least: Any, most: Any, whole: Any, shape: Any, count: int, points: Any, width: int
) -> Any:
    """The run [first, last) of a row whose eight neighbours all lie inside; solved in float64, then walked outward."""
    first, last = 0, count
    for s in range(3):
        low = -whole[s] + MARGIN - least[s] - origin[s]
        high = shape[s] - 1 - whole[s] - MARGIN - most[s] - origin[s]
        m = slopes[s]
        if not abs(low) + abs(high) + abs(m) < FAR:
            return 0, 0
        if abs(m) * count < MARGIN:  # (nearly) constant along the row
            if low > -abs(m) * count or high < abs(m) * count:
                first, last = 0, 0
            continue
        enters, leaves = (low / m, high / m) if m > 0 else (high / m, low / m)
        first = max(first, int(np.ceil(min(max(enters, -count), count))) + count // 2)
        last = min(last, int(np.floor(min(max(leaves, -count), count))) + count // 2 + 1)
    if first >= last:
        return 0, 0
    while first > 0 and is_inside(points, first - 1, width, whole, shape):
        first -= 1
    while last < count and is_inside(points, last, width, whole, shape):
        last += 1
    return first, last


@jit
def is_inside(points: Any, k: int, width: int, whole: Any, shape: Any) -> bool:
    """Whether all eight neighbours of voxel k of the row lie inside the array."""
    for s in range(3):
        x = points[s * width + k]
        if not (x >= np.float32(-whole[s]) and x < np.float32(shape[s] - 1 - whole[s])):
            return False
    return True


# Readers of one row --------------------------------------------------------------------------------------------------
#
# data     address of the array's first voxel, typed by its stored dtype
# points   (3, width) float32 coordinates about `whole` (3,), which is a voxel index; `shape` (3,) of the array
# key, values, fractions, indices: fields and per-channel values of the key; scratch
# out      the row's first element in each channel of the output, whose channels lie `out_step` apart
# count, first, last: voxels of the row, and the run whose neighbours are all inside


def read_linear(
    data: Any, points: Any, fractions: Any, indices: Any, whole: Any, shape: Any, key: Any, values: Any,
    out: int, out_step: int, width: int, count: int, first: int, last: int,
) -> None:  # fmt: skip
    """Trilinear float32 values."""
    i, j, k = key[STRIDE], key[STRIDE + 1], key[STRIDE + 2]
    split_row(points, fractions, indices, key, width, first, last)
    fi, fj, fk = fractions, moved(fractions, width), moved(fractions, 2 * width)
    origin = whole[0] * i + whole[1] * j + whole[2] * k
    for channel in range(key[CHANNELS]):
        slope, intercept = np.float32(values[channel * VALUES]), np.float32(values[channel * VALUES + 1])
        target = moved(float_at(key[OUT]), out + channel * out_step)
        start = origin + channel * key[CHANNEL_STRIDE]
        if k == 1:
            for x in range(first, last):
                value = trilinear(data, start + np.int64(indices[x]), i, j, k, fi[x], fj[x], fk[x])
                target[x] = value * slope + intercept
        else:
            for x in range(first, last):
                value = trilinear_strided(data, start + np.int64(indices[x]), i, j, k, fi[x], fj[x], fk[x])
                target[x] = value * slope + intercept
        for x in range(first):
            target[x] = linear_at(data, points, x, width, whole, shape, key, channel, values)
        for x in range(last, count):
            target[x] = linear_at(data, points, x, width, whole, shape, key, channel, values)


@jit
def split_row(points: Any, fractions: Any, indices: Any, key: Any, width: int, first: int, last: int) -> None:
    """Coordinates to fractions and to element offsets from the row's whole voxel."""
    for s in range(3):
        x, f, stride = moved(points, s * width), moved(fractions, s * width), np.int32(key[STRIDE + s])
        if s == 0:
            for k in range(first, last):
                lower = floor(x[k])
                f[k] = x[k] - lower
                indices[k] = step(lower, stride)
        else:
            for k in range(first, last):
                lower = floor(x[k])
                f[k] = x[k] - lower
                indices[k] = plus(indices[k], step(lower, stride))


@jit
def linear_at(
    data: Any, points: Any, k: int, width: int, whole: Any, shape: Any, key: Any, channel: int, values: Any
) -> Any:
    """One voxel near or beyond the border: neighbours outside the array are the pad value."""
    slope, intercept = np.float32(values[channel * VALUES]), np.float32(values[channel * VALUES + 1])
    pad = np.float32(values[channel * VALUES + 2])
    x, y, z = points[k], points[width + k], points[2 * width + k]
    if not (reaches(x, whole[0], shape[0]) and reaches(y, whole[1], shape[1]) and reaches(z, whole[2], shape[2])):
        return pad
    i0, j0, k0 = floor(x), floor(y), floor(z)
    fi, fj, fk = x - i0, y - j0, z - k0
    stored, inside, outside = ZERO, ZERO, ZERO
    for di in range(2):
        for dj in range(2):
            for dk in range(2):
                weight = (fi if di else ONE - fi) * (fj if dj else ONE - fj) * (fk if dk else ONE - fk)
                i, j, k = whole[0] + int(i0) + di, whole[1] + int(j0) + dj, whole[2] + int(k0) + dk
                if 0 <= i < shape[0] and 0 <= j < shape[1] and 0 <= k < shape[2]:
                    index = channel * key[CHANNEL_STRIDE] + i * key[STRIDE] + j * key[STRIDE + 1] + k * key[STRIDE + 2]
                    stored += weight * stored_float(data, index)
                    inside += weight
                else:
                    outside += weight
    return stored * slope + inside * intercept + outside * pad


@jit
def reaches(x: Any, whole: int, size: int) -> bool:
    """Whether a coordinate has a neighbour inside an axis of `size` voxels; not for one that is not a number."""
    return bool(x > np.float32(-1 - whole) and x < np.float32(size - whole))


def read_nearest(
    data: Any, points: Any, fractions: Any, indices: Any, whole: Any, shape: Any, key: Any, values: Any,
    out: int, out_step: int, width: int, count: int, first: int, last: int,
) -> None:  # fmt: skip
    """Stored labels at floor(x + NEAREST_SHIFT), int64."""
    nearest_indices(points, indices, key, width, first, last)
    origin = whole[0] * key[STRIDE] + whole[1] * key[STRIDE + 1] + whole[2] * key[STRIDE + 2]
    for channel in range(key[CHANNELS]):
        slope, intercept = int(values[channel * VALUES]), int(values[channel * VALUES + 1])
        target = moved(int64_at(key[OUT]), out + channel * out_step)
        start = origin + channel * key[CHANNEL_STRIDE]
        for x in range(first, last):
            target[x] = stored_whole(data, start + np.int64(indices[x])) * slope + intercept
        for x in range(first):
            target[x] = nearest_at(data, points, x, width, whole, shape, key, channel, values)
        for x in range(last, count):
            target[x] = nearest_at(data, points, x, width, whole, shape, key, channel, values)


@jit
def nearest_indices(points: Any, indices: Any, key: Any, width: int, first: int, last: int) -> None:
    """Coordinates to the nearest voxel's element offset from the row's whole voxel."""
    for s in range(3):
        x, stride = moved(points, s * width), np.int32(key[STRIDE + s])
        if s == 0:
            for k in range(first, last):
                indices[k] = step(floor(x[k] + SHIFT), stride)
        else:
            for k in range(first, last):
                indices[k] = plus(indices[k], step(floor(x[k] + SHIFT), stride))


@jit
def nearest_at(
    data: Any, points: Any, k: int, width: int, whole: Any, shape: Any, key: Any, channel: int, values: Any
) -> Any:
    """One voxel near or beyond the border."""
    index = channel * key[CHANNEL_STRIDE]
    for s in range(3):
        x = points[s * width + k]
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
    rows: Any, size: Any, matrix: Any, rest: Any, base: Any, coefficients: Any, start: Any, extent: Any,
    shape: Any, keys: Any, values: Any, scratch: Any, indices: Any,
) -> None:  # fmt: skip
    """Reads planes rows[0] .. rows[1] - 1 of one patch for the keys that share its map and the array's shape.

    `coefficients` (3, gi, gj, gk), empty without a spline. `keys` (n, FIELDS), `values` (n, channels, VALUES).
    `scratch` float32 and `indices` int32 are the caller's memory, as `scratch_size` says.
    """
    num_i, num_j, num_k = size
    width = row_width(num_k)
    fractions = address(scratch)
    ramp, weights = moved(address(scratch), 3 * width), moved(address(scratch), 4 * width)
    points = moved(address(scratch), (8 + coefficients.shape[3]) * width)
    for k in range(width):
        ramp[k] = np.float32(k - num_k // 2)
    displaced = coefficients.size > 0
    cells_i, taps_i = np.zeros(num_i, np.int64), np.zeros((num_i, 4))
    cells_j, taps_j = np.zeros(num_j, np.int64), np.zeros((num_j, 4))
    c0, num_c = 0, 0
    if displaced:
        cells_and_taps(start[0], num_i, extent[0], coefficients.shape[1], cells_i, taps_i)
        cells_and_taps(start[1], num_j, extent[1], coefficients.shape[2], cells_j, taps_j)
        c0, num_c = dense_weights(start[2], num_k, extent[2], coefficients.shape[3], weights, width)
    padded = (num_c + 3) // 4 * 4
    plane, row = np.zeros((3, coefficients.shape[2], num_c)), np.zeros((3, padded), np.float32)
    least, most, origin = np.zeros(3), np.zeros(3), np.zeros(3)
    slopes = matrix[:, 2].copy()
    all_points, whole, runs = points, np.zeros((BLOCK, 3), np.int64), np.zeros((BLOCK, 2), np.int64)
    for j0 in range(0, num_j, BLOCK):
        j1 = min(j0 + BLOCK, num_j)
        for i in range(rows[0], rows[1]):
            if displaced:
                contract_plane(
                    coefficients, cells_i, taps_i, i, cells_j[j0], cells_j[j1 - 1] + 4, c0, num_c, plane
                )
            for j in range(j0, j1):
                points = moved(all_points, (j - j0) * 3 * width)
                for s in range(3):
                    x = rest[s] + matrix[s, 0] * (i - num_i // 2) + matrix[s, 1] * (j - num_j // 2)
                    near = int(np.floor(x)) if abs(x) < FAR else 0
                    origin[s], whole[j - j0, s] = x - near, base[s] + near
                if displaced:
                    contract_row(plane, cells_j, taps_j, j, num_c, row, least, most)
                    displace_row(points, weights, row, padded, width)
                ramp_row(points, ramp, origin, slopes, width, displaced)
                runs[j - j0, 0], runs[j - j0, 1] = find_interior(
                    origin, slopes, least, most, moved(address(whole), (j - j0) * 3), shape, num_k, points, width)
            for n in range(keys.shape[0]):
                for j in range(j0, j1):
                    call(
                        keys[n, READER], keys[n, DATA], (moved(all_points, (j - j0) * 3 * width), fractions, address(indices), moved(address(whole), (j - j0) * 3),
                        address(shape), moved(address(keys), n * FIELDS), moved(address(values), n * values.shape[1] * VALUES), (i * num_j + j) * num_k,
                        num_i * num_j * num_k, width, num_k, runs[j - j0, 0], runs[j - j0, 1]),
                    )  # fmt: skip


@jit
def row_width(count: int) -> int:
    """Voxels of a row, rounded up to whole vectors."""
    return (count + 15) // 16 * 16


@jit
def dense_weights(start: int, count: int, extent: int, points: int, weights: Any, width: int) -> Any:
    """Weights (control points rounded up to 4, width) of the control points that a row sees; first one, and number."""
    cells, taps = np.zeros(count, np.int64), np.zeros((count, 4))
    cells_and_taps(start, count, extent, points, cells, taps)
    first, number = cells[0], cells[count - 1] + 4 - cells[0]
    for c in range((number + 3) // 4 * 4 * width):
        weights[c] = ZERO
    for p in range(count):
        for tap in range(4):
            weights[(cells[p] - first + tap) * width + p] = np.float32(taps[p, tap])
    return first, number
