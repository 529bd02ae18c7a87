"""The compiled readers of the CPU backend: one tile of one key, for each mode and stored dtype.

A reader takes the run of each row whose neighbours all lie inside the array without a test, and the rest of the row
voxel by voxel. It asks for the cache lines that the tile will need three steps on along the patch's first axis: the
processor cannot guess the lines of a rotated row, and waiting for them took longer than everything else together.

Every reader takes the same nine arguments:

    data       address of the array's first voxel, typed by its stored dtype
    points     (rows, 3, TILE_K) float32 source coordinates about `whole` (rows, 3), a voxel index
    runs       (rows, 2): the first voxel whose neighbours are all inside, and the one after the last
    tile       its fields below: where it lies in the output, its size, the array's shape, what to ask for ahead
    key        its fields below; `values` (channels, VALUES): slope, intercept, pad
    fractions, indices: scratch for a row
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuqueue.patches.gather.contract import NEAREST_SHIFT
from gpuqueue.patches.gather.numba_cache import jit
from gpuqueue.patches.gather.numba_instructions import (
    agree,
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

TILE_J, TILE_K = 16, 128  # rows, and voxels of a row, that are read before the next plane
FIRST, ROW_STEP, CHANNEL_STEP, ROWS, COUNT, SHAPE, AHEAD, TILE_FIELDS = 0, 1, 2, 3, 4, 5, 8, 11
DATA, READER, OUT, CHANNELS, CHANNEL_STRIDE, STRIDE, KEY_FIELDS = 0, 1, 2, 3, 4, 5, 8
SLOPE, INTERCEPT, PAD, VALUES = range(4)
SHIFT, STEPS = np.float32(NEAREST_SHIFT), np.float32(128)  # vote weighs in steps of 1/128, so that sums are exact
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)


# Linear --------------------------------------------------------------------------------------------------------------


def read_linear(
    data: Any, points: Any, whole: Any, runs: Any, tile: Any, key: Any, values: Any, fractions: Any, indices: Any
) -> None:
    """Trilinear float32 values."""
    for row in range(tile[ROWS]):
        x, corner, first, last = (
            moved(points, row * 3 * TILE_K),
            moved(whole, row * 3),
            runs[2 * row],
            runs[2 * row + 1],
        )
        split_row(x, key, first, last, fractions, indices)
        ask_ahead(data, corner, tile, key, first, last, 4, indices)
        for channel in range(key[CHANNELS]):
            constants = moved(values, channel * VALUES)
            start = channel * key[CHANNEL_STRIDE] + element(corner, key)
            target = moved(float_at(key[OUT]), tile[FIRST] + row * tile[ROW_STEP] + channel * tile[CHANNEL_STEP])
            linear_run(data, start, key, constants, fractions, indices, first, last, target)
            for k in range(first):
                target[k] = linear_at(data, x, k, corner, tile, key, channel, constants)
            for k in range(last, tile[COUNT]):
                target[k] = linear_at(data, x, k, corner, tile, key, channel, constants)


@jit
def linear_run(
    data: Any, start: int, key: Any, constants: Any, fractions: Any, indices: Any, first: int, last: int, target: Any
) -> None:
    """The inner run of a row, in one channel."""
    slope, intercept = np.float32(constants[SLOPE]), np.float32(constants[INTERCEPT])
    si, sj, sk = key[STRIDE], key[STRIDE + 1], key[STRIDE + 2]
    fi, fj, fk = fractions, moved(fractions, TILE_K), moved(fractions, 2 * TILE_K)
    if sk == 1:
        for k in range(first, last):
            value = trilinear(data, start + np.int64(indices[k]), si, sj, sk, fi[k], fj[k], fk[k])
            target[k] = value * slope + intercept
    else:
        for k in range(first, last):
            value = trilinear_strided(data, start + np.int64(indices[k]), si, sj, sk, fi[k], fj[k], fk[k])
            target[k] = value * slope + intercept


@jit
def linear_at(data: Any, points: Any, k: int, whole: Any, tile: Any, key: Any, channel: int, constants: Any) -> Any:
    """One voxel near or beyond the border: neighbours outside the array are the pad value."""
    slope, intercept, pad = np.float32(constants[SLOPE]), np.float32(constants[INTERCEPT]), np.float32(constants[PAD])
    if not reaches_in(points, k, whole, tile):
        return pad
    x, y, z = points[k], points[TILE_K + k], points[2 * TILE_K + k]
    x0, y0, z0 = floor(x), floor(y), floor(z)
    fi, fj, fk = x - x0, y - y0, z - z0
    i0, j0, k0 = whole[0] + int(x0), whole[1] + int(y0), whole[2] + int(z0)
    stored, inside, outside = ZERO, ZERO, ZERO
    for tap in range(8):
        di, dj, dk = tap >> 2, tap >> 1 & 1, tap & 1
        weight = (fi if di else ONE - fi) * (fj if dj else ONE - fj) * (fk if dk else ONE - fk)
        index = element_at(i0 + di, j0 + dj, k0 + dk, tile, key)
        if index >= 0:
            stored += weight * stored_float(data, channel * key[CHANNEL_STRIDE] + index)
            inside += weight
        else:
            outside += weight
    return stored * slope + inside * intercept + outside * pad


# Nearest -------------------------------------------------------------------------------------------------------------


def read_nearest(
    data: Any, points: Any, whole: Any, runs: Any, tile: Any, key: Any, values: Any, fractions: Any, indices: Any
) -> None:
    """Stored labels at floor(x + NEAREST_SHIFT), int64."""
    for row in range(tile[ROWS]):
        x, corner, first, last = (
            moved(points, row * 3 * TILE_K),
            moved(whole, row * 3),
            runs[2 * row],
            runs[2 * row + 1],
        )
        nearest_row(x, key, first, last, indices)
        ask_ahead(data, corner, tile, key, first, last, 8, indices)
        for channel in range(key[CHANNELS]):
            constants = moved(values, channel * VALUES)
            slope, intercept = int(constants[SLOPE]), int(constants[INTERCEPT])
            start = channel * key[CHANNEL_STRIDE] + element(corner, key)
            target = moved(int64_at(key[OUT]), tile[FIRST] + row * tile[ROW_STEP] + channel * tile[CHANNEL_STEP])
            for k in range(first, last):
                target[k] = stored_whole(data, start + np.int64(indices[k])) * slope + intercept
            for k in range(first):
                target[k] = nearest_at(data, x, k, corner, tile, key, channel, constants)
            for k in range(last, tile[COUNT]):
                target[k] = nearest_at(data, x, k, corner, tile, key, channel, constants)


@jit
def nearest_at(data: Any, points: Any, k: int, whole: Any, tile: Any, key: Any, channel: int, constants: Any) -> Any:
    """One voxel near or beyond the border."""
    if not reaches_in(points, k, whole, tile):
        return int(constants[PAD])
    i, j = whole[0] + int(floor(points[k] + SHIFT)), whole[1] + int(floor(points[TILE_K + k] + SHIFT))
    index = element_at(i, j, whole[2] + int(floor(points[2 * TILE_K + k] + SHIFT)), tile, key)
    if index < 0:
        return int(constants[PAD])
    return stored_whole(data, channel * key[CHANNEL_STRIDE] + index) * int(constants[SLOPE]) + int(constants[INTERCEPT])


# Vote ----------------------------------------------------------------------------------------------------------------


def read_vote(
    data: Any, points: Any, whole: Any, runs: Any, tile: Any, key: Any, values: Any, fractions: Any, indices: Any
) -> None:
    """Of the eight neighbours' labels the one with the greatest summed weight, int64; the smaller of equals."""
    labels, weights = np.zeros(8, np.int64), np.zeros(8, np.int64)
    for row in range(tile[ROWS]):
        x, corner, first, last = (
            moved(points, row * 3 * TILE_K),
            moved(whole, row * 3),
            runs[2 * row],
            runs[2 * row + 1],
        )
        split_row(x, key, first, last, fractions, indices)
        ask_ahead(data, corner, tile, key, first, last, 8, indices)
        for channel in range(key[CHANNELS]):
            constants = moved(values, channel * VALUES)
            start = channel * key[CHANNEL_STRIDE] + element(corner, key)
            target = moved(int64_at(key[OUT]), tile[FIRST] + row * tile[ROW_STEP] + channel * tile[CHANNEL_STEP])
            vote_run(data, start, key, constants, fractions, indices, first, last, labels, weights, target)
            for k in range(first):
                target[k] = vote_at(data, x, k, corner, tile, key, channel, constants, labels, weights)
            for k in range(last, tile[COUNT]):
                target[k] = vote_at(data, x, k, corner, tile, key, channel, constants, labels, weights)


@jit
def vote_run(
    data: Any, start: int, key: Any, constants: Any, fractions: Any, indices: Any, first: int, last: int, labels: Any,
    weights: Any, target: Any,
) -> None:  # fmt: skip
    """The inner run of a row, in one channel; most voxels have neighbours of one label only."""
    slope, intercept = int(constants[SLOPE]), int(constants[INTERCEPT])
    si, sj, sk = key[STRIDE], key[STRIDE + 1], key[STRIDE + 2]
    for k in range(first, last):
        near = start + np.int64(indices[k])
        if sk == 1 and agree(data, near, si, sj):
            target[k] = stored_whole(data, near) * slope + intercept
        else:
            for tap in range(8):
                place = near + (tap >> 2) * si + (tap >> 1 & 1) * sj + (tap & 1) * sk
                labels[tap] = stored_whole(data, place) * slope + intercept
            target[k] = winner(labels, weights, fractions[k], fractions[TILE_K + k], fractions[2 * TILE_K + k])


@jit
def winner(labels: Any, weights: Any, fi: Any, fj: Any, fk: Any) -> Any:
    """The label (8 neighbours, i slowest) with the greatest weight in steps of 1/128, the smaller of equals."""
    wi, wj, wk = int(floor(fi * STEPS + HALF)), int(floor(fj * STEPS + HALF)), int(floor(fk * STEPS + HALF))
    for tap in range(8):
        along_i, along_j, along_k = (
            wi if tap >> 2 else 128 - wi,
            wj if tap >> 1 & 1 else 128 - wj,
            wk if tap & 1 else 128 - wk,
        )
        weights[tap] = along_i * along_j * along_k
    best, most = labels[0], 0
    for tap in range(8):
        total = 0
        for later in range(tap, 8):  # an earlier equal label has been counted with this one
            if labels[later] == labels[tap]:
                total += weights[later]
        if 2 * total > 128**3:
            return labels[tap]
        if total > most or (total == most and labels[tap] < best):
            best, most = labels[tap], total
    return best


@jit
def vote_at(
    data: Any,
    points: Any,
    k: int,
    whole: Any,
    tile: Any,
    key: Any,
    channel: int,
    constants: Any,
    labels: Any,
    weights: Any,
) -> Any:
    """One voxel near or beyond the border: neighbours outside the array vote for the pad label."""
    if not reaches_in(points, k, whole, tile):
        return int(constants[PAD])
    x, y, z = points[k], points[TILE_K + k], points[2 * TILE_K + k]
    x0, y0, z0 = floor(x), floor(y), floor(z)
    for tap in range(8):
        i, j = whole[0] + int(x0) + (tap >> 2), whole[1] + int(y0) + (tap >> 1 & 1)
        index = element_at(i, j, whole[2] + int(z0) + (tap & 1), tile, key)
        labels[tap] = int(constants[PAD])
        if index >= 0:
            stored = stored_whole(data, channel * key[CHANNEL_STRIDE] + index)
            labels[tap] = stored * int(constants[SLOPE]) + int(constants[INTERCEPT])
    return winner(labels, weights, x - x0, y - y0, z - z0)


# Shared --------------------------------------------------------------------------------------------------------------


@jit
def split_row(points: Any, key: Any, first: int, last: int, fractions: Any, indices: Any) -> None:
    """Coordinates to fractions and to element offsets from the row's whole voxel, eight at a time."""
    si, sj, sk = spread8(np.int32(key[STRIDE])), spread8(np.int32(key[STRIDE + 1])), spread8(np.int32(key[STRIDE + 2]))
    for k in range(first // 8 * 8, last, 8):
        x, y, z = load8(points, k), load8(points, TILE_K + k), load8(points, 2 * TILE_K + k)
        i, j, h = floor8(x), floor8(y), floor8(z)
        store8(fractions, k, minus8(x, i))
        store8(fractions, TILE_K + k, minus8(y, j))
        store8(fractions, 2 * TILE_K + k, minus8(z, h))
        store8(indices, k, fused8(whole8(i), si, fused8(whole8(j), sj, fused8(whole8(h), sk, spread8(np.int32(0))))))


@jit
def nearest_row(points: Any, key: Any, first: int, last: int, indices: Any) -> None:
    """Coordinates to the nearest voxel's element offset from the row's whole voxel, eight at a time."""
    si, sj, sk = spread8(np.int32(key[STRIDE])), spread8(np.int32(key[STRIDE + 1])), spread8(np.int32(key[STRIDE + 2]))
    shift = spread8(SHIFT)
    for k in range(first // 8 * 8, last, 8):
        i, j = floor8(plus8(load8(points, k), shift)), floor8(plus8(load8(points, TILE_K + k), shift))
        h = floor8(plus8(load8(points, 2 * TILE_K + k), shift))
        store8(indices, k, fused8(whole8(i), si, fused8(whole8(j), sj, fused8(whole8(h), sk, spread8(np.int32(0))))))


@jit
def ask_ahead(data: Any, whole: Any, tile: Any, key: Any, first: int, last: int, every: int, indices: Any) -> None:
    """Asks for the cache lines of every n-th voxel of the row as it will lie some planes on."""
    start = element(whole, key) + element(moved(tile, AHEAD), key)
    for k in range(first, last, every):
        prefetch(data, start + np.int64(indices[k]))


@jit
def element(voxel: Any, key: Any) -> int:
    """Element offset of a voxel (3,)."""
    return int(voxel[0] * key[STRIDE] + voxel[1] * key[STRIDE + 1] + voxel[2] * key[STRIDE + 2])


@jit
def element_at(i: int, j: int, k: int, tile: Any, key: Any) -> int:
    """Element offset of voxel (i, j, k) counted from the array's lowest, or -1 outside the array."""
    if i < 0 or j < 0 or k < 0 or i >= tile[SHAPE] or j >= tile[SHAPE + 1] or k >= tile[SHAPE + 2]:
        return -1
    return int(i * key[STRIDE] + j * key[STRIDE + 1] + k * key[STRIDE + 2])


@jit
def reaches_in(points: Any, k: int, whole: Any, tile: Any) -> bool:
    """Whether a neighbour of voxel k lies inside the array on every axis; not for a point that is not a number."""
    for s in range(3):
        x = points[s * TILE_K + k]
        if not (x > np.float32(-1 - whole[s]) and x < np.float32(tile[SHAPE + s] - whole[s])):
            return False
    return True


@jit
def is_inside(points: Any, k: int, whole: Any, tile: Any) -> bool:
    """Whether all eight neighbours of voxel k lie inside the array."""
    for s in range(3):
        x = points[s * TILE_K + k]
        if not (x >= np.float32(-whole[s]) and x < np.float32(tile[SHAPE + s] - 1 - whole[s])):
            return False
    return True
