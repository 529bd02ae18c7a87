"""The Triton kernels: one launch gathers all keys of a mixed batch; another contracts its splines beforehand.

A program reads one brick of one patch. Its 512 voxels lie on the lanes of a warp as 8 along k, 2 along j and 2 along i,
which touches fewer cache lines of a turned source than a row does. Addresses come from a table, so volumes of any shape
share the launch; offsets are 64-bit before the first product. Sources are read in their stored dtype.

Everything that is the same for a whole launch is a compile-time constant, so that no argument can be specialised by
accident. Clamps use maximum and minimum, which drop a NaN: such a point lands outside and reads pad.

A patch's record in `ints` (int64): base 3, shape 3, spline table offset, control points along k; then for each key
address of the data, address of the output, strides c i j k, and slope, intercept, pad of each channel of a label.
In `floats` (float32): matrix 9, rest 3, largest displacement 3; first cell fraction, cells per voxel, least and
greatest cell coordinate along k; then for each key slope, intercept and pad in stored units of each channel.
CODES packs 6 bits a key: mode 2, number of the dtype 3, whether pad can be loaded like a stored value 1; CHANNELS packs
10 bits a key. (One file, though long: the functions inline one another into one kernel.)
"""

# mypy: ignore-errors
# (the functions are Triton's language, which has Python's grammar but not its types)

import triton
import triton.language as tl

PATCH_INTS: tl.constexpr = tl.constexpr(8)
PATCH_FLOATS: tl.constexpr = tl.constexpr(19)
KEY_INTS: tl.constexpr = tl.constexpr(6)


@triton.jit
def typed(address, DTYPE: tl.constexpr):
    """An address as a pointer to a stored dtype, by its number in `triton_records.DTYPES`."""
    if DTYPE == 0:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif DTYPE == 1:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif DTYPE == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif DTYPE == 3:
        pointer = address.to(tl.pointer_type(tl.uint16))
    elif DTYPE == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif DTYPE == 5:
        pointer = address.to(tl.pointer_type(tl.float16))
    elif DTYPE == 6:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return pointer


@triton.jit
def cubic(position, least, greatest):
    """Cell and four cubic B-spline weights of a cell coordinate, clamped to the extent."""
    t = tl.minimum(tl.maximum(position, least), greatest)
    cell = tl.minimum(tl.floor(t), greatest - 1)
    f = t - cell
    g = 1 - f
    w0, w3 = g * g * g * (1 / 6), f * f * f * (1 / 6)
    w1 = 2 / 3 - f * f * (1 - f * 0.5)
    return cell.to(tl.int32), w0, w1, 1 - w0 - w1 - w3, w3


@triton.jit
def contract_kernel(ints, floats, coefficients, table, SIZE_J: tl.constexpr, BLOCK: tl.constexpr):
    """table[i, j, s, c] = sum_ab wi[i, a] wj[j, b] coefficients[s, a, b, c] for one plane i of one patch.

    Records: `ints` coefficients offset, table offset, control points along i j k that the patch sees; `floats` first
    fraction, cells per voxel, least and greatest cell coordinate of axis i, then of axis j.
    """
    patch, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ints += patch * 5
    floats += patch * 8
    source, target = coefficients + tl.load(ints), table + tl.load(ints + 1)
    num_a, num_b, num_c = tl.load(ints + 2).to(tl.int32), tl.load(ints + 3).to(tl.int32), tl.load(ints + 4).to(tl.int32)
    position = tl.load(floats) + i.to(tl.float32) * tl.load(floats + 1)
    cell_i, a0, a1, a2, a3 = cubic(position, tl.load(floats + 2), tl.load(floats + 3))
    row = 3 * num_c
    for first in range(0, SIZE_J * row, BLOCK):
        n = first + tl.arange(0, BLOCK)
        mask = n < SIZE_J * row
        j, s, c = n // row, n % row // num_c, n % num_c
        along_j = tl.load(floats + 4) + j.to(tl.float32) * tl.load(floats + 5)
        cell_j, b0, b1, b2, b3 = cubic(along_j, tl.load(floats + 6), tl.load(floats + 7))
        place = source + ((s * num_a + cell_i) * num_b + cell_j) * num_c + c
        total = tl.zeros((BLOCK,), tl.float32)
        for a in tl.static_range(4):
            along = tl.load(place, mask=mask, other=0) * b0 + tl.load(place + num_c, mask=mask, other=0) * b1
            along += tl.load(place + 2 * num_c, mask=mask, other=0) * b2
            along += tl.load(place + 3 * num_c, mask=mask, other=0) * b3
            total += along * (a0 if a == 0 else a1 if a == 1 else a2 if a == 2 else a3)
            place += num_b * num_c
        tl.store(target + i.to(tl.int64) * (SIZE_J * row) + n, total, mask=mask)


@triton.jit
def voxel_of(index, SIZE: tl.constexpr):
    """A voxel index of the patch, counted from the patch's centre voxel, as float32."""
    return (index - SIZE // 2).to(tl.float32)


@triton.jit
def coordinate(floats, s: tl.constexpr, qi, qj, qk):
    """Affine source coordinate of axis s, relative to base."""
    m = floats + 3 * s
    return tl.load(m) * qi + (tl.load(m + 1) * qj + (tl.load(m + 2) * qk + tl.load(floats + 9 + s)))


@triton.jit
def reach(floats, s: tl.constexpr, TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_K: tl.constexpr):
    """How far, in source voxels, a brick's voxels can lie from its middle; rounding included."""
    m = floats + 3 * s
    along = tl.abs(tl.load(m)) * ((TILE_I - 1) * 0.5) + tl.abs(tl.load(m + 1)) * ((TILE_J - 1) * 0.5)
    return along + tl.abs(tl.load(m + 2)) * ((TILE_K - 1) * 0.5) + tl.load(floats + 12 + s) + 0.01


@triton.jit
def gather_kernel(
    ints, floats, table,
    SIZE_I: tl.constexpr, SIZE_J: tl.constexpr, SIZE_K: tl.constexpr,
    TILE_I: tl.constexpr, TILE_J: tl.constexpr, TILE_K: tl.constexpr,
    NUM_KEYS: tl.constexpr, CODES: tl.constexpr, CHANNELS: tl.constexpr, NUM_INTS: tl.constexpr,
    NUM_FLOATS: tl.constexpr, SPLINE: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """One brick of one patch, all keys. PATH 0 chooses per brick; 1 always tests bounds, 2 never (to count code)."""
    bricks_i, bricks_j = (SIZE_I + TILE_I - 1) // TILE_I, (SIZE_J + TILE_J - 1) // TILE_J
    bricks_k = (SIZE_K + TILE_K - 1) // TILE_K
    program = tl.program_id(0)
    patch = (program // (bricks_i * bricks_j * bricks_k)).to(tl.int64)
    ints += patch * NUM_INTS
    floats += patch * NUM_FLOATS
    i0 = program // (bricks_j * bricks_k) % bricks_i * TILE_I
    j0, k0 = program // bricks_k % bricks_j * TILE_J, program % bricks_k * TILE_K

    n = tl.arange(0, TILE_I * TILE_J * TILE_K)
    high_k, high_j = TILE_K // 8, TILE_J // 2
    i = i0 + n // 16 % 2 + n // (32 * high_k * high_j) * 2
    j = j0 + n // 8 % 2 + n // (32 * high_k) % high_j * 2
    k = k0 + n % 8 + n // 32 % high_k * 8
    exists = (i < SIZE_I) & (j < SIZE_J) & (k < SIZE_K)
    i, j, k = tl.minimum(i, SIZE_I - 1), tl.minimum(j, SIZE_J - 1), tl.minimum(k, SIZE_K - 1)
    out = (i.to(tl.int64) * SIZE_J + j) * SIZE_K + k

    qi, qj, qk = voxel_of(i, SIZE_I), voxel_of(j, SIZE_J), voxel_of(k, SIZE_K)
    x, y, z = coordinate(floats, 0, qi, qj, qk), coordinate(floats, 1, qi, qj, qk), coordinate(floats, 2, qi, qj, qk)
    if SPLINE:
        number = tl.load(ints + 7).to(tl.int32)
        position = tl.load(floats + 15) + k.to(tl.float32) * tl.load(floats + 16)
        cell, w0, w1, w2, w3 = cubic(position, tl.load(floats + 17), tl.load(floats + 18))
        row = table + tl.load(ints + 6) + ((i * SIZE_J + j) * (3 * number) + cell)
        x += displacement(row, w0, w1, w2, w3)
        y += displacement(row + number, w0, w1, w2, w3)
        z += displacement(row + 2 * number, w0, w1, w2, w3)

    if PATH == 0:
        mi, mj = i0 + (TILE_I - 1) * 0.5 - SIZE_I // 2, j0 + (TILE_J - 1) * 0.5 - SIZE_J // 2
        mk = k0 + (TILE_K - 1) * 0.5 - SIZE_K // 2
        inside = axis_inside(ints, floats, 0, mi, mj, mk, TILE_I, TILE_J, TILE_K)
        inside = inside & axis_inside(ints, floats, 1, mi, mj, mk, TILE_I, TILE_J, TILE_K)
        inside = inside & axis_inside(ints, floats, 2, mi, mj, mk, TILE_I, TILE_J, TILE_K)
        if inside:
            read_keys(ints, floats, x, y, z, out, exists, SIZE_I * SIZE_J * SIZE_K, NUM_KEYS, CODES, CHANNELS, False)
        else:
            read_keys(ints, floats, x, y, z, out, exists, SIZE_I * SIZE_J * SIZE_K, NUM_KEYS, CODES, CHANNELS, True)
    else:
        read_keys(ints, floats, x, y, z, out, exists, SIZE_I * SIZE_J * SIZE_K, NUM_KEYS, CODES, CHANNELS, PATH == 1)


@triton.jit
def displacement(row, w0, w1, w2, w3):
    """Four control points along k."""
    return tl.load(row) * w0 + tl.load(row + 1) * w1 + (tl.load(row + 2) * w2 + tl.load(row + 3) * w3)


@triton.jit
def axis_inside(ints, floats, s: tl.constexpr, mi, mj, mk, TILE_I: tl.constexpr, TILE_J: tl.constexpr,
                TILE_K: tl.constexpr):  # fmt: skip
    """Whether both neighbours of every voxel of the brick lie inside the array on axis s."""
    middle = coordinate(floats, s, mi, mj, mk)
    distance = reach(floats, s, TILE_I, TILE_J, TILE_K)
    base, size = tl.load(ints + s), tl.load(ints + 3 + s)
    return (middle - distance > (-base).to(tl.float32)) & (middle + distance < (size - 1 - base).to(tl.float32))


@triton.jit
def split(ints, s: tl.constexpr, x, BOUNDED: tl.constexpr):
    """Voxel below a coordinate (int32, relative to base), fraction, and whether it and the next are in the array."""
    base, size = tl.load(ints + s).to(tl.int32), tl.load(ints + 3 + s).to(tl.int32)
    if BOUNDED:
        x = tl.minimum(tl.maximum(x, (-2 - base).to(tl.float32)), (size + 1 - base).to(tl.float32))
    lower = tl.floor(x)
    whole = lower.to(tl.int32)
    if BOUNDED:
        place = whole + base
        near = place.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)
        far = (place + 1).to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)
    else:
        near = True
        far = True
    return whole, x - lower, near, far


@triton.jit
def read_keys(
    ints, floats, x, y, z, out, exists, CHANNEL_STEP: tl.constexpr, NUM_KEYS: tl.constexpr, CODES: tl.constexpr,
    CHANNELS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """All keys of a brick from the same coordinates."""
    i, fi, i_near, i_far = split(ints, 0, x, BOUNDED)
    j, fj, j_near, j_far = split(ints, 1, y, BOUNDED)
    k, fk, k_near, k_far = split(ints, 2, z, BOUNDED)
    key, values = ints + PATCH_INTS, floats + PATCH_FLOATS
    for n in tl.static_range(NUM_KEYS):
        read_key(
            ints, key, values, out, exists, i, j, k, fi, fj, fk, i_near, i_far, j_near, j_far, k_near, k_far,
            CHANNEL_STEP, (CODES >> (6 * n)) % 64, (CHANNELS >> (10 * n)) % 1024, BOUNDED,
        )  # fmt: skip
        key += KEY_INTS + 3 * ((CHANNELS >> (10 * n)) % 1024)
        values += 3 * ((CHANNELS >> (10 * n)) % 1024)


@triton.jit
def read_key(
    ints, key, values, out, exists, i, j, k, fi, fj, fk, i_near, i_far, j_near, j_far, k_near, k_far,
    CHANNEL_STEP: tl.constexpr, CODE: tl.constexpr, CHANNELS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """All channels of one key of a brick."""
    MODE: tl.constexpr = CODE % 4
    DIRECT: tl.constexpr = CODE // 32 == 1
    si, sj, sk = tl.load(key + 3), tl.load(key + 4), tl.load(key + 5)
    origin = tl.load(ints) * si + tl.load(ints + 1) * sj + tl.load(ints + 2) * sk
    place = typed(tl.load(key), CODE // 4 % 8) + origin
    place += i.to(tl.int64) * si + j.to(tl.int64) * sj + k.to(tl.int64) * sk
    target = tl.load(key + 1).to(tl.pointer_type(tl.float32 if MODE == 0 else tl.int64)) + out
    for channel in range(CHANNELS):
        if MODE == 0:
            value = linear(place, si, sj, sk, fi, fj, fk, i_near, i_far, j_near, j_far, k_near, k_far,
                           values + 3 * channel, DIRECT, BOUNDED)  # fmt: skip
        elif MODE == 1:
            value = nearest(place, si, sj, sk, fi, fj, fk, i_near, i_far, j_near, j_far, k_near, k_far,
                            key + KEY_INTS + 3 * channel, DIRECT, BOUNDED)  # fmt: skip
        else:
            value = vote(place, si, sj, sk, fi, fj, fk, i_near, i_far, j_near, j_far, k_near, k_far,
                         key + KEY_INTS + 3 * channel, DIRECT, BOUNDED)  # fmt: skip
        tl.store(target, value, mask=exists)
        place += tl.load(key + 2)
        target += CHANNEL_STEP


@triton.jit
def load_or(place, mask, other, BOUNDED: tl.constexpr):
    """A stored value, or `other` where the mask is off."""
    if BOUNDED:
        return tl.load(place, mask=mask, other=other)
    else:
        return tl.load(place)


@triton.jit
def linear(
    place, si, sj, sk, fi, fj, fk, i_near, i_far, j_near, j_far, k_near, k_far, values, DIRECT: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Trilinear value; where pad is no stored value, it is added with the weight of the neighbours outside."""
    pad = tl.load(values + 2)
    other = pad.to(place.dtype.element_ty) if DIRECT else tl.zeros((), place.dtype.element_ty)
    a = load_or(place, i_near & j_near & k_near, other, BOUNDED).to(tl.float32)
    b = load_or(place + sk, i_near & j_near & k_far, other, BOUNDED).to(tl.float32)
    top = a + fk * (b - a)
    a = load_or(place + sj, i_near & j_far & k_near, other, BOUNDED).to(tl.float32)
    b = load_or(place + (sj + sk), i_near & j_far & k_far, other, BOUNDED).to(tl.float32)
    value = top + fj * (a + fk * (b - a) - top)
    a = load_or(place + si, i_far & j_near & k_near, other, BOUNDED).to(tl.float32)
    b = load_or(place + (si + sk), i_far & j_near & k_far, other, BOUNDED).to(tl.float32)
    top = a + fk * (b - a)
    a = load_or(place + (si + sj), i_far & j_far & k_near, other, BOUNDED).to(tl.float32)
    b = load_or(place + (si + sj + sk), i_far & j_far & k_far, other, BOUNDED).to(tl.float32)
    value += fi * (top + fj * (a + fk * (b - a) - top) - value)
    if BOUNDED and not DIRECT:
        share = weight_inside(fi, i_near, i_far) * weight_inside(fj, j_near, j_far) * weight_inside(fk, k_near, k_far)
        value += pad * (1 - share)
    return value * tl.load(values) + tl.load(values + 1)


@triton.jit
def weight_inside(f, near, far):
    """Of one axis, the weight of the neighbours inside the array; exactly 1 when both are."""
    return 1 - tl.where(near, 0.0, 1 - f) - tl.where(far, 0.0, f)


@triton.jit
def label_at(place, inside, values, DIRECT: tl.constexpr, BOUNDED: tl.constexpr):
    """A label, pad outside, as int64 or a stored integer dtype no wider than int32."""
    pad = tl.load(values + 2)
    if DIRECT:
        stored = load_or(place, inside, pad.to(place.dtype.element_ty), BOUNDED)
        label = stored.to(tl.int32)
    else:
        stored = load_or(place, inside, tl.zeros((), place.dtype.element_ty), BOUNDED)
        label = stored.to(tl.float32).to(tl.int64) if stored.dtype.is_floating() else stored.to(tl.int64)
        label = label * tl.load(values) + tl.load(values + 1)
        if BOUNDED:
            label = tl.where(inside, label, pad)
    return label


@triton.jit
def nearest(
    place, si, sj, sk, fi, fj, fk, i_near, i_far, j_near, j_far, k_near, k_far, values, DIRECT: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """The label at floor(x + NEAREST_SHIFT): the next voxel from fraction 0.499 on."""
    up_i, up_j, up_k = fi >= 0.499, fj >= 0.499, fk >= 0.499
    place += tl.where(up_i, si, 0) + tl.where(up_j, sj, 0) + tl.where(up_k, sk, 0)
    inside = True
    if BOUNDED:
        inside = tl.where(up_i, i_far, i_near) & tl.where(up_j, j_far, j_near) & tl.where(up_k, k_far, k_near)
    return label_at(place, inside, values, DIRECT, BOUNDED).to(tl.int64)


@triton.jit
def vote(
    place, si, sj, sk, fi, fj, fk, i_near, i_far, j_near, j_far, k_near, k_far, values, DIRECT: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Of the eight neighbours' labels the one with the greatest weight in steps of 1/128, the smaller of equals."""
    gi, gj, gk = (fi * 128 + 0.5).to(tl.int32), (fj * 128 + 0.5).to(tl.int32), (fk * 128 + 0.5).to(tl.int32)
    hi, hj, hk = 128 - gi, 128 - gj, 128 - gk
    l0 = label_at(place, i_near & j_near & k_near, values, DIRECT, BOUNDED)
    l1 = label_at(place + sk, i_near & j_near & k_far, values, DIRECT, BOUNDED)
    l2 = label_at(place + sj, i_near & j_far & k_near, values, DIRECT, BOUNDED)
    l3 = label_at(place + (sj + sk), i_near & j_far & k_far, values, DIRECT, BOUNDED)
    l4 = label_at(place + si, i_far & j_near & k_near, values, DIRECT, BOUNDED)
    l5 = label_at(place + (si + sk), i_far & j_near & k_far, values, DIRECT, BOUNDED)
    l6 = label_at(place + (si + sj), i_far & j_far & k_near, values, DIRECT, BOUNDED)
    l7 = label_at(place + (si + sj + sk), i_far & j_far & k_far, values, DIRECT, BOUNDED)
    w0, w1, w2, w3 = hi * hj * hk, hi * hj * gk, hi * gj * hk, hi * gj * gk
    w4, w5, w6, w7 = gi * hj * hk, gi * hj * gk, gi * gj * hk, gi * gj * gk
    # a tap's total counts later equal taps, so the first of equal taps has the whole sum, and exactly
    t6 = w6 + same(l6, l7, w7)
    t5 = w5 + same(l5, l6, w6) + same(l5, l7, w7)
    t4 = w4 + same(l4, l5, w5) + same(l4, l6, w6) + same(l4, l7, w7)
    t3 = w3 + same(l3, l4, w4) + same(l3, l5, w5) + same(l3, l6, w6) + same(l3, l7, w7)
    t2 = w2 + same(l2, l3, w3) + same(l2, l4, w4) + same(l2, l5, w5) + same(l2, l6, w6) + same(l2, l7, w7)
    t1 = w1 + same(l1, l2, w2) + same(l1, l3, w3) + same(l1, l4, w4) + same(l1, l5, w5) + same(l1, l6, w6)
    t1 += same(l1, l7, w7)
    t0 = w0 + same(l0, l1, w1) + same(l0, l2, w2) + same(l0, l3, w3) + same(l0, l4, w4) + same(l0, l5, w5)
    t0 += same(l0, l6, w6) + same(l0, l7, w7)
    if place.dtype.element_ty.primitive_bitwidth == 8 and DIRECT:  # totals and labels fit one word
        best = tl.maximum(tl.maximum(packed(l0, t0), packed(l1, t1)), tl.maximum(packed(l2, t2), packed(l3, t3)))
        best = tl.maximum(best, tl.maximum(packed(l4, t4), packed(l5, t5)))
        best = tl.maximum(best, tl.maximum(packed(l6, t6), packed(l7, w7)))
        best = ((128 - best) & 511) - 128
    else:
        best, most = better(l0, t0, l1, t1)
        best, most = better(best, most, l2, t2)
        best, most = better(best, most, l3, t3)
        best, most = better(best, most, l4, t4)
        best, most = better(best, most, l5, t5)
        best, most = better(best, most, l6, t6)
        best, most = better(best, most, l7, w7)
    return best.to(tl.int64)


@triton.jit
def same(label, other, weight):
    """The other tap's weight, if it has this label."""
    return tl.where(label == other, weight, 0)


@triton.jit
def packed(label, total):
    """Total and label in one int32, the greater the better: totals reach 2^21, labels lie in -128 .. 255."""
    return total * 512 - label


@triton.jit
def better(best, most, label, total):
    """The label with the greater total, the smaller of equals."""
    wins = (total > most) | ((total == most) & (label < best))
    return tl.where(wins, label, best), tl.where(wins, total, most)
