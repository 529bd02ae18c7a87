"""How voxels are kept: in which dtypes, and how every other one is narrowed to one of them.

Data keep their own dtype where it is one of `STORED_DTYPES` (half the bytes of float32 for CT) and their own memory
layout (NIfTI lies in Fortran order). Everything else becomes one of them that holds every value; only images of 64-bit
numbers may lose digits, to float32. Labels are whole numbers or an error, never a guess.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuqueue.errors import VolumeError

Array = NDArray[Any]

STORED_DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)
POLICIES = ("raise", "replace", "keep")
LABEL_TOLERANCE = 1e-3  # how far a label may be from a whole number
_SLAB = 1 << 16  # voxels converted at a time, so that 64-bit intermediates stay small
_TILE = 16  # voxels: a cache line of them
_NARROWEST_FIRST = (np.uint8, np.int8, np.int16, np.uint16, np.int32)
_STORED_NUMPY = (*_NARROWEST_FIRST, np.float16, np.float32)


def storable(array: Any, role: str, where: str, slope: float = 1.0, intercept: float = 0.0) -> torch.Tensor:
    """The voxels as a CPU tensor (C, I, J, K) of a stored dtype, sharing memory with `array` where that is possible.

    `array` is a numpy array or torch tensor (I, J, K) or (C, I, J, K) of any numeric dtype, byte order and strides; it
    is never modified. `role` is "image", "map" (alike) or "label"; `where` begins every message. With `slope` and
    `intercept` the values are `array * slope + intercept`, computed in float64. Labels must be whole numbers within
    1e-3 and fit int32. Raises VolumeError.

    >>> storable(np.full((2, 2, 2), 300, np.int64), "label", "volume 'a'").dtype
    torch.int16
    """
    if isinstance(array, torch.Tensor):
        plain = _plain(array, where)
        if plain.dtype == torch.bfloat16 and role != "label" and (slope, intercept) == (1, 0):
            _check_shape(tuple(plain.shape), where)
            return plain if plain.ndim == 4 else plain[None]
        array = plain.float().numpy() if plain.dtype == torch.bfloat16 else plain.numpy()
    voxels = np.asarray(array)
    check_numeric(voxels.dtype, where)
    _check_shape(voxels.shape, where)
    if voxels.dtype == np.bool_:
        voxels = voxels.view(np.uint8)
    voxels = voxels if voxels.ndim == 4 else voxels[None]
    return torch.from_numpy(_torch_ready(_narrowed(voxels, role, where, slope, intercept)))


def widest_dtype(dtype: np.dtype[Any], role: str, scaled: bool) -> torch.dtype:
    """The largest dtype that `storable` may give for data of `dtype`; known without the voxels.

    >>> widest_dtype(np.dtype(">i2"), "image", scaled=False)
    torch.int16
    """
    native = dtype.newbyteorder("=")
    if role == "label":
        keeps = native in _NARROWEST_FIRST and not scaled
    else:
        keeps = native in _STORED_NUMPY and not scaled
    if native == np.bool_:
        return torch.uint8
    if keeps:
        return torch.from_numpy(np.empty(0, native)).dtype
    return torch.int32 if role == "label" else torch.float32


def handle_nonfinite(data: torch.Tensor, policy: str, where: str) -> torch.Tensor:
    """Voxels that are NaN or infinite, by `policy`; integer data, and all-finite data, come back as they are.

    "raise": a VolumeError that counts them and names the first. "replace": NaN becomes 0, +inf and -inf the largest
    and smallest finite value of `data` (0 where there is none), in a copy, with a warning in the log. "keep": left as
    they are.

    >>> handle_nonfinite(torch.tensor([[[[1.0, math.nan, math.inf]]]]), "replace", "volume 'a'")
    tensor([[[[1., 0., 1.]]]])
    """
    if policy not in POLICIES:
        raise ValueError(f"on_nonfinite must be one of {', '.join(POLICIES)}, got {policy!r}")
    if policy == "keep" or not data.is_floating_point():
        return data
    lowest, highest = (float(bound) for bound in torch.aminmax(data))  # NaN spreads into both, and needs no copy
    if math.isfinite(lowest) and math.isfinite(highest):
        return data
    count, first = _nonfinite(data)
    found = (
        f"{where}: {count} of {data.numel()} voxels are NaN or infinite, the first {float(data[first])} at channel "
        f"{first[0]}, voxel {first[1:]}"
    )
    if policy == "raise":
        raise VolumeError(f"{found}; repair the file, or choose on_nonfinite='replace' or 'keep'")
    logging.getLogger("gpuqueue").warning("%s; replaced (on_nonfinite='replace')", found)
    return _replaced(data)


def as_float16(data: torch.Tensor) -> torch.Tensor:
    """float32 images in half the bytes, about 3 digits, by choice; others, and values beyond 65504, as they are.

    To be called before a volume is used as well as cached, so that every epoch sees the same values.

    >>> as_float16(torch.tensor([1.0, 2.0])).dtype, as_float16(torch.tensor([1e6])).dtype
    (torch.float16, torch.float32)
    """
    if data.dtype != torch.float32 or not data.numel():
        return data
    half = data.to(torch.float16)
    overflows = torch.isinf(half) & torch.isfinite(data)
    return data if bool(overflows.any()) else half


def contiguous_along_k(data: torch.Tensor) -> torch.Tensor:
    """`data` (C, I, J, K) as it is if k moves fastest in memory, else a copy where it does, as gathers want it.

    >>> contiguous_along_k(torch.zeros(1, 4, 5, 6).permute(0, 3, 2, 1)).stride()
    (120, 20, 4, 1)
    """
    if data.is_contiguous():
        return data
    bits = data.view(torch.int16) if data.dtype == torch.bfloat16 else data
    return torch.from_numpy(in_c_order(bits.numpy())).view(data.dtype)


def in_c_order(array: Array) -> Array:
    """`array` in C order. Fortran arrays of three axes and more are turned tile by tile: axes of 256 or 512 voxels lie
    powers of two apart, which the processor's cache cannot hold side by side, and tiles make that 2 to 10 times faster.
    """
    if array.ndim < 3 or array.flags.c_contiguous:
        return np.ascontiguousarray(array)
    out = np.empty(array.shape, array.dtype)
    for i in range(0, array.shape[-3], _TILE):
        for k in range(0, array.shape[-1], _TILE):
            tile = (..., slice(i, i + _TILE), slice(None), slice(k, k + _TILE))
            out[tile] = array[tile]
    return out


def check_numeric(dtype: np.dtype[Any], where: str) -> None:
    """Refuse voxels that are not plain numbers, with a VolumeError that says what to store instead."""
    if dtype.names is not None:
        raise VolumeError(f"{where}: voxels are colours or records ({dtype}); save each component as a channel")
    if dtype.kind == "c":
        raise VolumeError(f"{where}: voxels are complex ({dtype}); save the magnitude, or two channels")
    if dtype.kind not in "biuf":
        raise VolumeError(f"{where}: voxels must be numbers, got dtype {dtype}")


def _plain(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """A detached, strided CPU tensor of class torch.Tensor itself."""
    if tensor.device.type != "cpu":
        raise VolumeError(f"{where}: the data are on {tensor.device}; return CPU data, the queue moves them")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise VolumeError(f"{where}: sparse and quantised tensors cannot be used; pass a dense one")
    plain = tensor.detach().as_subclass(torch.Tensor)
    return plain.resolve_neg() if not plain.is_complex() else plain.resolve_conj().resolve_neg()


def _check_shape(shape: tuple[int, ...], where: str) -> None:
    if len(shape) not in (3, 4):
        raise VolumeError(f"{where}: expected axes (I, J, K) or (C, I, J, K), got shape {shape}")
    if 0 in shape:
        raise VolumeError(f"{where}: an axis is empty: shape {shape}")


def _torch_ready(array: Array) -> Array:
    """Native, aligned, writable and without negative strides, in the same memory order; copied only if it must be."""
    native = array.dtype.newbyteorder("=")
    strides_fit = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if array.dtype == native and strides_fit and array.flags.writeable and array.flags.aligned:
        return array
    return np.array(array, dtype=native, order="K")


def _narrowed(voxels: Array, role: str, where: str, slope: float, intercept: float) -> Array:
    native = voxels.dtype.newbyteorder("=")
    scaled = (slope, intercept) != (1, 0)
    if role == "label":
        if scaled or native.kind == "f":
            return _rounded(voxels, where, slope, intercept)
        return voxels if native in _STORED_NUMPY else voxels.astype(_integer_for(*_bounds(voxels), where), order="K")
    if native in _STORED_NUMPY and not scaled:
        return voxels
    if native.kind in "iu" and not scaled:
        lowest, highest = _bounds(voxels)
        if highest <= np.iinfo(np.int32).max and lowest >= np.iinfo(np.int32).min:
            return voxels.astype(_integer_for(lowest, highest, where), order="K")
    return _as_float32(voxels, where, slope, intercept)


def _bounds(voxels: Array) -> tuple[int, int]:
    return int(voxels.min()), int(voxels.max())


def _integer_for(lowest: float, highest: float, where: str) -> type[np.integer[Any]]:
    """The narrowest stored integer type that holds `lowest` to `highest`; VolumeError beyond int32."""
    for candidate in _NARROWEST_FIRST:
        info = np.iinfo(candidate)
        if info.min <= lowest and highest <= info.max:
            return candidate
    raise VolumeError(f"{where}: labels run from {lowest:.0f} to {highest:.0f}, beyond int32; renumber them")


def _slabs(voxels: Array) -> Iterator[tuple[slice, ...]]:
    """Pieces of about 2**16 voxels along the axis that moves slowest in memory."""
    axis = max(range(voxels.ndim), key=lambda a: abs(voxels.strides[a]) if voxels.shape[a] > 1 else -1)
    length = voxels.shape[axis]
    step = max(1, _SLAB * length // voxels.size)
    for start in range(0, length, step):
        yield (*(slice(None),) * axis, slice(start, start + step))


def _rounded(voxels: Array, where: str, slope: float, intercept: float) -> Array:
    """Labels from floats or scaled integers: checked, then rounded to the narrowest stored integer."""
    lowest, highest, worst, value = math.inf, -math.inf, 0.0, 0.0
    for piece in _slabs(voxels):
        values = voxels[piece].astype(np.float64) * slope + intercept
        nearest = np.rint(values)
        if not np.isfinite(nearest).all():
            raise VolumeError(f"{where}: labels hold NaN or infinite values; labels must be whole numbers")
        off = np.abs(values - nearest)
        at = int(off.argmax())
        if off.flat[at] > worst:
            worst, value = float(off.flat[at]), float(values.flat[at])
        lowest, highest = min(lowest, float(nearest.min())), max(highest, float(nearest.max()))
    if worst > LABEL_TOLERANCE:
        raise VolumeError(
            f"{where}: labels must be whole numbers within {LABEL_TOLERANCE}, found {value:.6g}, which is {worst:.3g} "
            "off; was this label resampled with interpolation? Use nearest, or declare the key an image"
        )
    out = np.empty_like(voxels, dtype=_integer_for(lowest, highest, where))
    for piece in _slabs(voxels):
        out[piece] = np.rint(voxels[piece].astype(np.float64) * slope + intercept)
    return out


def _as_float32(voxels: Array, where: str, slope: float, intercept: float) -> Array:
    """Scaled or 64-bit images as float32, computed in float64; a finite value that float32 cannot hold is an error."""
    out = np.empty_like(voxels, dtype=np.float32)
    wide = np.longdouble if voxels.dtype.itemsize > 8 else np.float64
    for piece in _slabs(voxels):
        values: Array = voxels[piece].astype(wide)
        if (slope, intercept) != (1, 0):
            values = values * slope + intercept
        with np.errstate(over="ignore"):
            out[piece] = values
        if (np.isinf(out[piece]) & np.isfinite(values)).any():
            raise VolumeError(f"{where}: values up to {np.abs(values).max():.3g} are beyond float32; rescale them")
    return out


def _nonfinite(data: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """How many voxels of (C, I, J, K) are not finite, and the index of the first."""
    count, first = 0, (0, 0, 0, 0)
    for channel in range(data.shape[0]):
        for plane in range(data.shape[1]):
            bad = ~torch.isfinite(data[channel, plane])
            here = int(bad.sum())
            if here and not count:
                j, k = torch.nonzero(bad)[0].tolist()
                first = (channel, plane, j, k)
            count += here
    return count, first


def _replaced(data: torch.Tensor) -> torch.Tensor:
    finite = data[torch.isfinite(data)]
    lowest, highest = (0.0, 0.0) if finite.numel() == 0 else (float(finite.min()), float(finite.max()))
    return torch.nan_to_num(data, nan=0.0, posinf=highest, neginf=lowest)
