"""Which dtypes are kept, and how every other one is narrowed."""

from __future__ import annotations

import logging
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuqueue.errors import VolumeError
from gpuqueue.volumes.storage import (
    STORED_DTYPES,
    as_float16,
    contiguous_along_k,
    handle_nonfinite,
    storable,
    widest_dtype,
)

WHERE = "volume 'case1', key 'image' (t1.nii.gz)"
NATIVE = ["u1", "i1", "i2", "u2", "i4", "f2", "f4"]
NUMERIC = [
    "?",
    "u1",
    "i1",
    "<i2",
    ">i2",
    "<u2",
    ">u2",
    "<i4",
    ">i4",
    "<u4",
    ">u4",
    "<i8",
    ">i8",
    "<f2",
    ">f2",
    ">f4",
    "<f8",
]


def _exact(text: str) -> st.SearchStrategy[object]:
    """Values of a dtype that float32 holds exactly, so that nothing may be lost."""
    dtype = np.dtype(text)
    if dtype.kind == "f":
        return st.integers(-2048, 2048).map(float)
    if dtype.itemsize == 8 or dtype.newbyteorder("=") == np.uint32:
        return st.integers(0 if dtype.kind == "u" else -(2**24), 2**24)
    return hnp.from_dtype(dtype)


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray:
    """Any numeric dtype and byte order, axes permuted, reversed and strided, writable or not."""
    text = draw(st.sampled_from(NUMERIC))
    shape = draw(hnp.array_shapes(min_dims=3, max_dims=4, max_side=4))
    array = draw(hnp.arrays(np.dtype(text), shape, elements=_exact(text)))
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    array = array[tuple(slice(None, None, draw(st.sampled_from([1, -1, 2]))) for _ in range(array.ndim))]
    array.flags.writeable = draw(st.booleans())
    return array


@settings(max_examples=200, deadline=None)
@given(_arrays(), st.sampled_from(["image", "label", "map"]))
def test_any_numeric_array_keeps_its_values_and_is_never_changed(array: np.ndarray, role: str) -> None:
    """H49: every numeric dtype, byte order and stride."""
    before = array.copy()
    stored = storable(array, role, WHERE)
    assert stored.dtype in STORED_DTYPES and stored.ndim == 4 and type(stored) is torch.Tensor
    np.testing.assert_array_equal(stored.numpy()[0] if array.ndim == 3 else stored.numpy(), before.astype(np.float64))
    np.testing.assert_array_equal(array, before)
    assert stored.element_size() <= torch.empty(0, dtype=widest_dtype(array.dtype, role, scaled=False)).element_size()


@pytest.mark.parametrize(
    "array",
    [
        np.full((4, 4, 4), 40000, np.uint16),
        np.arange(60, dtype=np.int16).reshape(3, 4, 5)[::-1, :, ::-1],
        np.arange(60).reshape(3, 4, 5).astype(">i2"),
        np.linspace(0, 1, 60).reshape(3, 4, 5).astype(">f4"),
        np.asfortranarray(np.arange(60, dtype=np.float32).reshape(3, 4, 5)),
        np.broadcast_to(np.float32(3), (3, 4, 5)),
        np.zeros((3, 4, 5), [("a", "u1"), ("b", "i2")])["b"],
    ],
    ids=["uint16", "negative", "big-endian int", "big-endian float", "fortran", "broadcast", "misaligned"],
)
def test_uint16_and_odd_layouts_are_accepted(array: np.ndarray) -> None:
    """H49: 40000 stays 40000, flipped views and foreign byte orders are copied, not refused."""
    np.testing.assert_array_equal(storable(array, "image", WHERE).numpy()[0], array)


@pytest.mark.parametrize("text", NATIVE)
@pytest.mark.parametrize("order", ["C", "F"])
def test_stored_dtypes_are_shared_without_a_copy_and_keep_their_memory_order(text: str, order: str) -> None:
    array = np.ones((3, 4, 5), text, order=order)
    stored = storable(array, "image", WHERE)
    assert stored.data_ptr() == array.ctypes.data
    assert stored.stride()[1:] == tuple(stride // array.itemsize for stride in array.strides)
    again = storable(stored, "image", WHERE)
    assert again.data_ptr() == array.ctypes.data and again.stride() == stored.stride()


@pytest.mark.parametrize("text", [">i2", "<i8", "<f8"])
def test_converted_arrays_keep_fortran_order(text: str) -> None:
    array = np.asfortranarray(np.arange(60).reshape(3, 4, 5).astype(text))
    assert storable(array, "image", WHERE).stride()[1:] == (1, 3, 12)
    assert storable(array, "label", WHERE).stride()[1:] == (1, 3, 12)


def test_memory_mapped_files_are_read_without_a_warning_or_a_change(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(60, dtype=np.int16).reshape(3, 4, 5))
    stored = storable(np.load(tmp_path / "a.npy", mmap_mode="r"), "image", WHERE)
    stored += 1  # a copy, so the file stays as it was
    assert np.load(tmp_path / "a.npy").flat[0] == 0


def test_tensor_subclasses_and_tensors_that_need_gradients_become_plain_tensors() -> None:
    class MetaTensor(torch.Tensor):
        """As MONAI's: a subclass whose operations return itself."""

    for tensor in (torch.ones(1, 2, 3, 4).as_subclass(MetaTensor), torch.ones(1, 2, 3, 4, requires_grad=True)):
        stored = storable(tensor, "image", WHERE)
        assert type(stored) is torch.Tensor and not stored.requires_grad
        assert stored.data_ptr() == tensor.data_ptr()


def test_bfloat16_is_kept_for_images_and_rounded_for_labels() -> None:
    tensor = torch.tensor([0.0, 1, 200]).bfloat16().reshape(1, 1, 3)
    assert storable(tensor, "image", WHERE).dtype == torch.bfloat16
    assert storable(tensor, "label", WHERE).flatten().tolist() == [0, 1, 200]
    assert storable(tensor, "label", WHERE).dtype == torch.uint8


def test_data_on_another_device_are_refused() -> None:
    """H55: workers must not touch CUDA; the message says what to return."""
    with pytest.raises(VolumeError, match=r"^volume 'case1'.*meta; return CPU data"):
        storable(torch.ones(2, 2, 2, device="meta"), "image", WHERE)


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0, 300], "i8", torch.int16),  # uint8 would wrap
        ([-1, 100], "i8", torch.int8),
        ([0, 255], "f8", torch.uint8),
        ([0, 40000], "u8", torch.uint16),
        ([-1, 40000], "i8", torch.int32),
        ([0, 12175], "i4", torch.int32),  # a stored dtype is kept
        ([0, 2**31 - 1], "u4", torch.int32),
        ([0, 1], "f4", torch.uint8),
        ([0, 1], "?", torch.uint8),
    ],
)
def test_labels_take_the_narrowest_integer_that_holds_them(
    values: list[int], dtype: str, expected: torch.dtype
) -> None:
    """H48: values outside a dtype never wrap on the way into it."""
    stored = storable(np.array(values, dtype).reshape(1, 1, 2), "label", WHERE)
    assert stored.dtype == expected and stored.flatten().tolist() == values


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0, 70000], "i8", torch.int32),
        ([0, 3_000_000_000], "u4", torch.float32),  # beyond int32
        ([-(2**40), 2**40], "i8", torch.float32),
        ([0.1, 1e30], "f8", torch.float32),
        ([1, 2], "g", torch.float32),
    ],
)
def test_images_of_64_bits_become_int32_or_float32(values: list[float], dtype: str, expected: torch.dtype) -> None:
    """H48: values outside a dtype never wrap on the way into it."""
    stored = storable(np.array(values, dtype).reshape(1, 1, 2), "image", WHERE)
    assert stored.dtype == expected
    np.testing.assert_array_equal(stored.flatten().numpy(), np.array(values, np.float32))


def test_labels_within_a_thousandth_are_rounded_and_others_refused_with_the_worst_value() -> None:
    """H64: rounded, not truncated."""
    near = np.array([0.999999, 1.999998, 2.999997, 4.0009]).reshape(1, 2, 2)
    assert storable(near, "label", WHERE).flatten().tolist() == [1, 2, 3, 4]
    far = np.array([1.0, 1.3, 2.4, 3.0]).reshape(1, 2, 2)
    with pytest.raises(VolumeError, match=r"^volume 'case1'.*whole numbers within 0.001, found 2.4, which is 0.4 off"):
        storable(far, "label", WHERE)


@pytest.mark.parametrize(
    ("array", "role", "message"),
    [
        (np.zeros((2, 2, 2), np.complex64), "image", "complex"),
        (np.zeros((2, 2, 2), [("R", "u1"), ("G", "u1"), ("B", "u1")]), "image", "as a channel"),
        (np.zeros((2, 2, 2), object), "image", "must be numbers"),
        (np.full((2, 2, 2), "a"), "image", "must be numbers"),
        (np.zeros((2, 2)), "image", r"\(I, J, K\) or \(C, I, J, K\), got shape \(2, 2\)"),
        (np.zeros((1, 1, 2, 2, 2)), "image", r"got shape \(1, 1, 2, 2, 2\)"),
        (np.zeros((2, 0, 2)), "image", r"empty: shape \(2, 0, 2\)"),
        (torch.zeros(2, 2, dtype=torch.bfloat16), "image", "got shape"),
        (torch.zeros(2, 2, 2, dtype=torch.complex64), "image", "complex"),
        (torch.zeros(2, 2, 2).to_sparse(), "image", "sparse"),
        (np.full((2, 2, 2), math.nan), "label", "NaN or infinite"),
        (np.full((2, 2, 2), 2**31), "label", "beyond int32"),
        (np.full((2, 2, 2), 3e9), "label", "beyond int32"),
        (np.full((2, 2, 2), 1e300), "image", "beyond float32"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(array: object, role: str, message: str) -> None:
    with pytest.raises(VolumeError, match=rf"^volume 'case1', key 'image' \(t1.nii.gz\): .*{message}"):
        storable(array, role, WHERE)


def test_slope_and_intercept_are_applied_in_double_precision() -> None:
    array = np.array([[[0, 1, 2, 3]]], np.int32)
    assert storable(array, "label", WHERE, 1 / 3 * 3.0, 1.0).flatten().tolist() == [1, 2, 3, 4]
    scaled = storable(array, "image", WHERE, 0.1, -5.0)
    np.testing.assert_array_equal(scaled.numpy(), (array[None] * 0.1 - 5.0).astype(np.float32))


@pytest.mark.parametrize(("role", "dtype", "result"), [("label", np.float64, 1), ("image", np.float64, 4)])
def test_narrowing_makes_no_second_volume_of_doubles(role: str, dtype: type, result: int) -> None:
    array = np.zeros((128, 128, 256), dtype, order="F")  # 32 MB
    tracemalloc.start()
    try:
        storable(array, role, WHERE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < array.size * result + 2**24  # the result, and the intermediates of one slab


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(STORED_DTYPES),
    st.tuples(*[st.integers(1, n) for n in (3, 40, 5, 40)]),
    st.permutations(range(4)),
)
def test_turning_to_contiguous_along_k_keeps_every_voxel(
    dtype: torch.dtype, shape: tuple[int, ...], order: list[int]
) -> None:
    data = torch.arange(math.prod(shape)).to(dtype).reshape(shape).permute(order)
    turned = contiguous_along_k(data)
    assert turned.is_contiguous() and turned.dtype == dtype and torch.equal(turned, data)
    assert turned is data or not data.is_contiguous()


def test_half_precision_is_taken_only_where_it_holds_the_values() -> None:
    """H48: a value beyond 65504 never becomes infinite."""
    assert as_float16(torch.tensor([0.1, 65504.0])).dtype == torch.float16
    for kept in (torch.tensor([70000.0]), torch.tensor([1], dtype=torch.int16), torch.empty(0)):
        assert as_float16(kept) is kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nonfinite_voxels_follow_the_policy(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """H47: error naming the volume, replace, or keep; the input never changes."""
    data = torch.arange(24, dtype=dtype).reshape(1, 2, 3, 4)
    assert handle_nonfinite(data, "raise", WHERE) is data
    data[0, 1, 0, 2], data[0, 1, 2, 1], data[0, 1, 2, 3] = math.inf, math.nan, -math.inf
    before = data.clone()
    assert handle_nonfinite(data, "keep", WHERE) is data
    with pytest.raises(
        VolumeError, match=r"^volume 'case1'.*3 of 24 voxels.*first inf at channel 0, voxel \(1, 0, 2\).*on_nonfinite="
    ):
        handle_nonfinite(data, "raise", WHERE)
    with caplog.at_level(logging.WARNING, logger="gpuqueue"):
        replaced = handle_nonfinite(data, "replace", WHERE)
    assert [record.getMessage().startswith("volume 'case1'") for record in caplog.records] == [True]
    assert replaced.dtype == dtype
    assert [float(replaced[0, 1, j, k]) for j, k in ((0, 2), (2, 1), (2, 3))] == [22, 0, 0]
    assert torch.equal(torch.isfinite(data), torch.isfinite(before)) and float(replaced[0, 0, 2, 1]) == 9


def test_nonfinite_policies_cost_nothing_for_integers_and_are_spelt_right() -> None:
    data = torch.ones(1, 2, 2, 2, dtype=torch.int16)
    assert all(handle_nonfinite(data, policy, WHERE) is data for policy in ("raise", "replace", "keep"))
    assert torch.equal(handle_nonfinite(torch.full((1, 1, 1, 2), math.inf), "replace", WHERE), torch.zeros(1, 1, 1, 2))
    with pytest.raises(ValueError, match="one of raise, replace, keep, got 'ignore'"):
        handle_nonfinite(data, "ignore", WHERE)
