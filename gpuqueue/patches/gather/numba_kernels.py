"""The compiled driver of the CPU backend: source coordinates, tile by tile.

A patch is cut into tiles of TILE_J rows by TILE_K voxels, walked along i, so that the source voxels of a tile stay in a
near cache and rows are written whole. A tile's coordinates are float32, each row about a whole source voxel of its own.
Readers are reached through their addresses, so that n keys of m dtypes need n + m compilations, not n times m.
All scratch memory is one tile: no coordinate grid exists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuqueue.patches.gather.numba_cache import jit
from gpuqueue.patches.gather.numba_instructions import (
    address,
    call,
    fused8,
    load8,
    moved,
    plus8,
    spread8,
    store8,
)
from gpuqueue.patches.gather.numba_readers import (
    AHEAD,
    CHANNEL_STEP,
    COUNT,
    DATA,
    FIRST,
    KEY_FIELDS,
    READER,
    ROW_STEP,
    ROWS,
    SHAPE,
    STRIDE,
    TILE_FIELDS,
    TILE_J,
    TILE_K,
    ZERO,
    is_inside,
)

MARGIN = 1e-3  # voxels; keeps the rounding of float32 out of the test for the interior
FAR = 2.0**30  # beyond it, or not a number, a coordinate is simply outside
PLANES_AHEAD = 3  # how far along i the readers ask for cache lines


# The driver ----------------------------------------------------------------------------------------------------------


@jit
def fill(
    planes: Any, size: Any, pull_back: Any, spline: Any, shape: Any, keys: Any, values: Any, scratch: Any, indices: Any
) -> None:
    """Reads planes planes[0] .. planes[1] - 1 of one patch for the keys that share its map and the array's shape.

    `pull_back` (matrix, rest, base); `spline` (coefficients, start, extent), without coefficients where there is none;
    `keys` (n, KEY_FIELDS), `values` (n, channels, VALUES); `scratch` and `indices` are the caller's memory.
    """
    tables = spline_tables(spline, size)
    most, num_k = largest(tables[0]), size[2]
    room = np.zeros((3, tables[0].shape[2], tables[0].shape[3]), np.float32)
    row = np.zeros((3, tables[0].shape[3]), np.float32)
    whole, runs, tile = (
        np.zeros((TILE_J, 3), np.int64),
        np.zeros((TILE_J, 2), np.int64),
        np.zeros(TILE_FIELDS, np.int64),
    )
    fractions = address(scratch)
    ramp, points = moved(fractions, 3 * TILE_K), moved(fractions, 3 * TILE_K + (num_k + 7) // 8 * 8)
    for k in range((num_k + 7) // 8 * 8):
        ramp[k] = np.float32(k - num_k // 2)
    set_patch(tile, size, shape, pull_back[0])
    can_be_inside = offsets_fit(pull_back[0], num_k, most, keys)
    for k0 in range(0, num_k, TILE_K):
        tile[COUNT] = min(TILE_K, num_k - k0)
        for j0 in range(0, size[1], TILE_J):
            tile[ROWS] = min(TILE_J, size[1] - j0)
            for i in range(planes[0], planes[1]):
                tile[FIRST] = (i * size[1] + j0) * num_k + k0
                inside = can_be_inside and tile_is_inside(i, j0, k0, size, pull_back, most, tile)
                place_tile(i, j0, k0, size, pull_back, tables, room, row, ramp, points, whole, tile)
                find_runs(points, whole, tile, inside, can_be_inside, runs)
                for n in range(len(keys)):
                    key, constants = moved(address(keys), n * KEY_FIELDS), moved(address(values), n * values[0].size)
                    call(
                        key[READER], key[DATA],
                        (points, address(whole), address(runs), address(tile), key, constants, fractions,
                         address(indices)),
                    )  # fmt: skip


@jit
def set_patch(tile: Any, size: Any, shape: Any, matrix: Any) -> None:
    """The fields of a tile that are the same for the whole patch."""
    tile[ROW_STEP], tile[CHANNEL_STEP] = size[2], size[0] * size[1] * size[2]
    for s in range(3):
        tile[SHAPE + s] = shape[s]
        step = matrix[s, 0] * PLANES_AHEAD
        tile[AHEAD + s] = int(np.round(step)) if abs(step) < FAR else 0
    tile[AHEAD] += 1  # of the two source planes that a voxel lies between, the one not read yet


@jit
def offsets_fit(matrix: Any, num_k: int, most: Any, keys: Any) -> bool:
    """Whether element offsets within a row fit int32 in every key; else all voxels go the slow, 64-bit way."""
    for n in range(len(keys)):
        largest_offset = 0.0
        for s in range(3):
            largest_offset += (abs(matrix[s, 2]) * num_k + most[s] + 2) * keys[n, STRIDE + s]
        if not largest_offset < 2.0**31:
            return False
    return True


# Coordinates ---------------------------------------------------------------------------------------------------------


@jit
def tile_is_inside(i: int, j0: int, k0: int, size: Any, pull_back: Any, most: Any, tile: Any) -> bool:
    """Whether all eight neighbours of every voxel of the tile lie inside the array, whatever the displacement."""
    matrix, rest, base = pull_back
    half_j, half_k = (tile[ROWS] - 1) / 2, (tile[COUNT] - 1) / 2
    for s in range(3):
        middle = base[s] + rest[s] + matrix[s, 0] * (i - size[0] // 2)
        middle += matrix[s, 1] * (j0 + half_j - size[1] // 2) + matrix[s, 2] * (k0 + half_k - size[2] // 2)
        reach = abs(matrix[s, 1]) * half_j + abs(matrix[s, 2]) * half_k + most[s] + MARGIN
        if not (middle - reach > 0 and middle + reach < tile[SHAPE + s] - 1):
            return False
    return True


@jit
def place_tile(
    i: int, j0: int, k0: int, size: Any, pull_back: Any, tables: Any, room: Any, row: Any, ramp: Any, points: Any,
    whole: Any, tile: Any,
) -> None:  # fmt: skip
    """Source coordinates of a tile's voxels into `points` (rows, 3, TILE_K), about `whole` (rows, 3)."""
    matrix, rest, base = pull_back
    part, weights, cells_i, taps_i, cells_j, taps_j, cells_k = tables
    if part.size > 0:
        contract_plane(part, cells_i, taps_i, i, cells_j[j0], cells_j[j0 + tile[ROWS] - 1] + 4, room)
    for j in range(tile[ROWS]):
        if part.size > 0:
            contract_row(room, cells_j, taps_j, j0 + j, row)
            displace_row(row, weights, cells_k, k0, k0 + tile[COUNT], moved(points, j * 3 * TILE_K))
        for s in range(3):
            x = rest[s] + matrix[s, 0] * (i - size[0] // 2) + matrix[s, 1] * (j0 + j - size[1] // 2)
            near = int(np.floor(x)) if abs(x) < FAR else 0
            whole[j, s] = base[s] + near
            target = moved(points, (j * 3 + s) * TILE_K)
            ramp_row(
                np.float32(x - near), np.float32(matrix[s, 2]), moved(ramp, k0), tile[COUNT], part.size > 0, target
            )


@jit
def ramp_row(start: Any, slope: Any, ramp: Any, count: int, displaced: bool, points: Any) -> None:
    """points[k] = start + slope * ramp[k], plus what points[k] holds already where it is displaced."""
    a, m = spread8(start), spread8(slope)
    if displaced:
        for k in range(0, count, 8):
            store8(points, k, plus8(load8(points, k), fused8(m, load8(ramp, k), a)))
    else:
        for k in range(0, count, 8):
            store8(points, k, fused8(m, load8(ramp, k), a))


@jit
def displace_row(row: Any, weights: Any, cells_k: Any, k0: int, k1: int, points: Any) -> None:
    """points[s, k - k0] = sum_c row[s, c] weights[c, k], over the few control points that eight voxels see."""
    taps, values, step = address(weights), address(row), row.shape[1]
    for k in range(k0, k1, 8):
        u0, u1, u2 = spread8(ZERO), spread8(ZERO), spread8(ZERO)
        for c in range(cells_k[k], cells_k[min(k + 7, k1 - 1)] + 4):
            w = load8(taps, c * weights.shape[1] + k)
            u0 = fused8(w, spread8(values[c]), u0)
            u1 = fused8(w, spread8(values[step + c]), u1)
            u2 = fused8(w, spread8(values[2 * step + c]), u2)
        store8(points, k - k0, u0)
        store8(points, TILE_K + k - k0, u1)
        store8(points, 2 * TILE_K + k - k0, u2)


@jit
def find_runs(points: Any, whole: Any, tile: Any, inside: bool, can_be_inside: bool, runs: Any) -> None:
    """For each row the first run [first, last) of voxels whose eight neighbours all lie inside the array."""
    for j in range(tile[ROWS]):
        row, corner, count = moved(points, j * 3 * TILE_K), moved(address(whole), j * 3), tile[COUNT]
        first, last = 0, count if inside else 0
        if can_be_inside and not inside:
            while first < count and not is_inside(row, first, corner, address(tile)):
                first += 1
            last = first
            while last < count and is_inside(row, last, corner, address(tile)):
                last += 1
        runs[j, 0], runs[j, 1] = first, last


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
def spline_tables(spline: Any, size: Any) -> Any:
    """What the patch sees of a spline: control points, dense weights along k, and cells and taps of each axis."""
    coefficients, start, extent = spline
    if coefficients.size == 0:
        cells, taps = np.zeros(0, np.int64), np.zeros((0, 4))
        return np.zeros((3, 0, 0, 0), np.float32), np.zeros((0, 0), np.float32), cells, taps, cells, taps, cells
    _, num_a, num_b, num_c = coefficients.shape
    cells_i, taps_i = cells_and_taps(start[0], size[0], extent[0], num_a)
    cells_j, taps_j = cells_and_taps(start[1], size[1], extent[1], num_b)
    cells_k, taps_k = cells_and_taps(start[2], size[2], extent[2], num_c)
    part = padded_part(coefficients, cells_i, cells_j, cells_k)
    return part, dense_weights(cells_k, taps_k, part.shape[3]), cells_i, taps_i, cells_j, taps_j, cells_k


@jit
def largest(part: Any) -> Any:
    """Greatest absolute control point of each axis (3,): no displacement is larger. Infinite if one is no number."""
    most = np.zeros(3)
    for s in range(3):
        for value in part[s].flat:
            most[s] = max(most[s], abs(value)) if value == value else np.inf
    return most


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
