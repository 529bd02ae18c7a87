"""Files become voxels, affines and scales: exactly, or with one error that names the file."""

from __future__ import annotations

import csv
import gzip
import itertools
import logging
import pathlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from gpuqueue.errors import VolumeError
from gpuqueue.volumes import reading
from gpuqueue.volumes.reading import Stored, read, read_channels, read_header
from gpuqueue.volumes.storage import handle_nonfinite

AFFINE = np.array([[0, -1.5, 0, 10], [1, 0, 0, -20], [0, 0, 3, 5], [0, 0, 0, 1.0]])
SHAPE = (9, 10, 11)


def _voxels(shape: tuple[int, ...] = SHAPE, dtype: Any = np.int16, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(0, 40, shape).cumsum(0)).astype(dtype)


def _save(path: pathlib.Path, voxels: np.ndarray, affine: np.ndarray = AFFINE, **header: Any) -> pathlib.Path:
    image = nib.Nifti1Image(voxels, affine, dtype=voxels.dtype)
    for field, value in header.items():
        image.header[field] = value
    nib.save(image, path)
    return path


def _values(stored: Stored) -> np.ndarray:
    """True values (C, I, J, K) in float64."""
    return stored.data.numpy().astype(np.float64) * stored.scale[:, 0, None, None, None] + np.expand_dims(
        stored.scale[:, 1], (1, 2, 3)
    )


def _by_nibabel(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Values (C, I, J, K) and affine in mm, as nibabel gives them; also for gzip or names that it does not expect."""
    freesurfer = path.suffix in (".mgh", ".mgz")  # whose file nibabel leaves open
    try:
        if freesurfer:
            raise nib.filebasedimages.ImageFileError
        image: Any = nib.load(path)
    except nib.filebasedimages.ImageFileError:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        image = (nib.MGHImage if freesurfer else nib.Nifti1Image).from_bytes(raw)
    values = np.asarray(image.dataobj, dtype=np.float64)
    if hasattr(getattr(image.dataobj, "file_like", None), "close"):
        image.dataobj.file_like.close()
    space = (*values.shape[:3], 1)[:3]
    affine = image.affine.copy()
    if isinstance(image.header, nib.Nifti1Header) and (code := int(image.header["xyzt_units"]) % 8) in (1, 3):
        affine[:3] *= {1: 1e3, 3: 1e-3}[code]
    return np.moveaxis(values.reshape((*space, -1), order="F"), -1, 0), affine


def _assert_as_nibabel(path: pathlib.Path, role: str) -> Stored:
    stored, header = read(path, role), read_header(path, role)
    values, affine = _by_nibabel(path)
    np.testing.assert_allclose(_values(stored), values, rtol=1e-6, atol=1e-6 if role == "image" else 1e-3)
    np.testing.assert_array_equal(stored.affine, affine)
    assert (header.channels, *header.shape) == tuple(stored.data.shape)
    np.testing.assert_array_equal(header.affine, stored.affine)
    assert header.nbytes >= stored.data.nbytes
    return stored


# The odd files. OPTION rows may go either way: these are gpuqueue's ways.
LOADS = {"dim_4d_time.nii.gz", "dim_2d.nii.gz", "ori_shear.nii.gz", "file_gzip_named_nii.nii", "file_no_extension"}
LOADS |= {"hdr_bitpix_wrong.nii.gz", "sct_fmri_float64_4d.nii.gz", "nb_example4d.nii.gz", "nb_test.mgz"}
LOADS |= {"nb_functional.nii", "nb_phantom_EPI_asc_CLEAR_2_1.PAR"}
WARNS = {"ori_zero_pixdim.nii.gz", "ori_metres.nii.gz", "hdr_sizeof_hdr_wrong.nii.gz"}
REJECTS = {"ori_zero_affine.nii.gz", "file_bad_crc.nii.gz"}
NONFINITE = {"val_nan_background.nii.gz", "sct_mtr_neginf.nii.gz"}
BIG = "big_640x640x600_int16.nii.gz"  # has a test of its own


def _odd_files(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, str, str]]:
    """(path, role, what is expected) of every file."""
    for table in ("gen", "wild"):
        with (folder / "odd" / table / "specs.tsv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                kind, _, name = row["kind"].partition(":")
                path = folder / "odd" / table / row["name"] / name
                if kind in ("image", "label") and row["name"] != BIG:
                    yield path, kind, row["expect"]
                elif kind == "pair":  # what is wrong with a pair is mostly between its files; each alone is readable
                    for file in sorted(path.iterdir()):
                        soft = row["name"] == "lab_soft_edges" and file.name.startswith("label")
                        yield file, "label" if file.name.startswith("label") else "image", "REJECT" if soft else "LOAD"


def _check_odd(path: pathlib.Path, role: str, expect: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    if expect == "REJECT" or path.name in REJECTS:
        with pytest.raises(VolumeError) as error:
            read(path, role)
        assert str(path) in str(error.value)
        return
    stored = _assert_as_nibabel(path, role)
    if path.name in NONFINITE:
        with pytest.raises(VolumeError, match="NaN or infinite"):
            handle_nonfinite(stored.data, "raise", str(path))
        assert torch.isfinite(handle_nonfinite(stored.data, "replace", str(path))).all()
    warned = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert len(warned) == (1 if expect == "WARN" or path.name in WARNS else 0), warned


def test_every_odd_file_behaves_as_its_table_says(shared_data: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """LOAD: nibabel's values; WARN: those, one warning; REJECT: one error naming the file; OPTION: as listed above."""
    wrong, seen = [], set()
    for path, role, expect in _odd_files(shared_data):
        seen.add(path.name)
        assert expect != "OPTION" or path.name in LOADS | WARNS | REJECTS, f"choose what {path.name} should do"
        try:
            _check_odd(path, role, expect, caplog)
        except Exception as error:
            wrong.append(f"{expect} {path.name}: {type(error).__name__}: {error}")
    assert not wrong, "\n\n".join(wrong)
    assert seen >= LOADS | WARNS | REJECTS | NONFINITE


def test_a_large_volume_in_a_small_file_takes_its_own_size_and_no_more(shared_data: pathlib.Path) -> None:
    """492 MB of int16 (983 MB as float32) from 1.2 MB; voxel (0, 0, k) holds k."""
    path = shared_data / "odd" / "gen" / BIG
    tracemalloc.start()
    try:
        stored = read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert stored.data.shape == (1, 640, 640, 600) and stored.data.dtype == torch.int16
    assert stored.data[0, 0, 0].tolist() == list(range(600))
    assert peak < stored.data.nbytes + path.stat().st_size + 2**20


def test_every_format_that_nibabel_carries_samples_of_reads_alike() -> None:
    """Its own test files: MINC, AFNI, PAR/REC, MGH, NIfTI-1 and -2; what is no volume is a VolumeError."""
    folder = pathlib.Path(nib.__file__).parent / "tests" / "data"
    read_suffixes = set()
    for path in sorted(folder.iterdir()):
        if path.is_dir() or path.suffix in (".py", ".img", ".REC", ".BRIK", ".gitignore"):
            continue
        try:
            read(path)
        except VolumeError as error:
            assert str(path) in str(error)
            continue
        _assert_as_nibabel(path, "image")
        read_suffixes.add(path.suffix)
    assert read_suffixes >= {".nii", ".gz", ".mgz", ".mnc", ".HEAD", ".PAR"}


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.nii.bz2", "A.NII.GZ", "a.img", "a.hdr", "a.img.gz"])
@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i2", ">f4", "<f8", "<i8", "<u4"])
def test_values_affine_and_dtype_survive_the_round_trip(tmp_path: pathlib.Path, name: str, dtype: str) -> None:
    """H49: any dtype and byte order."""
    voxels = _voxels(dtype=np.int16).clip(0, 255).astype(dtype)
    image = (nib.Nifti1Pair if ".nii" not in name.lower() else nib.Nifti1Image)(
        voxels, AFFINE, nib.Nifti1Header(endianness=">" if dtype[0] == ">" else "<"), dtype=np.dtype(dtype)
    )
    nib.save(image, tmp_path / name)
    stored = _assert_as_nibabel(tmp_path / name, "image")
    np.testing.assert_array_equal(stored.data[0].numpy(), voxels)
    if dtype[1:] in ("1", "i2", "f4"):  # kept as it is, in Fortran order
        assert stored.data.numpy().dtype == np.dtype(dtype).newbyteorder("=")
        assert stored.data.stride()[1:] == (1, 9, 90)


@pytest.mark.parametrize("suffix", ["mgh", "mgz"])
def test_freesurfer_volumes_are_checked_like_nifti(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    nib.save(nib.MGHImage(_voxels(dtype=np.float32), AFFINE.astype(np.float32)), path)
    _assert_as_nibabel(path, "image")
    if suffix == "mgz":
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(VolumeError, match=r"a\.mgz.*EOFError"):
            read(path)


def test_scaled_images_carry_slope_and_intercept(tmp_path: pathlib.Path) -> None:
    """H64: stored 100, slope 0.5, intercept 10 is 60, kept as int16."""
    path = _save(tmp_path / "a.nii", np.full(SHAPE, 100, np.int16))
    raw = bytearray(path.read_bytes())
    raw[112:120] = np.array([0.5, 10], "<f4").tobytes()  # scl_slope, scl_inter
    path.write_bytes(raw)
    stored = read(path)
    assert stored.data.dtype == torch.int16 and stored.data.unique().tolist() == [100]
    assert stored.scale.tolist() == [[0.5, 10.0]] and (_values(stored) == 60).all()
    assert read(path, "label").scale.tolist() == [[1.0, 0.0]] and (read(path, "label").data == 60).all()


def test_scaled_floats_are_scaled_at_reading(tmp_path: pathlib.Path) -> None:
    path = _save(tmp_path / "a.nii", np.full(SHAPE, 3, np.float32))
    raw = bytearray(path.read_bytes())
    raw[112:120] = np.array([0.5, 10], "<f4").tobytes()
    path.write_bytes(raw)
    assert read(path).scale.tolist() == [[1.0, 0.0]] and (read(path).data == 11.5).all()
    raw[112:116] = np.array([1e38], "<f4").tobytes()
    path.write_bytes(raw[:352] + np.full(SHAPE, 1e9, "<f4").tobytes())
    with pytest.raises(VolumeError, match="beyond float32"):
        read(path)


def test_labels_saved_with_a_tiny_slope_are_whole_numbers_again(tmp_path: pathlib.Path) -> None:
    """H64: nibabel writes float labels into an int32 file with slope 9.3e-10; 4 comes back as 4.000000001."""
    labels = np.random.default_rng(1).integers(0, 5, SHAPE)
    image = nib.Nifti1Image(labels.astype(np.float64), AFFINE)
    image.set_data_dtype(np.int32)
    nib.save(image, tmp_path / "a.nii.gz")
    assert (nib.load(tmp_path / "a.nii.gz").get_fdata() == 4).sum() == 0  # the trap
    stored = read(tmp_path / "a.nii.gz", "label")
    assert stored.data.dtype == torch.uint8 and int((stored.data == 4).sum()) == int((labels == 4).sum())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((9, 10, 11, 1), (1, 9, 10, 11)),
        ((9, 10, 11, 5), (5, 9, 10, 11)),
        ((9, 10, 11, 1, 2), (2, 9, 10, 11)),
        ((9, 10), (1, 9, 10, 1)),
        ((9, 10, 1), (1, 9, 10, 1)),
        ((9, 10, 1, 3), (3, 9, 10, 1)),
    ],
)
def test_axes_beyond_space_become_channels(
    tmp_path: pathlib.Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """H66: out[c, i, j, k] == in[i, j, k, c]."""
    voxels = _voxels(shape)
    stored = _assert_as_nibabel(_save(tmp_path / "a.nii.gz", voxels), "image")
    assert tuple(stored.data.shape) == expected
    space = np.prod(expected[1:])
    for c in range(expected[0]):
        np.testing.assert_array_equal(
            stored.data[c].numpy().flatten("F"), voxels.flatten("F")[c * space : (c + 1) * space]
        )


@pytest.mark.parametrize("shape", [(9, 10, 11, 4, 2), (9,)])
def test_too_many_and_too_few_axes_are_refused(tmp_path: pathlib.Path, shape: tuple[int, ...]) -> None:
    """H66."""
    path = _save(tmp_path / "a.nii.gz", _voxels(shape))
    for call in (read, read_header):
        with pytest.raises(VolumeError, match=r"a\.nii\.gz.*axes"):
            call(path)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(tmp_path: pathlib.Path, name: str, share: float) -> None:
    """H65: the path, with where it was asked for."""
    path = _save(tmp_path / name, _voxels())
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(VolumeError) as error:
        read(path, "image", "volume 'case1', key 'image'")
    assert str(error.value).startswith(f"volume 'case1', key 'image': {path}: ")


def test_a_missing_file_keeps_its_cause(tmp_path: pathlib.Path) -> None:
    for call, path in itertools.product((read, read_header), (tmp_path / "no.nii.gz", tmp_path)):
        with pytest.raises(VolumeError) as error:
            call(path)
        assert isinstance(error.value.__cause__, OSError) and str(error.value.__cause__) in str(error.value)
    with pytest.raises(VolumeError) as error:
        read(tmp_path / "no.nii.gz")
    assert isinstance(error.value.__cause__, FileNotFoundError)


def test_a_header_that_claims_too_much_is_refused_before_anything_is_allocated(tmp_path: pathlib.Path) -> None:
    path = _save(tmp_path / "a.nii", _voxels())
    raw = bytearray(path.read_bytes())
    raw[42:48] = np.array([30000] * 3, "<i2").tobytes()
    path.write_bytes(raw)
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(raw))
    tracemalloc.start()
    try:
        for file in (path, packed):
            with pytest.raises(VolumeError, match=r"claims .*30000.* bytes, but the file can hold at most"):
                read(file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("units", "factor"), [(1, 1e3), (2, 1.0), (3, 1e-3), (0, 1.0), (7, 1.0)])
def test_other_length_units_become_millimetres_with_a_warning(
    tmp_path: pathlib.Path, units: int, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    path = _save(tmp_path / "a.nii.gz", _voxels(), xyzt_units=units)
    np.testing.assert_allclose(read(path).affine[:3], AFFINE[:3] * factor)
    assert len(caplog.records) == (factor != 1)


def test_forms_that_disagree_give_the_sform_and_one_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = nib.Nifti1Image(_voxels(), AFFINE)
    moved = AFFINE.copy()
    for shift, warnings in ((3e-3, 0), (1.5, 1)):  # in mm, voxels of 1 mm and more
        moved[1, 3] = AFFINE[1, 3] + shift
        image.header.set_sform(AFFINE, 1)
        image.header.set_qform(moved, 1)
        nib.save(image, tmp_path / "a.nii.gz")
        caplog.clear()
        np.testing.assert_allclose(read(tmp_path / "a.nii.gz").affine, AFFINE, atol=1e-6)
        assert len(caplog.records) == warnings
    assert "a.nii.gz: sform and qform differ by up to 1.5 voxels" in caplog.text


@pytest.mark.parametrize("broken", ["zero", "nan", "parallel"])
def test_affines_that_cannot_be_inverted_are_refused(tmp_path: pathlib.Path, broken: str) -> None:
    path = _save(tmp_path / "a.nii", _voxels())
    rows = {"zero": np.zeros((3, 4)), "nan": np.full((3, 4), np.nan), "parallel": np.ones((3, 4))}[broken]
    raw = bytearray(path.read_bytes())
    raw[280:328] = rows.astype("<f4").tobytes()
    path.write_bytes(raw)
    for call in (read, read_header):
        with pytest.raises(VolumeError, match=r"a\.nii: the affine"):
            call(path)


def test_a_volume_is_decompressed_once_however_many_patches_are_cut(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H67: one pass over the stream, and the header's few bytes."""
    path = _save(tmp_path / "a.nii.gz", _voxels((32, 32, 32)))
    calls: list[int] = []
    inflate: Callable[[bytes, int], bytearray] = reading.inflate
    monkeypatch.setattr(reading, "inflate", lambda stream, needed: calls.append(needed) or inflate(stream, needed))
    data = read(path).data
    patches = [data[:, i : i + 8, :8, :8].clone() for i in range(24)]
    assert len(patches) == 24 and calls == [32**3 * 2 + 352]
    read_header(path)
    assert len(calls) == 1


def test_peak_memory_is_one_volume_and_its_compressed_bytes(tmp_path: pathlib.Path) -> None:
    path = _save(tmp_path / "a.nii.gz", _voxels((128, 128, 64), ">i2"))
    for role in ("image", "label"):
        tracemalloc.start()
        try:
            stored = read(path, role)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < stored.data.nbytes + path.stat().st_size + 2**18


def test_several_files_become_the_channels_of_one_volume(tmp_path: pathlib.Path) -> None:
    one = _save(tmp_path / "one.nii.gz", _voxels())
    two = _save(tmp_path / "two.nii.gz", _voxels((*SHAPE, 2), np.float32, seed=1))
    three = _save(tmp_path / "three.nii.gz", _voxels(seed=2).astype(np.uint8))
    raw = bytearray(gzip.decompress(one.read_bytes()))
    raw[112:120] = np.array([0.5, 10], "<f4").tobytes()
    one.write_bytes(gzip.compress(raw))
    stored = read_channels([one, two, three], "image", "volume 'a'")
    expected = np.concatenate([_by_nibabel(path)[0] for path in (one, two, three)])
    np.testing.assert_array_equal(_values(stored), expected)
    assert stored.data.dtype == torch.float32 and stored.scale[:, 1].tolist() == [10, 0, 0, 0]
    assert read_channels([one, three]).data.dtype == torch.int16  # holds uint8 too
    assert read_channels([three, three], "label").data.dtype == torch.uint8


def test_channels_on_different_grids_are_refused_with_both_files_and_values(tmp_path: pathlib.Path) -> None:
    """H53: 3e-4 mm apart is accepted, 0.6 mm is not."""
    moved, near = AFFINE.copy(), AFFINE.copy()
    moved[2, 3] += 0.6
    near[2, 3] += 3e-4
    one, other = _save(tmp_path / "one.nii.gz", _voxels()), _save(tmp_path / "other.nii.gz", _voxels(), moved)
    small = _save(tmp_path / "small.nii.gz", _voxels((9, 10, 10)))
    read_channels([one, _save(tmp_path / "near.nii.gz", _voxels(), near)])
    with pytest.raises(VolumeError, match=r"volume 'a': .*one\.nii\.gz and .*other\.nii\.gz are 0\.2 voxels apart"):
        read_channels([one, other], "image", "volume 'a'")
    with pytest.raises(VolumeError, match=r"one\.nii\.gz has \(9, 10, 11\) and .*small\.nii\.gz has \(9, 10, 10\)"):
        read_channels([one, small])


@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "i8", "u4", "f4", "f8"])
@pytest.mark.parametrize("role", ["image", "label"])
def test_the_header_bounds_what_reading_takes(tmp_path: pathlib.Path, dtype: str, role: str) -> None:
    path = _save(tmp_path / "a.nii.gz", np.arange(990).reshape(SHAPE).astype(dtype))
    header, stored = read_header(path, role), read(path, role)
    assert header.nbytes >= stored.data.nbytes and header.shape == SHAPE and header.channels == 1
    if dtype in ("u1", "i2", "u2", "i4"):
        assert header.dtype == stored.data.dtype and header.nbytes == stored.data.nbytes


# Fuzzing: whatever happens to a file's bytes, the right volume or a clear error.


def _mutated(raw: bytes, random: np.random.Generator, first: int, last: int) -> bytes:
    """One to three bytes changed between `first` and `last`, or the end cut off."""
    if random.random() < 0.2:
        return raw[: random.integers(len(raw))]
    changed = bytearray(raw)
    for _ in range(random.integers(1, 4)):
        at = int(random.integers(first, last))
        changed[at] = random.integers(256) if random.random() < 0.5 else changed[at] ^ (1 << random.integers(8))
    return bytes(changed)


def _read_within(path: pathlib.Path, role: str, limit: int) -> Stored | None:
    """What `read` gives, or None for a VolumeError that names the path; never more than `limit` bytes."""
    tracemalloc.start()
    try:
        return read(path, role)
    except VolumeError as error:
        assert str(path) in str(error)
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= limit, f"{peak} bytes"


def _fuzz_gzip(path: pathlib.Path, count: int) -> None:
    voxels = _voxels((64, 64, 64))
    raw = _save(path, voxels).read_bytes()
    random, right = np.random.default_rng(0), 0
    for _ in range(count):
        path.write_bytes(_mutated(raw, random, 0, len(raw)))
        stored = _read_within(path, "image", 2 * voxels.nbytes + len(raw))
        if stored is not None:
            right += 1
            np.testing.assert_array_equal(stored.data[0].numpy(), voxels)
            np.testing.assert_allclose(stored.affine, AFFINE)
    assert right < count / 10  # most changes are damage: nothing was read past it


def _fuzz_headers(folder: pathlib.Path, count: int) -> None:
    voxels = _voxels((64, 32, 64))
    raw = _save(folder / "a.nii", voxels).read_bytes()
    random, right = np.random.default_rng(0), 0
    for number in range(count):
        role, packed = ("label" if number % 4 == 0 else "image"), number % 2 == 0
        path = folder / ("b.nii.gz" if packed else "b.nii")
        changed = _mutated(raw, random, 0, 352 if random.random() < 0.8 else len(raw))
        path.write_bytes(gzip.compress(changed, 1) if packed else changed)
        stored = _read_within(path, role, 2 * len(raw) + path.stat().st_size + 2**22)  # and one slab
        if stored is not None:
            right += 1
            values, affine = _by_nibabel(path)
            np.testing.assert_allclose(_values(stored), values, rtol=1e-6, atol=1e-6 if role == "image" else 2e-3)
            np.testing.assert_allclose(stored.affine, affine)
    assert count / 5 < right < count


def test_mutated_gzip_files_give_the_right_volume_or_an_error(tmp_path: pathlib.Path) -> None:
    """H65: flips and truncations of a .nii.gz."""
    _fuzz_gzip(tmp_path / "a.nii.gz", 150)


def test_mutated_headers_and_voxels_give_what_nibabel_gives_or_an_error(tmp_path: pathlib.Path) -> None:
    _quiet_nibabel()
    _fuzz_headers(tmp_path, 150)


@pytest.mark.soak
def test_two_thousand_mutations_of_each_kind(tmp_path: pathlib.Path) -> None:
    """H65, in full."""
    _quiet_nibabel()
    _fuzz_gzip(tmp_path / "a.nii.gz", 2000)
    _fuzz_headers(tmp_path, 2000)


def _quiet_nibabel() -> None:
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)
