"""The few instructions that the CPU kernels need and numba does not have, written out in LLVM's language.

Kernels index through typed addresses, because an array index costs a wrap-around test. `trilinear` reads the two
neighbours along k as one word and interpolates four lanes at once; the compiler does not find that form.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

HALF, BFLOAT16 = types.Opaque("float16"), types.Opaque("bfloat16")  # numba knows neither on the CPU
FLOAT, DOUBLE, INT32, INT64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
FUSE = ("contract",)  # a product and a sum may become one fused instruction


def _bits(dtype: Any) -> int:
    return 16 if isinstance(dtype, types.Opaque) else int(dtype.bitwidth)


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _pick(builder: Any, vector: Any, *lanes: int) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    first = builder.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, INT32(0))
    return _pick(builder, first, *[0] * lanes)


def _lerp(builder: Any, a: Any, b: Any, fraction: Any) -> Any:
    return builder.fadd(a, builder.fmul(fraction, builder.fsub(b, a, FUSE), FUSE), FUSE)


def _load(builder: Any, data: Any, index: Any, dtype: Any, kind: Any) -> Any:
    """A `kind` read at element `index` of the typed address `data`, however it is aligned."""
    elements = builder.bitcast(data, ir.IntType(_bits(dtype)).as_pointer())
    address = builder.bitcast(builder.gep(elements, [index]), kind.as_pointer())
    return builder.load(address, align=_bits(dtype) // 8)


def _half_to_float(builder: Any, words: Any) -> Any:
    """IEEE half as float: exponent and fraction move to float's place, times 2^112; exponent 31 stays infinite."""
    floats, ints = ir.VectorType(FLOAT, words.type.count), ir.VectorType(INT32, words.type.count)
    wide = builder.zext(words, ints)
    moved = builder.shl(builder.and_(wide, _constant(ints, 0x7FFF)), _constant(ints, 13))
    finite = builder.bitcast(builder.fmul(builder.bitcast(moved, floats), _constant(floats, 2.0**112)), ints)
    infinite = builder.or_(moved, _constant(ints, 0x7F800000))
    is_infinite = builder.icmp_unsigned(">=", moved, _constant(ints, 0x7C00 << 13))
    sign = builder.shl(builder.and_(wide, _constant(ints, 0x8000)), _constant(ints, 16))
    return builder.bitcast(builder.or_(builder.select(is_infinite, infinite, finite), sign), floats)


def _to_float(builder: Any, words: Any, dtype: Any) -> Any:
    """Stored words <n x iB> as <n x float>."""
    floats, ints = ir.VectorType(FLOAT, words.type.count), ir.VectorType(INT32, words.type.count)
    if dtype == types.float32:
        return builder.bitcast(words, floats)
    if dtype == HALF:
        return _half_to_float(builder, words)
    if dtype == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(words, ints), _constant(ints, 16)), floats)
    if _bits(dtype) < 32:
        words = builder.sext(words, ints) if dtype.signed else builder.zext(words, ints)
    return builder.sitofp(words, floats)


def _neighbours(builder: Any, data: Any, dtype: Any, index: Any, step_j: Any, step_k: Any | None) -> Any:
    """The four neighbours along j and k of `index` as <4 x float>; without `step_k`, k is contiguous."""
    word = ir.IntType(_bits(dtype))
    pairs = [index, builder.add(index, step_j)]
    if step_k is None:
        pair = DOUBLE if dtype == types.float32 else ir.IntType(2 * _bits(dtype))
        loaded = [_load(builder, data, place, dtype, pair) for place in pairs]
    else:
        places = [place for first in pairs for place in (first, builder.add(first, step_k))]
        loaded = [_load(builder, data, place, dtype, word) for place in places]
    vector = ir.Constant(ir.VectorType(loaded[0].type, len(loaded)), ir.Undefined)
    for lane, value in enumerate(loaded):
        vector = builder.insert_element(vector, value, INT32(lane))
    return _to_float(builder, builder.bitcast(vector, ir.VectorType(word, 4)), dtype)


def _interpolate(builder: Any, args: Any, dtype: Any, contiguous: bool) -> Any:
    data, index, step_i, step_j, step_k, fraction_i, fraction_j, fraction_k = args
    along_k = None if contiguous else step_k
    near = _neighbours(builder, data, dtype, index, step_j, along_k)
    far = _neighbours(builder, data, dtype, builder.add(index, step_i), step_j, along_k)
    plane = _lerp(builder, near, far, _splat(builder, fraction_i, 4))
    line = _lerp(builder, _pick(builder, plane, 0, 1), _pick(builder, plane, 2, 3), _splat(builder, fraction_j, 2))
    a, b = (builder.extract_element(line, INT32(lane)) for lane in (0, 1))
    return _lerp(builder, a, b, fraction_k)


def _trilinear(typing: Any, data: Any, index: Any, i: Any, j: Any, k: Any, fi: Any, fj: Any, fk: Any) -> Any:
    """(address, index, steps i j k, fractions i j k) -> float32; the neighbours along k are adjacent."""
    signature = types.float32(data, *[types.int64] * 4, *[types.float32] * 3)
    return signature, lambda context, builder, sig, args: _interpolate(builder, args, data.dtype, True)


def _trilinear_strided(typing: Any, data: Any, index: Any, i: Any, j: Any, k: Any, fi: Any, fj: Any, fk: Any) -> Any:
    """`trilinear` for an array whose voxels along k are `k` elements apart."""
    signature = types.float32(data, *[types.int64] * 4, *[types.float32] * 3)
    return signature, lambda context, builder, sig, args: _interpolate(builder, args, data.dtype, False)


def _agree(typing: Any, data: Any, index: Any, step_i: Any, step_j: Any) -> Any:
    """(address, index, steps i j) -> whether the eight neighbours hold one value; those along k are adjacent."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, (pointer, first, along_i, along_j) = _bits(data.dtype), args
        pair = ir.IntType(2 * bits)
        places = [first, builder.add(first, along_j)]
        places += [builder.add(place, along_i) for place in places]
        words = [_load(builder, pointer, place, data.dtype, pair) for place in places]
        swapped = builder.or_(builder.shl(words[0], pair(bits)), builder.lshr(words[0], pair(bits)))
        differ = builder.xor(words[0], swapped)
        for word in words[1:]:
            differ = builder.or_(differ, builder.xor(words[0], word))
        return builder.icmp_unsigned("==", differ, pair(0))

    return types.boolean(data, types.int64, types.int64, types.int64), code


def _prefetch(typing: Any, data: Any, index: Any) -> Any:
    """Asks for the cache line of element `index`; any address may be asked for."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        elements = builder.bitcast(args[0], ir.IntType(_bits(data.dtype)).as_pointer())
        place = builder.bitcast(builder.gep(elements, [args[1]], inbounds=False), byte)
        builder.call(function, [place, INT32(0), INT32(3), INT32(1)])
        return context.get_dummy_value()

    return types.none(data, types.int64), code


def _stored_float(typing: Any, data: Any, index: Any) -> Any:
    """(address, index) -> the stored value as float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _load(builder, args[0], args[1], data.dtype, ir.IntType(_bits(data.dtype)))
        lanes = builder.bitcast(word, ir.VectorType(word.type, 1))
        return builder.extract_element(_to_float(builder, lanes, data.dtype), INT32(0))

    return types.float32(data, types.int64), code


def _stored_whole(typing: Any, data: Any, index: Any) -> Any:
    """(address, index) -> the stored value as int64; integers never pass through a float."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _load(builder, args[0], args[1], data.dtype, ir.IntType(_bits(data.dtype)))
        if isinstance(data.dtype, types.Integer):
            return builder.sext(word, INT64) if data.dtype.signed else builder.zext(word, INT64)
        lanes = builder.bitcast(word, ir.VectorType(word.type, 1))
        return builder.fptosi(builder.extract_element(_to_float(builder, lanes, data.dtype), INT32(0)), INT64)

    return types.int64(data, types.int64), code


# Eight voxels of a row at once ---------------------------------------------------------------------------------------


class Lanes(types.Type):  # type: ignore[misc, unused-ignore]
    """Eight float32 or eight int32 in a vector register."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"{element} x 8")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):  # type: ignore[misc, unused-ignore]
    def __init__(self, manager: Any, kind: Lanes) -> None:
        element = FLOAT if kind.element == types.float32 else INT32
        super().__init__(manager, kind, ir.VectorType(element, 8))


FLOATS, INTS = Lanes(types.float32), Lanes(types.int32)


def _load8(typing: Any, pointer: Any, index: Any) -> Any:
    """(address, index) -> the eight values there."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = context.get_value_type(signature.return_type)
        return builder.load(builder.bitcast(builder.gep(*_place(args)), vector.as_pointer()), align=4)

    return Lanes(pointer.dtype)(pointer, types.int64), code


def _store8(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """(address, index, eight values)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(builder.gep(*_place(args)), args[2].type.as_pointer())
        builder.store(args[2], place, align=4)
        return context.get_dummy_value()

    return types.none(pointer, types.int64, value), code


def _place(args: Any) -> Any:
    return args[0], [args[1]]


def _spread8(typing: Any, value: Any) -> Any:
    """One float32 or int32 in all eight lanes."""
    return Lanes(value)(value), lambda context, builder, sig, args: _splat(builder, args[0], 8)


def _floor8(typing: Any, x: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(args[0].type, [args[0].type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.floor.v8f32"), args)

    return FLOATS(FLOATS), code


def _whole8(typing: Any, x: Any) -> Any:
    """Whole floats as int32."""
    return INTS(FLOATS), lambda context, builder, sig, args: builder.fptosi(args[0], ir.VectorType(INT32, 8))


def _minus8(typing: Any, a: Any, b: Any) -> Any:
    return FLOATS(FLOATS, FLOATS), lambda context, builder, sig, args: builder.fsub(*args)


def _plus8(typing: Any, a: Any, b: Any) -> Any:
    return FLOATS(FLOATS, FLOATS), lambda context, builder, sig, args: builder.fadd(*args)


def _fused8(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, floats or ints."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if a == FLOATS:
            return builder.fadd(builder.fmul(*args[:2], FUSE), args[2], FUSE)
        return builder.add(builder.mul(*args[:2]), args[2])

    return a(a, a, a), code


def _floor(typing: Any, x: Any) -> Any:
    """float32 -> float32, in one instruction."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [FLOAT]), args)

    return types.float32(types.float32), code


# Addresses -----------------------------------------------------------------------------------------------------------


def _address(typing: Any, array: Any) -> Any:
    """The typed address of an array's first element; the array must be kept by the caller."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), code


def _moved(typing: Any, pointer: Any, index: Any) -> Any:
    """A typed address moved on by `index` elements."""
    return pointer(pointer, types.int64), lambda context, builder, sig, args: builder.gep(args[0], [args[1]])


def _float_at(typing: Any, address: Any) -> Any:
    """An int64 address as the typed address of float32."""
    pointer = types.CPointer(types.float32)
    return pointer(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], FLOAT.as_pointer())


def _int64_at(typing: Any, address: Any) -> Any:
    """An int64 address as the typed address of int64."""
    pointer = types.CPointer(types.int64)
    return pointer(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], INT64.as_pointer())


def _call(typing: Any, function: Any, data: Any, arguments: Any) -> Any:
    """Calls the C function at an int64 address with the int64 address `data` and a tuple of further arguments."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        rest = [builder.extract_value(args[2], n) for n in range(len(arguments))]
        kind = ir.FunctionType(ir.VoidType(), [byte, *[arg.type for arg in rest]])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.inttoptr(args[1], byte), *rest])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, arguments), code


trilinear, trilinear_strided = intrinsic(_trilinear), intrinsic(_trilinear_strided)
stored_float, stored_whole = intrinsic(_stored_float), intrinsic(_stored_whole)
load8, store8, spread8, floor8 = intrinsic(_load8), intrinsic(_store8), intrinsic(_spread8), intrinsic(_floor8)
whole8, minus8, plus8, fused8 = intrinsic(_whole8), intrinsic(_minus8), intrinsic(_plus8), intrinsic(_fused8)
floor, prefetch, agree = intrinsic(_floor), intrinsic(_prefetch), intrinsic(_agree)
address, moved, float_at, int64_at = intrinsic(_address), intrinsic(_moved), intrinsic(_float_at), intrinsic(_int64_at)
call = intrinsic(_call)
