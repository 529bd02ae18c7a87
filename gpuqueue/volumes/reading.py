"""A file becomes voxels, affine and scale: any format that nibabel reads, checked, in the file's own dtype.

Images keep the stored integers; slope and intercept go with them and are applied where patches are gathered. Labels are
scaled, checked and rounded here. NIfTI and MGH files are read directly (gzip through libdeflate, whose check sums are
held; nibabel checks none), everything else by `nibabel.load`. Whatever is wrong is one VolumeError that names the file.

Axes beyond the third become channels first; a 2D image has K = 1. Formats that scale each slice by its own factor
(AFNI, PAR/REC, MINC, ECAT) are read as float32. Peak memory is one volume in the file's dtype and its compressed bytes.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import nibabel
import numpy as np
import torch
from nibabel.arrayproxy import ArrayProxy
from numpy.typing import NDArray

from gpuqueue.errors import VolumeError
from gpuqueue.volumes.grid import Grid, Matrix, corner_difference
from gpuqueue.volumes.headers import START, FileHeader, channels_and_shape, check_header, file_affine, parse
from gpuqueue.volumes.inflate import LARGEST_RATIO, MAGIC, inflate, inflate_start
from gpuqueue.volumes.storage import Array, check_numeric, storable, widest_dtype

PathLike = str | os.PathLike[str]
SAME_GRID = 1e-2  # voxels that files stacked as channels may be apart
_HEAD = 1 << 16  # bytes of a gzip stream that surely hold the header
_UNBOUNDED = (".bz2", ".zst")  # compressions without a largest ratio


@dataclass(frozen=True, eq=False)
class Stored:
    """`data` (C, I, J, K) of a stored dtype, laid out as in the file; `affine` (4, 4) float64, voxel index to mm;
    `scale` (C, 2) float64: a value is `data * scale[c, 0] + scale[c, 1]` (labels: 1 and 0)."""

    data: torch.Tensor
    affine: Matrix
    scale: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Header:
    """What `read` will give, from the header alone: `shape` (I, J, K), `channels`, `affine`, and the largest `dtype`
    and `nbytes` that it can take (64-bit voxels and float labels may become smaller when their values are seen)."""

    shape: tuple[int, int, int]
    channels: int
    dtype: torch.dtype
    affine: Matrix
    nbytes: int


def read(path: PathLike, role: str = "image", where: str = "") -> Stored:
    """The volume in the file at `path`; `role` is "image", "map" or "label"; `where` begins every message.

    Raises VolumeError for anything that is wrong with the file. Repairs (units, sform against qform) are logged.
    """
    where = _naming(path, where)
    with _as_volume_error(where):
        header, voxels = _load(Path(path), where)
        for remark in header.remarks:
            logging.getLogger("gpuqueue").warning("%s: %s", where, remark)
        channels, shape = channels_and_shape(header.shape, where)
        first = np.moveaxis(voxels.reshape((*shape, channels), order="F"), -1, 0)
        slope, intercept = header.slope, header.intercept
        if role == "label" or header.dtype.kind == "f":
            data, slope, intercept = storable(first, role, where, slope, intercept), 1.0, 0.0
        else:
            data = storable(first, role, where)
        return Stored(data, header.affine, np.tile([slope, intercept], (channels, 1)))


def read_channels(paths: Sequence[PathLike], role: str = "image", where: str = "") -> Stored:
    """The volumes of several files as the channels of one; shapes and affines (within 1e-2 voxel) must agree.

    Files of different dtypes are stacked in the stored dtype that holds them all (float32 where none does).
    """
    parts = [read(path, role, where) for path in paths]
    for path, part in zip(paths[1:], parts[1:]):
        _check_same_grid(_grid(parts[0]), _grid(part), paths[0], path, where)
    dtype = np.result_type(*(part.data.numpy().dtype for part in parts))
    wide = np.dtype(np.float32) if dtype == np.float64 else dtype  # int32 beside float32
    sizes = [part.data.shape[0] for part in parts]
    out = np.empty((*parts[0].data.shape[1:], sum(sizes)), wide, order="F")
    scales = np.concatenate([part.scale for part in parts])
    affine = parts[0].affine
    start = 0
    while parts:  # each part is freed once copied
        data = parts.pop(0).data.numpy()
        out[..., start : start + data.shape[0]] = np.moveaxis(data, 0, -1)
        start += data.shape[0]
    return Stored(torch.from_numpy(np.moveaxis(out, -1, 0)), affine, scales)


def read_header(path: PathLike, role: str = "image", where: str = "") -> Header:
    """Shape, channels, affine and largest size of the volume at `path`, without reading its voxels."""
    where = _naming(path, where)
    with _as_volume_error(where):
        header = _file_header(Path(path), where)
        channels, shape = channels_and_shape(header.shape, where)
        scaled = (header.slope, header.intercept) != (1, 0) and (role == "label" or header.dtype.kind == "f")
        dtype = widest_dtype(header.dtype, role, scaled)
        return Header(shape, channels, dtype, header.affine, channels * math.prod(shape) * dtype.itemsize)


def _naming(path: PathLike, where: str) -> str:
    """`where` followed by the path, unless it says it already."""
    name = os.fspath(path)
    if name in where:
        return where
    return f"{where}: {name}" if where else name


@contextmanager
def _as_volume_error(where: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes a VolumeError that begins with `where` and keeps its cause."""
    try:
        yield
    except VolumeError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise VolumeError(f"{where}: the file cannot be opened: {error}") from error
    except Exception as error:  # nibabel, gzip and numpy raise dozens of types for damaged files
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        remedy = "install that package" if isinstance(error, ImportError) else "replace it or leave it out"
        raise VolumeError(f"{where}: the file cannot be read ({text}); {remedy}") from error


def _load(path: Path, where: str) -> tuple[FileHeader, Array]:
    """The file's header and its voxels as they are stored, without scaling."""
    with open(path, "rb") as file:
        header, zipped = _own_header(file, path.name, where)
        if header is None:
            return _load_other(path, where)
        count = math.prod(header.shape)
        if zipped:
            file.seek(0)
            data: Any = inflate(file.read(), header.offset + header.nbytes)
            voxels = np.frombuffer(data, header.dtype, count, header.offset)
        else:
            file.seek(header.offset)
            voxels = np.empty(count, header.dtype)
            if file.readinto(voxels.view(np.uint8).data) != header.nbytes:
                raise EOFError(f"fewer than {header.nbytes} bytes of voxels")
    if not header.dtype.isnative:
        voxels = voxels.byteswap(inplace=True).view(header.dtype.newbyteorder("="))
    return header, voxels.reshape(header.shape, order="F")


def _own_header(file: BinaryIO, name: str, where: str) -> tuple[FileHeader | None, bool]:
    """The checked header of a NIfTI or MGH file and whether it is gzipped; None for other formats."""
    head = file.read(_HEAD)
    zipped = head.startswith(MAGIC)
    header = parse(inflate_start(head, START) if zipped else head[:START], name, where)
    if header is not None:
        size = os.fstat(file.fileno()).st_size
        check_header(header, size * LARGEST_RATIO if zipped else size, where)
    return header, zipped


def _file_header(path: Path, where: str) -> FileHeader:
    with open(path, "rb") as file:
        header, _ = _own_header(file, path.name, where)
    if header is not None:
        return header
    with _opened(path) as image:
        return _other_header(image, where)


def _load_other(path: Path, where: str) -> tuple[FileHeader, Array]:
    """Any other format, through nibabel."""
    with _opened(path) as image:
        header = _other_header(image, where)
        if _scales_by_slice(image.dataobj):
            return header, np.asanyarray(image.dataobj, dtype=np.float32)
        return header, image.dataobj.get_unscaled()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A nibabel image; its file is closed at the end (nibabel leaves that of PAR/REC open)."""
    image: Any = nibabel.load(path, mmap=False)
    try:
        yield image
    finally:
        close = getattr(getattr(getattr(image, "dataobj", None), "file_like", None), "close", None)
        if close is not None:
            close()


def _other_header(image: Any, where: str) -> FileHeader:
    proxy = getattr(image, "dataobj", None)
    if proxy is None or getattr(image, "affine", None) is None:
        raise VolumeError(f"{where}: a {type(image).__name__} is not a volume of voxels with an affine")
    shape = tuple(int(size) for size in image.shape)
    if len(shape) > 3 and isinstance(image, nibabel.Minc1Image):
        raise VolumeError(f"{where}: MINC keeps the further axis of shape {shape} before space; convert it to NIfTI")
    affine, remarks = file_affine(image.header, image.affine, shape, where)
    if _scales_by_slice(proxy):
        check_numeric(np.dtype(image.get_data_dtype()), where)
        return FileHeader(shape, np.dtype(np.float32), 0, 1.0, 0.0, affine, remarks)
    header = FileHeader(shape, proxy.dtype, int(proxy.offset), float(proxy.slope), float(proxy.inter), affine, remarks)
    check_header(header, _room(image), where)
    return header


def _scales_by_slice(proxy: Any) -> bool:
    return not isinstance(proxy, ArrayProxy) or getattr(proxy, "scaling", None) is not None


def _room(image: Any) -> float:
    """The most bytes that the file with the voxels can hold once it is decompressed."""
    name = image.file_map["image"].filename
    if name is None or str(name).lower().endswith(_UNBOUNDED):
        return math.inf
    with open(name, "rb") as file:
        zipped = file.read(2) == MAGIC
        return os.fstat(file.fileno()).st_size * (LARGEST_RATIO if zipped else 1)


def _grid(part: Stored) -> Grid:
    _, i, j, k = part.data.shape
    return Grid((i, j, k), part.affine)


def _check_same_grid(a: Grid, b: Grid, path_a: PathLike, path_b: PathLike, where: str) -> None:
    begin = f"{where}: " if where else ""
    if a.shape != b.shape:
        raise VolumeError(
            f"{begin}channels must have one shape, but {path_a} has {a.shape} and {path_b} has {b.shape}; resample one"
        )
    if (apart := corner_difference(a, b)) > SAME_GRID:
        raise VolumeError(
            f"{begin}channels must lie on one grid, but {path_a} and {path_b} are {apart:.3g} voxels apart: affines "
            f"{a.affine.tolist()} and {b.affine.tolist()}; resample one to the other"
        )
