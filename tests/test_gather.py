"""Every backend of the gather against a dense float64 reference built from the formula in `contract`."""

from __future__ import annotations

import functools
import itertools
import os
import timeit
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

from gpuqueue.patches.gather import contract
from gpuqueue.patches.gather.contract import NEAREST_SHIFT, Mode, PullBack, Read, Source, Spline, spline_weights

Floats = NDArray[np.float64]
MODES: dict[str, Mode] = {"image": "linear", "label": "nearest", "vote": "vote"}
TOLERANCE = {"torch": 1e-4, "numba": 2e-5, "triton": 2e-5}
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float32,
)  # fmt: skip


@pytest.fixture(params=list(TOLERANCE))
def backend(request: pytest.FixtureRequest) -> str:
    """On a machine without CUDA the Triton kernels run in Triton's interpreter, on CPU tensors."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    return str(request.param)


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported


def enough_memory(count: int) -> bool:
    return hasattr(os, "sysconf") and os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > count


# The reference -------------------------------------------------------------------------------------------------------


def coordinates(pull_back: PullBack, size: tuple[int, int, int]) -> Floats:
    """Source coordinates (3, I, J, K) in float64, straight from the formula."""
    q = np.stack(np.meshgrid(*[np.arange(n) - n // 2 for n in size], indexing="ij"))
    x = np.einsum("sa,a...->s...", pull_back.matrix, q) + (pull_back.base + pull_back.rest)[:, None, None, None]
    if pull_back.spline is not None:
        spline = pull_back.spline
        w = [
            spline_weights(spline.start[a], size[a], spline.extent[a], spline.coefficients.shape[a + 1])
            for a in range(3)
        ]
        x = x + np.einsum("ia,jb,kc,sabc->sijk", *w, spline.coefficients, optimize=True)
    return np.asarray(x)


def real_values(source: Source) -> Floats:
    stored = source.data.to(torch.float64).numpy()
    return np.asarray(stored * source.scale[:, 0, None, None, None] + source.scale[:, 1, None, None, None])


def expected(read: Read, mode: Mode, size: tuple[int, int, int]) -> Floats:
    x, values = coordinates(read.pull_back, size), real_values(read.source)
    if mode == "linear":
        return np.stack([
            ndimage.map_coordinates(v, x, order=1, mode="grid-constant", cval=pad)
            for v, pad in zip(values, read.source.pad)
        ])  # fmt: skip
    if mode == "nearest":
        return labels_at(read.source, values, np.floor(x + NEAREST_SHIFT))
    lower = np.floor(x)
    weights = np.floor((x - lower) * 128 + 0.5)
    taps, shares = [], []
    for corner in itertools.product((0, 1), repeat=3):
        taps.append(labels_at(read.source, values, lower + np.reshape(corner, (3, 1, 1, 1))))
        shares.append(np.prod([w if on else 128 - w for w, on in zip(weights, corner)], axis=0))
    classes = np.unique(taps)
    totals = [sum(share * (tap == label) for tap, share in zip(taps, shares)) for label in classes]
    return np.asarray(classes[np.argmax(totals, axis=0)])  # the first, so the smallest, of equals


def labels_at(source: Source, values: Floats, place: Floats) -> Floats:
    index, limit = place.astype(np.int64), np.array(values.shape[1:])[:, None, None, None]
    outside = ((index < 0) | (index >= limit)).any(axis=0)
    i, j, k = np.clip(index, 0, limit - 1)
    return np.where(outside, source.pad[:, None, None, None], values[:, i, j, k])


def near_a_tie(read: Read, mode: Mode, size: tuple[int, int, int], margin: float = 1e-4) -> NDArray[np.bool_]:
    """Voxels within `margin` voxels of where their label is decided by rounding."""
    x = coordinates(read.pull_back, size)
    shifted, margin = (x + NEAREST_SHIFT, margin) if mode == "nearest" else (x * 128 + 0.5, margin * 128)
    return np.asarray((np.abs(shifted - np.round(shifted)) <= margin).any(axis=0))


# Cases ---------------------------------------------------------------------------------------------------------------


def rotation(degrees: tuple[float, float, float], scale: float = 1.0) -> Floats:
    rx, ry, rz = np.deg2rad(degrees)
    x = np.array([[1, 0, 0], [0, np.cos(rx), -np.sin(rx)], [0, np.sin(rx), np.cos(rx)]])
    y = np.array([[np.cos(ry), 0, np.sin(ry)], [0, 1, 0], [-np.sin(ry), 0, np.cos(ry)]])
    z = np.array([[np.cos(rz), -np.sin(rz), 0], [np.sin(rz), np.cos(rz), 0], [0, 0, 1]])
    return np.asarray(z @ y @ x * scale)


def mapping(matrix: Floats, centre: tuple[float, ...] | Floats, spline: Spline | None = None) -> PullBack:
    """The pull-back whose patch centre voxel reads at `centre`."""
    point = np.asarray(centre, np.float64)
    base = np.floor(point).astype(np.int64)
    return PullBack(np.asarray(matrix, np.float64), base, point - base, spline)


def elastic(seed: int, extent: tuple[int, int, int], start: tuple[int, int, int], size: float = 4.0) -> Spline:
    g = (7, 8, 10)
    return Spline(np.random.default_rng(seed).uniform(-size, size, (3, *g)), start, extent)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if dtype.is_floating_point:
        return torch.from_numpy(rng.random(shape, np.float32)).to(dtype)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(2**20)), min(info.max, 2**20)
    return torch.from_numpy(rng.integers(low, high, shape, endpoint=True)).to(dtype)


def source(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, scale: bool = False, label: bool = False
) -> Source:
    data = noise(shape, dtype, seed)
    if label:
        data = (data.to(torch.float32) * 1000).to(torch.int64).remainder(90).to(dtype)
    values = np.array([[0.5 + 0.25 * c, -100.0 + c] if scale else [1.0, 0.0] for c in range(shape[0])])
    pad = np.arange(3.0, 3.0 + shape[0]) if label else np.full(shape[0], float(data.to(torch.float64).mean()))
    return Source(data, values, pad)


def run(
    backend: str, reads: dict[str, list[Read]], modes: dict[str, Mode], size: tuple[int, int, int]
) -> dict[str, NDArray[Any]]:
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    moved = {
        key: [Read(replace(read.source, data=read.source.data.to(device)), read.pull_back) for read in patches]
        for key, patches in reads.items()
    }
    out = {}
    for key, patches in moved.items():
        kind = torch.float32 if modes[key] == "linear" else torch.int64
        shape = (len(patches), patches[0].source.data.shape[0], *size)
        out[key] = torch.full(shape, -77, dtype=kind, device=device)
    with np.errstate(all="ignore" if backend == "triton" else None):  # the interpreter computes with NumPy
        contract.gather(moved, modes, size, out, backend=backend)
    return {key: value.cpu().numpy() for key, value in out.items()}


def check(backend: str, reads: dict[str, list[Read]], modes: dict[str, Mode], size: tuple[int, int, int]) -> None:
    """Linear keys within the backend's tolerance of the value range, labels equal away from ties."""
    for key, values in run(backend, reads, modes, size).items():
        for read, patch in zip(reads[key], values):
            want = expected(read, modes[key], size)
            if modes[key] == "linear":
                real = real_values(read.source)
                range_ = np.ptp(np.append(real, read.source.pad))
                assert np.abs(patch - want).max() <= TOLERANCE[backend] * range_
            else:
                wrong = (patch != want).any(axis=0)
                assert not (wrong & ~near_a_tie(read, modes[key], size)).any()
                assert wrong.mean() <= (1e-4 if modes[key] == "nearest" else 0.02)


MATRICES = {
    "rotation": rotation((17, -12, 9), 1.05),
    "quarter turn and a bit": rotation((90, 3, 0), 0.9),
    "coarser, oblique": rotation((5, 10, -4)) @ np.diag([1.0, 2.2, 0.7]),
    "shear and flip": np.array([[-1.0, 0.2, 0.0], [0.0, 1.0, 0.1], [0.05, 0.0, 1.1]]),
    "half-voxel shift": np.eye(3),
}


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_spline", [False, True], ids=["affine", "elastic"])
@pytest.mark.parametrize("name", list(MATRICES))
def test_a_mixed_batch_equals_the_float64_reference(backend: str, name: str, with_spline: bool) -> None:
    size = (21, 24, 37)
    reads: dict[str, list[Read]] = {"image": [], "label": []}
    for n, (shape, centre) in enumerate([((30, 34, 41), (14.3, 17.5, 20.1)), ((41, 26, 50), (-3.2, 9.6, 45.25))]):
        spline = elastic(n, shape, (2 - 9 * n, 3, 1)) if with_spline else None
        pull_back = mapping(MATRICES[name], centre, spline)
        reads["image"].append(Read(source((1, *shape), torch.float32, seed=n), pull_back))
        reads["label"].append(Read(source((1, *shape), torch.uint8, seed=n + 9, label=True), pull_back))
    reads["vote"] = reads["label"]
    check(backend, reads, MODES, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 4])
def test_every_stored_dtype_is_read_with_its_slope_intercept_and_pad(
    backend: str, dtype: torch.dtype, channels: int
) -> None:
    shape, size = (19, 23, 33), (18, 12, 35)
    pull_back = mapping(rotation((10, 5, -17)), (9.1, 11.7, 15.4), elastic(1, shape, (1, 2, -1), 2.0))
    image = source((channels, *shape), dtype, scale=True)
    label = source((channels, *shape), dtype, label=True)
    reads = {"image": [Read(image, pull_back)], "label": [Read(label, pull_back)]}
    reads["vote"] = reads["label"]
    check(backend, reads, MODES, size)


@pytest.mark.parametrize(
    ("shape", "size", "centre"),
    [
        ((20, 20, 20), (9, 9, 9), (300.2, 4.0, 4.0)),  # wholly outside
        ((20, 20, 20), (9, 9, 9), (-4.4, 10.0, 22.0)),  # one corner inside
        ((5, 6, 7), (16, 15, 40), (2.3, 3.1, 3.6)),  # larger than the volume
        ((30, 1, 40), (12, 1, 34), (15.0, 0.0, 20.0)),  # a single slice
        ((1, 1, 1), (4, 5, 6), (0.2, 0.0, -0.3)),
        ((20, 20, 20), (1, 1, 1), (10.4, 9.6, 9.1)),
    ],
)
@pytest.mark.parametrize("with_spline", [False, True], ids=["affine", "elastic"])
def test_patches_outside_larger_or_thin_are_padded_like_any_other(
    backend: str, shape: tuple[int, int, int], size: tuple[int, int, int], centre: tuple[float, ...], with_spline: bool
) -> None:
    matrix = np.eye(3) * 0.9 if 1 in shape else rotation((10, 20, 30))
    pull_back = mapping(matrix, centre, elastic(3, shape, (0, 0, 0), 0.4) if with_spline else None)
    reads = {
        "image": [Read(source((2, *shape)), pull_back)],
        "label": [Read(source((1, *shape), torch.int16, label=True), pull_back)],
    }
    reads["vote"] = reads["label"]
    check(backend, reads, MODES, size)


def test_keys_of_a_patch_may_lie_on_different_grids(backend: str) -> None:
    size = (16, 16, 16)
    image = Read(source((1, 30, 30, 30)), mapping(rotation((5, 5, 5)), (15.2, 14.8, 15.5)))
    label = Read(source((1, 15, 15, 15), torch.uint8, label=True), mapping(rotation((5, 5, 5), 0.5), (7.4, 7.2, 7.6)))
    check(backend, {"image": [image], "label": [label], "vote": [label]}, MODES, size)


def test_the_error_does_not_grow_with_the_size_of_the_volume(backend: str) -> None:
    size, shape = (12, 10, 33), (512, 20, 512)
    pull_back = mapping(rotation((1, 17, 2)), (500.37, 10.2, 490.81), elastic(5, shape, (494, 5, 474)))
    reads = {
        "image": [Read(source((1, *shape)), pull_back)],
        "label": [Read(source((1, *shape), torch.uint8, label=True), pull_back)],
    }
    check(backend, reads, MODES, size)


def test_a_patch_of_128_a_side_is_within_tolerance(backend: str) -> None:
    shape = (150, 140, 160)
    pull_back = mapping(rotation((17, -15, 16), 1.1), (75.3, 70.2, 80.9), elastic(6, shape, (11, 6, 16), 7.0))
    reads = {
        "image": [Read(source((1, *shape)), pull_back)],
        "label": [Read(source((1, *shape), torch.uint8, label=True), pull_back)],
    }
    # the interpreter is slow: fewer rows, of full length
    check(backend, reads, MODES, (128, 8 if backend == "triton" else 128, 128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_any_strides_are_read_as_they_lie(backend: str, dtype: torch.dtype) -> None:
    whole = source((2, 26, 30, 34), dtype, label=True)
    pull_back = mapping(rotation((10, 5, -7)), (12.1, 14.7, 15.4))
    for data in (
        whole.data.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1),  # Fortran order
        torch.stack([whole.data] * 2, dim=-1)[..., 1],  # every second element
        whole.data[:, :, :1].expand(-1, -1, 30, -1),  # a stride of zero
    ):
        read = Read(Source(data, whole.scale, whole.pad), pull_back)
        check(backend, {"image": [read], "label": [read], "vote": [read]}, MODES, (14, 15, 33))


def test_ties_of_a_centred_oblique_change_go_the_same_way_everywhere(backend: str) -> None:
    """x.5 coordinates in exact arithmetic: 2 mm labels read on a 1 mm grid about the same centre, on turned axes."""
    size = (24, 24, 24)
    turn = rotation((20, 0, 0))
    matrix = turn.T @ (turn * 0.5)  # 0.5 on the diagonal up to rounding
    label = source((1, 14, 14, 14), torch.uint8, label=True)
    read = Read(label, mapping(matrix, (6.5, 6.75, 6.25)))
    assert near_a_tie(read, "nearest", size, 0.0015).mean() > 0.2
    values = run(backend, {"label": [read]}, {"label": "nearest"}, size)["label"]
    np.testing.assert_array_equal(values[0], expected(read, "nearest", size))


# Copies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flips_and_reorientations_are_exact_copies_with_padding(backend: str, dtype: torch.dtype) -> None:
    size = (6, 9, 7)
    image = source((2, 11, 8, 9), dtype, scale=True)
    label = source((1, 11, 8, 9), dtype, label=True)
    for axes in itertools.permutations(range(3)):
        for signs in itertools.product((1, -1), repeat=3):
            matrix = np.zeros((3, 3))
            matrix[range(3), axes] = signs
            snapped = ((axes[0], signs[0]), (axes[1], signs[1]), (axes[2], signs[2]))
            pull_back = PullBack(matrix, np.array([2, 6, 4]), np.zeros(3), None, snapped)
            reads = {"image": [Read(image, pull_back)], "label": [Read(label, pull_back)]}
            reads["vote"] = reads["label"]
            out = run(backend, reads, MODES, size)
            np.testing.assert_array_equal(out["vote"], out["label"])
            np.testing.assert_array_equal(out["label"][0], expected(reads["label"][0], "nearest", size))
            scale = image.scale.astype(np.float32)[..., None, None, None]
            exact = image.data.to(torch.float32).numpy() * scale[:, 0] + scale[:, 1]
            plain = Source(torch.from_numpy(exact), np.tile([1.0, 0.0], (2, 1)), image.pad.astype(np.float32))
            np.testing.assert_array_equal(out["image"][0], expected(Read(plain, pull_back), "nearest", size))


def test_a_nan_voxel_stays_one_voxel_in_a_copy(backend: str) -> None:
    """H47."""
    data = torch.ones(1, 8, 8, 8)
    data[0, 4, 4, 4] = torch.nan
    identity = ((0, 1), (1, 1), (2, 1))
    pull_back = PullBack(np.eye(3), np.array([4, 4, 4]), np.zeros(3), None, identity)
    plain = Source(data, np.array([[1.0, 0.0]]), np.zeros(1))
    out = run(backend, {"image": [Read(plain, pull_back)]}, {"image": "linear"}, (8, 8, 8))["image"]
    assert np.isnan(out).sum() == 1 and np.isnan(out[0, 0, 4, 4, 4])


def test_integer_labels_beyond_float32_keep_their_value(backend: str) -> None:
    data = torch.full((1, 6, 6, 6), 2**24 + 1, dtype=torch.int32)
    label = Source(data, np.array([[1.0, 0.0]]), np.array([2.0**31 - 1]))
    warped = mapping(rotation((3, 3, 3)), (3.0, 3.0, 3.0))
    copied = PullBack(np.eye(3), np.array([3, 3, 3]), np.zeros(3), None, ((0, 1), (1, 1), (2, 1)))
    for pull_back in (warped, copied):
        out = run(backend, {"label": [Read(label, pull_back)]}, {"label": "nearest"}, (8, 8, 8))["label"]
        assert set(np.unique(out)) == {2**24 + 1, 2**31 - 1}


# Known faults --------------------------------------------------------------------------------------------------------


def test_identity_and_whole_shifts_through_interpolation_change_nothing(backend: str) -> None:
    """H35."""
    data = torch.arange(210, dtype=torch.float32).reshape(1, 5, 6, 7)
    plain = Source(data, np.array([[1.0, 0.0]]), np.array([-5.0]))
    modes: tuple[Mode, ...] = ("linear", "nearest", "vote")
    for mode, shift in itertools.product(modes, (0, -1)):
        read = Read(plain, mapping(np.eye(3), (2.0 + shift, 3.0, 3.0)))
        out = run(backend, {"key": [read]}, {"key": mode}, (5, 6, 7))["key"][0, 0]
        want = data[0].numpy() if shift == 0 else np.concatenate([np.full((1, 6, 7), -5.0), data[0, :-1].numpy()])
        assert np.abs(out - want).max() <= 1e-3


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_constant_displacement_is_that_many_voxels_on_any_axis(backend: str, axis: int) -> None:
    """H36."""
    shape = (16, 32, 64)
    coefficients = np.zeros((3, 7, 7, 7))
    coefficients[axis] = -2.0  # content moves up by two
    read = Read(source((1, *shape)), mapping(np.eye(3), (8, 16, 32), Spline(coefficients, (0, 0, 0), shape)))
    out = run(backend, {"image": [read]}, {"image": "linear"}, shape)["image"][0, 0]
    moved, data = np.moveaxis(out, axis, 0), np.moveaxis(read.source.data[0].numpy(), axis, 0)
    assert np.abs(moved[2:] - data[:-2]).max() <= 1e-3
    assert np.abs(moved[:2] - read.source.pad[0]).max() <= 1e-3


@pytest.mark.parametrize("mode", ["nearest", "vote"])
def test_labels_never_gain_values(backend: str, mode: Mode) -> None:
    """H40."""
    data = torch.ones(1, 24, 24, 24, dtype=torch.int16)
    data[:, 12:] = 9
    label = Source(data, np.array([[1.0, 0.0]]), np.zeros(1))
    for seed in range(8 if backend == "triton" else 100):
        turn = rotation(tuple(np.random.default_rng(seed).uniform(-40, 40, 3)))
        read = Read(label, mapping(turn, (12.0, 12.0, 12.0), elastic(seed, (24, 24, 24), (0, 0, 0))))
        out = run(backend, {"label": [read]}, {"label": mode}, (16, 16, 16))["label"]
        assert out.dtype == np.int64 and set(np.unique(out)) <= {0, 1, 9}


def test_coordinates_keep_their_precision_for_half_data_and_under_autocast(backend: str) -> None:
    """H46."""
    row = torch.arange(700).remainder(2).to(torch.float16)
    plain = Source(row.reshape(1, 1, 1, 700), np.array([[1.0, 0.0]]), np.zeros(1))
    read = Read(plain, mapping(np.eye(3), (0, 0, 350), Spline(np.zeros((3, 4, 4, 4)), (0, 0, 0), (1, 1, 700))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(backend, {"image": [read]}, {"image": "linear"}, (1, 1, 700))["image"]
    assert np.abs(out.ravel() - row.float().numpy()).max() <= 2e-3


@pytest.mark.parametrize("mode", ["linear", "nearest", "vote"])
@pytest.mark.parametrize("value", [1e30, 1e300, np.inf, -np.inf, np.nan])
def test_points_that_are_not_finite_or_huge_read_pad(backend: str, mode: Mode, value: float) -> None:
    """H47."""
    coefficients = np.zeros((3, 6, 6, 6))
    coefficients[1, 0, 0, 0] = value
    spline = Spline(coefficients, (0, 0, 0), (30, 30, 30))
    one = Source(torch.ones(1, 30, 30, 30), np.array([[1.0, 0.0]]), np.array([5.0]))
    for pull_back in (mapping(np.eye(3), (15, 15, 15), spline), mapping(np.diag([1, value, 1]), (15, 15, 15))):
        out = run(backend, {"key": [Read(one, pull_back)]}, {"key": mode}, (30, 30, 30))["key"]
        assert np.isfinite(out).all() and ((out == 5) | (np.abs(out - 1) < 1e-6)).all()
        assert (out == 5).any()


def test_uint16_and_bytes_keep_their_value(backend: str) -> None:
    """H48 H49."""
    for dtype, value in ((torch.uint16, 40000), (torch.int16, 32767), (torch.int16, -32768), (torch.uint8, 255)):
        full = torch.full((1, 6, 6, 6), value).to(dtype)
        read = Read(Source(full, np.array([[2.0, 0.0]]), np.zeros(1)), mapping(rotation((3, 2, 1)), (3.2, 3.0, 3.0)))
        out = run(backend, {"image": [read], "label": [read]}, MODES, (3, 3, 3))
        np.testing.assert_allclose(out["image"], 2 * value, rtol=1e-6)
        assert (out["label"] == 2 * value).all()


@pytest.mark.parametrize(
    ("shift", "nearest", "linear"), [(0.3, 1, 0.70), (0.49, 1, 0.51), (0.51, 0, 0.49), (0.999, 0, 0.001), (1.5, 0, 0.0)]
)
def test_the_field_of_view_ends_half_a_voxel_beyond_the_outer_centres(
    backend: str, shift: float, nearest: int, linear: float
) -> None:
    """H50."""
    ones = Source(torch.ones(1, 10, 10, 10), np.array([[1.0, 0.0]]), np.zeros(1))
    for axis in range(3):
        for sign in (1, -1):
            centre = np.full(3, 5.0)
            centre[axis] = 9 + shift if sign > 0 else -shift
            read = Read(ones, mapping(np.eye(3), centre))
            out = run(backend, {"a": [read], "b": [read]}, {"a": "linear", "b": "nearest"}, (1, 1, 1))
            assert out["a"].item() == pytest.approx(linear, abs=2e-6) and out["b"].item() == nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_a_patch_costs_what_a_patch_costs_whatever_the_size_of_the_volume(backend: str, dtype: torch.dtype) -> None:
    """H30."""
    if backend == "triton":
        pytest.skip("a program reads its brick whatever the volume; the interpreter's time says nothing")
    size, out = (16, 16, 16), {"image": torch.empty(20, 1, 16, 16, 16)}

    def best_time(side: int) -> float:
        image = Source(torch.zeros(1, side, side, side, dtype=dtype), np.array([[1.0, 0.0]]), np.zeros(1))
        read = Read(image, mapping(rotation((10, 5, 3)), (side / 2 + 0.3, side / 2, side / 2)))
        call = functools.partial(contract.gather, {"image": [read] * 20}, MODES, size, out, backend)
        return min(timeit.repeat(call, number=1, repeat=9))

    assert best_time(256) < 3 * best_time(64)


@pytest.mark.skipif(not enough_memory(16 * 2**30), reason="needs 16 GiB of memory")
def test_the_far_corner_of_more_than_two_to_the_31_voxels_is_read_right(backend: str) -> None:
    side, size = 1300, (8, 8, 8)
    data = torch.zeros(1, side, side, side, dtype=torch.uint8)
    corner = noise((1, 20, 20, 20), torch.uint8)
    data[:, -20:, -20:, -20:] = corner
    small, large = (Source(d, np.array([[1.0, 0.0]]), np.zeros(1)) for d in (corner, data))
    near = mapping(rotation((10, -5, 3)), (14.3, 13.9, 15.1))
    far = PullBack(near.matrix, near.base + side - 20, near.rest)
    keys = dict.fromkeys(MODES)
    want = run(backend, {key: [Read(small, near)] for key in keys}, MODES, size)
    got = run(backend, {key: [Read(large, far)] for key in keys}, MODES, size)
    for key in keys:
        np.testing.assert_array_equal(got[key], want[key])
        assert got[key].any()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend='cuda'"):
        contract.find_backend("cuda", torch.device("cpu"))
