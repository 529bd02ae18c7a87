"""The compiled code of the CPU backend: one driver, and one row reader for each (mode, stored dtype).

The driver walks the rows (i, j) of a patch, computes their source coordinates in float32 about a whole source voxel of
the row, finds the run [first, last) of each row whose neighbours all lie inside the array, and hands the row to the
reader of every key. A reader truncates, looks up and interpolates that run without a test, and takes the rest voxel by
voxel. All scratch memory is a few rows, so no coordinate grid exists.

Everything that is compiled lives in this one file: numba's disk cache only notices changes of the file itself.
Kernels index through pointers, because array indices cost a wrap-around test; whole numbers and floats are never mixed,
because that makes float64; and vector instructions that the compiler does not find are written out (`_trilinear`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])
Pointer = Any  # what kernels see: a typed address

HALF, BFLOAT16 = types.Opaque("float16"), types.Opaque("bfloat16")  # numba knows neither on the CPU
OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}, "cache": True}
SHIFT = np.float32(0.5 + 1e-3)
ZERO, ONE = np.float32(0), np.float32(1)
BLOCK = 16  # rows j of a plane that are read before the next plane: their source stays in the cache

# Fields of a key, int64, and of each of its channels, float64
ADDRESS, CHANNELS, CHANNEL_STRIDE, STRIDE_I, STRIDE_J, STRIDE_K, OUT, OUT_CHANNEL_STRIDE, READER, NUM_FIELDS = range(10)
SLOPE, INTERCEPT, PAD, NUM_VALUES = range(4)


def jit(function: F) -> F:
    """numba.njit with this file's options; the GIL is released."""
    return cast(F, numba.njit(nogil=True, **OPTIONS)(function))


# Instructions --------------------------------------------------------------------------------------------------------

FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
CONTRACT = ("contract",)


def _bits(dtype: Any) -> int:
    return 16 if isinstance(dtype, types.Opaque) else int(dtype.bitwidth)


def _vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _to_float(builder: Any, words: Any, dtype: Any) -> Any:
    """Stored words <n x iB> as <n x float>."""
    n = words.type.count
    floats, ints = _vector(FLOAT, n), _vector(INT32, n)
    if dtype == types.float32:
        return builder.bitcast(words, floats)
    if dtype == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(words, ints), _constant(ints, 16)), floats)
    if dtype == HALF:  # exponent and fraction move to float32's place, times 2^112; exponent 31 stays infinite
        wide = builder.zext(words, ints)
        magnitude = builder.shl(builder.and_(wide, _constant(ints, 0x7FFF)), _constant(ints, 13))
        scaled = builder.bitcast(
            builder.fmul(builder.bitcast(magnitude, floats), _constant(floats, 2.0**112)), ints
        )
        infinite = builder.icmp_unsigned(">=", magnitude, _constant(ints, 0x7C00 << 13))
        scaled = builder.select(infinite, builder.or_(magnitude, _constant(ints, 0x7F800000)), scaled)
        sign = builder.shl(builder.and_(wide, _constant(ints, 0x8000)), _constant(ints, 16))
        return builder.bitcast(builder.or_(scaled, sign), floats)
    if _bits(dtype) < 32:
        words = builder.sext(words, ints) if dtype.signed else builder.zext(words, ints)
    return builder.sitofp(words, floats)


def _load(builder: Any, data: Any, offset: Any, kind: Any, align: int) -> Any:
    """Loads a `kind` at byte address data + offset."""
    address = builder.inttoptr(builder.add(data, offset), kind.as_pointer())
    return builder.load(address, align=align)


def _lerp(builder: Any, a: Any, b: Any, fraction: Any) -> Any:
    return builder.fadd(a, builder.fmul(fraction, builder.fsub(b, a, CONTRACT), CONTRACT), CONTRACT)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    one = builder.insert_element(ir.Constant(_vector(value.type, lanes), ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_vector(INT32, lanes), [0] * lanes))


def _pick(builder: Any, vector: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(_vector(INT32, len(lanes)), lanes))
